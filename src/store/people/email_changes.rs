//! Changes of accounts' e-mail addresses, until both addresses have confirmed them.

use sqlx::PgConnection;

use fencepost_domain::ids::AccountId;

/// A change that an address has confirmed.
#[derive(Debug, Clone)]
pub struct Confirmed {
    pub new_email: String,
    /// Whether no other confirmation is missing.
    pub is_complete: bool,
}

/// Stores a change in place of an earlier one. Without `old_hash`, the old address need not confirm
/// it.
pub async fn replace(
    conn: &mut PgConnection,
    id: AccountId,
    new_email: &str,
    (new_hash, old_hash): (&[u8], Option<&[u8]>),
    life_seconds: i64,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into email_changes (account_id, new_email, new_hash, old_hash, expires_at)
        values ($1, $2, $3, $4, now() + make_interval(secs => $5))
        on conflict (account_id) do update
        set new_email = excluded.new_email, new_hash = excluded.new_hash,
            old_hash = excluded.old_hash, expires_at = excluded.expires_at
        ",
        id.0,
        new_email,
        new_hash,
        old_hash,
        life_seconds as f64,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Gives a change to this address the token that is mailed to the new address, or to the old one.
/// Returns whether that address must still confirm it.
pub async fn set_hash(
    conn: &mut PgConnection,
    id: AccountId,
    new_email: &str,
    hash: &[u8],
    is_of_new: bool,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        update email_changes
        set new_hash = case when $4 then $3 else new_hash end,
            old_hash = case when $4 then old_hash else $3 end
        where account_id = $1 and new_email = $2 and expires_at > now()
            and case when $4 then new_hash else old_hash end is not null
        ",
        id.0,
        new_email,
        hash,
        is_of_new,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() > 0)
}

/// Confirms a change with one of its tokens; none: it is unknown, used or expired, or of another
/// account.
pub async fn confirm(
    conn: &mut PgConnection,
    id: AccountId,
    hash: &[u8],
) -> sqlx::Result<Option<Confirmed>> {
    sqlx::query_as!(
        Confirmed,
        r#"
        update email_changes
        set new_hash = nullif(new_hash, $2), old_hash = nullif(old_hash, $2)
        where account_id = $1 and expires_at > now() and $2 in (new_hash, old_hash)
        returning new_email, new_hash is null and old_hash is null "is_complete!"
        "#,
        id.0,
        hash,
    )
    .fetch_optional(conn)
    .await
}

pub async fn delete(conn: &mut PgConnection, id: AccountId) -> sqlx::Result<()> {
    sqlx::query!("delete from email_changes where account_id = $1", id.0).execute(conn).await?;
    Ok(())
}
