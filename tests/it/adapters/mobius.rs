//! Mobius workers.

use crate::harness::{TestProject, run_alone};
use serde_json::{Value, json};

const JOBS: &str = "/mobius/v1/projects/main/jobs";

/// Claims without waiting.
async fn claim(t: &TestProject) -> Value {
    t.post(&format!("{JOBS}/claim"), json!({"worker_id": "worker-1", "queues": ["default"]}))
        .await
        .is(200)
}

async fn say(t: &TestProject, job: &Value, what: &str, more: Value) -> crate::harness::Reply {
    let id = job["job_id"].as_str().expect("an id");
    let mut body = json!({"worker_id": "worker-1", "attempt": job["attempt"]});
    body.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
    t.post(&format!("{JOBS}/{id}/{what}"), body).await
}

#[test]
fn a_job_is_claimed_kept_and_completed() {
    run_alone(async |t| {
        let nothing = json!({"worker_id": "worker-1", "queues": ["default"], "wait_seconds": 0});
        t.post(&format!("{JOBS}/claim"), nothing).await.is_empty(204);
        let id = t.enqueue(json!({"job_type": "render", "payload": {"page": 1.50}})).await;
        let job = claim(t).await;
        assert_eq!(job["job_id"], format!("{id}-1"));
        assert_eq!(job["run_id"], id);
        assert_eq!((&job["step_name"], &job["action"]), (&json!("render"), &json!("render")));
        assert_eq!(job["parameters"], json!({"page": 1.5}));
        assert_eq!((&job["attempt"], &job["queue"]), (&json!(1), &json!("default")));
        assert_eq!(job["heartbeat_interval_seconds"], 30);

        let beat = say(t, &job, "heartbeat", json!({})).await.is(200);
        assert_eq!(beat, json!({"ok": true, "directives": {"should_cancel": false}}));
        let done = json!({"status": "completed", "result_b64": "eyJzdW1tYXJ5IjogImRvbmUifQ=="});
        say(t, &job, "complete", done.clone()).await.is_empty(204);
        // Its answer was lost: it is reported again.
        say(t, &job, "complete", done).await.is_empty(204);
        assert_eq!(t.job(&id).await["result"], json!({"summary": "done"}));
        let read = t.get(&format!("{JOBS}/{id}-1")).await.is(200);
        assert_eq!(
            (&read["status"], &read["result"]["summary"]),
            (&json!("completed"), &json!("done"))
        );
    });
}

#[test]
fn newer_clients_name_their_worker_otherwise_and_hear_that_there_is_no_socket() {
    run_alone(async |t| {
        let id = t.enqueue(json!({"job_type": "render"})).await;
        let about = json!({
            "worker_instance_id": "host-1", "worker_session_token": "boot-1",
            "concurrency_limit": 3, "queues": ["default"],
        });
        t.post(&format!("{JOBS}/claim"), about).await.is(200);
        let path = format!("{JOBS}/{id}-1/heartbeat");
        let other =
            json!({"worker_instance_id": "host-2", "worker_session_token": "x", "attempt": 1});
        t.post(&path, other).await.is(409);
        t.post(&path, json!({"attempt": 1})).await.is(400);
        let token = json!({"worker_session_token": "boot-1", "attempt": 1});
        t.post(&path, token).await.is(200);
        let worker = t.get("/v1/workers").await.is(200)["workers"][0].clone();
        assert_eq!((&worker["worker_id"], &worker["concurrency"]), (&json!("host-1"), &json!(3)));
        let socket = t.get("/mobius/v1/workers/socket").await.is(400);
        let message = socket["error"]["message"].as_str().expect("a message");
        assert!(message.contains("0.0.20"), "{message}");
    });
}

#[test]
fn a_retry_is_a_new_job_and_the_old_one_reads_failed() {
    run_alone(async |t| {
        let id = t.enqueue(json!({"retry": {"initial_seconds": 0, "jitter_seconds": 0}})).await;
        let job = claim(t).await;
        let failed = json!({"status": "failed", "error_type": "Oops", "error_message": "it broke"});
        say(t, &job, "complete", failed).await.is_empty(204);
        let status = async |attempt: i32| {
            t.get(&format!("{JOBS}/{id}-{attempt}")).await.is(200)["status"].clone()
        };
        assert_eq!((status(1).await, status(2).await), (json!("failed"), json!("pending")));
        t.get(&format!("{JOBS}/{id}-3")).await.is(404);
        let poll = json!({"worker_id": "worker-1", "wait_seconds": 10});
        let again = t.post(&format!("{JOBS}/claim"), poll).await.is(200);
        assert_eq!(again["job_id"], format!("{id}-2"));
        assert_eq!(status(2).await, "claimed");
        let first = t.get(&format!("{JOBS}/{id}-1")).await.is(200);
        assert_eq!(first["scheduled_at"], first["created_at"], "not the time of the retry");
        // The first attempt may not speak for the second.
        let old = say(t, &job, "heartbeat", json!({})).await;
        assert_eq!(old.is(409)["error"]["code"], "conflict");
        let mixed = json!({"worker_id": "worker-1", "attempt": 1});
        t.post(&format!("{JOBS}/{id}-2/heartbeat"), mixed).await.is(409);
        say(t, &again, "complete", json!({"status": "completed"})).await.is_empty(204);
    });
}

