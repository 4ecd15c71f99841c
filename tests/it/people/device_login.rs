//! The login of a terminal: a code that its person approves, and a key.

use fencepost_domain::access::Role;
use fencepost_identity::accounts;
use fencepost_store::sweep::purge;

use super::{PASSWORD, Person, post_from, second_factor::age_sessions};
use crate::harness::{
    LoneProject, Reply, TestProject, TestServer, fresh_database, limited, run_alone,
};
use serde_json::{Value, json};

const TERMINAL: &str = "192.0.2.50";
/// Accounts that are deleted while their key is collected; fewer than an address may log in.
const RACES: u32 = 8;

async fn begin(t: &TestProject) -> Value {
    post_from(t, "/v1/auth/device", json!({"name": "cli@lovelace"}), TERMINAL).await.is(201)
}

async fn collect(t: &TestProject, begun: &Value) -> Reply {
    let body = json!({"device_code": begun["device_code"]});
    post_from(t, "/v1/auth/device/key", body, TERMINAL).await
}

fn approval(begun: &Value) -> Value {
    json!({"user_code": begun["user_code"], "preset": "full"})
}

fn shown(begun: &Value) -> Value {
    json!({"user_code": begun["user_code"]})
}

/// Begins a login, and has it approved for the project of the test.
async fn approved(t: &TestProject, by: &Person) -> Value {
    let begun = begin(t).await;
    let path = format!("/v1/projects/{}/devices/approve", t.id);
    by.post(&path, approval(&begun)).await.is_empty(204);
    begun
}

async fn keys_of_terminals(t: &LoneProject) -> i64 {
    t.database.number("select count(*) from api_keys where name = 'cli@lovelace'").await
}

fn devices(person: &Person) -> String {
    let project = person.made["project"]["id"].as_str().expect("an id");
    format!("/v1/projects/{project}/devices/approve")
}

#[test]
fn a_terminal_gets_a_key_once_its_person_has_approved_it() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, "ada@example.com").await;
        let begun = begin(t).await;
        let page = begun["verification_uri"].as_str().expect("a page");
        assert!(page.ends_with("/console/device"), "{page}");
        let user_code = begun["user_code"].as_str().expect("a code");
        assert_eq!(begun["verification_uri_complete"], format!("{page}?code={user_code}"));
        let waits = json!({"project": null, "email": null, "api_key": null});
        assert_eq!(collect(t, &begun).await.is(200), waits);
        let seen = ada.post("/v1/auth/device/preview", shown(&begun)).await.is(200);
        assert_eq!((&seen["name"], &seen["address"]), (&json!("cli@lovelace"), &json!(TERMINAL)));
        let typed = user_code.to_lowercase().replace('-', "");
        let approval = json!({"user_code": typed, "preset": "worker"});
        ada.post(&devices(&ada), approval.clone()).await.is_empty(204);
        ada.post(&devices(&ada), approval).await.refuses("user_code");
        ada.post("/v1/auth/device/preview", shown(&begun)).await.refuses("user_code");
        let collected = collect(t, &begun).await.is(200);
        assert_eq!(collected["project"]["id"], ada.made["project"]["id"]);
        assert_eq!(collected["email"], "ada@example.com");
        let key = &collected["api_key"]["key"];
        assert_eq!((&key["name"], &key["scopes"]), (&json!("cli@lovelace"), &json!(["work"])));
        assert_eq!(key["created_by"], ada.account_id.as_str());
        let days = "select extract(day from max(expires_at) - now())::bigint from api_keys \
                    where name = 'cli@lovelace'";
        assert_eq!(t.database.number(days).await, 89, "ninety, but for a moment");
        let secret = collected["api_key"]["secret"].as_str().expect("a key");
        let list = t.client.get(format!("{}/v1/keys", t.url)).bearer_auth(secret).send().await;
        Reply::of(list.expect("an answer")).await.is_error(403, "forbidden");
        collect(t, &begun).await.refuses("device_code");
        let audit = format!(
            "select count(*) from audit_log where action = 'key.created' \
                             and target = '{}' and address = '{TERMINAL}'",
            key["id"].as_str().expect("an id")
        );
        assert_eq!(t.database.number(&audit).await, 1);
    });
}

#[test]
fn a_code_is_approved_by_those_who_may_create_keys_and_have_proved_who_they_are() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, "ada@example.com").await;
        let begun = begin(t).await;
        t.post("/v1/auth/device/preview", shown(&begun)).await.is_error(403, "forbidden");
        let project = t.id.clone();
        let with_key = format!("/v1/projects/{project}/devices/approve");
        t.post(&with_key, approval(&begun)).await.is_error(403, "forbidden");
        let bob = Person::sign_up(t, "bob@example.com").await;
        bob.post(&with_key, approval(&begun)).await.is_error(404, "project_not_found");
        ada.join(t, Role::Member).await;
        ada.post(&with_key, approval(&begun)).await.is_error(403, "forbidden");
        age_sessions(t).await;
        ada.post(&devices(&ada), approval(&begun)).await.is_error(403, "step_up_required");
        assert!(collect(t, &begun).await.is(200)["api_key"].is_null());
        assert_eq!(keys_of_terminals(t).await, 0);
    });
}

