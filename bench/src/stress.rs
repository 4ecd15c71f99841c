//! The lifecycle (enqueue, poll and ack of one job) under what slows queues in databases: a deep
//! backlog, and a held snapshot.

use std::time::Duration;

use anyhow::ensure;
use sqlx::{ConnectOptions, Connection, Executor, postgres::PgConnectOptions};

use super::{bulk, client::Target, load};

/// How long a snapshot is held: for this many measurements, one after the other.
pub const HELD_WINDOWS: u32 = 6;
/// Jobs stored at a time while a queue is filled, to leave the server some capacity.
const FILL_JOBS: usize = 100_000;

/// Lifecycles per second beside a backlog.
#[derive(Debug, Clone, Copy)]
pub struct Beside {
    /// Before there is one.
    pub before: f64,
    /// In the queue that has it.
    pub same: f64,
    pub other: f64,
}

/// The cost of a backlog of this size.
pub async fn backlog(
    target: &Target,
    queue: &str,
    jobs: usize,
    time: Duration,
) -> anyhow::Result<Beside> {
    let lifecycle = async |queue: &str| load::lifecycle(target, queue, time).await;
    let (same, other) = (format!("{queue}-deep"), format!("{queue}-other"));
    let before = lifecycle(&other).await?;
    let mut left = jobs;
    while left > 0 {
        let some = left.min(FILL_JOBS);
        bulk::fill(target, &same, some).await?;
        left -= some;
    }
    Ok(Beside { before, same: lifecycle(&same).await?, other: lifecycle(&other).await? })
}

/// Lifecycles per second before a snapshot is held, and in each window while it is.
pub async fn held_snapshot(
    target: &Target,
    database_url: &str,
    queue: &str,
    time: Duration,
) -> anyhow::Result<(f64, Vec<f64>)> {
    let before = load::lifecycle(target, queue, time).await?;
    let options: PgConnectOptions = database_url.parse()?;
    let mut conn = options.connect().await?;
    conn.execute(sqlx::raw_sql("begin isolation level repeatable read")).await?;
    conn.execute(sqlx::raw_sql("select count(*) from projects")).await?;
    let mut held = Vec::new();
    for _ in 0..HELD_WINDOWS {
        held.push(load::lifecycle(target, queue, time).await?);
    }
    let xmin: Option<String> = sqlx::query_scalar(
        "select backend_xmin::text from pg_stat_activity where pid = pg_backend_pid()",
    )
    .fetch_one(&mut conn)
    .await?;
    ensure!(xmin.is_some(), "the snapshot was not held");
    conn.execute(sqlx::raw_sql("rollback")).await?;
    conn.close().await?;
    Ok((before, held))
}
