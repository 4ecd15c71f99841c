//! Storing workflows.

use axum::{Json as Reply, extract::State, http::StatusCode};
use fencepost_domain::{
    backoff::{JitterKind, RetryPolicy, RetryStrategy},
    constraint_key,
    dependency::Dependency,
    error::Error,
    ids::{JobId, WorkflowId},
    job::DEFAULT_QUEUE,
    limits,
    plan::Tenant,
    workflow::{self, BrokenGraph, Node},
};
use fencepost_engine::{
    enqueue::{
        Extras, NewJob, Start,
        dependencies::{JobWithDependencies, OnConflict},
    },
    jobs::workflows::{self, JobGraph},
};
use fencepost_web::{
    app::App,
    auth::{Caller, Cost, Produce},
    wire::{
        extract::{Json, RequestBody},
        openapi::{chars, items, range},
        validate::Check,
    },
};
use serde::Deserialize;
use serde_json::value::RawValue;
use sqlx::types::Json as Stored;
use utoipa::ToSchema;

use super::workflows::{Envelope, StoredEnvelope, Workflow, view};

/// The type of jobs created here.
const JOB_TYPE: &str = "command";

/// A workflow to store.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CreateRequest {
    /// Display name.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_NAME_CHARS)))))]
    name: String,
    /// Trigger; for people.
    #[schema(extensions(("bounds" = json!(chars(0, limits::MAX_NAME_CHARS)))))]
    trigger: Option<String>,
    /// 1 to 500 jobs.
    #[schema(min_items = 1, max_items = 500)]
    jobs: Vec<JobRequest>,
}

impl RequestBody for CreateRequest {
    const MAX_BYTES: usize = limits::MAX_BATCH_BODY_BYTES;
}

/// A job of a workflow.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct JobRequest {
    /// Key, unique in the workflow.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_NAME_CHARS)))))]
    id: String,
    /// Display name. Default: its id.
    #[schema(extensions(("bounds" = json!(chars(0, limits::MAX_NAME_CHARS)))))]
    name: Option<String>,
    /// Command to run.
    command: String,
    /// Ids of its parents.
    #[serde(default)]
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_PARENTS)))))]
    depends_on: Vec<String>,
    /// Labels that its worker must have.
    #[serde(default)]
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_LABELS)))))]
    required_labels: Vec<String>,
    /// Number of immediate retries.
    #[serde(default)]
    #[schema(extensions(("bounds" = json!(range(0, limits::MAX_MAX_ATTEMPTS - 1)))))]
    max_retries: i32,
    /// Kept as it is.
    #[schema(value_type = Option<Object>)]
    metadata: Option<Box<RawValue>>,
    /// Kept as it is.
    #[schema(value_type = Option<Vec<serde_json::Value>>)]
    ports: Option<Box<RawValue>>,
}

/// Store a workflow. It waits until it is run.
#[utoipa::path(
    post, path = "/api/workflows", tag = "workflows", operation_id = "create_workflow",
    request_body = CreateRequest,
    responses((status = 201, description = "Stored.", body = Workflow)),
)]
pub async fn create(
    caller: Caller<Produce>,
    State(app): State<App>,
    Json(request): Json<CreateRequest>,
) -> Result<(StatusCode, Reply<Workflow>), Error> {
    let id = store(&app, &caller, request).await?;
    Ok((StatusCode::CREATED, Reply(view(&app, caller.project_id, id).await?)))
}

/// Store a sample workflow: a build, its tests, and a step after both.
#[utoipa::path(
    post, path = "/api/workflows/sample", tag = "workflows", operation_id = "create_sample_workflow",
    responses((status = 201, description = "Stored.", body = Workflow)),
)]
pub async fn sample(
    caller: Caller<Produce>,
    State(app): State<App>,
) -> Result<(StatusCode, Reply<Workflow>), Error> {
    let job = |id: &str, command: &str, depends_on: &[&str]| JobRequest {
        id: id.to_owned(),
        name: None,
        command: command.to_owned(),
        depends_on: depends_on.iter().map(|it| (*it).to_owned()).collect(),
        required_labels: Vec::new(),
        max_retries: 0,
        metadata: None,
        ports: None,
    };
    let request = CreateRequest {
        name: "sample".to_owned(),
        trigger: None,
        jobs: vec![
            job("build", "echo building", &[]),
            job("unit-tests", "echo testing", &["build"]),
            job("lint", "echo linting", &["build"]),
            job("deploy", "echo deploying", &["unit-tests", "lint"]),
        ],
    };
    let id = store(&app, &caller, request).await?;
    Ok((StatusCode::CREATED, Reply(view(&app, caller.project_id, id).await?)))
}

