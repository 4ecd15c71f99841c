//! Passkeys of accounts, and the challenges that were used.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use fencepost_domain::ids::{AccountId, PasskeyId};

/// A passkey of an account.
#[derive(Debug, Clone)]
pub struct PasskeyRow {
    pub id: PasskeyId,
    pub name: String,
    pub credential_id: Vec<u8>,
    pub created_at: DateTime<Utc>,
    pub last_used_at: Option<DateTime<Utc>>,
}

/// A passkey that someone shows, and its account.
#[derive(Clone)]
pub struct PasskeyOwner {
    pub id: PasskeyId,
    pub account_id: AccountId,
    pub public_key: Vec<u8>,
    pub sign_count: i64,
    /// Null: it was added before this was stored, and not used since.
    pub may_be_copied: Option<bool>,
    /// Whether it logs in without the password.
    pub logs_in_alone: bool,
    pub password_hash: String,
    pub is_suspended: bool,
}

impl std::fmt::Debug for PasskeyOwner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PasskeyOwner").field("id", &self.id).finish_non_exhaustive()
    }
}

/// An account's passkeys, oldest first.
pub async fn list(conn: &mut PgConnection, id: AccountId) -> sqlx::Result<Vec<PasskeyRow>> {
    sqlx::query_as!(
        PasskeyRow,
        r#"
        select id "id: PasskeyId", name, credential_id, created_at, last_used_at
        from passkeys
        where account_id = $1
        order by id
        "#,
        id.0,
    )
    .fetch_all(conn)
    .await
}

/// A passkey to add.
#[derive(Debug, Clone, Copy)]
pub struct NewPasskey<'a> {
    pub id: PasskeyId,
    pub name: &'a str,
    pub credential_id: &'a [u8],
    pub public_key: &'a [u8],
    pub sign_count: i64,
    /// Null: it is not known.
    pub may_be_copied: Option<bool>,
}

/// Adds a passkey to an account that has fewer than `max`.
///
/// # Errors
/// A violation of uniqueness, when an account has it.
pub async fn insert(
    conn: &mut PgConnection,
    account_id: AccountId,
    new: NewPasskey<'_>,
    max: i64,
) -> sqlx::Result<Option<PasskeyRow>> {
    sqlx::query_as!(
        PasskeyRow,
        r#"
        insert into passkeys (
            account_id, id, name, credential_id, public_key, sign_count, may_be_copied
        )
        select $1, $2, $3, $4, $5, $6, $8
        where (select count(*) from passkeys where account_id = $1) < $7
        returning id "id: PasskeyId", name, credential_id, created_at, last_used_at
        "#,
        account_id.0,
        new.id.0,
        new.name,
        new.credential_id,
        new.public_key,
        new.sign_count,
        max,
        new.may_be_copied,
    )
    .fetch_optional(conn)
    .await
}

/// The passkey with this credential id. It names its account.
pub async fn find(
    conn: &mut PgConnection,
    credential_id: &[u8],
) -> sqlx::Result<Option<PasskeyOwner>> {
    sqlx::query_as!(
        PasskeyOwner,
        r#"
        select passkeys.id "id: PasskeyId", account_id "account_id: AccountId", public_key,
               sign_count, may_be_copied, logs_in_alone, password_hash, suspended_at is not null "is_suspended!"
        from passkeys
        join accounts on accounts.id = passkeys.account_id
        where credential_id = $1
        "#,
        credential_id,
    )
    .fetch_optional(conn)
    .await
}

/// Records a use. Returns false if the passkey is gone, or its counter has gone past this.
pub async fn record_use(
    conn: &mut PgConnection,
    account_id: AccountId,
    id: PasskeyId,
    (sign_count, may_be_copied): (i64, bool),
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        update passkeys
        set last_used_at = now(), sign_count = $3, may_be_copied = $4
        where account_id = $1 and id = $2 and (sign_count < $3 or (sign_count = 0 and $3 = 0))
        ",
        account_id.0,
        id.0,
        sign_count,
        may_be_copied,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Removes a passkey. Returns whether the account had it.
pub async fn delete(
    conn: &mut PgConnection,
    account_id: AccountId,
    id: PasskeyId,
) -> sqlx::Result<bool> {
    let done =
        sqlx::query!("delete from passkeys where account_id = $1 and id = $2", account_id.0, id.0)
            .execute(conn)
            .await?;
    Ok(done.rows_affected() == 1)
}

/// Removes all passkeys of an account. Returns how many.
pub async fn delete_all(conn: &mut PgConnection, id: AccountId) -> sqlx::Result<u64> {
    let done = sqlx::query!("delete from passkeys where account_id = $1", id.0);
    Ok(done.execute(conn).await?.rows_affected())
}

/// From now on, the account's passkeys log in after the password only.
pub async fn require_password(conn: &mut PgConnection, id: AccountId) -> sqlx::Result<()> {
    sqlx::query!(
        "update passkeys set logs_in_alone = false where account_id = $1 and logs_in_alone",
        id.0
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// From now on, this passkey logs in without the password, too.
pub async fn log_in_alone(
    conn: &mut PgConnection,
    account_id: AccountId,
    id: PasskeyId,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update passkeys set logs_in_alone = true
        where account_id = $1 and id = $2 and not logs_in_alone
        ",
        account_id.0,
        id.0,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Uses up a challenge that is valid for `life_seconds`. Returns false if it was used already.
pub async fn use_challenge(
    conn: &mut PgConnection,
    challenge: &str,
    life_seconds: i64,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        insert into used_challenges (challenge, expires_at)
        values ($1, now() + 2 * make_interval(secs => $2))
        on conflict do nothing
        ",
        challenge,
        life_seconds as f64,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}
