//! What any node does for all: look what waits to be done, add up counts, forget what was kept long enough,
//! clear away dead rows.

pub mod cascade;
pub mod gauges;
pub mod promote;
pub mod reap;

use std::{sync::atomic::Ordering, time::Duration};

use metrics::counter;
use sqlx::Acquire;

use super::Engine;
use crate::{
    domain::limits::{DEFAULT_RETENTION_DAYS, FIRE_KEEP_DAYS, OPERATION_KEEP_DAYS},
    store::sweep::{
        self,
        counts::{self, MAX_COUNTED_ROWS},
        operations, probe,
        prune::{self, MAX_PRUNED_CHUNKS, MAX_PRUNED_JOBS, OldQueue},
        purge, schedules,
    },
    telemetry,
    wakeups::{BackgroundTask, Hint},
};

/// How often it is looked what waits to be done: what another node has left is begun within this.
pub const PROBE_PERIOD: Duration = Duration::from_millis(750);
/// A change of a queue is heard of so long: nodes whose look comes late hear of it too.
const CHANGE_KEEP_MS: i64 = 3_000;
/// Settled rows after which the hot tables are vacuumed.
const VACUUM_AFTER_ROWS: u64 = 20_000;

/// One look at what waits to be done, which the other loops then do.
///
/// # Errors
/// Only those of the store; the look can be repeated.
pub async fn probe(engine: &Engine) -> sqlx::Result<()> {
    let mut conn = engine.pools.background.acquire().await?;
    let seen = probe::probe(&mut conn, CHANGE_KEEP_MS).await?;
    drop(conn);
    let is_tick_near =
        seen.next_tick_ms.is_some_and(|it| it <= PROBE_PERIOD.as_secs_f64() * 1_000.0);
    let chores = [
        (seen.has_orphans, BackgroundTask::Cascade),
        (seen.has_outdated, BackgroundTask::Expire),
        (seen.has_deltas, BackgroundTask::MergeCounts),
        (seen.has_operations, BackgroundTask::Operations),
        (seen.has_unplanned, BackgroundTask::Plan),
        (is_tick_near, BackgroundTask::Fire),
    ];
    let wake = &engine.notifier.wake;
    for (_, chore) in chores.iter().filter(|(waits, _)| *waits) {
        wake.ask(*chore);
    }
    engine.breakers.learn(seen.braked.into_iter().collect());
    for (project_id, queue) in &seen.changed_queues {
        // Each node looks for itself: nobody else need be told.
        wake.hint_here(Hint::QueueChanged(*project_id, queue.as_str().into()));
    }
    Ok(())
}

/// Adds up what queues count. Answers whether there may be more.
pub async fn merge_counts(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let folded = counts::merge_counts(&mut conn).await?;
    Ok(folded == Some(MAX_COUNTED_ROWS))
}

/// Vacuums the hot tables once enough rows have left them. Answers whether it did.
pub async fn vacuum_if_due(engine: &Engine) -> sqlx::Result<bool> {
    if engine.settled.load(Ordering::Relaxed) < VACUUM_AFTER_ROWS {
        return Ok(false);
    }
    engine.settled.store(0, Ordering::Relaxed);
    let mut conn = engine.pools.background.acquire().await?;
    sweep::vacuum_hot_tables(&mut conn).await?;
    Ok(true)
}

/// Forgets what was kept long enough: answers for idempotency keys, workers that nobody hears of, ended
/// operations, ticks, rates and numbers. Answers whether there may be more.
pub async fn prune(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let rows = [
        sweep::prune_idempotency_keys(&mut conn).await?,
        sweep::prune_workers(&mut conn).await?,
        operations::prune(&mut conn, OPERATION_KEEP_DAYS).await?,
        schedules::prune_fires(&mut conn, FIRE_KEEP_DAYS).await?,
        prune::prune_rates(&mut conn).await?,
        prune::prune_stats(&mut conn).await?,
    ];
    Ok(rows.contains(&(sweep::MAX_SWEEP_ROWS as u64)))
}

/// Deletes some rows of a project that was deleted, and itself when none are left. Answers whether there is more.
pub async fn purge(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let mut tx = conn.begin().await?;
    let Some(project_id) = purge::deleted_project(&mut tx).await? else { return Ok(false) };
    let mut rows = 0;
    for table in purge::TENANT_TABLES {
        rows += purge::delete_rows(&mut tx, table, project_id).await?;
    }
    if rows == 0 {
        purge::delete_project(&mut tx, project_id).await?;
    }
    tx.commit().await?;
    Ok(true)
}

/// Forgets finished jobs that were kept as long as their queues say. Answers whether there may be more. A queue
/// that fails does not keep the others waiting.
pub async fn enforce_retention(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let old = prune::queues_with_old_jobs(&mut conn, DEFAULT_RETENTION_DAYS).await?;
    drop(conn);
    let (mut is_more, mut failure) = (false, None);
    for queue in &old {
        match retain_queue(engine, queue).await {
            Ok(is_full) => is_more |= is_full,
            Err(error) => failure = Some(error),
        }
    }
    failure.map_or(Ok(is_more), Err)
}

/// One batch of one queue. Answers whether it was full.
async fn retain_queue(engine: &Engine, queue: &OldQueue) -> sqlx::Result<bool> {
    // Given back between queues: other loops wait for it.
    let mut conn = engine.pools.background.acquire().await?;
    if prune::prune_logs(&mut conn, queue).await? == MAX_PRUNED_CHUNKS {
        return Ok(true);
    }
    let mut tx = conn.begin().await?;
    let pruned = prune::prune_jobs(&mut tx, queue).await?;
    if !pruned.workflows.is_empty() {
        prune::prune_workflows(&mut tx, queue.project_id, &pruned.workflows).await?;
    }
    tx.commit().await?;
    counter!(telemetry::JOBS_PRUNED).increment(pruned.jobs.unsigned_abs());
    Ok(pruned.jobs == MAX_PRUNED_JOBS)
}
