//! Second factors of accounts: authenticator apps, recovery codes, and logins that wait for one.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use fencepost_domain::ids::{AccountId, SessionId};

/// An account's authenticator app.
#[derive(Clone)]
pub struct Totp {
    pub secret: Option<Vec<u8>>,
    pub pending_secret: Option<Vec<u8>>,
    pub last_step: i64,
    /// The database's time, in seconds since 1970.
    pub now: i64,
}

impl std::fmt::Debug for Totp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Totp").field("last_step", &self.last_step).finish_non_exhaustive()
    }
}

/// The second factors of an account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overview {
    pub totp_confirmed_at: Option<DateTime<Utc>>,
    pub recovery_codes: i64,
}

/// A login whose password was right.
#[derive(Clone)]
pub struct Challenge {
    pub account_id: AccountId,
    pub password_hash: String,
}

impl std::fmt::Debug for Challenge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Challenge").field("account_id", &self.account_id).finish_non_exhaustive()
    }
}

/// Whether logins of this account need a second factor.
pub async fn is_required(conn: &mut PgConnection, id: AccountId) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        select exists (
            select from totp where account_id = $1 and secret is not null
        ) or exists (
            select from passkeys where account_id = $1
        ) "is_required!"
        "#,
        id.0,
    )
    .fetch_one(conn)
    .await
}

pub async fn overview(conn: &mut PgConnection, id: AccountId) -> sqlx::Result<Overview> {
    sqlx::query_as!(
        Overview,
        r#"
        select (select confirmed_at from totp where account_id = $1) totp_confirmed_at,
               (select count(*) from recovery_codes where account_id = $1) "recovery_codes!"
        "#,
        id.0,
    )
    .fetch_one(conn)
    .await
}

