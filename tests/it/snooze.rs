//! Workers put their jobs off: `released` with a delay.

use serde_json::{Value, json};

use crate::harness::{TestProject, run, run_alone};

async fn put_off(t: &TestProject, job: &Value, seconds: u32) -> Value {
    t.ack_with(job, "w", "released", json!({"delay_seconds": seconds})).await.is(200)
}

#[test]
fn a_job_that_is_put_off_comes_back_without_a_failure() {
    run(async |t| {
        let id = t.enqueue(json!({"max_attempts": 1})).await;
        for times in 1..=2 {
            let job = t.wait_and_lease("w").await;
            assert_eq!((&job["id"], &job["attempt"]), (&json!(id), &json!(times)));
            let acked = put_off(t, &job, 1).await;
            assert_eq!(acked["action"], "retry");
            assert_eq!(put_off(t, &job, 1).await, acked, "a repeated ack gets the same answer");
            let waiting = t.job(&id).await;
            assert_eq!(waiting["run_at"], acked["retry_at"]);
            assert_eq!(waiting["waiting_for"], "backoff");
            let counts = ["snoozes", "failures"].map(|it| waiting[it].clone());
            assert_eq!(counts, [json!(times), json!(0)]);
            assert!(t.poll("w", 1).await.is_empty(), "it waits");
        }
        let job = t.wait_and_lease("w").await;
        t.ack(&job, "w", "succeeded").await.is(200);
        let done = t.job(&id).await;
        assert_eq!((&done["state"], &done["snoozes"]), (&json!("succeeded"), &json!(2)));
        let ends: Vec<_> = done["attempts"].as_array().expect("attempts").iter().collect();
        let types: Vec<_> = ends.iter().map(|it| it["error"]["type"].as_str()).collect();
        assert!(types.contains(&Some("snoozed")), "{types:?}");
        assert_eq!(done["last_error"], Value::Null, "it is in no trouble");
    });
}

#[test]
fn a_job_that_is_put_off_keeps_its_place_and_frees_its_slot() {
    run(async |t| {
        t.patch("/v1/queues/default", json!({"groups": {"order": "strict"}})).await.is(200);
        let limited = json!({"concurrency_key": "k", "concurrency_limit": 1});
        let mut first = limited.clone();
        first["group"] = json!("a");
        t.enqueue(first).await;
        t.enqueue(json!({"group": "a"})).await;
        let job = t.wait_and_lease("w").await;
        let other = t.enqueue(limited).await;
        assert!(t.poll("w", 9).await.is_empty(), "the first of its group runs, and has the slot");
        put_off(t, &job, 600).await;
        assert_eq!(t.wait_and_lease("w").await["id"], other.as_str(), "the slot is free");
        assert!(t.poll("w", 9).await.is_empty(), "the group waits behind its first job");
    });
}

#[test]
fn a_delay_has_bounds_and_belongs_to_a_release() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = t.wait_and_lease("w").await;
        let ack = async |status: &str, delay: Value| {
            t.ack_with(&job, "w", status, json!({"delay_seconds": delay})).await
        };
        for delay in [json!(-1), json!(2_592_001), json!("1"), json!(1.5)] {
            ack("released", delay).await.refuses("delay_seconds");
        }
        for status in ["succeeded", "failed", "rate_limited"] {
            ack(status, json!(1)).await.refuses("delay_seconds");
        }
        assert_eq!(t.job(&id).await["state"], "processing", "nothing was recorded");
        let end = json!({
            "job_id": id, "worker_id": "w", "status": "released", "attempt": job["attempt"],
            "delay_seconds": 2_592_000,
        });
        let acked = t.post("/v1/workers/ack/batch", json!({"acks": [end]})).await.is(200);
        assert_eq!(acked["results"][0]["action"], "retry", "{acked}");
        assert_eq!(t.job(&id).await["snoozes"], 1);
        assert!(t.poll("w", 1).await.is_empty());
        let fenced = json!({"delay_seconds": 1});
        t.ack_with(&job, "other", "released", fenced).await.is_error(409, "invalid_state");
    });
}

#[test]
fn a_delay_is_not_answered_as_kept_when_the_attempt_was_released_without_one() {
    run(async |t| {
        let id = t.enqueue(json!({"max_attempts": 3})).await;
        let job = t.wait_and_lease("w").await;
        t.ack(&job, "w", "released").await.is(200);
        let delay = json!({"delay_seconds": 600});
        t.ack_with(&job, "w", "released", delay).await.is_error(409, "invalid_state");
        let job = t.wait_and_lease("w").await;
        put_off(t, &job, 1).await;
        t.ack(&job, "w", "released").await.is_error(409, "invalid_state");
        t.ack(&job, "w", "rate_limited").await.is_error(409, "invalid_state");
        let job = t.wait_and_lease("w").await;
        let error = json!({"type": "Real"});
        let failed = json!({"error": error, "retry_after_seconds": 0});
        t.ack_with(&job, "w", "failed", failed).await.is(200);
        let job = t.wait_and_lease("w").await;
        put_off(t, &job, 600).await;
        assert_eq!(t.job(&id).await["last_error"]["type"], "Real");
        let found = t.get("/v1/jobs?q=error:real").await.is(200);
        assert_eq!(found["jobs"][0]["id"], id.as_str());
    });
}

#[test]
fn a_cancelled_job_that_is_put_off_ends_without_an_error() {
    run(async |t| {
        for (status, more) in [
            ("released", json!({"delay_seconds": 9})),
            ("rate_limited", json!({"scope": "queue", "retry_after_seconds": 1})),
        ] {
            let id = t.enqueue(json!({})).await;
            let job = t.wait_and_lease("w").await;
            t.act(&format!("/v1/jobs/{id}/cancel")).await.is(200);
            assert_eq!(t.ack_with(&job, "w", status, more).await.is(200)["action"], "done");
            let ended = t.job_becomes(&id, "cancelled").await;
            assert_eq!((&ended["snoozes"], &ended["last_error"]), (&json!(0), &Value::Null));
            assert_eq!(ended["attempts"][0]["error"], Value::Null);
        }
    });
}

#[test]
fn attempts_that_were_put_off_do_not_use_up_the_claims_of_a_job() {
    run_alone(async |t| {
        let id = t.enqueue(json!({})).await;
        for (attempt, snoozes, state) in [(1_500, 501, "pending"), (1_600, 600, "dead_letter")] {
            let job = t.wait_and_lease("w").await;
            t.database
                .execute(&format!(
                    "update jobs set attempt = {attempt}; update job_bodies set snoozes = {snoozes}"
                ))
                .await;
            let mut released = job.clone();
            released["attempt"] = json!(attempt);
            t.ack(&released, "w", "released").await.is(200);
            assert_eq!(t.job(&id).await["state"], state);
        }
    });
}
