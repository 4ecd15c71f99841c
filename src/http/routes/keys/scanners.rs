//! Leaked keys that a secret scanner reports, in the form of GitHub's partner programme.

use axum::{
    Extension,
    extract::{FromRequest, Request, State},
    http::{HeaderMap, StatusCode},
};
use fencepost_domain::{
    error::Error,
    limits::{self, MAX_REPORT_BYTES, MAX_REPORTED_KEYS},
};
use fencepost_identity::accounts::{Client, key, keys};
use fencepost_web::{
    app::App,
    wire::{body, extract::is_json, openapi::chars},
};
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use utoipa::ToSchema;

use super::revoke::evict;
use crate::error::ErrorBody;

const KEY_HEADER: &str = "github-public-key-identifier";
const SIGNATURE_HEADER: &str = "github-public-key-signature";
const NOT_SIGNED: &str = "must be of the body, by a key that the operator trusts";

/// A string that a scanner has found. Its other fields are ignored.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"token": "fp_live_…"}))]
pub struct FoundToken {
    /// The key itself: its possession proves that it has leaked.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(0, limits::MAX_SECRET_BYTES)))))]
    token: SecretString,
}

/// The tokens of a body that a known scanner has signed.
pub struct Signed(Vec<FoundToken>);

impl FromRequest<App> for Signed {
    type Rejection = Error;

    async fn from_request(request: Request, app: &App) -> Result<Self, Error> {
        if !is_json(request.headers()) {
            return Err(Error::UnsupportedMediaType);
        }
        let text = |headers: &HeaderMap, name| {
            headers.get(name).and_then(|it| it.to_str().ok()).unwrap_or_default().to_owned()
        };
        let id = text(request.headers(), KEY_HEADER);
        let signature = text(request.headers(), SIGNATURE_HEADER);
        let client = request.extensions().get::<Client>().cloned().unwrap_or_default();
        let body = body::read(request, MAX_REPORT_BYTES, None).await?;
        if !app.accounts.scanner_keys.have_signed(&id, &signature, &body) {
            app.accounts.throttle.address(&client).await?;
            return Err(Error::invalid(SIGNATURE_HEADER, NOT_SIGNED));
        }
        // What the parser says may repeat a key.
        let found: Vec<FoundToken> = serde_json::from_slice(&body)
            .map_err(|_| Error::Unreadable("the body must be a list of {token}".to_owned()))?;
        if found.len() > MAX_REPORTED_KEYS {
            let count = found.len();
            let message = format!("must have at most {MAX_REPORTED_KEYS} entries, has {count}");
            return Err(Error::invalid("body", message));
        }
        Ok(Self(found))
    }
}

/// Report leaked keys as a secret scanner.
///
/// Revokes the keys immediately, and all keys that were created with them. The body is signed with
/// a key that the operator trusts (ECDSA on P-256 with SHA-256), as GitHub's secret scanning does.
/// Strings that are no keys, and fields that are not listed, are ignored.
#[utoipa::path(
    post, path = "/keys/scanner-reports", tag = "keys", operation_id = "keys_scanner_report",
    request_body = Vec<FoundToken>, security(()),
    params(
        ("Github-Public-Key-Identifier" = Option<String>, Header, description = "Name of the scanner's key."),
        ("Github-Public-Key-Signature" = Option<String>, Header, description = "Signature of the body, in base64."),
    ),
    responses(
        (status = 204, description = "Those that were valid are revoked."),
        (status = 400, description = "No known scanner has signed the body.", body = ErrorBody),
    ),
)]
pub async fn report(
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Signed(found): Signed,
) -> Result<StatusCode, Error> {
    for FoundToken { token } in found {
        if !key::is_well_formed(token.expose_secret()) {
            continue;
        }
        let mut conn = app.engine.pools.people.acquire().await?;
        let ended = keys::report(&mut conn, &token, &client).await?;
        drop(conn);
        evict(&app, ended).await;
    }
    Ok(StatusCode::NO_CONTENT)
}
