//! Batches: making, sealing and reading them; `completions.rs` completes them, and stores the
//! callbacks of single jobs, too.

pub mod completions;
mod workflow_event;

use fencepost_domain::{
    error::Error,
    ids::{BatchId, ProjectId},
    plan::Tenant,
};
use fencepost_store::workflows::batches;
use sqlx::Acquire;

use super::{Engine, enqueue::quota, queues};

pub use fencepost_store::workflows::batches::{BatchRow, NewBatch};

/// Stores a batch without jobs. One that exists already is left alone.
///
/// # Errors
/// [`Error::Invalid`] about the queue of a callback. [`Error::QuotaExceeded`] when the project has
/// as many that have not completed as its plan allows, or may not have that many more jobs as there
/// are callbacks.
pub async fn create(
    engine: &Engine,
    tenant: Tenant,
    batch: &NewBatch,
    callback_count: usize,
) -> Result<BatchRow, Error> {
    let project_id = tenant.project_id;
    if let Some(callbacks) = &batch.callbacks {
        let callbacks = serde_json::from_str(callbacks).map_err(Error::internal)?;
        queues::check_new_names_of(engine, project_id, ("", &callbacks)).await?;
    }
    let mut conn = engine.pools.enqueue.acquire_for(project_id).await?;
    if let Some(stored) = batches::find(&mut conn, project_id, batch.id).await? {
        return Ok(stored);
    }
    drop(conn);
    quota::admit_count(engine, tenant, callback_count).await?;
    let mut conn = engine.pools.enqueue.acquire_for(project_id).await?;
    let mut tx = conn.begin().await?;
    if let Err(full) = quota::admit_batch(&mut tx, tenant).await? {
        // The request that this one repeats may have stored it meanwhile.
        return batches::find(&mut tx, project_id, batch.id).await?.ok_or(full);
    }
    batches::insert(&mut tx, project_id, batch).await?;
    let found = batches::find(&mut tx, project_id, batch.id).await?;
    tx.commit().await?;
    found.ok_or(Error::BatchNotFound)
}

/// Seals a batch: it completes when all of its jobs have ended, at once if they have.
///
/// # Errors
/// [`Error::BatchNotFound`].
pub async fn seal(engine: &Engine, project_id: ProjectId, id: BatchId) -> Result<BatchRow, Error> {
    let mut conn = engine.pools.enqueue.acquire_for(project_id).await?;
    let mut tx = conn.begin().await?;
    let enqueued = completions::seal(&mut tx, project_id, id).await?.ok_or(Error::BatchNotFound)?;
    tx.commit().await?;
    enqueued.publish(engine);
    engine.notifier.notify_endpoints(std::iter::once(project_id));
    batches::find(&mut conn, project_id, id).await?.ok_or(Error::BatchNotFound)
}

/// A batch, with exact counts.
///
/// # Errors
/// [`Error::BatchNotFound`].
pub async fn find(engine: &Engine, project_id: ProjectId, id: BatchId) -> Result<BatchRow, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    batches::find(&mut conn, project_id, id).await?.ok_or(Error::BatchNotFound)
}

/// A page of batches below an id, newest first.
pub async fn list(
    engine: &Engine,
    project_id: ProjectId,
    before: Option<BatchId>,
    limit: i64,
) -> Result<Vec<BatchRow>, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    Ok(batches::list(&mut conn, project_id, before, limit).await?)
}
