//! Addresses that several accounts claim: who proves one, and what strangers cannot do with it.

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
        let links: Vec<_> = mail.text.match_indices("/console/reset/confirm?token=").collect();
        assert_eq!(links.len(), 2, "{}", mail.text);
        assert!(mail.text.contains("Several accounts"), "{}", mail.text);
        // The newest comes first: it is the one that the address's owner has made last.
        let confirm = json!({"token": secret_in(&mail), "new_password": "seven yellow submarines"});
        post_from(&t, "/v1/auth/password/reset/confirm", confirm, "192.0.2.9").await.is_empty(204);
        let told = server.next_mail().await;
        assert_eq!(told.subject, "The password of your account was reset");
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
