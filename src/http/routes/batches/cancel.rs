//! `POST /v1/batches/{batch_id}/cancel`.

use axum::{Json as Reply, extract::State};
use fencepost_domain::{
    error::Error,
    ids::{BatchId, OperationId},
    operation::{JobFilter, Kind, Which},
};
use fencepost_engine::{
    batches,
    operations::{self, NewOperation},
};
use fencepost_web::{
    app::App,
    auth::{Caller, Manage},
    wire::extract::{BatchInPath, OptionalJson, RequestBody},
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::BatchView;
use crate::{
    error::ErrorBody,
    redact::shown,
    routes::{
        audit::{self, NewAuditEntry},
        operations::Operation,
    },
};

/// How to cancel a batch. No body: its jobs run on.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"cancel_jobs": true}))]
pub struct CancelBatchRequest {
    /// Whether to cancel its jobs that have not ended. Default: false.
    #[serde(default)]
    #[schema(required = false)]
    cancel_jobs: bool,
}

impl RequestBody for CancelBatchRequest {}

/// A batch that was cancelled, and the operation that cancels its jobs.
#[derive(Debug, Serialize, ToSchema)]
pub struct CancelledBatch {
    /// The batch as it is after the request: sealed.
    pub batch: BatchView,
    /// The operation that cancels its jobs; null if none was asked for.
    #[schema(required)]
    pub operation: Option<Operation>,
}

/// Cancel a batch.
///
/// For a batch that is not needed any more: it is sealed, and completes when its jobs have ended.
/// A batch without jobs completes at once. With `cancel_jobs` an operation cancels its jobs that
/// have not ended.
#[utoipa::path(
    post, path = "/batches/{batch_id}/cancel", tag = "batches", operation_id = "batches_cancel",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(("batch_id" = String, Path, description = "The batch.", example = "batch_01m7w3ha3aextt8pkwwdmxsmqw")),
    request_body(content = CancelBatchRequest, description = "Optional."),
    responses(
        (status = 200, description = "The batch, and the operation if jobs are cancelled.", body = CancelledBatch),
        (status = 404, description = "The project has no such batch.", body = ErrorBody),
    ),
)]
pub async fn cancel(
    caller: Caller<Manage>,
    State(app): State<App>,
    BatchInPath(id): BatchInPath,
    OptionalJson(request): OptionalJson<CancelBatchRequest>,
) -> Result<Reply<CancelledBatch>, Error> {
    let row = batches::seal(&app.engine, caller.project_id, id).await?;
    audit::note(&app, &caller, NewAuditEntry::to("batch.cancelled", id.to_string())).await;
    let operation = match request.cancel_jobs && row.completed_at.is_none() {
        true => Some(cancel_jobs(&app, &caller, id).await?),
        false => None,
    };
    Ok(Reply(CancelledBatch { batch: row.into(), operation }))
}

async fn cancel_jobs(app: &App, caller: &Caller<Manage>, id: BatchId) -> Result<Operation, Error> {
    let new = NewOperation {
        id: OperationId::generate(),
        kind: Kind::JobsCancel,
        filter: Which::Jobs(JobFilter { batch_id: Some(id), ..JobFilter::default() }),
        expected: None,
        max_jobs: None,
        rate_per_second: None,
    };
    let row = operations::begin(&app.engine, caller.tenant(), &new).await?;
    Ok(shown(&caller.who, row.into()))
}
