//! Groups of jobs: which jobs of a group may run, and what holds them. See ADR 17.

pub mod rates;
pub mod turns;

use chrono::{DateTime, Utc};
use fencepost_domain::{
    alarm::MAX_BLOCKED_GROUPS,
    ids::{JobId, JobKey, ProjectId},
    job::{RATE_LIMITED, StoredState},
    limits::MAX_PAUSED_GROUPS,
};
use sqlx::PgConnection;

/// A group of one queue.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GroupKey {
    pub project_id: ProjectId,
    pub queue: String,
    pub group: String,
}

/// Pauses a group for this many seconds, or until it is resumed. A later end stays. Returns whether
/// it was not paused before. The queue's settings must be locked: its claims look for pauses from
/// now on. They rest for a moment if more than 500 of the group's jobs are to wait again.
pub async fn pause(
    conn: &mut PgConnection,
    group: &GroupKey,
    seconds: Option<i32>,
) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        with before as materialized (
            select paused_until > statement_timestamp() as is_paused
            from job_groups
            where project_id = $1 and queue = $2 and group_key = $3
        ), gated as (
            update queues
            set has_gate = true, groups_close_until = case
                    when (
                        select count(*) > 500
                        from (
                            select
                            from jobs
                            where project_id = $1 and queue = $2 and group_key = $3
                                and group_key is not null and waits_for_group is not true
                                and completed_at is null
                            limit 501
                        ) open
                    ) then statement_timestamp() + interval '1 second'
                    else groups_close_until
                end
            where project_id = $1 and name = $2
        ), noted as (
            insert into group_notes (project_id, queue, group_key) values ($1, $2, $3)
        )
        insert into job_groups (project_id, queue, group_key, paused_until)
        values ($1, $2, $3, coalesce(
            statement_timestamp() + make_interval(secs => $4::int), 'infinity'
        ))
        on conflict (project_id, queue, group_key) do update
        set paused_until = greatest(job_groups.paused_until, excluded.paused_until),
            -- A pause that has ended has a row until admission deletes it.
            paused_at = case
                when (select is_paused from before) then job_groups.paused_at
                else statement_timestamp()
            end
        returning (select is_paused from before) is not true "is_new!"
        "#,
        group.project_id.0,
        group.queue,
        group.group,
        seconds,
    )
    .fetch_one(conn)
    .await
}

/// Returns true if a group has a row of a pause, or fewer than `max` groups of its project
/// have one.
pub async fn may_pause(conn: &mut PgConnection, group: &GroupKey, max: i64) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        select exists (
            select from job_groups where project_id = $1 and queue = $2 and group_key = $3
        ) or (
            select count(*) < $4
            from (select from job_groups where project_id = $1 limit $4) counted
        ) "may!"
        "#,
        group.project_id.0,
        group.queue,
        group.group,
        max,
    )
    .fetch_one(conn)
    .await
}

/// Lets no job of a queue start for this many seconds; a later end stays. Returns whether no rate
/// limit kept them from it until now. The queue's settings must be locked.
pub async fn rate_limit_queue(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    seconds: i32,
) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        with before as materialized (
            select rate_limited_until > statement_timestamp() as is_paused
            from queues
            where project_id = $1 and name = $2
        )
        update queues
        set has_gate = true, updated_at = now(),
            rate_limited_until = greatest(
                rate_limited_until, statement_timestamp() + make_interval(secs => $3::int)
            )
        from before
        where project_id = $1 and name = $2
        returning before.is_paused is not true "is_new!"
        "#,
        project_id.0,
        queue,
        seconds,
    )
    .fetch_one(conn)
    .await
}

/// The queue and the group of a live job.
pub async fn of_job(
    conn: &mut PgConnection,
    key: JobKey,
) -> sqlx::Result<Option<(String, Option<String>)>> {
    let row = sqlx::query!(
        "select queue, group_key from jobs where project_id = $1 and id = $2",
        key.project_id.0,
        key.id.0,
    );
    Ok(row.fetch_optional(conn).await?.map(|it| (it.queue, it.group_key)))
}

