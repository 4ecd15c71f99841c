//! Text that programs produce: half of an emoji, a file's name in another encoding. No report is
//! refused for it, and no other report with it.

use fencepost_domain::ids::JobId;
use serde_json::{Value, json};

use crate::harness::{TestProject, run, run_alone};

/// What `JSON.stringify("card 😀".slice(0, 6))` makes.
const CUT: &str = r#""card \ud83d""#;
/// What is stored of it.
const READ: &str = "card \u{FFFD}";

/// A body in which each [`READ`] is sent as [`CUT`].
fn cut(body: &Value) -> String {
    body.to_string().replace(&json!(READ).to_string(), CUT)
}

async fn leased(t: &TestProject) -> Value {
    t.enqueue(json!({"max_attempts": 1})).await;
    t.lease("w").await
}

#[test]
fn a_failure_is_recorded_whatever_its_texts_are() {
    run(async |t| {
        let job = leased(t).await;
        let mut ack = TestProject::ack_body(&job, "w", "failed");
        ack["error"] = json!({"type": READ, "message": READ, "stack_trace": READ});
        t.post_text("/v1/workers/ack", cut(&ack)).await.is(200);
        let error = t.job(job["id"].as_str().expect("an id")).await["last_error"].clone();
        let texts = [&error["type"], &error["message"], &error["stack_trace"]];
        assert_eq!(texts, [&json!(READ); 3]);
        let wrong = json!({"job_id": job["id"], "worker_id": "w", "status": "failed", "error": {
            "message": 5,
        }});
        t.post("/v1/workers/ack", wrong).await.refuses("error.message");
    });
}

#[test]
fn a_failure_is_recorded_at_every_door_whatever_its_texts_are() {
    run_alone(async |t| {
        let message = async |id: &Value| {
            t.job(id.as_str().expect("an id")).await["last_error"]["message"].clone()
        };
        let id = json!(t.enqueue(json!({"max_attempts": 1})).await);
        let job = t.post("/mobius/v1/projects/main/jobs/claim", json!({"worker_id": "w"}));
        let job = job.await.is(200);
        let failed = json!({
            "worker_id": "w", "attempt": 1, "status": "failed", "error_type": READ,
            "error_message": READ,
        });
        let path = format!("/mobius/v1/projects/main/jobs/{}/complete", job["job_id"]);
        t.post_text(&path.replace('"', ""), cut(&failed)).await.is_empty(204);
        assert_eq!(message(&id).await, READ);

        let id = json!(t.enqueue(json!({"max_attempts": 1})).await);
        let task = t.post("/orch8/workers/tasks/poll", json!({})).await.is(200);
        let failed = json!({"error": READ, "logs": [{"message": READ, "level": READ}]});
        let path = format!("/orch8/workers/tasks/{}/fail", task["id"]).replace('"', "");
        t.post_text(&path, cut(&failed)).await.is(200);
        assert_eq!(message(&id).await, READ);

        let job = json!({"max_attempts": 1, "payload": {"command": "x"}});
        let id = json!(t.enqueue(job).await);
        let claim = json!({"worker_id": "w", "labels": [], "lease_ttl_secs": 60});
        let claimed = t.post("/workflow-graph/api/jobs/claim", claim).await.is(200);
        let path = format!("/workflow-graph/api/jobs/{}", claimed["lease"]["lease_id"]);
        let path = path.replace('"', "");
        let chunk = json!({"chunks": [{
            "workflow_id": "x", "job_id": "x", "sequence": 0, "data": READ, "timestamp_ms": 1,
            "stream": "stdout",
        }]});
        t.post_text(&format!("{path}/logs"), cut(&chunk)).await.is_empty(200);
        let logs = format!("/v1/jobs/{}/logs", id.as_str().expect("an id"));
        assert_eq!(t.get(&logs).await.is(200)["logs"][0]["data"], READ);
        t.post_text(&format!("{path}/fail"), cut(&json!({"error": READ}))).await.is_empty(200);
        assert_eq!(message(&id).await, READ);

        let job = json!({"type": "a", "args": [], "options": {"retry": {"max_attempts": 1}}});
        let stored = t.post("/ojs/v1/jobs", job).await.is(201)["job"]["id"].clone();
        t.post("/ojs/v1/workers/fetch", json!({"queues": ["default"]})).await.is(200);
        let id = stored.as_str().expect("an id");
        let progress = json!({"progress": 0.5, "message": READ});
        let request = t.request(reqwest::Method::PUT, &format!("/ojs/v1/jobs/{id}/progress"));
        let request = request.header("content-type", "application/json").body(cut(&progress));
        let reported = request.send().await.expect("an answer");
        assert_eq!(reported.status(), 200);
        let failed = json!({"job_id": stored, "error": {
            "code": READ, "message": READ, "details": {"error_class": READ, "stack_trace": READ},
        }});
        t.post_text("/ojs/v1/workers/nack", cut(&failed)).await.is(200);
        let job = t.get(&format!("/ojs/v1/jobs/{id}")).await.is(200)["job"].clone();
        assert!(job["error"]["message"] == READ, "{job}");
    });
}

