//! Who is calling. Having a [`Caller`] *is* the permission: a handler that takes one cannot run
//! without a live key, and takes its project from nowhere else.

pub mod key;

use std::sync::Arc;

use axum::{
    extract::{FromRequestParts, RawPathParams},
    http::{HeaderMap, header::AUTHORIZATION, request::Parts},
};
use base64::{Engine as _, prelude::BASE64_STANDARD};

use crate::{
    app::{App, KEY_CACHE_TTL, SecretHash},
    error::Error,
    ids::ProjectId,
    store::keys::KeyOwner,
};

/// The key may come in this header instead of `Authorization`.
const API_KEY_HEADER: &str = "x-api-key";
/// The path parameter that names a project; it must agree with the key.
const PROJECT_PARAMETER: &str = "project";

/// A request with a live key.
#[derive(Debug, Clone)]
pub struct Caller {
    /// Whose jobs this request may see and touch.
    pub project_id: ProjectId,
    hash: SecretHash,
}

impl Caller {
    /// Resolves when the key is found to be revoked.
    pub async fn until_revoked(&self, app: &App) {
        loop {
            tokio::time::sleep(KEY_CACHE_TTL).await;
            // In a task of its own: this wait may be dropped in the middle. A store that does not
            // answer revokes nothing.
            let (app, hash) = (app.clone(), self.hash);
            let asked = tokio::spawn(async move { app.key_owner(hash).await });
            if matches!(asked.await, Ok(Ok(None))) {
                return;
            }
        }
    }
}

impl FromRequestParts<App> for Caller {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Error> {
        let secret = presented_key(&parts.headers).ok_or(Error::Unauthorized)?;
        if !key::is_well_formed(&secret) {
            return Err(Error::Unauthorized);
        }
        let hash = key::hash(&secret);
        let owner = app.key_owner(hash).await?.ok_or(Error::Unauthorized)?;
        check_project_in_path(parts, app, &owner).await?;
        Ok(Self { project_id: owner.project_id, hash })
    }
}

async fn check_project_in_path(
    parts: &mut Parts,
    app: &App,
    owner: &Arc<KeyOwner>,
) -> Result<(), Error> {
    let params =
        RawPathParams::from_request_parts(parts, app).await.map_err(|_| Error::ProjectNotFound)?;
    let named = params.iter().find(|(name, _)| *name == PROJECT_PARAMETER).map(|(_, value)| value);
    match named {
        Some(it) if it != owner.project_slug && it != owner.project_public_id.to_string() => {
            Err(Error::ProjectNotFound)
        }
        _ => Ok(()),
    }
}

/// The key from `Authorization: Bearer`, from `X-Api-Key`, or from HTTP Basic as the password.
fn presented_key(headers: &HeaderMap) -> Option<String> {
    if let Some(value) = headers.get(AUTHORIZATION) {
        let (scheme, rest) = value.to_str().ok()?.split_once(' ')?;
        let rest = rest.trim();
        if scheme.eq_ignore_ascii_case("bearer") {
            return Some(rest.to_owned());
        }
        if scheme.eq_ignore_ascii_case("basic") {
            let decoded = String::from_utf8(BASE64_STANDARD.decode(rest).ok()?).ok()?;
            // Some clients can only set a user.
            let (user, password) = decoded.split_once(':')?;
            return Some(if password.is_empty() { user } else { password }.to_owned());
        }
        return None;
    }
    headers.get(API_KEY_HEADER)?.to_str().ok().map(str::to_owned)
}
