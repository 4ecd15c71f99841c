//! Deleting what is past its retention.

use sqlx::PgConnection;
use uuid::Uuid;

use fencepost_domain::{
    ids::{JobId, ProjectId},
    limits::DELETED_KEEP_SECONDS,
};

/// Finished jobs of a queue that one pass deletes, each with everything that belongs to it. The
/// statement carries the same number as a literal.
pub const MAX_PRUNED_JOBS: usize = 1_000;

/// Hours for which the server's own jobs are kept.
const CANARY_RETENTION_HOURS: i32 = 1;
/// Hours for which deliveries are kept that were accepted or cancelled.
pub const DELIVERED_RETENTION_HOURS: i32 = 24;

/// A queue that is due to be looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DueQueue {
    pub project_id: ProjectId,
    pub queue: String,
    /// Hours for which it keeps its finished jobs.
    pub retention_hours: i32,
}

/// Queues of one pass. The statement carries the same number as a literal.
pub const MAX_DUE_QUEUES: usize = 50;
/// A queue that was taken is due again after this many seconds, if it could not be pruned or its
/// node has died.
const TAKEN_SECONDS: f64 = 120.0;
/// A queue whose oldest job must stay, because its children wait, is looked at again after this
/// many seconds, at the earliest.
const PAUSE_SECONDS: f64 = 60.0;

/// Takes the queues that have been due for longest. The default retention is `default_days`.
pub async fn take_due_queues(
    conn: &mut PgConnection,
    default_days: i32,
) -> sqlx::Result<Vec<DueQueue>> {
    sqlx::query_as!(
        DueQueue,
        r#"
        with due as materialized (
            select project_id, queue
            from retention_dues
            where due_at <= now()
            order by due_at
            limit 50
            for update skip locked
        ), taken as (
            update retention_dues
            set due_at = now() + make_interval(secs => $4)
            from due
            where retention_dues.project_id = due.project_id and retention_dues.queue = due.queue
            returning retention_dues.project_id, retention_dues.queue
        )
        select taken.project_id "project_id: ProjectId", taken.queue,
               case projects.kind
                   when 'canary' then $2
                   when 'outbox' then $3
                   else 24 * coalesce(setting.retention_days, $1)
               end "retention_hours!"
        from taken
        join projects on projects.id = taken.project_id
        left join queues setting
            on setting.project_id = taken.project_id and setting.name = taken.queue
        "#,
        default_days,
        CANARY_RETENTION_HOURS,
        DELIVERED_RETENTION_HOURS,
        TAKEN_SECONDS,
    )
    .fetch_all(conn)
    .await
}

/// Says when a queue that was taken is due again: now, behind all that are due, if it has more;
/// else when its oldest job is past its retention. A change of its retention meanwhile stays.
pub async fn set_due(conn: &mut PgConnection, due: &DueQueue, is_more: bool) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update retention_dues
        set due_at = case
            when $4 then now()
            else greatest(
                now() + make_interval(secs => $5),
                make_interval(hours => $3) + coalesce((
                    select completed_at
                    from finished_jobs
                    where project_id = $1 and queue = $2
                    order by completed_at
                    limit 1
                ), now())
            )
        end
        where project_id = $1 and queue = $2 and due_at > now()
        ",
        due.project_id.0,
        due.queue,
        due.retention_hours,
        is_more,
        PAUSE_SECONDS,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Deletes log chunks of the oldest finished jobs of a queue, at most [`MAX_PRUNED_CHUNKS`], and
