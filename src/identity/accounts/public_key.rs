//! Checks signatures of OpenID Connect providers: `ring` has what they need, and no RSA of its own
//! that signs.

use jsonwebtoken::{
    Algorithm, AlgorithmFamily, DecodingKey, DecodingKeyKind,
    crypto::JwtVerifier,
    errors::{ErrorKind, Result},
    signature::{self, Verifier},
};
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P384_SHA384_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256,
    RSA_PSS_2048_8192_SHA256, RsaParameters, RsaPublicKeyComponents, UnparsedPublicKey,
    VerificationAlgorithm,
};

/// The algorithms that providers may sign with. Each needs a key of its own family.
pub const ALGORITHMS: &[Algorithm] =
    &[Algorithm::RS256, Algorithm::PS256, Algorithm::ES256, Algorithm::ES384, Algorithm::EdDSA];

/// A public key with its algorithm.
pub struct PublicKey {
    algorithm: Algorithm,
    key: Key,
}

enum Key {
    Rsa(&'static RsaParameters, RsaPublicKeyComponents<Vec<u8>>),
    Curve(UnparsedPublicKey<Vec<u8>>),
}

impl PublicKey {
    /// A key for one algorithm.
    ///
    /// # Errors
    /// When the algorithm is none of [`ALGORITHMS`], or needs another kind of key.
    pub fn new(algorithm: Algorithm, key: &DecodingKey) -> Result<Self> {
        let curve = |family, with: &'static dyn VerificationAlgorithm| -> Result<Key> {
            if key.family() != family {
                return Err(ErrorKind::InvalidAlgorithm.into());
            }
            Ok(Key::Curve(UnparsedPublicKey::new(with, key.try_get_as_bytes()?.to_vec())))
        };
        let rsa = |with| match key.kind() {
            DecodingKeyKind::RsaModulusExponent { n, e } => {
                Ok(Key::Rsa(with, RsaPublicKeyComponents { n: n.clone(), e: e.clone() }))
            }
            DecodingKeyKind::SecretOrDer(_) => Err(ErrorKind::InvalidAlgorithm.into()),
        };
        let key: Result<Key> = match algorithm {
            Algorithm::RS256 => rsa(&RSA_PKCS1_2048_8192_SHA256),
            Algorithm::PS256 => rsa(&RSA_PSS_2048_8192_SHA256),
            Algorithm::ES256 => curve(AlgorithmFamily::Ec, &ECDSA_P256_SHA256_FIXED),
            Algorithm::ES384 => curve(AlgorithmFamily::Ec, &ECDSA_P384_SHA384_FIXED),
            Algorithm::EdDSA => curve(AlgorithmFamily::Ed, &ED25519),
            _ => Err(ErrorKind::InvalidAlgorithm.into()),
        };
        Ok(Self { algorithm, key: key? })
    }
}

impl Verifier<Vec<u8>> for PublicKey {
    fn verify(
        &self,
        message: &[u8],
        signature: &Vec<u8>,
    ) -> std::result::Result<(), signature::Error> {
        let verdict = match &self.key {
            Key::Rsa(with, key) => key.verify(with, message, signature),
            Key::Curve(key) => key.verify(message, signature),
        };
        verdict.map_err(|_| signature::Error::new())
    }
}

impl JwtVerifier for PublicKey {
    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}
