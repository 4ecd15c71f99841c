//! What workers call while they run tasks: poll and heartbeat.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use axum::{
    Extension, Json as Reply,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::Error,
    ids::{ProjectId, WorkflowId},
    job::{DEFAULT_QUEUE, JobState},
    limits, workflow,
};
use fencepost_engine::{
    dispatch::{self, DispatchedJob, Poll},
    jobs::workflows,
    settle::{
        checkpoints::{self, Saved},
        heartbeat::{self as beats, Advice, Beat},
    },
};
use fencepost_web::{
    app::App,
    auth::{Beating, Caller, Polling},
    wire::{
        ClientGone,
        extract::{Json, OptionalJson, RequestBody},
        openapi::{chars, items, range},
        poll_answer,
        validate::{Check, stored_json},
    },
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::{LEASE_SECONDS, WAIT_SECONDS, read_task_id, state_name, task_id};
use crate::{params::PathParams, plain_errors::ErrorBody, work};

/// Maximum `limit` that clients may send.
const MAX_LIMIT: u32 = 1_000;

/// A poll. With `handler_name` or `limit` the answer is a list, immediately; otherwise one task
/// after a wait, or a list if `batch_size` is more than 1.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct PollRequest {
    /// Only tasks of these handlers. Default: any.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_POLL_JOB_TYPES)))))]
    handler_names: Option<Vec<String>>,
    /// Only tasks of this handler.
    handler_name: Option<String>,
    /// Queue. Default: only the default queue.
    queue_name: Option<String>,
    /// Id that the worker chooses for itself.
    #[schema(extensions(("bounds" = json!(chars(0, limits::MAX_WORKER_ID_CHARS)))))]
    worker_id: Option<String>,
    /// Maximum number of tasks to return. Default: 1.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_POLL_CAPACITY)))))]
    batch_size: Option<u32>,
    /// Maximum number of tasks to return; at most 50. Default: `batch_size`.
    #[schema(extensions(("bounds" = json!(range(1, MAX_LIMIT)))))]
    limit: Option<u32>,
}

impl RequestBody for PollRequest {}

/// The shape of a poll's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    One,
    Many,
    ListAtOnce,
}

/// A poll's answer, in the requested shape.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum PollReply {
    One(Task),
    Many(Vec<Task>),
    AtOnce(Vec<WideTask>),
}

/// A leased task, in the first shape.
#[derive(Debug, Serialize, ToSchema)]
pub struct Task {
    /// Id of the job and its attempt.
    #[schema(example = "task_01m7w3ha3aextt8pkwwdmxsmqw-1")]
    id: String,
    /// Type of the job.
    handler_name: String,
    /// Payload.
    #[schema(value_type = Object)]
    params: Box<RawValue>,
    context: Context,
    metadata: Metadata,
    /// The last checkpoint of earlier attempts. Absent: there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    checkpoint: Option<Box<RawValue>>,
}

/// Context of a task.
#[derive(Debug, Serialize, ToSchema)]
pub struct Context {
    /// Id of the workflow, or of the job if it has none.
    instance_id: String,
    /// Key of the job in its workflow, or its type.
    step_id: String,
    /// Results of its parents, by their keys.
    steps: BTreeMap<String, StepOutput>,
    /// Input of the workflow.
    #[schema(value_type = serde_json::Value)]
    data: Option<Box<RawValue>>,
}

