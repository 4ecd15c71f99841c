//! Keys that are bound to queues and job types: they reach those alone, and nothing else.

use fencepost_domain::{access::Scope, binding::KeyBinding};
use serde_json::{Value, json};

use crate::{
    harness::{Reply, TestProject, run, run_alone},
    surface,
};

/// Operations that a bound key may call.
const BOUND_OPERATIONS: [&str; 11] = [
    "jobs_create",
    "jobs_create_batch",
    "limits_list",
    "workers_ack",
    "workers_ack_batch",
    "workers_deregister",
    "workers_events",
    "workers_heartbeat",
    "workers_logs",
    "workers_poll",
    "workers_register",
];

/// One of these more, whose body names the queue that the key is bound to.
const WORKFLOWS_CREATE: &str = "workflows_create";

async fn bound(t: &TestProject, queues: &[&str], job_types: &[&str]) -> TestProject {
    let mut body = json!({"name": "bound"});
    for (field, names) in [("queues", queues), ("job_types", job_types)] {
        if !names.is_empty() {
            body[field] = json!(names);
        }
    }
    with(t, &t.post("/v1/keys", body).await.is(201))
}

fn with(t: &TestProject, made: &Value) -> TestProject {
    t.with_key(made["secret"].as_str().expect("a key"))
}

/// Leases the one job of a queue.
async fn lease_of(t: &TestProject, worker: &str, queue: &str) -> Value {
    let poll = json!({"worker_id": worker, "queues": [queue], "wait_seconds": 0});
    t.polled(poll).await.pop().expect("a job to lease")
}

#[test]
fn a_key_is_bound_for_its_life_and_has_no_scope_that_would_lead_around_it() {
    run(async |t| {
        let body = json!({"name": "b", "queues": ["sms", "mail", "sms"], "job_types": ["send"]});
        let made = t.post("/v1/keys", body).await.is(201);
        let key = &made["key"];
        assert_eq!(key["queues"], json!(["mail", "sms"]));
        assert_eq!(key["job_types"], json!(["send"]));
        assert_eq!(key["scopes"], json!(["produce", "work", "payload:read"]));
        let path = format!("/v1/keys/{}", key["id"].as_str().expect("an id"));
        let rotated = t.act(&format!("{path}/rotate")).await.is(201);
        for field in ["queues", "job_types", "scopes"] {
            assert_eq!(rotated["key"][field], key[field], "{field}");
            assert_eq!(t.get(&path).await.is(200)[field], key[field], "{field}");
        }
        let renamed = t.patch(&path, json!({"name": "c", "queues": []})).await;
        renamed.is_error(400, "invalid_request");
        let free = t.post("/v1/keys", json!({"name": "free"})).await.is(201);
        assert_eq!((&free["key"]["queues"], &free["key"]["job_types"]), (&json!([]), &json!([])));
        let bound_ones = KeyBinding::SCOPES.map(Scope::name);
        for scope in ["read", "manage", "schedules", "keys"] {
            assert!(!bound_ones.contains(&scope));
            let body = json!({"name": "b", "queues": ["mail"], "scopes": ["work", scope]});
            t.post("/v1/keys", body).await.refuses("scopes");
        }
        let many = |count: usize| (0..count).map(|it| format!("n{it}")).collect::<Vec<_>>();
        t.post("/v1/keys", json!({"name": "b", "queues": many(20)})).await.is(201);
        t.post("/v1/keys", json!({"name": "b", "queues": many(21)})).await.refuses("queues");
        t.post("/v1/keys", json!({"name": "b", "job_types": many(100)})).await.is(201);
        t.post("/v1/keys", json!({"name": "b", "job_types": many(101)})).await.refuses("job_types");
        t.post("/v1/keys", json!({"name": "b", "queues": [""]})).await.refuses("queues[0]");
        // A list that came out empty must not make a key for everything.
        t.post("/v1/keys", json!({"name": "b", "queues": []})).await.refuses("queues");
    });
}

