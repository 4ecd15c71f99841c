//! Logs of jobs.

use std::collections::HashSet;

use axum::{Json as Reply, extract::State, http::HeaderMap, response::Response};
use fencepost_domain::{error::Error, limits, text};
use fencepost_engine::{
    jobs::{self, LogPlace, LogRow},
    settle::attempt_reports::{self, AttemptLogs, LogChunk, ShownFence},
};
use fencepost_web::{
    app::App,
    auth::{Caller, ReadPayloads, Work},
    wire::{
        extract::{Json, RequestBody},
        logs::{self, STREAMS},
        openapi::at_least,
        produced::ProducedText,
        streams,
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{LeaseName, find_job, or_lost};
use crate::{params::PathParams, plain_errors::ErrorBody};

/// Output of a running job.
#[derive(Debug, Deserialize, ToSchema)]
pub struct LogsRequest {
    /// At most 500 chunks.
    #[schema(max_items = 500)]
    chunks: Vec<ChunkRequest>,
}

impl RequestBody for LogsRequest {
    const MAX_BYTES: usize = limits::MAX_BATCH_BODY_BYTES;
}

/// A chunk of output.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ChunkRequest {
    /// Sequence number in its stream, from 0. A chunk that was stored before is ignored.
    #[schema(extensions(("bounds" = json!(at_least(0)))))]
    sequence: i64,
    /// Text; 64 KiB of it are kept.
    #[schema(value_type = String)]
    data: ProducedText,
    /// Time in milliseconds since 1970.
    #[schema(extensions(("bounds" = json!(at_least(0)))))]
    timestamp_ms: i64,
    /// `stdout`, `stderr` or `system`.
    stream: String,
}

/// A chunk of output.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = LogChunk)]
pub struct ChunkView {
    workflow_id: String,
    job_id: String,
    sequence: i64,
    data: String,
    timestamp_ms: i64,
    stream: String,
}

impl ChunkView {
    fn of(workflow: &str, job: &str, row: LogRow) -> Self {
        Self {
            workflow_id: workflow.to_owned(),
            job_id: job.to_owned(),
            sequence: row.sequence,
            data: row.data,
            timestamp_ms: row.timestamp_ms,
            stream: row.stream,
        }
    }
}

/// Push output. The lease names the attempt; ids in the chunks are ignored.
#[utoipa::path(
    post, path = "/api/jobs/{lease_id}/logs", tag = "workers", operation_id = "push_logs",
    params(("lease_id" = String, Path, description = "The lease, as claimed.")),
    request_body = LogsRequest,
    responses(
        (status = 200, description = "Stored, up to the limit."),
        (status = 409, description = "The lease has ended; nothing is stored.", body = ErrorBody),
    ),
)]
pub async fn push(
    caller: Caller<Work>,
    State(app): State<App>,
    params: PathParams,
    Json(request): Json<LogsRequest>,
) -> Result<(), Error> {
    let lease: LeaseName = params.get("lease_id").parse()?;
    let mut check = Check::default();
    if request.chunks.len() > limits::MAX_LOG_CHUNKS {
        check.count("chunks", request.chunks.len(), limits::MAX_LOG_CHUNKS);
    }
    let (mut places, mut chunks) = (HashSet::new(), Vec::with_capacity(request.chunks.len()));
    for (index, chunk) in request.chunks.into_iter().enumerate() {
        let mut item = Check::below(format!("chunks[{index}]."));
        item.range("sequence", chunk.sequence, 0, i64::MAX);
        item.range("timestamp_ms", chunk.timestamp_ms, 0, i64::MAX);
        if !STREAMS.contains(&chunk.stream.as_str()) {
            item.refuse("stream", "must be stdout, stderr or system");
        }
        check.absorb(item);
        if places.insert((chunk.stream.clone(), chunk.sequence)) {
            chunks.push(LogChunk {
                stream: chunk.stream,
                sequence: chunk.sequence,
                data: text::without_nul(chunk.data.into_string()),
                timestamp_ms: chunk.timestamp_ms,
            });
        }
    }
    check.finish()?;
    let shown = ShownFence::of(lease.job_id, &lease.fence());
    let attempts = [AttemptLogs { shown, chunks }];
    let kept = attempt_reports::keep_logs(&app.engine, caller.tenant(), &attempts).await;
    kept.map_err(or_lost)?;
    Ok(())
}

/// Read the output of a job's latest attempt.
#[utoipa::path(
    get, path = "/api/workflows/{workflow_id}/jobs/{job_id}/logs", tag = "workflows", operation_id = "read_logs",
    params(
        ("workflow_id" = String, Path, description = "The workflow."),
        ("job_id" = String, Path, description = "The job."),
    ),
    responses(
        (status = 200, description = "The chunks, by stream and sequence.", body = Vec<ChunkView>),
        (status = 404, description = "No such job.", body = ErrorBody),
    ),
)]
pub async fn list(
    caller: Caller<ReadPayloads>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<Vec<ChunkView>>, Error> {
    let (workflow, job) = (params.get("workflow_id"), params.get("job_id"));
    let key = find_job(&app.engine, caller.project_id, workflow, job).await?;
    let attempt = Some(jobs::find(&app.engine, key).await?.attempt);
    let limit = limits::MAX_PAGE_LOGS.into();
    let (mut chunks, mut after) = (Vec::new(), logs::beginning());
    // As many as are kept of one attempt.
    while chunks.len() < limits::MAX_LOG_CHUNKS_KEPT.unsigned_abs() as usize {
        let page = jobs::logs(&app.engine, key, attempt, &after, limit).await?;
        let Some(last) = page.last() else { break };
        let LogRow { attempt, sequence, stream, .. } = last;
        after = LogPlace { attempt: *attempt, stream: stream.clone(), sequence: *sequence };
        chunks.extend(page.into_iter().map(|it| ChunkView::of(workflow, job, it)));
    }
    Ok(Reply(chunks))
}

/// Stream a job's output: stored chunks first, then new ones.
#[utoipa::path(
    get, path = "/api/workflows/{workflow_id}/jobs/{job_id}/logs/stream", tag = "workflows", operation_id = "stream_logs",
    params(
        ("workflow_id" = String, Path, description = "The workflow."),
        ("job_id" = String, Path, description = "The job."),
    ),
    responses(
        (status = 200, description = "Server-sent events of the type `log`; each has a chunk.", content_type = "text/event-stream"),
        (status = 404, description = "No such job.", body = ErrorBody),
    ),
)]
pub async fn stream(
    caller: Caller<ReadPayloads>,
    State(app): State<App>,
    params: PathParams,
    headers: HeaderMap,
) -> Result<Response, Error> {
    let (workflow, job) = (params.get("workflow_id").to_owned(), params.get("job_id").to_owned());
    let key = find_job(&app.engine, caller.project_id, &workflow, &job).await?;
    jobs::find(&app.engine, key).await?;
    let sent = streams::last_event_id(&headers).map(logs::read_sent).unwrap_or_default();
    let view = move |row| ChunkView::of(&workflow, &job, row);
    let reading = app.clone();
    streams::start(&app, &caller, |writer| logs::follow(reading, key, sent, writer, view))
}
