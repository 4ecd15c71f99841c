//! Exchanging a token of a CI service or a cluster for a key of minutes: so no key is stored there.

use std::sync::Arc;

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    access::Scope,
    binding::KeyBinding,
    error::Error,
    ids::{KeyId, ProjectId, ProjectPublicId},
    lease::RequireFence,
    limits::{EXCHANGED_KEY_SECONDS, MAX_EXCHANGED_KEYS, MAX_NAME_CHARS},
    text,
};
use fencepost_store::{
    self as store,
    people::{audit::NewAuditEntry, keys::ListedKey},
};
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use serde_json::json;
use sqlx::{Acquire, PgConnection};
use tokio::time::timeout;

use super::{PROVIDER_TIMEOUT, Providers, TokenIssuer, issuer::OidcError};
use crate::accounts::{
    Client, EXCHANGES_PER_ADDRESS, EXCHANGES_PER_SUBJECT,
    base::Base,
    keys::{self, KeyOrigin, KeyRequest, MadeKey, TrustedTokens},
    throttle::charge,
};

/// The claims of a token.
#[derive(Debug, Clone, Deserialize)]
pub struct BearerClaims {
    sub: String,
    exp: i64,
}

/// The issuer that a token names. It is not checked yet.
#[derive(Deserialize)]
struct Named {
    iss: String,
}

fn named_issuer(token: &str) -> Option<String> {
    let claims = token.split('.').nth(1)?;
    let claims = BASE64_URL_SAFE_NO_PAD.decode(claims).ok()?;
    Some(serde_json::from_slice::<Named>(&claims).ok()?.iss)
}

fn refused(why: impl Into<String>) -> Error {
    Error::TokenRefused(why.into())
}

/// Exchanges of tokens for keys.
#[derive(Clone)]
pub struct TokenExchanges {
    pub(in crate::accounts) base: Base,
    pub(in crate::accounts) providers: Arc<Providers>,
    pub(in crate::accounts) public_url: String,
}

impl TokenExchanges {
    /// Exchanges a token for a key with the rights of the key `id`, which trusts it.
    ///
    /// # Errors
    /// [`Error::TokenRefused`] when the token is not valid, or there is no such key that trusts it;
    /// [`Error::NotReady`] when its issuer does not answer; [`Error::Suspended`];
    /// [`Error::QuotaExceeded`]; [`Error::RateLimited`].
    pub async fn exchange(
        &self,
        project: &str,
        id: KeyId,
        token: &SecretString,
        client: &Client,
    ) -> Result<MadeKey, Error> {
        self.base
            .throttle
            .count(&[charge("exchanges", &client.address, EXCHANGES_PER_ADDRESS)])
            .await?;
        let (issuer, claims) = self.check_bearer(token).await?;
        let (issuer, subject) = (issuer.issuer.url(), claims.sub.as_str());
        let pair = format!("{issuer} {subject}");
        self.base.throttle.count(&[charge("exchanged", &pair, EXCHANGES_PER_SUBJECT)]).await?;
        // The subject is its own: it says nothing of projects.
        let unknown =
            || refused(format!("the project has no live key with this id that trusts {subject:?}"));
        let mut conn = self.base.pool.acquire().await?;
        if text::check_name(project, MAX_NAME_CHARS).is_err() {
            return Err(unknown());
        }
        let public_id = project.parse::<ProjectPublicId>().ok();
        let found = store::people::projects::find(&mut conn, project, public_id).await?;
        let project = found.ok_or_else(unknown)?;
        let mut tx = conn.begin().await?;
        let key = store::people::keys::lock(&mut tx, project.id, id).await?.filter(|it| it.is_live);
        let trusts = |it: &TrustedTokens| it.include(issuer, subject);
        let key = key.filter(|it| TrustedTokens::of(it).as_ref().is_some_and(trusts));
        let key = key.ok_or_else(unknown)?;
        if project.suspended_at.is_some() {
            return Err(Error::Suspended { what: "project" });
        }
        let token_end = DateTime::from_timestamp(claims.exp, 0);
        let ends: Vec<_> = token_end.into_iter().chain(key.expires_at).collect();
        let end = store::people::keys::end_within(&mut tx, EXCHANGED_KEY_SECONDS, &ends).await?;
        if store::people::keys::seconds_until(&mut tx, end).await? < 1.0 {
            return Err(refused("it has expired"));
        }
        store::people::keys::record_used(&mut tx, &[((project.id, key.id), 0)]).await?;
        let request = exchanged(&key, end);
        let owner = (project.id, project.mode.as_str(), subject);
        let made = insert_exchanged(&mut tx, owner, &key, request, client).await?;
        tx.commit().await?;
        Ok(made)
    }

    async fn check_bearer(
        &self,
        token: &SecretString,
    ) -> Result<(&TokenIssuer, BearerClaims), Error> {
        let named = named_issuer(token.expose_secret());
        let named = named.ok_or_else(|| refused("it is no JSON Web Token with an issuer"))?;
        let known = self.providers.token_issuers.iter().find(|it| it.issuer.url() == named);
        let known = known.ok_or_else(|| {
            refused("the operator of this server does not accept tokens of its issuer")
        })?;
        let audience = known.audience.as_deref().unwrap_or(&self.public_url);
        let checked = timeout(PROVIDER_TIMEOUT, known.issuer.verify(token, audience)).await;
        match checked {
            Ok(Ok(claims)) => Ok((known, claims)),
            Ok(Err(OidcError::Token(why))) => Err(refused(why)),
            Ok(Err(error)) => {
                let (issuer, error) = (known.issuer.url(), fencepost_domain::error::chain(&error));
                tracing::warn!(issuer, error, "token of an identity provider was not verified");
                Err(Error::NotReady("the issuer of the token does not answer"))
            }
            Err(_) => Err(Error::NotReady("the issuer of the token does not answer in time")),
        }
    }
}

/// A key that a token is exchanged for: with the rights of the key that trusts it.
fn exchanged(key: &ListedKey, expires_at: DateTime<Utc>) -> KeyRequest {
    KeyRequest {
        name: key.name.clone(),
        scopes: key.scopes.iter().filter_map(|it| Scope::of_name(it)).collect(),
        expires_at: Some(expires_at),
        per_minute: [key.produce_per_minute, key.work_per_minute, key.manage_per_minute],
        require_fence: RequireFence::of_name(&key.require_fence),
        strict: key.strict,
        allowed_ips: keys::read_networks(&key.allowed_ips),
        binding: KeyBinding::of(key.queues.clone(), key.job_types.clone()),
        origin: KeyOrigin::Exchanged,
    }
}

/// Stores such a key, with an audit entry that names the token's subject.
///
/// # Errors
/// [`Error::QuotaExceeded`].
async fn insert_exchanged(
    conn: &mut PgConnection,
    (project_id, mode, subject): (ProjectId, &str, &str),
    by: &ListedKey,
    request: KeyRequest,
    client: &Client,
) -> Result<MadeKey, Error> {
    let creator = Some(by.id.to_string());
    let made =
        keys::insert_first(conn, (project_id, mode), request, creator, MAX_EXCHANGED_KEYS).await?;
    let (id, listed) = (made.listed.id.to_string(), &made.listed);
    let after = json!({"subject": subject, "expires_at": listed.expires_at}).to_string();
    let entry = NewAuditEntry {
        action: "key.exchanged",
        target: Some(id),
        before: None,
        after: Some(after),
    };
    let actor = client.actor("key", by.id.to_string());
    store::people::audit::insert(conn, project_id, &actor, &entry).await?;
    Ok(made)
}
