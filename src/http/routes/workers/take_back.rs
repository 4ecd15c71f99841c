//! `POST /v1/workers/{worker_id}/take-back` and `POST /v1/queues/{queue}/take-back`.

use axum::{Json as Reply, extract::State};
use fencepost_domain::{error::Error, limits};
use fencepost_engine::workers::take_back::{self, ReleasedLeases};
use fencepost_web::{
    app::App,
    auth::{Caller, Manage},
    wire::{
        extract::{NameInPath, OptionalJson},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    change::ReasonRequest,
    error::ErrorBody,
    routes::{
        audit::{self, NewAuditEntry},
        queues,
    },
};

/// Answer to a request that releases leases for their workers.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct TakeBackReply {
    /// Number of released jobs.
    pub released: u64,
    /// True if 10,000 were released: there may be more.
    pub has_more: bool,
}

impl From<ReleasedLeases> for TakeBackReply {
    fn from(ReleasedLeases { number, has_more }: ReleasedLeases) -> Self {
        Self { released: number, has_more }
    }
}

/// Take back the jobs of a worker.
///
/// Releases all jobs that the worker holds, without counting failures. The fence holds: if it still
/// works on one, its next call about it is refused. It may go on polling.
#[utoipa::path(
    post, path = "/workers/{worker_id}/take-back", tag = "workers",
    operation_id = "workers_take_back",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(("worker_id" = String, Path, description = "The worker.", example = "worker-1")),
    request_body(content = ReasonRequest, description = "Optional."),
    responses(
        (status = 200, description = "The jobs wait again.", body = TakeBackReply),
        (status = 404, description = "The project has no such worker.", body = ErrorBody),
    ),
)]
pub async fn of_worker(
    caller: Caller<Manage>,
    State(app): State<App>,
    NameInPath(worker_id): NameInPath,
    OptionalJson(request): OptionalJson<ReasonRequest>,
) -> Result<Reply<TakeBackReply>, Error> {
    let key = (caller.project_id, worker_id.as_str().into());
    let by = request.accept(&caller.who)?;
    let done = take_back::of_worker(&app.engine, &key, &by).await?;
    note(&app, &caller, NewAuditEntry::to("worker.take_back", &*worker_id), done).await;
    Ok(Reply(done.into()))
}

/// Take back the jobs that silent workers hold.
///
/// Releases the queue's running jobs whose workers have made no call for a minute, or for three
/// times their `beat_seconds`, without counting failures. The fence holds: if a worker still works
/// on one, its next call about it is refused.
#[utoipa::path(
    post, path = "/queues/{queue}/take-back", tag = "queues", operation_id = "queues_take_back",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(("queue" = String, Path, description = "The queue.", example = "default")),
    request_body(content = ReasonRequest, description = "Optional."),
    responses(
        (status = 200, description = "The jobs wait again.", body = TakeBackReply),
        (status = 404, description = "The project has no such queue.", body = ErrorBody),
    ),
)]
pub async fn in_queue(
    caller: Caller<Manage>,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
    OptionalJson(request): OptionalJson<ReasonRequest>,
) -> Result<Reply<TakeBackReply>, Error> {
    let by = request.accept(&caller.who)?;
    let mut check = Check::default();
    check.name("queue", &queue, limits::MAX_QUEUE_CHARS);
    check.finish()?;
    queues::if_known(&app, caller.project_id, &queue).await?.ok_or(Error::QueueNotFound)?;
    let done = take_back::in_queue(&app.engine, caller.project_id, &queue, &by).await?;
    note(&app, &caller, NewAuditEntry::to("queue.take_back", &*queue), done).await;
    Ok(Reply(done.into()))
}

async fn note(app: &App, caller: &Caller<Manage>, entry: NewAuditEntry, done: ReleasedLeases) {
    let after = Some(serde_json::json!({ "released": done.number }).to_string());
    audit::note(app, caller, NewAuditEntry { after, ..entry }).await;
}
