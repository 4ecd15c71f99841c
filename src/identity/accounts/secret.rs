//! Secrets of 256 random bits: refresh tokens, mailed tokens, device codes, and those of logins
//! that wait for a code. Only their SHA-256 is stored, which is enough for secrets that cannot be
//! guessed.

use rand::RngExt;
use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest, Sha256};

use fencepost_domain::limits;

/// Characters of base62 that hold 256 bits.
pub const RANDOM_CHARS: usize = 43;
/// The characters of secrets.
pub const BASE62: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
/// Prefix of refresh tokens.
pub const REFRESH_PREFIX: &str = "fp_refresh_";
/// Prefix of tokens of logins that wait for the second factor.
pub const LOGIN_PREFIX: &str = "fp_login_";
/// Prefix of device codes.
pub const DEVICE_PREFIX: &str = "fp_device_";
/// Prefix of mailed tokens.
pub const MAIL_PREFIX: &str = "fp_mail_";

/// This many random characters.
pub fn random_chars() -> impl Iterator<Item = char> {
    let mut rng = rand::rng();
    (0..RANDOM_CHARS).map(move |_| char::from(BASE62[rng.random_range(0..BASE62.len())]))
}

/// A new secret, shown only once.
#[must_use]
pub fn generate(prefix: &str) -> SecretString {
    let mut secret = prefix.to_owned();
    secret.extend(random_chars());
    SecretString::from(secret)
}

/// The stored hash of a secret.
#[must_use]
pub fn hash(secret: &SecretString) -> [u8; 32] {
    Sha256::digest(secret.expose_secret().as_bytes()).into()
}

/// Whether this has the form of such a secret.
#[must_use]
pub fn is_well_formed(secret: &SecretString, prefix: &str) -> bool {
    let text = secret.expose_secret();
    text.len() <= limits::MAX_SECRET_BYTES && text.starts_with(prefix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_never_the_same_and_never_shows_itself() {
        let (one, other) = (generate(REFRESH_PREFIX), generate(REFRESH_PREFIX));
        assert_ne!(hash(&one), hash(&other));
        assert!(is_well_formed(&one, REFRESH_PREFIX) && !is_well_formed(&one, MAIL_PREFIX));
        assert!(!format!("{one:?}").contains("fp_refresh_"));
    }
}
