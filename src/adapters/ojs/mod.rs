//! Open Job Spec 1.0: its worker protocol and its HTTP binding.
//!
//! What the protocol lacks: a fetch need not name its worker, and an ack shows a job's id and no
//! attempt. So a lease may have no named worker until a heartbeat lists the job and adopts it; and
//! an ack settles whichever lease the job has. Ids are the UUIDs of jobs and workflows. A payload
//! that is not an array is the only argument. Fields without a native equivalent (meta, a schema,
//! unknown fields) are stored beside the payload and shown by this adapter alone. `attempt` counts
//! failures and the current run: after a release, or a retry from the dead letter, it continues
//! from there.

mod accept;
mod cron;
mod events;
mod fields;
mod jobs;
mod operate;
mod progress;
mod show;
mod unique;
mod work;
mod workers;
mod workflows;

use axum::{
    Json,
    http::{HeaderName, HeaderValue, StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::{MethodRouter, post},
};
use fencepost_domain::{
    error::{Class, Error},
    ids::JobId,
    job::StoredState,
};
use fencepost_web::{
    app::App,
    wire::{errors, routes::routes},
};
use serde::Serialize;
use serde_json::json;
use utoipa::{
    OpenApi, ToSchema,
    openapi::{
        Object, PathItem, RefOr, Required, Type,
        path::{HttpMethod, ParameterBuilder, ParameterIn},
    },
};
use utoipa_axum::router::OpenApiRouter;
use uuid::Uuid;

use super::Adapter;

/// The version of the specification, in each answer.
const SPEC_VERSION: &str = "1.0";
/// The only media type of answers.
const MEDIA_TYPE: &str = "application/openjobspec+json";
/// Default reservation of a fetched job: the protocol's own number.
pub const VISIBILITY_SECONDS: i32 = 1_800;
/// Maximum bytes stored beside a job's arguments: the specification's limit for `meta`.
pub const MAX_ENVELOPE_BYTES: usize = 64 * 1024;
/// Fields of retry policies: errors in them have a status of their own.
const RETRY_FIELD: &str = "options.retry";

pub(super) const ADAPTER: Adapter = Adapter {
    name: "ojs",
    routes,
    also_below: &[],
    render_error,
    media_type: MEDIA_TYPE,
    document: OjsDocument::openapi,
    error_schema: "OjsError",
};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Fencepost: Open Job Spec",
        description = "Open Job Spec 1.0, worker protocol and HTTP binding, on the jobs of this server. All answers \
            have the media type `application/openjobspec+json`.",
        license(name = "MIT OR Apache-2.0", identifier = "MIT OR Apache-2.0"),
    ),
    tags(
        (name = "jobs", description = "Enqueue, read and control jobs."),
        (name = "workers", description = "Register, poll, heartbeat, ack and report."),
        (name = "queues", description = "Queues and their depth."),
        (name = "dead-letter", description = "Jobs that have failed for the last time."),
        (name = "cron", description = "Recurring schedules (cron)."),
        (name = "workflows", description = "Jobs with dependencies."),
        (name = "system", description = "Capabilities of this server."),
    )
)]
struct OjsDocument;

/// Another path of an operation. A job in the path takes the place of `job_id` in the body.
struct Alias {
    path: &'static str,
    operation_id: &'static str,
    /// The path of the operation.
    of: &'static str,
    handler: fn() -> MethodRouter<App>,
}

const ALIASES: [Alias; 4] = [
    Alias {
        path: "/v1/jobs/fetch",
        operation_id: "fetch_jobs",
        of: "/v1/workers/fetch",
        handler: || post(work::fetch),
    },
    Alias {
        path: "/v1/jobs/{id}/ack",
        operation_id: "ack_job",
        of: "/v1/workers/ack",
        handler: || post(work::ack),
    },
    Alias {
        path: "/v1/jobs/{id}/nack",
        operation_id: "nack_job",
        of: "/v1/workers/nack",
        handler: || post(work::nack),
    },
    Alias {
        path: "/v1/jobs/{id}/fail",
        operation_id: "fail_job",
        of: "/v1/workers/nack",
        handler: || post(work::nack),
    },
];

fn routes() -> OpenApiRouter<App> {
    let router = OpenApiRouter::new()
        .routes(routes!(operate::manifest))
        .routes(routes!(operate::health))
        .routes(routes!(jobs::create))
        .routes(routes!(jobs::create_batch))
        .routes(routes!(jobs::get, jobs::cancel))
        .routes(routes!(progress::activate))
        .routes(routes!(progress::get, progress::report))
        .routes(routes!(progress::report_of))
        .routes(routes!(work::fetch))
        .routes(routes!(work::ack))
        .routes(routes!(work::nack))
        .routes(routes!(workers::register))
        .routes(routes!(workers::beat))
        .routes(routes!(workers::deregister))
        .routes(routes!(operate::schemas))
        .routes(routes!(operate::queues))
        .routes(routes!(operate::stats))
        .routes(routes!(operate::pause))
        .routes(routes!(operate::resume))
        .routes(routes!(operate::dead_letters))
        .routes(routes!(operate::retry_dead_letter))
        .routes(routes!(operate::delete_dead_letter))
        .routes(routes!(cron::list, cron::put))
        .routes(routes!(cron::get, cron::delete))
        .routes(routes!(workflows::create))
        .routes(routes!(workflows::get, workflows::cancel))
        .routes(routes!(events::list));
    ALIASES.iter().fold(router, with_alias)
}

