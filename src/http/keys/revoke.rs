//! Rotating and revoking keys, and reports of leaked keys.

use axum::{Extension, Json as Reply, extract::State, http::StatusCode};
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use sqlx::Acquire;
use utoipa::ToSchema;

use super::{CreatedApiKey, check_again, make, note};
use crate::{
    accounts::{Client, KeyRequest, key},
    app::App,
    auth::{Administer, Caller},
    credentials::Evict,
    domain::{
        access::{Scope, may_grant},
        limits::MAX_KEY_OVERLAP_SECONDS,
    },
    error::Error,
    http::error::ErrorBody,
    store::{
        self,
        audit::{Actor, NewAuditEntry},
    },
    wire::{
        extract::{Json, KeyInPath, OptionalJson, RequestBody},
        validate::Check,
    },
};

/// Default overlap of a rotation, in seconds.
const DEFAULT_OVERLAP_SECONDS: i64 = 86_400;

/// Rotation of a key.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"overlap_seconds": 3600}))]
pub struct RotateKeyRequest {
    /// Seconds for which the old key stays valid. Default: 86400.
    #[schema(minimum = 0, maximum = 2_592_000)]
    overlap_seconds: Option<i64>,
}

impl RequestBody for RotateKeyRequest {}

/// Rotate a key.
///
/// Creates a key with the same rights, and lets the old one expire after the overlap. Both are
/// valid until then.
#[utoipa::path(
    post, path = "/keys/{key_id}/rotate", tag = "keys", operation_id = "keys_rotate",
    security(("api_key" = ["manage"]), ("session" = ["admin"])),
    params(("key_id" = String, Path, description = "The key's id.", example = "key_01m7w3ha3aextt8pkwwdmxsmqw")),
    request_body(content = RotateKeyRequest, description = "May be missing."),
    responses(
        (status = 201, description = "The new key. It is shown only once.", body = CreatedApiKey),
        (status = 400, description = "Invalid request.", body = ErrorBody),
        (status = 404, description = "The project has no such live key.", body = ErrorBody),
        (status = 413, description = "The body is too large.", body = ErrorBody),
        (status = 415, description = "The body is not JSON.", body = ErrorBody),
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
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let mut tx = conn.begin().await?;
    let end = check_again(&mut tx, &caller).await?;
    let old = store::keys::lock(&mut tx, caller.project_id, id).await?;
    let old = old.filter(|it| it.is_live).ok_or(Error::KeyNotFound)?;
    let scopes: Vec<_> = old.scopes.iter().filter_map(|it| Scope::of_name(it)).collect();
    if !may_grant(caller.who.scopes(), &scopes) {
        return Err(Error::RoleExceedsCaller);
    }
    let hash = store::keys::end_after(&mut tx, caller.project_id, id, overlap).await?;
    let request = KeyRequest {
        name: old.name.clone(),
        scopes,
        expires_at: [old.expires_at, end].into_iter().flatten().min(),
        created_by: Some(caller.who.id()),
        per_minute: [old.produce_per_minute, old.work_per_minute, old.manage_per_minute],
    };
    // The replaced key does not count, so that a project with the maximum number of keys can
    // rotate.
    let made = make(&mut tx, &caller, request, 1).await?;
    note(&mut tx, &caller, "key.rotated", Some(&old), Some(&made.listed)).await?;
    tx.commit().await?;
    drop(conn);
    evict(&app, hash).await;
    Ok((StatusCode::CREATED, Reply(made.into())))
}

async fn evict(app: &App, hash: Option<Vec<u8>>) {
    if let Some(hash) = hash.and_then(|it| it.try_into().ok()) {
        app.credentials.evict(Evict::Key(hash)).await;
    }
}

/// Revoke a key.
///
/// Every node refuses it within five seconds, and ends its polls. Revoking twice is no error.
#[utoipa::path(
    delete, path = "/keys/{key_id}", tag = "keys", operation_id = "keys_revoke",
    security(("api_key" = ["manage"]), ("session" = ["admin"])),
    params(("key_id" = String, Path, description = "The key's id.", example = "key_01m7w3ha3aextt8pkwwdmxsmqw")),
    responses(
        (status = 204, description = "Revoked."),
        (status = 404, description = "The project has no such key.", body = ErrorBody),
    ),
)]
pub async fn revoke(
    caller: Caller<Administer>,
    State(app): State<App>,
    KeyInPath(id): KeyInPath,
) -> Result<StatusCode, Error> {
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let mut tx = conn.begin().await?;
    check_again(&mut tx, &caller).await?;
    let row = store::keys::lock(&mut tx, caller.project_id, id).await?;
    let row = row.ok_or(Error::KeyNotFound)?;
    let hash = store::keys::revoke(&mut tx, caller.project_id, id).await?;
    note(&mut tx, &caller, "key.revoked", Some(&row), None).await?;
    tx.commit().await?;
    drop(conn);
    evict(&app, hash).await;
    Ok(StatusCode::NO_CONTENT)
}

/// A leaked key.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"key": "fp_live_…"}))]
pub struct ReportKeyRequest {
    /// The key itself: its possession proves that it has leaked.
    #[schema(value_type = String, max_length = 128)]
    key: SecretString,
}

impl RequestBody for ReportKeyRequest {}

/// Report a leaked key.
///
/// Revokes the key immediately. Needs no other credential. The answer does not reveal whether the
/// key was valid.
#[utoipa::path(
    post, path = "/keys/report", tag = "keys", operation_id = "keys_report",
    request_body = ReportKeyRequest, security(()),
    responses(
        (status = 204, description = "If the key was valid, it is revoked."),
        (status = 400, description = "Invalid request.", body = ErrorBody),
        (status = 413, description = "The body is too large.", body = ErrorBody),
        (status = 415, description = "The body is not JSON.", body = ErrorBody),
        (status = 429, description = "Too many requests from this client.", body = ErrorBody),
        (status = 503, description = "Try again later.", body = ErrorBody),
    ),
)]
pub async fn report(
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<ReportKeyRequest>,
) -> Result<StatusCode, Error> {
    app.accounts.throttle_address(&client).await?;
    let secret = request.key.expose_secret();
    if !key::is_well_formed(secret) {
        return Ok(StatusCode::NO_CONTENT);
    }
    let mut conn = app.engine.pools.people.acquire().await?;
    let mut tx = conn.begin().await?;
    let Some(owner) = store::keys::find_by_secret(&mut tx, &key::hash(secret)).await? else {
        return Ok(StatusCode::NO_CONTENT);
    };
    let hash = store::keys::revoke(&mut tx, owner.project_id, owner.key_id).await?;
    let entry = NewAuditEntry {
        action: "key.reported",
        target: Some(owner.key_id.to_string()),
        ..NewAuditEntry::default()
    };
    let actor = Actor {
        request_id: Some(client.request_id.to_string()),
        address: Some(client.address.to_string()),
        ..Actor::SYSTEM
    };
    store::audit::insert(&mut tx, owner.project_id, &actor, &entry).await?;
    tx.commit().await?;
    drop(conn);
    evict(&app, hash).await;
    Ok(StatusCode::NO_CONTENT)
}
