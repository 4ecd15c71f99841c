//! Settings of queues that claims must obey: limits, rates, pauses, paused types.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use fencepost_domain::{ids::ProjectId, rate::Handout};

/// Job types that are claimed separately in a queue with paused types. The statement carries the
/// same number as a literal.
pub const MAX_OPEN_TYPES: usize = 1_000;

/// Settings of a queue that claims must obey.
#[derive(Debug, Clone, PartialEq)]
pub struct QueueRules {
    /// Maximum number of running jobs.
    pub max_concurrency: Option<i32>,
    /// Maximum number of running jobs of each group.
    pub group_max_running: Option<i32>,
    /// Rate limits of each group: numbers of jobs, and seconds of their windows.
    pub group_rate_counts: Option<Vec<i32>>,
    pub group_rate_seconds: Option<Vec<i32>>,
    /// Whether groups take turns.
    pub has_turns: bool,
    /// Whether they have begun to, and not all of its jobs are found by their groups yet.
    pub begins_turns: bool,
    /// Names of the limits that it shares with other queues.
    pub shared_limits: Option<Vec<String>>,
    /// Maximum number of jobs started in a time window.
    pub rate_limit_count: Option<i32>,
    pub rate_limit_per_seconds: Option<i32>,
    /// Minimum lease if the poll sets none.
    pub default_lease_seconds: Option<i32>,
    pub is_paused: bool,
    /// Paused types.
    pub paused_types: Vec<String>,
    /// Milliseconds until its jobs may start again, because a worker has met a rate limit, or many
    /// jobs of a group are to wait for it; negative: they may.
    pub rests_ms: Option<f64>,
    /// Whether this transaction may count against its limits: it has none, or the lock was
    /// acquired.
    pub is_locked: bool,
}

/// Settings of a queue that claims must obey; none if it has no such settings. Tries the queue's
/// lock if it has a limit, of its groups or of its own, and is not paused.
pub async fn lock_queue(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> sqlx::Result<Option<QueueRules>> {
    sqlx::query_as!(
        QueueRules,
        r#"
        select max_concurrency, case when group_order <> 'strict' then group_max_running end
                   as group_max_running,
               case when group_order <> 'strict' then group_rate_counts end as group_rate_counts,
               case when group_order <> 'strict' then group_rate_seconds end as group_rate_seconds,
               group_fair and group_order <> 'strict' "has_turns!",
               group_walks > 1 and group_walk_job is not null "begins_turns!", shared_limits,
               rate_limit_count, rate_limit_per_seconds, default_lease_seconds,
               -- While a queue becomes strict, claims would walk over all of its open jobs.
               paused_at is not null or (group_order = 'strict' and group_walks > 1) "is_paused!",
               paused_types, (extract(epoch from greatest(rate_limited_until, groups_close_until)
                   - statement_timestamp()) * 1000)::float8 as rests_ms,
               case
                   when paused_at is null and (
                       max_concurrency is not null or rate_limit_count is not null
                       or group_max_running is not null or group_rate_counts is not null
                       or group_fair or shared_limits is not null
                   )
                   then pg_try_advisory_xact_lock(hashtextextended('queue ' || name, project_id))
                   else true
               end "is_locked!"
        from queues
        where project_id = $1 and name = $2 and (has_rules or has_gate)
        "#,
        project_id.0,
        queue,
    )
    .fetch_optional(conn)
    .await
}

/// How many jobs of each group of a queue run; an empty name: those without a group.
pub async fn busy_groups(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> sqlx::Result<Vec<(String, i64)>> {
    let rows = sqlx::query!(
        r#"
        select coalesce(group_key, '') "group_key!", count(*) "running!"
        from jobs
        where project_id = $1 and queue = $2 and state = 'processing'
        group by group_key
        "#,
        project_id.0,
        queue,
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(|it| (it.group_key, it.running)).collect())
}

/// What limits how many jobs of a group run or start.
#[derive(Debug, Clone, Copy)]
pub struct GroupLimitRow {
    /// None: all may run.
    pub max: Option<i32>,
    /// Jobs of the group that run.
    pub running: i64,
    /// When its rates let the next job start; none: one may.
    pub full_until: Option<DateTime<Utc>>,
    /// The database's clock.
    pub now: DateTime<Utc>,
}

/// The limits of a group; none: its queue has none, or a strict order.
pub async fn limit_of_group(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    group: &str,
) -> sqlx::Result<Option<GroupLimitRow>> {
    sqlx::query_as!(
        GroupLimitRow,
        r#"
        select coalesce(own.max_running, group_max_running) as max, (
                   select full_until
                   from group_handouts
                   where project_id = $1 and queue = $2 and group_key = $3
                       and (group_rate_counts is not null or own.rate_counts is not null)
               ) as full_until, (
                   select count(*)
                   from jobs
                   where project_id = $1 and queue = $2 and state = 'processing' and group_key = $3
               ) "running!", statement_timestamp() "now!"
        from queues
        left join group_overrides own on own.project_id = $1 and own.queue = $2
            and own.group_key = $3 and group_fair
            and (own.expires_at is null or own.expires_at > statement_timestamp())
        where queues.project_id = $1 and name = $2 and group_order <> 'strict' and (
            group_max_running is not null or group_rate_counts is not null
            or own.max_running is not null or own.rate_counts is not null
        )
        "#,
        project_id.0,
        queue,
        group,
    )
    .fetch_optional(conn)
    .await
}

/// The types of the queue's claimable jobs without a constraint key, except for these; at most
/// [`MAX_OPEN_TYPES`].
pub async fn open_types(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    paused: &[String],
) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar!(
        r#"
        with recursive seen as (
            (
                select job_type
                from jobs
                where project_id = $1 and queue = $2 and state = 'pending'
                    and constraint_key is null
                order by job_type, rank, run_at, id
                limit 1
            )
            union all
            select next.job_type
            from seen
            cross join lateral (
                select job_type
                from jobs
                where project_id = $1 and queue = $2 and state = 'pending'
                    and constraint_key is null
                    and job_type > seen.job_type
                order by job_type, rank, run_at, id
                limit 1
            ) next
        )
        select job_type "job_type!"
        from (select job_type from seen limit 1000) types
        where job_type <> all($3)
        "#,
        project_id.0,
        queue,
        paused,
    )
    .fetch_all(conn)
    .await
}

/// The recent starts of a rate-limited queue, and the time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handouts {
    /// Sorted; none: nothing yet.
    pub at: Option<Vec<DateTime<Utc>>>,
    pub jobs: Option<Vec<i32>>,
    /// The database's clock.
    pub now: DateTime<Utc>,
}

/// The recent starts of a queue. It must be locked by an earlier statement of this transaction.
pub async fn find_handouts(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> sqlx::Result<Handouts> {
    sqlx::query_as!(
        Handouts,
        r#"
        select past.at "at?", past.jobs "jobs?", statement_timestamp() "now!"
        from (select) as always
        left join queue_handouts past on past.project_id = $1 and past.queue = $2
        "#,
        project_id.0,
        queue,
    )
    .fetch_one(conn)
    .await
}

/// Stores the recent starts of a queue.
pub async fn keep_handouts(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    handouts: &[Handout],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into queue_handouts (project_id, queue, at, jobs)
        values ($1, $2, $3, $4)
        on conflict (project_id, queue) do update set at = excluded.at, jobs = excluded.jobs
        ",
        project_id.0,
        queue,
        &handouts.iter().map(|it| it.at).collect::<Vec<_>>(),
        &handouts.iter().map(|it| it.jobs).collect::<Vec<_>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}
