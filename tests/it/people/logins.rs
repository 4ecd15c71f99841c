//! Logins with a password, without the API around them.

use std::time::{Duration, Instant};

use fencepost_config::{RedisPlace, Signup};
use fencepost_domain::{error::Error, ids::AccountId, plan::Plans};
use fencepost_identity::accounts::{
    Accounts, Client, Parts, SignUp, TRIES_PER_PAIR,
    password::{MAX_WAITING, Passwords, Turn, Turns},
    token::Tokens,
};
use fencepost_net::mail::Mailer;
use fencepost_signals::{
    limiter::Limiter,
    redis_bus::{Bus, DEFAULT_BUDGET},
};
use fencepost_store::connection::pools::Pools;
use futures_util::{FutureExt, future::BoxFuture};
use secrecy::SecretString;
use tokio::sync::mpsc;
use uuid::Uuid;

use super::PASSWORD;
use crate::harness::{Database, fresh_database, limited, redis_url};

/// Accounts on a database of their own.
async fn accounts(redis: Option<RedisPlace>, turns: Turns) -> (Database, Pools, Accounts) {
    let database = fresh_database().await;
    let pools =
        Pools::new(&database.url, fencepost_config::PoolArgs::default(), None).expect("pools");
    let bus = Bus::new(redis.as_ref(), Uuid::new_v4(), DEFAULT_BUDGET).expect("a bus");
    let (mailer, _mails) = mpsc::unbounded_channel();
    let accounts = Accounts::new(Parts {
        pool: pools.people.clone(),
        limiter: Limiter::new(bus),
        passwords: Passwords::new(None, turns),
        tokens: Tokens::default(),
        master_keys: std::sync::Arc::default(),
        mailer: Mailer::Hand(mailer),
        signup: Signup::Open,
        public_url: "http://localhost".to_owned(),
        security_contact: None,
        plan_contact: None,
        scanner_keys: std::sync::Arc::default(),
        providers: std::sync::Arc::default(),
        default_plan: "free".to_owned(),
        plans: Plans::built_in(),
        wake: fencepost_signals::wakeups::channel().0,
    });
    (database, pools, accounts)
}

fn client(name: &str) -> Client {
    Client { address: name.into(), ..Client::default() }
}

async fn sign_up(accounts: &Accounts, email: &str, client: &Client) -> AccountId {
    let sign_up = SignUp {
        email: email.to_owned(),
        password: SecretString::from(PASSWORD),
        project_name: None,
        invitation: None,
    };
    accounts.sign_ups.sign_up(sign_up, client).await.expect("an account").account.id
}

/// Takes all turns, and all places that wait for one.
fn fill<'a>(turns: &'a Turns, names: &'a [String]) -> (Vec<Turn>, Vec<Waiting<'a>>) {
    let (mut held, mut waiting) = (Vec::new(), Vec::new());
    for name in names {
        let mut turn = turns.take(name).boxed();
        match turn.as_mut().now_or_never() {
            Some(Ok(turn)) => held.push(turn),
            Some(Err(_)) => break,
            None => waiting.push(turn),
        }
    }
    (held, waiting)
}

type Waiting<'a> = BoxFuture<'a, Result<Turn, Error>>;

/// How much longer one kind of address may take than the other, in percent. A comparison that is
/// left out makes half the time, or less.
const MAX_DIFFERENCE_PERCENT: u128 = 40;

