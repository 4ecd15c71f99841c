//! What a browser says of a passkey, and whether it is true: WebAuthn Level 3, sections 7.1 and
//! 7.2, for passkeys without attestation. Pure: the challenge, the origin and the stored passkey
//! come in.

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use ciborium::Value;
use ring::signature::{
    ECDSA_P256_SHA256_ASN1, ED25519, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents,
    UnparsedPublicKey,
};
use serde::Deserialize;
use sha2::{Digest, Sha256};

/// Maximum bytes of a credential's id (WebAuthn, section 5.8.3, since Level 3).
const MAX_ID_BYTES: usize = 1023;
/// Maximum bytes of a public key as it is stored: RSA with 8,192 bits, and some overhead.
const MAX_KEY_BYTES: usize = 2_048;
/// Bytes of authenticator data before what is optional.
const FIXED_BYTES: usize = 37;
/// Bytes of the model's id, which nothing is concluded from.
const AAGUID_BYTES: usize = 16;

const USER_PRESENT: u8 = 1;
const USER_VERIFIED: u8 = 1 << 2;
const MAY_BE_COPIED: u8 = 1 << 3;
const IS_COPIED: u8 = 1 << 4;
const HAS_CREDENTIAL: u8 = 1 << 6;

/// The algorithms of public keys (COSE), best first.
pub const ALGORITHMS: [i64; 3] = [EDDSA, ES256, RS256];
const EDDSA: i64 = -8;
const ES256: i64 = -7;
const RS256: i64 = -257;

/// Where a passkey is used.
#[derive(Debug, Clone, Copy)]
pub struct RelyingParty<'a> {
    /// The server's domain.
    pub id: &'a str,
    /// The origin of its pages.
    pub origin: &'a str,
}

/// Whether a passkey is made or used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    Create,
    Get,
}

/// A passkey to store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewPasskey {
    pub credential_id: Vec<u8>,
    /// The key, as COSE.
    pub public_key: Vec<u8>,
    pub sign_count: u32,
    /// True if its authenticator may copy it to other devices, which never changes; none: it was
    /// added before this was stored.
    pub may_be_copied: Option<bool>,
}

/// A use of a passkey.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Use {
    pub sign_count: u32,
    pub may_be_copied: bool,
}

/// The answer of `navigator.credentials.create()`, as `toJSON()` writes it.
#[derive(Debug, Clone, Deserialize)]
pub struct Registration {
    response: RegistrationResponse,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RegistrationResponse {
    #[serde(rename = "clientDataJSON")]
    client_data: String,
    attestation_object: String,
}

/// The answer of `navigator.credentials.get()`, as `toJSON()` writes it.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Assertion {
    raw_id: String,
    response: AssertionResponse,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct AssertionResponse {
    #[serde(rename = "clientDataJSON")]
    client_data: String,
    authenticator_data: String,
    signature: String,
    user_handle: Option<String>,
}

/// The part of the collected client data that is checked.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ClientData {
    #[serde(rename = "type")]
    kind: String,
    challenge: String,
    origin: String,
    #[serde(default)]
    cross_origin: bool,
}

/// Why an answer is refused.
pub type Refused = &'static str;

const UNREADABLE: Refused = "it cannot be read";
const COUNTED_BACK: Refused = "its counter went back: there may be a copy of it";
const OTHER_KIND: Refused = "it is of another kind than the one that was added";
/// Refusals that the owner of a passkey should know of: the answer was signed with its key.
pub const SUSPICIOUS: [Refused; 2] = [COUNTED_BACK, OTHER_KIND];

