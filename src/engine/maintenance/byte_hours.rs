//! The stored bytes of all projects, from hour to hour.

use fencepost_store::sweep::usage;
use sqlx::Acquire;

use crate::Engine;

/// Adds the bytes that some projects store to the byte-hours of the day, once for this hour. Each
/// hour counts once, on any number of nodes. Returns whether there are more projects.
///
/// # Errors
/// When the database does not answer.
pub async fn pass(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    usage::begin_hour(&mut conn).await?;
    let mut tx = conn.begin().await?;
    let Some(after) = usage::next_projects(&mut tx).await? else { return Ok(false) };
    let last = usage::add_byte_hours(&mut tx, after).await?;
    usage::note_added(&mut tx, last).await?;
    tx.commit().await?;
    Ok(last.is_some())
}
