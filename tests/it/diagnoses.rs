//! Planted causes: what `explain` says of a job, and of the job that has waited longest in a queue.

use std::time::Duration;

use fencepost_domain::explain::Reason;
use fencepost_store::workers::ALIVE_SECONDS;
use serde_json::{Value, json};

use crate::harness::{TestProject, run_alone, run_for, scratch};

/// A cause: it makes a job wait in the queue of this name, and returns its id.
struct Cause {
    queue: &'static str,
    reason: Option<Reason>,
    /// A part of the sentence.
    says: &'static str,
}

const fn cause(queue: &'static str, reason: Reason, says: &'static str) -> Cause {
    Cause { queue, reason: Some(reason), says }
}

const fn of_ended_job(queue: &'static str, says: &'static str) -> Cause {
    Cause { queue, reason: None, says }
}

const CAUSES: [Cause; 22] = [
    cause("unpolled", Reason::NoWorkers, "no live worker polls queue unpolled"),
    cause("other-type", Reason::NoWorkers, "no live worker polls queue other-type for mail"),
    cause("lost-worker", Reason::NoWorkers, "no live worker polls queue lost-worker"),
    cause("quiet-worker", Reason::NoWorkers, "1 live worker of queue quiet-worker was asked"),
    cause("labels", Reason::Labels, "has the labels gpu"),
    cause("busy", Reason::WorkersBusy, "all workers are busy: 1 of 1 slot in use"),
    cause("idle", Reason::Ready, "ready: it starts as soon as a worker polls"),
    cause("behind", Reason::OtherJobs, "1 live worker; 1 job before it"),
    cause("paused", Reason::QueuePaused, "queue paused is paused since"),
    cause("paused-type", Reason::TypePaused, "paused manually"),
    cause("brake", Reason::CircuitBreaker, "paused by the circuit breaker after 1"),
    cause("closed", Reason::Concurrency, "queue closed allows no job: its limit is 0"),
    cause("full", Reason::Concurrency, "queue full 1/1 busy"),
    cause("full-key", Reason::Concurrency, "key acme 1/1 busy"),
    cause("rate", Reason::RateLimit, "queue rate has started 1 of 1 jobs in 3600 s"),
    cause("later", Reason::RunAt, "its run_at is"),
    cause("backoff", Reason::Backoff, "failure 1 of 3: retried in"),
    cause("parents", Reason::Parents, "it waits for the end of 1 parent"),
    of_ended_job("running", "worker w runs it"),
    of_ended_job("asked", "worker w is asked to stop"),
    of_ended_job("dead", "dead-lettered after 1 of 1 failures"),
    of_ended_job("cancelled", "cancelled: retry it manually"),
];

/// Enqueues one job in this queue.
async fn enqueue(t: &TestProject, queue: &str, more: Value) -> String {
    let mut job = json!({"job_type": "mail", "queue": queue});
    job.as_object_mut().expect("an object").extend(more.as_object().expect("fields").clone());
    t.post("/v1/jobs", job).await.is(201)["id"].as_str().expect("an id").to_owned()
}

/// Registers a worker of one slot for this queue.
async fn register(t: &TestProject, worker: &str, queue: &str, types: Value) {
    let body = json!({
        "worker_id": worker, "queues": [queue], "job_types": types, "concurrency": 1,
    });
    t.post("/v1/workers/register", body).await.is(200);
}

/// Leases the first job of this queue.
async fn lease(t: &TestProject, queue: &str) -> Value {
    let poll = json!({"worker_id": "w", "queues": [queue], "wait_seconds": 10});
    t.polled(poll).await.pop().expect("a job")
}

