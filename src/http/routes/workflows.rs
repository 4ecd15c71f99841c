//! `/v1/workflows`: jobs with dependencies.

use axum::{
    Json as Reply,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::Response,
};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    dependency::{Dependency, When},
    error::Error,
    ids::WorkflowId,
    job::{JobState, StoredState},
    limits, outbound,
    plan::Tenant,
    workflow::{self, BrokenGraph, Node, WorkflowState},
};
use fencepost_engine::jobs::workflows::{self, JobGraph, StateCount, WorkflowJobRow, WorkflowRow};
use fencepost_web::{
    app::App,
    auth::{Bound, Caller, Control, Cost, Produce, Read},
    wire::{
        extract::{Object, OptionalJson, Query, RequestBody, WorkflowInPath},
        openapi::chars,
        templates::{self, Templates},
        validate::{Check, stored_json},
    },
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};

use crate::{
    change::ReasonRequest,
    cursor::{self, List},
    error::ErrorBody,
    idempotency::{self, Answer, Ids, Once},
    page::{PageSize, page},
    redact::{Redact, shown},
    routes::jobs::request::{EnqueueRequest, accept, traceparent},
};

const DEFAULT_PAGE_WORKFLOWS: u32 = 20;

/// A workflow to create: its jobs form a graph without cycles.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"name": "nightly", "jobs": [
    {"key": "fetch", "job_type": "report.fetch"},
    {"key": "send", "job_type": "email.send", "depends_on": ["fetch"]}
]}))]
pub struct CreateWorkflowRequest {
    /// Display name.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_NAME_CHARS)))))]
    name: Option<String>,
    /// Any JSON, which templates name as `{{input.…}}`. Default: null.
    #[serde(default)]
    #[schema(value_type = serde_json::Value, required = false)]
    input: Option<Box<RawValue>>,
    /// URL to notify when all of its jobs have ended: that of an endpoint that takes callbacks, or
    /// one below it. It is not shown again.
    #[schema(extensions(("bounds" = json!(chars(1, outbound::MAX_URL_CHARS)))))]
    callback_url: Option<String>,
    /// 1 to 500 jobs.
    #[schema(min_items = 1, max_items = 500, value_type = Vec<EnqueueRequest>)]
    jobs: Vec<Object<EnqueueRequest>>,
}

impl RequestBody for CreateWorkflowRequest {
    const MAX_BYTES: usize = limits::MAX_BATCH_BODY_BYTES;
}

/// A workflow.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Workflow {
    /// Id of the workflow.
    #[schema(example = "wf_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// Display name.
    #[schema(required)]
    pub name: Option<String>,
    /// State.
    pub state: WorkflowState,
    /// Input that its templates name, as it was sent.
    #[schema(value_type = serde_json::Value, required)]
    pub input: Option<Box<RawValue>>,
    /// True if the input is null because the caller may not read it.
    pub redacted: bool,
    /// When it was stored.
    pub created_at: DateTime<Utc>,
    /// When it was cancelled.
    #[schema(required)]
    pub cancelled_at: Option<DateTime<Utc>>,
    /// Jobs, in the order in which they were sent.
    pub jobs: Vec<WorkflowJob>,
}

/// A job of a workflow.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct WorkflowJob {
    /// Key in the workflow.
    pub key: String,
    /// Id of the job.
    #[schema(example = "job_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// Job type: the kind of work.
    #[schema(required)]
    pub job_type: Option<String>,
    /// State; null if it was pruned.
    #[schema(required)]
    pub state: Option<JobState>,
    /// Latest attempt; 0 before the first.
    #[schema(required)]
    pub attempt: Option<i32>,
    /// When it ended.
    #[schema(required)]
    pub completed_at: Option<DateTime<Utc>>,
    /// Keys of its parents.
    pub depends_on: Vec<String>,
    /// Parents of the job, each with the end that it waits for.
    pub dependencies: Vec<WorkflowDependency>,
}

/// A dependency of a job in a workflow.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct WorkflowDependency {
    /// Key of the parent.
    pub key: String,
    /// The end of the parent that lets the job run.
    pub when: When,
}

impl Redact for Workflow {
    fn redact(&mut self) {
        self.redacted = true;
        self.input = None;
    }
}

impl Workflow {
    async fn find<P>(app: &App, caller: &Caller<P>, id: WorkflowId) -> Result<Self, Error> {
        let project_id = caller.project_id;
        let (row, jobs) = workflows::find(&app.engine, project_id, id).await?;
        let input = workflows::inputs(&app.engine, project_id, &[id]).await?.pop();
        let input = input.map(|it| stored_json(it.1)).transpose()?;
        Ok(shown(&caller.who, Self::of(row, jobs, input)))
    }

