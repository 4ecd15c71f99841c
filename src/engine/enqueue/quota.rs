//! How many jobs of a project may wait or run, and how many queues it may have. Each node caches
//! the counts for a moment and adds what it stores itself, so the check costs an enqueue nothing.
//! What other nodes store within that moment may exceed the quota.

use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use super::NewJob;
use crate::{domain::plan::Tenant, engine::Engine, error::Error, ids::ProjectId, store};

/// How long a count is trusted.
const COUNT_KEEP: Duration = Duration::from_secs(1);
/// A count that says "full" is read again no sooner.
const RECOUNT_PAUSE: Duration = Duration::from_millis(100);
/// Projects whose count one node caches.
const MAX_CACHED: usize = 20_000;

#[derive(Debug, Clone, Copy)]
struct Backlog {
    /// 0 if they are unlimited.
    jobs: i64,
    /// Whether the project has as many queues as its plan allows.
    has_all_queues: bool,
    counted_at: Instant,
}

#[derive(Debug, Default)]
pub struct Backlogs(Mutex<HashMap<ProjectId, Backlog>>);

impl Backlogs {
    /// What is known, and whether the caller is to count again: one does, while the others go by
    /// the old count.
    fn known(&self, project_id: ProjectId, keep: Duration) -> (Option<Backlog>, bool) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(backlog) = known.get_mut(&project_id) else { return (None, true) };
        let is_old = backlog.counted_at.elapsed() >= keep;
        if is_old {
            backlog.counted_at = Instant::now();
        }
        (Some(*backlog), is_old)
    }

    fn note(&self, project_id: ProjectId, backlog: Backlog) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MAX_CACHED {
            known.clear();
        }
        known.insert(project_id, backlog);
    }

    /// Adds to the count, if it stays within `max`.
    fn add(&self, project_id: ProjectId, jobs: i64, max: i64) -> bool {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(backlog) = known.get_mut(&project_id) else { return false };
        if backlog.jobs.saturating_add(jobs) > max {
            return false;
        }
        backlog.jobs += jobs;
        true
    }

    /// Takes back what was admitted and not stored.
    pub(super) fn refund(&self, project_id: ProjectId, jobs: usize) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(backlog) = known.get_mut(&project_id) {
            backlog.jobs -= i64::try_from(jobs).unwrap_or(i64::MAX);
        }
    }
}

/// What new jobs count: themselves, and the jobs that their ends enqueue, which are never refused
/// later.
pub(super) fn cost<'a>(jobs: impl Iterator<Item = &'a NewJob>) -> usize {
    jobs.map(|it| 1 + it.extras.as_ref().map_or(0, |it| it.callback_count)).sum()
}

/// Admits new jobs.
///
/// # Errors
/// [`Error::QuotaExceeded`] when the project would have too many jobs, or has as many queues as its
/// plan allows and would get another.
pub(super) async fn admit(
    engine: &Engine,
    tenant: Tenant,
    jobs: impl Iterator<Item = &NewJob> + Clone,
) -> Result<(), Error> {
    if known(engine, tenant).await?.has_all_queues {
        let names: HashSet<_> = jobs.clone().map(|it| it.queue.as_ref()).collect();
        let names: Vec<_> = names.into_iter().collect();
        check_queues(engine, tenant, &names).await?;
    }
    admit_count(engine, tenant, cost(jobs)).await
}

async fn known(engine: &Engine, tenant: Tenant) -> Result<Backlog, Error> {
    match engine.backlogs.known(tenant.project_id, COUNT_KEEP) {
        (Some(known), false) => Ok(known),
        // The old count serves until the database answers.
        (Some(known), true) => Ok(recount(engine, tenant).await.unwrap_or(known)),
        (None, _) => recount(engine, tenant).await,
    }
}

