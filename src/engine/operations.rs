//! Bulk operations in the background: purging a queue, redriving and purging dead letters, and
//! cancelling, pausing, resuming, retrying and replaying listed jobs. A step and its progress are
//! one transaction, so a dead node leaves nothing half done, and another continues.

use std::time::Duration;

use fencepost_domain::{
    actor::ChangedBy,
    error::{self, Error},
    history,
    ids::{JobId, JobKey, OperationId, ProjectId},
    limits::MAX_RUNNING_OPERATIONS,
    operation::{
        Filter, JobFilter, Kind, MAX_FAILED_STEPS, SkipReason, Skipped, Which, pause_ms, step_jobs,
    },
    plan::Tenant,
};
use fencepost_signals::{telemetry, wakeups::BackgroundTask};
use fencepost_store::{
    self as store, TimePosition, groups,
    jobs::{self, MAX_COUNTED, events},
    operations::{self, DueOperation, MAX_EXAMINED_JOBS, Progress},
    settle::settle_success::WaitingJob,
    sweep,
};
use metrics::counter;
use sqlx::{Acquire, PgConnection};

use super::{
    Engine,
    cancel::{self, CancelReason, Cancelled, cancel_all, cancel_waiting},
    enqueue::{NewlyStored, quota},
    jobs::{
        control, dead_letters,
        pauses::{self, Pause},
        replay,
    },
};

pub use fencepost_store::operations::{NewOperation, OperationRow};

/// Pause after a failed step.
const FAILURE_PAUSE_SECONDS: i32 = 5;
/// Pause of an operation whose kind this version does not know: a newer node runs it.
const UNREADABLE_PAUSE_SECONDS: i32 = 60;
/// Pause of an operation whose project is suspended.
const SUSPENDED_PAUSE_SECONDS: i32 = 60;
/// Pause of a retry whose project is full.
const FULL_PAUSE_SECONDS: i32 = 30;
/// The pause when another node has locked what is due.
const LOCKED_ELSEWHERE_PAUSE: Duration = Duration::from_millis(50);

/// Starts an operation.
///
/// # Errors
/// [`Error::QuotaExceeded`] when [`MAX_RUNNING_OPERATIONS`] of the project are running, it would
/// replay more jobs than the project may have, or retry some while the project is full.
/// [`Error::Invalid`] when it would replay an unknown number of jobs.
pub async fn begin(
    engine: &Engine,
    tenant: Tenant,
    new: &NewOperation,
) -> Result<OperationRow, Error> {
    let project_id = tenant.project_id;
    let mut conn = engine.pools.read_for(project_id).await?;
    if let Some(there) = operations::find(&mut conn, project_id, new.id).await? {
        return Ok(there);
    }
    if is_retry(new.kind) {
        // It takes a connection of the same share.
        drop(conn);
        quota::require_room(engine, tenant).await?;
        conn = engine.pools.read_for(project_id).await?;
    }
    if operations::count_running(&mut conn, project_id).await? >= MAX_RUNNING_OPERATIONS {
        let what = "running operations";
        return Err(Error::QuotaExceeded { what, max: MAX_RUNNING_OPERATIONS });
    }
    let expected = new.expected;
    let max_jobs = match new.kind {
        Kind::JobsReplay => {
            let message = format!("must be sent, at most {MAX_COUNTED}: more jobs match");
            let count = expected.ok_or_else(|| Error::invalid("max", message))?;
            // It takes a connection of the same share.
            drop(conn);
            quota::admit_count(engine, tenant, usize::try_from(count).unwrap_or(0)).await?;
            conn = engine.pools.read_for(project_id).await?;
            expected
        }
        _ => new.max_jobs,
    };
    operations::insert(&mut conn, project_id, &NewOperation { max_jobs, ..new.clone() }).await?;
    let found = operations::find(&mut conn, project_id, new.id).await?;
    drop(conn);
    engine.notifier.wake.ask(BackgroundTask::Operations);
    found.ok_or(Error::OperationNotFound)
}

/// One operation.
///
/// # Errors
/// [`Error::OperationNotFound`].
pub async fn find(
    engine: &Engine,
    project_id: ProjectId,
    id: OperationId,
) -> Result<OperationRow, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    operations::find(&mut conn, project_id, id).await?.ok_or(Error::OperationNotFound)
}

