//! What users do to jobs: cancel, change, retry.

use chrono::{DateTime, TimeDelta, Utc};
use fencepost_domain::{
    actor::ChangedBy,
    constraint_key,
    error::{self, Error, JobStatus, QueueError, is_unique_violation},
    history,
    ids::{JobId, JobKey, ProjectId},
    job::{self, CancelDecision, StoredState},
    limits,
    operation::Kind,
    plan::Tenant,
};
use fencepost_signals::wakeups::BackgroundTask;
use fencepost_store::{
    groups,
    jobs::{
        control::{self, LockedJob},
        dead_letters,
        events::{self, NewEvent},
        requeue,
    },
    settle::{checkpoints, losses, settle_success::WaitingJob},
    workflows::{cascade, dependencies},
};
use sqlx::{Acquire, PgConnection, Postgres, Transaction};
use uuid::Uuid;

use crate::{
    Engine,
    cancel::{CancelReason, Cancelled, cancel_waiting},
    enqueue::{Start, quota, too_far_ahead},
    notify::job_event,
    queues,
};

pub use fencepost_store::jobs::control::{Change, ChangedLabels};

/// Descendants that are retried in one transaction, with their ancestor.
pub const MAX_RETRIED_AT_ONCE: usize = 500;
/// Their generations.
const MAX_GENERATIONS_AT_ONCE: usize = 100;
/// Tries to lock a job that is moving from one table to the other.
const MAX_LOCK_TRIES: u32 = 3;

/// Cancels a job: at once while it waits; otherwise its worker learns of it with its next
/// heartbeat. Cancelling a cancelled job changes nothing.
///
/// # Errors
/// [`Error::JobNotFound`]. [`Error::InvalidState`] when it has succeeded or is a dead letter.
pub async fn cancel(engine: &Engine, key: JobKey, by: &ChangedBy) -> Result<(), Error> {
    let mut conn = engine.pools.read_for(key.project_id).await?;
    let mut tx = conn.begin().await?;
    let cancelled = cancel_in(&mut tx, key, by).await;
    finish(tx, cancelled).await?.publish(engine);
    Ok(())
}

async fn cancel_in(tx: &mut PgConnection, key: JobKey, by: &ChangedBy) -> Result<Cancelled, Error> {
    let seen = lock(tx, key).await?;
    match job::cancel(seen.state) {
        CancelDecision::Done => Ok(Cancelled::default()),
        CancelDecision::TooLate => Err(refused(&seen)),
        CancelDecision::AskWorker => {
            if !seen.cancel_requested {
                control::request_cancel(tx, key).await?;
                let event = NewEvent::change(key, history::CANCEL_REQUESTED, by);
                record(tx, NewEvent { attempt: Some(seen.attempt), ..event }).await?;
            }
            Ok(Cancelled { asked: vec![key], ..Cancelled::default() })
        }
        CancelDecision::CancelNow => {
            let gone = cancel_waiting(tx, &[key], CancelReason::Asked).await?;
            record(tx, NewEvent::change(key, history::CANCELLED, by)).await?;
            Ok(Cancelled { gone, ..Cancelled::default() })
        }
    }
}

/// Ends a transaction before its outcome is answered. One that is dropped is rolled back a moment
/// later; until then claims would pass over the jobs that it has locked.
pub(crate) async fn finish<T>(
    tx: Transaction<'_, Postgres>,
    done: Result<T, Error>,
) -> Result<T, Error> {
    match &done {
        Ok(_) => tx.commit().await?,
        // The refusal stands, whatever becomes of its locks.
        Err(_) => {
            if let Err(error) = tx.rollback().await {
                tracing::warn!(error = error::chain(&error), "refused change was not rolled back");
            }
        }
    }
    done
}

/// Removes the unique key of a live job, so that another job may take it.
pub async fn forget_unique_key(engine: &Engine, key: JobKey) -> Result<(), Error> {
    let mut conn = engine.pools.read_for(key.project_id).await?;
    Ok(dependencies::forget_unique_key(&mut conn, key).await?)
}

/// Whether the job was cancelled, so that its worker should stop.
///
/// # Errors
/// [`Error::JobNotFound`].
pub async fn is_cancelled(engine: &Engine, key: JobKey) -> Result<bool, Error> {
    let mut conn = engine.pools.reports.acquire_for(key.project_id).await?;
    let found = control::find_cancelled(&mut conn, key).await?;
    found.ok_or(Error::JobNotFound)
}

