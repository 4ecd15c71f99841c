//! `/v1/shared-limits/{shared_limit}/groups`: groups under a limit that each group has for itself.

use axum::{Json as Reply, extract::State};
use chrono::{DateTime, Utc};
use fencepost_domain::{error::Error, limits, rate::RateLimit, shared_limit::KeyRules};
use fencepost_engine::shared_limits::{self, LimitGroupRow};
use fencepost_web::{
    app::App,
    auth::{Caller, Manage, Read},
    wire::{
        extract::{GroupInPath, Json, NameInPath, Object, Query, RequestBody},
        openapi::range,
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::{DEFAULT_PAGE_LIMITS, check_name, note, used};
use crate::{
    cursor::{self, List},
    error::ErrorBody,
    page::{PageSize, page},
    routes::queues::change::{RateLimitRequest, accept_rates},
};

/// A group under a shared limit.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct SharedLimitGroup {
    /// Its name.
    #[schema(example = "customer:42")]
    pub group: String,
    /// Running jobs of it, in all queues that name the limit.
    pub running: i64,
    /// Jobs of it that have started in the window of each of its rates: its own, or those of the
    /// limit.
    pub started: Vec<i32>,
    /// When its next job may start, by its pause and its rates; null: one may now, as far as these
    /// decide.
    #[schema(required)]
    pub next_at: Option<DateTime<Utc>>,
    /// End of the pause that a worker has asked for; null: not paused.
    #[schema(required)]
    pub paused_until: Option<DateTime<Utc>>,
    /// Numbers of its own, in place of those of the limit; null: none.
    #[schema(required)]
    pub rules: Option<KeyRules>,
}

impl SharedLimitGroup {
    fn of(row: LimitGroupRow, of_limit: &[RateLimit]) -> Self {
        let rates = row.rates.as_deref().unwrap_or(of_limit);
        let (started, next_at) = used(rates, &row.starts, row.paused_until, row.now);
        let has_rules = row.max_running.is_some() || row.rates.is_some();
        let rules =
            KeyRules { max_running: row.max_running, rates: row.rates, expires_at: row.expires_at };
        Self {
            group: row.group,
            running: row.running,
            started,
            next_at,
            paused_until: row.paused_until,
            rules: Some(rules).filter(|_| has_rules),
        }
    }

    fn unknown(group: String, of_limit: &[RateLimit]) -> Self {
        let started = vec![0; of_limit.len()];
        Self { group, running: 0, started, next_at: None, paused_until: None, rules: None }
    }
}

/// Page of groups under a shared limit.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct SharedLimitGroupsQuery {
    /// Maximum number of groups to return. Default: 50.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

page! {
    /// A page of groups under a shared limit, by name.
    SharedLimitGroupPage {
        /// Groups of the page.
        groups: SharedLimitGroup
    }
}

/// List groups under a shared limit.
///
/// Of a limit by group: those that run jobs, have started some in its windows, are paused, or have
/// numbers of their own.
#[utoipa::path(
    get, path = "/shared-limits/{shared_limit}/groups", tag = "queues",
    operation_id = "shared_limits_list_groups",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(
        SharedLimitGroupsQuery,
        ("shared_limit" = String, Path, description = "The limit.", example = "stripe"),
    ),
    responses(
        (status = 200, description = "A page of groups.", body = SharedLimitGroupPage),
        (status = 404, description = "There is no such limit.", body = ErrorBody),
    ),
)]
pub async fn list(
    caller: Caller<Read>,
    State(app): State<App>,
    NameInPath(name): NameInPath,
    Query(query): Query<SharedLimitGroupsQuery>,
) -> Result<Reply<SharedLimitGroupPage>, Error> {
    let mut check = Check::default();
    let size =
        PageSize::read(query.limit, DEFAULT_PAGE_LIMITS, limits::MAX_PAGE_GROUPS, &mut check);
    check_name(&name, check)?;
    let list = List::of(caller.project_id, "shared_limit_groups").filtered(&name);
    let after = cursor::read_text(&app, list, query.cursor.as_deref())?.unwrap_or_default();
    let (page, of) = ((after.as_str(), size.one_more()), (caller.project_id, name.as_str()));
    let (limit, mut rows) = shared_limits::groups(&app.engine, of, page).await?;
    let next_cursor = size.cut(&mut rows, |it| cursor::write_text(&app, list, &it.group));
    let found = rows.into_iter().map(|it| SharedLimitGroup::of(it, &limit.rates)).collect();
    Ok(Reply(SharedLimitGroupPage::of(found, next_cursor)))
}

