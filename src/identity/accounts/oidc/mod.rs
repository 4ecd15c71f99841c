//! Logging in with OpenID Connect providers (authorization code with PKCE).
//!
//! An identity is an issuer and its `sub`. It is linked from within a session that was stepped up,
//! never by an e-mail address. What a login needs between its two requests is in a signed token
//! that the browser keeps in a cookie: so nothing is stored for strangers, and a login that another
//! browser has begun is of no use.

pub mod config;
mod exchange;
mod identities;
mod issuer;

use std::{path::Path, sync::Arc, time::Duration};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use fencepost_domain::{error::Error, ids::SessionId};
use fencepost_store::{self as store, people::identities::Subject};
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::time::timeout;

pub use self::exchange::TokenExchanges;
use self::{
    config::{OidcConfig, ProviderConfig},
    issuer::{IdClaims, Issuer, OidcError, authorization_url},
};
use super::{
    Client,
    base::Base,
    sessions::{Login, SignedIn},
    token::{Bearer, Tokens},
};

/// How long a person may take at the provider, in seconds.
pub const LOGIN_SECONDS: u64 = 600;
/// The deadline of everything that a provider is asked for one request.
const PROVIDER_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of a login's page to return to; a longer one is forgotten.
const MAX_NEXT_BYTES: usize = 600;
/// Bytes of a code that a provider gives.
const MAX_CODE_BYTES: usize = 2_048;
/// The audience of the token between the requests.
const PURPOSE: &str = "oidc-login";

/// The providers of a server.
#[derive(Debug, Default)]
pub struct Providers {
    logins: Vec<Provider>,
    token_issuers: Vec<TokenIssuer>,
}

/// An issuer whose tokens projects may trust.
#[derive(Debug)]
struct TokenIssuer {
    audience: Option<String>,
    issuer: Issuer,
}

#[derive(Debug)]
struct Provider {
    config: ProviderConfig,
    issuer: Issuer,
}

impl Providers {
    /// Reads the operator's file, and calls no provider.
    ///
    /// # Errors
    /// When the file cannot be read, or breaks a rule.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let OidcConfig { providers, token_issuers } = config::open(path)?;
        let logins = providers.into_iter().map(|config| {
            let issuer = Issuer::new(&config.issuer, None)?;
            Ok(Provider { config, issuer })
        });
        let logins = logins.collect::<anyhow::Result<_>>()?;
        let token_issuers = token_issuers.into_iter().map(|settings| {
            let issuer = Issuer::new(&settings.issuer, settings.keys)?;
            Ok(TokenIssuer { audience: settings.audience, issuer })
        });
        Ok(Self { logins, token_issuers: token_issuers.collect::<anyhow::Result<_>>()? })
    }

    /// The URLs of the issuers whose tokens projects may trust.
    pub fn token_issuers(&self) -> impl Iterator<Item = &str> {
        self.token_issuers.iter().map(|it| it.issuer.url())
    }

    /// The names and labels.
    pub fn labels(&self) -> impl Iterator<Item = (&str, &str)> {
        self.logins.iter().map(|it| (it.config.name.as_str(), it.config.label.as_str()))
    }

    /// The label of an issuer; its URL, if it is no provider any more.
    #[must_use]
    pub fn label_of<'a>(&'a self, issuer: &'a str) -> &'a str {
        let found = self.logins.iter().find(|it| it.config.issuer == issuer);
        found.map_or(issuer, |it| &it.config.label)
    }

    /// Asks each provider and issuer for its keys: their names, and what is wrong.
    pub async fn check(&self) -> Vec<(&str, Option<String>)> {
        let mut checked = Vec::new();
        let logins = self.logins.iter().map(|it| (it.config.name.as_str(), &it.issuer));
        let token_issuers = self.token_issuers.iter().map(|it| (it.issuer.url(), &it.issuer));
        for (name, issuer) in logins.chain(token_issuers) {
            let fault = issuer.check_keys().await.err();
            checked.push((name, fault.map(|it| fencepost_domain::error::chain(&it))));
        }
        checked
    }

    fn find(&self, name: &str) -> Option<&Provider> {
        self.logins.iter().find(|it| it.config.name == name)
    }
}

/// The state of a login while the person is at the provider.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Pending {
    provider: String,
    state: String,
    nonce: String,
    /// The secret of PKCE (RFC 7636).
    verifier: String,
    next: String,
    /// The session that links the identity to its account; none: a login.
    session: Option<String>,
}

