//! Workflows: a chain, a group, a batch with callbacks, or steps with dependencies.

use axum::{extract::State, http::StatusCode};
use fencepost_domain::{
    callbacks::Callbacks,
    dependency::Dependency,
    error::{Error, JobStatus},
    ids::{BatchId, JobKey, ProjectId, WorkflowId},
    job::StoredState,
    limits,
    plan::Tenant,
    workflow::{self, BrokenGraph, Node, WorkflowState},
};
use fencepost_engine::{
    batches::NewBatch,
    enqueue::{self, Extras, Start},
    jobs::{
        self,
        workflows::{self, JobGraph, WorkflowJobRow, WorkflowRow},
    },
};
use fencepost_web::{
    app::App,
    auth::{Caller, Control, Cost, Produce, ReadPayloads},
    wire::{extract::Json, validate::Check},
};
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use super::{
    ErrorBody, Reply,
    accept::{Accepted, accept},
    fields::{Fields, LargeFields, StoredEnvelope, time},
    jobs::{cancel_waiting, set_expiries},
    state_name,
};
use crate::params::PathParams;

/// Where the kind of a workflow is stored: in the envelopes of its jobs.
const KIND_FIELD: &str = "x_workflow_type";
/// The kind of a workflow that is none of the protocol's.
const GRAPH: &str = "graph";

/// One workflow, twice: the HTTP binding has it in a field, and some clients read it at the top.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OjsWorkflowReply)]
pub struct WorkflowReply {
    workflow: WorkflowView,
    #[serde(flatten)]
    at_top: WorkflowView,
}

impl WorkflowReply {
    fn of(workflow: WorkflowView) -> Self {
        Self { at_top: workflow.clone(), workflow }
    }
}

/// A workflow.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = OjsWorkflow)]
pub struct WorkflowView {
    id: String,
    name: Option<String>,
    /// `chain`, `group`, `batch`, or `graph`.
    #[serde(rename = "type")]
    kind: String,
    /// `running`, `completed`, `failed` or `cancelled`.
    state: &'static str,
    steps_total: usize,
    steps_completed: usize,
    jobs_total: usize,
    jobs_completed: usize,
    steps: Vec<StepView>,
    created_at: String,
    metadata: WorkflowCounts,
}

/// Counts of a workflow's jobs, as the libraries name them.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = OjsWorkflowCounts)]
struct WorkflowCounts {
    job_count: usize,
    completed_count: usize,
    failed_count: usize,
    created_at: String,
}

/// A job of a workflow.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = OjsWorkflowStep)]
pub struct StepView {
    id: String,
    #[serde(rename = "type")]
    job_type: Option<String>,
    state: Option<&'static str>,
    job_id: String,
    depends_on: Vec<String>,
}

/// A workflow's state in this protocol's words.
fn workflow_state_name(state: WorkflowState) -> &'static str {
    match state {
        WorkflowState::Running => "running",
        WorkflowState::Succeeded => "completed",
        WorkflowState::Failed => "failed",
        WorkflowState::Cancelled => "cancelled",
    }
}

impl WorkflowView {
    fn of(row: &WorkflowRow, kind: String, parts: Vec<WorkflowJobRow>) -> Self {
        let state = workflow_state_name(workflows::state(row, &parts));
        let is_done = |it: &&WorkflowJobRow| it.state == Some(StoredState::Succeeded);
        let total = parts.len();
        let completed = parts.iter().filter(is_done).count();
        let is_dead = |it: &&WorkflowJobRow| it.state == Some(StoredState::DeadLetter);
        let created_at = time(row.created_at);
        let metadata = WorkflowCounts {
            job_count: total,
            completed_count: completed,
            failed_count: parts.iter().filter(is_dead).count(),
            created_at: created_at.clone(),
        };
        let step = |it: WorkflowJobRow| StepView {
            state: it.state.map(|state| state_name(state, i32::from(!it.depends_on.is_empty()))),
            id: it.key,
            job_type: it.job_type,
            job_id: it.id.0.to_string(),
            depends_on: it.depends_on,
        };
        Self {
            id: row.id.0.to_string(),
            name: row.name.clone(),
            kind,
            state,
            steps_total: total,
            steps_completed: completed,
            jobs_total: total,
            jobs_completed: completed,
            steps: parts.into_iter().map(step).collect(),
            created_at,
            metadata,
        }
    }
}

async fn find(app: &App, project_id: ProjectId, id: WorkflowId) -> Result<WorkflowView, Error> {
    let (row, parts) = workflows::find(&app.engine, project_id, id).await?;
    let first = parts.first().map(|it| it.id);
    let first = jobs::find_all(&app.engine, project_id, first.as_slice()).await?;
    let envelope = first.first().and_then(|it| it.envelope.as_deref());
    let kind = StoredEnvelope::read(envelope).take(KIND_FIELD, &mut Check::default());
    Ok(WorkflowView::of(&row, kind.unwrap_or_else(|| GRAPH.to_owned()), parts))
}

