//! `PATCH /v1/queues/{queue}`: what a queue is set to.

use axum::{Json as Reply, extract::State};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use super::{
    error::ErrorBody,
    extract::{Json, NameInPath, RequestBody},
    validate::Check,
};
use crate::{app::App, auth::Caller, domain::limits, error::Error, store};

/// What to change of a queue. At least one field.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"max_concurrency": 10}))]
pub struct ChangeQueueRequest {
    /// Jobs of the queue that may run at a time; null takes the limit away.
    #[serde(default, deserialize_with = "some")]
    #[schema(value_type = Option<i32>, required = false, minimum = 0, maximum = 100_000)]
    max_concurrency: Option<Option<i32>>,
}

impl RequestBody for ChangeQueueRequest {}

/// A field that is there, though it may be null.
fn some<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

/// A queue's settings.
#[derive(Debug, Serialize, ToSchema)]
pub struct Queue {
    /// Its name.
    pub queue: String,
    /// Jobs that may run at a time; null: as many as there are workers for.
    #[schema(required)]
    pub max_concurrency: Option<i32>,
}

/// Change a queue.
///
/// A lower limit does not stop what runs; nothing more is handed out until fewer run.
#[utoipa::path(
    patch, path = "/queues/{queue}", tag = "queues", operation_id = "queues_change",
    params(("queue" = String, Path, description = "The queue.", example = "default")),
    request_body = ChangeQueueRequest,
    responses(
        (status = 200, description = "The settings, as they are now.", body = Queue),
        (status = 400, description = "The request cannot be read or breaks a rule.", body = ErrorBody),
        (status = 401, description = "No valid API key.", body = ErrorBody),
        (status = 413, description = "The body is too large.", body = ErrorBody),
        (status = 415, description = "The body is not JSON.", body = ErrorBody),
        (status = 503, description = "Try again later.", body = ErrorBody),
    ),
)]
pub async fn change(
    caller: Caller,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
    Json(request): Json<ChangeQueueRequest>,
) -> Result<Reply<Queue>, Error> {
    let mut check = Check::default();
    check.name("queue", &queue, limits::MAX_QUEUE_CHARS);
    match request.max_concurrency {
        None => check.refuse("body", "must change max_concurrency"),
        Some(Some(limit)) => check.range("max_concurrency", limit, 0, limits::MAX_CONCURRENCY),
        Some(None) => (),
    }
    check.finish()?;
    let limit = request.max_concurrency.flatten();
    let mut conn = app.engine.pools.read.acquire().await?;
    let settings =
        store::queues::set_max_concurrency(&mut conn, caller.project_id, &queue, limit).await?;
    app.engine.tidings.wake.queue_changed(caller.project_id, &queue);
    Ok(Reply(Queue { queue, max_concurrency: settings.max_concurrency }))
}