impl Registration {
    /// The new passkey, if the browser has made it for this page and challenge, and the
    /// authenticator has verified the person.
    ///
    /// # Errors
    /// The rule that was broken.
    pub fn check(&self, of: RelyingParty<'_>, challenge: &str) -> Result<NewPasskey, Refused> {
        check_client_data(&decode(&self.response.client_data)?, Act::Create, of, challenge)?;
        let object = decode(&self.response.attestation_object)?;
        let object: Value = ciborium::from_reader(object.as_slice()).map_err(|_| UNREADABLE)?;
        let data = field(&object, "authData").and_then(Value::as_bytes).ok_or(UNREADABLE)?;
        let head = AuthenticatorHead::read(data, of)?;
        if head.flags & HAS_CREDENTIAL == 0 {
            return Err("it has no credential");
        }
        let rest = data.get(FIXED_BYTES + AAGUID_BYTES..).ok_or(UNREADABLE)?;
        let (length, rest) = rest.split_at_checked(2).ok_or(UNREADABLE)?;
        let length = usize::from(u16::from_be_bytes([length[0], length[1]]));
        if !(1..=MAX_ID_BYTES).contains(&length) {
            return Err("the id of its credential has a wrong length");
        }
        let (credential_id, mut rest) = rest.split_at_checked(length).ok_or(UNREADABLE)?;
        // Extensions may follow the key.
        let key: Value = ciborium::from_reader(&mut rest).map_err(|_| UNREADABLE)?;
        let mut public_key = Vec::new();
        ciborium::into_writer(&key, &mut public_key).map_err(|_| UNREADABLE)?;
        if public_key.len() > MAX_KEY_BYTES {
            return Err("its public key is too long");
        }
        PublicKey::read(&key)?;
        Ok(NewPasskey {
            credential_id: credential_id.to_vec(),
            public_key,
            sign_count: head.sign_count,
            may_be_copied: Some(head.may_be_copied()),
        })
    }
}

impl Assertion {
    /// Id of the credential that it names.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn credential_id(&self) -> Result<Vec<u8>, Refused> {
        let id = decode(&self.raw_id)?;
        if id.len() > MAX_ID_BYTES { Err(UNREADABLE) } else { Ok(id) }
    }

    /// Whether it says whose passkey it is.
    #[must_use]
    pub fn names_user(&self) -> bool {
        self.response.user_handle.as_ref().is_some_and(|it| !it.is_empty())
    }

    /// The use, if the passkey has signed this challenge for this page, after its
    /// authenticator has verified the person. `user` is the account that has the passkey.
    ///
    /// # Errors
    /// The rule that was broken.
    pub fn check(
        &self,
        of: RelyingParty<'_>,
        challenge: &str,
        user: &[u8],
        stored: &NewPasskey,
    ) -> Result<Use, Refused> {
        let AssertionResponse { client_data, authenticator_data, signature, user_handle } =
            &self.response;
        if let Some(handle) = user_handle
            && decode(handle)? != user
        {
            return Err("it is of another account");
        }
        let client_data = decode(client_data)?;
        check_client_data(&client_data, Act::Get, of, challenge)?;
        let data = decode(authenticator_data)?;
        let head = AuthenticatorHead::read(&data, of)?;
        let key: Value =
            ciborium::from_reader(stored.public_key.as_slice()).map_err(|_| UNREADABLE)?;
        let signed = [data.as_slice(), Sha256::digest(&client_data).as_slice()].concat();
        PublicKey::read(&key)?.verify(&signed, &decode(signature)?)?;
        if stored.may_be_copied.is_some_and(|it| it != head.may_be_copied()) {
            return Err(OTHER_KIND);
        }
        // Many authenticators do not count: both are 0 then.
        let (before, after) = (stored.sign_count, head.sign_count);
        if (before, after) != (0, 0) && after <= before {
            return Err(COUNTED_BACK);
        }
        Ok(Use { sign_count: after, may_be_copied: head.may_be_copied() })
    }
}

fn check_client_data(
    client_data: &[u8],
    act: Act,
    of: RelyingParty<'_>,
    challenge: &str,
) -> Result<(), Refused> {
    let data: ClientData = serde_json::from_slice(client_data).map_err(|_| UNREADABLE)?;
    let kind = match act {
        Act::Create => "webauthn.create",
        Act::Get => "webauthn.get",
    };
    if data.kind != kind {
        return Err("it is an answer to another kind of challenge");
    }
    if data.challenge != challenge {
        return Err("it is an answer to another challenge");
    }
    if data.origin != of.origin || data.cross_origin {
        return Err("it was given to another site");
    }
    Ok(())
}

