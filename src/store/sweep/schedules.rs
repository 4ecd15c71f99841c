//! Schedules whose ticks are due, and those whose next tick is not planned yet.
//!
//! A tick fires once: its schedule's row is locked, its row in `schedule_fires` is unique, and its
//! job's id is derived from both.

use chrono::{DateTime, Utc};
use fencepost_domain::{
    ids::{JobId, ProjectId},
    job::StoredState,
    schedule::{CatchUp, FireOutcome, GRACE_SECONDS, OverlapPolicy},
};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::settle::settle_success::WaitingJob;

/// Payload bytes of one transaction, without the last payload.
const MAX_FIRED_BYTES: i64 = 64 * 1024 * 1024;
/// Schedules that one pass plans. The statement carries the same number as a literal.
pub const MAX_PLANNED: usize = 500;

/// A schedule, locked, with what the rules need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DueSchedule {
    pub project_id: ProjectId,
    pub id: String,
    pub job_type: String,
    pub cron_expression: String,
    pub timezone: String,
    pub overlap: OverlapPolicy,
    pub catch_up: CatchUp,
    /// Longest delay of a job after its tick.
    pub spread_seconds: i32,
    pub last_tick: Option<DateTime<Utc>>,
    /// None: not planned yet.
    pub next_tick: Option<DateTime<Utc>>,
    /// By the database's clock.
    pub now: DateTime<Utc>,
}

/// Locks the schedules whose ticks are next, at most `lead_ms` ahead: at most 10,000, with projects
/// taking turns. Those that depend on earlier jobs are not locked before their tick.
pub async fn lock_next(conn: &mut PgConnection, lead_ms: i64) -> sqlx::Result<Vec<DueSchedule>> {
    sqlx::query_as!(
        DueSchedule,
        r#"
        with horizon as materialized (
            select greatest(statement_timestamp(), next_tick) as tick
            from recurring_schedules
            where next_tick >= statement_timestamp() - make_interval(secs => $2::bigint)
                and not exists (
                    select from set_aside
                    where project_id = recurring_schedules.project_id and work = 'tick'
                        and item = recurring_schedules.id and next_try_at > now()
                )
            order by next_tick
            limit 1
        ), near as materialized (
            select project_id, id, next_tick, octet_length(payload) as bytes,
                   row_number() over (partition by project_id order by next_tick, id) as turn
            from (
                select project_id, id, next_tick, payload
                from recurring_schedules
                where next_tick >= statement_timestamp() - make_interval(secs => $2::bigint)
                    and next_tick <= (select tick from horizon)
                    and next_tick
                        <= statement_timestamp() + make_interval(secs => $1::bigint / 1000.0)
                    and (overlap = 'allow' or next_tick <= statement_timestamp())
                    and not exists (
                        select from set_aside
                        where project_id = recurring_schedules.project_id and work = 'tick'
                            and item = recurring_schedules.id and next_try_at > now()
                    )
                order by next_tick
                limit 50000
            ) first
        ), fair as materialized (
            select project_id, id, next_tick, bytes,
                   sum(bytes) over (order by turn, project_id, id) as bytes_so_far
            from near
            order by turn, project_id, id
            limit 10000
        )
        select due.project_id "project_id: ProjectId", due.id, due.job_type, due.cron_expression,
               due.timezone, due.overlap "overlap: OverlapPolicy", due.catch_up "catch_up: CatchUp",
               due.spread_seconds, due.last_tick, due.next_tick, statement_timestamp() "now!"
        from fair
        join recurring_schedules due
            on due.project_id = fair.project_id and due.id = fair.id
            and due.next_tick = fair.next_tick
        where fair.bytes_so_far - fair.bytes < $3::bigint
        for update of due skip locked
        "#,
        lead_ms,
        GRACE_SECONDS,
        MAX_FIRED_BYTES,
    )
    .fetch_all(conn)
    .await
}

/// Locks schedules whose tick no node has handled within its grace.
pub async fn lock_overdue(conn: &mut PgConnection) -> sqlx::Result<Vec<DueSchedule>> {
    sqlx::query_as!(
        DueSchedule,
        r#"
        select project_id "project_id: ProjectId", id, job_type, cron_expression, timezone,
               overlap "overlap: OverlapPolicy", catch_up "catch_up: CatchUp", spread_seconds, last_tick,
               next_tick, statement_timestamp() "now!"
        from recurring_schedules
        where next_tick < statement_timestamp() - make_interval(secs => $1::bigint)
            and not exists (
                select from set_aside
                where project_id = recurring_schedules.project_id and work = 'tick'
                    and item = recurring_schedules.id and next_try_at > now()
            )
        order by next_tick
        limit 5
        for update skip locked
        "#,
        GRACE_SECONDS,
    )
    .fetch_all(conn)
    .await
}

