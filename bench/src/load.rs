//! The measurements: throughput and latency.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Context;
use serde_json::Value;
use sqlx::{ConnectOptions, Executor, postgres::PgConnectOptions};
use tokio::task::JoinSet;

use super::client::{self, Client, SMALL_PAYLOAD_BYTES, Target};

/// Jobs of one enqueue in the batch lifecycle.
const BATCH_JOBS: usize = 100;
/// Capacity of a poll in the batch lifecycle.
const BATCH_CAPACITY: usize = 50;
/// Producers and workers of the batch lifecycle.
const BATCH_CONNECTIONS: usize = 8;
/// Concurrency keys of limited jobs.
const LIMITED_KEYS: usize = 8;
/// Running jobs that the limit of a queue allows: more than there are workers, so that the cost of
/// counting is measured and no worker waits.
const QUEUE_LIMIT: usize = 1_000;
/// Jobs per second while the pickup is measured.
const PICKUP_RATE: u32 = 50;
/// Parked polls while the pickup is measured.
const PICKUP_WORKERS: usize = 64;

/// How often the end of the last job is checked.
const LOOK_PERIOD: Duration = Duration::from_millis(1);
/// Time for the last of many polls to arrive at the server.
const SETTLING: Duration = Duration::from_secs(1);
/// Time for PostgreSQL sessions to report their earlier work: they do so every ten seconds.
pub const REPORTING: Duration = Duration::from_secs(11);
/// The wait of polls that expect a job at any moment, in seconds.
const BUSY_WAIT_SECONDS: u64 = 2;

/// The step that each connection repeats.
#[derive(Debug, Clone, Copy)]
pub enum Step {
    Enqueue,
    /// One job in, one job leased, one job done: three requests.
    Lifecycle,
    /// The same with two requests: the ack of a job polls for the next one.
    ShortLifecycle,
    /// A lifecycle whose jobs have one of [`LIMITED_KEYS`] concurrency keys.
    LimitedByKey,
}

impl Step {
    /// Does it once; returns the jobs that count.
    /// `held` is the job that the connection has leased.
    async fn run(
        self,
        client: &mut Client,
        queue: &str,
        worker: usize,
        held: &mut Option<Value>,
    ) -> anyhow::Result<u64> {
        match self {
            Self::LimitedByKey => client.post_limited_job(queue, worker % LIMITED_KEYS).await?,
            _ => client.post_job(queue).await?,
        };
        match self {
            Self::Enqueue => Ok(1),
            Self::Lifecycle | Self::LimitedByKey => {
                let jobs = client.poll(queue, worker, 1, BUSY_WAIT_SECONDS).await?;
                for job in &jobs {
                    client.post("/v1/workers/ack", client::ack(job, worker)).await?;
                }
                Ok(jobs.len() as u64)
            }
            Self::ShortLifecycle => {
                let Some(job) = held.take() else {
                    *held = client.poll(queue, worker, 1, BUSY_WAIT_SECONDS).await?.pop();
                    return Ok(0);
                };
                let ack = client::ack_then_poll(&job, worker, queue, BUSY_WAIT_SECONDS);
                let answer = client.post("/v1/workers/ack", ack).await?;
                let mut answer: Value = serde_json::from_slice(&answer)?;
                *held = Some(answer["poll"]["jobs"][0].take()).filter(|it| !it.is_null());
                Ok(1)
            }
        }
    }
}

/// Repeats a step on many connections for `time`; returns jobs per second.
pub async fn rate(
    target: &Target,
    step: Step,
    queue: &str,
    connections: usize,
    time: Duration,
) -> anyhow::Result<f64> {
    let mut clients = Vec::with_capacity(connections);
    for _ in 0..connections {
        clients.push(Client::connect(target).await?);
    }
    let done = Arc::new(AtomicU64::new(0));
    let mut running = JoinSet::new();
    let started = Instant::now();
    for (worker, mut client) in clients.into_iter().enumerate() {
        let (done, queue) = (Arc::clone(&done), queue.to_owned());
        running.spawn(async move {
            let mut held = None;
            while started.elapsed() < time {
                let jobs = step.run(&mut client, &queue, worker, &mut held).await?;
                done.fetch_add(jobs, Ordering::Relaxed);
            }
            anyhow::Ok(())
        });
    }
    finish(running).await?;
    Ok(done.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64())
}

