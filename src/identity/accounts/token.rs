//! Access tokens: short-lived JWTs with one algorithm, issuer and audience, signed with a key that
//! they name. Every claim is required, and any other kind of token is refused.

use std::sync::{Arc, RwLock};

use fencepost_domain::{
    error::Error,
    ids::{AccountId, SessionId},
    limits::ACCESS_TOKEN_SECONDS,
};
use fencepost_store::connection::nodes::SigningKey;
use jsonwebtoken::{
    Algorithm, DecodingKey, EncodingKey, Header, Validation, decode, decode_header, encode,
    get_current_timestamp,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use uuid::Uuid;

use super::token_crypto;

/// The algorithm of every token.
const ALGORITHM: Algorithm = Algorithm::HS256;
const ISSUER: &str = "fencepost";
const AUDIENCE: &str = "console";
/// The `typ` of a token (RFC 9068).
const TYPE: &str = "at+jwt";
/// The `typ` of a token that carries a value: it never authenticates anybody.
const VALUE_TYPE: &str = "value+jwt";
/// Tolerated difference between nodes' clocks, in seconds.
const LEEWAY_SECONDS: u64 = 30;
/// A new key signs only after this many seconds, when every node knows it.
pub const KEY_SETTLE_SECONDS: f64 = 150.0;
/// Maximum number of keys: the signing one, its successor, and those whose tokens still run.
pub const KNOWN_KEYS: i64 = 4;
pub const KEY_BYTES: usize = 32;
/// Maximum bytes of a presented token.
const MAX_TOKEN_BYTES: usize = 2_048;

/// The claims of a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    iss: String,
    aud: String,
    pub sub: String,
    pub sid: String,
    iat: u64,
    exp: u64,
}

/// The claims of a token that carries a value.
#[derive(Serialize, Deserialize)]
struct ValueClaims<T> {
    iss: String,
    aud: String,
    exp: u64,
    value: T,
}

/// The bearer of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Bearer {
    pub account_id: AccountId,
    /// The session.
    pub session_id: SessionId,
}

struct Key {
    id: String,
    encoding: EncodingKey,
    decoding: DecodingKey,
    is_settled: bool,
}

/// The keys that this node knows. Cheap to clone.
#[derive(Clone, Default)]
pub struct Tokens(Arc<RwLock<Keys>>);

#[derive(Default)]
struct Keys {
    known: Vec<Key>,
    /// Whether there are others, which this node cannot decrypt.
    has_unknown: bool,
}

impl Tokens {
    /// Replaces the keys, newest first. `stored` is how many there are.
    pub fn know(&self, keys: &[SigningKey], stored: usize) {
        token_crypto::install();
        let keys = keys.iter().map(|it| Key {
            id: it.id.simple().to_string(),
            encoding: EncodingKey::from_secret(&it.secret),
            decoding: DecodingKey::from_secret(&it.secret),
            is_settled: it.age_seconds >= KEY_SETTLE_SECONDS,
        });
        let keys = Keys { has_unknown: keys.len() < stored, known: keys.collect() };
        *self.0.write().unwrap_or_else(std::sync::PoisonError::into_inner) = keys;
    }

    /// Whether this node refuses tokens of others, because it cannot decrypt their key.
    #[must_use]
    pub fn has_unknown(&self) -> bool {
        self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner).has_unknown
    }

    /// A token for a session, valid for [`ACCESS_TOKEN_SECONDS`].
    ///
    /// # Errors
    /// [`Error::NotReady`] when this node knows no key yet.
    pub fn sign(&self, bearer: Bearer) -> Result<String, Error> {
        let now = get_current_timestamp();
        let claims = Claims {
            iss: ISSUER.to_owned(),
            aud: AUDIENCE.to_owned(),
            sub: bearer.account_id.to_string(),
            sid: bearer.session_id.to_string(),
            iat: now,
            exp: now + ACCESS_TOKEN_SECONDS as u64,
        };
        self.encode(TYPE, &claims)
    }

    /// A token with a value for one purpose, which comes back within `seconds`.
    ///
    /// # Errors
    /// [`Error::NotReady`] when this node knows no key yet.
    pub fn sign_value<T: Serialize>(
        &self,
        purpose: &str,
        value: &T,
        seconds: u64,
    ) -> Result<String, Error> {
        let exp = get_current_timestamp() + seconds;
        let claims = ValueClaims { iss: ISSUER.into(), aud: purpose.into(), exp, value };
        self.encode(VALUE_TYPE, &claims)
    }

    /// The value of such a token; none if it is not ours, of another purpose, or expired.
    #[must_use]
    pub fn read_value<T: DeserializeOwned>(&self, purpose: &str, token: &str) -> Option<T> {
        let required = ["exp", "iss", "aud"];
        let claims: ValueClaims<T> = self.decode(VALUE_TYPE, token, purpose, &required)?;
        Some(claims.value)
    }

    fn encode<T: Serialize>(&self, typ: &str, claims: &T) -> Result<String, Error> {
        let keys = self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        // The newest key that all nodes know; the very first signs at once.
        let key = keys.known.iter().find(|it| it.is_settled).or(keys.known.last());
        let key = key.ok_or(Error::NotReady("this node has no signing key yet"))?;
        let mut header = Header::new(ALGORITHM);
        header.typ = Some(typ.to_owned());
        header.kid = Some(key.id.clone());
        encode(&header, claims, &key.encoding).map_err(Error::internal)
    }

    fn decode<T: DeserializeOwned>(
        &self,
        typ: &str,
        token: &str,
        audience: &str,
        required: &[&str],
    ) -> Option<T> {
        if token.len() > MAX_TOKEN_BYTES {
            return None;
        }
        let header = decode_header(token).ok()?;
        if header.alg != ALGORITHM || header.typ.as_deref() != Some(typ) {
            return None;
        }
        let kid = header.kid?;
        let keys = self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let key = keys.known.iter().find(|it| it.id == kid)?;
        let validation = validation(audience, required);
        Some(decode::<T>(token, &key.decoding, &validation).ok()?.claims)
    }

    /// The bearer of this token; none if it is not ours, or expired.
    #[must_use]
    pub fn read(&self, token: &str) -> Option<Bearer> {
        let required = ["exp", "iss", "aud", "sub"];
        let claims: Claims = self.decode(TYPE, token, AUDIENCE, &required)?;
        // A token from the future was not made by us.
        if claims.iat > get_current_timestamp() + LEEWAY_SECONDS {
            return None;
        }
        Some(Bearer { account_id: claims.sub.parse().ok()?, session_id: claims.sid.parse().ok()? })
    }
}