/// The fixed part of authenticator data, checked.
struct AuthenticatorHead {
    flags: u8,
    sign_count: u32,
}

impl AuthenticatorHead {
    fn read(data: &[u8], of: RelyingParty<'_>) -> Result<Self, Refused> {
        let (site, rest) = data.split_at_checked(32).ok_or(UNREADABLE)?;
        let [flags, a, b, c, d, ..] = *rest else { return Err(UNREADABLE) };
        if site != Sha256::digest(of.id.as_bytes()).as_slice() {
            return Err("it is for another site");
        }
        if flags & USER_PRESENT == 0 || flags & USER_VERIFIED == 0 {
            return Err("the authenticator has not verified you");
        }
        if flags & IS_COPIED != 0 && flags & MAY_BE_COPIED == 0 {
            return Err(UNREADABLE);
        }
        Ok(Self { flags, sign_count: u32::from_be_bytes([a, b, c, d]) })
    }

    fn may_be_copied(&self) -> bool {
        self.flags & MAY_BE_COPIED != 0
    }
}

/// A public key (RFC 9053; RFC 8230 for RSA).
enum PublicKey<'a> {
    Es256 { point: Vec<u8> },
    EdDsa { point: &'a [u8] },
    Rs256 { modulus: &'a [u8], exponent: &'a [u8] },
}

impl<'a> PublicKey<'a> {
    const KIND: i64 = 1;
    const ALGORITHM: i64 = 3;
    const OKP: i64 = 1;
    const EC2: i64 = 2;
    const RSA: i64 = 3;
    const P256: i64 = 1;
    const CURVE_25519: i64 = 6;
    const COORDINATE_BYTES: usize = 32;
    /// As `ring` verifies them.
    const MIN_MODULUS_BYTES: usize = 256;

    fn read(key: &'a Value) -> Result<Self, Refused> {
        let number = |label| at(key, label).and_then(Value::as_integer).map(i128::from);
        let bytes = |label| at(key, label).and_then(Value::as_bytes).map(Vec::as_slice);
        let coordinate = |label| bytes(label).filter(|it| it.len() == Self::COORDINATE_BYTES);
        let is = |label, value: i64| number(label) == Some(value.into());
        let read = if is(Self::ALGORITHM, ES256) && is(Self::KIND, Self::EC2) && is(-1, Self::P256)
        {
            let point = coordinate(-2).zip(coordinate(-3));
            point.map(|(x, y)| Self::Es256 { point: [&[4], x, y].concat() })
        } else if is(Self::ALGORITHM, EDDSA)
            && is(Self::KIND, Self::OKP)
            && is(-1, Self::CURVE_25519)
        {
            coordinate(-2).map(|point| Self::EdDsa { point })
        } else if is(Self::ALGORITHM, RS256) && is(Self::KIND, Self::RSA) {
            let modulus = bytes(-1).filter(|it| it.len() >= Self::MIN_MODULUS_BYTES);
            modulus.zip(bytes(-2)).map(|(modulus, exponent)| Self::Rs256 { modulus, exponent })
        } else {
            return Err("its algorithm is none of ES256, EdDSA and RS256");
        };
        read.ok_or(UNREADABLE)
    }

    fn verify(&self, signed: &[u8], signature: &[u8]) -> Result<(), Refused> {
        let verified = match self {
            Self::Es256 { point } => {
                UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, point).verify(signed, signature)
            }
            Self::EdDsa { point } => {
                UnparsedPublicKey::new(&ED25519, point).verify(signed, signature)
            }
            Self::Rs256 { modulus, exponent } => {
                let key = RsaPublicKeyComponents { n: modulus, e: exponent };
                key.verify(&RSA_PKCS1_2048_8192_SHA256, signed, signature)
            }
        };
        verified.map_err(|_| "its signature is wrong")
    }
}

