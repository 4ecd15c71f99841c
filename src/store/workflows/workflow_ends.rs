//! What is told of the ends of workflows.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use fencepost_domain::ids::{ProjectId, WorkflowId};

/// Whether some job of a workflow has not ended.
pub async fn has_open_jobs(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: WorkflowId,
) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        select exists (
            select
            from workflow_jobs part
            cross join lateral (
                select completed_at
                from jobs
                where project_id = $1 and jobs.id = part.job_id
                offset 0
            ) live
            where part.project_id = $1 and part.workflow_id = $2 and live.completed_at is null
        ) "has!"
        "#,
        project_id.0,
        id.0,
    )
    .fetch_one(conn)
    .await
}

/// A workflow that may have ended.
#[derive(Debug, Clone)]
pub struct MaybeEnded {
    pub cancelled_at: Option<DateTime<Utc>>,
    /// Told of its end.
    pub callback_url: Option<String>,
    /// The end that was told last.
    pub told_state: Option<String>,
}

/// A workflow, locked until the end of the transaction, so that one node tells of its end. None: it
/// was deleted.
pub async fn lock(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: WorkflowId,
) -> sqlx::Result<Option<MaybeEnded>> {
    sqlx::query_as!(
        MaybeEnded,
        "
        select cancelled_at, callback_url, told_state
        from workflows
        where project_id = $1 and id = $2
        for no key update
        ",
        project_id.0,
        id.0,
    )
    .fetch_optional(conn)
    .await
}

/// Records which end of a locked workflow was told.
pub async fn note_told(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: WorkflowId,
    state: &str,
) -> sqlx::Result<()> {
    sqlx::query!(
        "update workflows set told_state = $3 where project_id = $1 and id = $2",
        project_id.0,
        id.0,
        state,
    )
    .execute(conn)
    .await?;
    Ok(())
}
