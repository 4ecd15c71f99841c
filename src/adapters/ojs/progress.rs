//! Activating jobs that were stored as pending, and the progress of running ones.

use axum::extract::State;
use fencepost_domain::{
    error::{Error, JobStatus},
    ids::{JobId, JobKey},
    lease::Fence,
    limits,
    text::printable,
};
use fencepost_engine::{
    jobs::{
        self,
        control::{self, Change, Timing},
    },
    settle::{
        attempt_reports::{NewEvent, ShownFence, record_events},
        heartbeat::{self, Beat},
    },
};
use fencepost_web::{
    app::App,
    auth::{Beating, Caller, Control, Read},
    wire::{extract::Json, produced::ProducedText, validate::Check},
};
use serde::Serialize;
use serde_json::json;
use utoipa::ToSchema;

use super::{ErrorBody, Reply, accept, fields::Fields, job_id, jobs as ojs_jobs};
use crate::params::PathParams;

/// The type of the events that keep messages about progress.
const PROGRESS_EVENT: &str = "ojs.progress";

/// Progress of a job.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OjsProgress)]
pub struct ProgressView {
    job_id: String,
    /// From 0 to 1; null: none was reported.
    progress: Option<f32>,
    /// The message that was reported last.
    message: Option<String>,
}

/// Make a pending job available.
///
/// A job that was stored with `"pending": true` waits until it is activated. From then on its own
/// `delay_until` counts.
#[utoipa::path(
    post, path = "/v1/jobs/{id}/activate", tag = "jobs", operation_id = "activate_job",
    params(("id" = String, Path, description = "The job.")),
    responses(
        (status = 200, description = "The job.", body = ojs_jobs::JobReply),
        (status = 404, description = "No such job.", body = ErrorBody),
        (status = 409, description = "It is not pending.", body = ErrorBody),
    ),
)]
pub async fn activate(
    caller: Caller<Control>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<ojs_jobs::JobReply>, Error> {
    let key = JobKey { project_id: caller.project_id, id: job_id(params.get("id"))? };
    let row = jobs::find(&app.engine, key).await?;
    if !accept::awaits_activation(&row) {
        let (state, attempt) = (row.state.public(), row.attempt);
        return Err(Error::InvalidState(JobStatus { state, attempt }));
    }
    let mut options = accept::stored_options(&row);
    let start = accept::accept_start(&mut options, &mut Check::default());
    let (tenant, what) = (caller.tenant(), (Timing::Activation(start), Change::default()));
    control::change(&app.engine, tenant, key.id, what, &caller.who.changed_by()).await?;
    ojs_jobs::find(&app, &caller.who, key).await.map(Reply::ok)
}

/// Report progress.
///
/// `progress` from 0 to 1, or `percentage` from 0 to 100; what lies outside is cut. It also renews
/// the job's reservation.
#[utoipa::path(
    put, path = "/v1/jobs/{id}/progress", tag = "workers", operation_id = "report_progress",
    params(("id" = String, Path, description = "The job.")),
    request_body(content = Object, description = "`progress`, `message`, `worker_id`."),
    responses(
        (status = 200, description = "Recorded.", body = ProgressView),
        (status = 404, description = "No such job.", body = ErrorBody),
        (status = 409, description = "It does not run, or the named worker does not hold it.", body = ErrorBody),
    ),
)]
pub async fn report(
    caller: Caller<Beating>,
    State(app): State<App>,
    params: PathParams,
    Json(sent): Json<Fields>,
) -> Result<Reply<ProgressView>, Error> {
    record(caller, &app, job_id(params.get("id"))?, sent, Check::default()).await
}

