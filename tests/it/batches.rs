//! Callbacks of jobs and of batches: what an end enqueues, exactly once.

mod open;
mod pace;

use std::collections::BTreeMap;

use crate::harness::{
    LoneProject, TestProject, TestServer, fresh_database, limited, run, run_alone, until,
};
use fencepost_engine::maintenance::idle_batches;
use serde_json::{Value, json};

async fn lease_from(t: &TestProject, queue: &str) -> Value {
    let poll = json!({
        "worker_id": "w", "queues": [queue], "capacity": 1, "wait_seconds": 20,
    });
    let polled = t.post("/v1/workers/poll", poll).await.is(200);
    assert_eq!(polled["jobs"].as_array().map(Vec::len), Some(1), "nothing came");
    polled["jobs"][0].clone()
}

async fn end(t: &TestProject, queue: &str, status: &str) -> Value {
    let job = lease_from(t, queue).await;
    let more = match status {
        "failed" => json!({"retryable": false, "error": {"type": "E", "message": "why"}}),
        _ => json!({"result": 7}),
    };
    t.ack_with(&job, "w", status, more).await.is(200);
    job
}

/// The number of jobs of each type that were ever stored.
async fn stored(t: &LoneProject) -> BTreeMap<String, i64> {
    let mut counts = BTreeMap::new();
    for job_type in ["success", "failure", "complete"] {
        let stored = format!(
            "select (select count(*) from jobs where job_type = '{job_type}')
                  + (select count(*) from finished_jobs where job_type = '{job_type}')"
        );
        counts.insert(job_type.to_owned(), t.database.number(&stored).await);
    }
    counts
}

/// Waits until the loop has nothing to do.
async fn settled(t: &LoneProject) {
    t.database.until("select count(*) from job_ends", 0).await;
}

fn callbacks() -> Value {
    json!({
        "on_success": {"job_type": "success", "queue": "success", "payload": {"a": 1.50}},
        "on_failure": {"job_type": "failure", "queue": "failure"},
        "on_complete": {"job_type": "complete", "queue": "complete", "payload": [1]},
    })
}

fn with(mut object: Value, more: &Value) -> Value {
    object.as_object_mut().expect("one").extend(more.as_object().expect("one").clone());
    object
}

#[test]
fn the_end_of_a_job_enqueues_its_callbacks_with_what_it_left() {
    run_alone(async |t| {
        let id = t.enqueue(with(json!({"queue": "q"}), &callbacks())).await;
        let shown = |it: &Value| json!([it["on"], it["queue"]]);
        let listed = t.job(&id).await["callbacks"].as_array().expect("a list").clone();
        let listed: Vec<_> = listed.iter().map(shown).collect();
        assert_eq!(
            listed,
            [
                json!(["success", "success"]),
                json!(["failure", "failure"]),
                json!(["complete", "complete"])
            ]
        );
        end(t, "q", "succeeded").await;
        let job = lease_from(t, "success").await;
        let ended = json!({
            "job_id": id, "state": "succeeded", "final_state": "succeeded", "end_number": 1,
        });
        assert_eq!(job["payload"], json!({"a": 1.50, "ended": ended}));
        let parent = &job["parent_results"][0];
        assert_eq!((&parent["job_id"], &parent["result"]), (&json!(id), &json!(7)));
        let job = lease_from(t, "complete").await;
        assert_eq!(job["payload"], json!([1]), "no object: nothing is added");
        settled(t).await;
        assert_eq!(stored(t).await["failure"], 0);
    });
}

#[test]
fn a_callback_says_how_its_job_was_cancelled() {
    run_alone(async |t| {
        let shown_in = async |queue: &str| {
            let ended = lease_from(t, queue).await["payload"]["ended"].clone();
            (ended["state"].clone(), ended["final_state"].clone())
        };
        let on = |queue: &str| json!({"job_type": "t", "queue": queue});
        let parent = t.enqueue(json!({"queue": "parents"})).await;
        t.enqueue(json!({
            "depends_on": [{"job_id": parent, "when": "failed"}],
            "on_failure": on("failure"), "on_complete": on("skip"),
        }))
        .await;
        end(t, "parents", "succeeded").await;
        assert_eq!(shown_in("skip").await, (json!("cancelled"), json!("skipped")));

        let late = json!({"delay_seconds": 3600, "on_failure": on("cancel")});
        let id = t.enqueue(late).await;
        t.act(&format!("/v1/jobs/{id}/cancel")).await.is(200);
        assert_eq!(shown_in("cancel").await, (json!("cancelled"), json!("cancelled")));

        let late = json!({"queue": "nobodys"});
        t.enqueue_expired(with(late, &json!({"on_failure": on("expiry")}))).await;
        assert_eq!(shown_in("expiry").await, (json!("cancelled"), json!("expired")));
        let none = json!({"worker_id": "w", "queues": ["failure"]});
        assert_eq!(t.post("/v1/workers/poll", none).await.is(200)["jobs"], json!([]));
    });
}

