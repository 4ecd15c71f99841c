//! Instances: sequences of steps, each a job of one workflow.

use axum::{Json as Reply, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    backoff::{JitterKind, RetryPolicy, RetryStrategy},
    constraint_key,
    dependency::{Dependency, When},
    error::Error,
    formats::whole_seconds,
    ids::{JobId, WorkflowId},
    job::{DEFAULT_QUEUE, DEFAULT_TIMEOUT_SECONDS, JobState},
    limits,
    plan::Tenant,
    template::TemplateMode,
    workflow::{self, BrokenGraph, Node, WorkflowState},
};
use fencepost_engine::{
    enqueue::{
        Extras, NewJob, Start,
        dependencies::{JobWithDependencies, OnConflict},
    },
    jobs::workflows::{self, JobGraph, WorkflowJobRow},
};
use fencepost_web::{
    app::App,
    auth::{Caller, Cost, Produce, ReadPayloads},
    wire::{
        extract::{Json, Object, RequestBody},
        openapi::{chars, range},
        templates::{self, Templates},
        validate::{Check, stored_json},
    },
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sqlx::types::Json as Stored;
use utoipa::ToSchema;

use crate::{params::PathParams, plain_errors::ErrorBody};

/// The only kind of block: a sequence runs its steps one after another.
const STEP: &str = "step";
/// Each step gets the outputs of all before it.
pub const MAX_STEPS: usize = limits::MAX_PARENTS;
/// Suffix of the key of the job that handles a step's failure.
const FALLBACK: &str = "fallback";
const DEFAULT_MULTIPLIER: f64 = 2.0;
const DEFAULT_BACKOFF_MS: i64 = 1_000;
const MS_PER_SECOND: i64 = 1_000;

/// An instance to run. A field that is not supported is refused: without it, something else runs.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = CreateInstanceRequest, example = json!({
    "sequence": {"name": "render", "blocks": [
        {"type": "step", "id": "render_video", "handler": "video_renderer", "queue_name": "gpu-workers",
         "params": {"input_url": "{{context.data.video_url}}", "resolution": "1080p"}}
    ]},
    "context": {"data": {"video_url": "https://example.com/a.mp4"}}
}))]
pub struct CreateRequest {
    /// The sequence to run.
    #[schema(value_type = SequenceRequest)]
    sequence: Object<SequenceRequest>,
    /// Values for its templates.
    #[schema(value_type = Option<ContextRequest>)]
    context: Option<Object<ContextRequest>>,
    /// Priority of its steps. Default: normal.
    priority: Option<Priority>,
}

impl RequestBody for CreateRequest {
    const MAX_BYTES: usize = limits::MAX_BATCH_BODY_BYTES;
    const IS_ALWAYS_STRICT: bool = true;
}

/// A sequence.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SequenceRequest {
    /// Display name.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_NAME_CHARS)))))]
    name: Option<String>,
    /// Its steps, in the order in which they run.
    #[schema(value_type = Vec<StepRequest>, min_items = 1, max_items = 100)]
    blocks: Vec<Object<StepRequest>>,
}

/// The context of an instance.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ContextRequest {
    /// Any JSON, which templates name as `{{context.data.…}}`.
    #[schema(value_type = Option<serde_json::Value>)]
    data: Option<Box<RawValue>>,
}

/// The priority of an instance.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = InstancePriority)]
pub enum Priority {
    /// -10.
    Low,
    /// 0.
    Normal,
    /// 10.
    High,
    /// 20.
    Critical,
}

impl Priority {
    /// Minus the native priority.
    fn rank(self) -> i16 {
        match self {
            Self::Low => 10,
            Self::Normal => 0,
            Self::High => -10,
            Self::Critical => -20,
        }
    }
}

