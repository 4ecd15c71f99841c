//! Statistics: what happened to jobs, by minute, by hour, and in total.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use fencepost_domain::{
    histogram::Histogram,
    ids::ProjectId,
    stats::{Counted, Counts},
};

/// Rows that one statement adds, each to its minute, its hour and its total.
pub const MAX_ADDED_ROWS: usize = 500;

/// Adds a node's counters to the present minute and hour.
pub async fn add(conn: &mut PgConnection, counted: &[Counted]) -> sqlx::Result<()> {
    let column =
        |of: fn(&Counts) -> i64| counted.iter().map(|it| of(&it.counts)).collect::<Vec<_>>();
    let flat = |of: fn(&Counts) -> &Histogram| {
        counted.iter().flat_map(|it| of(&it.counts).buckets).collect::<Vec<_>>()
    };
    sqlx::query!(
        r#"
        insert into job_stats (
            project_id, resolution, at, queue, job_type, enqueued, claimed, succeeded, failed, timed_out,
            lease_expired, released, dead_lettered, cancelled, wait_ms, run_ms, wait_buckets, run_buckets
        )
        select sent.project_id, slot.resolution, slot.at, sent.queue, sent.job_type, sent.enqueued,
               sent.claimed, sent.succeeded, sent.failed, sent.timed_out, sent.lease_expired,
               sent.released, sent.dead_lettered, sent.cancelled, sent.wait_ms, sent.run_ms,
               ($15::bigint[])[(sent.number - 1) * $17 + 1 : sent.number * $17],
               ($16::bigint[])[(sent.number - 1) * $17 + 1 : sent.number * $17]
        from unnest(
            $1::int[], $2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[],
            $8::bigint[], $9::bigint[], $10::bigint[], $11::bigint[], $12::bigint[], $13::bigint[],
            $14::bigint[]
        ) with ordinality as sent(
            project_id, queue, job_type, enqueued, claimed, succeeded, failed, timed_out, lease_expired,
            released, dead_lettered, cancelled, wait_ms, run_ms, number
        )
        cross join lateral (
            values ('minute', date_trunc('minute', now())), ('hour', date_trunc('hour', now(), 'UTC')),
                   ('total', 'epoch'::timestamptz)
        ) as slot(resolution, at)
        -- One order for all nodes, so that concurrent flushes cannot deadlock.
        order by sent.project_id, slot.resolution, slot.at, sent.queue, sent.job_type
        on conflict (project_id, resolution, at, queue, job_type) do update
        set enqueued = job_stats.enqueued + excluded.enqueued,
            claimed = job_stats.claimed + excluded.claimed,
            succeeded = job_stats.succeeded + excluded.succeeded,
            failed = job_stats.failed + excluded.failed,
            timed_out = job_stats.timed_out + excluded.timed_out,
            lease_expired = job_stats.lease_expired + excluded.lease_expired,
            released = job_stats.released + excluded.released,
            dead_lettered = job_stats.dead_lettered + excluded.dead_lettered,
            cancelled = job_stats.cancelled + excluded.cancelled,
            wait_ms = job_stats.wait_ms + excluded.wait_ms,
            run_ms = job_stats.run_ms + excluded.run_ms,
            wait_buckets = array(
                select coalesce(mine, 0) + coalesce(theirs, 0)
                from unnest(job_stats.wait_buckets, excluded.wait_buckets) with ordinality
                    as bucket(mine, theirs, number)
                order by number
            ),
            run_buckets = array(
                select coalesce(mine, 0) + coalesce(theirs, 0)
                from unnest(job_stats.run_buckets, excluded.run_buckets) with ordinality
                    as bucket(mine, theirs, number)
                order by number
            ),
            -- Rarely: the column is indexed, and would prevent HOT updates.
            updated_at = case
                when job_stats.updated_at < now() - interval '1 hour' then now()
                else job_stats.updated_at
            end
        "#,
        &counted.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &counted.iter().map(|it| it.queue.as_str()).collect::<Vec<_>>() as &[&str],
        &counted.iter().map(|it| it.job_type.as_str()).collect::<Vec<_>>() as &[&str],
        &column(|it| it.enqueued),
        &column(|it| it.claimed),
        &column(|it| it.succeeded),
        &column(|it| it.failed),
        &column(|it| it.timed_out),
        &column(|it| it.lease_expired),
        &column(|it| it.released),
        &column(|it| it.dead_lettered),
        &column(|it| it.cancelled),
        &column(|it| it.wait.sum_ms),
        &column(|it| it.run.sum_ms),
        &flat(|it| &it.wait),
        &flat(|it| &it.run),
        fencepost_domain::histogram::BUCKETS as i64,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Which statistics of a project to read.
#[derive(Debug, Clone, Copy)]
pub struct Span<'a> {
    /// Which rows: `minute` or `hour`.
    pub resolution: &'static str,
    /// The length of the returned buckets: `minute`, `hour` or `day` (UTC).
    pub slot: &'static str,
    /// The length of a bucket.
    pub slot_seconds: i32,
    /// How far back to read, in seconds.
    pub period_seconds: i32,
    /// Only this queue.
    pub queue: Option<&'a str>,
    /// Only this type.
    pub job_type: Option<&'a str>,
}

/// Counts of one time bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatsBucket {
    pub at: DateTime<Utc>,
    pub counts: Counts,
}