#[test]
fn each_end_of_a_retried_job_enqueues_them_once() {
    run_alone(async |t| {
        let id = t.enqueue(with(json!({"queue": "q"}), &callbacks())).await;
        for number in 1..=2 {
            end(t, "q", "failed").await;
            let job = lease_from(t, "failure").await;
            let state = "dead_letter";
            let ended = json!({
                "job_id": id, "state": state, "final_state": state, "end_number": number,
            });
            assert_eq!(job["payload"], json!({"ended": ended}));
            assert_eq!(job["parent_results"][0]["error"]["message"], "why");
            t.post(&format!("/v1/jobs/{id}/retry"), json!({})).await.is(200);
        }
        t.post(&format!("/v1/jobs/{id}/cancel"), json!({})).await.is(200);
        assert_eq!(lease_from(t, "failure").await["payload"]["ended"]["state"], "cancelled");
        t.post(&format!("/v1/jobs/{id}/retry"), json!({})).await.is(200);
        end(t, "q", "succeeded").await;
        let job = lease_from(t, "success").await;
        assert_eq!(job["payload"]["ended"]["end_number"], 4);
        settled(t).await;
        let expected = [("complete", 4), ("failure", 3), ("success", 1)];
        let expected = expected.map(|(name, count)| (name.to_owned(), count));
        assert_eq!(stored(t).await, BTreeMap::from(expected));
    });
}

#[test]
fn callbacks_follow_each_other_within_their_bounds() {
    run(async |t| {
        let mut chain = json!({"job_type": "success", "queue": "last"});
        for _ in 0..4 {
            chain = json!({"job_type": "t", "queue": "q", "on_complete": chain});
        }
        t.enqueue(json!({"queue": "q", "on_success": chain})).await;
        for _ in 0..5 {
            end(t, "q", "succeeded").await;
        }
        end(t, "last", "succeeded").await;
        let too_deep = json!({"job_type": "t", "on_success": {
            "job_type": "t", "on_success": chain,
        }});
        t.post("/v1/jobs", too_deep).await.refuses("on_success");
        let bad = json!({"job_type": "t", "on_failure": {"job_type": "t", "priority": 1_000_000}});
        t.post("/v1/jobs", bad).await.refuses("on_failure.priority");
        let unknown = json!({"job_type": "t", "on_complete": {"job_type": "t", "run_at": null}});
        t.post("/v1/jobs", unknown).await.refuses("on_complete.run_at");
        let nested = json!({"jobs": [
            {"job_type": "t", "on_success": {"job_type": "t", "on_failure": {"job_type": ""}}},
        ]});
        t.post("/v1/jobs/batch", nested).await.refuses("jobs[0].on_success.on_failure.job_type");
    });
}

async fn make_batch(t: &TestProject) -> String {
    let made = t.post("/v1/batches", with(json!({"name": "n"}), &callbacks())).await.is(201);
    assert_eq!((&made["state"], &made["total_jobs"]), (&json!("open"), &json!(0)));
    made["id"].as_str().expect("an id").to_owned()
}

