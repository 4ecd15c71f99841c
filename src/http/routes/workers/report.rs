//! `POST /v1/workers/events` and `POST /v1/workers/logs`.

use std::collections::HashSet;

use axum::{Extension, Json as Reply, extract::State};
use fencepost_domain::{
    error::Error,
    history,
    ids::{JobId, JobKey},
    limits, text,
};
use fencepost_engine::{
    reach::Reach,
    settle::attempt_reports::{self, AttemptLogs, LogChunk, NewEvent, ShownFence},
};
use fencepost_web::{
    app::App,
    auth::{Bound, Caller, Cost, Work},
    wire::{
        RequestId,
        entries::Entry,
        extract::{Json, Object, RequestBody, UnknownFields},
        openapi::{at_least, chars},
        produced::ProducedText,
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::accept_job_id;
use crate::error::{self, ApiError, ErrorBody};

/// Events of running attempts, stored all or none.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"worker_id": "worker-1", "events": [
    {"job_id": "job_01m7w3ha3aextt8pkwwdmxsmqw", "attempt": 1, "type": "page.rendered", "payload": {"page": 3}}
]}))]
pub struct EventsRequest {
    /// Worker that holds the jobs.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_WORKER_ID_CHARS)))))]
    worker_id: String,
    /// 1 to 100 events.
    #[schema(min_items = 1, max_items = 100, value_type = Vec<EventRequest>)]
    events: Vec<Object<EventRequest>>,
}

impl RequestBody for EventsRequest {
    const IS_OF_WORKERS: bool = true;
    const MAX_BYTES: usize = limits::MAX_BATCH_BODY_BYTES;
}

/// An event of an attempt.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EventRequest {
    /// Id of the job.
    job_id: String,
    /// Attempt from the poll's answer.
    #[schema(extensions(("bounds" = json!(at_least(1)))))]
    attempt: i32,
    /// Type of the event: letters, digits, `_`, `.` and `-`; not beginning with `fencepost.`.
    #[serde(rename = "type")]
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_EVENT_TYPE_CHARS)))))]
    kind: String,
    /// Any JSON of at most 16 KiB. Default: null.
    #[serde(default)]
    #[schema(value_type = serde_json::Value, required = false)]
    payload: Option<Box<RawValue>>,
}

/// Stored events.
#[derive(Debug, Serialize, ToSchema)]
pub struct EventsReply {
    /// Ids, in the order in which the events were sent.
    pub ids: Vec<String>,
}

/// Report events.
///
/// They become part of the jobs' histories. Only for running attempts.
#[utoipa::path(
    post, path = "/workers/events", tag = "workers", operation_id = "workers_events",
    security(("api_key" = ["work"]), ("session" = ["member"])),
    request_body = EventsRequest,
    responses(
        (status = 200, description = "The events are stored.", body = EventsReply),
        (status = 400, description = "Invalid request; nothing is stored.", body = ErrorBody),
        (status = 404, description = "The project has no such job.", body = ErrorBody),
        (status = 409, description = "An attempt no longer belongs to this worker; nothing is stored.", body = ErrorBody),
    ),
)]
pub async fn events(
    caller: Caller<Bound<Work>>,
    State(app): State<App>,
    Json(request): Json<EventsRequest>,
) -> Result<Reply<EventsReply>, Error> {
    let EventsRequest { worker_id, events: sent } = request;
    let mut check = Check::default();
    check.name("worker_id", &worker_id, limits::MAX_WORKER_ID_CHARS);
    let worker_id = caller.who.worker(worker_id);
    check.count("events", sent.len(), limits::MAX_EVENTS);
    let (mut shown, mut events) = (Vec::new(), Vec::new());
    for (index, Object(event)) in sent.into_iter().enumerate() {
        let mut item = Check::below(format!("events[{index}]."));
        item.event_type("type", &event.kind, &[history::RESERVED_PREFIX]);
        item.range("attempt", event.attempt, 1, i32::MAX);
        if let Some(payload) = &event.payload {
            item.size("payload", payload, limits::MAX_EVENT_PAYLOAD_BYTES)?;
            item.depth("payload", payload);
        }
        check.absorb(item);
        let id = accept_job_id(&event.job_id)?;
        let fence = shown_by(&worker_id, id, event.attempt);
        if !shown.contains(&fence) {
            shown.push(fence);
        }
        events.push(NewEvent {
            key: JobKey { project_id: caller.project_id, id },
            kind: event.kind,
            attempt: Some(event.attempt),
            worker_id: Some(worker_id.clone()),
            payload: event.payload.map(|it| Box::<str>::from(it).into_string()),
            by: None,
        });
    }
    check.finish()?;
    caller.charge(&app, "events", Cost::Items(events.len())).await?;
    app.engine.registry.record_seen(&(caller.project_id, worker_id.into()), &[], &[]);
    let ids = shown.iter().map(|it| it.job_id);
    check_reach(&app, &caller, ids).await?;
    let ids = attempt_reports::record_events(&app.engine, caller.tenant(), &shown, events).await?;
    Ok(Reply(EventsReply { ids: ids.iter().map(ToString::to_string).collect() }))
}

