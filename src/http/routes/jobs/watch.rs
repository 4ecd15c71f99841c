//! `GET /v1/jobs/{job_id}/explain`, `GET …/events/stream`, and `GET /v1/events/stream`.

use std::{sync::Arc, time::Duration};

use axum::{
    Json as Reply,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::Error,
    explain::{Condition, Reason},
    history,
    ids::{EventId, JobId, JobKey},
    job::{JobState, StoredState, WaitingFor},
};
use fencepost_engine::jobs::explain::{self, Explained};
use fencepost_signals::events_feed::{JobEvent, Listening};
use fencepost_web::{
    app::App,
    auth::{Caller, Read},
    wire::{
        extract::JobInPath,
        streams::{self, Ended, Writer},
    },
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio::sync::broadcast::error::RecvError;
use utoipa::ToSchema;

use super::events::{self, EventView};
use crate::{error::ErrorBody, redact::shown};

/// A busy job is read at most this often for one stream.
const READ_PAUSE: Duration = Duration::from_millis(100);

/// Why a job is not running.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct ExplainReply {
    /// Id of the job.
    #[schema(example = "job_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub job_id: String,
    /// State.
    pub state: JobState,
    /// First condition that is not met; null if the job runs or has ended.
    #[schema(required)]
    pub waiting_for: Option<WaitingFor>,
    /// Why it has not started; null if it runs or has ended.
    #[schema(required)]
    pub reason: Option<Reason>,
    /// Since when it is ready to run, as in `GET …/jobs/{job_id}`; null unless it is pending.
    #[serde(default)]
    #[schema(required)]
    pub ready_at: Option<DateTime<Utc>>,
    /// Explanation in one sentence.
    #[schema(example = "key acme 5/5 busy")]
    pub summary: String,
    /// All conditions between the job and a worker, in order; empty if it does not wait.
    pub gates: Vec<ConditionView>,
    /// Next time at which a condition changes by itself.
    #[schema(required)]
    pub next_change_at: Option<DateTime<Utc>>,
}

/// A condition that must be met before a job can run.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = Condition)]
pub struct ConditionView {
    /// The condition's kind.
    pub gate: WaitingFor,
    /// True if the condition is met.
    pub open: bool,
    /// Details, with numbers.
    #[schema(example = "key acme 5/5 busy")]
    pub message: String,
    /// Time of the next change of the condition, if it is known.
    #[schema(required)]
    pub changes_at: Option<DateTime<Utc>>,
}

impl From<Condition> for ConditionView {
    fn from(gate: Condition) -> Self {
        let Condition { reason, is_open, message, changes_at } = gate;
        Self { gate: reason.waits_for(), open: is_open, message, changes_at }
    }
}

/// Explain a job.
///
/// Why it is not running: every condition with its value and its bound, and the next time that
/// something changes.
#[utoipa::path(
    get, path = "/jobs/{job_id}/explain", tag = "jobs", operation_id = "jobs_explain",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(("job_id" = String, Path, description = "The job.", example = "job_01m7w3ha3aextt8pkwwdmxsmqw")),
    responses(
        (status = 200, description = "The explanation.", body = ExplainReply),
        (status = 404, description = "The project has no such job.", body = ErrorBody),
    ),
)]
pub async fn explain(
    caller: Caller<Read>,
    State(app): State<App>,
    JobInPath(id): JobInPath,
) -> Result<Reply<ExplainReply>, Error> {
    let key = JobKey { project_id: caller.project_id, id };
    let Explained { state, waiting_for, ready_at, why } =
        explain::explain(&app.engine, key).await?;
    Ok(Reply(ExplainReply {
        job_id: id.to_string(),
        state: state.public(),
        waiting_for,
        ready_at,
        summary: why.summary,
        reason: why.reason,
        gates: why.conditions.into_iter().map(ConditionView::from).collect(),
        next_change_at: why.next_change_at,
    }))
}