#[test]
fn a_batch_completes_when_it_is_sealed_and_its_last_job_has_ended() {
    run_alone(async |t| {
        let id = make_batch(t).await;
        let path = format!("/v1/batches/{id}");
        let job = t.enqueue(json!({"queue": "q", "batch_id": id})).await;
        assert_eq!(t.job(&job).await["batch_id"], json!(id));
        let more = json!({"job_type": "t", "queue": "q", "batch_id": id});
        t.post("/v1/jobs/batch", json!({"jobs": [more, more]})).await.is(201);
        end(t, "q", "succeeded").await;
        end(t, "q", "succeeded").await;
        let read = t.get(&path).await.is(200);
        let counts = ["total_jobs", "open_jobs", "succeeded_jobs"].map(|it| read[it].clone());
        assert_eq!(counts, [3, 1, 2].map(|it| json!(it)));
        let sealed = t.post(&format!("{path}/seal"), json!({})).await.is(200);
        assert_eq!(sealed["state"], "running");
        // Its own job adds another.
        let last = lease_from(t, "q").await;
        t.post("/v1/jobs", more.clone()).await.is(201);
        t.ack(&last, "w", "succeeded").await.is(200);
        settled(t).await;
        assert_eq!(t.get(&path).await.is(200)["state"], "running");
        end(t, "q", "succeeded").await;
        let job = lease_from(t, "success").await;
        let ended = json!({
            "batch_id": id, "jobs": 4, "succeeded": 4, "dead_letter": 0, "cancelled": 0,
            "skipped": 0, "total_jobs": 4, "succeeded_jobs": 4, "dead_letter_jobs": 0,
            "cancelled_jobs": 0, "skipped_jobs": 0,
        });
        assert_eq!(job["payload"]["ended"], ended);
        lease_from(t, "complete").await;
        let read = t.get(&path).await.is(200);
        assert_eq!(read["state"], "succeeded");
        let listed = t.get("/v1/batches").await.is(200);
        assert_eq!(listed["batches"], json!([read]));
        t.post("/v1/jobs", more).await.is_error(409, "batch_completed");
        t.post(&format!("{path}/seal"), json!({})).await.is(200);
        settled(t).await;
        assert_eq!(stored(t).await.into_values().sum::<i64>(), 2);
    });
}

#[test]
fn a_batch_with_failures_succeeds_when_they_are_retried() {
    run_alone(async |t| {
        let id = make_batch(t).await;
        let path = format!("/v1/batches/{id}");
        let job = json!({"job_type": "t", "queue": "q", "batch_id": id});
        let cancelled = t.enqueue(with(job.clone(), &json!({"delay_seconds": 3600}))).await;
        t.post("/v1/jobs", job.clone()).await.is(201);
        let failed = end(t, "q", "failed").await["id"].as_str().expect("an id").to_owned();
        t.post(&format!("{path}/seal"), json!({})).await.is(200);
        t.post(&format!("/v1/jobs/{cancelled}/cancel"), json!({})).await.is(200);
        let ended = lease_from(t, "failure").await["payload"]["ended"].clone();
        assert_eq!((&ended["dead_letter"], &ended["cancelled"]), (&json!(1), &json!(1)));
        lease_from(t, "complete").await;
        assert_eq!(t.get(&path).await.is(200)["state"], "failed");
        for retried in [&failed, &cancelled] {
            t.post(&format!("/v1/jobs/{retried}/retry"), json!({})).await.is(200);
        }
        let read = t.get(&path).await.is(200);
        assert_eq!((&read["state"], &read["open_jobs"]), (&json!("running"), &json!(2)));
        let sooner = json!({"run_at": "2020-01-01T00:00:00Z"});
        t.patch(&format!("/v1/jobs/{cancelled}"), sooner).await.is(200);
        end(t, "q", "succeeded").await;
        end(t, "q", "succeeded").await;
        assert_eq!(lease_from(t, "success").await["payload"]["ended"]["succeeded"], 2);
        settled(t).await;
        let all = stored(t).await;
        assert!(all.values().all(|it| *it == 1), "{all:?}");
    });
}

#[test]
fn a_job_that_was_not_needed_fails_no_batch() {
    run_alone(async |t| {
        let id = make_batch(t).await;
        let parent = t.enqueue(json!({"queue": "q", "batch_id": id})).await;
        let handler = json!({
            "job_type": "t", "queue": "q", "batch_id": id,
            "depends_on": [{"job_id": parent, "when": "failed"}],
            "on_failure": {"job_type": "failure"}, "on_complete": {"job_type": "t", "queue": "h"},
        });
        t.post("/v1/jobs", handler).await.is(201);
        t.post(&format!("/v1/batches/{id}/seal"), json!({})).await.is(200);
        end(t, "q", "succeeded").await;
        assert_eq!(lease_from(t, "success").await["payload"]["ended"]["skipped"], 1);
        assert_eq!(lease_from(t, "h").await["payload"]["ended"]["state"], "cancelled");
        settled(t).await;
        assert_eq!(stored(t).await["failure"], 0);
        let read = t.get(&format!("/v1/batches/{id}")).await.is(200);
        assert_eq!((&read["state"], &read["skipped_jobs"]), (&json!("succeeded"), &json!(1)));
    });
}

