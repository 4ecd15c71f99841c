//! `POST /v1/webhooks/{endpoint_id}/replay`: sends deliveries of a time again.

use axum::{Json as Reply, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use fencepost_domain::{error::Error, formats, limits};
use fencepost_engine::webhooks::{self, ReplayRequest};
use fencepost_web::{
    app::App,
    auth::{Caller, Webhooks},
    wire::{
        extract::{EndpointInPath, Json, RequestBody},
        openapi::range,
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    error::ErrorBody,
    routes::audit::{self, NewAuditEntry},
};

/// Deliveries to send again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReplayedDeliveries {
    /// Deliveries that failed or were cancelled.
    #[default]
    Failed,
    /// Accepted deliveries, too: as new deliveries of the same events.
    All,
}

/// Deliveries to send again.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"since": "2026-01-31T12:00:00Z", "which": "failed", "dry_run": true}))]
pub struct ReplayDeliveriesRequest {
    /// Only those made at this time or later.
    #[serde(deserialize_with = "formats::named_time")]
    #[schema(required, value_type = DateTime<Utc>)]
    since: Option<DateTime<Utc>>,
    /// Only those made before this time. Default: all until now.
    #[serde(default, deserialize_with = "formats::optional_time")]
    until: Option<DateTime<Utc>>,
    /// Default: `failed`.
    which: Option<ReplayedDeliveries>,
    /// Maximum deliveries per second. Default: unlimited.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_OPERATION_RATE)))))]
    rate_per_second: Option<i32>,
    /// Only count them. Default: false.
    #[serde(default)]
    dry_run: bool,
}

impl RequestBody for ReplayDeliveriesRequest {}

/// Deliveries that are sent again.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct ReplayStarted {
    /// Deliveries that match; null: more than 100,000.
    #[schema(required, example = 42)]
    pub matching: Option<i64>,
    /// True if they are being sent: false in a dry run.
    pub started: bool,
}

/// Replay deliveries.
///
/// In the background, oldest first, with the same event ids: receivers that keep these drop what
/// they have seen. The list of deliveries shows the progress.
#[utoipa::path(
    post, path = "/webhooks/{endpoint_id}/replay", tag = "webhooks",
    operation_id = "webhooks_replay",
    security(("api_key" = ["webhooks"]), ("session" = ["admin"])),
    params(("endpoint_id" = String, Path, description = "The endpoint.", example = "ep_01m7w3ha3aextt8pkwwdmxsmqw")),
    request_body = ReplayDeliveriesRequest,
    responses(
        (status = 202, description = "They are being sent.", body = ReplayStarted),
        (status = 200, description = "Dry run: how many there are.", body = ReplayStarted),
        (status = 404, description = "The project has no such endpoint.", body = ErrorBody),
    ),
)]
pub async fn replay(
    caller: Caller<Webhooks>,
    State(app): State<App>,
    EndpointInPath(id): EndpointInPath,
    Json(request): Json<ReplayDeliveriesRequest>,
) -> Result<(StatusCode, Reply<ReplayStarted>), Error> {
    let mut check = Check::default();
    check.time("since", request.since);
    check.time("until", request.until);
    check.range(
        "rate_per_second",
        request.rate_per_second.unwrap_or(1),
        1,
        limits::MAX_OPERATION_RATE,
    );
    check.finish()?;
    let since = request.since.ok_or_else(|| Error::invalid("since", "is missing"))?;
    let replay = ReplayRequest {
        since,
        until: request.until,
        is_of_all: request.which.unwrap_or_default() == ReplayedDeliveries::All,
        rate_per_second: request.rate_per_second,
        is_dry_run: request.dry_run,
    };
    let matching = webhooks::replay(&app.engine, caller.tenant(), id, &replay).await?;
    let started = !request.dry_run;
    if started {
        let entry = NewAuditEntry::to("endpoint.replayed", id.to_string());
        audit::note(&app, &caller, entry).await;
    }
    let status = if started { StatusCode::ACCEPTED } else { StatusCode::OK };
    Ok((status, Reply(ReplayStarted { matching, started })))
}
