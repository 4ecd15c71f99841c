//! `PATCH /v1/queues/{queue}`: settings.

use axum::extract::State;
use fencepost_domain::{
    error::Error,
    group::{GroupOrder, OnDead},
    limits,
    rate::{MAX_GROUP_RATES, RateLimit},
    shared_limit::MAX_LIMITS_OF_QUEUE,
};
use fencepost_engine::queues;
use fencepost_store::queues::settings::{GroupRulesChange, SettingsChange};
use fencepost_web::{
    app::App,
    auth::{Caller, Manage},
    wire::{
        extract::{self, Json, NameInPath, Object, RequestBody},
        openapi::range,
        validate::Check,
    },
};
use serde::Deserialize;
use utoipa::ToSchema;

use super::{Queue, if_known, one};
use crate::{
    retry::RetryRequest,
    routes::audit::{self, NewAuditEntry},
    settings::{self, Preconditions, Tagged},
};

/// Changes to a queue. At least one field; null removes a setting.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"max_concurrency": 10, "rate_limit": {"count": 100, "per_seconds": 60}}))]
pub struct ChangeQueueRequest {
    /// Maximum number of running jobs of the queue.
    #[serde(default, deserialize_with = "extract::sent")]
    #[schema(value_type = Option<i32>, required = false, extensions(("bounds" = json!(range(0, limits::MAX_CONCURRENCY)))))]
    max_concurrency: Option<Option<i32>>,
    /// Maximum number of jobs started in any window of `per_seconds`.
    #[serde(default, deserialize_with = "extract::sent")]
    #[schema(value_type = Option<RateLimitRequest>, required = false)]
    rate_limit: Option<Option<Object<RateLimitRequest>>>,
    /// Minimum lease in seconds when the poll sets none. Default: 30 if the job's timeout decides.
    #[serde(default, deserialize_with = "extract::sent")]
    #[schema(value_type = Option<i32>, required = false, extensions(("bounds" = json!(range(1, limits::MAX_LEASE_SECONDS)))))]
    default_lease_seconds: Option<Option<i32>>,
    /// Retention of finished jobs in days. Default: 7.
    #[serde(default, deserialize_with = "extract::sent")]
    #[schema(value_type = Option<i32>, required = false, extensions(("bounds" = json!(range(1, limits::MAX_RETENTION_DAYS)))))]
    retention_days: Option<Option<i32>>,
    /// Default `max_attempts` for jobs that do not set it; applies to jobs enqueued later.
    /// Recurring schedules set their own.
    #[serde(default, deserialize_with = "extract::sent")]
    #[schema(value_type = Option<i32>, required = false, extensions(("bounds" = json!(range(1, limits::MAX_MAX_ATTEMPTS)))))]
    default_max_attempts: Option<Option<i32>>,
    /// Default retry policy for jobs that do not set one; applies to jobs enqueued later.
    #[serde(default, deserialize_with = "extract::sent")]
    #[schema(value_type = Option<RetryRequest>, required = false)]
    default_retry: Option<Option<Object<RetryRequest>>>,
    /// Consecutive dead letters and losses of one job type that pause it (circuit breaker).
    #[serde(default, deserialize_with = "extract::sent")]
    #[schema(value_type = Option<i32>, required = false, extensions(("bounds" = json!(range(1, limits::MAX_BRAKE_AFTER)))))]
    brake_after: Option<Option<i32>>,
    /// Jobs that may wait or run: enqueues beyond it are refused with 429 `queue_full`. Schedules,
    /// callbacks and retries are not.
    #[serde(default, deserialize_with = "extract::sent")]
    #[schema(value_type = Option<i32>, required = false, extensions(("bounds" = json!(range(1, limits::MAX_MAX_WAITING)))))]
    max_waiting: Option<Option<i32>>,
    /// Rules of the queue's groups; null: jobs of a group run as others do.
    #[serde(default, deserialize_with = "extract::sent")]
    #[schema(value_type = Option<GroupRulesRequest>, required = false)]
    groups: Option<Option<Object<GroupRulesRequest>>>,
    /// Names of up to three limits that the queue keeps together with others; null or empty: none.
    /// One by `group` needs `groups.fair`.
    #[serde(default, deserialize_with = "extract::sent")]
    #[schema(value_type = Option<Vec<String>>, required = false, max_items = 3, example = json!(["stripe"]))]
    shared_limits: Option<Option<Vec<String>>>,
}

