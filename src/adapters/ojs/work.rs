//! Fetching and settling jobs, by the paths of the worker protocol and of the HTTP binding.

use axum::{Extension, extract::State, response::Response};
use fencepost_domain::{
    error::Error,
    formats::whole_seconds,
    ids::{JobKey, ProjectId},
    job::StoredState,
    lease::Fence,
    limits,
};
use fencepost_engine::{
    dispatch::{self, LeasedJob, Poll},
    jobs,
    settle::{
        self, Ack, Acked, Failure, ReportedOutcome,
        heartbeat::{self, ShorterLease},
    },
    workers,
};
use fencepost_web::{
    app::App,
    auth::{Caller, Polling, Settling},
    wire::{
        ClientGone,
        extract::{Json, OptionalJson, RequestBody},
        openapi::{at_least, chars, items},
        poll_answer,
        produced::{ProducedText, error_report},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::{
    ErrorBody, Reply, VISIBILITY_SECONDS, fields::time, job_id, label, show::JobView, state_name,
};
use crate::params::PathParams;

/// A fetch.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OjsFetchRequest)]
pub struct FetchRequest {
    /// Queues to fetch from, in this order.
    #[serde(default)]
    #[schema(extensions(("bounds" = json!(items(1, limits::MAX_POLL_QUEUES)))))]
    queues: Vec<String>,
    /// Maximum number of jobs to return; at most 50. Default: 1.
    #[schema(extensions(("bounds" = json!(at_least(1)))))]
    count: Option<i64>,
    /// Id that the worker chooses for itself.
    #[schema(extensions(("bounds" = json!(chars(0, limits::MAX_WORKER_ID_CHARS)))))]
    worker_id: Option<String>,
    /// Length of the reservation in milliseconds. Default: 30 minutes.
    #[schema(extensions(("bounds" = json!(at_least(1)))))]
    visibility_timeout_ms: Option<i64>,
}

impl RequestBody for FetchRequest {}

/// Reserved jobs.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OjsFetchReply)]
pub struct FetchReply {
    jobs: Vec<JobView>,
}

/// Fetch jobs.
#[utoipa::path(
    post, path = "/v1/workers/fetch", tag = "workers", operation_id = "fetch",
    request_body = FetchRequest,
    responses((status = 200, description = "Jobs, or none.", body = FetchReply)),
)]
pub async fn fetch(
    caller: Caller<Polling>,
    State(app): State<App>,
    Extension(ClientGone(gone)): Extension<ClientGone>,
    Json(request): Json<FetchRequest>,
) -> Result<Response, Error> {
    let mut check = Check::default();
    let count = request.count.unwrap_or(1);
    if count < 1 {
        check.refuse("count", format!("must be at least 1, is {count}"));
    }
    if request.queues.is_empty() {
        check.refuse("queues", "must name at least one queue");
    }
    let lease_ms = request.visibility_timeout_ms;
    if let Some(lease_ms) = lease_ms {
        check.range(
            "visibility_timeout_ms",
            lease_ms,
            1,
            i64::from(limits::MAX_LEASE_SECONDS) * 1_000,
        );
    }
    let lease_seconds = lease_ms.map_or(VISIBILITY_SECONDS.into(), whole_seconds);
    let worker_id = request.worker_id.filter(|it| !it.is_empty());
    let poll = Poll {
        worker_id: worker_id.clone(),
        queues: request.queues,
        capacity: u32::try_from(count).unwrap_or(u32::MAX).min(limits::MAX_POLL_CAPACITY),
        lease_seconds: i32::try_from(lease_seconds).ok(),
        loss_fails: Some(true),
        ..Poll::new(caller.project_id)
    };
    check.poll(&poll, "queues", "types");
    check.finish()?;
    let answer = dispatch::poll(&app.engine, poll, &gone, caller.until_revoked(&app)).await?;
    let jobs: Vec<JobView> = answer.jobs().iter().map(JobView::handed).collect::<Result<_, _>>()?;
    let shorter = answer.jobs().iter().zip(&jobs).filter_map(|(handed, shown)| {
        let wanted_ms = shown.visibility_ms().filter(|_| lease_ms.is_none());
        shorter_lease(&handed.job, wanted_ms)
    });
    heartbeat::shorten(&app.engine, &shorter.collect::<Vec<_>>()).await?;
    let directive = jobs.iter().filter_map(JobView::test_directive).max();
    if let (Some(directive), Some(worker_id)) = (directive, worker_id) {
        let worker = (caller.project_id, worker_id.into());
        workers::rehearse(&app.engine, &worker, directive).await?;
    }
    let mut response = poll_answer::respond(&FetchReply { jobs }, answer)?;
    label(&mut response);
    Ok(response)
}

