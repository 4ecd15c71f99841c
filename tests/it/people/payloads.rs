//! Payloads are a right of their own: callers without it see the same objects, without payloads,
//! results, error messages and logs.

use fencepost_domain::access::Role;
use serde_json::{Value, json};

use super::Person;
use crate::harness::{TestProject, run, run_alone};

/// What must not be seen.
const SECRET: &str = "s3cret-of-a-customer";

async fn key(t: &TestProject, scopes: &[&str]) -> TestProject {
    let made = t.post("/v1/keys", json!({"name": "k", "scopes": scopes})).await.is(201);
    t.with_key(made["secret"].as_str().expect("a key"))
}

/// A dead letter with the secret in each place that can hold it, and a job that has succeeded.
async fn fill(t: &TestProject) -> (String, String) {
    let secret = json!({ "text": SECRET });
    let job = json!({"job_type": "mail", "payload": secret, "max_attempts": 1});
    let dead = t.enqueue(job).await;
    let job = t.lease("w").await;
    let log = json!({"worker_id": "w", "chunks": [
        {"job_id": dead, "attempt": 1, "sequence": 0, "data": SECRET, "timestamp_ms": 1},
    ]});
    t.post("/v1/workers/logs", log).await.is(200);
    let event = json!({"worker_id": "w", "events": [
        {"job_id": dead, "attempt": 1, "type": "step", "payload": secret},
    ]});
    t.post("/v1/workers/events", event).await.is(200);
    let error = json!({"type": "SmtpError", "message": SECRET, "stack_trace": SECRET});
    t.ack_with(&job, "w", "failed", json!({ "error": error })).await.is(200);
    t.job_becomes(&dead, "dead_letter").await;
    let done = t.enqueue(json!({"job_type": "mail", "payload": secret})).await;
    let job = t.lease("w").await;
    t.ack_with(&job, "w", "succeeded", json!({ "result": secret })).await.is(200);
    let schedule = json!({"job_type": "mail", "cron_expression": "0 0 1 1 *", "payload": secret});
    t.put("/v1/recurring/yearly", schedule).await;
    (dead, done)
}

