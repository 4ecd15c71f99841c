//! Retrying ended jobs by request. Each statement runs in a transaction that has locked what it
//! changes.

use fencepost_domain::{
    ids::{JobId, JobKey, ProjectId},
    job::StoredState,
};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::settle::settle_success::WaitingJob;

/// Retries a dead letter: failures count from 0, and attempts are numbered on. None if it is not a
/// dead letter.
///
/// # Errors
/// A unique violation when a live job has taken its unique key.
pub async fn requeue_dead_letter(
    conn: &mut PgConnection,
    key: JobKey,
) -> sqlx::Result<Option<WaitingJob>> {
    sqlx::query_as!(
        WaitingJob,
        r#"
        with line as materialized (
            select dead.group_key is not null and setting.has_gate
                       and must_wait_for_group($1, dead.queue, dead.group_key) as must_wait,
                   setting.group_fair and setting.group_order <> 'strict' as has_turns,
                   dead.group_place is null or setting.group_order = 'strict'
                       and setting.group_on_dead = 'skip' as is_passed,
                   -- The first of its group that waits for it.
                   (
                       select min(child.group_place)
                       from job_edges edge
                       join jobs child on child.project_id = $1 and child.id = edge.child_id
                       where edge.project_id = $1 and edge.parent_id = $2 and not edge.is_met
                           and child.queue = dead.queue and child.group_key = dead.group_key
                   ) as child_place
            from jobs dead
            left join queues setting
                on setting.project_id = $1 and setting.name = dead.queue
            where dead.project_id = $1 and dead.id = $2
        ), revived as (
            update jobs
            set state = case when line.must_wait then 'scheduled' else 'pending' end,
                waits_for_group = case when line.must_wait then true end,
                takes_turns = case when line.has_turns then true end,
                unfinished_parents = case when line.must_wait then 1 else 0 end,
                group_place = case
                    when jobs.group_key is null then null
                    when line.child_place is not null
                    then coalesce(jobs.group_place, line.child_place - 1)
                    when line.is_passed then nextval('job_places')
                    else jobs.group_place
                end,
                failures = 0, completed_at = null, progress = null,
                run_at = statement_timestamp(), ready_at = null, cancel_requested = false,
                expires_at = case when expires_at > statement_timestamp() then expires_at end
            from line
            where jobs.project_id = $1 and jobs.id = $2 and jobs.completed_at is not null
            returning jobs.project_id, jobs.id, jobs.queue, jobs.job_type, jobs.rank, jobs.run_at,
                      jobs.state, jobs.constraint_key, jobs.batch_id, jobs.group_key,
                      jobs.waits_for_group, case
                          when jobs.takes_turns and not line.must_wait
                          then note_turn(jobs.project_id, jobs.queue, jobs.group_key)
                      end as turn
        ), counted as (
            insert into queue_deltas (project_id, queue, scheduled, active, dead_letter)
            select $1, queue, (state = 'scheduled')::int, (state = 'pending')::int, -1 from revived
        ), noted as (
            insert into group_notes (project_id, queue, group_key)
            select $1, queue, group_key from revived where waits_for_group
        ), ends as (
            insert into job_ends (project_id, job_id, batch_id, dead_letter)
            select $1, id, batch_id, -1 from revived where batch_id is not null
        )
        select project_id "project_id!: ProjectId", id "id!: JobId", queue "queue!", job_type "job_type!",
               rank "rank!", run_at "run_at!", state "state!: StoredState",
               constraint_key is not null "is_constrained!",
               turn is true "has_noted_turn!"
        from revived
        "#,
        key.project_id.0,
        key.id.0,
    )
    .fetch_optional(conn)
    .await
}

/// Locks the live parents of these jobs, so that none ends before the jobs are live again.
pub async fn lock_parents_of(
    conn: &mut PgConnection,
    project_id: ProjectId,
    jobs: &[JobId],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with parent as materialized (
            select distinct parent_id from job_edges where project_id = $1 and child_id = any($2)
        )
        select jobs.id
        from parent
        join jobs on jobs.project_id = $1 and jobs.id = parent.parent_id
        order by jobs.id
        for update of jobs
        ",
        project_id.0,
        &jobs.iter().map(|it| it.0).collect::<Vec<Uuid>>(),
    )
    .fetch_all(conn)
    .await?;
    Ok(())
}