/// In this protocol a job runs no longer than its timeout, and may name the length of its
/// reservations.
fn shorter_lease(job: &LeasedJob, wanted_ms: Option<i64>) -> Option<ShorterLease> {
    let wanted = wanted_ms.and_then(|it| i32::try_from(whole_seconds(it)).ok());
    let seconds = wanted.map_or(job.timeout_seconds, |it| it.min(job.timeout_seconds)).max(1);
    let key = JobKey { project_id: job.project_id, id: job.id };
    (seconds < job.lease_seconds).then_some(ShorterLease { key, lease_id: job.lease_id, seconds })
}

/// Success of a job.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[schema(as = OjsAckRequest)]
pub struct AckRequest {
    /// Id of the job; not if the path names it.
    job_id: Option<String>,
    /// Result: any JSON of at most 64 KiB.
    #[schema(value_type = Option<serde_json::Value>)]
    result: Option<Box<RawValue>>,
    /// Worker that holds it; checked if it is sent.
    worker_id: Option<String>,
}

impl RequestBody for AckRequest {}

/// Answer to an ack.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OjsAckReply)]
pub struct AckReply {
    acknowledged: bool,
    id: String,
    job_id: String,
    state: &'static str,
    completed_at: Option<String>,
    /// The job; absent if it could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    job: Option<JobView>,
}

/// Acknowledge a job.
#[utoipa::path(
    post, path = "/v1/workers/ack", tag = "workers", operation_id = "ack",
    request_body = AckRequest,
    responses(
        (status = 200, description = "Acknowledged.", body = AckReply),
        (status = 404, description = "No such job.", body = ErrorBody),
        (status = 409, description = "It is not active, or another worker holds it.", body = ErrorBody),
    ),
)]
pub async fn ack(
    caller: Caller<Settling>,
    State(app): State<App>,
    params: PathParams,
    OptionalJson(request): OptionalJson<AckRequest>,
) -> Result<Reply<AckReply>, Error> {
    let key = named_job(caller.project_id, &params, request.job_id.as_deref())?;
    let mut check = Check::default();
    if let Some(result) = &request.result {
        check.size("result", result, limits::MAX_RESULT_BYTES)?;
        check.depth("result", result);
    }
    check.finish()?;
    let result = request.result.map(|it| Box::<str>::from(it).into_string());
    settle_job(&app, key, request.worker_id, ReportedOutcome::Succeeded { result }).await?;
    let job = look(&app, key).await;
    let id = key.id.0.to_string();
    Ok(Reply::ok(AckReply {
        acknowledged: true,
        id: id.clone(),
        job_id: id,
        state: state_name(StoredState::Succeeded, 0),
        completed_at: job.as_ref().and_then(|it| it.completed_at.clone()),
        job,
    }))
}

/// The job that the path names, or else the body.
fn named_job(
    project_id: ProjectId,
    params: &PathParams,
    sent: Option<&str>,
) -> Result<JobKey, Error> {
    let id = match (params.get("id"), sent) {
        ("", None) => return Err(Error::invalid("job_id", "must be sent")),
        ("", Some(id)) | (id, _) => job_id(id)?,
    };
    Ok(JobKey { project_id, id })
}

/// The job after its end was recorded. A failure to read it must not look like a failure to record
/// it.
async fn look(app: &App, key: JobKey) -> Option<JobView> {
    let (row, ended) = jobs::find_with_attempts(&app.engine, key).await.ok()?;
    JobView::read(row, &ended).ok()
}

/// Settles whichever lease the job has. A worker that gives its name adopts a lease without one.
async fn settle_job(
    app: &App,
    key: JobKey,
    worker_id: Option<String>,
    end: ReportedOutcome,
) -> Result<Acked, Error> {
    // Many clients send empty strings for unset fields.
    let worker_id = worker_id.filter(|it| !it.is_empty());
    let mut check = Check::default();
    check.optional_name("worker_id", worker_id.as_deref(), limits::MAX_WORKER_ID_CHARS);
    check.finish()?;
    let fence = Fence { worker_id: worker_id.clone(), ..Fence::default() };
    let ack = Ack { job_id: key.id, fence, end, duration_ms: None };
    let settled = settle::ack(&app.engine, key.project_id, ack.clone()).await;
    let (Err(Error::WorkerMismatch(_)), Some(worker_id)) = (&settled, worker_id) else {
        return settled;
    };
    let adopted = heartbeat::adopt(&app.engine, key.project_id, &worker_id, &[key.id]).await?;
    if adopted.is_empty() {
        return settled;
    }
    settle::ack(&app.engine, key.project_id, ack).await
}

