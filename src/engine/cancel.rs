//! Cancelling waiting jobs, shared by every path that ends a job without its worker.

use metrics::counter;
use sqlx::PgConnection;

use super::{Engine, notify::happening};
use crate::{
    ids::{JobId, JobKey},
    store::{
        cascade,
        control::{self, CalledOff},
    },
    telemetry,
    wakeups::Chore,
};

/// Cancels waiting jobs and marks their children for the cascade.
pub(super) async fn call_off(
    tx: &mut PgConnection,
    jobs: &[JobKey],
    only_outdated: bool,
    cancelled_by: Option<JobId>,
) -> sqlx::Result<Vec<CalledOff>> {
    let gone = control::call_off(tx, jobs, only_outdated, cancelled_by).await?;
    let parents: Vec<_> = gone.iter().filter(|it| it.has_orphans).map(|it| it.key).collect();
    if !parents.is_empty() {
        cascade::mark_orphaned(tx, &parents).await?;
    }
    Ok(gone)
}

/// Counts and publishes cancelled jobs. Call it after the commit.
pub(super) fn tell_called_off(engine: &Engine, gone: &[CalledOff], kind: &str) {
    counter!(telemetry::JOBS_CANCELLED).increment(gone.len() as u64);
    engine.tidings.tally.called_off(gone);
    if gone.iter().any(|it| it.has_orphans) {
        engine.tidings.wake.ask(Chore::Orphans);
    }
    engine.tidings.news.tell(|| gone.iter().map(|it| happening(it.key, kind)).collect());
}
