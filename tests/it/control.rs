//! Cancel, change, retry.

use crate::harness::{Reply, TestProject, TestServer, fresh_database, limited, run, run_alone};
use reqwest::Method;
use serde_json::{Value, json};

async fn patch(t: &TestProject, id: &str, body: Value) -> Reply {
    let request = t.request(Method::PATCH, &format!("/v1/jobs/{id}")).json(&body);
    Reply::of(request.send().await.expect("an answer")).await
}

async fn act(t: &TestProject, id: &str, what: &str) -> Reply {
    t.post(&format!("/v1/jobs/{id}/{what}"), json!({})).await
}

fn kinds(history: &Value) -> Vec<String> {
    let events = history["events"].as_array().expect("events");
    events.iter().map(|it| it["type"].as_str().expect("a type").to_owned()).collect()
}

#[test]
fn a_waiting_job_is_cancelled_at_once_and_stays_so() {
    run(async |t| {
        let pending = t.enqueue(json!({})).await;
        let later = t.enqueue(json!({"delay_seconds": 60})).await;
        for id in [&pending, &later] {
            for _ in 0..2 {
                let job = act(t, id, "cancel").await.is(200);
                assert_eq!((&job["state"], &job["attempt"]), (&json!("cancelled"), &json!(0)));
                assert!(job["completed_at"].is_string());
            }
            let asked = t.get(&format!("/v1/jobs/{id}/cancelled")).await.is(200);
            assert_eq!(asked, json!({"cancelled": true}));
        }
        assert!(t.poll("w", 10).await.is_empty());
    });
}

#[test]
fn a_cancel_reaches_the_worker_and_its_ack_decides() {
    run(async |t| {
        let ends = [
            ("failed", "cancelled", "cancelled"),
            ("released", "cancelled", "cancelled"),
            ("succeeded", "succeeded", "succeeded"),
        ];
        for (status, state, outcome) in ends {
            let id = t.enqueue(json!({})).await;
            let job = t.lease("w").await;
            assert_eq!(t.heartbeat(&job, "w").await.is(200), json!({"status": "ok"}));
            let cancelled = act(t, &id, "cancel").await.is(200);
            assert_eq!(
                (&cancelled["state"], &cancelled["cancel_requested"]),
                (&json!("processing"), &json!(true))
            );
            act(t, &id, "cancel").await.is(200);
            assert_eq!(t.heartbeat(&job, "w").await.is(200), json!({"status": "cancel"}));
            let asked = t.get(&format!("/v1/jobs/{id}/cancelled")).await.is(200);
            assert_eq!(asked, json!({"cancelled": true}));
            for _ in 0..2 {
                let reply = t.ack(&job, "w", status).await.is(200);
                assert_eq!(reply, json!({"action": "done"}), "{status}");
            }
            let job = t.job(&id).await;
            assert_eq!(job["state"], state);
            assert_eq!(job["attempts"][0]["outcome"], outcome);
            let history = t.get(&format!("/v1/jobs/{id}/events")).await.is(200);
            let requested = kinds(&history).iter().filter(|it| it.ends_with("requested")).count();
            assert_eq!(requested, 1, "{history}");
        }
    });
}

#[test]
fn a_cancelled_job_whose_worker_falls_silent_is_not_run_again() {
    run_alone(async |t| {
        let id = t.enqueue(json!({})).await;
        t.lease("w").await;
        act(t, &id, "cancel").await.is(200);
        t.expire_leases().await;
        let job = t.job_becomes(&id, "cancelled").await;
        assert_eq!(job["attempts"][0]["outcome"], "cancelled");
    });
}

#[test]
fn what_has_ended_otherwise_cannot_be_cancelled_and_what_has_not_cannot_be_retried() {
    run(async |t| {
        let done = t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        act(t, &done, "retry").await.is_error(409, "invalid_state");
        t.ack(&job, "w", "succeeded").await.is(200);
        for what in ["cancel", "retry"] {
            let error = act(t, &done, what).await.is_error(409, "invalid_state");
            assert_eq!(error["job_state"], "succeeded");
        }
        let dead = t.enqueue(json!({"max_attempts": 1})).await;
        let job = t.lease("w").await;
        t.ack(&job, "w", "failed").await.is(200);
        act(t, &dead, "cancel").await.is_error(409, "invalid_state");
        act(t, "job_01m7w3ha3aextt8pkwwdmxsmqw", "cancel").await.is_error(404, "job_not_found");
        act(t, "nonsense", "retry").await.is_error(404, "job_not_found");
    });
}

