//! Limits of how many jobs of a group run at the same time.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicI64, Ordering},
};

use chrono::{DateTime, TimeDelta, Utc};
use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::harness::{TestProject, run, run_alone, until};

async fn limit(t: &TestProject, max_running: impl Into<Value>) {
    let max_running: Value = max_running.into();
    let change = json!({"groups": {"max_running": max_running}});
    let queue = t.patch("/v1/queues/default", change).await.is(200);
    assert_eq!(queue["groups"]["max_running"], max_running);
}

/// How many of these jobs each group has.
fn by_group(jobs: &[Value]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for job in jobs {
        let group = job["group"].as_str().unwrap_or("none").to_owned();
        *counts.entry(group).or_default() += 1;
    }
    counts
}

fn counts<const N: usize>(of: [(&str, usize); N]) -> BTreeMap<String, usize> {
    of.into_iter().map(|(group, count)| (group.to_owned(), count)).collect()
}

/// Polls until these jobs are there, and nothing more comes.
async fn leased(t: &TestProject, count: usize) -> Vec<Value> {
    let mut jobs = Vec::new();
    until(format!("{count} jobs to be leased"), async || {
        jobs.extend(t.poll("w", 20).await);
        jobs.len() >= count
    })
    .await;
    jobs
}

#[test]
fn as_many_jobs_of_a_group_run_as_its_queue_allows() {
    run(async |t| {
        limit(t, 2).await;
        for group in ["a", "a", "a", "a", "a", "b", "b", "b"] {
            t.enqueue(json!({"group": group})).await;
        }
        t.enqueue(json!({})).await;
        let jobs = leased(t, 5).await;
        assert_eq!(by_group(&jobs), counts([("a", 2), ("b", 2), ("none", 1)]));
        assert!(t.poll("w", 20).await.is_empty(), "both groups are full");
        let waiting = t.get("/v1/jobs?state=scheduled&group=a").await.is(200);
        let id = waiting["jobs"][0]["id"].as_str().expect("one waits").to_owned();
        assert_eq!(waiting["jobs"][0]["waiting_for"], "group");
        let why = t.get(&format!("/v1/jobs/{id}/explain")).await.is(200);
        assert_eq!(why["reason"], "group");
        assert_eq!(why["summary"], "2 jobs of its group a run: max_running is 2");
        let of_a: Vec<_> = jobs.iter().filter(|it| it["group"] == "a").collect();
        t.ack(of_a[0], "w", "succeeded").await.is(200);
        assert_eq!(t.wait_and_lease("w").await["group"], "a");
        t.ack_with(of_a[1], "w", "failed", json!({"retry_after_seconds": 0})).await.is(200);
        let next = t.wait_and_lease("w").await;
        assert_eq!(next["group"], "a", "the retry, or one that waited");
        assert!(t.poll("w", 20).await.is_empty(), "two run");
    });
}

#[test]
fn a_limit_holds_for_jobs_that_were_stored_before_it() {
    run(async |t| {
        let many = vec![json!({"job_type": "t", "group": "a"}); 60];
        t.post("/v1/jobs/batch", json!({"jobs": many})).await.is(201);
        limit(t, 3).await;
        t.enqueue(json!({"group": "b"})).await;
        let jobs = leased(t, 4).await;
        assert_eq!(by_group(&jobs), counts([("a", 3), ("b", 1)]));
        until("all but as many as may run to wait", async || {
            let page = t.get("/v1/jobs?state=pending&group=a").await.is(200);
            page["jobs"].as_array().expect("jobs").len() <= 3
        })
        .await;
        assert!(t.poll("w", 20).await.is_empty());
        limit(t, 5).await;
        let more = leased(t, 2).await;
        assert_eq!(by_group(&more), counts([("a", 2)]));
        let none = t.patch("/v1/queues/default", json!({"groups": null})).await.is(200);
        assert_eq!(none["groups"], Value::Null);
        let rest = leased(t, 55).await;
        assert_eq!(by_group(&rest), counts([("a", 55)]));
    });
}

