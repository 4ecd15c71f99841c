//! Dead letters, by age and grouped by error fingerprint. The jobs stay in `jobs` until they are
//! retried or deleted.

use chrono::{DateTime, Utc};
use fencepost_domain::{
    ids::{JobId, JobKey, ProjectId},
    operation::Filter,
};
use sqlx::{PgConnection, Postgres, QueryBuilder};
use uuid::Uuid;

use crate::{TimePosition, settle::settle_success::WaitingJob};

/// Dead letters that one query examines at most.
pub const MAX_EXAMINED: i64 = 2_000;

/// A job that is dead-lettered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewDeadLetter {
    pub key: JobKey,
    pub fingerprint: Uuid,
    pub queue: String,
    pub job_type: String,
    pub error_type: Option<String>,
    pub message: Option<String>,
}

/// Stores dead letters, and counts them in their groups.
pub async fn insert(conn: &mut PgConnection, dead: &[NewDeadLetter]) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with dead as materialized (
            select sent.*, job.completed_at as died_at
            from unnest(
                $1::int[], $2::uuid[], $3::uuid[], $4::text[], $5::text[], $6::text[], $7::text[]
            ) as sent(project_id, job_id, fingerprint, queue, job_type, error_type, message)
            join jobs job on job.project_id = sent.project_id and job.id = sent.job_id
        ), letters as (
            insert into dead_letters (project_id, job_id, fingerprint, queue, job_type, died_at)
            select project_id, job_id, fingerprint, queue, job_type, died_at
            from dead
            on conflict (project_id, job_id) do update
            set fingerprint = excluded.fingerprint, died_at = excluded.died_at
        )
        insert into dead_letter_groups (
            project_id, fingerprint, job_type, error_type, sample_message, sample_job_id, jobs,
            first_seen_at, last_seen_at
        )
        select project_id, fingerprint, min(job_type), min(error_type),
               (array_agg(message order by job_id))[1], (array_agg(job_id order by job_id))[1],
               count(*), min(died_at), max(died_at)
        from dead
        group by project_id, fingerprint
        order by project_id, fingerprint
        on conflict (project_id, fingerprint) do update
        set jobs = dead_letter_groups.jobs + excluded.jobs, last_seen_at = excluded.last_seen_at
        ",
        &dead.iter().map(|it| it.key.project_id.0).collect::<Vec<_>>(),
        &dead.iter().map(|it| it.key.id.0).collect::<Vec<_>>(),
        &dead.iter().map(|it| it.fingerprint).collect::<Vec<_>>(),
        &dead.iter().map(|it| it.queue.as_str()).collect::<Vec<_>>() as &[&str],
        &dead.iter().map(|it| it.job_type.as_str()).collect::<Vec<_>>() as &[&str],
        &dead.iter().map(|it| it.error_type.as_deref()).collect::<Vec<_>>() as &[Option<&str>],
        &dead.iter().map(|it| it.message.as_deref()).collect::<Vec<_>>() as &[Option<&str>],
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Removes jobs from the dead letters, because they were retried or deleted. Empty groups are
/// deleted. Many transactions share the rows of groups: call it last in a transaction.
pub async fn remove(
    conn: &mut PgConnection,
    project_id: ProjectId,
    jobs: &[JobId],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with gone as (
            delete from dead_letters
            where project_id = $1 and job_id = any($2)
            returning fingerprint
        ), fewer as materialized (
            select groups.fingerprint, groups.jobs - gone.jobs as jobs
            from (select fingerprint, count(*) as jobs from gone group by fingerprint) gone
            join dead_letter_groups groups
                on groups.project_id = $1 and groups.fingerprint = gone.fingerprint
            order by groups.fingerprint
            for update of groups
        ), emptied as (
            delete from dead_letter_groups
            using fewer
            where dead_letter_groups.project_id = $1
                and dead_letter_groups.fingerprint = fewer.fingerprint and fewer.jobs <= 0
        )
        update dead_letter_groups
        set jobs = fewer.jobs
        from fewer
        where dead_letter_groups.project_id = $1
            and dead_letter_groups.fingerprint = fewer.fingerprint and fewer.jobs > 0
        ",
        project_id.0,
        &jobs.iter().map(|it| it.0).collect::<Vec<Uuid>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Counts dead letters and losses in the streak of each type whose queue has a circuit breaker and
/// fewer than [`fencepost_domain::limits::MAX_PAUSED_TYPES`] paused types, a number that the
/// statement carries as a literal; and pauses types with too many. Returns the queues in which a
/// type was paused: [`crate::queues::keep_paused_types`] must follow.
pub async fn brake(
    conn: &mut PgConnection,
    ended: &[&WaitingJob],
) -> sqlx::Result<Vec<(ProjectId, String)>> {
    let rows = sqlx::query!(
        r#"
        with died as materialized (
            select sent.project_id, sent.queue, sent.job_type, setting.brake_after,
                   count(*)::int as jobs
            from unnest($1::int[], $2::text[], $3::text[]) as sent(project_id, queue, job_type)
            join queues setting
                on setting.project_id = sent.project_id and setting.name = sent.queue
            where setting.brake_after is not null and cardinality(setting.paused_types) < 100
            group by sent.project_id, sent.queue, sent.job_type, setting.brake_after
        ), counted as (
            insert into queue_types (project_id, queue, job_type, streak, paused_at, paused_by)
            select project_id, queue, job_type, jobs,
                   case when jobs >= brake_after then statement_timestamp() end,
                   case when jobs >= brake_after then 'brake' end
            from died
            order by project_id, queue, job_type
            on conflict (project_id, queue, job_type) do update
            set streak = queue_types.streak + excluded.streak,
                paused_at = case
                    when queue_types.paused_at is null and queue_types.streak + excluded.streak >= (
                        select brake_after from queues
                        where project_id = queue_types.project_id and name = queue_types.queue
                    ) then statement_timestamp()
                    else queue_types.paused_at
                end,
                paused_by = case
                    when queue_types.paused_at is null and queue_types.streak + excluded.streak >= (
                        select brake_after from queues
                        where project_id = queue_types.project_id and name = queue_types.queue
                    ) then 'brake'
                    else queue_types.paused_by
                end
            returning project_id, queue, paused_at = statement_timestamp() as was_paused_now
        )
        select distinct project_id "project_id: ProjectId", queue
        from counted
        where was_paused_now
        order by project_id, queue
        "#,
        &ended.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &ended.iter().map(|it| it.queue.as_str()).collect::<Vec<_>>() as &[&str],
        &ended.iter().map(|it| it.job_type.as_str()).collect::<Vec<_>>() as &[&str],
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(|it| (it.project_id, it.queue)).collect())
}

/// Ends streaks of dead letters: jobs of these types have succeeded. A streak that another
/// transaction is counting up is left alone.
pub async fn end_streaks(conn: &mut PgConnection, succeeded: &[JobKey]) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with streak as materialized (
            select kind.project_id, kind.queue, kind.job_type
            from (
                select distinct job.project_id, job.queue, job.job_type
                from unnest($1::int[], $2::uuid[]) as named(project_id, id)
                join finished_jobs job on job.project_id = named.project_id and job.id = named.id
            ) done
            join queue_types kind
                on kind.project_id = done.project_id and kind.queue = done.queue
                and kind.job_type = done.job_type
            where kind.streak > 0
            for update of kind skip locked
        )
        update queue_types
        set streak = 0
        from streak
        where queue_types.project_id = streak.project_id and queue_types.queue = streak.queue
            and queue_types.job_type = streak.job_type
        ",
        &succeeded.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &succeeded.iter().map(|it| it.id.0).collect::<Vec<_>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// A dead letter of a page, or the last one that was examined.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct LetterRow {
    pub job_id: JobId,
    pub fingerprint: Uuid,
    pub died_at: DateTime<Utc>,
    /// False: the last row that was examined, whether it matches or not. It shows how far the query
    /// has come.
    pub is_match: bool,
}

