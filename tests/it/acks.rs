//! Success, failure, release; the fence; retries and the dead letter.

use crate::harness::{TestProject, run, run_alone};
use serde_json::{Value, json};

fn seconds_between(earlier: &Value, later: &Value) -> f64 {
    let time = |it: &Value| {
        let text = it.as_str().expect("a time");
        chrono::DateTime::parse_from_rfc3339(text).expect("RFC 3339")
    };
    (time(later) - time(earlier)).as_seconds_f64()
}

#[test]
fn a_success_ends_the_job_and_keeps_its_result() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        let more = json!({"result": {"sent": 1}, "duration_ms": 17});
        let reply = t.ack_with(&job, "w", "succeeded", more).await.is(200);
        assert_eq!(reply, json!({"action": "done"}));
        let job = t.job(&id).await;
        assert_eq!((&job["state"], &job["result"]), (&json!("succeeded"), &json!({"sent": 1})));
        assert_eq!((&job["waiting_for"], &job["lease_expires_at"]), (&Value::Null, &Value::Null));
        assert_eq!(job["attempts"][0]["outcome"], "succeeded");
        assert_eq!(job["attempts"][0]["duration_ms"], 17);
        assert!(seconds_between(&job["claimed_at"], &job["completed_at"]) >= 0.0);
        assert!(t.poll("w", 1).await.is_empty());
    });
}

#[test]
fn failures_wait_longer_each_time_and_the_last_goes_to_the_dead_letter() {
    run_alone(async |t| {
        let id = t.enqueue(json!({"max_attempts": 3})).await;
        let mut job = t.lease("w").await;
        for (failures, base) in [(1, 15.0), (2, 30.0)] {
            assert_eq!(
                (&job["attempt"], &job["failures"]),
                (&json!(failures), &json!(failures - 1))
            );
            let error = json!({"error": {"type": "Timeout", "message": format!("no {failures}")}});
            let reply = t.ack_with(&job, "w", "failed", error).await.is(200);
            assert_eq!(reply["action"], "retry");
            let waiting = t.job(&id).await;
            assert_eq!(waiting["state"], "pending");
            assert_eq!(waiting["waiting_for"], "backoff");
            assert_eq!(waiting["run_at"], reply["retry_at"]);
            let ended = &waiting["attempts"][failures - 1]["ended_at"];
            let wait = seconds_between(ended, &reply["retry_at"]);
            assert!((base..=base + 3.0).contains(&wait), "{wait}");
            assert!(t.poll("w", 1).await.is_empty(), "not before its time");
            t.database.execute("update jobs set run_at = now()").await;
            job = t.wait_and_lease("w").await;
            assert_eq!(job["last_error"]["message"], format!("no {failures}"));
        }
        let error = json!({"error": {"message": "last"}});
        assert_eq!(t.ack_with(&job, "w", "failed", error).await.is(200), json!({"action": "done"}));
        let job = t.job(&id).await;
        assert_eq!((&job["state"], &job["failures"]), (&json!("dead_letter"), &json!(3)));
        assert_eq!(job["last_error"]["message"], "last");
        let outcomes: Vec<_> =
            job["attempts"].as_array().expect("attempts").iter().map(|it| &it["outcome"]).collect();
        assert_eq!(outcomes, ["failed", "failed", "failed"]);
        assert!(t.poll("w", 1).await.is_empty());
    });
}

#[test]
fn a_permanent_failure_is_dead_lettered_immediately() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        let reply = t.ack_with(&job, "w", "failed", json!({"retryable": false})).await;
        assert_eq!(reply.is(200), json!({"action": "done"}));
        assert_eq!(t.job(&id).await["state"], "dead_letter");

        let retry = json!({"non_retryable_types": ["billing.*"]});
        let id = t.enqueue(json!({"retry": retry})).await;
        let job = t.lease("w").await;
        let error = json!({"error": {"type": "billing.CardDeclined"}});
        assert_eq!(t.ack_with(&job, "w", "failed", error).await.is(200), json!({"action": "done"}));
        assert_eq!(t.job(&id).await["state"], "dead_letter");
    });
}

#[test]
fn a_worker_may_choose_when_its_job_is_tried_again() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        let reply =
            t.ack_with(&job, "w", "failed", json!({"retry_after_seconds": 500})).await.is(200);
        let ended = t.job(&id).await["attempts"][0]["ended_at"].clone();
        assert_eq!(seconds_between(&ended, &reply["retry_at"]), 500.0);
    });
}

