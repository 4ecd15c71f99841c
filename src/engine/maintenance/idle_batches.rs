//! Batches that were never sealed, and that no job has joined for a month: they end, or they would
//! count as open for good.

use fencepost_domain::{error::Error, limits::IDLE_BATCH_DAYS};
use fencepost_store::sweep::completions::{self, MAX_IDLE_BATCHES};

use crate::{Engine, batches};

/// One pass: seals some. Returns whether there may be more.
pub async fn pass(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let idle = completions::idle_batches(&mut conn, IDLE_BATCH_DAYS).await?;
    drop(conn);
    for (project_id, id) in &idle {
        match batches::seal(engine, *project_id, *id).await {
            Ok(_) | Err(Error::BatchNotFound) => (),
            Err(error) => {
                tracing::warn!(batch_id = %id, error = %error, "an idle batch was not sealed");
                return Ok(false);
            }
        }
    }
    Ok(idle.len() >= MAX_IDLE_BATCHES)
}
