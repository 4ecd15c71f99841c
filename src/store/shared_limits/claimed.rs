//! What claims count under shared limits. Each claim holds the locks of the limits that its queue
//! names, so what it counts over all their queues is exact.

use chrono::{DateTime, Utc};
use fencepost_domain::{
    ids::ProjectId,
    rate::{Handout, RateLimits},
};
use sqlx::{PgConnection, types::Json};

use super::rates_of;
use crate::groups::rates::{self, Stored};

/// A limit of a claim.
#[derive(Debug, Clone)]
pub struct LockedLimit {
    pub name: String,
    pub by_group: bool,
    pub max_running: Option<i32>,
    pub rates: RateLimits,
    /// Queues that name it.
    pub queues: Vec<String>,
}

/// Tries to lock these limits until the end of the transaction. None: another one has a lock.
pub async fn try_lock(
    conn: &mut PgConnection,
    project_id: ProjectId,
    names: &[String],
) -> sqlx::Result<Option<Vec<LockedLimit>>> {
    let rows = sqlx::query!(
        r#"
        select name, by_group, max_running, rate_counts, rate_seconds, queues,
               pg_try_advisory_xact_lock(hashtextextended('limit ' || name, project_id))
                   "is_locked!"
        from shared_limits
        where project_id = $1 and name = any($2)
        order by name
        "#,
        project_id.0,
        names,
    )
    .fetch_all(conn)
    .await?;
    if rows.iter().any(|it| !it.is_locked) {
        return Ok(None);
    }
    let limits = rows.into_iter().map(|it| LockedLimit {
        name: it.name,
        by_group: it.by_group,
        max_running: it.max_running,
        rates: rates_of(it.rate_counts, it.rate_seconds).unwrap_or_default(),
        queues: it.queues,
    });
    Ok(Some(limits.collect()))
}

/// Locks a limit until the end of the transaction: no claim counts under it meanwhile.
pub async fn lock(
    conn: &mut PgConnection,
    (project_id, limit): (ProjectId, &str),
) -> sqlx::Result<()> {
    sqlx::query!(
        "select pg_advisory_xact_lock(hashtextextended('limit ' || $2, $1::int))",
        project_id.0,
        limit,
    )
    .fetch_one(conn)
    .await?;
    Ok(())
}

/// Running jobs under a limit, of one group; empty: jobs without a group.
#[derive(Debug, Clone)]
pub struct RunningUnder {
    pub limit: String,
    pub group: String,
    pub running: i64,
}

/// How many jobs run under each of these limits, in all queues that name them: of these groups, or
/// of all. The limits must be locked by an earlier statement of this transaction.
pub async fn running(
    conn: &mut PgConnection,
    project_id: ProjectId,
    limits: &[&LockedLimit],
    groups: Option<&[&str]>,
) -> sqlx::Result<Vec<RunningUnder>> {
    let pairs = || limits.iter().flat_map(|it| it.queues.iter().map(|queue| (&it.name, queue)));
    sqlx::query_as!(
        RunningUnder,
        r#"
        select named.limit_name "limit!", crowd.group_key "group!", sum(crowd.jobs)::bigint "running!"
        from unnest($2::text[], $3::text[]) as named(limit_name, queue)
        cross join lateral (
            select coalesce(group_key, '') as group_key, count(*) as jobs
            from jobs
            where project_id = $1 and queue = named.queue and state = 'processing'
                and ($4::text[] is null or group_key = any($4))
            group by group_key
        ) crowd
        group by named.limit_name, crowd.group_key
        "#,
        project_id.0,
        &pairs().map(|it| it.0.as_str()).collect::<Vec<_>>() as &[&str],
        &pairs().map(|it| it.1.as_str()).collect::<Vec<_>>() as &[&str],
        groups as Option<&[&str]>,
    )
    .fetch_all(conn)
    .await
}