/// returns how many: one job may have very many.
pub async fn prune_logs(conn: &mut PgConnection, due: &DueQueue) -> sqlx::Result<u64> {
    let pruned = sqlx::query!(
        "
        with old as materialized (
            select id
            from finished_jobs
            where project_id = $1 and queue = $2
                and completed_at < now() - make_interval(hours => $3)
            order by completed_at
            limit 1000
        ), chunks as materialized (
            select chunk.job_id, chunk.attempt, chunk.stream, chunk.sequence
            from old
            join job_logs chunk on chunk.project_id = $1 and chunk.job_id = old.id
            limit 5000
        )
        delete from job_logs
        using chunks
        where job_logs.project_id = $1 and job_logs.job_id = chunks.job_id
            and job_logs.attempt = chunks.attempt and job_logs.stream = chunks.stream
            and job_logs.sequence = chunks.sequence
        ",
        due.project_id.0,
        due.queue,
        due.retention_hours,
    )
    .execute(conn)
    .await?;
    Ok(pruned.rows_affected())
}

/// Log chunks of one statement. It carries the same number as a literal.
pub const MAX_PRUNED_CHUNKS: u64 = 5_000;

/// Result of one batch of deletions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pruned {
    pub jobs: i64,
    /// The workflows they belonged to.
    pub workflows: Vec<Uuid>,
}

/// The oldest finished jobs of a queue, at most [`MAX_PRUNED_JOBS`]. A job whose children still
/// wait is kept: they need its result.
pub async fn find_old_jobs(conn: &mut PgConnection, due: &DueQueue) -> sqlx::Result<Vec<JobId>> {
    sqlx::query_scalar!(
        r#"
        select id "id: JobId"
        from finished_jobs
        where project_id = $1 and queue = $2
            and completed_at < now() - make_interval(hours => $3)
            and not exists (
                select
                from job_edges edge
                join jobs child on child.project_id = $1 and child.id = edge.child_id
                where edge.project_id = $1 and edge.parent_id = finished_jobs.id
                    and child.completed_at is null
            )
            and not exists (
                select from set_aside
                where project_id = $1 and work = 'retention' and item = finished_jobs.id::text
                    and next_try_at > now()
            )
        order by completed_at
        limit 1000
        "#,
        due.project_id.0,
        due.queue,
        due.retention_hours,
    )
    .fetch_all(conn)
    .await
}

/// Deletes finished jobs of a queue that are still past its retention, with everything that belongs
/// to them. Those that another node has locked are skipped.
pub async fn prune_jobs(
    conn: &mut PgConnection,
    due: &DueQueue,
    ids: &[Uuid],
) -> sqlx::Result<Pruned> {
    sqlx::query_as!(
        Pruned,
        r#"
        with old as materialized (
            select id, state, case when is_skipped then 'skipped' else state end as outcome
            from finished_jobs
            where project_id = $1 and id = any($4) and queue = $2
                and completed_at < now() - make_interval(hours => $3)
                and not exists (
                    select
                    from job_edges edge
                    join jobs child on child.project_id = $1 and child.id = edge.child_id
                    where edge.project_id = $1 and edge.parent_id = finished_jobs.id
                        and child.completed_at is null
                )
            for update skip locked
        ), gone as (
            delete from finished_jobs
            using old
            where finished_jobs.project_id = $1 and finished_jobs.id = old.id
        ), bodies as (
            delete from job_bodies
            using old
            where job_bodies.project_id = $1 and job_bodies.job_id = old.id
            returning job_bodies.workflow_id
        ), past as (
            delete from attempts
            using old
            where attempts.project_id = $1 and attempts.job_id = old.id
        ), events as (
            delete from job_events
            using old
            where job_events.project_id = $1 and job_events.job_id = old.id
        ), logs as (
            delete from job_logs
            using old
            where job_logs.project_id = $1 and job_logs.job_id = old.id
        ), totals as (
            delete from job_log_totals
            using old
            where job_log_totals.project_id = $1 and job_log_totals.job_id = old.id
        ), checkpoints as (
            delete from job_checkpoints
            using old
            where job_checkpoints.project_id = $1 and job_checkpoints.job_id = old.id
        ), edges as (
            delete from job_edges
            using old
            where job_edges.project_id = $1 and job_edges.child_id = old.id
        ), children as (
            update job_edges
            set outcome = old.outcome
            from old
            where job_edges.project_id = $1 and job_edges.parent_id = old.id
                -- Those edges are deleted: one statement must not touch a row twice.
                and not exists (select from old child where child.id = job_edges.child_id)
        ), counted as (
            insert into queue_deltas (project_id, queue, succeeded, cancelled)
            select $1, $2, -count(*) filter (where state = 'succeeded'),
                   -count(*) filter (where state = 'cancelled')
            from old
            having count(*) > 0
        )
        select (select count(*) from old) "jobs!",
               array(
                   select distinct workflow_id from bodies where workflow_id is not null
               ) "workflows!: Vec<Uuid>"
        "#,
        due.project_id.0,
        due.queue,
        due.retention_hours,
        ids,
    )
    .fetch_one(conn)
    .await
}