#[test]
fn an_empty_batch_succeeds_when_it_is_sealed() {
    run(async |t| {
        let id = make_batch(t).await;
        let sealed = t.post(&format!("/v1/batches/{id}/seal"), json!({})).await.is(200);
        assert_eq!(sealed["state"], "succeeded");
        lease_from(t, "success").await;
        lease_from(t, "complete").await;
    });
}

#[test]
fn missing_and_foreign_batches_look_the_same() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (t, other) = (server.project("ours").await, server.project("theirs").await);
        let (t, foreign) = (&t, make_batch(&other).await);
        for id in [foreign.as_str(), "batch_01m7w3ha3aextt8pkwwdmxsmqw", "batch_x"] {
            let read = t.get(&format!("/v1/batches/{id}")).await;
            read.is_error(404, "batch_not_found");
            let sealed = t.post(&format!("/v1/batches/{id}/seal"), json!({})).await;
            sealed.is_error(404, "batch_not_found");
            let job = json!({"job_type": "t", "batch_id": id});
            t.post("/v1/jobs", job).await.refuses("batch_id");
        }
    });
}

/// Members end in all ways, on many connections, while others are added and the batch is sealed.
/// Two nodes process their ends.
#[test]
fn a_batch_completes_once_however_its_jobs_race() {
    limited(async {
        // Two nodes take the same ends.
        let database = fresh_database().await;
        let server = TestServer::start(database.clone()).await;
        let other = TestServer::start(database).await;
        let t = &server.project("race").await;
        for round in 0..3 {
            let id = make_batch(t).await;
            let queue = format!("race-{round}");
            let job = json!({"job_type": "t", "queue": queue, "batch_id": id});
            let all: Vec<_> = (0..40).map(|_| job.clone()).collect();
            t.post("/v1/jobs/batch", json!({"jobs": all})).await.is(201);
            let mut tasks = tokio::task::JoinSet::new();
            for worker in 0..8 {
                let (t, queue, job) = (t.clone(), queue.clone(), job.clone());
                tasks.spawn(async move {
                    let mut added = 0;
                    loop {
                        let poll = json!({
                            "worker_id": format!("w{worker}"), "queues": [queue], "capacity": 3,
                            "wait_seconds": 1,
                        });
                        let polled = t.post("/v1/workers/poll", poll).await.is(200);
                        let jobs = polled["jobs"].as_array().expect("jobs").clone();
                        if jobs.is_empty() {
                            return added;
                        }
                        for leased in jobs {
                            if rand::random_bool(0.2) {
                                t.post("/v1/jobs", job.clone()).await.is(201);
                                added += 1;
                            }
                            let status =
                                if rand::random_bool(0.1) { "failed" } else { "succeeded" };
                            let more = match status {
                                "failed" => json!({"retryable": false}),
                                _ => json!({}),
                            };
                            let worker = format!("w{worker}");
                            t.ack_with(&leased, &worker, status, more).await.is(200);
                        }
                    }
                });
            }
            t.post(&format!("/v1/batches/{id}/seal"), json!({})).await.is(200);
            let added: i64 = tasks.join_all().await.into_iter().sum();
            let job = lease_from(t, "complete").await;
            t.ack(&job, "w", "succeeded").await.is(200);
            settled(t).await;
            let read = t.get(&format!("/v1/batches/{id}")).await.is(200);
            assert_eq!((&read["total_jobs"], &read["open_jobs"]), (&json!(40 + added), &json!(0)));
            let all = stored(t).await;
            assert_eq!(all["complete"], round + 1, "{all:?}");
            assert_eq!(all["success"] + all["failure"], round + 1, "{all:?}");
        }
        other.stop().await;
        server.stop().await;
    });
}

