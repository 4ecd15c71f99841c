//! Logins with an authenticator app, recovery codes, and what a session must be stepped up for.

use std::time::{SystemTime, UNIX_EPOCH};

use fencepost_domain::access::Role;
use fencepost_net::seal::{MasterKeys, new_master_key};
use serde_json::{Value, json};
use totp_rs::{Builder, Secret};

use super::{
    PASSWORD, Person,
    accounts::{open_server, secret_in},
    address_of, post_from,
    security::printed,
};
use crate::harness::{
    LoneProject, Reply, Stage, TestProject, TestServer, fresh_database, limited, run_alone,
    scratch, until,
};

const ADA: &str = "ada@example.com";

/// What an authenticator app shows now.
#[expect(clippy::disallowed_methods, reason = "an app has a clock of its own")]
pub fn shown(secret: &str) -> String {
    let secret = Secret::try_from_base32(secret).expect("base32");
    let app = Builder::new().with_secret(secret).build().expect("an app");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a time").as_secs();
    app.generate(now).to_string()
}

/// Another code than the one that is shown.
fn wrong(secret: &str) -> String {
    let code: u32 = shown(secret).parse().expect("digits");
    format!("{:06}", (code + 111_111) % 1_000_000)
}

/// Codes of the present may be used once more, as if the time had gone on.
pub async fn let_time_pass(t: &LoneProject) {
    t.database.execute("update totp set last_step = 0").await;
}

/// Adds an app. Returns its secret and the recovery codes.
pub async fn add_app(t: &LoneProject, person: &Person) -> (String, Vec<String>) {
    let new = person.post("/v1/me/second-factors/totp", json!({})).await.is(201);
    let secret = new["secret"].as_str().expect("a secret").to_owned();
    let body = json!({"code": shown(&secret)});
    let codes = person.post("/v1/me/second-factors/totp/confirm", body).await.is(200);
    let codes = codes["recovery_codes"].as_array().expect("codes").clone();
    let_time_pass(t).await;
    (secret, codes.iter().map(|it| it.as_str().expect("a code").to_owned()).collect())
}

async fn log_in(t: &TestProject, password: &str) -> Reply {
    let body = json!({"email": ADA, "password": password});
    post_from(t, "/v1/auth/login", body, &address_of(ADA)).await
}

/// The token of a login that needs a code.
async fn half(t: &TestProject) -> String {
    let error = log_in(t, PASSWORD).await.is_error(403, "code_required").clone();
    error["login_token"].as_str().expect("a token").to_owned()
}

async fn complete(t: &TestProject, token: &str, code: &str) -> Reply {
    complete_from(t, token, code, &address_of(ADA)).await
}

async fn complete_from(t: &TestProject, token: &str, code: &str, address: &str) -> Reply {
    let body = json!({"login_token": token, "code": code});
    post_from(t, "/v1/auth/login/code", body, address).await
}

/// As if all sessions had begun, or been stepped up, more than 15 minutes ago.
pub async fn age_sessions(t: &LoneProject) {
    let sql = "update sessions set stepped_up_at = now() - interval '901 s'";
    t.database.execute(sql).await;
}

async fn actions(person: &Person) -> Vec<String> {
    let log = person.get("/v1/me/security-log").await.is(200);
    let entries = log["entries"].as_array().expect("entries").clone();
    entries.iter().map(|it| it["action"].as_str().expect("text").to_owned()).collect()
}

#[test]
fn a_login_with_an_app_needs_password_and_code_and_no_code_twice() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, ADA).await;
        let none = ada.get("/v1/me/second-factors").await.is(200);
        assert_eq!(
            none,
            json!({"totp_confirmed_at": null, "recovery_codes_left": 0, "passkeys": []})
        );
        let new = ada.post("/v1/me/second-factors/totp", json!({})).await.is(201);
        let uri = new["uri"].as_str().expect("a link");
        assert!(uri.starts_with("otpauth://totp/Fencepost:ada%40example.com?"), "{uri}");
        let confirm = "/v1/me/second-factors/totp/confirm";
        let first = new["secret"].as_str().expect("a secret");
        let refused = ada.post(confirm, json!({"code": wrong(first)})).await;
        refused.is_error(401, "invalid_code");
        log_in(t, PASSWORD).await.is(200);

        let (secret, recovery) = add_app(t, &ada).await;
        assert_eq!(recovery.len(), 10);
        let again = ada.post(confirm, json!({"code": shown(&secret)})).await;
        again.is_error(401, "invalid_code");
        log_in(t, "another password of mine").await.is_error(401, "invalid_credentials");

        let token = half(t).await;
        complete(t, &token, &wrong(&secret)).await.is_error(401, "invalid_code");
        complete(t, &token, "").await.is_error(401, "invalid_code");
        complete(t, "fp_login_x", &shown(&secret)).await.is_error(401, "invalid_credentials");
        let code = shown(&secret);
        complete(t, &token, &code).await.is(200);
        complete(t, &token, &code).await.is_error(401, "invalid_credentials");
        let other = half(t).await;
        complete(t, &other, &code).await.is_error(401, "invalid_code");
        complete(t, &other, &recovery[0].to_uppercase()).await.is(200);
        let third = half(t).await;
        complete(t, &third, &recovery[0]).await.is_error(401, "invalid_code");
        let left = ada.get("/v1/me/second-factors").await.is(200);
        assert_eq!(left["recovery_codes_left"], 9);

        let log = actions(&ada).await;
        for action in ["totp.added", "code.refused", "recovery_code.used"] {
            assert!(log.iter().any(|it| it == action), "{action}: {log:?}");
        }
    });
}

