//! `POST /v1/workers/register`.

use axum::{Json as Reply, extract::State};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    app::App,
    auth::Caller,
    domain::limits,
    engine::registry::{self, Registration},
    error::Error,
    http::{
        error::ErrorBody,
        extract::{Json, RequestBody},
        validate::Check,
    },
};

const DEFAULT_CONCURRENCY: i32 = 10;

/// What a worker tells of itself.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({
    "worker_id": "worker-1", "queues": ["default"], "job_types": ["email.send"]
}))]
pub struct RegisterRequest {
    /// The worker's name for itself.
    #[schema(min_length = 1, max_length = 200)]
    worker_id: String,
    /// Queues it will poll.
    #[schema(max_items = 500)]
    queues: Vec<String>,
    /// Types it can do.
    #[schema(max_items = 500)]
    job_types: Vec<String>,
    /// Its machine.
    #[schema(min_length = 1, max_length = 200)]
    hostname: Option<String>,
    /// Its client's version.
    #[schema(min_length = 1, max_length = 200)]
    sdk_version: Option<String>,
    /// Jobs it runs at a time. Default: 10.
    #[schema(minimum = 1, maximum = 10_000)]
    concurrency: Option<i32>,
    /// Its process.
    #[schema(minimum = 0)]
    pid: Option<i32>,
    /// Must be empty: schedules are not supported yet.
    #[schema(max_items = 0)]
    recurring_schedules: Option<Vec<serde_json::Value>>,
}

impl RequestBody for RegisterRequest {}

/// The worker is known.
#[derive(Debug, Serialize, ToSchema)]
pub struct RegisterReply {
    /// Always `registered`.
    pub status: RegisterStatus,
}

/// The worker is known.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RegisterStatus {
    /// The worker is known.
    Registered,
}

/// Introduce a worker.
///
/// Optional: a worker may poll without. The last word of a `worker_id` counts.
#[utoipa::path(
    post, path = "/workers/register", tag = "workers", operation_id = "workers_register",
    request_body = RegisterRequest,
    responses(
        (status = 200, description = "The worker is known.", body = RegisterReply),
        (status = 400, description = "The request cannot be read or breaks a rule.", body = ErrorBody),
        (status = 401, description = "No valid API key.", body = ErrorBody),
        (status = 413, description = "The body is too large.", body = ErrorBody),
        (status = 415, description = "The body is not JSON.", body = ErrorBody),
        (status = 503, description = "Try again later.", body = ErrorBody),
    ),
)]
pub async fn register(
    caller: Caller,
    State(app): State<App>,
    Json(request): Json<RegisterRequest>,
) -> Result<Reply<RegisterReply>, Error> {
    let worker = accept(request)?;
    registry::register(&app.engine, caller.project_id, &worker).await?;
    Ok(Reply(RegisterReply { status: RegisterStatus::Registered }))
}

fn accept(request: RegisterRequest) -> Result<Registration, Error> {
    let max = limits::MAX_REGISTERED_NAMES;
    let mut check = Check::default();
    check.name("worker_id", &request.worker_id, limits::MAX_WORKER_ID_CHARS);
    check.names("queues", &request.queues, max, limits::MAX_QUEUE_CHARS);
    check.names("job_types", &request.job_types, max, limits::MAX_JOB_TYPE_CHARS);
    check.optional_name("hostname", request.hostname.as_deref(), limits::MAX_WORKER_INFO_CHARS);
    check.optional_name(
        "sdk_version",
        request.sdk_version.as_deref(),
        limits::MAX_WORKER_INFO_CHARS,
    );
    let concurrency = request.concurrency.unwrap_or(DEFAULT_CONCURRENCY);
    check.range("concurrency", concurrency, 1, limits::MAX_WORKER_CONCURRENCY);
    if let Some(pid) = request.pid {
        check.range("pid", pid, 0, i32::MAX);
    }
    if request.recurring_schedules.is_some_and(|it| !it.is_empty()) {
        check.refuse("recurring_schedules", "is not supported yet; register without it");
    }
    check.finish()?;
    Ok(Registration {
        worker_id: request.worker_id,
        queues: request.queues,
        job_types: request.job_types,
        hostname: request.hostname,
        sdk_version: request.sdk_version,
        concurrency,
        pid: request.pid,
    })
}
