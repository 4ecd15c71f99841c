//! Claims from queues in which groups take turns. The claim holds the lock of the queue: it reads
//! the groups in line with their best jobs, chooses, and leases what it has chosen.

use chrono::{DateTime, Utc};
use fencepost_domain::{
    ids::{JobId, LeaseId, ProjectId, WorkflowId},
    lease::{MIN_DEFAULT_LEASE_SECONDS, TIMEOUT_GRACE_SECONDS},
    rate::{Handout, RateLimits},
    turns::MIN_WEIGHT,
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
const MAX_EXAMINED_JOBS: i64 = 20;
/// Jobs of each type that a claim looks for in all groups, where it may not take all types: in its
/// group such a job may be behind many of other types.
const MAX_JOBS_OF_TYPE: i64 = 200;
/// The first jobs of each type among which it looks for them: others may be of groups that rest.
const MAX_EXAMINED_OF_TYPE: i64 = 2_000;
/// Constraint keys of a group that a claim looks at: more, where few groups are in line.
const KEYS_OF_GROUP: std::ops::RangeInclusive<i64> = 8..=64;
/// Constraint keys of all groups that a claim looks at, where that is more than the least of each.
const MAX_KEYS: i64 = 512;
/// Groups in line are counted up to this number, as the weight of the line.
const MAX_COUNTED_GROUPS: i64 = 1_000;

/// A group in line, or the jobs without a group.
#[derive(Debug, Clone)]
pub struct GroupInLine {
    /// Empty: the jobs without a group.
    pub group: String,
    pub turn: f64,
    /// Whether it has come into line since it started a job last.
    pub is_new: bool,
    /// Its rules and counted starts.
    pub standing: GroupStanding,
    /// Whether it has no job at all that may start, of whatever type.
    pub is_empty: bool,
    /// Its best jobs, in their order.
    pub jobs: Vec<JobInLine>,
}

/// What limits a group.
#[derive(Debug, Clone)]
pub struct GroupStanding {
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
}

/// A job that a claim may take.
#[derive(Debug, Clone, PartialEq, Eq)]
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
    /// Jobs of each group, and of each of its constraint keys.
    pub jobs: i64,
    /// Types that the claim may take; empty: all.
    pub job_types: &'a [String],
    pub paused_types: &'a [String],
    /// Constraint keys are looked at from this one on.
    pub after_key: Uuid,
    /// How many groups are in line.
    pub in_line: i64,
}

/// The row of a group, with a job of it if there is one.
struct LineRow {
    group: String,
    turn: f64,
    is_new: bool,
    weight: i16,
    max_running: Option<i32>,
    rate_counts: Option<Vec<i32>>,
    rate_seconds: Option<Vec<i32>>,
    paused_until: Option<DateTime<Utc>>,
    starts: Option<Json<rates::Stored>>,
    now: DateTime<Utc>,
    is_empty: bool,
    id: Option<JobId>,
    concurrency_key: Option<String>,
    concurrency_limit: Option<i32>,
}

