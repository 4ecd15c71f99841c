//! Stored sequences: instances are started from them by their id.

use axum::{Json as Reply, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::Error, ids::ProjectId, limits, raw_json::RawNode, template, template::TemplateMode,
};
use fencepost_engine::{
    enqueue::quota,
    jobs::definitions::{self, DefinitionRow, NewDefinition, Page, Stored},
};
use fencepost_web::{
    app::App,
    auth::{Caller, Manage, Produce, ReadPayloads},
    wire::{
        extract::{Json, Object, Query, RequestBody},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::sequence::{BlockRequest, Builder, Priority, SequenceRequest};
use crate::{params::PathParams, plain_errors::ErrorBody};

/// The namespace and tenant of a sequence that names none.
pub(super) const DEFAULT_NAMESPACE: &str = "default";

impl RequestBody for SequenceRequest {
    const MAX_BYTES: usize = limits::MAX_DEFINITION_BYTES;
    const IS_ALWAYS_STRICT: bool = true;
}

/// A stored sequence.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = StoredSequence)]
pub struct SequenceView {
    /// Id of the sequence.
    id: Uuid,
    /// Tenant, as it was sent.
    tenant_id: String,
    /// Namespace of the name.
    namespace: String,
    /// Name of the sequence.
    name: String,
    /// Version of the name.
    version: i32,
    /// Always false.
    deprecated: bool,
    /// Status, as it was sent. Default: `production`.
    status: String,
    /// Blocks, as they were sent.
    #[schema(value_type = Vec<BlockRequest>)]
    blocks: Vec<Object<BlockRequest>>,
    /// Time when it was stored.
    created_at: DateTime<Utc>,
}

impl SequenceView {
    fn of(row: DefinitionRow) -> Result<Self, Error> {
        let sent = read(&row.definition)?;
        Ok(Self {
            id: row.id,
            tenant_id: sent.tenant_id.unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned()),
            namespace: row.namespace,
            name: row.name,
            version: row.version,
            deprecated: false,
            status: sent.status.unwrap_or_else(|| "production".to_owned()),
            blocks: sent.blocks,
            created_at: row.created_at,
        })
    }
}

/// A stored sequence as it was sent.
pub(super) fn read(definition: &str) -> Result<SequenceRequest, Error> {
    serde_json::from_str(definition).map_err(Error::internal)
}

/// The sequence with an id. A malformed id is answered like an unknown one.
pub(super) async fn find(
    app: &App,
    project_id: ProjectId,
    id: &str,
) -> Result<DefinitionRow, Error> {
    let id = id.parse::<Uuid>().map_err(|_| Error::WorkflowNotFound)?;
    let found = definitions::find(&app.engine, project_id, id).await?;
    found.ok_or(Error::WorkflowNotFound)
}

/// Store a sequence. The same one, with the same id, is stored once.
#[utoipa::path(
    post, path = "/sequences", tag = "instances", operation_id = "create_sequence",
    request_body = SequenceRequest,
    responses((status = 201, description = "Stored.", body = SequenceView)),
)]
pub async fn create(
    caller: Caller<Produce>,
    State(app): State<App>,
    Json(sent): Json<SequenceRequest>,
) -> Result<(StatusCode, Reply<SequenceView>), Error> {
    const MAX_VERSION: i32 = i32::MAX;
    let mut check = Check::default();
    let id = sent.id.as_deref().map_or_else(|| Ok(Uuid::now_v7()), str::parse);
    if id.is_err() {
        check.refuse("id", "must be a UUID");
    }
    let namespace = sent.namespace.clone().unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned());
    check.name("namespace", &namespace, limits::MAX_NAME_CHARS);
    let name = sent.name.clone().unwrap_or_default();
    check.name("name", &name, limits::MAX_NAME_CHARS);
    let version = sent.version.unwrap_or(1);
    check.range("version", version, 1, MAX_VERSION);
    for (field, text) in [("tenant_id", &sent.tenant_id), ("status", &sent.status)] {
        check.optional_name(field, text.as_deref(), limits::MAX_NAME_CHARS);
    }
    if sent.deprecated == Some(true) {
        check.refuse("deprecated", "must be false");
    }
    let definition = serde_json::to_string(&SequenceRequest { id: None, created_at: None, ..sent });
    let definition = definition.map_err(Error::internal)?;
    let new = NewDefinition { id: id.unwrap_or_default(), namespace, name, version, definition };
    // Templates cannot miss values yet: an instance brings the input.
    let input = RawNode::read(template::NULL);
    let (tenant, priority, mode) = (caller.tenant(), Priority::Normal, TemplateMode::Lenient);
    let builder = Builder { tenant, priority, input: &input, mode, path: "blocks" };
    builder.build(read(&new.definition)?.blocks, &mut check)?;
    check.finish()?;
    quota::admit_count(&app.engine, tenant, 0).await?;
    match definitions::create(&app.engine, caller.project_id, &new).await? {
        Stored::New | Stored::Again => (),
        Stored::IdTaken => return Err(Error::invalid("id", "is that of another sequence")),
        Stored::VersionTaken => {
            return Err(Error::invalid("version", "is stored already: send another one"));
        }
    }
    let stored = find(&app, caller.project_id, &new.id.to_string()).await?;
    Ok((StatusCode::CREATED, Reply(SequenceView::of(stored)?)))
}

