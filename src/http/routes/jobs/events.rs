//! A job's history: from its own rows, and from stored events.

use axum::{Json as Reply, extract::State};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::Error,
    history,
    ids::JobId,
    job::{AttemptOutcome, StoredState},
    limits,
    text::ErrorReport,
};
use fencepost_store::{
    self as store,
    jobs::{AttemptRow, JobRow, events::EventRow},
};
use fencepost_web::{
    app::App,
    auth::{Caller, Read},
    wire::{
        extract::{JobInPath, Query},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use utoipa::{IntoParams, ToSchema};

use super::JobError;
use crate::{
    change::{ActorView, Names},
    cursor::{self, List},
    error::ErrorBody,
    redact::{Redact, shown},
};

/// An event of a job.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = JobEvent)]
pub struct EventView {
    /// Id of the event; a stream resumes after it if it is sent as `Last-Event-ID`.
    #[schema(example = "claimed-1")]
    pub id: String,
    /// Type of the event. Types that begin with `fencepost.` are the server's; others are workers'.
    #[serde(rename = "type")]
    #[schema(example = "fencepost.claimed")]
    pub kind: String,
    /// Id of the job.
    #[schema(example = "job_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub job_id: String,
    /// Time of the event.
    pub at: DateTime<Utc>,
    /// Attempt, if the event belongs to one.
    #[schema(required)]
    pub attempt: Option<i32>,
    /// Worker of the attempt.
    #[schema(required)]
    pub worker_id: Option<String>,
    /// Author of the change. Null if the event is none, and in the stream of a project.
    #[serde(default)]
    #[schema(required)]
    pub actor: Option<ActorView>,
    /// Reason of the change.
    #[serde(default)]
    #[schema(required)]
    pub reason: Option<String>,
    /// Details.
    #[schema(value_type = serde_json::Value, required)]
    pub payload: Option<Box<RawValue>>,
    /// True if the details are null because the caller may not read them.
    pub redacted: bool,
}

impl Redact for EventView {
    fn redact(&mut self) {
        self.redacted = true;
        self.payload = None;
    }
}

/// Part of a history to read.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct HistoryQuery {
    /// Maximum number of events to return, the newest. Default: all.
    #[param(minimum = 1, maximum = 1_000)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page: the events before it.
    cursor: Option<String>,
}

/// A job's history.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct JobHistory {
    /// Oldest first.
    pub events: Vec<EventView>,
    /// True if there are older events.
    pub has_more: bool,
    /// Pass it as `cursor` to get the older events.
    #[schema(required)]
    pub next_cursor: Option<String>,
}

/// Read a job's history.
///
/// Every transition and every event that a worker reported, in order.
#[utoipa::path(
    get, path = "/jobs/{job_id}/events", tag = "jobs", operation_id = "jobs_events",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(HistoryQuery, ("job_id" = String, Path, description = "The job.", example = "job_01m7w3ha3aextt8pkwwdmxsmqw")),
    responses(
        (status = 200, description = "The history.", body = JobHistory),
        (status = 404, description = "The project has no such job.", body = ErrorBody),
    ),
)]
pub async fn list(
    caller: Caller<Read>,
    State(app): State<App>,
    JobInPath(id): JobInPath,
    Query(query): Query<HistoryQuery>,
) -> Result<Reply<JobHistory>, Error> {
    let mut check = Check::default();
    if let Some(limit) = query.limit {
        check.range("limit", limit, 1, limits::MAX_PAGE_EVENTS);
    }
    check.finish()?;
    let list = List::of(caller.project_id, "events").filtered(&Some(id));
    let before = cursor::read_text(&app, list, query.cursor.as_deref())?;
    let stored = match (query.limit, &before) {
        (Some(limit), None) => i64::from(limit) + 1,
        _ => MAX_EVENTS,
    };
    let (mut events, _) = read(&app, &caller, id, stored).await?;
    if let Some(before) = before {
        let place = events.iter().position(|it| it.id == before);
        events.truncate(place.unwrap_or(0));
    }
    let older = events.len().saturating_sub(query.limit.unwrap_or(u32::MAX) as usize);
    events.drain(..older);
    let next = events.first().filter(|_| older > 0);
    let next_cursor = next.map(|it| cursor::write_text(&app, list, &it.id));
    let events = shown(&caller.who, events);
    Ok(Reply(JobHistory { events, has_more: older > 0, next_cursor }))
}