/// Up to `limit` dead letters below a position, newest first, from the newest [`MAX_EXAMINED`];
/// and, if there were that many, the last one examined.
pub async fn page(
    conn: &mut PgConnection,
    project_id: ProjectId,
    filter: &Filter,
    before: Option<TimePosition>,
    limit: i64,
) -> sqlx::Result<Vec<LetterRow>> {
    let mut query = QueryBuilder::new("with examined as materialized (");
    push_examined(&mut query, project_id, filter);
    if let Some(TimePosition { at, id }) = before {
        query.push(" and (died_at, job_id) < (").push_bind(at).push(", ");
        query.push_bind(id).push(")");
    }
    push_matching(&mut query, filter, "desc", limit);
    query.build_query_as().fetch_all(conn).await
}

/// Up to `limit` dead letters above a position, oldest first, up to a time, from the oldest
/// [`MAX_EXAMINED`]; and, if there were that many, the last one examined.
pub async fn next_batch(
    conn: &mut PgConnection,
    project_id: ProjectId,
    filter: &Filter,
    after: Option<TimePosition>,
    until: DateTime<Utc>,
    limit: i64,
) -> sqlx::Result<Vec<LetterRow>> {
    let mut query = QueryBuilder::new("with examined as materialized (");
    push_examined(&mut query, project_id, filter);
    query.push(" and died_at <= ").push_bind(until);
    if let Some(TimePosition { at, id }) = after {
        query.push(" and (died_at, job_id) > (").push_bind(at).push(", ");
        query.push_bind(id).push(")");
    }
    push_matching(&mut query, filter, "asc", limit);
    query.build_query_as().fetch_all(conn).await
}

