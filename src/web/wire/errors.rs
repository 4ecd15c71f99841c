//! Rendering of errors. A handler answers with an [`Error`] in the response's extensions. The layer
//! of its API or adapter renders it, and leaves an [`ErrorResponse`] for the log.

use axum::{
    extract::{Request, State},
    http::{
        HeaderValue,
        header::{ACCEPT_ENCODING, RETRY_AFTER},
    },
    middleware::Next,
    response::{IntoResponse, Response},
};
use fencepost_domain::error::{Error, FieldError};

use super::RequestId;

/// Seconds until a retry, if nothing better is known.
const RETRY_AFTER_SECONDS: u32 = 1;

/// An error that was rendered.
#[derive(Debug, Clone)]
pub struct ErrorResponse(pub Error);

/// How an API or adapter renders an error, given the id of the request and the response so far.
pub type RenderError = fn(&Error, &str, Response) -> Response;

/// The layer that renders the errors of handlers.
pub async fn render(
    State(render_error): State<RenderError>,
    request: Request,
    next: Next,
) -> Response {
    let id = request.extensions().get().map_or_else(String::new, |RequestId(it)| it.clone());
    let mut response = next.run(request).await;
    if let Some(error) = response.extensions_mut().remove::<Error>() {
        response = render_error(&error, &id, response);
        response.extensions_mut().insert(ErrorResponse(error));
    }
    response
}

/// Replaces the response, and adds `Retry-After`.
pub fn write(response: &mut Response, replacement: impl IntoResponse, error: &Error) {
    let (head, body) = replacement.into_response().into_parts();
    *response.status_mut() = head.status;
    for (name, value) in &head.headers {
        response.headers_mut().insert(name, value.clone());
    }
    *response.body_mut() = body;
    if matches!(error, Error::UnsupportedCoding) {
        response.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip"));
    }
    add_retry_after(error, response);
}

/// The invalid fields of an error.
#[must_use]
pub fn details(error: &Error) -> Vec<FieldError> {
    match error {
        Error::Invalid(fields) | Error::ParentTerminal(fields) => fields.clone(),
        Error::InvalidCron(field) | Error::InvalidTimezone(field) => vec![field.clone()],
        Error::UniqueConflict { field, holder } => {
            let holder = holder.map_or("a live job".to_owned(), |it| it.to_string());
            vec![FieldError::new(field, format!("{holder} has it"))]
        }
        Error::FieldTooLarge { field, limit_bytes } => {
            vec![FieldError::new(field, format!("must be at most {limit_bytes} bytes"))]
        }
        _ => Vec::new(),
    }
}

/// The error's message, with the first invalid field: most people read only this line.
#[must_use]
pub fn message(error: &Error) -> String {
    match (details(error).as_slice(), error) {
        (
            [first],
            Error::Invalid(_)
            | Error::ParentTerminal(_)
            | Error::InvalidCron(_)
            | Error::InvalidTimezone(_),
        ) => {
            format!("{}: {}", first.field, first.message)
        }
        ([first, rest @ ..], Error::Invalid(_)) => {
            format!("{}: {} (and {} more)", first.field, first.message, rest.len())
        }
        _ => error.to_string(),
    }
}

/// Adds `Retry-After`, if a retry may help.
pub fn add_retry_after(error: &Error, response: &mut Response) {
    let pause = match error {
        Error::RateLimited { retry_after_seconds } => Some(*retry_after_seconds),
        Error::Overloaded
        | Error::JobLocked
        | Error::Unavailable(_)
        | Error::NotReady(_)
        | Error::InDoubt
        | Error::IdempotencyInProgress
        | Error::QuotaExceeded { .. }
        | Error::QueueFull { .. } => Some(RETRY_AFTER_SECONDS),
        _ => None,
    };
    if let Some(pause) = pause {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(pause));
    }
}
