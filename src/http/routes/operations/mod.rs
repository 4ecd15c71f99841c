//! `GET /v1/operations`, `GET /v1/operations/{operation_id}` and `POST …/abort`: progress of bulk
//! operations.

pub mod bulk;

use std::collections::BTreeMap;

use axum::{Json as Reply, extract::State};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::Error,
    ids::OperationId,
    limits,
    operation::{Kind, State as OperationState, Which},
};
use fencepost_engine::operations::{self, OperationRow};
use fencepost_store as store;
use fencepost_web::{
    app::App,
    auth::{Caller, Manage, Read},
    wire::{
        extract::{OperationInPath, Query},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{
    cursor::{self, List},
    error::ErrorBody,
    page::{PageSize, page},
    redact::{Redact, shown},
    routes::audit::{self, NewAuditEntry},
};

const DEFAULT_PAGE_OPERATIONS: u32 = 20;

/// A bulk operation that runs in the background. It survives restarts, and any node continues it.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Operation {
    /// Id of the operation.
    #[schema(example = "op_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// Kind of the operation.
    #[schema(value_type = Kind)]
    pub kind: String,
    /// State.
    pub state: OperationState,
    /// Filter: which of the jobs that existed at its start.
    #[schema(value_type = Which)]
    pub filter: serde_json::Value,
    /// An error of the dead letters with the filter's `fingerprint`, read at the start. Null: the
    /// filter has no `fingerprint`, or the operation deletes.
    #[schema(required)]
    pub sample_error: Option<String>,
    /// True: the caller may not read payloads, so `sample_error` is null.
    pub redacted: bool,
    /// Estimated number of jobs at its start; null: more match than
    /// the server counts.
    #[schema(required)]
    pub expected: Option<i64>,
    /// Processed jobs.
    pub done: i64,
    /// Number of skipped jobs: they had changed meanwhile, or the operation was
    /// not possible for them.
    pub skipped: i64,
    /// Skipped jobs by reason: the code of the error with which a request for that job alone would
    /// be refused, or `template` where results of parents fill its payload. Absent: none.
    #[schema(example = json!({"unique_conflict": 2}))]
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub skipped_by: BTreeMap<String, i64>,
    /// Maximum number of jobs; null: all.
    #[schema(required)]
    pub max: Option<i64>,
    /// Maximum jobs per second; null: unlimited.
    #[schema(required)]
    pub rate_per_second: Option<i32>,
    /// Error of its last step; null: none. A failed step is repeated after a pause.
    #[schema(required)]
    pub last_error: Option<String>,
    /// When it started.
    pub created_at: DateTime<Utc>,
    /// Time of the operation's last step.
    pub updated_at: DateTime<Utc>,
    /// When it ended.
    #[schema(required)]
    pub ended_at: Option<DateTime<Utc>>,
}

impl Redact for Operation {
    fn redact(&mut self) {
        self.redacted = true;
        self.sample_error = None;
    }
}

impl From<OperationRow> for Operation {
    fn from(row: OperationRow) -> Self {
        Self {
            id: row.id.to_string(),
            kind: row.kind,
            state: row.state,
            filter: row.filter,
            sample_error: row.sample_error,
            redacted: false,
            expected: row.expected,
            done: row.done,
            skipped: row.skipped,
            skipped_by: row.skipped_by.map(|it| it.0.0).unwrap_or_default(),
            max: row.max_jobs,
            rate_per_second: row.rate_per_second,
            last_error: row.last_error,
            created_at: row.created_at,
            updated_at: row.updated_at,
            ended_at: row.ended_at,
        }
    }
}

/// Page of operations.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct OperationsQuery {
    /// Maximum number of operations to return. Default: 20.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

page! {
    /// A page of operations, newest first.
    OperationPage {
        /// Operations of the page.
        operations: Operation
    }
}

/// List operations.
///
/// Newest first. Ended ones are kept for 30 days.
#[utoipa::path(
    get, path = "/operations", tag = "operations", operation_id = "operations_list",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(OperationsQuery),
    responses(
        (status = 200, description = "A page of operations.", body = OperationPage),
    ),
)]
pub async fn list(
    caller: Caller<Read>,
    State(app): State<App>,
    Query(query): Query<OperationsQuery>,
) -> Result<Reply<OperationPage>, Error> {
    let mut check = Check::default();
    let size = PageSize::read(
        query.limit,
        DEFAULT_PAGE_OPERATIONS,
        limits::MAX_PAGE_OPERATIONS,
        &mut check,
    );
    check.finish()?;
    let list = List::of(caller.project_id, "operations");
    let before = cursor::read_id(&app, list, query.cursor.as_deref())?.map(OperationId);
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let mut rows =
        store::operations::page(&mut conn, caller.project_id, before, size.one_more()).await?;
    let next_cursor = size.cut(&mut rows, |it| cursor::write_id(&app, list, it.id.0));
    let operations: Vec<_> = rows.into_iter().map(Operation::from).collect();
    Ok(Reply(OperationPage::of(shown(&caller.who, operations), next_cursor)))
}

/// Read an operation.
#[utoipa::path(
    get, path = "/operations/{operation_id}", tag = "operations", operation_id = "operations_get",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(("operation_id" = String, Path, description = "The operation.", example = "op_01m7w3ha3aextt8pkwwdmxsmqw")),
    responses(
        (status = 200, description = "The operation.", body = Operation),
        (status = 404, description = "The project has no such operation.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<Read>,
    State(app): State<App>,
    OperationInPath(id): OperationInPath,
) -> Result<Reply<Operation>, Error> {
    let row = operations::find(&app.engine, caller.project_id, id).await?;
    Ok(Reply(shown(&caller.who, row.into())))
}

/// Abort an operation.
///
/// Jobs that were processed stay so. Aborting an ended operation changes nothing.
#[utoipa::path(
    post, path = "/operations/{operation_id}/abort", tag = "operations", operation_id = "operations_abort",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(("operation_id" = String, Path, description = "The operation.", example = "op_01m7w3ha3aextt8pkwwdmxsmqw")),
    responses(
        (status = 200, description = "The operation.", body = Operation),
        (status = 404, description = "The project has no such operation.", body = ErrorBody),
    ),
)]
pub async fn abort(
    caller: Caller<Manage>,
    State(app): State<App>,
    OperationInPath(id): OperationInPath,
) -> Result<Reply<Operation>, Error> {
    let row = operations::abort(&app.engine, caller.project_id, id).await?;
    audit::note(&app, &caller, NewAuditEntry::to("operation.aborted", id.to_string())).await;
    Ok(Reply(shown(&caller.who, row.into())))
}
