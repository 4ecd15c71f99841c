//! What an OpenID Connect issuer publishes: its endpoints and the keys that sign its tokens. Each
//! call has a deadline and a bound of bytes, and what it returns is kept for a while.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use fencepost_domain::limits::MAX_SUBJECT_CHARS;
use jsonwebtoken::{
    Algorithm, DecodingKey, Validation, decode, decode_header,
    jwk::{JwkSet, PublicKeyUse},
};
use reqwest::{Client, RequestBuilder, Url, header::AUTHORIZATION, redirect::Policy};
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, de::DeserializeOwned};
use tokio::sync::Semaphore;

use super::config::{ProviderConfig, check_url};
use crate::accounts::{
    public_key::{ALGORITHMS, PublicKey},
    read_email, token_crypto,
};

/// The deadline of a call.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of an answer: the largest known key set has about 20 KB.
const MAX_ANSWER_BYTES: usize = 256 * 1_024;
/// The time for which metadata are kept.
const METADATA_LIFE: Duration = Duration::from_secs(3_600);
/// Keys are kept for this time: a key that the issuer withdraws is accepted no longer than this,
/// and while they are read again.
const KEYS_LIFE: Duration = Duration::from_secs(600);
/// The longest time in which they are read: two calls.
const READING_TIME: Duration = Duration::from_secs(2 * CALL_TIMEOUT.as_secs());
/// The shortest time between two readings of the keys: a token may name any key.
const KEYS_PAUSE: Duration = Duration::from_secs(10);
/// After a failed call, the next one waits this long: others fail without a call.
const FAILURE_PAUSE: Duration = Duration::from_secs(5);
/// Calls at the same time, of all visitors.
const MAX_CALLS: usize = 16;
/// Tolerated difference between the clocks, in seconds.
const LEEWAY_SECONDS: u64 = 60;
/// How old a token may be, in seconds. It is sent at once; its own expiry may be a day away.
const MAX_TOKEN_AGE_SECONDS: u64 = 600;

