//! Claims from queues in which groups take turns. The claim holds the lock of the queue: it reads
//! the groups in line with their best jobs, chooses, and leases what it has chosen.

use chrono::{DateTime, Utc};
use fencepost_domain::{
    ids::{JobId, LeaseId, ProjectId, WorkflowId},
    lease::{MIN_DEFAULT_LEASE_SECONDS, TIMEOUT_GRACE_SECONDS},
    rate::{Handout, RateLimits},
};
use sqlx::{PgConnection, types::Json};
use uuid::Uuid;

use super::{
    Columns, QueueClaim,
    leased::{ClaimLimits, LeasedJob, leased_jobs, query_leased_of_best},
};
use crate::groups::rates;

/// Groups of one page.
pub const MAX_PAGE_GROUPS: usize = 200;
/// Jobs of a group that are examined at most beyond those that a claim wants: others have a type
/// that it may not take, or have expired.
const MAX_EXAMINED_JOBS: i64 = 100;

/// A group in line, or the jobs without a group.
#[derive(Debug, Clone)]
pub struct GroupInLine {
    /// Empty: the jobs without a group.
    pub group: String,
    pub turn: f64,
    pub weight: i16,
    /// Its own limits, in place of those of its queue: running jobs, and rates.
    pub max_running: Option<i32>,
    pub rates: Option<RateLimits>,
    /// None: it is not paused.
    pub paused_until: Option<DateTime<Utc>>,
    /// Its counted starts.
    pub starts: Vec<Handout>,
    /// The database's clock.
    pub now: DateTime<Utc>,
    /// Whether it has no job at all that may start, of whatever type.
    pub is_empty: bool,
    /// Its best jobs, in their order.
    pub jobs: Vec<JobInLine>,
}

/// A job that a claim may take.
#[derive(Debug, Clone)]
pub struct JobInLine {
    pub id: JobId,
    pub concurrency_key: Option<String>,
    pub concurrency_limit: Option<i32>,
}

/// Which jobs a page has.
#[derive(Debug, Clone, Copy)]
pub struct Page<'a> {
    /// The last group of the page before.
    pub after: (f64, &'a str),
    pub groups: i64,
    /// Jobs of each group.
    pub jobs: i64,
    pub paused_types: &'a [String],
    /// Constraint keys whose jobs may start.
    pub constraint_keys: &'a [Uuid],
}

/// The next groups in line, each with its best jobs that the claim may take.
pub async fn page(
    conn: &mut PgConnection,
    claim: &QueueClaim<'_>,
    page: Page<'_>,
) -> sqlx::Result<Vec<GroupInLine>> {
    let rows = sqlx::query!(
        r#"
        with line as materialized (
            select group_key, turn
            from group_turns
            where project_id = $1 and queue = $2 and rest_until is null
                and (turn, group_key) > ($3::float8, $4::text)
            order by turn, group_key
            limit $5
        )
        select line.group_key "group!", line.turn "turn!", coalesce(own.weight, 1::smallint) "weight!",
               own.max_running "max_running?", own.rate_counts "rate_counts?",
               own.rate_seconds "rate_seconds?",
               pause.paused_until "paused_until?", past.starts "starts?: Json<rates::Stored>",
               statement_timestamp() "now!",
               job.id is null and not has_turn_jobs($1, $2, line.group_key) "is_empty!",
               job.id "id?: JobId", job.concurrency_key "concurrency_key?",
               job.concurrency_limit "concurrency_limit?"
        from line
        left join group_overrides own on own.project_id = $1 and own.queue = $2
            and own.group_key = line.group_key
            and (own.expires_at is null or own.expires_at > statement_timestamp())
        left join job_groups pause on pause.project_id = $1 and pause.queue = $2
            and pause.group_key = line.group_key and pause.paused_until > statement_timestamp()
        left join group_handouts past
            on past.project_id = $1 and past.queue = $2 and past.group_key = line.group_key
        left join lateral (
            select *
            from (
                (
                    select id, rank, run_at, null as concurrency_key, null::int as concurrency_limit
                    from (
                        select id, rank, run_at, job_type, expires_at
                        from jobs
                        where project_id = $1 and queue = $2 and group_key = line.group_key
                            and waits_for_group is false and state = 'pending'
                            and constraint_key is null
                        order by group_key, constraint_key, rank, run_at, id
                        limit $6::bigint + $7::bigint
                    ) near
                    where (cardinality($8::text[]) = 0 or job_type = any($8))
                        and job_type <> all($9::text[])
                        and (expires_at is null or expires_at > statement_timestamp())
                    limit $6::bigint
                )
                union all
                (
                    select id, rank, run_at, null, null
                    from (
                        select id, rank, run_at, job_type, expires_at
                        from jobs
                        where line.group_key = '' and project_id = $1 and queue = $2
                            and group_key is null and waits_for_group is false
                            and state = 'pending' and constraint_key is null
                        order by group_key, constraint_key, rank, run_at, id
                        limit $6::bigint + $7::bigint
                    ) near
                    where (cardinality($8::text[]) = 0 or job_type = any($8))
                        and job_type <> all($9::text[])
                        and (expires_at is null or expires_at > statement_timestamp())
                    limit $6::bigint
                )
                union all
                select keyed.*
                from unnest($10::uuid[]) as open(constraint_key)
                cross join lateral (
                    (
                        select id, rank, run_at, concurrency_key, concurrency_limit
                        from jobs
                        where project_id = $1 and queue = $2 and group_key = line.group_key
                            and waits_for_group is false and state = 'pending'
                            and constraint_key = open.constraint_key
                            and (expires_at is null or expires_at > statement_timestamp())
                        order by rank, run_at, id
                        limit $6::bigint
                    )
                    union all
                    (
                        select id, rank, run_at, concurrency_key, concurrency_limit
                        from jobs
                        where line.group_key = '' and project_id = $1 and queue = $2
                            and group_key is null and waits_for_group is false
                            and state = 'pending' and constraint_key = open.constraint_key
                            and (expires_at is null or expires_at > statement_timestamp())
                        order by rank, run_at, id
                        limit $6::bigint
                    )
                ) keyed
            ) able
            order by rank, run_at, id
            limit $6::bigint
        ) job on pause.paused_until is null
        order by line.turn, line.group_key, job.rank, job.run_at, job.id
        "#,
        claim.project_id.0,
        claim.queue,
        page.after.0,
        page.after.1,
        page.groups,
        page.jobs,
        MAX_EXAMINED_JOBS,
        claim.job_types,
        page.paused_types,
        page.constraint_keys,
    )
    .fetch_all(conn)
    .await?;
    let mut line: Vec<GroupInLine> = Vec::new();
    for row in rows {
        if line.last().is_none_or(|it| it.group != row.group) {
            line.push(GroupInLine {
                group: row.group,
                turn: row.turn,
                weight: row.weight,
                max_running: row.max_running,
                rates: row.rate_counts.zip(row.rate_seconds).map(|it| rates::limits(&it.0, &it.1)),
                paused_until: row.paused_until,
                starts: rates::read(row.starts),
                now: row.now,
                is_empty: row.is_empty,
                jobs: Vec::new(),
            });
        }
        if let (Some(group), Some(id)) = (line.last_mut(), row.id) {
            let (concurrency_key, concurrency_limit) = (row.concurrency_key, row.concurrency_limit);
            group.jobs.push(JobInLine { id, concurrency_key, concurrency_limit });
        }
    }
    Ok(line)
}

