//! The bulk lifecycle of River: 100 jobs an enqueue from eight producers, workers at the same time,
//! handlers that do nothing. Prints jobs per second, as `peers.mjs` does.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use riverqueue::{
    BoxError, Client, Job, JobArgs, QueueConfig, WorkContext, WorkOutcome, Workers,
    migrate::PostgresMigrator, sqlx::postgres::PgPoolOptions,
};
use serde::{Deserialize, Serialize};

const BATCH_JOBS: usize = 100;
const PRODUCERS: usize = 8;
const CONNECTIONS: u32 = 26;
/// Jobs that run at a time.
const WORKERS: usize = 500;
const LOOK_PERIOD: Duration = Duration::from_millis(1);
const TEXT_BYTES: usize = 180;
/// A round that takes longer has lost a job.
const MAX_ROUND: Duration = Duration::from_secs(120);

#[derive(Clone, Debug, Deserialize, JobArgs, Serialize)]
#[river(kind = "noop")]
struct Noop {
    to: String,
    text: String,
}

/// Jobs whose handler has run: they are completed in batches a moment later.
static DONE: AtomicUsize = AtomicUsize::new(0);

async fn noop(_: WorkContext, _: Job<Noop>) -> Result<WorkOutcome, BoxError> {
    DONE.fetch_add(1, Ordering::Relaxed);
    Ok(WorkOutcome::Complete)
}

fn number(variable: &str, default: usize) -> usize {
    std::env::var(variable).ok().and_then(|it| it.parse().ok()).unwrap_or(default)
}

async fn round(client: &Client, jobs: usize) -> Result<f64, BoxError> {
    let before = DONE.load(Ordering::Relaxed);
    let started = Instant::now();
    let left = Arc::new(AtomicUsize::new(jobs / BATCH_JOBS));
    for _ in 0..PRODUCERS {
        let (client, left) = (client.clone(), Arc::clone(&left));
        tokio::spawn(async move {
            let take = |it: usize| it.checked_sub(1);
            while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
                let job = Noop { to: "ada@example.com".to_owned(), text: "x".repeat(TEXT_BYTES) };
                client.insert_many(vec![job; BATCH_JOBS]).await.expect("they are enqueued");
            }
        });
    }
    loop {
        let done = DONE.load(Ordering::Relaxed) - before;
        if done == jobs {
            break;
        }
        if started.elapsed() > MAX_ROUND {
            return Err(format!("only {done} of {jobs} jobs were done").into());
        }
        tokio::time::sleep(LOOK_PERIOD).await;
    }
    Ok(jobs as f64 / started.elapsed().as_secs_f64())
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let (jobs, rounds) = (number("PEER_JOBS", 60_000), number("PEER_ROUNDS", 5));
    let pool = PgPoolOptions::new().max_connections(CONNECTIONS);
    let pool = pool.connect(&std::env::var("PEER_DATABASE_URL")?).await?;
    PostgresMigrator::new(pool.clone()).migrate_up().await?;
    let mut workers = Workers::new();
    workers.add_fn(noop)?;
    let client = Client::builder(pool)
        .workers(workers)
        .fetch_cooldown(Duration::from_millis(1))
        .queue("default", QueueConfig::new(WORKERS))
        .build()?;
    let mut run = client.start()?;
    let mut rates = Vec::new();
    for _ in 0..rounds {
        rates.push(round(&client, jobs).await?);
    }
    run.stop().await?;
    rates.sort_by(f64::total_cmp);
    let (low, high) = (rates[0], rates[rounds - 1]);
    println!("River (Rust): {:.0} jobs/s ({low:.0} to {high:.0})", rates[rounds / 2]);
    Ok(())
}
