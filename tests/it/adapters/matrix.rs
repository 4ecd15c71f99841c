//! Five protocols, one job: whichever leases it, whichever settles it, all show the same.

use crate::harness::{LoneProject, TestProject, run_alone, until};
use serde_json::{Value, json};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Adapter {
    Native,
    Mobius,
    Orch8,
    OpenJobSpec,
    WorkflowGraph,
}

const ALL: [Adapter; 5] = [
    Adapter::Native,
    Adapter::Mobius,
    Adapter::Orch8,
    Adapter::OpenJobSpec,
    Adapter::WorkflowGraph,
];
const WORKER: &str = "worker-1";

/// What an adapter says of a job, in the native words.
#[derive(Debug, PartialEq)]
struct Seen {
    state: &'static str,
    /// Attempts that have begun.
    attempt: i64,
    result: Value,
}

/// A lease as its claimer knows it: the job, its attempt, its lease.
#[derive(Debug, Clone)]
struct Lease {
    job_id: String,
    attempt: i64,
    lease_id: String,
}

impl Lease {
    fn suffix(&self) -> &str {
        self.job_id.strip_prefix("job_").expect("a native id")
    }

    fn uuid(&self) -> String {
        uuid_of(&self.job_id)
    }
}

fn uuid_of(job_id: &str) -> String {
    job_id.parse::<fencepost_domain::ids::JobId>().expect("an id").0.to_string()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}")).to_owned()
}

/// The lease that a job has now.
async fn lease_of(t: &LoneProject, job_id: String) -> Lease {
    let attempt = t.job(&job_id).await["attempt"].as_i64().expect("a number");
    let id = uuid_of(&job_id);
    let lease_id =
        t.database.text(&format!("select lease_id::text from jobs where id = '{id}'")).await;
    Lease { job_id, attempt, lease_id }
}

/// Claims the one job that is there, and answers with its lease.
async fn claim(t: &LoneProject, adapter: Adapter) -> Lease {
    let job_id = match adapter {
        Adapter::Native => text(&t.lease(WORKER).await["id"]),
        Adapter::Mobius => {
            let poll = json!({"worker_id": WORKER, "queues": ["default"]});
            let job = t.post("/mobius/v1/projects/main/jobs/claim", poll).await.is(200);
            text(&job["job_id"]).rsplit_once('-').expect("an attempt").0.to_owned()
        }
        Adapter::Orch8 => {
            let poll = json!({"worker_id": WORKER});
            let task = t.post("/orch8/workers/tasks/poll", poll).await.is(200);
            let id = text(&task["id"]).replace("task_", "job_");
            id.rsplit_once('-').expect("an attempt").0.to_owned()
        }
        Adapter::OpenJobSpec => {
            let wanted = json!({"queues": ["default"], "worker_id": WORKER});
            let jobs = t.post("/ojs/v1/jobs/fetch", wanted).await.is(200)["jobs"].clone();
            let id = text(&jobs[0]["id"]).parse().expect("a uuid");
            fencepost_domain::ids::JobId(id).to_string()
        }
        Adapter::WorkflowGraph => {
            let wanted = json!({"worker_id": WORKER, "labels": []});
            let claim = t.post("/workflow-graph/api/jobs/claim", wanted).await.is(200);
            text(&claim["lease"]["lease_id"]).split('.').next().expect("a job").to_owned()
        }
    };
    lease_of(t, job_id).await
}

