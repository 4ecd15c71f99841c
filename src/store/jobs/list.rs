//! Listing and counting jobs: a bounded number of rows is examined, whatever the filter.

use fencepost_domain::{
    ids::{JobId, ProjectId},
    limits,
};
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use utoipa::ToSchema;
use uuid::Uuid;

use super::{
    JobRow, Payloads,
    filter::{Filter, next},
    queue_states,
};

/// Order of a list: jobs that were stored last come first, or last.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = JobOrder)]
#[allow(missing_docs)] // The names say it.
pub enum Order {
    #[default]
    Newest,
    Oldest,
}

/// Which page of a list.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    pub order: Order,
    /// The job before its first one; none: it is the first page.
    pub after: Option<JobId>,
    /// Maximum number of jobs on it.
    pub jobs: u32,
}

/// One page of jobs, from the rows of the tables that hold jobs of these states.
///
/// Returns the rows that match, and the last id examined if there may be more beyond it.
pub async fn page(
    conn: &mut PgConnection,
    project_id: ProjectId,
    filter: &Filter,
    place: Place,
    payloads: Payloads,
) -> sqlx::Result<(Vec<JobRow>, Option<JobId>)> {
    let Place { order, after, .. } = place;
    // One more, to know whether the page is the last one.
    let wanted = place.jobs as usize + 1;
    let (mut jobs, mut last, mut is_through) = (Vec::new(), after, false);
    let mut narrowed = None;
    for look in 0..limits::MAX_PAGE_LOOKS {
        // The first look finds a filter that many jobs match: only others pay for this search.
        if look == 1 {
            narrowed = queue_states::narrow(conn, project_id, filter).await?;
        }
        let filter = narrowed.as_ref().unwrap_or(filter);
        let left = i64::try_from(wanted - jobs.len()).unwrap_or(i64::MAX);
        let mut found = match order {
            Order::Newest => {
                let reach = Reach { rows: limits::MAX_PAGE_EXAMINED_ROWS, jobs: Some(left) };
                let bounds = filter.bounds(last);
                walk_over(conn, project_id, filter, bounds, reach, order).await?.into()
            }
            Order::Oldest => walk(conn, project_id, filter, last, left).await?,
        };
        jobs.append(&mut found.jobs);
        (last, is_through) = (found.last.or(last), found.is_through);
        if is_through || jobs.len() >= wanted {
            break;
        }
    }
    let mut page_jobs = place.jobs as usize;
    if payloads == Payloads::Shown {
        page_jobs = page_jobs.min(super::fitting(conn, project_id, &jobs).await?);
    }
    let is_full = jobs.len() > page_jobs;
    jobs.truncate(page_jobs);
    // A short page continues beyond the last row examined, unless all were.
    let next = if is_full { jobs.last().copied() } else { last.filter(|_| !is_through) };
    let mut rows = super::find_all(conn, project_id, &jobs, payloads).await?;
    // A job may have moved on since.
    rows.retain(|it| filter.states.is_empty() || filter.states.contains(&it.state.public()));
    rows.sort_by_key(|it| it.id);
    if order == Order::Newest {
        rows.reverse();
    }
    Ok((rows, next))
}

/// The state of a walk over jobs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Walked {
    pub jobs: Vec<JobId>,
    /// The last job examined; none: there was none.
    pub last: Option<JobId>,
    /// Whether nothing is left to examine.
    pub is_through: bool,
}

/// How far a walk goes.
struct Reach {
    /// Rows that it examines at most.
    rows: i64,
    /// Matching jobs after which it ends; none: it only counts them.
    jobs: Option<i64>,
}

/// The result of a walk.
struct Examined {
    jobs: Vec<JobId>,
    /// Number of matching jobs.
    matching: i64,
    last: Option<JobId>,
    is_through: bool,
}

impl From<Examined> for Walked {
    fn from(examined: Examined) -> Self {
        let Examined { jobs, last, is_through, .. } = examined;
        Self { jobs, last, is_through }
    }
}

/// Jobs that one count examines at most.
pub const MAX_COUNTED: i64 = 100_000;
/// The same where each job's last error is searched, which costs more.
const MAX_SEARCHED: i64 = 10_000;

