//! Logins with address and password. Known and unknown addresses get the same answers and take the
//! same time.

use fencepost_domain::{error::Error, ids::AccountId};
use fencepost_store as store;
use secrecy::SecretString;

use super::{
    Client, DELAY_OF_A_TRY, TRIES_PER_EMAIL, TRIES_PER_PAIR,
    base::Base,
    known_device::{self, is_known},
    password::{self, Passwords},
    read_email,
    security::AccountEvent,
    sessions::{Login, SignedIn},
    throttle::charge,
};

/// Logins with address and password.
#[derive(Clone)]
pub struct Logins {
    pub(super) base: Base,
    pub(super) passwords: Passwords,
}

impl Logins {
    /// Logs in.
    ///
    /// # Errors
    /// [`Error::InvalidCredentials`] when address and password do not match; [`Error::Suspended`]
    /// when the operator has suspended the account; [`Error::CodeRequired`] when it has a second
    /// factor: `SecondFactors::complete_login`; [`Error::RateLimited`].
    pub async fn log_in(
        &self,
        email: &str,
        password: SecretString,
        client: &Client,
    ) -> Result<SignedIn, Error> {
        let email = read_email("email", email)?;
        self.base.throttle.address(client).await?;
        let pair = charge("pair", &format!("{email} {}", client.address), TRIES_PER_PAIR);
        self.base.throttle.count(std::slice::from_ref(&pair)).await?;
        let tries = charge("tries", &email, TRIES_PER_EMAIL);
        let counted = self.base.throttle.limiter.charge(std::slice::from_ref(&tries), &[]).await;
        let is_late = counted.wait.is_some();
        if is_late {
            tokio::time::sleep(DELAY_OF_A_TRY).await;
        }
        let candidates = {
            let mut conn = self.base.pool.acquire().await?;
            store::people::accounts::candidates(&mut conn, &email).await?
        };
        let is_alone = candidates.len() == 1;
        // An account that only claims the address must not learn of its owner's logins.
        let meant = candidates.iter().find(|it| it.is_verified || is_alone);
        let known = meant.filter(|it| is_known(client, it.id, &it.password_hash));
        let asker = known.map_or_else(|| client.address.to_string(), |it| it.id.to_string());
        let meant = meant.map(|it| it.id);
        let hashes = candidates.iter().map(|it| it.password_hash.clone()).collect();
        let compared = self.passwords.compare(&asker, password.clone(), hashes).await;
        if matches!(compared, Err(Error::Overloaded)) {
            // Nothing was compared, so it was no try.
            let used = if is_late { vec![pair] } else { vec![pair, tries] };
            self.base.throttle.limiter.refund(&used).await;
            return Err(Error::Overloaded);
        }
        let found = compared?;
        let account = found.and_then(|it| candidates.into_iter().nth(it));
        let Some(account) = account else {
            if let Some(id) = meant {
                // A known address must not take longer than an unknown one.
                self.base.note_later(id, AccountEvent::LoginFailed, client);
            }
            return Err(Error::InvalidCredentials);
        };
        if account.is_suspended {
            return Err(Error::Suspended { what: "account" });
        }
        // Tries with the right password are not counted. An account that only claims the address
        // must not buy tries at the account that has verified it.
        if account.is_verified || is_alone {
            self.base.throttle.limiter.forgive(&pair).await;
        }
        let mut hash = account.password_hash;
        if !password::is_present(&hash) {
            let better = self.passwords.hash(&asker, password).await?;
            let mut conn = self.base.pool.acquire().await?;
            if store::people::accounts::replace_hash(&mut conn, account.id, &hash, &better).await? {
                hash = better;
            }
        }
        self.base.sessions.begin(account.id, &hash, Login::Proved, client).await
    }

    /// The token of a browser that has just logged in; none: the account has no password.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the database does not answer.
    pub async fn device_token(&self, account_id: AccountId) -> Result<Option<SecretString>, Error> {
        let mut conn = self.base.pool.acquire().await?;
        let found = store::people::accounts::credentials(&mut conn, account_id).await?;
        Ok(found.and_then(|it| known_device::token(account_id, &it.password_hash)))
    }
}
