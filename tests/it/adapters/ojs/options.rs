//! Open Job Spec: options of a job that bound its reservations, and the rate of its queue.

use super::{OJS, enqueue, fetch, fetch_one, read, refused};
use crate::harness::{LoneProject, eventually, run, run_alone};
use serde_json::{Value, json};

fn with_options(options: Value) -> Value {
    json!({"type": "options.test", "args": [], "options": options})
}

/// The length of the lease of the job that is active, from its claim, and as it is renewed.
async fn lease_seconds(t: &LoneProject) -> (i64, i64) {
    let lasts = "select extract(epoch from lease_expires_at - claimed_at)::bigint from jobs";
    let renewed = "select lease_seconds::bigint from jobs";
    (t.database.number(lasts).await, t.database.number(renewed).await)
}

#[test]
fn a_reservation_is_as_long_as_the_fetch_or_else_the_job_asks_within_the_timeout() {
    run_alone(async |t| {
        let cases = [
            (json!({}), None, 1_800),
            (json!({"visibility_timeout_ms": 3_000}), None, 3),
            (json!({"visibility_timeout_ms": 2_500}), None, 3),
            (json!({"visibility_timeout_ms": 3_000}), Some(60_000), 60),
            (json!({"timeout_ms": 2_000}), None, 2),
            (json!({"timeout_ms": 2_000, "visibility_timeout_ms": 60_000}), None, 2),
            (json!({"timeout_ms": 90_000}), Some(60_000), 60),
        ];
        for (options, asked_ms, expected) in cases {
            let job = enqueue(t, with_options(options.clone())).await;
            let mut wanted = json!({"queues": ["default"]});
            if let Some(ms) = asked_ms {
                wanted["visibility_timeout_ms"] = json!(ms);
            }
            let reply = t.post(&format!("{OJS}/workers/fetch"), wanted).await.is(200);
            assert_eq!(reply["jobs"][0]["id"], job["id"]);
            assert_eq!(lease_seconds(t).await, (expected, expected), "{options} {asked_ms:?}");
            let id = job["id"].as_str().expect("an id");
            t.delete(&format!("{OJS}/jobs/{id}")).await.is(200);
        }
    });
}

#[test]
fn a_run_that_exceeds_its_timeout_is_a_failed_attempt_without_grace() {
    run_alone(async |t| {
        let retry = json!({"max_attempts": 2, "initial_interval": "PT9S", "jitter": false});
        let job = enqueue(t, with_options(json!({"timeout_ms": 2_000, "retry": retry}))).await;
        fetch_one(t, "default").await;
        t.database
            .execute(
                "update jobs set claimed_at = claimed_at - interval '2 s',
                                 lease_expires_at = lease_expires_at - interval '2 s'",
            )
            .await;
        let seen = eventually("the attempt to end", async || {
            let seen = read(t, &job).await;
            (seen["state"] != "active").then_some(seen)
        })
        .await;
        assert_eq!(
            (&seen["state"], &seen["error"]["type"]),
            (&json!("retryable"), &json!("timeout"))
        );
    });
}

#[test]
fn a_job_may_set_the_rate_limit_of_its_queue_if_its_key_may() {
    run_alone(async |t| {
        let job = with_options(json!({"queue": "slow", "rate_limit": {"max_per_second": 1}}));
        let producer = json!({"name": "producer", "scopes": ["produce", "read"]});
        let key = t.post("/v1/keys", producer).await.is(201)["secret"].clone();
        let with_key = async || {
            let request = t.client.post(format!("{}{OJS}/jobs", t.url));
            let request = request.bearer_auth(key.as_str().expect("a key")).json(&job);
            crate::harness::Reply::of(request.send().await.expect("an answer")).await
        };
        with_key().await.is(403);
        for _ in 0..3 {
            enqueue(t, job.clone()).await;
        }
        with_key().await.is(201);
        let limit = t.get("/v1/queues/slow").await.is(200)["rate_limit"].clone();
        assert_eq!(limit, json!({"count": 1, "per_seconds": 1}));
        assert_eq!(fetch(t, "slow", 5).await.len(), 1);
        assert!(fetch(t, "slow", 5).await.is_empty());
        let changes = "select count(*) from audit_log where action = 'queue.changed'";
        assert_eq!(t.database.number(changes).await, 1, "only the first changed it");
        for limit in [json!({"max_per_second": 0}), json!({"key": "k"}), json!(true)] {
            let job = with_options(json!({"rate_limit": limit}));
            t.post(&format!("{OJS}/jobs"), job).await.is(400);
        }
    });
}

#[test]
fn a_job_may_carry_a_directive_for_its_worker_in_test_mode_only() {
    run_alone(async |t| {
        for mode in ["live", "test"] {
            t.database.execute(&format!("update projects set mode = '{mode}'")).await;
            for directive in ["quiet", "terminate", "running", "nonsense"] {
                let metadata = json!({"test_directive": directive});
                let job = enqueue(t, with_options(json!({"metadata": metadata}))).await;
                let worker = format!("{mode}-{directive}");
                let wanted = json!({"queues": ["default"], "worker_id": worker});
                let fetched = t.post(&format!("{OJS}/workers/fetch"), wanted).await.is(200);
                assert_eq!(fetched["jobs"][0]["id"], job["id"]);
                let beat = json!({"worker_id": worker, "active_jobs": [job["id"]]});
                let reported = t.post(&format!("{OJS}/workers/heartbeat"), beat).await.is(200);
                let is_obeyed = mode == "test" && ["quiet", "terminate"].contains(&directive);
                assert_eq!(reported["state"], if is_obeyed { directive } else { "running" });
                super::settle(t, "ack", &job, json!({"worker_id": worker})).await.is(200);
            }
        }
    });
}

