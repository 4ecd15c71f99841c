//! Running and reading workflows.

use std::collections::HashMap;

use axum::{Json as Reply, extract::State, http::StatusCode};
use fencepost_domain::{
    error::Error,
    ids::{JobId, JobKey, ProjectId, WorkflowId},
    workflow::WorkflowState,
};
use fencepost_engine::jobs::{
    self, JobRow, control,
    workflows::{self, WorkflowJobRow, WorkflowRow},
};
use fencepost_web::{
    app::App,
    auth::{Caller, Control, Cost, Produce, ReadPayloads},
    wire::{extract::Query, validate::Check},
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};

use super::Status;
use crate::{params::PathParams, plain_errors::ErrorBody};

/// Default trigger of a workflow.
const DEFAULT_TRIGGER: &str = "manual";

/// The envelope of a job stored with this protocol.
#[derive(Debug, Serialize, Deserialize)]
pub struct StoredEnvelope {
    pub workflow_graph: Envelope,
}

/// Fields without a native equivalent.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Envelope {
    pub name: Option<String>,
    pub trigger: Option<String>,
    pub metadata: Option<Box<RawValue>>,
    pub ports: Option<Box<RawValue>>,
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
    /// Result: JSON as text.
    #[serde(skip_serializing_if = "Option::is_none")]
    output: Option<String>,
    required_labels: Vec<String>,
    max_retries: i32,
    /// Attempt, counted from 0.
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
            // Retention has deleted the job, so how it ended is not known.
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

/// A job that was cancelled because a parent was dead-lettered counts as skipped.
fn mark_skipped(jobs: &mut [Job]) {
    let places: HashMap<_, _> = jobs.iter().zip(0_usize..).map(|(it, at)| (&*it.id, at)).collect();
    let mut children = vec![Vec::new(); jobs.len()];
    for (child, job) in jobs.iter().enumerate() {
        let parents = job.depends_on.iter().filter_map(|it| places.get(it.as_str()));
        parents.for_each(|parent| children[*parent].push(child));
    }
    let failed = |it: &usize| jobs[*it].status == Status::Failure;
    let mut bad: Vec<_> = (0..jobs.len()).filter(failed).collect();
    while let Some(parent) = bad.pop() {
        for child in std::mem::take(&mut children[parent]) {
            if jobs[child].status == Status::Cancelled {
                jobs[child].status = Status::Skipped;
                bad.push(child);
            }
        }
    }
}

/// A workflow as of its latest run.
///
/// # Errors
/// [`Error::WorkflowNotFound`].
pub async fn view(app: &App, project_id: ProjectId, id: WorkflowId) -> Result<Workflow, Error> {
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
        let kept: Option<StoredEnvelope> = kept.and_then(|it| serde_json::from_str(it).ok());
        let envelope = kept.map(|it| it.workflow_graph).unwrap_or_default();
        trigger = trigger.take().or(envelope.trigger.clone());
        Job::of(it, row, &envelope)
    };
    let mut jobs: Vec<_> = parts.iter().map(job).collect();
    mark_skipped(&mut jobs);
    let trigger = trigger.unwrap_or_else(|| DEFAULT_TRIGGER.to_owned());
    Workflow { name: name.unwrap_or_else(|| id.clone()), id, trigger, jobs }
}

/// Filter and page of workflows.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ListQuery {
    /// Maximum number of workflows to return. A page has at most 100, and ends with the workflow
    /// with which its workflows have 500 jobs or more. Default: 100.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<i64>,
    /// Number of workflows to skip.
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
    caller: Caller<ReadPayloads>,
    State(app): State<App>,
    Query(query): Query<ListQuery>,
) -> Result<Reply<Vec<Workflow>>, Error> {
    const MAX_ASKED: i64 = 1_000;
    const MAX_GIVEN: i64 = 100;
    const MAX_LISTED_JOBS: usize = 500;
    const MAX_OFFSET: i64 = 10_000;
    let (limit, offset) = (query.limit.unwrap_or(MAX_GIVEN), query.offset.unwrap_or(0));
    let mut check = Check::default();
    check.range("limit", limit, 1, MAX_ASKED);
    check.range("offset", offset, 0, MAX_OFFSET);
    check.finish()?;
    let project_id = caller.project_id;
    let rows = workflows::page(&app.engine, project_id, limit.min(MAX_GIVEN), offset).await?;
    let mut found = Vec::with_capacity(rows.len());
    let mut jobs = 0;
    for WorkflowRow { id, .. } in rows {
        let workflow = match view(&app, project_id, id).await {
            // Retention has deleted it meanwhile.
            Err(Error::WorkflowNotFound) => continue,
            workflow => workflow?,
        };
        jobs += workflow.jobs.len();
        let has = |status: &String| {
            let name = |it: &Job| serde_json::to_value(it.status).unwrap_or_default();
            workflow.jobs.iter().any(|it| name(it) == status.as_str())
        };
        if query.status.as_ref().is_none_or(has) {
            found.push(workflow);
        }
        if jobs >= MAX_LISTED_JOBS {
            break;
        }
    }
    Ok(Reply(found))
}