#[test]
fn an_ack_that_cannot_be_read_fails_alone() {
    run(async |t| {
        for _ in 0..3 {
            t.enqueue(json!({"max_attempts": 1})).await;
        }
        let jobs = t.poll("w", 3).await;
        let ack = |job: &Value, status: &str| TestProject::ack_body(job, "w", status);
        let mut cut_text = ack(&jobs[1], "failed");
        cut_text["error"] = json!({"message": READ});
        let mut unknown = ack(&jobs[2], "succeeded");
        unknown["statuss"] = json!("succeeded");
        let no_id = json!({"worker_id": "w", "status": "succeeded"});
        let cut_id = json!({"job_id": READ, "worker_id": "w", "status": "succeeded"});
        let acks = [ack(&jobs[0], "succeeded"), cut_text, unknown, no_id, json!(7), cut_id];
        let body = cut(&json!({"acks": acks}));
        let results = t.post_text("/v1/workers/ack/batch", body).await.is(200)["results"].clone();
        let statuses: Vec<_> =
            results.as_array().expect("results").iter().map(|it| it["status"].clone()).collect();
        assert_eq!(statuses, [200, 200, 400, 400, 400, 400].map(|it| json!(it)));
        assert_eq!(results[2]["job_id"], jobs[2]["id"]);
        assert_eq!(results[2]["error"]["details"][0]["field"], "acks[2].statuss");
        assert_eq!(results[3]["job_id"], "");
        assert_eq!(results[3]["error"]["details"][0]["field"], "acks[3].job_id");
        assert_eq!(results[4]["error"]["details"][0]["field"], "acks[4]");
        assert_eq!(results[5]["job_id"], "", "it is no text");
        let state =
            async |job: &Value| t.job(job["id"].as_str().expect("an id")).await["state"].clone();
        assert_eq!(state(&jobs[0]).await, "succeeded");
        assert_eq!(state(&jobs[1]).await, "dead_letter");
        assert_eq!(state(&jobs[2]).await, "processing");
        let broken = t.post_text("/v1/workers/ack/batch", r#"{"acks": [{]}"#).await;
        broken.is_error(400, "invalid_request");
        t.post("/v1/workers/ack/batch", json!({"acks": 5})).await.refuses("acks");
    });
}

#[test]
fn of_contradicting_acks_in_a_batch_the_first_counts() {
    const ROUNDS: usize = 10;
    run(async |t| {
        for _ in 0..ROUNDS {
            let job = leased(t).await;
            let ack = |status: &str| TestProject::ack_body(&job, "w", status);
            let acks = json!({"acks": [ack("succeeded"), ack("failed"), ack("succeeded")]});
            let results = t.post("/v1/workers/ack/batch", acks).await.is(200)["results"].clone();
            let statuses = [0, 1, 2].map(|it| results[it]["status"].clone());
            assert_eq!(statuses, [json!(200), json!(409), json!(200)], "{results}");
            let job = leased(t).await;
            let ack = |status: &str| TestProject::ack_body(&job, "w", status);
            let acks = json!({"acks": [ack("failed"), ack("succeeded")]});
            let results = t.post("/v1/workers/ack/batch", acks).await.is(200)["results"].clone();
            assert_eq!((&results[0]["status"], &results[1]["status"]), (&json!(200), &json!(409)));
            assert_eq!(t.job(job["id"].as_str().expect("an id")).await["state"], "dead_letter");
        }
    });
}

#[test]
fn a_chunk_of_output_that_cannot_be_read_fails_alone() {
    run(async |t| {
        let job = leased(t).await;
        let chunk = |sequence: i64, data: &str| {
            json!({
                "job_id": job["id"], "attempt": 1, "sequence": sequence, "data": data,
                "timestamp_ms": 1,
            })
        };
        let mut odd = chunk(2, "x");
        odd["stream"] = json!("stdwhat");
        let chunks = json!([chunk(0, "plain"), chunk(1, READ), odd, chunk(-1, "x")]);
        let body = cut(&json!({"worker_id": "w", "chunks": chunks}));
        let reply = t.post_text("/v1/workers/logs", body).await.is(200);
        assert_eq!((&reply["accepted"], &reply["duplicates"]), (&json!(2), &json!(0)));
        let refused = &reply["refused"];
        assert_eq!((&refused[0]["index"], &refused[1]["index"]), (&json!(2), &json!(3)));
        assert_eq!((&refused[0]["status"], &refused[0]["job_id"]), (&json!(400), &job["id"]));
        assert_eq!(refused[0]["error"]["details"][0]["field"], "chunks[2].stream");
        assert_eq!(refused[1]["error"]["details"][0]["field"], "chunks[3].sequence");
        let logs = t.get(&format!("/v1/jobs/{}/logs", job["id"].as_str().expect("an id"))).await;
        let logs = logs.is(200)["logs"].clone();
        assert_eq!((&logs[0]["data"], &logs[1]["data"]), (&json!("plain"), &json!(READ)));
        let all_odd = json!({"worker_id": "w", "chunks": [chunk(-1, "x")]});
        t.post("/v1/workers/logs", all_odd).await.refuses("chunks[0].sequence");
    });
}

#[test]
fn output_of_a_job_that_does_not_run_is_refused_alone() {
    run(async |t| {
        let (ended, running) = (leased(t).await, leased(t).await);
        t.ack(&ended, "w", "succeeded").await.is(200);
        let chunk = |job: &Value| {
            json!({
                "job_id": job, "attempt": 1, "sequence": 0, "data": "x", "timestamp_ms": 1,
            })
        };
        let unknown = json!(JobId::generate().to_string());
        let chunks = json!([chunk(&ended["id"]), chunk(&running["id"]), chunk(&unknown)]);
        let body = json!({"worker_id": "w", "chunks": chunks});
        let reply = t.post("/v1/workers/logs", body).await.is(200);
        assert_eq!((&reply["accepted"], &reply["refused"][2]), (&json!(1), &Value::Null));
        for (place, index, status, id) in [(0, 0, 409, &ended["id"]), (1, 2, 404, &unknown)] {
            let refused = &reply["refused"][place];
            let is = (&refused["index"], &refused["status"], &refused["job_id"]);
            assert_eq!(is, (&json!(index), &json!(status), id));
        }
        let alone = json!({"worker_id": "w", "chunks": [chunk(&ended["id"])]});
        t.post("/v1/workers/logs", alone).await.is(409);
    });
}

#[test]
fn names_and_tags_of_a_new_job_stay_strict() {
    run(async |t| {
        let check = async |field: &str, job: Value| {
            t.post_text("/v1/jobs", cut(&job)).await.refuses(field);
        };
        check("job_type", json!({"job_type": READ})).await;
        check("tags.a", json!({"job_type": "t", "tags": {"a": READ}})).await;
        let jobs = json!({"jobs": [{"job_type": "t"}, {"job_type": READ}]});
        t.post_text("/v1/jobs/batch", cut(&jobs)).await.refuses("jobs[1].job_type");
        assert_eq!(t.get("/v1/jobs").await.is(200)["jobs"], json!([]), "all or none");
    });
}

/// A body in which each [`READ`] ends with a byte that is no UTF-8.
fn broken(body: &Value) -> Vec<u8> {
    let text = body.to_string();
    let parts: Vec<_> = text.split('\u{FFFD}').map(str::as_bytes).collect();
    parts.join(&0xE9)
}

#[test]
fn a_byte_that_is_no_text_refuses_no_other_entry() {
    run(async |t| {
        let (good, bad, worst) = (leased(t).await, leased(t).await, leased(t).await);
        let mut failed = TestProject::ack_body(&bad, "w", "failed");
        failed["error"] = json!({"message": READ});
        let mut result = TestProject::ack_body(&worst, "w", "succeeded");
        result["worker_id"] = json!(READ);
        // Values that are stored as they are cannot be mended.
        let mut changed = TestProject::ack_body(&worst, "w", "succeeded");
        changed["result"] = json!(READ);
        let acks = [TestProject::ack_body(&good, "w", "succeeded"), failed, result, changed];
        let reply = t.post_text("/v1/workers/ack/batch", broken(&json!({"acks": acks}))).await;
        let results = reply.is(200)["results"].clone();
        let statuses: Vec<_> = (0..4).map(|it| results[it]["status"].clone()).collect();
        assert_eq!(statuses[..2], [json!(200), json!(200)], "{results}");
        assert_ne!(statuses[2], json!(200), "{results}");
        assert_eq!(results[3]["error"]["details"][0]["field"], "acks[3].result", "{results}");
        let error = t.job(bad["id"].as_str().expect("an id")).await["last_error"].clone();
        assert_eq!(error["message"], READ);
        let elsewhere = json!({"worker_id": READ, "chunks": [{}]});
        t.post_text("/v1/workers/logs", broken(&elsewhere)).await.refuses("worker_id");
        assert_eq!(t.job(good["id"].as_str().expect("an id")).await["state"], "succeeded");
    });
}
