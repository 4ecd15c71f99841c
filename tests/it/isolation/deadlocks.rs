//! Operations that lock the same rows in any order never deadlock.

use std::{
    env,
    time::{Duration, Instant},
};

use crate::harness::{TestProject, TestServer, fresh_database, run_for};
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use serde_json::{Value, json};
use tokio::task::JoinSet;

/// How long to try, in seconds; `make deadlocks SECONDS=600` tries longer.
const SECONDS: u64 = 5;
/// Clients at the same time.
const CLIENTS: u64 = 12;
const TYPES: [&str; 3] = ["a", "b", "c"];

/// One client: what it does depends on its seed alone, as far as the others let it.
struct Client {
    t: TestProject,
    random: StdRng,
    leased: Vec<Value>,
    known: Vec<String>,
}

impl Client {
    async fn act(&mut self) {
        let kind = self.random.random_range(0..20_u32);
        let job_type = *TYPES.choose(&mut self.random).expect("a type");
        let t = self.t.clone();
        let reply = match kind {
            0..=2 => self.enqueue(job_type).await,
            3..=4 => {
                self.leased.extend(t.poll("w", 8).await);
                return;
            }
            5..=8 => self.settle().await,
            9 => t.act("/v1/queues/default/resume").await,
            10 => t.post("/v1/queues/default/resume", json!({"job_type": job_type})).await,
            11 => t.post("/v1/queues/default/pause", json!({"job_type": job_type})).await,
            12..=13 => self.about_a_job().await,
            14 => {
                let (path, confirm) = *[
                    ("jobs/cancel", "cancel"),
                    ("jobs/retry", "retry"),
                    ("dead-letters/retry", "retry"),
                    ("dead-letters/purge", "purge"),
                ]
                .choose(&mut self.random)
                .expect("a path");
                let filter = json!({"job_type": job_type});
                t.post(&format!("/v1/{path}"), json!({"filter": filter, "confirm": confirm})).await
            }
            15 => t.post("/v1/queues/default/purge", json!({"confirm": "default"})).await,
            16 => {
                let active: Vec<_> = self
                    .leased
                    .iter()
                    .map(|it| json!({"job_id": it["id"], "attempt": it["attempt"]}))
                    .collect();
                t.post("/v1/workers/heartbeat", json!({"worker_id": "w", "active_jobs": active}))
                    .await
            }
            _ => self.family(job_type).await,
        };
        let status = reply.status.as_u16();
        assert!(status < 500 || status == 503, "{status}: {}", reply.text);
    }

    async fn enqueue(&mut self, job_type: &str) -> crate::harness::Reply {
        let mut job = json!({"job_type": job_type, "max_attempts": 1});
        if self.random.random_bool(0.4) {
            let key = self.random.random_range(0..4_u32).to_string();
            job["unique"] = json!({"key": key, "on_conflict": "replace"});
        }
        let parent = self.known.choose(&mut self.random).cloned();
        if let Some(parent) = parent.filter(|_| self.random.random_bool(0.4)) {
            job["depends_on"] = json!([parent]);
        }
        let reply = self.t.post("/v1/jobs", job).await;
        if reply.status == 201 {
            self.known.push(reply.json()["id"].as_str().expect("an id").to_owned());
        }
        reply
    }

    /// Settles some leases in one batch, in any order.
    async fn settle(&mut self) -> crate::harness::Reply {
        let count = self.leased.len().min(10);
        let jobs: Vec<_> = self.leased.drain(..count).collect();
        let acks: Vec<_> = jobs
            .iter()
            .map(|job| {
                let status = *["succeeded", "failed", "released"]
                    .choose(&mut self.random)
                    .expect("a status");
                TestProject::ack_body(job, "w", status)
            })
            .collect();
        match acks.is_empty() {
            true => self.t.get("/v1/queues/default").await,
            false => self.t.post("/v1/workers/ack/batch", json!({"acks": acks})).await,
        }
    }

    async fn about_a_job(&mut self) -> crate::harness::Reply {
        let Some(id) = self.known.choose(&mut self.random) else {
            return self.t.get("/v1/queues").await;
        };
        let what = *["cancel", "retry"].choose(&mut self.random).expect("a verb");
        self.t.act(&format!("/v1/jobs/{id}/{what}")).await
    }

    /// A workflow, or the end of one.
    async fn family(&mut self, job_type: &str) -> crate::harness::Reply {
        let job = |key: &str, on: Value| json!({"key": key, "job_type": job_type, "depends_on": on, "max_attempts": 1});
        let jobs = json!({"jobs": [
            job("first", json!([])), job("left", json!(["first"])),
            job("right", json!(["first"])), job("last", json!(["left", "right"])),
        ]});
        let made = self.t.post("/v1/workflows", jobs).await;
        if made.status != 201 || self.random.random_bool(0.5) {
            return made;
        }
        let id = made.json()["id"].as_str().expect("an id").to_owned();
        self.t.act(&format!("/v1/workflows/{id}/cancel")).await
    }
}

#[test]
fn operations_that_lock_the_same_rows_never_deadlock() {
    let seconds = env::var("FENCEPOST_DEADLOCK_SECONDS").ok();
    let seconds = seconds.map_or(SECONDS, |it| it.parse().expect("a number of seconds"));
    run_for(Duration::from_secs(seconds + 60), async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project("main").await;
        t.patch("/v1/queues/default", json!({"brake_after": 3})).await.is(200);
        let until = Instant::now() + Duration::from_secs(seconds);
        let mut clients = JoinSet::new();
        for number in 0..CLIENTS {
            let random = StdRng::seed_from_u64(number);
            let mut client =
                Client { t: t.project.clone(), random, leased: Vec::new(), known: Vec::new() };
            clients.spawn(async move {
                let mut calls = 0_u32;
                while Instant::now() < until {
                    client.act().await;
                    calls += 1;
                }
                calls
            });
        }
        let calls: u32 = clients.join_all().await.into_iter().sum();
        server.stop().await;
        let deadlocks = "select deadlocks from pg_stat_database where datname = current_database()";
        assert_eq!(t.database.number(deadlocks).await, 0, "in {calls} calls");
        println!("{calls} calls without a deadlock");
    });
}
