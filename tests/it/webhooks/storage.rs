//! Deliveries may store a part of the plan's bytes, and are kept for some time.

use fencepost_engine::maintenance;
use serde_json::{Value, json};
use uuid::Uuid;

use super::{delivery_becomes, endpoint, path};
use crate::harness::{
    ALL_ROWS, LoneProject, Sink, TestServer, eventually, fresh_database, limited, run_alone,
};

/// Failed attempts of the storm.
const FAILURES: usize = 40;

/// Text that PostgreSQL cannot compress: 32 characters for each part.
fn noise(parts: usize) -> String {
    (0..parts).map(|_| Uuid::new_v4().simple().to_string()).collect()
}

async fn stored(t: &LoneProject) -> i64 {
    let usage = t.get("/v1/usage").await.is(200);
    usage["stored_bytes"].as_i64().expect("a number")
}

async fn fail(t: &LoneProject, message: &str, tags: Value) {
    t.enqueue(json!({"tags": tags, "max_attempts": 1})).await;
    let error = json!({"error": {"type": "Refused", "message": message}});
    t.ack_with(&t.lease("w").await, "w", "failed", error).await.is(200);
}

#[test]
fn deliveries_count_as_bytes_of_their_project() {
    run_alone(async |t| {
        let sink = Sink::start().await;
        for _ in 0..3 {
            endpoint(t, &sink, json!({"events": ["job.dead_lettered"]})).await;
        }
        for _ in 0..FAILURES {
            fail(t, &noise(31), json!({"a": noise(15), "b": noise(15), "c": noise(15)})).await;
        }
        for _ in 0..3 * FAILURES {
            sink.next().await;
        }
        let ended = format!("select count(*) - {} from finished_jobs", 3 * FAILURES);
        t.database.until(&ended, 0).await;
        let rows = t.database.number(ALL_ROWS).await;
        assert!(rows > 3 * FAILURES as i64 * 2_432, "{rows} bytes: bodies are among them");
        eventually("all rows to be counted", async || {
            (rows * 10 <= stored(t).await * 12).then_some(())
        })
        .await;
    });
}

#[test]
fn events_are_dropped_while_deliveries_use_their_part_of_the_bytes() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project_with("small", "free", json!({"stored_bytes": 100_000})).await;
        let sink = Sink::start().await;
        let made = endpoint(&t, &sink, json!({"events": ["*"]})).await;
        let use_more = async |bytes: i64| {
            let add =
                format!("insert into stored_byte_deltas select outbox_id, {bytes} from outboxes");
            t.database.execute(&add).await;
        };
        use_more(50_000).await;
        fail(&t, "dropped", json!({})).await;
        t.database.until("select dropped_events from webhook_endpoints", 2).await;
        let alarm = "insert into outbound_events (project_id, type, incident_id)
                     select project_id, 'alarm.triggered', gen_random_uuid() from outboxes";
        t.database.execute(alarm).await;
        assert_eq!(sink.next().await.body()["type"], "alarm.triggered");
        use_more(-20_000).await;
        fail(&t, "sent", json!({})).await;
        // An alarm about the dropped events may come before.
        let mut sent = sink.next().await.body();
        while sent["type"] == "alarm.triggered" {
            sent = sink.next().await.body();
        }
        assert_eq!(sent["data"]["error"]["message"], "sent");
        delivery_becomes(&t, &made, "delivered").await;
        let all = json!({"since": "2020-01-01T00:00:00Z", "which": "all"});
        t.post(&path(&made, "/replay"), all.clone()).await.is(202);
        use_more(20_000).await;
        t.database.until("select count(*) from operations where state = 'running'", 0).await;
        let refused = t.post(&path(&made, "/replay"), all).await;
        let error = refused.is_error(429, "quota_exceeded");
        assert!(error["message"].as_str().is_some_and(|it| it.contains("deliveries")), "{error}");
        // Deliveries find no room that jobs have used.
        use_more(-40_000).await;
        t.enqueue(json!({"max_attempts": 1})).await;
        let leased = t.lease("w").await;
        t.enqueue(json!({"queue": "other", "payload": "x".repeat(90_000)})).await;
        t.ack_with(&leased, "w", "failed", json!({"error": {"message": "m"}})).await.is(200);
        t.database.until("select dropped_events from webhook_endpoints", 4).await;
        server.stop().await;
    });
}

#[test]
fn events_are_small_while_many_deliveries_wait() {
    run_alone(async |t| {
        let sink = Sink::start().await;
        let made = endpoint(t, &sink, json!({"events": ["job.dead_lettered"]})).await;
        let queue = made["id"].as_str().expect("an id");
        let fill = format!(
            "insert into queue_counts (project_id, queue, active)
             select outbox_id, '{queue}', 1000 from outboxes"
        );
        t.database.execute(&fill).await;
        fail(t, "short", json!({"customer": "7"})).await;
        let data = sink.next().await.body()["data"].clone();
        assert_eq!(
            (&data["error"]["message"], &data["job"]["tags_cut"]),
            (&json!("short"), &json!(false))
        );
        assert_eq!(data["job"]["tags"], json!({"customer": "7"}));
        fail(t, &"long".repeat(200), json!({"customer": "7"})).await;
        let text = sink.next().await;
        let data = text.body()["data"].clone();
        assert_eq!(
            (&data["error"]["type"], &data["error"]["message"]),
            (&json!("Refused"), &Value::Null)
        );
        assert_eq!((&data["job"]["tags_cut"], &data["job"]["tags"]), (&json!(true), &Value::Null));
        // A name cannot be left out.
        let long =
            json!({"job_type": "ä".repeat(500), "queue": "ä".repeat(100), "max_attempts": 1});
        t.enqueue(long).await;
        let poll = json!({"worker_id": "w", "queues": ["ä".repeat(100)], "wait_seconds": 5});
        let job = t.polled(poll).await.pop().expect("a job");
        t.ack_with(&job, "w", "failed", json!({"error": {"message": "m"}})).await.is(200);
        t.database.until("select dropped_events from webhook_endpoints", 1).await;
    });
}

#[test]
fn deliveries_that_were_accepted_are_kept_for_a_day() {
    run_alone(async |t| {
        let sink = Sink::start().await;
        let made = endpoint(t, &sink, json!({})).await;
        t.act(&path(&made, "/test")).await.is(202);
        delivery_becomes(t, &made, "delivered").await;
        let engine = t.database.engine();
        for (hours, kept) in [(23, 1), (25, 0)] {
            let age =
                format!("update finished_jobs set completed_at = now() - interval '{hours} hours'");
            t.database.execute(&age).await;
            maintenance::counts::pass(&engine).await.expect("it runs");
            t.database.execute("update retention_dues set due_at = now()").await;
            while maintenance::retention::pass(&engine).await.expect("it runs") {}
            let list = t.get(&path(&made, "/deliveries")).await.is(200);
            assert_eq!(list["deliveries"].as_array().map(Vec::len), Some(kept));
        }
        engine.finish().await;
    });
}
