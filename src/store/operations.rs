//! Bulk operations in the background.

use chrono::{DateTime, Utc};
use fencepost_domain::{
    ids::{JobId, OperationId, ProjectId},
    operation::{Kind, Skipped, State, Which},
};
use sqlx::{PgConnection, types::Json};
use uuid::Uuid;

use crate::TimePosition;

/// Characters of an operation's `sample_error`.
const MAX_SAMPLE_ERROR_CHARS: i32 = 300;

/// An operation to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewOperation {
    pub id: OperationId,
    pub kind: Kind,
    pub filter: Which,
    pub expected: Option<i64>,
    pub max_jobs: Option<i64>,
    pub rate_per_second: Option<i32>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct OperationRow {
    pub id: OperationId,
    pub kind: String,
    pub state: State,
    pub filter: serde_json::Value,
    /// Of the group of dead letters that the filter names, as it was at the start.
    pub sample_error: Option<String>,
    pub expected: Option<i64>,
    pub done: i64,
    pub skipped: i64,
    /// The same by reason. None: none were, or an older version ran it.
    pub skipped_by: Option<Json<Skipped>>,
    pub max_jobs: Option<i64>,
    pub rate_per_second: Option<i32>,
    pub last_error: Option<String>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
    pub ended_at: Option<DateTime<Utc>>,
}

/// Starts an operation. An existing one is left as it is.
pub async fn insert(
    conn: &mut PgConnection,
    project_id: ProjectId,
    new: &NewOperation,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into operations (
            project_id, id, kind, filter, expected, max_jobs, rate_per_second, sample_error
        )
        values ($1, $2, $3, $4, $5, $6, $7, (
            select nullif(left(concat_ws(': ', error_type, sample_message), $8), '')
            from dead_letter_groups
            where project_id = $1 and fingerprint = ($4::jsonb->>'fingerprint')::uuid
                -- What is deleted leaves no trace.
                and $3 <> 'dead_letters_purge'
        ))
        on conflict (project_id, id) do nothing
        ",
        project_id.0,
        new.id.0,
        new.kind as Kind,
        Json(&new.filter) as Json<&Which>,
        new.expected,
        new.max_jobs,
        new.rate_per_second,
        MAX_SAMPLE_ERROR_CHARS,
    )
    .execute(conn)
    .await?;
    Ok(())
}

pub async fn find(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: OperationId,
) -> sqlx::Result<Option<OperationRow>> {
    sqlx::query_as!(
        OperationRow,
        r#"
        select id "id: OperationId", kind, state "state: State", filter, sample_error, expected, done,
               skipped, skipped_by "skipped_by: Json<Skipped>", max_jobs, rate_per_second, last_error, created_at, updated_at, ended_at
        from operations
        where project_id = $1 and id = $2
        "#,
        project_id.0,
        id.0,
    )
    .fetch_optional(conn)
    .await
}

/// The operations below an id, newest first.
pub async fn page(
    conn: &mut PgConnection,
    project_id: ProjectId,
    before: Option<OperationId>,
    limit: i64,
) -> sqlx::Result<Vec<OperationRow>> {
    sqlx::query_as!(
        OperationRow,
        r#"
        select id "id: OperationId", kind, state "state: State", filter, sample_error, expected, done,
               skipped, skipped_by "skipped_by: Json<Skipped>", max_jobs, rate_per_second, last_error, created_at, updated_at, ended_at
        from operations
        where project_id = $1 and id < $2
        order by id desc
        limit $3
        "#,
        project_id.0,
        before.map_or(Uuid::max(), |it| it.0),
        limit,
    )
    .fetch_all(conn)
    .await
}

/// Number of running operations of a project.
pub async fn count_running(conn: &mut PgConnection, project_id: ProjectId) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        select count(*) "running!"
        from operations
        where project_id = $1 and next_step_at is not null
        "#,
        project_id.0,
    )
    .fetch_one(conn)
    .await
}