/// Changes a waiting job.
///
/// # Errors
/// [`Error::JobNotFound`]. [`Error::InvalidState`] when it does not wait. [`Error::Invalid`] when
/// its `run_at` would lie too far ahead, or about the queue's name. [`QueueError::GroupOrdered`]
/// when it has a place in a group. [`Error::QuotaExceeded`] when the queue would be one too many.
pub async fn change(
    engine: &Engine,
    tenant: Tenant,
    id: JobId,
    (timing, what): (Timing, Change),
    by: &ChangedBy,
) -> Result<(), Error> {
    let key = JobKey { project_id: tenant.project_id, id };
    if what.tags.is_some() {
        engine.backlogs.full.admit_more(tenant.project_id)?;
    }
    if let Some(queue) = &what.queue {
        let named = std::iter::once(("", queue.as_str()));
        queues::check_new_names(engine, tenant.project_id, named).await?;
        quota::admit_queue(engine, tenant, queue).await?;
    }
    let mut conn = engine.pools.read_for(key.project_id).await?;
    let mut tx = conn.begin().await?;
    let changed = change_in(&mut tx, key, (timing, what), by).await;
    let changed = finish(tx, changed).await?;
    engine.notifier.waiting(std::iter::once(&changed));
    engine.notifier.feed.publish(|| vec![job_event(key, history::CHANGED)]);
    Ok(())
}

async fn change_in(
    tx: &mut PgConnection,
    key: JobKey,
    (timing, what): (Timing, Change),
    by: &ChangedBy,
) -> Result<WaitingJob, Error> {
    let seen = lock(tx, key).await?;
    let run_at = match timing {
        Timing::Keep => None,
        Timing::At(run_at) => Some(run_at),
        Timing::After(delay) => Some(seen.now + delay),
        Timing::Activation(Start::At(run_at)) => Some(run_at),
        Timing::Activation(Start::After(seconds)) => {
            Some(seen.now + TimeDelta::seconds(seconds.into()))
        }
    };
    if run_at.is_some_and(|it| it > seen.now + TimeDelta::seconds(limits::MAX_RUN_AT_SECONDS)) {
        return Err(too_far_ahead());
    }
    let is_late = run_at.zip(seen.expires_at).is_some_and(|(run_at, end)| run_at >= end);
    if let Some(field) = timing.field().filter(|_| is_late) {
        return Err(Error::invalid(field, "must be earlier than the job's expires_at"));
    }
    let mut what = Change { run_at, ..what };
    if let Some(sent) = what.labels.take()
        && seen.state.is_waiting()
    {
        what.labels = Some(constrained(tx, key, sent.labels).await?);
    }
    if let Some(queue) = &what.queue
        && groups::is_ordered(tx, key, queue).await?
    {
        return Err(QueueError::GroupOrdered.into());
    }
    let changed = control::change(tx, key, &what).await?.ok_or_else(|| refused(&seen))?;
    if what.max_losses.is_some() || what.tags.is_some() || what.labels.is_some() {
        control::change_body(tx, key, &what).await?;
    }
    let payload = recorded(&what);
    let event = NewEvent::change(key, history::CHANGED, by);
    record(tx, NewEvent { payload: Some(payload.to_string()), ..event }).await?;
    Ok(changed)
}

/// The labels with the constraint key that they lead to.
async fn constrained(
    tx: &mut PgConnection,
    key: JobKey,
    labels: Vec<String>,
) -> Result<ChangedLabels, Error> {
    let of = control::find_constraint(tx, key).await?.ok_or(Error::JobNotFound)?;
    let concurrency = of.concurrency_key.as_deref().zip(of.concurrency_limit);
    let constraint_key = constraint_key::of(&of.job_type, &labels, concurrency);
    Ok(ChangedLabels { labels, constraint_key })
}

/// What the history says of a change: the fields that were sent, but for the first three, which are
/// always there.
fn recorded(what: &Change) -> serde_json::Value {
    let mut payload = serde_json::json!({
        "queue": what.queue, "priority": what.rank.map(|it| -it), "run_at": what.run_at,
    });
    let labels = what.labels.as_ref().map(|it| serde_json::json!(it.labels));
    let more = [
        ("max_attempts", what.max_attempts.map(serde_json::Value::from)),
        ("timeout_seconds", what.timeout_seconds.map(serde_json::Value::from)),
        ("max_losses", what.max_losses.map(serde_json::Value::from)),
        ("tags", what.tags.clone()),
        ("labels", labels),
    ];
    for (field, value) in more {
        if let Some(value) = value {
            payload[field] = value;
        }
    }
    payload
}

/// When a changed job may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timing {
    /// As before.
    Keep,
    At(DateTime<Utc>),
    After(TimeDelta),
    /// A job of another protocol is activated. If it expires before, it is cancelled then.
    Activation(Start),
}

