//! workflow-graph workers.

use fencepost_store::sweep::prune;

use crate::harness::{Reply, TestProject, eventually, run, run_alone};
use reqwest::Method;
use serde_json::{Value, json};

const API: &str = "/workflow-graph/api";

async fn claim(t: &TestProject, labels: Value) -> Value {
    let claim = json!({"worker_id": "w1", "labels": labels, "lease_ttl_secs": 60});
    t.post(&format!("{API}/jobs/claim"), claim).await.is(200)
}

async fn say(t: &TestProject, claim: &Value, what: &str, body: Value) -> Reply {
    let lease = claim["lease"]["lease_id"].as_str().expect("a lease");
    t.post(&format!("{API}/jobs/{lease}/{what}"), body).await
}

async fn status(t: &TestProject, workflow: &str) -> Vec<(String, String)> {
    let workflow = t.get(&format!("{API}/workflows/{workflow}/status")).await.is(200);
    let text = |it: &Value| it.as_str().expect("text").to_owned();
    let jobs = workflow["jobs"].as_array().expect("jobs").iter();
    jobs.map(|it| (text(&it["id"]), text(&it["status"]))).collect()
}

#[test]
fn a_command_is_claimed_logged_and_completed() {
    run_alone(async |t| {
        let worker = json!({"worker_id": "w1", "labels": ["docker"]});
        t.post(&format!("{API}/workers/register"), worker).await.is_empty(200);
        assert_eq!(claim(t, json!(["docker"])).await, Value::Null);
        let id = t.enqueue(json!({"payload": {"command": "echo hi"}, "queue": "any"})).await;
        let claimed = claim(t, json!(["docker"])).await;
        let (job, lease) = (&claimed["job"], &claimed["lease"]);
        assert_eq!((&job["job_id"], &job["workflow_id"]), (&json!(id), &json!(id)));
        assert_eq!((&job["command"], &job["attempt"]), (&json!("echo hi"), &json!(0)));
        assert_eq!((&lease["ttl_secs"], &lease["worker_id"]), (&json!(60), &json!("w1")));
        let path = format!("{API}/jobs/{}", lease["lease_id"].as_str().expect("an id"));
        t.act(&format!("{path}/heartbeat")).await.is_empty(200);
        let chunk = |sequence: i64, data: &str| {
            json!({"workflow_id": id, "job_id": id, "sequence": sequence, "data": data,
                   "timestamp_ms": 1_710_000_001_000_i64, "stream": "stdout"})
        };
        let chunks =
            json!({"chunks": [chunk(0, ""), chunk(1, "hi\n"), chunk(2, &"x".repeat(70_000))]});
        say(t, &claimed, "logs", chunks).await.is_empty(200);
        say(t, &claimed, "logs", json!({"chunks": []})).await.is_empty(200);
        let cancelled = format!("{API}/jobs/{id}/{id}/cancelled");
        assert_eq!(t.get(&cancelled).await.is(200), json!(false));
        say(t, &claimed, "complete", json!({"outputs": {"url": "s3://x"}})).await.is_empty(200);
        assert_eq!(t.job(&id).await["result"], json!({"url": "s3://x"}));
        let logs = t.get(&format!("{API}/workflows/{id}/jobs/{id}/logs")).await.is(200);
        assert_eq!((&logs[1]["data"], &logs[1]["stream"]), (&json!("hi\n"), &json!("stdout")));
        assert_eq!(logs[2]["data"].as_str().map(str::len), Some(64 * 1024));
        let native = t.get(&format!("/v1/jobs/{id}/logs")).await.is(200);
        assert_eq!(native["truncated_attempts"], json!([1]));
    });
}

#[test]
fn a_lease_that_is_settled_or_unknown_is_a_conflict_and_never_missing() {
    run_alone(async |t| {
        t.enqueue(json!({"payload": "true"})).await;
        let claimed = claim(t, json!([])).await;
        let failed = json!({"error": "", "retryable": false});
        say(t, &claimed, "fail", failed).await.is_empty(200);
        for lease in [
            claimed["lease"]["lease_id"].as_str().expect("an id"),
            "nonsense",
            &format!("{}.1.{}", fencepost_domain::ids::JobId::generate(), uuid::Uuid::nil()),
        ] {
            let path = format!("{API}/jobs/{lease}");
            t.act(&format!("{path}/heartbeat")).await.is(409);
            t.post(&format!("{path}/complete"), json!({})).await.is(409);
            let chunk = json!({"sequence": 0, "data": "x", "timestamp_ms": 0, "stream": "stderr"});
            t.post(&format!("{path}/logs"), json!({"chunks": [chunk]})).await.is(409);
        }
    });
}

