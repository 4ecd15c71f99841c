//! `POST /v1/workers/ack`.

use axum::{
    Extension, Json as Reply,
    extract::State,
    response::{IntoResponse, Response},
};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::Error,
    group::RateLimitScope,
    ids::{JobKey, LeaseId},
    limits,
    text::ErrorReport,
};
use fencepost_engine::{
    reach::Reach,
    settle::{
        self, Ack, Acked, Failure, RateLimited, ReportedOutcome,
        checkpoints::{self, NewCheckpoint},
    },
};
use fencepost_web::{
    app::App,
    auth::{Bound, Caller, Settling, Who},
    wire::{
        ClientGone, RequestId,
        extract::{Json, Object, RequestBody},
        openapi::{at_least, chars, range},
        produced::{ProducedText, error_report},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::{
    accept_fence, accept_job_id, checkpoint,
    then_poll::{self, ThenPollReply, ThenPollRequest},
};
use crate::{
    error::ErrorBody,
    routes::audit::{self, NewAuditEntry},
};

/// The end of an attempt.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({
    "job_id": "job_01m7w3ha3aextt8pkwwdmxsmqw", "worker_id": "worker-1", "attempt": 1,
    "status": "succeeded"
}))]
pub struct AckRequest {
    /// Id of the job.
    pub(super) job_id: String,
    /// Worker that holds the job.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_WORKER_ID_CHARS)))))]
    worker_id: String,
    /// Outcome of the attempt.
    status: AckStatus,
    /// Attempt from the poll's answer. An ack that shows it can be repeated.
    #[schema(extensions(("bounds" = json!(at_least(1)))))]
    attempt: Option<i32>,
    /// Lease from the poll's answer. An ack that shows it can be repeated.
    #[schema(value_type = Option<uuid::Uuid>)]
    lease_id: Option<LeaseId>,
    /// Run time in milliseconds, as the worker measured it.
    #[schema(extensions(("bounds" = json!(range(0, limits::MAX_DURATION_MS)))))]
    duration_ms: Option<i64>,
    /// With `succeeded`: any JSON of at most 64 KiB.
    #[serde(default)]
    #[schema(value_type = serde_json::Value, required = false)]
    result: Option<Box<RawValue>>,
    /// With `failed`: the error; 16 KiB of it are kept.
    #[schema(value_type = Option<AckError>)]
    error: Option<Object<AckError>>,
    /// With `failed`: whether to retry. Default: true.
    retryable: Option<bool>,
    /// With `failed`: seconds until the retry, instead of the backoff; at most 30 days, and without
    /// effect beside `retryable: false`. With
    /// `rate_limited`: seconds of the pause, 1 to 86,400; default: 5.
    #[schema(extensions(("bounds" = json!(range(0, limits::MAX_RETRY_SECONDS)))))]
    retry_after_seconds: Option<u32>,
    /// With `released`: seconds until the job may run again, at most 30 days. It keeps its place in
    /// a group with a strict order, and neither a failure nor a claim is counted. Default: 0, which
    /// counts a claim.
    #[schema(extensions(("bounds" = json!(range(0, limits::MAX_SNOOZE_SECONDS)))))]
    delay_seconds: Option<u32>,
    /// With `rate_limited`: what is paused. `group`, `queue`, or `shared_limit:` and the name of a
    /// shared limit: all its jobs, or those of the job's group if each group has it for itself. It
    /// is the queue where the queue does not name the limit. Default: the group, or the queue of a
    /// job without one.
    #[schema(value_type = Option<String>, required = false, example = "shared_limit:stripe")]
    scope: Option<RateLimitScope>,
    /// Except with `succeeded`: how far the attempt has come, any JSON of at most 64 KiB. The next
    /// lease of the job brings it. Needs `attempt` or `lease_id`. Where it cannot be stored, since
    /// it is stale or the project is full, the ack counts without it.
    #[serde(default, deserialize_with = "checkpoint::read")]
    #[schema(value_type = serde_json::Value, required = false)]
    checkpoint: Option<Box<RawValue>>,
    /// With `checkpoint`: its number. Only a larger one than the stored one replaces it.
    #[schema(extensions(("bounds" = json!(range(0, limits::MAX_CHECKPOINT_SEQUENCE)))))]
    checkpoint_sequence: Option<i64>,
    /// Polls when the ack is recorded; needs `attempt` or `lease_id`. Not in a batch.
    #[schema(value_type = Option<ThenPollRequest>)]
    then_poll: Option<Object<ThenPollRequest>>,
}

impl RequestBody for AckRequest {
    const IS_OF_WORKERS: bool = true;
}

/// Outcome of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AckStatus {
    /// The job is done.
    Succeeded,
    /// The attempt failed: retry the job, or dead-letter it.
    Failed,
    /// Release the job, at once or with a delay; no failure is counted.
    Released,
    /// A service that the job calls asks for fewer requests: the job waits with its group or its
    /// queue; no failure is counted.
    RateLimited,
}