#[test]
fn half_of_a_login_is_worth_nothing() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, ADA).await;
        let eve = Person::sign_up(t, "eve@example.com").await;
        let (secret, _) = add_app(t, &ada).await;
        let (of_eve, _) = add_app(t, &eve).await;
        let token = half(t).await;
        complete(t, &token, &shown(&of_eve)).await.is_error(401, "invalid_code");
        // The token is no session.
        let me = t.client.get(format!("{}/v1/me", t.url)).bearer_auth(&token).send().await;
        assert_eq!(me.expect("an answer").status(), 401);
        // After five wrong codes the login has ended, also for another client.
        for _ in 0..4 {
            complete(t, &token, &wrong(&secret)).await.is_error(401, "invalid_code");
        }
        let elsewhere = complete_from(t, &token, &shown(&secret), "192.0.2.9").await;
        elsewhere.is_error(401, "invalid_credentials");
        let limited = complete(t, &half(t).await, &shown(&secret)).await;
        limited.is_error(429, "rate_limit_exceeded");
        assert!(actions(&ada).await.iter().any(|it| it == "code.many_refused"));
        // A login ends with the password that it was begun with, and with time.
        let token = half(t).await;
        let expired = half(t).await;
        let hash = "update login_challenges set expires_at = now() where secret_hash = sha256('";
        t.database.execute(&format!("{hash}{expired}')")).await;
        let late = complete_from(t, &expired, &shown(&secret), "192.0.2.10").await;
        late.is_error(401, "invalid_credentials");
        let new =
            json!({"current_password": PASSWORD, "new_password": "loud herons lend galoshes"});
        ada.post("/v1/auth/password", new).await.is_empty(204);
        let stale = complete_from(t, &token, &shown(&secret), "192.0.2.10").await;
        stale.is_error(401, "invalid_credentials");
    });
}

#[test]
fn of_two_logins_with_the_same_code_one_succeeds() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, ADA).await;
        let (secret, recovery) = add_app(t, &ada).await;
        for code in [shown(&secret), recovery[3].clone()] {
            let (one, other) = (half(t).await, half(t).await);
            let (first, second) = tokio::join!(
                complete_from(t, &one, &code, "192.0.2.1"),
                complete_from(t, &other, &code, "192.0.2.2")
            );
            let mut statuses = [first.status.as_u16(), second.status.as_u16()];
            statuses.sort_unstable();
            assert_eq!(statuses, [200, 401], "{code}");
        }
        let_time_pass(t).await;
        let (token, code) = (half(t).await, shown(&secret));
        let twice = tokio::join!(
            complete_from(t, &token, &code, "192.0.2.1"),
            complete_from(t, &token, &code, "192.0.2.2")
        );
        let mut statuses = [twice.0.status.as_u16(), twice.1.status.as_u16()];
        statuses.sort_unstable();
        assert_eq!(statuses, [200, 401]);
    });
}

