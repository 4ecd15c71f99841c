//! Errors for protocols that have no error codes: a status, and a message for people.

use axum::{Json as Reply, http::StatusCode, response::Response};
use fencepost_domain::error::{Class, Error};
use serde::Serialize;
use utoipa::ToSchema;

use fencepost_web::wire::errors;

/// The default status of each class of errors.
#[must_use]
pub fn status(class: Class) -> StatusCode {
    match class {
        Class::Unreadable | Class::Invalid => StatusCode::BAD_REQUEST,
        Class::Unauthorized => StatusCode::UNAUTHORIZED,
        Class::Forbidden => StatusCode::FORBIDDEN,
        Class::NotFound => StatusCode::NOT_FOUND,
        Class::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
        Class::Conflict | Class::Duplicate => StatusCode::CONFLICT,
        Class::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        Class::MediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        Class::Timeout => StatusCode::REQUEST_TIMEOUT,
        Class::Limited => StatusCode::TOO_MANY_REQUESTS,
        Class::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Class::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// Renders errors for protocols without error codes: clients read the status, people the text.
pub fn render_plain(error: &Error, _: &str, mut response: Response) -> Response {
    let body = ErrorBody { error: errors::message(error) };
    errors::write(&mut response, (status(error.class()), Reply(body)), error);
    response
}

/// Body of every error response.
#[derive(Debug, Serialize, ToSchema)]
pub struct ErrorBody {
    /// Message.
    error: String,
}
