//! The manifest, queues, and dead letters.

use axum::extract::State;
use fencepost_domain::{error::Error, ids::JobKey, limits};
use fencepost_engine::{
    jobs::{self, control, dead_letters},
    queues::{self, QueueRow},
};
use fencepost_web::{
    app::App,
    auth::{Caller, Manage, Read, ReadPayloads},
    wire::{
        audit::{self, NewAuditEntry},
        extract::Query,
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::{IntoParams, ToSchema};

use super::{
    ErrorBody, Reply, SPEC_VERSION,
    fields::{page, time},
    job_id,
    jobs::{self as found, JobReply},
    show::JobView,
};
use crate::params::PathParams;

/// The highest level of the specification that is supported completely.
const CONFORMANCE_LEVEL: u8 = 3;
/// Capabilities, and whether they are supported: `docs/protocols.md` has the levels.
const CAPABILITIES: [(&str, bool); 11] = [
    ("batch_enqueue", true),
    ("cron_jobs", true),
    ("dead_letter", true),
    ("delayed_jobs", true),
    ("job_ttl", true),
    ("priority_queues", true),
    ("rate_limiting", false),
    ("schema_validation", false),
    ("unique_jobs", true),
    ("workflows", true),
    ("pause_resume", true),
];

/// Capabilities of this server.
#[utoipa::path(
    get, path = "/manifest", tag = "system", operation_id = "manifest", security(()),
    responses((status = 200, description = "The manifest.", body = Object)),
)]
pub async fn manifest() -> Reply<Value> {
    Reply::ok(json!({
        "specversion": SPEC_VERSION,
        "ojs_version": SPEC_VERSION,
        "implementation": {
            "name": "fencepost", "version": env!("CARGO_PKG_VERSION"), "language": "rust",
            "homepage": "/docs/protocols",
        },
        "conformance_level": CONFORMANCE_LEVEL,
        "protocols": ["http"],
        "backend": "postgresql",
        "capabilities": CAPABILITIES.into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        "extensions": [],
        "endpoints": {"base": "/ojs/v1", "openapi": "/openapi/ojs.json"},
    }))
}

/// Health of this server.
#[utoipa::path(
    get, path = "/v1/health", tag = "system", operation_id = "health", security(()),
    responses(
        (status = 200, description = "The server can serve.", body = Object),
        (status = 503, description = "The server cannot serve.", body = ErrorBody),
    ),
)]
pub async fn health(State(app): State<App>) -> Result<Reply<Value>, Error> {
    app.engine.check_serving().await?;
    Ok(Reply::ok(json!({
        "status": "ok",
        "version": env!("CARGO_PKG_VERSION"),
        "backend": {"type": "postgresql", "status": "connected"},
    })))
}

/// A page of a list.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct PageQuery {
    /// Maximum number of entries to return. Default: 50.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
    /// Number of entries to skip.
    #[param(minimum = 0, maximum = 1000)]
    offset: Option<u32>,
    /// Only dead letters of this queue; ignored for queues.
    queue: Option<String>,
}

/// The place of a page in its list, of which one item beyond the page was looked for. `total`
/// counts the items that are known to be there, so it is exact on the last page.
fn pagination(limit: u32, offset: u32, found: usize) -> Value {
    let has_more = found as u64 > u64::from(limit) + u64::from(offset);
    json!({"limit": limit, "offset": offset, "has_more": has_more, "total": found})
}

/// List schemas: there are none, since no arguments are validated.
#[utoipa::path(
    get, path = "/v1/schemas", tag = "system", operation_id = "list_schemas",
    params(PageQuery),
    responses((status = 200, description = "An empty page.", body = Object)),
)]
pub async fn schemas(
    _: Caller<Read>,
    Query(query): Query<PageQuery>,
) -> Result<Reply<Value>, Error> {
    let (limit, offset) = page(query.limit, query.offset, limits::MAX_PAGE_QUEUES)?;
    Ok(Reply::ok(json!({"schemas": [], "pagination": pagination(limit, offset, 0)})))
}