/// Read a sequence.
#[utoipa::path(
    get, path = "/sequences/{id}", tag = "instances", operation_id = "get_sequence",
    params(("id" = String, Path, description = "The sequence.")),
    responses(
        (status = 200, description = "The sequence.", body = SequenceView),
        (status = 404, description = "No such sequence.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<ReadPayloads>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<SequenceView>, Error> {
    let row = find(&app, caller.project_id, params.get("id")).await?;
    SequenceView::of(row).map(Reply)
}

/// A name, and which of its versions.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct NameQuery {
    /// The name.
    name: Option<String>,
    /// The namespace. Default: `default`; in a list without a name, all.
    namespace: Option<String>,
    /// The version. Default: the newest. Only by name.
    version: Option<i32>,
    /// Sequences of a list. Default: 50.
    #[param(minimum = 1, maximum = 50)]
    limit: Option<u32>,
    /// Sequences that a list leaves out at its beginning. Default: 0.
    #[param(minimum = 0, maximum = 500)]
    offset: Option<u32>,
    /// Ignored: the project is the key's.
    #[expect(dead_code, reason = "clients send it, and unknown parameters are refused")]
    tenant_id: Option<String>,
}

impl NameQuery {
    fn page(&self) -> Page {
        let limit = self.limit.map_or(limits::MAX_PAGE_DEFINITIONS, i64::from);
        Page { limit, offset: self.offset.unwrap_or_default().into() }
    }

    fn needed_name(&self) -> Result<&str, Error> {
        self.name.as_deref().ok_or_else(|| Error::invalid("name", "must be sent"))
    }

    fn check(&self) -> Result<(), Error> {
        let mut check = Check::default();
        let Page { limit, offset } = self.page();
        check.range("limit", limit, 1, limits::MAX_PAGE_DEFINITIONS);
        check.range("offset", offset, 0, limits::MAX_WORKFLOW_DEFINITIONS);
        check.optional_name("name", self.name.as_deref(), limits::MAX_NAME_CHARS);
        check.optional_name("namespace", self.namespace.as_deref(), limits::MAX_NAME_CHARS);
        check.finish()
    }
}

/// Read a sequence by its name.
#[utoipa::path(
    get, path = "/sequences/by-name", tag = "instances", operation_id = "get_sequence_by_name",
    params(NameQuery),
    responses(
        (status = 200, description = "The sequence.", body = SequenceView),
        (status = 404, description = "No such sequence.", body = ErrorBody),
    ),
)]
pub async fn by_name(
    caller: Caller<ReadPayloads>,
    State(app): State<App>,
    Query(query): Query<NameQuery>,
) -> Result<Reply<SequenceView>, Error> {
    query.check()?;
    let namespace = query.namespace.as_deref().unwrap_or(DEFAULT_NAMESPACE);
    let named = (namespace, query.needed_name()?);
    let row = definitions::by_name(&app.engine, caller.project_id, named, query.version).await?;
    SequenceView::of(row.ok_or(Error::WorkflowNotFound)?).map(Reply)
}

/// List the versions of a sequence, newest first; without a name, the sequences by name.
#[utoipa::path(
    get, path = "/sequences", tag = "instances", operation_id = "list_sequences",
    params(NameQuery),
    responses((status = 200, description = "The sequences.", body = Vec<SequenceView>)),
)]
pub async fn list(
    caller: Caller<ReadPayloads>,
    State(app): State<App>,
    Query(query): Query<NameQuery>,
) -> Result<Reply<Vec<SequenceView>>, Error> {
    query.check()?;
    let (name, namespace) = (query.name.as_deref(), query.namespace.as_deref());
    // A name alone is one of the default namespace.
    let namespace = namespace.or(name.map(|_| DEFAULT_NAMESPACE));
    let (named, page) = ((namespace, name), query.page());
    let rows = definitions::versions(&app.engine, caller.project_id, named, page).await?;
    rows.into_iter().map(SequenceView::of).collect::<Result<_, _>>().map(Reply)
}

/// List the versions of a name, newest first.
#[utoipa::path(
    get, path = "/sequences/versions", tag = "instances", operation_id = "list_sequence_versions",
    params(NameQuery),
    responses((status = 200, description = "The sequences.", body = Vec<SequenceView>)),
)]
pub async fn versions(
    caller: Caller<ReadPayloads>,
    app: State<App>,
    query: Query<NameQuery>,
) -> Result<Reply<Vec<SequenceView>>, Error> {
    query.0.needed_name()?;
    list(caller, app, query).await
}

/// Delete a sequence. Instances that were started from it run on.
#[utoipa::path(
    delete, path = "/sequences/{id}", tag = "instances", operation_id = "delete_sequence",
    params(("id" = String, Path, description = "The sequence.")),
    responses(
        (status = 204, description = "Deleted."),
        (status = 404, description = "No such sequence.", body = ErrorBody),
    ),
)]
pub async fn delete(
    caller: Caller<Manage>,
    State(app): State<App>,
    params: PathParams,
) -> Result<StatusCode, Error> {
    let id = params.get("id").parse::<Uuid>().map_err(|_| Error::WorkflowNotFound)?;
    if !definitions::delete(&app.engine, caller.project_id, id).await? {
        return Err(Error::WorkflowNotFound);
    }
    Ok(StatusCode::NO_CONTENT)
}
