//! Accounts, and the tokens that are mailed to them.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use fencepost_domain::ids::{AccountId, ProjectId};

#[derive(Debug, Clone)]
pub struct Account {
    pub id: AccountId,
    pub email: String,
    pub created_at: DateTime<Utc>,
    /// When the address was verified.
    pub verified_at: Option<DateTime<Utc>>,
}

/// An account, and its password hash.
#[derive(Clone)]
pub struct Credentials {
    pub id: AccountId,
    pub password_hash: String,
    /// Whether its address is verified.
    pub is_verified: bool,
    /// Whether the operator has suspended it.
    pub is_suspended: bool,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("id", &self.id).finish_non_exhaustive()
    }
}

/// The purpose of a mailed token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To verify an address.
    Verify,
    Reset,
}

impl Purpose {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Verify => "verify",
            Self::Reset => "reset",
        }
    }
}

/// Creates an account with an unverified address.
pub async fn insert(
    conn: &mut PgConnection,
    id: AccountId,
    email: &str,
    password_hash: &str,
) -> sqlx::Result<Account> {
    sqlx::query_as!(
        Account,
        r#"
        insert into accounts (id, email, password_hash)
        values ($1, $2, $3)
        returning id "id: AccountId", email, created_at, verified_at
        "#,
        id.0,
        email,
        password_hash,
    )
    .fetch_one(conn)
    .await
}

/// Accounts that only claim an address may log in if they are among this many of its oldest, or of
/// its newest: later claims lock out no earlier one, and earlier ones no later one.
pub const MAX_CLAIMS_OF_AN_AGE: i64 = 3;

/// Accounts that a login with this address may mean: the one that has verified it first; then, of
/// those that only claim it, some of the oldest and of the newest.
pub async fn candidates(conn: &mut PgConnection, email: &str) -> sqlx::Result<Vec<Credentials>> {
    sqlx::query_as!(
        Credentials,
        r#"
        select id "id: AccountId", password_hash, verified_at is not null "is_verified!",
               suspended_at is not null "is_suspended!"
        from accounts
        where email = $1 and (
            verified_at is not null
            or id = any(array(
                select id from accounts
                where email = $1 and verified_at is null
                order by created_at
                limit $2
            ))
            or id = any(array(
                select id from accounts
                where email = $1 and verified_at is null
                order by created_at desc
                limit $2
            ))
        )
        order by verified_at is null, created_at
        "#,
        email,
        MAX_CLAIMS_OF_AN_AGE,
    )
    .fetch_all(conn)
    .await
}

/// The accounts whose password a holder of this address may reset: the one that has verified it,
/// or else, of those with it that have not, the `of_each` oldest and the `of_each` newest, newest
/// first: strangers who sign up with it later must not hide an earlier account.
pub async fn with_address(
    conn: &mut PgConnection,
    email: &str,
    of_each: i64,
) -> sqlx::Result<Vec<Account>> {
    sqlx::query_as!(
        Account,
        r#"
        with claims as materialized (
            select id, email, created_at, verified_at,
                   row_number() over (order by created_at) as from_oldest,
                   row_number() over (order by created_at desc) as from_newest
            from accounts
            where email = $1 and (
                verified_at is not null
                or not exists (select from accounts where email = $1 and verified_at is not null)
            )
        )
        select id "id: AccountId", email, created_at, verified_at
        from claims
        where from_oldest <= $2 or from_newest <= $2
        order by created_at desc
        "#,
        email,
        of_each,
    )
    .fetch_all(conn)
    .await
}

/// The limits of mails that an account has sent.
#[derive(Debug, Clone, Copy)]
pub struct Sender {
    /// Whether its address is verified.
    pub is_verified: bool,
    /// Whether it was created lately.
    pub is_new: bool,
}

/// The sender of a mail. An account is new for this many days.
pub async fn sender(
    conn: &mut PgConnection,
    id: AccountId,
    new_days: i32,
) -> sqlx::Result<Option<Sender>> {
    sqlx::query_as!(
        Sender,
        r#"
        select verified_at is not null "is_verified!",
               created_at > now() - make_interval(days => $2) "is_new!"
        from accounts
        where id = $1
        "#,
        id.0,
        new_days,
    )
    .fetch_optional(conn)
    .await
}

