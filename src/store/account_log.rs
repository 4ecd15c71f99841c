//! What happened to an account: entries are added, never changed, and read by its owner.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::ids::{AccountId, AuditId};

/// What happened, and from where.
#[derive(Debug, Clone, Default)]
pub struct NewAccountEntry {
    /// Such as `login.succeeded`.
    pub action: &'static str,
    /// Of the client; none: the operator.
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

/// Adds an entry to the logs of these accounts, but to none that has `max_an_hour` of the same
/// action within the last hour: strangers cause some of them.
pub async fn insert(
    conn: &mut PgConnection,
    accounts: &[AccountId],
    entry: &NewAccountEntry,
    max_an_hour: i64,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into account_log (account_id, id, action, address, user_agent, request_id)
        select account_id, id, $3, $4, $5, $6
        from unnest($1::uuid[], $2::uuid[]) as added(account_id, id)
        where $7 > (
            select count(*) from account_log earlier
            where earlier.account_id = added.account_id and earlier.action = $3
                and earlier.at > now() - interval '1 hour'
        )
        ",
        &accounts.iter().map(|it| it.0).collect::<Vec<Uuid>>(),
        &accounts.iter().map(|_| AuditId::generate().0).collect::<Vec<Uuid>>(),
        entry.action,
        entry.address,
        entry.user_agent,
        entry.request_id,
        max_an_hour,
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
