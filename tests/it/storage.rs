//! How much a project may send and store, and how much a queue may hold.

mod texts;
mod usage;

use fencepost_domain::plan::Plans;
use fencepost_engine::maintenance::{dead_letter_age, excess_workers};
use serde_json::{Value, json};

use crate::harness::{
    Reply, TestProject, TestServer, eventually, fresh_database, limited, run, run_alone, until,
};

async fn used(t: &TestProject, name: &str) -> i64 {
    let limits = t.get("/v1/limits").await.is(200);
    let limits = limits["limits"].as_array().expect("limits").clone();
    let limit = limits.into_iter().find(|it| it["name"] == name).expect("the limit");
    limit["used"].as_i64().expect("a number")
}

/// Counts of queues are merged within a second; what a trigger notes is exact at once.
async fn until_stored(t: &TestProject, is: impl Fn(i64) -> bool) -> i64 {
    eventually("the bytes to be as wanted", async || {
        let stored = used(t, "stored_bytes").await;
        is(stored).then_some(stored)
    })
    .await
}

fn job(bytes: usize) -> Value {
    json!({"job_type": "a", "payload": "x".repeat(bytes)})
}

#[test]
fn what_a_project_stores_is_counted_with_all_that_belongs_to_its_jobs_and_freed() {
    run_alone(async |t| {
        // Its key and the entries of its audit log.
        let own = used(t, "stored_bytes").await;
        assert!(own < 2_000, "{own}");
        t.enqueue(json!({"job_type": "a"})).await;
        // Statistics come later.
        let is_small = |it| (own + 1_024..own + 1_024 + 8_000).contains(&it);
        until_stored(t, is_small).await;
        let large = t.enqueue(job(100_000)).await;
        let stored = until_stored(t, |it| it > own + 2 * 1_024 + 100_000).await;
        assert!(stored < own + 2 * 1_024 + 108_000, "{stored}");
        let leased = t.lease("w").await;
        t.ack(&leased, "w", "succeeded").await.is(200);
        let leased = t.lease("w").await;
        assert_eq!(leased["id"], large.as_str());
        let log = json!({"worker_id": "w", "chunks": [
            {"job_id": large, "attempt": 1, "sequence": 0, "data": "y".repeat(20_000),
             "timestamp_ms": 1},
        ]});
        t.post("/v1/workers/logs", log).await.is(200);
        let event = json!({"worker_id": "w", "events": [
            {"job_id": large, "attempt": 1, "type": "step", "payload": "z".repeat(10_000)},
        ]});
        t.post("/v1/workers/events", event).await.is(200);
        let error = json!({"message": "m", "stack_trace": "s".repeat(5_000)});
        t.ack_with(&leased, "w", "failed", json!({"error": error, "retryable": false})).await;
        t.job_becomes(&large, "dead_letter").await;
        // Its worker and the group of its dead letter count, too.
        let all = own + 2 * 1_024 + 100_000 + 20_000 + 10_000 + 5_000;
        let stored = until_stored(t, |it| it > all).await;
        assert!(stored < all + 8_000, "{stored}");
        // Statistics may come between the two.
        until("usage to say the same", async || {
            let usage = t.get("/v1/usage").await.is(200);
            usage["stored_bytes"] == json!(used(t, "stored_bytes").await)
        })
        .await;
        t.delete(&format!("/v1/dead-letters/{large}")).await.is_empty(204);
        until_stored(t, is_small).await;
        // Merged by a loop; the sum stays the same.
        let left = "select count(*) from stored_byte_deltas";
        t.database.until(left, 0).await;
        assert!(is_small(used(t, "stored_bytes").await));
    });
}

