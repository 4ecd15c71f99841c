//! API keys: `fp_live_` or `fp_test_`, 43 random base62 characters (256 bits), and 6 base62
//! characters of CRC-32 over all before them. So scanners and this server recognise junk without a
//! lookup. Only the SHA-256 of a key is stored.

use fencepost_domain::plan::TEST_MODE;
use sha2::{Digest, Sha256};

use super::secret::{BASE62, RANDOM_CHARS, random_chars};

/// SHA-256 of an API key.
pub type SecretHash = [u8; 32];

/// Prefix of keys of live projects.
pub const LIVE_PREFIX: &str = "fp_live_";
/// Prefix of keys of test projects.
pub const TEST_PREFIX: &str = "fp_test_";
const CHECKSUM_CHARS: usize = 6;
/// Characters that a list shows of a key, at its beginning and end.
const SHOWN_PREFIX_CHARS: usize = 12;
const SHOWN_END_CHARS: usize = 4;

/// A new key, shown only once. `mode` is its project's: `live` or `test`.
#[must_use]
pub fn generate(mode: &str) -> String {
    let mut key = if mode == TEST_MODE { TEST_PREFIX } else { LIVE_PREFIX }.to_owned();
    key.extend(random_chars());
    let checksum = checksum(&key);
    key + &checksum
}

fn checksum(text: &str) -> String {
    let mut rest = crc32fast::hash(text.as_bytes()) as usize;
    let mut digits = [BASE62[0]; CHECKSUM_CHARS];
    for digit in digits.iter_mut().rev() {
        *digit = BASE62[rest % BASE62.len()];
        rest /= BASE62.len();
    }
    digits.iter().copied().map(char::from).collect()
}

fn prefix_of(key: &str) -> Option<&'static str> {
    [LIVE_PREFIX, TEST_PREFIX].into_iter().find(|it| key.starts_with(it))
}

/// Whether this begins as a key does.
#[must_use]
pub fn has_prefix(key: &str) -> bool {
    prefix_of(key).is_some()
}

/// Whether this has the form of a key.
#[must_use]
pub fn is_well_formed(key: &str) -> bool {
    let Some(prefix) = prefix_of(key) else { return false };
    if !key.is_ascii() || key.len() != prefix.len() + RANDOM_CHARS + CHECKSUM_CHARS {
        return false;
    }
    let (body, end) = key.split_at(key.len() - CHECKSUM_CHARS);
    checksum(body) == end
}

/// The stored hash of a key.
#[must_use]
pub fn hash(key: &str) -> SecretHash {
    Sha256::digest(key.as_bytes()).into()
}

/// The beginning and end of a key, for lists.
#[must_use]
pub fn shown_parts(key: &str) -> (String, String) {
    let end = key.len().saturating_sub(SHOWN_END_CHARS);
    (key.chars().take(SHOWN_PREFIX_CHARS).collect(), key.get(end..).unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generated_key_is_well_formed_and_never_the_same() {
        let (one, other) = (generate("live"), generate("live"));
        assert!(is_well_formed(&one) && is_well_formed(&other));
        assert_ne!(one, other);
        assert_eq!(one.len(), 8 + 43 + 6);
    }

    #[test]
    fn a_mistyped_key_is_refused_without_a_look_up() {
        let key = generate("live");
        let mut typo = key.clone().into_bytes();
        typo[20] = if typo[20] == b'a' { b'b' } else { b'a' };
        assert!(!is_well_formed(&String::from_utf8(typo).expect("ascii")));
        assert!(!is_well_formed(&key[..key.len() - 1]));
        assert!(!is_well_formed(&key.replace("fp_live_", "fp_test_")));
        assert!(!is_well_formed(""));
        assert!(!is_well_formed("fp_live_ä"));
    }

    #[test]
    fn a_list_shows_too_little_of_a_key_to_guess_the_rest() {
        let key = generate("live");
        let (prefix, end) = shown_parts(&key);
        assert!(key.starts_with(&prefix) && key.ends_with(&end));
        assert!(prefix.len() + end.len() <= LIVE_PREFIX.len() + 8);
    }
}