#[test]
fn keys_members_and_deletion_need_a_session_that_was_stepped_up() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, ADA).await;
        ada.join(t, Role::Owner).await;
        let zed = Person::sign_up(t, "zed@example.com").await;
        zed.join(t, Role::Member).await;
        let other = Person::log_in(t, ADA, PASSWORD, Value::Null).await;
        let key = ada.post("/v1/projects/main/keys", json!({"name": "k"})).await.is(201);
        let key = key["key"]["id"].as_str().expect("an id").to_owned();
        age_sessions(t).await;
        let invite = json!({"email": "new@example.com", "role": "viewer"});
        let member = format!("/v1/projects/main/members/{}", zed.account_id);
        let rotate = format!("/v1/projects/main/keys/{key}/rotate");
        let refused = [
            ada.post("/v1/projects/main/keys", json!({"name": "k"})).await,
            ada.post(&rotate, json!({})).await,
            ada.patch(&member, json!({"role": "admin"})).await,
            ada.delete(&member).await,
            ada.post("/v1/projects/main/invitations", invite.clone()).await,
            ada.delete("/v1/projects/main?confirm=main").await,
            ada.post("/v1/me/second-factors/totp", json!({})).await,
            ada.post("/v1/me/second-factors/totp/confirm", json!({"code": "123456"})).await,
            ada.delete("/v1/me/second-factors/totp").await,
            ada.post("/v1/me/second-factors/recovery-codes", json!({})).await,
        ];
        for reply in refused {
            reply.is_error(403, "step_up_required");
        }
        // What ends rights needs no more than the session.
        ada.delete(&format!("/v1/projects/main/keys/{key}?revoke_keys=true")).await.is_empty(204);
        let wrong_password = json!({"password": "another password of mine"});
        ada.post("/v1/auth/step-up", wrong_password).await.is_error(401, "invalid_credentials");
        ada.post("/v1/auth/step-up", json!({"code": "123456"})).await.refuses("password");
        ada.post("/v1/auth/step-up", json!({})).await.refuses("code");
        ada.post("/v1/auth/step-up", json!({"password": PASSWORD})).await.is_empty(204);
        ada.post("/v1/projects/main/invitations", invite.clone()).await.is(201);
        let elsewhere = other.post("/v1/projects/main/keys", json!({"name": "k"})).await;
        elsewhere.is_error(403, "step_up_required");
        let leaving = format!("/v1/projects/main/members/{}?revoke_keys=true", zed.account_id);
        zed.delete(&leaving).await.is_empty(204);
    });
}

#[test]
fn an_account_with_an_app_is_stepped_up_by_codes_alone() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, ADA).await;
        let (secret, recovery) = add_app(t, &ada).await;
        age_sessions(t).await;
        let change =
            json!({"current_password": PASSWORD, "new_password": "loud herons lend galoshes"});
        let delete = json!({"password": PASSWORD});
        ada.post("/v1/auth/password", change).await.is_error(403, "step_up_required");
        ada.post("/v1/me/delete", delete.clone()).await.is_error(403, "step_up_required");
        ada.post("/v1/auth/step-up", json!({"password": PASSWORD})).await.refuses("code");
        let body = json!({"code": wrong(&secret)});
        ada.post("/v1/auth/step-up", body).await.is_error(401, "invalid_code");
        let code = shown(&secret);
        ada.post("/v1/auth/step-up", json!({"code": code})).await.is_empty(204);
        ada.post("/v1/auth/step-up", json!({"code": code})).await.is_error(401, "invalid_code");
        let new = ada.post("/v1/me/second-factors/recovery-codes", json!({})).await.is(200);
        assert_eq!(new["recovery_codes"].as_array().map(Vec::len), Some(10));
        let body = json!({"code": recovery[0]});
        ada.post("/v1/auth/step-up", body).await.is_error(401, "invalid_code");
        ada.delete("/v1/me/second-factors/totp").await.is_empty(204);
        log_in(t, PASSWORD).await.is(200);
        let none = ada.post("/v1/me/second-factors/recovery-codes", json!({})).await;
        none.refuses("second_factor");
        ada.post("/v1/me/delete", delete).await.is_empty(204);
    });
}

#[test]
fn an_operator_lets_an_owner_in_who_has_lost_the_app() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, ADA).await;
        let none = printed(t, &["accounts", "reset-second-factor", ADA]);
        assert!(none.ends_with(": none\n"), "{none}");
        add_app(t, &ada).await;
        half(t).await;
        printed(t, &["accounts", "reset-second-factor", ADA]);
        until("the session to end", async || ada.get("/v1/me").await.status == 401).await;
        let again = Person::log_in(t, ADA, PASSWORD, Value::Null).await;
        let log = actions(&again).await;
        assert!(log.iter().any(|it| it == "operator.second_factor_reset"), "{log:?}");
    });
}

