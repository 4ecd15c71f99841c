//! Which attempt a worker means that shows none.

use std::sync::Arc;

use sqlx::PgConnection;

use fencepost_domain::ids::JobKey;

/// A worker that says that it holds a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AskedHolder {
    pub key: JobKey,
    pub worker_id: Arc<str>,
}

/// The attempt that it holds.
#[derive(Debug, Clone, Copy)]
pub struct HeldAttempt {
    /// The index of the worker in the question.
    pub number: i64,
    pub attempt: i32,
    /// Whether an earlier attempt of this worker ended without a report of its own.
    pub has_lost_earlier: bool,
}

/// The attempts of those that hold their job.
pub async fn held_attempts(
    conn: &mut PgConnection,
    asked: &[AskedHolder],
) -> sqlx::Result<Vec<HeldAttempt>> {
    sqlx::query_as!(
        HeldAttempt,
        r#"
        select asked.number - 1 "number!", held.attempt "attempt!", exists (
                   select from attempts
                   where project_id = asked.project_id and job_id = asked.job_id
                       and worker_id = asked.worker_id
                       and (
                           outcome in ('lease_expired', 'timeout')
                           or error_kind in ('worker_gone', 'take_back')
                       )
               ) "has_lost_earlier!"
        from unnest($1::int[], $2::uuid[], $3::text[]) with ordinality
            as asked(project_id, job_id, worker_id, number)
        cross join lateral (
            select attempt
            from jobs
            where project_id = asked.project_id and id = asked.job_id
                and worker_id = asked.worker_id and lease_id is not null
        ) held
        "#,
        &asked.iter().map(|it| it.key.project_id.0).collect::<Vec<_>>(),
        &asked.iter().map(|it| it.key.id.0).collect::<Vec<_>>(),
        &asked.iter().map(|it| &*it.worker_id).collect::<Vec<_>>() as &[&str],
    )
    .fetch_all(conn)
    .await
}
