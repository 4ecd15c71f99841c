//! `/v1/webhooks/{endpoint_id}/deliveries`: what an endpoint was sent, and what it answered.

use axum::{Json as Reply, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::Error,
    formats,
    ids::DeliveryId,
    job::{JobState, StoredState},
    limits,
    webhook::{TEST_EVENT, WebhookEvent, WebhookProject, named_by},
};
use fencepost_engine::{
    jobs::AttemptRow,
    webhooks::{self, DeliveryRow, Wanted},
};
use fencepost_web::{
    app::App,
    auth::{Caller, Webhooks},
    wire::{
        extract::{DeliveryInPath, EndpointInPath, Query},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};

use crate::{
    cursor::{self, List},
    error::ErrorBody,
    page::{PageSize, page},
    redact::{Redact, hidden, shown},
};

const DEFAULT_PAGE_DELIVERIES: u32 = 50;

/// State of a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeliveryState {
    /// It waits for its first or next try.
    Waiting,
    /// It is being sent.
    Sending,
    /// The endpoint accepted it, with a status of 200 to 299.
    Delivered,
    /// All of its tries failed, or the endpoint is gone. It can be retried.
    Failed,
    /// The endpoint was deleted before.
    Cancelled,
}

impl DeliveryState {
    fn of(state: StoredState) -> Self {
        match state.public() {
            JobState::Scheduled | JobState::Pending => Self::Waiting,
            JobState::Processing => Self::Sending,
            JobState::Succeeded => Self::Delivered,
            JobState::DeadLetter => Self::Failed,
            JobState::Cancelled => Self::Cancelled,
        }
    }

    fn of_jobs(self) -> Vec<JobState> {
        match self {
            Self::Waiting => vec![JobState::Scheduled, JobState::Pending],
            Self::Sending => vec![JobState::Processing],
            Self::Delivered => vec![JobState::Succeeded],
            Self::Failed => vec![JobState::DeadLetter],
            Self::Cancelled => vec![JobState::Cancelled],
        }
    }
}

/// An event that is sent to an endpoint.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Delivery {
    /// Id of the delivery, as in the header `Fencepost-Delivery`.
    #[schema(example = "dlv_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// Id of the event, as in the header `webhook-id`: the same for all endpoints and tries.
    #[schema(example = "evt_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub event_id: String,
    /// Type of the event.
    #[schema(example = "job.dead_lettered")]
    pub event_type: String,
    /// State.
    pub state: DeliveryState,
    /// Tries so far.
    #[schema(example = 1)]
    pub tries: i32,
    /// Status of the answer that accepted it; null: none did.
    #[schema(required, example = 200)]
    pub status: Option<u16>,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// Earliest time of the next try; null: the delivery does not wait.
    #[schema(required)]
    pub next_try_at: Option<DateTime<Utc>>,
    /// Time when the delivery was accepted, or failed for the last time.
    #[schema(required)]
    pub ended_at: Option<DateTime<Utc>>,
}

impl From<&DeliveryRow> for Delivery {
    fn from(DeliveryRow { job, payload, delivered }: &DeliveryRow) -> Self {
        let state = DeliveryState::of(job.state);
        Self {
            id: DeliveryId(job.id.0).to_string(),
            event_id: payload.event_id.clone(),
            event_type: job.job_type.clone(),
            state,
            tries: job.attempt,
            status: delivered.as_ref().map(|it| it.status),
            created_at: job.created_at,
            next_try_at: (state == DeliveryState::Waiting).then_some(job.run_at),
            ended_at: job.completed_at,
        }
    }
}

/// A try that did not succeed.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct FailedTry {
    /// Number of the try, from 1.
    #[schema(example = 1)]
    pub attempt: i32,
    /// Time when the try began.
    pub started_at: DateTime<Utc>,
    /// Duration of the try in milliseconds.
    #[schema(required)]
    pub duration_ms: Option<i64>,
    /// The error: `http_` and the status of the answer; `timeout`; `not_connected`;
    /// `no_address`; `address_refused`: the host has an address that calls may not go to;
    /// `broken_answer`; `headers_too_large`; `no_turn`: too many requests of the project, or to the
    /// host, were under way; or null: the node stopped, or died.
    #[serde(rename = "error_type")]
    #[schema(required, example = "http_503")]
    pub kind: Option<String>,
    /// The first 1,024 bytes of the answer's body, or what went wrong.
    #[schema(required)]
    pub message: Option<String>,
}