#[test]
fn a_retried_job_starts_its_failures_anew_and_its_attempts_grow_on() {
    run(async |t| {
        let id = t.enqueue(json!({"max_attempts": 1})).await;
        let first = t.lease("w").await;
        t.ack(&first, "w", "failed").await.is(200);
        assert_eq!(t.job(&id).await["state"], "dead_letter");
        let job = act(t, &id, "retry").await.is(200);
        assert_eq!((&job["state"], &job["failures"]), (&json!("pending"), &json!(0)));
        assert_eq!((&job["attempt"], &job["completed_at"]), (&json!(1), &Value::Null));
        let second = t.lease("w").await;
        assert_eq!((&second["id"], &second["attempt"]), (&json!(id), &json!(2)));
        act(t, &id, "cancel").await.is(200);
        t.ack(&second, "w", "released").await.is(200);
        let job = act(t, &id, "retry").await.is(200);
        assert_eq!((&job["state"], &job["cancel_requested"]), (&json!("pending"), &json!(false)));
        assert_eq!(job["attempt"], 2);
        let third = t.lease("w").await;
        assert_eq!(third["attempt"], 3);
        t.ack(&first, "w", "failed").await.is(200);
        t.ack(&first, "w", "succeeded").await.is_error(409, "stale_lease");
        t.ack(&third, "w", "succeeded").await.is(200);
        let history = t.get(&format!("/v1/jobs/{id}/events")).await.is(200);
        assert_eq!(
            kinds(&history),
            [
                "fencepost.enqueued",
                "fencepost.claimed",
                "fencepost.failed",
                "fencepost.dead_lettered",
                "fencepost.retried",
                "fencepost.claimed",
                "fencepost.cancel_requested",
                "fencepost.cancelled",
                "fencepost.retried",
                "fencepost.claimed",
                "fencepost.succeeded",
            ]
        );
    });
}

#[test]
fn a_waiting_job_can_be_moved_hurried_and_put_off() {
    run(async |t| {
        let first = t.enqueue(json!({})).await;
        let second = t.enqueue(json!({})).await;
        assert_eq!(patch(t, &second, json!({"priority": 7})).await.is(200)["priority"], 7);
        assert_eq!(t.lease("w").await["id"], second);
        let job = patch(t, &first, json!({"queue": "other", "delay_seconds": 3600})).await.is(200);
        assert_eq!((&job["queue"], &job["state"]), (&json!("other"), &json!("scheduled")));
        let other = json!({"worker_id": "w", "queues": ["other"], "wait_seconds": 0});
        assert!(t.polled(other.clone()).await.is_empty());
        let waiting = {
            let (t, other) = (t.clone(), json!({"worker_id": "w", "queues": ["other"]}));
            tokio::spawn(async move { t.polled(other).await })
        };
        let job = patch(t, &first, json!({"run_at": "2020-01-01T00:00:00Z"})).await.is(200);
        assert_eq!(job["run_at"], "2020-01-01T00:00:00Z");
        assert_eq!(waiting.await.expect("an answer")[0]["id"], first);
        patch(t, &first, json!({"priority": 1})).await.is_error(409, "invalid_state");
    });
}

#[test]
fn a_bad_change_of_a_job_is_refused_with_its_field() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        patch(t, &id, json!({})).await.refuses("body");
        patch(t, &id, json!({"priority": 101})).await.refuses("priority");
        patch(t, &id, json!({"queue": ""})).await.refuses("queue");
        patch(t, &id, json!({"delay_seconds": -1})).await.refuses("delay_seconds");
        patch(t, &id, json!({"run_at": "2999-01-01T00:00:00Z"})).await.refuses("run_at");
        let both = json!({"run_at": "2020-01-01T00:00:00Z", "delay_seconds": 1});
        patch(t, &id, both).await.refuses("delay_seconds");
        patch(t, &id, json!({"state": "succeeded"})).await.refuses("state");
        assert_eq!(t.job(&id).await["state"], "pending");
    });
}

