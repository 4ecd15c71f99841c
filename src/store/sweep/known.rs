//! Projects that have something rare, a page after the other.

use sqlx::PgConnection;

use fencepost_domain::ids::ProjectId;

/// Projects of one page.
pub const MAX_PAGE_PROJECTS: i64 = 10_000;

/// Projects after this one that have a queue with a circuit breaker, in the order of their ids.
pub async fn braked(conn: &mut PgConnection, after: ProjectId) -> sqlx::Result<Vec<ProjectId>> {
    sqlx::query_scalar!(
        r#"
        select distinct project_id "project_id: ProjectId"
        from queues
        where brake_after is not null and project_id > $1
        order by project_id
        limit $2
        "#,
        after.0,
        MAX_PAGE_PROJECTS,
    )
    .fetch_all(conn)
    .await
}

/// Projects after this one with an enabled endpoint that asks for events, in the order of their
/// ids.
pub async fn subscribed(conn: &mut PgConnection, after: ProjectId) -> sqlx::Result<Vec<ProjectId>> {
    sqlx::query_scalar!(
        r#"
        select distinct project_id "project_id: ProjectId"
        from event_subscriptions
        where project_id > $1
        order by project_id
        limit $2
        "#,
        after.0,
        MAX_PAGE_PROJECTS,
    )
    .fetch_all(conn)
    .await
}