/// Aborts an operation: what is done stays done. One that has ended stays as it is.
///
/// # Errors
/// [`Error::OperationNotFound`].
pub async fn abort(
    engine: &Engine,
    project_id: ProjectId,
    id: OperationId,
) -> Result<OperationRow, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    operations::abort(&mut conn, project_id, id).await?;
    operations::find(&mut conn, project_id, id).await?.ok_or(Error::OperationNotFound)
}

/// Runs one step of the operation that has been due longest. Returns how long to sleep; none: no
/// operation is running.
pub async fn pass(engine: &Engine) -> sqlx::Result<Option<Duration>> {
    let mut conn = engine.pools.background.acquire().await?;
    let mut tx = conn.begin().await?;
    let due = sweep::operations::lock_due(&mut tx).await?;
    let Some(due) = due else {
        tx.commit().await?;
        let wait = sweep::operations::next_step_ms(&mut conn).await?;
        let sleep = |wait_ms: f64| match wait_ms > 0.0 {
            true => Duration::from_secs_f64(wait_ms / 1_000.0),
            false => LOCKED_ELSEWHERE_PAUSE,
        };
        return Ok(wait.map(sleep));
    };
    let Some(what) = Work::read(&due) else {
        tx.rollback().await?;
        tracing::warn!(operation.id = %due.id, "operation kind unknown to this version, skipped");
        operations::postpone(&mut conn, due.project_id, due.id, UNREADABLE_PAUSE_SECONDS).await?;
        return Ok(Some(Duration::ZERO));
    };
    if !store::people::projects::suspended(&mut tx, &[due.project_id]).await?.is_empty() {
        tx.rollback().await?;
        operations::postpone(&mut conn, due.project_id, due.id, SUSPENDED_PAUSE_SECONDS).await?;
        return Ok(Some(Duration::ZERO));
    }
    if is_retry(what.kind) && engine.backlogs.full.contains(due.project_id) {
        tx.rollback().await?;
        operations::postpone(&mut conn, due.project_id, due.id, FULL_PAUSE_SECONDS).await?;
        return Ok(Some(Duration::ZERO));
    }
    match step(&mut tx, &due, &what).await {
        Ok(stepped) => {
            tx.commit().await?;
            drop(conn);
            publish(engine, &stepped);
        }
        Err(error) => {
            let failure = error::chain(&error);
            tracing::warn!(error = failure, operation.id = %due.id, "operation step failed");
            tx.rollback().await?;
            let (project_id, id, pause) = (due.project_id, due.id, FAILURE_PAUSE_SECONDS);
            // The database's own message is for the log only.
            let message = error.to_string();
            operations::record_failure(
                &mut conn,
                project_id,
                id,
                &message,
                MAX_FAILED_STEPS,
                pause,
            )
            .await?;
        }
    }
    Ok(Some(Duration::ZERO))
}

/// True if it makes jobs live again: each such job may leave more, and so does its next end.
fn is_retry(kind: Kind) -> bool {
    matches!(kind, Kind::JobsRetry | Kind::DeadLettersRetry)
}

/// The work of an operation, if this version knows its kind.
struct Work {
    kind: Kind,
    which: Which,
}

impl Work {
    fn read(due: &DueOperation) -> Option<Self> {
        let kind = serde_json::from_value(due.kind.as_str().into()).ok()?;
        let which = match kind {
            Kind::JobsCancel
            | Kind::JobsRetry
            | Kind::JobsReplay
            | Kind::JobsPause
            | Kind::JobsResume => serde_json::from_value(due.filter.clone()).map(Which::Jobs),
            _ => serde_json::from_value(due.filter.clone()).map(Which::Letters),
        };
        Some(Self { kind, which: which.ok()? })
    }
}

/// The result of a step, to notify about.
#[derive(Default)]
struct Stepped {
    done: u64,
    cancelled: Cancelled,
    requeued: Vec<(JobKey, Vec<WaitingJob>)>,
    replayed: NewlyStored,
    paused: Option<(Pause, Vec<WaitingJob>)>,
}

fn publish(engine: &Engine, stepped: &Stepped) {
    counter!(telemetry::OPERATION_JOBS).increment(stepped.done);
    stepped.cancelled.publish(engine);
    stepped.replayed.publish(engine);
    if let Some((pause, changed)) = &stepped.paused {
        pauses::publish(engine, changed, *pause);
    }
    for (key, requeued) in &stepped.requeued {
        control::publish_retried(engine, *key, requeued);
    }
}

