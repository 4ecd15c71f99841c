//! `POST /v1/jobs/cancel`, `…/retry`, `…/pause`, `…/resume` and `…/replay`: bulk operations on
//! listed jobs.

use axum::{extract::State, response::Response};
use fencepost_domain::{
    error::Error,
    limits,
    operation::{JobFilter, Kind, Which},
};
use fencepost_store as store;
use fencepost_web::{
    app::App,
    auth::{Caller, CallerKind, Manage, Replay},
    wire::{
        extract::{Object, RequestBody},
        openapi::range,
        validate::Check,
    },
};
use serde::Deserialize;
use utoipa::ToSchema;

use super::read::{MAX_TAG_FILTER_CHARS, may_search};
use crate::{
    idempotency::{self, Once},
    routes::operations::bulk::{self, BulkRequest, BulkResult},
};

/// Bulk request about jobs.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"filter": {"queue": "default", "tag": "customer:42"}, "dry_run": true}))]
pub struct BulkJobsRequest {
    /// Conditions for jobs; an empty filter selects all jobs that the operation can handle.
    #[schema(value_type = JobFilter)]
    filter: Object<JobFilter>,
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

impl RequestBody for BulkJobsRequest {}

/// Cancel many jobs.
///
/// Cancels matching jobs that were stored before the operation starts, oldest first, in the
/// background. Waiting jobs are cancelled; workers of running jobs are asked to stop. The operation
/// shows the progress. `dry_run` only counts them.
#[utoipa::path(
    post, path = "/jobs/cancel", tag = "jobs", operation_id = "jobs_bulk_cancel",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(idempotency::Header),
    request_body = BulkJobsRequest,
    responses(
        (status = 202, description = "The operation has started; `Location` is its path.", body = BulkResult,
         headers(("Location" = String, description = "The operation's path."))),
        (status = 200, description = "Dry run: the number of matching jobs.", body = BulkResult),
    ),
)]
pub async fn cancel(
    caller: Caller<Manage>,
    State(app): State<App>,
    sent: Once<BulkJobsRequest>,
) -> Result<Response, Error> {
    begin(app, caller, (Kind::JobsCancel, "jobs.cancelled"), sent).await
}

/// Retry many jobs.
///
/// Retries matching dead letters and cancelled jobs that were stored before the operation starts,
/// oldest first, in the background. A job with a failed or cancelled parent is skipped. The
/// operation shows the progress. `dry_run` only counts them.
#[utoipa::path(
    post, path = "/jobs/retry", tag = "jobs", operation_id = "jobs_bulk_retry",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(idempotency::Header),
    request_body = BulkJobsRequest,
    responses(
        (status = 202, description = "The operation has started; `Location` is its path.", body = BulkResult,
         headers(("Location" = String, description = "The operation's path."))),
        (status = 200, description = "Dry run: the number of matching jobs.", body = BulkResult),
    ),
)]
pub async fn retry(
    caller: Caller<Manage>,
    State(app): State<App>,
    sent: Once<BulkJobsRequest>,
) -> Result<Response, Error> {
    begin(app, caller, (Kind::JobsRetry, "jobs.retried"), sent).await
}

/// Pause many jobs.
///
/// Pauses matching jobs that wait and were stored before the operation starts, oldest first, in the
/// background. See `POST /v1/jobs/{job_id}/pause`. The operation shows the progress. `dry_run` only
/// counts them.
#[utoipa::path(
    post, path = "/jobs/pause", tag = "jobs", operation_id = "jobs_bulk_pause",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(idempotency::Header),
    request_body = BulkJobsRequest,
    responses(
        (status = 202, description = "The operation has started; `Location` is its path.", body = BulkResult,
         headers(("Location" = String, description = "The operation's path."))),
        (status = 200, description = "Dry run: the number of matching jobs.", body = BulkResult),
    ),
)]
pub async fn pause(
    caller: Caller<Manage>,
    State(app): State<App>,
    sent: Once<BulkJobsRequest>,
) -> Result<Response, Error> {
    begin(app, caller, (Kind::JobsPause, "jobs.paused"), sent).await
}