#[test]
fn a_key_without_the_scope_sees_everything_but_payloads() {
    run(async |t| {
        let (dead, done) = fill(t).await;
        let workflow =
            json!({"input": {"text": SECRET}, "jobs": [{"key": "a", "job_type": "later"}]});
        let workflow = t.post("/v1/workflows", workflow).await.is(201)["id"].clone();
        let workflow = workflow.as_str().expect("an id");
        let retry = json!({"filter": {"job_type": "none"}, "rate_per_second": 1});
        t.post("/v1/dead-letters/retry", retry).await;
        let reader = key(t, &["read"]).await;
        let full = key(t, &["read", "payload:read"]).await;
        let paths = [
            format!("/v1/jobs/{dead}"),
            format!("/v1/jobs/{done}"),
            "/v1/jobs".to_owned(),
            format!("/v1/jobs/{dead}/events"),
            format!("/v1/jobs/{dead}/logs"),
            "/v1/dead-letters".to_owned(),
            "/v1/dead-letters/groups".to_owned(),
            "/v1/recurring".to_owned(),
            "/v1/recurring/yearly".to_owned(),
            format!("/v1/workflows/{workflow}"),
        ];
        for path in &paths {
            let (seen, all) = (reader.get(path).await.is(200), full.get(path).await.is(200));
            assert!(all.to_string().contains(SECRET), "{path}: {all}");
            assert!(!seen.to_string().contains(SECRET), "{path}: {seen}");
            assert!(seen.to_string().contains(r#""redacted":true"#), "{path}: {seen}");
            assert!(!all.to_string().contains(r#""redacted":true"#), "{path}: {all}");
        }
        let job = reader.get(&paths[0]).await.is(200);
        assert_eq!((&job["payload"], &job["redacted"]), (&Value::Null, &json!(true)));
        assert_eq!(job["last_error"]["type"], "SmtpError", "the type is a name, not content");
        assert_eq!(job["attempts"][0]["error"]["message"], Value::Null);
        for path in ["/v1/operations", "/v1/queues", "/v1/workers", "/v1/metrics/summary"] {
            let seen = reader.get(path).await.is(200).to_string();
            assert!(!seen.contains(SECRET), "{path}: {seen}");
        }
    });
}

#[test]
fn streams_show_no_payloads_without_the_scope() {
    run(async |t| {
        let (dead, done) = fill(t).await;
        let reader = key(t, &["read"]).await;
        let read = async |path: String, until: &str| {
            let mut answer = reader.request(reqwest::Method::GET, &path).send().await.expect("one");
            let mut text = String::new();
            while !text.contains(until) {
                let chunk = answer.chunk().await.expect("a part").expect("not the end");
                text += &String::from_utf8_lossy(&chunk);
            }
            assert!(!text.contains(SECRET), "{path}: {text}");
            assert!(text.contains(r#""redacted":true"#), "{path}: {text}");
        };
        read(format!("/v1/jobs/{dead}/events/stream"), "fencepost.dead_lettered").await;
        read(format!("/v1/jobs/{done}/events/stream"), "fencepost.succeeded").await;
        read(format!("/v1/jobs/{dead}/logs/stream"), "stdout").await;
        let mut all = reader
            .request(reqwest::Method::GET, "/v1/events/stream")
            .send()
            .await
            .expect("an answer");
        let id = t.enqueue(json!({"job_type": "mail"})).await;
        t.lease("w").await;
        let event = json!({"worker_id": "w", "events": [
            {"job_id": id, "attempt": 1, "type": "step", "payload": {"text": SECRET}},
        ]});
        t.post("/v1/workers/events", event).await.is(200);
        let mut text = String::new();
        while !text.contains("event: step") || !text.ends_with("\n\n") {
            text += &String::from_utf8_lossy(&all.chunk().await.expect("a part").expect("more"));
        }
        assert!(!text.contains(SECRET) && text.contains(r#""redacted":true"#), "{text}");
    });
}

#[test]
fn answers_to_changes_show_no_payloads_without_the_scope_and_replays_only_with_it() {
    run_alone(async |t| {
        let (dead, _) = fill(t).await;
        let producer = key(t, &["produce", "manage"]).await;
        let retried = producer.act(&format!("/v1/dead-letters/{dead}/retry")).await.is(200);
        assert_eq!((&retried["payload"], &retried["redacted"]), (&Value::Null, &json!(true)));
        let job = json!({"job_type": "a", "payload": {"text": SECRET},
                         "unique": {"key": "u", "on_conflict": "return_existing"}});
        let send = async |by: &TestProject| {
            let request = by.request(reqwest::Method::POST, "/v1/jobs").json(&job);
            let answer = request.header("idempotency-key", "once").send().await.expect("one");
            let is_replay = answer.headers().contains_key("idempotent-replay");
            (is_replay, answer.json::<Value>().await.expect("JSON"))
        };
        let (is_replay, first) = send(t).await;
        assert_eq!((is_replay, &first["payload"]["text"]), (false, &json!(SECRET)));
        let (is_replay, again) = send(t).await;
        assert!(is_replay);
        assert_eq!(again, first, "the payload comes from the job");
        let kept = t.database.text("select body from idempotency_keys").await;
        assert!(!kept.contains(SECRET), "it is not stored twice: {kept}");
        let (is_replay, other) = send(&producer).await;
        assert!(is_replay && !other.to_string().contains(SECRET), "{other}");
        let existing = producer.post("/v1/jobs", job.clone()).await.is(200);
        assert!(!existing.to_string().contains(SECRET), "{existing}");
        let batch = json!({"jobs": [{"job_type": "b", "payload": [1]}, {"job_type": "b"}]});
        let send = async || {
            let request = t.request(reqwest::Method::POST, "/v1/jobs/batch").json(&batch);
            let answer = request.header("idempotency-key", "batch").send().await.expect("one");
            answer.json::<Value>().await.expect("JSON")
        };
        let first = send().await;
        assert_eq!(first["jobs"][0]["payload"], json!([1]));
        assert_eq!(send().await, first);
    });
}

#[test]
fn a_viewer_sees_no_payloads_and_adapters_refuse_what_shows_them() {
    run_alone(async |t| {
        let (dead, _) = fill(t).await;
        let ada = Person::sign_up(t, "ada@example.com").await;
        ada.join_project(t, "main", Role::Viewer).await;
        let seen = ada.get(&format!("/v1/projects/main/jobs/{dead}")).await.is(200);
        assert!(!seen.to_string().contains(SECRET), "{seen}");
        t.database.execute("update members set role = 'member'").await;
        let (reader, full) = (key(t, &["read"]).await, key(t, &["read", "payload:read"]).await);
        let uuid = dead.parse::<fencepost_domain::ids::JobId>().expect("an id").0;
        for path in [
            format!("/ojs/v1/jobs/{uuid}"),
            "/ojs/v1/dead-letter".to_owned(),
            "/ojs/v1/cron".to_owned(),
            "/orch8/workers/tasks".to_owned(),
            "/workflow-graph/api/workflows".to_owned(),
        ] {
            let refused = reader.get(&path).await;
            assert_eq!(refused.status, 403, "{path}: {}", refused.text);
            assert_eq!(full.get(&path).await.status, 200, "{path}");
        }
        for path in ["/ojs/v1/queues", "/workflow-graph/api/workers", "/orch8/workers"] {
            assert_eq!(reader.get(path).await.status, 200, "{path}");
        }
        let scheduler = key(t, &["schedules"]).await;
        let deleted = scheduler.delete("/ojs/v1/cron/yearly").await;
        assert_eq!(deleted.status, 200, "{}", deleted.text);
        assert!(!deleted.text.contains(SECRET), "{}", deleted.text);
        let manager = key(t, &["manage"]).await;
        let retried = manager.act(&format!("/ojs/v1/dead-letter/{uuid}/retry")).await;
        assert_eq!(retried.status, 200, "{}", retried.text);
        assert!(!retried.text.contains(SECRET), "{}", retried.text);
    });
}
