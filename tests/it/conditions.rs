//! Dependencies on a failure or on any end, and what handled failures mean for a workflow.

use crate::harness::{TestProject, run, run_alone, until};
use serde_json::{Value, json};

async fn end(t: &TestProject, status: &str) -> Value {
    let job = t.wait_and_lease("w").await;
    let more = match status {
        "failed" => json!({"retryable": false, "error": {"type": "E", "message": "why"}}),
        _ => json!({"result": {"of": job["id"]}}),
    };
    t.ack_with(&job, "w", status, more).await.is(200);
    job
}

async fn child(t: &TestProject, parents: &[(&str, &str)]) -> String {
    let named = parents.iter().map(|(id, when)| json!({"job_id": id, "when": when}));
    t.enqueue(json!({"job_type": "child", "depends_on": named.collect::<Vec<_>>()})).await
}

async fn event_types(t: &TestProject, id: &str) -> Vec<String> {
    let events = t.get(&format!("/v1/jobs/{id}/events")).await.is(200);
    let events = events["events"].as_array().expect("events").clone();
    events.iter().map(|it| it["type"].as_str().expect("a type").to_owned()).collect()
}

#[test]
fn a_job_that_waits_for_a_failure_runs_after_it_and_gets_the_error() {
    run(async |t| {
        let parent = t.enqueue(json!({"priority": 9})).await;
        let handler = child(t, &[(&parent, "failed")]).await;
        let last = child(t, &[(&parent, "ended"), (&handler, "ended")]).await;
        let next = t.enqueue(json!({"depends_on": [parent]})).await;
        end(t, "failed").await;
        t.job_becomes(&next, "cancelled").await;
        let handled = end(t, "succeeded").await;
        assert_eq!(handled["id"], handler);
        let error = json!({"type": "E", "message": "why", "stack_trace": null, "truncated": false});
        assert_eq!(
            handled["parent_results"],
            json!([{
                "job_id": parent, "key": null, "job_type": "test", "state": "dead_letter",
                "result": null, "error": error, "omitted": false,
            }])
        );
        let job = t.wait_and_lease("w").await;
        assert_eq!(job["id"], last);
        let states = job["parent_results"].as_array().expect("both").iter();
        let states: Vec<_> = states.map(|it| it["state"].clone()).collect();
        assert_eq!(states, ["dead_letter", "succeeded"]);
    });
}

#[test]
fn a_job_that_waits_for_a_failure_is_skipped_after_a_success() {
    run(async |t| {
        let parent = t.enqueue(json!({"priority": 9})).await;
        let handler = child(t, &[(&parent, "failed")]).await;
        let of_handler = child(t, &[(&handler, "failed")]).await;
        let last = child(t, &[(&parent, "ended"), (&of_handler, "ended")]).await;
        end(t, "succeeded").await;
        for id in [&handler, &of_handler] {
            t.job_becomes(id, "cancelled").await;
            let last = event_types(t, id).await.pop();
            assert_eq!(last.as_deref(), Some("fencepost.condition_not_met"));
        }
        assert_eq!(end(t, "succeeded").await["id"], last, "whatever became of the others");
        let late = json!({"job_type": "t", "depends_on": [{"job_id": parent, "when": "failed"}]});
        t.post("/v1/jobs", late).await.is_error(409, "parent_terminal");
    });
}

#[test]
fn a_job_that_waits_for_no_failure_runs_after_a_success_or_a_skip() {
    run(async |t| {
        let parent = t.enqueue(json!({"priority": 9})).await;
        let handler = child(t, &[(&parent, "failed")]).await;
        let last = child(t, &[(&parent, "not_failed"), (&handler, "not_failed")]).await;
        end(t, "succeeded").await;
        t.job_becomes(&handler, "cancelled").await;
        assert_eq!(end(t, "succeeded").await["id"], last);

        let parent = t.enqueue(json!({})).await;
        let stopped = child(t, &[(&parent, "not_failed")]).await;
        end(t, "failed").await;
        t.job_becomes(&stopped, "cancelled").await;
    });
}