/// The dead letters of a project, or of one group, in a time range: each has an index of its own.
fn push_examined(query: &mut QueryBuilder<Postgres>, project_id: ProjectId, filter: &Filter) {
    query.push("select job_id, fingerprint, queue, job_type, died_at from dead_letters ");
    query.push("where project_id = ").push_bind(project_id.0);
    if let Some(fingerprint) = filter.fingerprint {
        query.push(" and fingerprint = ").push_bind(fingerprint);
    }
    if let Some(after) = filter.died_after {
        query.push(" and died_at >= ").push_bind(after);
    }
    if let Some(before) = filter.died_before {
        query.push(" and died_at < ").push_bind(before);
    }
}

/// Conditions that no index serves: they are applied to the examined rows.
fn push_unindexed(query: &mut QueryBuilder<Postgres>, filter: &Filter) {
    if let Some(queue) = &filter.queue {
        query.push(" and queue = ").push_bind(queue.clone());
    }
    if let Some(job_type) = &filter.job_type {
        query.push(" and job_type = ").push_bind(job_type.clone());
    }
}

fn push_matching(query: &mut QueryBuilder<Postgres>, filter: &Filter, order: &str, limit: i64) {
    let by = format!(" order by died_at {order}, job_id {order} limit ");
    let back = if order == "asc" { "desc" } else { "asc" };
    query.push(&by).push_bind(MAX_EXAMINED);
    query.push("), matching as (select job_id, fingerprint, died_at from examined where true");
    push_unindexed(query, filter);
    query.push(&by).push_bind(limit);
    query.push(") select job_id, fingerprint, died_at, true as is_match from matching union all (");
    query.push("select job_id, fingerprint, died_at, false from examined where ");
    query.push("(select count(*) from examined) = ").push_bind(MAX_EXAMINED);
    query.push(format!(" order by died_at {back}, job_id {back} limit 1)"));
    query.push(format!(" order by is_match desc, died_at {order}, job_id {order}"));
}

/// How many of the oldest [`MAX_COUNTED`] dead letters match, and whether there are more.
pub async fn count(
    conn: &mut PgConnection,
    project_id: ProjectId,
    filter: &Filter,
) -> sqlx::Result<(i64, bool)> {
    let mut query = QueryBuilder::new("with examined as materialized (");
    push_examined(&mut query, project_id, filter);
    query.push(" order by died_at, job_id limit ").push_bind(MAX_COUNTED + 1);
    query.push("), oldest as (select * from examined order by died_at, job_id limit ");
    query.push_bind(MAX_COUNTED).push(") select (select count(*) from oldest where true");
    push_unindexed(&mut query, filter);
    query.push("), (select count(*) from examined) > ").push_bind(MAX_COUNTED);
    query.build_query_as().fetch_one(conn).await
}

/// Dead letters are counted up to this number.
pub const MAX_COUNTED: i64 = 100_000;

/// Dead letters with the same fingerprint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupRow {
    pub fingerprint: Uuid,
    pub job_type: String,
    pub error_type: Option<String>,
    pub sample_message: Option<String>,
    pub sample_job_id: JobId,
    pub jobs: i64,
    pub first_seen_at: DateTime<Utc>,
    pub last_seen_at: DateTime<Utc>,
    /// Queues of the newest dead letters.
    pub queues: Vec<String>,
    /// Dead letters of the last hour, up to 100.
    pub last_hour: i64,
}

