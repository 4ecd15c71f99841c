//! How many jobs of a project may wait or run. Each node caches the count for a moment and adds
//! what it stores itself, so the check costs an enqueue nothing. Jobs that other nodes store within
//! that moment may exceed the quota.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use crate::{domain::plan::Tenant, engine::Engine, error::Error, ids::ProjectId, store};

/// How long a count is trusted.
const COUNT_KEEP: Duration = Duration::from_secs(1);
/// A count that says "full" is read again no sooner.
const RECOUNT_PAUSE: Duration = Duration::from_millis(100);
/// Projects whose count one node caches.
const MAX_CACHED: usize = 20_000;

#[derive(Debug, Clone, Copy)]
struct Backlog {
    jobs: i64,
    counted_at: Instant,
}

#[derive(Debug, Default)]
pub struct Backlogs(Mutex<HashMap<ProjectId, Backlog>>);

impl Backlogs {
    fn known(&self, project_id: ProjectId) -> Option<Backlog> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(&project_id).copied()
    }

    fn note(&self, project_id: ProjectId, jobs: i64) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MAX_CACHED {
            known.clear();
        }
        known.insert(project_id, Backlog { jobs, counted_at: Instant::now() });
    }

    /// Adds to the count, if it stays within `max`.
    fn add(&self, project_id: ProjectId, jobs: i64, max: i64) -> bool {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(backlog) = known.get_mut(&project_id) else { return false };
        if backlog.jobs + jobs > max {
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

/// Admits `jobs` new jobs.
///
/// # Errors
/// [`Error::QuotaExceeded`] when the project would have too many.
pub(super) async fn admit(engine: &Engine, tenant: Tenant, jobs: usize) -> Result<(), Error> {
    let Tenant { project_id, limits } = tenant;
    let Some(max) = limits.waiting_jobs else { return Ok(()) };
    let jobs = i64::try_from(jobs).unwrap_or(i64::MAX);
    let known = engine.backlogs.known(project_id);
    let is_fresh = |keep| known.is_some_and(|it| it.counted_at.elapsed() < keep);
    if is_fresh(COUNT_KEEP) && engine.backlogs.add(project_id, jobs, max) {
        return Ok(());
    }
    if !is_fresh(RECOUNT_PAUSE) {
        let waiting = waiting(engine, project_id).await?;
        engine.backlogs.note(project_id, waiting);
    }
    if engine.backlogs.add(project_id, jobs, max) {
        return Ok(());
    }
    Err(Error::QuotaExceeded { what: "live jobs", max })
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
    fn what_was_admitted_and_not_stored_can_be_admitted_again() {
        const MAX: i64 = 10;
        let (backlogs, project) = (Backlogs::default(), ProjectId(1));
        backlogs.note(project, MAX - 1);
        assert!(backlogs.add(project, 1, MAX));
        assert!(!backlogs.add(project, 1, MAX));
        backlogs.refund(project, 1);
        assert!(backlogs.add(project, 1, MAX));
    }
}
