//! What happened to an account: entries are added, never changed, and read by its owner.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use fencepost_domain::ids::{AccountId, AuditId};

/// An event of an account, and its origin.
#[derive(Debug, Clone, Default)]
pub struct NewAccountEntry {
    /// Such as `login.succeeded`.
    pub action: &'static str,
    /// Network address of the client; none: the operator made the change.
    pub address: Option<String>,
    pub user_agent: Option<String>,
    pub request_id: Option<String>,
}

/// An entry.
#[derive(Debug, Clone)]
pub struct AccountLogRow {
    pub id: AuditId,
    pub at: DateTime<Utc>,
    pub action: String,
    pub address: Option<String>,
    pub user_agent: Option<String>,
    pub request_id: Option<String>,
}

/// How many entries of an action an account has of the last day.
pub async fn count_last_day(
    conn: &mut PgConnection,
    account_id: AccountId,
    action: &str,
) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        select count(*) "count!"
        from account_log
        where account_id = $1 and action = $2 and at > now() - interval '1 day'
        "#,
        account_id.0,
        action,
    )
    .fetch_one(conn)
    .await
}

/// Adds an entry to an account's log, unless it has `max_a_day` of the same action within the last
/// day: strangers cause some, as failed logins.
pub async fn insert(
    conn: &mut PgConnection,
    account_id: AccountId,
    entry: &NewAccountEntry,
    max_a_day: i64,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into account_log (account_id, id, action, address, user_agent, request_id)
        select $1, $2, $3, $4, $5, $6
        where $7 > (
            select count(*)
            from (
                select from account_log
                where account_id = $1 and action = $3 and at > now() - interval '1 day'
                limit $7
            ) earlier
        )
        ",
        account_id.0,
        AuditId::generate().0,
        entry.action,
        entry.address,
        entry.user_agent,
        entry.request_id,
        max_a_day,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// The newest entries of an account.
pub async fn newest(
    conn: &mut PgConnection,
    account_id: AccountId,
    limit: i64,
) -> sqlx::Result<Vec<AccountLogRow>> {
    sqlx::query_as!(
        AccountLogRow,
        r#"
        select id "id: AuditId", at, action, address, user_agent, request_id
        from account_log
        where account_id = $1
        order by id desc
        limit $2
        "#,
        account_id.0,
        limit,
    )
    .fetch_all(conn)
    .await
}
