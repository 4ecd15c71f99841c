//! Groups of jobs: which jobs of a group may run, and what holds them. See ADR 17.

mod listed;
pub mod overrides;
pub mod rates;
pub mod turns;

use chrono::{DateTime, Utc};
use fencepost_domain::ids::{JobKey, ProjectId};
use sqlx::PgConnection;

pub use self::listed::{
    GroupRow, HeldGroups, Listed, MAX_COUNTED_JOBS, find, held, longest_waiting, names,
};

/// A group of one queue.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GroupKey {
    pub project_id: ProjectId,
    pub queue: String,
    pub group: String,
}

/// The end of a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PauseEnd {
    /// It is resumed.
    Never,
    /// Seconds from now.
    After(i32),
    /// A time.
    At(DateTime<Utc>),
}

/// Pauses a group. A later end stays. Returns whether it was not paused before. The queue's
/// settings must be locked: its claims look for pauses from now on. They rest for a moment if more
/// than 500 of the group's jobs are to wait again.
pub async fn pause(conn: &mut PgConnection, group: &GroupKey, end: PauseEnd) -> sqlx::Result<bool> {
    let (seconds, at) = match end {
        PauseEnd::Never => (None, None),
        PauseEnd::After(seconds) => (Some(seconds), None),
        PauseEnd::At(time) => (None, Some(time)),
    };
    sqlx::query_scalar!(
        r#"
        with before as materialized (
            select paused_until > statement_timestamp() as is_paused
            from job_groups
            where project_id = $1 and queue = $2 and group_key = $3
        ), gated as (
            update queues
            set has_gate = true, groups_close_until = case
                    when (
                        select count(*) > 500
                        from (
                            select
                            from jobs
                            where project_id = $1 and queue = $2 and group_key = $3
                                and group_key is not null and waits_for_group is not true
                                and completed_at is null
                            limit 501
                        ) open
                    ) then statement_timestamp() + interval '1 second'
                    else groups_close_until
                end
            where project_id = $1 and name = $2
        ), noted as (
            insert into group_notes (project_id, queue, group_key) values ($1, $2, $3)
        )
        insert into job_groups (project_id, queue, group_key, paused_until)
        values ($1, $2, $3, coalesce(
            $5, statement_timestamp() + make_interval(secs => $4::int), 'infinity'
        ))
        on conflict (project_id, queue, group_key) do update
        set paused_until = greatest(job_groups.paused_until, excluded.paused_until),
            -- A pause that has ended has a row until admission deletes it.
            paused_at = case
                when (select is_paused from before) then job_groups.paused_at
                else statement_timestamp()
            end
        returning (select is_paused from before) is not true "is_new!"
        "#,
        group.project_id.0,
        group.queue,
        group.group,
        seconds,
        at,
    )
    .fetch_one(conn)
    .await
}

/// Returns true if a group has a row of a pause, or fewer than `max` groups of its project
/// have one.
pub async fn may_pause(conn: &mut PgConnection, group: &GroupKey, max: i64) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        select exists (
            select from job_groups where project_id = $1 and queue = $2 and group_key = $3
        ) or (
            select count(*) < $4
            from (select from job_groups where project_id = $1 limit $4) counted
        ) "may!"
        "#,
        group.project_id.0,
        group.queue,
        group.group,
        max,
    )
    .fetch_one(conn)
    .await
}

/// Lets no job of a queue start for this many seconds; a later end stays. Returns whether no rate
/// limit kept them from it until now. The queue's settings must be locked.
pub async fn rate_limit_queue(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    seconds: i32,
) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        with before as materialized (
            select rate_limited_until > statement_timestamp() as is_paused
            from queues
            where project_id = $1 and name = $2
        )
        update queues
        set has_gate = true, updated_at = now(),
            rate_limited_until = greatest(
                rate_limited_until, statement_timestamp() + make_interval(secs => $3::int)
            )
        from before
        where project_id = $1 and name = $2
        returning before.is_paused is not true "is_new!"
        "#,
        project_id.0,
        queue,
        seconds,
    )
    .fetch_one(conn)
    .await
}

/// The queue and the group of a live job.
pub async fn of_job(
    conn: &mut PgConnection,
    key: JobKey,
) -> sqlx::Result<Option<(String, Option<String>)>> {
    let row = sqlx::query!(
        "select queue, group_key from jobs where project_id = $1 and id = $2",
        key.project_id.0,
        key.id.0,
    );
    Ok(row.fetch_optional(conn).await?.map(|it| (it.queue, it.group_key)))
}

/// Ends the pause of a group: admission deletes its row. Returns whether it was paused.
pub async fn resume(conn: &mut PgConnection, group: &GroupKey) -> sqlx::Result<bool> {
    let ended = sqlx::query!(
        "
        update job_groups
        set paused_until = statement_timestamp()
        where project_id = $1 and queue = $2 and group_key = $3
            and paused_until > statement_timestamp()
        ",
        group.project_id.0,
        group.queue,
        group.group,
    )
    .execute(conn)
    .await?;
    Ok(ended.rows_affected() > 0)
}

/// Lets the group of a dead letter continue, as if it were gone. Returns whether it blocked the
/// group until now.
pub async fn unblock(conn: &mut PgConnection, key: JobKey) -> sqlx::Result<bool> {
    let passed = sqlx::query_scalar!(
        r#"
        with passed as (
            update jobs
            set group_place = null
            where project_id = $1 and id = $2 and completed_at is not null
                and group_place is not null
            returning project_id, queue, group_key
        ), noted as (
            insert into group_notes (project_id, queue, group_key)
            select project_id, queue, group_key from passed
        )
        select count(*) "passed!" from passed
        "#,
        key.project_id.0,
        key.id.0,
    )
    .fetch_one(conn)
    .await?;
    Ok(passed > 0)
}

/// Dead letters whose groups one statement unblocks at most.
pub const MAX_UNBLOCKED: u64 = 500;

/// The same for the dead letters of a queue with strict order that were stored before a time, up to
/// [`MAX_UNBLOCKED`]. Returns how many.
pub async fn unblock_stored_before(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    before: DateTime<Utc>,
) -> sqlx::Result<u64> {
    let passed = sqlx::query_scalar!(
        r#"
        with dead as materialized (
            select id
            from jobs
            where project_id = $1 and queue = $2 and group_key is not null
                and group_place is not null and completed_at is not null and created_at < $3
                and has_strict_order($1, $2)
            order by group_key, group_place
            limit $4
            for update skip locked
        ), passed as (
            update jobs
            set group_place = null
            from dead
            where jobs.project_id = $1 and jobs.id = dead.id
            returning jobs.group_key
        ), noted as (
            insert into group_notes (project_id, queue, group_key)
            select distinct $1::int, $2, group_key from passed
        )
        select count(*) "passed!" from passed
        "#,
        project_id.0,
        queue,
        before,
        i64::try_from(MAX_UNBLOCKED).unwrap_or(i64::MAX),
    )
    .fetch_one(conn)
    .await?;
    Ok(passed.unsigned_abs())
}

/// Whether a job has a group, and its queue or another has a strict order: it may not move there.
pub async fn is_ordered(conn: &mut PgConnection, key: JobKey, queue: &str) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        select exists (
            select
            from jobs
            join queues setting
                on setting.project_id = $1 and setting.name in (jobs.queue, $3)
            where jobs.project_id = $1 and jobs.id = $2 and jobs.group_key is not null
                and jobs.queue <> $3 and setting.group_order = 'strict'
        ) "is_ordered!"
        "#,
        key.project_id.0,
        key.id.0,
        queue,
    )
    .fetch_one(conn)
    .await
}
