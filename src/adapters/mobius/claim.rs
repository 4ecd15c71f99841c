//! Claiming jobs.

use std::time::Duration;

use axum::{
    Extension,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use fencepost_domain::{error::Error, ids::ProjectId, limits};
use fencepost_engine::{
    dispatch::{self, DispatchedJob, Poll},
    jobs::workflows,
    workers::{self, Registration},
};
use fencepost_web::{
    app::App,
    auth::{Caller, Polling},
    wire::{
        ClientGone,
        extract::{Json, RequestBody},
        openapi::{chars, items, range},
        poll_answer,
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::{ErrorBody, HEARTBEAT_INTERVAL_SECONDS, LEASE_SECONDS};
use crate::{attempt::AttemptId, work};

/// A claim.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ClaimRequest {
    /// Id that the worker chooses for itself. Clients from 0.0.14 on call it `worker_instance_id`.
    #[serde(alias = "worker_instance_id")]
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_WORKER_ID_CHARS)))))]
    worker_id: String,
    /// Number of jobs that the worker runs at the same time. Default: 1.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_WORKER_CONCURRENCY)))))]
    concurrency_limit: Option<i32>,
    /// Display name.
    worker_name: Option<String>,
    /// Build of the worker.
    worker_version: Option<String>,
    /// Queues to claim from, in this order. Default: all.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_POLL_QUEUES)))))]
    queues: Option<Vec<String>>,
    /// Only jobs of these types. Default: any.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_POLL_JOB_TYPES)))))]
    actions: Option<Vec<String>>,
    /// Seconds to wait for a job. Default: 0.
    #[schema(extensions(("bounds" = json!(range(0, limits::MAX_POLL_WAIT_SECONDS)))))]
    wait_seconds: Option<u32>,
}

impl RequestBody for ClaimRequest {}

/// A leased job.
#[derive(Debug, Serialize, ToSchema)]
pub struct ClaimedJob {
    /// Id of the job and its attempt.
    #[schema(example = "job_01m7w3ha3aextt8pkwwdmxsmqw-1")]
    job_id: String,
    /// Id of the workflow, or of the job if it has none.
    run_id: String,
    /// Name of the workflow, or the job's type.
    workflow_name: String,
    /// Key of the job in its workflow, or its type.
    step_name: String,
    /// Type of the job.
    action: String,
    /// Payload, with `parent_results` if it waited for other jobs and has no such field.
    #[schema(value_type = Object)]
    parameters: Box<RawValue>,
    /// Attempt, counted from 1.
    attempt: i32,
    /// Queue.
    queue: String,
    /// Interval of heartbeats in seconds.
    heartbeat_interval_seconds: i32,
}

/// Claim the next job.
#[utoipa::path(
    post, path = "/v1/projects/{project}/jobs/claim", tag = "Jobs", operation_id = "claimJob",
    params(("project" = String, Path, description = "The key's project: its id or slug.")),
    request_body = ClaimRequest,
    responses(
        (status = 200, description = "A leased job.", body = ClaimedJob),
        (status = 204, description = "No job during the wait."),
        (status = 404, description = "No such project for this key.", body = ErrorBody),
    ),
)]
pub async fn claim(
    caller: Caller<Polling>,
    State(app): State<App>,
    Extension(ClientGone(gone)): Extension<ClientGone>,
    Json(request): Json<ClaimRequest>,
) -> Result<Response, Error> {
    let mut check = Check::default();
    let wait_seconds = request.wait_seconds.unwrap_or(0);
    check.range("wait_seconds", wait_seconds, 0, limits::MAX_POLL_WAIT_SECONDS);
    // Many clients send empty strings for unset fields.
    let sent = |it: Option<String>| it.filter(|it| !it.is_empty());
    let (name, version) = (sent(request.worker_name), sent(request.worker_version));
    check.optional_name("worker_name", name.as_deref(), limits::MAX_WORKER_INFO_CHARS);
    check.optional_name("worker_version", version.as_deref(), limits::MAX_WORKER_INFO_CHARS);
    let poll = Poll {
        worker_id: Some(request.worker_id),
        queues: request.queues.unwrap_or_default(),
        job_types: request.actions.unwrap_or_default(),
        lease_seconds: Some(LEASE_SECONDS),
        loss_fails: Some(true),
        wait: Duration::from_secs(wait_seconds.into()),
        ..Poll::new(caller.project_id)
    };
    check.poll(&poll, "queues", "actions");
    let concurrency = request.concurrency_limit;
    if let Some(concurrency) = concurrency {
        check.range("concurrency_limit", concurrency, 1, limits::MAX_WORKER_CONCURRENCY);
    }
    check.finish()?;
    if name.is_some() || version.is_some() || concurrency.is_some() {
        introduce(&app, &poll, (name, version), concurrency).await?;
    }
    let revoked = caller.until_revoked(&app);
    let answer = dispatch::poll(&app.engine, poll, &gone, revoked).await?;
    let Some(handed) = answer.jobs().first() else {
        return Ok(StatusCode::NO_CONTENT.into_response());
    };
    let job = claimed(&app, caller.project_id, handed).await?;
    poll_answer::respond(&job, answer)
}

/// A worker that describes itself, and is unknown, is registered with its first claim.
async fn introduce(
    app: &App,
    poll: &Poll,
    (name, version): (Option<String>, Option<String>),
    concurrency: Option<i32>,
) -> Result<(), Error> {
    const DEFAULT_CONCURRENCY: i32 = 1;
    let worker_id = poll.worker_id.clone().unwrap_or_default();
    let key = (poll.project_id, worker_id.as_str().into());
    if workers::facts(&app.engine, &key).await?.is_some() {
        return Ok(());
    }
    let worker = Registration {
        worker_id,
        queues: poll.queues.clone(),
        job_types: poll.job_types.clone(),
        hostname: name,
        sdk_version: version,
        concurrency: concurrency.unwrap_or(DEFAULT_CONCURRENCY),
        pid: None,
        labels: Vec::new(),
        beat_seconds: None,
        counts_losses: true,
    };
    workers::register(&app.engine, poll.project_id, &worker).await
}

async fn claimed(
    app: &App,
    project_id: ProjectId,
    handed: &DispatchedJob,
) -> Result<ClaimedJob, Error> {
    const PARENT_RESULTS: &str = "parent_results";
    let job = &handed.job;
    let mut parameters = work::object(&job.payload)?;
    if job.has_parents && !work::has_field(&parameters, PARENT_RESULTS) {
        let results = work::parent_results(handed)?;
        parameters = work::with_field(&parameters, PARENT_RESULTS, &results)?;
    }
    let workflow_name = match job.workflow_id {
        Some(id) => workflows::name(&app.engine, project_id, id).await?,
        None => None,
    };
    Ok(ClaimedJob {
        job_id: AttemptId { job_id: job.id, attempt: job.attempt }.to_string(),
        run_id: job.workflow_id.map_or(job.id.to_string(), |it| it.to_string()),
        workflow_name: workflow_name.unwrap_or_else(|| job.job_type.clone()),
        step_name: job.workflow_key.clone().unwrap_or_else(|| job.job_type.clone()),
        action: job.job_type.clone(),
        parameters,
        attempt: job.attempt,
        queue: job.queue.clone(),
        heartbeat_interval_seconds: HEARTBEAT_INTERVAL_SECONDS,
    })
}
