//! Since when a job is ready: what a job went through before that does not count.

use fencepost_store::sweep::{alarms, gauges};
use serde_json::{Value, json};

use crate::harness::{LoneProject, eventually, run_alone, until};

/// What is said of the age of something that has just happened.
const MAX_AGE_SECONDS: i64 = 5;
const PAST_SECONDS: i64 = 1_000;

/// Makes all that has happened to jobs and queues happen earlier.
async fn age(t: &LoneProject) {
    for (table, columns) in [
        ("jobs", &["run_at", "created_at", "ready_at", "claimed_at"][..]),
        ("queues", &["paused_at", "resumed_at"]),
        ("queue_types", &["paused_at", "resumed_at"]),
    ] {
        let earlier = |it: &&str| format!("{it} = {it} - interval '{PAST_SECONDS} s'");
        let earlier: Vec<_> = columns.iter().map(earlier).collect();
        t.database.execute(&format!("update {table} set {}", earlier.join(", "))).await;
    }
}

/// The oldest ready job of a queue and its age, which all that show one agree about.
async fn oldest(t: &LoneProject, queue: &str) -> (String, i64) {
    let seen = t.get(&format!("/v1/queues/{queue}")).await.is(200);
    let id = seen["oldest_ready_job_id"].as_str().unwrap_or_else(|| panic!("{seen}")).to_owned();
    let job = t.job(&id).await;
    assert_eq!(job["ready_at"], seen["oldest_ready_at"]);
    let explained = t.get(&format!("/v1/jobs/{id}/explain")).await.is(200);
    assert_eq!(explained["ready_at"], job["ready_at"]);
    let age = seen["oldest_ready_age_seconds"].as_i64().expect("an age");
    let mut conn = t.database.connect().await;
    // The queue is there once its deltas are merged.
    let place = eventually("a queue with a ready job", async || {
        let places = gauges::places(&mut conn, 30).await.expect("it runs");
        places.into_iter().find(|it| it.queue == queue)
    })
    .await;
    assert_eq!(place.job_id.to_string(), id);
    assert!((place.age_seconds as i64 - age).abs() <= MAX_AGE_SECONDS, "{}", place.age_seconds);
    (id, age)
}

/// Queues that the alarm `oldest_ready` would be about.
async fn alarming(t: &LoneProject) -> Vec<String> {
    let mut conn = t.database.connect().await;
    let id = "select max(id)::bigint from projects where kind = 'user'";
    let project = i32::try_from(t.database.number(id).await).expect("a number");
    let found = alarms::oldest_ready(&mut conn, &[project]).await.expect("it runs");
    found.into_iter().filter_map(|it| it.queue).collect()
}

async fn is_fresh(t: &LoneProject, id: &str, what: &str) {
    let (oldest, age) = oldest(t, "default").await;
    assert_eq!(oldest, id, "{what}");
    assert!((0..MAX_AGE_SECONDS).contains(&age), "{what}: {age} s");
}

#[test]
fn a_job_whose_worker_died_is_ready_since_its_lease_ended() {
    run_alone(async |t| {
        let id = t.enqueue(json!({})).await;
        let poll = json!({"worker_id": "w", "queues": ["default"], "lease_seconds": 900});
        assert_eq!(t.polled(poll).await.len(), 1);
        age(t).await;
        t.expire_leases().await;
        t.job_becomes(&id, "pending").await;
        is_fresh(t, &id, "a lost lease").await;
        assert!(alarming(t).await.is_empty());
        let metrics = t.get("/v1/metrics/prometheus").await;
        let name = "fencepost_project_queue_oldest_ready_age_seconds{";
        let line = metrics.text.lines().find(|it| it.starts_with(name)).expect("the metric");
        let seconds = line.rsplit(' ').next().expect("a value").parse::<f64>().expect("a number");
        assert!(seconds < MAX_AGE_SECONDS as f64, "{seconds}");
        age(t).await;
        assert_eq!(oldest(t, "default").await.1 / 10, PAST_SECONDS / 10);
        assert_eq!(alarming(t).await, ["default"]);
    });
}

