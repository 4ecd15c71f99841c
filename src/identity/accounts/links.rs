//! Links in mails: who follows one reads the address.

use fencepost_domain::{error::Error, ids::AccountId};
use fencepost_store::{self as store, connection::pools::Pool, people::accounts::Purpose};
use secrecy::SecretString;
use sqlx::PgConnection;

use super::secret::{self, MAIL_PREFIX};

/// Refuses a link that is unknown, used or expired; it stays unused.
pub(super) async fn check(
    pool: &Pool,
    purpose: Purpose,
    token: &SecretString,
) -> Result<(), Error> {
    let mut conn = pool.acquire().await?;
    let hash = secret::hash(token);
    match store::people::accounts::has_mail_token(&mut conn, purpose, &hash).await? {
        true => Ok(()),
        false => Err(Error::InvalidLink),
    }
}

/// Uses up a link. Returns its account.
pub(super) async fn follow(
    conn: &mut PgConnection,
    purpose: Purpose,
    token: &SecretString,
) -> Result<AccountId, Error> {
    if !secret::is_well_formed(token, MAIL_PREFIX) {
        return Err(Error::InvalidLink);
    }
    let used = store::people::accounts::use_mail_token(conn, purpose, &secret::hash(token)).await?;
    used.ok_or(Error::InvalidLink)
}
