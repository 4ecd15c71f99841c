//! Errors of the native API: a status, a stable code, and one body for all.

use axum::{
    Json,
    http::{
        HeaderMap, HeaderValue, StatusCode,
        header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, WWW_AUTHENTICATE},
    },
    response::Response,
};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::{self, Error, FieldError, JobStatus, QueueError},
    job::JobState,
};
use secrecy::ExposeSecret;
use serde::Serialize;
use utoipa::ToSchema;

use fencepost_web::wire::{
    accepted,
    errors::{self, ErrorResponse},
};

/// The page with a section for each code.
const ERROR_DOCS: &str = "/docs/errors";

/// Body of every error response.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ErrorBody {
    /// The error.
    pub error: ApiError,
}

/// An error.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ApiError {
    /// Stable code, for programs.
    #[schema(example = "invalid_request")]
    pub code: &'static str,
    /// Message for people; may change.
    #[schema(example = "queue: must be at most 100 characters, has 140")]
    pub message: String,
    /// Same as in `X-Request-Id` and in the server's log.
    pub request_id: String,
    /// Invalid fields.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub details: Vec<ErrorDetail>,
    /// In a 409 about a job: its current state.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub job_state: Option<JobState>,
    /// In a 409 about a job: its latest attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub current_attempt: Option<i32>,
    /// In a 409 `unique_conflict`: the job that has the key, if that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub existing_job_id: Option<String>,
    /// In a 409 `keys_remain`: the live keys that the removed member or key has created.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    pub keys: Vec<RemainingKey>,
    /// In a 403 `code_required`: the token of this login, for `POST /v1/auth/login/code`. Valid
    /// for five minutes.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub login_token: Option<String>,
    /// Documentation of the code.
    #[schema(example = "https://queue.example.com/docs/errors#invalid_request")]
    pub docs_url: String,
}

/// A live key that would remain.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct RemainingKey {
    /// Id of the key.
    #[schema(example = "key_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// Name.
    pub name: String,
    /// Scopes.
    pub scopes: Vec<String>,
    /// Last use, to within some seconds; null: never.
    #[schema(required)]
    pub last_used_at: Option<DateTime<Utc>>,
}

/// An invalid field.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ErrorDetail {
    /// Path of the field.
    #[schema(example = "jobs[3].queue")]
    pub field: String,
    /// Reason why the value is refused.
    pub message: String,
}

macro_rules! codes {
    ($($error:pat => $status:ident, $code:literal;)*) => {
        /// Every code of the native API, with its status. `docs/errors.md` has a section for each.
        pub const CODES: &[(&str, StatusCode)] = &[$(($code, StatusCode::$status)),*];

        /// The status and the stable code of a failure.
        #[must_use]
        pub fn status_and_code(error: &Error) -> (StatusCode, &'static str) {
            match error {
                $($error => (StatusCode::$status, $code),)*
            }
        }
    };
}

