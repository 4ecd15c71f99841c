//! Batches that were never sealed, and that no job has joined for a month: they end, or they would
//! count as open for good.

use fencepost_domain::{
    error::{Error, chain},
    limits::IDLE_BATCH_DAYS,
};
use fencepost_store::sweep::completions::{self, MAX_IDLE_BATCHES};

use crate::{Engine, batches};

/// Seals some of them. Returns whether there may be more.
pub async fn pass(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let idle = completions::idle_batches(&mut conn, IDLE_BATCH_DAYS).await?;
    drop(conn);
    let mut has_failed = false;
    for (project_id, id) in &idle {
        match batches::seal(engine, *project_id, *id).await {
            Ok(_) | Err(Error::BatchNotFound) => (),
            // The next ones may be of other projects.
            Err(error) => {
                tracing::warn!(batch_id = %id, error = chain(&error), "idle batch was not sealed");
                has_failed = true;
            }
        }
    }
    Ok(idle.len() >= MAX_IDLE_BATCHES && !has_failed)
}
