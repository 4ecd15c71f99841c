//! Open Job Spec: jobs that run later, again and again, or after each other.

use super::{OJS, enqueue, fetch, fetch_one, read, refused, settle};
use crate::harness::{TestProject, eventually, run, until};
use serde_json::{Value, json};

#[test]
fn a_job_can_wait_for_a_time_or_a_while() {
    run(async |t| {
        let job = |options: Value| json!({"type": "a", "args": [], "options": options});
        for options in
            [json!({"delay_until": "2026-12-31T23:59:59Z"}), json!({"scheduled_at": "+PT1H"})]
        {
            let stored = enqueue(t, job(options)).await;
            assert_eq!(stored["state"], "scheduled");
            assert!(stored["scheduled_at"].is_string());
            refused(&settle(t, "ack", &stored, json!({})).await, 409, "conflict");
        }
        assert!(fetch(t, "default", 1).await.is_empty());
        let past = enqueue(t, job(json!({"scheduled_at": "2020-01-01T00:00:00Z"}))).await;
        assert_eq!(past["state"], "available");
        assert_eq!(fetch_one(t, "default").await["id"], past["id"]);
        let soon = enqueue(t, job(json!({"scheduled_at": "+PT1S"}))).await;
        until("the job to be available", async || read(t, &soon).await["state"] == "available")
            .await;
        refused(
            &t.post(&format!("{OJS}/jobs"), job(json!({"delay_until": "soon"}))).await,
            400,
            "invalid_request",
        );
    });
}

#[test]
fn a_job_that_did_not_start_in_time_is_discarded() {
    run(async |t| {
        let job = |at: &str| json!({"type": "a", "args": [], "options": {"expires_at": at}});
        let far = enqueue(t, job("2099-12-31T23:59:59Z")).await;
        assert_eq!(far["expires_at"], "2099-12-31T23:59:59Z");
        fetch_one(t, "default").await;
        settle(t, "ack", &far, json!({})).await.is(200);
        let near = enqueue(t, job("+PT1S")).await;
        let over = eventually("the job to end", async || {
            let seen = read(t, &near).await;
            (seen["state"] != "available").then_some(seen)
        })
        .await;
        assert_eq!((&over["state"], &over["completed_at"]), (&json!("discarded"), &Value::Null));
        assert!(fetch(t, "default", 1).await.is_empty());
    });
}

