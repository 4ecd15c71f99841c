//! Rules of single groups: `PUT /v1/queues/{queue}/groups/{group}`, and resetting them.

use axum::{Json as Reply, extract::State};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::Error,
    group::GroupOverride,
    limits,
    turns::{MAX_WEIGHT, MIN_WEIGHT},
};
use fencepost_engine::groups;
use fencepost_web::{
    app::App,
    auth::{Caller, Manage},
    wire::{
        extract::{GroupInPath, Json, NameInPath, Object, RequestBody},
        openapi::range,
        validate::Check,
    },
};
use serde::Deserialize;
use utoipa::ToSchema;

use super::{
    change::{RateLimitRequest, accept_rates},
    groups::{Group, accept, note, now},
};
use crate::error::ErrorBody;

/// Rules of one group, in place of those of its queue: at least one of `weight`, `max_running` and
/// `rates`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"weight": 5, "max_running": 10}))]
pub struct PutGroupRequest {
    /// Its share beside other groups: one of weight 2 starts twice as many jobs as one of weight 1.
    /// Default: 1.
    #[schema(extensions(("bounds" = json!(range(MIN_WEIGHT, MAX_WEIGHT)))))]
    weight: Option<i16>,
    /// Jobs of it that run at the same time at most. Default: as its queue says.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_CONCURRENCY)))))]
    max_running: Option<i32>,
    /// Jobs of it that start in any window of `per_seconds` at most: up to four windows. Empty: as
    /// many as workers take. Default: as its queue says.
    #[schema(value_type = Option<Vec<RateLimitRequest>>, required = false, max_items = 4)]
    rates: Option<Vec<Object<RateLimitRequest>>>,
    /// Time at which these rules end by themselves. Default: when the group is reset.
    expires_at: Option<DateTime<Utc>>,
    /// Pauses the group as well, until this time: at most 30 days ahead. An earlier end than that
    /// of a pause under way changes nothing. Default: no pause begins, and none ends.
    paused_until: Option<DateTime<Utc>>,
}

impl RequestBody for PutGroupRequest {}

impl PutGroupRequest {
    fn accept(self, check: &mut Check) -> GroupOverride {
        if let Some(weight) = self.weight {
            check.range("weight", weight, MIN_WEIGHT, MAX_WEIGHT);
        }
        if let Some(max_running) = self.max_running {
            check.range("max_running", max_running, 1, limits::MAX_CONCURRENCY);
        }
        let rates = self.rates.map(|it| accept_rates(&it, "rates", check));
        check.time("expires_at", self.expires_at);
        check.time("paused_until", self.paused_until);
        if self.weight.is_none() && self.max_running.is_none() && rates.is_none() {
            check.refuse("body", "must have weight, max_running or rates");
        }
        GroupOverride {
            weight: self.weight.unwrap_or(MIN_WEIGHT),
            max_running: self.max_running,
            rates,
            expires_at: self.expires_at,
        }
    }
}

/// Give a group rules of its own.
///
/// They take the place of those of its queue, and of its own earlier ones, where groups take turns:
/// `groups.fair` of the queue. Other nodes know them with their next claim.
#[utoipa::path(
    put, path = "/queues/{queue}/groups/{group}", tag = "queues", operation_id = "queues_put_group",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(
        ("queue" = String, Path, description = "The queue.", example = "default"),
        ("group" = String, Path, description = "The group, percent-encoded.", example = "acme"),
    ),
    request_body = PutGroupRequest,
    responses(
        (status = 200, description = "The group.", body = Group),
    ),
)]
pub async fn put(
    caller: Caller<Manage>,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
    GroupInPath(group): GroupInPath,
    Json(request): Json<PutGroupRequest>,
) -> Result<Reply<Group>, Error> {
    let mut check = Check::default();
    let paused_until = request.paused_until;
    let rules = request.accept(&mut check);
    let group = accept(caller.project_id, queue, group, check)?;
    groups::put_rules(&app.engine, &group, &rules, paused_until).await?;
    let after = serde_json::json!({
        "group": group.group, "rules": rules, "paused_until": paused_until,
    });
    note(&app, &caller, "group.changed", &group, after).await;
    if paused_until.is_some() {
        let after = serde_json::json!({"group": group.group, "until": paused_until});
        note(&app, &caller, "group.paused", &group, after).await;
    }
    now(&app, group).await
}

/// Reset a group.
///
/// Deletes its own rules and the starts that its rates have counted: all windows are empty.
#[utoipa::path(
    post, path = "/queues/{queue}/groups/{group}/reset", tag = "queues",
    operation_id = "queues_reset_group",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(
        ("queue" = String, Path, description = "The queue.", example = "default"),
        ("group" = String, Path, description = "The group, percent-encoded.", example = "acme"),
    ),
    responses(
        (status = 200, description = "The group.", body = Group),
        (status = 404, description = "It has no jobs, no rules and no counted starts, and is not paused.", body = ErrorBody),
    ),
)]
pub async fn reset(
    caller: Caller<Manage>,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
    GroupInPath(group): GroupInPath,
) -> Result<Reply<Group>, Error> {
    let group = accept(caller.project_id, queue, group, Check::default())?;
    groups::reset(&app.engine, &group).await?;
    note(&app, &caller, "group.reset", &group, serde_json::json!({"group": group.group})).await;
    now(&app, group).await
}
