//! Events that wait to be told, and what is told of them.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use crate::ids::{BatchId, EndpointId, JobId, ProjectId, WorkflowId};

/// An event, by its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventKey {
    pub project_id: ProjectId,
    pub id: i64,
}

/// An event, with what the rows of its job say.
#[derive(Debug, Clone)]
pub struct TakenEvent {
    pub kind: String,
    pub at: DateTime<Utc>,
    pub job_id: JobId,
    pub queue: String,
    pub job_type: String,
    pub attempt: i32,
    /// Null: the job was deleted.
    pub max_attempts: Option<i32>,
    pub created_at: Option<DateTime<Utc>>,
    /// JSON.
    pub tags: Option<String>,
    pub batch_id: Option<BatchId>,
    pub workflow_id: Option<WorkflowId>,
    /// How the attempt ended; null: it succeeded, or there was none.
    pub outcome: Option<String>,
    pub error_kind: Option<String>,
    /// The beginning of its message.
    pub error_message: Option<String>,
    pub retry_at: Option<DateTime<Utc>>,
}

/// Takes events out of the table, to be told in the same transaction. Those that another node has
/// taken are left out.
pub async fn take(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[i64],
    max_message_chars: i32,
) -> sqlx::Result<Vec<TakenEvent>> {
    sqlx::query_as!(
        TakenEvent,
        r#"
        with taken as (
            delete from outbound_events
            where project_id = $1 and id in (
                select id from outbound_events
                where project_id = $1 and id = any($2)
                for update skip locked
            )
            returning id, type, at, job_id, queue, job_type, attempt
        )
        select taken.type "kind!", taken.at "at!", taken.job_id "job_id!: JobId",
               taken.queue "queue!", taken.job_type "job_type!", taken.attempt "attempt!",
               coalesce(live.max_attempts, ended.max_attempts) as max_attempts,
               coalesce(live.created_at, ended.created_at) as created_at,
               body.tags::text as tags, body.batch_id "batch_id: BatchId",
               body.workflow_id "workflow_id: WorkflowId",
               failed.outcome "outcome?", failed.error_kind, left(failed.error_message, $3) as error_message,
               failed.retry_at
        from taken
        left join jobs live on live.project_id = $1 and live.id = taken.job_id
        left join finished_jobs ended on ended.project_id = $1 and ended.id = taken.job_id
        left join job_bodies body on body.project_id = $1 and body.job_id = taken.job_id
        left join attempts failed
            on failed.project_id = $1 and failed.job_id = taken.job_id
            and failed.attempt = taken.attempt
            and taken.type in ('job.attempt_failed', 'job.dead_lettered')
        order by taken.id
        "#,
        project_id.0,
        ids,
        max_message_chars,
    )
    .fetch_all(conn)
    .await
}

/// Who wants events of a project.
#[derive(Debug, Clone)]
pub struct Subscriber {
    pub id: EndpointId,
    pub outbox: ProjectId,
    pub event_types: Vec<String>,
    pub queues: Vec<String>,
    pub job_types: Vec<String>,
    pub timeout_seconds: i32,
}

/// The enabled endpoints of a project.
pub async fn subscribers(
    conn: &mut PgConnection,
    project_id: ProjectId,
    limit: i64,
) -> sqlx::Result<Vec<Subscriber>> {
    sqlx::query_as!(
        Subscriber,
        r#"
        select id "id: EndpointId", outbox_id "outbox: ProjectId", event_types, queues, job_types, timeout_seconds
        from webhook_endpoints
        where project_id = $1 and disabled_at is null
        order by id
        limit $2
        "#,
        project_id.0,
        limit,
    )
    .fetch_all(conn)
    .await
}
