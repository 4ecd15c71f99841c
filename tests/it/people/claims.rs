//! Addresses that several accounts claim: who proves one, and what strangers cannot do with it.

use fencepost_domain::limits;
use fencepost_store::sweep::purge;
use serde_json::{Value, json};

use super::{
    PASSWORD, Person,
    accounts::{open_server, secret_in},
    post_from,
};
use crate::harness::{Stage, limited};

#[test]
fn a_link_verifies_only_the_account_that_its_reader_is_logged_in_to() {
    limited(async {
        let (server, t) = open_server(Stage::default()).await;
        // A stranger claims the address before its owner does, and both get the same mail.
        let stranger = Person::sign_up_unverified(&t, "ada@example.com").await;
        let mail = server.next_mail().await;
        assert!(mail.text.contains("requested\nfrom the network address 172."), "{}", mail.text);
        let for_stranger = json!({"token": secret_in(&mail)});
        let password = "eight purple elephants";
        let body = json!({"email": "ada@example.com", "password": password});
        post_from(&t, "/v1/auth/signup", body, "192.0.2.1").await.is(201);
        let for_ada = json!({"token": secret_in(&server.next_mail().await)});
        let ada = Person::log_in(&t, "ada@example.com", password, Value::Null).await;
        let alone = post_from(&t, "/v1/auth/verify", for_stranger.clone(), "192.0.2.1").await;
        let message = alone.is_error(401, "unauthorized")["message"].to_string();
        assert!(message.contains("no session was sent"), "{message}");
        let verify =
            async |who: &Person, what: &Value| who.post("/v1/auth/verify", what.clone()).await;
        verify(&ada, &for_stranger).await.is_error(400, "invalid_token");
        verify(&ada, &for_ada).await.is_empty(204);
        verify(&stranger, &for_stranger).await.is_error(409, "email_taken");
        server.stop().await;
    });
}

#[test]
fn a_reset_mail_has_a_link_for_each_account_that_claims_the_address() {
    limited(async {
        let (server, t) = open_server(Stage::default()).await;
        let mut accounts = Vec::new();
        for (place, password) in [PASSWORD, "eight purple elephants"].into_iter().enumerate() {
            let body = json!({"email": "ada@example.com", "password": password});
            let address = format!("192.0.2.{place}");
            let made = post_from(&t, "/v1/auth/signup", body, &address).await.is(201);
            accounts.push(made["account"]["id"].clone());
            server.next_mail().await;
        }
        let reset = json!({"email": "ada@example.com"});
        post_from(&t, "/v1/auth/password/reset", reset.clone(), "192.0.2.9").await.is_empty(204);
        let mail = server.next_mail().await;
        let links: Vec<_> = mail.text.match_indices("/console/reset/confirm#token=").collect();
        assert_eq!(links.len(), 2, "{}", mail.text);
        assert!(mail.text.contains("Several accounts"), "{}", mail.text);
        // The newest comes first: it is the one that the address's owner has made last.
        let confirm = json!({"token": secret_in(&mail), "new_password": "seven yellow submarines"});
        post_from(&t, "/v1/auth/password/reset/confirm", confirm, "192.0.2.9").await.is_empty(204);
        let reported = server.next_mail().await;
        assert_eq!(reported.subject, "The password of your account was reset");
        let password = "seven yellow submarines";
        let ada = Person::log_in(&t, "ada@example.com", password, Value::Null).await;
        assert_eq!(accounts[1], ada.account_id.as_str());
        post_from(&t, "/v1/auth/password/reset", reset, "192.0.2.8").await.is_empty(204);
        let mail = server.next_mail().await;
        assert_eq!(mail.text.matches("fp_mail_").count(), 1, "only the verified one");
        server.stop().await;
    });
}

