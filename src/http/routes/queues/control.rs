//! `POST /v1/queues/{queue}/pause`, `POST …/resume` and `POST …/purge`.

use axum::{Json as Reply, extract::State, http::StatusCode, response::Response};
use fencepost_domain::{
    error::Error,
    limits,
    operation::{Filter, Kind, Which},
};
use fencepost_engine::{
    operations::{self, NewOperation},
    queues,
};
use fencepost_web::{
    app::App,
    auth::{Caller, Manage},
    wire::{
        extract::{NameInPath, OptionalJson, RequestBody},
        openapi::chars,
        validate::Check,
    },
};
use serde::{Deserialize, Deserializer};
use utoipa::ToSchema;

use super::{Queue, known, one};
use crate::{
    error::ErrorBody,
    idempotency::{self, Answer, Ids, Once},
    redact::shown,
    routes::{
        audit::{self, NewAuditEntry},
        operations::Operation,
    },
};

/// Queue or job type to pause or resume. No body, or an empty object: the whole queue.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"job_type": "email.send"}))]
pub struct PauseRequest {
    /// Only jobs of this type.
    #[serde(default, deserialize_with = "named")]
    #[schema(value_type = Option<String>, required = false, extensions(("bounds" = json!(chars(1, limits::MAX_JOB_TYPE_CHARS)))))]
    job_type: Option<String>,
}

impl RequestBody for PauseRequest {}

/// Null is refused: it would mean the whole queue.
fn named<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    String::deserialize(from).map(Some)
}

/// Pause a queue.
///
/// It accepts jobs, but none is claimed; parked polls stay parked. With `job_type`, only jobs of
/// that type are paused. Running jobs continue.
#[utoipa::path(
    post, path = "/queues/{queue}/pause", tag = "queues", operation_id = "queues_pause",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(("queue" = String, Path, description = "The queue.", example = "default")),
    request_body(content = PauseRequest, description = "Optional."),
    responses(
        (status = 200, description = "The queue.", body = Queue),
    ),
)]
pub async fn pause(
    caller: Caller<Manage>,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
    OptionalJson(request): OptionalJson<PauseRequest>,
) -> Result<Reply<Queue>, Error> {
    set_paused(&app, &caller, queue, request, true).await
}

/// Resume a queue.
///
/// Its jobs are claimed again, also by parked polls: on this node immediately, on all others within
/// a second. Job types that were paused separately stay paused. With `job_type`, that type is
/// resumed, whether a person or the circuit breaker paused it.
#[utoipa::path(
    post, path = "/queues/{queue}/resume", tag = "queues", operation_id = "queues_resume",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(("queue" = String, Path, description = "The queue.", example = "default")),
    request_body(content = PauseRequest, description = "Optional."),
    responses(
        (status = 200, description = "The queue.", body = Queue),
        (status = 404, description = "The queue does not exist.", body = ErrorBody),
    ),
)]
pub async fn resume(
    caller: Caller<Manage>,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
    OptionalJson(request): OptionalJson<PauseRequest>,
) -> Result<Reply<Queue>, Error> {
    set_paused(&app, &caller, queue, request, false).await
}

/// Confirmation of a purge.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"confirm": "default"}))]
pub struct PurgeRequest {
    /// Must be the queue's name.
    confirm: String,
}

impl RequestBody for PurgeRequest {}

/// Purge a queue.
///
/// Cancels its waiting jobs, including scheduled ones, in the background; the operation shows the
/// progress. Running jobs, ended ones, and jobs enqueued after it started are not touched. Children
/// of the jobs are cancelled with them.
#[utoipa::path(
    post, path = "/queues/{queue}/purge", tag = "queues", operation_id = "queues_purge",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(
        ("queue" = String, Path, description = "The queue.", example = "default"),
        idempotency::Header,
    ),
    request_body = PurgeRequest,
    responses(
        (status = 202, description = "The operation has started; `Location` is its path.", body = Operation,
         headers(("Location" = String, description = "The operation's path."))),
        (status = 400, description = "Invalid request, or `confirm` is another name.", body = ErrorBody),
        (status = 404, description = "The queue does not exist.", body = ErrorBody),
    ),
)]
pub async fn purge(
    caller: Caller<Manage>,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
    Once { request, repeat }: Once<PurgeRequest>,
) -> Result<Response, Error> {
    let (running, by) = (app.clone(), caller.clone());
    repeat
        .once(&app, &caller, async move |ids: Ids| {
            let mut check = Check::default();
            check.name("queue", &queue, limits::MAX_QUEUE_CHARS);
            if request.confirm != queue {
                check.refuse("confirm", "must be the queue's name");
            }
            check.finish()?;
            let counts = known(&running, by.project_id, &queue).await?.counts;
            let new = NewOperation {
                id: ids.operation(),
                kind: Kind::QueuePurge,
                filter: Which::Letters(Filter { queue: Some(queue.clone()), ..Filter::default() }),
                expected: Some(counts.scheduled + counts.pending),
                max_jobs: None,
                rate_per_second: None,
            };
            let row = operations::begin(&running.engine, by.tenant(), &new).await?;
            audit::note(&running, &by, NewAuditEntry::to("queue.purged", queue)).await;
            let location = Some(format!("/v1/operations/{}", row.id));
            Answer::new(StatusCode::ACCEPTED, location, &shown(&by.who, Operation::from(row)))
        })
        .await
}

async fn set_paused(
    app: &App,
    caller: &Caller<Manage>,
    queue: String,
    request: PauseRequest,
    is_paused: bool,
) -> Result<Reply<Queue>, Error> {
    let mut check = Check::default();
    check.name("queue", &queue, limits::MAX_QUEUE_CHARS);
    check.optional_name("job_type", request.job_type.as_deref(), limits::MAX_JOB_TYPE_CHARS);
    check.finish()?;
    let (engine, project_id) = (&app.engine, caller.project_id);
    if !is_paused {
        // A misspelled queue must not look like a success.
        known(app, project_id, &queue).await?;
    }
    match &request.job_type {
        None => queues::set_paused(engine, project_id, &queue, is_paused).await?,
        Some(job_type) => {
            queues::set_type_paused(engine, project_id, &queue, job_type, is_paused).await?;
        }
    }
    let action = if is_paused { "queue.paused" } else { "queue.resumed" };
    let after = request.job_type.map(|it| serde_json::json!({ "job_type": it }).to_string());
    audit::note(app, caller, NewAuditEntry { after, ..NewAuditEntry::to(action, &*queue) }).await;
    one(app, project_id, queue).await
}