fn decode(text: &str) -> Result<Vec<u8>, Refused> {
    BASE64_URL_SAFE_NO_PAD.decode(text).map_err(|_| UNREADABLE)
}

/// The value of a map's text key.
fn field<'a>(map: &'a Value, name: &str) -> Option<&'a Value> {
    map.as_map()?.iter().find(|(key, _)| key.as_text() == Some(name)).map(|it| &it.1)
}

/// The value of a map's number key.
fn at(map: &Value, label: i64) -> Option<&Value> {
    let is_label = |key: &Value| key.as_integer().map(i128::from) == Some(label.into());
    map.as_map()?.iter().find(|(key, _)| is_label(key)).map(|it| &it.1)
}

#[cfg(test)]
mod tests {
    use ciborium::cbor;

    use super::*;

    // Made with OpenSSL, by a key that was thrown away.
    const MODULUS: &str = "9xvbkBozYJEgMAnkESl0PNSBGw7MTk3_HkfiloWP8_ZAnFJUMspASugDuxPwfCNplmgmEpsv94-ptpRLx7EX\
        FhvL9tIWNsV-2omhYQNc6Eb8GAAAwWiXWwLj3JiCE4GwnMBw-mqyeIuEb5KSlJcVIm7D_Z-uq_mgIqVZiOWO\
        O072iLNnVxGhxTwgeGX48XpRf2mjCffVsv3cSZmH9qOTqYq3_1N8oh9euingp3SSlKR9fyg_2jy_ebwyhKqE\
        8jdue34Z_hmOmcF8PCX3_ZWbNT-Mz8Y_8ZVJGR-8nZZO3mYq-hFhx5h3iLfbdMF1ECp2sATjHPdbvEczug8b\
        23Zp3Q";
    const SIGNATURE: &str = "jZnOB1kVNZTii6FeJkohHPmJBGAQikX9BFFNOExR2g0m--7WmABZm08TwMcDqriXLH7kyKMXZNWy3O7TQSQ5\
        Yy5w-T-bDdACXK1F3ds6q3i6WGJ-NuR9UwZ2Bb1RCdtP9ice0Jx4TsEICt9_Uyjj_4DTLbI9pakuimXq7ivD\
        Wuxa9Z-Q1MXjWUS1OpYzneuVLQHhbcHIjvcjXCrOaE1RgW3QQWB1_Pfne3tzMNMco9Vi-GzSI2sLIYMM1VAs\
        180-x5vu7MsXjKObT-jCd-QiFB1hEulBHF-OuXwQiq65WQxdO5GNNLfQhGzuj12KrCCreY1r2ttJGmKQhlZd\
        fERkkg";
    const CLIENT_DATA: &str = r#"{"type":"webauthn.get","challenge":"Y2hhbGxlbmdl","origin":"https://queue.example.com"}"#;
    const SITE: RelyingParty<'_> =
        RelyingParty { id: "queue.example.com", origin: "https://queue.example.com" };

    fn stored(public_key: Value) -> NewPasskey {
        let mut bytes = Vec::new();
        ciborium::into_writer(&public_key, &mut bytes).expect("bytes");
        let may_be_copied = Some(false);
        NewPasskey { credential_id: vec![1], public_key: bytes, sign_count: 0, may_be_copied }
    }

    fn rsa_key() -> Value {
        let modulus = Value::Bytes(decode(MODULUS).expect("bytes"));
        let exponent = Value::Bytes(vec![1, 0, 1]);
        cbor!({1 => 3, 3 => -257, -1 => modulus, -2 => exponent}).expect("a map")
    }

    fn assertion(signature: &str) -> Assertion {
        let mut data = Sha256::digest(SITE.id.as_bytes()).to_vec();
        data.extend([USER_PRESENT | USER_VERIFIED, 0, 0, 0, 0]);
        let response = AssertionResponse {
            client_data: BASE64_URL_SAFE_NO_PAD.encode(CLIENT_DATA),
            authenticator_data: BASE64_URL_SAFE_NO_PAD.encode(data),
            signature: signature.to_owned(),
            user_handle: None,
        };
        Assertion { raw_id: "AQ".to_owned(), response }
    }