/// Resume many jobs.
///
/// Resumes matching jobs that are paused and were stored before the operation starts, oldest first,
/// in the background. The operation shows the progress. `dry_run` only counts them.
#[utoipa::path(
    post, path = "/jobs/resume", tag = "jobs", operation_id = "jobs_bulk_resume",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(idempotency::Header),
    request_body = BulkJobsRequest,
    responses(
        (status = 202, description = "The operation has started; `Location` is its path.", body = BulkResult,
         headers(("Location" = String, description = "The operation's path."))),
        (status = 200, description = "Dry run: the number of matching jobs.", body = BulkResult),
    ),
)]
pub async fn resume(
    caller: Caller<Manage>,
    State(app): State<App>,
    sent: Once<BulkJobsRequest>,
) -> Result<Response, Error> {
    begin(app, caller, (Kind::JobsResume, "jobs.resumed"), sent).await
}

/// Replay many jobs.
///
/// Enqueues matching jobs that have ended again, as new ones, oldest first, in the background. See
/// `POST /v1/jobs/{job_id}/replay`. Jobs whose payload is a template of their workflow are skipped.
/// The number is checked against the project's quota when the operation starts; if more than
/// 100,000 jobs match, `max` must say how many, at most 100,000. `dry_run` only counts them.
#[utoipa::path(
    post, path = "/jobs/replay", tag = "jobs", operation_id = "jobs_bulk_replay",
    security(("api_key" = ["produce", "read"]), ("session" = ["member"])),
    params(idempotency::Header),
    request_body = BulkJobsRequest,
    responses(
        (status = 202, description = "The operation has started; `Location` is its path.", body = BulkResult,
         headers(("Location" = String, description = "The operation's path."))),
        (status = 200, description = "Dry run: the number of matching jobs.", body = BulkResult),
    ),
)]
pub async fn replay(
    caller: Caller<Replay>,
    State(app): State<App>,
    sent: Once<BulkJobsRequest>,
) -> Result<Response, Error> {
    begin(app, caller, (Kind::JobsReplay, "jobs.replayed"), sent).await
}

async fn begin<P: CallerKind + Clone>(
    app: App,
    caller: Caller<P>,
    (kind, action): (Kind, &'static str),
    Once { request, repeat }: Once<BulkJobsRequest>,
) -> Result<Response, Error> {
    let (running, by) = (app.clone(), caller.clone());
    repeat
        .once(&app, &caller, async move |ids| {
            let BulkJobsRequest { filter: Object(filter), dry_run, max, rate_per_second } = request;
            let mut check = Check::default();
            check_filter(kind, &filter, &mut check);
            bulk::check_pace(max, rate_per_second, &mut check);
            check.finish()?;
            let mut conn = running.engine.pools.read_for(by.project_id).await?;
            let now = store::schedules::clock(&mut conn).await?;
            let listed = store::jobs::Filter::of(kind, &filter, now)
                .map_err(|message| Error::invalid("filter.q", message))?;
            may_search(&by.who, &listed)?;
            let counted = store::jobs::count(&mut conn, by.project_id, &listed).await?;
            drop(conn);
            let which = Which::Jobs(filter);
            let request = BulkRequest { kind, which, action, max, rate_per_second, dry_run };
            bulk::begin(&running, &by, ids, request, counted).await
        })
        .await
}

fn check_filter(kind: Kind, filter: &JobFilter, check: &mut Check) {
    let JobFilter {
        q,
        ids,
        state,
        queue,
        job_type,
        group,
        tag,
        batch_id: _,
        created_after,
        created_before,
    } = filter;
    // An empty line would select everything, which is hardly meant.
    if q.as_ref().is_some_and(|it| it.trim().is_empty()) {
        check.refuse("filter.q", "must not be empty: leave it out to select all jobs");
    }
    if let Some(ids) = ids {
        check.range("filter.ids", ids.len(), 1, limits::MAX_PAGE_JOBS as usize);
    }
    if state.is_some_and(|it| !kind.states().contains(&it)) {
        let states: Vec<_> = kind.states().iter().map(|it| it.as_str()).collect();
        check.refuse("filter.state", format!("must be one of: {}", states.join(", ")));
    }
    check.optional_name("filter.queue", queue.as_deref(), limits::MAX_QUEUE_CHARS);
    check.optional_name("filter.job_type", job_type.as_deref(), limits::MAX_JOB_TYPE_CHARS);
    check.optional_name("filter.group", group.as_deref(), limits::MAX_GROUP_CHARS);
    check.optional_name("filter.tag", tag.as_deref(), MAX_TAG_FILTER_CHARS);
    check.time("filter.created_after", *created_after);
    check.time("filter.created_before", *created_before);
}
