//! Cancelling waiting jobs, shared by all paths that end a job as cancelled.

use metrics::counter;
use sqlx::PgConnection;

use super::{Engine, notify::job_event};
use crate::{
    ids::{JobId, JobKey},
    store::{
        cascade,
        control::{self, CancelledJob},
    },
    telemetry,
    wakeups::BackgroundTask,
};

/// Cancels waiting jobs and marks their children for the cascade.
pub(super) async fn cancel_waiting(
    tx: &mut PgConnection,
    jobs: &[JobKey],
    only_outdated: bool,
    cancelled_by: Option<JobId>,
) -> sqlx::Result<Vec<CancelledJob>> {
    let gone = control::cancel_waiting(tx, jobs, only_outdated, cancelled_by).await?;
    let parents: Vec<_> = gone.iter().filter(|it| it.has_orphans).map(|it| it.key).collect();
    if !parents.is_empty() {
        cascade::mark_orphaned(tx, &parents).await?;
    }
    Ok(gone)
}

/// Counts and publishes cancelled jobs. Call it after the commit.
pub(super) fn publish_cancelled(engine: &Engine, gone: &[CancelledJob], kind: &str) {
    counter!(telemetry::JOBS_CANCELLED).increment(gone.len() as u64);
    engine.notifier.tally.cancelled(gone);
    if gone.iter().any(|it| it.has_orphans) {
        engine.notifier.wake.ask(BackgroundTask::Cascade);
    }
    engine.notifier.feed.tell(|| gone.iter().map(|it| job_event(it.key, kind)).collect());
}
