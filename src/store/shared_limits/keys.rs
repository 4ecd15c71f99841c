//! Keys of shared limits: all jobs, whose name is empty, or one group.

use chrono::{DateTime, Utc};
use fencepost_domain::{
    ids::ProjectId,
    rate::{Handout, RateLimit},
    shared_limit::KeyRules,
};
use sqlx::{PgConnection, types::Json};

use crate::groups::rates::{self, Stored};

/// A group under a limit that each group has for itself.
#[derive(Debug, Clone)]
pub struct LimitGroupRow {
    pub group: String,
    /// Jobs of it that run, in all queues of the limit.
    pub running: i64,
    /// Its own numbers, in place of those of the limit, and when they end.
    pub max_running: Option<i32>,
    pub rates: Option<Vec<RateLimit>>,
    pub expires_at: Option<DateTime<Utc>>,
    /// None: it is not paused.
    pub paused_until: Option<DateTime<Utc>>,
    /// Its counted starts, oldest first.
    pub starts: Vec<Handout>,
    /// The database's clock.
    pub now: DateTime<Utc>,
}

/// Groups under a limit, by name: those of which jobs run in these queues, and those of which
/// something is known. One group, if it is named, or else the first `limit` after `after`.
pub async fn list(
    conn: &mut PgConnection,
    (project_id, name): (ProjectId, &str),
    queues: &[String],
    group: Option<&str>,
    (after, limit): (&str, i64),
) -> sqlx::Result<Vec<LimitGroupRow>> {
    let rows = sqlx::query!(
        r#"
        with crowd as materialized (
            select job.group_key, count(*) as running
            from unnest($3::text[]) as sharing(queue)
            cross join lateral (
                select group_key
                from jobs
                where project_id = $1 and queue = sharing.queue and state = 'processing'
                    and group_key > $4 and ($6::text is null or group_key = $6)
            ) job
            group by job.group_key
        ), named as (
            (
                select group_key
                from shared_limit_keys
                where project_id = $1 and limit_name = $2 and group_key > $4
                    and ($6::text is null or group_key = $6)
                    and (
                        ends_at is null or greatest(starts_end_at, paused_until, expires_at) > now()
                    )
                order by group_key
                limit $5
            )
            union
            (select group_key from crowd order by group_key limit $5)
            order by group_key
            limit $5
        )
        select named.group_key "group!", coalesce(crowd.running, 0) "running!",
               known.max_running "max_running?", known.rate_counts "rate_counts?",
               known.rate_seconds "rate_seconds?", known.expires_at "expires_at?",
               coalesce(known.expires_at > statement_timestamp(), true) "has_own!",
               case when known.paused_until > statement_timestamp() then known.paused_until end
                   as paused_until,
               known.starts "starts?: Json<Stored>", statement_timestamp() "now!"
        from named
        left join crowd on crowd.group_key = named.group_key
        left join shared_limit_keys known on known.project_id = $1 and known.limit_name = $2
            and known.group_key = named.group_key
        order by named.group_key
        "#,
        project_id.0,
        name,
        queues,
        after,
        limit,
        group,
    )
    .fetch_all(conn)
    .await?;
    let found = rows.into_iter().map(|row| {
        let rates = row.rate_counts.zip(row.rate_seconds).filter(|_| row.has_own);
        LimitGroupRow {
            group: row.group,
            running: row.running,
            max_running: row.max_running.filter(|_| row.has_own),
            rates: rates.map(|it| rates::pairs(&it.0, &it.1)),
            expires_at: row.expires_at.filter(|_| row.has_own),
            paused_until: row.paused_until,
            starts: rates::read(row.starts),
            now: row.now,
        }
    });
    Ok(found.collect())
}

/// Whether a key may get numbers of its own, with at most `max` of a project; and whether they
/// would end in the future.
#[derive(Debug, Clone, Copy)]
pub struct Admittance {
    pub has_place: bool,
    pub is_ahead: bool,
}

/// Whether a group may get numbers of its own that end at this time.
pub async fn admittance(
    conn: &mut PgConnection,
    (project_id, limit): (ProjectId, &str),
    group: &str,
    expires_at: Option<DateTime<Utc>>,
    max: i64,
) -> sqlx::Result<Admittance> {
    sqlx::query_as!(
        Admittance,
        r#"
        select exists (
                   select from shared_limit_keys
                   where project_id = $1 and limit_name = $2 and group_key = $3
                       and (max_running is not null or rate_counts is not null)
               ) or (
                   select count(*) < $4
                   from (
                       select from shared_limit_keys
                       where project_id = $1 and (max_running is not null or rate_counts is not null)
                       limit $4
                   ) counted
               ) "has_place!",
               coalesce($5::timestamptz > now(), true) "is_ahead!"
        "#,
        project_id.0,
        limit,
        group,
        max,
        expires_at,
    )
    .fetch_one(conn)
    .await
}

