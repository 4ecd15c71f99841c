//! Workers.

use axum::{Json as Reply, extract::State};
use fencepost_domain::{error::Error, limits};
use fencepost_engine::workers::{self, Registration, WorkerRow};
use fencepost_web::{
    app::App,
    auth::{Caller, Read, Registering, Work},
    wire::{
        extract::{Json, RequestBody},
        openapi::{chars, items},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{params::PathParams, plain_errors::ErrorBody};

/// Registration of a worker.
#[derive(Debug, Deserialize, ToSchema)]
pub struct RegisterRequest {
    /// Id that the worker chooses for itself.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_WORKER_ID_CHARS)))))]
    worker_id: String,
    /// Labels.
    #[serde(default)]
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_LABELS)))))]
    labels: Vec<String>,
}

impl RequestBody for RegisterRequest {}

/// Register a worker.
#[utoipa::path(
    post, path = "/api/workers/register", tag = "workers", operation_id = "register_worker",
    request_body = RegisterRequest,
    responses((status = 200, description = "Registered.")),
)]
pub async fn register(
    caller: Caller<Registering>,
    State(app): State<App>,
    Json(request): Json<RegisterRequest>,
) -> Result<(), Error> {
    const CONCURRENCY: i32 = 1;
    let RegisterRequest { worker_id, mut labels } = request;
    let mut check = Check::default();
    check.name("worker_id", &worker_id, limits::MAX_WORKER_ID_CHARS);
    check.names("labels", &labels, limits::MAX_LABELS, limits::MAX_LABEL_CHARS);
    check.finish()?;
    labels.sort();
    labels.dedup();
    let worker = Registration {
        worker_id,
        queues: Vec::new(),
        job_types: Vec::new(),
        hostname: None,
        sdk_version: None,
        concurrency: CONCURRENCY,
        pid: None,
        labels,
        beat_seconds: None,
        counts_losses: true,
    };
    workers::register(&app.engine, caller.project_id, &worker).await
}

/// Record that a worker is alive.
#[utoipa::path(
    post, path = "/api/workers/{worker_id}/heartbeat", tag = "workers", operation_id = "heartbeat_worker",
    params(("worker_id" = String, Path, description = "The worker.")),
    responses(
        (status = 200, description = "Recorded."),
        (status = 404, description = "No worker with this id is known.", body = ErrorBody),
    ),
)]
pub async fn beat(
    caller: Caller<Work>,
    State(app): State<App>,
    params: PathParams,
) -> Result<(), Error> {
    let worker = (caller.project_id, params.get("worker_id").into());
    if workers::facts(&app.engine, &worker).await?.is_none() {
        return Err(Error::WorkerNotFound);
    }
    app.engine.registry.record_seen(&worker, &[], &[]);
    Ok(())
}

/// A worker.
#[derive(Debug, Serialize, ToSchema)]
pub struct Worker {
    worker_id: String,
    labels: Vec<String>,
    registered_at_ms: i64,
    last_heartbeat_ms: i64,
    /// Always null: a worker may have several.
    current_job: Option<String>,
    status: WorkerStatus,
}

/// State of a worker.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum WorkerStatus {
    Idle,
    Busy,
    Offline,
}

impl From<WorkerRow> for Worker {
    fn from(row: WorkerRow) -> Self {
        let status = match (row.is_alive, row.slots_in_use) {
            (false, _) => WorkerStatus::Offline,
            (true, 0) => WorkerStatus::Idle,
            (true, _) => WorkerStatus::Busy,
        };
        Self {
            worker_id: row.worker_id,
            labels: row.labels,
            registered_at_ms: row.registered_at.timestamp_millis(),
            last_heartbeat_ms: row.last_seen_at.timestamp_millis(),
            current_job: None,
            status,
        }
    }
}

/// List workers: the first 200, by name.
#[utoipa::path(
    get, path = "/api/workers", tag = "workers", operation_id = "list_workers",
    responses((status = 200, description = "The workers.", body = Vec<Worker>)),
)]
pub async fn list(
    caller: Caller<Read>,
    State(app): State<App>,
) -> Result<Reply<Vec<Worker>>, Error> {
    let limit = limits::MAX_PAGE_WORKERS.into();
    let rows = workers::page(&app.engine, caller.project_id, None, None, "", limit).await?;
    Ok(Reply(rows.into_iter().map(Worker::from).collect()))
}
