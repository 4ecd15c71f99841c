//! Codes of second factors: those of authenticator apps (TOTP, RFC 6238), and recovery codes.

use fencepost_domain::{
    error::Error,
    ids::AccountId,
    limits::{MAX_CODE_CHARS, RECOVERY_CODES},
};
use fencepost_net::seal::MasterKeys;
use fencepost_signals::limiter::Charge;
use fencepost_store as store;
use rand::RngExt;
use secrecy::{ExposeSecret, SecretString};
use sqlx::PgConnection;
use totp_rs::{Builder, Secret, Totp};

use super::{CODES_PER_ACCOUNT, Client, TRIES_PER_PAIR, secret, throttle::charge};

/// Bytes of a secret that an app shares: as long as the hash (RFC 4226, section 4).
pub(super) const TOTP_SECRET_BYTES: usize = 20;
/// How authenticator apps name the account's provider.
const ISSUER: &str = "Fencepost";
/// Characters of a recovery code: 80 bits in base32.
const RECOVERY_CODE_CHARS: usize = 16;
/// Crockford's: people mistake none of them for another.
const BASE32: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";

/// The row in which an app's secret is stored. The secret is encrypted for it alone.
pub(super) fn row_of_secret(id: AccountId) -> String {
    format!("totp/{}", id.0)
}

pub(super) fn app(secret: &[u8], email: &str) -> Result<Totp, Error> {
    let secret = Secret::new(secret.into());
    let builder = Builder::new().with_secret(secret).with_issuer(Some(ISSUER));
    // The form `issuer:name` has one colon.
    let name = email.replace(':', " ");
    builder.with_account_name(name).build().map_err(Error::internal)
}

fn new_recovery_code() -> String {
    let mut rng = rand::rng();
    let mut code = String::with_capacity(RECOVERY_CODE_CHARS + RECOVERY_CODE_CHARS / 4);
    for place in 0..RECOVERY_CODE_CHARS {
        if place > 0 && place % 4 == 0 {
            code.push('-');
        }
        code.push(char::from(BASE32[rng.random_range(0..BASE32.len())]));
    }
    code
}

/// A code as it was typed, without spaces and hyphens.
pub(super) fn typed(code: &SecretString) -> SecretString {
    let kept = code.expose_secret().chars().take(MAX_CODE_CHARS);
    let kept = kept.filter(|it| !it.is_whitespace() && *it != '-');
    kept.collect::<String>().to_lowercase().into()
}

pub(super) fn is_recovery_code(code: &SecretString) -> bool {
    code.expose_secret().len() == RECOVERY_CODE_CHARS
}

/// Replaces the recovery codes of an account. Returns the new ones.
pub(super) async fn replace_recovery_codes(
    conn: &mut PgConnection,
    id: AccountId,
) -> sqlx::Result<Vec<String>> {
    let codes: Vec<String> = (0..RECOVERY_CODES).map(|_| new_recovery_code()).collect();
    let hash = |code: &String| secret::hash(&typed(&code.as_str().into())).to_vec();
    let hashes: Vec<Vec<u8>> = codes.iter().map(hash).collect();
    store::people::second_factors::replace_recovery_codes(conn, id, &hashes).await?;
    Ok(codes)
}

/// Deletes an account's app, passkeys and recovery codes. Returns whether logins needed them.
pub(super) async fn remove_all(conn: &mut PgConnection, id: AccountId) -> sqlx::Result<bool> {
    // Locked first: recovery codes that are replaced meanwhile must not outlive the rest.
    store::people::accounts::lock(conn, id).await?;
    let was_required = store::people::second_factors::is_required(conn, id).await?;
    store::people::second_factors::remove_totp(conn, id).await?;
    store::people::passkeys::delete_all(conn, id).await?;
    store::people::second_factors::delete_recovery_codes(conn, id).await?;
    Ok(was_required)
}

/// Deletes the recovery codes of an account without a second factor, whose row is locked.
pub(super) async fn remove_unneeded_recovery_codes(
    conn: &mut PgConnection,
    id: AccountId,
) -> sqlx::Result<()> {
    match store::people::second_factors::is_required(conn, id).await? {
        true => Ok(()),
        false => store::people::second_factors::delete_recovery_codes(conn, id).await,
    }
}

/// The secret of an app.
pub(super) fn open_totp(
    master_keys: &MasterKeys,
    id: AccountId,
    stored: &[u8],
) -> Result<Vec<u8>, Error> {
    master_keys.open(&row_of_secret(id), stored, TOTP_SECRET_BYTES).map_err(|_| {
        tracing::error!(account.id = %id, "secret of an authenticator app cannot be decrypted");
        Error::NotReady("this node cannot check codes: it has another master key")
    })
}

/// The time step of a code, if it is one of now, or of 30 s earlier or later.
pub(super) fn step_of(secret: &[u8], code: &SecretString, now: i64) -> Result<Option<i64>, Error> {
    let step = app(secret, "")?.check(code.expose_secret(), u64::try_from(now).unwrap_or(0));
    Ok(step.and_then(|it| i64::try_from(it).ok()))
}

/// The limits on codes: by account and client, which a right code resets; and with it that of the
/// whole account. A recovery code cannot be guessed: it lets its owner in while others try codes.
/// `code` is one that [`typed`] has read.
pub(super) fn code_charges(
    id: AccountId,
    client: &Client,
    code: &SecretString,
) -> (Charge, Vec<Charge>) {
    let of_client = charge("code-pair", &format!("{id} {}", client.address), TRIES_PER_PAIR);
    let all = charge("codes", &id.to_string(), CODES_PER_ACCOUNT);
    let all = Some(all).filter(|_| !is_recovery_code(code));
    (of_client.clone(), std::iter::once(of_client).chain(all).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recovery_code_is_read_as_people_type_it() {
        let code = new_recovery_code();
        assert_eq!(code.len(), RECOVERY_CODE_CHARS + 3);
        let loud = format!(" {} ", code.to_uppercase().replace('-', " "));
        let [plain, loud] = [code.as_str(), &loud].map(|it| typed(&it.into()));
        assert_eq!(plain.expose_secret(), loud.expose_secret());
        assert!(is_recovery_code(&plain) && !is_recovery_code(&"123456".into()));
    }

    #[test]
    fn an_app_makes_the_codes_of_rfc_6238() {
        // Its test vectors have eight digits; the last six are ours.
        let app = app(b"12345678901234567890", "ada@example.com").expect("an app");
        assert_eq!(app.check("287082", 59), Some(1));
        assert_eq!(app.check("005924", 1_234_567_890), Some(41_152_263));
        assert_eq!(app.check("005924", 1_234_567_890 + 60), None);
    }
}