/// How many of the newest [`MAX_COUNTED`] jobs match, fewer where errors are searched, and whether
/// there are more jobs than were examined. If the filter names a queue and states, only its jobs
/// are examined, unless they are many.
pub async fn count(
    conn: &mut PgConnection,
    project_id: ProjectId,
    filter: &Filter,
) -> sqlx::Result<(i64, bool)> {
    let narrowed = queue_states::narrow(conn, project_id, filter).await?;
    let filter = narrowed.as_ref().unwrap_or(filter);
    let most = if filter.error.is_some() { MAX_SEARCHED } else { MAX_COUNTED };
    // One more, to know whether there are more.
    let reach = Reach { rows: most + 1, jobs: None };
    let bounds = filter.bounds(None);
    let seen = walk_over(conn, project_id, filter, bounds, reach, Order::Newest).await?;
    Ok((seen.matching, !seen.is_through))
}

/// Up to `limit` matching jobs, in the order of their ids, above `after`. Examines at most
/// [`limits::MAX_PAGE_EXAMINED_ROWS`].
pub async fn walk(
    conn: &mut PgConnection,
    project_id: ProjectId,
    filter: &Filter,
    after: Option<JobId>,
    limit: i64,
) -> sqlx::Result<Walked> {
    let (upper, lower) = filter.bounds(None);
    let beyond = after.map_or(Uuid::nil(), |it| next(it.0));
    let bounds = (upper, lower.max(beyond));
    let reach = Reach { rows: limits::MAX_PAGE_EXAMINED_ROWS, jobs: Some(limit) };
    Ok(walk_over(conn, project_id, filter, bounds, reach, Order::Oldest).await?.into())
}

