//! Reading tasks: a list, counts, and the attempts of one.

use std::collections::BTreeMap;

use axum::{Json as Reply, extract::State};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::Error,
    job::{AttemptOutcome, JobState},
    limits,
};
use fencepost_engine::{
    jobs::{self, AttemptRow, Filter, JobRow, Payloads},
    queues, workers,
};
use fencepost_web::{
    app::App,
    auth::{Caller, Read, ReadPayloads},
    wire::{
        extract::Query,
        validate::{Check, stored_json},
    },
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};

use super::{read_task_id, state_name, task_id};
use crate::{attempt, params::PathParams, plain_errors::ErrorBody, work};

/// Filter and page of tasks.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct TasksQuery {
    /// `pending`, `claimed`, `completed` or `failed`.
    state: Option<String>,
    /// Only tasks of this handler.
    handler_name: Option<String>,
    /// Only tasks that this worker holds, or completed.
    worker_id: Option<String>,
    /// Only tasks of this queue.
    queue_name: Option<String>,
    /// Maximum number of tasks to return. Default: 50.
    #[param(minimum = 1, maximum = 200)]
    limit: Option<u32>,
    /// Number of tasks to skip. With `limit` at most 200: for older ones, list the jobs natively.
    #[param(minimum = 0, maximum = 199)]
    offset: Option<u32>,
}

/// The latest attempt of a job, or the one that it waits for.
#[derive(Debug, Serialize, ToSchema)]
pub struct TaskView {
    /// Id of the job and its attempt.
    id: String,
    /// Id of the workflow, or of the job if it has none.
    instance_id: String,
    /// Key of the job in its workflow, or its type.
    block_id: String,
    /// Type of the job.
    handler_name: String,
    /// Queue.
    queue_name: String,
    /// Payload.
    #[schema(value_type = Object)]
    params: Box<RawValue>,
    /// Attempt, counted from 0.
    attempt: i32,
    /// State.
    state: &'static str,
    /// Worker that holds it, or completed it.
    worker_id: Option<String>,
    /// Time when that worker claimed the job.
    claimed_at: Option<DateTime<Utc>>,
    /// The attempt, counted from 1.
    claim_epoch: i32,
    /// When the job ended.
    completed_at: Option<DateTime<Utc>>,
    /// Result.
    #[schema(value_type = Option<serde_json::Value>)]
    output: Option<Box<RawValue>>,
    /// When the job was stored.
    created_at: DateTime<Utc>,
}

impl TaskView {
    fn of(row: JobRow) -> Result<Self, Error> {
        let attempt = (row.attempt + i32::from(row.state.is_waiting())).max(1);
        Ok(Self {
            id: task_id(row.id, attempt),
            instance_id: row.workflow_id.map_or(row.id.to_string(), |it| it.to_string()),
            block_id: row.workflow_key.unwrap_or_else(|| row.job_type.clone()),
            handler_name: row.job_type,
            queue_name: row.queue,
            params: work::object(&row.payload)?,
            attempt: attempt - 1,
            state: state_name(row.state.public()),
            worker_id: row.worker_id,
            claimed_at: row.claimed_at,
            claim_epoch: attempt,
            completed_at: row.completed_at,
            output: row.result.map(stored_json).transpose()?,
            created_at: row.created_at,
        })
    }
}

/// The native states of a state of this protocol.
fn states_of(name: &str) -> Vec<JobState> {
    const ALL: [JobState; 6] = [
        JobState::Scheduled,
        JobState::Pending,
        JobState::Processing,
        JobState::Succeeded,
        JobState::DeadLetter,
        JobState::Cancelled,
    ];
    ALL.into_iter().filter(|it| state_name(*it) == name).collect()
}

/// List tasks, newest first.
#[utoipa::path(
    get, path = "/workers/tasks", tag = "tasks", operation_id = "list_tasks",
    params(TasksQuery),
    responses((status = 200, description = "A page of tasks.", body = Vec<TaskView>)),
)]
pub async fn list(
    caller: Caller<ReadPayloads>,
    State(app): State<App>,
    Query(query): Query<TasksQuery>,
) -> Result<Reply<Vec<TaskView>>, Error> {
    const DEFAULT_LIMIT: u32 = 50;
    let (limit, offset) = (query.limit.unwrap_or(DEFAULT_LIMIT), query.offset.unwrap_or(0));
    let states = query.state.as_deref().map(states_of);
    let mut check = Check::default();
    check.range("limit", limit, 1, limits::MAX_PAGE_JOBS);
    check.range("offset", offset, 0, limits::MAX_PAGE_JOBS.saturating_sub(limit));
    check.optional_name("queue_name", query.queue_name.as_deref(), limits::MAX_QUEUE_CHARS);
    check.optional_name("handler_name", query.handler_name.as_deref(), limits::MAX_JOB_TYPE_CHARS);
    if states.as_ref().is_some_and(Vec::is_empty) {
        check.refuse("state", "must be pending, claimed, completed or failed");
    }
    check.finish()?;
    let filter = Filter {
        states: states.unwrap_or_default(),
        queue: query.queue_name,
        job_type: query.handler_name,
        ..Filter::default()
    };
    // A page with payloads may end early: these are read for the wanted ones only.
    let (engine, project_id) = (&app.engine, caller.project_id);
    let (rows, _) =
        jobs::page(engine, project_id, &filter, limit + offset, Payloads::LeftOut).await?;
    let is_wanted = |it: &JobRow| query.worker_id.is_none() || it.worker_id == query.worker_id;
    let ids = rows.iter().filter(|it| is_wanted(it)).skip(offset as usize).map(|it| it.id);
    let mut rows = jobs::find_all(engine, project_id, &ids.collect::<Vec<_>>()).await?;
    rows.sort_by_key(|it| std::cmp::Reverse(it.id));
    let tasks = rows.into_iter().map(TaskView::of);
    Ok(Reply(tasks.collect::<Result<_, _>>()?))
}

