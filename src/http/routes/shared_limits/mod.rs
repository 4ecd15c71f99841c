//! `/v1/shared-limits`: limits that several queues of a project keep together.

pub mod groups;

use axum::{Json as Reply, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::Error,
    limits,
    rate::{Handout, RateLimit, RateLimits},
    shared_limit::{NewSharedLimit, SharedBy},
};
use fencepost_engine::shared_limits::{self, SharedLimitRow};
use fencepost_web::{
    app::App,
    auth::{Caller, Manage, Read},
    wire::{
        extract::{Json, NameInPath, Object, Query, RequestBody},
        openapi::range,
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{
    cursor::{self, List},
    error::ErrorBody,
    page::{PageSize, page},
    routes::{
        audit::{self, NewAuditEntry},
        queues::change::{RateLimitRequest, accept_rates},
    },
};

const DEFAULT_PAGE_LIMITS: u32 = 50;

/// A limit that several queues keep together.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct SharedLimit {
    /// Its name, by which queues name it.
    #[schema(example = "stripe")]
    pub name: String,
    /// Whose jobs it counts together.
    pub by: SharedBy,
    /// Jobs that run at the same time at most; null: as many as workers take.
    #[schema(required)]
    pub max_running: Option<i32>,
    /// Jobs that start in any window at most, of each window. Empty: as many as workers take.
    pub rates: Vec<RateLimit>,
    /// Queues that name it, by name.
    pub queues: Vec<String>,
    /// Running jobs of these queues.
    pub running: i64,
    /// Jobs that have started in the window of each of `rates`. Of a limit by group: empty, because
    /// each group has its own.
    pub started: Vec<i32>,
    /// When the next job may start, by its pause and its rates; null: one may now, as far as these
    /// decide.
    #[schema(required)]
    pub next_at: Option<DateTime<Utc>>,
    /// End of the pause that a worker has asked for; null: not paused.
    #[schema(required)]
    pub paused_until: Option<DateTime<Utc>>,
    /// Time at which it was created.
    pub created_at: DateTime<Utc>,
    /// Time of its last change.
    pub updated_at: DateTime<Utc>,
}

impl From<SharedLimitRow> for SharedLimit {
    fn from(row: SharedLimitRow) -> Self {
        let (started, next_at) = match row.by {
            SharedBy::All => used(&row.rates, &row.starts, row.paused_until, row.now),
            SharedBy::Group => (Vec::new(), None),
        };
        Self {
            name: row.name,
            by: row.by,
            max_running: row.max_running,
            rates: row.rates,
            queues: row.queues,
            running: row.running,
            started,
            next_at,
            paused_until: row.paused_until,
            created_at: row.created_at,
            updated_at: row.updated_at,
        }
    }
}

/// How many have started in each window, and when the next one may.
fn used(
    rates: &[RateLimit],
    starts: &[Handout],
    paused_until: Option<DateTime<Utc>>,
    now: DateTime<Utc>,
) -> (Vec<i32>, Option<DateTime<Utc>>) {
    let started = rates.iter().map(|it| it.started(starts, now)).collect();
    let by_rates = RateLimits::of(rates.to_vec()).next_at(starts, now);
    (started, paused_until.into_iter().chain(by_rates).max())
}

/// Page of shared limits.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct SharedLimitsQuery {
    /// Maximum number of limits to return. Default: 50.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

page! {
    /// A page of shared limits, by name.
    SharedLimitPage {
        /// Limits of the page.
        shared_limits: SharedLimit
    }
}

/// List shared limits.
///
/// Limits of the project, by name.
#[utoipa::path(
    get, path = "/shared-limits", tag = "queues", operation_id = "shared_limits_list",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(SharedLimitsQuery),
    responses(
        (status = 200, description = "A page of shared limits.", body = SharedLimitPage),
    ),
)]
pub async fn list(
    caller: Caller<Read>,
    State(app): State<App>,
    Query(query): Query<SharedLimitsQuery>,
) -> Result<Reply<SharedLimitPage>, Error> {
    let mut check = Check::default();
    let size =
        PageSize::read(query.limit, DEFAULT_PAGE_LIMITS, limits::MAX_PAGE_GROUPS, &mut check);
    check.finish()?;
    let list = List::of(caller.project_id, "shared_limits");
    let after = cursor::read_text(&app, list, query.cursor.as_deref())?.unwrap_or_default();
    let page = (after.as_str(), size.one_more());
    let mut rows = shared_limits::list(&app.engine, caller.project_id, page).await?;
    let next_cursor = size.cut(&mut rows, |it| cursor::write_text(&app, list, &it.name));
    let found = rows.into_iter().map(SharedLimit::from).collect();
    Ok(Reply(SharedLimitPage::of(found, next_cursor)))
}

