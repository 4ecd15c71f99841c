//! Turns of groups beside what keeps jobs from starting: pauses, limits, types, keys, and order.

use serde_json::{Value, json};

use super::turns::{begin, count_next, store_many, take_turns};
use crate::harness::{TestProject, run, until};

async fn of_type(t: &TestProject, job_type: &str, wait_seconds: u32) -> Vec<Value> {
    let poll = json!({
        "worker_id": "w", "queues": ["default"], "job_types": [job_type], "capacity": 1,
        "wait_seconds": wait_seconds,
    });
    t.polled(poll).await
}

#[test]
fn a_group_that_is_paused_without_an_end_keeps_no_other_from_its_turn() {
    run(async |t| {
        take_turns(t).await;
        begin(t, "a").await;
        store_many(t, Some("b"), 20).await;
        t.act("/v1/queues/default/groups/a/pause").await.is(200);
        until("jobs of the other group alone", async || count_next(t, 3, Some("b")).await == 3)
            .await;
        t.act("/v1/queues/default/groups/a/resume").await.is(200);
        until("jobs of the resumed group", async || count_next(t, 2, Some("a")).await > 0).await;
    });
}

#[test]
fn a_job_behind_many_of_another_type_starts_in_its_turn() {
    run(async |t| {
        take_turns(t).await;
        t.put("/v1/queues/default/groups/a", json!({"max_running": 5})).await.is(200);
        let jobs = vec![json!({"job_type": "long", "group": "a"}); 300];
        t.post("/v1/jobs/batch", json!({"jobs": jobs})).await.is(201);
        let hidden = t.enqueue(json!({"job_type": "rare", "group": "a"})).await;
        let jobs = vec![json!({"job_type": "rare", "group": "b"}); 30];
        t.post("/v1/jobs/batch", json!({"jobs": jobs})).await.is(201);
        let mut found = Vec::new();
        until("the hidden job to start", async || {
            found.extend(of_type(t, "rare", 1).await);
            found.iter().any(|it| it["id"] == json!(hidden))
        })
        .await;
        assert!(found.len() < 20, "its group has its turn: {}", found.len());
    });
}

#[test]
fn many_groups_with_jobs_of_another_type_hide_no_group() {
    run(async |t| {
        take_turns(t).await;
        let many = |range: std::ops::Range<usize>| {
            let job = |it| json!({"job_type": "other", "group": format!("other {it}")});
            json!({"jobs": range.map(job).collect::<Vec<_>>()})
        };
        t.post("/v1/jobs/batch", many(0..500)).await.is(201);
        t.post("/v1/jobs/batch", many(500..1_000)).await.is(201);
        t.put("/v1/queues/default/groups/z", json!({"max_running": 5})).await.is(200);
        let id = t.enqueue(json!({"job_type": "rare", "group": "z"})).await;
        assert_eq!(of_type(t, "rare", 10).await[0]["id"], json!(id));
    });
}

#[test]
fn a_full_group_with_many_keys_blocks_no_job_with_a_key() {
    run(async |t| {
        let rules = json!({"groups": {"fair": true, "max_running": 1}});
        t.patch("/v1/queues/default", rules).await.is(200);
        let job = |it: usize| json!({"job_type": "t", "group": "a", "concurrency_key": format!("k{it}"), "concurrency_limit": 1});
        let jobs: Vec<_> = (0..100).map(job).collect();
        t.post("/v1/jobs/batch", json!({"jobs": jobs})).await.is(201);
        assert_eq!(t.wait_and_lease("w").await["group"], "a");
        let other = json!({"group": "b", "concurrency_key": "other", "concurrency_limit": 1});
        t.enqueue(other).await;
        assert_eq!(t.wait_and_lease("w").await["group"], "b");
    });
}

#[test]
fn the_end_of_a_job_lets_the_next_of_its_full_group_start_at_once() {
    run(async |t| {
        let rules = json!({"groups": {"fair": true, "max_running": 1}});
        t.patch("/v1/queues/default", rules).await.is(200);
        store_many(t, Some("a"), 40).await;
        let mut job = t.wait_and_lease("w2").await;
        for _ in 0..20 {
            let waiting = {
                let t = t.clone();
                // Shorter than a full group rests, if nothing brings it back.
                let poll = json!({"worker_id": "w2", "queues": ["default"], "wait_seconds": 4});
                tokio::spawn(async move { t.polled(poll).await })
            };
            t.ack(&job, "w2", "succeeded").await.is(200);
            let next = waiting.await.expect("no panic");
            job = next.into_iter().next().expect("the next job of the group, in time");
        }
    });
}

#[test]
fn a_rate_that_is_lifted_while_claims_look_lets_its_group_start() {
    run(async |t| {
        take_turns(t).await;
        begin(t, "busy").await;
        store_many(t, Some("a"), 300).await;
        let path = "/v1/queues/default/groups/a";
        for _ in 0..25 {
            let hour = json!({"rates": [{"count": 1, "per_seconds": 3600}]});
            t.put(path, hour).await.is(200);
            let (polled, lifted) = tokio::join!(t.poll("w", 1), t.put(path, json!({"rates": []})));
            lifted.is(200);
            for job in polled {
                t.ack(&job, "w", "succeeded").await.is(200);
            }
            until("a job of the group to start", async || count_next(t, 1, Some("a")).await == 1)
                .await;
        }
    });
}

#[test]
fn an_order_that_follows_turns_lets_one_job_of_a_group_run() {
    run(async |t| {
        take_turns(t).await;
        begin(t, "a").await;
        t.patch("/v1/queues/default", json!({"groups": {"order": "strict"}})).await.is(200);
        let mut jobs = Vec::new();
        until("the first in line to start", async || {
            jobs.extend(t.poll("w", 20).await);
            !jobs.is_empty()
        })
        .await;
        for _ in 0..10 {
            jobs.extend(t.poll("w", 20).await);
        }
        assert_eq!(jobs.len(), 1, "one at a time");
    });
}
