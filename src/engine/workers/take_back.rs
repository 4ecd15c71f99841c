//! Releasing leases for workers that do not: a person takes the jobs back.

use fencepost_domain::{
    actor::ChangedBy,
    error::Error,
    history,
    ids::{JobKey, ProjectId},
    job::OutcomeCause,
    lease::Fence,
};
use fencepost_store::{
    jobs::events::{self, NewEvent},
    settle::settle_failure::{self, Held},
    workers::holders::{self, SilentLease},
};
use sqlx::{Acquire, PgConnection};

use super::{Ending, MAX_ENDED, WorkerKey, end_leases};
use crate::{Engine, settle::failure};

/// Leases that one call ends.
pub const MAX_TAKE_BACK: u64 = 10_000;

/// Leases that a call has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReleasedLeases {
    /// Their number.
    pub number: u64,
    /// There may be more: it has ended [`MAX_TAKE_BACK`].
    pub has_more: bool,
}

impl ReleasedLeases {
    fn of(number: u64) -> Self {
        Self { number, has_more: number >= MAX_TAKE_BACK }
    }
}

/// Ends all leases of a worker, whatever it does, without a failure.
///
/// # Errors
/// [`Error::WorkerNotFound`] when no worker of this name is known and none holds a lease.
pub async fn of_worker(
    engine: &Engine,
    key: &WorkerKey,
    by: &ChangedBy,
) -> Result<ReleasedLeases, Error> {
    // Not as it is cached: a worker that only polls is recorded later.
    let is_known =
        engine.registry.has_seen(key) || engine.worker_lookups.submit(key.clone()).await?.is_some();
    let (cause, max) = (OutcomeCause::TakeBack, MAX_TAKE_BACK);
    let ending = Ending { cause, silence_seconds: None, max, by: Some(by) };
    let released = end_leases(engine, &engine.pools.reports, key, &ending).await?;
    if !is_known && released == 0 {
        return Err(Error::WorkerNotFound);
    }
    Ok(ReleasedLeases::of(released))
}

/// Ends the leases of a queue whose workers make no calls, without a failure.
///
/// # Errors
/// [`Error::Unavailable`] when the database does not answer; some leases may have ended.
pub async fn in_queue(
    engine: &Engine,
    project_id: ProjectId,
    queue: &str,
    by: &ChangedBy,
) -> Result<ReleasedLeases, Error> {
    let mut released = 0;
    loop {
        let (found, ended) = end_some(engine, project_id, queue, by).await?;
        released += ended;
        // Some may be locked: their workers are back.
        if found < MAX_ENDED || ended == 0 || released >= MAX_TAKE_BACK {
            return Ok(ReleasedLeases::of(released));
        }
    }
}

/// Returns how many it found, and how many it ended.
async fn end_some(
    engine: &Engine,
    project_id: ProjectId,
    queue: &str,
    by: &ChangedBy,
) -> sqlx::Result<(i64, u64)> {
    let mut conn = engine.pools.reports.acquire_for(project_id).await?;
    let silent = holders::silent_leases(&mut conn, project_id, queue, MAX_ENDED).await?;
    let fences: Vec<(JobKey, Fence)> = silent.iter().map(fence).collect();
    let mut tx = conn.begin().await?;
    let fences = fences.iter().map(|(key, fence)| (*key, fence));
    let held = settle_failure::lock_held(&mut tx, fences).await?;
    let cause = OutcomeCause::TakeBack;
    let decide = |it| failure::decide(it, &cause, cause.unreported_error(), None);
    let outcomes: Vec<_> = held.iter().map(decide).collect();
    let after = failure::write(&mut tx, &outcomes).await?;
    note(&mut tx, &held, by).await?;
    tx.commit().await?;
    drop(conn);
    failure::publish(&engine.notifier, &outcomes, &after);
    Ok((silent.len() as i64, outcomes.len() as u64))
}

/// Records who took the jobs of these leases back. A job that was to be cancelled has ended: its
/// last change is the cancel.
pub(super) async fn note(tx: &mut PgConnection, held: &[Held], by: &ChangedBy) -> sqlx::Result<()> {
    let noted = held.iter().filter(|it| !it.cancel_requested).map(|lease| {
        let key = JobKey { project_id: lease.project_id, id: lease.id };
        let event = NewEvent::change(key, history::TAKE_BACK, by);
        NewEvent { attempt: Some(lease.attempt), ..event }
    });
    events::insert(tx, &noted.collect::<Vec<_>>()).await?;
    Ok(())
}

fn fence(lease: &SilentLease) -> (JobKey, Fence) {
    let fence = Fence { lease_id: Some(lease.lease_id), ..Fence::default() };
    (lease.key, fence)
}
