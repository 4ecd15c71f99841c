//! `/v1/me/passkeys`: the caller's passkeys.

use axum::{Extension, Json as Reply, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use fencepost_domain::{error::Error, limits};
use fencepost_identity::accounts::Client;
use fencepost_store::people::passkeys::PasskeyRow;
use fencepost_web::{
    app::App,
    auth::Person,
    wire::{
        extract::{Json, PasskeyInPath, RequestBody},
        openapi::chars,
        validate::Check,
    },
};
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::{
    error::ErrorBody,
    routes::auth::passkeys::{PasskeyChallenge, unreadable},
};

/// A passkey.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Passkey {
    /// Id of the passkey.
    #[schema(example = "pk_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// Name.
    #[schema(example = "laptop")]
    pub name: String,
    /// When it was added.
    pub created_at: DateTime<Utc>,
    /// When it was last used; null: never.
    #[schema(required)]
    pub last_used_at: Option<DateTime<Utc>>,
}

impl From<PasskeyRow> for Passkey {
    fn from(row: PasskeyRow) -> Self {
        Self {
            id: row.id.to_string(),
            name: row.name,
            created_at: row.created_at,
            last_used_at: row.last_used_at,
        }
    }
}

/// Ask for a new passkey.
///
/// Returns options for `navigator.credentials.create()`. Needs a session that was stepped up.
#[utoipa::path(
    post, path = "/me/passkeys/options", tag = "accounts", operation_id = "me_passkey_options", security(("session" = [])),
    responses(
        (status = 200, description = "A challenge.", body = PasskeyChallenge),
        (status = 401, description = "No live session, or this server has no domain name, which passkeys need.", body = ErrorBody),
        (status = 403, description = "The session must be stepped up.", body = ErrorBody),
    ),
)]
pub async fn ask(person: Person, State(app): State<App>) -> Result<Reply<PasskeyChallenge>, Error> {
    Ok(Reply(app.accounts.passkeys.ask_for_new(person.bearer).await?.into()))
}

/// A new passkey.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({
    "name": "laptop", "challenge_token": "eyJ…", "credential": {"id": "k1…", "rawId": "k1…", "type": "public-key", "response": {}},
}))]
pub struct AddPasskeyRequest {
    /// Name, such as that of the device.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_NAME_CHARS)))))]
    name: String,
    /// Token of the challenge.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(0, limits::MAX_TOKEN_BYTES)))))]
    challenge_token: SecretString,
    /// The result of `toJSON()` of the browser's credential.
    #[schema(value_type = Object)]
    credential: Box<RawValue>,
}

impl RequestBody for AddPasskeyRequest {
    const MAX_BYTES: usize = limits::MAX_PASSKEY_BYTES;
}

/// An added passkey.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct AddedPasskey {
    /// The passkey.
    pub passkey: Passkey,
    /// Recovery codes, if it is the first second factor. They are shown only once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub recovery_codes: Option<Vec<String>>,
}

/// Add a passkey.
///
/// From now on, logins need a second factor, and other sessions must step up again. The passkey
/// logs in without the password, too. Needs a session that was stepped up.
#[utoipa::path(
    post, path = "/me/passkeys", tag = "accounts", operation_id = "me_add_passkey", security(("session" = [])),
    request_body = AddPasskeyRequest,
    responses(
        (status = 201, description = "The passkey.", body = AddedPasskey),
        (status = 401, description = "No live session, or the passkey is refused.", body = ErrorBody),
        (status = 403, description = "The session must be stepped up.", body = ErrorBody),
    ),
)]
pub async fn add(
    person: Person,
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<AddPasskeyRequest>,
) -> Result<(StatusCode, Reply<AddedPasskey>), Error> {
    let AddPasskeyRequest { name, challenge_token, credential } = request;
    let mut check = Check::default();
    check.name("name", &name, limits::MAX_NAME_CHARS);
    check.finish()?;
    let registration = serde_json::from_str(credential.get()).map_err(|_| unreadable(""))?;
    let added = app
        .accounts
        .passkeys
        .add(person.bearer, &name, &challenge_token, &registration, &client)
        .await?;
    let reply = AddedPasskey { passkey: added.row.into(), recovery_codes: added.recovery_codes };
    Ok((StatusCode::CREATED, Reply(reply)))
}

/// Remove a passkey.
///
/// Sessions that it has begun stay. If it was the last second factor, the recovery codes are
/// removed, too. Needs a session that was stepped up (`POST /v1/auth/step-up`).
#[utoipa::path(
    delete, path = "/me/passkeys/{passkey_id}", tag = "accounts", operation_id = "me_remove_passkey", security(("session" = [])),
    params(("passkey_id" = String, Path, description = "The passkey.", example = "pk_01m7w3ha3aextt8pkwwdmxsmqw")),
    responses(
        (status = 204, description = "Removed."),
        (status = 403, description = "The session must be stepped up.", body = ErrorBody),
        (status = 404, description = "You have no such passkey.", body = ErrorBody),
    ),
)]
pub async fn remove(
    person: Person,
    State(app): State<App>,
    Extension(client): Extension<Client>,
    PasskeyInPath(id): PasskeyInPath,
) -> Result<StatusCode, Error> {
    app.accounts.passkeys.remove(person.bearer, id, &client).await?;
    Ok(StatusCode::NO_CONTENT)
}
