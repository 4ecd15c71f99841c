//! Recent events, derived from the newest jobs: nothing is stored for them.

use axum::extract::State;
use chrono::{DateTime, Utc};
use fencepost_domain::{error::Error, job::StoredState, limits};
use fencepost_engine::jobs::{self, Filter, JobRow, Payloads};
use fencepost_web::{
    app::App,
    auth::{Caller, Read},
    wire::{extract::Query, validate::Check},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::{IntoParams, ToSchema};

use super::{
    Reply, SPEC_VERSION,
    fields::{listed, time},
};

/// Filter of events.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct EventsQuery {
    /// Only these types, separated by commas.
    types: Option<String>,
    /// Only of these queues, separated by commas.
    queues: Option<String>,
    /// Maximum number of events to return. Default: 50.
    #[param(minimum = 1, maximum = 200)]
    limit: Option<u32>,
}

/// An event of a job.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OjsEvent)]
pub struct Event {
    specversion: &'static str,
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    time: String,
    subject: String,
    #[schema(value_type = Object)]
    data: Value,
}

/// Events, newest first.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OjsEvents)]
pub struct Events {
    events: Vec<Event>,
}

/// List events of the newest 200 jobs: `job.enqueued`, `job.started`, `job.completed`,
/// `job.discarded`, `job.cancelled`.
#[utoipa::path(
    get, path = "/v1/events", tag = "jobs", operation_id = "list_events",
    params(EventsQuery),
    responses((status = 200, description = "The events, newest first.", body = Events)),
)]
pub async fn list(
    caller: Caller<Read>,
    State(app): State<App>,
    Query(query): Query<EventsQuery>,
) -> Result<Reply<Events>, Error> {
    const DEFAULT_LIMIT: u32 = 50;
    let limit = query.limit.unwrap_or(DEFAULT_LIMIT);
    let (types, queues) = (listed(query.types.as_deref()), listed(query.queues.as_deref()));
    let mut check = Check::default();
    check.range("limit", limit, 1, limits::MAX_PAGE_JOBS);
    check.names("queues", &queues, limits::MAX_POLL_QUEUES, limits::MAX_QUEUE_CHARS);
    check.finish()?;
    let one = queues.first().filter(|_| queues.len() == 1).cloned();
    let filter = Filter { queue: one, ..Filter::default() };
    let (project_id, max) = (caller.project_id, limits::MAX_PAGE_JOBS);
    let (rows, _) = jobs::page(&app.engine, project_id, &filter, max, Payloads::LeftOut).await?;
    let of_queue = |it: &&JobRow| queues.is_empty() || queues.contains(&it.queue);
    let mut found: Vec<_> = rows.iter().filter(of_queue).flat_map(job_events).collect();
    found.retain(|(_, kind, _)| types.is_empty() || types.iter().any(|it| it == kind));
    found.sort_by_key(|(at, ..)| std::cmp::Reverse(*at));
    let events = found.into_iter().take(limit as usize).map(|(at, kind, row)| event(at, kind, row));
    Ok(Reply::ok(Events { events: events.collect() }))
}

/// The events that a job's row implies.
fn job_events(row: &JobRow) -> Vec<(DateTime<Utc>, &'static str, &JobRow)> {
    let mut found = vec![(row.created_at, "job.enqueued", row)];
    found.extend(row.claimed_at.map(|at| (at, "job.started", row)));
    let end = match row.state {
        StoredState::Succeeded => Some("job.completed"),
        StoredState::DeadLetter => Some("job.discarded"),
        StoredState::Cancelled => Some("job.cancelled"),
        _ => None,
    };
    found.extend(end.zip(row.completed_at).map(|(kind, at)| (at, kind, row)));
    found
}

fn event(at: DateTime<Utc>, kind: &'static str, row: &JobRow) -> Event {
    let id = row.id.0.to_string();
    let took = row.completed_at.zip(row.claimed_at).map(|(end, start)| end - start);
    Event {
        specversion: SPEC_VERSION,
        id: format!("{id}.{kind}"),
        kind,
        time: time(at),
        data: json!({
            "job_id": id, "job_type": row.job_type, "queue": row.queue, "attempt": row.attempt,
            "duration_ms": row.duration_ms.or(took.map(|it| it.num_milliseconds())),
        }),
        subject: id,
    }
}