/// Reports success, with a result that every adapter can carry; or a failure that may be tried
/// again.
async fn settle(t: &TestProject, adapter: Adapter, lease: &Lease, result: Option<&Value>) {
    let Lease { job_id, attempt, lease_id } = lease;
    let (path, body) = match (adapter, result) {
        (Adapter::Native, _) => {
            let mut body = json!({"job_id": job_id, "worker_id": WORKER, "attempt": attempt});
            match result {
                Some(result) => body["result"] = result.clone(),
                None => body["error"] = json!({"message": "again"}),
            }
            body["status"] = if result.is_some() { "succeeded" } else { "failed" }.into();
            ("/v1/workers/ack".to_owned(), body)
        }
        (Adapter::Mobius, _) => {
            let mut body = json!({"worker_id": WORKER, "attempt": attempt});
            match result {
                Some(result) => body["result_b64"] = base64(result).into(),
                None => body["error_message"] = "again".into(),
            }
            body["status"] = if result.is_some() { "completed" } else { "failed" }.into();
            (format!("/mobius/v1/projects/main/jobs/{job_id}-{attempt}/complete"), body)
        }
        (Adapter::Orch8, Some(result)) => {
            let path = format!("/orch8/workers/tasks/task_{}-{attempt}/complete", lease.suffix());
            (path, json!({"output": result}))
        }
        (Adapter::Orch8, None) => {
            let path = format!("/orch8/workers/tasks/task_{}-{attempt}/fail", lease.suffix());
            (path, json!({"error": "again", "retryable": true}))
        }
        (Adapter::OpenJobSpec, Some(result)) => {
            (format!("/ojs/v1/jobs/{}/ack", lease.uuid()), json!({"result": result}))
        }
        (Adapter::OpenJobSpec, None) => {
            let error = json!({"error": {"code": "handler_error", "message": "again"}});
            (format!("/ojs/v1/jobs/{}/nack", lease.uuid()), error)
        }
        (Adapter::WorkflowGraph, Some(result)) => {
            let path = format!("/workflow-graph/api/jobs/{job_id}.{attempt}.{lease_id}/complete");
            (path, json!({"outputs": result}))
        }
        (Adapter::WorkflowGraph, None) => {
            let path = format!("/workflow-graph/api/jobs/{job_id}.{attempt}.{lease_id}/fail");
            (path, json!({"error": "again", "retryable": true}))
        }
    };
    let reply = t.post(&path, body).await;
    assert!(reply.status.is_success(), "{adapter:?}: {reply:?}");
}

fn base64(result: &Value) -> String {
    use base64::Engine as _;
    base64::prelude::BASE64_STANDARD.encode(result.to_string())
}

/// Reads a job through an adapter.
async fn look(t: &TestProject, adapter: Adapter, job_id: &str) -> Seen {
    let number = |it: &Value| it.as_i64().expect("a number");
    let (word, attempt, result) = match adapter {
        Adapter::Native => {
            let job = t.job(job_id).await;
            (text(&job["state"]), number(&job["attempt"]), job["result"].clone())
        }
        Adapter::Mobius => {
            let job = t.get(&format!("/mobius/v1/projects/main/jobs/{job_id}")).await.is(200);
            (text(&job["status"]), number(&job["attempt"]), job["result"].clone())
        }
        Adapter::Orch8 => {
            let tasks = t.get("/orch8/workers/tasks").await.is(200);
            let prefix = job_id.replace("job_", "task_");
            let mine = |it: &&Value| text(&it["id"]).starts_with(&prefix);
            let task = tasks.as_array().expect("tasks").iter().find(mine).expect("it is listed");
            (text(&task["state"]), number(&task["claim_epoch"]), task["output"].clone())
        }
        Adapter::OpenJobSpec => {
            let job =
                t.get(&format!("/ojs/v1/jobs/{}", uuid_of(job_id))).await.is(200)["job"].clone();
            (text(&job["state"]), number(&job["attempt"]), job["result"].clone())
        }
        Adapter::WorkflowGraph => {
            let path = format!("/workflow-graph/api/workflows/{job_id}/status");
            let job = t.get(&path).await.is(200)["jobs"][0].clone();
            let output = job["output"].as_str().map(|it| serde_json::from_str(it).expect("JSON"));
            (text(&job["status"]), number(&job["attempt"]) + 1, output.unwrap_or_default())
        }
    };
    let state = match word.as_str() {
        "pending" | "available" | "retryable" | "queued" => "pending",
        "processing" | "claimed" | "active" | "running" => "processing",
        "succeeded" | "completed" | "success" => "succeeded",
        "dead_letter" | "failed" | "discarded" | "failure" => "dead_letter",
        other => panic!("{adapter:?} says {other}"),
    };
    // Where a retry is a new job, the one that waits is the next.
    let is_next = state == "pending" && [Adapter::Mobius, Adapter::Orch8].contains(&adapter);
    Seen { state, attempt: attempt - i64::from(is_next), result }
}

async fn all_show(
    t: &TestProject,
    job_id: &str,
    state: &'static str,
    attempt: i64,
    result: &Value,
) {
    for adapter in ALL {
        let expected = Seen { state, attempt, result: result.clone() };
        assert_eq!(look(t, adapter, job_id).await, expected, "{adapter:?}");
    }
}

async fn enqueue(t: &TestProject, max_attempts: i32) -> String {
    let retry = json!({"initial_seconds": 0, "jitter_seconds": 0});
    let payload = json!({"command": "true"});
    t.enqueue(json!({"payload": payload, "retry": retry, "max_attempts": max_attempts})).await
}

/// A failure without a wait makes a job claimable again a moment later.
async fn claimable(t: &TestProject, job_id: &str) {
    until("the job to wait for a worker", async || t.job(job_id).await["waiting_for"] == "worker")
        .await;
}

