//! Instances: sequences of steps, each a job of one workflow.

use axum::{Json as Reply, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    access::Permission,
    error::Error,
    ids::{ProjectId, WorkflowId},
    job::JobState,
    limits,
    plan::Tenant,
    template::TemplateMode,
    workflow::WorkflowState,
};
use fencepost_engine::jobs::{
    definitions::{self, WorkflowStart},
    workflows::{self, JobGraph, WorkflowJobRow},
};
use fencepost_web::{
    app::App,
    auth::{Caller, Cost, Produce, ReadPayloads},
    wire::{
        extract::{Json, Object, RequestBody},
        openapi::chars,
        templates,
        validate::{Check, stored_json},
    },
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::{
    sequence::{Builder, Priority, SequenceRequest},
    sequences,
};
use crate::{params::PathParams, plain_errors::ErrorBody};

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
    #[schema(value_type = Option<SequenceRequest>)]
    sequence: Option<Object<SequenceRequest>>,
    /// The stored sequence to run, instead.
    sequence_id: Option<String>,
    /// Ignored: the project is the key's.
    #[serde(rename = "tenant_id")]
    _tenant_id: Option<String>,
    /// Ignored: it is the sequence's.
    #[serde(rename = "namespace")]
    _namespace: Option<String>,
    /// With it, a second request starts nothing, and answers the first instance.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_IDEMPOTENCY_KEY_CHARS)))))]
    idempotency_key: Option<String>,
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

/// The context of an instance.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ContextRequest {
    /// Any JSON, which templates name as `{{context.data.…}}`.
    #[schema(value_type = Option<serde_json::Value>)]
    data: Option<Box<RawValue>>,
    /// Must be an empty object, if it is sent.
    #[serde(rename = "config")]
    _config: Option<NoFields>,
}

/// An object without fields.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NoFields {}

/// An instance.
#[derive(Debug, Serialize, ToSchema)]
pub struct Instance {
    /// Id of the workflow.
    id: String,
    /// Id of the stored sequence that it runs; without one, the id of the instance.
    sequence_id: String,
    /// Tenant of its sequence, as it was sent.
    tenant_id: String,
    /// Namespace of its sequence.
    namespace: String,
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
    /// Time when a step last ended; before that, when the instance was stored.
    updated_at: DateTime<Utc>,
    /// Of a new instance: whether one with its `idempotency_key` was there before.
    #[serde(skip_serializing_if = "Option::is_none")]
    deduplicated: Option<bool>,
}

/// The context of an instance.
#[derive(Debug, Serialize, ToSchema)]
pub struct InstanceContext {
    /// The data that was sent; an empty object if none was.
    #[schema(value_type = serde_json::Value)]
    data: Box<RawValue>,
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

/// Run a sequence, as it is sent or as it is stored. Each step is a task.
#[utoipa::path(
    post, path = "/instances", tag = "instances", operation_id = "create_instance",
    request_body = CreateRequest,
    responses(
        (status = 201, description = "Stored.", body = Instance),
        (status = 200, description = "An instance with this `idempotency_key` is there.", body = Instance),
        (status = 404, description = "No such sequence.", body = ErrorBody),
        (status = 409, description = "The `idempotency_key` was used for another sequence.", body = ErrorBody),
    ),
)]
pub async fn create(
    caller: Caller<Produce>,
    State(app): State<App>,
    Json(request): Json<CreateRequest>,
) -> Result<(StatusCode, Reply<Instance>), Error> {
    let tenant = caller.tenant();
    // A key without a stored sequence is refused below.
    let sequence_id = request.sequence_id.clone().filter(|_| request.sequence.is_none());
    let keyed = request.idempotency_key.clone().zip(sequence_id);
    let shows_data = caller.who.may(Permission::ReadPayloads);
    let find_known = async || match &keyed {
        Some(keyed) => started_with(&app, tenant.project_id, keyed, shows_data).await,
        None => Ok(None),
    };
    if let Some(known) = find_known().await? {
        return Ok((StatusCode::OK, Reply(known)));
    }
    let graph = accept(&app, tenant, request).await?;
    caller.charge(&app, "sequence.blocks", Cost::Items(graph.jobs.len())).await?;
    let id = WorkflowId::generate();
    let data = graph.input.clone();
    match workflows::create(&app.engine, tenant, caller.origin(), id, graph).await {
        Ok(()) => (),
        // Another request may have used the key at the same moment.
        Err(error) => {
            let known = find_known().await?;
            return known.map(|it| (StatusCode::OK, Reply(it))).ok_or(error);
        }
    }
    let stored = read(&app, tenant.project_id, id, data).await?;
    Ok((StatusCode::CREATED, Reply(Instance { deduplicated: Some(false), ..stored })))
}

