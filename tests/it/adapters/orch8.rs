//! Orch8 workers.

mod sequences;

use crate::harness::{Reply, TestProject, eventually, run, run_alone};
use reqwest::Method;
use serde_json::{Value, json};

const TASKS: &str = "/orch8/workers/tasks";

async fn poll(t: &TestProject, poll: Value) -> Value {
    t.post(&format!("{TASKS}/poll"), poll).await.is(200)
}

async fn say(t: &TestProject, task: &Value, what: &str, body: Value) -> Reply {
    let id = task["id"].as_str().expect("an id");
    t.post(&format!("{TASKS}/{id}/{what}"), body).await
}

#[test]
fn a_task_is_polled_kept_and_completed_by_its_id_alone() {
    run(async |t| {
        let payload = json!({"image_url": "https://x", "width": 800});
        let id = t.enqueue(json!({"job_type": "process_image", "payload": payload})).await;
        let wanted = json!({"handler_names": ["process_image"], "worker_id": "img-worker-1"});
        let task = poll(t, wanted).await;
        assert_eq!(task["id"], format!("{}-1", id.replace("job_", "task_")));
        assert_eq!((&task["handler_name"], &task["params"]), (&json!("process_image"), &payload));
        assert_eq!(task["context"]["instance_id"], id);
        assert_eq!(task["context"]["step_id"], "process_image");
        assert_eq!(task["metadata"]["attempt"], 1);
        // A heartbeat has no body, and no content type.
        let path = format!("{TASKS}/{}/heartbeat", task["id"].as_str().expect("an id"));
        assert_eq!(t.act(&path).await.is(200)["cancelled"], false);
        let output = json!({"output": {"resized_url": "https://y", "bytes": 142_038}});
        say(t, &task, "complete", output.clone()).await.is(200);
        say(t, &task, "complete", output.clone()).await.is(200);
        assert_eq!(t.job(&id).await["result"], output["output"]);
        say(t, &task, "fail", json!({"error": "late"})).await.is(409);
        t.act(&path).await.is(409);
        // A handler that returns nothing.
        let id = t.enqueue(json!({})).await;
        let task = poll(t, json!({})).await;
        say(t, &task, "complete", json!({})).await.is(400);
        say(t, &task, "complete", json!({"output": null})).await.is(200);
        assert_eq!(t.job(&id).await["result"], Value::Null);
    });
}

#[test]
fn a_failure_is_final_unless_it_is_retryable() {
    run(async |t| {
        let retry = json!({"initial_seconds": 0, "jitter_seconds": 0});
        let id = t.enqueue(json!({"retry": retry})).await;
        let task = poll(t, json!({})).await;
        say(t, &task, "fail", json!({})).await.is(400);
        let again = json!({"error": "Out of memory", "retryable": true});
        say(t, &task, "fail", again).await.is(200);
        let second = poll(t, json!({})).await;
        assert_eq!(second["metadata"]["attempt"], 2);
        // The first task's id is no fence for the second.
        say(t, &task, "complete", json!({"output": {}})).await.is(409);
        say(t, &second, "fail", json!({"error": "Fatal"})).await.is(200);
        let job = t.job(&id).await;
        assert_eq!(
            (&job["state"], &job["last_error"]["message"]),
            (&json!("dead_letter"), &json!("Fatal"))
        );
    });
}

#[test]
fn a_named_queue_is_for_those_who_name_it() {
    run(async |t| {
        t.enqueue(json!({"queue": "gpu-workers", "job_type": "video_renderer"})).await;
        let at_once = json!({"handler_name": "video_renderer", "worker_id": "w"});
        assert_eq!(poll(t, at_once.clone()).await, json!([]));
        let named = json!({"queue_name": "gpu-workers", "handler_names": ["video_renderer", "x"]});
        assert_eq!(poll(t, named).await["handler_name"], "video_renderer");
        t.enqueue(json!({"queue": "gpu-workers", "job_type": "video_renderer"})).await;
        let wide = json!({"queue_name": "gpu-workers", "handler_name": "video_renderer", "worker_id": "w"});
        let tasks = t.post("/orch8/api/v1/workers/tasks/poll/queue", wide).await.is(200);
        assert_eq!(tasks[0]["queue_name"], "gpu-workers");
    });
}

