//! Maintenance that any node does for all: probe for due work, delete rows past their retention,
//! vacuum.

pub mod byte_hours;
pub mod cascade;
pub mod completions;
pub mod counts;
pub mod dead_letter_age;
pub mod excess_workers;
pub mod gauges;
pub mod idle_batches;
pub mod known_projects;
pub mod promote;
pub mod reap;
pub mod retention;
pub mod revive;

use std::{sync::atomic::Ordering, time::Duration};

use fencepost_domain::{
    alarm::INCIDENT_KEEP_DAYS,
    limits::{EVENT_KEEP_HOURS, FIRE_KEEP_DAYS, OPERATION_KEEP_DAYS, USAGE_KEEP_DAYS},
};
use fencepost_signals::{
    telemetry,
    wakeups::{BackgroundTask, Hint},
};
use fencepost_store::sweep::{
    self, alarms, counts as stored, operations, probe, prune, purge, schedules, set_aside, usage,
    webhooks,
};
use metrics::counter;
use sqlx::{Acquire, PgConnection};

use super::Engine;

/// How often due work is probed for: the longest delay before another node continues it.
pub const PROBE_PERIOD: Duration = Duration::from_millis(750);
/// How long a change of a queue stays visible to the probe, so that late probes see it too.
const CHANGE_KEEP_MS: i64 = 3_000;
/// Settled rows after which the hot tables are vacuumed.
const VACUUM_AFTER_ROWS: u64 = 20_000;

/// Finds out which loops have work, and wakes them.
pub async fn probe(engine: &Engine) -> sqlx::Result<()> {
    let mut conn = engine.pools.background.acquire().await?;
    let seen = probe::probe(&mut conn, CHANGE_KEEP_MS).await?;
    drop(conn);
    let is_tick_near =
        seen.next_tick_ms.is_some_and(|it| it <= PROBE_PERIOD.as_secs_f64() * 1_000.0);
    let chores = [
        (seen.has_ends, BackgroundTask::Cascade),
        (seen.has_revived, BackgroundTask::Revive),
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
    engine.set_aside.learn(seen.has_set_aside);
    for project_id in seen.subscribed {
        engine.notifier.subscribed.add(project_id);
    }
    for changed in seen.changed_queues {
        if changed.has_breaker {
            engine.breakers.add(changed.project_id);
        }
        // Every node probes for itself: no need to notify the others.
        wake.hint_here(Hint::QueueChanged(changed.project_id, changed.name.into()));
    }
    Ok(())
}

/// Vacuums the hot tables once enough rows have left them. Returns whether it did.
pub async fn vacuum_if_due(engine: &Engine) -> sqlx::Result<bool> {
    if engine.settled.load(Ordering::Relaxed) < VACUUM_AFTER_ROWS {
        return Ok(false);
    }
    engine.settled.store(0, Ordering::Relaxed);
    let mut conn = engine.pools.vacuum.acquire().await?;
    conn.exempt();
    let vacuumed = tokio::select! {
        vacuumed = sweep::vacuum_hot_tables(&mut conn) => Some(vacuumed),
        () = engine.stopping.cancelled() => None,
    };
    match vacuumed {
        Some(vacuumed) => vacuumed.map(|()| true),
        None => {
            conn.abandon();
            Ok(false)
        }
    }
}

/// Deletes events that could not be sent, idempotency answers, old workers, ended operations,
/// fires, rates, statistics, keys of shared limits and attempt numbers of deleted jobs that are
/// past their retention, and adds old days of usage to their months. Returns whether there may be
/// more.
pub async fn prune(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let dropped = webhooks::drop_old_events(&mut conn, EVENT_KEEP_HOURS).await?;
    counter!(telemetry::EVENTS_DROPPED).increment(dropped);
    let rows = [
        sweep::prune_idempotency_keys(&mut conn).await?,
        sweep::workers::prune_workers(&mut conn).await?,
        operations::prune(&mut conn, OPERATION_KEEP_DAYS).await?,
        schedules::prune_fires(&mut conn, FIRE_KEEP_DAYS).await?,
        alarms::prune(&mut conn, INCIDENT_KEEP_DAYS, sweep::MAX_SWEEP_ROWS as i64).await?,
        prune::prune_rates(&mut conn).await?,
        prune::prune_stats(&mut conn).await?,
        prune::prune_numbers_under_limits(&mut conn).await?,
        prune::prune_shared_limit_keys(&mut conn).await?,
        prune::prune_deleted_jobs(&mut conn).await?,
        usage::fold_days(&mut conn, USAGE_KEEP_DAYS).await?,
        set_aside::prune(&mut conn).await?,
        sweep::completions::prune_batches(&mut conn).await?,
        dropped,
    ];
    Ok(rows.contains(&(sweep::MAX_SWEEP_ROWS as u64)))
}

/// Deletes some rows of a deleted project, and finally notes that they are gone. Returns whether
/// there is more.
pub async fn purge(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let mut tx = conn.begin().await?;
    let Some(project_id) = purge::deleted_project(&mut tx).await? else { return Ok(false) };
    let mut rows = 0;
    for table in purge::TENANT_TABLES {
        rows += purge::delete_rows(&mut tx, table, project_id).await?;
    }
    if rows == 0 {
        rows = purge::forget_invitees(&mut tx, project_id).await?;
    }
    if rows == 0 {
        purge::note_purged(&mut tx, project_id).await?;
    }
    tx.commit().await?;
    Ok(true)
}

/// Corrects the list and the groups of dead letters, and returns how many were wrong. Settlements
/// with dead letters wait meanwhile.
pub async fn relist_dead_letters(conn: &mut PgConnection) -> sqlx::Result<i64> {
    let mut tx = conn.begin().await?;
    stored::lock_dead_letters(&mut tx).await?;
    let letters = stored::relist_dead_letters(&mut tx).await?;
    stored::regroup_dead_letters(&mut tx).await?;
    tx.commit().await?;
    Ok(letters)
}
