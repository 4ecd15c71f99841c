//! The face of an error on the native wire: a status, a stable code, and one envelope for all.

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header::WWW_AUTHENTICATE},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{
    domain::job::JobState,
    error::{Error, FieldError, JobStatus},
    wire::errors,
};

/// Where each code has its section.
const ERROR_DOCS: &str = "/docs/errors";

/// The body of every answer that is not a success.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ErrorBody {
    /// What went wrong.
    pub error: ApiError,
}

/// What went wrong.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ApiError {
    /// Stable, for programs.
    #[schema(example = "invalid_request")]
    pub code: &'static str,
    /// For people; may change.
    pub message: String,
    /// The same as in `X-Request-Id` and in the server's log.
    pub request_id: String,
    /// The fields that break rules.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub details: Vec<ErrorDetail>,
    /// With a 409 about a job: its state now.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub job_state: Option<JobState>,
    /// With a 409 about a job: its latest attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub current_attempt: Option<i32>,
    /// Where the code is explained.
    #[schema(example = "/docs/errors#invalid_request")]
    pub docs_url: String,
}

/// A field that breaks a rule.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ErrorDetail {
    /// Where it is, as a path.
    #[schema(example = "jobs[3].queue")]
    pub field: String,
    /// Which rule it breaks.
    pub message: String,
}

/// Every code of the native wire, with its status. `docs/errors.md` has a section for each.
pub const CODES: &[(&str, StatusCode)] = &[
    ("invalid_request", StatusCode::BAD_REQUEST),
    ("invalid_cron_expression", StatusCode::BAD_REQUEST),
    ("invalid_timezone", StatusCode::BAD_REQUEST),
    ("unauthorized", StatusCode::UNAUTHORIZED),
    ("invalid_credentials", StatusCode::UNAUTHORIZED),
    ("invalid_token", StatusCode::BAD_REQUEST),
    ("forbidden", StatusCode::FORBIDDEN),
    ("role_exceeds_caller", StatusCode::FORBIDDEN),
    ("signup_closed", StatusCode::FORBIDDEN),
    ("not_found", StatusCode::NOT_FOUND),
    ("key_not_found", StatusCode::NOT_FOUND),
    ("account_not_found", StatusCode::NOT_FOUND),
    ("invitation_not_found", StatusCode::NOT_FOUND),
    ("session_not_found", StatusCode::NOT_FOUND),
    ("email_taken", StatusCode::CONFLICT),
    ("slug_taken", StatusCode::CONFLICT),
    ("cannot_remove_owner", StatusCode::CONFLICT),
    ("rate_limit_exceeded", StatusCode::TOO_MANY_REQUESTS),
    ("project_not_found", StatusCode::NOT_FOUND),
    ("job_not_found", StatusCode::NOT_FOUND),
    ("workflow_not_found", StatusCode::NOT_FOUND),
    ("worker_not_found", StatusCode::NOT_FOUND),
    ("queue_not_found", StatusCode::NOT_FOUND),
    ("operation_not_found", StatusCode::NOT_FOUND),
    ("recurring_job_not_found", StatusCode::NOT_FOUND),
    ("method_not_allowed", StatusCode::METHOD_NOT_ALLOWED),
    ("request_timeout", StatusCode::REQUEST_TIMEOUT),
    ("invalid_state", StatusCode::CONFLICT),
    ("worker_mismatch", StatusCode::CONFLICT),
    ("stale_lease", StatusCode::CONFLICT),
    ("parent_terminal", StatusCode::CONFLICT),
    ("unique_conflict", StatusCode::CONFLICT),
    ("recurring_job_type_conflict", StatusCode::CONFLICT),
    ("idempotency_key_reuse", StatusCode::CONFLICT),
    ("idempotency_in_progress", StatusCode::CONFLICT),
    ("quota_exceeded", StatusCode::TOO_MANY_REQUESTS),
    ("payload_too_large", StatusCode::PAYLOAD_TOO_LARGE),
    ("unsupported_media_type", StatusCode::UNSUPPORTED_MEDIA_TYPE),
    ("internal", StatusCode::INTERNAL_SERVER_ERROR),
    ("overloaded", StatusCode::SERVICE_UNAVAILABLE),
    ("unavailable", StatusCode::SERVICE_UNAVAILABLE),
];

