//! Who may call what: every operation, with every kind of credential; and what one project can see
//! of another: nothing.

use std::collections::HashMap;

use fencepost_domain::access::{Role, Scope};
use fencepost_identity::accounts::key;

use crate::{
    harness::{Reply, TestProject, TestServer, fresh_database, limited, run, run_alone},
    people::Person,
    surface::{Named, Operation, operations, operations_on},
};
use serde_json::{Value, json};

/// Whether the caller was let in, whatever came of it.
fn is_let_in(reply: &Reply) -> bool {
    if reply.text.is_empty() || reply.status.is_success() {
        return reply.status.is_success();
    }
    let code = reply.json()["error"]["code"].clone();
    let is_kept_out =
        ["unauthorized", "forbidden", "project_not_found"].iter().any(|it| code == *it);
    assert!(!reply.status.is_server_error(), "{}", reply.text);
    !is_kept_out
}

/// Where a call seems to come from: each from elsewhere, so that none meets a limit.
fn elsewhere() -> String {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    format!("10.{}.{}.{}", number >> 16 & 255, number >> 8 & 255, number & 255)
}

async fn call(t: &TestProject, operation: &Operation, credential: Option<&str>) -> Reply {
    operation.call(t, credential, &elsewhere()).await
}

/// As it is called with a key: a scoped path names the key's project.
fn with_key(t: &TestProject, operation: &Operation) -> Operation {
    if operation.is_scoped() { operation.under(&t.id) } else { operation.clone() }
}

#[test]
fn no_operation_lets_anybody_in_without_a_live_credential() {
    run_alone(async |t| {
        let id = t.enqueue(json!({})).await;
        let stranger = key::generate("live");
        let revoked = t.post("/v1/keys", json!({"name": "k"})).await.is(201);
        let key_id = revoked["key"]["id"].as_str().expect("an id").to_owned();
        t.delete(&format!("/v1/keys/{key_id}")).await.is_empty(204);
        let expired = t.post("/v1/keys", json!({"name": "k"})).await.is(201);
        let expired_id = expired["key"]["id"].as_str().expect("an id");
        t.database
            .execute("update api_keys set expires_at = now() - interval '1 s' where name = 'k'")
            .await;
        assert_eq!(t.get(&format!("/v1/keys/{expired_id}")).await.is(200)["state"], "expired");
        let person = Person::sign_up(t, "gone@example.com").await;
        person.post("/v1/auth/logout", json!({})).await.is_empty(204);
        let secret = |it: &Value| it["secret"].as_str().expect("a key").to_owned();
        let bad = [
            None,
            Some("junk".to_owned()),
            Some(String::new()),
            Some(stranger),
            Some(t.api_key[1..].to_owned()),
            Some(secret(&revoked)),
            Some(secret(&expired)),
            Some(person.access_token.clone()),
            Some(format!("{}x", person.access_token)),
            Some(person.refresh_token.clone()),
        ];
        for operation in operations(&id).iter().filter(|it| !it.is_public) {
            for credential in &bad {
                let reply = call(t, &with_key(t, operation), credential.as_deref()).await;
                reply.is_error(401, "unauthorized");
            }
        }
        assert_eq!(t.job(&id).await["state"], "pending");
    });
}

#[test]
fn a_cookie_opens_nothing_and_no_other_origin_is_let_in() {
    run(async |t| {
        let url = format!("{}/v1/jobs", t.url);
        let cookie = format!("fp={0}; __Host-fp={0}; session={0}", t.api_key);
        let request = t.client.get(&url).header("cookie", cookie);
        Reply::of(request.send().await.expect("an answer")).await.is_error(401, "unauthorized");
        let preflight = t
            .client
            .request(reqwest::Method::OPTIONS, &url)
            .header("origin", "https://evil.example")
            .header("access-control-request-method", "GET");
        let reply = Reply::of(preflight.send().await.expect("an answer")).await;
        reply.is_error(405, "method_not_allowed");
        let get =
            t.client.get(&url).bearer_auth(&t.api_key).header("origin", "https://evil.example");
        let reply = Reply::of(get.send().await.expect("an answer")).await;
        let headers = preflight_headers(&reply);
        assert!(headers.is_empty(), "{headers:?}");
    });
}

fn preflight_headers(reply: &Reply) -> Vec<String> {
    let names = reply.headers.keys().map(|it| it.as_str().to_owned());
    names.filter(|it| it.starts_with("access-control-")).collect()
}

