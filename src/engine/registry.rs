//! The workers that introduced themselves.

use super::Engine;
use crate::{error::Error, ids::ProjectId, store};

pub use crate::store::workers::Registration;

/// Keeps what a worker tells of itself.
///
/// # Errors
/// [`Error::Unavailable`] when the store does not answer.
pub async fn register(
    engine: &Engine,
    project_id: ProjectId,
    worker: &Registration,
) -> Result<(), Error> {
    let mut conn = engine.pools.claim.acquire().await?;
    store::workers::upsert(&mut conn, project_id, worker).await?;
    Ok(())
}
