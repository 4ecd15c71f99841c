//! States of workflows that endpoints are notified of.

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
pub struct MaybeCompleted {
    pub cancelled_at: Option<DateTime<Utc>>,
    /// URL that is notified when it has completed.
    pub callback_url: Option<String>,
    /// The final state that was sent last.
    pub told_state: Option<String>,
}

/// A workflow, locked until the end of the transaction, so that one node stores the event. None: it
/// was deleted.
pub async fn lock(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: WorkflowId,
) -> sqlx::Result<Option<MaybeCompleted>> {
    sqlx::query_as!(
        MaybeCompleted,
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

/// Records which final state of a locked workflow was sent.
pub async fn note_notified(
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