#[test]
fn a_released_job_is_claimed_before_later_ones_and_no_failure_is_counted() {
    run(async |t| {
        let first = t.enqueue(json!({})).await;
        let second = t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        assert_eq!(job["id"], first);
        let reply = t.ack(&job, "w", "released").await.is(200);
        assert_eq!(reply["action"], "retry");
        let again = t.lease("w").await;
        assert_eq!((&again["id"], &again["attempt"]), (&json!(first), &json!(2)));
        assert_eq!(again["failures"], 0);
        assert_eq!(t.lease("w").await["id"], second);
    });
}

/// Every way to be wrong about one leased job, in the order in which they are reported.
async fn is_fenced(t: &TestProject, job: &Value) {
    let id = &job["id"];
    let other_lease = "00000000-0000-4000-8000-000000000000";
    let foreign = json!({"job_id": id, "worker_id": "other", "status": "succeeded"});
    t.post("/v1/workers/ack", foreign).await.is_error(409, "worker_mismatch");
    for (field, stale) in [("attempt", json!(99)), ("lease_id", json!(other_lease))] {
        let ack = json!({"job_id": id, "worker_id": "w", "status": "succeeded", field: stale});
        let error = t.post("/v1/workers/ack", ack).await.is_error(409, "stale_lease");
        assert_eq!(
            (&error["job_state"], &error["current_attempt"]),
            (&json!("processing"), &job["attempt"])
        );
        let beat = json!({"job_id": id, "worker_id": "w", field: stale});
        t.post("/v1/workers/heartbeat", beat).await.is_error(409, "stale_lease");
    }
    let unknown = "job_01m7w3ha3aextt8pkwwdmxsmqw";
    for id in [unknown, "nonsense"] {
        let ack = json!({"job_id": id, "worker_id": "w", "status": "failed"});
        t.post("/v1/workers/ack", ack).await.is_error(404, "job_not_found");
        let beat = json!({"job_id": id, "worker_id": "w"});
        t.post("/v1/workers/heartbeat", beat).await.is_error(404, "job_not_found");
    }
}

#[test]
fn a_lease_is_fenced_by_its_worker_its_attempt_and_its_id() {
    run(async |t| {
        t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        is_fenced(t, &job).await;
        t.ack(&job, "w", "succeeded").await.is(200);
    });
}

#[test]
fn a_worker_that_lost_its_lease_cannot_ack() {
    run_alone(async |t| {
        let id = t.enqueue(json!({})).await;
        let slow = t.lease("slow").await;
        t.expire_leases().await;
        let fast = t.wait_and_lease("fast").await;
        assert_eq!((&fast["id"], &fast["attempt"]), (&json!(id), &json!(2)));
        for status in ["succeeded", "failed", "released"] {
            t.ack(&slow, "slow", status).await.is_error(409, "worker_mismatch");
        }
        t.heartbeat(&slow, "slow").await.is_error(409, "worker_mismatch");
        t.ack(&slow, "fast", "succeeded").await.is_error(409, "stale_lease");
        t.ack(&fast, "fast", "succeeded").await.is(200);
        t.ack(&slow, "slow", "failed").await.is_error(409, "invalid_state");
        assert_eq!(t.job(&id).await["state"], "succeeded");
    });
}

#[test]
fn a_repeated_ack_is_answered_as_the_first_time() {
    run_alone(async |t| {
        t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        t.ack(&job, "w", "succeeded").await.is(200);
        assert_eq!(t.ack(&job, "w", "succeeded").await.is(200), json!({"action": "done"}));
        let error = t.ack(&job, "w", "failed").await.is_error(409, "invalid_state");
        assert_eq!(error["job_state"], "succeeded");
        let bare = json!({"job_id": job["id"], "worker_id": "w", "status": "succeeded"});
        t.post("/v1/workers/ack", bare).await.is_error(409, "invalid_state");
        t.ack(&job, "other", "succeeded").await.is_error(409, "invalid_state");

        t.enqueue(json!({"max_attempts": 2})).await;
        let failed = t.lease("w").await;
        let first = t.ack(&failed, "w", "failed").await.is(200);
        assert_eq!(t.ack(&failed, "w", "failed").await.is(200), first);
        t.ack(&failed, "w", "released").await.is_error(409, "invalid_state");
        t.database.execute("update jobs set run_at = now()").await;
        let second = t.wait_and_lease("w").await;
        assert_eq!(t.ack(&failed, "w", "failed").await.is(200), first, "while the next one runs");
        assert_eq!(t.ack(&second, "w", "failed").await.is(200), json!({"action": "done"}));
        assert_eq!(t.ack(&second, "w", "failed").await.is(200), json!({"action": "done"}));
        assert_eq!(t.ack(&failed, "w", "failed").await.is(200), first);

        t.enqueue(json!({})).await;
        let released = t.lease("w").await;
        let first = t.ack(&released, "w", "released").await.is(200);
        assert_eq!(t.ack(&released, "w", "released").await.is(200), first);
    });
}

