//! `/v1/auth/…`: sign-up, login and logout, passwords, verification of addresses, and logins of
//! terminals. What needs no session is counted by IP address, but for the challenge for a passkey.

pub mod device;
pub mod passkeys;
pub mod second_factor;

use axum::{Extension, Json as Reply, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use fencepost_domain::{error::Error, limits};
use fencepost_identity::{
    accounts::{
        Client, PasswordChange, Reuse, SignUp, SignedIn,
        security::{self, AccountEvent},
    },
    credentials::Evict,
};
use fencepost_store as store;
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

use crate::{
    error::ErrorBody,
    routes::{keys::CreatedApiKey, projects::Project},
};

/// Sign-up request.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"email": "ada@example.com", "password": "quiet otters borrow umbrellas", "project_name": "Acme"}))]
pub struct SignupRequest {
    /// E-mail address.
    #[schema(extensions(("bounds" = json!(chars(3, limits::MAX_EMAIL_CHARS)))))]
    email: String,
    /// Password of 12 to 128 characters that is not easy to guess.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(limits::MIN_PASSWORD_CHARS, limits::MAX_PASSWORD_CHARS)))))]
    password: SecretString,
    /// Name of the first project. Default: `default`.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_NAME_CHARS)))))]
    project_name: Option<String>,
    /// Token of an invitation. The account then joins that project and gets none of its own.
    #[schema(value_type = Option<String>)]
    invitation: Option<SecretString>,
}

impl RequestBody for SignupRequest {}

/// An account.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Account {
    /// Id of the account.
    #[schema(example = "acct_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// E-mail address.
    pub email: String,
    /// True if the address is verified.
    pub email_verified: bool,
    /// When the account was created.
    pub created_at: DateTime<Utc>,
}

impl From<store::people::accounts::Account> for Account {
    fn from(it: store::people::accounts::Account) -> Self {
        Self {
            id: it.id.to_string(),
            email: it.email,
            email_verified: it.verified_at.is_some(),
            created_at: it.created_at,
        }
    }
}

/// Result of a sign-up.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct SignupReply {
    /// The new account.
    pub account: Account,
    /// The new project, or the one of the invitation.
    pub project: Project,
    /// API key with all scopes but `keys`, valid immediately. It is shown only once. Null after an
    /// invitation.
    #[schema(required)]
    pub api_key: Option<CreatedApiKey>,
}

/// Sign up.
///
/// Creates an account, a project, and an API key that is valid immediately. We send a mail to
/// verify the address. The answer is the same whether or not the address is known.
#[utoipa::path(
    post, path = "/auth/signup", tag = "accounts", operation_id = "auth_signup",
    request_body = SignupRequest, security(()),
    responses(
        (status = 201, description = "The account, its project and its first key.", body = SignupReply),
        (status = 400, description = "Invalid e-mail address, or weak password.", body = ErrorBody),
        (status = 403, description = "Sign-up is closed.", body = ErrorBody),
    ),
)]
pub async fn signup(
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<SignupRequest>,
) -> Result<(StatusCode, Reply<SignupReply>), Error> {
    let SignupRequest { email, password, project_name, invitation } = request;
    let request = SignUp { email, password, project_name, invitation };
    let made = app.accounts.sign_ups.sign_up(request, &client).await?;
    let reply = SignupReply {
        account: made.account.into(),
        project: Project::of(made.project, Some(made.role)),
        api_key: made.key.map(CreatedApiKey::from),
    };
    Ok((StatusCode::CREATED, Reply(reply)))
}

/// Address and password.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"email": "ada@example.com", "password": "quiet otters borrow umbrellas"}))]
pub struct LoginRequest {
    /// E-mail address.
    #[schema(extensions(("bounds" = json!(chars(3, limits::MAX_EMAIL_CHARS)))))]
    email: String,
    /// Password.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(0, limits::MAX_PASSWORD_CHARS)))))]
    password: SecretString,
    /// The `device_token` of an earlier login from this machine. While many wait for their password
    /// to be compared, logins with it go first. It gives no right.
    #[schema(value_type = Option<String>, extensions(("bounds" = json!(chars(0, limits::MAX_SECRET_BYTES)))))]
    device_token: Option<SecretString>,
}

