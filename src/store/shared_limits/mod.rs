//! Limits that several queues of a project keep together. `claimed.rs` has what claims count under
//! them, `keys.rs` what is known of single groups.

pub mod claimed;
pub mod keys;

use chrono::{DateTime, Utc};
use fencepost_domain::{
    ids::ProjectId,
    rate::{Handout, RateLimit, RateLimits},
    shared_limit::{NewSharedLimit, SharedBy},
};
use sqlx::{PgConnection, types::Json};

use crate::{
    groups::rates::{self, Stored},
    sweep::groups::walks,
};

/// Keys that one statement forgets at most.
pub const MAX_FORGOTTEN: i64 = 2_000;

/// A shared limit, and what counts under it now.
#[derive(Debug, Clone)]
pub struct SharedLimitRow {
    pub name: String,
    pub by: SharedBy,
    pub max_running: Option<i32>,
    pub rates: Vec<RateLimit>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
    /// Queues that name it, by name.
    pub queues: Vec<String>,
    /// Jobs of them that run.
    pub running: i64,
    /// End of the pause of all its jobs; none: they are not paused.
    pub paused_until: Option<DateTime<Utc>>,
    /// Starts of all its jobs, oldest first; of a limit by group: none.
    pub starts: Vec<Handout>,
    /// The database's clock.
    pub now: DateTime<Utc>,
}

struct Row {
    name: String,
    by_group: bool,
    max_running: Option<i32>,
    rate_counts: Option<Vec<i32>>,
    rate_seconds: Option<Vec<i32>>,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
    queues: Vec<String>,
    running: i64,
    paused_until: Option<DateTime<Utc>>,
    starts: Option<Json<Stored>>,
    now: DateTime<Utc>,
}

impl From<Row> for SharedLimitRow {
    fn from(row: Row) -> Self {
        let rates = row.rate_counts.zip(row.rate_seconds);
        Self {
            name: row.name,
            by: if row.by_group { SharedBy::Group } else { SharedBy::All },
            max_running: row.max_running,
            rates: rates.map_or_else(Vec::new, |it| rates::pairs(&it.0, &it.1)),
            created_at: row.created_at,
            updated_at: row.updated_at,
            queues: sorted(row.queues),
            running: row.running,
            paused_until: row.paused_until,
            starts: rates::read(row.starts),
            now: row.now,
        }
    }
}

fn sorted(mut names: Vec<String>) -> Vec<String> {
    names.sort_unstable();
    names
}

/// The rates of stored numbers.
fn rates_of(counts: Option<Vec<i32>>, seconds: Option<Vec<i32>>) -> Option<RateLimits> {
    counts.zip(seconds).map(|(counts, seconds)| rates::limits(&counts, &seconds))
}

/// Limits of a project, by name: those of these names, or else the first `limit` after `after`.
pub async fn find(
    conn: &mut PgConnection,
    project_id: ProjectId,
    names: Option<&[String]>,
    (after, limit): (&str, i64),
) -> sqlx::Result<Vec<SharedLimitRow>> {
    let rows = sqlx::query_as!(
        Row,
        r#"
        select shared.name, by_group, shared.max_running, shared.rate_counts, shared.rate_seconds,
               created_at, updated_at, queues, (
                   select coalesce(sum(crowd.jobs), 0)::bigint
                   from unnest(shared.queues) as named(queue)
                   cross join lateral (
                       select count(*) as jobs
                       from jobs
                       where project_id = $1 and queue = named.queue and state = 'processing'
                   ) crowd
               ) "running!",
               case when known.paused_until > statement_timestamp() then known.paused_until end
                   as paused_until,
               known.starts "starts?: Json<Stored>", statement_timestamp() "now!"
        from (
            select *
            from shared_limits
            where project_id = $1 and name > $2 and ($4::text[] is null or name = any($4))
            order by name
            limit $3
        ) shared
        left join shared_limit_keys known on known.project_id = $1
            and known.limit_name = shared.name and known.group_key = ''
        order by shared.name
        "#,
        project_id.0,
        after,
        limit,
        names,
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(SharedLimitRow::from).collect())
}

/// What became of a limit that was to be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    /// Whether its numbers were others before.
    Stored { is_changed: bool },
    /// One of its name counts other jobs together.
    IsOtherwise,
    /// The project has as many others as it may.
    IsTooMany,
}