impl Timing {
    /// The field of a request that must name a time before the job expires.
    fn field(self) -> Option<&'static str> {
        match self {
            Self::At(_) => Some("run_at"),
            Self::After(_) => Some("delay_seconds"),
            Self::Keep | Self::Activation(_) => None,
        }
    }
}

/// Retries a dead letter or a cancelled job, and the descendants that were cancelled with it.
/// Failures count from 0 again; attempts continue.
///
/// # Errors
/// [`Error::JobNotFound`]. [`Error::InvalidState`] when it is neither. [`Error::ParentTerminal`]
/// when it would wait for a parent that failed or was cancelled. [`Error::UniqueConflict`] when a
/// live job has taken its unique key.
pub async fn retry(
    engine: &Engine,
    key: JobKey,
    checkpoint: OldCheckpoint,
    by: &ChangedBy,
) -> Result<(), Error> {
    retry_from(engine, key, Kind::JobsRetry, checkpoint, by).await
}

/// What becomes of the checkpoint of a job that is retried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OldCheckpoint {
    /// The next attempt gets it.
    Kept,
    Dropped,
}

/// Retries a dead letter, but no cancelled job; see [`retry`].
///
/// # Errors
/// The errors of [`retry`].
pub async fn retry_dead_letter(engine: &Engine, key: JobKey, by: &ChangedBy) -> Result<(), Error> {
    retry_from(engine, key, Kind::DeadLettersRetry, OldCheckpoint::Kept, by).await
}

async fn retry_from(
    engine: &Engine,
    key: JobKey,
    kind: Kind,
    checkpoint: OldCheckpoint,
    by: &ChangedBy,
) -> Result<(), Error> {
    engine.backlogs.full.admit_more(key.project_id)?;
    let mut conn = engine.pools.read_for(key.project_id).await?;
    let mut tx = conn.begin().await?;
    let requeued = async {
        let requeued = retry_in(&mut tx, key, kind, by).await?;
        if checkpoint == OldCheckpoint::Dropped {
            checkpoints::remove(&mut tx, key).await?;
        }
        if requeued.was_dead_letter {
            dead_letters::remove(&mut tx, key.project_id, &[key.id]).await?;
        }
        Ok(requeued)
    };
    let requeued = requeued.await;
    let requeued = finish(tx, requeued).await?;
    publish_retried(engine, key, &requeued.jobs);
    Ok(())
}

/// The jobs that a retry has made live again.
pub(crate) struct RetriedJobs {
    pub jobs: Vec<WaitingJob>,
    /// Whether the job must be deleted from the dead letters at the end of the transaction.
    pub was_dead_letter: bool,
}

/// Retries a job in one of the states that this operation handles. The caller owns the transaction
/// and does what [`RetriedJobs`] says.
pub(crate) async fn retry_in(
    tx: &mut PgConnection,
    key: JobKey,
    kind: Kind,
    by: &ChangedBy,
) -> Result<RetriedJobs, Error> {
    let seen = lock(tx, key).await?;
    if !kind.states().contains(&seen.state.public()) {
        return Err(refused(&seen));
    }
    let was_dead_letter = seen.state == StoredState::DeadLetter;
    let jobs = if was_dead_letter {
        requeue_dead_letter(tx, key, by).await?
    } else {
        let requeued = requeue(tx, key.project_id, &[key.id]).await.map_err(conflict)?;
        requeue_with_descendants(tx, key, requeued, by).await?
    };
    Ok(RetriedJobs { jobs, was_dead_letter })
}

async fn requeue_dead_letter(
    tx: &mut PgConnection,
    key: JobKey,
    by: &ChangedBy,
) -> Result<Vec<WaitingJob>, Error> {
    cascade::unmark_ended(tx, key.project_id, &[key.id]).await?;
    let requeued = requeue::requeue_dead_letter(tx, key).await.map_err(conflict)?;
    cascade::restore_expiries(tx, key.project_id, &[key.id]).await?;
    losses::reset(tx, key.project_id, &[key.id]).await?;
    requeue_with_descendants(tx, key, requeued.into_iter().collect(), by).await
}

/// Records the retry, and retries the descendants.
async fn requeue_with_descendants(
    tx: &mut PgConnection,
    key: JobKey,
    mut requeued: Vec<WaitingJob>,
    by: &ChangedBy,
) -> Result<Vec<WaitingJob>, Error> {
    if requeued.is_empty() {
        return Err(Error::ParentTerminal(Vec::new()));
    }
    record(tx, NewEvent::change(key, history::RETRIED, by)).await?;
    requeued.extend(requeue_descendants(tx, key).await?);
    Ok(requeued)
}