#[test]
fn a_login_takes_as_long_for_an_unknown_address() {
    limited(async {
        let (_database, pools, accounts) = accounts(None, Turns::default()).await;
        let known = |number: u32| format!("{number}@example.com");
        // Each is met so seldom that none is answered late.
        const KNOWN: u32 = 6;
        for number in 0..KNOWN {
            sign_up(&accounts, &known(number), &client(&format!("c{number}"))).await;
        }
        let (mut of_known, mut of_unknown) = (Vec::new(), Vec::new());
        for number in 0..90 {
            // At random: two threads that take turns must not have one kind each.
            let is_known = rand::random();
            let email =
                if is_known { known(number % KNOWN) } else { format!("x{number}@example.com") };
            let started = Instant::now();
            let wrong = SecretString::from("not this one, no");
            let from = client(&format!("d{number}"));
            let refused = accounts.logins.log_in(&email, wrong, &from).await;
            assert!(matches!(refused, Err(Error::InvalidCredentials)), "{refused:?}");
            if is_known { &mut of_known } else { &mut of_unknown }.push(started.elapsed());
        }
        // The quickest quarter: what this machine does beside makes others slower.
        let quick = |mut all: Vec<Duration>| {
            all.sort();
            all[all.len() / 4].as_micros()
        };
        let (one, other) = (quick(of_known), quick(of_unknown));
        let difference = one.abs_diff(other) * 100 / one.min(other);
        assert!(difference < MAX_DIFFERENCE_PERCENT, "known {one} µs, unknown {other} µs");
        pools.close().await;
    });
}

#[test]
fn a_login_that_no_one_compared_is_no_try() {
    limited(async {
        let (turns, redis) = (Turns::default(), redis_url().into());
        let (_database, pools, accounts) = accounts(Some(redis), turns.clone()).await;
        let (email, ada) = (format!("{}@example.com", Uuid::new_v4()), client("ada"));
        // Her network got a hash, so she waits behind those who got none.
        sign_up(&accounts, &email, &ada).await;
        let crowd: Vec<String> = (0..2 * MAX_WAITING).map(|it| format!("crowd {it}")).collect();
        let (held, waiting) = fill(&turns, &crowd);
        let log_in = async || {
            let wrong = SecretString::from("not this one, no");
            accounts.logins.log_in(&email, wrong, &ada).await.map(drop)
        };
        for number in 0..TRIES_PER_PAIR.count + 2 {
            let refused = log_in().await;
            assert!(matches!(refused, Err(Error::Overloaded)), "{number}: {refused:?}");
        }
        drop((held, waiting));
        for number in 0..TRIES_PER_PAIR.count {
            let refused = log_in().await;
            assert!(matches!(refused, Err(Error::InvalidCredentials)), "{number}: {refused:?}");
        }
        assert!(matches!(log_in().await, Err(Error::RateLimited { .. })));
        pools.close().await;
    });
}

#[test]
fn a_browser_that_has_logged_in_before_goes_before_any_number_of_strangers() {
    limited(async {
        let (turns, redis) = (Turns::default(), redis_url().into());
        let (_database, pools, accounts) = accounts(Some(redis), turns.clone()).await;
        let email = format!("{}@example.com", Uuid::new_v4());
        let ada = client("192.0.2.1");
        let id = sign_up(&accounts, &email, &ada).await;
        let token = accounts.logins.device_token(id).await.expect("an answer");
        let known = Client { device_token: Some(token.expect("a token")), ..ada.clone() };
        // Each is of a wide network of its own, which got no hash.
        let address = |number: usize| format!("{}.{}.0.1", 1 + number / 256, number % 256);
        let crowd: Vec<String> = (0..2 * MAX_WAITING).map(address).collect();
        let (held, mut waiting) = fill(&turns, &crowd);
        let log_in = async |client: &Client| {
            let wrong = SecretString::from("not this one, no");
            accounts.logins.log_in(&email, wrong, client).await.map(drop)
        };
        assert!(matches!(log_in(&ada).await, Err(Error::Overloaded)));
        let last = waiting.pop().expect("the last of the crowd");
        let leaves = async {
            assert!(matches!(last.await, Err(Error::Overloaded)), "she has taken its place");
            drop(held);
        };
        let (refused, ()) = tokio::join!(log_in(&known), leaves);
        assert!(matches!(refused, Err(Error::InvalidCredentials)), "{refused:?}");
        pools.close().await;
    });
}
