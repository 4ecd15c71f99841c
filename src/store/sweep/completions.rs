//! Ends of jobs that wait to be processed, across projects.

use fencepost_domain::{
    ids::{BatchId, ProjectId},
    limits::BATCH_KEEP_DAYS,
};
use sqlx::PgConnection;

use crate::workflows::completions::CompletionKey;

/// Ends of one project that one pass processes at most. The statement carries the same number as a
/// literal.
pub const MAX_COMPLETIONS_OF_PROJECT: usize = 100;

/// Ends that one pass processes at most. The statement carries the same number as a literal.
pub const MAX_COMPLETIONS: usize = 5_000;

/// The oldest ends of each project, at most [`MAX_COMPLETIONS`]. Those of suspended projects wait.
pub async fn find(conn: &mut PgConnection) -> sqlx::Result<Vec<CompletionKey>> {
    sqlx::query_as!(
        CompletionKey,
        r#"
        with recursive project(id) as (
            (select project_id from job_ends order by project_id limit 1)
            union all
            select (
                select project_id from job_ends where project_id > project.id
                order by project_id limit 1
            )
            from project
            where project.id is not null
        )
        select project.id "project_id!: ProjectId", oldest.id "id!"
        from project
        cross join lateral (
            select job_ends.id
            from job_ends
            where project_id = project.id and not exists (
                select from set_aside
                where project_id = project.id and work = 'callbacks'
                    and item = job_ends.id::text and next_try_at > now()
            )
            order by job_ends.id
            limit 100
        ) oldest
        where project.id is not null and not exists (
            select from projects where id = project.id and suspended_at is not null
        )
        order by project.id, oldest.id
        limit 5000
        "#,
    )
    .fetch_all(conn)
    .await
}

/// Deletes batches that were completed [`BATCH_KEEP_DAYS`] ago. Returns how many.
pub async fn prune_batches(conn: &mut PgConnection) -> sqlx::Result<u64> {
    let done = sqlx::query!(
        "
        with old as materialized (
            select project_id, id
            from batches
            where completed_at < now() - make_interval(days => $1)
            order by completed_at
            limit 500
            for update skip locked
        )
        delete from batches
        using old
        where batches.project_id = old.project_id and batches.id = old.id
        ",
        BATCH_KEEP_DAYS,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected())
}

/// Idle batches that one pass seals. The statement carries the same number as a literal.
pub const MAX_IDLE_BATCHES: usize = 50;

/// Batches that are not sealed, and that no job has joined for this many days: a day more, since
/// the time of the last one is noted once a day.
pub async fn idle_batches(
    conn: &mut PgConnection,
    days: i32,
) -> sqlx::Result<Vec<(ProjectId, BatchId)>> {
    let rows = sqlx::query!(
        r#"
        select project_id "project_id: ProjectId", id "id: BatchId"
        from batches
        where sealed_at is null and joined_at < now() - make_interval(days => $1 + 1)
        order by joined_at
        limit 50
        "#,
        days,
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(|it| (it.project_id, it.id)).collect())
}