    fn of(row: WorkflowRow, jobs: Vec<WorkflowJobRow>, input: Option<Box<RawValue>>) -> Self {
        let state = workflows::state(&row, &jobs);
        let dependency =
            |it: Dependency<&str>| WorkflowDependency { key: it.parent.to_owned(), when: it.when };
        let part = |it: WorkflowJobRow| WorkflowJob {
            dependencies: it.dependencies().map(dependency).collect(),
            key: it.key,
            id: it.id.to_string(),
            job_type: it.job_type,
            state: it.state.map(StoredState::public),
            attempt: it.attempt,
            completed_at: it.completed_at,
            depends_on: it.depends_on,
        };
        Self {
            id: row.id.to_string(),
            name: row.name,
            state,
            input,
            redacted: false,
            created_at: row.created_at,
            cancelled_at: row.cancelled_at,
            jobs: jobs.into_iter().map(part).collect(),
        }
    }
}

/// Create a workflow.
///
/// Its jobs are stored all or none. A job runs when all of its parents have ended as it waits for,
/// by default with success, and gets their results and errors. If one of them ends otherwise, the
/// job is cancelled. A job that waits for a failure handles it: if it succeeds, the failure does
/// not fail the workflow.
#[utoipa::path(
    post, path = "/workflows", tag = "workflows", operation_id = "workflows_create",
    security(("api_key" = ["produce"]), ("session" = ["member"])),
    request_body = CreateWorkflowRequest,
    params(
        idempotency::Header,
        ("traceparent" = Option<String>, Header, description = "W3C trace context; the workers get it."),
        ("Fencepost-Hop" = Option<i16>, Header, description = "Copy this header from the webhook delivery that caused this request."),
    ),
    responses(
        (status = 201, description = "The workflow is stored.", body = Workflow,
         headers(("Location" = String, description = "The workflow's path."))),
        (status = 400, description = "Invalid request, or a cycle among the jobs.", body = ErrorBody),
    ),
)]
pub async fn create(
    caller: Caller<Bound<Produce>>,
    State(app): State<App>,
    headers: HeaderMap,
    Once { request, repeat }: Once<CreateWorkflowRequest>,
) -> Result<Response, Error> {
    let jobs = request.jobs.iter().map(|it| it.0.jobs()).sum();
    caller.charge(&app, "jobs", Cost::Items(jobs)).await?;
    let trace = traceparent(&headers).map(str::to_owned);
    let (running, by) = (app.clone(), caller.clone());
    repeat
        .once(&app, &caller, async move |ids: Ids| {
            let (id, tenant) = (ids.workflow(), by.tenant());
            let graph = accept_graph(tenant, ids, request, trace.as_deref())?;
            workflows::create(&running.engine, tenant, by.origin(), id, graph).await?;
            let workflow = Workflow::find(&running, &by, id).await?;
            let location = Some(format!("/v1/workflows/{id}"));
            Answer::new(StatusCode::CREATED, location, &workflow)
        })
        .await
}

fn accept_graph(
    tenant: Tenant,
    ids: Ids,
    request: CreateWorkflowRequest,
    trace: Option<&str>,
) -> Result<JobGraph, Error> {
    let mut check = Check::default();
    check.optional_name("name", request.name.as_deref(), limits::MAX_NAME_CHARS);
    check.optional_name("callback_url", request.callback_url.as_deref(), outbound::MAX_URL_CHARS);
    let input = templates::read_input("input", request.input.as_deref(), tenant, &mut check)?;
    let mut templates = Templates::new(&input, tenant);
    let mut named = Vec::with_capacity(request.jobs.len());
    let mut jobs = Vec::with_capacity(request.jobs.len());
    for (place, Object(mut job)) in request.jobs.into_iter().enumerate() {
        let mut item = Check::below(format!("jobs[{place}]."));
        let key = job.key.take().unwrap_or_default();
        item.name("key", &key, limits::MAX_NAME_CHARS);
        let depends_on = job.depends_on.take().unwrap_or_default();
        let depends_on = depends_on.into_iter().enumerate();
        let depends_on: Vec<Dependency<String>> =
            depends_on.map(|(number, it)| it.by_key(number, &mut item)).collect();
        let mode = job.template.take();
        let out_of_place = [
            ("parent_job_id", job.parent_job_id.is_some()),
            ("unique", job.unique.is_some()),
            ("idempotency_key", job.idempotency_key.is_some()),
        ];
        for (field, _) in out_of_place.into_iter().filter(|it| it.1) {
            item.refuse(field, "is not allowed for a job of a workflow");
        }
        if place < limits::MAX_WORKFLOW_JOBS {
            let mut entry = accept(tenant, ids.job(place), job, trace, &mut item)?;
            if let Some(mode) = mode {
                templates.accept(&mut entry.job, mode, &depends_on, "payload", &mut item);
            }
            let extras = entry.job.extras.get_or_insert_default();
            extras.workflow_key = Some(key.clone());
            jobs.push(entry);
        }
        named.push((key, depends_on));
        check.absorb(item);
    }
    let nodes: Vec<_> =
        named.iter().map(|(key, on): &(_, Vec<_>)| Node { key, depends_on: on }).collect();
    let parents = workflow::resolve(&nodes).unwrap_or_else(|broken| {
        for BrokenGraph { job, field, message } in broken {
            let path = job.map_or_else(String::new, |it| format!("jobs[{it}]."));
            check.refuse(&format!("{path}{field}"), message);
        }
        Vec::new()
    });
    check.finish()?;
    let input = request.input.map(|it| Box::<str>::from(it).into_string());
    let CreateWorkflowRequest { name, callback_url, .. } = request;
    Ok(JobGraph {
        name,
        input,
        callback_url,
        is_held: false,
        jobs,
        parents,
        batch: None,
        start: None,
    })
}

