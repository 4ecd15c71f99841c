//! Rules of single groups, in queues in which groups take turns.

use chrono::{DateTime, Utc};
use fencepost_domain::{
    group::GroupOverride,
    ids::ProjectId,
    limits::MAX_GROUP_PAUSE_SECONDS,
    rate::{Handout, RateLimits},
};
use sqlx::{PgConnection, types::Json};

use super::{
    GroupKey,
    rates::{self, Stored},
};

/// Overrides that one statement forgets at most.
const MAX_FORGOTTEN: i64 = 500;

/// Gives a group rules of its own, in place of those that it had. Admission looks at it soon.
pub async fn put(
    conn: &mut PgConnection,
    group: &GroupKey,
    rules: &GroupOverride,
) -> sqlx::Result<()> {
    let rates = rules.rates.as_ref();
    let counts: Option<Vec<_>> = rates.map(|it| it.iter().map(|it| it.count).collect());
    let seconds: Option<Vec<_>> = rates.map(|it| it.iter().map(|it| it.per_seconds).collect());
    sqlx::query!(
        "
        with noted as (
            insert into group_notes (project_id, queue, group_key) values ($1, $2, $3)
        ), opened as (
            -- By which rates it was full is not known.
            update group_handouts
            set full_until = null
            where project_id = $1 and queue = $2 and group_key = $3
        )
        insert into group_overrides (
            project_id, queue, group_key, weight, max_running, rate_counts, rate_seconds, expires_at
        )
        values ($1, $2, $3, $4, $5, $6, $7, $8)
        on conflict (project_id, queue, group_key) do update
        set weight = excluded.weight, max_running = excluded.max_running,
            rate_counts = excluded.rate_counts, rate_seconds = excluded.rate_seconds,
            expires_at = excluded.expires_at, updated_at = now()
        ",
        group.project_id.0,
        group.queue,
        group.group,
        rules.weight,
        rules.max_running,
        counts as Option<Vec<i32>>,
        seconds as Option<Vec<i32>>,
        rules.expires_at,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// What is asked before a group gets rules of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admittance {
    /// Whether the groups of its queue take turns.
    pub has_turns: bool,
    /// Whether it has rules of its own already, or fewer than the maximum of its project have.
    pub has_place: bool,
    /// Whether the rules would end in the future.
    pub is_ahead: bool,
    /// Whether the pause that comes with them would end in the future, and soon enough.
    pub may_pause_until: bool,
}

/// Whether a group may get rules of its own that end at this time, with at most `max` of a project,
/// and be paused until another time.
pub async fn admittance(
    conn: &mut PgConnection,
    group: &GroupKey,
    (expires_at, paused_until): (Option<DateTime<Utc>>, Option<DateTime<Utc>>),
    max: i64,
) -> sqlx::Result<Admittance> {
    sqlx::query_as!(
        Admittance,
        r#"
        select takes_turns($1, $2) "has_turns!", exists (
                   select from group_overrides
                   where project_id = $1 and queue = $2 and group_key = $3
               ) or (
                   select count(*) < $4
                   from (select from group_overrides where project_id = $1 limit $4) counted
               ) "has_place!",
               coalesce($5::timestamptz > now(), true) "is_ahead!",
               coalesce(
                   $6::timestamptz > now() and $6 <= now() + make_interval(secs => $7::int), true
               ) "may_pause_until!"
        "#,
        group.project_id.0,
        group.queue,
        group.group,
        max,
        expires_at,
        paused_until,
        MAX_GROUP_PAUSE_SECONDS,
    )
    .fetch_one(conn)
    .await
}

/// Deletes the rules of a group and its counted starts. Returns whether there were any.
pub async fn reset(conn: &mut PgConnection, group: &GroupKey) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        with rules as (
            delete from group_overrides
            where project_id = $1 and queue = $2 and group_key = $3
            returning 1
        ), starts as (
            delete from group_handouts
            where project_id = $1 and queue = $2 and group_key = $3
            returning 1
        ), noted as (
            insert into group_notes (project_id, queue, group_key) values ($1, $2, $3)
        )
        select exists (select from rules union all select from starts) "had_any!"
        "#,
        group.project_id.0,
        group.queue,
        group.group,
    )
    .fetch_one(conn)
    .await
}

/// A group of a queue that has limits of its own.
#[derive(Debug, Clone)]
pub struct OwnLimits {
    pub group: String,
    pub max_running: Option<i32>,
    /// None: those of its queue.
    pub rates: Option<RateLimits>,
    /// Its counted starts, oldest first.
    pub starts: Vec<Handout>,
    /// The database's clock.
    pub now: DateTime<Utc>,
}

/// Groups of a queue that have limits of their own.
pub async fn limited(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> sqlx::Result<Vec<OwnLimits>> {
    let rows = sqlx::query!(
        r#"
        select own.group_key, own.max_running, own.rate_counts, own.rate_seconds,
               past.starts "starts?: Json<Stored>", statement_timestamp() "now!"
        from group_overrides own
        left join group_handouts past on past.project_id = $1 and past.queue = $2
            and past.group_key = own.group_key
        where own.project_id = $1 and own.queue = $2
            and (own.max_running is not null or own.rate_counts is not null)
            and (own.expires_at is null or own.expires_at > statement_timestamp())
        "#,
        project_id.0,
        queue,
    )
    .fetch_all(conn)
    .await?;
    let limited = rows.into_iter().map(|it| OwnLimits {
        group: it.group_key,
        max_running: it.max_running,
        rates: it.rate_counts.zip(it.rate_seconds).map(|it| rates::limits(&it.0, &it.1)),
        starts: rates::read(it.starts),
        now: it.now,
    });
    Ok(limited.collect())
}

/// Deletes rules that have ended, and notes their groups. Returns whether there may be more.
pub async fn forget_ended(conn: &mut PgConnection) -> sqlx::Result<bool> {
    let forgotten = sqlx::query_scalar!(
        r#"
        with ended as materialized (
            select project_id, queue, group_key
            from group_overrides
            where expires_at <= now()
            order by expires_at
            limit $1
            for update skip locked
        ), gone as (
            delete from group_overrides
            using ended
            where group_overrides.project_id = ended.project_id
                and group_overrides.queue = ended.queue
                and group_overrides.group_key = ended.group_key
        ), opened as (
            update group_handouts
            set full_until = null
            from ended
            where group_handouts.project_id = ended.project_id
                and group_handouts.queue = ended.queue
                and group_handouts.group_key = ended.group_key
        ), noted as (
            insert into group_notes (project_id, queue, group_key)
            select project_id, queue, group_key from ended
        )
        select count(*) "forgotten!" from ended
        "#,
        MAX_FORGOTTEN,
    )
    .fetch_one(conn)
    .await?;
    Ok(forgotten == MAX_FORGOTTEN)
}
