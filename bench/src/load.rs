//! The measurements: throughput and latency.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Context;
use serde::Deserialize;
use sqlx::{ConnectOptions, Executor, postgres::PgConnectOptions};
use tokio::{sync::Semaphore, task::JoinSet, time::timeout_at};

use super::{
    client::{self, Client, Polled, SMALL_PAYLOAD_BYTES, Target},
    delivery::Ledger,
};

/// Connections that enqueue only.
const ENQUEUERS: usize = 64;
/// Producers of a lifecycle. They stay at most as many jobs ahead as there are workers.
const PRODUCERS: usize = 32;
/// Workers of a lifecycle.
const WORKERS: usize = 64;
/// Concurrency keys of limited jobs.
const LIMITED_KEYS: usize = 8;
/// Groups of jobs that have one, and where groups take turns.
const GROUPS: usize = 10_000;
const TURN_GROUPS: usize = 1_000;
/// Running jobs that the limit of a queue allows: more than there are workers, so that the cost of
/// counting is measured and no worker waits.
const QUEUE_LIMIT: usize = 1_000;
/// Running jobs that the limit of a queue allows: fewer than there are workers, which wait for each
/// other's acks.
const SCARCE_LIMIT: usize = 8;
/// The capacity of a worker that takes many jobs at a time.
const LARGE_CAPACITY: usize = 10;
/// Jobs per second while the pickup is measured.
const PICKUP_RATE: u32 = 50;
/// Parked polls while the pickup is measured.
const PICKUP_WORKERS: usize = 64;

/// Time for the last of many polls to arrive at the server.
const SETTLING: Duration = Duration::from_secs(1);
/// Time for PostgreSQL sessions to report their earlier work: they do so every ten seconds.
pub const REPORTING: Duration = Duration::from_secs(11);
/// The wait of polls that expect a job at any moment, in seconds.
pub const BUSY_WAIT_SECONDS: u64 = 2;

/// What is measured, one job a request.
#[derive(Debug, Clone, Copy)]
pub enum Step {
    /// Producers alone.
    Enqueue,
    /// One job in, one job leased, one job done: three requests.
    Lifecycle,
    /// The same with two requests: the ack of a job polls for the next one.
    ShortLifecycle,
    /// A lifecycle whose jobs have one of [`LIMITED_KEYS`] concurrency keys.
    LimitedByKey,
    /// A lifecycle whose jobs have one of [`GROUPS`] groups.
    InGroups,
    /// The same with [`TURN_GROUPS`].
    InTurn,
    /// A lifecycle whose polls want up to [`LARGE_CAPACITY`] jobs.
    ManyAPoll,
}

/// What the queue of a measurement has.
#[derive(Debug, Clone, Copy)]
pub enum Setting {
    Limit(usize),
    /// Jobs of a group run one at a time.
    StrictOrder,
    /// A limit of the running jobs of each group, which is not met.
    GroupLimit,
    /// Rates of each group, which are not met.
    GroupRates,
    /// Groups take turns.
    Turns,
    /// The same with rates of each group, which are not met.
    RatedTurns,
}

impl Step {
    fn capacity(self) -> usize {
        match self {
            Self::ManyAPoll => LARGE_CAPACITY,
            Self::Enqueue
            | Self::Lifecycle
            | Self::ShortLifecycle
            | Self::LimitedByKey
            | Self::InGroups
            | Self::InTurn => 1,
        }
    }
}

/// The measurements of jobs one by one: name, step, and the setting of the queue if it has one.
pub const MEASUREMENTS: [(&str, Step, Option<Setting>); 13] = [
    ("enqueue", Step::Enqueue, None),
    ("lifecycle", Step::Lifecycle, None),
    ("acks-that-poll", Step::ShortLifecycle, None),
    ("limited-by-key", Step::LimitedByKey, None),
    ("limited-by-queue", Step::Lifecycle, Some(Setting::Limit(QUEUE_LIMIT))),
    ("scarce-slots", Step::Lifecycle, Some(Setting::Limit(SCARCE_LIMIT))),
    ("scarce-slots-capacity-10", Step::ManyAPoll, Some(Setting::Limit(SCARCE_LIMIT))),
    ("groups", Step::InGroups, None),
    ("strict-groups", Step::InGroups, Some(Setting::StrictOrder)),
    ("limited-groups", Step::InGroups, Some(Setting::GroupLimit)),
    ("rated-groups", Step::InGroups, Some(Setting::GroupRates)),
    ("groups-in-turn", Step::InTurn, Some(Setting::Turns)),
    ("rated-groups-in-turn", Step::InTurn, Some(Setting::RatedTurns)),
];

/// The answer to an ack that polls.
#[derive(Debug, Deserialize)]
struct Acked {
    poll: Polled,
}

/// What the payload of a job says whose pickup is measured.
#[derive(Debug, Deserialize)]
struct Sent {
    sent_ms: f64,
}

/// What the connections of one measurement share.
struct Run {
    /// Nodes of one server: the connections are spread over them.
    targets: Vec<Target>,
    step: Step,
    queue: String,
    /// Jobs that may be under way.
    room: Semaphore,
    done: AtomicU64,
    until: Instant,
}

impl Run {
    fn has_ended(&self) -> bool {
        Instant::now() >= self.until
    }

    async fn connect(&self, number: usize) -> anyhow::Result<Client> {
        Client::connect(&self.targets[number % self.targets.len()]).await
    }

