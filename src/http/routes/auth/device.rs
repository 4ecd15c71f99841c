//! Logins of terminals: see `accounts/device_login.rs`.

use axum::{Extension, Json as Reply, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    access::KeyPreset,
    error::Error,
    limits::{self, DEVICE_LOGIN_SECONDS, DEVICE_POLL_SECONDS},
};
use fencepost_identity::accounts::{
    Client,
    device_login::{CollectedKey, NewDeviceLogin},
};
use fencepost_store as store;
use fencepost_web::{
    app::App,
    auth::{Caller, Govern, Person, Who},
    wire::{
        extract::{Json, RequestBody},
        openapi::chars,
        validate::Check,
    },
};
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    error::ErrorBody,
    routes::{keys::CreatedApiKey, projects::Project},
};

/// A terminal that logs in.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"name": "cli@lovelace"}))]
pub struct DeviceLoginRequest {
    /// Name of the key: letters, digits, `.`, `_`, `@` and `-`.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_DEVICE_NAME_CHARS)))))]
    name: String,
}

impl RequestBody for DeviceLoginRequest {}

/// A pending login.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct DeviceLogin {
    /// Secret of the terminal: `POST /v1/auth/device/key` takes it.
    #[schema(example = "fp_device_…")]
    pub device_code: String,
    /// Code that the user types.
    #[schema(example = "BDWP-HQKS")]
    pub user_code: String,
    /// Page on which they type it.
    #[schema(example = "https://queue.example.com/console/device")]
    pub verification_uri: String,
    /// `verification_uri` with the user code in it.
    #[schema(example = "https://queue.example.com/console/device?code=BDWP-HQKS")]
    pub verification_uri_complete: String,
    /// Lifetime of both codes in seconds.
    pub expires_in_seconds: i64,
    /// Pause between two requests for the key, in seconds.
    pub interval_seconds: i64,
}

/// Begin the login of a terminal.
///
/// For programs without a browser, as RFC 8628 has it. Show the code and the page to the user, and
/// ask `POST /v1/auth/device/key` for the key until they have approved the code.
#[utoipa::path(
    post, path = "/auth/device", tag = "accounts", operation_id = "auth_begin_device",
    request_body = DeviceLoginRequest, security(()),
    responses(
        (status = 201, description = "The codes.", body = DeviceLogin),
        (status = 429, description = "Too many logins from this address.", body = ErrorBody),
    ),
)]
pub async fn begin(
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<DeviceLoginRequest>,
) -> Result<(StatusCode, Reply<DeviceLogin>), Error> {
    let mut check = Check::default();
    check.public_name("name", &request.name, limits::MAX_DEVICE_NAME_CHARS);
    // The page for approval shows it: it must not look like words of that page.
    if !request.name.bytes().all(|it| it.is_ascii_alphanumeric() || b"._@-".contains(&it)) {
        check.refuse("name", "must consist of letters, digits, `.`, `_`, `@` and `-`");
    }
    check.finish()?;
    let NewDeviceLogin { device_code, user_code } =
        app.accounts.device_logins.begin(&request.name, &client).await?;
    let verification_uri = format!("{}/console/device", app.accounts.public_url);
    let reply = DeviceLogin {
        device_code: device_code.expose_secret().to_owned(),
        verification_uri_complete: format!("{verification_uri}?code={user_code}"),
        verification_uri,
        user_code,
        expires_in_seconds: DEVICE_LOGIN_SECONDS,
        interval_seconds: DEVICE_POLL_SECONDS,
    };
    Ok((StatusCode::CREATED, Reply(reply)))
}

/// The secret of a terminal that logs in.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"device_code": "fp_device_…"}))]
pub struct DeviceKeyRequest {
    /// From `POST /v1/auth/device`.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(0, limits::MAX_SECRET_BYTES)))))]
    device_code: SecretString,
}

impl RequestBody for DeviceKeyRequest {}

/// API key of a command line that logged in through a browser.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct DeviceKey {
    /// Project of the key; null while the login is pending.
    #[schema(required)]
    pub project: Option<Project>,
    /// E-mail address of the account that has approved the login; null while it is pending.
    #[schema(required, example = "ada@example.com")]
    pub email: Option<String>,
    /// API key, valid for 90 days and shown only once; null while the login is pending.
    #[schema(required)]
    pub api_key: Option<CreatedApiKey>,
}

