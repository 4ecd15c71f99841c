//! Changing an address: both addresses confirm it.

use serde_json::{Value, json};

use super::{
    PASSWORD, Person,
    accounts::{open_server, secret_in},
    post_from,
    second_factor::age_sessions,
};
use crate::harness::{Stage, limited};

const CONFIRM: &str = "/v1/me/email/confirm";

#[test]
fn an_address_is_changed_when_the_old_one_and_the_new_one_have_confirmed() {
    limited(async {
        let (server, t) = open_server(Stage::default()).await;
        let ada = Person::sign_up(&t, "ada@example.com").await;
        let eve = Person::sign_up(&t, "eve@example.com").await;
        let first = [server.next_mail().await, server.next_mail().await];
        assert!(first.iter().all(|it| it.subject == "Verify your e-mail address"), "{first:?}");
        for bad in ["", "x", "ada@example.com"] {
            ada.post("/v1/me/email", json!({"email": bad})).await.refuses("email");
        }
        let new = json!({"email": "Ada@example.org"});
        ada.post("/v1/me/email", new.clone()).await.is_empty(204);
        let mails = [server.next_mail().await, server.next_mail().await];
        let to = |address: &str| mails.iter().find(|it| it.to == address).expect("a mail");
        let (to_new, to_old) = (to("ada@example.org"), to("ada@example.com"));
        let [of_new, of_old] = [to_new, to_old].map(|it| json!({"token": secret_in(it)}));
        eve.post(CONFIRM, of_new.clone()).await.is_error(400, "invalid_token");
        ada.post(CONFIRM, json!({"token": "fp_mail_junk"})).await.is_error(400, "invalid_token");
        let half = ada.post(CONFIRM, of_new.clone()).await.is(200);
        assert_eq!(half, json!({"is_changed": false}));
        ada.post(CONFIRM, of_new).await.is_error(400, "invalid_token");
        assert_eq!(ada.get("/v1/me").await.is(200)["account"]["email"], "ada@example.com");
        let whole = ada.post(CONFIRM, of_old.clone()).await.is(200);
        assert_eq!(whole, json!({"is_changed": true}));
        ada.post(CONFIRM, of_old).await.is_error(400, "invalid_token");
        let me = ada.get("/v1/me").await.is(200);
        assert_eq!(me["account"]["email"], "ada@example.org");
        assert_eq!(me["account"]["email_verified"], true);
        let reported = server.next_mail().await;
        assert_eq!(reported.to, "ada@example.com");
        assert_eq!(reported.subject, "The e-mail address of your account was changed");
        Person::log_in(&t, "ada@example.org", PASSWORD, Value::Null).await;
        let old = json!({"email": "ada@example.com", "password": PASSWORD});
        let refused = post_from(&t, "/v1/auth/login", old, "192.0.2.1").await;
        refused.is_error(401, "invalid_credentials");
        server.stop().await;
    });
}

#[test]
fn a_taken_address_is_not_revealed_until_its_mail_is_read() {
    limited(async {
        let (server, t) = open_server(Stage::default()).await;
        Person::sign_up(&t, "ada@example.com").await;
        let eve = Person::sign_up_unverified(&t, "eve@example.com").await;
        let _ = [server.next_mail().await, server.next_mail().await];
        age_sessions(&t).await;
        let taken = json!({"email": "ada@example.com"});
        eve.post("/v1/me/email", taken.clone()).await.is_error(403, "step_up_required");
        eve.post("/v1/auth/step-up", json!({"password": PASSWORD})).await.is_empty(204);
        eve.post("/v1/me/email", taken).await.is_empty(204);
        // The old address is not verified: the new one alone confirms.
        let mail = server.next_mail().await;
        assert_eq!(mail.to, "ada@example.com");
        let token = json!({"token": secret_in(&mail)});
        eve.post(CONFIRM, token.clone()).await.is_error(409, "email_taken");
        t.database.execute("update email_changes set expires_at = now()").await;
        eve.post(CONFIRM, token).await.is_error(400, "invalid_token");
        for _ in 0..2 {
            eve.post("/v1/me/email", json!({"email": "eve@example.org"})).await.is_empty(204);
        }
        let late = eve.post("/v1/me/email", json!({"email": "eve@example.org"})).await;
        late.is_error(429, "rate_limit_exceeded");
        server.stop().await;
    });
}

#[test]
fn a_stranger_who_claims_an_address_cannot_change_it_when_its_owner_has_come() {
    limited(async {
        let (server, t) = open_server(Stage::default()).await;
        let eve = Person::sign_up_unverified(&t, "ada@example.com").await;
        server.next_mail().await;
        eve.post("/v1/me/email", json!({"email": "eve@example.com"})).await.is_empty(204);
        let mail = server.next_mail().await;
        assert!(!mail.text.contains("ada@example.com"), "{}", mail.text);
        let token = json!({"token": secret_in(&mail)});
        let reset = json!({"email": "ada@example.com"});
        post_from(&t, "/v1/auth/password/reset", reset, "192.0.2.9").await.is_empty(204);
        let new = "loud herons lend galoshes";
        let link = secret_in(&server.next_mail().await);
        let confirm = json!({"token": link, "new_password": new});
        post_from(&t, "/v1/auth/password/reset/confirm", confirm, "192.0.2.9").await.is_empty(204);
        let ada = Person::log_in(&t, "ada@example.com", new, Value::Null).await;
        ada.post(CONFIRM, token).await.is_error(400, "invalid_token");
        server.stop().await;
    });
}
