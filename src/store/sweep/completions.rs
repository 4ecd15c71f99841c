//! Ends of jobs that wait to be processed, across projects.

use fencepost_domain::{
    ids::{BatchId, ProjectId},
    limits::BATCH_KEEP_DAYS,
};
use sqlx::PgConnection;

/// Ends of one project that one pass processes at most. The statement carries the same number as a
/// literal.
pub const MAX_COMPLETIONS_OF_PROJECT: usize = 100;

/// Ends that one pass processes at most. The statement carries the same number as a literal.
pub const MAX_COMPLETIONS: usize = 5_000;

/// Bytes of callbacks that one pass stores of one project, but for the end that exceeds them: about
/// two hundred jobs. An end with twenty callbacks takes as much of a pass as twenty ends with one.
pub const MAX_CALLBACK_BYTES_OF_PROJECT: i64 = 32_768;

/// An end that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitingEnd {
    pub project_id: ProjectId,
    pub id: i64,
    /// True if it enqueues jobs, or may be the last end of a batch that does.
    pub enqueues: bool,
}

/// Ends, projects by turns and the oldest of each first: at most [`MAX_COMPLETIONS`]. Those of
/// suspended projects wait.
pub async fn find(conn: &mut PgConnection) -> sqlx::Result<Vec<WaitingEnd>> {
    sqlx::query_as!(
        WaitingEnd,
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
        select project.id "project_id!: ProjectId", oldest.id "id!",
               oldest.enqueues "enqueues!"
        from project
        cross join lateral (
            select id, enqueues, row_number() over (order by id) as turn,
                   coalesce(sum(bytes) over (
                       order by id rows between unbounded preceding and 1 preceding
                   ), 0) as bytes_before
            from (
                select job_ends.id, octet_length(job_ends.callbacks) as bytes,
                       -- A URL is called, and no job is enqueued.
                       coalesce(job_ends.callbacks like '%"on\_%', false) or exists (
                           select from batches
                           where project_id = project.id and id = job_ends.batch_id
                               and callbacks is not null
                       ) as enqueues
                from job_ends
                where project_id = project.id and not exists (
                    select from set_aside
                    where project_id = project.id and work = 'callbacks'
                        and item = job_ends.id::text and next_try_at > now()
                )
                order by job_ends.id
                limit 100
            ) bounded
        ) oldest
        where project.id is not null and oldest.bytes_before < $1 and not exists (
            select from projects where id = project.id and suspended_at is not null
        )
        order by oldest.turn, project.id
        limit 5000
        "#,
        MAX_CALLBACK_BYTES_OF_PROJECT,
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
            and not exists (
                select from set_aside
                where project_id = batches.project_id and work = 'seal'
                    and item = batches.id::text and next_try_at > now()
            )
        order by joined_at
        limit 50
        "#,
        days,
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(|it| (it.project_id, it.id)).collect())
}
