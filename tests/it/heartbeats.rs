//! Signs of life, and how long they last.

use crate::harness::{TestProject, run, run_alone};
use chrono::{DateTime, Utc};
use serde_json::{Value, json};

async fn lease_seconds_left(t: &TestProject, id: &Value) -> f64 {
    let job = t.job(id.as_str().expect("an id")).await;
    let time = |field: &str| -> DateTime<Utc> {
        job[field].as_str().expect("a time").parse().expect("RFC 3339")
    };
    (time("lease_expires_at") - time("claimed_at")).as_seconds_f64()
}

#[test]
fn a_heartbeat_renews_the_lease_by_its_own_length() {
    run_alone(async |t| {
        t.enqueue(json!({"timeout_seconds": 600})).await;
        let poll = json!({"worker_id": "w", "queues": ["default"], "lease_seconds": 40});
        let job = t.polled(poll).await.pop().expect("a job");
        assert_eq!(
            (&job["lease_seconds"], &job["heartbeat_interval_seconds"]),
            (&json!(40), &json!(13))
        );
        // The lease is 30 s old.
        t.database
            .execute(
                "update jobs set claimed_at = claimed_at - interval '30 s',
                                 lease_expires_at = lease_expires_at - interval '30 s'",
            )
            .await;
        assert_eq!(t.heartbeat(&job, "w").await.is(200), json!({"status": "ok"}));
        let left = lease_seconds_left(t, &job["id"]).await;
        assert!((70.0..75.0).contains(&left), "{left}");
    });
}

#[test]
fn a_lease_never_outlives_the_jobs_timeout_and_its_grace() {
    run(async |t| {
        t.enqueue(json!({"timeout_seconds": 20})).await;
        let poll = json!({"worker_id": "w", "queues": ["default"], "lease_seconds": 500});
        let job = t.polled(poll).await.pop().expect("a job");
        assert_eq!(lease_seconds_left(t, &job["id"]).await, 30.0);
        t.heartbeat(&job, "w").await.is(200);
        assert_eq!(lease_seconds_left(t, &job["id"]).await, 30.0);
    });
}

#[test]
fn a_poll_that_names_no_lease_gets_half_of_the_timeout_but_at_least_thirty_seconds() {
    run(async |t| {
        for (timeout, lease, interval) in
            [(1800, 900, 300), (100, 50, 16), (40, 30, 10), (1, 11, 3)]
        {
            t.enqueue(json!({"timeout_seconds": timeout})).await;
            let job = t.lease("w").await;
            assert_eq!(job["lease_seconds"], lease, "{timeout}");
            assert_eq!(job["heartbeat_interval_seconds"], interval, "{timeout}");
        }
    });
}

#[test]
fn progress_is_kept_until_it_is_reported_anew() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        let beat = json!({"job_id": id, "worker_id": "w", "progress": 0.25});
        t.post("/v1/workers/heartbeat", beat).await.is(200);
        t.heartbeat(&job, "w").await.is(200);
        assert_eq!(t.job(&id).await["progress"], 0.25);
        for bad in [json!(-0.1), json!(1.1), json!("x")] {
            let beat = json!({"job_id": id, "worker_id": "w", "progress": bad});
            t.post("/v1/workers/heartbeat", beat).await.refuses("progress");
        }
    });
}

#[test]
fn an_expired_lease_cannot_be_renewed() {
    run_alone(async |t| {
        t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        // The reaper looks after a gap first, so the lease stays as it is for this moment.
        t.database.execute("drop table reaper_state").await;
        t.expire_leases().await;
        t.heartbeat(&job, "w").await.is_error(409, "stale_lease");
        t.ack(&job, "w", "succeeded").await.is(200);
        t.heartbeat(&job, "w").await.is_error(409, "invalid_state");
    });
}

#[test]
fn each_entry_of_a_workers_heartbeat_is_answered_for_its_own_attempt() {
    run(async |t| {
        t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        let entry = |attempt: u32| json!({"job_id": job["id"], "attempt": attempt});
        for attempts in [[1, 9], [9, 1], [1, 1]] {
            let beat = json!({"worker_id": "w", "active_jobs": attempts.map(entry)});
            let reply = t.post("/v1/workers/heartbeat", beat).await.is(200);
            let seen = [0, 1].map(|it| reply["jobs"][it]["status"].clone());
            let expected = attempts.map(|it| json!(if it == 1 { "ok" } else { "lost" }));
            assert_eq!(seen, expected, "{attempts:?}");
        }
    });
}
