//! Encryption of secrets in the database, with a master key that is not in it. One of them signs
//! access tokens: who reads a backup cannot make any.

use anyhow::{Context, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest, Sha256};

/// Bytes of a master key.
pub const MASTER_KEY_BYTES: usize = 32;
/// Master keys that a node knows at most: the one that encrypts, and one that is being replaced.
pub const MAX_MASTER_KEYS: usize = 2;
/// The first byte of an encrypted secret, before its key's id and its nonce.
const VERSION: u8 = 1;
/// Bytes by which an encrypted secret names its master key.
const ID_BYTES: usize = 4;
const HEAD_BYTES: usize = 1 + ID_BYTES + NONCE_LEN;

/// The master keys of this node. The first one encrypts.
#[derive(Debug, Default)]
pub struct MasterKeys(Vec<MasterKey>);

#[derive(Debug)]
struct MasterKey {
    id: [u8; ID_BYTES],
    key: LessSafeKey,
}

/// A secret cannot be read with the master keys of this node: it is encrypted with another one,
/// was stored elsewhere, or was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is encrypted with another master key")]
pub struct OtherMasterKey;

impl MasterKeys {
    /// Reads one or two keys, each 32 bytes in base64 on a line of its own. The first encrypts.
    ///
    /// # Errors
    /// When there is none, or one is no key.
    pub fn parse(text: &SecretString) -> anyhow::Result<Self> {
        let lines = text.expose_secret().lines().map(str::trim).filter(|it| !it.is_empty());
        let keys: Vec<_> = lines.map(MasterKey::parse).collect::<anyhow::Result<_>>()?;
        ensure!(
            (1..=MAX_MASTER_KEYS).contains(&keys.len()),
            "there must be one or two master keys, each on a line of its own"
        );
        Ok(Self(keys))
    }

    /// Whether there is a master key.
    #[must_use]
    pub fn can_seal(&self) -> bool {
        !self.0.is_empty()
    }

    /// Encrypts a secret, if there is a master key. `place` says where it is stored: it can be read
    /// in no other place.
    #[must_use]
    pub fn seal(&self, place: &str, secret: &[u8]) -> Vec<u8> {
        let Some(master) = self.0.first() else { return secret.to_vec() };
        let nonce: [u8; NONCE_LEN] = rand::random();
        let mut sealed = [&[VERSION][..], &master.id, &nonce].concat();
        let mut text = secret.to_vec();
        let nonce = Nonce::assume_unique_for_key(nonce);
        master
            .key
            .seal_in_place_append_tag(nonce, Aad::from(place), &mut text)
            .unwrap_or_else(|_| unreachable!("a secret is short"));
        sealed.extend(text);
        sealed
    }

    /// Decrypts a secret of `plain_bytes` bytes. A stored value of that length is not encrypted: it
    /// is from a time without a master key.
    ///
    /// # Errors
    /// [`OtherMasterKey`].
    pub fn open(
        &self,
        place: &str,
        stored: &[u8],
        plain_bytes: usize,
    ) -> Result<Vec<u8>, OtherMasterKey> {
        if stored.len() == plain_bytes {
            return Ok(stored.to_vec());
        }
        let (head, text) = stored.split_at_checked(HEAD_BYTES).ok_or(OtherMasterKey)?;
        let is_of = |it: &&MasterKey| head[0] == VERSION && head[1..=ID_BYTES] == it.id;
        let master = self.0.iter().find(is_of).ok_or(OtherMasterKey)?;
        let nonce = Nonce::try_assume_unique_for_key(&head[1 + ID_BYTES..]);
        let nonce = nonce.map_err(|_| OtherMasterKey)?;
        let mut text = text.to_vec();
        let opened = master.key.open_in_place(nonce, Aad::from(place), &mut text);
        opened.map(|it| it.to_vec()).map_err(|_| OtherMasterKey)
    }

    /// A secret that is JSON of an object: what begins as one is not encrypted.
    ///
    /// # Errors
    /// [`OtherMasterKey`].
    pub fn open_object(&self, place: &str, stored: &[u8]) -> Result<Vec<u8>, OtherMasterKey> {
        let plain_bytes = if stored.first() == Some(&b'{') { stored.len() } else { usize::MAX };
        self.open(place, stored, plain_bytes)
    }

