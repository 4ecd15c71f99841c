//! Groups that take turns.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
};

use chrono::{DateTime, TimeDelta, Utc};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::harness::{TestProject, TestServer, fresh_database, limited, run, until};

pub async fn take_turns(t: &TestProject) {
    let queue = t.patch("/v1/queues/default", json!({"groups": {"fair": true}})).await.is(200);
    assert_eq!(queue["groups"]["fair"], true);
}

/// Stores this many jobs of a group at once.
pub async fn store_many(t: &TestProject, group: Option<&str>, count: usize) {
    let job = json!({"job_type": "t", "group": group});
    t.post("/v1/jobs/batch", json!({"jobs": vec![job; count]})).await.is(201);
}

/// The group of the next job, which succeeds at once.
async fn next_group(t: &TestProject) -> Option<String> {
    let job = t.wait_and_lease("w").await;
    t.ack(&job, "w", "succeeded").await.is(200);
    job["group"].as_str().map(str::to_owned)
}

/// How many of the next jobs have this group.
pub async fn count_next(t: &TestProject, of: usize, group: Option<&str>) -> usize {
    let mut count = 0;
    for _ in 0..of {
        count += usize::from(next_group(t).await.as_deref() == group);
    }
    count
}

/// Starts jobs of a group with many, until its turn has begun.
pub async fn begin(t: &TestProject, group: &str) {
    store_many(t, Some(group), 500).await;
    assert_eq!(count_next(t, 5, Some(group)).await, 5);
}

#[test]
fn a_group_with_many_jobs_does_not_let_another_wait() {
    run(async |t| {
        take_turns(t).await;
        begin(t, "a").await;
        let of_b = t.enqueue(json!({"group": "b"})).await;
        until("the turn of the other group", async || count_next(t, 1, Some("b")).await == 1).await;
        let waiting = t.get("/v1/queues/default").await.is(200)["counts"]["pending"].as_i64();
        assert!(waiting > Some(400), "most of the first group wait: {waiting:?}");
        t.job_becomes(&of_b, "succeeded").await;
        let last = t.enqueue(json!({"group": "a"})).await;
        until("the job to say what is before it", async || {
            let why = t.get(&format!("/v1/jobs/{last}/explain")).await.is(200);
            let summary = why["summary"].as_str().expect("a summary");
            summary.ends_with("jobs before it in its group, and the turn of 0 groups")
        })
        .await;
        store_many(t, Some("b"), 20).await;
        store_many(t, None, 20).await;
        until("jobs without a group", async || count_next(t, 1, None).await == 1).await;
        until("jobs of the other group", async || count_next(t, 1, Some("b")).await == 1).await;
        let mut counts = [0; 3];
        for _ in 0..30 {
            let group = next_group(t).await;
            counts[group.as_deref().map_or(0, |it| if it == "a" { 1 } else { 2 })] += 1;
        }
        assert!(counts.iter().all(|it| (7..=13).contains(it)), "{counts:?}");
    });
}

#[test]
fn priorities_order_the_jobs_of_a_group_and_turns_decide_between_groups() {
    run(async |t| {
        take_turns(t).await;
        begin(t, "a").await;
        for _ in 0..10 {
            t.enqueue(json!({"group": "a", "priority": 9})).await;
        }
        t.enqueue(json!({"group": "b", "priority": 1})).await;
        let best = t.enqueue(json!({"group": "b", "priority": 2})).await;
        let mut jobs = Vec::new();
        until("both jobs of the other group", async || {
            let job = t.wait_and_lease("w").await;
            t.ack(&job, "w", "succeeded").await.is(200);
            jobs.push(job);
            jobs.iter().filter(|it| it["group"] == "b").count() == 2
        })
        .await;
        assert!(jobs.len() < 200, "its turn comes before the backlog: {}", jobs.len());
        let of_b: Vec<_> = jobs.iter().filter(|it| it["group"] == "b").collect();
        assert_eq!(of_b.len(), 2, "{jobs:?}");
        assert_eq!(of_b[0]["id"], json!(best));
        let of_a = jobs.iter().find(|it| it["group"] == "a");
        assert!(of_a.is_none_or(|it| it["priority"] == 9), "{jobs:?}");
    });
}