/// The jobs of a request: each with its key, its path, and the keys of its parents.
struct Step {
    key: String,
    path: String,
    depends_on: Vec<Dependency<String>>,
    job: Fields,
}

/// Reads the kind, the steps, and the jobs that the end enqueues.
fn read_steps(
    tenant: Tenant,
    mut sent: Fields,
    check: &mut Check,
) -> Result<(String, Vec<Step>, Callbacks), Error> {
    // As answers call it: steps that name what they wait for.
    let kind = sent.take("type", check).filter(|it: &String| it != GRAPH);
    let (field, is_chain) = match kind.as_deref() {
        Some("group" | "batch") => ("jobs", false),
        Some("chain") => ("steps", true),
        None => ("steps", false),
        Some(_) => {
            check.refuse("type", "must be chain, group, batch or graph");
            ("steps", false)
        }
    };
    let jobs: Vec<Fields> = sent.need(field, check).unwrap_or_default();
    let mut steps: Vec<Step> = Vec::with_capacity(jobs.len());
    for (index, mut job) in jobs.into_iter().enumerate() {
        let path = format!("{field}[{index}].");
        let mut item = Check::below(path.clone());
        let given = job.take("id", &mut item).filter(|_| kind.is_none());
        let depends_on: Vec<String> = job.take("depends_on", &mut item).unwrap_or_default();
        let depends_on = depends_on.into_iter().map(Dependency::on_success).collect();
        check.absorb(item);
        let before = steps.last().filter(|_| is_chain);
        let before = before.map(|it| vec![Dependency::on_success(it.key.clone())]);
        let key = given.unwrap_or_else(|| index.to_string());
        steps.push(Step { key, path, depends_on: before.unwrap_or(depends_on), job });
    }
    let mut inner = Check::below("callbacks.");
    let mut sent_callbacks: Fields = sent.take("callbacks", check).unwrap_or_default();
    let mut one = |name: &str| -> Result<_, Error> {
        let Some(job) = sent_callbacks.take(name, &mut inner) else { return Ok(None) };
        let mut item = Check::below(format!("callbacks.{name}."));
        let accepted = accept(tenant, job, &mut item)?;
        let entry = &accepted.entry;
        let extras = entry.job.extras.as_ref();
        let out_of_place = [
            ("id", entry.is_id_given),
            ("options.unique", extras.is_some_and(|it| it.unique_key.is_some())),
            (
                "options.expires_at",
                accepted.expires_after_ms.is_some()
                    || extras.is_some_and(|it| it.expires_at.is_some()),
            ),
            ("options.delay_until", entry.job.start != Start::After(0)),
            ("options.rate_limit", accepted.max_per_second.is_some()),
        ];
        for (field, _) in out_of_place.into_iter().filter(|it| it.1) {
            item.refuse(field, "is not allowed for a callback");
        }
        inner.absorb(item);
        Ok(Some(Box::new(enqueue::callback(accepted.entry.job))))
    };
    let callbacks = Callbacks {
        url: None,
        on_success: one("on_success")?,
        on_failure: one("on_failure")?,
        on_complete: one("on_complete")?,
    };
    for unknown in sent_callbacks.0.keys() {
        inner.refuse(unknown, "must be on_success, on_failure or on_complete");
    }
    check.absorb(inner);
    Ok((kind.unwrap_or_else(|| GRAPH.to_owned()), steps, callbacks))
}

/// Create a workflow.
#[utoipa::path(
    post, path = "/v1/workflows", tag = "workflows", operation_id = "create_workflow",
    request_body(content = Object, description = "`type` chain with `steps`, or group or batch with `jobs`; or `steps` with `id` and `depends_on`."),
    responses(
        (status = 201, description = "The workflow is stored and started.", body = WorkflowReply),
        (status = 422, description = "A retry policy is invalid.", body = ErrorBody),
    ),
)]
pub async fn create(
    caller: Caller<Produce>,
    State(app): State<App>,
    Json(LargeFields(mut sent)): Json<LargeFields>,
) -> Result<Reply<WorkflowReply>, Error> {
    let tenant = caller.tenant();
    let mut check = Check::default();
    let name = sent.take("name", &mut check).filter(|it: &String| !it.is_empty());
    check.optional_name("name", name.as_deref(), limits::MAX_NAME_CHARS);
    let (kind, steps, callbacks) = read_steps(tenant, sent, &mut check)?;
    let named = |it: &Step| (it.key.clone(), it.depends_on.clone());
    let named: Vec<_> = steps.iter().map(named).collect();
    let nodes: Vec<_> = named.iter().map(|(key, on)| Node { key, depends_on: on }).collect();
    let parents = workflow::resolve(&nodes).unwrap_or_else(|broken| {
        for BrokenGraph { job, field, message } in broken {
            let path = job.and_then(|it| Some(steps.get(it)?.path.as_str())).unwrap_or_default();
            check.refuse(&format!("{path}{field}"), message);
        }
        Vec::new()
    });
    let mut all = Vec::with_capacity(steps.len());
    for step in steps.into_iter().take(limits::MAX_WORKFLOW_JOBS) {
        all.push(accept_step(tenant, step, &kind, &mut check)?);
    }
    check.finish()?;
    let count = all.len() + callbacks.count();
    caller.charge(&app, "steps", Cost::Items(count)).await?;
    set_expiries(&app, &mut all).await?;
    let mut jobs: Vec<_> = all.into_iter().map(|it| it.entry).collect();
    let id = WorkflowId::generate();
    let Extras { callbacks, callback_count, .. } = Extras::default().with_callbacks(&callbacks);
    let batch = callbacks.map(|it| NewBatch {
        id: BatchId(id.0),
        name: name.clone(),
        callbacks: Some(it),
        is_sealed: true,
        // Its jobs say it.
        hop: None,
    });
    for job in &mut jobs {
        job.job.extras.get_or_insert_default().batch_id = batch.as_ref().map(|it| it.id);
    }
    if let Some(first) = jobs.first_mut() {
        // For the quota.
        first.job.extras.get_or_insert_default().callback_count = callback_count;
    }
    let callback_url = None;
    let (input, start, is_held) = (None, None, false);
    let graph = JobGraph { name, input, callback_url, is_held, jobs, parents, batch, start };
    workflows::create(&app.engine, tenant, caller.origin(), id, graph).await?;
    let workflow = find(&app, tenant.project_id, id).await?;
    Ok(Reply(StatusCode::CREATED, WorkflowReply::of(workflow)))
}