fn validation(audience: &str, required: &[&str]) -> Validation {
    let mut validation = Validation::new(ALGORITHM);
    validation.set_issuer(&[ISSUER]);
    validation.set_audience(&[audience]);
    validation.leeway = LEEWAY_SECONDS;
    // All others are required by the claims' own types.
    validation.required_spec_claims = required.iter().map(|it| (*it).to_owned()).collect();
    validation
}

/// A new key's name and bytes.
#[must_use]
pub fn new_key() -> (Uuid, [u8; KEY_BYTES]) {
    (Uuid::now_v7(), rand::random())
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD as BASE64_URL};
    use hmac::{Hmac, KeyInit, Mac};
    use serde_json::{Value, json};
    use sha2::{Sha256, Sha384, Sha512};

    fn key(seed: u8, age_seconds: f64) -> SigningKey {
        SigningKey {
            id: Uuid::from_u128(u128::from(seed)),
            secret: vec![seed; KEY_BYTES],
            created_at: chrono::DateTime::UNIX_EPOCH,
            age_seconds,
        }
    }

    fn bearer() -> Bearer {
        Bearer { account_id: AccountId::generate(), session_id: SessionId::generate() }
    }

    fn known() -> Tokens {
        let tokens = Tokens::default();
        tokens.know(&[key(1, 1_000.0)], 1);
        tokens
    }

    /// A token as any other software would make it.
    fn forge(header: &Header, claims: &Value, secret: &[u8]) -> String {
        fn sign<H: Mac + KeyInit>(text: &str, secret: &[u8]) -> Vec<u8> {
            let hmac = <H as KeyInit>::new_from_slice(secret).expect("any length is valid");
            hmac.chain_update(text).finalize().into_bytes().to_vec()
        }
        let header_text = serde_json::to_string(header).expect("JSON");
        let [head, body] = [header_text, claims.to_string()].map(|it| BASE64_URL.encode(it));
        let text = format!("{head}.{body}");
        let signature = match header.alg {
            Algorithm::HS384 => sign::<Hmac<Sha384>>(&text, secret),
            Algorithm::HS512 => sign::<Hmac<Sha512>>(&text, secret),
            _ => sign::<Hmac<Sha256>>(&text, secret),
        };
        format!("{text}.{}", BASE64_URL.encode(signature))
    }

    #[test]
    fn a_token_says_who_shows_it() {
        let (tokens, bearer) = (known(), bearer());
        let token = tokens.sign(bearer).expect("a token");
        assert_eq!(tokens.read(&token), Some(bearer));
        assert_eq!(tokens.read(&token[..token.len() - 1]), None);
        assert_eq!(Tokens::default().read(&token), None);
    }

    #[test]
    fn a_new_key_signs_when_every_node_knows_it_and_the_old_ones_tokens_go_on() {
        let (tokens, bearer) = (known(), bearer());
        let old = tokens.sign(bearer).expect("a token");
        tokens.know(&[key(2, 10.0), key(1, 1_000.0)], 2);
        let kid = |token: &str| decode_header(token).expect("a header").kid;
        assert_eq!(kid(&tokens.sign(bearer).expect("a token")), kid(&old));
        tokens.know(&[key(2, 200.0), key(1, 1_200.0)], 2);
        let new = tokens.sign(bearer).expect("a token");
        assert_ne!(kid(&new), kid(&old));
        assert_eq!((tokens.read(&old), tokens.read(&new)), (Some(bearer), Some(bearer)));
        tokens.know(&[key(2, 200.0)], 1);
        assert_eq!(tokens.read(&old), None);
    }

    #[test]
    fn a_value_comes_back_for_its_purpose_only_and_is_no_bearer() {
        let tokens = known();
        let token = tokens.sign_value("one", &7, 60).expect("a token");
        assert_eq!(tokens.read_value("one", &token), Some(7));
        assert_eq!(tokens.read_value::<i32>("two", &token), None);
        assert_eq!(tokens.read_value::<String>("one", &token), None);
        assert_eq!(tokens.read(&token), None);
        // Even for the audience of sessions.
        assert_eq!(tokens.read(&tokens.sign_value(AUDIENCE, &7, 60).expect("a token")), None);
        let session = tokens.sign(bearer()).expect("a token");
        assert_eq!(tokens.read_value::<Value>(AUDIENCE, &session), None);
        let mut header = Header::new(ALGORITHM);
        header.typ = Some(VALUE_TYPE.to_owned());
        header.kid = Some(key(1, 0.0).id.simple().to_string());
        let late = get_current_timestamp() - LEEWAY_SECONDS - 1;
        let claims = json!({"iss": ISSUER, "aud": "one", "exp": late, "value": 7});
        let expired = forge(&header, &claims, &[1; KEY_BYTES]);
        assert_eq!(tokens.read_value::<i32>("one", &expired), None);
    }

    #[test]
    fn every_confusion_is_refused() {
        let (tokens, bearer) = (known(), bearer());
        let now = get_current_timestamp();
        let claims = json!({
            "iss": ISSUER, "aud": AUDIENCE, "sub": bearer.account_id.to_string(),
            "sid": bearer.session_id.to_string(), "iat": now, "exp": now + 600,
        });
        let mut header = Header::new(ALGORITHM);
        header.typ = Some(TYPE.to_owned());
        header.kid = Some(key(1, 0.0).id.simple().to_string());
        let secret = [1; KEY_BYTES];
        assert_eq!(tokens.read(&forge(&header, &claims, &secret)), Some(bearer), "the yardstick");

        let with = |name: &str, value: Value| {
            let mut claims = claims.clone();
            claims[name] = value;
            forge(&header, &claims, &secret)
        };
        let without = |name: &str| {
            let mut claims = claims.clone();
            claims.as_object_mut().expect("an object").remove(name);
            forge(&header, &claims, &secret)
        };
        let mut bad: Vec<(String, String)> = Vec::new();
        for name in ["iss", "aud", "sub", "sid", "iat", "exp"] {
            bad.push((format!("no {name}"), without(name)));
            bad.push((format!("{name} null"), with(name, Value::Null)));
            bad.push((format!("{name} of another type"), with(name, json!({"x": 1}))));
        }
        bad.push(("another issuer".into(), with("iss", json!("another"))));
        bad.push(("another audience".into(), with("aud", json!("api"))));
        bad.push(("expired".into(), with("exp", json!(now - 31))));
        bad.push(("exp as text".into(), with("exp", json!((now + 600).to_string()))));
        bad.push(("from the future".into(), with("iat", json!(now + 3_600))));
        bad.push(("a key as subject".into(), with("sub", json!("key_x"))));
        bad.push(("another secret".into(), forge(&header, &claims, &[2; KEY_BYTES])));
        bad.push(("an empty secret".into(), forge(&header, &claims, b"")));
        let change = |change: &dyn Fn(&mut Header)| {
            let mut header = header.clone();
            change(&mut header);
            forge(&header, &claims, &secret)
        };
        bad.push(("no type".into(), change(&|it| it.typ = None)));
        bad.push(("another type".into(), change(&|it| it.typ = Some("JWT".into()))));
        bad.push(("no kid".into(), change(&|it| it.kid = None)));
        bad.push(("an unknown kid".into(), change(&|it| it.kid = Some("x".into()))));
        bad.push(("HS384".into(), change(&|it| it.alg = Algorithm::HS384)));
        bad.push(("HS512".into(), change(&|it| it.alg = Algorithm::HS512)));
        let good = forge(&header, &claims, &secret);
        let body = good.split('.').nth(1).expect("claims").to_owned();
        // {"alg":"none","typ":"at+jwt"} in base64.
        let none = "eyJhbGciOiJub25lIiwidHlwIjoiYXQrand0In0";
        bad.push(("none".into(), format!("{none}.{body}.")));
        bad.push(("no signature".into(), good.rsplit_once('.').expect("parts").0.to_owned()));
        bad.push(("empty".into(), String::new()));
        bad.push(("too long".into(), format!("{good}{}", "x".repeat(MAX_TOKEN_BYTES))));
        for (what, token) in bad {
            assert_eq!(tokens.read(&token), None, "{what}");
        }
    }
}
