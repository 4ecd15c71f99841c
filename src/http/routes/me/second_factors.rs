//! `/v1/me/second-factors`: the caller's authenticator app and recovery codes.

use axum::{Extension, Json as Reply, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use fencepost_domain::{error::Error, limits};
use fencepost_identity::accounts::Client;
use fencepost_web::{
    app::App,
    auth::Person,
    wire::{
        extract::{Json, RequestBody},
        openapi::chars,
    },
};
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::passkeys::Passkey;
use crate::error::ErrorBody;

/// Second factors of an account.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct SecondFactors {
    /// Time when the authenticator app was confirmed; null: there is none.
    #[schema(required)]
    pub totp_confirmed_at: Option<DateTime<Utc>>,
    /// Recovery codes that were not used.
    pub recovery_codes_left: i64,
    /// Passkeys, oldest first: at most ten. Without one and without an app, logins need the
    /// password alone.
    pub passkeys: Vec<Passkey>,
}

/// Read your second factors.
#[utoipa::path(
    get, path = "/me/second-factors", tag = "accounts", operation_id = "me_second_factors", security(("session" = [])),
    responses((status = 200, description = "Your second factors.", body = SecondFactors)),
)]
pub async fn get(person: Person, State(app): State<App>) -> Result<Reply<SecondFactors>, Error> {
    let (found, passkeys) =
        app.accounts.authenticators.second_factors(person.bearer.account_id).await?;
    Ok(Reply(SecondFactors {
        totp_confirmed_at: found.totp_confirmed_at,
        recovery_codes_left: found.recovery_codes,
        passkeys: passkeys.into_iter().map(Passkey::from).collect(),
    }))
}

/// A secret for an authenticator app.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct NewTotp {
    /// The secret in base32, to be typed into an app.
    pub secret: String,
    /// The secret as an `otpauth://` link, for a QR code.
    pub uri: String,
}

/// Add an authenticator app.
///
/// Returns a secret for the app (TOTP: SHA-1, six digits, 30 seconds). The app counts once
/// `POST /v1/me/second-factors/totp/confirm` has got a code of it, within 15 minutes. It then
/// replaces an earlier app. Needs a session that was stepped up.
#[utoipa::path(
    post, path = "/me/second-factors/totp", tag = "accounts", operation_id = "me_add_totp", security(("session" = [])),
    responses(
        (status = 201, description = "A secret. It is shown only once.", body = NewTotp),
        (status = 403, description = "The session must be stepped up.", body = ErrorBody),
    ),
)]
pub async fn add_totp(
    person: Person,
    State(app): State<App>,
) -> Result<(StatusCode, Reply<NewTotp>), Error> {
    let new = app.accounts.authenticators.begin(person.bearer).await?;
    let reply = NewTotp {
        secret: new.secret.expose_secret().to_owned(),
        uri: new.uri.expose_secret().to_owned(),
    };
    Ok((StatusCode::CREATED, Reply(reply)))
}

/// A code of an app.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"code": "492039"}))]
pub struct ConfirmTotpRequest {
    /// Code that the app shows.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(0, limits::MAX_CODE_CHARS)))))]
    code: SecretString,
}

impl RequestBody for ConfirmTotpRequest {}

/// Recovery codes.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct NewRecoveryCodes {
    /// Ten codes. Each is valid once, in place of a code of the app. They are shown only once.
    pub recovery_codes: Vec<String>,
}

/// Confirm an authenticator app.
///
/// From now on, logins need a code, and other sessions must step up again. Returns recovery codes,
/// for when the app is lost. Needs a session that was stepped up.
#[utoipa::path(
    post, path = "/me/second-factors/totp/confirm", tag = "accounts", operation_id = "me_confirm_totp", security(("session" = [])),
    request_body = ConfirmTotpRequest,
    responses(
        (status = 200, description = "Recovery codes.", body = NewRecoveryCodes),
        (status = 401, description = "No live session, or the code is wrong, or no app waits for one.", body = ErrorBody),
        (status = 403, description = "The session must be stepped up.", body = ErrorBody),
        (status = 429, description = "Too many tries.", body = ErrorBody),
    ),
)]
pub async fn confirm_totp(
    person: Person,
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<ConfirmTotpRequest>,
) -> Result<Reply<NewRecoveryCodes>, Error> {
    let bearer = person.bearer;
    let recovery_codes =
        app.accounts.authenticators.confirm(bearer, &request.code, &client).await?;
    Ok(Reply(NewRecoveryCodes { recovery_codes }))
}

/// Remove the authenticator app.
///
/// If it was the last second factor, the recovery codes are removed, too. Needs a session that was
/// stepped up (`POST /v1/auth/step-up`).
#[utoipa::path(
    delete, path = "/me/second-factors/totp", tag = "accounts", operation_id = "me_remove_totp", security(("session" = [])),
    responses(
        (status = 204, description = "Removed."),
        (status = 403, description = "The session must be stepped up.", body = ErrorBody),
    ),
)]
pub async fn remove_totp(
    person: Person,
    State(app): State<App>,
    Extension(client): Extension<Client>,
) -> Result<StatusCode, Error> {
    app.accounts.authenticators.remove(person.bearer, &client).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Replace the recovery codes.
///
/// The earlier ones stop working. Needs a session that was stepped up.
#[utoipa::path(
    post, path = "/me/second-factors/recovery-codes", tag = "accounts", operation_id = "me_new_recovery_codes", security(("session" = [])),
    responses(
        (status = 200, description = "Recovery codes.", body = NewRecoveryCodes),
        (status = 400, description = "The account has no second factor.", body = ErrorBody),
        (status = 403, description = "The session must be stepped up.", body = ErrorBody),
    ),
)]
pub async fn new_recovery_codes(
    person: Person,
    State(app): State<App>,
    Extension(client): Extension<Client>,
) -> Result<Reply<NewRecoveryCodes>, Error> {
    let recovery_codes =
        app.accounts.authenticators.new_recovery_codes(person.bearer, &client).await?;
    Ok(Reply(NewRecoveryCodes { recovery_codes }))
}
