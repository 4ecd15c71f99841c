//! Logins with passkeys (WebAuthn). The console uses them; the API has them for other pages of the
//! same origin.

use axum::{Extension, Json as Reply, extract::State};
use fencepost_domain::{error::Error, limits};
use fencepost_identity::accounts::{
    Client, SecondStep,
    passkeys::{self, PasskeyAnswer},
};
use fencepost_web::{
    app::App,
    wire::{
        extract::{Json, RequestBody},
        openapi::chars,
    },
};
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use serde_json::{Value, value::RawValue};
use utoipa::ToSchema;

use super::SessionReply;
use crate::error::ErrorBody;

/// A challenge for a browser, to be answered within five minutes.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct PasskeyChallenge {
    /// Send it back with the answer.
    pub challenge_token: String,
    /// Options for `PublicKeyCredential.parseRequestOptionsFromJSON()` or, of a new passkey,
    /// `parseCreationOptionsFromJSON()`.
    #[schema(value_type = Object)]
    pub options: Value,
}

impl From<passkeys::PasskeyChallenge> for PasskeyChallenge {
    fn from(it: passkeys::PasskeyChallenge) -> Self {
        Self { challenge_token: it.challenge_token, options: it.options }
    }
}

/// Ask for a passkey.
///
/// Returns options for `navigator.credentials.get()`. Its answer logs in, or steps a session up.
#[utoipa::path(
    post, path = "/auth/passkeys/options", tag = "accounts", operation_id = "auth_passkey_options",
    security(()),
    responses(
        (status = 200, description = "A challenge.", body = PasskeyChallenge),
        (status = 401, description = "This server has no domain name, which passkeys need.", body = ErrorBody),
    ),
)]
pub async fn ask(State(app): State<App>) -> Result<Reply<PasskeyChallenge>, Error> {
    Ok(Reply(app.accounts.passkeys.ask()?.into()))
}

/// The answer of a passkey.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PasskeyProof {
    /// Token of the challenge.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(0, limits::MAX_TOKEN_BYTES)))))]
    challenge_token: SecretString,
    /// The result of `toJSON()` of the browser's credential.
    #[schema(value_type = Object)]
    credential: Box<RawValue>,
}

impl PasskeyProof {
    /// Reads the answer; `path` leads to its fields.
    pub(super) fn read(self, path: &str) -> Result<PasskeyAnswer, Error> {
        let Self { challenge_token, credential } = self;
        let assertion = serde_json::from_str(credential.get());
        let assertion = assertion.map_err(|_| unreadable(path))?;
        Ok(PasskeyAnswer { challenge_token, assertion })
    }
}

/// The refusal of a credential that is none.
#[must_use]
pub fn unreadable(path: &str) -> Error {
    let message = "must be what toJSON() of the browser's credential returns";
    Error::invalid(format!("{path}credential"), message)
}

/// The answer of a passkey, to log in with.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({
    "challenge_token": "eyJ…", "credential": {"id": "k1…", "rawId": "k1…", "type": "public-key", "response": {}},
}))]
pub struct PasskeyLoginRequest {
    /// Token of the challenge.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(0, limits::MAX_TOKEN_BYTES)))))]
    challenge_token: SecretString,
    /// The result of `toJSON()` of the browser's credential.
    #[schema(value_type = Object)]
    credential: Box<RawValue>,
    /// Token of a login whose password was right, if that is how it began.
    #[schema(value_type = Option<String>, extensions(("bounds" = json!(chars(0, limits::MAX_SECRET_BYTES)))))]
    login_token: Option<SecretString>,
}

impl RequestBody for PasskeyLoginRequest {
    const MAX_BYTES: usize = limits::MAX_PASSKEY_BYTES;
}

/// Log in with a passkey.
///
/// Without `login_token`, the passkey does without a password. It cannot if the password was reset
/// by mail since it was added: send the `login_token` of a login with the new password.
#[utoipa::path(
    post, path = "/auth/login/passkey", tag = "accounts", operation_id = "auth_login_passkey",
    request_body = PasskeyLoginRequest, security(()),
    responses(
        (status = 200, description = "A session.", body = SessionReply),
        (status = 401, description = "The passkey is refused, or the login has expired.", body = ErrorBody),
        (status = 403, description = "The account is suspended.", body = ErrorBody),
        (status = 429, description = "Too many tries.", body = ErrorBody),
    ),
)]
pub async fn log_in(
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<PasskeyLoginRequest>,
) -> Result<Reply<SessionReply>, Error> {
    let PasskeyLoginRequest { challenge_token, credential, login_token } = request;
    let answer = PasskeyProof { challenge_token, credential }.read("")?;
    let signed_in = match login_token {
        Some(token) => {
            app.accounts
                .second_factors
                .complete_login(&token, &SecondStep::Passkey(answer), &client)
                .await?
        }
        None => app.accounts.passkeys.log_in(&answer, &client).await?,
    };
    Ok(Reply(signed_in.into()))
}