/// Rules of the groups of a queue. A field that is left out stays as it is.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GroupRulesRequest {
    /// The order in which jobs of a group run. `none` at first.
    order: Option<GroupOrder>,
    /// The effect of a dead letter on its group. `block` at first.
    on_dead: Option<OnDead>,
    /// Jobs of a group that run at the same time at most, where the order is `none`. Null: as many
    /// as workers take.
    #[serde(default, deserialize_with = "extract::sent")]
    #[schema(value_type = Option<i32>, required = false, extensions(("bounds" = json!(range(1, limits::MAX_CONCURRENCY)))))]
    max_running: Option<Option<i32>>,
    /// Jobs of a group that start in any window of `per_seconds` at most, where the order is
    /// `none`: up to four windows. Empty or null: as many as workers take.
    #[serde(default, deserialize_with = "extract::sent")]
    #[schema(value_type = Option<Vec<RateLimitRequest>>, required = false, max_items = 4)]
    rates: Option<Option<Vec<Object<RateLimitRequest>>>>,
    /// Whether groups take turns by their weights, where the order is `none`: the jobs without a
    /// group are one of them, of weight 1. Priorities order the jobs of a group. `false` at first.
    fair: Option<bool>,
}

impl GroupRulesRequest {
    fn check(&self, check: &mut Check) {
        if let Some(Some(max_running)) = self.max_running {
            check.range("groups.max_running", max_running, 1, limits::MAX_CONCURRENCY);
        }
        if let Some(Some(rates)) = &self.rates {
            accept_rates(rates, "groups.rates", check);
        }
        let has_limits = self.max_running.is_some() || self.rates.is_some();
        let has_order = self.order.is_some() || self.on_dead.is_some() || self.fair.is_some();
        if !has_order && !has_limits {
            check.refuse("groups", "must have order, on_dead, max_running, rates or fair");
        }
    }
}

/// The rates of a group, each with a window of its own.
pub(crate) fn accept_rates(
    rates: &[Object<RateLimitRequest>],
    field: &str,
    check: &mut Check,
) -> Vec<RateLimit> {
    if rates.len() > MAX_GROUP_RATES {
        check.refuse(field, format!("must have at most {MAX_GROUP_RATES} entries"));
    }
    for (index, Object(it)) in rates.iter().enumerate().take(MAX_GROUP_RATES) {
        it.check(&format!("{field}[{index}]"), check);
        let is_double = |other: &Object<RateLimitRequest>| other.0.per_seconds == it.per_seconds;
        if rates[..index].iter().any(is_double) {
            let field = format!("{field}[{index}].per_seconds");
            check.refuse(&field, "must be another window than those before");
        }
    }
    rates.iter().map(|it| it.0.accept()).collect()
}

/// At most `count` jobs start in any window of `per_seconds`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RateLimitRequest {
    /// Number of jobs.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_RATE_LIMIT_COUNT)))))]
    count: i32,
    /// Length of the window in seconds.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_RATE_LIMIT_SECONDS)))))]
    per_seconds: i32,
}

impl RateLimitRequest {
    fn check(&self, path: &str, check: &mut Check) {
        check.range(&format!("{path}.count"), self.count, 1, limits::MAX_RATE_LIMIT_COUNT);
        let max = limits::MAX_RATE_LIMIT_SECONDS;
        check.range(&format!("{path}.per_seconds"), self.per_seconds, 1, max);
    }

    fn accept(&self) -> RateLimit {
        RateLimit { count: self.count, per_seconds: self.per_seconds }
    }
}

impl RequestBody for ChangeQueueRequest {}

