//! Where the error of a request goes. A handler answers with an [`Error`] in the response's extensions; the
//! layer of its wire writes it down in the wire's own words and leaves a [`Told`] for whoever logs.

use axum::{
    extract::{Request, State},
    http::{HeaderValue, header::RETRY_AFTER},
    middleware::Next,
    response::Response,
};

use super::RequestId;
use crate::error::Error;

/// How long to wait before trying again when nothing better is known.
const RETRY_AFTER_SECONDS: u32 = 1;

/// An error that the caller has been told.
#[derive(Debug, Clone)]
pub struct Told(pub Error);

/// How a wire tells its callers of an error: what it answers, given the id of the request and the answer's
/// head so far.
pub type Face = fn(&Error, &str, Response) -> Response;

/// The layer of a wire: writes down the errors of its handlers.
pub async fn tell(State(face): State<Face>, request: Request, next: Next) -> Response {
    let id = request.extensions().get().map_or_else(String::new, |RequestId(it)| it.clone());
    let mut response = next.run(request).await;
    if let Some(error) = response.extensions_mut().remove::<Error>() {
        response = face(&error, &id, response);
        response.extensions_mut().insert(Told(error));
    }
    response
}

/// Says when to try again, if trying again may help.
pub fn advise(error: &Error, response: &mut Response) {
    let pause = match error {
        Error::RateLimited { retry_after_seconds } => Some(*retry_after_seconds),
        Error::Overloaded
        | Error::Unavailable(_)
        | Error::NotReady(_)
        | Error::InDoubt
        | Error::IdempotencyInProgress
        | Error::QuotaExceeded { .. } => Some(RETRY_AFTER_SECONDS),
        _ => None,
    };
    if let Some(pause) = pause {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(pause));
    }
}
