//! The end of a task: completion or failure, with the output of its attempt.

use axum::{Json as Reply, extract::State};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::{Class, Error},
    limits,
    plan::Tenant,
    text,
};
use fencepost_engine::settle::{
    self, Ack, Failure, ReportedOutcome,
    attempt_reports::{self, AttemptLogs, LogChunk, ShownFence},
};
use fencepost_web::{
    app::App,
    auth::{Caller, Settling},
    wire::{
        extract::{self, Json, RequestBody},
        produced::{ProducedText, error_report},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, value::RawValue};
use utoipa::ToSchema;

use super::{
    read_task_id,
    work::{named, record_seen},
};
use crate::{params::PathParams, plain_errors::ErrorBody};

/// Levels whose lines are shown as standard error.
const ERROR_LEVELS: [&str; 4] = ["warn", "warning", "error", "fatal"];

/// A line of output.
#[derive(Debug, Deserialize, ToSchema)]
pub struct LogLine {
    /// Time, in RFC 3339 or in milliseconds since 1970. Default: 0.
    #[schema(value_type = Option<String>)]
    ts: Option<Value>,
    /// Level, such as `info`.
    #[schema(value_type = Option<String>)]
    level: Option<ProducedText>,
    /// The line.
    #[schema(value_type = String)]
    message: ProducedText,
}

/// Lines as they are stored: the level is part of the line.
fn accept_logs(sent: Vec<LogLine>, check: &mut Check) -> Vec<LogChunk> {
    if sent.len() > limits::MAX_LOG_CHUNKS {
        let max = limits::MAX_LOG_CHUNKS;
        check.refuse("logs", format!("must have at most {max} entries, has {}", sent.len()));
    }
    let mut chunks = Vec::with_capacity(sent.len().min(limits::MAX_LOG_CHUNKS));
    for (sequence, line) in (0..).zip(sent) {
        let mut item = Check::below(format!("logs[{sequence}]."));
        let timestamp_ms = match &line.ts {
            None => Some(0),
            Some(Value::String(text)) => {
                text.parse::<DateTime<Utc>>().ok().map(|it| it.timestamp_millis())
            }
            Some(other) => other.as_i64(),
        };
        let timestamp_ms = timestamp_ms.filter(|it| *it >= 0);
        if timestamp_ms.is_none() {
            item.refuse("ts", "must be a time as in RFC 3339, or milliseconds since 1970");
        }
        let level = line.level.map(ProducedText::into_string).unwrap_or_default();
        let before = if level.is_empty() { String::new() } else { format!("{level}: ") };
        let data = format!("{before}{}\n", line.message.as_str());
        if data.len() > limits::MAX_LOG_CHUNK_BYTES {
            let max = limits::MAX_LOG_CHUNK_BYTES;
            item.refuse("message", format!("must be at most {max} bytes, has {}", data.len()));
        }
        check.absorb(item);
        let is_error = ERROR_LEVELS.contains(&level.to_ascii_lowercase().as_str());
        let stream = if is_error { "stderr" } else { "stdout" };
        let (stream, data) = (stream.to_owned(), text::without_nul(data));
        let timestamp_ms = timestamp_ms.unwrap_or(0);
        chunks.push(LogChunk { stream, sequence, data, timestamp_ms });
    }
    chunks
}

/// Stores the output of an attempt. A refusal is ignored here: the ack that follows reports it, or
/// is accepted as a repeat.
async fn store_logs(
    app: &App,
    tenant: Tenant,
    shown: ShownFence,
    chunks: Vec<LogChunk>,
) -> Result<(), Error> {
    let of_attempt = [AttemptLogs { shown, chunks }];
    match attempt_reports::keep_logs(&app.engine, tenant, &of_attempt).await {
        Ok(_) => Ok(()),
        Err(error) if matches!(error.class(), Class::Conflict | Class::NotFound) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Completion of a task.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CompleteRequest {
    /// Result of at most 64 KiB; later steps get it.
    #[serde(default, deserialize_with = "extract::sent")]
    #[schema(value_type = Object, required = true)]
    output: Option<Box<RawValue>>,
    /// Worker that holds the task; checked if it is sent.
    worker_id: Option<String>,
    /// As polled; checked if it is sent.
    claim_epoch: Option<i32>,
    /// Output of the attempt, at most 500 lines.
    #[serde(default)]
    #[schema(required = false)]
    logs: Vec<LogLine>,
}

impl RequestBody for CompleteRequest {}

/// Answer to a completion.
#[derive(Debug, Serialize, ToSchema)]
pub struct Done {
    /// Always true.
    ok: bool,
}

/// Report success.
#[utoipa::path(
    post, path = "/workers/tasks/{id}/complete", tag = "tasks", operation_id = "complete_task",
    params(("id" = String, Path, description = "The task, as polled.")),
    request_body = CompleteRequest,
    responses(
        (status = 200, description = "Recorded.", body = Done),
        (status = 404, description = "No such task.", body = ErrorBody),
        (status = 409, description = "The task no longer belongs to this worker.", body = ErrorBody),
    ),
)]
pub async fn complete(
    caller: Caller<Settling>,
    State(app): State<App>,
    params: PathParams,
    Json(request): Json<CompleteRequest>,
) -> Result<Reply<Done>, Error> {
    let mut check = Check::default();
    match &request.output {
        None => check.refuse("output", "must be sent"),
        Some(output) => {
            check.size("output", output, limits::MAX_RESULT_BYTES)?;
            check.depth("output", output);
        }
    }
    let logs = accept_logs(request.logs, &mut check);
    check.finish()?;
    let result = request.output.map(|it| Box::<str>::from(it).into_string());
    let end = ReportedOutcome::Succeeded { result };
    let shown = (named(request.worker_id), request.claim_epoch);
    settle_task(&app, caller.tenant(), &params, (shown, logs), end).await
}

/// Failure of a task.
#[derive(Debug, Deserialize, ToSchema)]
pub struct FailRequest {
    /// Message of the error.
    #[schema(value_type = Option<String>)]
    error: Option<ProducedText>,
    /// Like `error`; workers that poll with `handler_name` send it.
    #[schema(value_type = Option<String>)]
    message: Option<ProducedText>,
    /// Whether to retry. Default: false.
    #[serde(default)]
    retryable: bool,
    /// Worker that holds the task; checked if it is sent.
    worker_id: Option<String>,
    /// As polled; checked if it is sent.
    claim_epoch: Option<i32>,
    /// Output of the attempt, at most 500 lines.
    #[serde(default)]
    #[schema(required = false)]
    logs: Vec<LogLine>,
}

impl RequestBody for FailRequest {}

/// Report failure.
#[utoipa::path(
    post, path = "/workers/tasks/{id}/fail", tag = "tasks", operation_id = "fail_task",
    params(("id" = String, Path, description = "The task, as polled.")),
    request_body = FailRequest,
    responses(
        (status = 200, description = "Recorded.", body = Done),
        (status = 404, description = "No such task.", body = ErrorBody),
        (status = 409, description = "The task no longer belongs to this worker.", body = ErrorBody),
    ),
)]
pub async fn fail(
    caller: Caller<Settling>,
    State(app): State<App>,
    params: PathParams,
    Json(request): Json<FailRequest>,
) -> Result<Reply<Done>, Error> {
    let message = request.error.or(request.message);
    let message = message.ok_or_else(|| Error::invalid("error", "must be sent"))?;
    let mut check = Check::default();
    let logs = accept_logs(request.logs, &mut check);
    check.finish()?;
    let error = error_report(None, Some(&message), None);
    let failure = Failure { error, retryable: request.retryable, retry_after_seconds: None };
    let shown = (named(request.worker_id), request.claim_epoch);
    let end = ReportedOutcome::Failed(failure);
    settle_task(&app, caller.tenant(), &params, (shown, logs), end).await
}

async fn settle_task(
    app: &App,
    tenant: Tenant,
    params: &PathParams,
    ((worker_id, claim_epoch), logs): ((Option<String>, Option<i32>), Vec<LogChunk>),
    end: ReportedOutcome,
) -> Result<Reply<Done>, Error> {
    let project_id = tenant.project_id;
    let id = read_task_id(params.get("id"))?;
    record_seen(app, project_id, worker_id.as_deref())?;
    let fence = id.fence(worker_id, claim_epoch);
    if !logs.is_empty() {
        store_logs(app, tenant, ShownFence::of(id.job_id, &fence), logs).await?;
    }
    let ack = Ack { job_id: id.job_id, fence, end, duration_ms: None };
    settle::ack(&app.engine, project_id, ack).await?;
    Ok(Reply(Done { ok: true }))
}