// One exhaustive match: the compiler refuses an error that has no code here.
codes! {
    Error::Unreadable(_) | Error::Invalid(_) => BAD_REQUEST, "invalid_request";
    Error::InvalidCron(_) => BAD_REQUEST, "invalid_cron_expression";
    Error::InvalidTimezone(_) => BAD_REQUEST, "invalid_timezone";
    Error::Unauthorized | Error::NoCredential(_) | Error::MalformedCredential(_) => UNAUTHORIZED, "unauthorized";
    Error::InvalidCredentials => UNAUTHORIZED, "invalid_credentials";
    Error::InvalidCode => UNAUTHORIZED, "invalid_code";
    Error::PasskeyRefused(_) => UNAUTHORIZED, "passkey_refused";
    Error::TokenRefused(_) => UNAUTHORIZED, "token_refused";
    Error::InvalidLink => BAD_REQUEST, "invalid_token";
    Error::Forbidden { .. } | Error::OutOfBounds(_) => FORBIDDEN, "forbidden";
    Error::Suspended { .. } => FORBIDDEN, "suspended";
    Error::RoleExceedsCaller => FORBIDDEN, "role_exceeds_caller";
    Error::EmailNotVerified => FORBIDDEN, "email_not_verified";
    Error::CodeRequired(_) => FORBIDDEN, "code_required";
    Error::StepUpRequired => FORBIDDEN, "step_up_required";
    Error::SignupClosed => FORBIDDEN, "signup_closed";
    Error::NoSuchRoute | Error::UnknownRoute { .. } => NOT_FOUND, "not_found";
    Error::KeyNotFound => NOT_FOUND, "key_not_found";
    Error::MemberNotFound => NOT_FOUND, "account_not_found";
    Error::InvitationNotFound => NOT_FOUND, "invitation_not_found";
    Error::SessionNotFound => NOT_FOUND, "session_not_found";
    Error::IdentityNotFound => NOT_FOUND, "identity_not_found";
    Error::PasskeyNotFound => NOT_FOUND, "passkey_not_found";
    Error::EmailTaken => CONFLICT, "email_taken";
    Error::SlugTaken => CONFLICT, "slug_taken";
    Error::LastOwner => CONFLICT, "cannot_remove_owner";
    Error::KeysRemain(_) => CONFLICT, "keys_remain";
    Error::RateLimited { .. } => TOO_MANY_REQUESTS, "rate_limit_exceeded";
    Error::ProjectNotFound => NOT_FOUND, "project_not_found";
    Error::JobNotFound | Error::NoJobId(_) => NOT_FOUND, "job_not_found";
    Error::WorkflowNotFound => NOT_FOUND, "workflow_not_found";
    Error::BatchNotFound => NOT_FOUND, "batch_not_found";
    Error::WorkerNotFound => NOT_FOUND, "worker_not_found";
    Error::QueueNotFound => NOT_FOUND, "queue_not_found";
    Error::EndpointNotFound => NOT_FOUND, "endpoint_not_found";
    Error::DeliveryNotFound => NOT_FOUND, "delivery_not_found";
    Error::AlarmNotFound => NOT_FOUND, "alarm_not_found";
    Error::PushNotFound => NOT_FOUND, "push_not_found";
    Error::OperationNotFound => NOT_FOUND, "operation_not_found";
    Error::ScheduleNotFound => NOT_FOUND, "recurring_job_not_found";
    Error::MethodNotAllowed | Error::WrongMethod { .. } => METHOD_NOT_ALLOWED, "method_not_allowed";
    Error::BodyTimeout => REQUEST_TIMEOUT, "request_timeout";
    Error::InvalidState(_) => CONFLICT, "invalid_state";
    Error::WorkerMismatch(_) => CONFLICT, "worker_mismatch";
    Error::StaleLease(_) => CONFLICT, "stale_lease";
    Error::FenceRequired(_) => CONFLICT, "fence_required";
    Error::ParentTerminal(_) => CONFLICT, "parent_terminal";
    Error::BatchCompleted(_) => CONFLICT, "batch_completed";
    Error::UniqueConflict { .. } => CONFLICT, "unique_conflict";
    Error::OfQueue(QueueError::InUse(_)) => CONFLICT, "queue_in_use";
    Error::OfQueue(QueueError::GroupOrdered) => CONFLICT, "group_ordered";
    Error::OfQueue(QueueError::GroupNotFound) => NOT_FOUND, "group_not_found";
    Error::OfQueue(QueueError::GroupNotBlocked) => CONFLICT, "group_not_blocked";
    Error::OfQueue(QueueError::SharedLimitNotFound) => NOT_FOUND, "shared_limit_not_found";
    Error::OfQueue(QueueError::SharedLimitInUse) => CONFLICT, "shared_limit_in_use";
    Error::PreconditionFailed => PRECONDITION_FAILED, "precondition_failed";
    Error::ScheduleTypeConflict => CONFLICT, "recurring_job_type_conflict";
    Error::IdempotencyKeyReuse => CONFLICT, "idempotency_key_reuse";
    Error::IdempotencyInProgress => CONFLICT, "idempotency_in_progress";
    Error::QuotaExceeded { .. } => TOO_MANY_REQUESTS, "quota_exceeded";
    Error::QueueFull { .. } => TOO_MANY_REQUESTS, "queue_full";
    Error::BodyTooLarge { .. } | Error::FieldTooLarge { .. } => PAYLOAD_TOO_LARGE, "payload_too_large";
    Error::UnsupportedMediaType | Error::UnsupportedCoding => UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type";
    Error::Internal(_) => INTERNAL_SERVER_ERROR, "internal";
    Error::Overloaded => SERVICE_UNAVAILABLE, "overloaded";
    Error::Unavailable(_) | Error::NotReady(_) | Error::InDoubt | Error::JobLocked => SERVICE_UNAVAILABLE, "unavailable";
}

/// The status of a failure.
#[must_use]
pub fn status(error: &Error) -> StatusCode {
    status_and_code(error).0
}