#[test]
fn a_key_may_do_what_its_scopes_say_and_nothing_else() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let mut keys = HashMap::new();
        for scope in Scope::ALL {
            let made = t.post("/v1/keys", json!({"name": "k", "scopes": [scope]})).await.is(201);
            keys.insert(scope, made["secret"].as_str().expect("a key").to_owned());
        }
        let mut cells = 0;
        for operation in operations(&id) {
            for (scope, secret) in &keys {
                let reply = call(t, &with_key(t, &operation), Some(secret)).await;
                let may = match &operation.scopes {
                    Some(scopes) => scopes.contains(scope),
                    None => operation.is_public,
                };
                let what = format!("{} with {scope:?}: {}", operation.id, reply.text);
                assert_eq!(is_let_in(&reply), may, "{what}");
                if !may {
                    reply.is_error(403, "forbidden");
                }
                cells += 1;
            }
        }
        assert!(cells >= 280, "every operation was tried with every scope: {cells}");
    });
}

#[test]
fn a_member_may_do_what_their_role_says_and_nothing_else() {
    run_alone(async |t| {
        let id = t.enqueue(json!({})).await;
        for role in Role::ALL {
            let person = Person::sign_up(t, &format!("{}@example.com", role.name())).await;
            person.join(t, role).await;
            for operation in operations(&id) {
                // It ends the session, and is tried elsewhere.
                if operation.id == "auth_logout" || operation.is_public {
                    continue;
                }
                let operation = match operation.is_about_account {
                    true => operation,
                    false => operation.under("main"),
                };
                let reply = call(t, &operation, Some(&person.access_token)).await;
                let may =
                    operation.is_about_account || operation.role.is_some_and(|least| role >= least);
                assert_eq!(is_let_in(&reply), may, "{} as {role:?}: {}", operation.id, reply.text);
                if !may {
                    reply.is_error(403, "forbidden");
                }
            }
        }
    });
}

#[test]
fn a_session_must_name_a_project_and_opens_only_those_of_its_account() {
    run_alone(async |t| {
        let id = t.enqueue(json!({"payload": "canary-of-ours"})).await;
        let person = Person::sign_up(t, "stranger@example.com").await;
        for operation in operations(&id) {
            if operation.is_public || operation.is_about_account {
                continue;
            }
            let inside = operation.under("main");
            let reply = call(t, &inside, Some(&person.access_token)).await;
            reply.is_error(404, "project_not_found");
            if !operation.is_scoped() {
                let reply = call(t, &operation, Some(&person.access_token)).await;
                reply.refuses("project");
            }
        }
        assert_eq!(t.job(&id).await["state"], "pending");
    });
}

#[test]
fn no_operation_touches_or_shows_anything_of_another_project() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (ours, theirs) = (server.project("ours").await, server.project("theirs").await);
        let id = ours.enqueue(json!({"payload": "canary-of-ours"})).await;
        ours.lease("w").await;
        let waiting = ours.enqueue(json!({"payload": "canary-of-ours"})).await;
        let before = (ours.job(&id).await, ours.job(&waiting).await);
        let named = everything_of(&ours, &id).await;
        for operation in operations_on(&named) {
            if operation.is_public || operation.is_about_account {
                continue;
            }
            for project in ["ours", ours.id.as_str()] {
                let reply = call(&theirs, &operation.under(project), Some(&theirs.api_key)).await;
                reply.is_error(404, "project_not_found");
            }
            // To put a schedule of that name is to make one of their own.
            if operation.is_scoped() || operation.id == "recurring_upsert" {
                continue;
            }
            let reply = call(&theirs, &operation, Some(&theirs.api_key)).await;
            assert!(!reply.text.contains("canary"), "{operation:?}: {}", reply.text);
            let text = format!("{}{:?}", operation.path, operation.body);
            if text.contains(&id) && operation.path.ends_with("batch") {
                assert_eq!(reply.is(200)["results"][0]["error"]["code"], "job_not_found");
            } else if text.contains(&id) {
                reply.is_error(404, "job_not_found");
            } else if let Some(code) = named.missing_in(&operation.path) {
                reply.is_error(404, code);
            }
        }
        assert_eq!(everything_lives(&ours, &named).await, 6, "nothing of ours is gone");
        assert_eq!((ours.job(&id).await, ours.job(&waiting).await), before);
        server.stop().await;
    });
}