/// Read a group under a shared limit.
///
/// Also one of which nothing is known: none of its jobs runs or has started in its windows.
#[utoipa::path(
    get, path = "/shared-limits/{shared_limit}/groups/{group}", tag = "queues",
    operation_id = "shared_limits_get_group",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(
        ("shared_limit" = String, Path, description = "The limit.", example = "stripe"),
        ("group" = String, Path, description = "The group, percent-encoded.", example = "acme"),
    ),
    responses(
        (status = 200, description = "The group.", body = SharedLimitGroup),
        (status = 404, description = "There is no such limit.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<Read>,
    State(app): State<App>,
    NameInPath(name): NameInPath,
    GroupInPath(group): GroupInPath,
) -> Result<Reply<SharedLimitGroup>, Error> {
    check_names(&name, &group, Check::default())?;
    shown(&app, (caller.project_id, &name), group).await
}

/// Numbers of one group, in place of those of a shared limit.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"max_running": 2}))]
pub struct PutSharedLimitGroupRequest {
    /// Jobs of it that run at the same time at most. Default: as the limit says.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_CONCURRENCY)))))]
    max_running: Option<i32>,
    /// Jobs of it that start in any window of `per_seconds` at most: up to four windows. Empty: as
    /// many as workers take. Default: as the limit says.
    #[schema(value_type = Option<Vec<RateLimitRequest>>, required = false, max_items = 4)]
    rates: Option<Vec<Object<RateLimitRequest>>>,
    /// Time at which these numbers end by themselves. Default: when the group is reset.
    expires_at: Option<DateTime<Utc>>,
}

impl RequestBody for PutSharedLimitGroupRequest {}

/// Give a group numbers of its own under a shared limit.
///
/// They take the place of those of the limit, and of its own earlier ones.
#[utoipa::path(
    put, path = "/shared-limits/{shared_limit}/groups/{group}", tag = "queues",
    operation_id = "shared_limits_put_group",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(
        ("shared_limit" = String, Path, description = "The limit.", example = "stripe"),
        ("group" = String, Path, description = "The group, percent-encoded.", example = "acme"),
    ),
    request_body = PutSharedLimitGroupRequest,
    responses(
        (status = 200, description = "The group.", body = SharedLimitGroup),
        (status = 404, description = "There is no such limit.", body = ErrorBody),
    ),
)]
pub async fn put(
    caller: Caller<Manage>,
    State(app): State<App>,
    NameInPath(name): NameInPath,
    GroupInPath(group): GroupInPath,
    Json(request): Json<PutSharedLimitGroupRequest>,
) -> Result<Reply<SharedLimitGroup>, Error> {
    let mut check = Check::default();
    if let Some(max_running) = request.max_running {
        check.range("max_running", max_running, 1, limits::MAX_CONCURRENCY);
    }
    let rates = request.rates.map(|it| accept_rates(&it, "rates", &mut check));
    check.time("expires_at", request.expires_at);
    if request.max_running.is_none() && rates.is_none() {
        check.refuse("body", "must have max_running or rates");
    }
    check_names(&name, &group, check)?;
    let (max_running, expires_at) = (request.max_running, request.expires_at);
    let rules = KeyRules { max_running, rates, expires_at };
    let of = (caller.project_id, name.as_str());
    shared_limits::put_group(&app.engine, of, &group, &rules).await?;
    let after = serde_json::json!({"group": group, "rules": rules});
    note(&app, &caller, "shared_limit.group_changed", &name, after).await;
    shown(&app, of, group).await
}

/// Reset a group under a shared limit.
///
/// Forgets its own numbers, its pause, and the starts that the limit has counted of it.
#[utoipa::path(
    post, path = "/shared-limits/{shared_limit}/groups/{group}/reset", tag = "queues",
    operation_id = "shared_limits_reset_group",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(
        ("shared_limit" = String, Path, description = "The limit.", example = "stripe"),
        ("group" = String, Path, description = "The group, percent-encoded.", example = "acme"),
    ),
    responses(
        (status = 200, description = "The group.", body = SharedLimitGroup),
        (status = 404, description = "There is no such limit.", body = ErrorBody),
    ),
)]
pub async fn reset(
    caller: Caller<Manage>,
    State(app): State<App>,
    NameInPath(name): NameInPath,
    GroupInPath(group): GroupInPath,
) -> Result<Reply<SharedLimitGroup>, Error> {
    check_names(&name, &group, Check::default())?;
    let of = (caller.project_id, name.as_str());
    shared_limits::reset_group(&app.engine, of, &group).await?;
    let after = serde_json::json!({"group": group});
    note(&app, &caller, "shared_limit.group_reset", &name, after).await;
    shown(&app, of, group).await
}

fn check_names(name: &str, group: &str, mut check: Check) -> Result<(), Error> {
    check.path_name("group", group, limits::MAX_GROUP_CHARS);
    check_name(name, check)
}

async fn shown(
    app: &App,
    of: (fencepost_domain::ids::ProjectId, &str),
    group: String,
) -> Result<Reply<SharedLimitGroup>, Error> {
    let (limit, found) = shared_limits::group(&app.engine, of, &group).await?;
    Ok(Reply(match found {
        Some(row) => SharedLimitGroup::of(row, &limit.rates),
        None => SharedLimitGroup::unknown(group, &limit.rates),
    }))
}