#[test]
fn the_jobs_of_a_batch_are_listed_counted_and_cancelled_together() {
    run(async |t| {
        let batch = t.post("/v1/batches", json!({})).await.is(201)["id"].clone();
        let id = batch.as_str().expect("an id");
        let done = t.enqueue(json!({"queue": "q", "batch_id": id})).await;
        end(t, "q", "succeeded").await;
        let waiting = t.enqueue(json!({"queue": "q", "batch_id": id})).await;
        let other = t.enqueue(json!({"queue": "q"})).await;
        let listed = async |query: &str| {
            let page = t.get(&format!("/v1/jobs?batch_id={id}{query}")).await.is(200);
            let jobs = page["jobs"].as_array().expect("a list").iter();
            jobs.map(|it| it["id"].as_str().expect("an id").to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(listed("").await, [waiting.clone(), done.clone()]);
        assert_eq!(listed("&limit=1").await, std::slice::from_ref(&waiting));
        assert_eq!(listed("&state=succeeded").await, [done]);
        let filter = json!({"filter": {"batch_id": id}, "dry_run": true});
        assert_eq!(t.post("/v1/jobs/cancel", filter).await.is(200)["count"], 1);
        let cancelled =
            t.post("/v1/jobs/cancel", json!({"filter": {"batch_id": id}})).await.is(202);
        let operation = cancelled["operation"]["id"].as_str().expect("an id");
        let operation = format!("/v1/operations/{operation}");
        until("the operation to end", async || {
            t.get(&operation).await.is(200)["state"] != "running"
        })
        .await;
        assert_eq!(t.job(&waiting).await["state"], "cancelled");
        assert_eq!(t.job(&other).await["state"], "pending");
        t.get("/v1/jobs?batch_id=job_01m7w3ha3aextt8pkwwdmxsmqw").await.refuses("batch_id");
        let wrong = json!({"filter": {"batch_id": "x"}});
        t.post("/v1/jobs/cancel", wrong).await.refuses("filter.batch_id");
        t.get("/v1/jobs?batch_id=batch_01m7w3ha3aextt8pkwwdmxsmqw").await.is(200);
    });
}

#[test]
fn a_batch_is_cancelled_with_its_jobs_on_demand() {
    run(async |t| {
        let make = async || t.post("/v1/batches", json!({})).await.is(201)["id"].clone();
        let cancel = async |id: &Value, body: Value| {
            let path = format!("/v1/batches/{}/cancel", id.as_str().expect("an id"));
            t.post(&path, body).await
        };
        let empty = make().await;
        let cancelled = cancel(&empty, json!({})).await.is(200);
        assert_eq!((&cancelled["batch"]["id"], &cancelled["operation"]), (&empty, &Value::Null));
        assert!(cancelled["batch"]["completed_at"].is_string(), "it has no job");
        t.post("/v1/jobs", json!({"job_type": "t", "batch_id": empty}))
            .await
            .is_error(409, "batch_completed");
        let kept = make().await;
        let job = t.enqueue(json!({"batch_id": kept})).await;
        let cancelled = cancel(&kept, json!({})).await.is(200);
        assert_eq!(cancelled["batch"]["state"], "running", "its job runs on");
        let cancelled = cancel(&kept, json!({"cancel_jobs": true})).await.is(200);
        assert_eq!(cancelled["operation"]["kind"], "jobs_cancel");
        t.job_becomes(&job, "cancelled").await;
        let path = format!("/v1/batches/{}", kept.as_str().expect("an id"));
        until("the batch to complete", async || t.get(&path).await.is(200)["state"] == "failed")
            .await;
        cancel(&kept, json!({"jobs": true})).await.refuses("jobs");
        t.act("/v1/batches/batch_01m7w3ha3aextt8pkwwdmxsmqw/cancel")
            .await
            .is_error(404, "batch_not_found");
    });
}

#[test]
fn a_batch_that_no_job_joins_for_a_month_is_sealed() {
    run_alone(async |t| {
        let idle = t.post("/v1/batches", json!({})).await.is(201);
        let used = t.post("/v1/batches", json!({})).await.is(201);
        let (idle, used) = (&idle["id"], &used["id"]);
        let engine = t.database.engine();
        let long_ago = "update batches set joined_at = now() - interval '31 days 1 hour'";
        t.database.execute(long_ago).await;
        t.post("/v1/jobs", json!({"job_type": "t", "batch_id": used})).await.is(201);
        let joined = "select count(*) from batches where joined_at > now() - interval '1 hour'";
        t.database.until(joined, 1).await;
        assert!(!idle_batches::pass(&engine).await.expect("a pass"));
        let state = async |id: &Value| {
            let path = format!("/v1/batches/{}", id.as_str().expect("an id"));
            t.get(&path).await.is(200)
        };
        assert_eq!(state(idle).await["state"], "succeeded");
        assert_eq!(state(used).await["sealed_at"], Value::Null);
        engine.finish().await;
    });
}