/// The statement of a walk in one order; `$back` is the reverse of `$forth`. Jobs of a batch are
/// found by its index: other jobs do not count as examined. The condition on tags is no `exists`: a
/// scalar subquery is evaluated row by row, and never becomes a scan of all bodies.
macro_rules! query_walk {
    ($forth:literal, $back:literal, $($argument:expr),+ $(,)?) => {
        sqlx::query_as!(
            Examined,
            r#"
        with examined as materialized (
            select * from (
                (select id, queue, job_type, state, created_at, failures, labels
                 from jobs
                 where (cardinality($5::text[]) = 0 or not $5 <@ array['succeeded', 'cancelled'])
                     and $13::uuid is null and $14::uuid[] is null and not $18
                     and $21::boolean is not true
                     and project_id = $1 and id < $2 and id >= $3
                 order by id "# + $forth + r#"
                 limit $4)
                union all
                (select id, queue, job_type, state, created_at, failures, labels
                 from jobs
                 where $21 and $13::uuid is null and $14::uuid[] is null
                     and project_id = $1 and paused_at is not null and id < $2 and id >= $3
                 order by id "# + $forth + r#"
                 limit $4)
                union all
                (select dead.job_id, job.queue, job.job_type, job.state, job.created_at,
                        job.failures, job.labels
                 from dead_letters dead
                 cross join lateral (
                     select queue, job_type, state, created_at, failures, labels
                     from jobs where project_id = $1 and id = dead.job_id
                     offset 0
                 ) job
                 where $18::boolean and $21 is not true and $13::uuid is null and $14::uuid[] is null
                     and dead.project_id = $1 and dead.job_id < $2 and dead.job_id >= $3
                 order by dead.job_id "# + $forth + r#"
                 limit $4)
                union all
                (select id, queue, job_type, state, created_at, failures, labels
                 from finished_jobs
                 where (cardinality($5::text[]) = 0 or $5 && array['succeeded', 'cancelled'])
                     and $13::uuid is null and $14::uuid[] is null and $21 is not true
                     and project_id = $1 and id < $2 and id >= $3
                 order by id "# + $forth + r#"
                 limit $4)
                union all
                (select member.job_id, job.queue, job.job_type, job.state, job.created_at,
                        job.failures, job.labels
                 from job_bodies member
                 cross join lateral (
                     select queue, job_type, state, created_at, failures, labels
                     from jobs where project_id = $1 and id = member.job_id
                     union all
                     select queue, job_type, state, created_at, failures, labels
                     from finished_jobs where project_id = $1 and id = member.job_id
                     -- Row by row: a join could walk over the jobs of all batches.
                     offset 0
                 ) job
                 where member.project_id = $1 and member.batch_id = $13
                     and ($14::uuid[] is null or member.job_id = any($14))
                     and member.job_id < $2 and member.job_id >= $3
                 order by member.job_id "# + $forth + r#"
                 limit $4)
                union all
                (select chosen.id, job.queue, job.job_type, job.state, job.created_at, job.failures,
                        job.labels
                 from unnest($14::uuid[]) chosen (id)
                 cross join lateral (
                     select queue, job_type, state, created_at, failures, labels
                     from jobs where project_id = $1 and id = chosen.id
                     union all
                     select queue, job_type, state, created_at, failures, labels
                     from finished_jobs where project_id = $1 and id = chosen.id
                     offset 0
                 ) job
                 where $13::uuid is null and chosen.id < $2 and chosen.id >= $3
                 order by chosen.id "# + $forth + r#"
                 limit $4)
            ) both_tables
            order by id "# + $forth + r#"
            limit $4
        ), matching as (
            select id from examined
            where (cardinality($5::text[]) = 0 or state = any($5))
                and ($6::text is null or queue = $6)
                and ($7::text is null or job_type = $7)
                and ($19::text[] is null or labels @> $19)
                and ($20::text is null or $20 = (
                    select grouped.group_key
                    from job_bodies grouped
                    where grouped.project_id = $1 and grouped.job_id = examined.id
                ))
                and ($21 is null or $21 = coalesce((
                    select held.paused_at is not null
                    from jobs held
                    where held.project_id = $1 and held.id = examined.id
                ), false))
                and ($8::timestamptz is null or created_at >= $8)
                and ($9::timestamptz is null or created_at < $9)
                and ($16::bigint is null
                    or ('x' || right(replace(id::text, '-', ''), 15))::bit(60)::bigint & $16
                        = $17::bigint)
                and (($10::jsonb is null and $11::text[] is null) or (
                    select ($10 is null or tagged.tags @> $10)
                        and ($11 is null or tagged.tags ?& $11)
                    from job_bodies tagged
                    where tagged.project_id = $1 and tagged.job_id = examined.id
                ))
                and ($15::text is null or (failures > 0 and (
                    select strpos(lower(left(
                        concat_ws(': ', past.error_kind, past.error_message), 1000
                    )), $15) > 0
                    from attempts past
                    where past.project_id = $1 and past.job_id = examined.id
                        and coalesce(past.error_kind, past.error_message, past.error_stack_trace)
                            is not null
                        and (past.outcome = 'released'
                            and past.error_kind in ('rate_limited', 'snoozed')) is not true
                    order by past.attempt desc
                    limit 1
                )))
            order by id "# + $forth + r#"
            limit $12::bigint
        )
        select array(
                   select id from matching order by id "# + $forth + r#" limit coalesce($12::bigint, 0)
               ) "jobs!: Vec<JobId>",
               (select count(*) from matching) "matching!",
               (select id from examined order by id "# + $back + r#" limit 1) "last: JobId",
               (select count(*) from examined) < $4 "is_through!"
        "#,
            $($argument),+
        )
    };
}

/// The matching jobs between two ids, from the newest or from the oldest.
async fn walk_over(
    conn: &mut PgConnection,
    project_id: ProjectId,
    filter: &Filter,
    (upper, lower): (Uuid, Uuid),
    reach: Reach,
    order: Order,
) -> sqlx::Result<Examined> {
    let (names, chosen) = (filter.tag_names(), filter.chosen());
    macro_rules! walk {
        ($forth:literal, $back:literal) => {
            query_walk!(
                $forth,
                $back,
                project_id.0,
                upper,
                lower,
                reach.rows,
                &filter.stored_states() as &[&str],
                filter.queue.as_deref(),
                filter.job_type.as_deref(),
                filter.created_after,
                filter.created_before,
                filter.tag_values(),
                names.as_deref(),
                reach.jobs,
                filter.batch_id.map(|it| it.0),
                chosen.as_deref(),
                filter.error_text(),
                filter.id_end.map(|it| it.0),
                filter.id_end.map(|it| it.1),
                filter.is_dead_only(),
                filter.labels.as_deref(),
                filter.group.as_deref(),
                filter.is_paused,
            )
        };
    }
    match order {
        Order::Newest => walk!("desc", "asc").fetch_one(conn).await,
        Order::Oldest => walk!("asc", "desc").fetch_one(conn).await,
    }
}
