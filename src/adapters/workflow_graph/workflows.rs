//! Workflows: storing them, running them, looking at them.

use std::collections::HashMap;

use axum::{Json as Reply, extract::State, http::StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sqlx::types::Json as Stored;
use utoipa::{IntoParams, ToSchema};

use super::{ErrorBody, Status};
use crate::{
    adapters::door::{DEFAULT_QUEUE, Names},
    app::App,
    auth::{Caller, Control, Produce, Read},
    domain::{
        backoff::{RetryPolicy, Strategy},
        gate, limits,
        plan::Limits,
        workflow::{self, BrokenGraph, Node},
    },
    engine::{
        control,
        enqueue::{Extras, NewJob, Start},
        family::{self, OnConflict, TiedJob},
        jobs::{self, JobRow},
        quota,
        settle::JobKey,
        workflows::{self, NewWorkflow, WorkflowJobRow, WorkflowRow},
    },
    error::Error,
    ids::{JobId, ProjectId, WorkflowId},
    wire::{
        check::Check,
        extract::{Json, Query, RequestBody},
    },
};

/// The type of jobs that are made here.
const JOB_TYPE: &str = "command";
/// What started a workflow that does not say.
const DEFAULT_TRIGGER: &str = "manual";

/// A workflow to store.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CreateRequest {
    /// For people.
    #[schema(min_length = 1, max_length = 100)]
    name: String,
    /// What starts it; for people.
    #[schema(max_length = 100)]
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
    /// Its key, unique in the workflow.
    #[schema(min_length = 1, max_length = 100)]
    id: String,
    /// For people. Default: its id.
    #[schema(max_length = 100)]
    name: Option<String>,
    /// What to run.
    command: String,
    /// The ids of the jobs it waits for.
    #[serde(default)]
    #[schema(max_items = 100)]
    depends_on: Vec<String>,
    /// What its worker must have.
    #[serde(default)]
    #[schema(max_items = 16)]
    required_labels: Vec<String>,
    /// How often it is tried again, at once.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 99)]
    max_retries: i32,
    /// Kept as it is.
    #[schema(value_type = Option<Object>)]
    metadata: Option<Box<RawValue>>,
    /// Kept as it is.
    #[schema(value_type = Option<Vec<serde_json::Value>>)]
    ports: Option<Box<RawValue>>,
}

/// What only this wire knows of a job.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Envelope {
    name: Option<String>,
    trigger: Option<String>,
    metadata: Option<Box<RawValue>>,
    ports: Option<Box<RawValue>>,
}

/// A workflow.
#[derive(Debug, Serialize, ToSchema)]
pub struct Workflow {
    id: String,
    name: String,
    trigger: String,
    jobs: Vec<Job>,
}

/// A job of a workflow.
#[derive(Debug, Serialize, ToSchema)]
pub struct Job {
    id: String,
    name: String,
    status: Status,
    command: String,
    depends_on: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    duration_secs: Option<i64>,
    /// In milliseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    started_at: Option<i64>,
    /// What it has made: JSON as text.
    #[serde(skip_serializing_if = "Option::is_none")]
    output: Option<String>,
    required_labels: Vec<String>,
    max_retries: i32,
    /// Counted from 0.
    attempt: i32,
    #[schema(value_type = Object)]
    metadata: Box<RawValue>,
    #[schema(value_type = Vec<serde_json::Value>)]
    ports: Box<RawValue>,
    collapsed: bool,
}

