//! Number of jobs per queue and state, and rates: from counters, never by counting jobs.
//!
//! Every statement that moves jobs between states adds a row to `queue_deltas`; a loop merges those
//! into `queue_counts` and `queue_rates` ([`crate::sweep::counts`]). A reader adds what is left
//! (`unmerged_deltas`), so its result is exact for its snapshot.

use chrono::{DateTime, Utc};
use fencepost_domain::{
    group::{GroupOrder, OnDead},
    ids::{JobId, ProjectId},
};
use sqlx::PgConnection;

use crate::workers::{ALIVE_SECONDS, holders::MAX_LISTED_HOLDERS};

/// Running jobs of a queue are counted in their index, up to this number; more are known from
/// `queue_deltas`, as all other states are. The statements carry it as a literal.
pub const MAX_COUNTED_PROCESSING: i64 = 10_000;

/// A queue: its counts, rates and settings.
#[derive(Debug, Clone, PartialEq)]
pub struct QueueRow {
    pub queue: String,
    /// By the database's clock.
    pub now: DateTime<Utc>,
    pub scheduled: i64,
    pub active: i64,
    pub backoff: i64,
    pub processing: i64,
    pub dead_letter: i64,
    pub succeeded: i64,
    pub cancelled: i64,
    /// Since when the longest-waiting ready job waits, at the earliest since it was stored; none:
    /// no job is ready.
    pub oldest_ready_at: Option<DateTime<Utc>>,
    pub oldest_ready_job_id: Option<JobId>,
    pub workers: i64,
    /// Running jobs whose workers make no calls, the number of these workers, and when the last of
    /// the jobs returns.
    pub silent_jobs: i64,
    pub silent_workers: i64,
    pub silent_until: Option<DateTime<Utc>>,
    pub enqueued_minute: i64,
    pub succeeded_minute: i64,
    pub failed_minute: i64,
    pub enqueued_hour: i64,
    pub succeeded_hour: i64,
    pub failed_hour: i64,
    pub max_concurrency: Option<i32>,
    pub rate_limit_count: Option<i32>,
    pub rate_limit_per_seconds: Option<i32>,
    pub default_lease_seconds: Option<i32>,
    pub retention_days: Option<i32>,
    pub default_max_attempts: Option<i32>,
    pub default_retry: Option<serde_json::Value>,
    pub brake_after: Option<i32>,
    pub max_waiting: Option<i32>,
    /// None: it has no settings.
    pub group_order: Option<GroupOrder>,
    pub group_on_dead: Option<OnDead>,
    pub group_max_running: Option<i32>,
    pub group_rate_counts: Option<Vec<i32>>,
    pub group_rate_seconds: Option<Vec<i32>>,
    pub group_fair: Option<bool>,
    pub shared_limits: Option<Vec<String>>,
    pub paused_at: Option<DateTime<Utc>>,
    pub updated_at: Option<DateTime<Utc>>,
    /// Whether it was ever used, has settings, or is polled.
    pub is_known: bool,
}

/// Names of queues of a project after `after`, in order: those that were ever used, have settings,
/// or are polled.
pub async fn queue_names(
    conn: &mut PgConnection,
    project_id: ProjectId,
    after: &str,
    limit: i64,
) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar!(
        r#"
        select queue "queue!"
        from (
            (
                select queue from queue_counts
                where project_id = $1 and queue > $2
                order by queue
                limit $3
            )
            union
            (
                select name from queues
                where project_id = $1 and name > $2
                order by name
                limit $3
            )
            union
            (
                select distinct queue from unmerged_deltas
                where project_id = $1 and queue > $2
                order by queue
                limit $3
            )
            union
            (
                select distinct polled.queue
                from workers
                cross join lateral unnest(queues) as polled(queue)
                where project_id = $1 and polled.queue > $2
                    and state = 'running' and lost_at is null
                    and last_seen_at > now() - make_interval(secs => greatest($4::int, 3 * beat_seconds))
                order by polled.queue
                limit $3
            )
        ) names
        order by queue
        limit $3
        "#,
        project_id.0,
        after,
        limit,
        ALIVE_SECONDS,
    )
    .fetch_all(conn)
    .await
}

/// Names of queues of a project that were ever used: first those with pending, running or
/// backing-off jobs, then the others, if wanted; of more than `limit`, any.
pub async fn busiest_queues(
    conn: &mut PgConnection,
    project_id: ProjectId,
    with_empty: bool,
    limit: i64,
) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar!(
        r#"
        select queue "queue!"
        from (
            select queue, active from queue_counts where project_id = $1
            union all
            select queue, active from unmerged_deltas where project_id = $1
        ) moves
        group by queue
        having $3 or sum(active) > 0
        order by sum(active) > 0 desc, random()
        limit $2
        "#,
        project_id.0,
        limit,
        with_empty,
    )
    .fetch_all(conn)
    .await
}

