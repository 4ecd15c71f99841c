//! Heartbeats: each renews one lease.

use std::collections::HashMap;

use fencepost_domain::{
    error::Error,
    ids::{JobId, JobKey, ProjectId},
    lease::{self, Refusal},
};
use fencepost_signals::wakeups::BackgroundTask;
use fencepost_store::{
    self as store,
    connection::pools::{self, Pool},
};
use futures_util::future::try_join_all;

use super::{HeldJob, Settling, explain_left};
use crate::{Engine, group_commit::GroupCommit, settle};

pub use fencepost_store::settle::heartbeats::{Beat, Renewed, ShorterLease};

/// The answer to a worker's heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    Continue,
    /// Stop working and ack: the job was cancelled.
    Cancel,
}

impl Advice {
    fn of(renewed: &Renewed) -> Self {
        if renewed.cancel_requested { Self::Cancel } else { Self::Continue }
    }
}

/// The result for each lease of a worker: the advice and the lease's length in seconds, or none if
/// the lease is lost.
pub type Leases = Vec<(JobId, Option<(Advice, i32)>)>;

/// Renews many leases of one worker, in one statement if the group commit has room.
///
/// # Errors
/// [`Error::Overloaded`] and [`Error::Unavailable`]: some may be renewed all the same.
pub async fn heartbeat_all(engine: &Engine, beats: Vec<Beat>) -> Result<Leases, Error> {
    let renewals = beats.into_iter().map(async |beat| {
        let id = beat.key.id;
        Ok(match renew(engine, beat).await? {
            Settling::Done(it) => (id, Some((Advice::of(&it), it.lease_seconds))),
            Settling::Left(_) | Settling::NoJob => (id, None),
        })
    });
    try_join_all(renewals).await
}

/// Renews a lease, if its fence holds and it has not expired.
///
/// # Errors
/// [`Error::JobNotFound`], [`Error::InvalidState`], [`Error::WorkerMismatch`] or
/// [`Error::StaleLease`] when the lease is not this worker's any more: it should stop.
/// [`Error::JobLocked`] when another transaction holds the job: the lease is not renewed.
pub async fn heartbeat(engine: &Engine, beat: Beat) -> Result<Advice, Error> {
    let fence = beat.fence.clone();
    match renew(engine, beat).await? {
        Settling::Done(renewed) => Ok(Advice::of(&renewed)),
        Settling::NoJob => Err(Error::JobNotFound),
        Settling::Left(found) => {
            let refusal = lease::explain_heartbeat(&fence, &found.standing);
            Err(settle::refused(refusal, &found.standing))
        }
    }
}

/// Tries until the job is not held by another transaction.
async fn renew(engine: &Engine, beat: Beat) -> Result<Settling<Renewed>, Error> {
    let mut held = HeldJob::new();
    loop {
        match engine.beats.submit(beat.clone()).await {
            Ok(Settling::Left(found))
                if lease::explain_heartbeat(&beat.fence, &found.standing) == Refusal::LostRace => {}
            Err(Error::JobLocked) => {}
            renewed => return renewed,
        }
        held.wait().await?;
    }
}

/// Shortens leases that were just given, before their jobs are delivered.
pub async fn shorten(engine: &Engine, leases: &[ShorterLease]) -> Result<(), Error> {
    if leases.is_empty() {
        return Ok(());
    }
    let mut conn = engine.pools.reports.acquire().await?;
    store::settle::heartbeats::shorten(&mut conn, leases).await?;
    if leases.iter().any(|it| lease::ends_before_next_look(it.seconds)) {
        engine.notifier.wake.ask(BackgroundTask::Reap);
    }
    Ok(())
}

/// Assigns leases without a named worker to the worker that claims them. Returns those that were
/// assigned.
pub async fn adopt(
    engine: &Engine,
    project_id: ProjectId,
    worker_id: &str,
    jobs: &[JobId],
) -> Result<Vec<JobId>, Error> {
    if jobs.is_empty() {
        return Ok(Vec::new());
    }
    let mut conn = engine.pools.reports.acquire_for(project_id).await?;
    Ok(store::settle::heartbeats::adopt(&mut conn, project_id, worker_id, jobs).await?)
}

/// The group commit of heartbeats.
pub struct Beats {
    pub(crate) pool: Pool,
}

impl GroupCommit for Beats {
    type Item = Beat;
    type Answer = Settling<Renewed>;
    type Key = JobKey;
    type Connection = pools::Connection;

    const KIND: &'static str = "heartbeat";
    const MAX_ROWS: usize = 500;

    fn bytes(_: &Beat) -> usize {
        0
    }

    fn key(item: &Beat) -> JobKey {
        item.key
    }

    fn project(item: &Beat) -> ProjectId {
        item.key.project_id
    }

    fn is_same(one: &Beat, other: &Beat) -> bool {
        one == other
    }

    async fn connect(&self) -> sqlx::Result<Self::Connection> {
        self.pool.acquire().await
    }

    async fn flush(
        &self,
        conn: &mut Self::Connection,
        items: &[Beat],
        _: bool,
    ) -> sqlx::Result<Vec<Result<Self::Answer, Error>>> {
        let renewed = store::settle::heartbeats::renew(conn, items).await?;
        let done: HashMap<_, _> = renewed.into_iter().map(|it| (it.key, it)).collect();
        let left = items.iter().filter(|it| !done.contains_key(&it.key));
        let mut left = explain_left(conn, left.map(|it| (it.key, &it.fence))).await?;
        let mut answer = |it: &Beat| match done.get(&it.key) {
            Some(renewed) => Settling::Done(*renewed),
            None => left.remove(&it.key).unwrap_or(Settling::NoJob),
        };
        Ok(items.iter().map(|it| Ok(answer(it))).collect())
    }
}
