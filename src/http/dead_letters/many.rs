//! `POST /v1/dead-letters/retry` and `POST /v1/dead-letters/purge`: many at once, as an operation.

use axum::{
    Extension,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::Response,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::check_filter;
use crate::{
    app::App,
    auth::{Caller, Manage},
    domain::{
        limits,
        operation::{Filter, Kind},
    },
    engine::operations::{self, NewOperation},
    error::Error,
    http::{
        audit::{self, Deed},
        error::ErrorBody,
        idempotency::{self, Answer, Ids},
        operations::Operation,
    },
    store,
    wire::{
        RequestId,
        check::Check,
        extract::{Fingerprinted, Object, RequestBody},
    },
};

/// What a purge asks to be typed.
const CONFIRM_PURGE: &str = "purge";

/// Which dead letters to bring back, and how fast.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"filter": {"job_type": "email.send"}, "rate_per_second": 50}))]
#[schema(as = RetryDeadLettersRequest)]
pub struct RetryManyRequest {
    /// Which; an empty filter means all.
    #[schema(value_type = Filter)]
    filter: Object<Filter>,
    /// Only count them. Default: false.
    #[serde(default)]
    dry_run: bool,
    /// No more than so many, the oldest first. Default: all.
    #[schema(minimum = 1, maximum = 10_000_000)]
    max: Option<i64>,
    /// No more than so many in a second. Default: as fast as it can.
    #[schema(minimum = 1, maximum = 10_000)]
    rate_per_second: Option<i32>,
}

/// Which dead letters to delete.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"filter": {"job_type": "email.send"}, "confirm": "purge"}))]
#[schema(as = PurgeDeadLettersRequest)]
pub struct PurgeManyRequest {
    /// Which; an empty filter means all.
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

/// How many dead letters there are, and what is done with them.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = DeadLettersReply)]
pub struct ManyReply {
    /// How many match, of the oldest 100,000; no more than `max`.
    pub count: i64,
    /// Whether there are more dead letters than were counted.
    pub is_capped: bool,
    /// The operation that has begun; null after a dry run.
    #[schema(required)]
    pub operation: Option<Operation>,
}

/// Retry many dead letters.
///
/// Those that match when it begins, the oldest first, in the background: the operation says how far it has
/// come. With `dry_run`, only their number.
#[utoipa::path(
    post, path = "/dead-letters/retry", tag = "dead-letters", operation_id = "dead_letters_retry_many",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(("Idempotency-Key" = Option<String>, Header, description = "Repeating the request with the same key answers as the first time, for 24 hours.", max_length = 200)),
    request_body = RetryManyRequest,
    responses(
        (status = 202, description = "The operation has begun; `Location` leads to it.", body = ManyReply,
         headers(("Location" = String, description = "The operation's path."), ("Idempotent-Replay" = Option<String>, description = "`true` when this is the answer to an earlier request."))),
        (status = 200, description = "A dry run: how many there are.", body = ManyReply),
        (status = 400, description = "The request cannot be read or breaks a rule.", body = ErrorBody),
        (status = 401, description = "No valid API key.", body = ErrorBody),
        (status = 409, description = "The idempotency key came with another request.", body = ErrorBody),
        (status = 413, description = "The body is too large.", body = ErrorBody),
        (status = 415, description = "The body is not JSON.", body = ErrorBody),
        (status = 503, description = "Try again later.", body = ErrorBody),
    ),
)]
pub async fn retry(
    caller: Caller<Manage>,
    State(app): State<App>,
    Extension(request_id): Extension<RequestId>,
    headers: HeaderMap,
    Fingerprinted { request, fingerprint }: Fingerprinted<RetryManyRequest>,
) -> Result<Response, Error> {
    let key = idempotency::key(&headers, None)?;
    let (running, by) = (app.clone(), caller.clone());
    idempotency::once(&app, &caller, key, &fingerprint, &request_id, async move |ids: Ids| {
        let RetryManyRequest { filter: Object(filter), dry_run, max, rate_per_second } = request;
        let mut check = Check::default();
        check_filter("filter.", &filter, &mut check);
        if let Some(max) = max {
            check.range("max", max, 1, limits::MAX_OPERATION_JOBS);
        }
        if let Some(rate) = rate_per_second {
            check.range("rate_per_second", rate, 1, limits::MAX_OPERATION_RATE);
        }
        check.finish()?;
        let what = What { kind: Kind::DeadLettersRetry, filter, max, rate_per_second };
        begin(&running, &by, ids, what, dry_run).await
    })
    .await
}