/// Forgets the next ticks of schedules that were planned by other rules of zones than the nodes use
/// now, at most 500 by older and as many by newer ones, so that they are planned again. Returns
/// their number.
pub async fn unplan_outdated(conn: &mut PgConnection, zone_rules: &str) -> sqlx::Result<usize> {
    let done = sqlx::query!(
        "
        with older as materialized (
            select project_id, id
            from recurring_schedules
            where next_tick is not null and zone_rules < $1
            order by zone_rules
            limit 500
            for update skip locked
        ), newer as materialized (
            select project_id, id
            from recurring_schedules
            where next_tick is not null and zone_rules > $1
            order by zone_rules desc
            limit 500
            for update skip locked
        )
        update recurring_schedules
        set next_tick = null
        from (select * from older union all select * from newer) outdated
        where recurring_schedules.project_id = outdated.project_id
            and recurring_schedules.id = outdated.id
        ",
        zone_rules,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() as usize)
}

/// Locks schedules whose next tick is not planned yet.
pub async fn lock_unplanned(conn: &mut PgConnection) -> sqlx::Result<Vec<DueSchedule>> {
    sqlx::query_as!(
        DueSchedule,
        r#"
        select project_id "project_id: ProjectId", id, job_type, cron_expression, timezone,
               overlap "overlap: OverlapPolicy", catch_up "catch_up: CatchUp", spread_seconds, last_tick,
               next_tick, statement_timestamp() "now!"
        from recurring_schedules
        where next_tick is null and problem is null and not is_paused
            and not exists (
                select from set_aside
                where project_id = recurring_schedules.project_id and work = 'plan'
                    and item = recurring_schedules.id and next_try_at > now()
            )
        limit 500
        for update skip locked
        "#,
    )
    .fetch_all(conn)
    .await
}

/// A schedule's last tick, and its next one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advance {
    pub project_id: ProjectId,
    pub id: String,
    pub last_tick: DateTime<Utc>,
    pub next_tick: Option<DateTime<Utc>>,
    /// Why it cannot be planned.
    pub problem: Option<String>,
}

/// Stores the last and next ticks of schedules, and the release of the zone rules by which they
/// were planned. The schedules must be locked.
pub async fn advance(
    conn: &mut PgConnection,
    advances: &[Advance],
    zone_rules: &str,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update recurring_schedules
        set last_tick = sent.last_tick, next_tick = sent.next_tick, problem = sent.problem,
            zone_rules = $6
        from unnest($1::int[], $2::text[], $3::timestamptz[], $4::timestamptz[], $5::text[])
            as sent(project_id, id, last_tick, next_tick, problem)
        where recurring_schedules.project_id = sent.project_id
            and recurring_schedules.id = sent.id
        ",
        &advances.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &advances.iter().map(|it| it.id.as_str()).collect::<Vec<_>>() as &[&str],
        &advances.iter().map(|it| it.last_tick).collect::<Vec<_>>(),
        &advances.iter().map(|it| it.next_tick).collect::<Vec<_>>() as &[Option<DateTime<Utc>>],
        &advances.iter().map(|it| it.problem.as_deref()).collect::<Vec<_>>() as &[Option<&str>],
        zone_rules,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// A tick, and its outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fire {
    pub project_id: ProjectId,
    pub schedule_id: String,
    pub tick: DateTime<Utc>,
    pub outcome: FireOutcome,
    /// How many ticks this stands for: more than one if they were missed.
    pub ticks: i64,
    pub job_id: JobId,
    /// Seconds between the tick and the start of its job.
    pub offset_seconds: i32,
    /// The concurrency key under which its jobs run one at a time.
    pub concurrency_key: Option<String>,
    pub constraint_key: Option<Uuid>,
}

