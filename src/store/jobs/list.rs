//! Listing and counting jobs, newest first: a bounded number of rows is examined, whatever the
//! filter.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use super::{JobRow, Payloads};
use crate::{
    domain::{
        job::JobState,
        limits,
        operation::{JobFilter, Kind},
    },
    ids::{BatchId, JobId, ProjectId},
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
    /// Only jobs of this batch.
    pub batch_id: Option<BatchId>,
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
            batch_id: filter.batch_id,
            created_after: filter.created_after,
            created_before: filter.created_before,
        }
    }
}

impl Filter {
    fn stored_states(&self) -> Vec<&'static str> {
        self.states.iter().flat_map(|it| stored_states(*it)).copied().collect()
    }

    fn tag_name(&self) -> Option<&str> {
        self.tag.as_ref().map(|it| &*it.0)
    }

    fn tag_value(&self) -> Option<&str> {
        self.tag.as_ref()?.1.as_deref()
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

/// One page of jobs: the newest whose id is below `before`, from the newest rows of the tables that
/// hold jobs of these states.
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
    let (mut upper, lower) = bounds(filter, before);
    // One more, to know whether the page is the last one.
    let wanted = page_jobs as usize + 1;
    let (mut jobs, mut last, mut is_through) = (Vec::new(), None, false);
    for _ in 0..limits::MAX_PAGE_LOOKS {
        let left = i64::try_from(wanted - jobs.len()).unwrap_or(i64::MAX);
        let mut found = walk_down(conn, project_id, filter, (upper, lower), left).await?;
        jobs.append(&mut found.jobs);
        (last, is_through) = (found.last.or(last), found.is_through);
        if is_through || jobs.len() >= wanted {
            break;
        }
        upper = last.map_or(upper, |it| it.0);
    }
    let mut page_jobs = page_jobs as usize;
    if payloads == Payloads::Shown {
        page_jobs = page_jobs.min(super::fitting(conn, project_id, &jobs).await?);
    }
    let is_full = jobs.len() > page_jobs;
    jobs.truncate(page_jobs);
    // A short page continues below the last row examined, unless all were.
    let next_below = if is_full { jobs.last().copied() } else { last.filter(|_| !is_through) };
    let mut rows = super::find_all(conn, project_id, &jobs, payloads).await?;
    // A job may have moved on since.
    rows.retain(|it| filter.states.is_empty() || filter.states.contains(&it.state.public()));
    rows.sort_by_key(|it| std::cmp::Reverse(it.id));
    Ok((rows, next_below))
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
    walk_up(conn, project_id, filter, (upper, lower.max(beyond)), limit).await
}

/// The oldest matching jobs between two ids. Those of a batch are found by its index: other jobs do
/// not count as examined. The condition on tags is no `exists`: a scalar
/// subquery is evaluated row by row, and never becomes a scan of all bodies.
async fn walk_up(
    conn: &mut PgConnection,
    project_id: ProjectId,
    filter: &Filter,
    (upper, lower): (Uuid, Uuid),
    limit: i64,
) -> sqlx::Result<Walked> {
    sqlx::query_as!(
        Walked,
        r#"
        with examined as materialized (
            select * from (
                (select id, queue, job_type, state, created_at
                 from jobs
                 where (cardinality($5::text[]) = 0 or not $5 <@ array['succeeded', 'cancelled'])
                     and $13::uuid is null
                     and project_id = $1 and id < $2 and id >= $3
                 order by id
                 limit $4)
                union all
                (select id, queue, job_type, state, created_at
                 from finished_jobs
                 where (cardinality($5::text[]) = 0 or $5 && array['succeeded', 'cancelled'])
                     and $13::uuid is null
                     and project_id = $1 and id < $2 and id >= $3
                 order by id
                 limit $4)
                union all
                (select member.job_id, job.queue, job.job_type, job.state, job.created_at
                 from job_bodies member
                 cross join lateral (
                     select queue, job_type, state, created_at
                     from jobs where project_id = $1 and id = member.job_id
                     union all
                     select queue, job_type, state, created_at
                     from finished_jobs where project_id = $1 and id = member.job_id
                     -- Row by row: a join could walk over the jobs of all batches.
                     offset 0
                 ) job
                 where member.project_id = $1 and member.batch_id = $13
                     and member.job_id < $2 and member.job_id >= $3
                 order by member.job_id
                 limit $4)
            ) both_tables
            order by id
            limit $4
        ), matching as (
            select id from examined
            where (cardinality($5::text[]) = 0 or state = any($5))
                and ($6::text is null or queue = $6)
                and ($7::text is null or job_type = $7)
                and ($8::timestamptz is null or created_at >= $8)
                and ($9::timestamptz is null or created_at < $9)
                and ($10::text is null or (
                    select case when $11::text is null then tagged.tags ? $10
                           else tagged.tags ->> $10 = $11 end
                    from job_bodies tagged
                    where tagged.project_id = $1 and tagged.job_id = examined.id
                ))
            order by id
            limit $12
        )
        select array(select id from matching order by id) "jobs!: Vec<JobId>",
               (select id from examined order by id desc limit 1) "last: JobId",
               (select count(*) from examined) < $4 "is_through!"
        "#,
        project_id.0,
        upper,
        lower,
        limits::MAX_PAGE_EXAMINED_ROWS,
        &filter.stored_states() as &[&str],
        filter.queue.as_deref(),
        filter.job_type.as_deref(),
        filter.created_after,
        filter.created_before,
        filter.tag_name(),
        filter.tag_value(),
        limit,
        filter.batch_id.map(|it| it.0),
    )
    .fetch_one(conn)
    .await
}