#[test]
fn a_bound_key_enqueues_into_its_queues_alone_by_whatever_way() {
    run(async |t| {
        let other = t.enqueue(json!({"queue": "billing"})).await;
        let key = bound(t, &["mail"], &["send"]).await;
        let job = |queue: &str, job_type: &str| json!({"queue": queue, "job_type": job_type});
        let own = key.post("/v1/jobs", job("mail", "send")).await.is(201);
        let refused = key.post("/v1/jobs", job("billing", "send")).await.is_error(403, "forbidden");
        assert_eq!(refused["message"], "this API key is not for the queue `billing`");
        key.post("/v1/jobs", json!({"job_type": "send"})).await.is_error(403, "forbidden");
        let refused = key.post("/v1/jobs", job("mail", "pay")).await.is_error(403, "forbidden");
        assert_eq!(refused["message"], "this API key is not for the job_type `pay`");
        let both = json!({"jobs": [job("mail", "send"), job("billing", "send")]});
        key.post("/v1/jobs/batch", both).await.is_error(403, "forbidden");
        let with = |field: &str, value: Value| {
            let mut job = job("mail", "send");
            job[field] = value;
            job
        };
        let deep = with("on_failure", job("mail", "pay"));
        key.post("/v1/jobs", with("on_success", deep)).await.is_error(403, "forbidden");
        let nested = with("on_success", with("on_complete", job("mail", "send")));
        key.post("/v1/jobs", nested).await.is(201);
        for parent in [&other, "job_01m7w3ha3aextt8pkwwdmxsmqw"] {
            let below = with("depends_on", json!([parent]));
            let message = key.post("/v1/jobs", below).await.refuses("depends_on[0]");
            assert_eq!(message, format!("the project has no job {parent}"));
            key.post("/v1/jobs", with("parent_job_id", json!(parent)))
                .await
                .refuses("parent_job_id");
        }
        key.post("/v1/jobs", with("depends_on", json!([own["id"]]))).await.is(201);
        // Jobs of other queues share these.
        let batch = t.post("/v1/batches", json!({})).await.is(201)["id"].clone();
        for (field, value) in
            [("unique", json!({"key": "k"})), ("concurrency_key", json!("k")), ("batch_id", batch)]
        {
            key.post("/v1/jobs", with(field, value)).await.refuses(field);
        }
        let graph = |queue: &str| {
            json!({"jobs": [
                {"key": "a", "queue": "mail", "job_type": "send"},
                {"key": "b", "queue": queue, "job_type": "send", "depends_on": ["a"]},
            ]})
        };
        key.post("/v1/workflows", graph("mail")).await.is(201);
        key.post("/v1/workflows", graph("billing")).await.is_error(403, "forbidden");
        let of_billing = t.get("/v1/jobs?queue=billing").await.is(200);
        let of_billing = of_billing["jobs"].as_array().map(Vec::len);
        assert_eq!(of_billing, Some(1), "nothing of a refused call is stored");
    });
}

#[test]
fn a_worker_with_a_bound_key_touches_only_jobs_of_its_queues_and_types() {
    run_alone(async |t| {
        let key = bound(t, &["mail"], &["send"]).await;
        let poll = |queues: Value, types: Value| json!({"worker_id": "w", "queues": queues, "job_types": types, "wait_seconds": 0});
        t.enqueue(json!({"queue": "mail", "job_type": "pay"})).await;
        t.enqueue(json!({"queue": "mail", "job_type": "send"})).await;
        let both = poll(json!(["mail", "billing"]), json!([]));
        key.post("/v1/workers/poll", both).await.is_error(403, "forbidden");
        let other = poll(json!(["mail"]), json!(["pay"]));
        key.post("/v1/workers/poll", other).await.is_error(403, "forbidden");
        let got = key.polled(json!({
            "worker_id": "w", "queues": ["mail"], "capacity": 5, "wait_seconds": 0,
        }));
        let got = got.await;
        assert_eq!(got.len(), 1);
        assert_eq!(got[0]["job_type"], "send");
        key.heartbeat(&got[0], "w").await.is(200);
        key.ack(&got[0], "w", "succeeded").await.is(200);
        key.ack(&got[0], "w", "succeeded").await.is(200);

        // The job of another queue looks as if it were not there, whatever is shown.
        t.enqueue(json!({"queue": "billing", "job_type": "send"})).await;
        t.enqueue(json!({"queue": "mail", "job_type": "send"})).await;
        let foreign = lease_of(t, "w", "billing").await;
        let own = lease_of(&key, "w", "mail").await;
        key.ack(&foreign, "w", "succeeded").await.is_error(404, "job_not_found");
        key.heartbeat(&foreign, "w").await.is_error(404, "job_not_found");
        let (job_id, attempt) = (&foreign["id"], 1);
        let event = json!({"job_id": job_id, "attempt": attempt, "type": "t"});
        let events = json!({"worker_id": "w", "events": [event]});
        key.post("/v1/workers/events", events).await.is_error(404, "job_not_found");
        let chunk = json!({
            "job_id": job_id, "attempt": attempt, "sequence": 0, "data": "x", "timestamp_ms": 0,
        });
        let chunks = json!({"worker_id": "w", "chunks": [chunk]});
        key.post("/v1/workers/logs", chunks).await.is_error(404, "job_not_found");
        let beat = json!({"worker_id": "w", "active_job_ids": [own["id"], job_id]});
        let beaten = key.post("/v1/workers/heartbeat", beat).await.is(200);
        assert_eq!(beaten["jobs"][0]["status"], "ok");
        assert_eq!(beaten["jobs"][1]["status"], "lost");
        let acks = json!({"acks": [
            TestProject::ack_body(&foreign, "w", "failed"),
            TestProject::ack_body(&own, "w", "succeeded"),
        ]});
        let results = key.post("/v1/workers/ack/batch", acks).await.is(200);
        assert_eq!(results["results"][0]["error"]["code"], "job_not_found");
        assert_eq!(results["results"][1]["action"], "done");
        let id = foreign["id"].as_str().expect("an id");
        assert_eq!(t.job(id).await["state"], "processing");
        t.ack(&foreign, "w", "succeeded").await.is(200);
    });
}