#[test]
fn a_cancelled_parent_has_failed() {
    run(async |t| {
        let parent = t.enqueue(json!({"delay_seconds": 3600})).await;
        let handler = child(t, &[(&parent, "failed")]).await;
        t.post(&format!("/v1/jobs/{parent}/cancel"), json!({})).await.is(200);
        t.job_becomes(&handler, "pending").await;
        let late = child(t, &[(&parent, "failed"), (&handler, "succeeded")]).await;
        assert_eq!(t.job(&late).await["state"], "scheduled");
        assert_eq!(end(t, "succeeded").await["id"], handler);
        assert_eq!(end(t, "succeeded").await["id"], late);
    });
}

#[test]
fn a_condition_is_met_once_however_often_the_parent_fails() {
    run(async |t| {
        let parent = t.enqueue(json!({"priority": 9})).await;
        let other = t.enqueue(json!({"delay_seconds": 3600})).await;
        let both = child(t, &[(&parent, "ended"), (&other, "succeeded")]).await;
        let plain = t.enqueue(json!({"depends_on": [parent]})).await;
        for _ in 0..2 {
            end(t, "failed").await;
            t.job_becomes(&plain, "cancelled").await;
            t.post(&format!("/v1/jobs/{parent}/retry"), json!({})).await.is(200);
            assert_eq!(t.job(&plain).await["state"], "scheduled", "it came back");
        }
        end(t, "succeeded").await;
        assert_eq!(end(t, "succeeded").await["id"], plain);
        assert_eq!(t.job(&both).await["state"], "scheduled", "the other has not ended");
        let sooner = json!({"run_at": "2020-01-01T00:00:00Z"});
        t.patch(&format!("/v1/jobs/{other}"), sooner).await.is(200);
        assert_eq!(end(t, "succeeded").await["id"], other);
        assert_eq!(end(t, "succeeded").await["id"], both);
    });
}

#[test]
fn a_failure_that_a_child_waits_for_does_not_fail_the_workflow() {
    run(async |t| {
        let jobs = json!({"name": "n", "jobs": [
            {"key": "a", "job_type": "t"},
            {"key": "b", "job_type": "t", "depends_on": ["a"]},
            {"key": "c", "job_type": "t", "depends_on": [{"key": "b"}]},
            {"key": "catch", "job_type": "t", "depends_on": [{"key": "c", "when": "failed"}]},
            {"key": "finally", "job_type": "t", "depends_on": [
                {"key": "c", "when": "ended"}, {"key": "catch", "when": "ended"},
            ]},
        ]});
        for (first, rest, key, state) in [
            ("failed", &["succeeded", "succeeded"][..], "catch", "succeeded"),
            ("failed", &["failed", "succeeded"][..], "catch", "failed"),
            ("succeeded", &["succeeded", "succeeded", "succeeded"][..], "b", "succeeded"),
        ] {
            let made = t.post("/v1/workflows", jobs.clone()).await.is(201);
            let path = format!("/v1/workflows/{}", made["id"].as_str().expect("an id"));
            assert_eq!(
                made["jobs"][4]["dependencies"],
                json!([{"key": "c", "when": "ended"}, {"key": "catch", "when": "ended"}])
            );
            let id_of = |key: &str| {
                let jobs = made["jobs"].as_array().expect("jobs");
                jobs.iter().find(|it| it["key"] == key).expect("a job")["id"].clone()
            };
            end(t, first).await;
            for (number, status) in rest.iter().enumerate() {
                let job = end(t, status).await;
                assert!(number > 0 || job["id"] == id_of(key), "{job}");
            }
            let read = t.get(&path).await.is(200);
            assert_eq!(read["state"], state, "{read}");
            let listed = t.get("/v1/workflows").await.is(200);
            assert_eq!(listed["workflows"][0]["state"], state, "{listed}");
        }
    });
}

#[test]
fn a_failure_stays_when_its_job_is_deleted() {
    run(async |t| {
        let jobs = json!({"jobs": [
            {"key": "a", "job_type": "t"}, {"key": "b", "job_type": "t", "depends_on": ["a"]},
        ]});
        let made = t.post("/v1/workflows", jobs).await.is(201);
        let failed = end(t, "failed").await;
        t.job_becomes(made["jobs"][1]["id"].as_str().expect("an id"), "cancelled").await;
        let id = failed["id"].as_str().expect("an id");
        t.delete(&format!("/v1/dead-letters/{id}")).await.is_empty(204);
        let path = format!("/v1/workflows/{}", made["id"].as_str().expect("an id"));
        assert_eq!(t.get(&path).await.is(200)["state"], "failed");
    });
}