/// The code of a failure. Its status is in [`CODES`].
fn code(error: &Error) -> &'static str {
    match error {
        Error::Unreadable(_) | Error::Invalid(_) => "invalid_request",
        Error::Unauthorized => "unauthorized",
        Error::Forbidden { .. } => "forbidden",
        Error::RateLimited { .. } => "rate_limit_exceeded",
        Error::InvalidCredentials => "invalid_credentials",
        Error::InvalidLink => "invalid_token",
        Error::SignupClosed => "signup_closed",
        Error::EmailTaken => "email_taken",
        Error::SlugTaken => "slug_taken",
        Error::LastOwner => "cannot_remove_owner",
        Error::RoleExceedsCaller => "role_exceeds_caller",
        Error::KeyNotFound => "key_not_found",
        Error::MemberNotFound => "account_not_found",
        Error::InvitationNotFound => "invitation_not_found",
        Error::SessionNotFound => "session_not_found",
        Error::NoSuchRoute => "not_found",
        Error::MethodNotAllowed => "method_not_allowed",
        Error::ProjectNotFound => "project_not_found",
        Error::JobNotFound => "job_not_found",
        Error::InvalidState(_) => "invalid_state",
        Error::WorkerMismatch(_) => "worker_mismatch",
        Error::StaleLease(_) => "stale_lease",
        Error::ParentTerminal(_) => "parent_terminal",
        Error::UniqueConflict { .. } => "unique_conflict",
        Error::IdempotencyKeyReuse => "idempotency_key_reuse",
        Error::IdempotencyInProgress => "idempotency_in_progress",
        Error::WorkflowNotFound => "workflow_not_found",
        Error::WorkerNotFound => "worker_not_found",
        Error::QueueNotFound => "queue_not_found",
        Error::OperationNotFound => "operation_not_found",
        Error::ScheduleNotFound => "recurring_job_not_found",
        Error::ScheduleTypeConflict => "recurring_job_type_conflict",
        Error::InvalidCron(_) => "invalid_cron_expression",
        Error::InvalidTimezone(_) => "invalid_timezone",
        Error::QuotaExceeded { .. } => "quota_exceeded",
        Error::BodyTooLarge { .. } | Error::FieldTooLarge { .. } => "payload_too_large",
        Error::BodyTimeout => "request_timeout",
        Error::UnsupportedMediaType => "unsupported_media_type",
        Error::Overloaded => "overloaded",
        Error::Unavailable(_) | Error::NotReady(_) | Error::InDoubt => "unavailable",
        Error::Internal(_) => "internal",
    }
}

/// The status of a failure.
#[must_use]
pub fn status(error: &Error) -> StatusCode {
    let code = code(error);
    CODES
        .iter()
        .find(|it| it.0 == code)
        .map_or(StatusCode::INTERNAL_SERVER_ERROR, |(_, status)| *status)
}

/// The error as callers read it.
#[must_use]
pub fn info(error: &Error, request_id: &str) -> ApiError {
    let code = code(error);
    let details = errors::details(error);
    let whereabouts = match error {
        Error::InvalidState(it) | Error::WorkerMismatch(it) | Error::StaleLease(it) => Some(*it),
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
        job_state: whereabouts.map(|JobStatus { state, .. }| state),
        current_attempt: whereabouts.map(|JobStatus { attempt, .. }| attempt),
        docs_url: format!("{ERROR_DOCS}#{code}"),
    }
}

/// An answer whose body is still to be written: the outermost layer knows the request's id.
impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let mut response = status(&self).into_response();
        response.extensions_mut().insert(self);
        response
    }
}

/// Writes the body of a failed answer.
#[must_use]
pub fn render(error: &Error, request_id: &str, mut response: Response) -> Response {
    let body = Json(ErrorBody { error: info(error, request_id) });
    errors::write(&mut response, (status(error), body), error);
    if matches!(error, Error::Unauthorized | Error::InvalidCredentials) {
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}
