//! `GET /v1/workers`, `POST /v1/workers/deregister` and `POST /v1/workers/{worker_id}/quiet`,
//! `/terminate`, `/resume`.

use axum::{Json as Reply, extract::State};
use chrono::{DateTime, Utc};
use fencepost_domain::{error::Error, limits, worker::WorkerState};
use fencepost_engine::workers::{self, WorkerKey, WorkerRow};
use fencepost_web::{
    app::App,
    auth::{Bound, Caller, Manage, Read, Work},
    wire::{
        extract::{Json, NameInPath, Query, RequestBody},
        openapi::chars,
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{
    cursor::{self, List},
    error::ErrorBody,
    page::{PageSize, page},
    routes::audit::{self, NewAuditEntry},
};

const DEFAULT_PAGE_WORKERS: u32 = 50;

/// Filter and page of workers.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct WorkersQuery {
    /// Only workers with this label.
    label: Option<String>,
    /// Only workers that poll this queue.
    queue: Option<String>,
    /// Maximum number of workers to return. Default: 50.
    #[param(minimum = 1, maximum = 200)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

page! {
    /// A page of workers, by name.
    WorkerPage {
        /// Workers of the page.
        workers: WorkerView
    }
}

/// A worker.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = Worker)]
pub struct WorkerView {
    /// Id that the worker chose.
    pub worker_id: String,
    /// State, as the worker reports it; `terminated` if it is lost.
    pub state: WorkerState,
    /// Directive; null: none.
    #[schema(required)]
    pub directive: Option<WorkerState>,
    /// True if it sent a request within the last minute, or within three times its `beat_seconds`
    /// if that is longer, and is neither lost nor deregistered.
    pub alive: bool,
    /// Time of its last request, to within a few seconds.
    pub last_seen_at: DateTime<Utc>,
    /// Time when the worker registered, or sent its first request.
    pub registered_at: DateTime<Utc>,
    /// Queues that it polls.
    pub queues: Vec<String>,
    /// Job types that it can run; empty if it has named none.
    pub job_types: Vec<String>,
    /// Labels, for jobs that require them.
    pub labels: Vec<String>,
    /// Number of jobs that it runs at the same time, as it reports.
    pub concurrency: i32,
    /// Longest time between two of its calls, in seconds, as it registered.
    #[serde(default)]
    #[schema(required)]
    pub beat_seconds: Option<i32>,
    /// Number of jobs that it holds leases on.
    pub slots_in_use: i64,
    /// Host name.
    #[schema(required)]
    pub hostname: Option<String>,
    /// Version of its client library.
    #[schema(required)]
    pub sdk_version: Option<String>,
    /// Process id.
    #[schema(required)]
    pub pid: Option<i32>,
}

impl From<WorkerRow> for WorkerView {
    fn from(row: WorkerRow) -> Self {
        Self {
            worker_id: row.worker_id,
            state: row.state,
            directive: row.directive,
            alive: row.is_alive,
            last_seen_at: row.last_seen_at,
            registered_at: row.registered_at,
            queues: row.queues,
            job_types: row.job_types,
            labels: row.labels,
            concurrency: row.concurrency,
            beat_seconds: row.beat_seconds,
            slots_in_use: row.slots_in_use,
            hostname: row.hostname,
            sdk_version: row.sdk_version,
            pid: row.pid,
        }
    }
}

/// List workers.
///
/// Registered workers and those that only polled, by id.
#[utoipa::path(
    get, path = "/workers", tag = "workers", operation_id = "workers_list",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(WorkersQuery),
    responses(
        (status = 200, description = "A page of workers.", body = WorkerPage),
    ),
)]
pub async fn list(
    caller: Caller<Read>,
    State(app): State<App>,
    Query(query): Query<WorkersQuery>,
) -> Result<Reply<WorkerPage>, Error> {
    let mut check = Check::default();
    let size =
        PageSize::read(query.limit, DEFAULT_PAGE_WORKERS, limits::MAX_PAGE_WORKERS, &mut check);
    check.optional_name("label", query.label.as_deref(), limits::MAX_LABEL_CHARS);
    check.optional_name("queue", query.queue.as_deref(), limits::MAX_QUEUE_CHARS);
    check.finish()?;
    let (label, queue) = (query.label.as_deref(), query.queue.as_deref());
    let list = List::of(caller.project_id, "workers").filtered(&(label, queue));
    let after = cursor::read_text(&app, list, query.cursor.as_deref())?.unwrap_or_default();
    let mut rows =
        workers::page(&app.engine, caller.project_id, label, queue, &after, size.one_more())
            .await?;
    let next_cursor = size
        .cut_by_bytes(&mut rows, names_bytes, |it| cursor::write_text(&app, list, &it.worker_id));
    let workers = rows.into_iter().map(WorkerView::from).collect();
    Ok(Reply(WorkerPage::of(workers, next_cursor)))
}