impl Job {
    fn of(part: &WorkflowJobRow, row: Option<&JobRow>, envelope: &Envelope) -> Self {
        let raw = |it: &Option<Box<RawValue>>, or: &'static str| {
            it.clone().or_else(|| RawValue::from_string(or.to_owned()).ok()).unwrap_or_default()
        };
        let claimed_at = row.and_then(|it| it.claimed_at);
        let completed_at = row.and_then(|it| it.completed_at);
        let took = completed_at.zip(claimed_at).map(|(end, start)| (end - start).num_seconds());
        let attempt = row.map_or(0, |it| it.attempt);
        Self {
            id: part.key.clone(),
            name: envelope.name.clone().unwrap_or_else(|| part.key.clone()),
            // A job that was pruned has ended long ago.
            status: part.state.map_or(Status::Success, |it| Status::of(it.public())),
            command: row.and_then(|it| super::command(&it.payload)).unwrap_or_default(),
            depends_on: part.depends_on.clone(),
            duration_secs: took,
            started_at: claimed_at.map(|it| it.timestamp_millis()),
            output: row.and_then(|it| it.result.clone()),
            required_labels: row.and_then(|it| it.labels.clone()).unwrap_or_default(),
            max_retries: row.map_or(0, |it| it.max_attempts - 1),
            attempt: (attempt - 1).max(0),
            metadata: raw(&envelope.metadata, "{}"),
            ports: raw(&envelope.ports, "[]"),
            collapsed: false,
        }
    }
}

/// A job that was called off because one that it waited for was given up has been skipped.
fn mark_skipped(jobs: &mut [Job]) {
    loop {
        let bad = |it: &Job| matches!(it.status, Status::Failure | Status::Skipped);
        let bad: Vec<_> = jobs.iter().filter(|it| bad(it)).map(|it| it.id.clone()).collect();
        let follows = |it: &Job| {
            it.status == Status::Cancelled && it.depends_on.iter().any(|it| bad.contains(it))
        };
        let Some(job) = jobs.iter_mut().find(|it| follows(it)) else { return };
        job.status = Status::Skipped;
    }
}

async fn view(app: &App, project_id: ProjectId, id: WorkflowId) -> Result<Workflow, Error> {
    let (row, parts) = workflows::find_latest(&app.engine, project_id, id).await?;
    let ids: Vec<_> = parts.iter().map(|it| it.id).collect();
    let rows = jobs::find_all(&app.engine, project_id, &ids).await?;
    let rows: HashMap<_, _> = rows.into_iter().map(|it| (it.id, it)).collect();
    Ok(show(id.to_string(), row.name, &parts, &rows))
}

fn show(
    id: String,
    name: Option<String>,
    parts: &[WorkflowJobRow],
    rows: &HashMap<JobId, JobRow>,
) -> Workflow {
    let mut trigger = None;
    let job = |it: &WorkflowJobRow| {
        let row = rows.get(&it.id);
        let kept = row.and_then(|it| it.envelope.as_deref());
        let envelope: Envelope =
            kept.and_then(|it| serde_json::from_str(it).ok()).unwrap_or_default();
        trigger = trigger.take().or(envelope.trigger.clone());
        Job::of(it, row, &envelope)
    };
    let mut jobs: Vec<_> = parts.iter().map(job).collect();
    mark_skipped(&mut jobs);
    let trigger = trigger.unwrap_or_else(|| DEFAULT_TRIGGER.to_owned());
    Workflow { name: name.unwrap_or_else(|| id.clone()), id, trigger, jobs }
}

/// Store a workflow. It waits until it is run.
#[utoipa::path(
    post, path = "/api/workflows", tag = "workflows", operation_id = "create_workflow",
    request_body = CreateRequest,
    responses((status = 201, description = "It is stored.", body = Workflow)),
)]
pub async fn create(
    caller: Caller<Produce>,
    State(app): State<App>,
    Json(request): Json<CreateRequest>,
) -> Result<(StatusCode, Reply<Workflow>), Error> {
    let id = store(&app, (caller.project_id, &caller.limits), request).await?;
    Ok((StatusCode::CREATED, Reply(view(&app, caller.project_id, id).await?)))
}

/// Store a workflow to try things with: a build, its tests, and what comes after both.
#[utoipa::path(
    post, path = "/api/workflows/sample", tag = "workflows", operation_id = "create_sample_workflow",
    responses((status = 201, description = "It is stored.", body = Workflow)),
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
    let id = store(&app, (caller.project_id, &caller.limits), request).await?;
    Ok((StatusCode::CREATED, Reply(view(&app, caller.project_id, id).await?)))
}

