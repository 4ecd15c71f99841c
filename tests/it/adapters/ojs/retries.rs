//! Open Job Spec: failures, retries, the dead letter, jobs that are unique, queues that are paused.

use super::{OJS, enqueue, fetch, fetch_one, read, refused, settle};
use crate::harness::{LoneProject, eventually, run, run_alone};
use serde_json::{Value, json};

fn with_retry(retry: Value) -> Value {
    json!({"type": "retry.test", "args": [], "options": {"retry": retry}})
}

fn broken(message: &str) -> Value {
    json!({"error": {"code": "handler_error", "message": message, "retryable": true}})
}

/// Lets jobs go whose backoff has just been looked at.
async fn end_backoffs(t: &LoneProject) {
    t.database
        .execute("update jobs set run_at = now() - interval '1 ms' where state = 'backoff'")
        .await;
}

/// Waits until there is a job to fetch.
async fn fetch_when_there(t: &LoneProject) -> Value {
    end_backoffs(t).await;
    eventually("a job", async || fetch(t, "default", 1).await.pop()).await
}

#[test]
fn retry_waits_grow_by_the_policy_and_are_reported() {
    run_alone(async |t| {
        let policies = [
            (json!({"backoff_coefficient": 10.0, "max_interval": "PT20S"}), [2_000, 20_000]),
            (json!({"backoff_strategy": "linear", "max_interval": "PT30S"}), [2_000, 4_000]),
            (json!({"backoff_coefficient": 1.0}), [2_000, 2_000]),
        ];
        for (mut policy, waits) in policies {
            let fields = policy.as_object_mut().expect("an object");
            fields.insert("max_attempts".into(), json!(4));
            fields.insert("initial_interval".into(), json!("PT2S"));
            fields.insert("jitter".into(), json!(false));
            let job = enqueue(t, with_retry(policy)).await;
            fetch_one(t, "default").await;
            for (attempt, wait) in (1..).zip(waits) {
                let reported = settle(t, "nack", &job, broken("no")).await.is(200);
                assert_eq!(
                    (&reported["state"], &reported["attempt"]),
                    (&json!("retryable"), &json!(attempt))
                );
                assert_eq!(
                    (&reported["retry_delay_ms"], &reported["max_attempts"]),
                    (&json!(wait), &json!(4))
                );
                assert!(reported["next_attempt_at"].is_string());
                let again = fetch_when_there(t).await;
                assert_eq!(
                    (&again["attempt"], &again["retry_delay_ms"]),
                    (&json!(attempt + 1), &json!(wait))
                );
            }
            settle(t, "ack", &job, json!({})).await.is(200);
            assert!(read(t, &job).await["error"].is_null(), "success clears the error");
        }
    });
}

#[test]
fn a_history_of_errors_is_kept_until_the_job_is_discarded() {
    run_alone(async |t| {
        let policy =
            json!({"max_attempts": 2, "initial_interval": "PT1S", "on_exhaustion": "dead_letter"});
        let job = enqueue(t, with_retry(policy)).await;
        fetch_one(t, "default").await;
        let first = json!({"error": {"code": "handler_error", "message": "first", "details": {"error_class": "SmtpError"}}});
        settle(t, "nack", &job, first).await.is(200);
        let seen = read(t, &job).await;
        assert_eq!((&seen["state"], &seen["attempt"]), (&json!("retryable"), &json!(1)));
        assert_eq!(
            (&seen["error"]["type"], &seen["error"]["message"]),
            (&json!("SmtpError"), &json!("first"))
        );
        fetch_when_there(t).await;
        let path = format!("{OJS}/jobs/{}/fail", job["id"].as_str().expect("an id"));
        let over = t.post(&path, broken("second")).await.is(200);
        assert_eq!((&over["state"], &over["attempt"]), (&json!("discarded"), &json!(2)));
        assert!(over["discarded_at"].is_string() && over["completed_at"].is_string());
        let letters = t.get(&format!("{OJS}/dead-letter")).await.is(200)["jobs"].clone();
        assert_eq!((&letters[0]["id"], &letters[0]["state"]), (&job["id"], &json!("discarded")));
        let reported = |it: &Value| (it["message"].clone(), it["attempt"].clone());
        let errors: Vec<_> =
            letters[0]["errors"].as_array().expect("errors").iter().map(reported).collect();
        assert_eq!(errors, [(json!("first"), json!(1)), (json!("second"), json!(2))]);
    });
}