async fn step(tx: &mut PgConnection, due: &DueOperation, what: &Work) -> Result<Stepped, Error> {
    let wanted = step_jobs(due.done, due.max_jobs, due.rate_per_second);
    let mut stepped = Stepped::default();
    let (kind, so_far) = (what.kind, &mut stepped);
    let (progress, is_through) = match &what.which {
        _ if wanted == 0 => (Progress::default(), true),
        Which::Jobs(filter) => step_jobs_listed(tx, due, (kind, filter), wanted, so_far).await?,
        Which::Letters(filter) if kind == Kind::QueuePurge => {
            purge_queue(tx, due, filter, wanted, so_far).await?
        }
        Which::Letters(filter) => {
            step_dead_letters(tx, due, (kind, filter), wanted, so_far).await?
        }
    };
    let pause_ms = (!is_through).then(|| pause_ms(progress.done, due.rate_per_second));
    let progress = Progress { pause_ms, ..progress };
    operations::advance(tx, due, &progress).await?;
    stepped.done = progress.done.unsigned_abs();
    Ok(stepped)
}

/// Cancels waiting jobs, in the order of their ids.
async fn purge_queue(
    tx: &mut PgConnection,
    due: &DueOperation,
    filter: &Filter,
    wanted: i64,
    stepped: &mut Stepped,
) -> Result<(Progress, bool), Error> {
    let DueOperation { project_id, created_at, .. } = due;
    let queue = filter.queue.as_deref().unwrap_or_default();
    let after = due.after_id.unwrap_or_default();
    let found =
        operations::waiting_jobs(tx, *project_id, queue, after, *created_at, wanted).await?;
    let keys: Vec<_> =
        found.jobs.iter().map(|id| JobKey { project_id: *project_id, id: *id }).collect();
    let gone = if keys.is_empty() {
        Vec::new()
    } else {
        cancel_waiting(tx, &keys, CancelReason::Asked).await?
    };
    let by = ChangedBy::operation(due.id);
    let noted = gone.iter().map(|it| cancel::event(it.key, history::CANCELLED, &by));
    events::insert(tx, &noted.collect::<Vec<_>>()).await?;
    let is_full = found.jobs.len() as i64 == wanted;
    let last = if is_full { found.jobs.last().map(|it| it.0) } else { found.last };
    let done = gone.len() as i64;
    stepped.cancelled.gone = gone;
    let progress = Progress {
        done,
        skipped: Skipped::of(SkipReason::InvalidState, keys.len() as i64 - done),
        after: last.map(|id| TimePosition { at: *created_at, id }),
        pause_ms: None,
    };
    // Dead letters stay, but nothing waits behind them any more.
    let unblocked = groups::unblock_stored_before(tx, *project_id, queue, *created_at).await?;
    let is_through = !is_full && found.examined < MAX_EXAMINED_JOBS;
    Ok((progress, is_through && unblocked < groups::MAX_UNBLOCKED))
}

/// Retries or deletes dead letters, oldest first.
async fn step_dead_letters(
    tx: &mut PgConnection,
    due: &DueOperation,
    (kind, filter): (Kind, &Filter),
    wanted: i64,
    stepped: &mut Stepped,
) -> Result<(Progress, bool), Error> {
    let DueOperation { project_id, created_at, .. } = due;
    let after = due.after_at.zip(due.after_id).map(|(at, id)| TimePosition { at, id });
    let found =
        store::jobs::dead_letters::next_batch(tx, *project_id, filter, after, *created_at, wanted)
            .await?;
    let matching: Vec<_> = found.iter().filter(|it| it.is_match).collect();
    let mut ids: Vec<_> = matching.iter().map(|it| it.job_id).collect();
    ids.sort();
    let (done, skipped) = match kind {
        Kind::DeadLettersPurge => {
            let deleted = dead_letters::delete_in(tx, *project_id, &ids).await?;
            (deleted, Skipped::of(SkipReason::InvalidState, ids.len() as i64 - deleted))
        }
        _ => requeue_all(tx, due, (kind, &ids), stepped).await?,
    };
    let is_full = matching.len() as i64 == wanted;
    let is_more = is_full || found.iter().any(|it| !it.is_match);
    let last = if is_full { matching.last().copied() } else { found.last() };
    let progress = Progress {
        done,
        skipped,
        after: last.map(|it| TimePosition { at: it.died_at, id: it.job_id.0 }),
        pause_ms: None,
    };
    Ok((progress, !is_more))
}