impl RequestBody for LoginRequest {}

/// Tokens of a session.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct SessionReply {
    /// Access token, sent as `Authorization: Bearer …`.
    pub access_token: String,
    /// Lifetime of the access token in seconds.
    pub expires_in_seconds: i64,
    /// Refresh token, valid once: `POST /v1/auth/refresh`.
    pub refresh_token: String,
    /// The account.
    #[schema(example = "acct_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub account_id: String,
    /// Id of the session.
    #[schema(example = "sess_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub session_id: String,
    /// To be sent with later logins from this machine, valid until the password changes. Null: this
    /// was no login with a password.
    #[schema(required)]
    pub device_token: Option<String>,
}

impl SessionReply {
    /// The same, with the token of a machine that has just logged in. A login does not fail for it.
    #[must_use]
    pub async fn with_device_token(app: &App, it: SignedIn) -> Self {
        let token = app.accounts.logins.device_token(it.bearer.account_id).await.ok().flatten();
        let device_token = token.map(|it| it.expose_secret().to_owned());
        Self { device_token, ..it.into() }
    }
}

impl From<SignedIn> for SessionReply {
    fn from(it: SignedIn) -> Self {
        Self {
            access_token: it.access_token.expose_secret().to_owned(),
            expires_in_seconds: limits::ACCESS_TOKEN_SECONDS,
            refresh_token: it.refresh_token.expose_secret().to_owned(),
            account_id: it.bearer.account_id.to_string(),
            session_id: it.bearer.session_id.to_string(),
            device_token: None,
        }
    }
}

/// Log in.
///
/// The answer does not reveal whether an address is known. An account with a second factor gets a
/// 403 `code_required` with a `login_token`, which `POST /v1/auth/login/code` takes.
#[utoipa::path(
    post, path = "/auth/login", tag = "accounts", operation_id = "auth_login",
    request_body = LoginRequest, security(()),
    responses(
        (status = 200, description = "A session.", body = SessionReply),
        (status = 400, description = "Invalid e-mail address.", body = ErrorBody),
        (status = 401, description = "Wrong e-mail address or password.", body = ErrorBody),
        (status = 403, description = "A code is needed, or the operator of the server has suspended the account.", body = ErrorBody),
        (status = 429, description = "Too many tries.", body = ErrorBody),
    ),
)]
pub async fn login(
    State(app): State<App>,
    Extension(mut client): Extension<Client>,
    Json(request): Json<LoginRequest>,
) -> Result<Reply<SessionReply>, Error> {
    check_length("password", &request.password)?;
    if let Some(token) = request.device_token {
        check_chars("device_token", &token, limits::MAX_SECRET_BYTES)?;
        client.device_token = Some(token);
    }
    let signed_in = app.accounts.logins.log_in(&request.email, request.password, &client).await?;
    Ok(Reply(SessionReply::with_device_token(&app, signed_in).await))
}

/// A password longer than any stored one is not even hashed.
fn check_length(field: &str, password: &SecretString) -> Result<(), Error> {
    check_chars(field, password, limits::MAX_PASSWORD_CHARS)
}

fn check_chars(field: &str, secret: &SecretString, max: usize) -> Result<(), Error> {
    if secret.expose_secret().chars().count() > max {
        return Err(Error::invalid(field, format!("must be at most {max} characters")));
    }
    Ok(())
}

/// Refresh request.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"refresh_token": "fp_refresh_…"}))]
pub struct RefreshRequest {
    /// Latest refresh token of the session.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(0, limits::MAX_SECRET_BYTES)))))]
    refresh_token: SecretString,
}