/// Deletes those of these workflows that have no job left, and the ones that they re-ran if those
/// have none left either. The first run stays as long as its latest re-run: clients know the
/// workflow by that id.
pub async fn prune_workflows(
    conn: &mut PgConnection,
    project_id: ProjectId,
    workflows: &[Uuid],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with empty as materialized (
            select workflows.id
            from workflows
            where project_id = $1 and (id = any($2) or successor_id = any($2)) and not exists (
                select
                from workflow_jobs part
                left join jobs live on live.project_id = $1 and live.id = part.job_id
                left join finished_jobs ended on ended.project_id = $1 and ended.id = part.job_id
                where part.project_id = $1
                    and part.workflow_id in (workflows.id, workflows.successor_id)
                    and (live.id is not null or ended.id is not null)
            )
        ), parts as (
            delete from workflow_jobs
            using empty
            where workflow_jobs.project_id = $1 and workflow_jobs.workflow_id = empty.id
        ), starts as (
            delete from workflow_starts
            using empty
            where workflow_starts.project_id = $1 and workflow_starts.workflow_id = empty.id
        )
        delete from workflows
        using empty
        where workflows.project_id = $1 and workflows.id = empty.id
        ",
        project_id.0,
        workflows,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Days after which an empty queue without settings is forgotten.
pub const EMPTY_QUEUE_KEEP_DAYS: i32 = 1;

/// Forgets empty queues without settings that have not changed for [`EMPTY_QUEUE_KEEP_DAYS`], among
/// the next 5,000 queues after this one. Returns the last of these; none: there are no more.
pub async fn prune_empty_queues(
    conn: &mut PgConnection,
    (after_project, after_queue): &(ProjectId, String),
) -> sqlx::Result<Option<(ProjectId, String)>> {
    let last = sqlx::query!(
        r#"
        with looked_at as materialized (
            select project_id, queue
            from queue_counts
            where (project_id, queue) > ($1, $2)
            order by project_id, queue
            limit 5000
        ), gone as (
            delete from queue_counts
            using looked_at
            where queue_counts.project_id = looked_at.project_id
                and queue_counts.queue = looked_at.queue
                and queue_counts.updated_at < now() - make_interval(days => $3)
                and queue_counts.scheduled = 0 and queue_counts.active = 0
                and queue_counts.backoff = 0 and queue_counts.dead_letter = 0
                and queue_counts.succeeded = 0 and queue_counts.cancelled = 0
                and not exists (
                    select from queues
                    where queues.project_id = looked_at.project_id
                        and queues.name = looked_at.queue
                )
        )
        select project_id "project_id: ProjectId", queue
        from looked_at
        order by project_id desc, queue desc
        limit 1
        "#,
        after_project.0,
        after_queue,
        EMPTY_QUEUE_KEEP_DAYS,
    )
    .fetch_optional(conn)
    .await?;
    Ok(last.map(|it| (it.project_id, it.queue)))
}

/// Deletes queue rates that are past their retention. Returns how many.
pub async fn prune_rates(conn: &mut PgConnection) -> sqlx::Result<u64> {
    let pruned = sqlx::query!(
        "
        delete from queue_rates
        using (
            select project_id, queue, minute
            from queue_rates
            where minute < now() - interval '2 hours'
            order by minute
            limit 500
            for update skip locked
        ) old
        where queue_rates.project_id = old.project_id and queue_rates.queue = old.queue
            and queue_rates.minute = old.minute
        ",
    )
    .execute(conn)
    .await?;
    Ok(pruned.rows_affected())
}

/// Deletes statistics that are past their retention: minutes after a day, hours after a month, and
/// totals of pairs not seen for a month. Returns how many rows.
pub async fn prune_stats(conn: &mut PgConnection) -> sqlx::Result<u64> {
    let pruned = sqlx::query!(
        "
        with old as materialized (
            select old.project_id, old.resolution, old.at, old.queue, old.job_type
            from (
                values ('minute', interval '26 hours'), ('hour', interval '32 days'),
                       ('total', interval '32 days')
            ) as kept(resolution, period)
            cross join lateral (
                select project_id, resolution, at, queue, job_type
                from job_stats
                where resolution = kept.resolution and updated_at < now() - kept.period
                order by updated_at
                limit 500
                for update skip locked
            ) old
            limit 500
        )
        delete from job_stats
        using old
        where job_stats.project_id = old.project_id and job_stats.resolution = old.resolution
            and job_stats.at = old.at and job_stats.queue = old.queue
            and job_stats.job_type = old.job_type
        ",
    )
    .execute(conn)
    .await?;
    Ok(pruned.rows_affected())
}

/// Forgets numbers that groups had of their own under shared limits, and that have ended. Returns
/// how many.
pub async fn prune_numbers_under_limits(conn: &mut PgConnection) -> sqlx::Result<u64> {
    let pruned = sqlx::query!(
        "
        with ended as materialized (
            select project_id, limit_name, group_key
            from shared_limit_keys
            where expires_at <= now()
            order by expires_at
            limit $1
            for update skip locked
        )
        update shared_limit_keys
        set max_running = null, rate_counts = null, rate_seconds = null, expires_at = null
        from ended
        where shared_limit_keys.project_id = ended.project_id
            and shared_limit_keys.limit_name = ended.limit_name
            and shared_limit_keys.group_key = ended.group_key
        ",
        super::MAX_SWEEP_ROWS as i64,
    )
    .execute(conn)
    .await?;
    Ok(pruned.rows_affected())
}

/// Forgets keys of shared limits of which nothing is left to know. Returns how many.
pub async fn prune_shared_limit_keys(conn: &mut PgConnection) -> sqlx::Result<u64> {
    let pruned = sqlx::query!(
        "
        with ended as materialized (
            select project_id, limit_name, group_key
            from shared_limit_keys
            where ends_at < now() - interval '1 minute'
            order by ends_at
            limit $1
            for update skip locked
        )
        delete from shared_limit_keys
        using ended
        where shared_limit_keys.project_id = ended.project_id
            and shared_limit_keys.limit_name = ended.limit_name
            and shared_limit_keys.group_key = ended.group_key
        ",
        super::MAX_SWEEP_ROWS as i64,
    )
    .execute(conn)
    .await?;
    Ok(pruned.rows_affected())
}

/// Forgets deleted jobs after [`DELETED_KEEP_SECONDS`], at most [`super::MAX_SWEEP_ROWS`]. Returns
/// how many.
pub async fn prune_deleted_jobs(conn: &mut PgConnection) -> sqlx::Result<u64> {
    let pruned = sqlx::query!(
        "
        delete from deleted_jobs
        using (
            select project_id, job_id
            from deleted_jobs
            where deleted_at < now() - make_interval(secs => $1::int)
            order by deleted_at
            limit 500
            for update skip locked
        ) old
        where deleted_jobs.project_id = old.project_id and deleted_jobs.job_id = old.job_id
        ",
        DELETED_KEEP_SECONDS,
    )
    .execute(conn)
    .await?;
    Ok(pruned.rows_affected())
}