/// Retries jobs, each in a savepoint, in the order of their ids. Returns how many were retried, and
/// how many were not.
///
/// All live parents are locked first, by id, as in every transaction that locks several jobs.
async fn requeue_all(
    tx: &mut PgConnection,
    due: &DueOperation,
    (kind, ids): (Kind, &[JobId]),
    stepped: &mut Stepped,
) -> Result<(i64, Skipped), Error> {
    let (project_id, by) = (due.project_id, ChangedBy::operation(due.id));
    store::jobs::requeue::lock_parents_of(tx, project_id, ids).await?;
    let (mut struck, mut skipped) = (Vec::new(), Skipped::default());
    for id in ids {
        let key = JobKey { project_id, id: *id };
        let mut each = tx.begin().await?;
        match control::retry_in(&mut each, key, kind, &by).await {
            Ok(requeued) => {
                each.commit().await?;
                struck.extend(requeued.was_dead_letter.then_some(*id));
                stepped.requeued.push((key, requeued.jobs));
            }
            Err(error) => {
                skipped.add(skip_reason(error)?, 1);
                each.rollback().await?;
            }
        }
    }
    store::jobs::dead_letters::remove(tx, project_id, &struck).await?;
    Ok((stepped.requeued.len() as i64, skipped))
}

/// The reason why a job cannot be retried, unless it is a fault.
fn skip_reason(error: Error) -> Result<SkipReason, Error> {
    match error {
        Error::JobNotFound => Ok(SkipReason::JobNotFound),
        Error::InvalidState(_) => Ok(SkipReason::InvalidState),
        Error::ParentTerminal(_) => Ok(SkipReason::ParentTerminal),
        Error::UniqueConflict { .. } => Ok(SkipReason::UniqueConflict),
        error => Err(error),
    }
}

/// Cancels live jobs, pauses or resumes waiting ones, retries failed and cancelled ones, or replays
/// ended ones, among those stored before the operation began. In the order of their ids: a parent
/// is older than its children, and must be retried first.
async fn step_jobs_listed(
    tx: &mut PgConnection,
    due: &DueOperation,
    (kind, filter): (Kind, &JobFilter),
    wanted: i64,
    stepped: &mut Stepped,
) -> Result<(Progress, bool), Error> {
    let DueOperation { project_id, created_at, .. } = due;
    let listed = jobs::Filter::of(kind, filter, *created_at);
    let mut listed = listed.map_err(|message| Error::invalid("filter.q", message))?;
    let until = listed.created_before.map_or(*created_at, |it| it.min(*created_at));
    listed.created_before = Some(until);
    let found = jobs::walk(tx, *project_id, &listed, due.after_id.map(JobId), wanted).await?;
    let keys: Vec<_> =
        found.jobs.iter().map(|id| JobKey { project_id: *project_id, id: *id }).collect();
    let (done, skipped) = match (kind, Pause::of(kind)) {
        (_, Some(pause)) => {
            let by = ChangedBy::operation(due.id);
            let changed = pauses::set_all(tx, &keys, pause, &by).await?;
            let done = changed.len() as i64;
            stepped.paused = Some((pause, changed));
            (done, Skipped::of(SkipReason::InvalidState, keys.len() as i64 - done))
        }
        (Kind::JobsCancel, _) => {
            stepped.cancelled = cancel_all(tx, &keys, &ChangedBy::operation(due.id)).await?;
            let done = (stepped.cancelled.gone.len() + stepped.cancelled.asked.len()) as i64;
            (done, Skipped::of(SkipReason::InvalidState, keys.len() as i64 - done))
        }
        (Kind::JobsReplay, _) => {
            let by = ChangedBy::operation(due.id);
            let (replayed, skipped) = replay::replay_in(tx, *project_id, &found.jobs, &by).await?;
            stepped.replayed = replayed;
            (stepped.replayed.len() as i64, skipped)
        }
        _ => requeue_all(tx, due, (kind, &found.jobs), stepped).await?,
    };
    let is_full = found.jobs.len() as i64 == wanted;
    let last = if is_full { found.jobs.last().copied() } else { found.last };
    let progress = Progress {
        done,
        skipped,
        after: last.map(|id| TimePosition { at: *created_at, id: id.0 }),
        pause_ms: None,
    };
    Ok((progress, !is_full && found.is_through))
}
