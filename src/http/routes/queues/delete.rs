//! `DELETE /v1/queues/{queue}`.

use axum::{extract::State, http::StatusCode};
use fencepost_domain::error::Error;
use fencepost_engine::queues;
use fencepost_web::{
    app::App,
    auth::{Caller, Manage},
    wire::extract::NameInPath,
};

use super::{if_known, one};
use crate::{
    error::ErrorBody,
    routes::audit::{self, NewAuditEntry},
    settings::{self, Preconditions},
};

/// Delete a queue.
///
/// With its settings; for a name that was mistyped. Only without jobs: purge what waits, and delete
/// dead letters. Finished jobs count until their retention. While a worker polls it, the queue is
/// still listed. A job that is enqueued later makes a new queue of this name.
#[utoipa::path(
    delete, path = "/queues/{queue}", tag = "queues", operation_id = "queues_delete",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(("queue" = String, Path, description = "The queue.", example = "default"), settings::Header),
    responses(
        (status = 204, description = "The queue is deleted."),
        (status = 404, description = "The queue does not exist.", body = ErrorBody),
        (status = 409, description = "The queue has jobs, or a push.", body = ErrorBody),
    ),
)]
pub async fn delete(
    caller: Caller<Manage>,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
    conditions: Preconditions,
) -> Result<StatusCode, Error> {
    let before = one(&app, caller.project_id, queue.clone()).await?.0.settings();
    let about = (caller.project_id, format!("queue {queue}"));
    let current = if_known(&app, caller.project_id, &queue);
    let delete = queues::delete(&app.engine, caller.project_id, &queue);
    conditions.write(&app, about, current, delete).await?;
    let entry = NewAuditEntry { before: Some(before), ..NewAuditEntry::to("queue.deleted", queue) };
    audit::note(&app, &caller, entry).await;
    Ok(StatusCode::NO_CONTENT)
}
