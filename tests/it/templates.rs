//! Workflow input and templates: what fills the payloads of a workflow's jobs.

use crate::harness::{TestProject, run};
use serde_json::{Value, json};

async fn make(t: &TestProject, input: Value, jobs: Value) -> Value {
    t.post("/v1/workflows", json!({"input": input, "jobs": jobs})).await.is(201)
}

#[test]
fn input_and_results_fill_the_payloads() {
    run(async |t| {
        let made = make(
            t,
            json!({"video": {"url": "v.mp4", "sizes": [720, 1080]}, "evil": "{{steps.a.output}}"}),
            json!([
                {"key": "a", "job_type": "t", "template": "strict", "payload": {
                    "url": "{{input.video.url}}", "all": "{{ input.video.sizes }}",
                    "name": "at {{input.video.sizes.1}}p", "plain": 1.5, "evil": "{{input.evil}}",
                }},
                {"key": "b", "job_type": "t", "template": "lenient", "depends_on": ["a"],
                 "payload": ["{{steps.a.output.file}}", "{{steps.a.output}}", "{{input.evil}}",
                             "{{steps.a.output.none}}", "{{input.none}}"]},
                {"key": "c", "job_type": "t", "depends_on": ["b"], "payload": "{{input.video}}"},
            ]),
        )
        .await;
        assert_eq!(made["input"]["video"]["url"], "v.mp4");
        let read = t.get(&format!("/v1/workflows/{}", made["id"].as_str().expect("an id"))).await;
        assert_eq!(read.is(200)["input"], made["input"]);
        let a = t.wait_and_lease("w").await;
        let expected = json!({
            "url": "v.mp4", "all": [720, 1080], "name": "at 1080p", "plain": 1.5,
            "evil": "{{steps.a.output}}",
        });
        assert_eq!(a["payload"], expected);
        let result = json!({"result": {"file": "{{input.evil}}"}});
        t.ack_with(&a, "w", "succeeded", result).await.is(200);
        let b = t.wait_and_lease("w").await;
        let expected = json!([
            "{{input.evil}}", {"file": "{{input.evil}}"}, "{{steps.a.output}}", null, null,
        ]);
        assert_eq!(b["payload"], expected, "what is filled in is not read again");
        t.ack(&b, "w", "succeeded").await.is(200);
        assert_eq!(t.wait_and_lease("w").await["payload"], "{{input.video}}", "no template");
    });
}

#[test]
fn a_retried_job_is_filled_again() {
    run(async |t| {
        let jobs = json!([
            {"key": "a", "job_type": "t"},
            {"key": "b", "job_type": "t", "template": "lenient", "depends_on": [
                {"key": "a", "when": "ended"},
            ], "payload": {"x": "{{steps.a.output}}", "y": "{{input}}"}},
        ]);
        make(t, json!(7), jobs).await;
        let a = t.wait_and_lease("w").await;
        t.ack_with(&a, "w", "succeeded", json!({"result": [1]})).await.is(200);
        for _ in 0..2 {
            let b = t.wait_and_lease("w").await;
            assert_eq!(b["payload"], json!({"x": [1], "y": 7}));
            t.ack(&b, "w", "released").await.is(200);
        }
    });
}

#[test]
fn a_job_that_has_succeeded_without_a_result_needs_no_fallback() {
    run(async |t| {
        let jobs = json!([
            {"key": "a", "job_type": "t", "queue": "a"},
            {"key": "a.fallback", "job_type": "t", "queue": "f"},
            {"key": "b", "job_type": "t", "queue": "b", "template": "lenient",
             "depends_on": ["a", "a.fallback"], "payload": ["{{steps.a.output}}"]},
        ]);
        make(t, json!(7), jobs).await;
        let lease = async |queue: &str| {
            let poll = json!({"worker_id": "w", "queues": [queue], "wait_seconds": 20});
            t.post("/v1/workers/poll", poll).await.is(200)["jobs"][0].clone()
        };
        t.ack(&lease("a").await, "w", "succeeded").await.is(200);
        let other = json!({"result": "other"});
        t.ack_with(&lease("f").await, "w", "succeeded", other).await.is(200);
        assert_eq!(lease("b").await["payload"], json!([null]));
    });
}