/// The workflow of a path, or a job that belongs to none.
enum Named {
    Workflow(WorkflowId),
    Job(JobId),
}

impl Named {
    fn of(params: &PathParams) -> Result<Self, Error> {
        let name = params.get("id");
        let job = || name.parse().map(Self::Job).map_err(|_| Error::WorkflowNotFound);
        name.parse().map(Self::Workflow).or_else(|_| job())
    }
}

/// Read a workflow.
#[utoipa::path(
    get, path = "/api/workflows/{id}/status", tag = "workflows", operation_id = "workflow_status",
    params(("id" = String, Path, description = "The workflow, or a job that belongs to none.")),
    responses(
        (status = 200, description = "The workflow, as of its latest run.", body = Workflow),
        (status = 404, description = "No such workflow.", body = ErrorBody),
    ),
)]
pub async fn status(
    caller: Caller<ReadPayloads>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<Workflow>, Error> {
    let id = match Named::of(&params)? {
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
        is_excused: false,
        depends_on: Vec::new(),
        conditions: Vec::new(),
    };
    let rows = HashMap::from([(id, row)]);
    Ok(Reply(show(key, Some(job_type), &[part], &rows)))
}

/// Run a workflow, for the first time or again. A running one is left alone.
#[utoipa::path(
    post, path = "/api/workflows/{id}/run", tag = "workflows", operation_id = "run_workflow",
    params(("id" = String, Path, description = "The workflow.")),
    responses(
        (status = 202, description = "The workflow was started, or is running."),
        (status = 404, description = "No such workflow.", body = ErrorBody),
    ),
)]
pub async fn run(
    caller: Caller<Produce>,
    State(app): State<App>,
    params: PathParams,
) -> Result<StatusCode, Error> {
    let Named::Workflow(id) = Named::of(&params)? else { return Err(Error::WorkflowNotFound) };
    let (row, jobs) = workflows::find_latest(&app.engine, caller.project_id, id).await?;
    let is_running = workflows::state(&row, &jobs) == WorkflowState::Running;
    // The jobs of a held workflow were counted when they were stored.
    let is_to_start = row.is_held && row.cancelled_at.is_none();
    let stored = if is_to_start || is_running { 0 } else { jobs.len() };
    caller.charge(&app, "id", Cost::Items(stored)).await?;
    workflows::run(&app.engine, caller.tenant(), caller.origin(), id).await?;
    Ok(StatusCode::ACCEPTED)
}

/// Cancel a workflow.
#[utoipa::path(
    post, path = "/api/workflows/{id}/cancel", tag = "workflows", operation_id = "cancel_workflow",
    params(("id" = String, Path, description = "The workflow, or a job that belongs to none.")),
    responses(
        (status = 202, description = "Waiting jobs are cancelled; running ones are asked to stop."),
        (status = 404, description = "No such workflow.", body = ErrorBody),
    ),
)]
pub async fn cancel(
    caller: Caller<Control>,
    State(app): State<App>,
    params: PathParams,
) -> Result<StatusCode, Error> {
    let (project_id, by) = (caller.project_id, caller.who.changed_by());
    match Named::of(&params)? {
        Named::Workflow(id) => {
            let (latest, _) = workflows::find_latest(&app.engine, project_id, id).await?;
            workflows::cancel(&app.engine, project_id, latest.id, &by).await?;
        }
        Named::Job(id) => {
            match control::cancel(&app.engine, JobKey { project_id, id }, &by).await {
                // It has ended already.
                Ok(()) | Err(Error::InvalidState(_)) => (),
                Err(error) => return Err(error),
            }
        }
    }
    Ok(StatusCode::ACCEPTED)
}
