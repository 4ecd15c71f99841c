//! `POST /v1/jobs/{job_id}/pause` and `…/resume`.

use axum::{Json as Reply, extract::State};
use fencepost_domain::{
    error::Error,
    ids::{JobId, JobKey},
};
use fencepost_engine::jobs::pauses::{self, Pause};
use fencepost_web::{
    app::App,
    auth::{Caller, Control},
    wire::extract::{JobInPath, OptionalJson},
};

use super::{Job, read};
use crate::{change::ReasonRequest, error::ErrorBody};

/// Pause a job.
///
/// A waiting job starts no attempt until it is resumed: it is `scheduled`, with `waiting_for`
/// `job_paused`. Its `run_at`, its parents, its unique key and its place in its group stay; in a
/// group with strict order the jobs behind it wait, too. `expires_at` still counts. Pausing a
/// paused job changes nothing.
#[utoipa::path(
    post, path = "/jobs/{job_id}/pause", tag = "jobs", operation_id = "jobs_pause",
    security(("api_key" = ["produce"]), ("api_key" = ["manage"]), ("session" = ["member"])),
    params(("job_id" = String, Path, description = "The job.", example = "job_01m7w3ha3aextt8pkwwdmxsmqw")),
    request_body(content = ReasonRequest, description = "Optional."),
    responses(
        (status = 200, description = "The job.", body = Job),
        (status = 404, description = "The project has no such job.", body = ErrorBody),
        (status = 409, description = "The job runs or has ended.", body = ErrorBody),
    ),
)]
pub async fn pause(
    caller: Caller<Control>,
    State(app): State<App>,
    JobInPath(id): JobInPath,
    OptionalJson(request): OptionalJson<ReasonRequest>,
) -> Result<Reply<Job>, Error> {
    set(&app, &caller, id, Pause::Begin, request).await
}

/// Resume a job.
///
/// A paused job waits again for its `run_at` and its parents, if it had to; else it is ready.
/// Resuming a job that is not paused changes nothing.
#[utoipa::path(
    post, path = "/jobs/{job_id}/resume", tag = "jobs", operation_id = "jobs_resume",
    security(("api_key" = ["produce"]), ("api_key" = ["manage"]), ("session" = ["member"])),
    params(("job_id" = String, Path, description = "The job.", example = "job_01m7w3ha3aextt8pkwwdmxsmqw")),
    request_body(content = ReasonRequest, description = "Optional."),
    responses(
        (status = 200, description = "The job.", body = Job),
        (status = 404, description = "The project has no such job.", body = ErrorBody),
        (status = 409, description = "The job runs or has ended.", body = ErrorBody),
    ),
)]
pub async fn resume(
    caller: Caller<Control>,
    State(app): State<App>,
    JobInPath(id): JobInPath,
    OptionalJson(request): OptionalJson<ReasonRequest>,
) -> Result<Reply<Job>, Error> {
    set(&app, &caller, id, Pause::End, request).await
}

async fn set(
    app: &App,
    caller: &Caller<Control>,
    id: JobId,
    pause: Pause,
    request: ReasonRequest,
) -> Result<Reply<Job>, Error> {
    let by = request.accept(&caller.who)?;
    let key = JobKey { project_id: caller.project_id, id };
    pauses::set(&app.engine, key, pause, &by).await?;
    read::find(app, caller, id).await.map(Reply)
}
