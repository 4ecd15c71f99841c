//! Events that wait to be told, and endpoints that are told, across projects.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use crate::{
    ids::{EndpointId, ProjectId},
    store::outbound_events::EventKey,
};

/// Events of one project that one pass tells at most. The statement carries the same number as a
/// literal.
pub const MAX_EVENTS_OF_PROJECT: usize = 200;
/// Events that one pass tells at most. The statement carries the same number as a literal.
pub const MAX_EVENTS: usize = 5_000;
/// Endpoints that one node serves at most. The statement carries the same number as a literal.
pub const MAX_SERVED_ENDPOINTS: usize = 5_000;

/// The oldest events of each project, at most [`MAX_EVENTS`]. Those of suspended projects wait, and
/// so do those whose outbox has `max_waiting` deliveries that have not ended.
pub async fn find_events(conn: &mut PgConnection, max_waiting: i64) -> sqlx::Result<Vec<EventKey>> {
    sqlx::query_as!(
        EventKey,
        r#"
        with recursive project(id) as (
            (select project_id from outbound_events order by project_id limit 1)
            union all
            select (
                select project_id from outbound_events where project_id > project.id
                order by project_id limit 1
            )
            from project
            where project.id is not null
        )
        select project.id "project_id!: ProjectId", oldest.id "id!"
        from project
        cross join lateral (
            select outbound_events.id
            from outbound_events
            where project_id = project.id and not exists (
                select from set_aside
                where project_id = project.id and work = 'events'
                    and item = outbound_events.id::text and next_try_at > now()
            )
            order by outbound_events.id
            limit 200
        ) oldest
        where project.id is not null
            and not exists (
                select from projects
                where id = project.id and (suspended_at is not null or deleted_at is not null)
            )
            and coalesce((
                select sum(active)
                from queue_counts
                where project_id = (
                    select outbox_id from webhook_endpoints where project_id = project.id limit 1
                )
            ), 0)::bigint < $1
        order by project.id, oldest.id
        limit 5000
        "#,
        max_waiting,
    )
    .fetch_all(conn)
    .await
}

/// Deletes the oldest events that have waited for this many hours. Returns how many.
pub async fn drop_old_events(conn: &mut PgConnection, hours: i32) -> sqlx::Result<u64> {
    let dropped = sqlx::query!(
        "
        delete from outbound_events
        where (project_id, id) in (
            select project_id, id
            from outbound_events
            where at < now() - make_interval(hours => $1)
            order by at
            limit 500
            for update skip locked
        )
        ",
        hours,
    )
    .execute(conn)
    .await?;
    Ok(dropped.rows_affected())
}

/// An endpoint to which a node delivers.
#[derive(Debug, Clone, PartialEq)]
pub struct ServedEndpoint {
    pub project_id: ProjectId,
    pub id: EndpointId,
    pub outbox: ProjectId,
    pub url: String,
    pub max_in_flight: i32,
    pub timeout_seconds: i32,
    pub updated_at: DateTime<Utc>,
    /// Encrypted, if there is a master key.
    pub secret: Vec<u8>,
    /// Null: there is none, or it signs no more.
    pub old_secret: Option<Vec<u8>>,
}

/// Enabled endpoints of projects that are not suspended, at most [`MAX_SERVED_ENDPOINTS`].
pub async fn served_endpoints(conn: &mut PgConnection) -> sqlx::Result<Vec<ServedEndpoint>> {
    sqlx::query_as!(
        ServedEndpoint,
        r#"
        select it.project_id "project_id: ProjectId", it.id "id: EndpointId",
               it.outbox_id "outbox: ProjectId", it.url, it.max_in_flight, it.timeout_seconds,
               it.updated_at, it.secret,
               case when it.old_secret_until > now() then it.old_secret end as old_secret
        from webhook_endpoints it
        join projects owner
            on owner.id = it.project_id and owner.suspended_at is null and owner.deleted_at is null
        where it.disabled_at is null
        order by it.project_id, it.id
        limit 5000
        "#,
    )
    .fetch_all(conn)
    .await
}