/// Stored events of one job: the maximum that workers may report, and as many of the server's.
pub(super) const MAX_EVENTS: i64 = limits::MAX_JOB_EVENTS * 2;

/// The history with its newest `max_stored` stored events, and the job's state.
pub(super) async fn read(
    app: &App,
    reader: &Caller<Read>,
    id: JobId,
    max_stored: i64,
) -> Result<(Vec<EventView>, StoredState), Error> {
    let project_id = reader.project_id;
    let mut conn = app.engine.pools.read_for(project_id).await?;
    let row = store::jobs::find(&mut conn, project_id, id).await?.ok_or(Error::JobNotFound)?;
    let attempts = store::jobs::attempts(&mut conn, project_id, id).await?;
    let events = store::jobs::events::of_job(&mut conn, project_id, id, max_stored).await?;
    let actors = events.iter().filter_map(|it| Some((it.actor_kind?, it.actor_id.as_deref()?)));
    let names = Names::read(&mut conn, &reader.who, project_id, actors).await?;
    let state = row.state;
    Ok((history(&row, attempts, events, &names)?, state))
}

/// Bytes of payloads of one part of a stream, which a slow reader keeps in memory.
const PART_BYTES: usize = 1024 * 1024;

/// A part of a history.
pub(super) struct HistoryPart {
    pub(super) events: Vec<EventView>,
    /// Whether nothing follows it yet.
    pub(super) is_last: bool,
    pub(super) state: StoredState,
}

/// The part of the history after this event, or from its beginning: bounded, however much has
/// happened. The rest is not kept: it is read again when the reader has taken this part.
pub(super) async fn read_part(
    app: &App,
    reader: &Caller<Read>,
    id: JobId,
    last: Option<&str>,
) -> Result<HistoryPart, Error> {
    let (mut events, state) = read(app, reader, id, MAX_EVENTS).await?;
    let is_last = cut_part(&mut events, last);
    Ok(HistoryPart { events, is_last, state })
}

/// Keeps the part after this event. Returns whether it is the last one.
fn cut_part(events: &mut Vec<EventView>, last: Option<&str>) -> bool {
    let seen = last.and_then(|last| events.iter().position(|it| it.id == last));
    events.drain(..seen.map_or(0, |it| it + 1));
    let mut bytes = 0;
    let fitting = events.iter().take_while(|event| {
        let is_first = bytes == 0;
        bytes += event.payload.as_ref().map_or(0, |it| it.get().len());
        is_first || bytes <= PART_BYTES
    });
    let fitting = fitting.count();
    let is_last = fitting == events.len();
    events.truncate(fitting);
    events.shrink_to_fit();
    is_last
}

/// The events of an ended attempt.
#[derive(Serialize)]
struct EndedPayload {
    error: Option<JobError>,
    retry_at: Option<DateTime<Utc>>,
    duration_ms: Option<i64>,
}

