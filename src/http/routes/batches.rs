//! `/v1/batches`: jobs whose ends are counted, and what follows the last one.

pub mod cancel;

use axum::{
    Json as Reply,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::Response,
};
use chrono::{DateTime, Utc};
use fencepost_domain::{error::Error, ids::BatchId, limits, outbound};
use fencepost_engine::{
    batches::{self, BatchRow, NewBatch},
    enqueue::{Extras, callback_url::check_callback_urls},
};
use fencepost_web::{
    app::App,
    auth::{Caller, Cost, Produce, Read},
    wire::{
        extract::{BatchInPath, Object, Query, RequestBody},
        openapi::chars,
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{
    cursor::{self, List},
    error::ErrorBody,
    idempotency::{self, Answer, Ids, Once},
    page::{PageSize, page},
    routes::jobs::{
        callbacks::{self, CallbackRequest, SentCallbacks},
        request::{accept_callbacks, traceparent},
    },
};

const DEFAULT_PAGE_BATCHES: u32 = 20;

/// A batch to create. Add jobs to it by their `batch_id`, then seal it.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"name": "import 7", "on_complete": {"job_type": "import.report"}}))]
pub struct CreateBatchRequest {
    /// Display name.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_NAME_CHARS)))))]
    name: Option<String>,
    /// Enqueued when all of its jobs have succeeded.
    #[schema(value_type = Option<CallbackRequest>)]
    on_success: Option<Box<Object<CallbackRequest>>>,
    /// Enqueued when all of its jobs have ended, and some have failed.
    #[schema(value_type = Option<CallbackRequest>)]
    on_failure: Option<Box<Object<CallbackRequest>>>,
    /// Enqueued when all of its jobs have ended.
    #[schema(value_type = Option<CallbackRequest>)]
    on_complete: Option<Box<Object<CallbackRequest>>>,
    /// URL to notify when all of its jobs have ended: that of an endpoint that takes callbacks, or
    /// one below it. It is not shown again.
    #[schema(extensions(("bounds" = json!(chars(1, outbound::MAX_URL_CHARS)))))]
    callback_url: Option<String>,
}

impl RequestBody for CreateBatchRequest {}

/// State of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BatchState {
    /// More jobs are expected: it is not sealed.
    Open,
    /// It is sealed, and some of its jobs have not ended.
    Running,
    /// All of its jobs have succeeded.
    Succeeded,
    /// All of its jobs have ended, and some have failed.
    Failed,
}

/// A batch.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = Batch)]
pub struct BatchView {
    /// Id of the batch.
    #[schema(example = "batch_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// Display name.
    #[schema(required)]
    pub name: Option<String>,
    /// State.
    pub state: BatchState,
    /// When it was created.
    pub created_at: DateTime<Utc>,
    /// Time when the batch was sealed.
    #[schema(required)]
    pub sealed_at: Option<DateTime<Utc>>,
    /// Time when all jobs of the batch had ended. No job can be added from then on.
    #[schema(required)]
    pub completed_at: Option<DateTime<Utc>>,
    /// Number of its jobs.
    pub total_jobs: i64,
    /// Number of jobs that have not ended.
    pub open_jobs: i64,
    /// Number of jobs that have succeeded.
    pub succeeded_jobs: i64,
    /// Number of dead-lettered jobs.
    pub dead_letter_jobs: i64,
    /// Number of cancelled jobs.
    pub cancelled_jobs: i64,
    /// Number of skipped jobs: a parent ended otherwise than they waited for, without failing.
    pub skipped_jobs: i64,
}

impl From<BatchRow> for BatchView {
    fn from(row: BatchRow) -> Self {
        let (done, failed) = (row.succeeded + row.skipped, row.dead_letter + row.cancelled);
        let state = match (row.sealed_at, row.completed_at) {
            (None, _) => BatchState::Open,
            (Some(_), None) => BatchState::Running,
            (Some(_), Some(_)) if done >= row.jobs => BatchState::Succeeded,
            // Failed jobs were retried.
            (Some(_), Some(_)) if done + failed < row.jobs => BatchState::Running,
            (Some(_), Some(_)) => BatchState::Failed,
        };
        Self {
            id: row.id.to_string(),
            name: row.name,
            state,
            created_at: row.created_at,
            sealed_at: row.sealed_at,
            completed_at: row.completed_at,
            total_jobs: row.jobs,
            open_jobs: (row.jobs - done - failed).max(0),
            succeeded_jobs: row.succeeded,
            dead_letter_jobs: row.dead_letter,
            cancelled_jobs: row.cancelled,
            skipped_jobs: row.skipped,
        }
    }
}

/// Create a batch.
///
/// It counts the ends of jobs that are enqueued with its id. When it is sealed and all of its jobs
/// have ended, its callbacks are enqueued, each exactly once.
#[utoipa::path(
    post, path = "/batches", tag = "batches", operation_id = "batches_create",
    security(("api_key" = ["produce"]), ("session" = ["member"])),
    request_body = CreateBatchRequest,
    params(
        idempotency::Header,
        ("traceparent" = Option<String>, Header, description = "W3C trace context; the workers get it."),
        ("Fencepost-Hop" = Option<i16>, Header, description = "Copy this header from the webhook delivery that caused this request."),
    ),
    responses(
        (status = 201, description = "The batch.", body = BatchView,
         headers(("Location" = String, description = "The batch's path."))),
    ),
)]
pub async fn create(
    caller: Caller<Produce>,
    State(app): State<App>,
    headers: HeaderMap,
    Once { request, repeat }: Once<CreateBatchRequest>,
) -> Result<Response, Error> {
    let trace = traceparent(&headers).map(str::to_owned);
    let sent = [&request.on_success, &request.on_failure, &request.on_complete];
    // The batch is one call, and each callback another.
    let cost = Cost::Items(1 + callbacks::count(sent));
    caller.charge(&app, "on_complete", cost).await?;
    let (running, tenant, hop) = (app.clone(), caller.tenant(), caller.hop());
    repeat
        .once(&app, &caller, async move |ids: Ids| {
            let mut check = Check::default();
            let CreateBatchRequest { name, on_success, on_failure, on_complete, callback_url } =
                request;
            check.optional_name("name", name.as_deref(), limits::MAX_NAME_CHARS);
            let sent = SentCallbacks { on_success, on_failure, on_complete, url: callback_url };
            let callbacks = accept_callbacks(tenant, sent, trace.as_deref(), &mut check)?;
            check.finish()?;
            let urls = callbacks.url.iter().map(|it| (String::new(), it.clone())).collect();
            check_callback_urls(&running.engine, tenant.project_id, urls).await?;
            let Extras { callbacks, callback_count, .. } =
                Extras::default().with_callbacks(&callbacks);
            let batch = NewBatch { id: ids.batch(), name, callbacks, is_sealed: false, hop };
            let row = batches::create(&running.engine, tenant, &batch, callback_count).await?;
            let location = Some(format!("/v1/batches/{}", batch.id));
            Answer::new(StatusCode::CREATED, location, &BatchView::from(row))
        })
        .await
}