/// Records the outcomes of ticks, and stores the jobs of those that fire. A tick with an outcome is
/// left as it is. Returns the stored jobs.
pub async fn fire(conn: &mut PgConnection, fires: &[Fire]) -> sqlx::Result<Vec<WaitingJob>> {
    sqlx::query_as!(
        WaitingJob,
        r#"
        with due as materialized (
            select *
            from unnest(
                $1::int[], $2::text[], $3::timestamptz[], $4::text[], $5::bigint[], $6::uuid[],
                $7::int[], $8::text[], $9::uuid[]
            ) as sent(
                project_id, schedule_id, tick, outcome, ticks, job_id, offset_seconds,
                concurrency_key, constraint_key
            )
        ), noted as (
            insert into schedule_fires (project_id, schedule_id, tick, outcome, job_id, ticks, at)
            select project_id, schedule_id, tick, outcome,
                   case when outcome in ('fired', 'manual') then job_id end, ticks,
                   greatest(tick, statement_timestamp())
            from due
            on conflict (project_id, schedule_id, tick) do nothing
            returning project_id, schedule_id, tick, outcome
        ), new as materialized (
            select due.project_id, due.job_id, due.constraint_key, due.concurrency_key,
                   due.schedule_id,
                   schedule.queue, schedule.job_type, schedule.rank, schedule.timeout_seconds,
                   schedule.max_attempts, schedule.payload, schedule.group_key,
                   coalesce(schedule.retry, setting.default_retry) as retry,
                   due.tick + make_interval(secs => due.offset_seconds) as run_at,
                   gate.waits,
                   case when gate.waits or due.offset_seconds > 0
                           and due.tick + make_interval(secs => due.offset_seconds) > statement_timestamp()
                       then 'scheduled' else 'pending'
                   end as state, gate.has_turns
            from noted
            join due on due.project_id = noted.project_id and due.schedule_id = noted.schedule_id
                and due.tick = noted.tick
            join recurring_schedules schedule
                on schedule.project_id = due.project_id and schedule.id = due.schedule_id
            left join queues setting
                on setting.project_id = due.project_id and setting.name = schedule.queue
            cross join lateral (
                select case when schedule.group_key is not null and setting.has_gate
                           then must_wait_for_group(
                               due.project_id, schedule.queue, schedule.group_key
                           )
                           else false
                       end as waits,
                       coalesce(setting.group_fair and setting.group_order <> 'strict', false)
                           as has_turns
            ) gate
            where noted.outcome in ('fired', 'manual')
        ), bodies as (
            insert into job_bodies (
                project_id, job_id, payload, retry, tags, constraint_key, concurrency_key,
                concurrency_limit, group_key, counted_bytes
            )
            select project_id, job_id, payload, retry,
                   jsonb_build_object('recurring_schedule', schedule_id), constraint_key,
                   concurrency_key,
                   case when concurrency_key is not null then 1 end, group_key,
                   long_names(queue, job_type)
            from new
        ), live as (
            insert into jobs (
                project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                timeout_seconds, constraint_key, concurrency_key, concurrency_limit, has_command,
                group_key, group_place, waits_for_group, takes_turns, unfinished_parents
            )
            select project_id, job_id, queue, job_type, state, rank, run_at, max_attempts,
                   timeout_seconds, constraint_key, concurrency_key,
                   case when concurrency_key is not null then 1 end,
                   nullif(offers_command(payload), false), group_key,
                   case when group_key is not null then nextval('job_places') end,
                   nullif(waits, false), nullif(has_turns, false), waits::int
            from new
            returning project_id, id, case
                when takes_turns and state = 'pending'
                then note_turn(project_id, queue, group_key)
            end as turn
        ), waiting as (
            insert into group_notes (project_id, queue, group_key)
            select distinct project_id, queue, group_key from new where waits
        ), counted as (
            insert into queue_deltas (project_id, queue, scheduled, active, enqueued)
            select project_id, queue, count(*) filter (where state = 'scheduled'),
                   count(*) filter (where state = 'pending'), count(*)
            from new
            group by project_id, queue
        )
        select project_id "project_id!: ProjectId", job_id "id!: JobId", queue "queue!",
               job_type "job_type!", rank "rank!", run_at "run_at!",
               state "state!: StoredState", constraint_key is not null "is_constrained!",
               (project_id, job_id) in (select project_id, id from live where turn)
                   "has_noted_turn!"
        from new
        "#,
        &fires.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &fires.iter().map(|it| it.schedule_id.as_str()).collect::<Vec<_>>() as &[&str],
        &fires.iter().map(|it| it.tick).collect::<Vec<_>>(),
        &fires.iter().map(|it| it.outcome.as_str()).collect::<Vec<_>>() as &[&str],
        &fires.iter().map(|it| it.ticks).collect::<Vec<_>>(),
        &fires.iter().map(|it| it.job_id.0).collect::<Vec<_>>(),
        &fires.iter().map(|it| it.offset_seconds).collect::<Vec<_>>(),
        &fires.iter().map(|it| it.concurrency_key.as_deref()).collect::<Vec<_>>()
            as &[Option<&str>],
        &fires.iter().map(|it| it.constraint_key).collect::<Vec<_>>() as &[Option<Uuid>],
    )
    .fetch_all(conn)
    .await
}