#[test]
fn a_pending_job_waits_until_it_is_activated_and_then_for_its_own_time() {
    run(async |t| {
        let now = enqueue(t, with_options(json!({"pending": true}))).await;
        let later = json!({"pending": true, "delay_until": "2099-01-01T00:00:00Z"});
        let later = enqueue(t, with_options(later)).await;
        assert_eq!((&now["state"], &now["scheduled_at"]), (&json!("pending"), &Value::Null));
        assert_eq!(fetch(t, "default", 1).await, Vec::<Value>::new());
        let activate = async |job: &Value| {
            let id = job["id"].as_str().expect("an id");
            t.act(&format!("{OJS}/jobs/{id}/activate")).await
        };
        assert_eq!(activate(&now).await.is(200)["job"]["state"], "available");
        let reply = activate(&later).await.is(200);
        assert_eq!(reply["job"]["scheduled_at"], "2099-01-01T00:00:00.000Z");
        assert_eq!(reply["job"]["state"], "scheduled");
        assert_eq!(activate(&now).await.status, 409);
        assert_eq!(activate(&json!({"id": "no"})).await.status, 404);
        assert_eq!(fetch_one(t, "default").await["id"], now["id"]);
    });
}

#[test]
fn a_job_with_labels_goes_to_a_worker_that_has_them() {
    run(async |t| {
        let job = enqueue(t, with_options(json!({"labels": ["gpu"]}))).await;
        assert_eq!(job["labels"], json!(["gpu"]));
        for (worker, labels) in [("plain", json!([])), ("gpu", json!(["gpu", "big"]))] {
            let body = json!({"worker_id": worker, "queues": ["default"], "labels": labels});
            t.post(&format!("{OJS}/workers/register"), body).await.is(200);
            let wanted = json!({"queues": ["default"], "worker_id": worker});
            let reply = t.post(&format!("{OJS}/workers/fetch"), wanted).await.is(200);
            let expected = if worker == "gpu" { job["id"].clone() } else { Value::Null };
            assert_eq!(reply["jobs"][0]["id"], expected, "{worker}");
        }
    });
}

#[test]
fn options_beside_the_type_count_as_options() {
    run(async |t| {
        let job = enqueue(
            t,
            json!({
                "type": "a", "args": [], "queue": "reports", "priority": 7, "timeout": 90,
                "scheduled_at": "+PT1H", "retry": {"max_attempts": 9}, "unique": {"keys": ["type"]},
            }),
        );
        let job = job.await;
        assert_eq!((&job["queue"], &job["priority"]), (&json!("reports"), &json!(7)));
        assert_eq!((&job["timeout_ms"], &job["max_attempts"]), (&json!(90_000), &json!(9)));
        assert_eq!(job["state"], "scheduled");
        let path = format!("{OJS}/jobs");
        let same = json!({"type": "a", "args": [], "unique": {"keys": ["type"]}});
        refused(&t.post(&path, same).await, 409, "duplicate");
        let twice = json!({"type": "b", "args": [], "queue": "a", "options": {"queue": "a"}});
        enqueue(t, twice).await;
        for (odd, field) in [
            (json!({"queue": "a", "options": {"queue": "b"}}), "queue"),
            (json!({"timeout": 1, "options": {"timeout_ms": 2_000}}), "timeout"),
            (json!({"timeout": -1}), "timeout"),
            (json!({"queue": "A B"}), "options.queue"),
        ] {
            let mut body = json!({"type": "c", "args": []});
            body.as_object_mut().expect("an object").extend(odd.as_object().expect("one").clone());
            let error = refused(&t.post(&path, body).await, 400, "invalid_request");
            assert_eq!(error["details"]["fields"][0]["field"], field, "{odd}");
        }
        // The policy has a status of its own, wherever it stands.
        let odd = json!({"type": "c", "args": [], "retry": {"max_attempts": -1}});
        refused(&t.post(&path, odd).await, 422, "invalid_request");
    });
}

#[test]
fn progress_is_kept_between_its_bounds_with_its_message() {
    run(async |t| {
        let job = enqueue(t, with_options(json!({}))).await;
        let path = format!("{OJS}/jobs/{}/progress", job["id"].as_str().expect("an id"));
        assert_eq!(t.put(&path, json!({"progress": 0.5})).await.status, 409, "it does not run");
        fetch_one(t, "default").await;
        let half = json!({"progress": 0.5, "message": "Halfway"});
        assert_eq!(t.put(&path, half).await.is(200)["progress"], 0.5);
        assert_eq!(t.put(&path, json!({"progress": 1.5})).await.is(200)["progress"], 1.0);
        assert_eq!(t.put(&path, json!({"percentage": 75})).await.is(200)["progress"], 0.75);
        let seen = t.get(&path).await.is(200);
        assert_eq!((&seen["progress"], &seen["message"]), (&json!(0.75), &json!("Halfway")));
        t.put(&path, json!({"progress": 1, "message": ""})).await.is(200);
        // As the libraries for Python and JavaScript report it.
        let workers = format!("{OJS}/workers/progress");
        let report = json!({"job_id": job["id"], "percentage": 25, "data": {"rows": 3}});
        assert_eq!(t.post(&workers, report).await.is(200)["job_id"], job["id"]);
        assert_eq!(t.get(&path).await.is(200)["progress"], 0.25);
        refused(&t.post(&workers, json!({"percentage": 1})).await, 400, "invalid_request");
        let unknown = json!({"job_id": "none", "percentage": 1});
        refused(&t.post(&workers, unknown).await, 404, "not_found");
        for odd in [json!({}), json!({"progress": "most"})] {
            assert_eq!(t.put(&path, odd.clone()).await.status, 400, "{odd}");
        }
    });
}
