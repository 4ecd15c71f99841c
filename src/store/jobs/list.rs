//! Listing and counting jobs, newest first: a bounded number of rows is examined, whatever the
//! filter.

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, Postgres, QueryBuilder};
use uuid::Uuid;

use super::{JobRow, Payloads};
use crate::{
    domain::{
        job::JobState,
        limits,
        operation::{JobFilter, Kind},
    },
    ids::{JobId, ProjectId},
};

/// Which jobs a list shows. Conditions are combined with "and".
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Only jobs in one of these states; none: any.
    pub states: Vec<JobState>,
    /// Only jobs of this queue.
    pub queue: Option<String>,
    /// Only jobs of this type.
    pub job_type: Option<String>,
    /// Only jobs with this tag; without a value, with any value.
    pub tag: Option<(String, Option<String>)>,
    /// Only jobs stored at this time or later.
    pub created_after: Option<DateTime<Utc>>,
    /// Only jobs stored before this time.
    pub created_before: Option<DateTime<Utc>>,
}

impl Filter {
    /// The conditions of an operation's filter, limited to states that its kind handles.
    #[must_use]
    pub fn of(kind: Kind, filter: &JobFilter) -> Self {
        let states = kind.states().iter().copied();
        Self {
            states: states.filter(|it| filter.state.is_none_or(|named| named == *it)).collect(),
            queue: filter.queue.clone(),
            job_type: filter.job_type.clone(),
            tag: filter.tag.as_deref().map(read_tag),
            created_after: filter.created_after,
            created_before: filter.created_before,
        }
    }
}

/// A tag as filters write it: `name:value`, or `name` for any value.
#[must_use]
pub fn read_tag(text: &str) -> (String, Option<String>) {
    match text.split_once(':') {
        Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
        None => (text.to_owned(), None),
    }
}

/// How far the time in a job's id may lie from its `created_at`: ids are made by the nodes' clocks,
/// in milliseconds.
const ID_CLOCK_MARGIN_MS: i64 = 3_600_000;

/// One page of jobs: the newest whose id is below `before`, from the newest
/// [`limits::MAX_PAGE_EXAMINED_ROWS`] rows of each table.
///
/// Returns the rows that match, and the smallest id examined if there may be more below it.
pub async fn page(
    conn: &mut PgConnection,
    project_id: ProjectId,
    filter: &Filter,
    before: Option<JobId>,
    page_jobs: u32,
    payloads: Payloads,
) -> sqlx::Result<(Vec<JobRow>, Option<JobId>)> {
    let (upper, lower) = bounds(filter, before);
    let mut query = QueryBuilder::<Postgres>::new("with examined as (select * from (");
    for (table, own_columns) in [
        (
            "jobs",
            "unfinished_parents, lease_expires_at, null::text as stored_result, null::bigint as duration_ms, \
             true as is_live, expires_at as live_expires_at",
        ),
        ("finished_jobs", "0, null, result as stored_result, duration_ms, false, null"),
    ] {
        if table == "finished_jobs" {
            query.push(" union all ");
        }
        query.push(
            "(select id, queue, job_type, state, rank, run_at, created_at, attempt, failures, ",
        );
        query.push(
            "max_attempts, timeout_seconds, cancel_requested, progress, completed_at, lease_id, ",
        );
        query.push("worker_id, claimed_at, ");
        query.push(own_columns).push(" from ").push(table);
        query.push(" where project_id = ").push_bind(project_id.0);
        query.push(" and id < ").push_bind(upper).push(" and id >= ").push_bind(lower);
        query.push(" order by id desc limit ").push_bind(limits::MAX_PAGE_EXAMINED_ROWS).push(")");
    }
    query.push(") both_tables order by id desc limit ").push_bind(limits::MAX_PAGE_EXAMINED_ROWS);
    query.push("), matching as (select * from examined where true");
    push_filter(&mut query, project_id, filter);
    query.push(" order by id desc limit ").push_bind(i64::from(page_jobs) + 1);
    query.push(") select matching.*, case when ").push_bind(payloads == Payloads::Shown);
    query.push(" then body.payload else 'null' end as payload, case when ");
    query.push_bind(payloads == Payloads::Shown).push(" then stored_result end as result, ");
    query.push("body.retry, body.tags, body.labels, ");
    query.push("body.concurrency_key, body.concurrency_limit, body.unique_key, ");
    query.push("case when is_live then live_expires_at else body.expires_at end as expires_at, ");
    query.push("body.workflow_id, body.workflow_key, body.envelope, case when body.has_parents then array(select parent_id from job_edges edge where edge.project_id = ");
    query.push_bind(project_id.0);
    query.push(" and edge.child_id = matching.id order by ordinal) else '{}' end as parents, ");
    push_closed(&mut query, project_id);
    query.push("(select count(*) from examined) as examined, (select id from examined order by id limit 1) as lowest");
    query.push(" from (select 1) as always left join matching on true");
    query.push(" left join job_bodies body on body.project_id = ").push_bind(project_id.0);
    query.push(" and body.job_id = matching.id left join queues setting on setting.project_id = ");
    query.push_bind(project_id.0);
    query.push(" and setting.name = matching.queue order by matching.id desc");
    let rows = query.build().fetch_all(conn).await?;
    read_page(rows, page_jobs as usize)
}

