//! `POST /v1/queues/{queue}/pause` and `POST …/resume`.

use axum::{Json as Reply, extract::State};
use serde::Deserialize;
use utoipa::ToSchema;

use super::{Queue, one};
use crate::{
    app::App,
    auth::Caller,
    domain::limits,
    engine::queues,
    error::Error,
    http::{
        error::ErrorBody,
        extract::{NameInPath, OptionalJson, RequestBody},
        validate::Check,
    },
};

/// What of a queue to pause or to resume. No body, or an empty object: all of it.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"job_type": "email.send"}))]
pub struct PauseRequest {
    /// Only jobs of this type.
    #[schema(min_length = 1, max_length = 500)]
    job_type: Option<String>,
}

impl RequestBody for PauseRequest {}

/// Pause a queue.
///
/// It goes on taking jobs and hands out none; parked polls stay parked. With `job_type`, only jobs of that
/// type are held back. What runs is not touched.
#[utoipa::path(
    post, path = "/queues/{queue}/pause", tag = "queues", operation_id = "queues_pause",
    params(("queue" = String, Path, description = "The queue.", example = "default")),
    request_body = inline(Option<PauseRequest>),
    responses(
        (status = 200, description = "The queue, as it is now.", body = Queue),
        (status = 400, description = "The request cannot be read or breaks a rule.", body = ErrorBody),
        (status = 401, description = "No valid API key.", body = ErrorBody),
        (status = 413, description = "The body is too large.", body = ErrorBody),
        (status = 415, description = "The body is not JSON.", body = ErrorBody),
        (status = 503, description = "Try again later.", body = ErrorBody),
    ),
)]
pub async fn pause(
    caller: Caller,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
    OptionalJson(request): OptionalJson<PauseRequest>,
) -> Result<Reply<Queue>, Error> {
    set_paused(&app, &caller, queue, request, true).await
}

/// Resume a queue.
///
/// Its jobs are handed out again, to polls that are parked already too: on this node at once, on all others
/// within a second. With `job_type`, jobs of that type are, whether somebody or the brake had paused them.
#[utoipa::path(
    post, path = "/queues/{queue}/resume", tag = "queues", operation_id = "queues_resume",
    params(("queue" = String, Path, description = "The queue.", example = "default")),
    request_body = inline(Option<PauseRequest>),
    responses(
        (status = 200, description = "The queue, as it is now.", body = Queue),
        (status = 400, description = "The request cannot be read or breaks a rule.", body = ErrorBody),
        (status = 401, description = "No valid API key.", body = ErrorBody),
        (status = 413, description = "The body is too large.", body = ErrorBody),
        (status = 415, description = "The body is not JSON.", body = ErrorBody),
        (status = 503, description = "Try again later.", body = ErrorBody),
    ),
)]
pub async fn resume(
    caller: Caller,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
    OptionalJson(request): OptionalJson<PauseRequest>,
) -> Result<Reply<Queue>, Error> {
    set_paused(&app, &caller, queue, request, false).await
}

async fn set_paused(
    app: &App,
    caller: &Caller,
    queue: String,
    request: PauseRequest,
    is_paused: bool,
) -> Result<Reply<Queue>, Error> {
    let mut check = Check::default();
    check.name("queue", &queue, limits::MAX_QUEUE_CHARS);
    check.optional_name("job_type", request.job_type.as_deref(), limits::MAX_JOB_TYPE_CHARS);
    check.finish()?;
    let (engine, project_id) = (&app.engine, caller.project_id);
    match &request.job_type {
        None => queues::set_paused(engine, project_id, &queue, is_paused).await?,
        Some(job_type) => {
            queues::set_type_paused(engine, project_id, &queue, job_type, is_paused).await?;
        }
    }
    one(app, project_id, queue).await
}
