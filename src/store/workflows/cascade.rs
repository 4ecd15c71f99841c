//! The cascade: what the end of a job means for its children. Its marks, and those of jobs with an
//! `expires_at`, are stored beside the jobs, and read by loops.

use chrono::{DateTime, Utc};
use fencepost_domain::{
    dependency::FinalState,
    ids::{JobId, JobKey, ProjectId},
    job::StoredState,
};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::settle::settle_success::WaitingJob;

/// Marks jobs that ended without success: their children must be cancelled, or may run.
pub async fn mark_ended(conn: &mut PgConnection, parents: &[JobKey]) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into ended_parents (project_id, job_id)
        select project_id, job_id from unnest($1::int[], $2::uuid[]) as ended(project_id, job_id)
        on conflict do nothing
        ",
        &parents.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &parents.iter().map(|it| it.id.0).collect::<Vec<_>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Removes the marks: the children are done, or the parents were retried. Returns how many marks
/// there were.
pub async fn unmark_ended(
    conn: &mut PgConnection,
    project_id: ProjectId,
    parents: &[JobId],
) -> sqlx::Result<u64> {
    let done = sqlx::query!(
        "delete from ended_parents where project_id = $1 and job_id = any($2)",
        project_id.0,
        &parents.iter().map(|it| it.0).collect::<Vec<Uuid>>(),
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected())
}