#[test]
fn a_run_lists_its_jobs_and_what_was_done() {
    run_alone(async |t| {
        let retry = json!({"initial_seconds": 0, "jitter_seconds": 0});
        let work = json!({"name": "import", "jobs": [
            {"key": "fetch", "job_type": "http.get", "payload": {"n": 1}, "retry": retry},
            {"key": "store", "job_type": "db.put", "depends_on": ["fetch"]},
        ]});
        let workflow = t.post("/v1/workflows", work).await.is(201);
        let run =
            format!("/mobius/v1/projects/main/runs/{}", workflow["id"].as_str().expect("an id"));
        let first = claim(t).await;
        assert_eq!(first["run_id"], workflow["id"]);
        let failed = json!({"status": "failed", "error_type": "Oops", "error_message": "it broke"});
        say(t, &first, "complete", failed).await.is_empty(204);
        let poll = json!({"worker_id": "worker-1", "wait_seconds": 10});
        let again = t.post(&format!("{JOBS}/claim"), poll).await.is(200);
        say(t, &again, "complete", json!({"status": "completed"})).await.is_empty(204);

        let log = t.get(&format!("{run}/action-log")).await.is(200);
        let reported: Vec<_> = log["items"].as_array().expect("a list").iter().collect();
        let ids: Vec<_> = reported.iter().map(|it| it["id"].clone()).collect();
        assert_eq!(ids, [first["job_id"].clone(), again["job_id"].clone()]);
        assert_eq!(
            (&reported[0]["error"], &reported[0]["step_name"]),
            (&json!("it broke"), &json!("fetch"))
        );
        assert_eq!(
            (&reported[1]["error"], &reported[1]["action"]),
            (&json!(null), &json!("http.get"))
        );
        assert!(reported.iter().all(|it| it["duration_ms"].as_i64().is_some_and(|it| it >= 0)));

        let jobs = t.get(&format!("{run}/jobs")).await.is(200);
        let states: Vec<_> = jobs["items"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|step| {
                (
                    step["step_name"].clone(),
                    step["status"].clone(),
                    step.get("parameters").is_none(),
                )
            })
            .collect();
        let expected = [("fetch", "completed"), ("store", "pending")];
        assert_eq!(states, expected.map(|it| (json!(it.0), json!(it.1), true)));
    });
}

#[test]
fn a_job_without_a_workflow_is_a_run_of_its_own() {
    run_alone(async |t| {
        let id = t.enqueue(json!({})).await;
        let run = format!("/mobius/v1/projects/main/runs/{id}");
        assert_eq!(t.get(&format!("{run}/action-log")).await.is(200)["items"], json!([]));
        assert_eq!(
            t.get(&format!("{run}/jobs")).await.is(200)["items"][0]["id"],
            format!("{id}-1")
        );
        for unknown in ["job_01m7w3ha3aextt8pkwwdmxsmqw", "wf_01m7w3ha3aextt8pkwwdmxsmqw", "x"] {
            let missing = format!("/mobius/v1/projects/main/runs/{unknown}/jobs");
            assert_eq!(t.get(&missing).await.is(404)["error"]["code"], "not_found", "{unknown}");
        }
    });
}

#[test]
fn a_cancelled_job_is_reported_and_reads_failed() {
    run_alone(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = claim(t).await;
        t.act(&format!("/v1/jobs/{id}/cancel")).await.is(200);
        let beat = say(t, &job, "heartbeat", json!({})).await.is(200);
        assert_eq!(beat["directives"]["should_cancel"], true);
        say(t, &job, "complete", json!({"status": "failed"})).await.is_empty(204);
        assert_eq!(t.job(&id).await["state"], "cancelled");
        assert_eq!(t.get(&format!("{JOBS}/{id}-1")).await.is(200)["status"], "failed");
        t.get(&format!("{JOBS}/{id}-2")).await.is(404);
        let never = t.enqueue(json!({})).await;
        t.act(&format!("/v1/jobs/{never}/cancel")).await.is(200);
        assert_eq!(t.get(&format!("{JOBS}/{never}-1")).await.is(200)["status"], "failed");
    });
}

