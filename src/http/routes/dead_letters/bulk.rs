//! `POST /v1/dead-letters/retry` and `POST /v1/dead-letters/purge`: bulk operations on dead
//! letters.

use axum::{extract::State, response::Response};
use fencepost_domain::{
    error::Error,
    limits,
    operation::{Filter, Kind, Which},
};
use fencepost_store as store;
use fencepost_web::{
    app::App,
    auth::{Caller, Manage},
    wire::{
        extract::{Object, RequestBody},
        openapi::range,
        validate::Check,
    },
};
use serde::Deserialize;
use utoipa::ToSchema;

use super::check_filter;
use crate::{
    idempotency::{self, Answer, Ids, Once},
    routes::operations::bulk::{self, BulkRequest, BulkResult},
};

/// The value of `confirm` that a purge needs.
const CONFIRM_PURGE: &str = "purge";

/// Bulk retry of dead letters.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"filter": {"job_type": "email.send"}, "rate_per_second": 50}))]
#[schema(as = RetryDeadLettersRequest)]
pub struct RetryManyRequest {
    /// Conditions for dead letters; an empty filter selects all.
    #[schema(value_type = Filter)]
    filter: Object<Filter>,
    /// Only count them. Default: false.
    #[serde(default)]
    dry_run: bool,
    /// Maximum number of jobs, oldest first. Default: all.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_OPERATION_JOBS)))))]
    max: Option<i64>,
    /// Maximum jobs per second. Default: unlimited.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_OPERATION_RATE)))))]
    rate_per_second: Option<i32>,
}

/// Bulk deletion of dead letters.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"filter": {"job_type": "email.send"}, "confirm": "purge"}))]
#[schema(as = PurgeDeadLettersRequest)]
pub struct PurgeManyRequest {
    /// Conditions for dead letters; an empty filter selects all.
    #[schema(value_type = Filter)]
    filter: Object<Filter>,
    /// Must be `purge`, unless it is a dry run.
    confirm: Option<String>,
    /// Only count them. Default: false.
    #[serde(default)]
    dry_run: bool,
}

impl RequestBody for RetryManyRequest {}
impl RequestBody for PurgeManyRequest {}

/// Retry many dead letters.
///
/// Retries those that match when the operation starts, oldest first, in the background. The
/// operation shows the progress. `dry_run` only counts them.
#[utoipa::path(
    post, path = "/dead-letters/retry", tag = "dead-letters", operation_id = "dead_letters_bulk_retry",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(idempotency::Header),
    request_body = RetryManyRequest,
    responses(
        (status = 202, description = "The operation has started; `Location` is its path.", body = BulkResult,
         headers(("Location" = String, description = "The operation's path."))),
        (status = 200, description = "Dry run: the number of matching jobs.", body = BulkResult),
    ),
)]
pub async fn retry(
    caller: Caller<Manage>,
    State(app): State<App>,
    Once { request, repeat }: Once<RetryManyRequest>,
) -> Result<Response, Error> {
    let (running, by) = (app.clone(), caller.clone());
    repeat
        .once(&app, &caller, async move |ids: Ids| {
            let RetryManyRequest { filter: Object(filter), dry_run, max, rate_per_second } =
                request;
            let mut check = Check::default();
            check_filter("filter.", &filter, &mut check);
            bulk::check_pace(max, rate_per_second, &mut check);
            check.finish()?;
            let what = BulkTarget { kind: Kind::DeadLettersRetry, filter, max, rate_per_second };
            begin(&running, &by, ids, what, dry_run).await
        })
        .await
}

/// Purge dead letters.
///
/// Deletes those that match when the operation starts, in the background. This cannot be undone:
/// `confirm` must be `purge`.
#[utoipa::path(
    post, path = "/dead-letters/purge", tag = "dead-letters", operation_id = "dead_letters_purge",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(idempotency::Header),
    request_body = PurgeManyRequest,
    responses(
        (status = 202, description = "The operation has started; `Location` is its path.", body = BulkResult,
         headers(("Location" = String, description = "The operation's path."))),
        (status = 200, description = "Dry run: the number of matching jobs.", body = BulkResult),
    ),
)]
pub async fn purge(
    caller: Caller<Manage>,
    State(app): State<App>,
    Once { request, repeat }: Once<PurgeManyRequest>,
) -> Result<Response, Error> {
    let (running, by) = (app.clone(), caller.clone());
    repeat
        .once(&app, &caller, async move |ids: Ids| {
            let PurgeManyRequest { filter: Object(filter), confirm, dry_run } = request;
            let mut check = Check::default();
            check_filter("filter.", &filter, &mut check);
            if !dry_run && confirm.as_deref() != Some(CONFIRM_PURGE) {
                check.refuse(
                    "confirm",
                    format!("must be \"{CONFIRM_PURGE}\": deletion cannot be undone"),
                );
            }
            check.finish()?;
            let kind = Kind::DeadLettersPurge;
            let what = BulkTarget { kind, filter, max: None, rate_per_second: None };
            begin(&running, &by, ids, what, dry_run).await
        })
        .await
}

async fn begin(
    app: &App,
    by: &Caller<Manage>,
    ids: Ids,
    what: BulkTarget,
    dry_run: bool,
) -> Result<Answer, Error> {
    let mut conn = app.engine.pools.read_for(by.project_id).await?;
    let counted = store::jobs::dead_letters::count(&mut conn, by.project_id, &what.filter).await?;
    drop(conn);
    let BulkTarget { kind, filter, max, rate_per_second } = what;
    let action = match kind {
        Kind::DeadLettersPurge => "dead_letters.purged",
        _ => "dead_letters.retried",
    };
    let request =
        BulkRequest { kind, which: Which::Letters(filter), action, max, rate_per_second, dry_run };
    bulk::begin(app, by, ids, request, counted).await
}

struct BulkTarget {
    kind: Kind,
    filter: Filter,
    max: Option<i64>,
    rate_per_second: Option<i32>,
}