    async fn produce(&self, number: usize) -> anyhow::Result<Ledger> {
        let mut client = self.connect(number).await?;
        let mut ledger = Ledger::default();
        // Producers begin in different places, and use all groups in turn.
        let of = if matches!(self.step, Step::InTurn) { TURN_GROUPS } else { GROUPS };
        let mut groups = (number * of / PRODUCERS..).map(|it| it % of);
        while !self.has_ended() {
            if !matches!(self.step, Step::Enqueue) {
                let Ok(room) = timeout_at(self.until.into(), self.room.acquire()).await else {
                    break;
                };
                room?.forget();
            }
            match self.step {
                Step::LimitedByKey => {
                    client.post_limited_job(&self.queue, number % LIMITED_KEYS).await?
                }
                Step::InGroups | Step::InTurn => {
                    let group = groups.next().unwrap_or_default();
                    client.post_job_of_group(&self.queue, group).await?
                }
                _ => client.post_job(&self.queue).await?,
            };
            ledger.stored += 1;
            if matches!(self.step, Step::Enqueue) {
                self.done.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(ledger)
    }

    async fn work(&self, number: usize) -> anyhow::Result<Ledger> {
        let mut client = self.connect(number).await?;
        let (mut ledger, mut held) = (Ledger::default(), Vec::new());
        let capacity = self.step.capacity();
        loop {
            let Some(job) = held.pop() else {
                if self.has_ended() {
                    return Ok(ledger);
                }
                held = client.poll(&self.queue, number, capacity, BUSY_WAIT_SECONDS).await?;
                continue;
            };
            match self.step {
                Step::ShortLifecycle if !self.has_ended() => {
                    let ack = client::ack_then_poll(&job, number, &self.queue, BUSY_WAIT_SECONDS);
                    let answer = client.post("/v1/workers/ack", ack).await?;
                    let Acked { poll } = serde_json::from_slice(&answer)?;
                    held = poll.jobs;
                }
                _ => drop(client.post("/v1/workers/ack", client::ack(&job, number)).await?),
            }
            ledger.ack(&job);
            self.done.fetch_add(1, Ordering::Relaxed);
            self.room.add_permits(1);
        }
    }
}

/// Measures a step for `time`; returns jobs per second, and what was delivered.
pub async fn rate(
    targets: &[Target],
    step: Step,
    queue: &str,
    time: Duration,
) -> anyhow::Result<(f64, Ledger)> {
    rate_of_part(targets, step, queue, time, 1).await
}

/// [`rate`] with one part of the clients, for a load that this many projects share.
pub async fn rate_of_part(
    targets: &[Target],
    step: Step,
    queue: &str,
    time: Duration,
    parts: usize,
) -> anyhow::Result<(f64, Ledger)> {
    let workers = WORKERS / parts;
    let run = Arc::new(Run {
        targets: targets.to_vec(),
        step,
        queue: queue.to_owned(),
        room: Semaphore::new(workers),
        done: AtomicU64::new(0),
        until: Instant::now() + time,
    });
    let (producers, workers) = match step {
        Step::Enqueue => (ENQUEUERS / parts, 0),
        _ => (PRODUCERS / parts, workers),
    };
    let mut running = JoinSet::new();
    for number in 0..producers {
        let run = Arc::clone(&run);
        running.spawn(async move { run.produce(number).await });
    }
    for number in 0..workers {
        let run = Arc::clone(&run);
        running.spawn(async move { run.work(number).await });
    }
    tokio::time::sleep_until(run.until.into()).await;
    let done = run.done.load(Ordering::Relaxed);
    let mut ledger = Ledger::default();
    while let Some(ended) = running.join_next().await {
        ledger.add(ended??);
    }
    Ok((done as f64 / time.as_secs_f64(), ledger))
}

/// Lifecycles per second.
pub async fn lifecycle(target: &Target, queue: &str, time: Duration) -> anyhow::Result<f64> {
    let targets = std::slice::from_ref(target);
    let (rate, _) = rate(targets, Step::Lifecycle, queue, time).await?;
    Ok(rate)
}

/// Gives a queue a setting.
pub async fn set(target: &Target, queue: &str, setting: Setting) -> anyhow::Result<()> {
    let mut client = Client::connect(target).await?;
    let rate = |seconds: i32| format!(r#"{{"count":100000,"per_seconds":{seconds}}}"#);
    let rates = format!("[{},{}]", rate(1), rate(60));
    let body = match setting {
        Setting::Limit(limit) => format!(r#"{{"max_concurrency":{limit}}}"#),
        Setting::StrictOrder => r#"{"groups":{"order":"strict"}}"#.to_owned(),
        Setting::GroupLimit => r#"{"groups":{"max_running":1000}}"#.to_owned(),
        Setting::Turns => r#"{"groups":{"fair":true}}"#.to_owned(),
        Setting::GroupRates => format!(r#"{{"groups":{{"rates":{rates}}}}}"#),
        Setting::RatedTurns => format!(r#"{{"groups":{{"fair":true,"rates":{rates}}}}}"#),
    };
    client.patch(&format!("/v1/queues/{queue}"), body).await?;
    Ok(())
}

pub async fn finish(mut running: JoinSet<anyhow::Result<()>>) -> anyhow::Result<()> {
    while let Some(ended) = running.join_next().await {
        ended??;
    }
    Ok(())
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
                    let Sent { sent_ms } = serde_json::from_str(job.payload.get())?;
                    let _ = times.send(got - sent_ms);
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
            // Until the connection ends with the measurement.
            loop {
                client.poll(&queue, worker, 1, 30).await?;
            }
        });
    }
    tokio::time::sleep(SETTLING).await;
    let measured = while_parked.await;
    if let Some(ended) = running.try_join_next() {
        let ended: anyhow::Result<()> = ended?;
        ended.context("a poll was not parked")?;
    }
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