async fn store(
    app: &App,
    (project_id, plan): (ProjectId, &Limits),
    request: CreateRequest,
) -> Result<WorkflowId, Error> {
    let mut check = Check::default();
    check.name("name", &request.name, limits::MAX_NAME_CHARS);
    check.optional_name("trigger", request.trigger.as_deref(), limits::MAX_NAME_CHARS);
    let named = |it: &JobRequest| (it.id.clone(), it.depends_on.clone());
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
        jobs.push(accept((project_id, plan), job, request.trigger.clone(), &mut item)?);
        check.absorb(item);
    }
    check.finish()?;
    quota::admit(&app.engine, project_id, jobs.len(), plan.waiting_jobs).await?;
    let mut workflow = NewWorkflow {
        id: WorkflowId::generate(),
        name: Some(request.name),
        edges: Vec::new(),
        is_held: true,
        rerun: None,
    };
    workflows::tie(&mut workflow, &mut jobs, &parents);
    family::store(&app.engine, project_id, &jobs, Some(&workflow)).await?;
    Ok(workflow.id)
}

fn accept(
    (project_id, plan): (ProjectId, &Limits),
    request: JobRequest,
    trigger: Option<String>,
    check: &mut Check,
) -> Result<TiedJob, Error> {
    check.name("id", &request.id, limits::MAX_NAME_CHARS);
    check.optional_name("name", request.name.as_deref(), limits::MAX_NAME_CHARS);
    check.range("max_retries", request.max_retries, 0, limits::MAX_MAX_ATTEMPTS - 1);
    let mut labels = request.required_labels;
    check.names("required_labels", &labels, limits::MAX_LABELS, limits::MAX_LABEL_CHARS);
    labels.sort();
    labels.dedup();
    let payload = serde_json::json!({ "command": request.command }).to_string();
    let limit_bytes = plan.max_payload_bytes();
    if payload.len() > limit_bytes {
        let field = format!("{}command", check.path());
        return Err(Error::FieldTooLarge { field, limit_bytes });
    }
    for (field, value) in [("metadata", &request.metadata), ("ports", &request.ports)] {
        if let Some(value) = value {
            check.size(field, value, limits::MAX_EVENT_PAYLOAD_BYTES)?;
            check.depth(field, value);
        }
    }
    let envelope =
        Envelope { name: request.name, trigger, metadata: request.metadata, ports: request.ports };
    let extras = Extras {
        gate: gate::gate(JOB_TYPE, &labels, None),
        labels,
        workflow_key: Some(request.id),
        envelope: Some(serde_json::to_string(&envelope).map_err(Error::internal)?),
        ..Extras::default()
    };
    let at_once = RetryPolicy {
        strategy: Strategy::Constant,
        initial_seconds: 0,
        multiplier: 1.0,
        max_seconds: 0,
        jitter_seconds: 0,
        non_retryable_types: Vec::new(),
    };
    let job = NewJob {
        project_id,
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
    Ok(TiedJob::new(job, OnConflict::Reject))
}

/// Which workflows to list.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ListQuery {
    /// Workflows of a page; no more than 100 are given. Default: 100.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<i64>,
    /// Workflows to pass over.
    #[param(minimum = 0, maximum = 10_000)]
    offset: Option<i64>,
    /// Only workflows with a job of this status, among those of the page.
    status: Option<String>,
}

/// List workflows, newest first.
#[utoipa::path(
    get, path = "/api/workflows", tag = "workflows", operation_id = "list_workflows",
    params(ListQuery),
    responses((status = 200, description = "A page of workflows.", body = Vec<Workflow>)),
)]
pub async fn list(
    caller: Caller<Read>,
    State(app): State<App>,
    Query(query): Query<ListQuery>,
) -> Result<Reply<Vec<Workflow>>, Error> {
    const MAX_ASKED: i64 = 1_000;
    const MAX_GIVEN: i64 = 100;
    const MAX_OFFSET: i64 = 10_000;
    let (limit, offset) = (query.limit.unwrap_or(MAX_GIVEN), query.offset.unwrap_or(0));
    let mut check = Check::default();
    check.range("limit", limit, 1, MAX_ASKED);
    check.range("offset", offset, 0, MAX_OFFSET);
    check.finish()?;
    let project_id = caller.project_id;
    let rows = workflows::page(&app.engine, project_id, limit.min(MAX_GIVEN), offset).await?;
    let mut found = Vec::with_capacity(rows.len());
    for WorkflowRow { id, .. } in rows {
        let workflow = view(&app, project_id, id).await?;
        let has = |status: &String| {
            let name = |it: &Job| serde_json::to_value(it.status).unwrap_or_default();
            workflow.jobs.iter().any(|it| name(it) == status.as_str())
        };
        if query.status.as_ref().is_none_or(has) {
            found.push(workflow);
        }
    }
    Ok(Reply(found))
}