#[test]
fn strangers_cannot_use_up_the_sign_ups_and_resets_of_an_address() {
    limited(async {
        let (server, t) = open_server(Stage::default()).await;
        Person::sign_up(&t, "ada@example.com").await;
        server.next_mail().await;
        let reset = json!({"email": "ada@example.com"});
        for place in 0..25 {
            let address = format!("198.51.100.{place}");
            let reply = post_from(&t, "/v1/auth/password/reset", reset.clone(), &address).await;
            reply.is_empty(204);
        }
        // What is not sent is answered all the same: the mails before have valid links.
        for _ in 0..21 {
            assert_eq!(server.next_mail().await.subject, "Reset your password");
        }
        let body = json!({"email": "ada@example.com", "password": PASSWORD});
        for place in 0..4 {
            let address = format!("203.0.113.{place}");
            post_from(&t, "/v1/auth/signup", body.clone(), &address).await.is(201);
        }
        let again = async || post_from(&t, "/v1/auth/signup", body.clone(), "192.0.2.1").await;
        for _ in 0..3 {
            again().await.is(201);
        }
        again().await.is_error(429, "rate_limit_exceeded");
        server.stop().await;
    });
}

#[test]
fn a_second_sign_up_with_an_address_mails_its_owner_and_is_deleted_if_unused() {
    limited(async {
        let (server, t) = open_server(Stage::default()).await;
        Person::sign_up(&t, "ada@example.com").await;
        server.next_mail().await;
        let sign_up = |project: &str| {
            let password = "eight purple elephants";
            let name = project.to_owned();
            let body = json!({"email": "ada@example.com", "password": password,
                              "project_name": name});
            let t = t.clone();
            async move { post_from(&t, "/v1/auth/signup", body, "192.0.2.7").await.is(201) }
        };
        let unused = sign_up("unused").await;
        let mail = server.next_mail().await;
        assert_eq!(mail.subject, "You already have an account");
        assert!(!mail.text.contains("fp_mail_"), "there is nothing to verify: {}", mail.text);
        let used = sign_up("used").await;
        let key = used["api_key"]["secret"].as_str().expect("a key").to_owned();
        let of_used = t.with_key(key);
        of_used.enqueue(json!({"job_type": "a"})).await;
        while t
            .database
            .number("select count(last_used_at) from api_keys where name = 'first'")
            .await
            == 0
        {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        let mut conn = t.database.connect().await;
        let age = "update accounts set created_at = created_at - interval '33 days',
                   last_login_at = last_login_at - interval '33 days'";
        t.database.execute(age).await;
        let pruned = purge::prune_unused(&mut conn, limits::UNUSED_ACCOUNT_DAYS).await;
        assert_eq!(pruned.expect("it runs"), 1);
        let left = |made: &Value| {
            let id = made["account"]["id"].as_str().expect("an id").to_owned();
            let id = id.parse::<fencepost_domain::ids::AccountId>().expect("an id").0;
            format!("select count(*) from accounts where id = '{id}'")
        };
        assert_eq!(t.database.number(&left(&unused)).await, 0);
        assert_eq!(t.database.number(&left(&used)).await, 1);
        let deleted =
            "select count(*) from projects where deleted_at is not null and name = 'unused'";
        assert_eq!(t.database.number(deleted).await, 1);
        of_used.get("/v1/jobs").await.is(200);
        server.stop().await;
    });
}

#[test]
fn each_of_five_accounts_that_claim_an_address_can_log_in() {
    limited(async {
        let (server, t) = open_server(Stage::default()).await;
        let mut made = Vec::new();
        for number in 0..5 {
            let password = format!("{number} quiet otters borrow umbrellas");
            let body = json!({"email": "ada@example.com", "password": password});
            let address = format!("192.0.2.{number}");
            let account = post_from(&t, "/v1/auth/signup", body.clone(), &address).await.is(201);
            made.push((body, account["account"]["id"].clone()));
        }
        for (place, (body, id)) in made.into_iter().enumerate() {
            let address = format!("198.51.100.{place}");
            let session = post_from(&t, "/v1/auth/login", body, &address).await.is(200);
            assert_eq!(session["account_id"], id);
        }
        server.stop().await;
    });
}