#[test]
fn a_bound_key_cannot_name_the_worker_of_another_key() {
    run_alone(async |t| {
        let key = bound(t, &["mail"], &["send"]).await;
        t.enqueue(json!({"queue": "billing", "job_type": "send"})).await;
        let foreign = lease_of(t, "w", "billing").await;
        for state in ["quiet", "terminate", "running"] {
            let beat = json!({"worker_id": "w", "state": state});
            key.post("/v1/workers/heartbeat", beat).await.is(200);
        }
        let register = |queues: Value| json!({"worker_id": "w", "queues": queues, "job_types": []});
        key.post("/v1/workers/register", register(json!(["billing"])))
            .await
            .is_error(403, "forbidden");
        key.post("/v1/workers/register", register(json!(["mail"]))).await.is(200);
        let ended = key.post("/v1/workers/deregister", json!({"worker_id": "w"})).await.is(200);
        assert_eq!(ended["released"], 0);
        let workers = t.get("/v1/workers?queue=mail").await.is(200);
        let name = workers["workers"][0]["worker_id"].as_str().expect("a worker").to_owned();
        assert!(name.starts_with("w@"), "{name}");
        // The other worker has lost nothing, and gets more.
        t.ack(&foreign, "w", "succeeded").await.is(200);
        t.enqueue(json!({"queue": "billing", "job_type": "send"})).await;
        lease_of(t, "w", "billing").await;
    });
}

#[test]
fn a_repeated_poll_shows_a_bound_key_no_job_of_another_queue() {
    run(async |t| {
        let key = bound(t, &["mail"], &[]).await;
        t.enqueue(json!({"queue": "billing"})).await;
        let poll = |queue: &str| {
            json!({
                "worker_id": "w", "queues": [queue], "wait_seconds": 0,
                "poll_id": "0190f5fe-7c00-7a00-8000-000000000001",
            })
        };
        assert_eq!(t.polled(poll("billing")).await.len(), 1);
        assert_eq!(key.polled(poll("mail")).await.len(), 0);
        assert_eq!(t.polled(poll("billing")).await.len(), 1, "it keeps its lease");
    });
}

#[test]
fn an_idempotency_key_reveals_nothing_between_bound_keys() {
    run(async |t| {
        let key = bound(t, &["mail"], &[]).await;
        let post = async |by: &TestProject, body: Value| {
            let request = by.request(reqwest::Method::POST, "/v1/jobs").json(&body);
            let request = request.header("idempotency-key", "same");
            Reply::of(request.send().await.expect("an answer")).await
        };
        let billing = json!({"queue": "billing", "job_type": "t"});
        post(t, billing.clone()).await.is(201);
        post(&key, billing).await.is_error(409, "idempotency_key_reuse");
        let shared = json!({"queue": "mail", "job_type": "t", "concurrency_key": "k"});
        let post = async |by: &TestProject, body: &Value| {
            let request = by.request(reqwest::Method::POST, "/v1/jobs").json(body);
            let request = request.header("idempotency-key", "other");
            Reply::of(request.send().await.expect("an answer")).await
        };
        post(&key, &shared).await.refuses("concurrency_key");
        post(t, &shared).await.is(201);
        post(&key, &shared).await.is_error(409, "idempotency_key_reuse");
    });
}

#[test]
fn no_other_operation_takes_a_bound_key_and_no_other_protocol() {
    run(async |t| {
        let job = t.enqueue(json!({})).await;
        let key = bound(t, &["default"], &["t"]).await;
        let mut allowed = Vec::new();
        for operation in surface::operations(&job) {
            // Streams and pages of accounts take sessions.
            if operation.is_public || operation.scopes.is_none() {
                continue;
            }
            let reply = operation.under(&t.id).call(t, Some(&key.api_key), "192.0.2.1").await;
            if !(reply.status == 403 && reply.text.contains("this operation requires")) {
                allowed.push(operation.id);
            }
        }
        allowed.retain(|it| it != WORKFLOWS_CREATE);
        allowed.sort();
        assert_eq!(allowed, BOUND_OPERATIONS);
        for path in ["/ojs/v1/jobs", "/ojs/v1/workers/fetch"] {
            let body = json!({"type": "t", "args": [], "queues": ["default"]});
            let refused = key.post(path, body).await;
            assert_eq!(refused.status, 403, "{path}: {}", refused.text);
        }
    });
}
