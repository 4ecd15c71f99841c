//! Projects, and settings of the whole instance.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use fencepost_domain::ids::{ProjectId, ProjectPublicId};

#[derive(Debug, Clone, PartialEq)]
pub struct Project {
    pub id: ProjectId,
    pub public_id: ProjectPublicId,
    /// The slug, unique.
    pub slug: String,
    pub name: String,
    /// `live` or `test`.
    pub mode: String,
    /// `ambiguous` or `always`.
    pub require_fence: String,
    /// Length of leases in seconds, for native polls that ask for none.
    pub default_lease_seconds: Option<i32>,
    /// Whether an expired lease counts as a failure.
    pub losses_count_as_failures: bool,
    pub plan: String,
    /// Overrides of the plan's limits.
    pub overrides: Option<serde_json::Value>,
    pub created_at: DateTime<Utc>,
    /// When the operator suspended it.
    pub suspended_at: Option<DateTime<Utc>>,
}

/// A project to create.
#[derive(Debug, Clone, Copy)]
pub struct NewProject<'a> {
    pub public_id: ProjectPublicId,
    /// The slug, unique.
    pub slug: &'a str,
    pub name: &'a str,
    /// `live` or `test`.
    pub mode: &'a str,
    pub plan: &'a str,
}

/// Settings of the whole instance.
#[derive(Clone)]
pub struct Instance {
    /// Its name among others that share a Redis.
    pub public_id: Uuid,
    pub cursor_key: Vec<u8>,
}

/// Creates a project, unless its slug is taken.
pub async fn insert(conn: &mut PgConnection, new: NewProject<'_>) -> sqlx::Result<Option<Project>> {
    sqlx::query_as!(
        Project,
        r#"
        insert into projects (public_id, slug, name, mode, plan)
        values ($1, $2, $3, $4, $5)
        on conflict (slug) do nothing
        returning id "id: ProjectId", public_id "public_id: ProjectPublicId", slug, name, mode,
                  require_fence, default_lease_seconds, losses_count_as_failures, plan, overrides, created_at,
                  suspended_at
        "#,
        new.public_id.0,
        new.slug,
        new.name,
        new.mode,
        new.plan,
    )
    .fetch_optional(conn)
    .await
}

/// The hidden project of the server's own jobs; it is created if it is missing. No slug of a
/// person begins with a dot.
pub async fn canary(conn: &mut PgConnection) -> sqlx::Result<ProjectId> {
    sqlx::query_scalar!(
        r#"
        insert into projects (public_id, slug, name, mode, plan, kind)
        values ($1, '.canary', 'Canary', 'live', 'unlimited', 'canary')
        on conflict (slug) do update set slug = excluded.slug
        returning id "id: ProjectId"
        "#,
        ProjectPublicId::generate().0,
    )
    .fetch_one(conn)
    .await
}

/// The project with this slug or public id.
pub async fn find(
    conn: &mut PgConnection,
    slug: &str,
    public_id: Option<ProjectPublicId>,
) -> sqlx::Result<Option<Project>> {
    sqlx::query_as!(
        Project,
        r#"
        select id "id: ProjectId", public_id "public_id: ProjectPublicId", slug, name, mode,
               require_fence, default_lease_seconds, losses_count_as_failures, plan, overrides, created_at,
                  suspended_at
        from projects
        where (slug = $1 or public_id = $2) and deleted_at is null and kind = 'user'
        limit 1
        "#,
        slug,
        public_id.map(|it| it.0),
    )
    .fetch_optional(conn)
    .await
}

pub async fn get(conn: &mut PgConnection, id: ProjectId) -> sqlx::Result<Option<Project>> {
    sqlx::query_as!(
        Project,
        r#"
        select id "id: ProjectId", public_id "public_id: ProjectPublicId", slug, name, mode,
               require_fence, default_lease_seconds, losses_count_as_failures, plan, overrides, created_at,
                  suspended_at
        from projects
        where id = $1 and deleted_at is null
        "#,
        id.0,
    )
    .fetch_optional(conn)
    .await
}