/// A step.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StepRequest {
    /// `step`. For other kinds of blocks use native workflows.
    #[serde(rename = "type")]
    kind: String,
    /// Unique in the sequence.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_NAME_CHARS)))))]
    id: String,
    /// Handler.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_JOB_TYPE_CHARS)))))]
    handler: String,
    /// Queue. Default: `default`.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_QUEUE_CHARS)))))]
    queue_name: Option<String>,
    /// A template. Default: an empty object.
    #[schema(value_type = Option<Object>)]
    params: Option<Box<RawValue>>,
    /// Default: the retry policy of the queue.
    #[schema(value_type = Option<StepRetry>)]
    retry: Option<Object<StepRetry>>,
    /// Timeout of one attempt, in milliseconds. Default: 30 minutes.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_TIMEOUT_SECONDS as i64 * MS_PER_SECOND)))))]
    timeout: Option<i64>,
    /// Runs when the step has failed for good or was cancelled; of the last step only.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_JOB_TYPE_CHARS)))))]
    fallback_handler: Option<String>,
}

/// When a failed step is retried. Waits are rounded up to seconds.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StepRetry {
    /// Attempts in all.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_MAX_ATTEMPTS)))))]
    max_attempts: i32,
    /// First wait, in milliseconds. Default: 1000.
    #[schema(extensions(("bounds" = json!(range(0, limits::MAX_RETRY_SECONDS * MS_PER_SECOND)))))]
    initial_backoff: Option<i64>,
    /// Longest wait, in milliseconds, not shorter than the first. Default: six hours.
    #[schema(extensions(("bounds" = json!(range(0, limits::MAX_RETRY_SECONDS * MS_PER_SECOND)))))]
    max_backoff: Option<i64>,
    /// Factor from each wait to the next. Default: 2.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_RETRY_MULTIPLIER as i64)))))]
    backoff_multiplier: Option<f64>,
}

/// A stored instance.
#[derive(Debug, Serialize, ToSchema)]
pub struct CreatedInstance {
    /// Id of the workflow.
    id: String,
    /// Whether it was there before: never.
    deduplicated: bool,
}

/// An instance.
#[derive(Debug, Serialize, ToSchema)]
pub struct Instance {
    /// Id of the workflow.
    id: String,
    /// Name of its sequence.
    name: Option<String>,
    /// `running`, `completed`, `failed` or `cancelled`.
    state: &'static str,
    /// Its context.
    context: InstanceContext,
    /// Its steps.
    steps: Vec<StepView>,
    /// When it was stored.
    created_at: DateTime<Utc>,
}

/// The context of an instance.
#[derive(Debug, Serialize, ToSchema)]
pub struct InstanceContext {
    /// As it was sent.
    #[schema(value_type = serde_json::Value)]
    data: Option<Box<RawValue>>,
}

/// A step of an instance.
#[derive(Debug, Serialize, ToSchema)]
pub struct StepView {
    /// Its id in the sequence.
    id: String,
    /// Handler.
    handler: Option<String>,
    /// `pending`, `claimed`, `completed`, `failed` or `cancelled`; null: it was pruned. A fallback
    /// that was not needed is cancelled.
    state: Option<&'static str>,
}

/// Run a sequence. Each step is a task, and runs when the one before it has succeeded.
#[utoipa::path(
    post, path = "/instances", tag = "instances", operation_id = "create_instance",
    request_body = CreateRequest,
    responses((status = 201, description = "Stored.", body = CreatedInstance)),
)]
pub async fn create(
    caller: Caller<Produce>,
    State(app): State<App>,
    Json(request): Json<CreateRequest>,
) -> Result<(StatusCode, Reply<CreatedInstance>), Error> {
    let graph = accept(caller.tenant(), request)?;
    caller.charge(&app, "sequence.blocks", Cost::Items(graph.jobs.len())).await?;
    let id = WorkflowId::generate();
    workflows::create(&app.engine, caller.tenant(), caller.origin(), id, graph).await?;
    let created = CreatedInstance { id: id.to_string(), deduplicated: false };
    Ok((StatusCode::CREATED, Reply(created)))
}