#[test]
fn a_job_is_worked_through_any_door_and_shown_alike_by_all() {
    run_alone(async |t| {
        let result = json!({"answer": "42"});
        for worker in ALL {
            let id = enqueue(t, 3).await;
            let lease = claim(t, worker).await;
            assert_eq!(lease.job_id, id, "{worker:?}");
            all_show(t, &id, "processing", 1, &Value::Null).await;
            settle(t, worker, &lease, None).await;
            all_show(t, &id, "pending", 1, &Value::Null).await;
            claimable(t, &id).await;
            let lease = claim(t, worker).await;
            all_show(t, &id, "processing", 2, &Value::Null).await;
            settle(t, worker, &lease, Some(&result)).await;
            all_show(t, &id, "succeeded", 2, &result).await;
            let job = t.job(&id).await;
            assert_eq!(
                (&job["worker_id"], &job["failures"]),
                (&json!(WORKER), &json!(1)),
                "{worker:?}"
            );
        }
    });
}

#[test]
fn a_lease_from_any_door_is_settled_through_any_other() {
    run_alone(async |t| {
        for giver in ALL {
            for taker in ALL {
                let id = enqueue(t, 2).await;
                let lease = claim(t, giver).await;
                settle(t, taker, &lease, None).await;
                claimable(t, &id).await;
                let lease = claim(t, taker).await;
                settle(t, giver, &lease, None).await;
                let reported = format!("{giver:?} and {taker:?}");
                assert_eq!(t.job(&id).await["state"], "dead_letter", "{reported}");
                all_show(t, &id, "dead_letter", 2, &Value::Null).await;
                assert_eq!(t.job(&id).await["last_error"]["message"], "again", "{reported}");
            }
        }
    });
}

#[test]
fn a_job_made_at_any_door_is_worked_through_every_other() {
    run_alone(async |t| {
        let result = json!({"answer": "42"});
        for worker in ALL {
            let native = enqueue(t, 1).await;
            let lease = claim(t, worker).await;
            assert_eq!(lease.job_id, native);
            settle(t, worker, &lease, Some(&result)).await;

            // Its arguments are an array, which is no command: workflow-graph is not offered it.
            let made =
                t.post("/ojs/v1/jobs", json!({"type": "a.b", "args": [1]})).await.is(201)["job"]
                    .clone();
            if worker == Adapter::WorkflowGraph {
                let wanted = json!({"worker_id": WORKER, "labels": []});
                let none = t.post("/workflow-graph/api/jobs/claim", wanted).await.is(200);
                assert_eq!(none, Value::Null);
                t.delete(&format!("/ojs/v1/jobs/{}", text(&made["id"]))).await.is(200);
            } else {
                let lease = claim(t, worker).await;
                assert_eq!(lease.uuid(), made["id"]);
                settle(t, worker, &lease, Some(&result)).await;
                all_show(t, &lease.job_id, "succeeded", 1, &result).await;
            }

            let jobs = json!([{"id": "only", "command": "true"}]);
            let path = "/workflow-graph/api/workflows";
            let workflow = t.post(path, json!({"name": "one", "jobs": jobs})).await.is(201);
            let id = text(&workflow["id"]);
            t.act(&format!("{path}/{id}/run")).await.is_empty(202);
            let lease = claim(t, worker).await;
            settle(t, worker, &lease, Some(&result)).await;
            let job = t.get(&format!("{path}/{id}/status")).await.is(200)["jobs"][0].clone();
            assert_eq!(job["status"], "success", "{worker:?}");
            assert_eq!(t.job(&lease.job_id).await["result"], result);
        }
    });
}

#[test]
fn workers_of_all_protocols_share_a_queue_side_by_side() {
    run_alone(async |t| {
        const EACH: usize = 8;
        let mut wanted = Vec::new();
        for _ in 0..EACH * ALL.len() {
            wanted.push(enqueue(t, 1).await);
        }
        let work = ALL.map(|adapter| {
            let t = t.clone();
            tokio::spawn(async move {
                let mut done = Vec::new();
                for _ in 0..EACH {
                    let lease = claim(&t, adapter).await;
                    settle(&t, adapter, &lease, Some(&json!({"by": format!("{adapter:?}")}))).await;
                    done.push(lease.job_id);
                }
                done
            })
        });
        let mut done = Vec::new();
        for worker in work {
            done.extend(worker.await.expect("no panic"));
        }
        done.sort();
        wanted.sort();
        assert_eq!(done, wanted, "each job was worked once");
    });
}