/// The instance that was started with a key from a stored sequence, with its data if the caller may
/// see it.
async fn started_with(
    app: &App,
    project_id: ProjectId,
    (key, sequence_id): &(String, String),
    shows_data: bool,
) -> Result<Option<Instance>, Error> {
    let mut check = Check::default();
    check.name("idempotency_key", key, limits::MAX_IDEMPOTENCY_KEY_CHARS);
    check.finish()?;
    let known = definitions::started_with(&app.engine, project_id, key).await?;
    let Some((id, definition_id)) = known else { return Ok(None) };
    if sequence_id.parse() != Ok(definition_id) {
        return Err(Error::IdempotencyKeyReuse);
    }
    let known = match shows_data {
        true => read_with_data(app, project_id, id).await,
        false => read(app, project_id, id, None).await,
    };
    match known {
        Ok(known) => Ok(Some(Instance { deduplicated: Some(true), ..known })),
        // It was pruned meanwhile.
        Err(Error::WorkflowNotFound) => Ok(None),
        Err(error) => Err(error),
    }
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
    read_with_data(&app, caller.project_id, id).await.map(Reply)
}

async fn read_with_data(
    app: &App,
    project_id: ProjectId,
    id: WorkflowId,
) -> Result<Instance, Error> {
    let stored = workflows::inputs(&app.engine, project_id, &[id]).await?.pop();
    read(app, project_id, id, stored.map(|(_, data)| data)).await
}

/// The instance, with the data of its context if the caller may see it.
async fn read(
    app: &App,
    project_id: ProjectId,
    id: WorkflowId,
    data: Option<String>,
) -> Result<Instance, Error> {
    const NO_DATA: &str = "{}";
    let (row, parts) = workflows::find(&app.engine, project_id, id).await?;
    let state = match workflows::state(&row, &parts) {
        WorkflowState::Running => "running",
        WorkflowState::Succeeded => "completed",
        WorkflowState::Failed => "failed",
        WorkflowState::Cancelled => "cancelled",
    };
    let start = definitions::start_of(&app.engine, project_id, id).await?;
    let definition = match &start {
        Some(it) => definitions::find(&app.engine, project_id, it.definition_id).await?,
        None => None,
    };
    let tenant_id = definition.as_ref().map(|it| sequences::read(&it.definition)).transpose()?;
    let default = || sequences::DEFAULT_NAMESPACE.to_owned();
    let updated_at = parts.iter().filter_map(|it| it.completed_at).max();
    let step = |it: WorkflowJobRow| StepView {
        id: it.key,
        handler: it.job_type,
        state: it.state.map(|it| step_state_name(it.public())),
    };
    Ok(Instance {
        id: row.id.to_string(),
        sequence_id: start.map_or(row.id.to_string(), |it| it.definition_id.to_string()),
        tenant_id: tenant_id.and_then(|it| it.tenant_id).unwrap_or_else(default),
        namespace: definition.map_or_else(default, |it| it.namespace),
        name: row.name,
        state,
        context: InstanceContext { data: stored_json(data.unwrap_or_else(|| NO_DATA.to_owned()))? },
        steps: parts.into_iter().map(step).collect(),
        created_at: row.created_at,
        updated_at: updated_at.unwrap_or(row.created_at),
        deduplicated: None,
    })
}

fn step_state_name(state: JobState) -> &'static str {
    match state {
        JobState::Cancelled => "cancelled",
        other => super::state_name(other),
    }
}

/// The jobs of a sequence: the one that is sent, or the stored one that is named.
async fn accept(app: &App, tenant: Tenant, request: CreateRequest) -> Result<JobGraph, Error> {
    const DATA: &str = "context.data";
    let CreateRequest { sequence, sequence_id, context, priority, idempotency_key, .. } = request;
    let (sequence, definition) = match (sequence, sequence_id) {
        (Some(Object(sequence)), None) => (sequence, None),
        (None, Some(id)) => {
            let row = sequences::find(app, tenant.project_id, &id).await?;
            (sequences::read(&row.definition)?, Some(row.id))
        }
        _ => {
            return Err(Error::invalid("sequence_id", "must be sent, or `sequence`, and not both"));
        }
    };
    let mut check = Check::default();
    if idempotency_key.is_some() && definition.is_none() {
        check.refuse("idempotency_key", "is supported with a sequence_id");
    }
    check.optional_name("sequence.name", sequence.name.as_deref(), limits::MAX_NAME_CHARS);
    let Object(ContextRequest { data, .. }) = context.unwrap_or(Object(ContextRequest::default()));
    let input = templates::read_input(DATA, data.as_deref(), tenant, &mut check)?;
    let (priority, mode) = (priority.unwrap_or_default(), TemplateMode::Strict);
    let builder = Builder { tenant, priority, input: &input, mode, path: "sequence.blocks" };
    let graph = builder.build(sequence.blocks, &mut check)?;
    check.finish()?;
    let start = definition
        .map(|definition_id| WorkflowStart { definition_id, request_key: idempotency_key });
    let input = data.as_ref().map(|it| it.get().to_owned());
    Ok(JobGraph { name: sequence.name, input, start, ..graph })
}
