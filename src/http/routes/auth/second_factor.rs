//! The second step of a login, and the step-up of a session.

use axum::{Extension, Json as Reply, extract::State, http::StatusCode};
use fencepost_domain::{error::Error, limits};
use fencepost_identity::accounts::{Client, Proof, SecondStep};
use fencepost_web::{
    app::App,
    auth::Person,
    wire::{
        extract::{Json, Object, RequestBody},
        openapi::chars,
    },
};
use secrecy::SecretString;
use serde::Deserialize;
use utoipa::ToSchema;

use super::{SessionReply, check_length, passkeys::PasskeyProof};
use crate::error::ErrorBody;

/// A login's token and a code.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"login_token": "fp_login_…", "code": "492039"}))]
pub struct LoginCodeRequest {
    /// Token of the login.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(0, limits::MAX_SECRET_BYTES)))))]
    login_token: SecretString,
    /// Code of the authenticator app, or a recovery code.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(0, limits::MAX_CODE_CHARS)))))]
    code: SecretString,
}

impl RequestBody for LoginCodeRequest {}

/// Complete a login with a code.
///
/// A code is valid once. After five wrong codes, log in again.
#[utoipa::path(
    post, path = "/auth/login/code", tag = "accounts", operation_id = "auth_login_code",
    request_body = LoginCodeRequest, security(()),
    responses(
        (status = 200, description = "A session.", body = SessionReply),
        (status = 401, description = "The code is wrong or used, or the login has expired.", body = ErrorBody),
        (status = 429, description = "Too many tries.", body = ErrorBody),
    ),
)]
pub async fn complete_login(
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<LoginCodeRequest>,
) -> Result<Reply<SessionReply>, Error> {
    let LoginCodeRequest { login_token, code } = request;
    let step = SecondStep::Code(code);
    let begun = app.accounts.second_factors.complete_login(&login_token, &step, &client).await?;
    Ok(Reply(SessionReply::with_device_token(&app, begun).await))
}

/// Password, code or passkey.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"code": "492039"}))]
pub struct StepUpRequest {
    /// Password, if the account has no second factor.
    #[schema(value_type = Option<String>, extensions(("bounds" = json!(chars(0, limits::MAX_PASSWORD_CHARS)))))]
    password: Option<SecretString>,
    /// Code of the authenticator app, or a recovery code, if the account has a second factor.
    #[schema(value_type = Option<String>, extensions(("bounds" = json!(chars(0, limits::MAX_CODE_CHARS)))))]
    code: Option<SecretString>,
    /// Answer of a passkey to `POST /v1/auth/passkeys/options`, in place of a code.
    #[schema(value_type = Option<PasskeyProof>)]
    passkey: Option<Object<PasskeyProof>>,
}

impl RequestBody for StepUpRequest {
    const MAX_BYTES: usize = limits::MAX_PASSKEY_BYTES;
}

/// Prove that it is you.
///
/// Changing keys, members, second factors and the address, and deleting projects, needs a session
/// that was stepped up, or begun, within 15 minutes. Otherwise the answer is 403
/// `step_up_required`.
#[utoipa::path(
    post, path = "/auth/step-up", tag = "accounts", operation_id = "auth_step_up",
    request_body = StepUpRequest, security(("session" = [])),
    responses(
        (status = 204, description = "Stepped up for 15 minutes."),
        (status = 400, description = "The other proof is needed.", body = ErrorBody),
        (status = 401, description = "No live session, or the password, code or passkey is wrong.", body = ErrorBody),
        (status = 429, description = "Too many tries.", body = ErrorBody),
    ),
)]
pub async fn step_up(
    person: Person,
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<StepUpRequest>,
) -> Result<StatusCode, Error> {
    let proof = match (request.password, request.code, request.passkey) {
        (Some(password), None, None) => {
            check_length("password", &password)?;
            Proof::Password(password)
        }
        (None, Some(code), None) => Proof::Code(code),
        (None, None, Some(Object(passkey))) => Proof::Passkey(passkey.read("passkey.")?),
        _ => {
            let message = "send one of `password`, `code` and `passkey`";
            return Err(Error::invalid("code", message));
        }
    };
    app.accounts.second_factors.step_up(person.bearer, proof, &client).await?;
    Ok(StatusCode::NO_CONTENT)
}
