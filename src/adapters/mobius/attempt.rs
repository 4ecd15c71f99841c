//! What a worker reports about its attempt: heartbeats, its end, events.

use axum::{Json as Reply, extract::State, http::StatusCode};
use base64::{
    Engine as _, alphabet,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use fencepost_domain::{error::Error, history, limits, text::json_depth};
use fencepost_engine::settle::{
    self, Ack, Failure, ReportedOutcome,
    attempt_reports::{self, NewEvent, ShownFence},
    heartbeat::{self, Advice, Beat},
};
use fencepost_web::{
    app::App,
    auth::{Beating, Caller, Settling, Work},
    wire::{
        extract::{Json, RequestBody},
        openapi::chars,
        produced::{ProducedText, error_report},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::{ErrorBody, accept};
use crate::params::PathParams;

/// Prefix of the protocol's own event types.
const RESERVED_PREFIX: &str = "mobius.";

/// A heartbeat.
#[derive(Debug, Deserialize, ToSchema)]
pub struct HeartbeatRequest {
    /// Worker that holds the job, or its `worker_instance_id`. Required without a token.
    #[serde(alias = "worker_instance_id")]
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_WORKER_ID_CHARS)))))]
    worker_id: Option<String>,
    /// Sent by clients from 0.0.14 on. It is not compared: the attempt is the fence.
    worker_session_token: Option<String>,
    /// Attempt from the claim's answer.
    attempt: i32,
}

impl RequestBody for HeartbeatRequest {}

/// The lease is renewed.
#[derive(Debug, Serialize, ToSchema)]
pub struct HeartbeatReply {
    ok: bool,
    directives: Directives,
}

/// Directive for the worker.
#[derive(Debug, Serialize, ToSchema)]
pub struct Directives {
    /// Stop, and complete the job as failed.
    should_cancel: bool,
}

/// Send a heartbeat.
#[utoipa::path(
    post, path = "/v1/projects/{project}/jobs/{id}/heartbeat", tag = "Jobs", operation_id = "heartbeatJob",
    params(
        ("project" = String, Path, description = "The key's project: its id or slug."),
        ("id" = String, Path, description = "The job and its attempt, as claimed."),
    ),
    request_body = HeartbeatRequest,
    responses(
        (status = 200, description = "The lease is renewed.", body = HeartbeatReply),
        (status = 404, description = "No such job.", body = ErrorBody),
        (status = 409, description = "The lease no longer belongs to this worker: stop.", body = ErrorBody),
    ),
)]
pub async fn beat(
    caller: Caller<Beating>,
    State(app): State<App>,
    params: PathParams,
    Json(request): Json<HeartbeatRequest>,
) -> Result<Reply<HeartbeatReply>, Error> {
    let shown = (request.worker_id.as_deref(), request.worker_session_token.as_deref());
    let id = accept(&app, caller.project_id, &params, shown)?;
    let fence = id.fence(request.worker_id, Some(request.attempt));
    let beat = Beat { key: id.key(caller.project_id), fence, progress: None };
    let advice = heartbeat::heartbeat(&app.engine, beat).await?;
    let directives = Directives { should_cancel: advice == Advice::Cancel };
    Ok(Reply(HeartbeatReply { ok: true, directives }))
}

/// The end of an attempt.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CompleteRequest {
    /// Worker that holds the job, or its `worker_instance_id`. Required without a token.
    #[serde(alias = "worker_instance_id")]
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_WORKER_ID_CHARS)))))]
    worker_id: Option<String>,
    /// Sent by clients from 0.0.14 on. It is not compared: the attempt is the fence.
    worker_session_token: Option<String>,
    /// Attempt from the claim's answer.
    attempt: i32,
    /// How it ended.
    status: CompleteStatus,
    /// Base64 of the result: JSON or text; at most 64 KiB.
    result_b64: Option<String>,
    /// Type of the error.
    #[schema(value_type = Option<String>)]
    error_type: Option<ProducedText>,
    /// Message of the error.
    #[schema(value_type = Option<String>)]
    error_message: Option<ProducedText>,
}

impl RequestBody for CompleteRequest {}

/// Outcome of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CompleteStatus {
    Completed,
    Failed,
}