/// List queues, by name.
#[utoipa::path(
    get, path = "/v1/queues", tag = "queues", operation_id = "list_queues",
    params(PageQuery),
    responses((status = 200, description = "A page of queues.", body = Object)),
)]
pub async fn queues(
    caller: Caller<Read>,
    State(app): State<App>,
    Query(query): Query<PageQuery>,
) -> Result<Reply<Value>, Error> {
    let (limit, offset) = page(query.limit, query.offset, limits::MAX_PAGE_QUEUES)?;
    let wanted = i64::from(limit) + i64::from(offset) + 1;
    let names = queues::names(&app.engine, caller.project_id, "", wanted).await?;
    let found = names.len();
    let shown: Vec<_> = names.into_iter().skip(offset as usize).take(limit as usize).collect();
    let rows = queues::find(&app.engine, caller.project_id, &shown).await?;
    let views: Vec<_> = rows.iter().map(queue_view).collect();
    Ok(Reply::ok(json!({
        "queues": views, "pagination": pagination(limit, offset, found),
    })))
}

/// As the specification and its HTTP binding have it, at once: counts beside the name, and below
/// `stats`.
fn queue_view(row: &QueueRow) -> Value {
    let available = (row.active - row.processing - row.backoff).max(0);
    json!({
        "name": row.queue,
        "status": status(row.paused_at.is_some()),
        "paused": row.paused_at.is_some(),
        "paused_at": row.paused_at.map(time),
        "available": available,
        "active": row.processing,
        "scheduled": row.scheduled,
        "retryable": row.backoff,
        "discarded": row.dead_letter,
        "completed": row.succeeded,
        "cancelled": row.cancelled,
        "stats": {
            "available": available,
            "active": row.processing,
            "scheduled": row.scheduled,
            "retryable": row.backoff,
            "discarded": row.dead_letter,
            "completed_last_hour": row.succeeded_hour,
            "failed_last_hour": row.failed_hour,
        },
        "computed_at": time(row.now),
    })
}

fn status(is_paused: bool) -> &'static str {
    if is_paused { "paused" } else { "active" }
}

fn queue_name(params: &PathParams) -> Result<String, Error> {
    let queue = params.get("name").to_owned();
    let mut check = Check::default();
    check.name("name", &queue, limits::MAX_QUEUE_CHARS);
    check.finish()?;
    Ok(queue)
}