impl RequestBody for RefreshRequest {}

/// Refresh a session.
///
/// A refresh token is valid once. If it is used again, the session is revoked, because the token
/// was probably stolen.
#[utoipa::path(
    post, path = "/auth/refresh", tag = "accounts", operation_id = "auth_refresh",
    request_body = RefreshRequest, security(()),
    responses(
        (status = 200, description = "New tokens.", body = SessionReply),
        (status = 401, description = "The token is unknown or used, or the session has ended.", body = ErrorBody),
    ),
)]
pub async fn refresh(
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<RefreshRequest>,
) -> Result<Reply<SessionReply>, Error> {
    match app.accounts.sessions.refresh(&request.refresh_token, Reuse::Never, &client).await? {
        Ok(signed_in) => Ok(Reply(signed_in.into())),
        Err(ended) => {
            app.credentials.evict(Evict::Session(ended)).await;
            Err(Error::InvalidCredentials)
        }
    }
}

/// Log out.
///
/// Revokes the session and all its tokens.
#[utoipa::path(
    post, path = "/auth/logout", tag = "accounts", operation_id = "auth_logout",
    security(("session" = [])),
    responses((status = 204, description = "Logged out.")),
)]
pub async fn logout(
    person: Person,
    State(app): State<App>,
    Extension(client): Extension<Client>,
) -> Result<StatusCode, Error> {
    let bearer = person.bearer;
    let mut conn = app.engine.pools.people.acquire().await?;
    store::people::sessions::revoke(&mut conn, bearer.account_id, bearer.session_id).await?;
    let event = AccountEvent::LoggedOut;
    security::record(&mut conn, bearer.account_id, event, Some(&client)).await?;
    drop(conn);
    app.credentials.evict(Evict::Session(bearer.session_id)).await;
    Ok(StatusCode::NO_CONTENT)
}

/// Password change.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"current_password": "quiet otters borrow umbrellas", "new_password": "loud herons lend galoshes"}))]
pub struct PasswordRequest {
    /// Current password.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(0, limits::MAX_PASSWORD_CHARS)))))]
    current_password: SecretString,
    /// New password of 12 to 128 characters that is not easy to guess.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(limits::MIN_PASSWORD_CHARS, limits::MAX_PASSWORD_CHARS)))))]
    new_password: SecretString,
    /// True removes all passkeys, too. Default: false.
    remove_passkeys: Option<bool>,
    /// True removes all links to login providers, too. Default: false.
    remove_identities: Option<bool>,
}

impl RequestBody for PasswordRequest {}

/// Change the password.
///
/// Revokes all other sessions. Passkeys and links to login providers stay, unless the request
/// removes them: a stranger who knew the old password may have added one.
#[utoipa::path(
    post, path = "/auth/password", tag = "accounts", operation_id = "auth_password",
    request_body = PasswordRequest, security(("session" = [])),
    responses(
        (status = 204, description = "Changed."),
        (status = 400, description = "The new password is weak.", body = ErrorBody),
        (status = 401, description = "No live session, or wrong current password.", body = ErrorBody),
    ),
)]
pub async fn password(
    person: Person,
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<PasswordRequest>,
) -> Result<StatusCode, Error> {
    check_length("current_password", &request.current_password)?;
    let change = PasswordChange {
        current: request.current_password,
        new: request.new_password,
        removes_passkeys: request.remove_passkeys.unwrap_or(false),
        removes_identities: request.remove_identities.unwrap_or(false),
    };
    let ended = app.accounts.password_changes.change(person.bearer, change, &client).await?;
    for session in ended {
        app.credentials.evict(Evict::Session(session)).await;
    }
    Ok(StatusCode::NO_CONTENT)
}

/// Password reset request.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"email": "ada@example.com"}))]
pub struct ResetRequest {
    /// E-mail address.
    #[schema(extensions(("bounds" = json!(chars(3, limits::MAX_EMAIL_CHARS)))))]
    email: String,
}