#[test]
fn every_way_into_the_queue_begins_the_wait_anew() {
    run_alone(async |t| {
        let id = t.enqueue(json!({"retry": {"initial_seconds": 1}})).await;
        let begin = async |what: &str| {
            is_fresh(t, &id, what).await;
            age(t).await;
        };
        begin("an enqueue").await;
        t.ack(&t.lease("w").await, "w", "released").await.is(200);
        begin("a release").await;
        t.ack(&t.lease("w").await, "w", "failed").await.is(200);
        let is_ready = async || t.job(&id).await["ready_at"].is_string();
        until("the retry", is_ready).await;
        begin("a retry").await;
        t.act("/v1/queues/default/pause").await.is(200);
        t.act("/v1/queues/default/resume").await.is(200);
        begin("a pause of the queue").await;
        t.post("/v1/queues/default/pause", json!({"job_type": "test"})).await.is(200);
        assert!(alarming(t).await.is_empty(), "the type is paused");
        t.post("/v1/queues/default/resume", json!({"job_type": "test"})).await.is(200);
        begin("a pause of the type").await;
        assert_eq!(alarming(t).await, ["default"]);
        t.patch(&format!("/v1/jobs/{id}"), json!({"priority": 3})).await.is(200);
        assert_eq!(oldest(t, "default").await.1 / 10, PAST_SECONDS / 10, "it has waited");
        t.patch(&format!("/v1/jobs/{id}"), json!({"queue": "other"})).await.is(200);
        t.patch(&format!("/v1/jobs/{id}"), json!({"queue": "default"})).await.is(200);
        begin("a move to the queue").await;
        t.patch(&format!("/v1/jobs/{id}"), json!({"delay_seconds": 600})).await.is(200);
        assert_eq!(t.job(&id).await["ready_at"], Value::Null);
        t.patch(&format!("/v1/jobs/{id}"), json!({"delay_seconds": 0})).await.is(200);
        begin("a change of its time").await;
        let more = json!({"retryable": false});
        t.ack_with(&t.lease("w").await, "w", "failed", more).await.is(200);
        age(t).await;
        t.act(&format!("/v1/jobs/{id}/retry")).await.is(200);
        begin("a redrive").await;
    });
}

#[test]
fn a_child_is_ready_since_its_last_parent_has_ended() {
    run_alone(async |t| {
        for (when, status) in [("succeeded", "succeeded"), ("ended", "failed")] {
            let parent = t.enqueue(json!({"max_attempts": 1})).await;
            let depends_on = json!([{"job_id": parent, "when": when}]);
            let child = t.enqueue(json!({"queue": when, "depends_on": depends_on})).await;
            age(t).await;
            t.ack(&t.lease("w").await, "w", status).await.is(200);
            t.job_becomes(&child, "pending").await;
            let (oldest, age) = oldest(t, when).await;
            assert_eq!(oldest, child);
            assert!((0..MAX_AGE_SECONDS).contains(&age), "{when}: {age} s");
        }
    });
}

#[test]
fn a_job_that_never_ran_is_older_than_those_before_it_that_were_released() {
    run_alone(async |t| {
        for more in [json!({}), json!({"labels": ["gpu"]})] {
            let queue = if more == json!({}) { "plain" } else { "gated" };
            let mut job = json!({"queue": queue, "priority": 2});
            job.as_object_mut().expect("a job").extend(more.as_object().expect("more").clone());
            for _ in 0..20 {
                t.enqueue(job.clone()).await;
            }
            let poll = json!({
                "worker_id": "w", "queues": [queue], "capacity": 20, "labels": ["gpu"],
            });
            let leased = t.polled(poll).await;
            assert_eq!(leased.len(), 20);
            let waits = t.enqueue(job).await;
            age(t).await;
            for it in leased {
                t.ack(&it, "w", "released").await.is(200);
            }
            let found = eventually("the releases", async || {
                let counts = t.get(&format!("/v1/queues/{queue}")).await.is(200);
                (counts["counts"]["processing"] == 0).then_some(oldest(t, queue).await)
            })
            .await;
            assert_eq!((found.0, found.1 / 10), (waits, PAST_SECONDS / 10), "{queue}");
        }
    });
}

#[test]
fn jobs_of_a_resumed_type_do_not_hide_older_ones_of_others() {
    run_alone(async |t| {
        for job_type in ["stopped", "stopped", "other"] {
            t.enqueue(json!({"job_type": job_type})).await;
        }
        t.post("/v1/queues/default/pause", json!({"job_type": "stopped"})).await.is(200);
        age(t).await;
        let alarms = async || (alarming(t).await == ["default"]).then_some(());
        eventually("an alarm about the type that is not paused", alarms).await;
        t.post("/v1/queues/default/resume", json!({"job_type": "stopped"})).await.is(200);
        let (id, seconds) = oldest(t, "default").await;
        assert_eq!(
            (t.job(&id).await["job_type"].as_str(), seconds / 10),
            (Some("other"), PAST_SECONDS / 10)
        );
        let poll = json!({"worker_id": "w", "queues": ["default"], "job_types": ["other"]});
        assert_eq!(t.polled(poll).await.len(), 1);
        let (id, seconds) = oldest(t, "default").await;
        assert_eq!(t.job(&id).await["job_type"], "stopped");
        assert!(seconds < MAX_AGE_SECONDS, "{seconds}");
    });
}
