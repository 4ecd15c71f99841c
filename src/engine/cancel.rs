//! Cancelling waiting jobs, shared by all paths that end a job as cancelled.

use fencepost_domain::{
    actor::{ActorKind, ChangedBy},
    history,
    ids::JobKey,
};
use fencepost_signals::{telemetry, wakeups::BackgroundTask};
use fencepost_store::{
    jobs::{
        control::{self, CancelledJob},
        events::{self, NewEvent},
    },
    workflows::cascade,
};
use metrics::counter;
use sqlx::PgConnection;

use super::{Engine, notify::job_event};

pub(super) use fencepost_store::jobs::control::CancelReason;

/// Cancels waiting jobs, and marks those with children for the cascade.
pub(super) async fn cancel_waiting(
    tx: &mut PgConnection,
    jobs: &[JobKey],
    reason: CancelReason,
) -> sqlx::Result<Vec<CancelledJob>> {
    let gone = control::cancel_waiting(tx, jobs, reason).await?;
    let parents: Vec<_> = gone.iter().filter(|it| it.has_children).map(|it| it.key).collect();
    if !parents.is_empty() {
        cascade::mark_ended(tx, &parents).await?;
    }
    Ok(gone)
}

/// Jobs that one request cancels.
#[derive(Debug, Default)]
pub(super) struct Cancelled {
    pub gone: Vec<CancelledJob>,
    /// Running ones, whose workers are asked to stop.
    pub asked: Vec<JobKey>,
}

impl Cancelled {
    /// Call it after the commit.
    pub fn publish(&self, engine: &Engine) {
        publish_cancelled(engine, &self.gone, history::CANCELLED);
        let asked = || self.asked.iter().map(|it| job_event(*it, history::CANCEL_REQUESTED));
        engine.notifier.feed.publish(|| asked().collect());
    }
}

/// Cancels jobs of one project: those that wait at once, the others by asking their workers. Those
/// that have ended stay as they are.
pub(super) async fn cancel_all(
    tx: &mut PgConnection,
    jobs: &[JobKey],
    by: &ChangedBy,
) -> sqlx::Result<Cancelled> {
    // First, or a job that stops running between the two statements would be missed by both.
    control::lock_all(tx, jobs).await?;
    let gone = cancel_waiting(tx, jobs, CancelReason::Asked).await?;
    let asked = control::request_cancels(tx, jobs).await?;
    let cancelled = gone.iter().map(|it| event(it.key, history::CANCELLED, by));
    let asked_for = asked.iter().map(|(key, attempt)| NewEvent {
        attempt: Some(*attempt),
        ..event(*key, history::CANCEL_REQUESTED, by)
    });
    events::insert(tx, &cancelled.chain(asked_for).collect::<Vec<_>>()).await?;
    Ok(Cancelled { gone, asked: asked.into_iter().map(|it| it.0).collect() })
}

/// The event of a cancelled job.
pub(super) fn event(key: JobKey, kind: &str, by: &ChangedBy) -> NewEvent {
    let operation = by.id.as_ref().filter(|_| by.kind == ActorKind::Operation);
    let payload = operation.map(|id| serde_json::json!({ "operation_id": id }).to_string());
    NewEvent { payload, ..NewEvent::change(key, kind, by) }
}

/// Counts and publishes cancelled jobs. Call it after the commit.
pub(super) fn publish_cancelled(engine: &Engine, gone: &[CancelledJob], kind: &str) {
    counter!(telemetry::JOBS_CANCELLED).increment(gone.len() as u64);
    engine.notifier.tally.cancelled(gone);
    if gone.iter().any(|it| it.has_follow_ups) {
        engine.notifier.wake.ask(BackgroundTask::Cascade);
    }
    if gone.iter().any(|it| it.has_noted_groups) {
        engine.notifier.wake.ask(BackgroundTask::Groups);
    }
    engine.notifier.notify_endpoints(gone.iter().map(|it| it.key.project_id));
    engine.notifier.feed.publish(|| gone.iter().map(|it| job_event(it.key, kind)).collect());
}