async fn plant(t: &TestProject, queue: &str) -> String {
    let path = format!("/v1/queues/{queue}");
    match queue {
        "other-type" => register(t, "types", queue, json!(["other"])).await,
        "lost-worker" => register(t, "lost", queue, json!([])).await,
        "quiet-worker" => {
            register(t, "quiet", queue, json!([])).await;
            t.post("/v1/workers/quiet/quiet", json!({})).await;
        }
        "labels" | "idle" | "behind" => register(t, queue, queue, json!([])).await,
        "busy" => {
            register(t, "w", queue, json!([])).await;
            enqueue(t, queue, json!({})).await;
            lease(t, queue).await;
        }
        "paused" => drop(t.act(&format!("{path}/pause")).await.is(200)),
        "paused-type" => {
            t.post(&format!("{path}/pause"), json!({"job_type": "mail"})).await.is(200);
        }
        "brake" => {
            t.patch(&path, json!({"brake_after": 1})).await.is(200);
            let id = enqueue(t, queue, json!({"max_attempts": 1})).await;
            t.ack(&lease(t, queue).await, "w", "failed").await.is(200);
            t.job_becomes(&id, "dead_letter").await;
        }
        "closed" => drop(t.patch(&path, json!({"max_concurrency": 0})).await.is(200)),
        "full" | "rate" => {
            let rate = json!({"rate_limit": {"count": 1, "per_seconds": 3600}});
            let full = json!({"max_concurrency": 1});
            t.patch(&path, if queue == "full" { full } else { rate }).await.is(200);
            enqueue(t, queue, json!({})).await;
            lease(t, queue).await;
        }
        "full-key" => {
            enqueue(t, queue, json!({"concurrency_key": "acme"})).await;
            lease(t, queue).await;
        }
        _ => (),
    }
    let more = match queue {
        "labels" => json!({"labels": ["gpu"]}),
        "full-key" => json!({"concurrency_key": "acme"}),
        "later" => json!({"delay_seconds": 900}),
        "backoff" => json!({"retry": {"initial_seconds": 900}}),
        "dead" => json!({"max_attempts": 1}),
        "parents" => {
            json!({"depends_on": [enqueue(t, queue, json!({"delay_seconds": 900})).await]})
        }
        _ => json!({}),
    };
    let id = enqueue(t, queue, more).await;
    match queue {
        "behind" => drop(enqueue(t, queue, json!({"priority": 9})).await),
        "backoff" | "dead" => drop(t.ack(&lease(t, queue).await, "w", "failed").await.is(200)),
        "running" => drop(lease(t, queue).await),
        "asked" => {
            lease(t, queue).await;
            t.act(&format!("/v1/jobs/{id}/cancel")).await.is(200);
        }
        "cancelled" => drop(t.act(&format!("/v1/jobs/{id}/cancel")).await.is(200)),
        _ => (),
    }
    id
}

#[test]
fn explain_names_twenty_two_planted_causes_for_a_job_and_its_queue() {
    run_for(Duration::from_secs(120), async {
        run_planted().await;
    });
}

async fn run_planted() {
    use crate::harness::{TestServer, fresh_database};
    let server = TestServer::start(fresh_database().await).await;
    let t = &server.project("main").await;
    for Cause { queue, reason, says } in &CAUSES {
        let id = plant(t, queue).await;
        if *queue == "lost-worker" {
            let past = format!("now() - make_interval(secs => {})", 2 * ALIVE_SECONDS);
            let lost = format!("update workers set last_seen_at = {past} where worker_id = 'lost'");
            t.database.execute(&lost).await;
        }
        let reported = t.get(&format!("/v1/jobs/{id}/explain")).await.is(200);
        assert_eq!(reported["reason"], json!(reason), "{queue}: {reported}");
        let summary = reported["summary"].as_str().expect("a sentence");
        assert!(summary.contains(says), "{queue}: {summary}");
        let seen = t.get(&format!("/v1/queues/{queue}")).await.is(200);
        let is_ready = reason.is_some_and(|it| Reason::OF_READY_JOBS.contains(&it));
        if is_ready && seen["oldest_ready_job_id"] == *id {
            assert_eq!(seen["oldest_ready_reason"], reported["reason"], "{queue}");
            assert_eq!(seen["oldest_ready_summary"], reported["summary"], "{queue}");
        } else {
            assert!(!is_ready || *queue == "behind", "{queue}: {seen}");
        }
    }
    server.stop().await;
}