#[test]
fn polls_with_and_without_a_handler_name_are_answered_in_their_own_way() {
    run(async |t| {
        for _ in 0..4 {
            t.enqueue(json!({"job_type": "a"})).await;
        }
        let many = poll(t, json!({"batch_size": 2})).await;
        assert_eq!(many.as_array().map(Vec::len), Some(2));
        let path = "/orch8/workers/tasks/poll";
        let nameless = t.post(path, json!({"handler_name": ""})).await.is(400)["error"].to_string();
        assert!(nameless.contains("handler_name"), "{nameless}");
        let wide = poll(t, json!({"handler_name": "a", "worker_id": "w-1", "limit": 1000})).await;
        assert_eq!(wide.as_array().map(Vec::len), Some(2));
        let task = &wide[0];
        assert_eq!((&task["attempt"], &task["claim_epoch"]), (&json!(0), &json!(1)));
        assert_eq!((&task["state"], &task["worker_id"]), (&json!("claimed"), &json!("w-1")));
        let shown = |epoch: i32, worker: &str| json!({"claim_epoch": epoch, "worker_id": worker});
        say(t, task, "heartbeat", shown(2, "w-1")).await.is(409);
        say(t, task, "heartbeat", shown(1, "w-2")).await.is(409);
        assert_eq!(say(t, task, "heartbeat", shown(1, "w-1")).await.is(200)["checkpoint_seq"], 0);
        for seq in 1..=2 {
            let kept = json!({"claim_epoch": 1, "worker_id": "w-1", "checkpoint": {"page": seq}});
            assert_eq!(say(t, task, "heartbeat", kept).await.is(200)["checkpoint_seq"], seq);
        }
        let large = json!({"claim_epoch": 1, "checkpoint": {"text": "x".repeat(70_000)}});
        say(t, task, "heartbeat", large).await.is(413);
        let failed =
            json!({"claim_epoch": 1, "worker_id": "w-1", "message": "no", "retryable": false});
        say(t, task, "fail", failed).await.is(200);
        t.post(&format!("{TASKS}/poll"), json!({"batch_size": 51})).await.is(400);
    });
}

#[test]
fn a_later_step_sees_what_earlier_ones_made() {
    run(async |t| {
        let jobs = json!({"input": {"video_url": "v"}, "jobs": [
            {"key": "a", "job_type": "a"},
            {"key": "b", "job_type": "b", "depends_on": ["a"], "template": "strict",
             "payload": {"url": "{{context.data.video_url}}", "x": "{{steps.a.output.x}}"}},
        ]});
        let workflow = t.post("/v1/workflows", jobs).await.is(201);
        let first = poll(t, json!({})).await;
        say(t, &first, "complete", json!({"output": {"x": 1}})).await.is(200);
        let second = poll(t, json!({})).await;
        let context = &second["context"];
        assert_eq!((&context["instance_id"], &context["step_id"]), (&workflow["id"], &json!("b")));
        assert_eq!(context["steps"], json!({"a": {"output": {"x": 1}}}));
        assert_eq!(context["data"], json!({"video_url": "v"}));
        assert_eq!(second["params"], json!({"url": "v", "x": 1}));
    });
}

fn step(id: &str, params: Value) -> Value {
    json!({"type": "step", "id": id, "handler": format!("run_{id}"), "params": params})
}