/// Why a job is not claimable: the same as in [`super::find`].
fn push_closed(query: &mut QueryBuilder<Postgres>, project_id: ProjectId) {
    let crowds = [
        (
            "(matching.state = 'pending' and (",
            "body.concurrency_limit",
            "concurrency_key = body.concurrency_key",
        ),
        (" or ", "setting.max_concurrency", "queue = matching.queue"),
    ];
    for (before, limit, same) in crowds {
        query.push(before).push("case when ").push(limit).push(" is not null then ").push(limit);
        query.push(" <= (select count(*) from (select from jobs running where project_id = ");
        query.push_bind(project_id.0).push(" and running.").push(same);
        query.push(" and state = 'processing' limit ").push(limit).push(") counted) end");
    }
    query.push(")) is true as is_crowded, setting.paused_at is not null as is_queue_paused, ");
    query
        .push("coalesce(matching.job_type = any(setting.paused_types), false) as is_type_paused, ");
    query
        .push("(case when setting.rate_limit_count is not null then setting.rate_limit_count <= (");
    query.push("select coalesce(sum(handed.jobs), 0) from queue_handouts past ");
    query.push("cross join lateral unnest(past.at, past.jobs) as handed(at, jobs) ");
    query.push("where past.project_id = ").push_bind(project_id.0);
    query.push(" and past.queue = matching.queue and handed.at > ");
    query.push("now() - make_interval(secs => setting.rate_limit_per_seconds)) end) is true ");
    query.push("as is_rate_limited, ");
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

/// Up to `limit` matching jobs, in the order of their ids, above `after`. Examines at most
/// [`limits::MAX_PAGE_EXAMINED_ROWS`].
pub async fn walk(
    conn: &mut PgConnection,
    project_id: ProjectId,
    filter: &Filter,
    after: Option<JobId>,
    limit: i64,
) -> sqlx::Result<Walked> {
    let (upper, lower) = bounds(filter, None);
    let beyond = after.map_or(Uuid::nil(), |it| Uuid::from_u128(it.0.as_u128().saturating_add(1)));
    let mut query = QueryBuilder::<Postgres>::new("with examined as materialized (");
    let (between, most) = ((upper, lower.max(beyond)), limits::MAX_PAGE_EXAMINED_ROWS);
    push_examined(&mut query, project_id, between, Order::OldestFirst, most);
    query.push("), matching as (select id from examined where true");
    push_filter(&mut query, project_id, filter);
    query.push(" order by id limit ").push_bind(limit);
    query.push(") select array(select id from matching order by id), ");
    query.push("(select id from examined order by id desc limit 1), ");
    query.push("(select count(*) from examined) < ").push_bind(limits::MAX_PAGE_EXAMINED_ROWS);
    let (jobs, last, is_through): (Vec<JobId>, Option<JobId>, bool) =
        query.build_query_as().fetch_one(conn).await?;
    Ok(Walked { jobs, last, is_through })
}

/// From which end rows are examined.
#[derive(Clone, Copy)]
enum Order {
    OldestFirst,
    NewestFirst,
}

/// The first rows of both tables between two ids, with the columns that filters need.
fn push_examined(
    query: &mut QueryBuilder<Postgres>,
    project_id: ProjectId,
    (upper, lower): (Uuid, Uuid),
    order: Order,
    limit: i64,
) {
    let order = match order {
        Order::OldestFirst => " order by id limit ",
        Order::NewestFirst => " order by id desc limit ",
    };
    query.push("select * from (");
    for table in ["jobs", "finished_jobs"] {
        if table == "finished_jobs" {
            query.push(" union all ");
        }
        query.push("(select id, queue, job_type, state, created_at from ").push(table);
        query.push(" where project_id = ").push_bind(project_id.0);
        query.push(" and id < ").push_bind(upper).push(" and id >= ").push_bind(lower);
        query.push(order).push_bind(limit).push(")");
    }
    query.push(") both_tables").push(order).push_bind(limit);
}

/// Jobs that one count examines at most.
pub const MAX_COUNTED: i64 = 100_000;

/// How many of the newest [`MAX_COUNTED`] jobs match, and whether there are more jobs than that.
pub async fn count(
    conn: &mut PgConnection,
    project_id: ProjectId,
    filter: &Filter,
) -> sqlx::Result<(i64, bool)> {
    let between = bounds(filter, None);
    let mut query = QueryBuilder::<Postgres>::new("with examined as materialized (");
    push_examined(&mut query, project_id, between, Order::NewestFirst, MAX_COUNTED + 1);
    query.push(") select (select count(*) from examined where true");
    push_filter(&mut query, project_id, filter);
    query.push("), (select count(*) from examined) > ").push_bind(MAX_COUNTED);
    query.build_query_as().fetch_one(conn).await
}

/// The range of ids in which a filter's jobs lie.
fn bounds(filter: &Filter, before: Option<JobId>) -> (Uuid, Uuid) {
    let created_before = filter.created_before.map(|it| id_at(it, ID_CLOCK_MARGIN_MS));
    let upper = [before.map(|it| it.0), created_before].into_iter().flatten().min();
    let lower = filter.created_after.map(|it| id_at(it, -ID_CLOCK_MARGIN_MS));
    (upper.unwrap_or(Uuid::max()), lower.unwrap_or(Uuid::nil()))
}

fn push_filter(query: &mut QueryBuilder<Postgres>, project_id: ProjectId, filter: &Filter) {
    if !filter.states.is_empty() {
        let states = filter.states.iter().flat_map(|it| stored_states(*it));
        query.push(" and state = any(").push_bind(states.collect::<Vec<_>>()).push(")");
    }
    if let Some(queue) = &filter.queue {
        query.push(" and queue = ").push_bind(queue.clone());
    }
    if let Some(job_type) = &filter.job_type {
        query.push(" and job_type = ").push_bind(job_type.clone());
    }
    if let Some((name, value)) = &filter.tag {
        // Not `exists`: a scalar subquery is evaluated row by row, and never becomes a scan of all
        // bodies.
        query.push(" and (select tagged.tags ");
        match value {
            Some(value) => {
                query.push("->> ").push_bind(name.clone()).push(" = ").push_bind(value.clone())
            }
            None => query.push("? ").push_bind(name.clone()),
        };
        query.push(" from job_bodies tagged where tagged.project_id = ").push_bind(project_id.0);
        query.push(" and tagged.job_id = examined.id)");
    }
    if let Some(after) = filter.created_after {
        query.push(" and created_at >= ").push_bind(after);
    }
    if let Some(before) = filter.created_before {
        query.push(" and created_at < ").push_bind(before);
    }
}

/// The last row of a full page is the next page's first: it is cut off, and the cursor is the id
/// before it. A short page continues below the last row examined, unless all were.
fn read_page(
    rows: Vec<sqlx::postgres::PgRow>,
    page_jobs: usize,
) -> sqlx::Result<(Vec<JobRow>, Option<JobId>)> {
    use sqlx::{FromRow, Row};
    let (mut jobs, mut examined, mut lowest) = (Vec::with_capacity(rows.len()), 0_i64, None);
    for row in &rows {
        examined = row.try_get("examined")?;
        lowest = row.try_get("lowest")?;
        if row.try_get::<Option<Uuid>, _>("id")?.is_some() {
            jobs.push(JobRow::from_row(row)?);
        }
    }
    let is_full = jobs.len() > page_jobs;
    jobs.truncate(page_jobs);
    let next_below = match jobs.last() {
        Some(last) if is_full => Some(last.id),
        _ if examined >= limits::MAX_PAGE_EXAMINED_ROWS => lowest,
        _ => None,
    };
    Ok((jobs, next_below))
}

fn stored_states(state: JobState) -> Vec<&'static str> {
    match state {
        JobState::Pending => vec!["pending", "backoff"],
        other => vec![other.as_str()],
    }
}

/// The smallest id that could have been made `margin_ms` after this time.
fn id_at(time: DateTime<Utc>, margin_ms: i64) -> Uuid {
    let millis = time.timestamp_millis().saturating_add(margin_ms).clamp(0, (1 << 48) - 1);
    Uuid::from_u128(u128::from(millis.unsigned_abs()) << 80)
}
