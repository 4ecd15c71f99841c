//! The keys that sign access tokens: nodes share them, and replace an old one.

use std::sync::Arc;

use fencepost_domain::limits::ACCESS_TOKEN_SECONDS;
use fencepost_net::seal::{MasterKeys, OtherMasterKey};
use fencepost_store::{
    self as store,
    connection::{nodes::SigningKey, pools::Pool},
};
use sqlx::PgConnection;
use uuid::Uuid;

use super::token::{self, KEY_BYTES, KNOWN_KEYS, Tokens};

/// A signing key is replaced after this many seconds (30 days).
const SIGNING_KEY_SECONDS: i64 = 30 * 86_400;
/// Signing keys that one command encrypts: there are never as many.
const MAX_SEALED_KEYS: i64 = 1_000;

/// The signing keys of all nodes.
#[derive(Clone)]
pub struct SigningKeys {
    pub(super) pool: Pool,
    pub(super) tokens: Tokens,
    pub(super) master_keys: Arc<MasterKeys>,
}

impl SigningKeys {
    /// Refreshes the signing keys: replaces an old one, and reads those of other nodes. A key that
    /// this node cannot decrypt is none to it: it refuses the tokens.
    pub async fn refresh(&self) -> sqlx::Result<()> {
        let mut conn = self.pool.acquire().await?;
        let stored = store::connection::nodes::signing_keys(&mut conn, KNOWN_KEYS).await?;
        // With another master key than the other nodes, it would lock them out.
        if stored.iter().all(|it| self.open(it).is_ok()) {
            let (id, bytes) = token::new_key();
            let secret = self.master_keys.seal(&signing_key_place(id), &bytes);
            let (max_age, keep) = (SIGNING_KEY_SECONDS, ACCESS_TOKEN_SECONDS * 2);
            store::connection::nodes::rotate_signing_keys(&mut conn, id, &secret, max_age, keep)
                .await?;
        }
        let stored = store::connection::nodes::signing_keys(&mut conn, KNOWN_KEYS).await?;
        let (stored_keys, mut known) = (stored.len(), Vec::new());
        for key in stored {
            match self.open(&key) {
                Ok(secret) => known.push(SigningKey { secret, ..key }),
                Err(error) => {
                    tracing::error!(key.id = %key.id, %error, "signing key cannot be decrypted");
                }
            }
        }
        self.tokens.know(&known, stored_keys);
        Ok(())
    }

    fn open(&self, key: &SigningKey) -> Result<Vec<u8>, OtherMasterKey> {
        self.master_keys.open(&signing_key_place(key.id), &key.secret, KEY_BYTES)
    }
}

/// Encrypts all signing keys with the first master key: those that are plain, and those that
/// another master key has encrypted. Returns how many.
///
/// # Errors
/// When one is encrypted with a key that is not given, or the database does not answer.
pub async fn seal_signing_keys(
    conn: &mut PgConnection,
    master_keys: &MasterKeys,
) -> anyhow::Result<usize> {
    let mut sealed = 0;
    for key in store::connection::nodes::signing_keys(conn, MAX_SEALED_KEYS).await? {
        if master_keys.is_current(&key.secret, KEY_BYTES) {
            continue;
        }
        let place = signing_key_place(key.id);
        let plain = master_keys.open(&place, &key.secret, KEY_BYTES)?;
        let secret = master_keys.seal(&place, &plain);
        store::connection::nodes::replace_signing_key(conn, key.id, &secret).await?;
        sealed += 1;
    }
    Ok(sealed)
}

/// The place that a signing key is sealed for: in another row it cannot be decrypted.
fn signing_key_place(id: Uuid) -> String {
    format!("signing_keys/{id}")
}
