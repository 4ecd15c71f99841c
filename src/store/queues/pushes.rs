//! Push: queues whose jobs are sent to a URL.

use chrono::{DateTime, Utc};
use fencepost_domain::ids::ProjectId;
use sqlx::PgConnection;

use crate::workers::ALIVE_SECONDS;

/// Seconds within which a node begins to send the jobs of a new push, and says so: it reads pushes
/// every two seconds, or a few more where there are very many.
const BEGIN_SECONDS: f64 = 15.0;

/// Where a queue's jobs are sent.
#[derive(Debug, Clone)]
pub struct PushRow {
    pub queue: String,
    pub url: String,
    pub timeout_seconds: i32,
    /// Jobs that one node sends at a time.
    pub max_in_flight: i32,
    /// Headers that requests carry besides ours.
    pub header_names: Vec<String>,
    pub paused_at: Option<DateTime<Utc>>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
    pub last_success_at: Option<DateTime<Utc>>,
    pub last_failure_at: Option<DateTime<Utc>>,
    pub failing_since: Option<DateTime<Utc>>,
    pub last_error: Option<String>,
    /// No node sends its jobs, although it has not changed for 15 s and is not paused.
    pub is_unserved: bool,
}

/// Settings of a push target, from its caller.
#[derive(Debug, Clone)]
pub struct PushSettings {
    pub url: String,
    pub timeout_seconds: i32,
    pub max_in_flight: i32,
    pub is_paused: bool,
}

/// Headers that requests carry besides ours.
#[derive(Clone, Default)]
pub struct PushHeaders {
    pub names: Vec<String>,
    /// JSON. Encrypted, if there is a master key. Null: there are none.
    pub stored: Option<Vec<u8>>,
}

/// The URL of a queue's push, locked until the end of the transaction: what is kept with it must
/// not go to another one.
pub async fn lock_url(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> sqlx::Result<Option<String>> {
    sqlx::query_scalar!(
        "select url from queue_pushes where project_id = $1 and queue = $2 for update",
        project_id.0,
        queue,
    )
    .fetch_optional(conn)
    .await
}

pub async fn find(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> sqlx::Result<Option<PushRow>> {
    sqlx::query_as!(
        PushRow,
        r#"
        select queue, url, timeout_seconds, max_in_flight, header_names, paused_at, created_at,
               updated_at, last_success_at, last_failure_at, failing_since, last_error,
               paused_at is null and updated_at < now() - make_interval(secs => $4) and not exists (
                   select from workers
                   where project_id = $1 and $2 = any(queues) and state = 'running'
                       and worker_id like 'fencepost-push-%'
                       and last_seen_at > now() - make_interval(secs => $3)
               ) "is_unserved!"
        from queue_pushes
        where project_id = $1 and queue = $2
        "#,
        project_id.0,
        queue,
        f64::from(ALIVE_SECONDS),
        BEGIN_SECONDS,
    )
    .fetch_optional(conn)
    .await
}

/// The state of a push whose jobs may not reach its URL.
#[derive(Debug, Clone)]
pub struct PushTrouble {
    pub failing_since: Option<DateTime<Utc>>,
    pub error: Option<String>,
    /// No node sends its jobs, as in [`PushRow`].
    pub is_unserved: bool,
}

/// The state of a queue's push, if no live worker polls the queue beside it.
pub async fn trouble(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> sqlx::Result<Option<PushTrouble>> {
    sqlx::query_as!(
        PushTrouble,
        r#"
        select failing_since, last_error as error,
               not known.is_pushed and updated_at < now() - make_interval(secs => $4) "is_unserved!"
        from queue_pushes
        cross join lateral (
            select coalesce(bool_or(worker_id like 'fencepost-push-%'), false) as is_pushed,
                   coalesce(bool_or(worker_id not like 'fencepost-push-%'), false) as is_polled
            from workers
            where project_id = $1 and $2 = any(queues) and state = 'running' and lost_at is null
                and last_seen_at > now() - make_interval(secs => greatest($3::int, 3 * beat_seconds))
        ) known
        where project_id = $1 and queue = $2 and paused_at is null and not known.is_polled
        "#,
        project_id.0,
        queue,
        ALIVE_SECONDS,
        BEGIN_SECONDS,
    )
    .fetch_optional(conn)
    .await
}

/// How many queues of a project are pushed, up to `limit`.
pub async fn count(
    conn: &mut PgConnection,
    project_id: ProjectId,
    limit: i64,
) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        select count(*) "count!"
        from (select from queue_pushes where project_id = $1 limit $2) bounded
        "#,
        project_id.0,
        limit,
    )
    .fetch_one(conn)
    .await
}

/// Stores where a queue's jobs are sent. The secret is for a new one; without headers they stay as
/// they are. Returns whether it is new.
pub async fn upsert(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    settings: &PushSettings,
    headers: Option<&PushHeaders>,
    secret: &[u8],
) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        insert into queue_pushes (
            project_id, queue, url, timeout_seconds, max_in_flight, paused_at, secret, headers,
            header_names
        )
        values ($1, $2, $3, $4, $5, case when $6 then now() end, $7, $8, coalesce($9::text[], '{}'))
        on conflict (project_id, queue) do update
        set url = excluded.url, timeout_seconds = excluded.timeout_seconds,
            max_in_flight = excluded.max_in_flight,
            paused_at = case when $6 then coalesce(queue_pushes.paused_at, now()) end,
            headers = case when $9::text[] is null then queue_pushes.headers else excluded.headers end,
            header_names = coalesce($9::text[], queue_pushes.header_names),
            updated_at = now(),
            failing_since = null, last_error = null
        returning xmax = 0 "is_new!"
        "#,
        project_id.0,
        queue,
        settings.url,
        settings.timeout_seconds,
        settings.max_in_flight,
        settings.is_paused,
        secret,
        headers.and_then(|it| it.stored.as_deref()),
        headers.map(|it| it.names.as_slice()) as Option<&[String]>,
    )
    .fetch_one(conn)
    .await
}

/// Ends a push. Returns whether there was one.
pub async fn delete(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "delete from queue_pushes where project_id = $1 and queue = $2",
        project_id.0,
        queue,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() > 0)
}

/// Replaces the secret. The present one signs as well for this many seconds.
pub async fn replace_secret(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    secret: &[u8],
    overlap_seconds: i32,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        update queue_pushes
        set old_secret = case when $4 > 0 then secret end,
            old_secret_until = case when $4 > 0 then now() + make_interval(secs => $4::int) end,
            secret = $3, updated_at = now()
        where project_id = $1 and queue = $2
        ",
        project_id.0,
        queue,
        secret,
        overlap_seconds,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() > 0)
}
