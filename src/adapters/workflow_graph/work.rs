//! Claiming, keeping and settling jobs.

use std::collections::BTreeMap;

use axum::{
    Extension, Json as Reply,
    extract::State,
    response::{IntoResponse, Response},
};
use fencepost_domain::{
    backoff::{RetryPolicy, RetryStrategy},
    error::Error,
    ids::ProjectId,
    limits,
};
use fencepost_engine::{
    dispatch::{self, DispatchedJob, Poll},
    jobs::control,
    settle::{
        self, Ack, Failure, ReportedOutcome,
        heartbeat::{self as beats, Beat},
    },
};
use fencepost_web::{
    app::App,
    auth::{Beating, Caller, Follow, Polling, Settling},
    wire::{
        ClientGone,
        extract::{Json, RequestBody},
        openapi::{chars, items, range},
        poll_answer,
        produced::{ProducedText, error_report},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, value::RawValue};
use utoipa::ToSchema;

use super::{DEFAULT_LEASE_SECONDS, LeaseName, command, find_job, or_lost, params};
use crate::{params::PathParams, plain_errors::ErrorBody, work};

/// A claim.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ClaimRequest {
    /// Id that the worker chooses for itself.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_WORKER_ID_CHARS)))))]
    worker_id: String,
    /// Its labels; jobs that need other labels are not returned.
    #[serde(default)]
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_LABELS)))))]
    labels: Vec<String>,
    /// Length of the lease in seconds. Default: 30.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_LEASE_SECONDS)))))]
    lease_ttl_secs: Option<i32>,
}

impl RequestBody for ClaimRequest {}

/// A leased job.
#[derive(Debug, Serialize, ToSchema)]
pub struct Claim {
    job: Job,
    lease: Lease,
}

/// A job.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ClaimedJob)]
pub struct Job {
    /// Its key in its workflow, or its own id.
    job_id: String,
    /// Id of its workflow, or its own id.
    workflow_id: String,
    /// Command to run.
    command: String,
    /// Labels that its worker must have.
    required_labels: Vec<String>,
    #[schema(value_type = Object)]
    retry_policy: RetryView,
    /// Attempt, counted from 0.
    attempt: i32,
    /// Results of its parents, by their keys.
    upstream_outputs: BTreeMap<String, BTreeMap<String, String>>,
    /// When it was stored.
    enqueued_at_ms: i64,
    /// When it became ready.
    delayed_until_ms: i64,
}

/// Number of retries, and the wait before each.
#[derive(Debug, Serialize)]
pub struct RetryView {
    max_retries: i32,
    backoff: Backoff,
}

/// Wait before a retry, in milliseconds.
#[derive(Debug, PartialEq, Eq, Serialize)]
enum Backoff {
    None,
    Fixed { delay_secs: u32 },
    Exponential { base_secs: u32, max_secs: u32 },
}

impl Backoff {
    fn of(policy: &RetryPolicy) -> Self {
        let (base_secs, max_secs) = (policy.initial_seconds, policy.max_seconds);
        match policy.strategy {
            _ if base_secs == 0 || max_secs == 0 => Self::None,
            RetryStrategy::Constant => Self::Fixed { delay_secs: base_secs.min(max_secs) },
            RetryStrategy::Exponential | RetryStrategy::Linear | RetryStrategy::Polynomial => {
                Self::Exponential { base_secs, max_secs }
            }
        }
    }
}

/// A lease.
#[derive(Debug, Serialize, ToSchema)]
pub struct Lease {
    /// Shown with every report about the job.
    lease_id: String,
    job_id: String,
    workflow_id: String,
    worker_id: String,
    ttl_secs: i32,
    granted_at_ms: i64,
}

/// A result as strings: an object's fields, or `value`.
fn outputs(result: Option<&RawValue>) -> BTreeMap<String, String> {
    let text = |it: Value| match it {
        Value::String(text) => text,
        other => other.to_string(),
    };
    match result.and_then(|it| serde_json::from_str(it.get()).ok()) {
        None | Some(Value::Null) => BTreeMap::new(),
        Some(Value::Object(fields)) => {
            fields.into_iter().map(|(name, it)| (name, text(it))).collect()
        }
        Some(other) => BTreeMap::from([("value".to_owned(), text(other))]),
    }
}

