//! `POST /v1/jobs/{job_id}/cancel`, `POST …/retry`, `PATCH /v1/jobs/{job_id}` and
//! `GET …/cancelled`.

use std::collections::BTreeMap;

use axum::{Json as Reply, extract::State};
use chrono::{DateTime, TimeDelta, Utc};
use fencepost_domain::{actor::MAX_REASON_CHARS, error::Error, formats, ids::JobKey, limits};
use fencepost_engine::jobs::control::{self, Change, ChangedLabels, Timing};
use fencepost_web::{
    app::App,
    auth::{Caller, Control, Follow},
    wire::{
        extract::{JobInPath, Json, OptionalJson, RequestBody},
        openapi::{chars, items, range},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use sqlx::types::Json as Stored;
use utoipa::ToSchema;

use super::{Job, read, request::accept_tags};
use crate::{
    change::{ReasonRequest, check_reason},
    error::ErrorBody,
};

/// Cancel a job.
///
/// A waiting job is cancelled immediately. A running job gets `cancel_requested`, and its worker
/// gets `cancel` in the next heartbeat's answer. Cancelling a cancelled job changes nothing.
#[utoipa::path(
    post, path = "/jobs/{job_id}/cancel", tag = "jobs", operation_id = "jobs_cancel",
    security(("api_key" = ["produce"]), ("api_key" = ["manage"]), ("session" = ["member"])),
    params(("job_id" = String, Path, description = "The job.", example = "job_01m7w3ha3aextt8pkwwdmxsmqw")),
    request_body(content = ReasonRequest, description = "Optional."),
    responses(
        (status = 200, description = "The job.", body = Job),
        (status = 404, description = "The project has no such job.", body = ErrorBody),
        (status = 409, description = "The job has succeeded or is a dead letter.", body = ErrorBody),
    ),
)]
pub async fn cancel(
    caller: Caller<Control>,
    State(app): State<App>,
    JobInPath(id): JobInPath,
    OptionalJson(request): OptionalJson<ReasonRequest>,
) -> Result<Reply<Job>, Error> {
    let by = request.accept(&caller.who)?;
    control::cancel(&app.engine, JobKey { project_id: caller.project_id, id }, &by).await?;
    read::find(&app, &caller, id).await.map(Reply)
}

/// How to retry a job.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"reason": "The partner is back."}))]
pub struct RetryJobRequest {
    /// Shown with the change in the job's history. One line.
    #[schema(extensions(("bounds" = json!(chars(1, MAX_REASON_CHARS)))))]
    reason: Option<String>,
    /// Whether the next attempt gets the checkpoint of the earlier ones. Default: true.
    keep_checkpoint: Option<bool>,
}

impl RequestBody for RetryJobRequest {}

/// Retry a job.
///
/// Retries a dead letter or a cancelled job. Failures and losses count from 0 again; attempts
/// continue, and so does the checkpoint. Descendants that were cancelled with it are retried, too.
#[utoipa::path(
    post, path = "/jobs/{job_id}/retry", tag = "jobs", operation_id = "jobs_retry",
    security(("api_key" = ["produce"]), ("api_key" = ["manage"]), ("session" = ["member"])),
    params(("job_id" = String, Path, description = "The job.", example = "job_01m7w3ha3aextt8pkwwdmxsmqw")),
    request_body(content = RetryJobRequest, description = "Optional."),
    responses(
        (status = 200, description = "The job.", body = Job),
        (status = 404, description = "The project has no such job.", body = ErrorBody),
        (status = 409, description = "The job is neither a dead letter nor cancelled, one of its parents failed or was cancelled, or its unique key is taken.", body = ErrorBody),
    ),
)]
pub async fn retry(
    caller: Caller<Control>,
    State(app): State<App>,
    JobInPath(id): JobInPath,
    OptionalJson(request): OptionalJson<RetryJobRequest>,
) -> Result<Reply<Job>, Error> {
    let RetryJobRequest { reason, keep_checkpoint } = request;
    let by = ReasonRequest { reason }.accept(&caller.who)?;
    let checkpoint = match keep_checkpoint {
        None | Some(true) => control::OldCheckpoint::Kept,
        Some(false) => control::OldCheckpoint::Dropped,
    };
    let key = JobKey { project_id: caller.project_id, id };
    control::retry(&app.engine, key, checkpoint, &by).await?;
    read::find(&app, &caller, id).await.map(Reply)
}

/// Changes to a job. At least one field beside the reason.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"priority": 50}))]
pub struct ChangeJobRequest {
    /// Queue.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_QUEUE_CHARS)))))]
    queue: Option<String>,
    /// Priority; higher runs first.
    #[schema(extensions(("bounds" = json!(range(limits::MIN_PRIORITY, limits::MAX_PRIORITY)))))]
    priority: Option<i16>,
    /// Earliest time of its next attempt, at most 100 years ahead.
    #[serde(default, deserialize_with = "formats::optional_time")]
    run_at: Option<DateTime<Utc>>,
    /// Seconds until it may run. Alternative to `run_at`.
    #[schema(extensions(("bounds" = json!(range(0, limits::MAX_DELAY_SECONDS)))))]
    delay_seconds: Option<i64>,
    /// Failures after which it is dead-lettered.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_MAX_ATTEMPTS)))))]
    max_attempts: Option<i32>,
    /// Timeout of one attempt, in seconds.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_TIMEOUT_SECONDS)))))]
    timeout_seconds: Option<i32>,
    /// Losses in a row after which it is dead-lettered.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_MAX_LOSSES)))))]
    max_losses: Option<i32>,
    /// All its tags, at most 32, in place of those that it has.
    #[serde(default, deserialize_with = "formats::tags")]
    tags: Option<BTreeMap<String, String>>,
    /// All labels that its worker must have, at most 16, in place of those that it has.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_LABELS)))))]
    labels: Option<Vec<String>>,
    /// Reason for the change, shown in the job's history. One line.
    #[schema(extensions(("bounds" = json!(chars(1, MAX_REASON_CHARS)))))]
    reason: Option<String>,
}

