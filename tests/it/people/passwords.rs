//! New passwords: what they must not be.

use fencepost_identity::accounts::password::lists::BreachedPasswords;
use serde_json::{Value, json};
use sqlx::Executor as _;

use super::{PASSWORD, Person, accounts::open_server, post_from};
use crate::harness::{Stage, limited, scratch};

#[test]
fn a_new_password_must_not_be_common_nor_on_the_operators_list() {
    limited(async {
        let breached = "loud herons lend galoshes";
        let file = scratch("breached").join("list");
        let hash = "EFA5A5A5A5A5A5A5A5A5A5A5A5A5A5A5A5A5A5A5";
        let mut lines = [format!("{hash}:1"), format!("{}:7", sha1(breached))];
        lines.sort();
        std::fs::write(&file, lines.join("\r\n")).expect("it is written");
        let list = BreachedPasswords::open(&file).expect("a list");
        let stage = Stage { breached_passwords: Some(list.into()), ..Stage::default() };
        let (server, t) = open_server(stage).await;
        let sign_up = async |password: &str| {
            let body = json!({"email": "ada@example.com", "password": password});
            post_from(&t, "/v1/auth/signup", body, "192.0.2.1").await
        };
        for (password, why) in [
            ("1234567890123456", "is too easy to guess"),
            ("Weihnachten1984!", "is common, or common with digits or symbols around it"),
            (breached, "was found in a breach of another service"),
        ] {
            let refused = sign_up(password).await;
            let error = refused.is_error(400, "invalid_request");
            assert_eq!(error["details"][0]["field"], "password");
            let message = error["details"][0]["message"].as_str().expect("text");
            assert!(message.starts_with(why), "{message}");
        }
        sign_up(PASSWORD).await.is(201);
        let ada = Person::log_in(&t, "ada@example.com", PASSWORD, Value::Null).await;
        let change = json!({"current_password": PASSWORD, "new_password": breached});
        ada.post("/v1/auth/password", change).await.refuses("new_password");
        server.stop().await;
    });
}

#[test]
fn a_password_is_not_changed_when_its_account_is_deleted_meanwhile() {
    limited(async {
        let (server, t) = open_server(Stage::default()).await;
        let ada = Person::sign_up(&t, "ada@example.com").await;
        let mut deleting = t.database.connect().await;
        deleting.execute("begin").await.expect("a transaction begins");
        let delete = "delete from accounts where email = 'ada@example.com'";
        deleting.execute(delete).await.expect("the account is deleted");
        let change = json!({"current_password": PASSWORD, "new_password": "loud herons lend it"});
        let (changed, ()) = tokio::join!(ada.post("/v1/auth/password", change), async {
            let waits = "select count(*) from pg_stat_activity
                         where wait_event_type = 'Lock' and datname = current_database()";
            t.database.until(waits, 1).await;
            deleting.execute("commit").await.expect("the transaction commits");
        });
        changed.is_error(401, "unauthorized");
        server.stop().await;
    });
}

fn sha1(text: &str) -> String {
    let hash = ring::digest::digest(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes());
    hash.as_ref().iter().map(|it| format!("{it:02X}")).collect()
}