/// Marks those of these retried jobs that have cancelled children: they are to be retried, too.
pub async fn mark_revived(
    conn: &mut PgConnection,
    project_id: ProjectId,
    parents: &[JobId],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into revived_parents (project_id, job_id)
        select $1, parent.id
        from unnest($2::uuid[]) as parent(id)
        where exists (
            select
            from job_edges edge
            join finished_jobs child on child.project_id = $1 and child.id = edge.child_id
            where edge.project_id = $1 and edge.parent_id = parent.id
                and child.state = 'cancelled' and child.cancelled_by is not null
        )
        on conflict (project_id, job_id) do update set after_id = excluded.after_id
        ",
        project_id.0,
        &parents.iter().map(|it| it.0).collect::<Vec<_>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Locks the mark of a retried job, and says after which child to continue. None: another node has
/// it, or it is done.
pub async fn lock_revived(conn: &mut PgConnection, parent: JobKey) -> sqlx::Result<Option<JobId>> {
    sqlx::query_scalar!(
        r#"
        select after_id "after_id: JobId"
        from revived_parents
        where project_id = $1 and job_id = $2
        for update skip locked
        "#,
        parent.project_id.0,
        parent.id.0,
    )
    .fetch_optional(conn)
    .await
}

/// Remembers after which child to continue; none: all had their turn.
pub async fn advance_revived(
    conn: &mut PgConnection,
    parent: JobKey,
    after: Option<JobId>,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with done as (
            delete from revived_parents
            where project_id = $1 and job_id = $2 and $3::uuid is null
        )
        update revived_parents set after_id = $3
        where project_id = $1 and job_id = $2 and $3 is not null
        ",
        parent.project_id.0,
        parent.id.0,
        after.map(|it| it.0),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Up to `limit` children of these jobs, after `after`, that were cancelled because a parent ended
/// without success: one of these, or another.
pub async fn cancelled_children(
    conn: &mut PgConnection,
    project_id: ProjectId,
    parents: &[JobId],
    after: JobId,
    limit: usize,
) -> sqlx::Result<Vec<JobId>> {
    sqlx::query_scalar!(
        r#"
        select distinct child.id "id: JobId"
        from job_edges edge
        join finished_jobs child on child.project_id = $1 and child.id = edge.child_id
        where edge.project_id = $1 and edge.parent_id = any($2) and child.id > $3
            and child.state = 'cancelled' and child.cancelled_by is not null
        order by child.id
        limit $4
        "#,
        project_id.0,
        &parents.iter().map(|it| it.0).collect::<Vec<Uuid>>(),
        after.0,
        limit as i64,
    )
    .fetch_all(conn)
    .await
}

/// Locks cancelled jobs. Of two transactions that retry parents of the same job, the second then
/// sees what the first did.
pub async fn lock_cancelled(
    conn: &mut PgConnection,
    project_id: ProjectId,
    jobs: &[JobId],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        select id
        from finished_jobs
        where project_id = $1 and id = any($2)
        order by id
        for update
        ",
        project_id.0,
        &jobs.iter().map(|it| it.0).collect::<Vec<Uuid>>(),
    )
    .fetch_all(conn)
    .await?;
    Ok(())
}

/// Stores until when jobs may start.
pub async fn insert_expiries(
    conn: &mut PgConnection,
    project_id: ProjectId,
    expiries: &[(JobId, DateTime<Utc>)],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into job_expiries (project_id, job_id, expires_at)
        select $1, job_id, expires_at
        from unnest($2::uuid[], $3::timestamptz[]) as job(job_id, expires_at)
        ",
        project_id.0,
        &expiries.iter().map(|it| it.0.0).collect::<Vec<_>>(),
        &expiries.iter().map(|it| it.1).collect::<Vec<_>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Stores again until when retried jobs may start. The expiry loop may be deleting this at the
/// moment, and waits for it.
pub async fn restore_expiries(
    conn: &mut PgConnection,
    project_id: ProjectId,
    jobs: &[JobId],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into job_expiries (project_id, job_id, expires_at)
        select project_id, id, expires_at
        from jobs
        where project_id = $1 and id = any($2) and expires_at is not null
        on conflict (project_id, job_id) do update set expires_at = excluded.expires_at
        ",
        project_id.0,
        &jobs.iter().map(|it| it.0).collect::<Vec<Uuid>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Deletes the expiry of these jobs, except for those that have not ended. The caller has cancelled
/// those that waited, so these run, and may wait again.
pub async fn delete_expiries(conn: &mut PgConnection, jobs: &[JobKey]) -> sqlx::Result<()> {
    sqlx::query!(
        "
        delete from job_expiries
        using unnest($1::int[], $2::uuid[]) as past(project_id, job_id)
        where job_expiries.project_id = past.project_id and job_expiries.job_id = past.job_id
            and not exists (
                select from jobs
                where jobs.project_id = past.project_id and jobs.id = past.job_id
                    and jobs.completed_at is null
            )
        ",
        &jobs.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &jobs.iter().map(|it| it.id.0).collect::<Vec<_>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Checks these jobs again later: they run. Here `expires_at` is only the time of the next look;
/// the job's own is in `jobs`.
pub async fn postpone_expiries(
    conn: &mut PgConnection,
    jobs: &[JobKey],
    seconds: i32,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update job_expiries
        set expires_at = statement_timestamp() + make_interval(secs => $3::int)
        from unnest($1::int[], $2::uuid[]) as running(project_id, job_id)
        where job_expiries.project_id = running.project_id
            and job_expiries.job_id = running.job_id
        ",
        &jobs.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &jobs.iter().map(|it| it.id.0).collect::<Vec<_>>(),
        seconds,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// How a job ended, as its dependencies see it: `succeeded`, `skipped`, `cancelled` or
/// `dead_letter`. None: it has not ended, or was deleted before any child was stored.
pub async fn find_end(conn: &mut PgConnection, job: JobKey) -> sqlx::Result<Option<FinalState>> {
    sqlx::query_scalar!(
        r#"
        select state "state!: FinalState"
        from (
            select state from jobs where project_id = $1 and id = $2 and state = 'dead_letter'
            union all
            select case when is_skipped then 'skipped' else state end
            from finished_jobs
            where project_id = $1 and id = $2
            union all
            select outcome from job_edges
            where project_id = $1 and parent_id = $2 and outcome is not null
        ) known
        limit 1
        "#,
        job.project_id.0,
        job.id.0,
    )
    .fetch_optional(conn)
    .await
}

/// Meets the dependencies on a job that has just ended like this, and returns the children that
/// wait for nothing more.
pub async fn meet(
    conn: &mut PgConnection,
    parent: JobKey,
    end: FinalState,
) -> sqlx::Result<Vec<WaitingJob>> {
    sqlx::query_as!(
        WaitingJob,
        r#"
        with met as (
            update job_edges
            set is_met = true
            where project_id = $1 and parent_id = $2 and not is_met
                and dependency_standing(condition, false, $3) = 'met'
            returning child_id
        ), child as materialized (
            select kid.id, kid.state as was
            from met
            join jobs kid on kid.project_id = $1 and kid.id = met.child_id
            where kid.unfinished_parents > other_holds(kid.waits_for_group, kid.paused_at)
            order by kid.id
            for no key update of kid
        ), freed as (
            update jobs
            set unfinished_parents = jobs.unfinished_parents - 1,
                state = case
                    when jobs.unfinished_parents = 1 and jobs.run_at <= statement_timestamp()
                    then 'pending'
                    else jobs.state
                end,
                ready_at = case
                    when jobs.unfinished_parents = 1 and jobs.run_at <= statement_timestamp()
                    then statement_timestamp()
                end
            from child
            where jobs.project_id = $1 and jobs.id = child.id
            returning jobs.id, jobs.queue, jobs.job_type, jobs.rank, jobs.run_at, jobs.state,
                      jobs.constraint_key, jobs.unfinished_parents,
                      jobs.state <> child.was as is_moved, case
                          when jobs.takes_turns and jobs.state = 'pending'
                          then note_turn(jobs.project_id, jobs.queue, jobs.group_key)
                      end as turn
        ), counted as (
            insert into queue_deltas (project_id, queue, scheduled, active)
            select $1, queue, -count(*), count(*)
            from freed
            where is_moved
            group by queue
        )
        select $1 "project_id!: ProjectId", id "id!: JobId", queue "queue!", job_type "job_type!",
               rank "rank!", run_at "run_at!", state "state!: StoredState",
               constraint_key is not null "is_constrained!",
               turn is true "has_noted_turn!"
        from freed
        where unfinished_parents = 0
        "#,
        parent.project_id.0,
        parent.id.0,
        end as FinalState,
    )
    .fetch_all(conn)
    .await
}

/// The children whose dependency on a job that ended like this can no longer be met.
pub async fn broken_children(
    conn: &mut PgConnection,
    parent: JobKey,
    end: FinalState,
) -> sqlx::Result<Vec<JobKey>> {
    sqlx::query_as!(
        JobKey,
        r#"
        select child.project_id "project_id: ProjectId", child.id "id: JobId"
        from job_edges edge
        join jobs child on child.project_id = edge.project_id and child.id = edge.child_id
        where edge.project_id = $1 and edge.parent_id = $2 and child.unfinished_parents > 0
            and dependency_standing(edge.condition, edge.is_met, $3) = 'broken'
        order by child.id
        "#,
        parent.project_id.0,
        parent.id.0,
        end as FinalState,
    )
    .fetch_all(conn)
    .await
}
