//! Mobius jobs: claim, heartbeat, complete, events, the list of workers.
//!
//! What the protocol lacks: jobs are made natively, so a run is a workflow, or a single job. It
//! creates a new job for each attempt; so a `job_id` here names a job and an attempt (`job_…-2`),
//! the old id reads `failed` and the new one `pending`. It has no state for a cancelled job or a
//! released attempt: these read `failed`. A job's payload is its `parameters`, which are an object.

mod attempt;
mod claim;
mod read;
mod runs;

use axum::{Json as Reply, response::Response};
use fencepost_domain::{
    error::{Class, Error},
    ids::ProjectId,
    limits,
};
use fencepost_web::{
    app::App,
    auth::{Caller, Work},
    wire::{
        errors,
        routes::{get, routes},
        validate::Check,
    },
};
use serde::Serialize;
use utoipa::{OpenApi, ToSchema};
use utoipa_axum::router::OpenApiRouter;

use super::{Adapter, attempt::AttemptId, params::PathParams, plain_errors};

/// Interval of heartbeats: the protocol's own number.
pub const HEARTBEAT_INTERVAL_SECONDS: i32 = 30;
/// Three missed heartbeats end a lease.
pub const LEASE_SECONDS: i32 = 3 * HEARTBEAT_INTERVAL_SECONDS;

/// Message to newer clients, which connect by a socket.
const NO_SOCKET: &str =
    "this server has no socket for workers: connect with deepnoodle-mobius 0.0.20 or older";

pub(super) const ADAPTER: Adapter = Adapter {
    name: "mobius",
    routes,
    also_below: &[],
    render_error,
    media_type: "application/json",
    document: MobiusDocument::openapi,
    error_schema: "ErrorBody",
};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Fencepost: Mobius jobs",
        description = "The worker protocol of Mobius, for workers written for it. Jobs come from native enqueues and \
            workflows; a `job_id` here names a job and an attempt.",
        license(name = "MIT OR Apache-2.0", identifier = "MIT OR Apache-2.0"),
    ),
    tags((name = "Jobs", description = "Register, poll, heartbeat, ack and report."), (name = "Workers", description = "Registered workers."),
        (name = "Runs", description = "What a run did."))
)]
struct MobiusDocument;

fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(claim::claim))
        .routes(routes!(attempt::beat))
        .routes(routes!(attempt::complete))
        .routes(routes!(attempt::emit))
        .routes(routes!(read::get))
        .routes(routes!(read::workers))
        .route("/v1/workers/socket", get(socket))
        .routes(routes!(runs::jobs_of_run))
        .routes(routes!(runs::action_log))
}

/// The status and the code of an error in this protocol.
fn render_error(error: &Error, _: &str, mut response: Response) -> Response {
    let code = match error.class() {
        Class::Unreadable | Class::Invalid => "invalid_request",
        Class::Unauthorized => "unauthorized",
        Class::Forbidden => "forbidden",
        Class::NotFound => "not_found",
        Class::MethodNotAllowed => "method_not_allowed",
        Class::Conflict | Class::Duplicate => "conflict",
        Class::TooLarge => "payload_too_large",
        Class::MediaType => "unsupported_media_type",
        Class::Timeout => "request_timeout",
        Class::Limited => "rate_limited",
        Class::Unavailable => "unavailable",
        Class::Internal => "internal",
    };
    let status = plain_errors::status(error.class());
    let body = ErrorBody { error: ErrorInfo { code, message: errors::message(error) } };
    errors::write(&mut response, (status, Reply(body)), error);
    response
}

/// Body of every error response.
#[derive(Debug, Serialize, ToSchema)]
pub struct ErrorBody {
    error: ErrorInfo,
}

/// An error.
#[derive(Debug, Serialize, ToSchema)]
pub struct ErrorInfo {
    code: &'static str,
    message: String,
}

/// The job of the path; the calling worker, if it shows its id, is recorded as heard.
fn accept(
    app: &App,
    project_id: ProjectId,
    params: &PathParams,
    (worker_id, token): (Option<&str>, Option<&str>),
) -> Result<AttemptId, Error> {
    let mut check = Check::default();
    check.optional_name("worker_id", worker_id, limits::MAX_WORKER_ID_CHARS);
    if worker_id.is_none() && token.is_none() {
        check.refuse("worker_id", "must be sent");
    }
    check.finish()?;
    if let Some(worker_id) = worker_id {
        app.engine.registry.record_seen(&(project_id, worker_id.into()), &[], &[]);
    }
    params.get("id").parse()
}

/// The socket of newer versions of the protocol, which this server does not have. It is not in the
/// OpenAPI document: a generated client has no use for an operation that never succeeds.
async fn socket(_: Caller<Work>) -> Error {
    Error::Unreadable(NO_SOCKET.to_owned())
}