/// Read a shared limit.
#[utoipa::path(
    get, path = "/shared-limits/{shared_limit}", tag = "queues", operation_id = "shared_limits_get",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(("shared_limit" = String, Path, description = "The limit.", example = "stripe")),
    responses(
        (status = 200, description = "The limit.", body = SharedLimit),
        (status = 404, description = "There is no such limit.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<Read>,
    State(app): State<App>,
    NameInPath(name): NameInPath,
) -> Result<Reply<SharedLimit>, Error> {
    check_name(&name, Check::default())?;
    let found = shared_limits::get(&app.engine, caller.project_id, &name).await?;
    Ok(Reply(found.into()))
}

/// A limit that several queues keep together.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"by": "all", "max_running": 10, "rates": [{"count": 100, "per_seconds": 60}]}))]
pub struct PutSharedLimitRequest {
    /// Whose jobs it counts together. It cannot be changed. Queues may name one by `group` if their
    /// groups take turns: `groups.fair`. Default: as it is; `all` for a new one.
    by: Option<SharedBy>,
    /// Jobs that run at the same time at most. Default: as many as workers take.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_CONCURRENCY)))))]
    max_running: Option<i32>,
    /// Jobs that start in any window of `per_seconds` at most: up to four windows. Default: as many
    /// as workers take.
    #[schema(value_type = Option<Vec<RateLimitRequest>>, required = false, max_items = 4)]
    rates: Option<Vec<Object<RateLimitRequest>>>,
}

impl RequestBody for PutSharedLimitRequest {}

/// Set a shared limit.
///
/// Creates it, or replaces its numbers. Queues name up to three in their `shared_limits`; then all
/// of them together keep it, on all nodes.
#[utoipa::path(
    put, path = "/shared-limits/{shared_limit}", tag = "queues", operation_id = "shared_limits_put",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(("shared_limit" = String, Path, description = "The limit.", example = "stripe")),
    request_body = PutSharedLimitRequest,
    responses(
        (status = 200, description = "The limit.", body = SharedLimit),
    ),
)]
pub async fn put(
    caller: Caller<Manage>,
    State(app): State<App>,
    NameInPath(name): NameInPath,
    Json(request): Json<PutSharedLimitRequest>,
) -> Result<Reply<SharedLimit>, Error> {
    let mut check = Check::default();
    if let Some(max_running) = request.max_running {
        check.range("max_running", max_running, 1, limits::MAX_CONCURRENCY);
    }
    let rates = accept_rates(&request.rates.unwrap_or_default(), "rates", &mut check);
    if request.max_running.is_none() && rates.is_empty() {
        check.refuse("body", "must have max_running or rates");
    }
    check_name(&name, check)?;
    let new = NewSharedLimit { name, by: request.by, max_running: request.max_running, rates };
    let stored = shared_limits::put(&app.engine, caller.project_id, &new).await?;
    let after = serde_json::json!({
        "by": stored.by, "max_running": stored.max_running, "rates": stored.rates,
    });
    note(&app, &caller, "shared_limit.changed", &new.name, after).await;
    Ok(Reply(stored.into()))
}

/// Delete a shared limit.
///
/// No queue may name it.
#[utoipa::path(
    delete, path = "/shared-limits/{shared_limit}", tag = "queues", operation_id = "shared_limits_delete",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(("shared_limit" = String, Path, description = "The limit.", example = "stripe")),
    responses(
        (status = 204, description = "It is deleted."),
        (status = 404, description = "There is no such limit.", body = ErrorBody),
        (status = 409, description = "A queue names it.", body = ErrorBody),
    ),
)]
pub async fn delete(
    caller: Caller<Manage>,
    State(app): State<App>,
    NameInPath(name): NameInPath,
) -> Result<StatusCode, Error> {
    check_name(&name, Check::default())?;
    shared_limits::delete(&app.engine, caller.project_id, &name).await?;
    note(&app, &caller, "shared_limit.deleted", &name, serde_json::json!({})).await;
    Ok(StatusCode::NO_CONTENT)
}

/// Reset a shared limit.
///
/// Forgets the starts that it has counted, and its pause. Of one by group: reset its groups.
#[utoipa::path(
    post, path = "/shared-limits/{shared_limit}/reset", tag = "queues",
    operation_id = "shared_limits_reset",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(("shared_limit" = String, Path, description = "The limit.", example = "stripe")),
    responses(
        (status = 200, description = "The limit.", body = SharedLimit),
        (status = 404, description = "There is no such limit.", body = ErrorBody),
    ),
)]
pub async fn reset(
    caller: Caller<Manage>,
    State(app): State<App>,
    NameInPath(name): NameInPath,
) -> Result<Reply<SharedLimit>, Error> {
    check_name(&name, Check::default())?;
    let after = shared_limits::reset(&app.engine, caller.project_id, &name).await?;
    note(&app, &caller, "shared_limit.reset", &name, serde_json::json!({})).await;
    Ok(Reply(after.into()))
}

fn check_name(name: &str, mut check: Check) -> Result<(), Error> {
    check.path_name("shared_limit", name, limits::MAX_QUEUE_CHARS);
    check.finish()
}

async fn note(
    app: &App,
    caller: &Caller<Manage>,
    action: &'static str,
    name: &str,
    after: serde_json::Value,
) {
    let entry = NewAuditEntry::to(action, name);
    audit::note(app, caller, NewAuditEntry { after: Some(after.to_string()), ..entry }).await;
}