/// Records how late ticks were fired.
pub async fn record_lateness(conn: &mut PgConnection, fires: &[&Fire]) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update schedule_fires
        set at = now()
        from unnest($1::int[], $2::text[], $3::timestamptz[]) as late(project_id, schedule_id, tick)
        where schedule_fires.project_id = late.project_id
            and schedule_fires.schedule_id = late.schedule_id and schedule_fires.tick = late.tick
        ",
        &fires.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &fires.iter().map(|it| it.schedule_id.as_str()).collect::<Vec<_>>() as &[&str],
        &fires.iter().map(|it| it.tick).collect::<Vec<_>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// A job of an earlier tick that has not ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EarlierJob {
    pub project_id: ProjectId,
    pub schedule_id: String,
    pub id: JobId,
    pub state: StoredState,
}

/// The jobs of these schedules' last 100 fires that have not ended; jobs created by request do not
/// count.
pub async fn earlier_jobs(
    conn: &mut PgConnection,
    schedules: &[(ProjectId, &str)],
) -> sqlx::Result<Vec<EarlierJob>> {
    sqlx::query_as!(
        EarlierJob,
        r#"
        select sent.project_id "project_id!: ProjectId", sent.schedule_id "schedule_id!",
               job.id "id: JobId", job.state "state: StoredState"
        from unnest($1::int[], $2::text[]) as sent(project_id, schedule_id)
        cross join lateral (
            select job_id
            from schedule_fires
            where project_id = sent.project_id and schedule_id = sent.schedule_id
                and outcome = 'fired'
            order by tick desc
            limit 100
        ) fired
        join jobs job on job.project_id = sent.project_id and job.id = fired.job_id
        where job.completed_at is null
        "#,
        &schedules.iter().map(|it| it.0.0).collect::<Vec<_>>(),
        &schedules.iter().map(|it| it.1).collect::<Vec<_>>() as &[&str],
    )
    .fetch_all(conn)
    .await
}

/// Waits until a time, by the database's clock.
pub async fn sleep_until(conn: &mut PgConnection, tick: DateTime<Utc>) -> sqlx::Result<()> {
    sqlx::query!("select pg_sleep_until($1)", tick).fetch_one(conn).await?;
    Ok(())
}

/// Milliseconds until the next tick of any schedule; negative if one is due, none if there is none.
pub async fn next_tick_ms(conn: &mut PgConnection) -> sqlx::Result<Option<f64>> {
    sqlx::query_scalar!(
        r#"
        select (extract(epoch from next_tick - statement_timestamp()) * 1000)::float8 "wait_ms!"
        from recurring_schedules
        where next_tick is not null
            and not exists (
                select from set_aside
                where project_id = recurring_schedules.project_id and work = 'tick'
                    and item = recurring_schedules.id and next_try_at > now()
            )
        order by next_tick
        limit 1
        "#,
    )
    .fetch_optional(conn)
    .await
}

/// Deletes the oldest fires past this many days. Returns how many.
pub async fn prune_fires(conn: &mut PgConnection, keep_days: i32) -> sqlx::Result<u64> {
    let pruned = sqlx::query!(
        "
        delete from schedule_fires
        using (
            select project_id, schedule_id, tick
            from schedule_fires
            where at < now() - make_interval(days => $1)
            order by at
            limit 500
            for update skip locked
        ) old
        where schedule_fires.project_id = old.project_id
            and schedule_fires.schedule_id = old.schedule_id and schedule_fires.tick = old.tick
        ",
        keep_days,
    )
    .execute(conn)
    .await?;
    Ok(pruned.rows_affected())
}