#[test]
fn an_ack_with_the_current_fence_counts_until_the_job_was_reaped() {
    run_alone(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        t.database
            .execute("update reaper_state set last_pass_at = now() - interval '1 hour'")
            .await;
        t.expire_leases().await;
        // After the gap the lease was given once more; either way it was not reaped.
        t.ack(&job, "w", "succeeded").await.is(200);
        assert_eq!(t.job(&id).await["state"], "succeeded");
    });
}

#[test]
fn an_ack_must_make_sense() {
    run(async |t| {
        t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        let ack = async |status: &str, more: Value| t.ack_with(&job, "w", status, more).await;
        ack("done", json!({})).await.refuses("status");
        ack("failed", json!({"result": 1})).await.refuses("result");
        ack("succeeded", json!({"error": {"message": "x"}})).await.refuses("error");
        ack("succeeded", json!({"retryable": true})).await.refuses("retryable");
        ack("released", json!({"retry_after_seconds": 1})).await.refuses("retry_after_seconds");
        ack("failed", json!({"error": {"mesage": "x"}})).await.refuses("error.mesage");
        ack("failed", json!({"duration_ms": -1})).await.refuses("duration_ms");
        ack("failed", json!({"lease_id": "x"})).await.refuses("lease_id");
        ack("failed", json!({"attempt": 0})).await.refuses("attempt");
        ack("succeeded", json!({})).await.is(200);
    });
}

#[test]
fn acks_in_a_batch_succeed_or_fail_each_for_itself() {
    run(async |t| {
        for _ in 0..4 {
            t.enqueue(json!({})).await;
        }
        let jobs = t.poll("w", 4).await;
        let body =
            |job: &Value, status: &str| crate::harness::TestProject::ack_body(job, "w", status);
        let mut late = body(&jobs[2], "succeeded");
        late["attempt"] = json!(7);
        let mut odd = body(&jobs[3], "succeeded");
        odd["duration_ms"] = json!(-1);
        let acks = json!([
            body(&jobs[0], "succeeded"),
            body(&jobs[1], "failed"),
            late,
            odd,
            body(&jobs[0], "succeeded"),
        ]);
        let reply = t.post("/v1/workers/ack/batch", json!({"acks": acks})).await.is(200);
        let results = reply["results"].as_array().expect("results");
        assert_eq!(results[0], json!({"job_id": jobs[0]["id"], "status": 200, "action": "done"}));
        assert_eq!((&results[1]["action"], &results[1]["status"]), (&json!("retry"), &json!(200)));
        assert!(results[1]["retry_at"].is_string());
        assert_eq!(results[2]["error"]["code"], "stale_lease");
        assert_eq!(results[3]["error"]["details"][0]["field"], "acks[3].duration_ms");
        assert_eq!((&results[3]["status"], &results[2]["status"]), (&json!(400), &json!(409)));
        assert_eq!(results[4], results[0], "the same ack twice in one batch");
        t.post("/v1/workers/ack/batch", json!({"acks": []})).await.refuses("acks");
    });
}

#[test]
fn a_bare_ack_counts_unless_its_worker_lost_an_earlier_attempt() {
    run_alone(async |t| {
        let id = t.enqueue(json!({"retry": {"initial_seconds": 0, "jitter_seconds": 0}})).await;
        let bare = |status: &str| json!({"job_id": id, "worker_id": "w", "status": status});
        let beat = json!({"job_id": id, "worker_id": "w"});
        t.wait_and_lease("w").await;
        t.post("/v1/workers/heartbeat", beat.clone()).await.is(200);
        // It reported the end of its first attempt, so it can mean the second only.
        t.post("/v1/workers/ack", bare("failed")).await.is(200);
        t.wait_and_lease("w").await;
        t.post("/v1/workers/heartbeat", beat.clone()).await.is(200);
        t.expire_leases().await;
        let third = t.wait_and_lease("w").await;
        let acks = json!({"acks": [bare("succeeded")]});
        let one = t.post("/v1/workers/ack/batch", acks).await.is(200)["results"][0].clone();
        assert_eq!(
            (&one["status"], &one["error"]["code"]),
            (&json!(409), &json!("fence_required"))
        );
        for (path, body) in [("ack", bare("succeeded")), ("heartbeat", beat)] {
            let refused = t.post(&format!("/v1/workers/{path}"), body).await;
            let error = refused.is_error(409, "fence_required");
            assert_eq!(error["current_attempt"], 3);
        }
        let job = t.job(&id).await;
        assert_eq!((&job["state"], &job["attempt"]), (&json!("processing"), &json!(3)));
        t.ack(&third, "w", "succeeded").await.is(200);
        t.post("/v1/workers/ack", bare("succeeded")).await.is_error(409, "invalid_state");
    });
}

