//! Who accounts are at OpenID Connect providers.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use fencepost_domain::ids::{AccountId, IdentityId};

/// A person, as a provider knows them.
#[derive(Debug, Clone)]
pub struct Subject<'a> {
    pub issuer: &'a str,
    pub subject: &'a str,
    pub email: Option<&'a str>,
}

/// An identity of an account.
#[derive(Debug, Clone)]
pub struct IdentityRow {
    pub id: IdentityId,
    pub issuer: String,
    pub email: Option<String>,
    pub created_at: DateTime<Utc>,
    pub last_used_at: Option<DateTime<Utc>>,
}

/// The account of an identity.
#[derive(Clone)]
pub struct IdentifiedAccount {
    pub id: AccountId,
    pub password_hash: String,
    pub is_suspended: bool,
}

impl std::fmt::Debug for IdentifiedAccount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IdentifiedAccount").field("id", &self.id).finish_non_exhaustive()
    }
}

/// The account that has this identity, which is used now.
pub async fn use_identity(
    conn: &mut PgConnection,
    by: &Subject<'_>,
) -> sqlx::Result<Option<IdentifiedAccount>> {
    sqlx::query_as!(
        IdentifiedAccount,
        r#"
        update identities
        set last_used_at = now(), email = $3
        from accounts
        where accounts.id = identities.account_id and issuer = $1 and subject = $2
        returning accounts.id "id: AccountId", password_hash, suspended_at is not null "is_suspended!"
        "#,
        by.issuer,
        by.subject,
        by.email,
    )
    .fetch_optional(conn)
    .await
}

/// Links an identity to an account that has fewer than `max`. Returns whether it was linked.
///
/// # Errors
/// A violation of uniqueness, when an account has it.
pub async fn insert(
    conn: &mut PgConnection,
    account_id: AccountId,
    id: IdentityId,
    of: &Subject<'_>,
    max: i64,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        insert into identities (account_id, id, issuer, subject, email)
        select $1, $2, $3, $4, $5
        where (select count(*) from identities where account_id = $1) < $6
        ",
        account_id.0,
        id.0,
        of.issuer,
        of.subject,
        of.email,
        max,
    );
    Ok(done.execute(conn).await?.rows_affected() == 1)
}

/// An account's identities, oldest first: it has few.
pub async fn list(
    conn: &mut PgConnection,
    account_id: AccountId,
) -> sqlx::Result<Vec<IdentityRow>> {
    sqlx::query_as!(
        IdentityRow,
        r#"
        select id "id: IdentityId", issuer, email, created_at, last_used_at
        from identities
        where account_id = $1
        order by created_at, id
        "#,
        account_id.0,
    )
    .fetch_all(conn)
    .await
}

/// Removes an identity. Returns whether there was one.
pub async fn delete(
    conn: &mut PgConnection,
    account_id: AccountId,
    id: IdentityId,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "delete from identities where account_id = $1 and id = $2",
        account_id.0,
        id.0,
    );
    Ok(done.execute(conn).await?.rows_affected() == 1)
}

/// Removes all identities of an account. Returns how many.
pub async fn delete_all(conn: &mut PgConnection, account_id: AccountId) -> sqlx::Result<u64> {
    let done = sqlx::query!("delete from identities where account_id = $1", account_id.0);
    Ok(done.execute(conn).await?.rows_affected())
}
