//! Recurring schedules.

use sqlx::PgConnection;

use crate::ids::ProjectId;

/// A schedule as a worker registers it. What is none keeps its value, or has its default.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // Each is the column of that name, described in the migrations.
pub struct RegisteredSchedule {
    pub id: String,
    pub job_type: String,
    pub cron_expression: String,
    pub timezone: Option<String>,
    pub queue: Option<String>,
    pub max_attempts: Option<i32>,
    pub timeout_seconds: Option<i32>,
}

/// Keeps a schedule, new or known. It does not set a paused one going. False: another job type has the
/// id, and nothing is kept.
///
/// # Errors
/// Only those of the store.
pub async fn upsert_registered(
    conn: &mut PgConnection,
    project_id: ProjectId,
    schedule: &RegisteredSchedule,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        insert into recurring_schedules (
            project_id, id, job_type, cron_expression, timezone, queue, max_attempts, timeout_seconds
        )
        values (
            $1, $2, $3, $4, coalesce($5, 'UTC'), coalesce($6, 'default'), coalesce($7, 3),
            coalesce($8, 1800)
        )
        on conflict (project_id, id) do update
        set cron_expression = $4,
            timezone = coalesce($5, recurring_schedules.timezone),
            queue = coalesce($6, recurring_schedules.queue),
            max_attempts = coalesce($7, recurring_schedules.max_attempts),
            timeout_seconds = coalesce($8, recurring_schedules.timeout_seconds),
            updated_at = now()
        where recurring_schedules.job_type = $3
        ",
        project_id.0,
        schedule.id,
        schedule.job_type,
        schedule.cron_expression,
        schedule.timezone,
        schedule.queue,
        schedule.max_attempts,
        schedule.timeout_seconds,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}