/// A row of counters, with its queue and type.
struct Row {
    at: Option<DateTime<Utc>>,
    queue: Option<String>,
    job_type: Option<String>,
    queues: Option<Vec<String>>,
    enqueued: i64,
    claimed: i64,
    succeeded: i64,
    failed: i64,
    timed_out: i64,
    lease_expired: i64,
    released: i64,
    dead_lettered: i64,
    cancelled: i64,
    wait_ms: i64,
    wait_buckets: Vec<i64>,
    run_ms: i64,
    run_buckets: Vec<i64>,
}

impl Row {
    fn counts(&self) -> Counts {
        Counts {
            enqueued: self.enqueued,
            claimed: self.claimed,
            succeeded: self.succeeded,
            failed: self.failed,
            timed_out: self.timed_out,
            lease_expired: self.lease_expired,
            released: self.released,
            dead_lettered: self.dead_lettered,
            cancelled: self.cancelled,
            wait: Histogram::stored(self.wait_ms, &self.wait_buckets),
            run: Histogram::stored(self.run_ms, &self.run_buckets),
        }
    }
}

/// The buckets of a span, oldest first, including empty ones; the last is still in progress.
pub async fn buckets(
    conn: &mut PgConnection,
    project_id: ProjectId,
    span: &Span<'_>,
) -> sqlx::Result<Vec<StatsBucket>> {
    let rows = sqlx::query_as!(
        Row,
        r#"
        with chosen as materialized (
            select date_trunc($3, at, 'UTC') as slot, enqueued, claimed, succeeded, failed, timed_out,
                   lease_expired, released, dead_lettered, cancelled, wait_ms, run_ms, wait_buckets,
                   run_buckets
            from job_stats
            where project_id = $1 and resolution = $2
                and at >= date_trunc($3, now() - make_interval(secs => $5::int), 'UTC')
                and ($6::text is null or queue = $6)
                and ($7::text is null or job_type = $7)
        ), summed as materialized (
            select slot, sum(enqueued) as enqueued, sum(claimed) as claimed, sum(succeeded) as succeeded,
                   sum(failed) as failed, sum(timed_out) as timed_out,
                   sum(lease_expired) as lease_expired, sum(released) as released,
                   sum(dead_lettered) as dead_lettered, sum(cancelled) as cancelled,
                   sum(wait_ms) as wait_ms, sum(run_ms) as run_ms
            from chosen
            group by slot
        ), bucketed as materialized (
            select slot, array_agg(waits order by number) as wait_buckets,
                   array_agg(runs order by number) as run_buckets
            from (
                select slot, number, sum(waited)::bigint as waits, sum(ran)::bigint as runs
                from chosen
                cross join lateral unnest(wait_buckets, run_buckets) with ordinality
                    as bucket(waited, ran, number)
                group by slot, number
            ) numbered
            group by slot
        )
        select at, null as queue, null as job_type, null::text[] as queues, coalesce(enqueued, 0)::bigint "enqueued!", coalesce(claimed, 0)::bigint "claimed!",
               coalesce(succeeded, 0)::bigint "succeeded!", coalesce(failed, 0)::bigint "failed!",
               coalesce(timed_out, 0)::bigint "timed_out!",
               coalesce(lease_expired, 0)::bigint "lease_expired!",
               coalesce(released, 0)::bigint "released!",
               coalesce(dead_lettered, 0)::bigint "dead_lettered!",
               coalesce(cancelled, 0)::bigint "cancelled!", coalesce(wait_ms, 0)::bigint "wait_ms!",
               coalesce(run_ms, 0)::bigint "run_ms!", coalesce(wait_buckets, '{}') "wait_buckets!",
               coalesce(run_buckets, '{}') "run_buckets!"
        from generate_series(
            date_trunc($3, now() - make_interval(secs => $5::int), 'UTC'), now(),
            make_interval(secs => $4::int)
        ) as series(at)
        left join summed on summed.slot = series.at
        left join bucketed on bucketed.slot = series.at
        order by at
        "#,
        project_id.0,
        span.resolution,
        span.slot,
        span.slot_seconds,
        span.period_seconds,
        span.queue,
        span.job_type,
    )
    .fetch_all(conn)
    .await?;
    let buckets =
        rows.into_iter().filter_map(|it| Some(StatsBucket { at: it.at?, counts: it.counts() }));
    Ok(buckets.collect())
}

