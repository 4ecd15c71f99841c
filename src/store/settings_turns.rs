//! Turns of those who write the same settings under a condition, or add things whose number is
//! bounded: each looks and writes before the next one looks.

use fencepost_domain::ids::ProjectId;
use sqlx::PgConnection;

/// Waits until no other transaction has the turn, and takes it until this one ends.
pub async fn take(conn: &mut PgConnection, project_id: ProjectId, what: &str) -> sqlx::Result<()> {
    sqlx::query!(
        "select pg_advisory_xact_lock(hashtextextended('settings ' || $2, $1))",
        i64::from(project_id.0),
        what,
    )
    .execute(conn)
    .await?;
    Ok(())
}
