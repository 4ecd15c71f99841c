//! Pausing and resuming: a whole queue, or one type of jobs in it.

use sqlx::Acquire;

use super::Engine;
use crate::{domain::limits::MAX_PAUSED_TYPES, error::Error, ids::ProjectId, store::queues};

/// Pauses a queue or sets it going. A paused queue takes jobs and hands out none.
///
/// # Errors
/// Only those of the store.
pub async fn set_paused(
    engine: &Engine,
    project_id: ProjectId,
    queue: &str,
    is_paused: bool,
) -> Result<(), Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    queues::set_paused(&mut conn, project_id, queue, is_paused).await?;
    engine.tidings.wake.queue_changed(project_id, queue);
    Ok(())
}

/// Pauses one type of jobs in a queue, or sets it going, whoever has paused it: its dead letters in a row
/// count from 0 again.
///
/// # Errors
/// [`Error::QuotaExceeded`] when [`MAX_PAUSED_TYPES`] are paused in it already.
pub async fn set_type_paused(
    engine: &Engine,
    project_id: ProjectId,
    queue: &str,
    job_type: &str,
    is_paused: bool,
) -> Result<(), Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let mut tx = conn.begin().await?;
    queues::lock_settings(&mut tx, project_id, queue).await?;
    let paused = queues::count_paused_types(&mut tx, project_id, queue).await?;
    if is_paused && paused >= MAX_PAUSED_TYPES {
        return Err(Error::QuotaExceeded {
            what: "paused types in a queue",
            max: MAX_PAUSED_TYPES,
        });
    }
    queues::set_type_paused(&mut tx, project_id, queue, job_type, is_paused).await?;
    queues::keep_paused_types(&mut tx, project_id, queue).await?;
    tx.commit().await?;
    engine.tidings.wake.queue_changed(project_id, queue);
    Ok(())
}