#[test]
fn only_jobs_with_a_command_are_offered_and_the_others_are_left_alone() {
    run_alone(async |t| {
        let other = t.enqueue(json!({"payload": {"to": "ada"}, "priority": 9})).await;
        for payload in [json!(null), json!([1]), json!({"command": 7}), json!("\u{0}x")] {
            t.enqueue(json!({"payload": payload, "priority": 5, "labels": ["docker"]})).await;
        }
        t.enqueue(json!({"payload": {"command": "a\u{0}b"}, "priority": 5})).await;
        let wanted = t.enqueue(json!({"payload": {"command": "ls"}})).await;
        let labelled = t.enqueue(json!({"payload": {"command": "ps"}, "labels": ["docker"]})).await;
        assert_eq!(claim(t, json!([])).await["job"]["job_id"], wanted);
        assert_eq!(claim(t, json!([])).await, Value::Null);
        let texts = claim(t, json!(["docker"])).await;
        // A string is a command, whatever is in it.
        assert_eq!(texts["job"]["command"], "\u{0}x");
        assert_eq!(claim(t, json!(["docker"])).await["job"]["job_id"], labelled);
        assert_eq!(claim(t, json!(["docker"])).await, Value::Null);
        assert_eq!(t.job(&other).await["attempt"], 0);
    });
}

#[test]
fn a_command_is_found_behind_any_number_of_other_jobs() {
    run_alone(async |t| {
        let others = |n: usize| json!({"jobs": vec![json!({"job_type": "t", "priority": 1}); n]});
        for _ in 0..3 {
            t.post("/v1/jobs/batch", others(100)).await.is(201);
        }
        let wanted = t.enqueue(json!({"payload": "ls"})).await;
        let claimed = claim(t, json!([])).await;
        assert_eq!(claimed["job"]["job_id"], wanted);
        // So after a retry of an ended job.
        t.act(&format!("/v1/jobs/{wanted}/cancel")).await.is(200);
        say(t, &claimed, "fail", json!({"error": "stopped", "retryable": false})).await;
        assert_eq!(t.job(&wanted).await["state"], "cancelled");
        t.act(&format!("/v1/jobs/{wanted}/retry")).await.is(200);
        assert_eq!(claim(t, json!([])).await["job"]["job_id"], wanted);
    });
}