/// Purge dead letters.
///
/// Deletes those that match when it begins, for good, in the background. `confirm` must be `purge`.
#[utoipa::path(
    post, path = "/dead-letters/purge", tag = "dead-letters", operation_id = "dead_letters_purge",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(("Idempotency-Key" = Option<String>, Header, description = "Repeating the request with the same key answers as the first time, for 24 hours.", max_length = 200)),
    request_body = PurgeManyRequest,
    responses(
        (status = 202, description = "The operation has begun; `Location` leads to it.", body = ManyReply,
         headers(("Location" = String, description = "The operation's path."), ("Idempotent-Replay" = Option<String>, description = "`true` when this is the answer to an earlier request."))),
        (status = 200, description = "A dry run: how many there are.", body = ManyReply),
        (status = 400, description = "The request cannot be read or breaks a rule.", body = ErrorBody),
        (status = 401, description = "No valid API key.", body = ErrorBody),
        (status = 409, description = "The idempotency key came with another request.", body = ErrorBody),
        (status = 413, description = "The body is too large.", body = ErrorBody),
        (status = 415, description = "The body is not JSON.", body = ErrorBody),
        (status = 503, description = "Try again later.", body = ErrorBody),
    ),
)]
pub async fn purge(
    caller: Caller<Manage>,
    State(app): State<App>,
    Extension(request_id): Extension<RequestId>,
    headers: HeaderMap,
    Fingerprinted { request, fingerprint }: Fingerprinted<PurgeManyRequest>,
) -> Result<Response, Error> {
    let key = idempotency::key(&headers, None)?;
    let (running, by) = (app.clone(), caller.clone());
    idempotency::once(&app, &caller, key, &fingerprint, &request_id, async move |ids: Ids| {
        let PurgeManyRequest { filter: Object(filter), confirm, dry_run } = request;
        let mut check = Check::default();
        check_filter("filter.", &filter, &mut check);
        if !dry_run && confirm.as_deref() != Some(CONFIRM_PURGE) {
            check.refuse(
                "confirm",
                format!("must be \"{CONFIRM_PURGE}\": they are deleted for good"),
            );
        }
        check.finish()?;
        let kind = Kind::DeadLettersPurge;
        let what = What { kind, filter, max: None, rate_per_second: None };
        begin(&running, &by, ids, what, dry_run).await
    })
    .await
}

struct What {
    kind: Kind,
    filter: Filter,
    max: Option<i64>,
    rate_per_second: Option<i32>,
}

async fn begin(
    app: &App,
    by: &Caller<Manage>,
    ids: Ids,
    what: What,
    dry_run: bool,
) -> Result<Answer, Error> {
    let project_id = by.project_id;
    let mut conn = app.engine.pools.read_for(project_id).await?;
    let (count, is_capped) =
        store::dead_letters::count(&mut conn, project_id, &what.filter).await?;
    drop(conn);
    let count = what.max.map_or(count, |it| it.min(count));
    if dry_run {
        let reply = ManyReply { count, is_capped, operation: None };
        return Answer::new(StatusCode::OK, None, &reply);
    }
    let expected = (!is_capped || Some(count) == what.max).then_some(count);
    let new = NewOperation {
        id: ids.operation(),
        kind: what.kind,
        filter: what.filter,
        expected,
        max_jobs: what.max,
        rate_per_second: what.rate_per_second,
    };
    let row = operations::begin(&app.engine, project_id, &new).await?;
    let action = match what.kind {
        Kind::DeadLettersPurge => "dead_letters.purged",
        _ => "dead_letters.retried",
    };
    let after = serde_json::to_string(&new.filter).ok();
    audit::note(app, by, Deed { after, ..Deed::to(action, row.id.to_string()) }).await;
    let location = Some(format!("/v1/operations/{}", row.id));
    let reply = ManyReply { count, is_capped, operation: Some(row.into()) };
    Answer::new(StatusCode::ACCEPTED, location, &reply)
}