/// Where to send a browser, and what it keeps meanwhile.
#[derive(Debug)]
pub struct Departure {
    pub url: String,
    pub kept: SecretString,
}

/// The parameters that a provider has appended to our URL.
#[derive(Debug, Default)]
pub struct Answer<'a> {
    pub state: &'a str,
    pub code: &'a str,
    /// Its issuer (RFC 9207), if it names it.
    pub issuer: Option<&'a str>,
}

/// How it ended, if nothing has failed.
#[derive(Debug)]
pub enum Arrival {
    SignedIn(SignedIn),
    /// The login needs a second factor, too; with its token.
    SecondFactorRequired(SecretString),
    /// The identity is linked to the session's account.
    Linked,
}

/// Why a login with a provider was refused. The person sees it, and may try again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It was begun by another browser or session, or too long ago, or it has ended.
    NotBegun,
    /// The person has declined, or the provider's answer is not valid.
    ByProvider,
    Unreachable,
    /// The operator allows other domains.
    Domain,
    /// No account has the identity.
    NotLinked,
    /// Another account has it, or this one.
    Taken,
    /// The account has as many as it may have.
    TooMany,
}

fn random() -> String {
    BASE64_URL_SAFE_NO_PAD.encode(rand::random::<[u8; 32]>())
}

/// Logins with identities at other providers.
#[derive(Clone)]
pub struct Identities {
    pub(in crate::accounts) base: Base,
    pub(in crate::accounts) providers: Arc<Providers>,
    pub(in crate::accounts) tokens: Tokens,
    pub(in crate::accounts) public_url: String,
}

impl Identities {
    /// Begins a login, or with a session a link to its account.
    ///
    /// # Errors
    /// [`Error::NoSuchRoute`] for an unknown provider; [`Error::StepUpRequired`] for a link;
    /// [`Error::NotReady`] when the provider does not answer; [`Error::RateLimited`].
    pub async fn leave(
        &self,
        provider: &str,
        next: &str,
        link_to: Option<Bearer>,
        client: &Client,
    ) -> Result<Departure, Error> {
        self.base.throttle.address(client).await?;
        let provider = self.providers.find(provider).ok_or(Error::NoSuchRoute)?;
        if let Some(bearer) = link_to {
            self.base.sessions.require_step_up(bearer).await?;
        }
        let metadata = timeout(PROVIDER_TIMEOUT, provider.issuer.metadata()).await;
        let metadata = metadata.map_err(|_| Error::NotReady(SILENT))?.map_err(|error| {
            note_failure(provider, &error);
            Error::NotReady(SILENT)
        })?;
        let pending = Pending {
            provider: provider.config.name.clone(),
            state: random(),
            nonce: random(),
            verifier: random(),
            next: if next.len() > MAX_NEXT_BYTES { String::new() } else { next.to_owned() },
            session: link_to.map(|it| it.session_id.to_string()),
        };
        let digest = Sha256::digest(pending.verifier.as_bytes());
        let challenge = BASE64_URL_SAFE_NO_PAD.encode(digest);
        let redirect_uri = self.redirect_uri(&pending.provider);
        let url = authorization_url(
            &metadata,
            &[
                ("response_type", "code"),
                ("client_id", &provider.config.client_id),
                ("redirect_uri", &redirect_uri),
                ("scope", "openid email"),
                ("state", &pending.state),
                ("nonce", &pending.nonce),
                ("code_challenge", &challenge),
                ("code_challenge_method", "S256"),
            ],
        );
        let url = url.map_err(|error| {
            note_failure(provider, &error);
            Error::NotReady(SILENT)
        })?;
        let url = url.to_string();
        let kept = self.tokens.sign_value(PURPOSE, &pending, LOGIN_SECONDS)?.into();
        Ok(Departure { url, kept })
    }