/// What is known of a key of a limit, or of none.
#[derive(Debug, Clone, Default)]
pub struct KnownKey {
    /// Oldest first.
    pub starts: Vec<Handout>,
    /// Its own numbers, in place of those of the limit.
    pub max_running: Option<i32>,
    pub rates: Option<RateLimits>,
    /// When these end; none: when they are reset.
    pub expires_at: Option<DateTime<Utc>>,
    /// None: it is not paused.
    pub paused_until: Option<DateTime<Utc>>,
}

/// What is known of these groups under these limits; an empty name: of all jobs. And the database's
/// clock. The limits must be locked.
pub async fn keys(
    conn: &mut PgConnection,
    project_id: ProjectId,
    limits: &[&str],
    groups: &[&str],
) -> sqlx::Result<(Vec<(String, String, KnownKey)>, DateTime<Utc>)> {
    let rows = sqlx::query!(
        r#"
        select known.limit_name "limit?", known.group_key "group?",
               known.starts "starts?: Json<Stored>",
               case when known.paused_until > statement_timestamp() then known.paused_until end
                   as paused_until,
               known.max_running "max_running?", known.rate_counts "rate_counts?",
               known.rate_seconds "rate_seconds?", known.expires_at "expires_at?",
               coalesce(known.expires_at > statement_timestamp(), true) "has_own!",
               statement_timestamp() "now!"
        from (select) as always
        left join shared_limit_keys known on known.project_id = $1
            and known.limit_name = any($2) and known.group_key = any($3)
        "#,
        project_id.0,
        limits as &[&str],
        groups as &[&str],
    )
    .fetch_all(conn)
    .await?;
    let now = rows.first().map_or(DateTime::UNIX_EPOCH, |it| it.now);
    let found = rows.into_iter().filter_map(|row| {
        let rates = rates_of(row.rate_counts, row.rate_seconds);
        let known = KnownKey {
            starts: rates::read(row.starts),
            max_running: row.max_running.filter(|_| row.has_own),
            rates: rates.filter(|_| row.has_own),
            expires_at: row.expires_at.filter(|_| row.has_own),
            paused_until: row.paused_until,
        };
        Some((row.limit?, row.group?, known))
    });
    Ok((found.collect(), now))
}

/// Starts to store: of a group under a limit, or of all its jobs if the name is empty.
#[derive(Debug, Clone)]
pub struct StartsUnder {
    pub limit: String,
    pub group: String,
    /// Oldest first.
    pub starts: Vec<Handout>,
    /// When the next job may start; none: one may now.
    pub full_until: Option<DateTime<Utc>>,
    /// When all windows are empty.
    pub ends_at: DateTime<Utc>,
}

/// Stores starts under limits, which must be locked.
pub async fn keep_starts(
    conn: &mut PgConnection,
    project_id: ProjectId,
    kept: &[StartsUnder],
) -> sqlx::Result<()> {
    let starts = kept.iter().map(|it| -> Stored {
        it.starts.iter().map(|it| (it.at.timestamp_micros(), it.jobs)).collect()
    });
    let starts: Vec<_> = starts.map(Json).collect();
    sqlx::query!(
        "
        insert into shared_limit_keys (
            project_id, limit_name, group_key, starts, full_until, starts_end_at
        )
        select $1, sent.*
        from unnest($2::text[], $3::text[], $4::jsonb[], $5::timestamptz[], $6::timestamptz[])
            as sent(limit_name, group_key, starts, full_until, starts_end_at)
        order by sent.limit_name, sent.group_key
        on conflict (project_id, limit_name, group_key) do update
        set starts = excluded.starts, full_until = excluded.full_until,
            starts_end_at = excluded.starts_end_at
        ",
        project_id.0,
        &kept.iter().map(|it| it.limit.as_str()).collect::<Vec<_>>() as &[&str],
        &kept.iter().map(|it| it.group.as_str()).collect::<Vec<_>>() as &[&str],
        &starts as &[Json<Stored>],
        &kept.iter().map(|it| it.full_until).collect::<Vec<_>>() as &[Option<DateTime<Utc>>],
        &kept.iter().map(|it| it.ends_at).collect::<Vec<_>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}