/// Notes that an attempt has met a rate limit, and deletes the rows of all but the last `kept`
/// attempts of the job that did.
pub async fn note_rate_limited(
    conn: &mut PgConnection,
    key: JobKey,
    kept: i64,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with old as materialized (
            select attempt
            from attempts
            where project_id = $1 and job_id = $2 and outcome = 'released' and error_kind = $4
            order by attempt desc
            offset $3
        ), gone as (
            delete from attempts
            using old
            where attempts.project_id = $1 and attempts.job_id = $2
                and attempts.attempt = old.attempt
        )
        update jobs
        set rate_limited_claims = coalesce(rate_limited_claims, 0) + 1
        where project_id = $1 and id = $2
        ",
        key.project_id.0,
        key.id.0,
        kept,
        RATE_LIMITED,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Ends the pause of a group: admission deletes its row. Returns whether it was paused.
pub async fn resume(conn: &mut PgConnection, group: &GroupKey) -> sqlx::Result<bool> {
    let ended = sqlx::query!(
        "
        update job_groups
        set paused_until = statement_timestamp()
        where project_id = $1 and queue = $2 and group_key = $3
            and paused_until > statement_timestamp()
        ",
        group.project_id.0,
        group.queue,
        group.group,
    )
    .execute(conn)
    .await?;
    Ok(ended.rows_affected() > 0)
}

/// A group, with what it waits for.
#[derive(Debug, Clone)]
pub struct GroupRow {
    pub group: String,
    /// By the database's clock.
    pub now: DateTime<Utc>,
    /// None: not paused.
    pub paused_at: Option<DateTime<Utc>>,
    /// None: it is not paused, or until it is resumed.
    pub paused_until: Option<DateTime<Utc>>,
    /// When its rates let the next job start; none: they let one start, or there is none.
    pub full_until: Option<DateTime<Utc>>,
    /// Jobs that have not started, up to twice [`MAX_COUNTED_JOBS`].
    pub waiting: i64,
    /// Running ones among the first [`MAX_COUNTED_JOBS`] that do not wait for the group.
    pub running: i64,
    /// The first in line of those that have not ended, or the dead letter that blocks them.
    pub head_id: Option<JobId>,
    pub head_state: Option<StoredState>,
    pub head_run_at: Option<DateTime<Utc>>,
    pub head_created_at: Option<DateTime<Utc>>,
    /// Parents that it waits for.
    pub head_parents: Option<i32>,
}

/// Jobs of a group are counted up to this number, which is a literal in the statement.
pub const MAX_COUNTED_JOBS: i64 = 1_000;

/// These groups of a queue, in this order, whether they have jobs or not.
pub async fn find(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    groups: &[String],
) -> sqlx::Result<Vec<GroupRow>> {
    sqlx::query_as!(
        GroupRow,
        r#"
        select named.group_key as "group!", statement_timestamp() "now!",
               pause.paused_at "paused_at?", nullif(pause.paused_until, 'infinity') as paused_until,
               recent.full_until "full_until?",
               held.jobs + open.waiting "waiting!", open.running "running!", head.id "head_id?: JobId",
               head.state "head_state?: StoredState", head.run_at "head_run_at?",
               head.created_at "head_created_at?", head.parents "head_parents?"
        from unnest($3::text[]) with ordinality as named(group_key, number)
        left join job_groups pause
            on pause.project_id = $1 and pause.queue = $2 and pause.group_key = named.group_key
            and pause.paused_until > statement_timestamp()
        left join group_handouts recent on recent.project_id = $1 and recent.queue = $2
            and recent.group_key = named.group_key and recent.full_until > statement_timestamp()
        cross join lateral (
            select count(*) as jobs
            from (
                select
                from jobs
                where project_id = $1 and queue = $2 and group_key = named.group_key
                    and waits_for_group
                limit 1000
            ) counted
        ) held
        cross join lateral (
            select count(*) filter (where lease_id is null) as waiting,
                   count(lease_id) as running
            from (
                select lease_id
                from jobs
                where project_id = $1 and queue = $2 and group_key = named.group_key
                    and group_key is not null and waits_for_group is not true
                    and completed_at is null
                limit 1000
            ) counted
        ) open
        left join lateral (
            select *
            from (
                (
                    select id, state, run_at, created_at, unfinished_parents as parents, group_place
                    from jobs
                    where project_id = $1 and queue = $2 and group_key = named.group_key
                        and group_key is not null and waits_for_group is not true
                        and completed_at is null
                    order by group_place
                    limit 1
                )
                union all
                (
                    select id, state, run_at, created_at, unfinished_parents - 1, group_place
                    from jobs
                    where project_id = $1 and queue = $2 and group_key = named.group_key
                        and waits_for_group
                    order by group_place
                    limit 1
                )
                union all
                (
                    select id, state, run_at, created_at, unfinished_parents, group_place
                    from jobs
                    where project_id = $1 and queue = $2 and group_key = named.group_key
                        and group_place is not null and completed_at is not null
                        and exists (
                            select from queues
                            where project_id = $1 and name = $2 and group_order = 'strict'
                                and group_on_dead = 'block'
                        )
                    order by group_place
                    limit 1
                )
            ) line
            order by state = 'processing' desc, group_place
            limit 1
        ) head on true
        order by named.number
        "#,
        project_id.0,
        queue,
        groups,
    )
    .fetch_all(conn)
    .await
}

/// Numbers of groups of a queue that are blocked by a dead letter, or paused.
#[derive(Debug, Clone)]
pub struct HeldGroups {
    pub queue: String,
    /// Jobs of them wait behind a dead letter; up to [`MAX_BLOCKED_GROUPS`].
    pub blocked: i64,
    /// Up to [`MAX_PAUSED_GROUPS`].
    pub paused: i64,
}

/// The same for these queues, of which those without an order and without pauses are left out.
pub async fn held(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queues: &[&str],
) -> sqlx::Result<Vec<HeldGroups>> {
    sqlx::query_as!(
        HeldGroups,
        r#"
        select gated.name as queue, blocked.groups "blocked!", paused.groups "paused!"
        from queues gated
        cross join lateral (
            select count(*) as groups from blocked_groups($1, gated.name, $3)
        ) blocked
        cross join lateral (
            select count(*) as groups
            from (
                select
                from job_groups
                where project_id = $1 and queue = gated.name
                    and paused_until > statement_timestamp()
                limit $4
            ) counted
        ) paused
        where gated.project_id = $1 and gated.name = any($2) and gated.has_gate
        order by gated.name
        "#,
        project_id.0,
        queues as &[&str],
        MAX_BLOCKED_GROUPS,
        MAX_PAUSED_GROUPS,
    )
    .fetch_all(conn)
    .await
}

/// Which groups of a queue to list.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Listed {
    /// With jobs that wait for their group.
    pub waiting: bool,
    /// With other jobs that have not ended.
    pub open: bool,
    /// That are paused.
    pub paused: bool,
    /// With a dead letter that blocks them.
    pub blocked: bool,
}

