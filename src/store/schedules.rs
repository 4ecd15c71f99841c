//! The schedules of a project.

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, types::Json};

use fencepost_domain::{
    backoff::RetryPolicy,
    ids::{JobId, ProjectId},
    schedule::{CatchUp, FireOutcome, OverlapPolicy, warning::Outlook},
};

use crate::workers::ALIVE_SECONDS;

/// A schedule as a worker registers it. None keeps the value, or uses the default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisteredSchedule {
    pub id: String,
    pub job_type: String,
    pub cron_expression: String,
    pub timezone: Option<String>,
    pub queue: Option<String>,
    pub max_attempts: Option<i32>,
    pub timeout_seconds: Option<i32>,
}

/// Stores a schedule, new or existing. A paused one stays paused. False: another job type has the
/// id, or it was not registered, and nothing is stored.
pub async fn upsert_registered(
    conn: &mut PgConnection,
    project_id: ProjectId,
    schedule: &RegisteredSchedule,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        insert into recurring_schedules (
            project_id, id, job_type, cron_expression, timezone, queue, max_attempts,
            timeout_seconds, last_tick, is_registered
        )
        values (
            $1, $2, $3, $4, coalesce($5, 'UTC'), coalesce($6, 'default'), coalesce($7, 3),
            coalesce($8, 1800), now(), true
        )
        on conflict (project_id, id) do update
        set cron_expression = $4,
            timezone = coalesce($5, recurring_schedules.timezone),
            queue = coalesce($6, recurring_schedules.queue),
            max_attempts = coalesce($7, recurring_schedules.max_attempts),
            timeout_seconds = coalesce($8, recurring_schedules.timeout_seconds),
            last_tick = case
                when (recurring_schedules.cron_expression, recurring_schedules.timezone)
                    = ($4, coalesce($5, recurring_schedules.timezone))
                then recurring_schedules.last_tick
                else now()
            end,
            next_tick = case
                when (recurring_schedules.cron_expression, recurring_schedules.timezone)
                    = ($4, coalesce($5, recurring_schedules.timezone))
                then recurring_schedules.next_tick
            end,
            problem = null,
            updated_at = now()
        where recurring_schedules.job_type = $3 and recurring_schedules.is_registered
        ",
        project_id.0,
        schedule.id,
        schedule.job_type,
        schedule.cron_expression,
        schedule.timezone,
        schedule.queue,
        schedule.max_attempts,
        schedule.timeout_seconds,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// A schedule as its project writes it, complete. None keeps the value, or uses the default.
#[derive(Debug, Clone, PartialEq)]
pub struct WrittenSchedule {
    pub id: String,
    pub job_type: String,
    pub cron_expression: String,
    pub timezone: String,
    pub queue: String,
    /// Of its jobs.
    pub group: Option<String>,
    pub payload: String,
    pub rank: i16,
    pub retry: Option<RetryPolicy>,
    pub overlap: OverlapPolicy,
    pub catch_up: CatchUp,
    pub spread_seconds: i32,
    pub is_paused: bool,
    pub max_attempts: Option<i32>,
    pub timeout_seconds: Option<i32>,
}

/// Stores a schedule, new or existing. If its times have changed, or it was paused, it starts from
/// this moment: past ticks are not caught up. None: another job type has the id, and nothing is
/// stored; else whether it is new.
pub async fn upsert(
    conn: &mut PgConnection,
    project_id: ProjectId,
    schedule: &WrittenSchedule,
) -> sqlx::Result<Option<bool>> {
    sqlx::query_scalar!(
        r#"
        insert into recurring_schedules (
            project_id, id, job_type, cron_expression, timezone, queue, payload, rank, retry, overlap,
            catch_up, spread_seconds, is_paused, max_attempts, timeout_seconds, group_key, last_tick
        )
        values (
            $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, coalesce($14, 3),
            coalesce($15, 1800), $16, now()
        )
        on conflict (project_id, id) do update
        set cron_expression = $4,
            timezone = $5,
            queue = $6,
            payload = $7,
            rank = $8,
            retry = $9,
            overlap = $10,
            catch_up = $11,
            spread_seconds = $12,
            is_paused = $13,
            group_key = $16,
            max_attempts = coalesce($14, recurring_schedules.max_attempts),
            timeout_seconds = coalesce($15, recurring_schedules.timeout_seconds),
            last_tick = case
                when (recurring_schedules.cron_expression, recurring_schedules.timezone)
                    = ($4, $5) and not recurring_schedules.is_paused
                then recurring_schedules.last_tick
                else now()
            end,
            next_tick = case
                when (recurring_schedules.cron_expression, recurring_schedules.timezone)
                    = ($4, $5) and not $13
                then recurring_schedules.next_tick
            end,
            problem = null,
            is_registered = false,
            updated_at = now()
        where recurring_schedules.job_type = $3
        returning xmax = 0 "is_new!"
        "#,
        project_id.0,
        schedule.id,
        schedule.job_type,
        schedule.cron_expression,
        schedule.timezone,
        schedule.queue,
        schedule.payload,
        schedule.rank,
        schedule.retry.as_ref().map(Json) as Option<Json<&RetryPolicy>>,
        schedule.overlap as OverlapPolicy,
        schedule.catch_up as CatchUp,
        schedule.spread_seconds,
        schedule.is_paused,
        schedule.max_attempts,
        schedule.timeout_seconds,
        schedule.group,
    )
    .fetch_optional(conn)
    .await
}

/// The counts to check before a schedule is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScheduleCount {
    /// Number of schedules of the project.
    pub schedules: i64,
    /// By the database's clock.
    pub now: DateTime<Utc>,
}

