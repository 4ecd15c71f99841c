//! What every request passes through: an id, a task of its own, a measure, and one shape for errors.

use std::time::Instant;

use axum::{
    extract::{MatchedPath, Request, State},
    http::{HeaderName, HeaderValue, Method, StatusCode},
    middleware::Next,
    response::{IntoResponse, Response},
};
use metrics::{counter, histogram};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::error;
use crate::{error::Error, ids, telemetry};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Characters of a request id that a caller may choose.
const MAX_REQUEST_ID_CHARS: usize = 128;

/// This request's id, for handlers that answer with several errors in one body.
#[derive(Debug, Clone)]
pub struct RequestId(pub String);

/// Cancelled when the client has closed its connection.
#[derive(Debug, Clone)]
pub struct ClientGone(pub CancellationToken);

/// Runs the handler in a task of its own, so that a client that vanishes cannot stop it in the
/// middle of a statement; what it was doing is done, and [`ClientGone`] tells those who wait.
pub async fn detach(
    State(handlers): State<TaskTracker>,
    mut request: Request,
    next: Next,
) -> Response {
    let gone = CancellationToken::new();
    let guard = gone.clone().drop_guard();
    request.extensions_mut().insert(ClientGone(gone));
    let answered = handlers.spawn(next.run(request)).await;
    guard.disarm();
    answered.unwrap_or_else(|panic| {
        counter!(telemetry::PANICS).increment(1);
        Error::internal(panic).into_response()
    })
}

/// Gives the request its id, measures it, and writes the body of its error if it has one.
pub async fn observe(mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let request_id = chosen_id(&request).unwrap_or_else(ids::request_id);
    request.extensions_mut().insert(RequestId(request_id.clone()));
    let method = method_label(request.method());
    let route = request.extensions().get::<MatchedPath>().cloned();
    let mut response = next.run(request).await;
    let failure = response.extensions_mut().remove::<Error>();
    if let Some(failure) = &failure {
        response = error::render(failure, &request_id, response);
    }
    if let Ok(value) = HeaderValue::from_str(&request_id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    let route = route.as_ref().map_or("unmatched", MatchedPath::as_str);
    let status = response.status();
    measure(route, method, status, started);
    log(route, method, status, started, &request_id, failure.as_ref());
    response
}

fn chosen_id(request: &Request) -> Option<String> {
    let id = request.headers().get(REQUEST_ID)?.to_str().ok()?;
    let is_sane = !id.is_empty()
        && id.len() <= MAX_REQUEST_ID_CHARS
        && id.bytes().all(|it| it.is_ascii_alphanumeric() || b"_-.".contains(&it));
    is_sane.then(|| id.to_owned())
}

/// A client may invent methods; metrics have no label whose values a client can invent.
fn method_label(method: &Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "HEAD" => "HEAD",
        "POST" => "POST",
        "PUT" => "PUT",
        "PATCH" => "PATCH",
        "DELETE" => "DELETE",
        "OPTIONS" => "OPTIONS",
        _ => "other",
    }
}

fn measure(route: &str, method: &'static str, status: StatusCode, started: Instant) {
    let route: String = route.to_owned();
    let status = status.as_u16().to_string();
    counter!(telemetry::HTTP_REQUESTS, "route" => route.clone(), "method" => method, "status" => status)
        .increment(1);
    histogram!(telemetry::HTTP_SECONDS, "route" => route, "method" => method)
        .record(started.elapsed().as_secs_f64());
}

/// One line a request: failures of ours loudly, mistakes of callers plainly, successes only when
/// asked for, because there are thousands a second.
fn log(
    route: &str,
    method: &'static str,
    status: StatusCode,
    started: Instant,
    request_id: &str,
    failure: Option<&Error>,
) {
    let duration_ms = started.elapsed().as_millis() as u64;
    let status = status.as_u16();
    match failure {
        Some(error) if status >= 500 => tracing::error!(
            request.id = request_id,
            http.route = route,
            http.method = method,
            http.status = status,
            duration_ms,
            error = crate::error::chain(error),
            "request failed"
        ),
        Some(error) => tracing::info!(
            request.id = request_id,
            http.route = route,
            http.method = method,
            http.status = status,
            duration_ms,
            reason = %error,
            "request refused"
        ),
        None => tracing::debug!(
            request.id = request_id,
            http.route = route,
            http.method = method,
            http.status = status,
            duration_ms,
            "request answered"
        ),
    }
}
