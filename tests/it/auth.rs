//! Who may call, and what one project can see of another: nothing.

use fencepost::{
    auth::key,
    http::openapi,
    ids::{OperationId, WorkflowId},
};
use reqwest::Method;
use serde_json::{Value, json};

use crate::harness::{Reply, TestProject, TestServer, fresh_database, limited, run};

/// Every operation of the OpenAPI file, with a body that passes its checks and the job `id` in it.
fn operations(id: &str) -> Vec<(Method, String, Option<Value>)> {
    let mut operations = Vec::new();
    let paths = openapi::document()["paths"].as_object().expect("paths");
    for (path, methods) in paths {
        for method in methods.as_object().expect("methods").keys() {
            let body = match (method.as_str(), path.as_str()) {
                ("get" | "delete", _) => None,
                (_, path) if is_bare(path) => None,
                ("post", "/v1/jobs") => Some(json!({"job_type": "t"})),
                ("post", "/v1/jobs/batch") => Some(json!({"jobs": [{"job_type": "t"}]})),
                ("post", "/v1/workers/register") => {
                    Some(json!({"worker_id": "w", "queues": [], "job_types": []}))
                }
                ("post", "/v1/workers/poll") => {
                    Some(json!({"worker_id": "w", "queues": ["default"], "wait_seconds": 0}))
                }
                ("post", "/v1/workers/heartbeat") => Some(json!({"job_id": id, "worker_id": "w"})),
                ("post", "/v1/workers/ack") => {
                    Some(json!({"job_id": id, "worker_id": "w", "status": "succeeded"}))
                }
                ("post", "/v1/workers/ack/batch") => {
                    Some(json!({"acks": [{"job_id": id, "worker_id": "w", "status": "succeeded"}]}))
                }
                ("patch", "/v1/jobs/{job_id}") => Some(json!({"priority": 1})),
                ("patch", "/v1/queues/{queue}") => Some(json!({"max_concurrency": 5})),
                ("put", "/v1/recurring/{recurring_id}") | ("post", "/v1/recurring") => {
                    Some(json!({"job_type": "t", "cron_expression": "@daily"}))
                }
                ("post", "/v1/recurring/preview") => Some(json!({"cron_expression": "@daily"})),
                ("post", "/v1/queues/{queue}/purge") => Some(json!({"confirm": "default"})),
                ("post", "/v1/dead-letters/retry") => Some(json!({"filter": {}})),
                ("post", "/v1/dead-letters/purge") => {
                    Some(json!({"filter": {}, "confirm": "purge"}))
                }
                ("post", "/v1/workflows") => Some(json!({"jobs": [{"key": "a", "job_type": "t"}]})),
                ("post", "/v1/workers/deregister") => Some(json!({"worker_id": "w"})),
                ("post", "/v1/workers/events") => Some(json!({
                    "worker_id": "w", "events": [{"job_id": id, "attempt": 1, "type": "t"}],
                })),
                ("post", "/v1/workers/logs") => Some(json!({"worker_id": "w", "chunks": [
                    {"job_id": id, "attempt": 1, "sequence": 0, "data": "x", "timestamp_ms": 0},
                ]})),
                (method, path) => panic!("{method} {path}: say here what its body is"),
            };
            let method = method.to_uppercase().parse().expect("a method");
            let path = path
                .replace("{job_id}", id)
                .replace("{workflow_id}", &WorkflowId::generate().to_string())
                .replace("{operation_id}", &OperationId::generate().to_string())
                .replace("{worker_id}", "w")
                .replace("{recurring_id}", "r")
                .replace("{queue}", "default");
            operations.push((method, path, body));
        }
    }
    assert!(operations.len() >= 25, "the document lists the operations");
    operations
}

/// Operations that need no body.
fn is_bare(path: &str) -> bool {
    const BARE: [&str; 8] =
        ["/cancel", "}/retry", "/quiet", "/terminate", "/pause", "/resume", "/abort", "/run"];
    BARE.iter().any(|it| path.ends_with(it))
}

async fn call(
    t: &TestProject,
    (method, path, body): &(Method, String, Option<Value>),
    api_key: Option<&str>,
) -> Reply {
    let mut request = t.client.request(method.clone(), format!("{}{path}", t.url));
    if let Some(api_key) = api_key {
        request = request.bearer_auth(api_key);
    }
    if let Some(body) = body {
        request = request.json(body);
    }
    Reply::of(request.send().await.expect("an answer")).await
}

#[test]
fn no_operation_answers_without_a_live_key() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let stranger = key::generate();
        for operation in operations(&id) {
            for bad in
                [None, Some("junk"), Some(""), Some(stranger.as_str()), Some(&t.api_key[1..])]
            {
                call(t, &operation, bad).await.is_error(401, "unauthorized");
            }
        }
        assert_eq!(t.job(&id).await["state"], "pending");
    });
}

#[test]
fn no_operation_touches_or_shows_a_job_of_another_project() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (ours, theirs) = (server.project("ours").await, server.project("theirs").await);
        let id = ours.enqueue(json!({"payload": "canary-of-ours"})).await;
        ours.lease("w").await;
        let waiting = ours.enqueue(json!({"payload": "canary-of-ours"})).await;
        let before = (ours.job(&id).await, ours.job(&waiting).await);
        for operation in operations(&id) {
            let reply = call(&theirs, &operation, Some(&theirs.api_key)).await;
            assert!(!reply.text.contains("canary"), "{operation:?}: {}", reply.text);
            let names_the_job = operation.1.contains(&id)
                || operation.2.as_ref().is_some_and(|it| it.to_string().contains(&id));
            if names_the_job && operation.1.ends_with("batch") {
                assert_eq!(reply.is(200)["results"][0]["error"]["code"], "job_not_found");
            } else if names_the_job {
                reply.is_error(404, "job_not_found");
            }
        }
        assert_eq!((ours.job(&id).await, ours.job(&waiting).await), before);
        server.stop().await;
    });
}

#[test]
fn every_operation_answers_under_the_project_of_its_key_and_under_no_other() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (ours, theirs) = (server.project("ours").await, server.project("theirs").await);
        let id = ours.enqueue(json!({})).await;
        for (method, path, body) in operations(&id) {
            let under = |project: &str| {
                let path = path.replacen("/v1/", &format!("/v1/projects/{project}/"), 1);
                (method.clone(), path, body.clone())
            };
            for project in ["ours", ours.id.as_str()] {
                let reply = call(&ours, &under(project), Some(&ours.api_key)).await;
                if reply.status.as_u16() == 404 {
                    let code = reply.json()["error"]["code"].clone();
                    let is_routed = [
                        "workflow_not_found",
                        "worker_not_found",
                        "operation_not_found",
                        "recurring_job_not_found",
                    ];
                    assert!(is_routed.iter().any(|it| code == *it), "{path}: {code}");
                }
                assert!(!reply.status.is_server_error(), "{path}: {}", reply.text);
            }
            for project in ["theirs", theirs.id.as_str(), "nobodys", "%00"] {
                let reply = call(&ours, &under(project), Some(&ours.api_key)).await;
                reply.is_error(404, "project_not_found");
            }
            call(&ours, &under("ours"), None).await.is_error(401, "unauthorized");
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
