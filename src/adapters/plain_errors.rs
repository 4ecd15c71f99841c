//! Errors for protocols that have no error codes: a status, and a message for people.

use axum::{Json as Reply, http::StatusCode, response::Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{
    error::{Class, Error},
    wire::errors,
};

/// The status of a failure on wires that have no other opinion.
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

/// How wires that know no codes tell of a failure: the status is all that clients look at, the text is for
/// people.
pub fn render_plain(error: &Error, _: &str, mut response: Response) -> Response {
    let body = ErrorBody { error: errors::message(error) };
    errors::write(&mut response, (status(error.class()), Reply(body)), error);
    response
}

/// The body of every answer that is not a success.
#[derive(Debug, Serialize, ToSchema)]
pub struct ErrorBody {
    /// What went wrong.
    error: String,
}
