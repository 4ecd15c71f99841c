//! Browsers that have logged in before. While many wait for a password to be compared, their
//! log-ins go before those of strangers.
//!
//! The token is made with the hash of the account's password: nothing is stored, and a new password
//! ends all tokens of the account. It gives no right, and a log-in with it counts as any other.

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use fencepost_domain::ids::AccountId;
use hmac::{Hmac, KeyInit, Mac};
use secrecy::{ExposeSecret, SecretString};
use sha2::Sha256;

use super::{Client, password::is_present};

/// The purpose of the token: its key signs nothing else.
const PURPOSE: &str = "fencepost known device";

/// The token of a browser that has just logged in; none: the account has no password.
pub(super) fn token(account_id: AccountId, password_hash: &str) -> Option<SecretString> {
    let mac = mac(account_id, password_hash)?.finalize().into_bytes();
    Some(BASE64_URL_SAFE_NO_PAD.encode(mac).into())
}

/// True if the client has logged in to this account before, with its present password.
pub(super) fn is_known(client: &Client, account_id: AccountId, password_hash: &str) -> bool {
    let token = client.device_token.as_ref();
    let token = token.and_then(|it| BASE64_URL_SAFE_NO_PAD.decode(it.expose_secret()).ok());
    let mac = mac(account_id, password_hash);
    token.zip(mac).is_some_and(|(token, mac)| mac.verify_slice(&token).is_ok())
}

/// None: there is no password, and so no secret.
fn mac(account_id: AccountId, password_hash: &str) -> Option<Hmac<Sha256>> {
    let key = Some(password_hash).filter(|it| is_present(it))?;
    let mac = <Hmac<Sha256> as KeyInit>::new_from_slice(key.as_bytes()).ok()?;
    Some(mac.chain_update(PURPOSE).chain_update(account_id.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_of_one_account_and_one_password() {
        let hash = |it: &str| format!("$argon2id$v=19$m=19456,t=2,p=1${it}");
        let (one, other) = (AccountId::generate(), AccountId::generate());
        let client = Client { device_token: token(one, &hash("a")), ..Client::default() };
        assert!(is_known(&client, one, &hash("a")));
        assert!(!is_known(&client, one, &hash("b")), "another password");
        assert!(!is_known(&client, other, &hash("a")), "another account");
        assert!(!is_known(&client, one, ""), "no password");
        assert!(!is_known(&Client::default(), one, &hash("a")));
        let forged = Client { device_token: Some("AAAA".into()), ..Client::default() };
        assert!(!is_known(&forged, one, &hash("a")));
    }
}
