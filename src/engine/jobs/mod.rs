//! Jobs, for the native API and all adapters: reading them here; control, replays, dead letters and
//! workflows in the modules below.

pub mod control;
pub mod dead_letters;
pub mod definitions;
pub mod explain;
pub mod pauses;
pub mod replay;
pub mod wait;
pub mod workflows;

use fencepost_domain::{
    error::Error,
    ids::{JobId, JobKey, ProjectId, WorkflowId},
};
use fencepost_store as store;

use super::Engine;

pub use fencepost_store::jobs::{
    AttemptRow, Filter, JobRow, Order, Payloads, Place,
    logs::{LogPlace, LogRow},
};

/// One job, live or ended.
///
/// # Errors
/// [`Error::JobNotFound`].
pub async fn find(engine: &Engine, key: JobKey) -> Result<JobRow, Error> {
    let mut conn = engine.pools.read_for(key.project_id).await?;
    let row = store::jobs::find(&mut conn, key.project_id, key.id).await?;
    row.ok_or(Error::JobNotFound)
}

/// One job with its newest attempts that did not succeed, oldest first.
///
/// # Errors
/// [`Error::JobNotFound`].
pub async fn find_with_attempts(
    engine: &Engine,
    key: JobKey,
) -> Result<(JobRow, Vec<AttemptRow>), Error> {
    let mut conn = engine.pools.read_for(key.project_id).await?;
    let row = store::jobs::find(&mut conn, key.project_id, key.id).await?;
    let row = row.ok_or(Error::JobNotFound)?;
    let attempts = store::jobs::attempts(&mut conn, key.project_id, key.id).await?;
    Ok((row, attempts))
}

/// Finds these jobs, in no order. Missing ones are left out.
pub async fn find_all(
    engine: &Engine,
    project_id: ProjectId,
    ids: &[JobId],
) -> Result<Vec<JobRow>, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    Ok(store::jobs::find_all(&mut conn, project_id, ids, Payloads::Shown).await?)
}

/// Finds these jobs, in no order, without payloads and results; and their past
/// attempts that did not succeed, oldest first, without stack traces. At most `per_job` of each are
/// returned, and the newest [`MAX_SHOWN_ATTEMPTS`](fencepost_domain::limits::MAX_SHOWN_ATTEMPTS) of
/// all.
pub async fn find_all_with_attempts(
    engine: &Engine,
    project_id: ProjectId,
    ids: &[JobId],
    per_job: i64,
) -> Result<(Vec<JobRow>, Vec<(JobId, AttemptRow)>), Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let rows = store::jobs::find_all(&mut conn, project_id, ids, Payloads::LeftOut).await?;
    let attempts = store::jobs::attempts_of_all(&mut conn, project_id, ids, per_job).await?;
    Ok((rows, attempts))
}

/// The newest jobs, and, if there may be more, the id below which the rest are.
pub async fn page(
    engine: &Engine,
    project_id: ProjectId,
    filter: &Filter,
    limit: u32,
    payloads: Payloads,
) -> Result<(Vec<JobRow>, Option<JobId>), Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let place = Place { order: Order::Newest, after: None, jobs: limit };
    Ok(store::jobs::page(&mut conn, project_id, filter, place, payloads).await?)
}

/// The job with this key in the latest run of a workflow.
///
/// # Errors
/// [`Error::WorkflowNotFound`], [`Error::JobNotFound`].
pub async fn find_in_workflow(
    engine: &Engine,
    project_id: ProjectId,
    workflow_id: WorkflowId,
    workflow_key: &str,
) -> Result<JobId, Error> {
    let (_, jobs) = self::workflows::find_latest(engine, project_id, workflow_id).await?;
    let job = jobs.into_iter().find(|it| it.key == workflow_key);
    Ok(job.ok_or(Error::JobNotFound)?.id)
}

/// The payload of a job's latest event of this type.
pub async fn last_event(engine: &Engine, key: JobKey, kind: &str) -> Result<Option<String>, Error> {
    let mut conn = engine.pools.read_for(key.project_id).await?;
    Ok(store::jobs::events::last_of_kind(&mut conn, key, kind).await?)
}

/// Log lines of a job after a position, optionally of one attempt.
pub async fn logs(
    engine: &Engine,
    key: JobKey,
    attempt: Option<i32>,
    after: &LogPlace,
    limit: i64,
) -> Result<Vec<LogRow>, Error> {
    let mut conn = engine.pools.read_for(key.project_id).await?;
    Ok(store::jobs::logs::page(&mut conn, key, attempt, after, limit).await?)
}
