//! Pausing and resuming waiting jobs. Each statement locks the jobs itself, in the order of keys.

use fencepost_domain::{
    ids::{JobId, JobKey, ProjectId},
    job::StoredState,
};
use sqlx::PgConnection;

use crate::settle::settle_success::WaitingJob;

/// Pauses those of these jobs that wait and are not paused: no claim finds them, and no time or
/// parent makes them ready. Returns them.
pub async fn pause(conn: &mut PgConnection, jobs: &[JobKey]) -> sqlx::Result<Vec<WaitingJob>> {
    sqlx::query_as!(
        WaitingJob,
        r#"
        with waiting as materialized (
            select job.project_id, job.id, job.state
            from unnest($1::int[], $2::uuid[]) as named(project_id, id)
            join jobs job on job.project_id = named.project_id and job.id = named.id
            where job.lease_id is null and job.completed_at is null and job.paused_at is null
            order by job.project_id, job.id
            for update of job
        ), paused as (
            update jobs
            set paused_at = statement_timestamp(),
                unfinished_parents = jobs.unfinished_parents + 1,
                state = 'scheduled',
                ready_at = null
            from waiting
            where jobs.project_id = waiting.project_id and jobs.id = waiting.id
            returning jobs.project_id, jobs.id, jobs.queue, jobs.job_type, jobs.rank, jobs.run_at,
                      jobs.state, jobs.constraint_key, jobs.group_key, waiting.state as was
        ), noted as (
            insert into group_notes (project_id, queue, group_key)
            select distinct project_id, queue, group_key
            from paused
            where group_key is not null and was = 'pending'
        ), counted as (
            insert into queue_deltas (project_id, queue, scheduled, active, backoff)
            select project_id, queue, count(*), -count(*),
                   -count(*) filter (where was = 'backoff')
            from paused
            where was <> 'scheduled'
            group by project_id, queue
        )
        select project_id "project_id!: ProjectId", id "id!: JobId", queue "queue!", job_type "job_type!",
               rank "rank!", run_at "run_at!", state "state!: StoredState",
               constraint_key is not null "is_constrained!", false "has_noted_turn!"
        from paused
        "#,
        &jobs.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &jobs.iter().map(|it| it.id.0).collect::<Vec<_>>(),
    )
    .fetch_all(conn)
    .await
}

/// Resumes those of these jobs that are paused, and returns them. They wait for their parents and
/// their time; those that have been claimed before are in backoff meanwhile. A job of a group that
/// is due waits for the promoter, which knows whether its group has room.
pub async fn resume(conn: &mut PgConnection, jobs: &[JobKey]) -> sqlx::Result<Vec<WaitingJob>> {
    sqlx::query_as!(
        WaitingJob,
        r#"
        with paused as materialized (
            select job.project_id, job.id
            from unnest($1::int[], $2::uuid[]) as named(project_id, id)
            join jobs job on job.project_id = named.project_id and job.id = named.id
            where job.paused_at is not null
            order by job.project_id, job.id
            for update of job
        ), resumed as (
            update jobs
            set paused_at = null,
                -- An older node that starts a held workflow counts no pause.
                unfinished_parents = greatest(jobs.unfinished_parents - 1, 0),
                state = case
                    when jobs.unfinished_parents > 1 then 'scheduled'
                    when jobs.run_at > statement_timestamp() and jobs.attempt > 0 then 'backoff'
                    when jobs.run_at <= statement_timestamp() and jobs.group_key is null
                    then 'pending'
                    else 'scheduled'
                end,
                ready_at = case
                    when jobs.unfinished_parents <= 1 and jobs.run_at <= statement_timestamp()
                    then statement_timestamp()
                end
            from paused
            where jobs.project_id = paused.project_id and jobs.id = paused.id
            returning jobs.project_id, jobs.id, jobs.queue, jobs.job_type, jobs.rank, jobs.run_at,
                      jobs.state, jobs.constraint_key, case
                          when jobs.takes_turns and jobs.state = 'pending'
                          then note_turn(jobs.project_id, jobs.queue, jobs.group_key)
                      end as turn
        ), counted as (
            insert into queue_deltas (project_id, queue, scheduled, active, backoff)
            select project_id, queue, -count(*), count(*), count(*) filter (where state = 'backoff')
            from resumed
            where state <> 'scheduled'
            group by project_id, queue
        )
        select project_id "project_id!: ProjectId", id "id!: JobId", queue "queue!", job_type "job_type!",
               rank "rank!", run_at "run_at!", state "state!: StoredState",
               constraint_key is not null "is_constrained!", turn is true "has_noted_turn!"
        from resumed
        "#,
        &jobs.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &jobs.iter().map(|it| it.id.0).collect::<Vec<_>>(),
    )
    .fetch_all(conn)
    .await
}