/// Collect the key of a command line.
///
/// All fields are null until the user has approved the login. The key is collected once. The
/// session that has approved it must still be live.
#[utoipa::path(
    post, path = "/auth/device/key", tag = "accounts", operation_id = "auth_collect_device_key",
    request_body = DeviceKeyRequest, security(()),
    responses(
        (status = 200, description = "The key, or nulls.", body = DeviceKey),
        (status = 400, description = "The login is unknown, was collected or refused, or has expired.", body = ErrorBody),
        (status = 403, description = "The user may create no such keys any more, or the project is suspended.", body = ErrorBody),
        (status = 404, description = "The project is deleted, or the user is no member any more.", body = ErrorBody),
        (status = 429, description = "Too many requests from this address, or the project has the maximum number of live keys.", body = ErrorBody),
    ),
)]
pub async fn collect(
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<DeviceKeyRequest>,
) -> Result<Reply<DeviceKey>, Error> {
    let collected = app.accounts.device_logins.collect_key(&request.device_code, &client).await?;
    Ok(Reply(match collected {
        None => DeviceKey { project: None, email: None, api_key: None },
        Some(CollectedKey { project, email, made }) => DeviceKey {
            project: Some(Project::of(project, None)),
            email: Some(email),
            api_key: Some(made.into()),
        },
    }))
}

/// The code that a terminal shows.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"user_code": "BDWP-HQKS"}))]
pub struct UserCode {
    /// With or without the hyphen, in any case.
    #[schema(extensions(("bounds" = json!(chars(0, limits::MAX_CODE_CHARS)))))]
    user_code: String,
}

impl RequestBody for UserCode {}

/// A terminal with a pending login.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct PendingDevice {
    /// Name that its key would have.
    #[schema(example = "cli@lovelace")]
    pub name: String,
    /// IP address of the device; of IPv6, the network (/64).
    #[schema(example = "192.0.2.7")]
    pub address: String,
    /// Time when the login began.
    pub created_at: DateTime<Utc>,
    /// Time when the login expires.
    pub expires_at: DateTime<Utc>,
}

/// Look at a terminal that logs in.
///
/// Show this to the user before they approve it: someone else may have sent them the code.
#[utoipa::path(
    post, path = "/auth/device/preview", tag = "accounts", operation_id = "auth_preview_device",
    request_body = UserCode, security(("session" = [])),
    responses(
        (status = 200, description = "The terminal.", body = PendingDevice),
        (status = 400, description = "No pending login has this code.", body = ErrorBody),
        (status = 429, description = "Too many codes.", body = ErrorBody),
    ),
)]
pub async fn preview(
    person: Person,
    State(app): State<App>,
    Json(request): Json<UserCode>,
) -> Result<Reply<PendingDevice>, Error> {
    let pending = app.accounts.device_logins.find(person.bearer, &request.user_code).await?;
    let store::people::device_logins::Pending { name, address, created_at, expires_at } = pending;
    Ok(Reply(PendingDevice { name, address, created_at, expires_at }))
}

/// Refuse a terminal that logs in.
///
/// Its codes are not valid any more.
#[utoipa::path(
    post, path = "/auth/device/refuse", tag = "accounts", operation_id = "auth_refuse_device",
    request_body = UserCode, security(("session" = [])),
    responses(
        (status = 204, description = "Refused."),
        (status = 400, description = "No pending login has this code.", body = ErrorBody),
        (status = 429, description = "Too many codes.", body = ErrorBody),
    ),
)]
pub async fn refuse(
    person: Person,
    State(app): State<App>,
    Json(request): Json<UserCode>,
) -> Result<StatusCode, Error> {
    app.accounts.device_logins.refuse(person.bearer, &request.user_code).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Approval of a terminal that logs in.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"user_code": "BDWP-HQKS", "preset": "operator"}))]
pub struct ApproveDeviceRequest {
    /// The code that the terminal shows.
    #[schema(extensions(("bounds" = json!(chars(0, limits::MAX_CODE_CHARS)))))]
    user_code: String,
    /// Scopes of its key.
    preset: KeyPreset,
}

impl RequestBody for ApproveDeviceRequest {}

/// Approve a terminal that logs in.
///
/// It then gets a key of this project that is valid for 90 days.
#[utoipa::path(
    post, path = "/devices/approve", tag = "projects", operation_id = "projects_approve_device",
    security(("session" = ["admin"])),
    params(("project" = String, Path, description = "The project's id or slug.", example = "acme")),
    request_body = ApproveDeviceRequest,
    responses(
        (status = 204, description = "Approved."),
        (status = 400, description = "No pending login has this code.", body = ErrorBody),
        (status = 429, description = "Too many codes.", body = ErrorBody),
    ),
)]
pub async fn approve(
    caller: Caller<Govern>,
    State(app): State<App>,
    Json(request): Json<ApproveDeviceRequest>,
) -> Result<StatusCode, Error> {
    let Who::Member(_, bearer) = &caller.who else {
        return Err(Error::Forbidden { needs: "a session of a member" });
    };
    let (by, scopes) = ((*bearer, caller.project_id), request.preset.scopes());
    app.accounts.device_logins.approve(by, &request.user_code, scopes, &caller.client).await?;
    Ok(StatusCode::NO_CONTENT)
}
