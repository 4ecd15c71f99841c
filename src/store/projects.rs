//! Projects, and what belongs to the whole instance.

use sqlx::PgConnection;

use crate::ids::{ProjectId, ProjectPublicId};

/// A project.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Project {
    /// Inside.
    pub id: ProjectId,
    /// Outside.
    pub public_id: ProjectPublicId,
    /// Short name in paths; unique.
    pub slug: String,
    /// For people.
    pub name: String,
}

/// Makes a project, unless its slug is taken.
///
/// # Errors
/// Only those of the store.
pub async fn insert(
    conn: &mut PgConnection,
    public_id: ProjectPublicId,
    slug: &str,
    name: &str,
) -> sqlx::Result<Option<Project>> {
    sqlx::query_as!(
        Project,
        r#"
        insert into projects (public_id, slug, name)
        values ($1, $2, $3)
        on conflict (slug) do nothing
        returning id "id: ProjectId", public_id "public_id: ProjectPublicId", slug, name
        "#,
        public_id.0,
        slug,
        name,
    )
    .fetch_optional(conn)
    .await
}

/// The project of this slug or public id.
///
/// # Errors
/// Only those of the store.
pub async fn find(
    conn: &mut PgConnection,
    slug: &str,
    public_id: Option<ProjectPublicId>,
) -> sqlx::Result<Option<Project>> {
    sqlx::query_as!(
        Project,
        r#"
        select id "id: ProjectId", public_id "public_id: ProjectPublicId", slug, name
        from projects
        where slug = $1 or public_id = $2
        limit 1
        "#,
        slug,
        public_id.map(|it| it.0),
    )
    .fetch_optional(conn)
    .await
}

/// The secret that signs list cursors: one for the whole instance.
///
/// # Errors
/// Only those of the store.
pub async fn cursor_key(conn: &mut PgConnection) -> sqlx::Result<Vec<u8>> {
    sqlx::query_scalar!("select cursor_key from instance").fetch_one(conn).await
}
