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
    /// Whether this transaction may count under it.
    pub is_locked: bool,
}

/// Tries to lock these limits until the end of the transaction: those that exist.
pub async fn lock(
    conn: &mut PgConnection,
    project_id: ProjectId,
    names: &[String],
) -> sqlx::Result<Vec<LockedLimit>> {
    let rows = sqlx::query!(
        r#"
        select name, by_group, max_running, rate_counts, rate_seconds,
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
    let limits = rows.into_iter().map(|it| LockedLimit {
        name: it.name,
        by_group: it.by_group,
        max_running: it.max_running,
        rates: rates_of(it.rate_counts, it.rate_seconds).unwrap_or_default(),
        is_locked: it.is_locked,
    });
    Ok(limits.collect())
}

/// Running jobs under a limit, of one group; empty: jobs without a group.
#[derive(Debug, Clone)]
pub struct RunningUnder {
    pub limit: String,
    pub group: String,
    pub running: i64,
}

/// How many jobs run under each of these limits, in all queues that name them. The limits must be
/// locked by an earlier statement of this transaction.
pub async fn running(
    conn: &mut PgConnection,
    project_id: ProjectId,
    limits: &[&str],
) -> sqlx::Result<Vec<RunningUnder>> {
    sqlx::query_as!(
        RunningUnder,
        r#"
        select shared.name as "limit!", crowd.group_key "group!", sum(crowd.running)::bigint "running!"
        from queues setting
        cross join lateral (
            select coalesce(group_key, '') as group_key, count(*) as running
            from jobs
            where project_id = $1 and queue = setting.name and state = 'processing'
            group by group_key
        ) crowd
        cross join lateral unnest(setting.shared_limits) as shared(name)
        where setting.project_id = $1 and setting.shared_limits is not null
            and setting.shared_limits && $2 and shared.name = any($2)
        group by shared.name, crowd.group_key
        "#,
        project_id.0,
        limits as &[&str],
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
               known.rate_seconds "rate_seconds?",
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
        insert into shared_limit_keys (project_id, limit_name, group_key, starts, starts_end_at)
        select $1, sent.*
        from unnest($2::text[], $3::text[], $4::jsonb[], $5::timestamptz[]) as sent
        on conflict (project_id, limit_name, group_key) do update
        set starts = excluded.starts, starts_end_at = excluded.starts_end_at
        ",
        project_id.0,
        &kept.iter().map(|it| it.limit.as_str()).collect::<Vec<_>>() as &[&str],
        &kept.iter().map(|it| it.group.as_str()).collect::<Vec<_>>() as &[&str],
        &starts as &[Json<Stored>],
        &kept.iter().map(|it| it.ends_at).collect::<Vec<_>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}