/// Admits this many new jobs, whatever their queues.
///
/// # Errors
/// [`Error::QuotaExceeded`] when the project would have too many jobs.
pub async fn admit_count(engine: &Engine, tenant: Tenant, count: usize) -> Result<(), Error> {
    let Tenant { project_id, limits } = tenant;
    let max = limits.waiting_jobs.unwrap_or(i64::MAX);
    let count = i64::try_from(count).unwrap_or(i64::MAX);
    known(engine, tenant).await?;
    if engine.backlogs.add(project_id, count, max) {
        return Ok(());
    }
    if engine.backlogs.known(project_id, RECOUNT_PAUSE).1 {
        recount(engine, tenant).await?;
        if engine.backlogs.add(project_id, count, max) {
            return Ok(());
        }
    }
    Err(Error::QuotaExceeded { what: "live jobs", max })
}

async fn recount(engine: &Engine, tenant: Tenant) -> Result<Backlog, Error> {
    let Tenant { project_id, limits } = tenant;
    let mut conn = engine.pools.read_for(project_id).await?;
    let jobs = match limits.waiting_jobs {
        Some(_) => store::counts::waiting(&mut conn, project_id).await?,
        None => 0,
    };
    let max = limits.max_queues();
    let queues = store::counts::count_queues(&mut conn, project_id, max).await?;
    let backlog = Backlog { jobs, has_all_queues: queues >= max, counted_at: Instant::now() };
    engine.backlogs.note(project_id, backlog);
    Ok(backlog)
}

/// Whether a job may be moved to this queue.
///
/// # Errors
/// [`Error::QuotaExceeded`] when the project has as many as its plan allows, and this is none of
/// them.
pub async fn admit_queue(engine: &Engine, tenant: Tenant, queue: &str) -> Result<(), Error> {
    let max = tenant.limits.max_queues();
    let mut conn = engine.pools.read_for(tenant.project_id).await?;
    let queues = store::counts::count_queues(&mut conn, tenant.project_id, max).await?;
    drop(conn);
    if queues >= max {
        check_queues(engine, tenant, &[queue]).await?;
    }
    Ok(())
}

/// A project that has as many queues as it may can use these only.
async fn check_queues(engine: &Engine, tenant: Tenant, names: &[&str]) -> Result<(), Error> {
    let Tenant { project_id, limits } = tenant;
    let mut conn = engine.pools.read_for(project_id).await?;
    let used = store::counts::used_queues(&mut conn, project_id, names).await?;
    if used.len() < names.len() {
        return Err(Error::QuotaExceeded { what: "queues", max: limits.max_queues() });
    }
    Ok(())
}

/// How many jobs of a project wait or run.
pub async fn waiting(engine: &Engine, project_id: ProjectId) -> Result<i64, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    Ok(store::counts::waiting(&mut conn, project_id).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_call_counts_again_while_the_others_go_by_the_old_count() {
        let (backlogs, project) = (Backlogs::default(), ProjectId(1));
        assert!(backlogs.known(project, COUNT_KEEP).1, "nothing is known");
        let backlog = Backlog { jobs: 5, has_all_queues: false, counted_at: Instant::now() };
        backlogs.note(project, backlog);
        assert!(!backlogs.known(project, COUNT_KEEP).1);
        let keeps = [Duration::ZERO, COUNT_KEEP, COUNT_KEEP];
        let counts_again = keeps.map(|keep| backlogs.known(project, keep).1);
        assert_eq!(counts_again, [true, false, false]);
    }

    #[test]
    fn what_was_admitted_and_not_stored_can_be_admitted_again() {
        const MAX: i64 = 10;
        let (backlogs, project) = (Backlogs::default(), ProjectId(1));
        let backlog = Backlog { jobs: MAX - 1, has_all_queues: false, counted_at: Instant::now() };
        backlogs.note(project, backlog);
        assert!(backlogs.add(project, 1, MAX));
        assert!(!backlogs.add(project, 1, MAX));
        backlogs.refund(project, 1);
        assert!(backlogs.add(project, 1, MAX));
    }
}
