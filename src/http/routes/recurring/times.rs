//! `GET /v1/recurring/{recurring_id}/next` and `POST /v1/recurring/preview`: when a schedule fires.

use axum::{Json as Reply, extract::State};
use chrono::{DateTime, Utc};
use fencepost_domain::{error::Error, limits, schedule::PreviewedTick};
use fencepost_engine::schedules;
use fencepost_web::{
    app::App,
    auth::{Caller, Read},
    wire::{
        extract::{Json, NameInPath, Query, RequestBody},
        openapi::{chars, range},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::DEFAULT_TIMEZONE;
use crate::error::ErrorBody;

const DEFAULT_TIMES: u32 = 5;

/// A future tick.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct FireTime {
    /// Time of the tick.
    pub at: DateTime<Utc>,
    /// Time of the tick in the schedule's zone.
    #[schema(example = "2026-03-29T03:00:00+02:00")]
    pub local: String,
    /// Effect of a clock change; null: none.
    #[schema(required)]
    pub note: Option<String>,
}

impl From<PreviewedTick> for FireTime {
    fn from(PreviewedTick { at, local, note }: PreviewedTick) -> Self {
        Self { at, local, note }
    }
}

/// Number of ticks to show.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct NextQuery {
    /// Number of ticks. Default: 5.
    #[param(minimum = 1, maximum = 100)]
    count: Option<u32>,
}

/// The next ticks of a schedule.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct NextTimes {
    /// The expression in words.
    pub description: String,
    /// False: the schedule is paused and does not fire.
    pub enabled: bool,
    /// Ticks.
    pub times: Vec<FireTime>,
}

/// Read the next ticks of a schedule.
#[utoipa::path(
    get, path = "/recurring/{recurring_id}/next", tag = "recurring", operation_id = "recurring_next",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(NextQuery, ("recurring_id" = String, Path, description = "The schedule.", example = "rjob_report")),
    responses(
        (status = 200, description = "The next ticks.", body = NextTimes),
        (status = 404, description = "The project has no such schedule.", body = ErrorBody),
    ),
)]
pub async fn next(
    caller: Caller<Read>,
    State(app): State<App>,
    NameInPath(id): NameInPath,
    Query(query): Query<NextQuery>,
) -> Result<Reply<NextTimes>, Error> {
    let count = query.count.unwrap_or(DEFAULT_TIMES);
    let mut check = Check::default();
    check.range("count", count, 1, limits::MAX_SHOWN_TIMES);
    check.finish()?;
    let row = schedules::find(&app.engine, caller.project_id, &id).await?;
    let schedule = app.engine.zones.agreed().schedule(&row.cron_expression, &row.timezone);
    let schedule = schedule.map_err(|error| schedules::refusal(&error))?;
    let times = schedule.preview(row.now, count as usize).unwrap_or_default();
    Ok(Reply(NextTimes {
        description: schedule.in_words(),
        enabled: !row.is_paused,
        times: times.into_iter().map(FireTime::from).collect(),
    }))
}

/// A schedule to preview.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"cron_expression": "30 2 * * *", "timezone": "Europe/Berlin"}))]
pub struct PreviewRequest {
    /// Five fields, six with seconds first, or `@daily` and similar.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_CRON_CHARS)))))]
    cron_expression: String,
    /// IANA time zone of the expression. Default: UTC.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_NAME_CHARS)))))]
    timezone: Option<String>,
    /// Number of ticks to show. Default: 5.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_SHOWN_TIMES)))))]
    count: Option<u32>,
}

impl RequestBody for PreviewRequest {}

/// Preview of a schedule.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct CronPreview {
    /// The expression in words.
    pub description: String,
    /// Next ticks.
    pub times: Vec<FireTime>,
    /// Effects of the next year's clock changes, by day.
    pub clock_changes: Vec<String>,
}

/// Preview a schedule.
///
/// Stores nothing: shows what the expression means, when it would fire, and the effect of clock
/// changes.
#[utoipa::path(
    post, path = "/recurring/preview", tag = "recurring", operation_id = "recurring_preview",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    request_body = PreviewRequest,
    responses(
        (status = 200, description = "Preview of the schedule.", body = CronPreview),
        (status = 400, description = "Invalid request, or the expression cannot be read, never fires, or fires too often.", body = ErrorBody),
    ),
)]
pub async fn preview(
    caller: Caller<Read>,
    State(app): State<App>,
    Json(request): Json<PreviewRequest>,
) -> Result<Reply<CronPreview>, Error> {
    let count = request.count.unwrap_or(DEFAULT_TIMES);
    let mut check = Check::default();
    check.name("cron_expression", &request.cron_expression, limits::MAX_CRON_CHARS);
    check.optional_name("timezone", request.timezone.as_deref(), limits::MAX_CRON_CHARS);
    check.range("count", count, 1, limits::MAX_SHOWN_TIMES);
    check.finish()?;
    let timezone = request.timezone.as_deref().unwrap_or(DEFAULT_TIMEZONE);
    let expression = (&*request.cron_expression, timezone);
    let min_period = caller.limits.min_schedule_period();
    let (schedule, now) =
        schedules::check(&app.engine, caller.project_id, expression, min_period).await?;
    let shown = tokio::task::spawn_blocking(move || {
        let times = schedule.preview(now, count as usize)?;
        Ok(CronPreview {
            description: schedule.in_words(),
            times: times.into_iter().map(FireTime::from).collect(),
            clock_changes: schedule.clock_changes(now),
        })
    });
    let shown = shown.await.map_err(Error::internal)?;
    shown.map(Reply).map_err(|error| schedules::refusal(&error))
}
