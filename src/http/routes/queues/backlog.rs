//! `GET /v1/queues/{queue}/backlog`: the numbers that an autoscaler needs.

use std::time::Duration;

use axum::{Extension, Json as Reply, extract::State};
use chrono::{DateTime, Utc};
use fencepost_domain::{error::Error, limits};
use fencepost_engine::backlog;
use fencepost_web::{
    app::App,
    auth::{Caller, Read},
    wire::{
        ClientGone,
        extract::{NameInPath, Query},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::error::ErrorBody;

/// Backlog of a queue.
#[derive(Debug, Serialize, ToSchema)]
pub struct Backlog {
    /// Name of the queue.
    pub queue: String,
    /// Jobs that need workers: `ready` plus `processing`, at most `max_concurrency`.
    pub backlog: i64,
    /// Jobs that wait for a worker, a concurrency key, a rate limit or labels; 0 while the queue is
    /// paused.
    pub ready: i64,
    /// Running jobs.
    pub processing: i64,
    /// Age of the longest-waiting ready job; 0: none waits, or the queue is paused.
    pub oldest_ready_age_seconds: i64,
    /// Live workers that poll it.
    pub workers: i64,
    /// Time since when the queue is paused; null: it is not.
    #[schema(required)]
    pub paused_at: Option<DateTime<Utc>>,
}

/// Read a queue's backlog.
///
/// A small, flat object for autoscalers. An unused queue has an empty backlog, so its workers can
/// be scaled before the first job. `wait_seconds` delays the answer until the backlog is not 0, or
/// the time is up.
#[utoipa::path(
    get, path = "/queues/{queue}/backlog", tag = "queues", operation_id = "queues_backlog",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(WaitQuery, ("queue" = String, Path, description = "The queue.", example = "default")),
    responses(
        (status = 200, description = "The backlog.", body = Backlog),
        (status = 400, description = "The name or `wait_seconds` is invalid.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<Read>,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
    Extension(ClientGone(gone)): Extension<ClientGone>,
    Query(query): Query<WaitQuery>,
) -> Result<Reply<Backlog>, Error> {
    let wait_seconds = query.wait_seconds.unwrap_or(0);
    let mut check = Check::default();
    check.name("queue", &queue, limits::MAX_QUEUE_CHARS);
    check.range("wait_seconds", wait_seconds, 0, limits::MAX_POLL_WAIT_SECONDS);
    check.finish()?;
    let wait = Duration::from_secs(wait_seconds.into());
    let (project_id, gone) = (caller.project_id, gone.cancelled());
    let row = backlog::until_any(&app.engine, project_id, &queue, wait, gone).await?;
    let oldest = row.oldest_ready_at.filter(|_| row.paused_at.is_none());
    Ok(Reply(Backlog {
        backlog: backlog::size(&row),
        ready: backlog::ready(&row),
        processing: row.processing,
        oldest_ready_age_seconds: oldest.map_or(0, |it| (row.now - it).num_seconds().max(0)),
        workers: row.workers,
        paused_at: row.paused_at,
        queue: row.queue,
    }))
}

/// How long to wait for a backlog.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct WaitQuery {
    /// Seconds to wait for the first job.
    #[param(minimum = 0, maximum = 30)]
    wait_seconds: Option<u32>,
}