#[test]
fn a_project_that_has_used_up_its_bytes_enqueues_no_more_and_settles_all_the_same() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project_with("small", "free", json!({"stored_bytes": 60_000})).await;
        let id = t.enqueue(job(50_000)).await;
        t.enqueue(job(20_000)).await;
        let refused = eventually("the storage to be full", async || {
            let reply = t.post("/v1/jobs", json!({"job_type": "a"})).await;
            (reply.status != 201).then_some(reply)
        })
        .await;
        let error = refused.is_error(429, "quota_exceeded");
        assert!(error["message"].as_str().is_some_and(|it| it.contains("stored bytes")), "{error}");
        let leased = t.lease("w").await;
        let event = json!({"worker_id": "w", "events": [
            {"job_id": id, "attempt": 1, "type": "step"},
        ]});
        t.post("/v1/workers/events", event).await.is_error(429, "quota_exceeded");
        let log = json!({"worker_id": "w", "chunks": [
            {"job_id": id, "attempt": 1, "sequence": 0, "data": "y", "timestamp_ms": 1},
        ]});
        t.post("/v1/workers/logs", log).await.is(200);
        let logs = t.get(&format!("/v1/jobs/{id}/logs")).await.is(200);
        assert_eq!((&logs["logs"], &logs["truncated_attempts"]), (&json!([]), &json!([1])));
        let result = json!({"result": "r".repeat(30_000)});
        t.ack_with(&leased, "w", "succeeded", result).await.is(200);
        let other = server.project("other").await;
        other.enqueue(job(50_000)).await;
        server.stop().await;
    });
}

#[test]
fn bodies_are_counted_by_their_bytes_however_they_are_sent() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project_with("small", "free", json!({"bytes_per_minute": 200_000})).await;
        for _ in 0..50 {
            t.enqueue(json!({"job_type": "small bodies are not counted"})).await;
        }
        assert_eq!(used(&t, "bytes_per_minute").await, 0);
        let body = job(90_000).to_string();
        t.post_text("/v1/jobs", body.clone()).await.is(201);
        assert!(used(&t, "bytes_per_minute").await >= 90_000 - 10_000);
        // Without a length in its head.
        let parts = body.as_bytes().chunks(10_000).map(<[u8]>::to_vec).collect::<Vec<_>>();
        let chunked = || {
            let parts = parts.clone().into_iter().map(Ok::<_, std::io::Error>);
            reqwest::Body::wrap_stream(futures_util::stream::iter(parts))
        };
        t.post_text("/v1/jobs", chunked()).await.is(201);
        // A connection whose body was not read is closed: none of the later requests may meet it.
        let refused = async |body: reqwest::Body| {
            let request = t.request(reqwest::Method::POST, "/v1/jobs").body(body);
            let request = request.header("content-type", "application/json");
            Reply::of(request.header("connection", "close").send().await.expect("an answer")).await
        };
        refused(chunked()).await.is_error(429, "rate_limit_exceeded");
        let refused = refused(body.into()).await;
        refused.is_error(429, "rate_limit_exceeded");
        assert!(refused.headers.contains_key("retry-after"));
        // Jobs that were leased can be settled with large results.
        let leased = t.lease("w").await;
        let result = json!({"result": "r".repeat(60_000)});
        t.ack_with(&leased, "w", "succeeded", result).await.is(200);
        server.stop().await;
    });
}

#[test]
fn a_queue_holds_no_more_than_its_max_waiting() {
    run(async |t| {
        t.patch("/v1/queues/mail", json!({"max_waiting": 3})).await.is(200);
        let mail = || json!({"job_type": "a", "queue": "mail"});
        let batch = json!({"jobs": [mail(), mail(), mail(), mail()]});
        let error = t.post("/v1/jobs/batch", batch).await.is_error(429, "queue_full");
        assert!(error["message"].as_str().is_some_and(|it| it.contains("mail")), "{error}");
        t.post("/v1/jobs/batch", json!({"jobs": [mail(), mail(), mail()]})).await.is(201);
        let refused = t.post("/v1/jobs", mail()).await;
        refused.is_error(429, "queue_full");
        assert!(refused.headers.contains_key("retry-after"));
        t.enqueue(json!({"job_type": "a", "queue": "other"})).await;
        let leased = t.polled(json!({"worker_id": "w", "queues": ["mail"]})).await.remove(0);
        t.post("/v1/jobs", mail()).await.is_error(429, "queue_full");
        t.ack(&leased, "w", "succeeded").await.is(200);
        until("room for a mail", async || t.post("/v1/jobs", mail()).await.status == 201).await;
        t.patch("/v1/queues/mail", json!({"max_waiting": null})).await.is(200);
        until("room for a mail", async || t.post("/v1/jobs", mail()).await.status == 201).await;
    });
}