/// Gives a group numbers of its own, in place of those that it had, and looks at it again.
pub async fn put(
    conn: &mut PgConnection,
    (project_id, limit): (ProjectId, &str),
    group: &str,
    rules: &KeyRules,
) -> sqlx::Result<()> {
    let rates = rules.rates.as_ref();
    let counts: Option<Vec<_>> = rates.map(|it| it.iter().map(|it| it.count).collect());
    let seconds: Option<Vec<_>> = rates.map(|it| it.iter().map(|it| it.per_seconds).collect());
    sqlx::query!(
        "
        with noted as (
            insert into group_notes (project_id, queue, group_key)
            select $1, named.queue, $3
            from shared_limits
            cross join lateral unnest(queues) as named(queue)
            where project_id = $1 and name = $2
        )
        insert into shared_limit_keys (
            project_id, limit_name, group_key, max_running, rate_counts, rate_seconds, expires_at
        )
        values ($1, $2, $3, $4, $5, $6, $7)
        on conflict (project_id, limit_name, group_key) do update
        set max_running = excluded.max_running, rate_counts = excluded.rate_counts,
            rate_seconds = excluded.rate_seconds, expires_at = excluded.expires_at,
            full_until = null
        ",
        project_id.0,
        limit,
        group,
        rules.max_running,
        counts as Option<Vec<i32>>,
        seconds as Option<Vec<i32>>,
        rules.expires_at,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Lets no job that a limit counts together with one of this group start for this many seconds; a
/// later end stays. Returns whether they were not paused before; none: there is no such limit.
pub async fn pause(
    conn: &mut PgConnection,
    (project_id, limit): (ProjectId, &str),
    group: &str,
    seconds: i32,
) -> sqlx::Result<Option<bool>> {
    sqlx::query_scalar!(
        r#"
        with key as materialized (
            select case when by_group then $3::text else '' end as group_key
            from shared_limits
            where project_id = $1 and name = $2
        ), before as materialized (
            select paused_until
            from shared_limit_keys
            where project_id = $1 and limit_name = $2
                and group_key = (select group_key from key)
        )
        insert into shared_limit_keys (project_id, limit_name, group_key, paused_until)
        select $1, $2, group_key, statement_timestamp() + make_interval(secs => $4::int) from key
        on conflict (project_id, limit_name, group_key) do update
        set paused_until = greatest(shared_limit_keys.paused_until, excluded.paused_until)
        returning not exists (
            select from before where paused_until > statement_timestamp()
        ) "is_new!"
        "#,
        project_id.0,
        limit,
        group,
        seconds,
    )
    .fetch_optional(conn)
    .await
}

/// Forgets a key: its own numbers, its pause and its counted starts. Its jobs are looked at again.
/// Returns whether anything was known. The limit must be locked by an earlier statement of this
/// transaction.
pub async fn reset(
    conn: &mut PgConnection,
    (project_id, limit): (ProjectId, &str),
    group: &str,
) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        with forgotten as (
            delete from shared_limit_keys
            where project_id = $1 and limit_name = $2 and group_key = $3
            returning 1
        ), noted as (
            insert into group_notes (project_id, queue, group_key)
            select $1, named.queue, $3
            from shared_limits
            cross join lateral unnest(queues) as named(queue)
            where project_id = $1 and name = $2 and $3 <> ''
        )
        select exists (select from forgotten) "was_known!"
        "#,
        project_id.0,
        limit,
        group,
    )
    .fetch_one(conn)
    .await
}

/// The limit of this name that a queue names, and whether each group has it for itself.
pub async fn named_by(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    limit: &str,
) -> sqlx::Result<Option<bool>> {
    sqlx::query_scalar!(
        r#"
        select shared.by_group
        from queues setting
        join shared_limits shared on shared.project_id = $1 and shared.name = $3
        where setting.project_id = $1 and setting.name = $2 and setting.shared_limits is not null
            and $3 = any(setting.shared_limits)
        "#,
        project_id.0,
        queue,
        limit,
    )
    .fetch_optional(conn)
    .await
}