/// The next groups in line, each with its best jobs that the claim may take.
pub async fn page(
    conn: &mut PgConnection,
    claim: &QueueClaim<'_>,
    page: Page<'_>,
) -> sqlx::Result<Vec<GroupInLine>> {
    let rows = sqlx::query_as!(
        LineRow,
        r#"
        with line as materialized (
            select group_key, turn, is_new
            from group_turns
            where project_id = $1 and queue = $2 and rest_until is null
                and (turn, group_key) > ($3::float8, $4::text)
            order by turn, group_key
            limit $5
        )
        select line.group_key "group!", line.turn "turn!", line.is_new "is_new!",
               coalesce(own.weight, $13::smallint) "weight!", own.max_running "max_running?",
               own.rate_counts "rate_counts?", own.rate_seconds "rate_seconds?",
               -- A pause may have no end.
               case when pause.paused_until is not null then least(
                   pause.paused_until, statement_timestamp() + interval '1 day'
               ) end as paused_until,
               past.starts "starts?: Json<rates::Stored>", statement_timestamp() "now!",
               job.id is null and not has_turn_jobs($1, $2, line.group_key) "is_empty!",
               job.id "id?: JobId", job.concurrency_key "concurrency_key?",
               job.concurrency_limit "concurrency_limit?"
        from line
        left join lateral (
            select * from group_overrides
            where project_id = $1 and queue = $2 and group_key = line.group_key
                and (expires_at is null or expires_at > statement_timestamp())
            limit 1
        ) own on true
        left join lateral (
            select paused_until from job_groups
            where project_id = $1 and queue = $2 and group_key = line.group_key
                and paused_until > statement_timestamp()
            limit 1
        ) pause on true
        left join lateral (
            select starts from group_handouts
            where project_id = $1 and queue = $2 and group_key = line.group_key
            limit 1
        ) past on true
        left join lateral (
            select *
            from jobs_in_turn_of(
                $1, $2, line.group_key, $6::bigint, $7::bigint, $8::text[], $9::text[], $10::text[],
                $11::uuid, $12::bigint
            )
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
        page.job_types,
        page.paused_types,
        claim.labels,
        page.after_key,
        (MAX_KEYS / page.in_line.max(1)).clamp(*KEYS_OF_GROUP.start(), *KEYS_OF_GROUP.end()),
        MIN_WEIGHT,
    )
    .fetch_all(conn)
    .await?;
    Ok(to_line(rows))
}

/// Groups in line with the best jobs of these types in the queue, whatever is before them in their
/// groups: the first [`MAX_JOBS_OF_TYPE`] of each type.
pub async fn of_types(
    conn: &mut PgConnection,
    claim: &QueueClaim<'_>,
    job_types: &[String],
) -> sqlx::Result<Vec<GroupInLine>> {
    let rows = sqlx::query_as!(
        LineRow,
        r#"
        with first as materialized (
            select job.*
            from unnest($3::text[]) as wanted(job_type)
            cross join lateral (
                select *
                from (
                    select id, rank, run_at, coalesce(group_key, '') as group_key
                    from jobs
                    where project_id = $1 and queue = $2 and job_type = wanted.job_type
                        and state = 'pending' and constraint_key is null
                        and (expires_at is null or expires_at > statement_timestamp())
                    order by rank, run_at, id
                    limit $6
                ) near
                where exists (
                    select from group_turns
                    where project_id = $1 and queue = $2 and group_key = near.group_key
                        and rest_until is null
                )
                order by rank, run_at, id
                limit $4
            ) job
        )
        select line.group_key "group!", line.turn "turn!", line.is_new "is_new!",
               coalesce(own.weight, $5::smallint) "weight!", own.max_running "max_running?",
               own.rate_counts "rate_counts?", own.rate_seconds "rate_seconds?",
               null::timestamptz "paused_until?", past.starts "starts?: Json<rates::Stored>",
               statement_timestamp() "now!", false "is_empty!", first.id "id?: JobId",
               null::text "concurrency_key?", null::int "concurrency_limit?"
        from first
        cross join lateral (
            select group_key, turn, is_new from group_turns
            where project_id = $1 and queue = $2 and group_key = first.group_key
                and rest_until is null
            limit 1
        ) line
        left join lateral (
            select * from group_overrides
            where project_id = $1 and queue = $2 and group_key = line.group_key
                and (expires_at is null or expires_at > statement_timestamp())
            limit 1
        ) own on true
        left join lateral (
            select starts from group_handouts
            where project_id = $1 and queue = $2 and group_key = line.group_key
            limit 1
        ) past on true
        where not is_group_paused($1, $2, line.group_key)
        order by line.turn, line.group_key, first.rank, first.run_at, first.id
        "#,
        claim.project_id.0,
        claim.queue,
        job_types,
        MAX_JOBS_OF_TYPE,
        MIN_WEIGHT,
        MAX_EXAMINED_OF_TYPE,
    )
    .fetch_all(conn)
    .await?;
    Ok(to_line(rows))
}

fn to_line(rows: Vec<LineRow>) -> Vec<GroupInLine> {
    let mut line: Vec<GroupInLine> = Vec::new();
    for row in rows {
        if line.last().is_none_or(|it| it.group != row.group) {
            let rates = row.rate_counts.zip(row.rate_seconds);
            line.push(GroupInLine {
                group: row.group,
                turn: row.turn,
                is_new: row.is_new,
                standing: GroupStanding {
                    weight: row.weight,
                    max_running: row.max_running,
                    rates: rates.map(|it| rates::limits(&it.0, &it.1)),
                    paused_until: row.paused_until,
                    starts: rates::read(row.starts),
                    now: row.now,
                },
                is_empty: row.is_empty,
                jobs: Vec::new(),
            });
        }
        if let (Some(group), Some(id)) = (line.last_mut(), row.id) {
            let (concurrency_key, concurrency_limit) = (row.concurrency_key, row.concurrency_limit);
            group.jobs.push(JobInLine { id, concurrency_key, concurrency_limit });
        }
    }
    line
}

/// Locks the rows of these groups of a queue. What is noted about them from now on is looked at
/// when this transaction has ended.
pub async fn hold(
    conn: &mut PgConnection,
    (project_id, queue): (ProjectId, &str),
    groups: &[&str],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        select locked.group_key
        from (select group_key from unnest($3::text[]) as it(group_key) order by 1) named
        cross join lateral (
            select group_key
            from group_turns
            where project_id = $1 and queue = $2 and group_key = named.group_key
            for update
        ) locked
        ",
        project_id.0,
        queue,
        groups as &[&str],
    )
    .fetch_all(conn)
    .await?;
    Ok(())
}