#[test]
fn a_payload_that_no_program_can_hold_is_a_command_all_the_same_or_is_left_alone() {
    run_alone(async |t| {
        let enqueue = async |payload: &str| {
            let body = format!(r#"{{"job_type": "t", "payload": {payload}}}"#);
            let reply = t.post_text("/v1/jobs", body).await;
            let path = reply.headers["location"].to_str().expect("text");
            path.rsplit('/').next().expect("an id").to_owned()
        };
        let left = enqueue(r#"{"command": "a\u0000b"}"#).await;
        for (payload, shown) in
            [(r#""\ud800""#, "\u{fffd}"), (r#"{"command": "ls", "n": 1e999}"#, "ls")]
        {
            let id = enqueue(payload).await;
            let claimed = claim(t, json!([])).await;
            assert_eq!(
                (&claimed["job"]["job_id"], &claimed["job"]["command"]),
                (&json!(id), &json!(shown))
            );
        }
        assert_eq!(claim(t, json!([])).await, Value::Null);
        assert_eq!(t.job(&left).await["attempt"], 0);
        let nul = json!([{"id": "a", "command": "a\u{0}b"}]);
        t.post(&format!("{API}/workflows"), json!({"name": "n", "jobs": nul})).await.is(400);
    });
}

#[test]
fn a_workflow_that_was_run_again_outlives_the_jobs_of_its_first_run() {
    run_alone(async |t| {
        let jobs = json!([{"id": "a", "command": "true"}]);
        let stored =
            t.post(&format!("{API}/workflows"), json!({"name": "n", "jobs": jobs})).await.is(201);
        let id = stored["id"].as_str().expect("an id").to_owned();
        for _ in 0..2 {
            t.act(&format!("{API}/workflows/{id}/run")).await.is_empty(202);
            let claimed = claim(t, json!([])).await;
            say(t, &claimed, "complete", json!({})).await.is_empty(200);
        }
        let project = fencepost_domain::ids::ProjectId(
            t.database.number("select id::bigint from projects where slug = 'main'").await as i32,
        );
        let original: fencepost_domain::ids::WorkflowId = id.parse().expect("an id");
        let first =
            format!("select job_id from workflow_jobs where workflow_id = '{}'", original.0);
        t.database.execute(&format!("delete from finished_jobs where id in ({first})")).await;
        let mut conn = t.database.connect().await;
        prune::prune_workflows(&mut conn, project, &[original.0]).await.expect("it runs");
        assert_eq!(status(t, &id).await, [("a".into(), "success".into())]);
        // With its last run it goes, too.
        let last = t
            .database
            .text("select successor_id::text from workflows where successor_id is not null")
            .await;
        t.database.execute("delete from finished_jobs").await;
        prune::prune_workflows(&mut conn, project, &[last.parse().expect("a uuid")])
            .await
            .expect("it runs");
        assert_eq!(t.database.number("select count(*) from workflows").await, 0);
        t.get(&format!("{API}/workflows/{id}/status")).await.is(404);
    });
}

#[test]
fn a_workflow_that_was_cancelled_before_it_ran_can_be_run() {
    run_alone(async |t| {
        let sample = t.act(&format!("{API}/workflows/sample")).await.is(201);
        let id = sample["id"].as_str().expect("an id");
        t.act(&format!("{API}/workflows/{id}/cancel")).await.is_empty(202);
        assert!(status(t, id).await.iter().all(|it| it.1 == "cancelled"));
        t.act(&format!("{API}/workflows/{id}/run")).await.is_empty(202);
        assert_eq!(claim(t, json!([])).await["job"]["job_id"], "build");
    });
}

#[test]
fn a_workflow_waits_until_it_is_run_and_can_be_run_again() {
    run_alone(async |t| {
        let job = |id: &str, on: &[&str]| {
            json!({"id": id, "name": id.to_uppercase(), "command": format!("run {id}"),
                   "depends_on": on, "metadata": {"k": 1.50}})
        };
        let jobs = json!([job("build", &[]), job("test", &["build"])]);
        let new = json!({"name": "ci", "trigger": "push", "jobs": jobs});
        let workflow = t.post(&format!("{API}/workflows"), new).await.is(201);
        let id = workflow["id"].as_str().expect("an id").to_owned();
        assert_eq!(
            (&workflow["trigger"], &workflow["jobs"][0]["name"]),
            (&json!("push"), &json!("BUILD"))
        );
        assert_eq!(claim(t, json!([])).await, Value::Null);
        let run = async || {
            let reply = t.act(&format!("{API}/workflows/{id}/run")).await;
            reply.is_empty(202);
        };
        run().await;
        // It runs: nothing happens.
        run().await;
        let build = claim(t, json!([])).await;
        assert_eq!(
            (&build["job"]["job_id"], &build["job"]["workflow_id"]),
            (&json!("build"), &json!(id))
        );
        assert_eq!(claim(t, json!([])).await, Value::Null);
        say(t, &build, "complete", json!({"outputs": {"artifact": "a.tar"}})).await.is_empty(200);
        let test = claim(t, json!([])).await;
        assert_eq!(test["job"]["upstream_outputs"], json!({"build": {"artifact": "a.tar"}}));
        let path = format!("{API}/jobs/{id}/test/cancelled");
        assert_eq!(t.get(&path).await.is(200), json!(false));
        say(t, &test, "complete", json!({})).await.is_empty(200);
        assert_eq!(
            status(t, &id).await,
            [("build".into(), "success".into()), ("test".into(), "success".into())]
        );
        run().await;
        assert_eq!(
            status(t, &id).await,
            [("build".into(), "queued".into()), ("test".into(), "queued".into())]
        );
        let again = claim(t, json!([])).await;
        assert_eq!(again["job"]["command"], "run build");
        say(t, &again, "fail", json!({"error": "no", "retryable": true})).await.is_empty(200);
        // Its retries are used up; nothing was cancelled by request.
        let skipped = eventually("the second step to leave the queue", async || {
            let seen = status(t, &id).await;
            (seen[1].1 != "queued").then_some(seen)
        })
        .await;
        assert_eq!(
            skipped,
            [("build".into(), "failure".into()), ("test".into(), "skipped".into())]
        );
        let listed = t.get(&format!("{API}/workflows?status=skipped")).await.is(200);
        assert_eq!((&listed[0]["id"], listed.as_array().map(Vec::len)), (&json!(id), Some(1)));
    });
}

#[test]
fn a_cancelled_workflow_notifies_its_worker() {
    run_alone(async |t| {
        let sample = t.act(&format!("{API}/workflows/sample")).await.is(201);
        let id = sample["id"].as_str().expect("an id");
        t.act(&format!("{API}/workflows/{id}/run")).await.is_empty(202);
        let build = claim(t, json!([])).await;
        t.act(&format!("{API}/workflows/{id}/cancel")).await.is_empty(202);
        assert_eq!(t.get(&format!("{API}/jobs/{id}/build/cancelled")).await.is(200), json!(true));
        say(t, &build, "fail", json!({"error": "reported"})).await.is_empty(200);
        assert!(status(t, id).await.iter().all(|it| it.1 == "cancelled"));
        t.act(&format!("{API}/workflows/wf_x/run")).await.is(404);
        let cycle = json!({"name": "x", "jobs": [
            {"id": "a", "command": "", "depends_on": ["b"]}, {"id": "b", "command": "", "depends_on": ["a"]},
        ]});
        t.post(&format!("{API}/workflows"), cycle).await.is(400);
    });
}

#[test]
fn what_a_job_prints_is_streamed_from_its_beginning() {
    run_alone(async |t| {
        let id = t.enqueue(json!({"payload": "make"})).await;
        let claimed = claim(t, json!([])).await;
        let chunk = |n: i64| json!({"sequence": n, "data": format!("line {n}"), "timestamp_ms": 1, "stream": "stdout"});
        say(t, &claimed, "logs", json!({"chunks": [chunk(0)]})).await.is_empty(200);
        let path = format!("{API}/workflows/{id}/jobs/{id}/logs/stream");
        let mut response = t.request(Method::GET, &path).send().await.expect("an answer");
        let mut seen = String::new();
        while !seen.contains("line 0") {
            let bytes = response.chunk().await.expect("a piece").expect("more");
            seen.push_str(&String::from_utf8_lossy(&bytes));
        }
        assert!(seen.contains("event: log"), "{seen}");
        say(t, &claimed, "logs", json!({"chunks": [chunk(1)]})).await.is_empty(200);
        say(t, &claimed, "complete", json!({})).await.is_empty(200);
        while let Some(bytes) = response.chunk().await.expect("a piece") {
            seen.push_str(&String::from_utf8_lossy(&bytes));
        }
        assert!(
            seen.contains("line 1") && seen.contains(&format!("\"job_id\":\"{id}\"")),
            "{seen}"
        );
    });
}

#[test]
fn workers_are_known_by_their_labels() {
    run(async |t| {
        let worker = json!({"worker_id": "w1", "labels": ["linux", "docker"]});
        t.post(&format!("{API}/workers/register"), worker).await.is_empty(200);
        t.act(&format!("{API}/workers/w1/heartbeat")).await.is_empty(200);
        t.act(&format!("{API}/workers/w2/heartbeat")).await.is(404);
        let workers = t.get(&format!("{API}/workers")).await.is(200);
        assert_eq!(
            (&workers[0]["labels"], &workers[0]["status"]),
            (&json!(["docker", "linux"]), &json!("idle"))
        );
        t.post(&format!("{API}/workers/register"), json!({})).await.is(400);
    });
}