/// Result of a step, or its error.
#[derive(Debug, Serialize, ToSchema)]
pub struct StepOutput {
    #[schema(value_type = serde_json::Value)]
    output: Option<Box<RawValue>>,
    /// Message of its last error, if it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Attempt of a task.
#[derive(Debug, Serialize, ToSchema)]
pub struct Metadata {
    /// Counted from 1.
    attempt: i32,
    /// When the job was stored.
    created_at: DateTime<Utc>,
}

/// A leased task, in the second shape.
#[derive(Debug, Serialize, ToSchema)]
pub struct WideTask {
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
    context: Context,
    /// Attempt, counted from 0.
    attempt: i32,
    /// Timeout of one attempt, in milliseconds.
    timeout_ms: i64,
    /// Always `claimed`.
    state: &'static str,
    /// Worker that holds it.
    worker_id: String,
    /// Time when that worker claimed the job.
    claimed_at: DateTime<Utc>,
    /// Attempt, counted from 1; shown with the end of the task.
    claim_epoch: i32,
    /// When the job was stored.
    created_at: DateTime<Utc>,
    /// The last checkpoint of earlier attempts. Absent: there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    checkpoint: Option<Box<RawValue>>,
}

/// The inputs of workflows.
type Inputs = HashMap<WorkflowId, String>;

impl Context {
    fn of(handed: &DispatchedJob, inputs: &Inputs) -> Result<Self, Error> {
        let job = &handed.job;
        let parents = work::parent_results(handed)?;
        // A fallback takes the place of its step.
        let output_of = |key: &str| {
            let named = parents.iter().find(|it| it.key.as_deref() == Some(key));
            named.and_then(|it| it.result.clone())
        };
        let step = |it: &work::ParentResultView| {
            let key = it.key.as_ref().unwrap_or(&it.job_id).clone();
            let output = match it.state {
                JobState::Succeeded => it.result.clone(),
                _ => output_of(&workflow::fallback_key(&key)),
            };
            (key, StepOutput { output, error: it.error.clone() })
        };
        let input = job.workflow_id.and_then(|it| inputs.get(&it));
        Ok(Self {
            instance_id: job.workflow_id.map_or(job.id.to_string(), |it| it.to_string()),
            step_id: job.workflow_key.clone().unwrap_or_else(|| job.job_type.clone()),
            steps: parents.iter().map(step).collect(),
            data: input.cloned().map(stored_json).transpose()?,
        })
    }
}

fn checkpoint(handed: &DispatchedJob) -> Result<Option<Box<RawValue>>, Error> {
    handed.checkpoint.as_ref().map(|it| stored_json(it.data.clone())).transpose()
}

impl Task {
    fn of(handed: &DispatchedJob, inputs: &Inputs) -> Result<Self, Error> {
        let job = &handed.job;
        Ok(Self {
            id: task_id(job.id, job.attempt),
            handler_name: job.job_type.clone(),
            params: work::object(&job.payload)?,
            context: Context::of(handed, inputs)?,
            metadata: Metadata { attempt: job.attempt, created_at: job.created_at },
            checkpoint: checkpoint(handed)?,
        })
    }
}

impl WideTask {
    fn of(handed: &DispatchedJob, inputs: &Inputs) -> Result<Self, Error> {
        const MS_PER_SECOND: i64 = 1_000;
        let job = &handed.job;
        let context = Context::of(handed, inputs)?;
        Ok(Self {
            id: task_id(job.id, job.attempt),
            instance_id: context.instance_id.clone(),
            block_id: context.step_id.clone(),
            handler_name: job.job_type.clone(),
            queue_name: job.queue.clone(),
            params: work::object(&job.payload)?,
            context,
            attempt: job.attempt - 1,
            timeout_ms: i64::from(job.timeout_seconds) * MS_PER_SECOND,
            state: state_name(JobState::Processing),
            worker_id: handed.worker_id.to_string(),
            claimed_at: job.claimed_at,
            claim_epoch: job.attempt,
            created_at: job.created_at,
            checkpoint: checkpoint(handed)?,
        })
    }
}

/// Wait for a task, or claim several immediately.
#[utoipa::path(
    post, path = "/workers/tasks/poll", tag = "tasks", operation_id = "poll_tasks",
    request_body = Option<PollRequest>,
    responses(
        (status = 200, description = "A task; a list if more than one was requested, or for an immediate answer.", body = PollReply),
        (status = 204, description = "No task during the wait."),
    ),
)]
pub async fn poll(
    caller: Caller<Polling>,
    State(app): State<App>,
    Extension(gone): Extension<ClientGone>,
    OptionalJson(request): OptionalJson<PollRequest>,
) -> Result<Response, Error> {
    let is_wide = request.handler_name.is_some() || request.limit.is_some();
    let shape = match request.batch_size {
        _ if is_wide => Shape::ListAtOnce,
        None | Some(1) => Shape::One,
        Some(_) => Shape::Many,
    };
    answer(&app, &caller, &gone, request, shape).await
}

/// Claim tasks of one queue immediately.
#[utoipa::path(
    post, path = "/workers/tasks/poll/queue", tag = "tasks", operation_id = "poll_queue_tasks",
    request_body = PollRequest,
    responses((status = 200, description = "Tasks, or none.", body = Vec<WideTask>)),
)]
pub async fn poll_queue(
    caller: Caller<Polling>,
    State(app): State<App>,
    Extension(gone): Extension<ClientGone>,
    Json(request): Json<PollRequest>,
) -> Result<Response, Error> {
    if request.queue_name.as_deref().is_none_or(str::is_empty) {
        return Err(Error::invalid("queue_name", "must be sent"));
    }
    answer(&app, &caller, &gone, request, Shape::ListAtOnce).await
}