#[test]
fn a_fallback_that_was_not_needed_is_cancelled() {
    run(async |t| {
        let mut only = step("send", json!({"to": "a"}));
        only["fallback_handler"] = json!("run_letter");
        let wanted = json!({"sequence": {"blocks": [only]}});
        let made = t.post("/orch8/instances", wanted).await.is(201);
        let at = format!("/orch8/instances/{}", made["id"].as_str().expect("an id"));
        let task = poll(t, json!({})).await;
        say(t, &task, "complete", json!({"output": {}})).await.is(200);
        let ended = eventually("the instance to end", async || {
            let seen = t.get(&at).await.is(200);
            (seen["state"] != "running").then_some(seen)
        })
        .await;
        assert_eq!(ended["state"], "completed");
        assert_eq!(ended["steps"][1]["state"], "cancelled");
    });
}

#[test]
fn the_steps_of_an_instance_run_one_after_another() {
    run(async |t| {
        let mut first = step("fetch", json!({"url": "{{context.data.video_url}}"}));
        first["queue_name"] = json!("gpu-workers");
        first["retry"] = json!({"max_attempts": 2, "initial_backoff": 0, "max_backoff": 1});
        let third = json!({"x": "{{steps.fetch.output.x}}", "y": "{{steps.cut.output.y}}"});
        let blocks = [first, step("cut", json!({})), step("send", third)];
        let context = json!({"data": {"video_url": "v"}});
        let sequence = json!({"name": "render", "blocks": blocks});
        let wanted = json!({"sequence": sequence, "context": context, "priority": "high"});
        let made = t.post("/orch8/instances", wanted).await.is(201);
        assert_eq!(made["deduplicated"], false);
        let at = format!("/orch8/instances/{}", made["id"].as_str().expect("an id"));
        let of_gpu = json!({"queue_name": "gpu-workers"});
        let task = poll(t, of_gpu.clone()).await;
        assert_eq!(
            (&task["handler_name"], &task["params"]),
            (&json!("run_fetch"), &json!({"url": "v"}))
        );
        assert_eq!(task["context"]["step_id"], "fetch");
        let again = json!({"error": "x", "retryable": true});
        say(t, &task, "fail", again).await.is(200);
        let task = poll(t, of_gpu).await;
        say(t, &task, "complete", json!({"output": {"x": 1}})).await.is(200);
        assert_eq!(t.get(&at).await.is(200)["state"], "running");
        let task = poll(t, json!({})).await;
        say(t, &task, "complete", json!({"output": {"y": 2}})).await.is(200);
        let task = poll(t, json!({})).await;
        assert_eq!(task["params"], json!({"x": 1, "y": 2}));
        say(t, &task, "complete", json!({"output": {}})).await.is(200);
        let ended = t.get(&at).await.is(200);
        assert_eq!((&ended["state"], &ended["name"]), (&json!("completed"), &json!("render")));
        assert_eq!(ended["context"], context);
        assert_eq!(
            ended["steps"][2],
            json!({"id": "send", "handler": "run_send", "state": "completed"})
        );
    });
}

#[test]
fn a_fallback_runs_when_the_last_step_has_failed() {
    run(async |t| {
        let mut last = step("send", json!({"to": "{{steps.cut.output.to}}"}));
        last["fallback_handler"] = json!("run_letter");
        let wanted = json!({"sequence": {"blocks": [step("cut", json!({})), last]}});
        let made = t.post("/orch8/instances", wanted).await.is(201);
        let at = format!("/orch8/instances/{}", made["id"].as_str().expect("an id"));
        let task = poll(t, json!({})).await;
        say(t, &task, "complete", json!({"output": {"to": "a"}})).await.is(200);
        let task = poll(t, json!({})).await;
        say(t, &task, "fail", json!({"error": "no route"})).await.is(200);
        let task = poll(t, json!({})).await;
        assert_eq!(
            (&task["handler_name"], &task["params"]),
            (&json!("run_letter"), &json!({"to": "a"}))
        );
        assert_eq!(task["context"]["steps"]["send"]["error"], "no route");
        say(t, &task, "complete", json!({"output": {}})).await.is(200);
        assert_eq!(t.get(&at).await.is(200)["state"], "completed");
    });
}