#[test]
fn any_queue_is_looked_at_when_none_is_named_and_a_new_one_is_found() {
    run_alone(async |t| {
        let waiting = tokio::spawn({
            let t = t.clone();
            async move {
                let poll = json!({"worker_id": "worker-1", "wait_seconds": 20});
                t.post(&format!("{JOBS}/claim"), poll).await.is(200)
            }
        });
        t.enqueue(json!({"queue": "brand-new"})).await;
        assert_eq!(waiting.await.expect("no panic")["queue"], "brand-new");
        let workers = t.get("/mobius/v1/projects/main/workers").await.is(200);
        // It is noted a moment after it was heard.
        assert!(workers["items"].as_array().is_some_and(|it| it.len() <= 1));
    });
}

#[test]
fn a_childs_parameters_hold_what_its_parents_made() {
    run_alone(async |t| {
        let jobs = json!({"name": "nightly", "jobs": [
            {"key": "fetch", "job_type": "fetch", "payload": [1]},
            {"key": "send", "job_type": "send", "payload": {"to": "ada"}, "depends_on": ["fetch"]},
            {"key": "own", "job_type": "own", "payload": {"parent_results": 1}, "depends_on": ["send"]},
        ]});
        let workflow = t.post("/v1/workflows", jobs).await.is(201);
        let first = claim(t).await;
        assert_eq!(
            (&first["run_id"], &first["workflow_name"]),
            (&workflow["id"], &json!("nightly"))
        );
        assert_eq!(
            (&first["step_name"], &first["parameters"]),
            (&json!("fetch"), &json!({"value": [1]}))
        );
        let text = json!({"status": "completed", "result_b64": "cGxhaW4="});
        say(t, &first, "complete", text).await.is_empty(204);
        let second = claim(t).await;
        assert_eq!(second["parameters"]["to"], "ada");
        let made = &second["parameters"]["parent_results"][0];
        assert_eq!((&made["key"], &made["result"]), (&json!("fetch"), &json!("plain")));
        say(t, &second, "complete", json!({"status": "completed"})).await.is_empty(204);
        assert_eq!(claim(t).await["parameters"], json!({"parent_results": 1}));
    });
}

#[test]
fn events_are_kept_all_or_none() {
    run_alone(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = claim(t).await;
        let event = |kind: &str| json!({"type": kind, "payload": {"n": 1}});
        let bad = json!({"events": [event("fine"), event("mobius.reserved")]});
        let refused = say(t, &job, "events", bad).await.is(400);
        assert!(
            refused["error"]["message"].as_str().is_some_and(|it| it.contains("events[1].type"))
        );
        let large = json!({"events": [{"type": "x", "payload": {"s": "x".repeat(17_000)}}]});
        say(t, &job, "events", large).await.is(413);
        say(t, &job, "events", json!({"events": []})).await.is(400);
        say(t, &job, "events", json!({"events": [event("page.done")]})).await.is_empty(204);
        let history = t.get(&format!("/v1/jobs/{id}/events")).await.is(200).to_string();
        assert!(history.contains("page.done") && !history.contains("fine"), "{history}");
    });
}

#[test]
fn bad_requests_are_refused_in_its_own_words() {
    run_alone(async |t| {
        t.enqueue(json!({})).await;
        let job = claim(t).await;
        let code = async |body: Value, what: &str| {
            let reply = say(t, &job, what, body).await;
            (reply.status.as_u16(), reply.json()["error"]["code"].clone())
        };
        let bad = json!({"status": "completed", "result_b64": "***"});
        assert_eq!(code(bad, "complete").await, (400, json!("invalid_request")));
        assert_eq!(
            code(json!({"status": "odd"}), "complete").await,
            (400, json!("invalid_request"))
        );
        let path = format!("{JOBS}/claim");
        t.post(&path, json!({})).await.is(400);
        t.post(&path, json!({"worker_id": "w", "wait_seconds": 31})).await.is(400);
        let unknown = t
            .post(&format!("{JOBS}/job_x-1/heartbeat"), json!({"worker_id": "w", "attempt": 1}))
            .await;
        assert_eq!(unknown.is(404)["error"]["code"], "not_found");
        t.post("/mobius/v1/projects/other/jobs/claim", json!({"worker_id": "w"})).await.is(404);
        assert_eq!(t.get("/mobius/nope").await.is(404)["error"]["code"], "not_found");
        let keyless = t.client.post(format!("{}{path}", t.url)).json(&json!({"worker_id": "w"}));
        let keyless = crate::harness::Reply::of(keyless.send().await.expect("an answer")).await;
        assert_eq!(keyless.is(401)["error"]["code"], "unauthorized");
    });
}