/// Stores the secret of an app that is to be confirmed, in place of an earlier one.
pub async fn set_pending(
    conn: &mut PgConnection,
    id: AccountId,
    secret: &[u8],
    life_seconds: i64,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into totp (account_id, pending_secret, pending_until)
        values ($1, $2, now() + make_interval(secs => $3))
        on conflict (account_id) do update
        set pending_secret = excluded.pending_secret, pending_until = excluded.pending_until
        ",
        id.0,
        secret,
        life_seconds as f64,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// An account's app, locked until the transaction ends: of two callers with one code, the second
/// finds it used.
pub async fn lock_totp(conn: &mut PgConnection, id: AccountId) -> sqlx::Result<Option<Totp>> {
    sqlx::query_as!(
        Totp,
        r#"
        select secret, last_step,
               case when pending_until > now() then pending_secret end pending_secret,
               extract(epoch from now())::bigint "now!"
        from totp
        where account_id = $1
        for update
        "#,
        id.0,
    )
    .fetch_optional(conn)
    .await
}

/// The pending secret, given anew, becomes the one that logins need.
pub async fn confirm_totp(
    conn: &mut PgConnection,
    id: AccountId,
    secret: &[u8],
    step: i64,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update totp
        set secret = $3, confirmed_at = now(), last_step = $2,
            pending_secret = null, pending_until = null
        where account_id = $1
        ",
        id.0,
        step,
        secret,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Uses up the codes of this step and of earlier ones.
pub async fn record_step(conn: &mut PgConnection, id: AccountId, step: i64) -> sqlx::Result<()> {
    sqlx::query!("update totp set last_step = $2 where account_id = $1", id.0, step)
        .execute(conn)
        .await?;
    Ok(())
}

/// Deletes an account's app. Returns whether it was confirmed.
pub async fn remove_totp(conn: &mut PgConnection, id: AccountId) -> sqlx::Result<bool> {
    let confirmed = sqlx::query_scalar!(
        r#"delete from totp where account_id = $1 returning secret is not null "is_confirmed!""#,
        id.0,
    );
    Ok(confirmed.fetch_optional(conn).await?.unwrap_or(false))
}

pub async fn delete_recovery_codes(conn: &mut PgConnection, id: AccountId) -> sqlx::Result<()> {
    sqlx::query!("delete from recovery_codes where account_id = $1", id.0).execute(conn).await?;
    Ok(())
}

/// Replaces all recovery codes. Their hashes are 32 bytes each.
pub async fn replace_recovery_codes(
    conn: &mut PgConnection,
    id: AccountId,
    hashes: &[Vec<u8>],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with old as (
            delete from recovery_codes where account_id = $1
        )
        insert into recovery_codes (account_id, secret_hash)
        select $1, unnest($2::bytea[])
        ",
        id.0,
        hashes,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Uses up a recovery code. Returns whether the account had it.
pub async fn use_recovery_code(
    conn: &mut PgConnection,
    id: AccountId,
    hash: &[u8],
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "delete from recovery_codes where account_id = $1 and secret_hash = $2",
        id.0,
        hash,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Stores a login that waits for the second factor.
pub async fn insert_challenge(
    conn: &mut PgConnection,
    secret_hash: &[u8],
    (id, password_hash): (AccountId, &str),
    life_seconds: i64,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into login_challenges (secret_hash, account_id, password_hash, expires_at)
        values ($1, $2, $3, now() + make_interval(secs => $4))
        ",
        secret_hash,
        id.0,
        password_hash,
        life_seconds as f64,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// A login that waits, and has not expired.
pub async fn find_challenge(
    conn: &mut PgConnection,
    secret_hash: &[u8],
) -> sqlx::Result<Option<Challenge>> {
    sqlx::query_as!(
        Challenge,
        r#"
        select account_id "account_id: AccountId", password_hash
        from login_challenges
        where secret_hash = $1 and expires_at > now()
        "#,
        secret_hash,
    )
    .fetch_optional(conn)
    .await
}

/// The wrong codes of a login that waits, locked until the transaction ends; none: it has expired,
/// or was completed.
pub async fn lock_challenge(
    conn: &mut PgConnection,
    secret_hash: &[u8],
) -> sqlx::Result<Option<i32>> {
    sqlx::query_scalar!(
        "
        select tries from login_challenges
        where secret_hash = $1 and expires_at > now()
        for update
        ",
        secret_hash,
    )
    .fetch_optional(conn)
    .await
}

/// Counts a wrong code of a login.
pub async fn count_try(conn: &mut PgConnection, secret_hash: &[u8]) -> sqlx::Result<()> {
    sqlx::query!(
        "update login_challenges set tries = tries + 1 where secret_hash = $1",
        secret_hash
    )
    .execute(conn)
    .await?;
    Ok(())
}

pub async fn delete_challenge(conn: &mut PgConnection, secret_hash: &[u8]) -> sqlx::Result<()> {
    sqlx::query!("delete from login_challenges where secret_hash = $1", secret_hash)
        .execute(conn)
        .await?;
    Ok(())
}

/// The person of a session has proved who they are.
pub async fn step_up(
    conn: &mut PgConnection,
    account_id: AccountId,
    id: SessionId,
) -> sqlx::Result<()> {
    sqlx::query!(
        "update sessions set stepped_up_at = now() where account_id = $1 and id = $2",
        account_id.0,
        id.0,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// The persons of all other sessions must prove again who they are.
pub async fn step_down_others(
    conn: &mut PgConnection,
    account_id: AccountId,
    keep: SessionId,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update sessions
        set stepped_up_at = '-infinity'
        where account_id = $1 and id <> $2 and revoked_at is null
        ",
        account_id.0,
        keep.0,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Whether the person of a session has proved lately who they are.
pub async fn is_stepped_up(
    conn: &mut PgConnection,
    account_id: AccountId,
    id: SessionId,
    within_seconds: i64,
) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        select exists (
            select from sessions
            where account_id = $1 and id = $2 and revoked_at is null and expires_at > now()
                and stepped_up_at > now() - make_interval(secs => $3)
        ) "is_stepped_up!"
        "#,
        account_id.0,
        id.0,
        within_seconds as f64,
    )
    .fetch_one(conn)
    .await
}

/// The secrets of apps after this account, in the order of accounts.
pub async fn secrets(
    conn: &mut PgConnection,
    after: AccountId,
    limit: i64,
) -> sqlx::Result<Vec<(AccountId, Vec<u8>)>> {
    let rows = sqlx::query!(
        r#"
        select account_id "account_id: AccountId", secret "secret!"
        from totp
        where account_id > $1 and secret is not null
        order by account_id
        limit $2
        "#,
        after.0,
        limit,
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(|it| (it.account_id, it.secret)).collect())
}

/// Stores another encryption of an app's secret, unless the secret was changed meanwhile.
pub async fn replace_secret(
    conn: &mut PgConnection,
    id: AccountId,
    old: &[u8],
    new: &[u8],
) -> sqlx::Result<()> {
    sqlx::query!(
        "update totp set secret = $3 where account_id = $1 and secret = $2",
        id.0,
        old,
        new,
    )
    .execute(conn)
    .await?;
    Ok(())
}