#[test]
fn a_race_of_cancel_claim_and_ack_ends_in_exactly_one_way() {
    run(async |t| {
        for round in 0..30 {
            let id = t.enqueue(json!({})).await;
            let cancel = async { act(t, &id, "cancel").await.status.as_u16() };
            let work = async {
                let Some(job) = t.poll("w", 1).await.pop() else { return false };
                t.ack(&job, "w", "succeeded").await.is(200);
                true
            };
            let (cancelled, worked) = tokio::join!(cancel, work);
            let job = t.job(&id).await;
            let expected = match (cancelled, worked) {
                (200 | 409, true) => "succeeded",
                (200, false) => "cancelled",
                other => panic!("round {round}: {other:?}"),
            };
            assert_eq!(job["state"], expected, "round {round}");
        }
    });
}

#[test]
fn a_job_that_was_not_begun_in_time_is_cancelled_by_parent() {
    run_alone(async |t| {
        let late = t.enqueue_expired(json!({})).await;
        let job = t.job_becomes(&late, "cancelled").await;
        assert_eq!(job["attempt"], 0);
        assert!(t.poll("w", 1).await.is_empty(), "it was not handed out either");
        let history = t.get(&format!("/v1/jobs/{late}/events")).await.is(200);
        assert_eq!(kinds(&history), ["fencepost.enqueued", "fencepost.expired"]);
        let running = t.enqueue(json!({"expires_at": "2999-01-01T00:00:00Z"})).await;
        let job = t.lease("w").await;
        t.database.execute("update jobs set expires_at = now() - interval '1 s'").await;
        t.ack(&job, "w", "succeeded").await.is(200);
        assert_eq!(t.job(&running).await["state"], "succeeded");
        let wrong = json!({
            "job_type": "t", "run_at": "2020-01-02T00:00:00Z", "expires_at": "2020-01-01T00:00:00Z",
        });
        t.post("/v1/jobs", wrong).await.refuses("expires_at");
        for start in [json!({}), json!({"delay_seconds": 60})] {
            let mut past = start;
            past["job_type"] = json!("t");
            past["expires_at"] = json!("2020-01-01T00:00:00Z");
            t.post("/v1/jobs", past.clone()).await.refuses("expires_at");
            let batch = json!({"jobs": [{"job_type": "t"}, past]});
            t.post("/v1/jobs/batch", batch).await.refuses("jobs[1].expires_at");
        }
        let far = json!({"delay_seconds": 60, "expires_at": "2999-01-01T00:00:00.0000009Z"});
        let far = t.enqueue(far).await;
        assert_eq!(t.job(&far).await["expires_at"], "2999-01-01T00:00:00Z");
        let too_late = json!({"run_at": "2999-01-02T00:00:00Z"});
        t.patch(&format!("/v1/jobs/{far}"), too_late).await.refuses("run_at");
        // After a retry it has no expiry.
        assert_eq!(act(t, &late, "retry").await.is(200)["state"], "pending");
        assert_eq!(t.lease("w").await["id"], late);
    });
}

#[test]
fn another_project_sees_and_touches_nothing() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (ours, theirs) = (server.project("ours").await, server.project("theirs").await);
        let id = ours.enqueue(json!({})).await;
        for what in ["cancel", "retry"] {
            act(&theirs, &id, what).await.is_error(404, "job_not_found");
        }
        patch(&theirs, &id, json!({"priority": 1})).await.is_error(404, "job_not_found");
        for what in ["cancelled", "explain", "events", "logs", "logs/stream", "events/stream"] {
            theirs.get(&format!("/v1/jobs/{id}/{what}")).await.is_error(404, "job_not_found");
        }
        let child = json!({"job_type": "t", "parent_job_id": id});
        theirs.post("/v1/jobs", child).await.refuses("parent_job_id");
        assert_eq!(ours.job(&id).await["priority"], 0);
        server.stop().await;
    });
}
