//! Real clients against real nodes, while nodes, PostgreSQL and Redis are killed, frozen and cut
//! off as a seed says. In the end each job's history must fit the server's book.
//!
//! A seed fixes which faults come and what clients intend. How they meet is up to the machine: a
//! violation is kept as a history, and may need several runs of its seed to come again.

mod check;
mod clients;
mod history;
mod nemesis;
mod report;
mod stage;

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use clap::Parser;
use futures_util::{StreamExt, stream};
use sqlx::Connection;
use tokio::{runtime::Runtime, task::JoinSet, time::sleep};

use crate::{
    check::BookJob,
    clients::{Client, World},
    history::History,
    stage::Stage,
};

/// Producers and workers of each tenant.
const PRODUCERS: u64 = 3;
const WORKERS: u64 = 6;
/// How long it may take until all jobs have ended, once nothing is broken any more.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);
/// Jobs that are read at a time.
const READS: usize = 16;

/// Runs clients and faults against a private server, and checks what came of it.
#[derive(Debug, Parser)]
struct Args {
    /// Decides which faults come, and what clients intend [default: a random one]
    #[arg(long)]
    seed: Option<u64>,

    /// How long faults come, in seconds
    #[arg(long, default_value_t = 60)]
    seconds: u64,

    /// Runs of the same seed, one after the other
    #[arg(long, default_value_t = 1)]
    repeat: u64,

    /// Folder for histories and logs [default: a temporary one]
    #[arg(long)]
    dir: Option<PathBuf>,

    /// The server [default: `fencepost` beside this program]
    #[arg(long)]
    program: Option<PathBuf>,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    fencepost::tls::install();
    let seed = args.seed.unwrap_or_else(|| u64::from(rand::random::<u32>()));
    // What the main thread has started ends with it: it does not change.
    let runtime = Runtime::new()?;
    for number in 0..args.repeat {
        runtime.block_on(run(&args, seed, number))?;
    }
    Ok(())
}

async fn run(args: &Args, seed: u64, number: u64) -> anyhow::Result<()> {
    let temporary = std::env::temp_dir().join(format!("fencepost-chaos-{}", std::process::id()));
    let dir = args.dir.clone().unwrap_or(temporary).join(format!("seed-{seed}-{number}"));
    std::fs::create_dir_all(&dir)?;
    let beside = std::env::current_exe()?.with_file_name("fencepost");
    let mut stage = Stage::start(&dir, args.program.clone().unwrap_or(beside)).await?;
    let world = Arc::new(World {
        history: History::new(&dir.join("history.jsonl"))?,
        urls: stage.urls(),
        tenants: stage.tenants.clone(),
        client: reqwest::Client::new(),
        is_healing: AtomicBool::new(false),
        has_ended: AtomicBool::new(false),
    });
    let (mut producers, mut workers) = (JoinSet::new(), JoinSet::new());
    for tenant in 0..stage.tenants.len() {
        for number in 0..PRODUCERS {
            let seed = seed ^ ((tenant as u64) << 32) ^ (number << 40);
            producers.spawn(Client::new(&world, tenant, seed).produce());
        }
        for number in 0..WORKERS {
            let seed = seed ^ ((tenant as u64) << 32) ^ (number << 48);
            let name = format!("worker-{tenant}-{number}");
            workers.spawn(Client::new(&world, tenant, seed).work(name));
        }
    }
    let during = Duration::from_secs(args.seconds);
    nemesis::harm(&mut stage, &world.history, seed, during).await?;
    let healed = Instant::now();
    world.is_healing.store(true, Ordering::Relaxed);
    while producers.join_next().await.is_some() {}
    let drained = drain(&stage, healed).await;
    world.has_ended.store(true, Ordering::Relaxed);
    while workers.join_next().await.is_some() {}
    let book = read_book(&world, &stage).await?;
    let events = world.history.end()?;
    let violations = check::violations(&events, &book);
    let is_whole = report::print(seed, args.seconds, &events, &book, &violations, &drained);
    ensure!(violations.is_empty(), "{} violations: see {}", violations.len(), dir.display());
    drained.context("jobs did not end")?;
    ensure!(args.seconds < report::MIN_SECONDS || is_whole, "the run was too easy");
    drop(stage);
    if args.dir.is_none() {
        std::fs::remove_dir_all(&dir)?;
        // It is empty now, but for what another run has kept in it.
        let _ = std::fs::remove_dir(dir.parent().unwrap_or(&dir));
    }
    Ok(())
}

/// Waits until every job has ended. Returns how long it took since nothing was broken any more.
async fn drain(stage: &Stage, healed: Instant) -> anyhow::Result<Duration> {
    let mut conn = stage.connect().await?;
    let sql = "select count(*) from jobs where completed_at is null";
    loop {
        let open: i64 = sqlx::query_scalar(sql).fetch_one(&mut conn).await?;
        if open == 0 {
            conn.close().await?;
            return Ok(healed.elapsed());
        }
        ensure!(healed.elapsed() < DRAIN_TIMEOUT, "{open} jobs are open after a minute");
        sleep(Duration::from_millis(50)).await;
    }
}

/// All jobs of all tenants, as the API shows them.
async fn read_book(world: &World, stage: &Stage) -> anyhow::Result<Vec<BookJob>> {
    let mut book = Vec::new();
    for tenant in &stage.tenants {
        let get = async |path: String| -> anyhow::Result<serde_json::Value> {
            let url = format!("{}{path}", world.urls[0]);
            let answer = world.client.get(url).bearer_auth(&tenant.key).send().await?;
            Ok(answer.error_for_status()?.json().await?)
        };
        let (mut ids, mut cursor) = (Vec::new(), String::new());
        loop {
            let page = get(format!("/v1/jobs?limit=100{cursor}")).await?;
            let jobs = page["jobs"].as_array().cloned().unwrap_or_default();
            ids.extend(jobs.iter().filter_map(|it| it["id"].as_str().map(str::to_owned)));
            match page["next_cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => break,
            }
        }
        let read =
            stream::iter(ids).map(|id| get(format!("/v1/jobs/{id}"))).buffer_unordered(READS);
        let read: Vec<_> = read.collect().await;
        for job in read {
            book.push(serde_json::from_value(job?)?);
        }
    }
    Ok(book)
}