impl RequestBody for ResetRequest {}

/// Request a password reset.
///
/// If an account has this address, we send it a mail. The answer does not reveal whether one has.
#[utoipa::path(
    post, path = "/auth/password/reset", tag = "accounts", operation_id = "auth_password_reset",
    request_body = ResetRequest, security(()),
    responses(
        (status = 204, description = "If an account has this address, a mail was sent."),
        (status = 400, description = "Invalid e-mail address.", body = ErrorBody),
        (status = 429, description = "Too many requests from this client, or too many mails to this address.", body = ErrorBody),
    ),
)]
pub async fn request_reset(
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<ResetRequest>,
) -> Result<StatusCode, Error> {
    app.accounts.password_changes.request_reset(&request.email, &client).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// New password with the token from a reset mail.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"token": "fp_mail_…", "new_password": "loud herons lend galoshes"}))]
pub struct ConfirmResetRequest {
    /// Token from the mail.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(0, limits::MAX_SECRET_BYTES)))))]
    token: SecretString,
    /// New password of 12 to 128 characters that is not easy to guess.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(limits::MIN_PASSWORD_CHARS, limits::MAX_PASSWORD_CHARS)))))]
    new_password: SecretString,
}

impl RequestBody for ConfirmResetRequest {}

/// Reset the password.
///
/// Revokes all sessions. If the address was not verified before, it also revokes the keys of
/// projects that have no other member.
#[utoipa::path(
    post, path = "/auth/password/reset/confirm", tag = "accounts", operation_id = "auth_password_reset_confirm",
    request_body = ConfirmResetRequest, security(()),
    responses(
        (status = 204, description = "Changed: log in with it."),
        (status = 400, description = "Invalid token, or weak password.", body = ErrorBody),
        (status = 409, description = "Another account has verified the address.", body = ErrorBody),
    ),
)]
pub async fn confirm_reset(
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<ConfirmResetRequest>,
) -> Result<StatusCode, Error> {
    let ConfirmResetRequest { token, new_password } = request;
    let ended = app.accounts.password_changes.confirm_reset(&token, new_password, &client).await?;
    for session in ended {
        app.credentials.evict(Evict::Session(session)).await;
    }
    // Keys may have been revoked, too.
    app.credentials.evict(Evict::KeysAndMembers).await;
    Ok(StatusCode::NO_CONTENT)
}

/// Verification request.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"token": "fp_mail_…"}))]
pub struct VerifyRequest {
    /// Token from the mail.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(0, limits::MAX_SECRET_BYTES)))))]
    token: SecretString,
}

impl RequestBody for VerifyRequest {}

/// Verify your e-mail address.
///
/// The token must be of the mail to this very account: a stranger who signs up with your address
/// cannot have it verified by your click.
#[utoipa::path(
    post, path = "/auth/verify", tag = "accounts", operation_id = "auth_verify",
    request_body = VerifyRequest, security(("session" = [])),
    responses(
        (status = 204, description = "Verified."),
        (status = 400, description = "Invalid token.", body = ErrorBody),
        (status = 409, description = "Another account has verified the address.", body = ErrorBody),
    ),
)]
pub async fn verify(
    person: Person,
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<VerifyRequest>,
) -> Result<StatusCode, Error> {
    app.accounts.addresses.verify(person.bearer, &request.token, &client).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Resend the verification mail.
#[utoipa::path(
    post, path = "/auth/verify/send", tag = "accounts", operation_id = "auth_verify_send",
    security(("session" = [])),
    responses((status = 204, description = "The mail was sent.")),
)]
pub async fn send_verification(
    person: Person,
    State(app): State<App>,
    Extension(client): Extension<Client>,
) -> Result<StatusCode, Error> {
    app.accounts.addresses.send_verification(person.bearer, &client).await?;
    Ok(StatusCode::NO_CONTENT)
}