async fn store(
    app: &App,
    caller: &Caller<Produce>,
    request: CreateRequest,
) -> Result<WorkflowId, Error> {
    let tenant = caller.tenant();
    let mut check = Check::default();
    check.name("name", &request.name, limits::MAX_NAME_CHARS);
    check.optional_name("trigger", request.trigger.as_deref(), limits::MAX_NAME_CHARS);
    let named = |it: &JobRequest| {
        let parents = it.depends_on.iter().cloned().map(Dependency::on_success);
        (it.id.clone(), parents.collect::<Vec<_>>())
    };
    let named: Vec<_> = request.jobs.iter().map(named).collect();
    let nodes: Vec<_> = named.iter().map(|(key, on)| Node { key, depends_on: on }).collect();
    let parents = workflow::resolve(&nodes).unwrap_or_else(|broken| {
        for BrokenGraph { job, field, message } in broken {
            let field = if field == "key" { "id".to_owned() } else { field };
            let path = job.map_or_else(String::new, |it| format!("jobs[{it}]."));
            check.refuse(&format!("{path}{field}"), message);
        }
        Vec::new()
    });
    let mut jobs = Vec::new();
    for (place, job) in request.jobs.into_iter().take(limits::MAX_WORKFLOW_JOBS).enumerate() {
        let mut item = Check::below(format!("jobs[{place}]."));
        jobs.push(accept(tenant, job, request.trigger.clone(), &mut item)?);
        check.absorb(item);
    }
    check.finish()?;
    caller.charge(app, "jobs", Cost::Items(jobs.len())).await?;
    let id = WorkflowId::generate();
    let graph = JobGraph {
        name: Some(request.name),
        input: None,
        callback_url: None,
        is_held: true,
        jobs,
        parents,
        batch: None,
        start: None,
    };
    workflows::create(&app.engine, tenant, caller.origin(), id, graph).await?;
    Ok(id)
}

fn accept(
    tenant: Tenant,
    request: JobRequest,
    trigger: Option<String>,
    check: &mut Check,
) -> Result<JobWithDependencies, Error> {
    check.name("id", &request.id, limits::MAX_NAME_CHARS);
    let name = request.name.filter(|it| !it.is_empty());
    check.optional_name("name", name.as_deref(), limits::MAX_NAME_CHARS);
    if request.command.contains('\0') {
        check.refuse("command", "must not contain U+0000: no shell accepts it");
    }
    check.range("max_retries", request.max_retries, 0, limits::MAX_MAX_ATTEMPTS - 1);
    let mut labels = request.required_labels;
    check.names("required_labels", &labels, limits::MAX_LABELS, limits::MAX_LABEL_CHARS);
    labels.sort();
    labels.dedup();
    let payload = serde_json::json!({ "command": request.command }).to_string();
    check.bytes("command", payload.len(), tenant.limits.max_payload_bytes())?;
    for (field, value) in [("metadata", &request.metadata), ("ports", &request.ports)] {
        if let Some(value) = value {
            check.size(field, value, limits::MAX_EVENT_PAYLOAD_BYTES)?;
            check.depth(field, value);
        }
    }
    let (metadata, ports) = (request.metadata, request.ports);
    let envelope = StoredEnvelope { workflow_graph: Envelope { name, trigger, metadata, ports } };
    let extras = Extras {
        constraint_key: constraint_key::of(JOB_TYPE, &labels, None),
        labels,
        workflow_key: Some(request.id),
        envelope: Some(serde_json::to_string(&envelope).map_err(Error::internal)?),
        ..Extras::default()
    };
    let at_once = RetryPolicy {
        strategy: RetryStrategy::Constant,
        initial_seconds: 0,
        multiplier: 1.0,
        max_seconds: 0,
        jitter: JitterKind::Additive,
        jitter_seconds: 0,
        non_retryable_types: Vec::new(),
    };
    let job = NewJob {
        project_id: tenant.project_id,
        id: JobId::generate(),
        queue: DEFAULT_QUEUE.to_owned(),
        job_type: JOB_TYPE.to_owned(),
        rank: 0,
        start: Start::After(0),
        max_attempts: Some(request.max_retries.saturating_add(1)),
        timeout_seconds: limits::MAX_TIMEOUT_SECONDS,
        payload,
        retry: Some(Stored(at_once)),
        tags: None,
        extras: Some(Box::new(extras)),
    };
    Ok(JobWithDependencies::new(job, OnConflict::Reject))
}