/// Aborts an operation. Waits for the step in progress.
pub async fn abort(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: OperationId,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update operations
        set state = 'aborted', next_step_at = null, updated_at = now(), ended_at = now()
        where project_id = $1 and id = $2 and state = 'running'
        ",
        project_id.0,
        id.0,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// An operation whose next step is due, locked.
#[derive(Debug, Clone, PartialEq)]
pub struct DueOperation {
    pub project_id: ProjectId,
    pub id: OperationId,
    /// As stored: a newer version may know more kinds.
    pub kind: String,
    /// As stored: a newer version may know more filters.
    pub filter: serde_json::Value,
    pub done: i64,
    pub skipped_by: Option<Json<Skipped>>,
    pub max_jobs: Option<i64>,
    pub rate_per_second: Option<i32>,
    pub after_at: Option<DateTime<Utc>>,
    pub after_id: Option<Uuid>,
    pub created_at: DateTime<Utc>,
}

/// The progress of a step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    pub done: i64,
    /// Jobs that were skipped.
    pub skipped: Skipped,
    pub after: Option<TimePosition>,
    /// Milliseconds until the next step; none: it was the last.
    pub pause_ms: Option<i64>,
}

/// Stores the progress of an operation, in the transaction of its step.
pub async fn advance(
    conn: &mut PgConnection,
    due: &DueOperation,
    progress: &Progress,
) -> sqlx::Result<()> {
    let earlier = due.skipped_by.as_ref().map(|it| it.0.clone()).unwrap_or_default();
    let skipped_by = Some(earlier.and(&progress.skipped)).filter(|it| it.total() > 0);
    sqlx::query!(
        "
        update operations
        set done = done + $3,
            skipped = skipped + $4,
            skipped_by = $8,
            after_at = coalesce($5, after_at),
            after_id = coalesce($6, after_id),
            state = case when $7::bigint is null then 'succeeded' else state end,
            next_step_at = statement_timestamp() + make_interval(secs => $7::bigint / 1000.0),
            failed_steps = 0,
            last_error = null,
            updated_at = statement_timestamp(),
            ended_at = case when $7::bigint is null then statement_timestamp() end
        where project_id = $1 and id = $2
        ",
        due.project_id.0,
        due.id.0,
        progress.done,
        progress.skipped.total(),
        progress.after.map(|it| it.at),
        progress.after.map(|it| it.id),
        progress.pause_ms,
        skipped_by.map(Json) as Option<Json<Skipped>>,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Records a failed step, and delays the next one; after `max_failed` failures in a row the
/// operation has failed.
pub async fn record_failure(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: OperationId,
    error: &str,
    max_failed: i32,
    pause_seconds: i32,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update operations
        set failed_steps = failed_steps + 1,
            last_error = $3,
            updated_at = now(),
            state = case when failed_steps + 1 >= $4 then 'failed' else state end,
            ended_at = case when failed_steps + 1 >= $4 then now() end,
            next_step_at = case
                when failed_steps + 1 < $4 then now() + make_interval(secs => $5::int)
            end
        where project_id = $1 and id = $2 and next_step_at is not null
        ",
        project_id.0,
        id.0,
        error,
        max_failed,
        pause_seconds,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Delays an operation whose kind this version does not know: a newer node runs it.
pub async fn postpone(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: OperationId,
    pause_seconds: i32,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update operations
        set next_step_at = now() + make_interval(secs => $3::int)
        where project_id = $1 and id = $2 and next_step_at is not null
        ",
        project_id.0,
        id.0,
        pause_seconds,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Waiting jobs of a queue, stored before a purge began, and how far the query has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingJobs {
    pub jobs: Vec<JobId>,
    /// The last job examined; none: there was none.
    pub last: Option<Uuid>,
    pub examined: i64,
}

/// Jobs that one step of a purge examines at most. The statement carries the same number as a
/// literal.
pub const MAX_EXAMINED_JOBS: i64 = 5_000;

/// Up to `limit` waiting jobs of a queue, stored until a time, with ids above `after`.
pub async fn waiting_jobs(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    after: Uuid,
    until: DateTime<Utc>,
    limit: i64,
) -> sqlx::Result<WaitingJobs> {
    sqlx::query_as!(
        WaitingJobs,
        r#"
        with examined as materialized (
            select id, queue, state, created_at
            from jobs
            where project_id = $1 and id > $3
            order by id
            limit 5000
        ), matching as (
            select id
            from examined
            where queue = $2 and state in ('pending', 'scheduled', 'backoff') and created_at <= $4
            order by id
            limit $5
        )
        select array(select id from matching order by id) "jobs!: Vec<JobId>",
               (select id from examined order by id desc limit 1) as last,
               (select count(*) from examined) "examined!"
        "#,
        project_id.0,
        queue,
        after,
        until,
        limit,
    )
    .fetch_one(conn)
    .await
}