impl From<AttemptRow> for FailedTry {
    fn from(row: AttemptRow) -> Self {
        Self {
            attempt: row.attempt,
            started_at: row.claimed_at,
            duration_ms: row.duration_ms,
            kind: row.error_kind,
            message: row.error_message,
        }
    }
}

/// A delivery with its body and its tries.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct DeliveryDetails {
    /// The delivery.
    pub delivery: Delivery,
    /// The body of its request.
    #[schema(value_type = Option<WebhookEvent>)]
    pub body: Box<RawValue>,
    /// The first 1,024 bytes of the body of the answer that accepted it.
    #[schema(required, example = "ok")]
    pub answer: Option<String>,
    /// Tries that did not succeed, oldest first.
    pub failed_tries: Vec<FailedTry>,
    /// True if the body and the answers are null because the caller may not read payloads.
    pub redacted: bool,
}

impl Redact for DeliveryDetails {
    fn redact(&mut self) {
        self.redacted = true;
        self.body = hidden();
        self.answer = None;
        self.failed_tries.iter_mut().for_each(|it| it.message = None);
    }
}

/// Page of deliveries, and which.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct DeliveriesQuery {
    /// Only those in this state.
    state: Option<DeliveryState>,
    /// Only events of this type.
    event_type: Option<String>,
    /// Only those made at this time or later.
    #[serde(default, deserialize_with = "formats::optional_time")]
    since: Option<DateTime<Utc>>,
    /// Maximum number of deliveries to return. Default: 50.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

page! {
    /// A page of deliveries, newest first. With a filter it may be short, or empty, and have more
    /// after it.
    DeliveryPage {
        /// Deliveries of the page.
        deliveries: Delivery
    }
}

/// List deliveries.
///
/// Newest first. Those that were accepted or cancelled are kept for a day, those that failed for
/// 30.
#[utoipa::path(
    get, path = "/webhooks/{endpoint_id}/deliveries", tag = "webhooks",
    operation_id = "webhooks_deliveries", params(DeliveriesQuery,
        ("endpoint_id" = String, Path, description = "The endpoint.", example = "ep_01m7w3ha3aextt8pkwwdmxsmqw")),
    security(("api_key" = ["webhooks"]), ("session" = ["admin"])),
    responses(
        (status = 200, description = "A page of deliveries.", body = DeliveryPage),
        (status = 404, description = "The project has no such endpoint.", body = ErrorBody),
    ),
)]
pub async fn list(
    caller: Caller<Webhooks>,
    State(app): State<App>,
    EndpointInPath(id): EndpointInPath,
    Query(query): Query<DeliveriesQuery>,
) -> Result<Reply<DeliveryPage>, Error> {
    let mut check = Check::default();
    let max = limits::MAX_PAGE_DELIVERIES;
    let size = PageSize::read(query.limit, DEFAULT_PAGE_DELIVERIES, max, &mut check);
    check.time("since", query.since);
    if let Some(kind) = &query.event_type
        && kind != TEST_EVENT
        && named_by(kind).first().is_none_or(|it| it != kind)
    {
        check.refuse("event_type", "must be the type of an event, such as job.dead_lettered");
    }
    check.finish()?;
    let filters = (Some(id), query.state, query.event_type.clone(), query.since);
    let list = List::of(caller.project_id, "deliveries").filtered(&filters);
    let after = cursor::read_id(&app, list, query.cursor.as_deref())?.map(DeliveryId);
    let states = query.state.map(DeliveryState::of_jobs).unwrap_or_default();
    let wanted = Wanted { states, event_type: query.event_type, since: query.since };
    let key = (caller.project_id, id);
    let found = webhooks::deliveries(&app.engine, key, wanted, after, size.rows()).await?;
    let next_cursor = found.1.map(|it| cursor::write_id(&app, list, it.0));
    let deliveries = found.0.iter().map(Delivery::from).collect();
    Ok(Reply(DeliveryPage::of(deliveries, next_cursor)))
}

