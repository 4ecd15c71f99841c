//! The password that the person of a session shows once more.

use fencepost_domain::error::Error;
use fencepost_store::{self as store, connection::pools::Pool};
use secrecy::SecretString;

use super::{password::Passwords, token::Bearer};

/// The present passwords of accounts.
#[derive(Clone)]
pub(super) struct OwnPassword {
    pub(super) pool: Pool,
    pub(super) passwords: Passwords,
}

impl OwnPassword {
    /// True if this is the password of the session's account.
    pub(super) async fn is_right(
        &self,
        bearer: Bearer,
        password: SecretString,
    ) -> Result<bool, Error> {
        let credentials = {
            let mut conn = self.pool.acquire().await?;
            store::people::accounts::credentials(&mut conn, bearer.account_id).await?
        };
        let hashes = credentials.into_iter().map(|it| it.password_hash).collect();
        let client = bearer.account_id.to_string();
        Ok(self.passwords.compare(&client, password, hashes).await?.is_some())
    }
}
