//! Acks that carry a poll: the next jobs come in their answers.

use serde_json::{Value, json};

use crate::harness::{TestProject, TestServer, fresh_database, limited, run};

const POLL_ID: &str = "0190f5fe-7c00-7a00-8000-000000000001";

fn then_poll() -> Value {
    json!({"queues": ["default"], "poll_id": POLL_ID, "wait_seconds": 0})
}

/// Acks a job and polls for the next one.
async fn ack(t: &TestProject, job: &Value, status: &str, then: Value) -> crate::harness::Reply {
    t.ack_with(job, "w", status, json!({"then_poll": then})).await
}

#[test]
fn a_worker_gets_its_next_job_with_the_answer_to_its_ack() {
    run(async |t| {
        let ids = [t.enqueue(json!({})).await, t.enqueue(json!({})).await];
        let first = t.lease("w").await;
        let answer = ack(t, &first, "succeeded", then_poll()).await.is(200);
        assert_eq!(answer["action"], "done");
        let second = &answer["poll"]["jobs"][0];
        assert_eq!(second["id"], json!(ids[1]));
        assert_eq!(answer["poll"].get("error"), None);
        // Lost on the way: the same request gets the same answer.
        let again = ack(t, &first, "succeeded", then_poll()).await.is(200);
        assert_eq!(again, answer);
        assert_eq!(t.job(&ids[0]).await["state"], "succeeded");
        assert!(t.poll("w", 1).await.is_empty(), "no third lease");
        // It is refused, so no poll follows, and the job stays for others.
        let third = t.enqueue(json!({})).await;
        ack(t, &first, "failed", then_poll()).await.is_error(409, "invalid_state");
        assert_eq!(t.job(&third).await["state"], "pending");
        let last = ack(
            t,
            second,
            "failed",
            json!({
                "queues": ["default"], "poll_id": "0190f5fe-7c00-7a00-8000-000000000002",
            }),
        );
        let last = last.await.is(200);
        assert_eq!(
            (&last["action"], &last["poll"]["jobs"][0]["id"]),
            (&json!("retry"), &json!(third))
        );
    });
}

#[test]
fn a_poll_after_an_ack_waits_like_any_other_and_ends_when_the_node_stops() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project("main").await;
        t.enqueue(json!({})).await;
        let first = t.lease("w").await;
        let waiting = json!({"queues": ["default"], "poll_id": POLL_ID, "wait_seconds": 30});
        let (acking, answering) = (t.clone(), first.clone());
        let waits = waiting.clone();
        let polling =
            tokio::spawn(async move { ack(&acking, &answering, "succeeded", waits).await });
        t.job_becomes(first["id"].as_str().expect("an id"), "succeeded").await;
        let next = t.enqueue(json!({})).await;
        let answer = polling.await.expect("an answer").is(200);
        assert_eq!(answer["poll"]["jobs"][0]["id"], json!(next));

        let second = answer["poll"]["jobs"][0].clone();
        let mut waits = waiting;
        waits["poll_id"] = json!("0190f5fe-7c00-7a00-8000-000000000003");
        let acking = t.clone();
        let id = second["id"].as_str().expect("an id").to_owned();
        let polling = tokio::spawn(async move { ack(&acking, &second, "succeeded", waits).await });
        t.job_becomes(&id, "succeeded").await;
        server.stop().await;
        let answer = polling.await.expect("an answer").is(200);
        assert_eq!((&answer["action"], &answer["poll"]["jobs"]), (&json!("done"), &json!([])));
    });
}

#[test]
fn a_wrong_poll_is_refused_before_the_ack_and_a_late_refusal_does_not_undo_it() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        let with = |field: &str, value: Value| {
            let mut then = then_poll();
            then[field] = value;
            then
        };
        for (field, wrong) in
            [("queues", json!([])), ("capacity", json!(51)), ("wait_seconds", json!(31))]
        {
            let refused = ack(t, &job, "succeeded", with(field, wrong)).await;
            refused.refuses(&format!("then_poll.{field}"));
        }
        let nameless = ack(t, &job, "succeeded", json!({"queues": ["default"]})).await;
        nameless.refuses("then_poll.poll_id");
        let misspelt = ack(t, &job, "succeeded", with("capacty", json!(1))).await;
        misspelt.refuses("then_poll.capacty");
        let bare = json!({
            "job_id": id, "worker_id": "w", "status": "succeeded", "then_poll": then_poll(),
        });
        t.post("/v1/workers/ack", bare.clone()).await.refuses("then_poll.poll_id");
        let mut of_batch = bare;
        of_batch["attempt"] = json!(1);
        let results = t.post("/v1/workers/ack/batch", json!({"acks": [of_batch]})).await.is(200);
        assert_eq!(results["results"][0]["status"], 400);
        assert_eq!(t.job(&id).await["state"], "processing", "nothing was acked");
    });
}

#[test]
fn it_is_counted_as_an_ack_and_a_poll_and_the_ack_counts_without_the_poll() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        // The lease, the ack, and no call more.
        let limits = json!({"work_per_minute": 2});
        let t = server.project_with("small", "free", limits).await;
        let id = t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        let answer = ack(&t, &job, "succeeded", then_poll()).await.is(200);
        assert_eq!(answer["action"], "done");
        assert_eq!(answer["poll"]["error"]["code"], "rate_limit_exceeded");
        assert_eq!(answer["poll"]["jobs"], json!([]));
        assert_eq!(t.job(&id).await["state"], "succeeded");
        server.stop().await;
    });
}