/// Stores a limit, or changes the numbers of the one that has its name. At most `max` of a project
/// are stored.
pub async fn put(
    conn: &mut PgConnection,
    project_id: ProjectId,
    new: &NewSharedLimit,
    max: i64,
) -> sqlx::Result<Put> {
    let counts: Vec<_> = new.rates.iter().map(|it| it.count).collect();
    let seconds: Vec<_> = new.rates.iter().map(|it| it.per_seconds).collect();
    let has_rates = !new.rates.is_empty();
    let found = sqlx::query!(
        r#"
        with before as materialized (
            select max_running, rate_counts, rate_seconds, by_group
            from shared_limits
            where project_id = $1 and name = $2
        ), stored as (
            insert into shared_limits (
                project_id, name, by_group, max_running, rate_counts, rate_seconds
            )
            select $1, $2, coalesce($3, (select by_group from before), false), $4, $5, $6
            where exists (select from shared_limits where project_id = $1 and name = $2) or (
                select count(*) < $7
                from (select from shared_limits where project_id = $1 limit $7) counted
            )
            on conflict (project_id, name) do update
            set max_running = excluded.max_running, rate_counts = excluded.rate_counts,
                rate_seconds = excluded.rate_seconds, updated_at = now()
            where shared_limits.by_group = excluded.by_group
            returning 1
        )
        select exists (select from stored) "is_stored!", exists (select from before) "is_known!",
               exists (
                   select from before
                   where (max_running, rate_counts, rate_seconds)
                       is distinct from ($4::int, $5::int[], $6::int[])
               ) "is_changed!"
        "#,
        project_id.0,
        new.name,
        new.by.map(|it| it == SharedBy::Group),
        new.max_running,
        has_rates.then_some(counts) as Option<Vec<i32>>,
        has_rates.then_some(seconds) as Option<Vec<i32>>,
        max,
    )
    .fetch_one(conn)
    .await?;
    Ok(match (found.is_stored, found.is_known) {
        (true, _) => Put::Stored { is_changed: found.is_changed },
        (false, true) => Put::IsOtherwise,
        (false, false) => Put::IsTooMany,
    })
}

/// Has the groups of these queues looked at again: what lets them rest has changed.
pub async fn walk(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queues: &[String],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update queues
        set group_walk_at = now(), group_walk_after = '',
            group_walks = case when group_fair then $3::smallint else greatest(group_walks, 1) end
        where project_id = $1 and name = any($2)
        ",
        project_id.0,
        queues,
        walks::WALKS,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Deletes a limit that no queue names. Returns whether there was one.
pub async fn delete(
    conn: &mut PgConnection,
    project_id: ProjectId,
    name: &str,
) -> sqlx::Result<bool> {
    // Who names it changes its row, so that this sees it.
    let deleted = sqlx::query!(
        "delete from shared_limits where project_id = $1 and name = $2 and queues = '{}'",
        project_id.0,
        name,
    )
    .execute(conn)
    .await?;
    Ok(deleted.rows_affected() > 0)
}

/// Forgets keys of a deleted limit, those that would not end first. Returns how many: up to
/// [`MAX_FORGOTTEN`].
pub async fn forget_keys(
    conn: &mut PgConnection,
    project_id: ProjectId,
    name: &str,
) -> sqlx::Result<i64> {
    let forgotten = sqlx::query!(
        "
        delete from shared_limit_keys
        where project_id = $1 and limit_name = $2 and group_key in (
            select group_key
            from shared_limit_keys
            where project_id = $1 and limit_name = $2
            order by ends_at nulls first
            limit $3
        ) and not exists (select from shared_limits where project_id = $1 and name = $2)
        ",
        project_id.0,
        name,
        MAX_FORGOTTEN,
    )
    .execute(conn)
    .await?;
    Ok(forgotten.rows_affected() as i64)
}

/// The names of the limits that a queue keeps. Its row is locked until the end of the transaction.
pub async fn names_of(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> sqlx::Result<Vec<String>> {
    let names = sqlx::query_scalar!(
        "select shared_limits from queues where project_id = $1 and name = $2 for no key update",
        project_id.0,
        queue,
    )
    .fetch_optional(conn)
    .await?;
    Ok(names.flatten().unwrap_or_default())
}

/// A limit that a queue has begun or ceased to name.
#[derive(Debug, Clone)]
pub struct NamedLimit {
    pub name: String,
    pub by_group: bool,
    /// All queues that name it now.
    pub queues: Vec<String>,
}

/// Notes in limits that a queue names them, and in others that it does so no more. Returns those
/// that exist.
pub async fn note_naming(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    (named, unnamed): (&[String], &[String]),
) -> sqlx::Result<Vec<NamedLimit>> {
    sqlx::query_as!(
        NamedLimit,
        r#"
        with changed as materialized (
            select name
            from shared_limits
            where project_id = $1 and (name = any($3) or name = any($4))
            order by name
            for no key update
        )
        update shared_limits
        set queues = case
                when shared_limits.name = any($3)
                then array_append(array_remove(shared_limits.queues, $2), $2)
                else array_remove(shared_limits.queues, $2)
            end
        from changed
        where shared_limits.project_id = $1 and shared_limits.name = changed.name
        returning shared_limits.name, by_group, queues
        "#,
        project_id.0,
        queue,
        named,
        unnamed,
    )
    .fetch_all(conn)
    .await
}

/// Whether groups of a queue take turns, as this transaction has stored it.
pub async fn has_turns(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> sqlx::Result<bool> {
    sqlx::query_scalar!(r#"select takes_turns($1, $2) "has_turns!""#, project_id.0, queue)
        .fetch_one(conn)
        .await
}
