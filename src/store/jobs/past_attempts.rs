//! Attempts of jobs that have ended, and did not succeed.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use fencepost_domain::{
    ids::{JobId, ProjectId},
    job::AttemptOutcome,
    limits,
    text::ErrorReport,
};
use sqlx::PgConnection;
use uuid::Uuid;

/// A past attempt that did not succeed.
#[derive(Debug, Clone)]
pub struct AttemptRow {
    pub attempt: i32,
    pub worker_id: String,
    pub claimed_at: DateTime<Utc>,
    pub ended_at: DateTime<Utc>,
    pub outcome: AttemptOutcome,
    pub error_kind: Option<String>,
    pub error_message: Option<String>,
    pub error_stack_trace: Option<String>,
    pub error_truncated: bool,
    pub retry_at: Option<DateTime<Utc>>,
    pub duration_ms: Option<i64>,
}

impl AttemptRow {
    /// Takes away what only those see who may read payloads.
    pub fn redact(&mut self) {
        self.error_message = None;
        self.error_stack_trace = None;
    }
}

/// The past attempts of one job that did not succeed, oldest first; the newest
/// [`limits::MAX_SHOWN_ATTEMPTS`] if there are more.
pub async fn attempts(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: JobId,
) -> sqlx::Result<Vec<AttemptRow>> {
    let mut rows = sqlx::query_as!(
        AttemptRow,
        r#"
        select attempt, worker_id, claimed_at, ended_at, outcome "outcome: AttemptOutcome", error_kind,
               error_message, error_stack_trace, error_truncated, retry_at, duration_ms
        from attempts
        where project_id = $1 and job_id = $2
        order by attempt desc
        limit $3
        "#,
        project_id.0,
        id.0,
        limits::MAX_SHOWN_ATTEMPTS,
    )
    .fetch_all(conn)
    .await?;
    rows.reverse();
    Ok(rows)
}

/// The past attempts of these jobs that did not succeed, in the order of their claims, without
/// stack traces: at most `per_job` of each, and the newest [`limits::MAX_SHOWN_ATTEMPTS`] of all.
pub async fn attempts_of_all(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[JobId],
    per_job: i64,
) -> sqlx::Result<Vec<(JobId, AttemptRow)>> {
    let rows = sqlx::query!(
        r#"
        select job_id "job_id: JobId", attempt, worker_id, claimed_at, ended_at,
               outcome "outcome: AttemptOutcome", error_kind, error_message, error_truncated,
               retry_at, duration_ms
        from unnest($2::uuid[]) as sought(id)
        cross join lateral (
            select job_id, attempt, worker_id, claimed_at, ended_at, outcome, error_kind,
                   error_message, error_truncated, retry_at, duration_ms
            from attempts
            where project_id = $1 and job_id = sought.id
            order by attempt desc
            limit $3
        ) past
        order by claimed_at desc
        limit $4
        "#,
        project_id.0,
        &ids.iter().map(|it| it.0).collect::<Vec<Uuid>>(),
        per_job,
        limits::MAX_SHOWN_ATTEMPTS,
    )
    .fetch_all(conn)
    .await?;
    let with_id = rows.into_iter().rev().map(|found| {
        let row = AttemptRow {
            attempt: found.attempt,
            worker_id: found.worker_id,
            claimed_at: found.claimed_at,
            ended_at: found.ended_at,
            outcome: found.outcome,
            error_kind: found.error_kind,
            error_message: found.error_message,
            error_stack_trace: None,
            error_truncated: found.error_truncated,
            retry_at: found.retry_at,
            duration_ms: found.duration_ms,
        };
        (found.job_id, row)
    });
    Ok(with_id.collect())
}

/// The latest error that a worker reported for each of these jobs.
pub async fn last_errors(
    conn: &mut PgConnection,
    keys: &[(ProjectId, JobId)],
) -> sqlx::Result<HashMap<(ProjectId, JobId), ErrorReport>> {
    let rows = sqlx::query!(
        r#"
        select sought.project_id "project_id!: ProjectId", sought.job_id "job_id!: JobId",
               past.error_kind as kind, past.error_message as message,
               past.error_stack_trace as stack_trace, past.error_truncated as truncated
        from unnest($1::int[], $2::uuid[]) as sought(project_id, job_id)
        cross join lateral (
            select error_kind, error_message, error_stack_trace, error_truncated
            from attempts
            where project_id = sought.project_id
                and job_id = sought.job_id
                and coalesce(error_kind, error_message, error_stack_trace) is not null
            order by attempt desc
            limit 1
        ) past
        "#,
        &keys.iter().map(|it| it.0.0).collect::<Vec<_>>(),
        &keys.iter().map(|it| it.1.0).collect::<Vec<_>>(),
    )
    .fetch_all(conn)
    .await?;
    let reports = rows.into_iter().map(|row| {
        let report = ErrorReport {
            kind: row.kind,
            message: row.message,
            stack_trace: row.stack_trace,
            truncated: row.truncated,
        };
        ((row.project_id, row.job_id), report)
    });
    Ok(reports.collect())
}