    /// Whether the first key has encrypted this.
    #[must_use]
    pub fn is_current(&self, stored: &[u8], plain_bytes: usize) -> bool {
        let of_first = |it: &MasterKey| stored.get(1..=ID_BYTES) == Some(&it.id);
        stored.len() != plain_bytes && self.0.first().is_some_and(of_first)
    }
}

impl MasterKey {
    fn parse(text: &str) -> anyhow::Result<Self> {
        let bytes = BASE64_STANDARD.decode(text).ok().filter(|it| it.len() == MASTER_KEY_BYTES);
        let bytes = bytes.context("a master key must be 32 random bytes in base64")?;
        let key = UnboundKey::new(&AES_256_GCM, &bytes);
        let key = key.unwrap_or_else(|_| unreachable!("it has as many bytes"));
        let hash = Sha256::new_with_prefix("fencepost master key").chain_update(&bytes).finalize();
        let mut id = [0; ID_BYTES];
        id.copy_from_slice(&hash[..ID_BYTES]);
        Ok(Self { id, key: LessSafeKey::new(key) })
    }
}

/// A new master key, as a line of its file.
#[must_use]
pub fn new_master_key() -> String {
    BASE64_STANDARD.encode(rand::random::<[u8; MASTER_KEY_BYTES]>())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef";

    fn keys(text: &str) -> MasterKeys {
        MasterKeys::parse(&text.into()).expect("keys")
    }

    #[test]
    fn a_secret_is_read_in_its_place_with_its_key_alone() {
        let (old, new) = (new_master_key(), new_master_key());
        let (old_keys, both) = (keys(&old), keys(&format!("{new}\n{old}\n")));
        let sealed = old_keys.seal("a:1", SECRET);
        assert!(!sealed.windows(8).any(|it| it == &SECRET[..8]));
        assert_eq!(old_keys.open("a:1", &sealed, SECRET.len()).as_deref(), Ok(SECRET));
        assert_eq!(both.open("a:1", &sealed, SECRET.len()).as_deref(), Ok(SECRET));
        assert_eq!(old_keys.open("a:2", &sealed, SECRET.len()), Err(OtherMasterKey));
        assert_eq!(keys(&new).open("a:1", &sealed, SECRET.len()), Err(OtherMasterKey));
        assert_eq!(MasterKeys::default().open("a:1", &sealed, SECRET.len()), Err(OtherMasterKey));
        for place in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[place] ^= 1;
            let opened = old_keys.open("a:1", &changed, SECRET.len());
            assert_eq!(opened, Err(OtherMasterKey), "{place}");
        }
        assert!(old_keys.is_current(&sealed, SECRET.len()));
        assert!(!both.is_current(&sealed, SECRET.len()) && !both.is_current(SECRET, SECRET.len()));
    }

    #[test]
    fn an_object_is_read_whether_it_is_encrypted_or_not() {
        let (text, keys) = (br#"{"Authorization":"Bearer x"}"#, keys(&new_master_key()));
        let none = MasterKeys::default();
        for stored in [keys.seal("a:1", text), none.seal("a:1", text)] {
            assert_eq!(keys.open_object("a:1", &stored).as_deref(), Ok(&text[..]));
        }
        assert_eq!(none.open_object("a:1", &keys.seal("a:1", text)), Err(OtherMasterKey));
    }

    #[test]
    fn without_a_master_key_secrets_are_stored_as_they_are() {
        let none = MasterKeys::default();
        assert_eq!(none.seal("a:1", SECRET), SECRET);
        assert_eq!(
            keys(&new_master_key()).open("a:1", SECRET, SECRET.len()).as_deref(),
            Ok(SECRET)
        );
    }

    #[test]
    fn what_is_no_master_key_is_refused_without_being_shown() {
        let three = vec![new_master_key(); 3].join("\n");
        for bad in ["", "\n", "secret", "c2VjcmV0", &three] {
            let error = MasterKeys::parse(&bad.into()).expect_err("refused").to_string();
            assert!(error.contains("master key") && !error.contains("secret"), "{error}");
        }
    }
}