impl RequestBody for ChangeJobRequest {}

impl ChangeJobRequest {
    /// Checks all but the reason.
    fn accept(self, check: &mut Check) -> (Timing, Change) {
        check.optional_name("queue", self.queue.as_deref(), limits::MAX_QUEUE_CHARS);
        if let Some(priority) = self.priority {
            check.range("priority", priority, limits::MIN_PRIORITY, limits::MAX_PRIORITY);
        }
        let numbers = [
            ("max_attempts", self.max_attempts, limits::MAX_MAX_ATTEMPTS),
            ("timeout_seconds", self.timeout_seconds, limits::MAX_TIMEOUT_SECONDS),
            ("max_losses", self.max_losses, limits::MAX_MAX_LOSSES),
        ];
        for (field, number, max) in numbers {
            if let Some(number) = number {
                check.range(field, number, 1, max);
            }
        }
        let timing = accept_timing(self.run_at, self.delay_seconds, check);
        let mut labels = self.labels;
        if let Some(labels) = &mut labels {
            check.names("labels", labels, limits::MAX_LABELS, limits::MAX_LABEL_CHARS);
            labels.sort();
            labels.dedup();
        }
        let tags = self.tags.map(|it| match accept_tags(Some(it), check) {
            Some(Stored(tags)) => serde_json::json!(tags),
            None => serde_json::json!({}),
        });
        let what = Change {
            queue: self.queue,
            rank: self.priority.map(i16::saturating_neg),
            max_attempts: self.max_attempts,
            timeout_seconds: self.timeout_seconds,
            max_losses: self.max_losses,
            tags,
            labels: labels.map(|labels| ChangedLabels { labels, ..ChangedLabels::default() }),
            run_at: None,
        };
        if timing == Timing::Keep && what == Change::default() {
            check.refuse(
                "body",
                "must change queue, priority, run_at, delay_seconds, max_attempts, \
                 timeout_seconds, max_losses, tags or labels",
            );
        }
        (timing, what)
    }
}

fn accept_timing(
    run_at: Option<DateTime<Utc>>,
    delay_seconds: Option<i64>,
    check: &mut Check,
) -> Timing {
    check.time("run_at", run_at);
    if let Some(delay) = delay_seconds {
        check.range("delay_seconds", delay, 0, limits::MAX_DELAY_SECONDS);
    }
    match (run_at, delay_seconds) {
        (Some(_), Some(_)) => {
            check.refuse("delay_seconds", "must not be sent together with run_at");
            Timing::Keep
        }
        (Some(run_at), None) => Timing::At(run_at),
        (None, Some(delay)) => Timing::After(TimeDelta::try_seconds(delay).unwrap_or_default()),
        (None, None) => Timing::Keep,
    }
}

/// Change a waiting job.
///
/// Omitted fields keep their values. Other limits and labels count from its next attempt on.
#[utoipa::path(
    patch, path = "/jobs/{job_id}", tag = "jobs", operation_id = "jobs_update",
    security(("api_key" = ["produce"]), ("api_key" = ["manage"]), ("session" = ["member"])),
    params(("job_id" = String, Path, description = "The job.", example = "job_01m7w3ha3aextt8pkwwdmxsmqw")),
    request_body = ChangeJobRequest,
    responses(
        (status = 200, description = "The job.", body = Job),
        (status = 404, description = "The project has no such job.", body = ErrorBody),
        (status = 409, description = "The job does not wait.", body = ErrorBody),
    ),
)]
pub async fn change(
    caller: Caller<Control>,
    State(app): State<App>,
    JobInPath(id): JobInPath,
    Json(request): Json<ChangeJobRequest>,
) -> Result<Reply<Job>, Error> {
    let mut check = Check::default();
    check_reason(&mut check, request.reason.as_deref());
    let by = caller.who.changed_by().because(request.reason.clone());
    let what = request.accept(&mut check);
    check.finish()?;
    control::change(&app.engine, caller.tenant(), id, what, &by).await?;
    read::find(&app, &caller, id).await.map(Reply)
}

/// The answer about one job: cancelled or not.
#[derive(Debug, Serialize, ToSchema)]
pub struct CancelledReply {
    /// True as soon as the job is cancelled, even while its worker still runs it.
    pub cancelled: bool,
}

/// Check for cancellation.
///
/// For workers that cannot wait for the answer to their next heartbeat.
#[utoipa::path(
    get, path = "/jobs/{job_id}/cancelled", tag = "jobs", operation_id = "jobs_cancelled",
    security(("api_key" = ["work"]), ("api_key" = ["read"]), ("session" = ["viewer"])),
    params(("job_id" = String, Path, description = "The job.", example = "job_01m7w3ha3aextt8pkwwdmxsmqw")),
    responses(
        (status = 200, description = "True if the job was cancelled.", body = CancelledReply),
        (status = 404, description = "The project has no such job.", body = ErrorBody),
    ),
)]
pub async fn cancelled(
    caller: Caller<Follow>,
    State(app): State<App>,
    JobInPath(id): JobInPath,
) -> Result<Reply<CancelledReply>, Error> {
    let key = JobKey { project_id: caller.project_id, id };
    let cancelled = control::is_cancelled(&app.engine, key).await?;
    Ok(Reply(CancelledReply { cancelled }))
}