#[test]
fn a_template_is_filled_when_its_parent_has_left_nothing() {
    run(async |t| {
        let jobs = json!([
            {"key": "a", "job_type": "t", "max_attempts": 1},
            {"key": "b", "job_type": "t", "queue": "b", "template": "lenient", "depends_on": [
                {"key": "a", "when": "failed"},
            ], "payload": ["{{steps.a.output}}", "{{input}}"]},
        ]);
        let made = make(t, json!(7), jobs).await;
        let a = t.wait_and_lease("w").await;
        t.ack(&a, "w", "failed").await.is(200);
        t.job_becomes(made["jobs"][1]["id"].as_str().expect("an id"), "pending").await;
        let retry = format!("/v1/jobs/{}/retry", a["id"].as_str().expect("an id"));
        t.post(&retry, json!({})).await.is(200);
        let poll = json!({"worker_id": "w", "queues": ["b"], "wait_seconds": 10});
        let polled = t.post("/v1/workers/poll", poll).await.is(200);
        assert_eq!(polled["jobs"][0]["payload"], json!([null, 7]));
    });
}

#[test]
fn wrong_templates_are_refused_with_the_mistake() {
    run(async |t| {
        let with = async |payload: Value| {
            let job =
                json!({"key": "b", "job_type": "t", "template": "strict", "payload": payload});
            let jobs = json!([{"key": "a", "job_type": "t"}, job]);
            t.post("/v1/workflows", json!({"input": {"a": 1}, "jobs": jobs})).await
        };
        with(json!("{{input.a")).await.refuses("jobs[1].payload");
        with(json!("{{input.b}}")).await.refuses("jobs[1].payload");
        with(json!("{{steps.a.output}}")).await.refuses("jobs[1].payload");
        with(json!("{{env.PATH}}")).await.refuses("jobs[1].payload");
        with(json!(vec!["{{input.a}}"; 101])).await.refuses("jobs[1].payload");
        with(json!({"ok": "{{input.a}}"})).await.is(201);
        let alone = json!({"job_type": "t", "template": "strict"});
        t.post("/v1/jobs", alone).await.refuses("template");
        let large = "x".repeat(3_000);
        let filled = json!({"input": large, "jobs": [
            {"key": "a", "job_type": "t", "template": "lenient", "payload": vec!["{{input}}"; 100]},
        ]});
        t.post("/v1/workflows", filled).await.refuses("jobs[0].payload");
    });
}

#[test]
fn what_fills_a_place_is_the_stored_text() {
    run(async |t| {
        let workflow = r#"{"input": {"n": 18446744073709551616, "cut": "\ud83d"}, "jobs": [
            {"key": "a", "job_type": "t", "template": "strict",
             "payload": {"n": "{{input.n}}", "cut": "{{input.cut}} {{input.n}}", "own": [1e400]}},
            {"key": "b", "job_type": "t", "template": "strict", "depends_on": ["a"],
             "payload": { "name": "{{steps.a.output.name}}", "all":"{{steps.a.output}}" }}
        ]}"#;
        // Half an emoji is no text for the client here: answers are compared as they come.
        assert_eq!(t.post_text("/v1/workflows", workflow).await.status, 201);
        let polled = async || {
            let poll = json!({"worker_id": "w", "queues": ["default"], "wait_seconds": 10});
            t.post("/v1/workers/poll", poll).await
        };
        let first = polled().await;
        let filled =
            r#"{"n": 18446744073709551616, "cut": "\ud83d 18446744073709551616", "own": [1e400]}"#;
        assert!(first.text.contains(filled), "{}", first.text);
        let part = |name: &str| {
            let (_, after) = first.text.split_once(&format!(r#""{name}":""#)).expect("a field");
            after.split('"').next().expect("a text").to_owned()
        };
        let result =
            r#"{"name": "Ada", "note": "\ud83d", "n": 1e999, "long": 0.1234567890123456789}"#;
        let ack = format!(
            r#"{{"job_id": "{}", "worker_id": "w", "lease_id": "{}", "status": "succeeded",
                "result": {result}}}"#,
            part("id"),
            part("lease_id"),
        );
        t.post_text("/v1/workers/ack", ack).await.is(200);
        let second = polled().await;
        let filled = format!(r#"{{ "name": "Ada", "all":{result} }}"#);
        assert!(second.text.contains(&filled), "{}", second.text);
    });
}