#[test]
fn schedules_are_kept_listed_and_deleted() {
    run(async |t| {
        let cron = json!({
            "name": "nightly", "expression": "0 9 * * *", "timezone": "Asia/Tokyo", "overlap_policy": "skip",
            "job_template": {"type": "report.make", "args": [{"day": 1}], "options": {"queue": "reports"}},
        });
        let path = format!("{OJS}/cron");
        let made = t.post(&path, cron.clone()).await.is(201);
        assert_eq!(made["cron_job"], made["cron"], "both of its names");
        let kept = made["cron"].clone();
        for (field, value) in [
            ("name", "nightly"),
            ("expression", "0 9 * * *"),
            ("timezone", "Asia/Tokyo"),
            ("overlap_policy", "skip"),
            ("queue", "reports"),
            ("type", "report.make"),
        ] {
            assert_eq!(kept[field], value, "{field}");
        }
        assert_eq!((&kept["enabled"], &kept["args"]), (&json!(true), &json!([{"day": 1}])));
        assert!(kept["next_run_at"].is_string() && kept["created_at"].is_string());
        t.post(&path, cron).await.is(200);
        // The binding's own words for it.
        let other = json!({"name": "hourly", "cron": "@hourly", "type": "tick", "args": []});
        assert_eq!(t.post(&path, other).await.is(201)["cron"]["expression"], "@hourly");
        let names = |it: &Value| {
            it["crons"]
                .as_array()
                .expect("crons")
                .iter()
                .map(|it| it["name"].clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(names(&t.get(&path).await.is(200)), ["hourly", "nightly"]);
        assert_eq!(t.delete(&format!("{path}/hourly")).await.is(200)["cron"]["name"], "hourly");
        refused(&t.delete(&format!("{path}/hourly")).await, 404, "not_found");
        assert_eq!(t.get(&format!("{path}/nightly")).await.is(200)["cron"]["name"], "nightly");
        for odd in ["not a valid cron", "0 0 0 0 0 0 0", "99 25 32 13 8"] {
            let bad =
                json!({"name": "x", "expression": odd, "job_template": {"type": "a", "args": []}});
            refused(&t.post(&path, bad).await, 400, "invalid_request");
        }
        let odd = json!({
            "name": "x", "cron": "@hourly", "expression": "@daily", "labels": ["gpu"],
            "job_template": {"type": "a", "args": [], "meta": {"a": 1}, "options": {"meta": {"a": 1}}},
        });
        let error = refused(&t.post(&path, odd).await, 400, "invalid_request");
        let named = error["details"]["fields"].as_array().expect("fields").iter();
        let named: Vec<_> = named.map(|it| it["field"].as_str().expect("a field")).collect();
        assert_eq!(named, ["cron", "meta", "labels", "options.meta"]);
        let native = t.get("/v1/recurring/nightly").await.is(200);
        assert_eq!(native["payload"], json!([{"day": 1}]));
    });
}

#[test]
fn a_schedules_job_is_fetched_like_any_other() {
    run(async |t| {
        let cron = json!({
            "name": "often", "expression": "* * * * * *", "overlap_policy": "skip",
            "job_template": {"type": "tick", "args": [{"action": "tick"}]},
        });
        t.post(&format!("{OJS}/cron"), cron).await.is(201);
        let job = eventually("a job", async || fetch(t, "default", 1).await.pop()).await;
        assert_eq!((&job["type"], &job["args"][0]["action"]), (&json!("tick"), &json!("tick")));
        t.delete(&format!("{OJS}/cron/often")).await.is(200);
    });
}

fn step(name: &str) -> Value {
    json!({"type": name, "args": [name], "options": {"queue": "flow", "retry": {"max_attempts": 1}}})
}

async fn start(t: &TestProject, workflow: Value) -> Value {
    t.post(&format!("{OJS}/workflows"), workflow).await.is(201)["workflow"].clone()
}

/// The workflow, which some clients read in its field and others at the top.
async fn look(t: &TestProject, workflow: &Value) -> Value {
    let id = workflow["id"].as_str().expect("an id");
    let mut reply = t.get(&format!("{OJS}/workflows/{id}")).await.is(200);
    let workflow = reply["workflow"].take();
    reply.as_object_mut().expect("an object").remove("workflow");
    assert_eq!(reply, workflow);
    workflow
}

#[test]
fn a_chain_runs_step_by_step_and_hands_results_on() {
    run(async |t| {
        let chain =
            json!({"type": "chain", "name": "c", "steps": [step("a"), step("b"), step("c")]});
        let workflow = start(t, chain).await;
        assert_eq!((&workflow["type"], &workflow["state"]), (&json!("chain"), &json!("running")));
        assert_eq!(
            (&workflow["steps_total"], &workflow["steps_completed"]),
            (&json!(3), &json!(0))
        );
        let first = fetch_one(t, "flow").await;
        assert!(fetch(t, "flow", 1).await.is_empty());
        settle(t, "ack", &first, json!({"result": {"report_id": 7}})).await.is(200);
        let second = fetch_one(t, "flow").await;
        assert_eq!(
            (&second["type"], &second["parent_results"]),
            (&json!("b"), &json!([{"report_id": 7}]))
        );
        settle(t, "nack", &second, json!({"error": {"code": "x", "message": "y"}})).await.is(200);
        until("the workflow to end", async || look(t, &workflow).await["state"] != "running").await;
        let over = look(t, &workflow).await;
        assert_eq!((&over["state"], &over["steps_completed"]), (&json!("failed"), &json!(1)));
        let counts = &over["metadata"];
        assert_eq!((&counts["job_count"], &counts["failed_count"]), (&json!(3), &json!(1)));
        assert!(fetch(t, "flow", 1).await.is_empty());
    });
}

#[test]
fn a_batch_is_followed_by_what_its_success_calls_for() {
    run(async |t| {
        let after = json!({"type": "after", "args": [], "options": {"queue": "callbacks"}});
        let batch = json!({
            "type": "batch", "name": "b", "jobs": [step("a"), step("b")],
            "callbacks": {"on_success": after},
        });
        let workflow = start(t, batch).await;
        assert_eq!((&workflow["jobs_total"], &workflow["jobs_completed"]), (&json!(2), &json!(0)));
        for job in fetch(t, "flow", 2).await {
            assert!(fetch(t, "callbacks", 1).await.is_empty());
            settle(t, "ack", &job, json!({})).await.is(200);
        }
        let after = until_fetched(t, "callbacks").await;
        settle(t, "ack", &after, json!({})).await.is(200);
        let over = look(t, &workflow).await;
        assert_eq!((&over["state"], &over["jobs_completed"]), (&json!("completed"), &json!(2)));
        let bad = json!({"type": "batch", "jobs": [step("a")], "callbacks": {"on_failure": {}}});
        let error =
            refused(&t.post(&format!("{OJS}/workflows"), bad).await, 400, "invalid_request");
        assert!(error["message"].as_str().expect("text").contains("on_failure"), "{error}");
        let after = json!({"type": "after", "args": []});
        let bad = json!({"type": "batch", "jobs": [step("a")], "callbacks": {"on_succes": after}});
        let error =
            refused(&t.post(&format!("{OJS}/workflows"), bad).await, 400, "invalid_request");
        assert_eq!(error["details"]["fields"][0]["field"], "callbacks.on_succes");
    });
}

#[test]
fn a_graph_may_be_called_as_answers_call_it() {
    run(async |t| {
        let (mut first, mut second) = (step("a"), step("b"));
        first["id"] = json!("one");
        second["id"] = json!("two");
        second["depends_on"] = json!(["one"]);
        let workflow = start(t, json!({"type": "graph", "steps": [first, second]})).await;
        assert_eq!(
            (&workflow["type"], &workflow["steps"][1]["depends_on"]),
            (&json!("graph"), &json!(["one"]))
        );
    });
}

#[test]
fn a_batch_is_followed_by_what_its_failure_calls_for() {
    run(async |t| {
        let after = |queue: &str| json!({"type": "after", "args": [{"for": queue}], "options": {"queue": queue}});
        let callbacks = json!({
            "on_success": after("success"),
            "on_failure": after("failure"),
            "on_complete": after("complete"),
        });
        let batch = json!({
            "type": "batch", "name": "b", "jobs": [step("a"), step("b")], "callbacks": callbacks,
        });
        let workflow = start(t, batch).await;
        let jobs = fetch(t, "flow", 2).await;
        let error = json!({"error": {"code": "e", "message": "m", "retryable": false}});
        settle(t, "nack", &jobs[0], error).await.is(200);
        settle(t, "ack", &jobs[1], json!({})).await.is(200);
        for queue in ["failure", "complete"] {
            let job = until_fetched(t, queue).await;
            assert_eq!(job["args"], json!([{"for": queue}]), "as they were sent");
        }
        assert!(fetch(t, "success", 1).await.is_empty());
        assert_eq!(look(t, &workflow).await["state"], "failed");
    });
}

/// Callbacks are stored a moment after the end.
async fn until_fetched(t: &TestProject, queue: &str) -> Value {
    eventually("a job", async || fetch(t, queue, 1).await.pop()).await
}

#[test]
fn a_cancelled_workflow_ends_immediately() {
    run(async |t| {
        let workflow = start(t, json!({"type": "group", "jobs": [step("a"), step("b")]})).await;
        let held = fetch_one(t, "flow").await;
        let path = format!("{OJS}/workflows/{}", workflow["id"].as_str().expect("an id"));
        let over = t.delete(&path).await.is(200)["workflow"].clone();
        assert_eq!((&over["id"], &over["state"]), (&workflow["id"], &json!("cancelled")));
        refused(&settle(t, "ack", &held, json!({})).await, 409, "conflict");
        assert!(fetch(t, "flow", 1).await.is_empty());
        refused(&t.delete(&path).await, 409, "conflict");
        let graph = json!({"name": "g", "steps": [
            {"id": "x", "type": "a", "args": []}, {"id": "y", "type": "b", "args": [], "depends_on": ["x"]},
        ]});
        let graph = start(t, graph).await;
        assert_eq!(
            (&graph["type"], &graph["steps"][1]["depends_on"]),
            (&json!("graph"), &json!(["x"]))
        );
        let unknown = json!({"steps": [{"id": "x", "type": "a", "args": [], "depends_on": ["z"]}]});
        refused(&t.post(&format!("{OJS}/workflows"), unknown).await, 400, "invalid_request");
    });
}
