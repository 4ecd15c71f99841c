//! Many jobs a request: one phase after the other, both at the same time, and acks that are
//! refused.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use serde_json::Value;
use tokio::task::JoinSet;

use super::{
    client::{self, Client, Job, Target},
    delivery::Ledger,
    load::{BUSY_WAIT_SECONDS, finish},
};

/// Jobs of one enqueue.
const ENQUEUED_JOBS: usize = 100;
/// Capacity of a poll.
const CAPACITY: usize = 50;
/// Producers, and as many workers.
const CONNECTIONS: usize = 8;
/// Jobs whose acks are refused, and then accepted.
pub const REFUSED_JOBS: usize = 10_000;
/// How often the end of the last job is checked.
const LOOK_PERIOD: Duration = Duration::from_millis(1);

/// Throughput, one phase after the other.
#[derive(Debug, Clone, Copy)]
pub struct Phases {
    /// Jobs enqueued per second.
    pub enqueue: f64,
    /// Jobs leased and acknowledged per second.
    pub drain: f64,
    /// Jobs per second through both.
    pub lifecycle: f64,
}

/// Enqueues `jobs` jobs.
pub async fn fill(target: &Target, queue: &str, jobs: usize) -> anyhow::Result<()> {
    let requests = jobs / ENQUEUED_JOBS;
    let mut running = JoinSet::new();
    for sender in 0..CONNECTIONS {
        let (target, queue) = (target.clone(), queue.to_owned());
        running.spawn(async move {
            let mut client = Client::connect(&target).await?;
            let job = client::job(&queue, target.payload_bytes);
            let body = format!(r#"{{"jobs":[{}]}}"#, vec![job; ENQUEUED_JOBS].join(","));
            for _ in (sender..requests).step_by(CONNECTIONS) {
                client.post("/v1/jobs/batch", body.clone()).await?;
            }
            anyhow::Ok(())
        });
    }
    finish(running).await
}

/// Works off `jobs` jobs; returns when the last one was acknowledged, and all of them.
async fn drain(
    target: &Target,
    queue: &str,
    jobs: usize,
) -> anyhow::Result<(Instant, Vec<String>)> {
    let left = Arc::new(AtomicU64::new(jobs as u64));
    let mut running = JoinSet::new();
    for worker in 0..CONNECTIONS {
        let (target, queue, left) = (target.clone(), queue.to_owned(), Arc::clone(&left));
        running.spawn(async move {
            let mut client = Client::connect(&target).await?;
            let mut ledger = Ledger::default();
            while left.load(Ordering::Relaxed) > 0 {
                let jobs = client.poll(&queue, worker, CAPACITY, BUSY_WAIT_SECONDS).await?;
                if jobs.is_empty() {
                    continue;
                }
                let acks: Vec<_> = jobs.iter().map(|it| client::ack(it, worker)).collect();
                let answer = client.post("/v1/workers/ack/batch", batch(&acks)).await?;
                check_statuses(&answer, 200)?;
                jobs.iter().for_each(|it| ledger.ack(it));
                let (done, order) = (jobs.len() as u64, Ordering::Relaxed);
                let _ = left.fetch_update(order, order, |it| Some(it.saturating_sub(done)));
            }
            anyhow::Ok(ledger.acked)
        });
    }
    // The last job ends the measurement; idle workers return a little later.
    let finished = tokio::spawn(running.join_all());
    while left.load(Ordering::Relaxed) > 0 && !finished.is_finished() {
        tokio::time::sleep(LOOK_PERIOD).await;
    }
    let ended = Instant::now();
    let mut acked = Vec::with_capacity(jobs);
    for of_worker in finished.await? {
        acked.extend(of_worker?);
    }
    Ok((ended, acked))
}

fn batch(acks: &[String]) -> String {
    format!(r#"{{"acks":[{}]}}"#, acks.join(","))
}

/// # Errors
/// When one of the acks was answered otherwise.
pub fn check_statuses(answer: &[u8], status: u16) -> anyhow::Result<()> {
    let answer: Value = serde_json::from_slice(answer)?;
    let results = answer["results"].as_array().context("a batch answers with results")?;
    let is_expected = results.iter().all(|it| it["status"] == status);
    ensure!(is_expected, "an ack was not answered with {status}");
    Ok(())
}

fn whole_requests(jobs: usize) -> usize {
    jobs / ENQUEUED_JOBS * ENQUEUED_JOBS
}

/// Enqueues `jobs` jobs, then works them off.
pub async fn phases(target: &Target, queue: &str, jobs: usize) -> anyhow::Result<(Phases, Ledger)> {
    let jobs = whole_requests(jobs);
    let started = Instant::now();
    fill(target, queue, jobs).await?;
    let filled = Instant::now();
    let (ended, acked) = drain(target, queue, jobs).await?;
    let rate = |from: Instant, to: Instant| jobs as f64 / to.duration_since(from).as_secs_f64();
    let phases = Phases {
        enqueue: rate(started, filled),
        drain: rate(filled, ended),
        lifecycle: rate(started, ended),
    };
    Ok((phases, Ledger { stored: jobs as u64, acked }))
}

/// Enqueues `jobs` jobs, and works them off at the same time; returns jobs per second.
pub async fn at_once(target: &Target, queue: &str, jobs: usize) -> anyhow::Result<(f64, Ledger)> {
    let jobs = whole_requests(jobs);
    let started = Instant::now();
    let ((), (ended, acked)) =
        tokio::try_join!(fill(target, queue, jobs), drain(target, queue, jobs))?;
    let rate = jobs as f64 / ended.duration_since(started).as_secs_f64();
    Ok((rate, Ledger { stored: jobs as u64, acked }))
}

/// Leased jobs whose acks are measured.
pub struct Leased {
    target: Target,
    jobs: Vec<Job>,
}

impl Leased {
    /// Enqueues and leases [`REFUSED_JOBS`] jobs.
    pub async fn new(target: &Target, queue: &str) -> anyhow::Result<Self> {
        fill(target, queue, REFUSED_JOBS).await?;
        let mut client = Client::connect(target).await?;
        let mut jobs = Vec::with_capacity(REFUSED_JOBS);
        while jobs.len() < REFUSED_JOBS {
            let polled = client.poll(queue, 0, CAPACITY, BUSY_WAIT_SECONDS).await?;
            ensure!(!polled.is_empty(), "jobs are missing");
            jobs.extend(polled);
        }
        Ok(Self { target: target.clone(), jobs })
    }

    /// Acks them all, in batches; returns acks per second.
    ///
    /// # Errors
    /// When one is answered otherwise than with `status`.
    pub async fn ack(&self, is_stale: bool) -> anyhow::Result<f64> {
        let status = if is_stale { 409 } else { 200 };
        let mut running = JoinSet::new();
        let started = Instant::now();
        for jobs in self.jobs.chunks(REFUSED_JOBS.div_ceil(CONNECTIONS)) {
            let (target, mut jobs) = (self.target.clone(), jobs.to_vec());
            running.spawn(async move {
                let mut client = Client::connect(&target).await?;
                for jobs in jobs.chunks_mut(CAPACITY) {
                    for job in jobs.iter_mut().filter(|_| is_stale) {
                        job.attempt += 1;
                    }
                    let acks: Vec<_> = jobs.iter().map(|it| client::ack(it, 0)).collect();
                    let answer = client.post("/v1/workers/ack/batch", batch(&acks)).await?;
                    check_statuses(&answer, status)?;
                }
                anyhow::Ok(())
            });
        }
        finish(running).await?;
        Ok(REFUSED_JOBS as f64 / started.elapsed().as_secs_f64())
    }
}