/// Stream a job's events.
///
/// Its history, then new events, as server-sent events (`event` is the type, `data` an event of
/// `GET …/events`). Resumes after `Last-Event-ID`. Ends after success; a client that reconnects
/// then gets 204.
#[utoipa::path(
    get, path = "/jobs/{job_id}/events/stream", tag = "streams", operation_id = "jobs_events_stream",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(
        ("job_id" = String, Path, description = "The job.", example = "job_01m7w3ha3aextt8pkwwdmxsmqw"),
        ("Last-Event-ID" = Option<String>, Header, description = "The last event received."),
    ),
    responses(
        // The 204 is not listed: generators expect one shape of answers.
        (status = 200, description = "The stream.", content_type = "text/event-stream", body = String),
        (status = 404, description = "The project has no such job.", body = ErrorBody),
    ),
)]
pub async fn job_stream(
    caller: Caller<Read>,
    State(app): State<App>,
    JobInPath(id): JobInPath,
    headers: HeaderMap,
) -> Result<Response, Error> {
    let last = streams::last_event_id(&headers).map(str::to_owned);
    let (events, state) = events::read(&app, &caller, id, events::MAX_EVENTS).await?;
    let has_seen_all = events.last().map(|it| &it.id) == last.as_ref();
    if state == StoredState::Succeeded && has_seen_all {
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    let (reading, reader) = (app.clone(), caller.clone());
    streams::start(&app, &caller, |writer| write_job(reading, reader, id, last, writer))
}

async fn write_job(
    app: App,
    reader: Caller<Read>,
    id: JobId,
    mut last: Option<String>,
    writer: Writer,
) -> Result<(), Ended> {
    let project_id = reader.project_id;
    let watch = app.engine.notifier.feed.watch(project_id, id);
    loop {
        // Subscribe before reading.
        let changed = watch.changed();
        tokio::pin!(changed);
        changed.as_mut().enable();
        let part = events::read_part(&app, &reader, id, last.as_deref()).await;
        let part = part.map_err(|_| Ended)?;
        let events = shown(&reader.who, part.events);
        for event in &events {
            writer.send(&event.kind, &event.id, event).await?;
        }
        last = events.last().map(|it| it.id.clone()).or(last);
        if part.is_last {
            if part.state == StoredState::Succeeded {
                return Ok(());
            }
            writer.wait(changed).await?;
        }
        writer.wait(tokio::time::sleep(READ_PAUSE)).await?;
    }
}

/// Stream a project's events.
///
/// Events of its jobs that this node processes, as server-sent events. Resumes after
/// `Last-Event-ID` if the node still has it; otherwise the first event is `fencepost.gap`: read the
/// jobs that matter again.
#[utoipa::path(
    get, path = "/events/stream", tag = "streams", operation_id = "events_stream",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(("Last-Event-ID" = Option<String>, Header, description = "The last event received.")),
    responses(
        (status = 200, description = "The stream.", content_type = "text/event-stream", body = String),
    ),
)]
pub async fn project_stream(
    caller: Caller<Read>,
    State(app): State<App>,
    headers: HeaderMap,
) -> Result<Response, Error> {
    let last = streams::last_event_id(&headers);
    // An unknown id counts as forgotten.
    let last = last.map(|it| it.parse().unwrap_or_else(|_| EventId::generate()));
    let listening = app.engine.notifier.feed.listen(caller.project_id, last);
    let reader = caller.clone();
    streams::start(&app, &caller, |writer| write_project(listening, reader, writer))
}

async fn write_project(
    listening: Listening,
    reader: Caller<Read>,
    writer: Writer,
) -> Result<(), Ended> {
    let Listening { mut receiver, missed, has_gap } = listening;
    if has_gap {
        send_gap(&writer).await?;
    }
    for job_event in missed {
        send(&writer, &reader, &job_event).await?;
    }
    loop {
        match writer.wait(receiver.recv()).await? {
            Ok(job_event) => send(&writer, &reader, &job_event).await?,
            Err(RecvError::Lagged(_)) => send_gap(&writer).await?,
            Err(RecvError::Closed) => return Ok(()),
        }
    }
}

async fn send_gap(writer: &Writer) -> Result<(), Ended> {
    let id = EventId::generate().to_string();
    writer.send(history::GAP, &id, &serde_json::json!({"type": history::GAP})).await
}

async fn send(
    writer: &Writer,
    reader: &Caller<Read>,
    job_event: &Arc<JobEvent>,
) -> Result<(), Ended> {
    // The id was made when this node received the event.
    let made = job_event.id.0.get_timestamp().map(|it| it.to_unix());
    let at = made
        .and_then(|(seconds, nanos)| DateTime::from_timestamp(i64::try_from(seconds).ok()?, nanos));
    let event = EventView {
        id: job_event.id.to_string(),
        kind: job_event.kind.clone(),
        job_id: job_event.job_id.to_string(),
        at: at.unwrap_or_default(),
        attempt: job_event.attempt,
        worker_id: job_event.worker_id.clone(),
        actor: None,
        reason: None,
        payload: job_event.payload.clone().and_then(|it| RawValue::from_string(it).ok()),
        redacted: false,
    };
    let event = shown(&reader.who, event);
    writer.send(&event.kind, &event.id, &event).await
}