/// Gives a queue a limit that its workers never reach.
pub async fn limit_queue(target: &Target, queue: &str) -> anyhow::Result<()> {
    let mut client = Client::connect(target).await?;
    let path = format!("/v1/queues/{queue}");
    client.patch(&path, format!(r#"{{"max_concurrency":{QUEUE_LIMIT}}}"#)).await?;
    Ok(())
}

async fn finish(mut running: JoinSet<anyhow::Result<()>>) -> anyhow::Result<()> {
    while let Some(ended) = running.join_next().await {
        ended??;
    }
    Ok(())
}

/// Throughput of a batch lifecycle.
#[derive(Debug, Clone, Copy)]
pub struct BatchRates {
    /// Jobs enqueued per second.
    pub enqueue: f64,
    /// Jobs leased and acknowledged per second.
    pub drain: f64,
    /// Jobs per second through both, one after the other.
    pub lifecycle: f64,
}

/// Enqueues `jobs` jobs in batches.
pub async fn fill(target: &Target, queue: &str, jobs: usize) -> anyhow::Result<()> {
    let batches = jobs / BATCH_JOBS;
    let mut running = JoinSet::new();
    for sender in 0..BATCH_CONNECTIONS {
        let (target, queue) = (target.clone(), queue.to_owned());
        running.spawn(async move {
            let mut client = Client::connect(&target).await?;
            let job = client::job(&queue, target.payload_bytes);
            let body = format!(r#"{{"jobs":[{}]}}"#, vec![job; BATCH_JOBS].join(","));
            for _ in (sender..batches).step_by(BATCH_CONNECTIONS) {
                client.post("/v1/jobs/batch", body.clone()).await?;
            }
            anyhow::Ok(())
        });
    }
    finish(running).await
}

/// Enqueues `jobs` jobs in batches, then works them off in batches.
pub async fn batch(target: &Target, queue: &str, jobs: usize) -> anyhow::Result<BatchRates> {
    let batches = jobs / BATCH_JOBS;
    let enqueuing = Instant::now();
    fill(target, queue, jobs).await?;
    let enqueue_seconds = enqueuing.elapsed().as_secs_f64();

    let left = Arc::new(AtomicU64::new((batches * BATCH_JOBS) as u64));
    let draining = Instant::now();
    let mut running = JoinSet::new();
    for worker in 0..BATCH_CONNECTIONS {
        let (target, queue, left) = (target.clone(), queue.to_owned(), Arc::clone(&left));
        running.spawn(async move {
            let mut client = Client::connect(&target).await?;
            while left.load(Ordering::Relaxed) > 0 {
                let jobs = client.poll(&queue, worker, BATCH_CAPACITY, BUSY_WAIT_SECONDS).await?;
                if jobs.is_empty() {
                    continue;
                }
                let acks: Vec<_> = jobs.iter().map(|it| client::ack(it, worker)).collect();
                let body = format!(r#"{{"acks":[{}]}}"#, acks.join(","));
                client.post("/v1/workers/ack/batch", body).await?;
                left.fetch_sub(jobs.len() as u64, Ordering::Relaxed);
            }
            anyhow::Ok(())
        });
    }
    // The last job ends the measurement; idle workers return a little later.
    let finished = tokio::spawn(finish(running));
    while left.load(Ordering::Relaxed) > 0 && !finished.is_finished() {
        tokio::time::sleep(LOOK_PERIOD).await;
    }
    let drain_seconds = draining.elapsed().as_secs_f64();
    finished.await??;
    let jobs = (batches * BATCH_JOBS) as f64;
    Ok(BatchRates {
        enqueue: jobs / enqueue_seconds,
        drain: jobs / drain_seconds,
        lifecycle: jobs / (enqueue_seconds + drain_seconds),
    })
}

/// Milliseconds from sending an enqueue to `target` until a worker that is parked at `there` has
/// the job: p50 and p99, at low load.
pub async fn pickup(
    target: &Target,
    there: &Target,
    queue: &str,
    time: Duration,
) -> anyhow::Result<(f64, f64)> {
    let epoch = Instant::now();
    let (times, mut picked) = tokio::sync::mpsc::unbounded_channel();
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mut running = JoinSet::new();
    for worker in 0..PICKUP_WORKERS {
        let (target, queue) = (there.clone(), queue.to_owned());
        let (stop, times) = (Arc::clone(&stop), times.clone());
        running.spawn(async move {
            let mut client = Client::connect(&target).await?;
            while !stop.load(Ordering::Relaxed) {
                for job in client.poll(&queue, worker, 1, BUSY_WAIT_SECONDS).await? {
                    let got = epoch.elapsed().as_secs_f64() * 1e3;
                    let sent = job["payload"]["sent_ms"].as_f64().context("a time")?;
                    let _ = times.send(got - sent);
                    client.post("/v1/workers/ack", client::ack(&job, worker)).await?;
                }
            }
            anyhow::Ok(())
        });
    }
    drop(times);
    let mut sender = Client::connect(target).await?;
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / PICKUP_RATE);
    tokio::time::sleep(SETTLING).await;
    let started = Instant::now();
    while started.elapsed() < time {
        ticks.tick().await;
        let sent_ms = epoch.elapsed().as_secs_f64() * 1e3;
        let body = format!(
            r#"{{"job_type":"bench.pickup","queue":"{queue}","payload":{{"sent_ms":{sent_ms}}}}}"#
        );
        sender.post("/v1/jobs", body).await?;
    }
    stop.store(true, Ordering::Relaxed);
    finish(running).await?;
    let mut all = Vec::new();
    while let Some(it) = picked.recv().await {
        all.push(it);
    }
    all.sort_by(f64::total_cmp);
    let at = |share: f64| all.get((all.len() as f64 * share) as usize).copied();
    Ok((at(0.5).context("nothing was picked up")?, at(0.99).context("nothing was picked up")?))
}

/// Parks `polls` polls on an empty queue, runs `while_parked`, and ends them.
pub async fn parked<T>(
    target: &Target,
    queue: &str,
    polls: usize,
    while_parked: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    let mut running = JoinSet::new();
    for worker in 0..polls {
        let mut client = Client::connect(target).await?;
        let queue = queue.to_owned();
        running.spawn(async move {
            // The polls outlive the measurement, and end with their connections.
            client.poll(&queue, worker, 1, 30).await.map(|_| ())
        });
    }
    tokio::time::sleep(SETTLING).await;
    let measured = while_parked.await;
    running.abort_all();
    measured
}

/// C1: rows per second that PostgreSQL itself commits one by one, from `clients` connections.
pub async fn commits(database_url: &str, clients: usize, time: Duration) -> anyhow::Result<f64> {
    let options: PgConnectOptions = database_url.parse()?;
    let mut conn = options.connect().await?;
    conn.execute(sqlx::raw_sql(
        "create table if not exists bench_commits (id uuid primary key, body text not null)",
    ))
    .await?;
    let done = Arc::new(AtomicU64::new(0));
    let mut connections = Vec::with_capacity(clients);
    for _ in 0..clients {
        connections.push(options.connect().await?);
    }
    let started = Instant::now();
    let mut running = JoinSet::new();
    for mut conn in connections {
        let done = Arc::clone(&done);
        running.spawn(async move {
            let body = client::job("bench", SMALL_PAYLOAD_BYTES);
            while started.elapsed() < time {
                sqlx::query("insert into bench_commits (id, body) values ($1, $2)")
                    .bind(uuid::Uuid::now_v7())
                    .bind(&body)
                    .execute(&mut conn)
                    .await?;
                done.fetch_add(1, Ordering::Relaxed);
            }
            anyhow::Ok(())
        });
    }
    finish(running).await?;
    let rate = done.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64();
    conn.execute(sqlx::raw_sql("drop table bench_commits")).await?;
    Ok(rate)
}