/// One of everything that a path may name.
async fn everything_of(t: &TestProject, job: &str) -> Named {
    let text = |it: &Value| it.as_str().expect("an id").to_owned();
    let graph = json!({"jobs": [{"key": "a", "job_type": "x", "queue": "w"}]});
    let workflow = t.post("/v1/workflows", graph).await.is(201);
    let batch = t.post("/v1/batches", json!({})).await.is(201);
    let operation = t.post("/v1/queues/w/purge", json!({"confirm": "w"})).await.is(202);
    let schedule = json!({"job_type": "t", "cron_expression": "@daily"});
    t.put("/v1/recurring/ours", schedule).await.is(200);
    let worker = json!({"worker_id": "ours", "queues": ["q"], "job_types": ["t"]});
    t.post("/v1/workers/register", worker).await.is(200);
    let keys = t.get("/v1/keys").await.is(200);
    Named {
        workflow: text(&workflow["id"]),
        batch: text(&batch["id"]),
        operation: text(&operation["id"]),
        key: text(&keys["keys"][0]["id"]),
        recurring: "ours".to_owned(),
        worker: "ours".to_owned(),
        ..Named::job(job)
    }
}

/// How many of those are still there, as they were.
async fn everything_lives(t: &TestProject, named: &Named) -> usize {
    let paths = [
        format!("/v1/workflows/{}", named.workflow),
        format!("/v1/batches/{}", named.batch),
        format!("/v1/operations/{}", named.operation),
        format!("/v1/keys/{}", named.key),
        format!("/v1/recurring/{}", named.recurring),
    ];
    for path in &paths {
        t.get(path).await.is(200);
    }
    let workers = t.get("/v1/workers").await.is(200);
    let ours =
        workers["workers"].as_array().expect("workers").iter().find(|it| it["worker_id"] == "ours");
    assert!(ours.expect("the worker")["directive"].is_null());
    paths.len() + 1
}

#[test]
fn every_operation_answers_under_the_project_of_its_key_and_under_no_other() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (ours, theirs) = (server.project("ours").await, server.project("theirs").await);
        let id = ours.enqueue(json!({})).await;
        for operation in operations(&id) {
            if operation.scopes.is_none() {
                continue;
            }
            for project in ["ours", ours.id.as_str()] {
                let reply = call(&ours, &operation.under(project), Some(&ours.api_key)).await;
                if reply.status.as_u16() == 404 {
                    let code = reply.json()["error"]["code"].clone();
                    let is_routed = [
                        "workflow_not_found",
                        "batch_not_found",
                        "worker_not_found",
                        "group_not_found",
                        "shared_limit_not_found",
                        "operation_not_found",
                        "recurring_job_not_found",
                        "key_not_found",
                        "push_not_found",
                        "endpoint_not_found",
                        "delivery_not_found",
                        "alarm_not_found",
                    ];
                    assert!(is_routed.iter().any(|it| code == *it), "{operation:?}: {code}");
                }
                assert!(!reply.status.is_server_error(), "{operation:?}: {}", reply.text);
            }
            for project in ["theirs", theirs.id.as_str(), "nobodys", "%00"] {
                let reply = call(&ours, &operation.under(project), Some(&ours.api_key)).await;
                reply.is_error(404, "project_not_found");
            }
            call(&ours, &operation.under("ours"), None).await.is_error(401, "unauthorized");
        }
        server.stop().await;
    });
}

#[test]
fn a_key_may_come_in_three_ways() {
    run(async |t| {
        let url = format!("{}/v1/jobs", t.url);
        let answer = async |request: reqwest::RequestBuilder| {
            Reply::of(request.send().await.expect("an answer")).await
        };
        let get = || t.client.get(&url);
        answer(get().header("x-api-key", &t.api_key)).await.is(200);
        answer(get().basic_auth("", Some(&t.api_key))).await.is(200);
        answer(get().basic_auth("anybody", Some(&t.api_key))).await.is(200);
        answer(get().basic_auth(&t.api_key, Some(""))).await.is(200);
        answer(get().header("authorization", format!("bearer  {}", t.api_key))).await.is(200);
        for junk in ["Bearer", "Basic !!", "Basic eA==", "Digest x", &t.api_key] {
            answer(get().header("authorization", junk)).await.is_error(401, "unauthorized");
        }
        answer(get().header("x-api-key", "ä")).await.is_error(401, "unauthorized");
    });
}
