//! What workers report during an attempt: events and logs. Both are fenced.

use std::collections::{BTreeMap, HashSet};

use fencepost_domain::{
    error::Error,
    ids::{EventId, JobKey, ProjectId},
    lease, limits, logs,
    plan::Tenant,
    text,
};
use fencepost_signals::events_feed::JobEvent;
use fencepost_store::{
    self as store,
    jobs::{events, logs::LogTotals},
};
use sqlx::Acquire;

use crate::{Engine, enqueue::quota, settle};

pub use fencepost_store::jobs::{
    events::{NewEvent, ShownFence},
    logs::LogChunk,
};

/// Stores events of running attempts, all or none. Answers with their ids.
///
/// # Errors
/// [`Error::JobNotFound`], [`Error::InvalidState`], [`Error::WorkerMismatch`] or
/// [`Error::StaleLease`] when one of the attempts is not this worker's. [`Error::Invalid`] when a
/// job has too many events. [`Error::QuotaExceeded`] when the project has stored too many bytes.
pub async fn record_events(
    engine: &Engine,
    tenant: Tenant,
    shown: &[ShownFence],
    events: Vec<NewEvent>,
) -> Result<Vec<EventId>, Error> {
    let project_id = tenant.project_id;
    quota::require_room(engine, tenant).await?;
    let mut conn = engine.pools.read_for(project_id).await?;
    let mut tx = conn.begin().await?;
    let running = lock_running(&mut tx, project_id, shown).await?;
    if let Some((_, refused)) = shown.iter().enumerate().find(|it| !running.contains(&it.0)) {
        // The connection is returned first: `read_again` takes its own.
        drop(tx);
        drop(conn);
        return Err(refusal(engine, project_id, refused).await?);
    }
    let mut by_job: BTreeMap<_, (JobKey, i64)> = BTreeMap::new();
    for event in &events {
        by_job.entry(event.key.id).or_insert((event.key, 0)).1 += 1;
    }
    for (key, more) in by_job.into_values() {
        let max = limits::MAX_JOB_EVENTS;
        if store::jobs::events::count(&mut tx, key, max).await? + more > max {
            let message = format!("{} has {max} events, its limit", key.id);
            return Err(Error::invalid("events", message));
        }
    }
    let ids = events::insert(&mut tx, &events).await?;
    tx.commit().await?;
    drop(conn);
    engine.notifier.feed.publish(|| {
        let events = ids.iter().zip(events).map(|(id, event)| JobEvent {
            project_id,
            job_id: event.key.id,
            id: *id,
            kind: event.kind,
            attempt: event.attempt,
            worker_id: event.worker_id,
            payload: event.payload.filter(|it| it.len() <= limits::MAX_STREAMED_PAYLOAD_BYTES),
        });
        events.collect()
    });
    Ok(ids)
}

/// Locks the attempts that run against their end, and returns their numbers.
async fn lock_running(
    tx: &mut sqlx::PgConnection,
    project_id: ProjectId,
    shown: &[ShownFence],
) -> sqlx::Result<HashSet<usize>> {
    let running = events::lock_running(tx, project_id, shown).await?;
    Ok(running.into_iter().filter_map(|it| usize::try_from(it).ok()).collect())
}

async fn refusal(
    engine: &Engine,
    project_id: ProjectId,
    shown: &ShownFence,
) -> Result<Error, Error> {
    let key = JobKey { project_id, id: shown.job_id };
    let fence = shown.fence();
    let found = settle::read_again(engine, key, &fence).await?;
    Ok(settle::refused(lease::explain_report(&fence, &found.standing), &found.standing))
}

/// Chunks of one attempt.
#[derive(Debug, Clone)]
pub struct AttemptLogs {
    pub shown: ShownFence,
    /// The output. No two chunks have the same sequence and stream.
    pub chunks: Vec<LogChunk>,
}

/// The stored part of the chunks.
#[derive(Debug, Clone, Default)]
pub struct Logged {
    pub accepted: usize,
    pub duplicates: usize,
    /// Whether output was cut, now or before.
    pub is_truncated: bool,
    /// Attempts that do not run, by their numbers, with the reason: nothing of them is stored.
    pub refused: Vec<(usize, Error)>,
}

/// Stores chunks of running attempts. Chunks that were stored before are ignored; chunks beyond the
/// limit are cut, and so is all output of a project that has stored too many bytes.
///
/// # Errors
/// As [`record_events`], for the first attempt, when none of them runs.
pub async fn keep_logs(
    engine: &Engine,
    tenant: Tenant,
    attempts: &[AttemptLogs],
) -> Result<Logged, Error> {
    let project_id = tenant.project_id;
    let has_room = !quota::has_all_bytes(engine, tenant).await?;
    let mut conn = engine.pools.read_for(project_id).await?;
    let mut tx = conn.begin().await?;
    let shown: Vec<_> = attempts.iter().map(|it| it.shown.clone()).collect();
    let running = lock_running(&mut tx, project_id, &shown).await?;
    let of_running = attempts.iter().enumerate().filter(|it| running.contains(&it.0));
    let (mut logged, mut bytes) = (Logged::default(), 0);
    for (_, AttemptLogs { shown, chunks }) in of_running.clone() {
        let key = JobKey { project_id, id: shown.job_id };
        // The lock keeps totals and positions consistent.
        let mut totals = store::jobs::logs::lock_totals(&mut tx, key, shown.attempt).await?;
        let taken = store::jobs::logs::find_taken(&mut tx, key, shown.attempt, chunks).await?;
        let taken: HashSet<_> =
            taken.into_iter().filter_map(|it| usize::try_from(it).ok()).collect();
        logged.duplicates += taken.len();
        let new = chunks.iter().enumerate().filter(|(number, _)| !taken.contains(number));
        let kept: Vec<_> = new.filter_map(|(_, it)| keep(&mut totals, it, has_room)).collect();
        store::jobs::logs::insert(&mut tx, key, shown.attempt, &kept).await?;
        store::jobs::logs::set_totals(&mut tx, key, shown.attempt, totals).await?;
        logged.accepted += kept.len();
        bytes += kept.iter().map(|it| it.data.len() as i64).sum::<i64>();
        logged.is_truncated |= totals.is_truncated;
    }
    tx.commit().await?;
    // The connection is returned first: `read_again` takes its own.
    drop(conn);
    engine.usage.logged(project_id, bytes);
    of_running.for_each(|(_, it)| engine.notifier.feed.nudge(project_id, it.shown.job_id));
    for (number, shown) in shown.iter().enumerate().filter(|it| !running.contains(&it.0)) {
        // Also what prevents reading it: the other chunks are stored.
        let (Ok(reason) | Err(reason)) = refusal(engine, project_id, shown).await;
        logged.refused.push((number, reason));
    }
    match logged.refused.len() == attempts.len() {
        true => logged.refused.into_iter().next().map_or(Ok(Logged::default()), |it| Err(it.1)),
        false => Ok(logged),
    }
}

/// Cuts a chunk to the space that is left, and counts it.
fn keep(totals: &mut LogTotals, chunk: &LogChunk, has_room: bool) -> Option<LogChunk> {
    let bytes = chunk.data.len();
    let room = logs::room(totals.kept_bytes, totals.kept_chunks, bytes).filter(|_| has_room);
    totals.is_truncated |= room.is_none_or(|it| it < bytes);
    let data = text::cut(&chunk.data, room?).to_owned();
    totals.kept_bytes += data.len() as i64;
    totals.kept_chunks += 1;
    Some(LogChunk { data, ..chunk.clone() })
}