impl ChangeQueueRequest {
    fn accept(self, max_retention_days: i32, check: &mut Check) -> SettingsChange {
        let bounds = [
            ("max_concurrency", self.max_concurrency, 0, limits::MAX_CONCURRENCY),
            ("default_lease_seconds", self.default_lease_seconds, 1, limits::MAX_LEASE_SECONDS),
            ("retention_days", self.retention_days, 1, max_retention_days),
            ("default_max_attempts", self.default_max_attempts, 1, limits::MAX_MAX_ATTEMPTS),
            ("brake_after", self.brake_after, 1, limits::MAX_BRAKE_AFTER),
            ("max_waiting", self.max_waiting, 1, limits::MAX_MAX_WAITING),
        ];
        for (field, value, min, max) in bounds {
            if let Some(Some(value)) = value {
                check.range(field, value, min, max);
            }
        }
        if let Some(Some(Object(it))) = &self.rate_limit {
            it.check("rate_limit", check);
        }
        if let Some(Some(Object(rules))) = &self.groups {
            rules.check(check);
        }
        let shared = self.shared_limits.map(|it| it.filter(|names| !names.is_empty()));
        if let Some(Some(names)) = &shared {
            check.names("shared_limits", names, MAX_LIMITS_OF_QUEUE, limits::MAX_QUEUE_CHARS);
            for (place, name) in names.iter().enumerate() {
                if names[..place].contains(name) {
                    check.refuse(&format!("shared_limits[{place}]"), "is named twice");
                }
            }
        }
        let change = SettingsChange {
            max_concurrency: self.max_concurrency,
            rate_limit: self
                .rate_limit
                .map(|it| it.map(|Object(limit)| (limit.count, limit.per_seconds))),
            default_lease_seconds: self.default_lease_seconds,
            retention_days: self.retention_days,
            default_max_attempts: self.default_max_attempts,
            default_retry: self
                .default_retry
                .map(|it| it.map(|Object(retry)| retry.accept("default_retry", check))),
            brake_after: self.brake_after,
            max_waiting: self.max_waiting,
            groups: self.groups.map(|it| match it {
                Some(Object(rules)) => {
                    let GroupRulesRequest { order, on_dead, max_running, rates, fair } = rules;
                    let rates = rates.map(|it| it.into_iter().flatten().map(|it| it.0.accept()));
                    let rates = rates.map(Iterator::collect);
                    GroupRulesChange { order, on_dead, max_running, rates, fair }
                }
                None => GroupRulesChange::END,
            }),
            shared_limits: shared,
        };
        if change == SettingsChange::default() {
            check.refuse("body", "must change at least one setting");
        }
        change
    }
}

/// Change a queue.
///
/// A lower `max_concurrency` or a `rate_limit` does not stop running jobs; no more start until the
/// limit allows it.
#[utoipa::path(
    patch, path = "/queues/{queue}", tag = "queues", operation_id = "queues_update",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(("queue" = String, Path, description = "The queue.", example = "default"), settings::Header),
    request_body = ChangeQueueRequest,
    responses(
        (status = 200, description = "The queue.", body = Queue),
    ),
)]
pub async fn change(
    caller: Caller<Manage>,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
    conditions: Preconditions,
    Json(request): Json<ChangeQueueRequest>,
) -> Result<Tagged<Queue>, Error> {
    let mut check = Check::default();
    check.name("queue", &queue, limits::MAX_QUEUE_CHARS);
    let change = request.accept(caller.limits.max_retention_days(), &mut check);
    check.finish()?;
    let about = (caller.project_id, format!("queue {queue}"));
    let current = if_known(&app, caller.project_id, &queue);
    let write = write(&app, &caller, &queue, &change);
    conditions.write(&app, about, current, write).await.map(Tagged)
}

async fn write(
    app: &App,
    caller: &Caller<Manage>,
    queue: &str,
    change: &SettingsChange,
) -> Result<Queue, Error> {
    let before = one(app, caller.project_id, queue.to_owned()).await?.0.settings();
    queues::change_settings(&app.engine, caller.project_id, queue, change).await?;
    let after = one(app, caller.project_id, queue.to_owned()).await?.0;
    let entry = NewAuditEntry::to("queue.changed", queue);
    let entry = NewAuditEntry { before: Some(before), after: Some(after.settings()), ..entry };
    audit::note(app, caller, entry).await;
    Ok(after)
}
