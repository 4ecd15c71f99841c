//! API keys. The key is looked up by its hash before a project is known, because it is what names
//! the project; every other statement starts with the project.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use crate::ids::{KeyId, ProjectId, ProjectPublicId};

/// What a key opens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyOwner {
    /// Whose key.
    pub project_id: ProjectId,
    /// The project's public id.
    pub project_public_id: ProjectPublicId,
    /// The project's short name in paths.
    pub project_slug: String,
}

/// A key as a list shows it.
#[derive(Debug, Clone)]
pub struct ListedKey {
    /// Which key.
    pub id: KeyId,
    /// What it is called.
    pub name: String,
    /// How it begins.
    pub shown_prefix: String,
    /// How it ends.
    pub shown_end: String,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// When it was revoked, if it was.
    pub revoked_at: Option<DateTime<Utc>>,
}

/// Whose live key has this hash.
///
/// # Errors
/// Only those of the store.
pub async fn find_by_secret(
    conn: &mut PgConnection,
    secret_hash: &[u8],
) -> sqlx::Result<Option<KeyOwner>> {
    sqlx::query_as!(
        KeyOwner,
        r#"
        select key.project_id "project_id: ProjectId",
               project.public_id "project_public_id: ProjectPublicId",
               project.slug as project_slug
        from api_keys key
        join projects project on project.id = key.project_id
        where key.secret_hash = $1 and key.revoked_at is null
        "#,
        secret_hash,
    )
    .fetch_optional(conn)
    .await
}

/// Keeps a new key's hash, unless the project has `max_live` live keys. Answers whether it was kept.
///
/// # Errors
/// Only those of the store.
pub async fn insert(
    conn: &mut PgConnection,
    project_id: ProjectId,
    key: &ListedKey,
    secret_hash: &[u8],
    max_live: i64,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        insert into api_keys (project_id, id, name, secret_hash, shown_prefix, shown_end)
        select $1, $2, $3, $4, $5, $6
        where (select count(*) from api_keys where project_id = $1 and revoked_at is null) < $7
        ",
        project_id.0,
        key.id.0,
        key.name,
        secret_hash,
        key.shown_prefix,
        key.shown_end,
        max_live,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// A project's keys, newest first.
///
/// # Errors
/// Only those of the store.
pub async fn list(
    conn: &mut PgConnection,
    project_id: ProjectId,
    limit: i64,
) -> sqlx::Result<Vec<ListedKey>> {
    sqlx::query_as!(
        ListedKey,
        r#"
        select id "id: KeyId", name, shown_prefix, shown_end, created_at, revoked_at
        from api_keys
        where project_id = $1
        order by id desc
        limit $2
        "#,
        project_id.0,
        limit,
    )
    .fetch_all(conn)
    .await
}

/// Revokes a key. Answers whether the project had it; to revoke it twice is no mistake.
///
/// # Errors
/// Only those of the store.
pub async fn revoke(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: KeyId,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        update api_keys
        set revoked_at = coalesce(revoked_at, now())
        where project_id = $1 and id = $2
        ",
        project_id.0,
        id.0,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}