fn accept_step(
    tenant: Tenant,
    step: Step,
    kind: &str,
    check: &mut Check,
) -> Result<Accepted, Error> {
    let Step { key, path, mut job, .. } = step;
    let mut item = Check::below(path);
    item.name("id", &key, limits::MAX_NAME_CHARS);
    let shown = serde_json::to_string(kind).map_err(Error::internal)?;
    let shown = RawValue::from_string(shown).map_err(Error::internal)?;
    job.0.insert(KIND_FIELD.to_owned(), shown);
    let mut accepted = accept(tenant, job, &mut item)?;
    let extras = accepted.entry.job.extras.get_or_insert_default();
    if extras.unique_key.is_some() {
        item.refuse("options.unique", "is not allowed for a job of a workflow");
    }
    extras.workflow_key = Some(key);
    if accepted.max_per_second.is_some() {
        item.refuse("options.rate_limit", "is not allowed for a job of a workflow");
    }
    check.absorb(item);
    Ok(accepted)
}

fn workflow_id(params: &PathParams) -> Result<WorkflowId, Error> {
    params.get("id").parse::<Uuid>().map(WorkflowId).map_err(|_| Error::WorkflowNotFound)
}

/// Read a workflow.
#[utoipa::path(
    get, path = "/v1/workflows/{id}", tag = "workflows", operation_id = "get_workflow",
    params(("id" = String, Path, description = "The workflow.")),
    responses(
        (status = 200, description = "The workflow.", body = WorkflowReply),
        (status = 404, description = "No such workflow.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<ReadPayloads>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<WorkflowReply>, Error> {
    let workflow = find(&app, caller.project_id, workflow_id(&params)?).await?;
    Ok(Reply::ok(WorkflowReply::of(workflow)))
}

/// Cancel a workflow: every job of it that has not ended.
#[utoipa::path(
    delete, path = "/v1/workflows/{id}", tag = "workflows", operation_id = "cancel_workflow",
    params(("id" = String, Path, description = "The workflow.")),
    responses(
        (status = 200, description = "The workflow, cancelled.", body = WorkflowReply),
        (status = 404, description = "No such workflow.", body = ErrorBody),
        (status = 409, description = "It has ended.", body = ErrorBody),
    ),
)]
pub async fn cancel(
    caller: Caller<Control>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<WorkflowReply>, Error> {
    let (project_id, id) = (caller.project_id, workflow_id(&params)?);
    let (row, parts) = workflows::find(&app.engine, project_id, id).await?;
    let is_running = |it: &WorkflowJobRow| it.state == Some(StoredState::Processing);
    if workflows::state(&row, &parts) != WorkflowState::Running {
        let state = fencepost_domain::job::JobState::Cancelled;
        return Err(Error::InvalidState(JobStatus { state, attempt: 0 }));
    }
    let by = caller.who.changed_by();
    workflows::cancel(&app.engine, project_id, id, &by).await?;
    // Running jobs: read again, because no more can start.
    let (_, parts) = workflows::find(&app.engine, project_id, id).await?;
    for WorkflowJobRow { id, .. } in parts.into_iter().filter(is_running) {
        match cancel_waiting(&app, JobKey { project_id, id }, &by).await {
            // It ended meanwhile.
            Ok(()) | Err(Error::InvalidState(_) | Error::JobNotFound) => (),
            Err(error) => return Err(error),
        }
    }
    let workflow = find(&app, project_id, id).await?;
    Ok(Reply::ok(WorkflowReply::of(workflow)))
}