/// One job that the key may not use refuses all, as an unknown one does.
async fn check_reach(
    app: &App,
    caller: &Caller<Bound<Work>>,
    ids: impl Iterator<Item = JobId> + Clone,
) -> Result<(), Error> {
    let binding = caller.who.binding();
    let reach = Reach::read(&app.engine, caller.project_id, binding, ids.clone()).await?;
    ids.into_iter().try_for_each(|it| reach.check(it))
}

fn shown_by(worker_id: &str, job_id: JobId, attempt: i32) -> ShownFence {
    ShownFence { job_id, attempt, worker_id: Some(worker_id.to_owned()), lease_id: None }
}

/// Output of running attempts. A chunk that cannot be read, or whose attempt does not run, fails
/// alone.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"worker_id": "worker-1", "chunks": [
    {"job_id": "job_01m7w3ha3aextt8pkwwdmxsmqw", "attempt": 1, "sequence": 0, "data": "hello\n", "timestamp_ms": 1_710_000_001_000_i64}
]}))]
pub struct LogsRequest {
    /// Worker that holds the jobs.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_WORKER_ID_CHARS)))))]
    worker_id: String,
    /// 1 to 500 chunks.
    #[schema(min_items = 1, max_items = 500, value_type = Vec<LogChunkRequest>)]
    chunks: Vec<Entry<LogChunkRequest>>,
}

impl RequestBody for LogsRequest {
    const IS_OF_WORKERS: bool = true;
    const HAS_ENTRIES: bool = true;

    fn mark_entries(&mut self, mark: char) -> Result<(), Error> {
        if self.worker_id.contains(mark) {
            return Err(Error::invalid("worker_id", "must be valid UTF-8"));
        }
        self.chunks.iter_mut().for_each(|it| it.set_mark(mark));
        Ok(())
    }
}

/// A chunk of an attempt's output.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LogChunkRequest {
    /// Id of the job.
    job_id: String,
    /// Attempt from the poll's answer.
    #[schema(extensions(("bounds" = json!(at_least(1)))))]
    attempt: i32,
    /// Sequence number in its stream, from 0. A chunk that was stored before is ignored.
    #[schema(extensions(("bounds" = json!(at_least(0)))))]
    sequence: i64,
    /// Stream. Default: stdout.
    stream: Option<LogStream>,
    /// Text, at most 64 KiB.
    #[schema(value_type = String)]
    data: ProducedText,
    /// Time by the worker's clock, in milliseconds since 1970.
    #[schema(extensions(("bounds" = json!(at_least(0)))))]
    timestamp_ms: i64,
}

/// Output stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LogStream {
    /// Standard output.
    #[default]
    Stdout,
    /// Standard error.
    Stderr,
    /// Messages of the worker itself.
    System,
}

impl LogStream {
    fn as_str(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
            Self::System => "system",
        }
    }
}

/// Result of a report.
#[derive(Debug, Serialize, ToSchema)]
pub struct LogsReply {
    /// Stored chunks.
    pub accepted: usize,
    /// Ignored chunks: they were stored before.
    pub duplicates: usize,
    /// True if output was cut: 1 MiB of an attempt is kept.
    pub truncated: bool,
    /// Chunks that are not stored; absent if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    pub refused: Vec<RefusedChunk>,
}

/// A chunk that is not stored.
#[derive(Debug, Serialize, ToSchema)]
pub struct RefusedChunk {
    /// Index of the chunk, from 0.
    pub index: usize,
    /// Id of the job; empty if it cannot be read.
    pub job_id: String,
    /// Status that this chunk alone would have had.
    #[schema(example = 400)]
    pub status: u16,
    /// Why it is not stored.
    pub error: ApiError,
}