impl Claim {
    fn of(handed: &DispatchedJob, command: String) -> Result<Self, Error> {
        let job = &handed.job;
        let (workflow_id, job_id) = params(job.id, job.workflow_id, job.workflow_key.as_deref());
        let policy = RetryPolicy::stored(job.retry.as_ref());
        let upstream = work::parent_results(handed)?.into_iter().map(|parent| {
            let made = outputs(parent.result.as_deref());
            (parent.key.unwrap_or(parent.job_id), made)
        });
        let name = LeaseName { job_id: job.id, attempt: job.attempt, lease_id: job.lease_id };
        Ok(Self {
            lease: Lease {
                lease_id: name.to_string(),
                job_id: job_id.clone(),
                workflow_id: workflow_id.clone(),
                worker_id: handed.worker_id.to_string(),
                ttl_secs: job.lease_seconds,
                granted_at_ms: job.claimed_at.timestamp_millis(),
            },
            job: Job {
                job_id,
                workflow_id,
                command,
                required_labels: job.labels.clone().unwrap_or_default(),
                retry_policy: RetryView {
                    max_retries: job.max_attempts - 1,
                    backoff: Backoff::of(&policy),
                },
                attempt: job.attempt - 1,
                upstream_outputs: upstream.collect(),
                enqueued_at_ms: job.created_at.timestamp_millis(),
                delayed_until_ms: job.run_at.timestamp_millis(),
            },
        })
    }
}

/// Claim a job.
#[utoipa::path(
    post, path = "/api/jobs/claim", tag = "workers", operation_id = "claim_job",
    request_body = ClaimRequest,
    responses((status = 200, description = "A leased job; null if there is none.", body = Option<Claim>)),
)]
pub async fn claim(
    caller: Caller<Polling>,
    State(app): State<App>,
    Extension(ClientGone(gone)): Extension<ClientGone>,
    Json(request): Json<ClaimRequest>,
) -> Result<Response, Error> {
    let lease_seconds = request.lease_ttl_secs.unwrap_or(DEFAULT_LEASE_SECONDS);
    let mut check = Check::default();
    check.range("lease_ttl_secs", lease_seconds, 1, limits::MAX_LEASE_SECONDS);
    let poll = Poll {
        worker_id: Some(request.worker_id),
        labels: Some(request.labels),
        only_commands: true,
        lease_seconds: Some(lease_seconds),
        loss_fails: Some(true),
        ..Poll::new(caller.project_id)
    };
    check.poll(&poll, "queues", "job_types");
    check.finish()?;
    let revoked = caller.until_revoked(&app);
    let answer = dispatch::poll(&app.engine, poll, &gone, revoked).await?;
    let first = answer.jobs().first();
    let first = first.and_then(|it| Some((it, command(&it.job.payload)?)));
    let Some((handed, command)) = first else {
        // Jobs that were leased all the same are released.
        return Ok(Reply(None::<Claim>).into_response());
    };
    let claim = Claim::of(handed, command)?;
    poll_answer::respond(&claim, answer)
}

/// Send a heartbeat.
#[utoipa::path(
    post, path = "/api/jobs/{lease_id}/heartbeat", tag = "workers", operation_id = "heartbeat_job",
    params(("lease_id" = String, Path, description = "The lease, as claimed.")),
    responses(
        (status = 200, description = "The lease is renewed."),
        (status = 409, description = "The lease has ended: stop.", body = ErrorBody),
    ),
)]
pub async fn heartbeat(
    caller: Caller<Beating>,
    State(app): State<App>,
    params: PathParams,
) -> Result<(), Error> {
    let lease: LeaseName = params.get("lease_id").parse()?;
    let beat = Beat { key: lease.key(caller.project_id), fence: lease.fence(), progress: None };
    beats::heartbeat(&app.engine, beat).await.map_err(or_lost)?;
    Ok(())
}

/// Check for cancellation.
#[utoipa::path(
    get, path = "/api/jobs/{workflow_id}/{job_id}/cancelled", tag = "workers", operation_id = "is_cancelled",
    params(
        ("workflow_id" = String, Path, description = "The workflow, as claimed."),
        ("job_id" = String, Path, description = "The job, as claimed."),
    ),
    responses(
        (status = 200, description = "True if the job was cancelled.", body = bool, content_type = "application/json"),
        (status = 404, description = "No such job.", body = ErrorBody),
    ),
)]
pub async fn cancelled(
    caller: Caller<Follow>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<bool>, Error> {
    let (workflow, job) = (params.get("workflow_id"), params.get("job_id"));
    let key = find_job(&app.engine, caller.project_id, workflow, job).await?;
    control::is_cancelled(&app.engine, key).await.map(Reply)
}

/// Completion of a job.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CompleteRequest {
    /// Result: strings by name, at most 64 KiB; later jobs get it. Default: none.
    #[schema(value_type = Option<BTreeMap<String, String>>)]
    outputs: Option<Box<RawValue>>,
}