/// How many queues a project has used, up to `max`. Those whose first change is not merged yet are
/// not counted.
pub async fn count_queues(
    conn: &mut PgConnection,
    project_id: ProjectId,
    max: i64,
) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        select count(*) "queues!"
        from (select from queue_counts where project_id = $1 limit $2) counted
        "#,
        project_id.0,
        max,
    )
    .fetch_one(conn)
    .await
}

/// Queues among these that have had a job.
pub async fn used_queues(
    conn: &mut PgConnection,
    project_id: ProjectId,
    names: &[&str],
) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar!(
        r#"
        select queue "queue!" from queue_counts where project_id = $1 and queue = any($2)
        union
        select queue from unmerged_deltas where project_id = $1 and queue = any($2)
        "#,
        project_id.0,
        names as &[&str],
    )
    .fetch_all(conn)
    .await
}

/// How many jobs of a project wait or run.
pub async fn waiting(conn: &mut PgConnection, project_id: ProjectId) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        select (coalesce(kept.jobs, 0) + coalesce(fresh.jobs, 0))::bigint "jobs!"
        from (
            select sum(scheduled + active) as jobs from queue_counts where project_id = $1
        ) kept
        cross join (
            select sum(scheduled + active) as jobs from unmerged_deltas where project_id = $1
        ) fresh
        "#,
        project_id.0,
    )
    .fetch_one(conn)
    .await
}

/// Jobs of a project by state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Totals {
    pub scheduled: i64,
    pub active: i64,
    pub processing: i64,
    pub dead_letter: i64,
    pub succeeded: i64,
    pub cancelled: i64,
}

/// Jobs of a project by state, over all its queues.
pub async fn totals(conn: &mut PgConnection, project_id: ProjectId) -> sqlx::Result<Totals> {
    sqlx::query_as!(
        Totals,
        r#"
        select coalesce(sum(scheduled), 0)::bigint "scheduled!",
               coalesce(sum(active), 0)::bigint "active!",
               (
                   select case when count(*) < 10000 then count(*)
                       else greatest(count(*), sum(moves.processing)) end
                   from (
                       select from jobs
                       where project_id = $1 and state = 'processing'
                       limit 10000
                   ) counted
               )::bigint "processing!",
               coalesce(sum(dead_letter), 0)::bigint "dead_letter!",
               coalesce(sum(succeeded), 0)::bigint "succeeded!",
               coalesce(sum(cancelled), 0)::bigint "cancelled!"
        from (
            select scheduled, active, processing, dead_letter, succeeded, cancelled
            from queue_counts
            where project_id = $1
            union all
            select scheduled, active, processing, dead_letter, succeeded, cancelled
            from unmerged_deltas
            where project_id = $1
        ) moves
        "#,
        project_id.0,
    )
    .fetch_one(conn)
    .await
}

/// Number of jobs of a queue, by state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Depth {
    pub queue: String,
    pub scheduled: i64,
    pub active: i64,
    pub backoff: i64,
    pub dead_letter: i64,
}

/// The queues of a project, those with the most scheduled, active and dead-lettered jobs first.
pub async fn depths(
    conn: &mut PgConnection,
    project_id: ProjectId,
    limit: i64,
) -> sqlx::Result<Vec<Depth>> {
    sqlx::query_as!(
        Depth,
        r#"
        select queue "queue!", sum(scheduled)::bigint "scheduled!", sum(active)::bigint "active!",
               sum(backoff)::bigint "backoff!", sum(dead_letter)::bigint "dead_letter!"
        from (
            select queue, scheduled, active, backoff, dead_letter
            from queue_counts
            where project_id = $1
            union all
            select queue, scheduled, active, backoff, dead_letter
            from unmerged_deltas
            where project_id = $1
        ) moves
        group by queue
        order by sum(scheduled + active + dead_letter) desc, queue
        limit $2
        "#,
        project_id.0,
        limit,
    )
    .fetch_all(conn)
    .await
}