#[test]
fn old_dead_letters_go_after_as_many_days_as_the_plan_keeps_them() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project_with("small", "free", json!({"dead_letter_days": 2})).await;
        let keeps = server.project("keeps").await;
        for t in [&t, &keeps] {
            for days in [1, 4] {
                let id = t.enqueue(json!({"job_type": "a", "max_attempts": 1})).await;
                let leased = t.lease("w").await;
                t.ack(&leased, "w", "failed").await.is(200);
                t.job_becomes(&id, "dead_letter").await;
                let uuid = id.parse::<fencepost_domain::ids::JobId>().expect("an id").0;
                let age = format!(
                    "update dead_letters set died_at = died_at - interval '{days} days'
                     where job_id = '{uuid}'"
                );
                t.database.execute(&age).await;
            }
        }
        let engine = t.database.engine();
        for _ in 0..2 {
            let plans = Plans::built_in();
            dead_letter_age::pass(&engine, &plans).await.expect("a pass");
        }
        engine.finish().await;
        let done = eventually("the operation to succeed", async || {
            let page = t.get("/v1/operations").await.is(200);
            let operations = page["operations"].as_array().expect("operations").clone();
            assert_eq!(operations.len(), 1, "once a day: {page}");
            (operations[0]["state"] == "succeeded").then(|| operations[0]["done"].clone())
        })
        .await;
        assert_eq!(done, 1);
        let left = async |t: &TestProject| {
            let letters = t.get("/v1/dead-letters").await.is(200);
            letters["dead_letters"].as_array().map(Vec::len)
        };
        assert_eq!((left(&t).await, left(&keeps).await), (Some(1), Some(2)));
        server.stop().await;
    });
}

#[test]
fn worker_ids_that_are_used_once_do_not_fill_the_table_of_workers() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let crowded = server.project_with("crowded", "free", json!({"workers": 100})).await;
        let keeps = server.project("keeps").await;
        let register = async |t: &TestProject, id: &str| {
            let worker = json!({"worker_id": id, "queues": ["q"], "job_types": ["a"]});
            t.post("/v1/workers/register", worker).await.is(200);
        };
        for number in 0..120 {
            register(&crowded, &format!("old-{number:03}")).await;
            register(&keeps, &format!("old-{number:03}")).await;
        }
        crowded.database.execute("update workers set last_seen_at = now() - interval '1 h'").await;
        register(&crowded, "newest").await;
        register(&crowded, "old-000").await;
        let engine = crowded.database.engine();
        let is_more = excess_workers::pass(&engine, &Plans::built_in()).await.expect("a pass");
        assert!(!is_more);
        engine.finish().await;
        let known = async |t: &TestProject| {
            let page = t.get("/v1/workers?limit=200").await.is(200);
            let workers = page["workers"].as_array().expect("workers").clone();
            let ids = workers.iter().map(|it| it["worker_id"].as_str().expect("an id").to_owned());
            ids.collect::<Vec<_>>()
        };
        let left = known(&crowded).await;
        assert_eq!(left.len(), 100);
        assert!(left.iter().any(|it| it == "newest") && left.iter().any(|it| it == "old-000"));
        assert!(!left.iter().any(|it| it == "old-001"), "silent for longest");
        assert_eq!(known(&keeps).await.len(), 120);
        let limits = crowded.get("/v1/limits").await.is(200);
        let listed = limits["limits"].as_array().expect("limits").clone();
        let workers = listed.iter().find(|it| it["name"] == "workers").expect("workers");
        assert_eq!((&workers["limit"], &workers["used"]), (&json!(100), &json!(100)));
        server.stop().await;
    });
}