/// Read an instance.
#[utoipa::path(
    get, path = "/instances/{id}", tag = "instances", operation_id = "get_instance",
    params(("id" = String, Path, description = "The instance.")),
    responses(
        (status = 200, description = "The instance.", body = Instance),
        (status = 404, description = "No such instance.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<ReadPayloads>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<Instance>, Error> {
    let id: WorkflowId = params.get("id").parse().map_err(|_| Error::WorkflowNotFound)?;
    let (row, parts) = workflows::find(&app.engine, caller.project_id, id).await?;
    let data = workflows::inputs(&app.engine, caller.project_id, &[id]).await?.pop();
    let state = match workflows::state(&row, &parts) {
        WorkflowState::Running => "running",
        WorkflowState::Succeeded => "completed",
        WorkflowState::Failed => "failed",
        WorkflowState::Cancelled => "cancelled",
    };
    let step = |it: WorkflowJobRow| StepView {
        id: it.key,
        handler: it.job_type,
        state: it.state.map(|it| step_state_name(it.public())),
    };
    Ok(Reply(Instance {
        id: row.id.to_string(),
        name: row.name,
        state,
        context: InstanceContext { data: data.map(|it| stored_json(it.1)).transpose()? },
        steps: parts.into_iter().map(step).collect(),
        created_at: row.created_at,
    }))
}

fn step_state_name(state: JobState) -> &'static str {
    match state {
        JobState::Cancelled => "cancelled",
        other => super::state_name(other),
    }
}

/// The jobs of a sequence: each depends on all steps before it, so that it gets their outputs.
fn accept(tenant: Tenant, request: CreateRequest) -> Result<JobGraph, Error> {
    const DATA: &str = "context.data";
    let CreateRequest { sequence: Object(sequence), context, priority } = request;
    let mut check = Check::default();
    check.optional_name("sequence.name", sequence.name.as_deref(), limits::MAX_NAME_CHARS);
    let Object(ContextRequest { data }) = context.unwrap_or(Object(ContextRequest::default()));
    let input = templates::read_input(DATA, data.as_deref(), tenant, &mut check)?;
    let mut templates = Templates::new(&input, tenant);
    let count = sequence.blocks.len();
    if !(1..=MAX_STEPS).contains(&count) {
        let message = format!("must have 1 to {MAX_STEPS} steps, has {count}");
        check.refuse("sequence.blocks", message);
    }
    let (mut named, mut jobs) = (Vec::new(), Vec::new());
    let mut earlier: Vec<Dependency<String>> = Vec::new();
    for (place, Object(mut step)) in sequence.blocks.into_iter().take(MAX_STEPS).enumerate() {
        let mut item = Check::below(format!("sequence.blocks[{place}]."));
        let (id, fallback) = (step.id.clone(), step.fallback_handler.take());
        let mut job = accept_step(tenant, step, priority.unwrap_or(Priority::Normal), &mut item)?;
        templates.accept(&mut job, TemplateMode::Strict, &earlier, "params", &mut item);
        named.push((id.clone(), earlier.clone()));
        if let Some(handler) = fallback {
            item.name("fallback_handler", &handler, limits::MAX_JOB_TYPE_CHARS);
            if place + 1 < count {
                let message = "is supported at the last step only: use a native workflow";
                item.refuse("fallback_handler", message);
            }
            let key = format!("{id}.{FALLBACK}");
            let handled = handling(&job, handler, key.clone());
            jobs.extend([job, handled]);
            // Its params are the step's: they may name outputs of earlier steps.
            let mut parents = earlier.clone();
            parents.push(Dependency { parent: id.clone(), when: When::Failed });
            named.push((key, parents));
        } else {
            jobs.push(job);
        }
        earlier.push(Dependency::on_success(id));
        check.absorb(item);
    }
    let nodes: Vec<_> =
        named.iter().map(|(key, on): &(_, Vec<_>)| Node { key, depends_on: on }).collect();
    let parents = workflow::resolve(&nodes).unwrap_or_else(|broken| {
        // Whatever else is wrong follows from two steps with one id.
        for BrokenGraph { job, message, .. } in broken.into_iter().filter(|it| it.field == "key") {
            let place = job.unwrap_or_default().min(count.saturating_sub(1));
            check.refuse(&format!("sequence.blocks[{place}].id"), message);
        }
        Vec::new()
    });
    check.finish()?;
    let jobs =
        jobs.into_iter().map(|it| JobWithDependencies::new(it, OnConflict::Reject)).collect();
    let input = data.map(|it| Box::<str>::from(it).into_string());
    let (name, callback_url) = (sequence.name, None);
    Ok(JobGraph { name, input, callback_url, is_held: false, jobs, parents, batch: None })
}

