//! `GET /v1/jobs/{job_id}/logs` and `…/logs/stream`.

use std::collections::BTreeMap;

use axum::{Json as Reply, extract::State, http::HeaderMap, response::Response};
use fencepost_domain::{error::Error, ids::JobKey, limits, logs};
use fencepost_store::{
    self as store,
    jobs::logs::{LogPlace, LogRow},
};
use fencepost_web::{
    app::App,
    auth::{Caller, Read},
    wire::{
        extract::{JobInPath, Query},
        logs as printed, streams,
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{
    error::ErrorBody,
    page::PageSize,
    redact::{Redact, shown},
};

const DEFAULT_PAGE_LOGS: u32 = 500;

/// Logs to read.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct LogsQuery {
    /// Only this attempt.
    #[param(minimum = 1)]
    #[param(minimum = 1)]
    attempt: Option<i32>,
    /// Maximum number of chunks to return. Default: 500.
    #[param(minimum = 1, maximum = 1_000)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

/// A chunk of an attempt's output.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = LogChunk)]
pub struct LogView {
    /// Attempt.
    pub attempt: i32,
    /// Stream: `stdout`, `stderr` or `system`.
    #[schema(example = "stdout")]
    pub stream: String,
    /// Sequence number in the stream.
    pub sequence: i64,
    /// Text.
    #[schema(required)]
    pub data: Option<String>,
    /// True if the text is null because the caller may not read it.
    pub redacted: bool,
    /// Time by the worker's clock, in milliseconds since 1970.
    pub timestamp_ms: i64,
}

impl From<LogRow> for LogView {
    fn from(row: LogRow) -> Self {
        let LogRow { attempt, stream, sequence, data, timestamp_ms } = row;
        let data = Some(data);
        Self { attempt, stream, sequence, data, redacted: false, timestamp_ms }
    }
}

impl Redact for LogView {
    fn redact(&mut self) {
        self.redacted = true;
        self.data = None;
    }
}

/// A page of a job's logs, by attempt, stream and sequence.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct LogPage {
    /// Chunks of the page.
    pub logs: Vec<LogView>,
    /// Missing sequences, so far.
    pub gaps: Vec<GapView>,
    /// Attempts whose output was cut.
    pub truncated_attempts: Vec<i32>,
    /// True if there are more chunks.
    pub has_more: bool,
    /// Pass it as `cursor` to get the next page.
    #[schema(required)]
    pub next_cursor: Option<String>,
}

/// Missing sequences of a stream, both ends included.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = LogGap)]
pub struct GapView {
    /// Attempt.
    pub attempt: i32,
    /// Stream.
    pub stream: String,
    /// First missing sequence.
    pub from_sequence: i64,
    /// Last missing sequence.
    pub to_sequence: i64,
}

/// Read a job's logs.
#[utoipa::path(
    get, path = "/jobs/{job_id}/logs", tag = "jobs", operation_id = "jobs_logs",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(LogsQuery, ("job_id" = String, Path, description = "The job.", example = "job_01m7w3ha3aextt8pkwwdmxsmqw")),
    responses(
        (status = 200, description = "A page of logs.", body = LogPage),
        (status = 404, description = "The project has no such job.", body = ErrorBody),
    ),
)]
pub async fn list(
    caller: Caller<Read>,
    State(app): State<App>,
    JobInPath(id): JobInPath,
    Query(query): Query<LogsQuery>,
) -> Result<Reply<LogPage>, Error> {
    let mut check = Check::default();
    let size = PageSize::read(query.limit, DEFAULT_PAGE_LOGS, limits::MAX_PAGE_LOGS, &mut check);
    if let Some(attempt) = query.attempt {
        check.range("attempt", attempt, 1, i32::MAX);
    }
    check.finish()?;
    let after =
        query.cursor.as_deref().map_or_else(|| Ok(printed::beginning()), printed::read_place)?;
    let key = JobKey { project_id: caller.project_id, id };
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    store::jobs::find(&mut conn, key.project_id, id).await?.ok_or(Error::JobNotFound)?;
    let mut rows =
        store::jobs::logs::page(&mut conn, key, query.attempt, &after, size.one_more()).await?;
    let truncated_attempts = store::jobs::logs::truncated_attempts(&mut conn, key).await?;
    let next_cursor = size.cut_by_bytes(&mut rows, |it| it.data.len(), write_place);
    let gaps = find_gaps(&after, &rows);
    let logs: Vec<_> = rows.into_iter().map(LogView::from).collect();
    Ok(Reply(LogPage {
        logs: shown(&caller.who, logs),
        gaps,
        truncated_attempts,
        has_more: next_cursor.is_some(),
        next_cursor,
    }))
}

fn find_gaps(after: &LogPlace, rows: &[LogRow]) -> Vec<GapView> {
    let mut streams: BTreeMap<(i32, &str), Vec<i64>> = BTreeMap::new();
    for row in rows {
        streams.entry((row.attempt, &row.stream)).or_default().push(row.sequence);
    }
    let gaps = streams.into_iter().flat_map(|((attempt, stream), sequences)| {
        let is_continued = (after.attempt, after.stream.as_str()) == (attempt, stream);
        let before = if is_continued { after.sequence } else { -1 };
        let view = move |it: logs::Gap| GapView {
            attempt,
            stream: stream.to_owned(),
            from_sequence: it.from,
            to_sequence: it.to,
        };
        logs::gaps(before, &sequences).into_iter().map(view)
    });
    gaps.collect()
}

fn write_place(row: &LogRow) -> String {
    format!("{}.{}.{}", row.attempt, row.stream, row.sequence)
}

/// Stream a job's logs.
///
/// Stored chunks, then new ones, as server-sent events named `log`. Resumes after `Last-Event-ID`.
/// Ends after the job has ended.
#[utoipa::path(
    get, path = "/jobs/{job_id}/logs/stream", tag = "streams", operation_id = "jobs_logs_stream",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(
        ("job_id" = String, Path, description = "The job.", example = "job_01m7w3ha3aextt8pkwwdmxsmqw"),
        ("Last-Event-ID" = Option<String>, Header, description = "The last chunk received."),
    ),
    responses(
        (status = 200, description = "The stream.", content_type = "text/event-stream", body = String),
        (status = 404, description = "The project has no such job.", body = ErrorBody),
    ),
)]
pub async fn stream(
    caller: Caller<Read>,
    State(app): State<App>,
    JobInPath(id): JobInPath,
    headers: HeaderMap,
) -> Result<Response, Error> {
    let key = JobKey { project_id: caller.project_id, id };
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    store::jobs::find(&mut conn, key.project_id, id).await?.ok_or(Error::JobNotFound)?;
    drop(conn);
    let sent = streams::last_event_id(&headers).map(printed::read_sent).unwrap_or_default();
    let (reading, reader) = (app.clone(), caller.clone());
    streams::start(&app, &caller, |writer| {
        let view = move |row| shown(&reader.who, LogView::from(row));
        printed::follow(reading, key, sent, writer, view)
    })
}