#[test]
fn some_failures_are_final() {
    run(async |t| {
        let policy = json!({"max_attempts": 5, "non_retryable_errors": ["Auth.*", "FatalError"]});
        for class in ["FatalError", "Auth.TokenExpired"] {
            let job = enqueue(t, with_retry(policy.clone())).await;
            fetch_one(t, "default").await;
            let error = json!({"error": {"code": "handler_error", "message": "x", "details": {"error_class": class}}});
            assert_eq!(
                settle(t, "nack", &job, error).await.is(200)["state"],
                "discarded",
                "{class}"
            );
        }
        let job = enqueue(t, with_retry(policy)).await;
        fetch_one(t, "default").await;
        let error = json!({"error": {"code": "handler_error", "message": "x", "retryable": false}});
        assert_eq!(settle(t, "nack", &job, error).await.is(200)["state"], "discarded");
    });
}

#[test]
fn a_requeued_job_is_available_and_has_not_failed() {
    run(async |t| {
        let job = enqueue(t, with_retry(json!({"max_attempts": 1}))).await;
        fetch_one(t, "default").await;
        let back = json!({"requeue": true, "error": {"code": "cancelled", "message": "x", "retryable": false}});
        assert_eq!(settle(t, "nack", &job, back).await.is(200)["state"], "available");
        assert_eq!(fetch_one(t, "default").await["attempt"], 1);
    });
}

#[test]
fn a_broken_policy_has_a_status_of_its_own() {
    run(async |t| {
        let refuses = async |policy: Value, field: &str| {
            let reply = t.post(&format!("{OJS}/jobs"), with_retry(policy)).await;
            let error = refused(&reply, 422, "invalid_request");
            assert_eq!(error["type"], "validation_error");
            assert!(error["message"].as_str().expect("text").contains(field), "{error}");
        };
        refuses(json!({"max_attempts": -1}), "max_attempts").await;
        refuses(json!({"backoff_coefficient": 0.5}), "backoff_coefficient").await;
        refuses(json!({"initial_interval": "soon"}), "initial_interval").await;
    });
}

#[test]
fn a_dead_letter_is_retried_from_the_beginning_or_deleted() {
    run(async |t| {
        let dead = async || {
            let job = enqueue(t, with_retry(json!({"max_attempts": 1}))).await;
            fetch_one(t, "default").await;
            settle(t, "nack", &job, broken("x")).await.is(200);
            job
        };
        let (job, other) = (dead().await, dead().await);
        let path =
            |job: &Value| format!("{OJS}/dead-letter/{}", job["id"].as_str().expect("an id"));
        let again =
            t.post(&format!("{}/retry", path(&job)), json!({})).await.is(200)["job"].clone();
        assert_eq!((&again["state"], &again["attempt"]), (&json!("available"), &json!(0)));
        assert_eq!(fetch_one(t, "default").await["attempt"], 1);
        settle(t, "ack", &job, json!({})).await.is(200);
        let gone = t.delete(&path(&other)).await.is(200);
        assert_eq!((&gone["deleted"], &gone["job_id"]), (&json!(true), &other["id"]));
        assert_eq!(t.get(&format!("{OJS}/dead-letter")).await.is(200)["jobs"], json!([]));
        refused(&t.delete(&path(&other)).await, 404, "not_found");
        refused(&t.delete(&path(&job)).await, 409, "conflict");
    });
}

#[test]
fn an_id_that_is_used_again_refuses_the_attempts_of_the_deleted_job() {
    run(async |t| {
        let mut job = with_retry(json!({"max_attempts": 1}));
        job["id"] = json!(uuid::Uuid::now_v7());
        enqueue(t, job.clone()).await;
        let old = t.lease("w").await;
        t.ack(&old, "w", "failed").await.is(200);
        let id = job["id"].as_str().expect("an id");
        t.delete(&format!("{OJS}/dead-letter/{id}")).await.is(200);
        enqueue(t, job.clone()).await;
        let new = t.lease("w").await;
        assert_eq!((&old["attempt"], &new["attempt"]), (&json!(1), &json!(2)));
        let mut ack = json!({"job_id": new["id"], "worker_id": "w", "status": "succeeded"});
        ack["attempt"] = json!(1);
        t.post("/v1/workers/ack", ack).await.is_error(409, "stale_lease");
        t.ack(&new, "w", "succeeded").await.is(200);
    });
}

#[test]
fn a_job_with_the_id_of_a_deleted_one_keeps_its_time_when_it_is_cancelled_and_retried() {
    run_alone(async |t| {
        let id = uuid::Uuid::now_v7();
        t.database
            .execute(&format!(
                "insert into deleted_jobs (project_id, job_id, attempt)
                 select id, '{id}', 7 from projects where slug = 'main'"
            ))
            .await;
        let later =
            json!({"id": id, "type": "a", "args": [], "options": {"scheduled_at": "+PT1H"}});
        enqueue(t, later).await;
        let job = t.get("/v1/jobs").await.is(200)["jobs"][0].clone();
        assert_eq!((&job["state"], &job["attempt"]), (&json!("scheduled"), &json!(7)));
        let path = format!("/v1/jobs/{}", job["id"].as_str().expect("an id"));
        t.post(&format!("{path}/cancel"), json!({})).await.is(200);
        let again = t.post(&format!("{path}/retry"), json!({})).await.is(200);
        assert_eq!((&again["state"], &again["run_at"]), (&json!("scheduled"), &job["run_at"]));
    });
}