/// Counts of the jobs of one type since a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TypeStats {
    pub job_type: String,
    /// By name, at most 20.
    pub queues: Vec<String>,
    pub counts: Counts,
}

/// Counts by type of the last 24 hours, for up to `limit` types: those with most enqueued
/// jobs first.
pub async fn by_type(
    conn: &mut PgConnection,
    project_id: ProjectId,
    limit: i64,
) -> sqlx::Result<Vec<TypeStats>> {
    let rows = sqlx::query_as!(
        Row,
        r#"
        with chosen as materialized (
            select *
            from job_stats
            where project_id = $1 and resolution = 'hour'
                and at >= date_trunc('hour', now() - interval '24 hours', 'UTC')
        ), summed as materialized (
            select job_type, (array_agg(distinct queue order by queue))[:20] as queues,
                   sum(enqueued) as enqueued, sum(claimed) as claimed, sum(succeeded) as succeeded,
                   sum(failed) as failed, sum(timed_out) as timed_out,
                   sum(lease_expired) as lease_expired, sum(released) as released,
                   sum(dead_lettered) as dead_lettered, sum(cancelled) as cancelled,
                   sum(wait_ms) as wait_ms, sum(run_ms) as run_ms
            from chosen
            group by job_type
            order by sum(enqueued) desc, job_type
            limit $2
        ), bucketed as materialized (
            select job_type, array_agg(waits order by number) as wait_buckets,
                   array_agg(runs order by number) as run_buckets
            from (
                select job_type, number, sum(waited)::bigint as waits, sum(ran)::bigint as runs
                from chosen
                cross join lateral unnest(wait_buckets, run_buckets) with ordinality
                    as bucket(waited, ran, number)
                where job_type in (select job_type from summed)
                group by job_type, number
            ) numbered
            group by job_type
        )
        select null::timestamptz as at, null as queue, job_type "job_type?", queues, enqueued::bigint "enqueued!", claimed::bigint "claimed!",
               succeeded::bigint "succeeded!", failed::bigint "failed!",
               timed_out::bigint "timed_out!", lease_expired::bigint "lease_expired!",
               released::bigint "released!", dead_lettered::bigint "dead_lettered!",
               cancelled::bigint "cancelled!", wait_ms::bigint "wait_ms!",
               run_ms::bigint "run_ms!", coalesce(wait_buckets, '{}') "wait_buckets!",
               coalesce(run_buckets, '{}') "run_buckets!"
        from summed
        left join bucketed using (job_type)
        order by enqueued desc, job_type
        "#,
        project_id.0,
        limit,
    )
    .fetch_all(conn)
    .await?;
    let stats = rows.into_iter().filter_map(|row| {
        let counts = row.counts();
        Some(TypeStats { job_type: row.job_type?, queues: row.queues?, counts })
    });
    Ok(stats.collect())
}

/// Totals, for up to `limit` pairs of queue and type: the oldest pairs first.
pub async fn totals(
    conn: &mut PgConnection,
    project_id: ProjectId,
    limit: i64,
) -> sqlx::Result<Vec<Counted>> {
    let rows = sqlx::query_as!(
        Row,
        r#"
        select null::timestamptz as at, queue "queue?", job_type "job_type?", null::text[] as queues, enqueued, claimed, succeeded, failed, timed_out, lease_expired, released,
               dead_lettered, cancelled, wait_ms, wait_buckets, run_ms, run_buckets
        from job_stats
        where project_id = $1 and resolution = 'total'
        order by since, queue, job_type
        limit $2
        "#,
        project_id.0,
        limit,
    )
    .fetch_all(conn)
    .await?;
    let totals = rows.into_iter().filter_map(|row| {
        let counts = row.counts();
        Some(Counted { project_id, queue: row.queue?, job_type: row.job_type?, counts })
    });
    Ok(totals.collect())
}