/// These queues, in order, whether they exist or not.
pub async fn queues(
    conn: &mut PgConnection,
    project_id: ProjectId,
    names: &[String],
) -> sqlx::Result<Vec<QueueRow>> {
    sqlx::query_as!(
        QueueRow,
        r#"
        with fresh as materialized (
            select queue, sum(scheduled)::bigint as scheduled, sum(active)::bigint as active,
                   sum(processing)::bigint as processing, sum(backoff)::bigint as backoff,
                   sum(dead_letter)::bigint as dead_letter, sum(succeeded)::bigint as succeeded,
                   sum(cancelled)::bigint as cancelled, sum(enqueued)::bigint as enqueued,
                   sum(failed)::bigint as failed,
                   sum(greatest(succeeded, 0))::bigint as has_succeeded
            from unmerged_deltas
            where project_id = $1 and queue = any($2)
            group by queue
        ), live_workers as materialized (
            select polled.queue, count(*) as workers
            from workers
            cross join lateral unnest(queues) as polled(queue)
            where project_id = $1 and state = 'running' and lost_at is null
                and coalesce(directive, 'running') = 'running'
                and last_seen_at > now() - make_interval(secs => greatest($3::int, 3 * beat_seconds))
                and polled.queue = any($2)
            group by polled.queue
        )
        select named.queue "queue!", now() "now!",
               coalesce(kept.scheduled, 0) + coalesce(fresh.scheduled, 0) "scheduled!",
               coalesce(kept.active, 0) + coalesce(fresh.active, 0) "active!",
               coalesce(kept.backoff, 0) + coalesce(fresh.backoff, 0) "backoff!",
               coalesce(kept.dead_letter, 0) + coalesce(fresh.dead_letter, 0) "dead_letter!",
               coalesce(kept.succeeded, 0) + coalesce(fresh.succeeded, 0) "succeeded!",
               coalesce(kept.cancelled, 0) + coalesce(fresh.cancelled, 0) "cancelled!",
               case when running.processing < 10000 then running.processing
                   else greatest(
                       running.processing,
                       coalesce(kept.processing, 0) + coalesce(fresh.processing, 0)
                   )
               end "processing!", oldest.ready_at "oldest_ready_at?",
               oldest.id "oldest_ready_job_id?: JobId",
               coalesce(live_workers.workers, 0) "workers!", silent.jobs "silent_jobs!",
               silent.workers "silent_workers!", silent.until as silent_until,
               coalesce(rate.enqueued_minute, 0) + coalesce(fresh.enqueued, 0) "enqueued_minute!",
               coalesce(rate.succeeded_minute, 0) + coalesce(fresh.has_succeeded, 0)
                   "succeeded_minute!",
               coalesce(rate.failed_minute, 0) + coalesce(fresh.failed, 0) "failed_minute!",
               coalesce(rate.enqueued, 0) + coalesce(fresh.enqueued, 0) "enqueued_hour!",
               coalesce(rate.succeeded, 0) + coalesce(fresh.has_succeeded, 0) "succeeded_hour!",
               coalesce(rate.failed, 0) + coalesce(fresh.failed, 0) "failed_hour!",
               setting.max_concurrency, setting.rate_limit_count, setting.rate_limit_per_seconds,
               setting.default_lease_seconds, setting.retention_days, setting.default_max_attempts,
               setting.default_retry, setting.brake_after, setting.max_waiting, setting.paused_at,
               setting.group_order "group_order?: GroupOrder",
               setting.group_on_dead "group_on_dead?: OnDead",
               setting.group_max_running, setting.group_rate_counts, setting.group_rate_seconds,
               setting.group_fair "group_fair?", setting.shared_limits,
               setting.updated_at "updated_at?",
               coalesce(kept.queue, setting.name, fresh.queue, live_workers.queue) is not null
                   "is_known!"
        from unnest($2::text[]) as named(queue)
        left join queue_counts kept on kept.project_id = $1 and kept.queue = named.queue
        left join queues setting on setting.project_id = $1 and setting.name = named.queue
        left join fresh on fresh.queue = named.queue
        left join live_workers on live_workers.queue = named.queue
        cross join lateral (
            select count(*) as processing
            from (
                select from jobs
                where project_id = $1 and queue = named.queue and state = 'processing'
                limit 10000
            ) counted
        ) running
        left join lateral (
            select sum(enqueued)::bigint as enqueued, sum(succeeded)::bigint as succeeded,
                   sum(failed)::bigint as failed,
                   round(sum(enqueued * share))::bigint as enqueued_minute,
                   round(sum(succeeded * share))::bigint as succeeded_minute,
                   round(sum(failed * share))::bigint as failed_minute
            from (
                select enqueued, succeeded, failed,
                       case minute
                           when date_trunc('minute', now()) then 1
                           when date_trunc('minute', now()) - interval '1 minute'
                           then 1 - extract(epoch from now() - date_trunc('minute', now())) / 60
                           else 0
                       end as share
                from queue_rates
                where project_id = $1 and queue = named.queue
                    and minute > now() - interval '1 hour'
            ) minutes
        ) rate on true
        left join lateral longest_ready($1, named.queue, 500, true) oldest on true
        cross join lateral (
            select coalesce(sum(jobs), 0)::bigint as jobs, count(*) as workers,
                   max(return_by) as until
            from silent_holders($1, named.queue, $3, $4)
        ) silent
        order by named.queue
        "#,
        project_id.0,
        names,
        ALIVE_SECONDS,
        MAX_LISTED_HOLDERS,
    )
    .fetch_all(conn)
    .await
}
