//! Exchanging tokens of CI services and clusters for keys.

use axum::{Extension, Json as Reply, extract::State, http::StatusCode};
use fencepost_domain::{error::Error, ids::KeyId, limits};
use fencepost_identity::accounts::Client;
use fencepost_web::{
    app::App,
    wire::{
        extract::{Json, RequestBody},
        openapi::chars,
    },
};
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use utoipa::ToSchema;

use super::CreatedApiKey;
use crate::error::ErrorBody;

/// A token, and the key that trusts it.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"project": "acme-7f3k", "key_id": "key_01m7w3ha3aextt8pkwwdmxsmqw", "token": "eyJhbGciOi…"}))]
pub struct ExchangeTokenRequest {
    /// Id or slug of the project.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_NAME_CHARS)))))]
    project: String,
    /// Id of the key that trusts the token.
    key_id: String,
    /// The token, as the CI service or the cluster gives it.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(1, limits::MAX_TOKEN_BYTES)))))]
    token: SecretString,
}

impl RequestBody for ExchangeTokenRequest {}

/// Exchange a token for a key.
///
/// For CI services and clusters that give their jobs OpenID Connect tokens. The key has the rights
/// of the key that trusts the token, and lives for 15 minutes, but no longer than the token. Needs
/// no other credential.
#[utoipa::path(
    post, path = "/keys/exchange", tag = "keys", operation_id = "keys_exchange",
    request_body = ExchangeTokenRequest, security(()),
    responses(
        (status = 201, description = "A key of minutes.", body = CreatedApiKey),
        (status = 401, description = "The token is not valid, or no such key trusts it.", body = ErrorBody),
        (status = 403, description = "The project is suspended.", body = ErrorBody),
        (status = 429, description = "Too many exchanges.", body = ErrorBody),
    ),
)]
pub async fn exchange(
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<ExchangeTokenRequest>,
) -> Result<(StatusCode, Reply<CreatedApiKey>), Error> {
    let ExchangeTokenRequest { project, key_id, token } = request;
    if token.expose_secret().len() > limits::MAX_TOKEN_BYTES {
        let message = format!("must have at most {} bytes", limits::MAX_TOKEN_BYTES);
        return Err(Error::invalid("token", message));
    }
    let id: KeyId =
        key_id.parse().map_err(|_| Error::invalid("key_id", "must be the id of a key"))?;
    let made = app.accounts.token_exchanges.exchange(&project, id, &token, &client).await?;
    Ok((StatusCode::CREATED, Reply(made.into())))
}