#[test]
fn the_refusal_of_a_sequence_names_its_wrong_field() {
    run(async |t| {
        let refused = async |blocks: Value, field: &str| {
            let wanted = json!({"sequence": {"blocks": blocks}});
            let reported = t.post("/orch8/instances", wanted).await.is(400);
            let reported = reported["error"].as_str().expect("a message");
            assert!(reported.contains(&format!("sequence.blocks{field}")), "{field}: {reported}");
        };
        let with = |field: &str, value: Value| {
            let mut step = step("a", json!({}));
            step[field] = value;
            json!([step, {"type": "step", "id": "b", "handler": "b"}])
        };
        refused(json!([]), "").await;
        refused(with("type", json!("parallel")), "[0].type").await;
        refused(with("params", json!([1])), "[0].params").await;
        refused(with("params", json!("{{context.data.x}}")), "[0].params").await;
        refused(with("params", json!({"x": "{{context.data.x}}"})), "[0].params").await;
        refused(with("timeout", json!(0)), "[0].timeout").await;
        refused(with("retry", json!({"max_attempts": 0})), "[0].retry.max_attempts").await;
        refused(with("fallback_handler", json!("")), "[0].fallback_handler").await;
        refused(with("id", json!("b")), "[1].id").await;
        refused(with("send_window", json!({})), "[0].send_window").await;
        let many: Vec<_> = (0..101).map(|it| step(&format!("s{it}"), json!({}))).collect();
        let many = json!({"sequence": {"blocks": many}});
        let reported = t.post("/orch8/instances", many).await.is(400)["error"].to_string();
        assert!(reported.contains("1 to 100 steps, has 101"), "{reported}");
        let dry = json!({"sequence": {"blocks": [step("a", json!({}))]}, "dry_run": true});
        t.post("/orch8/instances", dry).await.is(400);
        t.get("/orch8/instances/x").await.is(404);
    });
}

#[test]
fn tasks_can_be_listed_counted_and_followed() {
    run(async |t| {
        t.enqueue(json!({"job_type": "a"})).await;
        t.enqueue(json!({"job_type": "b"})).await;
        let task = poll(t, json!({"handler_names": ["a"], "worker_id": "w-1"})).await;
        let claimed = t.get(&format!("{TASKS}?state=claimed")).await.is(200);
        assert_eq!((&claimed[0]["id"], claimed.as_array().map(Vec::len)), (&task["id"], Some(1)));
        t.get(&format!("{TASKS}?state=odd")).await.is(400);
        let again = json!({"error": "slow", "retryable": true});
        say(t, &task, "fail", again).await.is(200);
        let stats = t.get(&format!("{TASKS}/stats")).await.is(200);
        assert_eq!(
            (&stats["by_state"]["pending"], &stats["by_handler"]["a"]["pending"]),
            (&json!(2), &json!(1))
        );
        let id = task["id"].as_str().expect("an id");
        let events = t.get(&format!("{TASKS}/{id}/attempts")).await.is(200);
        assert_eq!(
            (&events[0]["event"], &events[1]["event"]),
            (&json!("claimed"), &json!("failed"))
        );
        assert_eq!(events[1]["error"], "slow");
        t.get(&format!("{TASKS}/task_x/attempts")).await.is(404);
    });
}

#[test]
fn errors_are_a_text_and_keys_come_in_every_header() {
    run(async |t| {
        let missing = t.post(&format!("{TASKS}/task_x-1/complete"), json!({"output": {}})).await;
        assert!(missing.is(404)["error"].is_string());
        let url = format!("{}{TASKS}/stats", t.url);
        let with = async |request: reqwest::RequestBuilder| {
            request.send().await.expect("an answer").status().as_u16()
        };
        let request = || t.client.request(Method::GET, &url);
        assert_eq!(with(request()).await, 401);
        assert_eq!(with(request().header("x-api-key", &t.api_key)).await, 200);
        assert_eq!(with(request().basic_auth("", Some(&t.api_key))).await, 200);
        assert_eq!(with(request().basic_auth(&t.api_key, Some(""))).await, 200);
    });
}

