//! Dead letters: recording them, pausing job types by the circuit breaker, and deleting them.

use fencepost_domain::{
    error::Error,
    fingerprint::fingerprint,
    ids::{JobId, JobKey, ProjectId},
    job::StoredState,
    operation::Filter,
};
use fencepost_signals::{telemetry, wakeups::BackgroundTask};
use fencepost_store::{
    jobs::dead_letters::{self, NewDeadLetter},
    queues,
    settle::settle_failure::{AfterOutcome, OutcomeToWrite},
};
use metrics::counter;
use sqlx::{Acquire, PgConnection};

use super::control;
use crate::Engine;

/// Records the dead letters among ended attempts, in their transaction, and opens the circuit
/// breaker of their types and of those whose workers are lost.
pub(crate) async fn write(
    tx: &mut PgConnection,
    ends: &[OutcomeToWrite],
    after: &[AfterOutcome],
) -> sqlx::Result<()> {
    let end_of = |it: &AfterOutcome| ends.iter().find(|end| end.key == it.job.key());
    let is_dead = |it: &AfterOutcome| it.job.state == StoredState::DeadLetter;
    let is_lost_again = |it: &AfterOutcome| {
        end_of(it).and_then(|end| end.losses).is_some_and(|losses| losses.is_in_streak)
    };
    let in_streak: Vec<_> =
        after.iter().filter(|it| is_dead(it) || is_lost_again(it)).map(|it| &it.job).collect();
    if in_streak.is_empty() {
        return Ok(());
    }
    let braked = dead_letters::brake(tx, &in_streak).await?;
    for (project_id, queue) in &braked {
        queues::lock_settings(tx, *project_id, queue).await?;
        queues::keep_paused_types(tx, *project_id, queue).await?;
    }
    counter!(telemetry::BRAKES).increment(braked.len() as u64);
    let dead = after.iter().filter(|it| is_dead(it));
    let dead: Vec<_> = dead.filter_map(|it| Some(dead_letter(end_of(it)?, it))).collect();
    if dead.is_empty() {
        return Ok(());
    }
    dead_letters::insert(tx, &dead).await
}

fn dead_letter(end: &OutcomeToWrite, after: &AfterOutcome) -> NewDeadLetter {
    let job_type = after.job.job_type.clone();
    // Without an error type from the worker, the outcome is the error type.
    let error_type = end.error.kind.clone().unwrap_or_else(|| end.outcome.as_str().to_owned());
    let message = end.error.message.clone();
    NewDeadLetter {
        key: end.key,
        fingerprint: fingerprint(&job_type, Some(&error_type), message.as_deref()),
        queue: after.job.queue.clone(),
        job_type,
        error_type: Some(error_type),
        message,
    }
}

/// Deletes a dead letter with everything that belongs to it.
///
/// # Errors
/// [`Error::JobNotFound`]. [`Error::InvalidState`] when it is not a dead letter.
pub async fn delete(engine: &Engine, key: JobKey) -> Result<(), Error> {
    let mut conn = engine.pools.read_for(key.project_id).await?;
    let mut tx = conn.begin().await?;
    let deleted = async {
        let seen = control::lock(&mut tx, key).await?;
        if seen.state != StoredState::DeadLetter {
            return Err(control::refused(&seen));
        }
        delete_in(&mut tx, key.project_id, &[key.id]).await
    };
    let deleted = deleted.await;
    control::finish(tx, deleted).await?;
    engine.notifier.wake.ask(BackgroundTask::Groups);
    Ok(())
}

/// Deletes those of these jobs that are dead letters, and returns how many.
pub(crate) async fn delete_in(
    tx: &mut PgConnection,
    project_id: ProjectId,
    jobs: &[JobId],
) -> Result<i64, Error> {
    let deleted = dead_letters::delete(tx, project_id, jobs).await?;
    dead_letters::remove(tx, project_id, &deleted).await?;
    Ok(deleted.len() as i64)
}

/// The newest dead letters of a project, or of one queue.
pub async fn newest(
    engine: &Engine,
    project_id: ProjectId,
    queue: Option<String>,
    limit: i64,
) -> Result<Vec<JobId>, Error> {
    let filter = Filter { queue, ..Filter::default() };
    let mut conn = engine.pools.read_for(project_id).await?;
    let rows = dead_letters::page(&mut conn, project_id, &filter, None, limit).await?;
    Ok(rows.into_iter().filter(|it| it.is_match).map(|it| it.job_id).collect())
}