#[test]
fn a_group_of_slow_jobs_leaves_workers_to_others() {
    run(async |t| {
        take_turns(t).await;
        store_many(t, Some("slow"), 50).await;
        let mut slow = Vec::new();
        until("ten slow jobs to run", async || {
            slow.extend(t.poll("w", 10 - slow.len() as u32).await);
            slow.len() == 10
        })
        .await;
        store_many(t, Some("quick"), 30).await;
        until("the quick group", async || count_next(t, 1, Some("quick")).await == 1).await;
        assert_eq!(count_next(t, 20, Some("quick")).await, 20);
    });
}

#[test]
fn jobs_that_were_stored_before_take_turns_as_well() {
    run(async |t| {
        store_many(t, Some("a"), 400).await;
        store_many(t, None, 100).await;
        store_many(t, Some("b"), 10).await;
        take_turns(t).await;
        until("the three to take turns", async || {
            let before = count_next(t, 1, Some("b")).await;
            before == 1
        })
        .await;
        let of_b = count_next(t, 9, Some("b")).await;
        assert!((2..=4).contains(&of_b), "{of_b}");
        let none = t.patch("/v1/queues/default", json!({"groups": null})).await.is(200);
        assert_eq!(none["groups"], Value::Null);
        let mut left = t.get("/v1/queues/default").await.is(200)["counts"]["pending"].as_i64();
        while left != Some(0) {
            t.poll("w", 50).await;
            left = t.get("/v1/queues/default").await.is(200)["counts"]["pending"].as_i64();
        }
    });
}

/// Whatever way a job becomes ready by, it does not wait behind a group with many.
#[test]
fn a_job_takes_its_turn_whatever_way_it_becomes_ready_by() {
    run(async |t| {
        take_turns(t).await;
        begin(t, "a").await;
        let lease_of = async |group: &str| {
            for _ in 0..20 {
                let job = t.wait_and_lease("w").await;
                if job["group"] == group {
                    return job;
                }
                t.ack(&job, "w", "succeeded").await.is(200);
            }
            panic!("no job of {group}");
        };
        // After a delay.
        let delayed = t.enqueue(json!({"group": "delayed", "delay_seconds": 1})).await;
        t.job_becomes(&delayed, "pending").await;
        let job = lease_of("delayed").await;
        // As a retry, without a wait and after one.
        for wait in [0, 1] {
            let job = if wait == 0 { job.clone() } else { lease_of("delayed").await };
            let retry = json!({"retry_after_seconds": wait});
            t.ack_with(&job, "w", "failed", retry).await.is(200);
            until("the retry to be due", async || t.job(&delayed).await["waiting_for"] == "worker")
                .await;
        }
        // Released by its worker, and dead-lettered and retried by a person.
        let job = lease_of("delayed").await;
        t.ack(&job, "w", "released").await.is(200);
        let job = lease_of("delayed").await;
        t.ack_with(&job, "w", "failed", json!({"retryable": false})).await.is(200);
        t.job_becomes(&delayed, "dead_letter").await;
        t.act(&format!("/v1/jobs/{delayed}/retry")).await.is(200);
        lease_of("delayed").await;
        // Freed by a parent.
        let parent = t.enqueue(json!({"group": "parent"})).await;
        let child = t.enqueue(json!({"group": "child", "depends_on": [parent]})).await;
        let job = lease_of("parent").await;
        t.ack(&job, "w", "succeeded").await.is(200);
        t.job_becomes(&child, "pending").await;
        lease_of("child").await;
        // Cancelled and retried, and moved from another queue.
        let cancelled = t.enqueue(json!({"group": "cancelled", "delay_seconds": 60})).await;
        t.act(&format!("/v1/jobs/{cancelled}/cancel")).await.is(200);
        t.act(&format!("/v1/jobs/{cancelled}/retry")).await.is(200);
        let now = json!({"run_at": "2020-01-01T00:00:00Z"});
        t.patch(&format!("/v1/jobs/{cancelled}"), now).await.is(200);
        lease_of("cancelled").await;
        let moved = t.enqueue(json!({"group": "moved", "queue": "other"})).await;
        t.patch(&format!("/v1/jobs/{moved}"), json!({"queue": "default"})).await.is(200);
        lease_of("moved").await;
        // After a pause.
        t.act("/v1/queues/default/groups/paused/pause").await.is(200);
        t.enqueue(json!({"group": "paused"})).await;
        assert_eq!(count_next(t, 5, Some("a")).await, 5);
        t.act("/v1/queues/default/groups/paused/resume").await.is(200);
        lease_of("paused").await;
    });
}