fn names_bytes(worker: &WorkerRow) -> usize {
    worker.queues.iter().chain(&worker.job_types).map(String::len).sum()
}

/// A worker to deregister.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"worker_id": "worker-1"}))]
pub struct DeregisterRequest {
    /// Id that the worker chose.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_WORKER_ID_CHARS)))))]
    worker_id: String,
}

impl RequestBody for DeregisterRequest {
    const IS_OF_WORKERS: bool = true;
}

/// Answer to a deregistration.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({"status": "terminated", "released": 2}))]
pub struct DeregisterReply {
    /// Always `terminated`.
    pub status: WorkerState,
    /// Number of released jobs.
    pub released: u64,
}

/// Deregister a worker.
///
/// Releases the jobs that the worker still holds, without counting failures. Its polls return no
/// jobs until it registers again.
#[utoipa::path(
    post, path = "/workers/deregister", tag = "workers", operation_id = "workers_deregister",
    security(("api_key" = ["work"]), ("session" = ["member"])),
    request_body = DeregisterRequest,
    responses(
        (status = 200, description = "Deregistered.", body = DeregisterReply),
        (status = 404, description = "The project has no such worker.", body = ErrorBody),
    ),
)]
pub async fn deregister(
    caller: Caller<Bound<Work>>,
    State(app): State<App>,
    Json(request): Json<DeregisterRequest>,
) -> Result<Reply<DeregisterReply>, Error> {
    let mut check = Check::default();
    check.name("worker_id", &request.worker_id, limits::MAX_WORKER_ID_CHARS);
    check.finish()?;
    let key = (caller.project_id, caller.who.worker(request.worker_id).into());
    let released = workers::deregister(&app.engine, &key).await?;
    Ok(Reply(DeregisterReply { status: WorkerState::Terminated, released }))
}

/// Directive of a worker: an instruction that it gets with its next heartbeat or poll.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct DirectiveReply {
    /// Id of the worker.
    pub worker_id: String,
    /// Directive that it gets with its next heartbeat or poll; null: none.
    #[schema(required)]
    pub directive: Option<WorkerState>,
}

macro_rules! directive {
    ($(#[$doc:meta])* $name:ident, $path:literal, $operation:literal, $directive:expr) => {
        $(#[$doc])*
        #[utoipa::path(
            post, path = $path, tag = "workers", operation_id = $operation,
            security(("api_key" = ["manage"]), ("session" = ["member"])),
            params(("worker_id" = String, Path, description = "The worker.", example = "worker-1")),
            responses(
                (status = 200, description = "The directive is set.", body = DirectiveReply),
                (status = 404, description = "The project has no such worker.", body = ErrorBody),
            ),
        )]
        pub async fn $name(
            caller: Caller<Manage>,
            State(app): State<App>,
            NameInPath(worker_id): NameInPath,
        ) -> Result<Reply<DirectiveReply>, Error> {
            let key: WorkerKey = (caller.project_id, worker_id.as_str().into());
            workers::direct(&app.engine, &key, $directive).await?;
            let directive = Some($directive).filter(|it| *it != WorkerState::Running);
            let after = Some(serde_json::json!({ "directive": directive }).to_string());
            audit::note(&app, &caller, NewAuditEntry { after, ..NewAuditEntry::to("worker.directed", &*worker_id) })
                .await;
            Ok(Reply(DirectiveReply { worker_id, directive }))
        }
    };
}

directive!(
    /// Quiet a worker.
    ///
    /// It takes no more jobs and finishes those it has. Stays until it is resumed.
    quiet, "/workers/{worker_id}/quiet", "workers_quiet", WorkerState::Quiet
);
directive!(
    /// Terminate a worker.
    ///
    /// It takes no more jobs and stops after its grace period. Stays until it is resumed.
    terminate, "/workers/{worker_id}/terminate", "workers_terminate", WorkerState::Terminate
);
directive!(
    /// Resume a worker.
    ///
    /// Ends its directive. Its heartbeats are answered `running` until it says that it runs; then
    /// it gets jobs again.
    resume, "/workers/{worker_id}/resume", "workers_resume", WorkerState::Running
);