/// Report the end of an attempt.
#[utoipa::path(
    post, path = "/v1/projects/{project}/jobs/{id}/complete", tag = "Jobs", operation_id = "completeJob",
    params(
        ("project" = String, Path, description = "The key's project: its id or slug."),
        ("id" = String, Path, description = "The job and its attempt, as claimed."),
    ),
    request_body = CompleteRequest,
    responses(
        (status = 204, description = "The end of the attempt is recorded."),
        (status = 404, description = "No such job.", body = ErrorBody),
        (status = 409, description = "The attempt no longer belongs to this worker.", body = ErrorBody),
    ),
)]
pub async fn complete(
    caller: Caller<Settling>,
    State(app): State<App>,
    params: PathParams,
    Json(request): Json<CompleteRequest>,
) -> Result<StatusCode, Error> {
    let shown = (request.worker_id.as_deref(), request.worker_session_token.as_deref());
    let id = accept(&app, caller.project_id, &params, shown)?;
    let fence = id.fence(request.worker_id, Some(request.attempt));
    let end = match request.status {
        CompleteStatus::Completed => {
            let result = request.result_b64.as_deref().map(decode).transpose()?;
            ReportedOutcome::Succeeded { result: result.flatten() }
        }
        CompleteStatus::Failed => {
            let (kind, message) = (&request.error_type, &request.error_message);
            let error = error_report(kind.as_ref(), message.as_ref(), None);
            ReportedOutcome::Failed(Failure { error, retryable: true, retry_after_seconds: None })
        }
    };
    let ack = Ack { job_id: id.job_id, fence, end, duration_ms: None };
    settle::ack(&app.engine, caller.project_id, ack).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A result as it is stored: JSON as it came, anything else as a JSON string; none if it is empty.
fn decode(result_b64: &str) -> Result<Option<String>, Error> {
    const ANY_PADDING: GeneralPurposeConfig =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let plain = GeneralPurpose::new(&alphabet::STANDARD, ANY_PADDING);
    let url_safe = GeneralPurpose::new(&alphabet::URL_SAFE, ANY_PADDING);
    // Many tools break long lines.
    let result_b64: String = result_b64.split_ascii_whitespace().collect();
    let bytes = plain.decode(&result_b64).or_else(|_| url_safe.decode(&result_b64));
    let bytes = bytes.map_err(|_| Error::invalid("result_b64", "must be base64"))?;
    if bytes.is_empty() {
        return Ok(None);
    }
    let is_json = serde_json::from_slice::<&RawValue>(&bytes).is_ok();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let result = if is_json && json_depth(&text) <= limits::MAX_JSON_DEPTH {
        text
    } else {
        serde_json::to_string(&text).map_err(Error::internal)?
    };
    Check::default().bytes("result_b64", result.len(), limits::MAX_RESULT_BYTES)?;
    Ok(Some(result))
}

/// Events of a running attempt, stored all or none.
#[derive(Debug, Deserialize, ToSchema)]
pub struct EventsRequest {
    /// Worker that holds the job, or its `worker_instance_id`. Required without a token.
    #[serde(alias = "worker_instance_id")]
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_WORKER_ID_CHARS)))))]
    worker_id: Option<String>,
    /// Sent by clients from 0.0.14 on. It is not compared: the attempt is the fence.
    worker_session_token: Option<String>,
    /// Attempt from the claim's answer.
    attempt: i32,
    /// 1 to 100 events.
    #[schema(min_items = 1, max_items = 100)]
    events: Vec<EventRequest>,
}

impl RequestBody for EventsRequest {
    const MAX_BYTES: usize = limits::MAX_BATCH_BODY_BYTES;
}

/// An event.
#[derive(Debug, Deserialize, ToSchema)]
pub struct EventRequest {
    /// Type: letters, digits, `_`, `.` and `-`; not beginning with `mobius.` or `fencepost.`.
    #[serde(rename = "type")]
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_EVENT_TYPE_CHARS)))))]
    kind: String,
    /// Any JSON of at most 16 KiB.
    #[schema(value_type = Object)]
    payload: Option<Box<RawValue>>,
}

/// Report events.
#[utoipa::path(
    post, path = "/v1/projects/{project}/jobs/{id}/events", tag = "Jobs", operation_id = "emitJobEvents",
    params(
        ("project" = String, Path, description = "The key's project: its id or slug."),
        ("id" = String, Path, description = "The job and its attempt, as claimed."),
    ),
    request_body = EventsRequest,
    responses(
        (status = 204, description = "The events are stored."),
        (status = 404, description = "No such job.", body = ErrorBody),
        (status = 409, description = "The attempt no longer belongs to this worker; nothing is stored.", body = ErrorBody),
    ),
)]
pub async fn emit(
    caller: Caller<Work>,
    State(app): State<App>,
    params: PathParams,
    Json(request): Json<EventsRequest>,
) -> Result<StatusCode, Error> {
    let shown = (request.worker_id.as_deref(), request.worker_session_token.as_deref());
    let id = accept(&app, caller.project_id, &params, shown)?;
    let EventsRequest { worker_id, attempt, events: sent, .. } = request;
    let mut check = Check::default();
    check.count("events", sent.len(), limits::MAX_EVENTS);
    let mut events = Vec::with_capacity(sent.len());
    for (index, event) in sent.into_iter().take(limits::MAX_EVENTS).enumerate() {
        let mut item = Check::below(format!("events[{index}]."));
        item.event_type("type", &event.kind, &[RESERVED_PREFIX, history::RESERVED_PREFIX]);
        if let Some(payload) = &event.payload {
            item.size("payload", payload, limits::MAX_EVENT_PAYLOAD_BYTES)?;
            item.depth("payload", payload);
        }
        check.absorb(item);
        events.push(NewEvent {
            key: id.key(caller.project_id),
            kind: event.kind,
            attempt: Some(id.attempt),
            worker_id: worker_id.clone(),
            payload: event.payload.map(|it| Box::<str>::from(it).into_string()),
            by: None,
        });
    }
    check.finish()?;
    let fence = id.fence(worker_id, Some(attempt));
    let shown = ShownFence::of(id.job_id, &fence);
    attempt_reports::record_events(&app.engine, caller.tenant(), &[shown], events).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_json_or_else_text() {
        let kept = |it: &str| decode(it).expect("base64");
        assert_eq!(kept("eyJzdW1tYXJ5IjogImRvbmUifQ==").as_deref(), Some(r#"{"summary": "done"}"#));
        assert_eq!(kept("eyJzdW1tYXJ5IjogImRvbmUifQ").as_deref(), Some(r#"{"summary": "done"}"#));
        assert_eq!(kept("ZG9uZQ==").as_deref(), Some(r#""done""#));
        assert_eq!(kept("ZG9u\nZQ==\n").as_deref(), Some(r#""done""#));
        assert_eq!(kept("").as_deref(), None);
        assert!(decode("***").is_err());
    }
}