/// Why a call to a provider failed, or its token was refused.
#[derive(Debug, Clone, thiserror::Error)]
pub enum OidcError {
    #[error("the provider does not answer")]
    Unreachable(#[source] Arc<reqwest::Error>),
    #[error("the provider answers with status {0}")]
    Status(u16),
    #[error("the provider's answer is not valid: {0}")]
    Answer(String),
    #[error("too many logins wait for the provider")]
    Busy,
    #[error("a call to the provider has just failed")]
    FailedBefore,
    #[error("the provider's token is not valid: {0}")]
    Token(String),
}

impl From<reqwest::Error> for OidcError {
    fn from(error: reqwest::Error) -> Self {
        // Its URL may have a query.
        Self::Unreachable(Arc::new(error.without_url()))
    }
}

/// The metadata of an issuer (OpenID Connect Discovery 1.0).
#[derive(Debug, Clone, Deserialize)]
pub struct ProviderMetadata {
    issuer: String,
    /// Absent at issuers of tokens for machines, as is `token_endpoint`.
    #[serde(default)]
    authorization_endpoint: Option<String>,
    #[serde(default)]
    token_endpoint: Option<String>,
    jwks_uri: String,
    userinfo_endpoint: Option<String>,
    #[serde(default)]
    token_endpoint_auth_methods_supported: Vec<String>,
}

/// The claims of an ID token that count here.
#[derive(Debug, Clone, Deserialize)]
pub struct IdClaims {
    pub sub: String,
    iat: u64,
    aud: Audience,
    azp: Option<String>,
    nonce: Option<String>,
    pub email: Option<String>,
    /// Some providers send a text.
    #[serde(default)]
    email_verified: serde_json::Value,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Audience {
    One(#[expect(dead_code, reason = "the validation compares it")] String),
    Many(Vec<String>),
}

impl IdClaims {
    /// The address, if the provider has verified it.
    #[must_use]
    pub fn verified_email(&self) -> Option<&str> {
        let is_verified = self.email_verified == true || self.email_verified == "true";
        let email = self.email.as_deref().filter(|_| is_verified);
        email.filter(|it| read_email("email", it).is_ok())
    }
}

/// The answer of a provider that exchanges a code.
#[derive(Deserialize)]
pub struct ProviderTokens {
    pub id_token: SecretString,
    access_token: SecretString,
}

/// A person's data at a provider, beside the ID token.
#[derive(Deserialize)]
struct UserInfo {
    sub: String,
    email: Option<String>,
    #[serde(default)]
    email_verified: serde_json::Value,
}

/// An issuer.
pub struct Issuer {
    url: String,
    /// Its keys, if the operator has given them.
    given_keys: Option<JwkSet>,
    http: Client,
    calls: Semaphore,
    cache: Mutex<Cache>,
    /// Held by the one read that is under way, and not by those who know what they need.
    reading: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Cache {
    metadata: Option<(Arc<ProviderMetadata>, Instant)>,
    keys: Option<(Arc<JwkSet>, Instant)>,
    failed_at: Option<Instant>,
}

fn fresh<T>(it: Option<&(Arc<T>, Instant)>, life: Duration) -> Option<Arc<T>> {
    it.filter(|(_, since)| since.elapsed() < life).map(|(it, _)| Arc::clone(it))
}

impl std::fmt::Debug for Issuer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Issuer").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Issuer {
    /// An issuer that nothing is known of yet.
    ///
    /// # Errors
    /// When TLS cannot be set up.
    pub fn new(url: &str, given_keys: Option<JwkSet>) -> anyhow::Result<Self> {
        token_crypto::install();
        let http = Client::builder()
            .timeout(CALL_TIMEOUT)
            // Secrets go to the named hosts only.
            .redirect(Policy::none())
            .build()?;
        let (calls, cache) = (Semaphore::new(MAX_CALLS), Mutex::default());
        let reading = tokio::sync::Mutex::default();
        Ok(Self { url: url.to_owned(), given_keys, http, calls, cache, reading })
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn call<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T, OidcError> {
        let _slot = self.calls.try_acquire().map_err(|_| OidcError::Busy)?;
        let mut answer = request.send().await?;
        if !answer.status().is_success() {
            return Err(OidcError::Status(answer.status().as_u16()));
        }
        let mut body = Vec::new();
        while let Some(chunk) = answer.chunk().await? {
            if body.len() + chunk.len() > MAX_ANSWER_BYTES {
                return Err(OidcError::Answer(format!("more than {MAX_ANSWER_BYTES} bytes")));
            }
            body.extend_from_slice(&chunk);
        }
        // A message of serde could repeat what was sent.
        serde_json::from_slice(&body).map_err(|_| OidcError::Answer("not the expected JSON".into()))
    }

    /// A call that others wait for: after a failure they fail at once.
    async fn read<T: DeserializeOwned>(&self, url: &str) -> Result<T, OidcError> {
        if self.cache().failed_at.is_some_and(|it| it.elapsed() < FAILURE_PAUSE) {
            return Err(OidcError::FailedBefore);
        }
        let read = self.call(self.http.get(url)).await;
        self.cache().failed_at = read.is_err().then(Instant::now);
        read
    }

    /// The metadata of the issuer.
    ///
    /// # Errors
    /// [`OidcError`].
    pub async fn metadata(&self) -> Result<Arc<ProviderMetadata>, OidcError> {
        if let Some(known) = self.known_metadata() {
            return Ok(known);
        }
        let _reading = self.reading.lock().await;
        self.read_metadata().await
    }

    fn known_metadata(&self) -> Option<Arc<ProviderMetadata>> {
        fresh(self.cache().metadata.as_ref(), METADATA_LIFE)
    }

    /// For the one that reads. Another one may have read it before.
    async fn read_metadata(&self) -> Result<Arc<ProviderMetadata>, OidcError> {
        if let Some(known) = self.known_metadata() {
            return Ok(known);
        }
        let url = format!("{}/.well-known/openid-configuration", self.url.trim_end_matches('/'));
        let read: ProviderMetadata = self.read(&url).await?;
        if read.issuer != self.url {
            return Err(OidcError::Answer("its `issuer` is not the configured URL".into()));
        }
        let login_urls =
            [&read.authorization_endpoint, &read.token_endpoint, &read.userinfo_endpoint];
        for url in login_urls.into_iter().flatten().chain([&read.jwks_uri]) {
            check_url(url).map_err(|error| OidcError::Answer(format!("{error:#}")))?;
        }
        let read = Arc::new(read);
        self.cache().metadata = Some((Arc::clone(&read), Instant::now()));
        Ok(read)
    }

    /// The key that a token names. An unknown name may be that of a new key: then all are read
    /// again, though not often.
    async fn key(&self, kid: Option<&str>, algorithm: Algorithm) -> Result<DecodingKey, OidcError> {
        let unknown = || OidcError::Token("signed with an unknown key".into());
        if let Some(given) = &self.given_keys {
            return choose(given, kid, algorithm).ok_or_else(unknown);
        }
        let known = |life| {
            let keys = fresh(self.cache().keys.as_ref(), life);
            keys.and_then(|it| choose(&it, kid, algorithm))
        };
        if let Some(key) = known(KEYS_LIFE) {
            return Ok(key);
        }
        let _reading = match self.reading.try_lock() {
            Ok(reading) => reading,
            // While others read, the old keys are good enough.
            Err(_) => match known(KEYS_LIFE + READING_TIME) {
                Some(key) => return Ok(key),
                None => self.reading.lock().await,
            },
        };
        if let Some(key) = known(KEYS_LIFE) {
            return Ok(key);
        }
        if fresh(self.cache().keys.as_ref(), KEYS_PAUSE).is_some() {
            return Err(unknown());
        }
        let metadata = self.read_metadata().await?;
        let keys: Arc<JwkSet> = Arc::new(self.read(&metadata.jwks_uri).await?);
        self.cache().keys = Some((Arc::clone(&keys), Instant::now()));
        choose(&keys, kid, algorithm).ok_or_else(unknown)
    }

    /// Whether it has keys, given or published.
    ///
    /// # Errors
    /// [`OidcError`].
    pub async fn check_keys(&self) -> Result<(), OidcError> {
        if self.given_keys.is_some() {
            return Ok(());
        }
        let metadata = self.metadata().await?;
        self.read::<JwkSet>(&metadata.jwks_uri).await.map(drop)
    }

    /// Exchanges a code for tokens.
    ///
    /// # Errors
    /// [`OidcError`]: the status is 400 for a code that is unknown or used.
    pub async fn exchange(
        &self,
        provider: &ProviderConfig,
        (code, verifier): (&str, &str),
        redirect_uri: &str,
    ) -> Result<ProviderTokens, OidcError> {
        let metadata = self.metadata().await?;
        let mut form = vec![
            ("grant_type", "authorization_code"),
            ("code", code),
            ("code_verifier", verifier),
            ("redirect_uri", redirect_uri),
        ];
        let methods = &metadata.token_endpoint_auth_methods_supported;
        // Basic is what providers have that name no method.
        let is_basic = methods.is_empty() || methods.iter().any(|it| it == "client_secret_basic");
        let missing = || OidcError::Answer("no token_endpoint".into());
        let url = metadata.token_endpoint.as_ref().ok_or_else(missing)?;
        let mut request = self.http.post(url);
        match &provider.client_secret {
            Some(secret) if is_basic => {
                let encode = |text: &str| {
                    form_urlencoded::byte_serialize(text.as_bytes()).collect::<String>()
                };
                let (id, secret) = (encode(&provider.client_id), encode(secret.expose_secret()));
                let pair = BASE64_STANDARD.encode(format!("{id}:{secret}"));
                request = request.header(AUTHORIZATION, format!("Basic {pair}"));
            }
            Some(secret) => {
                form.push(("client_id", &provider.client_id));
                form.push(("client_secret", secret.expose_secret()));
            }
            None => form.push(("client_id", &provider.client_id)),
        }
        self.call(request.form(&form)).await
    }

    /// The claims with the e-mail address. Most providers put it into the ID token; others return
    /// it only at their userinfo endpoint.
    ///
    /// # Errors
    /// [`OidcError`].
    pub async fn with_email(
        &self,
        claims: IdClaims,
        tokens: &ProviderTokens,
    ) -> Result<IdClaims, OidcError> {
        let metadata = self.metadata().await?;
        let is_known = claims.verified_email().is_some();
        let Some(url) = metadata.userinfo_endpoint.as_ref().filter(|_| !is_known) else {
            return Ok(claims);
        };
        let request = self.http.get(url).bearer_auth(tokens.access_token.expose_secret());
        let info: UserInfo = self.call(request).await?;
        if info.sub != claims.sub {
            return Err(OidcError::Answer("its userinfo is about another person".into()));
        }
        Ok(IdClaims { email: info.email, email_verified: info.email_verified, ..claims })
    }

    /// Checks an ID token: its signature, issuer, audience, age and nonce.
    ///
    /// # Errors
    /// [`OidcError`].
    pub async fn check(
        &self,
        token: &SecretString,
        client_id: &str,
        nonce: &str,
    ) -> Result<IdClaims, OidcError> {
        let claims: IdClaims = self.verify(token, client_id).await?;
        let fault = claims.fault(client_id, nonce, jsonwebtoken::get_current_timestamp());
        fault.map_or(Ok(claims), |it| Err(OidcError::Token(it.into())))
    }

    /// Checks any token of the issuer: its signature, issuer, audience and expiry.
    ///
    /// # Errors
    /// [`OidcError`].
    pub async fn verify<T: DeserializeOwned>(
        &self,
        token: &SecretString,
        audience: &str,
    ) -> Result<T, OidcError> {
        let refused = |it: jsonwebtoken::errors::Error| OidcError::Token(it.to_string());
        let header = decode_header(token.expose_secret()).map_err(refused)?;
        if !ALGORITHMS.contains(&header.alg) {
            return Err(OidcError::Token("signed with an algorithm that is not accepted".into()));
        }
        let key = self.key(header.kid.as_deref(), header.alg).await?;
        let mut validation = Validation::new(header.alg);
        validation.set_issuer(&[&self.url]);
        validation.set_audience(&[audience]);
        validation.leeway = LEEWAY_SECONDS;
        validation.validate_nbf = true;
        let required = ["exp", "iss", "aud", "sub"].map(str::to_owned);
        validation.required_spec_claims = HashSet::from(required);
        Ok(decode::<T>(token.expose_secret(), &key, &validation).map_err(refused)?.claims)
    }
}

impl IdClaims {
    /// The rule that they break, beyond those that the library checks.
    fn fault(&self, client_id: &str, nonce: &str, now: u64) -> Option<&'static str> {
        let is_for_many = matches!(&self.aud, Audience::Many(all) if all.len() > 1);
        let is_ours = self.azp.as_deref().map_or(!is_for_many, |it| it == client_id);
        let (earliest, latest) = (now.saturating_sub(MAX_TOKEN_AGE_SECONDS), now + LEEWAY_SECONDS);
        match () {
            () if !is_ours => Some("it was issued to another client"),
            () if self.nonce.as_deref() != Some(nonce) => {
                Some("its nonce belongs to another login")
            }
            () if !(earliest..=latest).contains(&self.iat) => {
                Some("it was issued too long ago, or in the future")
            }
            () if !(1..=MAX_SUBJECT_CHARS).contains(&self.sub.chars().count()) => {
                Some("its `sub` is empty or too long")
            }
            () if self.sub.contains(char::is_control) => Some("its `sub` has control characters"),
            () => None,
        }
    }
}

/// The key of a set that a token names; without a name, the only one that fits.
fn choose(keys: &JwkSet, kid: Option<&str>, algorithm: Algorithm) -> Option<DecodingKey> {
    let fitting = keys.keys.iter().filter(|key| {
        let common = &key.common;
        let signs = common.public_key_use.as_ref().is_none_or(|it| *it == PublicKeyUse::Signature);
        let named = common.key_algorithm.map(|it| it.to_string());
        let fits = named.is_none_or(|it| it == format!("{algorithm:?}"));
        signs && fits && kid.is_none_or(|kid| common.key_id.as_deref() == Some(kid))
    });
    let mut keys = fitting
        .filter_map(|it| DecodingKey::from_jwk(it).ok())
        .filter(|it| PublicKey::new(algorithm, it).is_ok());
    let first = keys.next()?;
    (kid.is_some() || keys.next().is_none()).then_some(first)
}

/// The URL that a browser is sent to.
///
/// # Errors
/// When the endpoint is no URL.
pub fn authorization_url(
    metadata: &ProviderMetadata,
    parameters: &[(&str, &str)],
) -> Result<Url, OidcError> {
    let url = metadata.authorization_endpoint.as_deref().unwrap_or_default();
    let mut url = check_url(url).map_err(|error| OidcError::Answer(format!("{error:#}")))?;
    url.query_pairs_mut().extend_pairs(parameters);
    Ok(url)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use serde_json::json;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_token_that_names_an_unknown_key_holds_up_no_other() {
        fencepost_net::tls::install();
        let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", silent.local_addr().expect("an address"));
        let issuer = Issuer::new(&url, None).expect("an issuer");
        // The example of RFC 7517, appendix A.1.
        let key = json!({
            "kty": "EC", "crv": "P-256", "kid": "one", "use": "sig",
            "x": "MKBCTNIcKUSDii11ySs3526iDZ8AiTo7Tu6KPAqv7D4",
            "y": "4Etl6SRW2YiLUrN5vfvVHuhp7x8PxltmWWlbbM4IFyM",
        });
        let keys: JwkSet = serde_json::from_value(json!({"keys": [key]})).expect("keys");
        let were_read = |ago: Duration| {
            let read_at = Instant::now().checked_sub(ago).expect("a time before");
            issuer.cache().keys = Some((Arc::new(keys.clone()), read_at));
        };
        let known = || issuer.key(Some("one"), Algorithm::ES256).now_or_never();
        were_read(KEYS_PAUSE);
        let mut unknown = Box::pin(issuer.key(Some("two"), Algorithm::ES256));
        assert!(unknown.as_mut().now_or_never().is_none(), "the keys are read again");
        assert!(known().expect("at once").is_ok());
        were_read(KEYS_LIFE);
        assert!(known().expect("at once").is_ok(), "the old keys, while others read");
        were_read(KEYS_LIFE + READING_TIME);
        assert!(known().is_none(), "they are too old");
    }
}