/// The error as callers see it.
#[must_use]
pub fn info(error: &Error, request_id: &str) -> ApiError {
    let (_, code) = status_and_code(error);
    let details = errors::details(error);
    let job_status = match error {
        Error::InvalidState(it)
        | Error::WorkerMismatch(it)
        | Error::StaleLease(it)
        | Error::FenceRequired(it) => Some(*it),
        _ => None,
    };
    ApiError {
        code,
        message: errors::message(error),
        request_id: request_id.to_owned(),
        details: details
            .into_iter()
            .map(|FieldError { field, message }| ErrorDetail { field, message })
            .collect(),
        job_state: job_status.map(|JobStatus { state, .. }| state),
        current_attempt: job_status.map(|JobStatus { attempt, .. }| attempt),
        existing_job_id: match error {
            Error::UniqueConflict { holder, .. } => holder.map(|it| it.to_string()),
            _ => None,
        },
        keys: match error {
            Error::KeysRemain(keys) => keys.iter().cloned().map(RemainingKey::from).collect(),
            _ => Vec::new(),
        },
        login_token: match error {
            Error::CodeRequired(token) => Some(token.expose_secret().to_owned()),
            _ => None,
        },
        docs_url: format!("{ERROR_DOCS}#{code}"),
    }
}

impl From<error::RemainingKey> for RemainingKey {
    fn from(key: error::RemainingKey) -> Self {
        let error::RemainingKey { id, name, scopes, last_used_at } = key;
        Self { id: id.to_string(), name, scopes, last_used_at }
    }
}

impl ApiError {
    /// The same with a whole URL of its documentation, on the server with this one.
    #[must_use]
    pub fn at(mut self, public_url: &str) -> Self {
        self.docs_url.insert_str(0, public_url);
        self
    }
}

/// The media type of RFC 9457.
const PROBLEM: &str = "application/problem+json";

/// True if a client asks for errors as RFC 9457 has them, at least as much as for other JSON.
#[must_use]
pub fn is_problem(headers: &HeaderMap) -> bool {
    let weight = |name: &str| accepted::weight(headers, &ACCEPT, name);
    weight(PROBLEM).is_some_and(|problem| {
        problem > 0.0 && problem >= weight("application/json").unwrap_or(0.0)
    })
}

/// An error as RFC 9457 has it, with the members that errors have otherwise.
#[derive(Debug, Serialize)]
struct Problem {
    #[serde(rename = "type")]
    kind: String,
    title: String,
    status: u16,
    detail: String,
    #[serde(flatten)]
    error: ApiError,
}

/// Gives an error response the body of RFC 9457.
fn turn_into_problem(response: &mut Response, error: ApiError) {
    let problem = Problem {
        kind: error.docs_url.clone(),
        title: error.code.replace('_', " "),
        status: response.status().as_u16(),
        detail: error.message.clone(),
        error,
    };
    let Ok(body) = serde_json::to_vec(&problem) else { return };
    *response.body_mut() = body.into();
    let headers = response.headers_mut();
    headers.remove(CONTENT_LENGTH);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(PROBLEM));
}

/// Writes the body of an error response.
#[must_use]
pub fn render(
    error: &Error,
    request_id: &str,
    public_url: &str,
    mut response: Response,
) -> Response {
    let body = Json(ErrorBody { error: info(error, request_id).at(public_url) });
    errors::write(&mut response, (status(error), body), error);
    if status(error) == StatusCode::UNAUTHORIZED {
        // RFC 6750, section 3.1: no reason where no credential was sent.
        let challenge = match error {
            Error::Unauthorized | Error::MalformedCredential(_) => "Bearer error=\"invalid_token\"",
            _ => "Bearer",
        };
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
    }
    response
}

/// Renders an error that no adapter has rendered: it belongs to the native API, or to no route.
/// Returns the error of the response, if it has one.
pub fn render_unrendered(
    response: &mut Response,
    request_id: &str,
    public_url: &str,
    as_problem: bool,
) -> Option<Error> {
    let rendered = response.extensions_mut().remove::<ErrorResponse>();
    let Some(unrendered) = response.extensions_mut().remove::<Error>() else {
        return rendered.map(|ErrorResponse(it)| it);
    };
    let untouched = std::mem::take(response);
    *response = render(&unrendered, request_id, public_url, untouched);
    if as_problem {
        turn_into_problem(response, info(&unrendered, request_id).at(public_url));
    }
    Some(unrendered)
}