#[test]
fn a_list_explains_the_queues_whose_jobs_wait_longest() {
    run_alone(async |t| {
        for queue in ["slow", "fresh"] {
            enqueue(t, queue, json!({})).await;
        }
        let past = "now() - interval '2 minutes'";
        let slow =
            format!("update jobs set run_at = {past}, created_at = {past} where queue = 'slow'");
        t.database.execute(&slow).await;
        let listed = t.get("/v1/queues").await.is(200);
        let of = |name: &str| {
            let queues = listed["queues"].as_array().expect("queues");
            queues.iter().find(|it| it["queue"] == name).expect("a queue").clone()
        };
        assert_eq!(of("slow")["oldest_ready_reason"], "no_workers");
        assert_eq!(of("fresh")["oldest_ready_reason"], Value::Null);
    });
}

/// Rules of a project for promtool, and six series that it scraped, each of which must fire one
/// alert with its reason.
fn rule_test(series: &[&str]) -> String {
    let inputs =
        series.iter().map(|it| format!("      - series: '{it}'\n        values: '400+60x10'\n"));
    let label = |it: &str, name: &str| {
        let begin = format!("{name}=\"");
        let value = it.split(&begin).nth(1).expect("the label").split('"').next();
        value.expect("its end").to_owned()
    };
    let alert =
        |it: &&&str, is_unpolled: bool| (label(it, "reason") == "no_workers") == is_unpolled;
    let expected = |name: &str, summary: &dyn Fn(&str) -> String, is_unpolled: bool| {
        let alerts = series.iter().filter(|it| alert(it, is_unpolled)).map(|sample| {
            let (queue, reason) = (label(sample, "queue"), label(sample, "reason"));
            format!(
                "          - exp_labels: {{severity: page, project: main, queue: {queue}, reason: {reason}}}\n            \
                 exp_annotations: {{summary: '{}', runbook_url: 'RUNBOOKS/{}'}}\n",
                summary(sample),
                if is_unpolled { "queue-without-workers" } else { "queue-stuck" }
            )
        });
        format!(
            "      - eval_time: 3m\n        alertname: {name}\n        exp_alerts:\n{}",
            alerts.collect::<String>()
        )
    };
    let stuck = |it: &str| {
        let (queue, reason) = (label(it, "queue"), label(it, "reason"));
        format!("jobs of the queue {queue} have waited 9m 40s: {reason}")
    };
    let unpolled =
        |it: &str| format!("no worker polls the queue {}, and jobs wait in it", label(it, "queue"));
    format!(
        "rule_files: [rules.yml]\ntests:\n  - interval: 1m\n    input_series:\n{}    alert_rule_test:\n{}{}",
        inputs.collect::<String>(),
        expected("FencepostQueueStuck", &stuck, false),
        expected("FencepostQueueWithoutWorkers", &unpolled, true),
    )
}

#[test]
fn six_planted_troubles_each_fire_one_alert_of_the_project_with_its_reason() {
    run_alone(async |t| {
        for queue in ["unpolled", "labels", "busy", "brake", "full", "rate"] {
            plant(t, queue).await;
        }
        // A short wait is no trouble.
        t.database
            .execute(
                "update jobs set created_at = created_at - interval '10 min',
                                 run_at = run_at - interval '10 min'
                 where state = 'pending'",
            )
            .await;
        plant(t, "paused").await;
        let scraped = t.get("/v1/metrics/prometheus").await.text;
        let series = scraped.lines().filter_map(|it| it.split_once(' ')).map(|it| it.0);
        let series: Vec<_> =
            series.filter(|it| it.starts_with("fencepost_project_oldest_ready_seconds{")).collect();
        assert_eq!(series.len(), 6, "{scraped}");
        let folder = scratch("project-rules");
        let rules = t.get("/v1/alert-rules.yaml").await.text;
        std::fs::write(folder.join("rules.yml"), rules).expect("it is written");
        let runbooks = format!("{}/docs/runbooks", t.url);
        let test = rule_test(&series).replace("RUNBOOKS", &runbooks);
        std::fs::write(folder.join("test.yml"), &test).expect("it is written");
        let mut promtool = tokio::process::Command::new("promtool");
        promtool.args(["test", "rules", "test.yml"]).current_dir(&folder);
        let checked = promtool.output().await.expect("it runs");
        let said =
            String::from_utf8_lossy(&checked.stdout) + String::from_utf8_lossy(&checked.stderr);
        assert!(checked.status.success(), "{said}\n{test}");
    });
}
