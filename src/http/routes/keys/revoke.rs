//! Rotating and revoking keys, and reports of leaked keys.

use axum::{Extension, Json as Reply, extract::State, http::StatusCode};
use fencepost_domain::{
    error::Error,
    limits::{self, MAX_KEY_OVERLAP_SECONDS},
};
use fencepost_identity::{
    accounts::{
        Client,
        key::{self, SecretHash},
        keys,
    },
    credentials::Evict,
};
use fencepost_web::{
    app::App,
    auth::{Administer, Caller},
    wire::{
        extract::{Json, KeyInPath, OptionalJson, Query, RequestBody},
        openapi::{chars, range},
        validate::Check,
    },
};
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use utoipa::ToSchema;

use super::CreatedApiKey;
use crate::{error::ErrorBody, routes::members::RevokeKeysQuery};

/// Default overlap of a rotation, in seconds.
const DEFAULT_OVERLAP_SECONDS: i64 = 86_400;

/// Rotation of a key.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"overlap_seconds": 3600}))]
pub struct RotateKeyRequest {
    /// Seconds for which the old key stays valid. Default: 86400.
    #[schema(extensions(("bounds" = json!(range(0, MAX_KEY_OVERLAP_SECONDS)))))]
    overlap_seconds: Option<i64>,
}

impl RequestBody for RotateKeyRequest {}

/// Rotate a key.
///
/// Creates a key with the same rights, and lets the old one expire after the overlap. Both are
/// valid until then.
#[utoipa::path(
    post, path = "/keys/{key_id}/rotate", tag = "keys", operation_id = "keys_rotate",
    security(("api_key" = ["keys"]), ("session" = ["admin"])),
    params(("key_id" = String, Path, description = "The key's id.", example = "key_01m7w3ha3aextt8pkwwdmxsmqw")),
    request_body(content = RotateKeyRequest, description = "Optional."),
    responses(
        (status = 201, description = "The new key. It is shown only once.", body = CreatedApiKey),
        (status = 404, description = "The project has no such live key.", body = ErrorBody),
    ),
)]
pub async fn rotate(
    caller: Caller<Administer>,
    State(app): State<App>,
    KeyInPath(id): KeyInPath,
    OptionalJson(request): OptionalJson<RotateKeyRequest>,
) -> Result<(StatusCode, Reply<CreatedApiKey>), Error> {
    let overlap = request.overlap_seconds.unwrap_or(DEFAULT_OVERLAP_SECONDS);
    let mut check = Check::default();
    check.range("overlap_seconds", overlap, 0, MAX_KEY_OVERLAP_SECONDS);
    check.finish()?;
    caller.require_step_up(&app).await?;
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let (author, max) = (caller.author(), caller.limits.max_keys());
    let (made, hash) = keys::rotate(&mut conn, &author, id, overlap, max).await?;
    drop(conn);
    evict(&app, hash).await;
    Ok((StatusCode::CREATED, Reply(made.into())))
}

pub(super) async fn evict(app: &App, hashes: impl IntoIterator<Item = SecretHash>) {
    for hash in hashes {
        app.credentials.evict(Evict::Key(hash)).await;
    }
}

/// Revoke a key.
///
/// Every node refuses it within five seconds, and ends its polls. Revoking twice is no error.
#[utoipa::path(
    delete, path = "/keys/{key_id}", tag = "keys", operation_id = "keys_revoke",
    security(("api_key" = ["keys"]), ("session" = ["admin"])),
    params(
        ("key_id" = String, Path, description = "The key's id.", example = "key_01m7w3ha3aextt8pkwwdmxsmqw"),
        RevokeKeysQuery,
    ),
    responses(
        (status = 204, description = "Revoked."),
        (status = 404, description = "The project has no such key.", body = ErrorBody),
        (status = 409, description = "Live keys that it has created remain.", body = ErrorBody),
    ),
)]
pub async fn revoke(
    caller: Caller<Administer>,
    State(app): State<App>,
    KeyInPath(id): KeyInPath,
    Query(query): Query<RevokeKeysQuery>,
) -> Result<StatusCode, Error> {
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let ended = keys::revoke(&mut conn, &caller.author(), id, query.revoke_keys).await?;
    drop(conn);
    evict(&app, ended).await;
    Ok(StatusCode::NO_CONTENT)
}

/// A leaked key.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"key": "fp_live_…"}))]
pub struct ReportKeyRequest {
    /// The key itself: its possession proves that it has leaked.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(0, limits::MAX_SECRET_BYTES)))))]
    key: SecretString,
}

impl RequestBody for ReportKeyRequest {}

/// Report a leaked key.
///
/// Revokes the key immediately, and all keys that were created with it. Needs no other credential.
/// The answer does not reveal whether the key was valid.
#[utoipa::path(
    post, path = "/keys/report", tag = "keys", operation_id = "keys_report",
    request_body = ReportKeyRequest, security(()),
    responses(
        (status = 204, description = "If the key was valid, it is revoked."),
    ),
)]
pub async fn report(
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<ReportKeyRequest>,
) -> Result<StatusCode, Error> {
    app.accounts.throttle.address(&client).await?;
    if !key::is_well_formed(request.key.expose_secret()) {
        return Ok(StatusCode::NO_CONTENT);
    }
    let mut conn = app.engine.pools.people.acquire().await?;
    let ended = keys::report(&mut conn, &request.key, &client).await?;
    drop(conn);
    evict(&app, ended).await;
    Ok(StatusCode::NO_CONTENT)
}