/// Notifies about a retried job and its descendants. Call it after the commit.
pub(crate) fn publish_retried(engine: &Engine, key: JobKey, requeued: &[WaitingJob]) {
    engine.notifier.waiting(requeued.iter());
    // A large family follows.
    engine.notifier.wake.ask(BackgroundTask::Revive);
    engine.notifier.feed.publish(|| {
        let others = requeued.iter().filter(|it| it.key() != key);
        let others = others.map(|it| job_event(it.key(), history::REVIVED));
        std::iter::once(job_event(key, history::RETRIED)).chain(others).collect()
    });
}

/// Retries descendants level by level. A job stays cancelled if another of its parents failed or
/// was cancelled. A family that is larger than [`MAX_RETRIED_AT_ONCE`], or has more generations
/// than [`MAX_GENERATIONS_AT_ONCE`], follows step by step in the background.
async fn requeue_descendants(
    tx: &mut PgConnection,
    root: JobKey,
) -> Result<Vec<WaitingJob>, Error> {
    let project_id = root.project_id;
    let (mut back, mut all) = (vec![root.id], Vec::new());
    for generation in 0.. {
        let room = MAX_RETRIED_AT_ONCE - all.len();
        let first = JobId(Uuid::nil());
        let children = cascade::cancelled_children(tx, project_id, &back, first, room + 1).await?;
        if children.is_empty() {
            break;
        }
        if children.len() > room || generation == MAX_GENERATIONS_AT_ONCE {
            cascade::mark_revived(tx, project_id, &back).await?;
            break;
        }
        let requeued = requeue_children(tx, root, &children).await.map_err(conflict)?;
        back = requeued.iter().map(|it| it.id).collect();
        all.extend(requeued);
    }
    Ok(all)
}

/// Retries cancelled jobs with this ancestor, if their parents permit it. The others are found
/// again as children of those of their parents that are retried later.
pub(crate) async fn requeue_children(
    tx: &mut PgConnection,
    ancestor: JobKey,
    children: &[JobId],
) -> sqlx::Result<Vec<WaitingJob>> {
    let project_id = ancestor.project_id;
    let requeued = requeue(tx, project_id, children).await?;
    let is_back = |id: &JobId| requeued.iter().any(|it| it.id == *id);
    let left: Vec<_> = children.iter().filter(|it| !is_back(it)).copied().collect();
    if !left.is_empty() {
        requeue::blame_another(tx, project_id, &left).await?;
    }
    let by = ChangedBy::parent(ancestor.id);
    let revived = |it: &WaitingJob| NewEvent::change(it.key(), history::REVIVED, &by);
    events::insert(tx, &requeued.iter().map(revived).collect::<Vec<_>>()).await?;
    Ok(requeued)
}

/// Several statements: the last sees the final state of what the others have locked.
async fn requeue(
    tx: &mut PgConnection,
    project_id: ProjectId,
    jobs: &[JobId],
) -> sqlx::Result<Vec<WaitingJob>> {
    cascade::lock_cancelled(tx, project_id, jobs).await?;
    requeue::lock_parents_of(tx, project_id, jobs).await?;
    let requeued = requeue::requeue_cancelled(tx, project_id, jobs).await?;
    let back: Vec<_> = requeued.iter().map(|it| it.id).collect();
    // Jobs that stay cancelled keep their mark: their children must follow.
    cascade::unmark_ended(tx, project_id, &back).await?;
    cascade::restore_expiries(tx, project_id, &back).await?;
    losses::reset(tx, project_id, &back).await?;
    Ok(requeued)
}

/// Locks a job, in whichever table it is.
pub(crate) async fn lock(tx: &mut PgConnection, key: JobKey) -> Result<LockedJob, Error> {
    for _ in 0..MAX_LOCK_TRIES {
        if let Some(seen) = control::lock_live(tx, key).await? {
            return Ok(seen);
        }
        if let Some(seen) = control::lock_ended(tx, key).await? {
            return Ok(seen);
        }
    }
    Err(Error::JobNotFound)
}

async fn record(tx: &mut PgConnection, event: NewEvent) -> Result<(), Error> {
    events::insert(tx, &[event]).await?;
    Ok(())
}

/// The refusal of a job whose state does not allow what was asked.
pub(super) fn refused(seen: &LockedJob) -> Error {
    Error::InvalidState(JobStatus { state: seen.state.public(), attempt: seen.attempt })
}

fn conflict(error: sqlx::Error) -> Error {
    if is_unique_violation(&error) {
        return Error::UniqueConflict { field: "unique.key".to_owned(), holder: None };
    }
    error.into()
}