#[test]
fn an_approval_ends_with_the_rights_and_the_session_of_its_user() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, "ada@example.com").await;
        ada.join(t, Role::Admin).await;
        let begun = approved(t, &ada).await;
        t.database.execute("update members set role = 'member' where role = 'admin'").await;
        collect(t, &begun).await.is_error(403, "forbidden");
        t.database.execute("delete from members where role = 'member'").await;
        collect(t, &begun).await.is_error(404, "project_not_found");
        ada.join(t, Role::Admin).await;
        t.database.execute("update projects set suspended_at = now() where slug = 'main'").await;
        collect(t, &begun).await.is_error(403, "suspended");
        t.database.execute("update projects set suspended_at = null").await;
        t.database.execute("update projects set overrides = '{\"keys\": 1}'").await;
        collect(t, &begun).await.is_error(429, "quota_exceeded");
        t.database.execute("update projects set overrides = null").await;
        let late = approved(t, &ada).await;
        t.database.execute("update device_logins set expires_at = now()").await;
        collect(t, &late).await.refuses("device_code");
        let begun = approved(t, &ada).await;
        ada.post("/v1/auth/logout", json!({})).await.is_empty(204);
        collect(t, &begun).await.refuses("device_code");
        assert_eq!(keys_of_terminals(t).await, 0);
    });
}

#[test]
fn terminals_that_collect_at_once_get_one_key() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, "ada@example.com").await;
        ada.join(t, Role::Admin).await;
        let begun = approved(t, &ada).await;
        let all = (0..8).map(|_| collect(t, &begun));
        let all = futures_util::future::join_all(all).await;
        let gotten = all.iter().filter(|it| it.status.is_success());
        assert_eq!(gotten.count(), 1);
        assert_eq!(keys_of_terminals(t).await, 1);
    });
}

#[test]
fn a_refused_terminal_gets_no_key_and_an_approval_is_reported() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project("main").await;
        let ada = Person::sign_up(&t, "ada@example.com").await;
        ada.join(&t, Role::Admin).await;
        let begun = begin(&t).await;
        ada.post("/v1/auth/device/refuse", shown(&begun)).await.is_empty(204);
        collect(&t, &begun).await.refuses("device_code");
        ada.post("/v1/auth/device/refuse", shown(&begun)).await.refuses("user_code");
        approved(&t, &ada).await;
        let reported = "A terminal was logged in with your account";
        while server.next_mail().await.subject != reported {}
        let log = ada.get("/v1/me/security-log").await.is(200);
        let entries = log["entries"].as_array().expect("entries");
        assert!(entries.iter().any(|it| it["action"] == "device.approved"), "{log}");
        let audit = t.get("/v1/audit-log").await.is(200);
        let entries = audit["entries"].as_array().expect("entries");
        let entry = entries.iter().find(|it| it["action"] == "device.approved");
        let entry = entry.expect("an entry");
        assert_eq!(entry["actor"]["id"], ada.account_id.as_str());
        assert_eq!(entry["after"]["address"], TERMINAL);
        server.stop().await;
    });
}

#[test]
fn codes_are_bounded_and_cannot_be_guessed() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, "ada@example.com").await;
        for wrong in ["", "BCDF-GHJK", "nonsense", "BCDF-GHJK-LMNP"] {
            let body = json!({"user_code": wrong});
            ada.post("/v1/auth/device/preview", body).await.refuses("user_code");
        }
        for wrong in ["", "fp_device_x", "fp_live_x"] {
            let body = json!({"device_code": wrong});
            post_from(t, "/v1/auth/device/key", body, TERMINAL).await.refuses("device_code");
        }
        for wrong in ["", "Support, approved by IT"] {
            let body = json!({"name": wrong});
            post_from(t, "/v1/auth/device", body, TERMINAL).await.refuses("name");
        }
        for _ in 0..accounts::DEVICE_LOGINS_PER_ADDRESS.count {
            begin(t).await;
        }
        let body = json!({"name": "one-too-many"});
        let refused = post_from(t, "/v1/auth/device", body, TERMINAL).await;
        refused.is_error(429, "rate_limit_exceeded");
        let mut last = 200;
        for _ in 0..accounts::USER_CODES_PER_ACCOUNT.count {
            let body = json!({"user_code": "BCDF-GHJK"});
            last = ada.post("/v1/auth/device/preview", body).await.status.as_u16();
        }
        assert_eq!(last, 429);
    });
}

#[test]
fn logins_that_have_expired_are_deleted_and_no_other_ones() {
    run_alone(async |t| {
        let (old, new) = (begin(t).await, begin(t).await);
        let expire = "update device_logins set expires_at = now() - interval '1 second'
                      where ctid = (select min(ctid) from device_logins)";
        t.database.execute(expire).await;
        let mut conn = t.database.connect().await;
        purge::prune_expired(&mut conn).await.expect("it runs");
        assert_eq!(t.database.number("select count(*) from device_logins").await, 1);
        collect(t, &old).await.refuses("device_code");
        collect(t, &new).await.is(200);
    });
}

#[test]
fn a_key_is_collected_or_not_when_its_account_goes_at_that_moment() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project("main").await;
        for number in 0..RACES {
            let ada = Person::sign_up(&t, &format!("ada-{number}@example.com")).await;
            ada.join(&t, Role::Admin).await;
            let begun = approved(&t, &ada).await;
            let leave = json!({"password": PASSWORD, "revoke_keys": true});
            let (collected, gone) =
                tokio::join!(collect(&t, &begun), ada.post("/v1/me/delete", leave));
            assert!([200, 400, 403, 404].contains(&collected.status.as_u16()), "{collected:?}");
            gone.is_empty(204);
            let live = "select count(*) from api_keys where name = 'cli@lovelace' \
                        and revoked_at is null";
            assert_eq!(t.database.number(live).await, 0, "{collected:?}");
        }
        server.stop().await;
    });
}