/// Groups of dead letters, the most recent first.
pub async fn groups(
    conn: &mut PgConnection,
    project_id: ProjectId,
    before: Option<TimePosition>,
    limit: i64,
) -> sqlx::Result<Vec<GroupRow>> {
    sqlx::query_as!(
        GroupRow,
        r#"
        select fingerprint, job_type, error_type, sample_message, sample_job_id "sample_job_id: JobId",
               jobs, first_seen_at, last_seen_at,
               array(
                   select distinct queue
                   from (
                       select queue
                       from dead_letters letter
                       where letter.project_id = $1
                           and letter.fingerprint = dead_letter_groups.fingerprint
                       order by died_at desc, job_id desc
                       limit 20
                   ) newest
                   order by queue
               ) "queues!",
               (
                   select count(*)
                   from (
                       select
                       from dead_letters letter
                       where letter.project_id = $1
                           and letter.fingerprint = dead_letter_groups.fingerprint
                           and died_at >= now() - interval '1 hour'
                       limit 100
                   ) recent
               ) "last_hour!"
        from dead_letter_groups
        where project_id = $1
            and (last_seen_at, fingerprint)
                < (coalesce($2, 'infinity'::timestamptz), coalesce($3, $5::uuid))
        order by last_seen_at desc, fingerprint desc
        limit $4
        "#,
        project_id.0,
        before.map(|it| it.at),
        before.map(|it| it.id),
        limit,
        Uuid::max(),
    )
    .fetch_all(conn)
    .await
}

/// Locks those of these jobs that are dead letters, in the order of their ids, and deletes them
/// with everything that belongs to them, but for the number of the last attempt. Returns which.
pub async fn delete(
    conn: &mut PgConnection,
    project_id: ProjectId,
    jobs: &[JobId],
) -> sqlx::Result<Vec<JobId>> {
    sqlx::query_scalar!(
        r#"
        with dead as materialized (
            select project_id, id, queue, attempt, group_key
            from jobs
            where project_id = $1 and id = any($2) and completed_at is not null
            order by id
            for update
        ), gone as (
            delete from jobs
            using dead
            where jobs.project_id = $1 and jobs.id = dead.id
        ), kept as (
            insert into deleted_jobs (project_id, job_id, attempt)
            select $1, id, attempt from dead
            on conflict (project_id, job_id)
                do update set attempt = excluded.attempt, deleted_at = excluded.deleted_at
        ), edges as (
            delete from job_edges
            using dead
            where job_edges.project_id = $1 and job_edges.child_id = dead.id
        ), children as (
            update job_edges
            set outcome = 'dead_letter'
            from dead
            where job_edges.project_id = $1 and job_edges.parent_id = dead.id
                -- Those edges are deleted: one statement must not touch a row twice.
                and not exists (select from dead child where child.id = job_edges.child_id)
        ), past as (
            delete from attempts
            using dead
            where attempts.project_id = $1 and attempts.job_id = dead.id
        ), bodies as (
            delete from job_bodies
            using dead
            where job_bodies.project_id = $1 and job_bodies.job_id = dead.id
        ), events as (
            delete from job_events
            using dead
            where job_events.project_id = $1 and job_events.job_id = dead.id
        ), logs as (
            delete from job_logs
            using dead
            where job_logs.project_id = $1 and job_logs.job_id = dead.id
        ), totals as (
            delete from job_log_totals
            using dead
            where job_log_totals.project_id = $1 and job_log_totals.job_id = dead.id
        ), checkpoints as (
            delete from job_checkpoints
            using dead
            where job_checkpoints.project_id = $1 and job_checkpoints.job_id = dead.id
        ), counted as (
            insert into queue_deltas (project_id, queue, dead_letter)
            select $1, queue, -count(*) from dead group by queue
        ), noted as (
            insert into group_notes (project_id, queue, group_key)
            select distinct dead.project_id, dead.queue, dead.group_key
            from dead
            cross join lateral (
                select from queues
                where project_id = dead.project_id and name = dead.queue
                    and group_order = 'strict'
                offset 0
            ) ordered
            where dead.group_key is not null
            returning 1
        )
        select id "id!: JobId" from dead
        "#,
        project_id.0,
        &jobs.iter().map(|it| it.0).collect::<Vec<Uuid>>(),
    )
    .fetch_all(conn)
    .await
}

/// Projects among these with dead letters older than that number of days.
pub async fn projects_with_old(
    conn: &mut PgConnection,
    projects: &[(ProjectId, i32)],
) -> sqlx::Result<Vec<ProjectId>> {
    sqlx::query_scalar!(
        r#"
        select asked.project_id "project_id!: ProjectId"
        from unnest($1::int[], $2::int[]) as asked(project_id, days)
        where exists (
            select from dead_letters
            where project_id = asked.project_id
                and died_at < date_trunc('day', now(), 'UTC') - make_interval(days => asked.days)
        )
        "#,
        &projects.iter().map(|it| it.0.0).collect::<Vec<_>>(),
        &projects.iter().map(|it| it.1).collect::<Vec<_>>(),
    )
    .fetch_all(conn)
    .await
}