pub async fn find(conn: &mut PgConnection, id: AccountId) -> sqlx::Result<Option<Account>> {
    sqlx::query_as!(
        Account,
        r#"
        select id "id: AccountId", email, created_at, verified_at
        from accounts
        where id = $1
        "#,
        id.0,
    )
    .fetch_optional(conn)
    .await
}

/// Locks an account.
pub async fn lock(conn: &mut PgConnection, id: AccountId) -> sqlx::Result<()> {
    sqlx::query!("select id from accounts where id = $1 for no key update", id.0)
        .fetch_optional(conn)
        .await?;
    Ok(())
}

/// The password hash of an account.
pub async fn credentials(
    conn: &mut PgConnection,
    id: AccountId,
) -> sqlx::Result<Option<Credentials>> {
    sqlx::query_as!(
        Credentials,
        r#"
        select id "id: AccountId", password_hash, verified_at is not null "is_verified!",
               suspended_at is not null "is_suspended!"
        from accounts
        where id = $1
        "#,
        id.0,
    )
    .fetch_optional(conn)
    .await
}

/// Whether an account has verified this address.
pub async fn is_address_verified(conn: &mut PgConnection, email: &str) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        select exists (
            select from accounts where email = $1 and verified_at is not null
        ) "exists!"
        "#,
        email,
    )
    .fetch_one(conn)
    .await
}

/// Stores another password.
pub async fn set_password(
    conn: &mut PgConnection,
    id: AccountId,
    password_hash: &str,
) -> sqlx::Result<()> {
    sqlx::query!("update accounts set password_hash = $2 where id = $1", id.0, password_hash)
        .execute(conn)
        .await?;
    Ok(())
}

/// Stores another hash of the same password, unless the password was changed meanwhile. Returns
/// whether it did.
pub async fn replace_hash(
    conn: &mut PgConnection,
    id: AccountId,
    old: &str,
    new: &str,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "update accounts set password_hash = $3 where id = $1 and password_hash = $2",
        id.0,
        old,
        new,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Locks an account until the transaction ends, if its password still has this hash, and it is not
/// suspended.
pub async fn lock_if_hash(
    conn: &mut PgConnection,
    id: AccountId,
    password_hash: &str,
) -> sqlx::Result<bool> {
    let found = sqlx::query!(
        "
        select id from accounts
        where id = $1 and password_hash = $2 and suspended_at is null
        for no key update
        ",
        id.0,
        password_hash,
    );
    Ok(found.fetch_optional(conn).await?.is_some())
}

/// Invalidates the password reset tokens of an account.
pub async fn spend_resets(conn: &mut PgConnection, id: AccountId) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update mail_tokens
        set used_at = now()
        where account_id = $1 and purpose = 'reset' and used_at is null
        ",
        id.0,
    )
    .execute(conn)
    .await?;
    Ok(())
}

pub async fn record_login(conn: &mut PgConnection, id: AccountId) -> sqlx::Result<()> {
    sqlx::query!("update accounts set last_login_at = now() where id = $1", id.0)
        .execute(conn)
        .await?;
    Ok(())
}

/// Marks the address as verified. Returns whether that is new.
///
/// # Errors
/// A unique violation when another account has verified the address.
pub async fn verify(conn: &mut PgConnection, id: AccountId) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "update accounts set verified_at = now() where id = $1 and verified_at is null",
        id.0,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Changes the address of an account, which has verified the new one.
///
/// # Errors
/// A unique violation when another account has verified the address.
pub async fn set_email(conn: &mut PgConnection, id: AccountId, email: &str) -> sqlx::Result<()> {
    sqlx::query!("update accounts set email = $2, verified_at = now() where id = $1", id.0, email)
        .execute(conn)
        .await?;
    Ok(())
}