    #[test]
    fn a_signature_of_rsa_is_verified() {
        let check = |signature: &str, key| {
            assertion(signature).check(SITE, "Y2hhbGxlbmdl", b"", &stored(key))
        };
        let used = Use { sign_count: 0, may_be_copied: false };
        assert_eq!(check(SIGNATURE, rsa_key()), Ok(used));
        let before = |may_be_copied| NewPasskey { may_be_copied, ..stored(rsa_key()) };
        let check_against =
            |before: NewPasskey| assertion(SIGNATURE).check(SITE, "Y2hhbGxlbmdl", b"", &before);
        assert_eq!(check_against(before(None)), Ok(used));
        assert_eq!(check_against(before(Some(true))), Err(OTHER_KIND));
        let broken = SIGNATURE.replacen(&SIGNATURE[..1], "_", 1);
        assert_eq!(check(&broken, rsa_key()), Err("its signature is wrong"));
        let other_site = RelyingParty { origin: "http://queue.example.com", ..SITE };
        let refused =
            assertion(SIGNATURE).check(other_site, "Y2hhbGxlbmdl", b"", &stored(rsa_key()));
        assert_eq!(refused, Err("it was given to another site"));
    }

    #[test]
    fn a_key_of_another_kind_or_length_is_refused() {
        let bytes = |count: usize| Value::Bytes(vec![7; count]);
        let check = |key: Value, expected: Refused| {
            assert_eq!(PublicKey::read(&key).err(), Some(expected), "{key:?}");
        };
        let unknown = "its algorithm is none of ES256, EdDSA and RS256";
        check(cbor!({1 => 2, 3 => -35, -1 => 2}).expect("a map"), unknown);
        check(cbor!({1 => 2, 3 => -7, -1 => 2}).expect("a map"), unknown);
        check(cbor!({1 => 3, 3 => -7, -1 => 1}).expect("a map"), unknown);
        check(cbor!([1, 2]).expect("a list"), unknown);
        let short = cbor!({1 => 2, 3 => -7, -1 => 1, -2 => bytes(31), -3 => bytes(32)});
        check(short.expect("a map"), UNREADABLE);
        let long = cbor!({1 => 1, 3 => -8, -1 => 6, -2 => bytes(33)});
        check(long.expect("a map"), UNREADABLE);
    }

    #[test]
    fn junk_is_refused_and_never_read_beyond_its_end() {
        let whole = {
            let mut data = Sha256::digest(SITE.id.as_bytes()).to_vec();
            data.extend([USER_PRESENT | USER_VERIFIED | HAS_CREDENTIAL, 0, 0, 0, 0]);
            data.extend([0; AAGUID_BYTES]);
            data.extend([0, 1, 9]);
            ciborium::into_writer(&rsa_key(), &mut data).expect("bytes");
            data
        };
        let register = |data: &[u8]| {
            let object = cbor!({"authData" => Value::Bytes(data.to_vec())}).expect("a map");
            let mut bytes = Vec::new();
            ciborium::into_writer(&object, &mut bytes).expect("bytes");
            let response = RegistrationResponse {
                client_data: BASE64_URL_SAFE_NO_PAD.encode(CLIENT_DATA.replace(".get", ".create")),
                attestation_object: BASE64_URL_SAFE_NO_PAD.encode(bytes),
            };
            Registration { response }.check(SITE, "Y2hhbGxlbmdl")
        };
        assert_eq!(register(&whole).map(|it| it.credential_id), Ok(vec![9]));
        for length in 0..whole.len() {
            assert!(register(&whole[..length]).is_err(), "{length} bytes");
        }
        let mut nameless = whole;
        nameless[FIXED_BYTES + AAGUID_BYTES + 1] = 0;
        assert_eq!(register(&nameless), Err("the id of its credential has a wrong length"));
    }
}
