//! `GET /v1/usage`: what a project used in a month, and stores now.

use axum::{Json as Reply, extract::State};
use chrono::NaiveDate;
use fencepost_domain::error::Error;
use fencepost_engine::enqueue::quota;
use fencepost_store as store;
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
/// that much.
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
    /// Jobs that wait or run now.
    pub live_jobs: i64,
    /// Bytes that are stored now, deliveries of webhooks among them; each job and each delivery
    /// counts as at least 1024.
    pub stored_bytes: i64,
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
    let (month, used) = store::people::usage::month(&mut conn, project_id, month).await?;
    Ok(Reply(Usage {
        month: month.format("%Y-%m").to_string(),
        jobs_enqueued: used.enqueued,
        attempts: used.claimed,
        jobs_succeeded: used.succeeded,
        jobs_dead_lettered: used.dead_lettered,
        live_jobs,
        stored_bytes,
    }))
}

/// The first day of a month.
fn read_month(text: &str) -> Result<NaiveDate, Error> {
    let first = || {
        let (year, month) = text.split_once('-')?;
        let is_whole = year.len() == 4 && month.len() == 2 && !text.contains('+');
        let (year, month) = (year.parse().ok()?, month.parse().ok()?);
        NaiveDate::from_ymd_opt(year, month, 1).filter(|_| is_whole)
    };
    first().ok_or_else(|| Error::invalid("month", "must be a month such as 2026-11"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_month_has_four_and_two_digits() {
        assert_eq!(read_month("2026-11").ok(), NaiveDate::from_ymd_opt(2026, 11, 1));
        for junk in ["", "2026", "2026-13", "2026-1", "26-11", "2026-11-01", "x-y", "+026-11"] {
            assert!(read_month(junk).is_err(), "{junk}");
        }
    }
}