/// Count the jobs of a queue.
#[utoipa::path(
    get, path = "/v1/queues/{name}/stats", tag = "queues", operation_id = "queue_stats",
    params(("name" = String, Path, description = "The queue.")),
    responses((status = 200, description = "The counts.", body = Object)),
)]
pub async fn stats(
    caller: Caller<Read>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<Value>, Error> {
    let names = [queue_name(&params)?];
    let rows = queues::find(&app.engine, caller.project_id, &names).await?;
    let queue = rows.first().map(queue_view).unwrap_or_default();
    // The HTTP binding has the counts beside the queue.
    let (stats, status, at) = (&queue["stats"], &queue["status"], &queue["computed_at"]);
    Ok(Reply::ok(json!({"stats": stats, "status": status, "computed_at": at, "queue": queue})))
}

/// Pause a queue: it accepts jobs, but none is fetched.
#[utoipa::path(
    post, path = "/v1/queues/{name}/pause", tag = "queues", operation_id = "pause_queue",
    params(("name" = String, Path, description = "The queue.")),
    responses((status = 200, description = "Paused.", body = Object)),
)]
pub async fn pause(
    caller: Caller<Manage>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<Value>, Error> {
    set_paused(&app, &caller, &queue_name(&params)?, true).await
}

/// Resume a queue.
#[utoipa::path(
    post, path = "/v1/queues/{name}/resume", tag = "queues", operation_id = "resume_queue",
    params(("name" = String, Path, description = "The queue.")),
    responses((status = 200, description = "Resumed.", body = Object)),
)]
pub async fn resume(
    caller: Caller<Manage>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<Value>, Error> {
    set_paused(&app, &caller, &queue_name(&params)?, false).await
}

async fn set_paused(
    app: &App,
    caller: &Caller<Manage>,
    queue: &str,
    is_paused: bool,
) -> Result<Reply<Value>, Error> {
    queues::set_paused(&app.engine, caller.project_id, queue, is_paused).await?;
    let action = if is_paused { "queue.paused" } else { "queue.resumed" };
    audit::note(app, caller, NewAuditEntry::to(action, queue)).await;
    let view = json!({"name": queue, "paused": is_paused, "status": status(is_paused)});
    Ok(Reply::ok(json!({"queue": view})))
}

/// A page of dead letters.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OjsDeadLetters)]
pub struct DeadLetters {
    jobs: Vec<JobView>,
    #[schema(value_type = Object)]
    pagination: Value,
}

/// List dead letters, newest first.
#[utoipa::path(
    get, path = "/v1/dead-letter", tag = "dead-letter", operation_id = "list_dead_letters",
    params(PageQuery),
    responses((status = 200, description = "A page of jobs.", body = DeadLetters)),
)]
pub async fn dead_letters(
    caller: Caller<ReadPayloads>,
    State(app): State<App>,
    Query(query): Query<PageQuery>,
) -> Result<Reply<DeadLetters>, Error> {
    const MAX_LIMIT: u32 = 100;
    let (limit, offset) = page(query.limit, query.offset, MAX_LIMIT)?;
    let mut check = Check::default();
    check.optional_name("queue", query.queue.as_deref(), limits::MAX_QUEUE_CHARS);
    check.finish()?;
    let (project_id, wanted) = (caller.project_id, i64::from(limit) + i64::from(offset) + 1);
    let ids = dead_letters::newest(&app.engine, project_id, query.queue, wanted).await?;
    let pagination = pagination(limit, offset, ids.len());
    let mut letters = Vec::with_capacity(limit as usize);
    for id in ids.into_iter().skip(offset as usize).take(limit as usize) {
        match jobs::find_with_attempts(&app.engine, JobKey { project_id, id }).await {
            Ok((row, ended)) => letters.push(JobView::read(row, &ended)?),
            // Deleted meanwhile.
            Err(Error::JobNotFound) => (),
            Err(error) => return Err(error),
        }
    }
    Ok(Reply::ok(DeadLetters { jobs: letters, pagination }))
}

/// Retry a dead letter: its failures count from 0.
#[utoipa::path(
    post, path = "/v1/dead-letter/{id}/retry", tag = "dead-letter", operation_id = "retry_dead_letter",
    params(("id" = String, Path, description = "The job.")),
    responses(
        (status = 200, description = "The job, available.", body = JobReply),
        (status = 404, description = "No such job.", body = ErrorBody),
        (status = 409, description = "It is not a dead letter.", body = ErrorBody),
    ),
)]
pub async fn retry_dead_letter(
    caller: Caller<Manage>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<JobReply>, Error> {
    let id = job_id(params.get("id"))?;
    let key = JobKey { project_id: caller.project_id, id };
    control::retry_dead_letter(&app.engine, key, &caller.who.changed_by()).await?;
    audit::note(&app, &caller, NewAuditEntry::to("dead_letter.retried", id.to_string())).await;
    found::find(&app, &caller.who, key).await.map(Reply::ok)
}

/// Delete a dead letter.
#[utoipa::path(
    delete, path = "/v1/dead-letter/{id}", tag = "dead-letter", operation_id = "delete_dead_letter",
    params(("id" = String, Path, description = "The job.")),
    responses(
        (status = 200, description = "Deleted.", body = Object),
        (status = 404, description = "No such job.", body = ErrorBody),
        (status = 409, description = "It is not a dead letter.", body = ErrorBody),
    ),
)]
pub async fn delete_dead_letter(
    caller: Caller<Manage>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<Value>, Error> {
    let id = job_id(params.get("id"))?;
    dead_letters::delete(&app.engine, JobKey { project_id: caller.project_id, id }).await?;
    audit::note(&app, &caller, NewAuditEntry::to("dead_letter.deleted", id.to_string())).await;
    Ok(Reply::ok(json!({"deleted": true, "job_id": id.0.to_string()})))
}