/// Failure of a job.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[schema(as = OjsNackRequest)]
pub struct NackRequest {
    /// Id of the job; not if the path names it.
    job_id: Option<String>,
    /// Error of the attempt.
    error: Option<NackError>,
    /// Whether to retry. Default: as the error says, or true.
    retryable: Option<bool>,
    /// Release the job; no failure is counted.
    #[serde(default)]
    requeue: bool,
    /// Worker that holds it; checked if it is sent.
    worker_id: Option<String>,
}

impl RequestBody for NackRequest {}

/// An error.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[schema(as = OjsNackError)]
pub struct NackError {
    #[schema(value_type = Option<String>)]
    code: Option<ProducedText>,
    #[serde(rename = "type")]
    #[schema(value_type = Option<String>)]
    kind: Option<ProducedText>,
    #[schema(value_type = Option<String>)]
    message: Option<ProducedText>,
    retryable: Option<bool>,
    details: Option<NackDetails>,
}

/// Details of an error.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[schema(as = OjsNackDetails)]
pub struct NackDetails {
    /// Type of the error; retry policies match it first.
    #[schema(value_type = Option<String>)]
    error_class: Option<ProducedText>,
    #[schema(value_type = Option<String>)]
    stack_trace: Option<ProducedText>,
}

/// Answer to a failure.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OjsNackReply)]
pub struct NackReply {
    id: String,
    job_id: String,
    state: &'static str,
    attempt: Option<i32>,
    max_attempts: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next_attempt_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_delay_ms: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    discarded_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    completed_at: Option<String>,
    /// The job; absent if it could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    job: Option<JobView>,
}

/// Report a failure.
#[utoipa::path(
    post, path = "/v1/workers/nack", tag = "workers", operation_id = "nack",
    request_body = NackRequest,
    responses(
        (status = 200, description = "Recorded.", body = NackReply),
        (status = 404, description = "No such job.", body = ErrorBody),
        (status = 409, description = "It is not active, or another worker holds it.", body = ErrorBody),
    ),
)]
pub async fn nack(
    caller: Caller<Settling>,
    State(app): State<App>,
    params: PathParams,
    OptionalJson(request): OptionalJson<NackRequest>,
) -> Result<Reply<NackReply>, Error> {
    let key = named_job(caller.project_id, &params, request.job_id.as_deref())?;
    let sent = request.error.unwrap_or_default();
    let details = sent.details.unwrap_or_default();
    let kind = details.error_class.or(sent.kind).or(sent.code);
    let (message, stack_trace) = (sent.message.as_ref(), details.stack_trace.as_ref());
    let error = error_report(kind.as_ref(), message, stack_trace);
    let end = if request.requeue {
        ReportedOutcome::Released
    } else {
        let retryable = request.retryable.or(sent.retryable).unwrap_or(true);
        ReportedOutcome::Failed(Failure { error, retryable, retry_after_seconds: None })
    };
    let is_released = matches!(end, ReportedOutcome::Released);
    let next_attempt_at = match settle_job(&app, key, request.worker_id, end).await? {
        Acked::Retry { at, .. } if !is_released => Some(at),
        _ => None,
    };
    let job = look(&app, key).await;
    let of = |field: fn(&JobView) -> Option<String>| job.as_ref().and_then(field);
    let state = match next_attempt_at {
        _ if is_released => state_name(StoredState::Pending, 0),
        Some(_) => state_name(StoredState::Backoff, 0),
        None => job.as_ref().map_or(state_name(StoredState::DeadLetter, 0), |it| it.state),
    };
    let id = key.id.0.to_string();
    Ok(Reply::ok(NackReply {
        id: id.clone(),
        job_id: id,
        state,
        attempt: job.as_ref().map(|it| it.attempt),
        max_attempts: job.as_ref().map(|it| it.max_attempts),
        next_attempt_at: next_attempt_at.map(time),
        retry_delay_ms: job.as_ref().and_then(|it| it.retry_delay_ms),
        discarded_at: of(|it| it.completed_at.clone()),
        completed_at: of(|it| it.completed_at.clone()),
        job,
    }))
}