/// Number of tasks by state.
#[derive(Debug, Serialize, ToSchema)]
pub struct TaskStats {
    /// Of the whole project, at present.
    by_state: BTreeMap<&'static str, i64>,
    /// Of the newest 200 jobs only.
    by_handler: BTreeMap<String, BTreeMap<&'static str, i64>>,
    /// Workers that were heard within the last minute; at most 200.
    active_workers: usize,
}

/// Count tasks.
#[utoipa::path(
    get, path = "/workers/tasks/stats", tag = "tasks", operation_id = "task_stats",
    responses((status = 200, description = "The counts.", body = TaskStats)),
)]
pub async fn stats(
    caller: Caller<Read>,
    State(app): State<App>,
) -> Result<Reply<TaskStats>, Error> {
    let totals = queues::totals(&app.engine, caller.project_id).await?;
    let (newest, limit) = (Filter::default(), limits::MAX_PAGE_JOBS);
    let (rows, _) =
        jobs::page(&app.engine, caller.project_id, &newest, limit, Payloads::LeftOut).await?;
    let mut by_handler: BTreeMap<String, BTreeMap<&'static str, i64>> = BTreeMap::new();
    for row in rows {
        let of_handler = by_handler.entry(row.job_type).or_default();
        *of_handler.entry(state_name(row.state.public())).or_default() += 1;
    }
    let limit = limits::MAX_PAGE_WORKERS.into();
    let workers = workers::page(&app.engine, caller.project_id, None, None, "", limit).await?;
    let by_state = [
        (JobState::Pending, totals.scheduled + totals.active - totals.processing),
        (JobState::Processing, totals.processing),
        (JobState::Succeeded, totals.succeeded),
        (JobState::DeadLetter, totals.dead_letter + totals.cancelled),
    ];
    Ok(Reply(TaskStats {
        by_state: by_state.into_iter().map(|(state, it)| (state_name(state), it)).collect(),
        by_handler,
        active_workers: workers.iter().filter(|it| it.is_alive).count(),
    }))
}

/// Filter of a task's events.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct AttemptsQuery {
    /// Maximum number of events to return, the newest. Default: 100.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
}

/// An event of a job.
#[derive(Debug, Serialize, ToSchema)]
pub struct AttemptEvent {
    /// `claimed`, `reclaimed`, `completed`, `failed`, `timed_out` or `cancelled`.
    event: &'static str,
    /// Time.
    at: DateTime<Utc>,
    /// Attempt, counted from 0.
    attempt: i32,
    /// Worker of the attempt.
    worker_id: String,
    /// Error that the worker reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// The end of an attempt in this protocol's words.
fn event_name(outcome: AttemptOutcome) -> &'static str {
    match outcome {
        AttemptOutcome::Succeeded => "completed",
        AttemptOutcome::Failed => "failed",
        AttemptOutcome::Timeout => "timed_out",
        AttemptOutcome::LeaseExpired | AttemptOutcome::Released => "reclaimed",
        AttemptOutcome::Cancelled => "cancelled",
    }
}

fn events(row: &JobRow, ended: &[AttemptRow]) -> Vec<AttemptEvent> {
    let event = |event, at, attempt: i32, worker_id: &str, error| AttemptEvent {
        event,
        at,
        attempt: attempt - 1,
        worker_id: worker_id.to_owned(),
        error,
    };
    let mut events = Vec::new();
    for it in ended {
        let error = it.error_message.clone();
        events.push(event("claimed", it.claimed_at, it.attempt, &it.worker_id, None));
        events.push(event(event_name(it.outcome), it.ended_at, it.attempt, &it.worker_id, error));
    }
    let is_listed = ended.iter().any(|it| it.attempt == row.attempt);
    if let (Some(worker_id), Some(at), false) = (&row.worker_id, row.claimed_at, is_listed) {
        events.push(event("claimed", at, row.attempt, worker_id, None));
        if row.state.public() == JobState::Succeeded
            && let Some(at) = row.completed_at
        {
            events.push(event(
                event_name(AttemptOutcome::Succeeded),
                at,
                row.attempt,
                worker_id,
                None,
            ));
        }
    }
    events
}

/// List the events of a task's job: of all its attempts.
#[utoipa::path(
    get, path = "/workers/tasks/{id}/attempts", tag = "tasks", operation_id = "task_attempts",
    params(AttemptsQuery, ("id" = String, Path, description = "The task.")),
    responses(
        (status = 200, description = "The events, oldest first.", body = Vec<AttemptEvent>),
        (status = 404, description = "No such task.", body = ErrorBody),
    ),
)]
pub async fn attempts(
    caller: Caller<ReadPayloads>,
    State(app): State<App>,
    params: PathParams,
    Query(query): Query<AttemptsQuery>,
) -> Result<Reply<Vec<AttemptEvent>>, Error> {
    const DEFAULT_LIMIT: usize = 100;
    const MAX_LIMIT: usize = 1_000;
    let limit = query.limit.unwrap_or(DEFAULT_LIMIT);
    let mut check = Check::default();
    check.range("limit", limit, 1, MAX_LIMIT);
    check.finish()?;
    let id = read_task_id(params.get("id"))?;
    let key = id.key(caller.project_id);
    let (row, ended) = jobs::find_with_attempts(&app.engine, key).await?;
    attempt::stage(id.attempt, &row, &ended)?;
    let mut events = events(&row, &ended);
    events.drain(..events.len().saturating_sub(limit));
    Ok(Reply(events))
}