/// Counts a project's schedules, to check before one is stored.
pub async fn count(conn: &mut PgConnection, project_id: ProjectId) -> sqlx::Result<ScheduleCount> {
    sqlx::query_as!(
        ScheduleCount,
        r#"
        select count(*) "schedules!", now() "now!"
        from recurring_schedules
        where project_id = $1
        "#,
        project_id.0,
    )
    .fetch_one(conn)
    .await
}

/// The database's clock.
pub async fn clock(conn: &mut PgConnection) -> sqlx::Result<DateTime<Utc>> {
    sqlx::query_scalar!(r#"select now() "now!""#).fetch_one(conn).await
}

#[derive(Debug, Clone, PartialEq)]
pub struct ScheduleRow {
    pub id: String,
    pub job_type: String,
    pub cron_expression: String,
    pub timezone: String,
    pub queue: String,
    pub group: Option<String>,
    pub payload: String,
    pub rank: i16,
    pub retry: Option<serde_json::Value>,
    pub overlap: OverlapPolicy,
    pub catch_up: CatchUp,
    pub spread_seconds: i32,
    pub is_paused: bool,
    pub max_attempts: i32,
    pub timeout_seconds: i32,
    pub next_tick: Option<DateTime<Utc>>,
    pub problem: Option<String>,
    pub is_registered: bool,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
    pub last_run_at: Option<DateTime<Utc>>,
    /// Since when its ticks cannot be stored; the server tries again.
    pub failing_since: Option<DateTime<Utc>>,
    /// By the database's clock.
    pub now: DateTime<Utc>,
    /// See [`Outlook`]; so for the next three.
    pub skipped: i64,
    pub is_queue_paused: bool,
    pub is_type_paused: bool,
    pub is_served: bool,
}

impl ScheduleRow {
    /// The facts about what its jobs may wait for.
    #[must_use]
    pub fn outlook(&self) -> Outlook {
        let Self { is_paused, skipped, is_queue_paused, is_type_paused, is_served, .. } = *self;
        Outlook { is_paused, skipped, is_queue_paused, is_type_paused, is_served }
    }
}

/// A checked statement that reads the schedules of `shown`, which its text begins with.
macro_rules! query_schedules {
    ($shown:literal, $order:literal, $($argument:expr),+ $(,)?) => {
        sqlx::query_as!(
            ScheduleRow,
            "with shown as materialized ("
                + $shown
                + r#"
        ), polled as materialized (
            select distinct polled.queue, taken.job_type
            from workers
            cross join lateral unnest(workers.queues) as polled(queue)
            left join lateral unnest(workers.job_types) as taken(job_type) on true
            where workers.project_id = $1 and workers.state = 'running' and workers.lost_at is null
                and coalesce(workers.directive, 'running') = 'running'
                and workers.last_seen_at
                    > now() - make_interval(secs => greatest($2::int, 3 * workers.beat_seconds))
                and polled.queue = any(array(select queue from shown))
                and (
                    taken.job_type is null
                    or taken.job_type = any(array(select job_type from shown))
                )
        )
        select shown.id, shown.job_type, cron_expression, timezone, shown.queue,
               group_key as group, payload, rank, retry, overlap "overlap: OverlapPolicy", catch_up "catch_up: CatchUp",
               spread_seconds, is_paused, max_attempts, timeout_seconds, next_tick, problem,
               is_registered, created_at, shown.updated_at, last.tick "last_run_at?",
               failing.first_failed_at "failing_since?", now() "now!", skipped.ticks "skipped!",
               setting.paused_at is not null "is_queue_paused!",
               coalesce(shown.job_type = any(setting.paused_types), false) "is_type_paused!",
               exists (
                   select from polled
                   where polled.queue = shown.queue
                       and (polled.job_type is null or polled.job_type = shown.job_type)
               ) or exists (
                   select from queue_pushes
                   where project_id = $1 and queue_pushes.queue = shown.queue
                       and queue_pushes.paused_at is null
               ) "is_served!"
        from shown
        left join queues setting on setting.project_id = $1 and setting.name = shown.queue
        left join lateral (
            select first_failed_at
            from set_aside
            where project_id = $1 and work in ('tick', 'plan') and item = shown.id
            limit 1
        ) failing on true
        left join lateral (
            select tick
            from schedule_fires
            where project_id = $1 and schedule_id = shown.id and outcome = 'fired'
            order by tick desc
            limit 1
        ) last on true
        cross join lateral (
            select count(*) as ticks
            from (
                select
                from schedule_fires
                where project_id = $1 and schedule_id = shown.id and outcome = 'skipped_overlap'
                    and tick > coalesce(last.tick, '-infinity')
                limit 100
            ) bounded
        ) skipped
        "# + $order,
            $($argument),+
        )
    };
}