/// Names of groups of a queue after `after`, in order.
pub async fn names(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    listed: Listed,
    after: &str,
    limit: i64,
) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar!(
        r#"
        with recursive seen as (
            select next_listed_group($1, $2, $3, $5, $6, $7, $8) as group_key
            union all
            select next_listed_group($1, $2, seen.group_key, $5, $6, $7, $8)
            from seen
            where seen.group_key is not null
        )
        select group_key "group_key!"
        from (select group_key from seen limit $4) first
        where group_key is not null
        "#,
        project_id.0,
        queue,
        after,
        limit,
        listed.waiting,
        listed.open,
        listed.paused,
        listed.blocked,
    )
    .fetch_all(conn)
    .await
}

/// Lets the group of a dead letter continue, as if it were gone. Returns whether it blocked the
/// group until now.
pub async fn unblock(conn: &mut PgConnection, key: JobKey) -> sqlx::Result<bool> {
    let passed = sqlx::query_scalar!(
        r#"
        with passed as (
            update jobs
            set group_place = null
            where project_id = $1 and id = $2 and completed_at is not null
                and group_place is not null
            returning project_id, queue, group_key
        ), noted as (
            insert into group_notes (project_id, queue, group_key)
            select project_id, queue, group_key from passed
        )
        select count(*) "passed!" from passed
        "#,
        key.project_id.0,
        key.id.0,
    )
    .fetch_one(conn)
    .await?;
    Ok(passed > 0)
}

/// Dead letters whose groups one statement unblocks at most.
pub const MAX_UNBLOCKED: u64 = 500;

/// The same for the dead letters of a queue with strict order that were stored before a time, up to
/// [`MAX_UNBLOCKED`]. Returns how many.
pub async fn unblock_stored_before(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    before: DateTime<Utc>,
) -> sqlx::Result<u64> {
    let passed = sqlx::query_scalar!(
        r#"
        with dead as materialized (
            select id
            from jobs
            where project_id = $1 and queue = $2 and group_key is not null
                and group_place is not null and completed_at is not null and created_at < $3
                and has_strict_order($1, $2)
            order by group_key, group_place
            limit $4
            for update skip locked
        ), passed as (
            update jobs
            set group_place = null
            from dead
            where jobs.project_id = $1 and jobs.id = dead.id
            returning jobs.group_key
        ), noted as (
            insert into group_notes (project_id, queue, group_key)
            select distinct $1::int, $2, group_key from passed
        )
        select count(*) "passed!" from passed
        "#,
        project_id.0,
        queue,
        before,
        i64::try_from(MAX_UNBLOCKED).unwrap_or(i64::MAX),
    )
    .fetch_one(conn)
    .await?;
    Ok(passed.unsigned_abs())
}

/// Whether a job has a group, and its queue or another has a strict order: it may not move there.
pub async fn is_ordered(conn: &mut PgConnection, key: JobKey, queue: &str) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        select exists (
            select
            from jobs
            join queues setting
                on setting.project_id = $1 and setting.name in (jobs.queue, $3)
            where jobs.project_id = $1 and jobs.id = $2 and jobs.group_key is not null
                and jobs.queue <> $3 and setting.group_order = 'strict'
        ) "is_ordered!"
        "#,
        key.project_id.0,
        key.id.0,
        queue,
    )
    .fetch_one(conn)
    .await
}