/// Adds an alias, documented as an operation of its own.
fn with_alias(mut router: OpenApiRouter<App>, alias: &Alias) -> OpenApiRouter<App> {
    let paths = &mut router.get_openapi_mut().paths.paths;
    let mut operation = paths.get(alias.of).and_then(|it| it.post.clone()).unwrap_or_default();
    operation.operation_id = Some(alias.operation_id.to_owned());
    operation.description = Some(format!("The same as `{}`.", alias.of));
    if alias.path.contains("{id}") {
        let id = ParameterBuilder::new()
            .name("id")
            .parameter_in(ParameterIn::Path)
            .required(Required::True)
            .description(Some("The job."))
            .schema(Some(Object::with_type(Type::String)));
        operation.parameters = Some(vec![RefOr::T(id.build())]);
        if let Some(RefOr::T(body)) = &mut operation.request_body {
            body.required = Some(Required::False);
        }
    }
    paths.insert(alias.path.to_owned(), PathItem::new(HttpMethod::Post, operation));
    router.route(alias.path, (alias.handler)())
}

/// An answer of this protocol.
#[derive(Debug)]
struct Reply<T>(StatusCode, T);

impl<T> Reply<T> {
    fn ok(body: T) -> Self {
        Self(StatusCode::OK, body)
    }
}

impl<T: Serialize> IntoResponse for Reply<T> {
    fn into_response(self) -> Response {
        let mut response = (self.0, Json(self.1)).into_response();
        label(&mut response);
        response
    }
}

/// Adds the header with the protocol's version.
fn label(response: &mut Response) {
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
    let version = HeaderValue::from_static(SPEC_VERSION);
    headers.insert(HeaderName::from_static("ojs-version"), version);
}

/// The status and the code of an error in this protocol, and whether to retry.
fn render_error(error: &Error, request_id: &str, mut response: Response) -> Response {
    let details = errors::details(error);
    let is_policy = details.iter().any(|it| it.field.contains(RETRY_FIELD));
    let (status, code, retryable) = match error.class() {
        Class::Unreadable => (StatusCode::BAD_REQUEST, "invalid_payload", false),
        Class::Invalid if is_policy => (StatusCode::UNPROCESSABLE_ENTITY, "invalid_request", false),
        Class::Invalid | Class::MediaType => (StatusCode::BAD_REQUEST, "invalid_request", false),
        Class::Unauthorized => (StatusCode::UNAUTHORIZED, "unauthorized", false),
        Class::Forbidden => (StatusCode::FORBIDDEN, "forbidden", false),
        Class::NotFound => (StatusCode::NOT_FOUND, "not_found", false),
        Class::MethodNotAllowed => (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", false),
        Class::Conflict => (StatusCode::CONFLICT, "conflict", false),
        Class::Duplicate => (StatusCode::CONFLICT, "duplicate", false),
        Class::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "payload_too_large", false),
        Class::Timeout => (StatusCode::REQUEST_TIMEOUT, "request_timeout", true),
        Class::Limited => (StatusCode::TOO_MANY_REQUESTS, "rate_limited", true),
        Class::Unavailable => (StatusCode::SERVICE_UNAVAILABLE, "backend_error", true),
        Class::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "backend_error", true),
    };
    let fields = details.iter().map(|it| json!({"field": it.field, "message": it.message}));
    let holder = match error {
        Error::UniqueConflict { holder: Some(holder), .. } => Some(holder.0.to_string()),
        _ => None,
    };
    let body = json!({"error": {
        "code": code,
        "type": if error.class() == Class::Invalid { "validation_error" } else { code },
        "message": errors::message(error),
        "retryable": retryable,
        "hint": hint(error.class()),
        "docs_url": "/docs/protocols",
        "details": {"fields": fields.collect::<Vec<_>>(), "existing_job_id": holder},
        "request_id": request_id,
    }});
    errors::write(&mut response, (status, Json(body)), error);
    label(&mut response);
    response
}

/// A hint for the caller.
fn hint(class: Class) -> &'static str {
    match class {
        Class::Unreadable | Class::Invalid | Class::MediaType | Class::TooLarge => {
            "fix the request"
        }
        Class::Unauthorized => "send a live API key as a bearer token",
        Class::Forbidden => "use a key with the required scope",
        Class::NotFound | Class::MethodNotAllowed => "check the path and the id",
        Class::Conflict => "read the job: its state no longer allows this",
        Class::Duplicate => "use the existing job, or another key",
        Class::Timeout | Class::Limited | Class::Unavailable => "try again later",
        Class::Internal => "something went wrong on our side: contact support with the request id",
    }
}

/// Body of every error response.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OjsError)]
pub struct ErrorBody {
    #[schema(value_type = Object)]
    error: serde_json::Value,
}

/// A job's state in this protocol's words.
fn state_name(state: StoredState, unfinished_parents: i32) -> &'static str {
    match state {
        StoredState::Scheduled if unfinished_parents > 0 => "pending",
        StoredState::Scheduled => "scheduled",
        StoredState::Pending => "available",
        StoredState::Backoff => "retryable",
        StoredState::Processing => "active",
        StoredState::Succeeded => "completed",
        StoredState::DeadLetter => "discarded",
        StoredState::Cancelled => "cancelled",
    }
}

/// The job with an id. A malformed id is answered like an unknown one.
fn job_id(text: &str) -> Result<JobId, Error> {
    text.parse::<Uuid>().map(JobId).map_err(|_| Error::JobNotFound)
}