#[test]
fn a_reservation_that_runs_out_is_a_failed_attempt() {
    run_alone(async |t| {
        let job = enqueue(t, json!({"type": "a", "args": []})).await;
        let wanted = json!({"queues": ["default"], "visibility_timeout_ms": 60_000});
        t.post(&format!("{OJS}/workers/fetch"), wanted).await.is(200);
        t.expire_leases().await;
        let seen = eventually("the attempt to end", async || {
            let seen = read(t, &job).await;
            (seen["state"] != "active").then_some(seen)
        })
        .await;
        assert_eq!((&seen["state"], &seen["attempt"]), (&json!("available"), &json!(1)));
        assert_eq!(seen["error"]["type"], "lease_expired");
    });
}

#[test]
fn jobs_that_are_the_same_are_rejected_ignored_or_replaced() {
    run(async |t| {
        let job = |on_conflict: &str, keys: Value, args: Value| {
            let unique = json!({"keys": keys, "on_conflict": on_conflict});
            json!({"type": format!("unique.{on_conflict}"), "args": args, "options": {"unique": unique}})
        };
        let all = || json!(["type", "args"]);
        let path = format!("{OJS}/jobs");
        let first = enqueue(t, job("reject", all(), json!([{"b": 1, "a": 2}]))).await;
        let same = job("reject", all(), json!([{"a": 2, "b": 1}]));
        let error = refused(&t.post(&path, same).await, 409, "duplicate");
        assert_eq!(error["details"]["existing_job_id"], first["id"]);
        enqueue(t, job("reject", all(), json!([{"a": 3}]))).await;
        let first = enqueue(t, job("ignore", all(), json!([]))).await;
        let again = t.post(&path, job("ignore", all(), json!([]))).await.is(200);
        assert_eq!(again["job"]["id"], first["id"]);
        let twice = json!({"jobs": [
            job("ignore", all(), json!([])), job("ignore", all(), json!([])),
        ]});
        let both = t.post(&format!("{path}/batch"), twice).await.is(201);
        for it in both["jobs"].as_array().expect("jobs") {
            assert_eq!(it["id"], first["id"]);
        }
        assert_eq!(both["count"], 2);
        let old = enqueue(t, job("replace", json!(["type"]), json!([1]))).await;
        let new = enqueue(t, job("replace", json!(["type"]), json!([2]))).await;
        assert_eq!(
            (read(t, &old).await["state"].clone(), &new["args"]),
            (json!("cancelled"), &json!([2]))
        );
    });
}

#[test]
fn a_unique_key_is_made_as_the_libraries_name_it() {
    run(async |t| {
        let job = |unique: Value, args: Value| json!({"type": "a", "args": args, "options": {"unique": unique}});
        let path = format!("{OJS}/jobs");
        // As the library for Python sends it.
        let key = || json!({"key": ["type", "queue", "args"], "on_conflict": "ignore"});
        let first = enqueue(t, job(key(), json!([1]))).await;
        let other = enqueue(t, job(key(), json!([2]))).await;
        assert_ne!(first["id"], other["id"]);
        let again = t.post(&path, job(key(), json!([1]))).await.is(200);
        assert_eq!(again["job"]["id"], first["id"]);
        // As those for Java and Go do: fields of arguments, and a period in milliseconds.
        let key = || json!({"key": ["id"], "period_ms": 3_600_000, "on_conflict": "reject"});
        enqueue(t, job(key(), json!([{"id": 1, "at": 1}]))).await;
        enqueue(t, job(key(), json!([{"id": 2, "at": 1}]))).await;
        let same = t.post(&path, job(key(), json!([{"id": 1, "at": 2}]))).await;
        refused(&same, 409, "duplicate");
        // Whatever else is in the arguments, and however they are written.
        let key = || json!({"keys": ["args", "type"], "args_keys": ["n"], "period": "PT0S"});
        let precise =
            json!([{"n": 1, "score": 0.844_421_851_525_048_1, "at": 1_764_385_467_412_776_i64}]);
        enqueue(t, job(key(), precise)).await;
        let turned = json!({"keys": ["type", "args"], "args_keys": ["n"], "period_ms": 0});
        let same = t.post(&path, job(turned, json!([{"score": 1, "n": 1.0}]))).await;
        refused(&same, 409, "duplicate");
        for (odd, field) in [
            (json!({"key": ["id"]}), "key"),
            (json!({"keys": ["args"], "args_keys": ["user"]}), "args_keys"),
            (json!({"keys": ["argz"]}), "keys"),
            (json!({"keys": ["type"], "key": ["type"]}), "key"),
            (json!({"key": ["type"], "on_conflikt": "ignore"}), "on_conflikt"),
            (json!({"key": ["type"], "period_ms": -1}), "period_ms"),
            (json!({"keys": ["type", "meta"]}), "meta_keys"),
            (json!({"key": vec!["id"; 33]}), "key"),
            (json!({"keys": ["args"], "args_keys": [""]}), "args_keys[0]"),
        ] {
            let reply = t.post(&path, job(odd.clone(), json!([{"idd": 1}]))).await;
            let error = refused(&reply, 400, "invalid_request");
            let named = &error["details"]["fields"][0]["field"];
            assert_eq!(named, &json!(format!("options.unique.{field}")), "{odd}");
        }
    });
}