fn history(
    row: &JobRow,
    attempts: Vec<AttemptRow>,
    events: Vec<EventRow>,
    names: &Names,
) -> Result<Vec<EventView>, Error> {
    let event = |id: String, kind: &str, at| EventView {
        id,
        kind: kind.to_owned(),
        job_id: row.id.to_string(),
        at,
        attempt: None,
        worker_id: None,
        actor: None,
        reason: None,
        payload: None,
        redacted: false,
    };
    let mut views = vec![event("enqueued".into(), history::ENQUEUED, row.created_at)];
    for it in attempts {
        let (attempt, worker_id) = (Some(it.attempt), Some(it.worker_id));
        let in_attempt =
            |view: EventView| EventView { attempt, worker_id: worker_id.clone(), ..view };
        let claimed = event(format!("claimed-{}", it.attempt), history::CLAIMED, it.claimed_at);
        views.push(in_attempt(claimed));
        let error = JobError::of(ErrorReport {
            kind: it.error_kind,
            message: it.error_message,
            stack_trace: it.error_stack_trace,
            truncated: it.error_truncated,
        });
        let payload = EndedPayload { error, retry_at: it.retry_at, duration_ms: it.duration_ms };
        let id = format!("{}-{}", it.outcome.as_str(), it.attempt);
        let ended = in_attempt(event(id, &history::ended(it.outcome), it.ended_at));
        let payload = Some(to_raw_value(&payload).map_err(Error::internal)?);
        views.push(EventView { payload, ..ended });
        if it.retry_at.is_none() && it.outcome != AttemptOutcome::Cancelled {
            let id = format!("dead_lettered-{}", it.attempt);
            views.push(in_attempt(event(id, history::DEAD_LETTERED, it.ended_at)));
        }
    }
    let in_last =
        |view| EventView { attempt: Some(row.attempt), worker_id: row.worker_id.clone(), ..view };
    let is_last = matches!(row.state, StoredState::Processing | StoredState::Succeeded);
    if let Some(claimed_at) = row.claimed_at.filter(|_| is_last) {
        let id = format!("claimed-{}", row.attempt);
        views.push(in_last(event(id, history::CLAIMED, claimed_at)));
    }
    if let Some(completed_at) = row.completed_at.filter(|_| row.state == StoredState::Succeeded) {
        views.push(in_last(event("succeeded".into(), history::SUCCEEDED, completed_at)));
    }
    for it in events {
        let payload = it.payload.map(RawValue::from_string).transpose().map_err(Error::internal)?;
        let view = event(it.id.to_string(), &it.kind, it.at);
        let (attempt, worker_id, reason) = (it.attempt, it.worker_id, it.reason);
        let actor = it.actor_kind.map(|kind| names.actor(kind, it.actor_id));
        views.push(EventView { attempt, worker_id, actor, reason, payload, ..view });
    }
    // Events of the same instant keep this order.
    views.sort_by_key(|it| it.at);
    Ok(views)
}

#[cfg(test)]
mod tests {
    use fencepost_domain::ids::EventId;

    use super::*;

    fn event(id: &str, second: i64, bytes: usize) -> EventView {
        let text = format!("\"{}\"", "x".repeat(bytes));
        EventView {
            id: id.to_owned(),
            kind: "step".to_owned(),
            job_id: String::new(),
            at: DateTime::from_timestamp(second, 0).expect("a time"),
            attempt: None,
            worker_id: None,
            actor: None,
            reason: None,
            payload: Some(RawValue::from_string(text).expect("JSON")),
            redacted: false,
        }
    }

    fn read_all(events: &[EventView], last: Option<&str>) -> (Vec<String>, usize) {
        let (mut ids, mut parts) = (Vec::new(), 0);
        let mut last = last.map(str::to_owned);
        loop {
            let mut part = events.to_vec();
            let is_last = cut_part(&mut part, last.as_deref());
            last = part.last().map(|it| it.id.clone()).or(last);
            ids.extend(part.into_iter().map(|it| it.id));
            parts += 1;
            if is_last {
                return (ids, parts);
            }
        }
    }

    #[test]
    fn a_long_history_is_read_in_parts_and_each_event_once() {
        let large = PART_BYTES / 2;
        let ids = ["enqueued", "claimed-1", "a", "b", "c"];
        let events: Vec<_> =
            ids.iter().zip(0..).map(|(id, second)| event(id, second, large)).collect();
        assert_eq!(read_all(&events, None), (ids.map(str::to_owned).to_vec(), 5));
        let rest = ids[2..].iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
        assert_eq!(read_all(&events, Some("claimed-1")).0, rest);
        let unknown = EventId::generate().to_string();
        assert_eq!(read_all(&events, Some(&unknown)).0, ids.map(str::to_owned));
        assert_eq!(read_all(&events, Some("c")).0, Vec::<String>::new());
        let small: Vec<_> = ids.iter().zip(0..).map(|(id, second)| event(id, second, 9)).collect();
        assert_eq!(read_all(&small, None), (ids.map(str::to_owned).to_vec(), 1));
    }
}
