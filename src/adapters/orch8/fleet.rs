//! Workers, the handlers that they have, and the health of this server.

use std::collections::BTreeMap;

use axum::{Json as Reply, extract::State};
use chrono::{DateTime, TimeDelta, Utc};
use fencepost_domain::{error::Error, ids::ProjectId, limits, worker::WorkerState};
use fencepost_engine::workers::{self, WorkerRow};
use fencepost_web::{
    app::App,
    auth::{Caller, Read},
    wire::{extract::Query, validate::Check},
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::plain_errors::ErrorBody;

/// A worker counts as live for this long unless the query says otherwise.
const ALIVE_SECONDS: i64 = 60;
/// Pages of workers that are read for one list: those that are gone stay known for a while, and
/// must not hide the live ones.
const MAX_READ_PAGES: usize = 10;
/// The longest time that a query can name: a day.
const MAX_ALIVE_SECONDS: i64 = 86_400;

/// Which workers are listed.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct FleetQuery {
    /// Seconds since its last call within which a worker is live. Default: 60.
    #[param(minimum = 1, maximum = 86400)]
    alive_within_secs: Option<i64>,
    /// Whether to list the others, too. Default: false.
    #[serde(default)]
    include_stale: bool,
}

/// A worker.
#[derive(Debug, Serialize, ToSchema)]
pub struct Worker {
    worker_id: String,
    /// Types that it polls for; empty: any.
    handlers: Vec<String>,
    queues: Vec<String>,
    version: Option<String>,
    hostname: Option<String>,
    alive: bool,
    last_seen_at: DateTime<Utc>,
    registered_at: DateTime<Utc>,
}

/// A handler, and its live workers.
#[derive(Debug, Serialize, ToSchema)]
pub struct Handler {
    handler_name: String,
    workers: i64,
}

/// Workers that the query asks for, each with whether it is live.
async fn listed_workers(
    app: &App,
    project_id: ProjectId,
    query: &FleetQuery,
) -> Result<Vec<(WorkerRow, bool)>, Error> {
    let within = query.alive_within_secs.unwrap_or(ALIVE_SECONDS);
    let mut check = Check::default();
    check.range("alive_within_secs", within, 1, MAX_ALIVE_SECONDS);
    check.finish()?;
    let most = limits::MAX_PAGE_WORKERS as usize;
    let now = app.engine.now().await?;
    let is_recent = |it: &WorkerRow| now - it.last_seen_at <= TimeDelta::seconds(within);
    let is_alive = |it: &WorkerRow| it.state != WorkerState::Terminated && is_recent(it);
    let (mut found, mut after) = (Vec::new(), String::new());
    for _ in 0..MAX_READ_PAGES {
        let limit = limits::MAX_PAGE_WORKERS.into();
        let rows = workers::page(&app.engine, project_id, None, None, &after, limit).await?;
        let is_last = rows.len() < most;
        after = rows.last().map_or(after, |it| it.worker_id.clone());
        let with_life = rows.into_iter().map(|worker| {
            let alive = is_alive(&worker);
            (worker, alive)
        });
        found.extend(with_life.filter(|it| it.1 || query.include_stale));
        if is_last || found.len() >= most {
            break;
        }
    }
    found.truncate(most);
    Ok(found)
}

/// List workers: the first 200 that match, by id, among the first 2,000.
#[utoipa::path(
    get, path = "/workers", tag = "system", operation_id = "list_workers", params(FleetQuery),
    responses((status = 200, description = "The workers.", body = Vec<Worker>)),
)]
pub async fn workers(
    caller: Caller<Read>,
    State(app): State<App>,
    Query(query): Query<FleetQuery>,
) -> Result<Reply<Vec<Worker>>, Error> {
    let rows = listed_workers(&app, caller.project_id, &query).await?;
    let workers = rows.into_iter().map(|(row, alive)| Worker {
        worker_id: row.worker_id,
        handlers: row.job_types,
        queues: row.queues,
        version: row.sdk_version,
        hostname: row.hostname,
        alive,
        last_seen_at: row.last_seen_at,
        registered_at: row.registered_at,
    });
    Ok(Reply(workers.collect()))
}

/// List the handlers that workers have named, by name.
#[utoipa::path(
    get, path = "/handlers", tag = "system", operation_id = "list_handlers", params(FleetQuery),
    responses((status = 200, description = "The handlers.", body = Vec<Handler>)),
)]
pub async fn handlers(
    caller: Caller<Read>,
    State(app): State<App>,
    Query(query): Query<FleetQuery>,
) -> Result<Reply<Vec<Handler>>, Error> {
    let mut counted: BTreeMap<String, i64> = BTreeMap::new();
    for (row, alive) in listed_workers(&app, caller.project_id, &query).await? {
        for name in row.job_types {
            *counted.entry(name).or_default() += i64::from(alive);
        }
    }
    let handlers = counted.into_iter();
    let handlers = handlers.map(|(handler_name, workers)| Handler { handler_name, workers });
    Ok(Reply(handlers.collect()))
}

/// Health of this server.
#[derive(Debug, Serialize, ToSchema)]
pub struct Health {
    /// Always `ok`.
    status: &'static str,
}

/// Whether this server runs.
#[utoipa::path(
    get, path = "/health/live", tag = "system", operation_id = "live", security(()),
    responses((status = 200, description = "It runs.", body = Health)),
)]
pub async fn live() -> Reply<Health> {
    Reply(Health { status: "ok" })
}

/// Whether this server can serve.
#[utoipa::path(
    get, path = "/health/ready", tag = "system", operation_id = "ready", security(()),
    responses(
        (status = 200, description = "It can.", body = Health),
        (status = 503, description = "It cannot.", body = ErrorBody),
    ),
)]
pub async fn ready(State(app): State<App>) -> Result<Reply<Health>, Error> {
    app.engine.check_serving().await?;
    Ok(Reply(Health { status: "ok" }))
}