#[test]
fn a_unique_period_that_has_passed_lets_a_duplicate_of_a_live_job_be_stored() {
    run_alone(async |t| {
        let unique = json!({"keys": ["type"], "period": "PT1H"});
        let job = json!({"type": "a", "args": [], "options": {"unique": unique}});
        let first = enqueue(t, job.clone()).await;
        refused(&t.post(&format!("{OJS}/jobs"), job.clone()).await, 409, "duplicate");
        t.database.execute("update jobs set created_at = now() - interval '2 hours'").await;
        let second = enqueue(t, job.clone()).await;
        assert_ne!(first["id"], second["id"]);
        assert_eq!(read(t, &first).await["state"], "available");
        refused(&t.post(&format!("{OJS}/jobs"), job).await, 409, "duplicate");
    });
}

#[test]
fn many_jobs_are_stored_all_or_none_and_counted() {
    run(async |t| {
        let job = || json!({"type": "a", "args": [], "options": {"queue": "bulk"}});
        let jobs = |many: usize| json!({"jobs": (0..many).map(|_| job()).collect::<Vec<_>>()});
        let stored = t.post(&format!("{OJS}/jobs/batch"), jobs(100)).await.is(201);
        assert_eq!(
            (&stored["count"], stored["jobs"].as_array().map(Vec::len)),
            (&json!(100), Some(100))
        );
        let stats = t.get(&format!("{OJS}/queues/bulk/stats")).await.is(200)["queue"].clone();
        assert_eq!((&stats["name"], &stats["available"]), (&json!("bulk"), &json!(100)));
        let bad = json!({"jobs": [job(), {"args": []}]});
        let error =
            refused(&t.post(&format!("{OJS}/jobs/batch"), bad).await, 400, "invalid_request");
        assert!(error["message"].as_str().expect("text").contains("jobs[1].type"), "{error}");
        assert_eq!(
            t.get(&format!("{OJS}/queues/bulk/stats")).await.is(200)["queue"]["available"],
            100
        );
        t.post(&format!("{OJS}/jobs/batch"), json!({"jobs": []})).await.is(400);
    });
}

#[test]
fn a_paused_queue_takes_jobs_and_hands_out_none() {
    run(async |t| {
        let queue = format!("{OJS}/queues/default");
        let paused = t.post(&format!("{queue}/pause"), json!({})).await.is(200)["queue"].clone();
        assert_eq!((&paused["name"], &paused["paused"]), (&json!("default"), &json!(true)));
        let job = enqueue(t, json!({"type": "a", "args": []})).await;
        assert_eq!(job["state"], "available");
        assert!(fetch(t, "default", 1).await.is_empty());
        let listed = t.get(&format!("{OJS}/queues")).await.is(200)["queues"].clone();
        assert_eq!(
            (&listed[0]["name"], &listed[0]["status"]),
            (&json!("default"), &json!("paused"))
        );
        let resumed = t.post(&format!("{queue}/resume"), json!({})).await.is(200);
        assert_eq!(resumed["queue"]["paused"], false);
        assert_eq!(fetch_one(t, "default").await["id"], job["id"]);
        settle(t, "ack", &job, json!({})).await.is(200);
        let stats = t.get(&format!("{queue}/stats")).await.is(200)["queue"].clone();
        let counts = ["available", "active", "completed"].map(|it| stats[it].clone());
        assert_eq!(counts, [0, 0, 1]);
        let log = t.get("/v1/audit-log").await.is(200).to_string();
        assert!(log.contains("queue.paused") && log.contains("queue.resumed"), "{log}");
    });
}
