//! `/v1/me/email`: changing the address of the caller's account.

use axum::{Extension, Json as Reply, extract::State, http::StatusCode};
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
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ErrorBody;

/// A new address.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"email": "ada@example.org"}))]
pub struct ChangeEmailRequest {
    /// New e-mail address.
    #[schema(extensions(("bounds" = json!(chars(3, limits::MAX_EMAIL_CHARS)))))]
    email: String,
}

impl RequestBody for ChangeEmailRequest {}

/// Change your e-mail address.
///
/// Mails a link to the new address and, if the old one is verified, to the old one. The address
/// changes when both have confirmed it within two days. Needs a session that was stepped up. The
/// answer does not reveal whether another account has the address.
#[utoipa::path(
    post, path = "/me/email", tag = "accounts", operation_id = "me_change_email", security(("session" = [])),
    request_body = ChangeEmailRequest,
    responses(
        (status = 204, description = "The mails were sent."),
        (status = 400, description = "Invalid e-mail address, or the server sends no mail.", body = ErrorBody),
        (status = 403, description = "The session must be stepped up.", body = ErrorBody),
        (status = 429, description = "Too many changes.", body = ErrorBody),
    ),
)]
pub async fn change(
    person: Person,
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<ChangeEmailRequest>,
) -> Result<StatusCode, Error> {
    app.accounts.addresses.change(person.bearer, &request.email, &client).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Token of a mail.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"token": "fp_mail_…"}))]
pub struct ConfirmEmailRequest {
    /// Token from the mail.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(0, limits::MAX_SECRET_BYTES)))))]
    token: SecretString,
}

impl RequestBody for ConfirmEmailRequest {}

/// Outcome of a confirmation.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct EmailConfirmed {
    /// True if the address is changed now. False: the other address must confirm it, too.
    pub is_changed: bool,
}

/// Confirm a new e-mail address.
///
/// With the token of one of the mails, in a session of the account.
#[utoipa::path(
    post, path = "/me/email/confirm", tag = "accounts", operation_id = "me_confirm_email", security(("session" = [])),
    request_body = ConfirmEmailRequest,
    responses(
        (status = 200, description = "Confirmed.", body = EmailConfirmed),
        (status = 400, description = "Invalid token.", body = ErrorBody),
        (status = 409, description = "Another account has verified the address.", body = ErrorBody),
    ),
)]
pub async fn confirm(
    person: Person,
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<ConfirmEmailRequest>,
) -> Result<Reply<EmailConfirmed>, Error> {
    let is_changed =
        app.accounts.addresses.confirm_change(person.bearer, &request.token, &client).await?;
    Ok(Reply(EmailConfirmed { is_changed }))
}