#[test]
fn a_mailed_link_resets_the_password_and_not_the_app() {
    limited(async {
        let (server, t) = open_server(Stage::default()).await;
        // A stranger claims the address, and adds an app to the account.
        let eve = Person::sign_up_unverified(&t, ADA).await;
        server.next_mail().await;
        add_app(&t, &eve).await;
        for (has_app, new) in [(false, "loud herons lend galoshes"), (true, PASSWORD)] {
            let reset = json!({"email": ADA});
            post_from(&t, "/v1/auth/password/reset", reset, "192.0.2.9").await.is_empty(204);
            let mail = server.next_mail().await;
            let token = secret_in(&mail);
            let confirm = json!({"token": token, "new_password": new});
            let done = post_from(&t, "/v1/auth/password/reset/confirm", confirm, "192.0.2.9").await;
            done.is_empty(204);
            server.next_mail().await;
            let body = json!({"email": ADA, "password": new});
            let login = post_from(&t, "/v1/auth/login", body, "192.0.2.9").await;
            assert_eq!(login.status, if has_app { 403 } else { 200 }, "{}", login.text);
            if !has_app {
                let ada = Person::log_in(&t, ADA, new, Value::Null).await;
                add_app(&t, &ada).await;
                let reported = server.next_mail().await;
                assert!(reported.subject.contains("authenticator app"), "{}", reported.subject);
            }
        }
        server.stop().await;
    });
}

#[test]
fn secrets_of_apps_are_encrypted_and_a_node_with_another_key_says_so() {
    limited(async {
        let database = fresh_database().await;
        let key = new_master_key();
        let stage = |text: &str| {
            let keys = MasterKeys::parse(&text.into()).expect("a key");
            Stage { master_keys: keys.into(), ..Stage::default() }
        };
        // Without a master key, it is stored as it is, until it is encrypted.
        let server = TestServer::start_as(database.clone(), Stage::default()).await;
        let t = server.project("main").await;
        let ada = Person::sign_up(&t, ADA).await;
        let (secret, _) = add_app(&t, &ada).await;
        server.stop().await;
        let file = scratch("totp-master-key").join("key");
        std::fs::write(&file, &key).expect("it is written");
        let file = file.to_str().expect("text");
        let reported = printed(&t, &["keys", "seal", "--master-key-file", file]);
        assert!(reported.contains("1 secrets of authenticator apps encrypted\n"), "{reported}");
        let server = TestServer::start_as(database.clone(), stage(&key)).await;
        let t = t.through(&server.url);
        let plain = "select count(*) from totp where octet_length(secret) = 20";
        assert_eq!(database.number(plain).await, 0);
        let token = half(&t).await;
        let other = TestServer::start_as(database.clone(), stage(&new_master_key())).await;
        let there = t.through(&other.url);
        let refused = complete(&there, &token, &shown(&secret)).await;
        refused.is_error(503, "unavailable");
        complete(&t, &token, &shown(&secret)).await.is(200);
        server.stop().await;
        other.stop().await;
    });
}

#[test]
fn an_earlier_session_cannot_remove_an_app_with_the_password_alone() {
    run_alone(async |t| {
        let thief = Person::sign_up(t, ADA).await;
        let ada = Person::log_in(t, ADA, PASSWORD, Value::Null).await;
        add_app(t, &ada).await;
        thief.delete("/v1/me/second-factors/totp").await.is_error(403, "step_up_required");
        ada.delete("/v1/me/second-factors/totp").await.is_empty(204);
    });
}

#[test]
fn an_app_must_show_its_first_code_in_time_and_is_forgotten_otherwise() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, ADA).await;
        let new = ada.post("/v1/me/second-factors/totp", json!({})).await.is(201);
        t.database.execute("update totp set pending_until = now() - interval '1 s'").await;
        let code = json!({"code": shown(new["secret"].as_str().expect("a secret"))});
        let late = ada.post("/v1/me/second-factors/totp/confirm", code).await;
        late.is_error(401, "invalid_code");
        let mut conn = t.database.connect().await;
        fencepost_store::sweep::purge::prune_expired(&mut conn).await.expect("pruned");
        assert_eq!(t.database.number("select count(*) from totp").await, 0);
    });
}

#[test]
fn a_suspended_account_cannot_complete_a_login() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, ADA).await;
        let (secret, _) = add_app(t, &ada).await;
        let token = half(t).await;
        printed(t, &["accounts", "suspend", ADA]);
        let refused = complete(t, &token, &shown(&secret)).await;
        refused.is_error(401, "invalid_credentials");
    });
}

#[test]
fn codes_from_all_clients_together_are_counted_by_account() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, ADA).await;
        let (secret, recovery) = add_app(t, &ada).await;
        let mut tries = 0;
        loop {
            let address = format!("192.0.2.{}", 20 + tries);
            let body = json!({"email": ADA, "password": PASSWORD});
            let error = post_from(t, "/v1/auth/login", body, &address).await;
            let error = error.is_error(403, "code_required");
            let token = error["login_token"].as_str().expect("a token");
            if complete_from(t, token, &wrong(&secret), &address).await.status == 429 {
                break;
            }
            tries += 1;
        }
        assert!((18..=20).contains(&tries), "{tries}");
        // It cannot be guessed, and lets its owner in.
        complete_from(t, &half(t).await, &recovery[0], "192.0.2.99").await.is(200);
    });
}
