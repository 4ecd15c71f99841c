//! Logins of terminals, until their key is collected or they have expired.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use fencepost_domain::ids::{AccountId, ProjectId, SessionId};

/// A login that is not approved yet.
#[derive(Debug, Clone)]
pub struct Pending {
    pub name: String,
    pub address: String,
    pub created_at: DateTime<Utc>,
    pub expires_at: DateTime<Utc>,
}

/// A login, as its terminal asks for it.
#[derive(Debug, Clone)]
pub struct DeviceLogin {
    pub name: String,
    pub session_id: Option<SessionId>,
    pub account_id: Option<AccountId>,
    pub project_id: Option<ProjectId>,
    pub scopes: Vec<String>,
}

/// Stores a login; false: another stored one has the same user code.
pub async fn insert(
    conn: &mut PgConnection,
    (secret_hash, code_hash): (&[u8], &[u8]),
    (name, address): (&str, &str),
    life_seconds: i64,
) -> sqlx::Result<bool> {
    let stored = sqlx::query!(
        "
        insert into device_logins (secret_hash, code_hash, name, address, expires_at)
        values ($1, $2, $3, $4, now() + make_interval(secs => $5))
        on conflict (code_hash) do nothing
        ",
        secret_hash,
        code_hash,
        name,
        address,
        life_seconds as f64,
    )
    .execute(conn)
    .await?;
    Ok(stored.rows_affected() == 1)
}

/// The pending login with this user code.
pub async fn find_pending(
    conn: &mut PgConnection,
    code_hash: &[u8],
) -> sqlx::Result<Option<Pending>> {
    sqlx::query_as!(
        Pending,
        "
        select name, address, created_at, expires_at
        from device_logins
        where code_hash = $1 and approved_in is null and expires_at > now()
        ",
        code_hash,
    )
    .fetch_optional(conn)
    .await
}

/// Approves the pending login with this user code, and returns it.
pub async fn approve(
    conn: &mut PgConnection,
    code_hash: &[u8],
    (session_id, project_id): (SessionId, ProjectId),
    scopes: &[String],
) -> sqlx::Result<Option<Pending>> {
    sqlx::query_as!(
        Pending,
        "
        update device_logins
        set approved_in = $2, approved_for = $3, scopes = $4,
            -- Its terminal asks every few seconds.
            expires_at = greatest(expires_at, now() + interval '1 minute')
        where code_hash = $1 and approved_in is null and expires_at > now()
        returning name, address, created_at, expires_at
        ",
        code_hash,
        session_id.0,
        project_id.0,
        scopes,
    )
    .fetch_optional(conn)
    .await
}

/// Deletes the pending login with this user code; false: there is none.
pub async fn refuse(conn: &mut PgConnection, code_hash: &[u8]) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        delete from device_logins
        where code_hash = $1 and approved_in is null and expires_at > now()
        ",
        code_hash,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// The login of this device code.
pub async fn find(
    conn: &mut PgConnection,
    secret_hash: &[u8],
) -> sqlx::Result<Option<DeviceLogin>> {
    sqlx::query_as!(
        DeviceLogin,
        r#"
        select login.name, session.id "session_id?: SessionId",
               session.account_id "account_id?: AccountId",
               login.approved_for "project_id?: ProjectId", coalesce(login.scopes, '{}') "scopes!"
        from device_logins login
        left join sessions session on session.id = login.approved_in
        where login.secret_hash = $1 and login.expires_at > now()
        "#,
        secret_hash,
    )
    .fetch_optional(conn)
    .await
}

/// Deletes a login, whose key is created; false: another request was first.
pub async fn delete(conn: &mut PgConnection, secret_hash: &[u8]) -> sqlx::Result<bool> {
    let done = sqlx::query!("delete from device_logins where secret_hash = $1", secret_hash)
        .execute(conn)
        .await?;
    Ok(done.rows_affected() == 1)
}
