//! Invitations to projects.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use fencepost_domain::ids::{AccountId, InvitationId, ProjectId};

#[derive(Debug, Clone)]
pub struct Invitation {
    pub id: InvitationId,
    pub email: String,
    pub role: String,
    /// Member since.
    pub created_at: DateTime<Utc>,
    pub expires_at: DateTime<Utc>,
}

/// Stores an invitation.
pub async fn insert(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: InvitationId,
    (email, role): (&str, &str),
    secret_hash: &[u8],
    invited_by: Option<AccountId>,
    life_seconds: i64,
) -> sqlx::Result<Invitation> {
    sqlx::query_as!(
        Invitation,
        r#"
        insert into invitations (project_id, id, email, role, secret_hash, invited_by, expires_at)
        values ($1, $2, $3, $4, $5, $6, now() + make_interval(secs => $7))
        returning id "id: InvitationId", email, role, created_at, expires_at
        "#,
        project_id.0,
        id.0,
        email,
        role,
        secret_hash,
        invited_by.map(|it| it.0),
        life_seconds as f64,
    )
    .fetch_one(conn)
    .await
}

/// A project's open invitations, oldest first.
pub async fn list(
    conn: &mut PgConnection,
    project_id: ProjectId,
    limit: i64,
) -> sqlx::Result<Vec<Invitation>> {
    sqlx::query_as!(
        Invitation,
        r#"
        select id "id: InvitationId", email, role, created_at, expires_at
        from invitations
        where project_id = $1 and expires_at > now()
        order by id
        limit $2
        "#,
        project_id.0,
        limit,
    )
    .fetch_all(conn)
    .await
}

/// Revokes an invitation, and returns it.
pub async fn delete(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: InvitationId,
) -> sqlx::Result<Option<Invitation>> {
    sqlx::query_as!(
        Invitation,
        r#"
        delete from invitations
        where project_id = $1 and id = $2
        returning id "id: InvitationId", email, role, created_at, expires_at
        "#,
        project_id.0,
        id.0,
    )
    .fetch_optional(conn)
    .await
}

/// Revokes all invitations for an address.
pub async fn delete_of_address(
    conn: &mut PgConnection,
    project_id: ProjectId,
    email: &str,
) -> sqlx::Result<()> {
    sqlx::query!(
        "delete from invitations where project_id = $1 and email = $2",
        project_id.0,
        email,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Revokes the invitations that a member has made.
pub async fn delete_by(
    conn: &mut PgConnection,
    project_id: ProjectId,
    invited_by: AccountId,
) -> sqlx::Result<()> {
    sqlx::query!(
        "delete from invitations where project_id = $1 and invited_by = $2",
        project_id.0,
        invited_by.0,
    )
    .execute(conn)
    .await?;
    Ok(())
}
/// The content of an invitation.
#[derive(Debug)]
pub struct Invited {
    pub project_name: String,
    pub email: String,
    pub role: String,
    /// When it expires.
    pub expires_at: DateTime<Utc>,
}

/// The open invitation with this secret.
pub async fn invited(conn: &mut PgConnection, secret_hash: &[u8]) -> sqlx::Result<Option<Invited>> {
    sqlx::query_as!(
        Invited,
        "
        select project.name as project_name, invitation.email, invitation.role, invitation.expires_at
        from invitations invitation
        join projects project on project.id = invitation.project_id
        where (invitation.secret_hash = $1 or invitation.mailed_hash = $1)
            and invitation.expires_at > now()
            and project.deleted_at is null
        ",
        secret_hash,
    )
    .fetch_optional(conn)
    .await
}

/// Gives an open invitation the token that is mailed. Returns the name of its project.
pub async fn note_mailed(
    conn: &mut PgConnection,
    (project_id, id): (ProjectId, InvitationId),
    hash: &[u8],
) -> sqlx::Result<Option<String>> {
    sqlx::query_scalar!(
        "
        update invitations it
        set mailed_hash = $3
        from projects
        where it.project_id = $1 and it.id = $2 and it.expires_at > now()
            and projects.id = it.project_id and projects.deleted_at is null
        returning projects.name
        ",
        project_id.0,
        id.0,
        hash,
    )
    .fetch_optional(conn)
    .await
}

/// Uses up an invitation, and returns its project, role and address. Other invitations of the
/// project for that address end with it.
pub async fn accept(
    conn: &mut PgConnection,
    secret_hash: &[u8],
) -> sqlx::Result<Option<(ProjectId, String, String)>> {
    let row = sqlx::query!(
        r#"
        with accepted as (
            select invitation.project_id, invitation.role, invitation.email
            from invitations invitation
            join projects project on project.id = invitation.project_id
            where (invitation.secret_hash = $1 or invitation.mailed_hash = $1)
                and invitation.expires_at > now()
                and project.deleted_at is null
            for update of invitation
        ), gone as (
            delete from invitations
            using accepted
            where invitations.project_id = accepted.project_id
                and invitations.email = accepted.email
        )
        select project_id "project_id: ProjectId", role, email from accepted
        "#,
        secret_hash,
    )
    .fetch_optional(conn)
    .await?;
    Ok(row.map(|it| (it.project_id, it.role, it.email)))
}