/// Projects, oldest first.
pub async fn list(
    conn: &mut PgConnection,
    after: ProjectId,
    limit: i64,
) -> sqlx::Result<Vec<Project>> {
    sqlx::query_as!(
        Project,
        r#"
        select id "id: ProjectId", public_id "public_id: ProjectPublicId", slug, name, mode,
               require_fence, default_lease_seconds, losses_count_as_failures, plan, overrides, created_at,
                  suspended_at
        from projects
        where id > $1 and deleted_at is null and kind = 'user'
        order by id
        limit $2
        "#,
        after.0,
        limit,
    )
    .fetch_all(conn)
    .await
}

/// Outboxes of webhooks, oldest first.
pub async fn outboxes(
    conn: &mut PgConnection,
    after: ProjectId,
    limit: i64,
) -> sqlx::Result<Vec<ProjectId>> {
    sqlx::query_scalar!(
        r#"
        select id "id: ProjectId"
        from projects
        where id > $1 and deleted_at is null and kind = 'outbox'
        order by id
        limit $2
        "#,
        after.0,
        limit,
    )
    .fetch_all(conn)
    .await
}

/// Changes a project's name and settings; none keeps the value.
pub async fn change(
    conn: &mut PgConnection,
    id: ProjectId,
    name: Option<&str>,
    require_fence: Option<&str>,
    default_lease_seconds: Option<Option<i32>>,
    losses_count_as_failures: Option<bool>,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update projects
        set name = coalesce($2, name), require_fence = coalesce($3, require_fence),
            default_lease_seconds = case when $5 then $4 else default_lease_seconds end,
            losses_count_as_failures = coalesce($6, losses_count_as_failures)
        where id = $1
        ",
        id.0,
        name,
        require_fence,
        default_lease_seconds.flatten(),
        default_lease_seconds.is_some(),
        losses_count_as_failures,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Assigns a plan to a project.
pub async fn set_plan(
    conn: &mut PgConnection,
    id: ProjectId,
    plan: &str,
    overrides: Option<&serde_json::Value>,
) -> sqlx::Result<()> {
    sqlx::query!(
        "update projects set plan = $2, overrides = $3 where id = $1",
        id.0,
        plan,
        overrides,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Suspends a project, or ends its suspension.
pub async fn suspend(
    conn: &mut PgConnection,
    id: ProjectId,
    is_suspended: bool,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update projects
        set suspended_at = case when $2 then coalesce(suspended_at, now()) end
        where id = $1
        ",
        id.0,
        is_suspended,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Projects among these that are suspended.
pub async fn suspended(conn: &mut PgConnection, ids: &[ProjectId]) -> sqlx::Result<Vec<ProjectId>> {
    sqlx::query_scalar!(
        r#"
        select id "id: ProjectId" from projects
        where id = any($1) and suspended_at is not null
        "#,
        &ids.iter().map(|it| it.0).collect::<Vec<_>>(),
    )
    .fetch_all(conn)
    .await
}

/// The project with this public id, deleted or not: its audit log outlives it.
pub async fn find_ever(
    conn: &mut PgConnection,
    public_id: ProjectPublicId,
) -> sqlx::Result<Option<ProjectId>> {
    sqlx::query_scalar!(
        r#"select id "id: ProjectId" from projects where public_id = $1 and kind = 'user'"#,
        public_id.0,
    )
    .fetch_optional(conn)
    .await
}

/// Deletes a project and its outbox for all callers; their rows follow.
pub async fn delete(conn: &mut PgConnection, id: ProjectId) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update projects
        set deleted_at = coalesce(deleted_at, now())
        where id = $1 or owner_project_id = $1
        ",
        id.0,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Settings of the whole instance.
pub async fn instance(conn: &mut PgConnection) -> sqlx::Result<Instance> {
    sqlx::query_as!(Instance, "select public_id, cursor_key from instance").fetch_one(conn).await
}