    /// Completes what [`Self::leave`] has begun. Also returns the page to show next.
    ///
    /// # Errors
    /// [`Error::Suspended`] for the account; [`Error::StepUpRequired`] for a link;
    /// [`Error::RateLimited`].
    pub async fn arrive(
        &self,
        provider: &str,
        kept: &str,
        answer: &Answer<'_>,
        visitor: Option<Bearer>,
        client: &Client,
    ) -> Result<Result<(Arrival, String), Refusal>, Error> {
        self.base.throttle.address(client).await?;
        let provider = self.providers.find(provider).ok_or(Error::NoSuchRoute)?;
        let pending = self.tokens.read_value::<Pending>(PURPOSE, kept);
        let pending =
            pending.filter(|it| it.provider == provider.config.name && it.state == answer.state);
        let Some(pending) = pending else { return Ok(Err(Refusal::NotBegun)) };
        if answer.issuer.is_some_and(|it| it != provider.config.issuer) {
            return Ok(Err(Refusal::ByProvider));
        }
        // Before the code is used up: a step-up leads back here.
        if let (Some(_), Some(bearer)) = (&pending.session, visitor) {
            self.base.sessions.require_step_up(bearer).await?;
        }
        let asked = timeout(PROVIDER_TIMEOUT, self.ask(provider, &pending, answer.code)).await;
        let claims = match asked {
            Ok(Ok(claims)) => claims,
            Ok(Err(refusal)) => return Ok(Err(refusal)),
            Err(_) => return Ok(Err(Refusal::Unreachable)),
        };
        let subject = Subject {
            issuer: provider.issuer.url(),
            subject: &claims.sub,
            email: claims.verified_email(),
        };
        let arrival = match &pending.session {
            Some(session) => {
                let session: Option<SessionId> = session.parse().ok();
                match visitor.filter(|it| Some(it.session_id) == session) {
                    Some(bearer) => self.link(bearer, &subject, client).await?,
                    None => Err(Refusal::NotBegun),
                }
            }
            None => self.log_in(&subject, client).await?,
        };
        Ok(arrival.map(|it| (it, pending.next)))
    }

    /// Asks the provider who the person is.
    async fn ask(
        &self,
        provider: &Provider,
        pending: &Pending,
        code: &str,
    ) -> Result<IdClaims, Refusal> {
        if code.is_empty() || code.len() > MAX_CODE_BYTES {
            return Err(Refusal::ByProvider);
        }
        let redirect_uri = self.redirect_uri(&pending.provider);
        let asked = async {
            let (issuer, config) = (&provider.issuer, &provider.config);
            let code = (code, pending.verifier.as_str());
            let tokens = issuer.exchange(config, code, &redirect_uri).await?;
            let claims = issuer.check(&tokens.id_token, &config.client_id, &pending.nonce).await?;
            match issuer.with_email(claims.clone(), &tokens).await {
                // It is only shown.
                Err(_) if config.allowed_domains.is_empty() => Ok(claims),
                asked => asked,
            }
        };
        let claims = asked.await.map_err(|error| {
            note_failure(provider, &error);
            match error {
                OidcError::Token(_) | OidcError::Status(400..=499) => Refusal::ByProvider,
                _ => Refusal::Unreachable,
            }
        })?;
        match provider.config.allows(claims.verified_email()) {
            true => Ok(claims),
            false => Err(Refusal::Domain),
        }
    }

    /// Where providers send the browser back to.
    fn redirect_uri(&self, provider: &str) -> String {
        format!("{}/console/login/with/{provider}/return", self.public_url)
    }

    async fn log_in(
        &self,
        subject: &Subject<'_>,
        client: &Client,
    ) -> Result<Result<Arrival, Refusal>, Error> {
        let found = {
            let mut conn = self.base.pool.acquire().await?;
            store::people::identities::use_identity(&mut conn, subject).await?
        };
        let Some(account) = found else { return Ok(Err(Refusal::NotLinked)) };
        if account.is_suspended {
            return Err(Error::Suspended { what: "account" });
        }
        let (id, hash) = (account.id, account.password_hash);
        match self.base.sessions.begin(id, &hash, Login::Vouched, client).await {
            Ok(signed_in) => Ok(Ok(Arrival::SignedIn(signed_in))),
            Err(Error::CodeRequired(token)) => Ok(Ok(Arrival::SecondFactorRequired(token))),
            Err(other) => Err(other),
        }
    }
}

/// Shown to visitors.
const SILENT: &str = "the login provider does not answer: try again, or log in with your password";

fn note_failure(provider: &Provider, error: &OidcError) {
    let (provider, error) = (&provider.config.name, fencepost_domain::error::chain(error));
    tracing::warn!(provider, error, "login with an identity provider failed");
}
