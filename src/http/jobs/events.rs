//! A job's history: read from its own rows, and from the rows that rare events leave.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use utoipa::ToSchema;

use axum::{Json as Reply, extract::State};

use super::ErrorView;
use crate::{
    app::App,
    auth::{Caller, Read},
    domain::{
        history,
        job::{Outcome, StoredState},
        limits,
        text::ErrorReport,
    },
    error::Error,
    http::error::ErrorBody,
    ids::{JobId, ProjectId},
    store::{
        self,
        events::EventRow,
        jobs::{AttemptRow, JobRow},
    },
    wire::extract::JobInPath,
};

/// Something that happened to a job.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct EventView {
    /// Its name; a stream goes on after it when it comes as `Last-Event-ID`.
    #[schema(example = "claimed-1")]
    pub id: String,
    /// What happened. Types that begin with `fencepost.` are ours; others are workers'.
    #[serde(rename = "type")]
    #[schema(example = "fencepost.claimed")]
    pub kind: String,
    /// The job.
    #[schema(example = "job_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub job_id: String,
    /// When.
    pub at: DateTime<Utc>,
    /// In which attempt, if in one.
    #[schema(required)]
    pub attempt: Option<i32>,
    /// Whose attempt.
    #[schema(required)]
    pub worker_id: Option<String>,
    /// More about it.
    #[schema(value_type = serde_json::Value, required)]
    pub payload: Option<Box<RawValue>>,
}

/// A job's whole history.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct JobHistory {
    /// Oldest first.
    pub events: Vec<EventView>,
}

/// Read a job's history.
///
/// Every transition and every event that a worker reported, in order.
#[utoipa::path(
    get, path = "/jobs/{job_id}/events", tag = "jobs", operation_id = "jobs_events",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(("job_id" = String, Path, description = "The job.", example = "job_01m7w3ha3aextt8pkwwdmxsmqw")),
    responses(
        (status = 200, description = "The history.", body = JobHistory),
        (status = 401, description = "No valid API key.", body = ErrorBody),
        (status = 404, description = "The project has no such job.", body = ErrorBody),
        (status = 503, description = "Try again later.", body = ErrorBody),
    ),
)]
pub async fn list(
    caller: Caller<Read>,
    State(app): State<App>,
    JobInPath(id): JobInPath,
) -> Result<Reply<JobHistory>, Error> {
    let (events, _) = read(&app, caller.project_id, id).await?;
    Ok(Reply(JobHistory { events }))
}

/// The history, and the job's state.
pub(super) async fn read(
    app: &App,
    project_id: ProjectId,
    id: JobId,
) -> Result<(Vec<EventView>, StoredState), Error> {
    let mut conn = app.engine.pools.read_for(project_id).await?;
    let row = store::jobs::find(&mut conn, project_id, id).await?.ok_or(Error::JobNotFound)?;
    let attempts = store::jobs::attempts(&mut conn, project_id, id).await?;
    // Ours come on top of those that workers may send.
    let limit = limits::MAX_JOB_EVENTS * 2;
    let events = store::events::of_job(&mut conn, project_id, id, limit).await?;
    let state = row.state;
    Ok((history(&row, attempts, events)?, state))
}

/// What an ended attempt leaves to say.
#[derive(Serialize)]
struct EndedPayload {
    error: Option<ErrorView>,
    retry_at: Option<DateTime<Utc>>,
    duration_ms: Option<i64>,
}

fn history(
    row: &JobRow,
    attempts: Vec<AttemptRow>,
    events: Vec<EventRow>,
) -> Result<Vec<EventView>, Error> {
    let event = |id: String, kind: &str, at| EventView {
        id,
        kind: kind.to_owned(),
        job_id: row.id.to_string(),
        at,
        attempt: None,
        worker_id: None,
        payload: None,
    };
    let mut told = vec![event("enqueued".into(), history::ENQUEUED, row.created_at)];
    for it in attempts {
        let (attempt, worker_id) = (Some(it.attempt), Some(it.worker_id));
        let in_attempt =
            |view: EventView| EventView { attempt, worker_id: worker_id.clone(), ..view };
        let claimed = event(format!("claimed-{}", it.attempt), history::CLAIMED, it.claimed_at);
        told.push(in_attempt(claimed));
        let error = ErrorView::of(ErrorReport {
            kind: it.error_kind,
            message: it.error_message,
            stack_trace: it.error_stack_trace,
            truncated: it.error_truncated,
        });
        let payload = EndedPayload { error, retry_at: it.retry_at, duration_ms: it.duration_ms };
        let id = format!("{}-{}", it.outcome.as_str(), it.attempt);
        let ended = in_attempt(event(id, &history::ended(it.outcome), it.ended_at));
        let payload = Some(to_raw_value(&payload).map_err(Error::internal)?);
        told.push(EventView { payload, ..ended });
        if it.retry_at.is_none() && it.outcome != Outcome::Cancelled {
            let id = format!("dead_lettered-{}", it.attempt);
            told.push(in_attempt(event(id, history::DEAD_LETTERED, it.ended_at)));
        }
    }
    let in_last =
        |view| EventView { attempt: Some(row.attempt), worker_id: row.worker_id.clone(), ..view };
    let is_last = matches!(row.state, StoredState::Processing | StoredState::Succeeded);
    if let Some(claimed_at) = row.claimed_at.filter(|_| is_last) {
        let id = format!("claimed-{}", row.attempt);
        told.push(in_last(event(id, history::CLAIMED, claimed_at)));
    }
    if let Some(completed_at) = row.completed_at.filter(|_| row.state == StoredState::Succeeded) {
        told.push(in_last(event("succeeded".into(), history::SUCCEEDED, completed_at)));
    }
    for it in events {
        let payload = it.payload.map(RawValue::from_string).transpose().map_err(Error::internal)?;
        let view = event(it.id.to_string(), &it.kind, it.at);
        let (attempt, worker_id) = (it.attempt, it.worker_id);
        told.push(EventView { attempt, worker_id, payload, ..view });
    }
    // What happened at one instant keeps the order of above.
    told.sort_by_key(|it| it.at);
    Ok(told)
}