#[test]
fn output_that_comes_with_the_end_is_kept_and_the_end_can_be_repeated() {
    run(async |t| {
        let retry = json!({"initial_seconds": 0, "jitter_seconds": 0});
        let id = t.enqueue(json!({"retry": retry})).await;
        let task = poll(t, json!({})).await;
        let odd = json!({"error": "x", "logs": [{"ts": "noon", "message": "a"}]});
        let refused = say(t, &task, "fail", odd).await;
        refused.is(400);
        assert!(refused.text.contains("logs[0].ts"), "{}", refused.text);
        let failed = json!({"error": "no", "retryable": true, "logs": [
            {"ts": "2026-01-31T12:00:00Z", "level": "info", "message": "begins"},
            {"ts": 1_769_860_801_000_i64, "level": "error", "message": "breaks"},
        ]});
        say(t, &task, "fail", failed.clone()).await.is(200);
        say(t, &task, "fail", failed).await.is(200);
        let done = json!({"output": {}, "logs": [{"message": "done"}]});
        say(t, &poll(t, json!({})).await, "complete", done).await.is(200);
        let logs = t.get(&format!("/v1/jobs/{id}/logs")).await.is(200);
        let line = |it: &Value| (it["attempt"].clone(), it["stream"].clone(), it["data"].clone());
        let lines: Vec<_> = logs["logs"].as_array().expect("logs").iter().map(line).collect();
        let line = |attempt, stream, data| (json!(attempt), json!(stream), json!(data));
        assert_eq!(lines.len(), 3, "{logs}");
        assert!(lines.contains(&line(1, "stdout", "info: begins\n")), "{logs}");
        assert!(lines.contains(&line(1, "stderr", "error: breaks\n")), "{logs}");
        assert!(lines.contains(&line(2, "stdout", "done\n")), "{logs}");
    });
}

#[test]
fn workers_handlers_and_health_are_shown() {
    run_alone(async |t| {
        let body = json!({"worker_id": "img", "queues": ["default"], "job_types": ["resize"]});
        t.post("/v1/workers/register", body).await.is(200);
        let workers = t.get("/orch8/workers").await.is(200);
        assert_eq!((&workers[0]["worker_id"], &workers[0]["alive"]), (&json!("img"), &json!(true)));
        let handlers = t.get("/orch8/api/v1/handlers").await.is(200);
        assert_eq!(handlers, json!([{"handler_name": "resize", "workers": 1}]));
        let past = "update workers set last_seen_at = now() - interval '1 hour'";
        t.database.execute(past).await;
        assert_eq!(t.get("/orch8/workers").await.is(200), json!([]));
        let stale = t.get("/orch8/workers?include_stale=true").await.is(200);
        assert_eq!(stale[0]["alive"], false);
        assert_eq!(t.get("/orch8/workers?alive_within_secs=7200").await.is(200)[0]["alive"], true);
        t.get("/orch8/workers?alive_within_secs=0").await.is(400);
        // Those that are gone do not hide the live ones.
        let gone = "insert into workers (project_id, worker_id, queues, job_types, concurrency, last_seen_at)
            select project_id, 'a' || number, '{}', '{}', 1, now() - interval '1 hour'
            from workers, generate_series(1, 250) as number";
        t.database.execute(gone).await;
        let body = json!({"worker_id": "zed", "queues": ["default"], "job_types": ["resize"]});
        t.post("/v1/workers/register", body).await.is(200);
        assert_eq!(t.get("/orch8/workers").await.is(200)[0]["worker_id"], "zed");
        for path in ["/orch8/health/live", "/orch8/api/v1/health/ready"] {
            assert_eq!(t.get(path).await.is(200), json!({"status": "ok"}));
        }
    });
}
