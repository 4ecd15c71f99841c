//! Claims under limits: jobs with labels or a concurrency key, and all jobs of a queue with
//! `has_rules` (limits, a default lease, a pause, or paused types).
//!
//! Running jobs are counted from their rows, so no counter can drift. A count is exact because
//! every claim under a key, or in a limited queue, holds its lock until the commit, and counts with
//! a statement that began after it had the lock. Locks are tried, never awaited.

use chrono::{DateTime, Utc};
use fencepost_domain::{
    ids::{JobId, LeaseId, ProjectId, WorkflowId},
    lease::{MIN_DEFAULT_LEASE_SECONDS, TIMEOUT_GRACE_SECONDS},
};
use sqlx::PgConnection;
use uuid::Uuid;

pub use super::leased::{ClaimLimits, GroupLimits};
use super::{
    Columns, QueueClaim,
    leased::{LeasedJob, leased_jobs, query_leased_of_best},
};

/// Constraint keys of one page. The statement carries the same number as a literal.
pub const MAX_PAGE_CONSTRAINT_KEYS: usize = 200;

/// Which of these queues have limits, or claimable jobs with a constraint key. Returns their
/// indexes.
pub async fn queues_with_constraint_keys(
    conn: &mut PgConnection,
    queues: &[(ProjectId, &str)],
) -> sqlx::Result<Vec<i64>> {
    sqlx::query_scalar!(
        r#"
        select claim.number - 1 "number!"
        from unnest($1::int[], $2::text[]) with ordinality as claim(project_id, queue, number)
        cross join lateral (
            (
                select 1
                from queues
                where project_id = claim.project_id and name = claim.queue
                    and (has_rules or has_gate)
            )
            union all
            (
                select 1
                from jobs
                where project_id = claim.project_id and queue = claim.queue
                    and state = 'pending' and constraint_key is not null
                order by constraint_key, rank, run_at, id
                limit 1
            )
            limit 1
        ) found
        "#,
        &queues.iter().map(|it| it.0.0).collect::<Vec<_>>(),
        &queues.iter().map(|it| it.1).collect::<Vec<_>>() as &[&str],
    )
    .fetch_all(conn)
    .await
}

/// A constraint key with claimable jobs that match by type and labels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConstraintKey {
    pub constraint_key: Uuid,
    pub concurrency_key: Option<String>,
    /// Whether as many jobs run with its concurrency key as its first job permits. Not certain:
    /// nothing is locked.
    pub is_full: bool,
    /// Its first job's position.
    pub rank: i16,
    pub run_at: DateTime<Utc>,
}

/// A page of constraint keys.
#[derive(Debug, Default)]
pub struct ConstraintKeyPage {
    pub keys: Vec<ConstraintKey>,
    /// The last key of a full page, matching or not.
    pub next: Option<Uuid>,
}

/// Running jobs with one concurrency key that are counted before it is locked. Larger limits count
/// as not reached.
const MAX_COUNTED_RUNNING: i64 = 1_000;