/// The newest matching jobs between two ids; otherwise like [`walk_up`].
async fn walk_down(
    conn: &mut PgConnection,
    project_id: ProjectId,
    filter: &Filter,
    (upper, lower): (Uuid, Uuid),
    limit: i64,
) -> sqlx::Result<Walked> {
    sqlx::query_as!(
        Walked,
        r#"
        with examined as materialized (
            select * from (
                (select id, queue, job_type, state, created_at
                 from jobs
                 where (cardinality($5::text[]) = 0 or not $5 <@ array['succeeded', 'cancelled'])
                     and $13::uuid is null
                     and project_id = $1 and id < $2 and id >= $3
                 order by id desc
                 limit $4)
                union all
                (select id, queue, job_type, state, created_at
                 from finished_jobs
                 where (cardinality($5::text[]) = 0 or $5 && array['succeeded', 'cancelled'])
                     and $13::uuid is null
                     and project_id = $1 and id < $2 and id >= $3
                 order by id desc
                 limit $4)
                union all
                (select member.job_id, job.queue, job.job_type, job.state, job.created_at
                 from job_bodies member
                 cross join lateral (
                     select queue, job_type, state, created_at
                     from jobs where project_id = $1 and id = member.job_id
                     union all
                     select queue, job_type, state, created_at
                     from finished_jobs where project_id = $1 and id = member.job_id
                     -- Row by row: a join could walk over the jobs of all batches.
                     offset 0
                 ) job
                 where member.project_id = $1 and member.batch_id = $13
                     and member.job_id < $2 and member.job_id >= $3
                 order by member.job_id desc
                 limit $4)
            ) both_tables
            order by id desc
            limit $4
        ), matching as (
            select id from examined
            where (cardinality($5::text[]) = 0 or state = any($5))
                and ($6::text is null or queue = $6)
                and ($7::text is null or job_type = $7)
                and ($8::timestamptz is null or created_at >= $8)
                and ($9::timestamptz is null or created_at < $9)
                and ($10::text is null or (
                    select case when $11::text is null then tagged.tags ? $10
                           else tagged.tags ->> $10 = $11 end
                    from job_bodies tagged
                    where tagged.project_id = $1 and tagged.job_id = examined.id
                ))
            order by id desc
            limit $12
        )
        select array(select id from matching order by id desc) "jobs!: Vec<JobId>",
               (select id from examined order by id limit 1) "last: JobId",
               (select count(*) from examined) < $4 "is_through!"
        "#,
        project_id.0,
        upper,
        lower,
        limits::MAX_PAGE_EXAMINED_ROWS,
        &filter.stored_states() as &[&str],
        filter.queue.as_deref(),
        filter.job_type.as_deref(),
        filter.created_after,
        filter.created_before,
        filter.tag_name(),
        filter.tag_value(),
        limit,
        filter.batch_id.map(|it| it.0),
    )
    .fetch_one(conn)
    .await
}