#[test]
fn a_bare_ack_of_a_worker_that_lost_nothing_is_not_held_up_by_others() {
    run_alone(async |t| {
        let id = t.enqueue(json!({})).await;
        t.lease("lost").await;
        t.expire_leases().await;
        t.wait_and_lease("w").await;
        let bare = |worker: &str| json!({"job_id": id, "worker_id": worker, "status": "succeeded"});
        t.post("/v1/workers/ack", bare("lost")).await.is_error(409, "worker_mismatch");
        t.post("/v1/workers/ack", bare("w")).await.is(200);
    });
}

#[test]
fn a_project_or_a_key_may_require_that_every_ack_shows_its_attempt() {
    run(async |t| {
        let made = json!({"name": "strict", "scopes": ["work"], "require_fence": "always"});
        let strict = t.post("/v1/keys", made).await.is(201);
        assert_eq!(strict["key"]["require_fence"], "always");
        let secret = strict["secret"].as_str().expect("a key").to_owned();
        let strict = t.with_key(secret);
        let id = t.enqueue(json!({})).await;
        let leased = t.lease("w").await;
        let bare = json!({"job_id": id, "worker_id": "w", "status": "failed"});
        let beat = json!({"job_id": id, "worker_id": "w"});
        t.post("/v1/workers/heartbeat", beat.clone()).await.is(200);
        for (path, body) in [("ack", bare.clone()), ("heartbeat", beat)] {
            let refused = strict.post(&format!("/v1/workers/{path}"), body).await;
            assert_eq!(refused.is_error(409, "fence_required")["current_attempt"], 1);
        }
        let of_worker = json!({"worker_id": "w", "active_job_ids": [id]});
        strict.post("/v1/workers/heartbeat", of_worker).await.refuses("active_job_ids[0].attempt");
        let named = json!({"worker_id": "w", "active_jobs": [{"job_id": id, "attempt": 1}]});
        let beaten = strict.post("/v1/workers/heartbeat", named).await.is(200);
        assert_eq!(beaten["jobs"][0]["status"], "ok");
        strict.ack(&leased, "w", "succeeded").await.is(200);
    });
}

#[test]
fn a_job_that_changes_while_it_succeeds_is_not_kept_beside_its_success() {
    const JOBS: usize = 400;
    run_alone(async |t| {
        let job = json!({"job_type": "t", "queue": "default"});
        t.post("/v1/jobs/batch", json!({"jobs": vec![job; JOBS]})).await.is(201);
        let mut leased = Vec::new();
        while leased.len() < JOBS {
            leased.extend(t.poll("w", 50).await);
        }
        // As heartbeats do, but without a pause: rows get new versions while acks look at them.
        let beating = tokio::spawn({
            let database = t.database.clone();
            async move {
                let mut conn = database.connect().await;
                loop {
                    let beat = "update jobs set lease_expires_at = lease_expires_at
                                where id in (select id from jobs order by random() limit 20)";
                    sqlx::query(beat).execute(&mut conn).await.expect("it beats");
                }
            }
        });
        let mut acking = tokio::task::JoinSet::new();
        for one in leased {
            let t = t.clone();
            acking.spawn(async move { t.ack(&one, "w", "succeeded").await.is(200) });
        }
        acking.join_all().await;
        beating.abort();
        let both = "select count(*) from jobs join finished_jobs using (project_id, id)";
        assert_eq!(t.database.number(both).await, 0);
        let done = "select count(*) from finished_jobs where state = 'succeeded'";
        assert_eq!(t.database.number(done).await, i64::try_from(JOBS).expect("a number"));
    });
}