/// What limits these groups of a queue now, and how many jobs of each run.
pub async fn standings(
    conn: &mut PgConnection,
    (project_id, queue): (ProjectId, &str),
    groups: &[&str],
) -> sqlx::Result<Vec<(String, GroupStanding, i64)>> {
    let rows = sqlx::query!(
        r#"
        select named.group_key "group!", coalesce(own.weight, $4::smallint) "weight!",
               own.max_running "max_running?", own.rate_counts "rate_counts?",
               own.rate_seconds "rate_seconds?",
               case when pause.paused_until is not null then least(
                   pause.paused_until, statement_timestamp() + interval '1 day'
               ) end as paused_until,
               past.starts "starts?: Json<rates::Stored>", statement_timestamp() "now!",
               coalesce(crowd.jobs, 0) "running!"
        from unnest($3::text[]) as named(group_key)
        left join lateral (
            select * from group_overrides
            where project_id = $1 and queue = $2 and group_key = named.group_key
                and (expires_at is null or expires_at > statement_timestamp())
            limit 1
        ) own on true
        left join lateral (
            select paused_until from job_groups
            where project_id = $1 and queue = $2 and group_key = named.group_key
                and paused_until > statement_timestamp()
            limit 1
        ) pause on true
        left join lateral (
            select starts from group_handouts
            where project_id = $1 and queue = $2 and group_key = named.group_key
            limit 1
        ) past on true
        left join (
            select group_key, count(*) as jobs
            from jobs
            where project_id = $1 and queue = $2 and state = 'processing'
            group by group_key
        ) crowd on crowd.group_key = named.group_key
        "#,
        project_id.0,
        queue,
        groups as &[&str],
        MIN_WEIGHT,
    )
    .fetch_all(conn)
    .await?;
    let standing = rows.into_iter().map(|row| {
        let rates = row.rate_counts.zip(row.rate_seconds);
        let standing = GroupStanding {
            weight: row.weight,
            max_running: row.max_running,
            rates: rates.map(|it| rates::limits(&it.0, &it.1)),
            paused_until: row.paused_until,
            starts: rates::read(row.starts),
            now: row.now,
        };
        (row.group, standing, row.running)
    });
    Ok(standing.collect())
}

/// Whether at most `max` jobs of a queue wait, and none of them has a constraint key.
pub async fn are_few(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    max: i64,
) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        select count(*) <= $3::bigint and not exists (
            select from jobs
            where project_id = $1 and queue = $2 and state = 'pending'
                and constraint_key is not null
        ) "are_few!"
        from (
            select from jobs
            where project_id = $1 and queue = $2 and state = 'pending' and constraint_key is null
            limit $3::bigint + 1
        ) counted
        "#,
        project_id.0,
        queue,
        max,
    )
    .fetch_one(conn)
    .await
}

/// How many groups of a queue are in line, counted up to [`MAX_COUNTED_GROUPS`].
pub async fn count_in_line(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        select count(*) "groups!"
        from (
            select from group_turns
            where project_id = $1 and queue = $2 and rest_until is null
            limit $3
        ) counted
        "#,
        project_id.0,
        queue,
        MAX_COUNTED_GROUPS,
    )
    .fetch_one(conn)
    .await
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
            from unnest($17::uuid[]) with ordinality as named(id, number)
            join jobs job on job.project_id = $1 and job.id = named.id
            -- The mark and the types are those of claims without turns.
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
