//! Bulk requests: they count matching jobs first, and then start an operation.

use axum::http::StatusCode;
use fencepost_domain::{
    error::Error,
    limits,
    operation::{Kind, Which},
};
use fencepost_engine::operations::{self, NewOperation};
use fencepost_web::{app::App, auth::Caller, wire::validate::Check};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Operation;
use crate::{
    idempotency::{Answer, Ids},
    redact::shown,
    routes::audit::{self, NewAuditEntry},
};

/// Number of matching jobs, and the operation that processes them.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct BulkResult {
    /// Matching jobs, of the first 100,000 examined; at most `max`.
    pub count: i64,
    /// True if there are more jobs than were examined.
    pub is_capped: bool,
    /// The operation that was started; null after a dry run.
    #[schema(required)]
    pub operation: Option<Operation>,
}

/// A bulk request.
pub struct BulkRequest {
    /// The kind of operation.
    pub kind: Kind,
    /// The jobs it selects.
    pub which: Which,
    /// The action of the audit entry.
    pub action: &'static str,
    /// Maximum number of jobs.
    pub max: Option<i64>,
    /// Maximum jobs per second.
    pub rate_per_second: Option<i32>,
    /// Whether the jobs are only counted.
    pub dry_run: bool,
}

/// Checks the maximum and the rate.
pub fn check_pace(max: Option<i64>, rate_per_second: Option<i32>, check: &mut Check) {
    if let Some(max) = max {
        check.range("max", max, 1, limits::MAX_OPERATION_JOBS);
    }
    if let Some(rate) = rate_per_second {
        check.range("rate_per_second", rate, 1, limits::MAX_OPERATION_RATE);
    }
}

/// Starts an operation, or returns the number of jobs after a dry run.
///
/// # Errors
/// The errors of [`operations::begin`].
pub async fn begin<P>(
    app: &App,
    by: &Caller<P>,
    ids: Ids,
    request: BulkRequest,
    (count, is_capped): (i64, bool),
) -> Result<Answer, Error> {
    let BulkRequest { kind, which, action, max, rate_per_second, dry_run } = request;
    let count = max.map_or(count, |it| it.min(count));
    if dry_run {
        let reply = BulkResult { count, is_capped, operation: None };
        return Answer::new(StatusCode::OK, None, &reply);
    }
    let new = NewOperation {
        id: ids.operation(),
        kind,
        filter: which,
        expected: (!is_capped || Some(count) == max).then_some(count),
        max_jobs: max,
        rate_per_second,
    };
    let row = operations::begin(&app.engine, by.tenant(), &new).await?;
    let after = serde_json::to_string(&new.filter).ok();
    audit::note(app, by, NewAuditEntry { after, ..NewAuditEntry::to(action, row.id.to_string()) })
        .await;
    let location = Some(format!("/v1/operations/{}", row.id));
    let reply = BulkResult { count, is_capped, operation: Some(shown(&by.who, row.into())) };
    Answer::new(StatusCode::ACCEPTED, location, &reply)
}