/// Read a workflow.
///
/// The graph with the state of each job.
#[utoipa::path(
    get, path = "/workflows/{workflow_id}", tag = "workflows", operation_id = "workflows_get",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(("workflow_id" = String, Path, description = "The workflow.", example = "wf_01m7w3ha3aextt8pkwwdmxsmqw")),
    responses(
        (status = 200, description = "The workflow.", body = Workflow),
        (status = 404, description = "The project has no such workflow.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<Read>,
    State(app): State<App>,
    WorkflowInPath(id): WorkflowInPath,
) -> Result<Reply<Workflow>, Error> {
    Workflow::find(&app, &caller, id).await.map(Reply)
}

/// Page of workflows.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct WorkflowsQuery {
    /// Maximum number of workflows to return. Default: 20.
    #[param(minimum = 1, maximum = 50)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

/// A workflow, without its jobs.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct WorkflowSummary {
    /// Id of the workflow.
    #[schema(example = "wf_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// Display name.
    #[schema(required)]
    pub name: Option<String>,
    /// State.
    pub state: WorkflowState,
    /// When it was stored.
    pub created_at: DateTime<Utc>,
    /// When it was cancelled.
    #[schema(required)]
    pub cancelled_at: Option<DateTime<Utc>>,
    /// Number of jobs, including pruned ones.
    pub total_jobs: i64,
    /// Number of succeeded jobs.
    pub succeeded_jobs: i64,
}

impl WorkflowSummary {
    fn of((row, counts): (WorkflowRow, Vec<StateCount>)) -> Self {
        let members: Vec<_> = counts.iter().filter_map(StateCount::member).collect();
        let succeeded = counts.iter().filter(|it| it.state == Some(StoredState::Succeeded));
        Self {
            id: row.id.to_string(),
            name: row.name,
            state: workflow::state(&members, row.cancelled_at.is_some()),
            created_at: row.created_at,
            cancelled_at: row.cancelled_at,
            succeeded_jobs: succeeded.map(|it| it.jobs).sum(),
            total_jobs: counts.iter().map(|it| it.jobs).sum(),
        }
    }
}

page! {
    /// A page of workflows, newest first.
    WorkflowPage {
        /// Workflows of the page.
        workflows: WorkflowSummary
    }
}

/// List workflows.
///
/// Newest first, without their jobs.
#[utoipa::path(
    get, path = "/workflows", tag = "workflows", operation_id = "workflows_list",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(WorkflowsQuery),
    responses(
        (status = 200, description = "A page of workflows.", body = WorkflowPage),
    ),
)]
pub async fn list(
    caller: Caller<Read>,
    State(app): State<App>,
    Query(query): Query<WorkflowsQuery>,
) -> Result<Reply<WorkflowPage>, Error> {
    let mut check = Check::default();
    let size =
        PageSize::read(query.limit, DEFAULT_PAGE_WORKFLOWS, limits::MAX_PAGE_WORKFLOWS, &mut check);
    check.finish()?;
    let list = List::of(caller.project_id, "workflows");
    let before = cursor::read_id(&app, list, query.cursor.as_deref())?.map(WorkflowId);
    let mut rows = workflows::list(&app.engine, caller.project_id, before, size.one_more()).await?;
    let next_cursor = size.cut(&mut rows, |it| cursor::write_id(&app, list, it.0.id.0));
    let workflows = rows.into_iter().map(WorkflowSummary::of).collect();
    Ok(Reply(WorkflowPage::of(workflows, next_cursor)))
}

/// Cancel a workflow.
///
/// Cancels each of its jobs that has not ended, as `POST /v1/jobs/{job_id}/cancel` does.
#[utoipa::path(
    post, path = "/workflows/{workflow_id}/cancel", tag = "workflows", operation_id = "workflows_cancel",
    security(("api_key" = ["produce"]), ("api_key" = ["manage"]), ("session" = ["member"])),
    params(("workflow_id" = String, Path, description = "The workflow.", example = "wf_01m7w3ha3aextt8pkwwdmxsmqw")),
    request_body(content = ReasonRequest, description = "Optional."),
    responses(
        (status = 200, description = "The workflow.", body = Workflow),
        (status = 404, description = "The project has no such workflow.", body = ErrorBody),
    ),
)]
pub async fn cancel(
    caller: Caller<Control>,
    State(app): State<App>,
    WorkflowInPath(id): WorkflowInPath,
    OptionalJson(request): OptionalJson<ReasonRequest>,
) -> Result<Reply<Workflow>, Error> {
    let by = request.accept(&caller.who)?;
    workflows::cancel(&app.engine, caller.project_id, id, &by).await?;
    Workflow::find(&app, &caller, id).await.map(Reply)
}