#[test]
fn wrong_dependencies_are_named() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let one = async |it: Value| {
            t.post("/v1/jobs", json!({"job_type": "t", "depends_on": [it]})).await
        };
        one(json!({"job_id": id, "when": "dead"})).await.refuses("depends_on[0].when");
        one(json!({"when": "failed"})).await.refuses("depends_on[0].job_id");
        one(json!({"job_id": id, "key": "a"})).await.refuses("depends_on[0].key");
        one(json!({"job_id": id, "why": "failed"})).await.refuses("depends_on[0].why");
        one(json!(1)).await.refuses("depends_on[0]");
        let graph = json!({"jobs": [
            {"key": "a", "job_type": "t"},
            {"key": "b", "job_type": "t", "depends_on": [{"job_id": id}]},
        ]});
        t.post("/v1/workflows", graph).await.refuses("jobs[1].depends_on[0].job_id");
    });
}

#[test]
fn the_database_and_the_rules_decide_alike() {
    use fencepost_domain::dependency::{FinalState, When};
    run_alone(async |t| {
        let ends = [
            ("succeeded", FinalState::Succeeded),
            ("skipped", FinalState::Skipped),
            ("cancelled", FinalState::Cancelled),
            ("dead_letter", FinalState::DeadLetter),
        ];
        for when in [When::Succeeded, When::Failed, When::NotFailed, When::Ended] {
            for (name, end) in ends {
                let is_met = format!(
                    "select (dependency_standing('{}', false, '{name}') = 'met')::int::bigint",
                    when.as_str()
                );
                let is_met = t.database.number(&is_met).await == 1;
                assert_eq!(is_met, when.is_met_by(end), "{when:?} {name}");
            }
        }
    });
}

/// The parents end, by success or failure, in the instant in which their children are stored, and
/// are retried: every child runs once or is cancelled, as its conditions say.
#[test]
fn no_condition_is_lost_or_met_twice_in_a_race() {
    run_alone(async |t| {
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..24 {
            let t = t.clone();
            tasks.spawn(async move {
                let queue = format!("race-{number}");
                let parent = t.enqueue(json!({"queue": queue, "max_attempts": 1})).await;
                let polled = t.post(
                    "/v1/workers/poll",
                    json!({
                        "worker_id": "w", "queues": [queue], "capacity": 1,
                    }),
                );
                let job = polled.await.is(200)["jobs"][0].clone();
                let status = if number % 2 == 0 { "failed" } else { "succeeded" };
                let make = |when: &'static str| {
                    let depends_on = json!([{"job_id": parent, "when": when}]);
                    let child =
                        json!({"job_type": "c", "queue": "after", "depends_on": depends_on});
                    t.post("/v1/jobs", child)
                };
                let (_, failed, ended) =
                    tokio::join!(t.ack(&job, "w", status), make("failed"), make("ended"));
                if status == "failed" {
                    t.post(&format!("/v1/jobs/{parent}/retry"), json!({})).await.is(200);
                    let again = t.post(
                        "/v1/workers/poll",
                        json!({
                            "worker_id": "w", "queues": [queue], "capacity": 1, "wait_seconds": 5,
                        }),
                    );
                    let again = again.await.is(200)["jobs"][0].clone();
                    t.ack(&again, "w", "succeeded").await.is(200);
                }
                let ended = ended.is(201)["id"].as_str().expect("an id").to_owned();
                // Stored after the success: refused.
                let failed = (failed.status == 201).then(|| failed.is(201)["id"].clone());
                (ended, failed.and_then(|it| it.as_str().map(str::to_owned)))
            });
        }
        let made: Vec<_> = tasks.join_all().await;
        for (ended, failed) in &made {
            t.job_becomes(ended, "pending").await;
            if let Some(failed) = failed {
                until("the retry of the failed job", async || {
                    t.job(failed).await["state"] != "scheduled"
                })
                .await;
            }
        }
        let open = "select count(*) from jobs where unfinished_parents <> 0";
        assert_eq!(t.database.number(open).await, 0);
    });
}