/// Read a delivery.
#[utoipa::path(
    get, path = "/webhooks/{endpoint_id}/deliveries/{delivery_id}", tag = "webhooks",
    operation_id = "webhooks_delivery",
    security(("api_key" = ["webhooks"]), ("session" = ["admin"])),
    params(
        ("endpoint_id" = String, Path, description = "The endpoint.", example = "ep_01m7w3ha3aextt8pkwwdmxsmqw"),
        ("delivery_id" = String, Path, description = "The delivery.", example = "dlv_01m7w3ha3aextt8pkwwdmxsmqw"),
    ),
    responses(
        (status = 200, description = "The delivery, its body and its tries.", body = DeliveryDetails),
        (status = 404, description = "The endpoint has no such delivery.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<Webhooks>,
    State(app): State<App>,
    EndpointInPath(endpoint): EndpointInPath,
    DeliveryInPath(id): DeliveryInPath,
) -> Result<Reply<DeliveryDetails>, Error> {
    let key = (caller.project_id, endpoint);
    let (row, failed) = webhooks::delivery(&app.engine, key, id).await?;
    let details = DeliveryDetails {
        delivery: Delivery::from(&row),
        body: row.payload.body,
        answer: row.delivered.map(|it| it.text),
        failed_tries: failed.into_iter().map(FailedTry::from).collect(),
        redacted: false,
    };
    Ok(Reply(shown(&caller.who, details)))
}

/// Retry a delivery.
///
/// One that failed or was cancelled is sent again, with the same event id and a new signature; one
/// that waits is sent now.
#[utoipa::path(
    post, path = "/webhooks/{endpoint_id}/deliveries/{delivery_id}/retry", tag = "webhooks",
    operation_id = "webhooks_retry",
    security(("api_key" = ["webhooks"]), ("session" = ["admin"])),
    params(
        ("endpoint_id" = String, Path, description = "The endpoint.", example = "ep_01m7w3ha3aextt8pkwwdmxsmqw"),
        ("delivery_id" = String, Path, description = "The delivery.", example = "dlv_01m7w3ha3aextt8pkwwdmxsmqw"),
    ),
    responses(
        (status = 200, description = "The delivery.", body = Delivery),
        (status = 404, description = "The endpoint has no such delivery.", body = ErrorBody),
        (status = 409, description = "It is being sent, or was accepted.", body = ErrorBody),
    ),
)]
pub async fn retry(
    caller: Caller<Webhooks>,
    State(app): State<App>,
    EndpointInPath(endpoint): EndpointInPath,
    DeliveryInPath(id): DeliveryInPath,
) -> Result<Reply<Delivery>, Error> {
    let key = (caller.project_id, endpoint);
    webhooks::retry(&app.engine, key, id, &caller.who.changed_by()).await?;
    let (row, _) = webhooks::delivery(&app.engine, key, id).await?;
    Ok(Reply((&row).into()))
}

/// Send a test.
///
/// The endpoint gets an event of the type `endpoint.test`. Read the delivery to see its answer.
#[utoipa::path(
    post, path = "/webhooks/{endpoint_id}/test", tag = "webhooks", operation_id = "webhooks_test",
    security(("api_key" = ["webhooks"]), ("session" = ["admin"])),
    params(("endpoint_id" = String, Path, description = "The endpoint.", example = "ep_01m7w3ha3aextt8pkwwdmxsmqw")),
    responses(
        (status = 202, description = "The delivery.", body = Delivery),
        (status = 404, description = "The project has no such endpoint.", body = ErrorBody),
    ),
)]
pub async fn test(
    caller: Caller<Webhooks>,
    State(app): State<App>,
    EndpointInPath(endpoint): EndpointInPath,
) -> Result<(StatusCode, Reply<Delivery>), Error> {
    let (id, slug) = (caller.who.project().to_string(), caller.who.slug().to_owned());
    let project = WebhookProject { id, slug };
    let delivery = webhooks::send_test(&app.engine, caller.project_id, endpoint, project).await?;
    let key = (caller.project_id, endpoint);
    let (row, _) = webhooks::delivery(&app.engine, key, delivery).await?;
    Ok((StatusCode::ACCEPTED, Reply((&row).into())))
}