/// An error report.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AckError {
    /// Type of the error.
    #[serde(rename = "type")]
    #[schema(value_type = Option<String>)]
    kind: Option<ProducedText>,
    /// Message.
    #[schema(value_type = Option<String>)]
    message: Option<ProducedText>,
    /// Stack trace.
    #[schema(value_type = Option<String>)]
    stack_trace: Option<ProducedText>,
}

/// Result of an ack.
#[derive(Debug, Serialize, ToSchema)]
pub struct AckReply {
    /// `done` if the job has ended, `retry` if it runs again.
    pub action: AckAction,
    /// Time of the next attempt; only with `retry`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub retry_at: Option<DateTime<Utc>>,
    /// Number of children that may run now; only if the job has children.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub children_activated: Option<i32>,
    /// Answer to `then_poll`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub poll: Option<ThenPollReply>,
}

/// The next step of an acknowledged job.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AckAction {
    /// The job has ended: it has succeeded, is dead-lettered, or was cancelled.
    Done,
    /// The job runs again.
    Retry,
}

impl From<Acked> for AckReply {
    fn from(acked: Acked) -> Self {
        match acked {
            Acked::Done { children_activated } => {
                Self { action: AckAction::Done, retry_at: None, children_activated, poll: None }
            }
            Acked::Retry { at, .. } => Self {
                action: AckAction::Retry,
                retry_at: Some(at),
                children_activated: None,
                poll: None,
            },
        }
    }
}

/// Ack an attempt.
///
/// Repeating an ack that shows its attempt or lease returns the first answer. A 409 means that
/// nothing was recorded: the attempt no longer belongs to this worker, or the ack must show it
/// (`fence_required`).
///
/// With `then_poll` the next jobs come in the answer to the ack. A wrong `then_poll` refuses both.
/// Then the ack is recorded, and counts whatever happens to the poll: `poll.error` says why there
/// was none. A refused ack is followed by no poll. Repeating the whole request returns the first
/// answer to the ack and, while their leases run, the same jobs. It is counted as an ack and a
/// poll.
#[utoipa::path(
    post, path = "/workers/ack", tag = "workers", operation_id = "workers_ack",
    security(("api_key" = ["work"]), ("session" = ["member"])),
    request_body = AckRequest,
    responses(
        (status = 200, description = "The end of the attempt is recorded.", body = AckReply),
        (status = 404, description = "The project has no such job.", body = ErrorBody),
        (status = 409, description = "The attempt no longer belongs to this worker, or the ack must show it.", body = ErrorBody),
    ),
)]
pub async fn ack(
    caller: Caller<Bound<Settling>>,
    State(app): State<App>,
    Extension(ClientGone(gone)): Extension<ClientGone>,
    Extension(request_id): Extension<RequestId>,
    Json(mut request): Json<AckRequest>,
) -> Result<Response, Error> {
    let has_fence = request.attempt.is_some() || request.lease_id.is_some();
    let poll = request.then_poll.take();
    let poll = poll.map(|Object(it)| it.accept(&caller, &request.worker_id, has_fence));
    let poll = poll.transpose()?;
    let reach = read_reach(&caller, &app, std::slice::from_ref(&request).iter()).await?;
    let acked = settle_one(&caller, &app, &reach, request, "").await?;
    match poll {
        None => Ok(Reply(AckReply::from(acked)).into_response()),
        Some(poll) => {
            let ack = AckReply::from(acked);
            let answered = |reply| AckReply { poll: Some(reply), ..ack };
            // Boxed: most acks have none, and its bytes would be part of each.
            Box::pin(then_poll::answer(&app, &caller, poll, (&gone, &request_id), answered)).await
        }
    }
}

pub(super) async fn read_reach(
    caller: &Caller<Bound<Settling>>,
    app: &App,
    acks: impl Iterator<Item = &AckRequest>,
) -> Result<Reach, Error> {
    let ids = acks.filter_map(|it| it.job_id.parse().ok());
    Reach::read(&app.engine, caller.project_id, caller.who.binding(), ids).await
}