/// Retries cancelled jobs, except for those with a dependency that can no longer be met. A job that
/// has never run keeps a `run_at` in the future; a backoff is dropped. A job waits for its open
/// dependencies: those parents must be locked by an earlier statement of this transaction.
///
/// # Errors
/// A unique violation when a live job has taken the unique key of one of them.
pub async fn requeue_cancelled(
    conn: &mut PgConnection,
    project_id: ProjectId,
    jobs: &[JobId],
) -> sqlx::Result<Vec<WaitingJob>> {
    sqlx::query_as!(
        WaitingJob,
        r#"
        with parted as materialized (
            select ended.id,
                   -- A job without parents waits for the start of its workflow.
                   greatest(count(*) filter (where edge.standing = 'open'), case when exists (
                       select
                       from job_bodies body
                       join workflows on workflows.project_id = $1 and workflows.id = body.workflow_id
                       where body.project_id = $1 and body.job_id = ended.id
                           and workflows.is_held and workflows.cancelled_at is null
                   ) then 1 else 0 end)::int as unfinished,
                   count(*) filter (where edge.standing = 'broken') as bad
            from finished_jobs ended
            left join lateral (
                select dependency_standing(edge.condition, edge.is_met, coalesce(
                    live.state, case when past.is_skipped then 'skipped' else past.state end,
                    edge.outcome
                )) as standing
                from job_edges edge
                left join jobs live on live.project_id = $1 and live.id = edge.parent_id
                left join finished_jobs past on past.project_id = $1 and past.id = edge.parent_id
                where edge.project_id = $1 and edge.child_id = ended.id
            ) edge on true
            where ended.project_id = $1 and ended.id = any($2) and ended.state = 'cancelled'
            group by ended.id
        ), gone as (
            delete from finished_jobs
            using parted
            where finished_jobs.project_id = $1 and finished_jobs.id = parted.id and parted.bad = 0
            returning finished_jobs.*, parted.unfinished
        ), met as (
            -- What a failed parent has met, and its cascade has not noted yet.
            update job_edges
            set is_met = true
            from gone
            where job_edges.project_id = $1 and job_edges.child_id = gone.id
                and job_edges.condition <> 'succeeded' and not job_edges.is_met
                and (
                    job_edges.outcome <> 'succeeded'
                    or exists (
                        select from jobs
                        where project_id = $1 and id = job_edges.parent_id and state = 'dead_letter'
                    )
                    or exists (
                        select from finished_jobs
                        where project_id = $1 and id = job_edges.parent_id and state = 'cancelled'
                    )
                )
        ), back as (
            insert into jobs (
                project_id, id, queue, job_type, state, rank, run_at, created_at, attempt, failures,
                max_attempts, timeout_seconds, labels, constraint_key, concurrency_key,
                concurrency_limit,
                unique_key, expires_at, unfinished_parents, children, batch_id, has_callbacks,
                has_command, group_key, group_place, waits_for_group, takes_turns
            )
            select gone.project_id, gone.id, gone.queue, gone.job_type,
                   case
                       when gone.unfinished > 0 or gate.waits then 'scheduled'
                       when not past.ran and gone.run_at > statement_timestamp() then 'scheduled'
                       else 'pending'
                   end,
                   gone.rank,
                   case
                       when past.ran then statement_timestamp()
                       else greatest(gone.run_at, statement_timestamp())
                   end,
                   gone.created_at, gone.attempt, 0, gone.max_attempts, gone.timeout_seconds,
                   body.labels, body.constraint_key, body.concurrency_key, body.concurrency_limit,
                   body.unique_key,
                   case when body.expires_at > statement_timestamp() then body.expires_at end,
                   gone.unfinished + gate.waits::int, gone.children, body.batch_id,
                   case when body.callbacks is not null then true end,
                   nullif(offers_command(body.payload), false), body.group_key,
                   case when body.group_key is not null then nextval('job_places') end,
                   nullif(gate.waits, false),
                   nullif(takes_turns(gone.project_id, gone.queue), false)
            from gone
            join job_bodies body on body.project_id = gone.project_id and body.job_id = gone.id
            cross join lateral (
                select case when body.group_key is not null
                           then must_wait_for_group(gone.project_id, gone.queue, body.group_key)
                           else false
                       end as waits
            ) gate
            cross join lateral (
                select exists (
                    select from attempts where project_id = gone.project_id and job_id = gone.id
                ) as ran
            ) past
            returning project_id, id, queue, job_type, rank, run_at, state, constraint_key, batch_id,
                      group_key, waits_for_group, case
                          when takes_turns and state = 'pending'
                          then note_turn(project_id, queue, group_key)
                      end as turn
        ), noted as (
            insert into group_notes (project_id, queue, group_key)
            select distinct project_id, queue, group_key from back where waits_for_group
        ), ends as (
            insert into job_ends (project_id, job_id, batch_id, cancelled)
            select $1, id, batch_id, -1 from back where batch_id is not null
        ), counted as (
            insert into queue_deltas (project_id, queue, scheduled, active, cancelled)
            select $1, queue, count(*) filter (where state = 'scheduled'),
                   count(*) filter (where state <> 'scheduled'), -count(*)
            from back
            group by queue
        )
        select project_id "project_id!: ProjectId", id "id!: JobId", queue "queue!", job_type "job_type!",
               rank "rank!", run_at "run_at!", state "state!: StoredState",
               constraint_key is not null "is_constrained!",
               turn is true "has_noted_turn!"
        from back
        "#,
        project_id.0,
        &jobs.iter().map(|it| it.0).collect::<Vec<Uuid>>(),
    )
    .fetch_all(conn)
    .await
}

/// Records another parent as the reason why these jobs stay cancelled.
pub async fn blame_another(
    conn: &mut PgConnection,
    project_id: ProjectId,
    jobs: &[JobId],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update finished_jobs
        set cancelled_by = coalesce((
            select edge.parent_id
            from job_edges edge
            left join jobs live on live.project_id = $1 and live.id = edge.parent_id
            left join finished_jobs past on past.project_id = $1 and past.id = edge.parent_id
            where edge.project_id = $1 and edge.child_id = finished_jobs.id
                and dependency_standing(edge.condition, edge.is_met, coalesce(
                    live.state, case when past.is_skipped then 'skipped' else past.state end,
                    edge.outcome
                )) = 'broken'
            order by edge.ordinal
            limit 1
        ), cancelled_by)
        where project_id = $1 and id = any($2)
        ",
        project_id.0,
        &jobs.iter().map(|it| it.0).collect::<Vec<Uuid>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}
