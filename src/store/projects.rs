//! Projects, and what belongs to the whole instance.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::ids::{ProjectId, ProjectPublicId};

#[derive(Debug, Clone, PartialEq)]
pub struct Project {
    pub id: ProjectId,
    pub public_id: ProjectPublicId,
    /// Short name in paths; unique.
    pub slug: String,
    pub name: String,
    /// `live` or `test`.
    pub mode: String,
    pub plan: String,
    /// Single limits of the plan, replaced.
    pub overrides: Option<serde_json::Value>,
    pub created_at: DateTime<Utc>,
}

/// A project to make.
#[derive(Debug, Clone, Copy)]
pub struct NewProject<'a> {
    pub public_id: ProjectPublicId,
    /// Short name in paths; unique.
    pub slug: &'a str,
    pub name: &'a str,
    /// `live` or `test`.
    pub mode: &'a str,
    pub plan: &'a str,
}

/// What belongs to the whole instance.
#[derive(Clone)]
pub struct Instance {
    /// Its name among others that share a Redis.
    pub public_id: Uuid,
    pub cursor_key: Vec<u8>,
}

/// Makes a project, unless its slug is taken.
pub async fn insert(conn: &mut PgConnection, new: NewProject<'_>) -> sqlx::Result<Option<Project>> {
    sqlx::query_as!(
        Project,
        r#"
        insert into projects (public_id, slug, name, mode, plan)
        values ($1, $2, $3, $4, $5)
        on conflict (slug) do nothing
        returning id "id: ProjectId", public_id "public_id: ProjectPublicId", slug, name, mode,
                  plan, overrides, created_at
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

/// The project of this slug or public id.
pub async fn find(
    conn: &mut PgConnection,
    slug: &str,
    public_id: Option<ProjectPublicId>,
) -> sqlx::Result<Option<Project>> {
    sqlx::query_as!(
        Project,
        r#"
        select id "id: ProjectId", public_id "public_id: ProjectPublicId", slug, name, mode, plan,
               overrides, created_at
        from projects
        where (slug = $1 or public_id = $2) and deleted_at is null
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
        select id "id: ProjectId", public_id "public_id: ProjectPublicId", slug, name, mode, plan,
               overrides, created_at
        from projects
        where id = $1 and deleted_at is null
        "#,
        id.0,
    )
    .fetch_optional(conn)
    .await
}

/// Projects, the oldest first.
pub async fn list(
    conn: &mut PgConnection,
    after: ProjectId,
    limit: i64,
) -> sqlx::Result<Vec<Project>> {
    sqlx::query_as!(
        Project,
        r#"
        select id "id: ProjectId", public_id "public_id: ProjectPublicId", slug, name, mode, plan,
               overrides, created_at
        from projects
        where id > $1 and deleted_at is null
        order by id
        limit $2
        "#,
        after.0,
        limit,
    )
    .fetch_all(conn)
    .await
}

/// Gives a project another name.
pub async fn rename(conn: &mut PgConnection, id: ProjectId, name: &str) -> sqlx::Result<()> {
    sqlx::query!("update projects set name = $2 where id = $1", id.0, name).execute(conn).await?;
    Ok(())
}

/// Puts a project on a plan.
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

/// Ends a project for everybody; its rows follow. Its slug is free again.
pub async fn delete(conn: &mut PgConnection, id: ProjectId) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update projects
        set deleted_at = coalesce(deleted_at, now()), slug = 'deleted-' || public_id::text
        where id = $1
        ",
        id.0,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// What belongs to the whole instance.
pub async fn instance(conn: &mut PgConnection) -> sqlx::Result<Instance> {
    sqlx::query_as!(Instance, "select public_id, cursor_key from instance").fetch_one(conn).await
}