/// The first [`MAX_PAGE_CONSTRAINT_KEYS`] constraint keys of a queue after `after`. Those of
/// `paused_types` do not match.
pub async fn find_constraint_keys(
    conn: &mut PgConnection,
    claim: &QueueClaim<'_>,
    paused_types: &[String],
    after: Uuid,
) -> sqlx::Result<ConstraintKeyPage> {
    let rows = sqlx::query!(
        r#"
        with recursive seen as (
            (
                select constraint_key, job_type, labels, concurrency_key, concurrency_limit, rank,
                       run_at
                from jobs
                where project_id = $1 and queue = $2 and state = 'pending'
                    and constraint_key is not null
                    and constraint_key > $3
                order by constraint_key, rank, run_at, id
                limit 1
            )
            union all
            select next.constraint_key, next.job_type, next.labels, next.concurrency_key,
                   next.concurrency_limit, next.rank, next.run_at
            from seen
            cross join lateral (
                select constraint_key, job_type, labels, concurrency_key, concurrency_limit, rank,
                       run_at
                from jobs
                where project_id = $1 and queue = $2 and state = 'pending'
                    and constraint_key is not null
                    and constraint_key > seen.constraint_key
                order by constraint_key, rank, run_at, id
                limit 1
            ) next
        ), page as materialized (
            select *, (cardinality($4::text[]) = 0 or job_type = any($4))
                       and job_type <> all($6)
                       and (labels is null or labels <@ $5) as is_fitting
            from seen
            limit 200
        ), crowd as materialized (
            select concurrency_key, (
                select count(*)
                from (
                    select
                    from jobs
                    where project_id = $1 and concurrency_key = used.concurrency_key
                        and state = 'processing'
                    limit $7
                ) counted
            ) as running
            from (
                select distinct concurrency_key
                from page
                where is_fitting and concurrency_key is not null
            ) used
        )
        select constraint_key "constraint_key!", is_fitting "is_fitting!", page.concurrency_key,
               rank "rank!", run_at "run_at!",
               coalesce(crowd.running >= page.concurrency_limit, false) "is_full!"
        from page
        left join crowd on crowd.concurrency_key = page.concurrency_key
        order by constraint_key
        "#,
        claim.project_id.0,
        claim.queue,
        after,
        claim.job_types,
        claim.labels,
        paused_types,
        MAX_COUNTED_RUNNING,
    )
    .fetch_all(conn)
    .await?;
    let is_whole = rows.len() == MAX_PAGE_CONSTRAINT_KEYS;
    let next = rows.last().filter(|_| is_whole).map(|it| it.constraint_key);
    let fitting = rows.into_iter().filter(|it| it.is_fitting).map(|it| ConstraintKey {
        constraint_key: it.constraint_key,
        concurrency_key: it.concurrency_key,
        is_full: it.is_full,
        rank: it.rank,
        run_at: it.run_at,
    });
    Ok(ConstraintKeyPage { keys: fitting.collect(), next })
}

/// Locks concurrency keys until the end of the transaction, so that running jobs can be counted.
/// Says of each, in order, whether it is locked: another claim may hold it.
pub async fn lock_concurrency_keys(
    conn: &mut PgConnection,
    project_id: ProjectId,
    keys: &[&str],
) -> sqlx::Result<Vec<bool>> {
    sqlx::query_scalar!(
        r#"
        select pg_try_advisory_xact_lock(hashtextextended('key ' || key, $1)) "is_locked!"
        from unnest($2::text[]) with ordinality as wanted(key, number)
        order by number
        "#,
        i64::from(project_id.0),
        keys as &[&str],
    )
    .fetch_all(conn)
    .await
}

/// Jobs with one constraint key that are searched for commands: they have one type, so a few show
/// it. So for jobs of one type, while other types of the queue are paused.
pub const MAX_EXAMINED_FOR_COMMANDS: i64 = 20;