/// The schedules of a project after `after`, in the order of their ids.
pub async fn page(
    conn: &mut PgConnection,
    project_id: ProjectId,
    after: &str,
    limit: i64,
) -> sqlx::Result<Vec<ScheduleRow>> {
    query_schedules!(
        "select * from recurring_schedules where project_id = $1 and id > $3 order by id limit $4",
        "order by shown.id",
        project_id.0,
        ALIVE_SECONDS,
        after,
        limit,
    )
    .fetch_all(conn)
    .await
}

pub async fn find(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: &str,
) -> sqlx::Result<Option<ScheduleRow>> {
    Ok(find_all(conn, project_id, &[id.to_owned()]).await?.pop())
}

/// Finds these schedules, in no order. Missing ones are left out.
pub async fn find_all(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[String],
) -> sqlx::Result<Vec<ScheduleRow>> {
    query_schedules!(
        "select * from recurring_schedules where project_id = $1 and id = any($3)",
        "",
        project_id.0,
        ALIVE_SECONDS,
        ids,
    )
    .fetch_all(conn)
    .await
}

/// Pauses a schedule, or resumes it from this moment. False: it does not exist.
pub async fn set_paused(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: &str,
    is_paused: bool,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        update recurring_schedules
        set last_tick = case when is_paused then now() else last_tick end,
            next_tick = case when not $3 and not is_paused then next_tick end,
            is_paused = $3,
            updated_at = now()
        where project_id = $1 and id = $2
        ",
        project_id.0,
        id,
        is_paused,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Deletes a schedule; its jobs stay, and so do its fires, until they are old enough. False: it
/// does not exist.
pub async fn delete(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: &str,
) -> sqlx::Result<bool> {
    let deleted = sqlx::query!(
        "delete from recurring_schedules where project_id = $1 and id = $2",
        project_id.0,
        id,
    )
    .execute(conn)
    .await?;
    Ok(deleted.rows_affected() == 1)
}

/// The outcome of a tick.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FireRow {
    pub tick: DateTime<Utc>,
    pub outcome: FireOutcome,
    pub job_id: Option<JobId>,
    pub ticks: i64,
    pub at: DateTime<Utc>,
}

/// Outcomes of a schedule's ticks before a time, newest first.
pub async fn fires(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: &str,
    before: Option<DateTime<Utc>>,
    limit: i64,
) -> sqlx::Result<Vec<FireRow>> {
    sqlx::query_as!(
        FireRow,
        r#"
        select tick, outcome "outcome: FireOutcome", job_id "job_id: JobId", ticks, at
        from schedule_fires
        where project_id = $1 and schedule_id = $2
            and tick < coalesce($3, 'infinity'::timestamptz)
        order by tick desc
        limit $4
        "#,
        project_id.0,
        id,
        before,
        limit,
    )
    .fetch_all(conn)
    .await
}