#[test]
fn jobs_that_become_due_wait_for_room_and_the_best_of_them_runs_first() {
    run(async |t| {
        limit(t, 1).await;
        let running = t.enqueue(json!({"group": "a"})).await;
        let job = t.wait_and_lease("w").await;
        assert_eq!(job["id"], json!(running));
        for priority in [0, 5, 9] {
            t.enqueue(json!({"group": "a", "priority": priority, "delay_seconds": 1})).await;
        }
        let parent = t.enqueue(json!({"queue": "other"})).await;
        let child = json!({"group": "a", "depends_on": [parent], "priority": 20});
        let child = t.enqueue(child).await;
        until("the delayed jobs to wait for their group", async || {
            let page = t.get("/v1/jobs?group=a&state=scheduled").await.is(200);
            let jobs = page["jobs"].as_array().expect("jobs");
            jobs.iter().filter(|it| it["waiting_for"] == "group").count() == 2
        })
        .await;
        let poll = json!({"worker_id": "w", "queues": ["other"], "wait_seconds": 10});
        let ended = t.polled(poll).await.remove(0);
        t.ack(&ended, "w", "succeeded").await.is(200);
        until("the child to be ready", async || t.job(&child).await["state"] == "pending").await;
        let mut held = job;
        let mut order = Vec::new();
        for _ in 0..4 {
            assert!(t.poll("w", 20).await.is_empty(), "one runs");
            t.ack(&held, "w", "succeeded").await.is(200);
            held = t.wait_and_lease("w").await;
            order.push(held["priority"].clone());
        }
        let order: Vec<_> = order.iter().map(|it| it.as_i64().expect("a number")).collect();
        assert!(order[..2].contains(&20), "only the one that is open goes first: {order:?}");
        assert!(order[2] > order[3], "the best that waits is next: {order:?}");
    });
}

#[test]
fn a_pause_of_a_limited_group_holds_and_ends() {
    run(async |t| {
        limit(t, 1).await;
        for _ in 0..3 {
            t.enqueue(json!({"group": "a"})).await;
        }
        t.act("/v1/queues/default/groups/a/pause").await.is(200);
        until("all to wait", async || {
            let page = t.get("/v1/jobs?group=a&state=scheduled").await.is(200);
            page["jobs"].as_array().expect("jobs").len() == 3
        })
        .await;
        assert!(t.poll("w", 20).await.is_empty());
        t.act("/v1/queues/default/groups/a/resume").await.is(200);
        t.wait_and_lease("w").await;
        assert!(t.poll("w", 20).await.is_empty(), "one of the group runs");
    });
}

#[test]
fn a_job_that_is_moved_to_later_leaves_its_room_to_another() {
    run(async |t| {
        limit(t, 1).await;
        let open = t.enqueue(json!({"group": "a"})).await;
        let waiting = t.enqueue(json!({"group": "a"})).await;
        assert_eq!(t.job(&waiting).await["waiting_for"], "group");
        let later = json!({"run_at": "2100-01-01T00:00:00Z"});
        t.patch(&format!("/v1/jobs/{open}"), later).await.is(200);
        assert_eq!(t.wait_and_lease("w").await["id"], json!(waiting));
    });
}

#[test]
fn no_race_of_workers_starts_more_of_a_group() {
    const WORKERS: usize = 12;
    const GROUPS: usize = 3;
    const JOBS: usize = 120;
    const MAX: i64 = 2;
    run_alone(async |t| {
        limit(t, MAX).await;
        let jobs: Vec<_> = (0..JOBS)
            .map(|it| json!({"job_type": "t", "group": format!("g{}", it % GROUPS)}))
            .collect();
        t.post("/v1/jobs/batch", json!({"jobs": jobs})).await.is(201);
        let running: Vec<_> = (0..GROUPS).map(|_| AtomicI64::new(0)).collect();
        let done = AtomicI64::new(0);
        let worker = async |name: String, running: &[AtomicI64], done: &AtomicI64| {
            while done.load(Ordering::SeqCst) < JOBS as i64 {
                let poll = json!({
                    "worker_id": name, "queues": ["default"], "capacity": 4, "wait_seconds": 1,
                });
                let jobs = t.polled(poll).await;
                let of = |job: &Value| {
                    let group = job["group"].as_str().expect("a group");
                    &running[group[1..].parse::<usize>().expect("a number")]
                };
                for job in &jobs {
                    let now = of(job).fetch_add(1, Ordering::SeqCst) + 1;
                    assert!(now <= MAX, "{now} jobs of {} run", job["group"]);
                }
                for job in &jobs {
                    of(job).fetch_sub(1, Ordering::SeqCst);
                    t.ack(job, &name, "succeeded").await.is(200);
                    done.fetch_add(1, Ordering::SeqCst);
                }
            }
        };
        let workers = (0..WORKERS).map(|it| worker(format!("w{it}"), &running, &done));
        join_all(workers).await;
        assert_eq!(done.load(Ordering::SeqCst), JOBS as i64);
    });
}

