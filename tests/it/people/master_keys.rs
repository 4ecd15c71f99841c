//! Secrets in the database are encrypted with a master key, which can be replaced.

use std::{path::Path, process::Command};

use fencepost_net::seal::{MasterKeys, new_master_key};

use super::Person;
use crate::harness::{Database, Stage, TestServer, fresh_database, limited, scratch};

const MISSING: &str = "encrypted with another master key";

/// Runs `fencepost keys seal`.
fn seal(database: &Database, file: &Path) -> (bool, String) {
    let run = Command::new(env!("CARGO_BIN_EXE_fencepost"))
        .args(["keys", "seal", "--master-key-file"])
        .arg(file)
        .env_clear()
        .env("FENCEPOST_DATABASE_URL", &database.url)
        .output()
        .expect("it runs");
    let text = [run.stdout, run.stderr].concat();
    (run.status.success(), String::from_utf8(text).expect("text"))
}

async fn start(database: &Database, master_keys: &str) -> TestServer {
    let stage = Stage::default();
    let master_keys = match master_keys {
        "" => MasterKeys::default(),
        text => MasterKeys::parse(&text.into()).expect("keys"),
    };
    TestServer::start_as(database.clone(), Stage { master_keys: master_keys.into(), ..stage }).await
}

/// The status of the account's page with this token, and what `/readyz` says.
async fn answers(server: &TestServer, token: &str) -> (u16, String) {
    let client = crate::harness::client();
    let me = client.get(format!("{}/v1/me", server.url)).bearer_auth(token).send().await;
    let ready = client.get(format!("{}/readyz", server.url)).send().await.expect("an answer");
    (me.expect("an answer").status().as_u16(), ready.text().await.expect("text"))
}

#[test]
fn keys_that_sign_tokens_are_encrypted_and_their_master_key_can_be_replaced() {
    limited(async {
        let database = fresh_database().await;
        let (old, new) = (new_master_key(), new_master_key());
        let file = scratch("master-keys").join("key");
        let write = |text: &str| std::fs::write(&file, text).expect("it is written");
        let plain = "select count(*) from signing_keys where octet_length(secret) = 32";

        let server = start(&database, "").await;
        let t = server.project("main").await;
        let token = Person::sign_up(&t, "ada@example.com").await.access_token;
        assert_eq!(answers(&server, &token).await, (200, "ok\n".to_owned()));
        assert_eq!(database.number(plain).await, 1);
        server.stop().await;

        write(&old);
        assert_eq!(
            seal(&database, &file),
            (
                true,
                "1 signing keys encrypted\n0 secrets of authenticator apps encrypted\nsecrets of 0 endpoints and pushes encrypted\n".to_owned()
            )
        );
        assert_eq!(
            seal(&database, &file),
            (
                true,
                "0 signing keys encrypted\n0 secrets of authenticator apps encrypted\nsecrets of 0 endpoints and pushes encrypted\n".to_owned()
            )
        );
        assert_eq!(database.number(plain).await, 0);
        let both = format!("{new}\n{old}\n");
        for keys in [&old, &both] {
            let server = start(&database, keys).await;
            assert_eq!(answers(&server, &token).await, (200, "ok\n".to_owned()));
            server.stop().await;
        }
        for keys in ["", &new] {
            let server = start(&database, keys).await;
            let (status, ready) = answers(&server, &token).await;
            assert_eq!(status, 401);
            assert!(ready.contains(MISSING), "{ready}");
            server.stop().await;
        }

        write(&new);
        let (is_done, reported) = seal(&database, &file);
        assert!(!is_done && reported.contains(MISSING), "{reported}");
        write(&both);
        assert_eq!(
            seal(&database, &file),
            (
                true,
                "1 signing keys encrypted\n0 secrets of authenticator apps encrypted\nsecrets of 0 endpoints and pushes encrypted\n".to_owned()
            )
        );
        let server = start(&database, &new).await;
        assert_eq!(answers(&server, &token).await, (200, "ok\n".to_owned()));
        server.stop().await;
        write("no key");
        assert!(!seal(&database, &file).0);
    });
}

#[test]
fn a_node_with_a_master_key_stores_no_plain_signing_key() {
    limited(async {
        let database = fresh_database().await;
        let server = start(&database, &new_master_key()).await;
        let t = server.project("main").await;
        let token = Person::sign_up(&t, "ada@example.com").await.access_token;
        assert_eq!(answers(&server, &token).await.0, 200);
        let sealed = "select count(*) from signing_keys where octet_length(secret) > 32";
        assert_eq!(database.number(sealed).await, 1);
        server.stop().await;
    });
}