/// The job that runs when a step has failed for good: the same work with another handler.
fn handling(step: &NewJob, handler: String, key: String) -> NewJob {
    let mut job = NewJob { id: JobId::generate(), job_type: handler, ..step.clone() };
    let extras = job.extras.get_or_insert_default();
    extras.constraint_key = constraint_key::of(&job.job_type, &[], None);
    extras.workflow_key = Some(key);
    job
}

fn accept_step(
    tenant: Tenant,
    step: StepRequest,
    priority: Priority,
    check: &mut Check,
) -> Result<NewJob, Error> {
    if step.kind != STEP {
        check.refuse("type", "must be step: for other kinds of blocks use a native workflow");
    }
    check.name("id", &step.id, limits::MAX_NAME_CHARS);
    check.name("handler", &step.handler, limits::MAX_JOB_TYPE_CHARS);
    let queue = step.queue_name.unwrap_or_else(|| DEFAULT_QUEUE.to_owned());
    check.name("queue_name", &queue, limits::MAX_QUEUE_CHARS);
    let max_ms = i64::from(limits::MAX_TIMEOUT_SECONDS) * MS_PER_SECOND;
    let timeout_ms = step.timeout.unwrap_or(i64::from(DEFAULT_TIMEOUT_SECONDS) * MS_PER_SECOND);
    check.range("timeout", timeout_ms, 1, max_ms);
    if let Some(params) = &step.params {
        check.size("params", params, tenant.limits.max_payload_bytes())?;
        check.depth("params", params);
        if !params.get().trim_start().starts_with('{') {
            check.refuse("params", "must be an object");
        }
    }
    let payload = step.params.map_or("{}".to_owned(), |it| Box::<str>::from(it).into_string());
    let max_attempts = step.retry.as_ref().map(|it| it.0.max_attempts);
    let extras = Extras {
        constraint_key: constraint_key::of(&step.handler, &[], None),
        workflow_key: Some(step.id),
        ..Extras::default()
    };
    Ok(NewJob {
        project_id: tenant.project_id,
        id: JobId::generate(),
        queue,
        job_type: step.handler,
        rank: priority.rank(),
        start: Start::After(0),
        max_attempts,
        timeout_seconds: bounded_seconds(timeout_ms),
        payload,
        retry: step.retry.map(|it| Stored(accept_retry(&it.0, check))),
        tags: None,
        extras: Some(Box::new(extras)),
    })
}

fn accept_retry(sent: &StepRetry, check: &mut Check) -> RetryPolicy {
    const MAX_MS: i64 = limits::MAX_RETRY_SECONDS * MS_PER_SECOND;
    let multiplier = sent.backoff_multiplier.unwrap_or(DEFAULT_MULTIPLIER);
    let initial_ms = sent.initial_backoff.unwrap_or(DEFAULT_BACKOFF_MS);
    let default_ms = i64::from(RetryPolicy::default().max_seconds) * MS_PER_SECOND;
    let longest_ms = sent.max_backoff.unwrap_or(initial_ms.max(default_ms));
    check.range("retry.max_attempts", sent.max_attempts, 1, limits::MAX_MAX_ATTEMPTS);
    check.range("retry.initial_backoff", initial_ms, 0, MAX_MS);
    check.range("retry.max_backoff", longest_ms, initial_ms.min(MAX_MS), MAX_MS);
    check.range("retry.backoff_multiplier", multiplier, 1.0, limits::MAX_RETRY_MULTIPLIER);
    RetryPolicy {
        strategy: RetryStrategy::Exponential,
        initial_seconds: bounded_seconds(initial_ms),
        multiplier,
        max_seconds: bounded_seconds(longest_ms),
        jitter: JitterKind::Additive,
        jitter_seconds: 0,
        non_retryable_types: Vec::new(),
    }
}

/// Values out of bounds were refused before.
fn bounded_seconds<T: TryFrom<i64> + Default>(ms: i64) -> T {
    T::try_from(whole_seconds(ms)).unwrap_or_default()
}