/// Leases the best jobs of one claim, with and without constraint keys. The keys and the queue's
/// limits must be locked by an earlier statement of this transaction.
///
/// A job may start while fewer than its `concurrency_limit` run under its key, including those
/// started before it by this claim. Jobs with lower limits start first: `place` is how many run
/// then with this job. One whose limit is reached takes no place, so `place` is the turn, less
/// those whose limit was reached before. Of a group as many start as may run beside those that
/// do. A claim for commands only searches the first
/// [`MAX_EXAMINED_FOR_COMMANDS`] jobs of each constraint key, and of each type if types are named;
/// others have an index. Like [`super::claim_some_types`], it also returns how many were selected.
pub async fn claim_constrained(
    conn: &mut PgConnection,
    claim: &QueueClaim<'_>,
    limits: ClaimLimits<'_>,
) -> sqlx::Result<(Vec<LeasedJob>, usize)> {
    let columns = Columns::of(std::slice::from_ref(claim), limits.default_lease_seconds);
    let rows = query_leased_of_best!(
        r#"
        with behind as materialized (
            select found.*, row_number() over (
                       partition by found.concurrency_key
                       order by found.concurrency_limit, found.rank, found.run_at, found.id
                   ) as turn
            from unnest($17::uuid[]) as passed(constraint_key)
            cross join lateral (
                select id, rank, run_at, group_key, concurrency_key, concurrency_limit
                from (
                    select id, rank, run_at, group_key, concurrency_key, concurrency_limit,
                           has_command
                    from jobs
                    where project_id = $1 and queue = $2 and state = 'pending'
                        and constraint_key = passed.constraint_key
                        and (expires_at is null or expires_at > statement_timestamp())
                        and (group_key is null or group_key <> all($19) and ($22::bigint is distinct from 0 or group_key = any($20))
                            and group_may_start($1, $2, group_key, waits_for_group))
                    order by rank, run_at, id
                    limit coalesce($18::bigint, $14::bigint)
                ) near
                where $18 is null or has_command
                order by rank, run_at, id
                limit $14::bigint
            ) found
        ), crowd as materialized (
            select key.concurrency_key, (
                select count(*)
                from jobs
                where project_id = $1 and concurrency_key = key.concurrency_key
                    and state = 'processing'
            ) as running
            from (
                select distinct concurrency_key from behind where concurrency_key is not null
            ) key
        ), placed as materialized (
            select behind.*, behind.turn + least(crowd.running, min(
                       greatest(behind.concurrency_limit, crowd.running) - behind.turn
                   ) over (
                       partition by behind.concurrency_key order by behind.turn
                       rows between unbounded preceding and 1 preceding
                   )) as place
            from behind
            left join crowd on crowd.concurrency_key = behind.concurrency_key
        ), ready as materialized (
            (
                select id, rank, run_at, group_key
                from jobs
                where $15::text[] is null and $18::bigint is null
                    and project_id = $1 and queue = $2 and state = 'pending'
                    and constraint_key is null
                    and (expires_at is null or expires_at > statement_timestamp())
                    and (group_key is null or group_key <> all($19) and ($22 is distinct from 0 or group_key = any($20))
                        and group_may_start($1, $2, group_key, waits_for_group))
                    and (rank, run_at) >= ($12::smallint, $13::timestamptz)
                order by rank, run_at, id
                limit $14::bigint
            )
            union all
            (
                select id, rank, run_at, group_key
                from jobs
                where $15::text[] is null and $18::bigint is not null
                    and project_id = $1 and queue = $2 and state = 'pending'
                    and constraint_key is null and has_command
                    and (expires_at is null or expires_at > statement_timestamp())
                    and (group_key is null or group_key <> all($19) and ($22 is distinct from 0 or group_key = any($20))
                        and group_may_start($1, $2, group_key, waits_for_group))
                    and (rank, run_at) >= ($12::smallint, $13::timestamptz)
                order by rank, run_at, id
                limit $14::bigint
            )
            union all
            select found.id, found.rank, found.run_at, found.group_key
            from unnest($15::text[]) as wanted(job_type)
            cross join lateral (
                select id, rank, run_at, group_key
                from (
                    select id, rank, run_at, group_key, has_command
                    from jobs
                    where project_id = $1 and queue = $2 and job_type = wanted.job_type
                        and state = 'pending' and constraint_key is null
                        and (expires_at is null or expires_at > statement_timestamp())
                        and (group_key is null or group_key <> all($19) and ($22 is distinct from 0 or group_key = any($20))
                            and group_may_start($1, $2, group_key, waits_for_group))
                        and (rank, run_at) >= ($12::smallint, $13::timestamptz)
                    order by rank, run_at, id
                    limit coalesce($18::bigint, $14::bigint)
                ) near
                where $18 is null or has_command
                order by rank, run_at, id
                limit $14::bigint
            ) found
        ), best as materialized (
            select id, rank, run_at, 'pending'::text as state
            from (
                select able.*, coalesce(named.room, $22) as room, row_number() over (
                           partition by able.group_key order by rank, run_at, id
                       ) as place
                from (
                    select id, rank, run_at, group_key from ready
                    union all
                    select id, rank, run_at, group_key from placed
                    where concurrency_limit is null or place <= concurrency_limit
                ) able
                left join unnest($20::text[], $21::bigint[]) as named(group_key, room)
                    on named.group_key = able.group_key
            ) candidate
            where group_key is null or room is null or place <= room
            order by rank, run_at, id
            limit least($14, 250, case when exists (
                select from queues
                where project_id = $1 and name = $2 and rate_limited_until > statement_timestamp()
            ) then 0 when $11::int is null then 250 else greatest(0, $11::int - (
                select count(*)
                from jobs
                where project_id = $1 and queue = $2 and state = 'processing'
            )) end)
        "#,
        claim,
        limits,
        columns,
        limits.constraint_keys,
        claim.only_commands.then_some(MAX_EXAMINED_FOR_COMMANDS),
        &limits.groups.full,
        &limits.groups.open,
        &limits.groups.room,
        limits.groups.room_of_others,
    )
    .fetch_all(conn)
    .await?;
    let chosen = rows.first().map_or(0, |it| usize::try_from(it.chosen).unwrap_or(0));
    Ok((leased_jobs!(rows).collect(), chosen))
}