/// Report output.
///
/// Only for running attempts. Sending a chunk again is harmless. A chunk that is malformed, or
/// whose attempt no longer belongs to this worker, is not stored, and is listed in `refused`. A
/// request of such chunks alone is refused.
#[utoipa::path(
    post, path = "/workers/logs", tag = "workers", operation_id = "workers_logs",
    security(("api_key" = ["work"]), ("session" = ["member"])),
    request_body = LogsRequest,
    responses(
        (status = 200, description = "The chunks are stored, up to the limit.", body = LogsReply),
        (status = 400, description = "Invalid request; nothing is stored.", body = ErrorBody),
        (status = 404, description = "The project has none of these jobs.", body = ErrorBody),
        (status = 409, description = "No attempt belongs to this worker any more; nothing is stored.", body = ErrorBody),
    ),
)]
pub async fn logs(
    caller: Caller<Bound<Work>>,
    State(app): State<App>,
    Extension(RequestId(request_id)): Extension<RequestId>,
    unknown: UnknownFields,
    Json(request): Json<LogsRequest>,
) -> Result<Reply<LogsReply>, Error> {
    let LogsRequest { worker_id, chunks: sent } = request;
    let mut check = Check::default();
    check.name("worker_id", &worker_id, limits::MAX_WORKER_ID_CHARS);
    let worker_id = caller.who.worker(worker_id);
    check.count("chunks", sent.len(), limits::MAX_LOG_CHUNKS);
    let SortedChunks { attempts, doubled, mut refused } = sort(&sent, unknown, &worker_id);
    if attempts.len() > limits::MAX_LOG_JOBS {
        let max = limits::MAX_LOG_JOBS;
        check.refuse("chunks", format!("must be of at most {max} jobs, are of {}", attempts.len()));
    }
    check.finish()?;
    app.engine.registry.record_seen(&(caller.project_id, worker_id.into()), &[], &[]);
    let (binding, ids) = (caller.who.binding(), attempts.iter().map(|it| it.0.shown.job_id));
    let reach = Reach::read(&app.engine, caller.project_id, binding, ids).await?;
    let (attempts, beyond): (Vec<_>, Vec<_>) =
        attempts.into_iter().partition(|it| reach.includes(it.0.shown.job_id));
    let refuse = |indexes: Vec<usize>, job_id: JobId, error: Error| {
        indexes.into_iter().map(move |it| (it, job_id.to_string(), error.clone()))
    };
    for (attempt, indexes) in beyond {
        refused.extend(refuse(indexes, attempt.shown.job_id, Error::JobNotFound));
    }
    if attempts.is_empty() && !refused.is_empty() {
        return Err(refused.swap_remove(0).2);
    }
    let (attempts, mut indexes): (Vec<_>, Vec<_>) = attempts.into_iter().unzip();
    let kept = attempt_reports::keep_logs(&app.engine, caller.tenant(), &attempts).await?;
    for (number, error) in kept.refused {
        let indexes = std::mem::take(&mut indexes[number]);
        refused.extend(refuse(indexes, attempts[number].shown.job_id, error));
    }
    refused.sort_by_key(|it| it.0);
    let shown = |(index, job_id, error): (usize, String, Error)| RefusedChunk {
        index,
        job_id,
        status: error::status(&error).as_u16(),
        error: error::info(&error, &request_id).at(&app.accounts.public_url),
    };
    Ok(Reply(LogsReply {
        accepted: kept.accepted,
        duplicates: kept.duplicates + doubled,
        truncated: kept.is_truncated,
        refused: refused.into_iter().map(shown).collect(),
    }))
}

/// Chunks by their attempts.
#[derive(Default)]
struct SortedChunks {
    /// Each with the indexes of its chunks.
    attempts: Vec<(AttemptLogs, Vec<usize>)>,
    /// Number of chunks that are sent twice.
    doubled: usize,
    /// Those that cannot be read: index, job and reason.
    refused: Vec<(usize, String, Error)>,
}

fn sort(sent: &[Entry<LogChunkRequest>], unknown: UnknownFields, worker_id: &str) -> SortedChunks {
    let (mut sorted, mut places) = (SortedChunks::default(), HashSet::new());
    for (index, entry) in sent.iter().enumerate() {
        let read = entry.read(unknown, &format!("chunks[{index}]"));
        let (shown, chunk) = match read.and_then(|it| accept_chunk(it, index, worker_id)) {
            Ok(accepted) => accepted,
            Err(error) => {
                sorted.refused.push((index, entry.job_id(), error));
                continue;
            }
        };
        if !places.insert((shown.clone(), chunk.stream.clone(), chunk.sequence)) {
            sorted.doubled += 1;
            continue;
        }
        match sorted.attempts.iter_mut().find(|it| it.0.shown == shown) {
            Some((attempt, indexes)) => {
                attempt.chunks.push(chunk);
                indexes.push(index);
            }
            None => {
                let attempt = AttemptLogs { shown, chunks: vec![chunk] };
                sorted.attempts.push((attempt, vec![index]));
            }
        }
    }
    sorted
}

fn accept_chunk(
    sent: LogChunkRequest,
    index: usize,
    worker_id: &str,
) -> Result<(ShownFence, LogChunk), Error> {
    let mut check = Check::below(format!("chunks[{index}]."));
    check.range("attempt", sent.attempt, 1, i32::MAX);
    check.range("sequence", sent.sequence, 0, i64::MAX);
    check.range("timestamp_ms", sent.timestamp_ms, 0, i64::MAX);
    let data = sent.data.into_string();
    if data.len() > limits::MAX_LOG_CHUNK_BYTES {
        let max = limits::MAX_LOG_CHUNK_BYTES;
        check.refuse("data", format!("must be at most {max} bytes, has {}", data.len()));
    }
    check.finish()?;
    let shown = shown_by(worker_id, accept_job_id(&sent.job_id)?, sent.attempt);
    let stream = sent.stream.unwrap_or_default().as_str().to_owned();
    let (sequence, timestamp_ms) = (sent.sequence, sent.timestamp_ms);
    // Without characters that PostgreSQL cannot store as text.
    let data = text::without_nul(data);
    Ok((shown, LogChunk { stream, sequence, data, timestamp_ms }))
}