/// How many jobs of each group of a queue run; empty: jobs without a group.
pub async fn running(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> sqlx::Result<Vec<(String, i64)>> {
    let rows = sqlx::query!(
        r#"
        select coalesce(group_key, '') "group!", count(*) "running!"
        from jobs
        where project_id = $1 and queue = $2 and state = 'processing'
        group by group_key
        "#,
        project_id.0,
        queue,
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(|it| (it.group, it.running)).collect())
}

/// How many jobs of a project run with each of these concurrency keys, in their order. The keys
/// must be locked by an earlier statement of this transaction.
pub async fn running_with_keys(
    conn: &mut PgConnection,
    project_id: ProjectId,
    keys: &[&str],
) -> sqlx::Result<Vec<i64>> {
    sqlx::query_scalar!(
        r#"
        select (
            select count(*)
            from jobs
            where project_id = $1 and concurrency_key = named.key and state = 'processing'
        ) "running!"
        from unnest($2::text[]) with ordinality as named(key, number)
        order by number
        "#,
        project_id.0,
        keys as &[&str],
    )
    .fetch_all(conn)
    .await
}

/// Leases these jobs, as many of the first as the queue's limit lets run. Those that another
/// transaction has locked or changed are left out. Returns how many were selected, too.
pub async fn lease(
    conn: &mut PgConnection,
    claim: &QueueClaim<'_>,
    limits: ClaimLimits<'_>,
    chosen: &[JobId],
) -> sqlx::Result<(Vec<LeasedJob>, usize)> {
    let columns = Columns::of(std::slice::from_ref(claim), limits.default_lease_seconds);
    let chosen: Vec<_> = chosen.iter().map(|it| it.0).collect();
    let rows = query_leased_of_best!(
        r#"
        with best as materialized (
            select named.id, job.rank, job.run_at, 'pending'::text as state
            from unnest($16::uuid[]) with ordinality as named(id, number)
            join jobs job on job.project_id = $1 and job.id = named.id
            where $15::text[] is null and ($12::smallint, $13::timestamptz) is not null
            order by named.number
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
        &chosen,
    )
    .fetch_all(conn)
    .await?;
    let count = rows.first().map_or(0, |it| usize::try_from(it.chosen).unwrap_or(0));
    Ok((leased_jobs!(rows).collect(), count))
}

/// What is before a job whose group takes turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ahead {
    /// Jobs of its group.
    pub jobs: i64,
    /// Groups whose turn comes before that of its group.
    pub groups: i64,
}

/// What is before a job at this position in its group, each counted up to `limit`.
pub async fn ahead(
    conn: &mut PgConnection,
    (project_id, queue, group): (ProjectId, &str, Option<&str>),
    (rank, run_at): (i16, DateTime<Utc>),
    limit: i64,
) -> sqlx::Result<Ahead> {
    sqlx::query_as!(
        Ahead,
        r#"
        select (
            select count(*)
            from (
                (
                    select from jobs
                    where project_id = $1 and queue = $2 and group_key = $3
                        and waits_for_group is false and state = 'pending'
                        and constraint_key is null and (rank, run_at) < ($4::smallint, $5)
                    limit $6
                )
                union all
                (
                    select from jobs
                    where $3 is null and project_id = $1 and queue = $2 and group_key is null
                        and waits_for_group is false and state = 'pending'
                        and constraint_key is null and (rank, run_at) < ($4, $5)
                    limit $6
                )
            ) before
        ) "jobs!", (
            select count(*)
            from (
                select from group_turns
                where project_id = $1 and queue = $2 and rest_until is null and turn < (
                    select turn
                    from group_turns
                    where project_id = $1 and queue = $2 and group_key = coalesce($3, '')
                )
                limit $6
            ) others
        ) "groups!"
        "#,
        project_id.0,
        queue,
        group,
        rank,
        run_at,
        limit,
    )
    .fetch_one(conn)
    .await
}
