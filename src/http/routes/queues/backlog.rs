//! `GET /v1/queues/{queue}/backlog`: the numbers that an autoscaler needs.

use axum::{Json as Reply, extract::State};
use chrono::{DateTime, Utc};
use fencepost_domain::{error::Error, limits};
use fencepost_store as store;
use fencepost_web::{
    app::App,
    auth::{Caller, Read},
    wire::{extract::NameInPath, validate::Check},
};
use serde::Serialize;
use utoipa::ToSchema;

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
/// be scaled before the first job.
#[utoipa::path(
    get, path = "/queues/{queue}/backlog", tag = "queues", operation_id = "queues_backlog",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(("queue" = String, Path, description = "The queue.", example = "default")),
    responses(
        (status = 200, description = "The backlog.", body = Backlog),
        (status = 400, description = "The name is invalid.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<Read>,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
) -> Result<Reply<Backlog>, Error> {
    let mut check = Check::default();
    check.name("queue", &queue, limits::MAX_QUEUE_CHARS);
    check.finish()?;
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let rows = store::queues::counts::queues(&mut conn, caller.project_id, &[queue]).await?;
    let row = rows.into_iter().next().ok_or(Error::QueueNotFound)?;
    let is_paused = row.paused_at.is_some();
    let ready = if is_paused { 0 } else { (row.active - row.backoff - row.processing).max(0) };
    let oldest = row.oldest_ready_at.filter(|_| !is_paused);
    let most = row.max_concurrency.map_or(i64::MAX, i64::from);
    Ok(Reply(Backlog {
        backlog: (ready + row.processing).min(most.max(row.processing)),
        ready,
        processing: row.processing,
        oldest_ready_age_seconds: oldest.map_or(0, |it| (row.now - it).num_seconds().max(0)),
        workers: row.workers,
        paused_at: row.paused_at,
        queue: row.queue,
    }))
}