async fn answer(
    app: &App,
    caller: &Caller<Polling>,
    ClientGone(gone): &ClientGone,
    request: PollRequest,
    shape: Shape,
) -> Result<Response, Error> {
    let mut check = Check::default();
    let batch_size = request.batch_size.unwrap_or(1);
    check.range("batch_size", batch_size, 1, limits::MAX_POLL_CAPACITY);
    let limit = request.limit.unwrap_or(batch_size);
    check.range("limit", limit, 1, MAX_LIMIT);
    if let Some(name) = &request.handler_name {
        check.name("handler_name", name, limits::MAX_JOB_TYPE_CHARS);
    }
    // Before it joins `handler_names`, so that an error names the field that was sent.
    check.finish()?;
    let mut check = Check::default();
    let handlers = request.handler_names.unwrap_or_default();
    let waits = shape != Shape::ListAtOnce;
    let poll = Poll {
        worker_id: named(request.worker_id),
        queues: vec![named(request.queue_name).unwrap_or_else(|| DEFAULT_QUEUE.to_owned())],
        job_types: handlers.into_iter().chain(request.handler_name).collect(),
        capacity: limit.min(limits::MAX_POLL_CAPACITY),
        lease_seconds: Some(LEASE_SECONDS),
        wait: Duration::from_secs(if waits { WAIT_SECONDS } else { 0 }),
        ..Poll::new(caller.project_id)
    };
    check.poll(&poll, "queue_name", "handler_names");
    check.finish()?;
    let revoked = caller.until_revoked(app);
    let answer = dispatch::poll(&app.engine, poll, gone, revoked).await?;
    let workflows: Vec<_> = answer.jobs().iter().filter_map(|it| it.job.workflow_id).collect();
    let inputs = workflows::inputs(&app.engine, caller.project_id, &workflows).await?;
    let inputs: Inputs = inputs.into_iter().collect();
    let tasks = || answer.jobs().iter();
    let (wide, task) = (
        |it: &DispatchedJob| WideTask::of(it, &inputs),
        |it: &DispatchedJob| Task::of(it, &inputs),
    );
    let reply = match (shape, answer.jobs()) {
        (Shape::ListAtOnce, _) => PollReply::AtOnce(tasks().map(wide).collect::<Result<_, _>>()?),
        (_, []) => return Ok(StatusCode::NO_CONTENT.into_response()),
        (Shape::Many, _) => PollReply::Many(tasks().map(task).collect::<Result<_, _>>()?),
        (Shape::One, [first, ..]) => PollReply::One(task(first)?),
    };
    poll_answer::respond(&reply, answer)
}

/// Many clients send empty strings for unset fields.
pub(super) fn named(name: Option<String>) -> Option<String> {
    name.filter(|it| !it.is_empty())
}

/// Records a worker that gives its name.
pub(super) fn record_seen(
    app: &App,
    project_id: ProjectId,
    worker_id: Option<&str>,
) -> Result<(), Error> {
    let Some(worker_id) = worker_id else { return Ok(()) };
    let mut check = Check::default();
    check.name("worker_id", worker_id, limits::MAX_WORKER_ID_CHARS);
    check.finish()?;
    app.engine.registry.record_seen(&(project_id, worker_id.into()), &[], &[]);
    Ok(())
}

/// A heartbeat; the body may be absent.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct HeartbeatRequest {
    /// Worker that holds the task; checked if it is sent.
    worker_id: Option<String>,
    /// As polled; checked if it is sent.
    claim_epoch: Option<i32>,
    /// How far the task has come: at most 64 KiB. The next attempt gets it.
    #[schema(value_type = Option<Object>)]
    checkpoint: Option<Box<RawValue>>,
}

impl RequestBody for HeartbeatRequest {}

/// The lease is renewed.
#[derive(Debug, Serialize, ToSchema)]
pub struct HeartbeatReply {
    /// Number of the checkpoint that was stored; 0: none was.
    checkpoint_seq: i64,
    /// Whether the job was cancelled: stop, and fail the task.
    cancelled: bool,
}

/// Send a heartbeat.
#[utoipa::path(
    post, path = "/workers/tasks/{id}/heartbeat", tag = "tasks", operation_id = "heartbeat_task",
    params(("id" = String, Path, description = "The task, as polled.")),
    request_body = Option<HeartbeatRequest>,
    responses(
        (status = 200, description = "The lease is renewed.", body = HeartbeatReply),
        (status = 404, description = "No such task.", body = ErrorBody),
        (status = 409, description = "The task no longer belongs to this worker: stop.", body = ErrorBody),
    ),
)]
pub async fn heartbeat(
    caller: Caller<Beating>,
    State(app): State<App>,
    params: PathParams,
    OptionalJson(request): OptionalJson<HeartbeatRequest>,
) -> Result<Reply<HeartbeatReply>, Error> {
    let mut check = Check::default();
    if let Some(checkpoint) = &request.checkpoint {
        check.size("checkpoint", checkpoint, limits::MAX_CHECKPOINT_BYTES)?;
        check.depth("checkpoint", checkpoint);
    }
    check.finish()?;
    let id = read_task_id(params.get("id"))?;
    let worker_id = named(request.worker_id);
    record_seen(&app, caller.project_id, worker_id.as_deref())?;
    let fence = id.fence(worker_id, request.claim_epoch);
    let key = id.key(caller.project_id);
    let beat = Beat { key, fence: fence.clone(), progress: None };
    let advice = beats::heartbeat(&app.engine, beat).await?;
    let saved = match request.checkpoint {
        Some(data) => {
            let data = Box::<str>::from(data).into_string();
            checkpoints::save_next(&app.engine, caller.tenant(), (key.id, fence), data).await?
        }
        None => None,
    };
    let stored = saved.filter(|it| it.0 == Saved::Stored);
    let checkpoint_seq = stored.map_or(0, |it| it.1);
    Ok(Reply(HeartbeatReply { checkpoint_seq, cancelled: advice == Advice::Cancel }))
}
