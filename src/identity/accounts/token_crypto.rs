//! HMAC with SHA-256 for our own tokens, and public keys for those of others, from the crates that
//! everything else here uses. The providers of `jsonwebtoken` bring the crate `rsa`, or take half a
//! minute to build.

use hmac::{Hmac, KeyInit, Mac};
use jsonwebtoken::{
    Algorithm, AlgorithmFamily, DecodingKey, EncodingKey,
    crypto::{CryptoProvider, JwtSigner, JwtVerifier, KeyUtils},
    errors::{ErrorKind, Result},
    signature::{self, Signer, Verifier},
};
use sha2::Sha256;

use super::public_key::PublicKey;

static PROVIDER: CryptoProvider = CryptoProvider {
    signer_factory: |algorithm, key| Ok(Box::new(signer(*algorithm, key)?)),
    verifier_factory: |algorithm, key| match algorithm {
        Algorithm::HS256 => Ok(Box::new(verifier(*algorithm, key)?)),
        other => Ok(Box::new(PublicKey::new(*other, key)?)),
    },
    key_utils: KeyUtils::new_unimplemented(),
};

/// Makes this the cryptography of all tokens of the process.
pub(super) fn install() {
    // It fails only when a provider is installed already.
    let _ = PROVIDER.install_default();
}

struct HmacSha256(Hmac<Sha256>);

fn signer(algorithm: Algorithm, key: &EncodingKey) -> Result<HmacSha256> {
    HmacSha256::new(algorithm, key.family(), Ok(key.as_bytes()))
}

fn verifier(algorithm: Algorithm, key: &DecodingKey) -> Result<HmacSha256> {
    HmacSha256::new(algorithm, key.family(), key.try_get_as_bytes())
}

impl HmacSha256 {
    fn new(algorithm: Algorithm, family: AlgorithmFamily, key: Result<&[u8]>) -> Result<Self> {
        if algorithm != Algorithm::HS256 || family != AlgorithmFamily::Hmac {
            return Err(ErrorKind::InvalidAlgorithm.into());
        }
        let hmac = Hmac::new_from_slice(key?).map_err(|_| ErrorKind::InvalidKeyFormat)?;
        Ok(Self(hmac))
    }

    fn over(&self, message: &[u8]) -> Hmac<Sha256> {
        let mut hmac = self.0.clone();
        hmac.update(message);
        hmac
    }
}

impl Signer<Vec<u8>> for HmacSha256 {
    fn try_sign(&self, message: &[u8]) -> std::result::Result<Vec<u8>, signature::Error> {
        Ok(self.over(message).finalize().into_bytes().to_vec())
    }
}

impl Verifier<Vec<u8>> for HmacSha256 {
    fn verify(
        &self,
        message: &[u8],
        signature: &Vec<u8>,
    ) -> std::result::Result<(), signature::Error> {
        self.over(message).verify_slice(signature).map_err(|_| signature::Error::new())
    }
}

impl JwtSigner for HmacSha256 {
    fn algorithm(&self) -> Algorithm {
        Algorithm::HS256
    }
}

impl JwtVerifier for HmacSha256 {
    fn algorithm(&self) -> Algorithm {
        Algorithm::HS256
    }
}
