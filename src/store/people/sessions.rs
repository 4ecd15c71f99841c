//! Sessions of accounts, and their refresh tokens.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use fencepost_domain::ids::{AccountId, SessionId};

#[derive(Debug, Clone)]
pub struct Session {
    pub id: SessionId,
    pub created_at: DateTime<Utc>,
    pub last_used_at: DateTime<Utc>,
    /// When it expires at the latest.
    pub expires_at: DateTime<Utc>,
    /// The client's description of itself.
    pub user_agent: Option<String>,
    pub address: Option<String>,
}

/// The client that starts a session.
#[derive(Debug, Clone, Default)]
pub struct Origin {
    /// The client's description of itself.
    pub user_agent: Option<String>,
    pub address: Option<String>,
    /// Whether it is a browser: see [`use_secret`].
    pub is_browser: bool,
}

/// The state of a refresh token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Presented {
    pub account_id: AccountId,
    pub session_id: SessionId,
    /// Whether it was used before, and longer ago than the grace allows.
    pub is_used: bool,
    pub is_live: bool,
}

/// Starts a session; without a proof of who its person is, it must be stepped up first.
pub async fn insert(
    conn: &mut PgConnection,
    account_id: AccountId,
    id: SessionId,
    origin: &Origin,
    life_seconds: i64,
    is_proved: bool,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into sessions (
            id, account_id, expires_at, user_agent, address, is_browser, stepped_up_at
        )
        values (
            $1, $2, now() + make_interval(secs => $3), $4, $5, $6,
            case when $7 then now() else '-infinity' end
        )
        ",
        id.0,
        account_id.0,
        life_seconds as f64,
        origin.user_agent,
        origin.address,
        origin.is_browser,
        is_proved,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Whether an account was logged in to before, but has no session of this user agent.
pub async fn is_new_device(
    conn: &mut PgConnection,
    account_id: AccountId,
    user_agent: Option<&str>,
) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        select last_login_at is not null and not exists (
            select from sessions
            where account_id = $1 and user_agent is not distinct from $2
        ) "is_new!"
        from accounts
        where id = $1
        "#,
        account_id.0,
        user_agent,
    )
    .fetch_one(conn)
    .await
}

/// Stores the next refresh token of a session.
pub async fn insert_secret(
    conn: &mut PgConnection,
    session_id: SessionId,
    secret_hash: &[u8],
) -> sqlx::Result<()> {
    sqlx::query!(
        "insert into refresh_tokens (secret_hash, session_id) values ($1, $2)",
        secret_hash,
        session_id.0,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Uses up a refresh token, and returns its state before; none: it is unknown. Of two callers that
/// present the same token, one finds it used, unless the other came within the grace and the
/// session is one of a browser.
///
/// The clock is read after the row is locked: for a caller that waited, `now()` lies before the
/// other's use.
pub async fn use_secret(
    conn: &mut PgConnection,
    secret_hash: &[u8],
    idle_seconds: i64,
    grace_seconds: i64,
) -> sqlx::Result<Option<Presented>> {
    let row = sqlx::query!(
        r#"
        with presented as materialized (
            select secret_hash, session_id, used_at
            from refresh_tokens
            where secret_hash = $1
            for update
        ), used as (
            update refresh_tokens
            set used_at = now()
            from presented
            where refresh_tokens.secret_hash = presented.secret_hash
                and presented.used_at is null
        )
        select session.account_id "account_id: AccountId", session.id "session_id: SessionId",
               coalesce(
                   presented.used_at <= clock_timestamp()
                       - make_interval(secs => case when session.is_browser then $3 else 0 end),
                   false
               ) "is_used!",
               (session.revoked_at is null and session.expires_at > now()
                and session.last_used_at > now() - make_interval(secs => $2)) "is_live!"
        from presented
        join sessions session on session.id = presented.session_id
        "#,
        secret_hash,
        idle_seconds as f64,
        grace_seconds as f64,
    )
    .fetch_optional(conn)
    .await?;
    Ok(row.map(|it| Presented {
        account_id: it.account_id,
        session_id: it.session_id,
        is_used: it.is_used,
        is_live: it.is_live,
    }))
}

/// Extends a session.
pub async fn touch(conn: &mut PgConnection, id: SessionId) -> sqlx::Result<()> {
    sqlx::query!("update sessions set last_used_at = now() where id = $1", id.0)
        .execute(conn)
        .await?;
    Ok(())
}

/// Whether a session of this account is live.
pub async fn is_live(
    conn: &mut PgConnection,
    account_id: AccountId,
    id: SessionId,
) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        select exists (
            select from sessions
            where id = $2 and account_id = $1 and revoked_at is null and expires_at > now()
        ) "is_live!"
        "#,
        account_id.0,
        id.0,
    )
    .fetch_one(conn)
    .await
}

/// The live sessions of an account, newest first.
pub async fn list(
    conn: &mut PgConnection,
    account_id: AccountId,
    idle_seconds: i64,
    limit: i64,
) -> sqlx::Result<Vec<Session>> {
    sqlx::query_as!(
        Session,
        r#"
        select id "id: SessionId", created_at, last_used_at, expires_at, user_agent, address
        from sessions
        where account_id = $1 and revoked_at is null and expires_at > now()
            and last_used_at > now() - make_interval(secs => $2)
        order by created_at desc
        limit $3
        "#,
        account_id.0,
        idle_seconds as f64,
        limit,
    )
    .fetch_all(conn)
    .await
}

/// Ends a session. Returns whether the account has it; ending it twice is no error.
pub async fn revoke(
    conn: &mut PgConnection,
    account_id: AccountId,
    id: SessionId,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        update sessions
        set revoked_at = coalesce(revoked_at, now())
        where account_id = $1 and id = $2
        ",
        account_id.0,
        id.0,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Ends all sessions of all accounts, and returns how many.
pub async fn revoke_all(conn: &mut PgConnection) -> sqlx::Result<u64> {
    let done = sqlx::query!("update sessions set revoked_at = now() where revoked_at is null");
    Ok(done.execute(conn).await?.rows_affected())
}

/// Ends all sessions of an account but one, and returns those that it ended.
pub async fn revoke_others(
    conn: &mut PgConnection,
    account_id: AccountId,
    keep: Option<SessionId>,
) -> sqlx::Result<Vec<SessionId>> {
    sqlx::query_scalar!(
        r#"
        update sessions
        set revoked_at = now()
        where account_id = $1 and id is distinct from $2 and revoked_at is null
        returning id "id: SessionId"
        "#,
        account_id.0,
        keep.map(|it| it.0),
    )
    .fetch_all(conn)
    .await
}