/// What a path names: a workflow, or a job that is in none.
enum Named {
    Workflow(WorkflowId),
    Job(JobId),
}

impl Named {
    fn of(names: &Names) -> Result<Self, Error> {
        let name = names.get("id");
        let job = || name.parse().map(Self::Job).map_err(|_| Error::WorkflowNotFound);
        name.parse().map(Self::Workflow).or_else(|_| job())
    }
}

/// Read a workflow.
#[utoipa::path(
    get, path = "/api/workflows/{id}/status", tag = "workflows", operation_id = "workflow_status",
    params(("id" = String, Path, description = "The workflow; or a job that is in none.")),
    responses(
        (status = 200, description = "The workflow, as its last run made it.", body = Workflow),
        (status = 404, description = "No such workflow.", body = ErrorBody),
    ),
)]
pub async fn status(
    caller: Caller<Read>,
    State(app): State<App>,
    names: Names,
) -> Result<Reply<Workflow>, Error> {
    let id = match Named::of(&names)? {
        Named::Workflow(id) => return view(&app, caller.project_id, id).await.map(Reply),
        Named::Job(id) => id,
    };
    let row = jobs::find(&app.engine, JobKey { project_id: caller.project_id, id }).await?;
    let (key, job_type) = (row.id.to_string(), row.job_type.clone());
    let part = WorkflowJobRow {
        key: key.clone(),
        id,
        state: Some(row.state),
        job_type: Some(job_type.clone()),
        attempt: Some(row.attempt),
        completed_at: row.completed_at,
        depends_on: Vec::new(),
    };
    let rows = HashMap::from([(id, row)]);
    Ok(Reply(show(key, Some(job_type), &[part], &rows)))
}

/// Run a workflow, for the first time or again. One that runs is left alone.
#[utoipa::path(
    post, path = "/api/workflows/{id}/run", tag = "workflows", operation_id = "run_workflow",
    params(("id" = String, Path, description = "The workflow.")),
    responses(
        (status = 202, description = "It runs."),
        (status = 404, description = "No such workflow.", body = ErrorBody),
    ),
)]
pub async fn run(
    caller: Caller<Produce>,
    State(app): State<App>,
    names: Names,
) -> Result<StatusCode, Error> {
    let Named::Workflow(id) = Named::of(&names)? else { return Err(Error::WorkflowNotFound) };
    workflows::run(&app.engine, caller.project_id, id).await?;
    Ok(StatusCode::ACCEPTED)
}

/// Call a workflow off.
#[utoipa::path(
    post, path = "/api/workflows/{id}/cancel", tag = "workflows", operation_id = "cancel_workflow",
    params(("id" = String, Path, description = "The workflow; or a job that is in none.")),
    responses(
        (status = 202, description = "What waits is called off; what runs is told to stop."),
        (status = 404, description = "No such workflow.", body = ErrorBody),
    ),
)]
pub async fn cancel(
    caller: Caller<Control>,
    State(app): State<App>,
    names: Names,
) -> Result<StatusCode, Error> {
    let project_id = caller.project_id;
    match Named::of(&names)? {
        Named::Workflow(id) => {
            let (latest, _) = workflows::find_latest(&app.engine, project_id, id).await?;
            workflows::cancel(&app.engine, project_id, latest.id).await?;
        }
        Named::Job(id) => match control::cancel(&app.engine, JobKey { project_id, id }).await {
            // It has ended: there is nothing to call off.
            Ok(()) | Err(Error::InvalidState(_)) => (),
            Err(error) => return Err(error),
        },
    }
    Ok(StatusCode::ACCEPTED)
}
