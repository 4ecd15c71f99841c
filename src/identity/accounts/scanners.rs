//! Public keys of secret scanners, which sign the leaked keys that they report: a report that is
//! signed needs no limit by address, and may name many keys.

use std::path::Path;

use anyhow::{Context, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use ring::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use serde::Deserialize;

/// How a public key on the curve P-256 begins (RFC 5480): what follows is the point.
const P256_HEAD: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];
/// Bytes of an uncompressed point.
const POINT_BYTES: usize = 65;

/// The keys that an operator trusts.
#[derive(Debug, Default)]
pub struct ScannerKeys(Vec<ScannerKey>);

#[derive(Debug)]
struct ScannerKey {
    id: String,
    point: [u8; POINT_BYTES],
}

/// A file of keys, as GitHub publishes it for its partners.
#[derive(Deserialize)]
struct KeyFile {
    public_keys: Vec<FileKey>,
}

#[derive(Deserialize)]
struct FileKey {
    key_identifier: String,
    key: String,
}

impl ScannerKeys {
    /// Reads a file.
    ///
    /// # Errors
    /// When it cannot be read, has no key, or one that is not on the curve P-256.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let named = || format!("{}", path.display());
        let text = std::fs::read_to_string(path).with_context(named)?;
        Self::parse(&text).with_context(named)
    }

    /// Reads `{"public_keys": [{"key_identifier": …, "key": PEM}]}`.
    ///
    /// # Errors
    /// As for [`Self::open`].
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let file: KeyFile = serde_json::from_str(text)?;
        ensure!(!file.public_keys.is_empty(), "it has no key");
        let read = |it: FileKey| {
            let point = point_of(&it.key).with_context(|| {
                format!("the key {} is not a P-256 key in PEM", it.key_identifier)
            })?;
            Ok(ScannerKey { id: it.key_identifier, point })
        };
        Ok(Self(file.public_keys.into_iter().map(read).collect::<anyhow::Result<_>>()?))
    }

    /// Whether the key of this name has signed the text: ECDSA with SHA-256, in base64.
    #[must_use]
    pub fn have_signed(&self, id: &str, signature: &str, text: &[u8]) -> bool {
        let Ok(signature) = BASE64_STANDARD.decode(signature) else { return false };
        let is_valid = |key: &ScannerKey| {
            let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, &key.point);
            key.verify(text, &signature).is_ok()
        };
        self.0.iter().any(|it| it.id == id && is_valid(it))
    }
}

fn point_of(pem: &str) -> Option<[u8; POINT_BYTES]> {
    let body: String = pem.lines().map(str::trim).filter(|it| !it.starts_with("-----")).collect();
    let der = BASE64_STANDARD.decode(body).ok()?;
    der.strip_prefix(&P256_HEAD)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_read_from_its_pem_and_junk_is_refused() {
        let head = BASE64_STANDARD.encode([&P256_HEAD[..], &[4; POINT_BYTES]].concat());
        let pem = format!("-----BEGIN PUBLIC KEY-----\n{head}\n-----END PUBLIC KEY-----\n");
        assert_eq!(point_of(&pem), Some([4; POINT_BYTES]));
        for junk in [
            "",
            "{}",
            r#"{"public_keys": []}"#,
            r#"{"public_keys": [{"key_identifier": "a", "key": "x"}]}"#,
        ] {
            assert!(ScannerKeys::parse(junk).is_err(), "{junk}");
        }
    }
}