/// Invalidates all mailed tokens of an account.
pub async fn spend_mail_tokens(conn: &mut PgConnection, id: AccountId) -> sqlx::Result<()> {
    sqlx::query!(
        "update mail_tokens set used_at = now() where account_id = $1 and used_at is null",
        id.0,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Suspends an account, or ends its suspension. Returns whether it exists.
pub async fn suspend(
    conn: &mut PgConnection,
    id: AccountId,
    is_suspended: bool,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        update accounts
        set suspended_at = case when $2 then coalesce(suspended_at, now()) end
        where id = $1
        ",
        id.0,
        is_suspended,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// An account as the operator sees it.
#[derive(Debug, Clone)]
pub struct ListedAccount {
    pub id: AccountId,
    pub email: String,
    pub created_at: DateTime<Utc>,
    pub verified_at: Option<DateTime<Utc>>,
    pub suspended_at: Option<DateTime<Utc>>,
    pub last_login_at: Option<DateTime<Utc>>,
    /// Projects that it is a member of.
    pub projects: i64,
}

/// Accounts after this place, oldest first; only of this address, if one is given.
pub async fn list(
    conn: &mut PgConnection,
    after: (DateTime<Utc>, AccountId),
    email: Option<&str>,
    limit: i64,
) -> sqlx::Result<Vec<ListedAccount>> {
    sqlx::query_as!(
        ListedAccount,
        r#"
        select id "id: AccountId", email, created_at, verified_at, suspended_at, last_login_at,
               (select count(project_id) from members where account_id = accounts.id) "projects!"
        from accounts
        where (created_at, id) > ($1, $2) and ($3::text is null or email = $3)
        order by created_at, id
        limit $4
        "#,
        after.0,
        after.1.0,
        email,
        limit,
    )
    .fetch_all(conn)
    .await
}

/// Deletes an account, with its sessions and memberships.
pub async fn delete(conn: &mut PgConnection, id: AccountId) -> sqlx::Result<()> {
    sqlx::query!("delete from accounts where id = $1", id.0).execute(conn).await?;
    Ok(())
}

/// Stores a token that is mailed.
pub async fn insert_mail_token(
    conn: &mut PgConnection,
    account_id: AccountId,
    purpose: Purpose,
    secret_hash: &[u8],
    life_seconds: i64,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into mail_tokens (secret_hash, account_id, purpose, expires_at)
        values ($1, $2, $3, now() + make_interval(secs => $4))
        ",
        secret_hash,
        account_id.0,
        purpose.name(),
        life_seconds as f64,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Whether a mailed token can be used.
pub async fn has_mail_token(
    conn: &mut PgConnection,
    purpose: Purpose,
    secret_hash: &[u8],
) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        select exists (
            select from mail_tokens
            where secret_hash = $1 and purpose = $2 and used_at is null and expires_at > now()
        ) "exists!"
        "#,
        secret_hash,
        purpose.name(),
    )
    .fetch_one(conn)
    .await
}

/// Uses up a mailed token, and returns its account; none if it is unknown, used or expired.
pub async fn use_mail_token(
    conn: &mut PgConnection,
    purpose: Purpose,
    secret_hash: &[u8],
) -> sqlx::Result<Option<AccountId>> {
    sqlx::query_scalar!(
        r#"
        update mail_tokens
        set used_at = now()
        where secret_hash = $1 and purpose = $2 and used_at is null and expires_at > now()
        returning account_id "account_id: AccountId"
        "#,
        secret_hash,
        purpose.name(),
    )
    .fetch_optional(conn)
    .await
}

/// Projects that this account is the last owner of, and whether they have other members.
pub async fn solely_owned(
    conn: &mut PgConnection,
    id: AccountId,
) -> sqlx::Result<Vec<(ProjectId, bool)>> {
    let rows = sqlx::query!(
        r#"
        select own.project_id "project_id: ProjectId",
               exists (
                   select from members other
                   where other.project_id = own.project_id and other.account_id <> $1
               ) "has_others!"
        from members own
        join projects project on project.id = own.project_id and project.deleted_at is null
        where own.account_id = $1 and own.role = 'owner' and not exists (
            select from members other
            where other.project_id = own.project_id and other.account_id <> $1
                and other.role = 'owner'
        )
        "#,
        id.0,
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(|it| (it.project_id, it.has_others)).collect())
}