/// Jobs that one count examines at most.
pub const MAX_COUNTED: i64 = 100_000;

/// How many of the newest [`MAX_COUNTED`] jobs match, and whether there are more jobs than that.
pub async fn count(
    conn: &mut PgConnection,
    project_id: ProjectId,
    filter: &Filter,
) -> sqlx::Result<(i64, bool)> {
    let (upper, lower) = bounds(filter, None);
    let counted = sqlx::query!(
        r#"
        with examined as materialized (
            select * from (
                (select id, queue, job_type, state, created_at
                 from jobs
                 where (cardinality($5::text[]) = 0 or not $5 <@ array['succeeded', 'cancelled'])
                     and $12::uuid is null
                     and project_id = $1 and id < $2 and id >= $3
                 order by id desc
                 limit $4)
                union all
                (select id, queue, job_type, state, created_at
                 from finished_jobs
                 where (cardinality($5::text[]) = 0 or $5 && array['succeeded', 'cancelled'])
                     and $12::uuid is null
                     and project_id = $1 and id < $2 and id >= $3
                 order by id desc
                 limit $4)
                union all
                (select member.job_id, job.queue, job.job_type, job.state, job.created_at
                 from job_bodies member
                 cross join lateral (
                     select queue, job_type, state, created_at
                     from jobs where project_id = $1 and id = member.job_id
                     union all
                     select queue, job_type, state, created_at
                     from finished_jobs where project_id = $1 and id = member.job_id
                     -- Row by row: a join could walk over the jobs of all batches.
                     offset 0
                 ) job
                 where member.project_id = $1 and member.batch_id = $12
                     and member.job_id < $2 and member.job_id >= $3
                 order by member.job_id desc
                 limit $4)
            ) both_tables
            order by id desc
            limit $4
        )
        select (
            select count(*) from examined
            where (cardinality($5::text[]) = 0 or state = any($5))
                and ($6::text is null or queue = $6)
                and ($7::text is null or job_type = $7)
                and ($8::timestamptz is null or created_at >= $8)
                and ($9::timestamptz is null or created_at < $9)
                and ($10::text is null or (
                    select case when $11::text is null then tagged.tags ? $10
                           else tagged.tags ->> $10 = $11 end
                    from job_bodies tagged
                    where tagged.project_id = $1 and tagged.job_id = examined.id
                ))
        ) "matching!", (select count(*) from examined) "examined!"
        "#,
        project_id.0,
        upper,
        lower,
        MAX_COUNTED + 1,
        &filter.stored_states() as &[&str],
        filter.queue.as_deref(),
        filter.job_type.as_deref(),
        filter.created_after,
        filter.created_before,
        filter.tag_name(),
        filter.tag_value(),
        filter.batch_id.map(|it| it.0),
    )
    .fetch_one(conn)
    .await?;
    Ok((counted.matching, counted.examined > MAX_COUNTED))
}

/// The range of ids in which a filter's jobs lie.
fn bounds(filter: &Filter, before: Option<JobId>) -> (Uuid, Uuid) {
    let created_before = filter.created_before.map(|it| id_at(it, ID_CLOCK_MARGIN_MS));
    let upper = [before.map(|it| it.0), created_before].into_iter().flatten().min();
    let lower = filter.created_after.map(|it| id_at(it, -ID_CLOCK_MARGIN_MS));
    (upper.unwrap_or(Uuid::max()), lower.unwrap_or(Uuid::nil()))
}

fn stored_states(state: JobState) -> &'static [&'static str] {
    match state {
        JobState::Scheduled => &["scheduled"],
        JobState::Pending => &["pending", "backoff"],
        JobState::Processing => &["processing"],
        JobState::Succeeded => &["succeeded"],
        JobState::DeadLetter => &["dead_letter"],
        JobState::Cancelled => &["cancelled"],
    }
}

/// The smallest id that could have been made `margin_ms` after this time.
fn id_at(time: DateTime<Utc>, margin_ms: i64) -> Uuid {
    let millis = time.timestamp_millis().saturating_add(margin_ms).clamp(0, (1 << 48) - 1);
    Uuid::from_u128(u128::from(millis.unsigned_abs()) << 80)
}