#[test]
fn limits_of_groups_hold_where_they_take_turns() {
    run(async |t| {
        let rates = json!([{"count": 3, "per_seconds": 3600}]);
        let rules = json!({"groups": {"fair": true, "max_running": 2, "rates": rates}});
        t.patch("/v1/queues/default", rules).await.is(200);
        store_many(t, Some("a"), 300).await;
        store_many(t, Some("b"), 300).await;
        store_many(t, None, 6).await;
        let mut jobs = Vec::new();
        until("two of each and all without a group", async || {
            jobs.extend(t.poll("w", 20).await);
            jobs.len() >= 10
        })
        .await;
        let of = |group: Value| jobs.iter().filter(|it| it["group"] == group).count();
        assert_eq!([of(json!("a")), of(json!("b")), of(Value::Null)], [2, 2, 6]);
        assert!(t.poll("w", 20).await.is_empty());
        let ended = jobs.iter().find(|it| it["group"] == "a").expect("one of a");
        t.ack(ended, "w", "succeeded").await.is(200);
        let next = t.wait_and_lease("w").await;
        assert_eq!(next["group"], "a");
        t.ack(&next, "w", "succeeded").await.is(200);
        assert!(t.poll("w", 20).await.is_empty(), "three have started");
        let page = t.get("/v1/queues/default/groups").await.is(200);
        assert!(page["groups"][0]["next_change_at"].is_string(), "{page}");
        let waiting = t.get("/v1/jobs?state=pending&group=a&limit=1").await.is(200);
        let id = waiting["jobs"][0]["id"].as_str().expect("one waits").to_owned();
        let why = t.get(&format!("/v1/jobs/{id}/explain")).await.is(200);
        assert_eq!(why["reason"], "group");
        let summary = why["summary"].as_str().expect("a summary");
        assert!(summary.starts_with("its group a has used its rate until"), "{summary}");
    });
}

#[test]
fn keys_labels_types_and_the_limit_of_the_queue_hold_where_groups_take_turns() {
    run(async |t| {
        take_turns(t).await;
        for group in ["a", "b", "c"] {
            for _ in 0..3 {
                let keyed = json!({"group": group, "concurrency_key": "k", "concurrency_limit": 2});
                t.enqueue(keyed).await;
            }
        }
        let labelled = t.enqueue(json!({"group": "a", "labels": ["gpu"]})).await;
        t.enqueue(json!({"group": "a", "job_type": "other"})).await;
        let poll = |more: Value| {
            let mut poll = json!({"worker_id": "w", "queues": ["default"], "capacity": 20});
            poll.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
            poll
        };
        let mut jobs = Vec::new();
        until("the jobs of type `test` that may run", async || {
            jobs.extend(t.polled(poll(json!({"job_types": ["test"], "wait_seconds": 0}))).await);
            jobs.len() >= 2
        })
        .await;
        assert_eq!(jobs.len(), 2, "{jobs:?}");
        let rest = t.polled(poll(json!({"wait_seconds": 0}))).await;
        let types: Vec<_> = rest.iter().map(|it| it["job_type"].clone()).collect();
        assert_eq!(types, ["other"]);
        let of_gpu = t.polled(poll(json!({"labels": ["gpu"], "wait_seconds": 0}))).await;
        assert_eq!(of_gpu[0]["id"], json!(labelled));
        t.ack(&jobs[0], "w", "succeeded").await.is(200);
        let change = json!({"max_concurrency": 3});
        t.patch("/v1/queues/default", change).await.is(200);
        store_many(t, Some("d"), 3).await;
        assert!(t.poll("w", 20).await.is_empty(), "three run");
    });
}