/// Gives the groups of the queue `default` these rates.
async fn rates(t: &TestProject, rates: Value) {
    let change = json!({"groups": {"rates": rates}});
    let queue = t.patch("/v1/queues/default", change).await.is(200);
    assert_eq!(queue["groups"]["rates"], rates);
}

#[test]
fn no_more_jobs_of_a_group_start_in_a_window_than_its_rate_allows() {
    run(async |t| {
        rates(t, json!([{"count": 2, "per_seconds": 3}])).await;
        for group in ["a", "a", "a", "a", "a", "b"] {
            t.enqueue(json!({"group": group})).await;
        }
        t.enqueue(json!({})).await;
        let jobs = leased(t, 4).await;
        assert_eq!(by_group(&jobs), counts([("a", 2), ("b", 1), ("none", 1)]));
        let page = t.get("/v1/jobs?group=a&state=scheduled").await.is(200);
        let id = page["jobs"][0]["id"].as_str().expect("one waits").to_owned();
        let why = t.get(&format!("/v1/jobs/{id}/explain")).await.is(200);
        let summary = why["summary"].as_str().expect("a summary");
        assert!(summary.starts_with("its group a has used its rate until "), "{summary}");
        let group = t.get("/v1/queues/default/groups/a").await.is(200);
        assert!(group["next_change_at"].is_string(), "{group}");
        for job in &jobs {
            t.ack(job, "w", "succeeded").await.is(200);
        }
        let mut starts: Vec<_> = jobs.iter().filter(|it| it["group"] == "a").cloned().collect();
        while starts.len() < 5 {
            let job = t.wait_and_lease("w").await;
            assert_eq!(job["group"], "a");
            t.ack(&job, "w", "succeeded").await.is(200);
            starts.push(job);
        }
        let mut at = Vec::new();
        for job in &starts {
            let job = t.job(job["id"].as_str().expect("an id")).await;
            let text = job["attempts"][0]["claimed_at"].as_str().expect("a time").to_owned();
            at.push(text.parse::<DateTime<Utc>>().expect("a time"));
        }
        at.sort();
        for three in at.windows(3) {
            let took = three[2] - three[0];
            assert!(took >= TimeDelta::seconds(3), "three started within {took}");
        }
    });
}

#[test]
fn a_limit_is_between_one_and_a_hundred_thousand() {
    run(async |t| {
        for wrong in [json!(0), json!(-1), json!(100_001)] {
            let change = json!({"groups": {"max_running": wrong}});
            t.patch("/v1/queues/default", change).await.refuses("groups.max_running");
        }
        t.patch("/v1/queues/default", json!({"groups": {}})).await.refuses("groups");
        let rate =
            |count: i64, per_seconds: i64| json!({"count": count, "per_seconds": per_seconds});
        for (wrong, field) in [
            (json!([rate(0, 60)]), "groups.rates[0].count"),
            (json!([rate(1, 60), rate(1, 0)]), "groups.rates[1].per_seconds"),
            (json!([rate(1, 60), rate(2, 60)]), "groups.rates[1].per_seconds"),
            (json!((1..=5).map(|it| rate(1, it)).collect::<Vec<_>>()), "groups.rates"),
        ] {
            let change = json!({"groups": {"rates": wrong}});
            t.patch("/v1/queues/default", change).await.refuses(field);
        }
        limit(t, 100_000).await;
        let strict = json!({"groups": {"order": "strict"}});
        let queue = t.patch("/v1/queues/default", strict).await.is(200);
        let both = json!({
            "order": "strict", "on_dead": "block", "max_running": 100_000, "rates": [],
            "fair": false,
        });
        assert_eq!(queue["groups"], both, "what is left out stays");
    });
}