/// Report progress of the job that the body names.
///
/// It does what `PUT /v1/jobs/{id}/progress` does. Structured `data` is not kept.
#[utoipa::path(
    post, path = "/v1/workers/progress", tag = "workers", operation_id = "report_progress_of",
    request_body(content = Object, description = "`job_id`, `percentage` or `progress`, `message`, `worker_id`."),
    responses(
        (status = 200, description = "Recorded.", body = ProgressView),
        (status = 404, description = "No such job.", body = ErrorBody),
        (status = 409, description = "It does not run, or the named worker does not hold it.", body = ErrorBody),
    ),
)]
pub async fn report_of(
    caller: Caller<Beating>,
    State(app): State<App>,
    Json(mut sent): Json<Fields>,
) -> Result<Reply<ProgressView>, Error> {
    let mut check = Check::default();
    let Some(id) = sent.need::<String>("job_id", &mut check) else {
        return Err(check.finish().err().unwrap_or(Error::JobNotFound));
    };
    record(caller, &app, job_id(&id)?, sent, check).await
}

async fn record(
    caller: Caller<Beating>,
    app: &App,
    id: JobId,
    mut sent: Fields,
    mut check: Check,
) -> Result<Reply<ProgressView>, Error> {
    const PERCENT: f32 = 100.0;
    let key = JobKey { project_id: caller.project_id, id };
    let percentage = sent.take::<f32>("percentage", &mut check).map(|it| it / PERCENT);
    let progress = sent.take::<f32>("progress", &mut check).or(percentage);
    let message = sent.take::<ProducedText>("message", &mut check);
    let message = message.map(|it| printable(it.as_str())).filter(|it| !it.is_empty());
    let chars = message.as_ref().map_or(0, |it| it.chars().count());
    if chars > limits::MAX_NAME_CHARS {
        let max = limits::MAX_NAME_CHARS;
        check.refuse("message", format!("must be at most {max} characters, has {chars}"));
    }
    let worker_id: Option<String> = sent.take("worker_id", &mut check);
    check.optional_name("worker_id", worker_id.as_deref(), limits::MAX_WORKER_ID_CHARS);
    if progress.is_none_or(f32::is_nan) {
        check.refuse("progress", "must be a number");
    }
    check.finish()?;
    let progress = progress.map(|it| it.clamp(0.0, 1.0));
    let attempt = jobs::find(&app.engine, key).await?.attempt;
    let fence = Fence { worker_id, attempt: Some(attempt), lease_id: None };
    let shown = ShownFence::of(key.id, &fence);
    heartbeat::heartbeat(&app.engine, Beat { key, fence, progress }).await?;
    if let Some(message) = &message {
        let payload = json!({"progress": progress, "message": message}).to_string();
        let event = NewEvent::reported(key, PROGRESS_EVENT, attempt, payload);
        match record_events(&app.engine, caller.tenant(), &[shown], vec![event]).await {
            // There is no room for more events: the progress itself is recorded.
            Ok(_) | Err(Error::Invalid(_) | Error::QuotaExceeded { .. }) => (),
            Err(error) => return Err(error),
        }
    }
    Ok(Reply::ok(ProgressView { job_id: key.id.0.to_string(), progress, message }))
}

/// Read the progress of a job.
#[utoipa::path(
    get, path = "/v1/jobs/{id}/progress", tag = "jobs", operation_id = "get_progress",
    params(("id" = String, Path, description = "The job.")),
    responses(
        (status = 200, description = "Its progress.", body = ProgressView),
        (status = 404, description = "No such job.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<Read>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<ProgressView>, Error> {
    let key = JobKey { project_id: caller.project_id, id: job_id(params.get("id"))? };
    let progress = jobs::find(&app.engine, key).await?.progress;
    let event = match caller.who.may_read_payloads() {
        true => jobs::last_event(&app.engine, key, PROGRESS_EVENT).await?,
        false => None,
    };
    let event: Option<serde_json::Value> = event.and_then(|it| serde_json::from_str(&it).ok());
    let message = event.and_then(|it| it["message"].as_str().map(str::to_owned));
    Ok(Reply::ok(ProgressView { job_id: key.id.0.to_string(), progress, message }))
}
