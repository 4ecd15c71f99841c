//! Jobs of many groups keep their order while nodes are killed and attempts fail.
//!
//! A short form runs with all tests. `FENCEPOST_ORDER_GROUPS` and `FENCEPOST_ORDER_JOBS` make it
//! longer.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rand::{Rng, RngExt};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::order::order;
use crate::harness::{LoneProject, NodeProcess, TestProject, TestServer, fresh_database, run_for};

const NODES: usize = 3;
const WORKERS: usize = 8;
/// Jobs of one request.
const BATCH: usize = 500;
/// Of this many first attempts one fails.
const FAILS: u64 = 5;
/// Seconds until a lease ends whose poll had no answer.
const LEASE_SECONDS: u32 = 3;
/// Attempts that began before an earlier job of their group had ended.
const OVERTAKES: &str = "
    with runs as (
        select body.group_key, (body.payload::json->>'number')::int as number, run.attempt,
               run.claimed_at, run.ended_at
        from job_bodies body
        join (
            select job_id, attempt, claimed_at, ended_at from attempts
            union all
            select id, attempt, claimed_at, completed_at from finished_jobs
        ) run on run.job_id = body.job_id
    )
    select count(*)
    from (
        select claimed_at, lag(ended_at) over (
                   partition by group_key order by number, attempt, ended_at
               ) as before
        from runs
    ) line
    where claimed_at < before";

/// Stores jobs of all groups, the first of each group first.
async fn fill(t: &TestProject, groups: usize, jobs: usize) {
    let all: Vec<_> = (0..jobs)
        .flat_map(|number| (0..groups).map(move |group| (group, number)))
        .map(|(group, number)| {
            json!({"job_type": "t", "group": format!("g{group}"), "payload": {"number": number},
                   "timeout_seconds": 60})
        })
        .collect();
    for batch in all.chunks(BATCH) {
        t.post("/v1/jobs/batch", json!({"jobs": batch})).await.is(201);
    }
}

/// Posts to any node until one accepts it.
async fn post_anywhere(nodes: &[LoneProject], path: &str, body: &Value) -> Value {
    loop {
        let node = &nodes[rand::rng().random_range(0..nodes.len())];
        let request = node.request(reqwest::Method::POST, path).json(body);
        if let Ok(answer) = request.send().await
            && answer.status().is_success()
            && let Ok(answer) = answer.json().await
        {
            return answer;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn work(nodes: Vec<LoneProject>, worker: String, has_ended: Arc<AtomicBool>) {
    let poll = json!({"worker_id": worker, "queues": ["default"], "capacity": 50,
                      "wait_seconds": 1, "lease_seconds": LEASE_SECONDS});
    while !has_ended.load(Ordering::SeqCst) {
        let polled = post_anywhere(&nodes, "/v1/workers/poll", &poll).await;
        let leased = polled["jobs"].as_array().cloned().unwrap_or_default();
        let acks = leased.iter().map(|job| {
            let number = job["payload"]["number"].as_u64().unwrap_or_default();
            let fails = number % FAILS == 0 && job["attempt"] == 1;
            json!({"job_id": job["id"], "attempt": job["attempt"], "lease_id": job["lease_id"],
                   "worker_id": worker, "status": if fails { "failed" } else { "succeeded" },
                   "retry_after_seconds": fails.then_some(0)})
        });
        let acks: Vec<_> = acks.collect();
        if !acks.is_empty() {
            post_anywhere(&nodes, "/v1/workers/ack/batch", &json!({"acks": acks})).await;
        }
    }
}

async fn keep_order(groups: usize, jobs: usize) {
    let database = fresh_database().await;
    let server = TestServer::start(database.clone()).await;
    let t = server.project("main").await;
    order(&t, "block").await;
    let mut nodes: Vec<_> = (0..NODES).map(|_| NodeProcess::start(&database)).collect();
    for node in &mut nodes {
        node.until_ready().await;
    }
    fill(&t, groups, jobs).await;
    let seen: Vec<_> = nodes.iter().map(|it| t.through(&it.url())).collect();
    let has_ended = Arc::new(AtomicBool::new(false));
    let mut workers = JoinSet::new();
    for number in 0..WORKERS {
        workers.spawn(work(seen.clone(), format!("w{number}"), Arc::clone(&has_ended)));
    }
    let left = "select count(*) from (select from jobs limit 1) left_over";
    // The whole test has a bound.
    let ended = async {
        while database.number(left).await > 0 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let killing = async {
        loop {
            // The kill falls anywhere between two statements.
            tokio::time::sleep(Duration::from_millis(rand::rng().random_range(100..2_500))).await;
            let victim = (rand::rng().next_u32() as usize) % NODES;
            let port = nodes[victim].port;
            nodes[victim].kill();
            nodes[victim] = NodeProcess::start_at(&database, port, &[]);
        }
    };
    tokio::select! {
        () = killing => (),
        () = ended => (),
    }
    has_ended.store(true, Ordering::SeqCst);
    workers.join_all().await;
    assert_eq!(database.number(OVERTAKES).await, 0, "each began after the one before had ended");
    let ended = database.number("select count(*) from finished_jobs where state = 'succeeded'");
    assert_eq!(ended.await, i64::try_from(groups * jobs).expect("few"));
    let failed = database.number("select count(*) from attempts where outcome = 'failed'").await;
    assert!(failed > 0, "some attempts fail");
    server.stop().await;
}

#[test]
fn groups_keep_their_order_while_nodes_are_killed() {
    let number = |name: &str| std::env::var(name).ok().and_then(|it| it.parse().ok());
    let groups = number("FENCEPOST_ORDER_GROUPS").unwrap_or(40);
    let jobs = number("FENCEPOST_ORDER_JOBS").unwrap_or(10);
    let seconds = 120 + groups as u64 * jobs as u64 / 100;
    run_for(Duration::from_secs(seconds), keep_order(groups, jobs));
}