impl RequestBody for CompleteRequest {}

/// Report success.
#[utoipa::path(
    post, path = "/api/jobs/{lease_id}/complete", tag = "workers", operation_id = "complete_job",
    params(("lease_id" = String, Path, description = "The lease, as claimed.")),
    request_body = CompleteRequest,
    responses(
        (status = 200, description = "Recorded."),
        (status = 409, description = "The lease has ended; nothing is recorded.", body = ErrorBody),
    ),
)]
pub async fn complete(
    caller: Caller<Settling>,
    State(app): State<App>,
    params: PathParams,
    Json(request): Json<CompleteRequest>,
) -> Result<(), Error> {
    let mut check = Check::default();
    if let Some(outputs) = &request.outputs {
        if !outputs.get().starts_with('{') {
            check.refuse("outputs", "must be an object");
        }
        check.size("outputs", outputs, limits::MAX_RESULT_BYTES)?;
        check.depth("outputs", outputs);
    }
    check.finish()?;
    let sent = request.outputs.map(|it| Box::<str>::from(it).into_string());
    let outputs = sent.unwrap_or_else(|| "{}".to_owned());
    settle_lease(
        &app,
        caller.project_id,
        &params,
        ReportedOutcome::Succeeded { result: Some(outputs) },
    )
    .await
}

/// Failure of a job.
#[derive(Debug, Deserialize, ToSchema)]
pub struct FailRequest {
    /// Message of the error; 16 KiB of it are kept.
    #[schema(value_type = String)]
    error: ProducedText,
    /// Whether to retry. Default: false.
    #[serde(default)]
    retryable: bool,
}

impl RequestBody for FailRequest {}

/// Report failure.
#[utoipa::path(
    post, path = "/api/jobs/{lease_id}/fail", tag = "workers", operation_id = "fail_job",
    params(("lease_id" = String, Path, description = "The lease, as claimed.")),
    request_body = FailRequest,
    responses(
        (status = 200, description = "Recorded."),
        (status = 409, description = "The lease has ended; nothing is recorded.", body = ErrorBody),
    ),
)]
pub async fn fail(
    caller: Caller<Settling>,
    State(app): State<App>,
    params: PathParams,
    Json(request): Json<FailRequest>,
) -> Result<(), Error> {
    let error = error_report(None, Some(&request.error), None);
    let failure = Failure { error, retryable: request.retryable, retry_after_seconds: None };
    settle_lease(&app, caller.project_id, &params, ReportedOutcome::Failed(failure)).await
}

async fn settle_lease(
    app: &App,
    project_id: ProjectId,
    params: &PathParams,
    end: ReportedOutcome,
) -> Result<(), Error> {
    let lease: LeaseName = params.get("lease_id").parse()?;
    let ack = Ack { job_id: lease.job_id, fence: lease.fence(), end, duration_ms: None };
    settle::ack(&app.engine, project_id, ack).await.map_err(or_lost)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_become_strings() {
        let made = |json: &str| {
            let result = RawValue::from_string(json.to_owned()).expect("JSON");
            outputs(Some(&result)).into_iter().collect::<Vec<_>>()
        };
        let pair = |name: &str, it: &str| (name.to_owned(), it.to_owned());
        assert_eq!(made(r#"{"b": [1], "a": "x"}"#), [pair("a", "x"), pair("b", "[1]")]);
        assert_eq!(made(r#""x""#), [pair("value", "x")]);
        assert_eq!(made("null"), []);
    }

    #[test]
    fn a_wait_of_no_length_is_none() {
        let policy = RetryPolicy::default();
        let exponential = Backoff::Exponential { base_secs: 15, max_secs: 21_600 };
        assert_eq!(Backoff::of(&policy), exponential);
        let constant = RetryPolicy { strategy: RetryStrategy::Constant, ..policy.clone() };
        assert_eq!(Backoff::of(&constant), Backoff::Fixed { delay_secs: 15 });
        let at_once = RetryPolicy { initial_seconds: 0, ..policy };
        assert_eq!(Backoff::of(&at_once), Backoff::None);
    }
}