pub(super) async fn settle_one(
    caller: &Caller<Bound<Settling>>,
    app: &App,
    reach: &Reach,
    request: AckRequest,
    path: &str,
) -> Result<Acked, Error> {
    let (mut ack, sent) = accept(&caller.who, request, path)?;
    reach.check(ack.job_id)?;
    let worker = ack.fence.worker_id.as_deref().unwrap_or_default().into();
    app.engine.registry.record_seen(&(caller.project_id, worker), &[], &[]);
    let key = JobKey { project_id: caller.project_id, id: ack.job_id };
    if let Some(sent) = sent {
        let required = checkpoints::require_fence(&app.engine, key, &ack.fence).await;
        required.map_err(|it| it.below(path))?;
        // An outcome counts, whatever becomes of it.
        if let Err(error) = checkpoint::save(app, caller, key, &ack.fence, sent).await {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(job.id = %key.id, error, "checkpoint of an ack was not stored");
        }
    }
    ack.fence =
        settle::name_attempt(&app.engine, key, ack.fence, caller.who.require_fence()).await?;
    let job_id = ack.job_id;
    let acked = settle::ack(&app.engine, caller.project_id, ack).await;
    let acked = acked.map_err(|it| it.below(path))?;
    if let Acked::Retry { paused: Some(scope), .. } = &acked {
        // One key that may only work can stop a queue.
        let after = Some(serde_json::json!({ "scope": scope.to_string() }).to_string());
        let entry = NewAuditEntry::to("job.rate_limited", job_id.to_string());
        audit::note_detached(app, caller, NewAuditEntry { after, ..entry }).await;
    }
    Ok(acked)
}

fn accept(
    who: &Who,
    mut request: AckRequest,
    path: &str,
) -> Result<(Ack, Option<NewCheckpoint>), Error> {
    let mut check = Check::below(path);
    let (data, sequence) = (request.checkpoint.take(), request.checkpoint_sequence);
    let checkpoint = match request.status {
        AckStatus::Succeeded if data.is_some() || sequence.is_some() => {
            check.refuse("checkpoint", "must not be sent with status succeeded");
            None
        }
        _ => checkpoint::accept(&mut check, data, sequence)?,
    };
    check_retry(&mut check, &request);
    let fence = accept_fence(&mut check, who, request.worker_id, request.attempt, request.lease_id);
    if let Some(duration_ms) = request.duration_ms {
        check.range("duration_ms", duration_ms, 0, limits::MAX_DURATION_MS);
    }
    if request.then_poll.is_some() {
        check.refuse("then_poll", "must not be sent in a batch");
    }
    let is_out_of_place = |status, is_sent| request.status != status && is_sent;
    if is_out_of_place(AckStatus::Succeeded, request.result.is_some()) {
        check.refuse("result", "must be sent with status succeeded only");
    }
    let of_failures =
        [("error", request.error.is_some()), ("retryable", request.retryable.is_some())];
    for (field, is_sent) in of_failures {
        if is_out_of_place(AckStatus::Failed, is_sent) {
            check.refuse(field, "must be sent with status failed only");
        }
    }
    if let Some(result) = &request.result {
        check.size("result", result, limits::MAX_RESULT_BYTES)?;
        check.depth("result", result);
    }
    check.finish()?;
    let end = match request.status {
        AckStatus::Succeeded => ReportedOutcome::Succeeded {
            result: request.result.map(|it| Box::<str>::from(it).into_string()),
        },
        AckStatus::Failed => ReportedOutcome::Failed(Failure {
            error: report(request.error.map(|Object(it)| it)),
            retryable: request.retryable.unwrap_or(true),
            retry_after_seconds: request.retry_after_seconds,
        }),
        AckStatus::Released => match request.delay_seconds {
            None | Some(0) => ReportedOutcome::Released,
            Some(delay_seconds) => ReportedOutcome::Snoozed { delay_seconds },
        },
        AckStatus::RateLimited => ReportedOutcome::RateLimited(RateLimited {
            retry_after_seconds: request
                .retry_after_seconds
                .unwrap_or(limits::DEFAULT_RATE_LIMITED_SECONDS),
            scope: request.scope,
        }),
    };
    let job_id = accept_job_id(&request.job_id)?;
    Ok((Ack { job_id, fence, end, duration_ms: request.duration_ms }, checkpoint))
}

fn check_retry(check: &mut Check, request: &AckRequest) {
    let (status, field) = (request.status, "retry_after_seconds");
    let (min, max) = match status {
        AckStatus::RateLimited => (1, limits::MAX_RATE_LIMITED_SECONDS),
        _ => (0, limits::MAX_RETRY_SECONDS),
    };
    if let Some(seconds) = request.retry_after_seconds {
        match status {
            AckStatus::Failed | AckStatus::RateLimited => {
                check.range(field, i64::from(seconds), min, max);
            }
            _ => check.refuse(field, "must be sent with status failed or rate_limited only"),
        }
    }
    if let Some(seconds) = request.delay_seconds {
        match status {
            AckStatus::Released => {
                check.range("delay_seconds", seconds, 0, limits::MAX_SNOOZE_SECONDS);
            }
            _ => check.refuse("delay_seconds", "must be sent with status released only"),
        }
    }
    if status != AckStatus::RateLimited && request.scope.is_some() {
        check.refuse("scope", "must be sent with status rate_limited only");
    }
}

fn report(error: Option<AckError>) -> ErrorReport {
    let Some(AckError { kind, message, stack_trace }) = error else {
        return ErrorReport::default();
    };
    error_report(kind.as_ref(), message.as_ref(), stack_trace.as_ref())
}