#[test]
fn a_group_has_rules_of_its_own_until_they_end_or_it_is_reset() {
    run(async |t| {
        let path = "/v1/queues/default/groups/a";
        let refused = t.put(path, json!({"weight": 3})).await;
        refused.refuses("queue");
        take_turns(t).await;
        for (wrong, field) in [
            (json!({}), "body"),
            (json!({"weight": 0}), "weight"),
            (json!({"weight": 101}), "weight"),
            (json!({"max_running": 0}), "max_running"),
            (json!({"rates": [{"count": 1, "per_seconds": 0}]}), "rates[0].per_seconds"),
            (json!({"weight": 1, "expires_at": "2020-01-01T00:00:00Z"}), "expires_at"),
        ] {
            t.put(path, wrong).await.refuses(field);
        }
        let put = t.put(path, json!({"weight": 4})).await.is(200);
        let rules = json!({"weight": 4, "max_running": null, "rates": null, "expires_at": null});
        assert_eq!((&put["rules"], &put["state"]), (&rules, &json!("idle")));
        store_many(t, Some("a"), 200).await;
        store_many(t, Some("b"), 200).await;
        assert_eq!(t.get(path).await.is(200)["rules"], rules);
        until("both groups to be in line", async || count_next(t, 1, Some("b")).await == 1).await;
        let of_a = count_next(t, 50, Some("a")).await;
        assert!((38..=42).contains(&of_a), "{of_a}");
        // Its limits hold beside its weight.
        t.put(path, json!({"weight": 100, "max_running": 2})).await.is(200);
        let jobs = t.poll("w", 20).await;
        let of_a = jobs.iter().filter(|it| it["group"] == "a").count();
        assert_eq!(of_a, 2, "{jobs:?}");
        let hour = json!({"rates": [{"count": 1, "per_seconds": 3600}]});
        t.put("/v1/queues/default/groups/b", hour).await.is(200);
        assert_eq!(t.poll("w", 20).await.len(), 1, "one of b");
        assert!(t.poll("w", 20).await.is_empty());
        let reset = t.act("/v1/queues/default/groups/b/reset").await.is(200);
        assert_eq!(reset["rules"], Value::Null);
        assert_eq!(t.wait_and_lease("w").await["group"], "b");
        // They end by themselves.
        let stored = t.enqueue(json!({"queue": "other"})).await;
        let now = t.job(&stored).await["created_at"].as_str().expect("a time").to_owned();
        let now: DateTime<Utc> = now.parse().expect("a time");
        let end = (now + TimeDelta::seconds(2)).to_rfc3339();
        t.put(path, json!({"max_running": 2, "expires_at": end})).await.is(200);
        until("the rules to end", async || t.get(path).await.is(200)["rules"].is_null()).await;
        until("more of a to run", async || {
            t.poll("w", 20).await.iter().any(|it| it["group"] == "a")
        })
        .await;
        t.act("/v1/queues/default/groups/none/reset").await.is_error(404, "group_not_found");
    });
}

/// Jobs of each of three groups, of weights 1 to 3.
const JOBS_OF_GROUP: usize = 100;
/// Jobs of all groups that start while each has more.
const SHARED_JOBS: usize = 150;

#[test]
fn workers_of_two_nodes_share_their_time_by_weight_and_lease_each_job_once() {
    limited(async {
        let database = fresh_database().await;
        let (one, two) =
            (TestServer::start(database.clone()).await, TestServer::start(database).await);
        let t = one.project("main").await;
        take_turns(&t).await;
        for (group, weight) in [("a", 1), ("b", 2), ("c", 3)] {
            let path = format!("/v1/queues/default/groups/{group}");
            t.put(&path, json!({"weight": weight})).await.is(200);
            store_many(&t, Some(group), JOBS_OF_GROUP).await;
        }
        until("all groups to be in line", async || {
            t.database.number("select count(*) from group_turns").await == 3
        })
        .await;
        let nodes = [t.clone(), t.through(&two.url)];
        let started = Arc::new(Mutex::new(Vec::new()));
        let mut workers = JoinSet::new();
        for (number, node) in nodes.iter().cycle().take(6).cloned().enumerate() {
            let started = Arc::clone(&started);
            workers.spawn(async move {
                let name = format!("w{number}");
                loop {
                    let jobs = node.poll(&name, 2).await;
                    let is_done = {
                        let mut started = started.lock().expect("no panic");
                        started.extend(jobs.iter().cloned());
                        started.len() == 3 * JOBS_OF_GROUP
                    };
                    for job in &jobs {
                        node.ack(job, &name, "succeeded").await.is(200);
                    }
                    if is_done {
                        break;
                    }
                }
            });
        }
        workers.join_all().await;
        let mut started = std::mem::take(&mut *started.lock().expect("no panic"));
        let ids: BTreeSet<_> = started.iter().map(|it| it["id"].to_string()).collect();
        assert_eq!(ids.len(), 3 * JOBS_OF_GROUP, "each once");
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        // Answers reach this process in another order than jobs start.
        started.sort_by_key(|it| it["claimed_at"].to_string());
        for job in &started[..SHARED_JOBS] {
            *counts.entry(job["group"].to_string()).or_default() += 1;
        }
        let shares = [("a", 25), ("b", 50), ("c", 75)];
        for (group, share) in shares {
            let count = counts[&format!("\"{group}\"")];
            assert!(count.abs_diff(share) <= 8, "{counts:?}");
        }
        one.stop().await;
        two.stop().await;
    });
}
