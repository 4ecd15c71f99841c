//! What queues are set to.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use crate::ids::ProjectId;

/// The settings of a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueSettings {
    /// Jobs that may run at a time; none: as many as there are workers for.
    pub max_concurrency: Option<i32>,
    /// When somebody last changed them; none: never.
    pub updated_at: Option<DateTime<Utc>>,
}

/// Limits how many jobs of a queue may run at a time; none takes the limit away.
///
/// # Errors
/// Only those of the store.
pub async fn set_max_concurrency(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    max_concurrency: Option<i32>,
) -> sqlx::Result<QueueSettings> {
    sqlx::query_as!(
        QueueSettings,
        r#"
        insert into queues (project_id, name, max_concurrency)
        values ($1, $2, $3)
        on conflict (project_id, name) do update
        set max_concurrency = excluded.max_concurrency, updated_at = now()
        returning max_concurrency, updated_at "updated_at?"
        "#,
        project_id.0,
        queue,
        max_concurrency,
    )
    .fetch_one(conn)
    .await
}

/// The settings of a queue that somebody has changed.
///
/// # Errors
/// Only those of the store.
pub async fn find_settings(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> sqlx::Result<Option<QueueSettings>> {
    sqlx::query_as!(
        QueueSettings,
        r#"
        select max_concurrency, updated_at "updated_at?"
        from queues
        where project_id = $1 and name = $2
        "#,
        project_id.0,
        queue,
    )
    .fetch_optional(conn)
    .await
}

/// How crowded it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crowds {
    /// Jobs that run under a concurrency key.
    pub under_key: i64,
    /// Jobs that run in a queue.
    pub in_queue: i64,
    /// The database's clock.
    pub now: DateTime<Utc>,
}

/// How many jobs run under a concurrency key, and in a queue; counted up to `limit`.
///
/// # Errors
/// Only those of the store.
pub async fn count_running(
    conn: &mut PgConnection,
    project_id: ProjectId,
    concurrency_key: Option<&str>,
    queue: &str,
    limit: i64,
) -> sqlx::Result<Crowds> {
    sqlx::query_as!(
        Crowds,
        r#"
        select (
            select count(*) from (
                select from jobs
                where project_id = $1 and concurrency_key = $2 and state = 'processing'
                limit $4
            ) under_key
        ) "under_key!", (
            select count(*) from (
                select from jobs
                where project_id = $1 and queue = $3 and state = 'processing'
                limit $4
            ) in_queue
        ) "in_queue!", statement_timestamp() "now!"
        "#,
        project_id.0,
        concurrency_key,
        queue,
        limit,
    )
    .fetch_one(conn)
    .await
}

/// How many claimable jobs without a gate stand before a place in a queue, counted up to `limit`.
///
/// # Errors
/// Only those of the store.
pub async fn count_ahead(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    rank: i16,
    run_at: DateTime<Utc>,
    limit: i64,
) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        select count(*) "ahead!"
        from (
            select from jobs
            where project_id = $1 and queue = $2 and state = 'pending' and gate is null
                and (rank, run_at) < ($3::smallint, $4)
            limit $5
        ) before
        "#,
        project_id.0,
        queue,
        rank,
        run_at,
        limit,
    )
    .fetch_one(conn)
    .await
}
