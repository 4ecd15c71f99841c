//! `GET /v1/usage`: what a project used in a month and on its days, and stores now.

use axum::{Json as Reply, extract::State};
use chrono::NaiveDate;
use fencepost_domain::{
    error::Error,
    usage::{Used, month},
};
use fencepost_engine::enqueue::quota;
use fencepost_store::people::usage;
use fencepost_web::{
    app::App,
    auth::{Caller, Read},
    wire::extract::Query,
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::error::ErrorBody;

/// Which month.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct UsageQuery {
    /// The month (UTC), as `2026-11`. Default: the present one.
    #[param(example = "2026-11")]
    month: Option<String>,
}

/// Usage of a project in a month. Nodes add it up every few seconds; a node that is killed loses
/// that much. Its days are kept for 400 days.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Usage {
    /// The month (UTC).
    #[schema(example = "2026-11")]
    pub month: String,
    /// Jobs that were enqueued, also by schedules and callbacks.
    pub jobs_enqueued: i64,
    /// Attempts that began.
    pub attempts: i64,
    /// Jobs that succeeded.
    pub jobs_succeeded: i64,
    /// Jobs that became dead letters.
    pub jobs_dead_lettered: i64,
    /// Calls of the API with a key of the project, or on it by a member, without those that are
    /// refused because of who calls; pages of the console are none.
    pub requests: i64,
    /// Time that polls of workers took, most of which they waited for jobs.
    pub poll_seconds: i64,
    /// Bytes of logs that were stored.
    pub log_bytes: i64,
    /// Stored bytes, added up once an hour: a gibibyte that is stored for a day adds
    /// 25,769,803,776.
    pub stored_byte_hours: i64,
    /// Jobs that wait or run now.
    pub live_jobs: i64,
    /// Bytes that are stored now, deliveries of webhooks among them; each job and each delivery
    /// counts as at least 1024.
    pub stored_bytes: i64,
    /// Days of the month on which something was used, in their order.
    pub days: Vec<UsageDay>,
}

/// Usage of a project on a day. Its fields are those of a month.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct UsageDay {
    /// The day (UTC).
    #[schema(example = "2026-11-30")]
    pub day: NaiveDate,
    /// Jobs that were enqueued.
    pub jobs_enqueued: i64,
    /// Attempts that began.
    pub attempts: i64,
    /// Jobs that succeeded.
    pub jobs_succeeded: i64,
    /// Jobs that became dead letters.
    pub jobs_dead_lettered: i64,
    /// Calls of the API.
    pub requests: i64,
    /// Time that polls took.
    pub poll_seconds: i64,
    /// Bytes of logs that were stored.
    pub log_bytes: i64,
    /// Stored bytes, added up once an hour.
    pub stored_byte_hours: i64,
}

impl UsageDay {
    fn new(day: NaiveDate, used: Used) -> Self {
        Self {
            day,
            jobs_enqueued: used.enqueued,
            attempts: used.claimed,
            jobs_succeeded: used.succeeded,
            jobs_dead_lettered: used.dead_lettered,
            requests: used.requests,
            poll_seconds: used.poll_seconds(),
            log_bytes: used.log_bytes,
            stored_byte_hours: used.byte_hours,
        }
    }
}

fn read_month(text: &str) -> Result<NaiveDate, Error> {
    month(text).ok_or_else(|| Error::invalid("month", "must be a month such as 2026-11"))
}

/// Read your usage.
#[utoipa::path(
    get, path = "/usage", tag = "limits", operation_id = "usage_get",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(UsageQuery),
    responses(
        (status = 200, description = "The usage of a month.", body = Usage),
        (status = 400, description = "Invalid month.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<Read>,
    State(app): State<App>,
    Query(query): Query<UsageQuery>,
) -> Result<Reply<Usage>, Error> {
    let month = query.month.as_deref().map(read_month).transpose()?;
    let project_id = caller.project_id;
    let live_jobs = quota::waiting(&app.engine, project_id).await?;
    let stored_bytes = quota::stored_bytes(&app.engine, project_id).await?;
    let mut conn = app.engine.pools.read_for(project_id).await?;
    let month = match month {
        Some(month) => month,
        None => usage::present_month(&mut conn).await?,
    };
    let days = usage::days(&mut conn, project_id, month).await?;
    let mut used = Used::default();
    days.iter().for_each(|it| used += it.1);
    Ok(Reply(Usage {
        month: month.format("%Y-%m").to_string(),
        jobs_enqueued: used.enqueued,
        attempts: used.claimed,
        jobs_succeeded: used.succeeded,
        jobs_dead_lettered: used.dead_lettered,
        requests: used.requests,
        poll_seconds: used.poll_seconds(),
        log_bytes: used.log_bytes,
        stored_byte_hours: used.byte_hours,
        live_jobs,
        stored_bytes,
        days: days.into_iter().filter_map(|(day, used)| Some(UsageDay::new(day?, used))).collect(),
    }))
}