/// Read a batch.
#[utoipa::path(
    get, path = "/batches/{batch_id}", tag = "batches", operation_id = "batches_get",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(("batch_id" = String, Path, description = "The batch.", example = "batch_01m7w3ha3aextt8pkwwdmxsmqw")),
    responses(
        (status = 200, description = "The batch, with exact counts.", body = BatchView),
        (status = 404, description = "The project has no such batch.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<Read>,
    State(app): State<App>,
    BatchInPath(id): BatchInPath,
) -> Result<Reply<BatchView>, Error> {
    let row = batches::find(&app.engine, caller.project_id, id).await?;
    Ok(Reply(row.into()))
}

/// Seal a batch.
///
/// From then on it completes when all of its jobs have ended; at once if they have. Until it
/// completes, jobs can still be added, for example by its own jobs.
#[utoipa::path(
    post, path = "/batches/{batch_id}/seal", tag = "batches", operation_id = "batches_seal",
    security(("api_key" = ["produce"]), ("session" = ["member"])),
    params(("batch_id" = String, Path, description = "The batch.", example = "batch_01m7w3ha3aextt8pkwwdmxsmqw")),
    responses(
        (status = 200, description = "The batch.", body = BatchView),
        (status = 404, description = "The project has no such batch.", body = ErrorBody),
    ),
)]
pub async fn seal(
    caller: Caller<Produce>,
    State(app): State<App>,
    BatchInPath(id): BatchInPath,
) -> Result<Reply<BatchView>, Error> {
    let row = batches::seal(&app.engine, caller.project_id, id).await?;
    Ok(Reply(row.into()))
}

/// Page of batches.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct BatchesQuery {
    /// Maximum number of batches to return. Default: 20.
    #[param(minimum = 1, maximum = 50)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

page! {
    /// A page of batches, newest first.
    BatchPage {
        /// Batches of the page.
        batches: BatchView
    }
}

/// List batches.
///
/// Batches, newest first. Completed batches are kept for 30 days.
#[utoipa::path(
    get, path = "/batches", tag = "batches", operation_id = "batches_list",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(BatchesQuery),
    responses(
        (status = 200, description = "A page of batches.", body = BatchPage),
    ),
)]
pub async fn list(
    caller: Caller<Read>,
    State(app): State<App>,
    Query(query): Query<BatchesQuery>,
) -> Result<Reply<BatchPage>, Error> {
    let mut check = Check::default();
    let size =
        PageSize::read(query.limit, DEFAULT_PAGE_BATCHES, limits::MAX_PAGE_BATCHES, &mut check);
    check.finish()?;
    let list = List::of(caller.project_id, "batches");
    let before = cursor::read_id(&app, list, query.cursor.as_deref())?.map(BatchId);
    let mut rows = batches::list(&app.engine, caller.project_id, before, size.one_more()).await?;
    let next_cursor = size.cut(&mut rows, |it| cursor::write_id(&app, list, it.id.0));
    let batches = rows.into_iter().map(BatchView::from).collect();
    Ok(Reply(BatchPage::of(batches, next_cursor)))
}
