//! `GET` and `PUT /v1/job-types/{job_type}`: the schema of a job type's payloads.

use axum::extract::State;
use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::Error,
    ids::ProjectId,
    limits,
    payload_schema::{MAX_SCHEMA_BYTES, PayloadSchema},
};
use fencepost_engine::enqueue::UNREADABLE;
use fencepost_store as store;
use fencepost_web::{
    app::App,
    auth::{Caller, Manage, Read},
    wire::{
        extract::{Json, NameInPath, RequestBody},
        validate::{Check, stored_json},
    },
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, value::RawValue};
use utoipa::ToSchema;

use crate::{
    error::ErrorBody,
    routes::audit::{self, NewAuditEntry},
    settings::{self, Preconditions, Settings, Tagged},
};

/// A job type.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct JobType {
    /// Job type: the kind of work.
    #[schema(example = "email.send")]
    pub job_type: String,
    /// JSON Schema of its payloads, as it was sent; null: it has none.
    #[schema(required, value_type = serde_json::Value)]
    pub schema: Option<Box<RawValue>>,
    /// Time when the schema was stored.
    #[schema(required)]
    pub updated_at: Option<DateTime<Utc>>,
    /// Version of the settings, also in the header `ETag`. A write with it as `If-Match` is refused
    /// if they have changed since.
    #[serde(default)]
    #[schema(required, example = "\"4f0c2a9d1be87a3355d0c61e\"")]
    pub etag: String,
}

impl Settings for JobType {
    const FIELDS: &'static [&'static str] = &["schema"];

    fn etag(&mut self) -> &mut String {
        &mut self.etag
    }
}

/// Description and schema of a job type.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"schema": {"type": "object", "required": ["to"], "properties": {"to": {"type": "string", "format": "email"}}}}))]
pub struct PutJobTypeRequest {
    /// JSON Schema (2020-12) of its payloads, at most 16 KiB and 10 patterns; null removes it.
    /// Keywords that could take long to check are refused, such as `$ref` and `anyOf`.
    #[schema(value_type = serde_json::Value)]
    schema: Box<RawValue>,
}

impl RequestBody for PutJobTypeRequest {}

/// Read a job type.
///
/// Its schema, if it has one. A job type exists from its first use.
#[utoipa::path(
    get, path = "/job-types/{job_type}", tag = "jobs", operation_id = "job_types_get",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(("job_type" = String, Path, description = "The job type.", example = "email.send")),
    responses(
        (status = 200, description = "The job type.", body = JobType),
    ),
)]
pub async fn get(
    caller: Caller<Read>,
    State(app): State<App>,
    NameInPath(job_type): NameInPath,
) -> Result<Tagged<JobType>, Error> {
    check_name(&job_type)?;
    find(&app, caller.project_id, job_type).await.map(Tagged)
}

/// Set the schema of a job type.
///
/// It describes payloads for the console's form, and for jobs that are enqueued with
/// `check_payload`. Jobs that are stored already stay as they are.
#[utoipa::path(
    put, path = "/job-types/{job_type}", tag = "jobs", operation_id = "job_types_put",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(("job_type" = String, Path, description = "The job type.", example = "email.send"), settings::Header),
    request_body = PutJobTypeRequest,
    responses(
        (status = 200, description = "The job type.", body = JobType),
        (status = 413, description = "The schema is too large.", body = ErrorBody),
    ),
)]
pub async fn put(
    caller: Caller<Manage>,
    State(app): State<App>,
    NameInPath(job_type): NameInPath,
    conditions: Preconditions,
    Json(request): Json<PutJobTypeRequest>,
) -> Result<Tagged<JobType>, Error> {
    check_name(&job_type)?;
    let schema = request.schema.get();
    let mut check = Check::default();
    check.size("schema", &request.schema, MAX_SCHEMA_BYTES)?;
    check.depth("schema", &request.schema);
    check.finish()?;
    let read: Value =
        serde_json::from_str(schema).map_err(|_| Error::invalid("schema", UNREADABLE))?;
    if !read.is_null() {
        PayloadSchema::read(&read).map_err(|message| Error::invalid("schema", message))?;
    }
    let about = (caller.project_id, format!("job type {job_type}"));
    let current = async {
        let found = find(&app, caller.project_id, job_type.clone()).await?;
        // Any type can be read; its settings exist once it has a schema.
        Ok(Some(found).filter(|it| it.schema.is_some() || !conditions.are_about_existence()))
    };
    let write = write(&app, &caller, &job_type, &request.schema);
    conditions.write(&app, about, current, write).await.map(Tagged)
}

/// Stores a schema; null removes it.
async fn write(
    app: &App,
    caller: &Caller<Manage>,
    job_type: &str,
    schema: &RawValue,
) -> Result<JobType, Error> {
    let before = find(app, caller.project_id, job_type.to_owned()).await?.schema;
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    if schema.get() == "null" {
        store::jobs::job_types::delete(&mut conn, caller.project_id, job_type).await?;
    } else {
        let (max, text) = (limits::MAX_JOB_SCHEMAS, schema.get());
        if !store::jobs::job_types::upsert(&mut conn, caller.project_id, job_type, text, max)
            .await?
        {
            return Err(Error::QuotaExceeded { what: "job types with a schema", max });
        }
    }
    drop(conn);
    let text = |it: &RawValue| format!("{{\"schema\":{}}}", it.get());
    let (before, after) = (before.as_deref().map(text), Some(text(schema)));
    let entry = NewAuditEntry { before, after, ..NewAuditEntry::to("job_type.changed", job_type) };
    audit::note(app, caller, entry).await;
    find(app, caller.project_id, job_type.to_owned()).await
}

fn check_name(job_type: &str) -> Result<(), Error> {
    let mut check = Check::default();
    check.path_name("job_type", job_type, limits::MAX_JOB_TYPE_CHARS);
    check.finish()
}

async fn find(app: &App, project_id: ProjectId, job_type: String) -> Result<JobType, Error> {
    let mut conn = app.engine.pools.read_for(project_id).await?;
    let named = std::slice::from_ref(&job_type);
    let found = store::jobs::job_types::schemas_of(&mut conn, project_id, named).await?.pop();
    let (schema, updated_at) = found.map(|it| (it.schema, it.updated_at)).unzip();
    let schema = schema.map(stored_json).transpose()?;
    Ok(JobType { job_type, schema, updated_at, etag: String::new() }.tagged())
}
