//! `/v1/queues/{queue}/groups`: groups of jobs, what they wait for, and what a person may do.

use axum::{Json as Reply, extract::State};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::{Error, QueueError},
    group::{GroupOverride, HeadAction},
    ids::ProjectId,
    job::{JobState, StoredState},
    limits,
};
use fencepost_engine::groups::{self, GroupKey, GroupRow, Listed, PauseEnd};
use fencepost_store::groups::MAX_COUNTED_JOBS;
use fencepost_web::{
    app::App,
    auth::{Caller, Manage, Read},
    wire::{
        extract::{GroupInPath, Json, NameInPath, OptionalJson, Query, RequestBody},
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
    routes::audit::{self, NewAuditEntry},
};

const DEFAULT_PAGE_GROUPS: u32 = 50;

/// A group of jobs of one queue.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Group {
    /// Name.
    #[schema(example = "customer:42")]
    pub group: String,
    /// Its queue.
    pub queue: String,
    /// The most urgent of its states.
    pub state: GroupState,
    /// Jobs that have not started, counted up to 1,000.
    pub waiting: i64,
    /// Running jobs, counted up to 1,000.
    pub running: i64,
    /// The first in line of those that have not ended: in strict order the one that runs; with
    /// `on_dead: block` also a dead letter. Null: it has no jobs.
    #[schema(required)]
    pub head: Option<GroupHead>,
    /// Paused since; null: not paused.
    #[schema(required)]
    pub paused_at: Option<DateTime<Utc>>,
    /// End of its pause; null: not paused, or paused until it is resumed.
    #[schema(required)]
    pub paused_until: Option<DateTime<Utc>>,
    /// The next time at which it changes by itself: a pause ends, its rates let a job start, or its
    /// head is due. Null: not known.
    #[schema(required)]
    pub next_change_at: Option<DateTime<Utc>>,
    /// Since when its first job waits that is due, also while the group is paused or blocked. It
    /// counts anew from the end of a pause. Null: none waits.
    #[schema(required)]
    pub waiting_since: Option<DateTime<Utc>>,
    /// Rules of its own, in place of those of its queue; null: none.
    #[schema(required)]
    pub rules: Option<GroupOverride>,
}

/// The state of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum GroupState {
    /// Its waiting jobs are held until the pause ends.
    Paused,
    /// A dead letter holds it: unblock it.
    Blocked,
    /// Jobs of it run.
    Running,
    /// Jobs of it wait, and none runs.
    Waiting,
    /// It has no jobs.
    Idle,
}

impl GroupState {
    /// Its name.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Paused => "paused",
            Self::Blocked => "blocked",
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Idle => "idle",
        }
    }
}

/// The job that a group waits for.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct GroupHead {
    /// Id.
    pub job_id: String,
    /// State.
    pub state: JobState,
    /// From when it may run.
    pub run_at: DateTime<Utc>,
    /// Time at which it was stored.
    pub created_at: DateTime<Utc>,
}

impl Group {
    fn of(queue: &str, row: GroupRow) -> Self {
        let head = match (row.head_id, row.head_state, row.head_run_at, row.head_created_at) {
            (Some(id), Some(state), Some(run_at), Some(created_at)) => {
                let (job_id, state) = (id.to_string(), state.public());
                Some(GroupHead { job_id, state, run_at, created_at })
            }
            _ => None,
        };
        let is_blocked = row.head_state == Some(StoredState::DeadLetter);
        let state = match (row.paused_at, row.running, row.waiting) {
            (Some(_), ..) => GroupState::Paused,
            _ if is_blocked => GroupState::Blocked,
            (None, 1.., _) => GroupState::Running,
            (None, _, 1..) => GroupState::Waiting,
            (None, ..) => GroupState::Idle,
        };
        let head_due = row.head_run_at.filter(|it| *it > row.now && !is_blocked);
        let next_change_at = match row.paused_at {
            Some(_) => row.paused_until,
            None => row.full_until.or(head_due),
        };
        Self {
            rules: row.rules(),
            group: row.group,
            queue: queue.to_owned(),
            state,
            waiting: row.waiting.min(MAX_COUNTED_JOBS),
            running: row.running,
            head,
            paused_at: row.paused_at,
            paused_until: row.paused_until,
            next_change_at,
            waiting_since: row.waiting_since,
        }
    }
}

/// Page of groups.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct GroupsQuery {
    /// Only groups that a dead letter blocks, that are paused, or with jobs that wait for their
    /// group or its turn. Default: all with jobs that have not ended, and those that are blocked or
    /// paused.
    #[param(inline)]
    state: Option<ListedState>,
    /// Order of the list. Default: `name`.
    #[param(inline)]
    order: Option<GroupListOrder>,
    /// Maximum number of groups to return. Default: 50.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

/// Which groups to list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ListedState {
    /// A dead letter holds them.
    Blocked,
    /// They are paused.
    Paused,
    /// Jobs wait for their group, or its turn, for which it is in line soon after they are stored.
    Waiting,
}

/// How to order groups.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum GroupListOrder {
    /// By name.
    #[default]
    Name,
    /// Those whose first job has waited longest first, of queues with rules of groups: one page,
    /// without paused and blocked groups, of the first 1,000 with waiting jobs by name.
    LongestWait,
}

page! {
    /// A page of groups, by name.
    JobGroupPage {
        /// Groups of the page.
        groups: Group
    }
}

/// List groups.
///
/// Groups of a queue by name, or those that wait longest.
#[utoipa::path(
    get, path = "/queues/{queue}/groups", tag = "queues", operation_id = "queues_list_groups",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(GroupsQuery, ("queue" = String, Path, description = "The queue.", example = "default")),
    responses(
        (status = 200, description = "A page of groups.", body = JobGroupPage),
    ),
)]
pub async fn list(
    caller: Caller<Read>,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
    Query(query): Query<GroupsQuery>,
) -> Result<Reply<JobGroupPage>, Error> {
    let mut check = Check::default();
    check.name("queue", &queue, limits::MAX_QUEUE_CHARS);
    let size =
        PageSize::read(query.limit, DEFAULT_PAGE_GROUPS, limits::MAX_PAGE_GROUPS, &mut check);
    let order = query.order.unwrap_or_default();
    if order == GroupListOrder::LongestWait {
        let given = [("state", query.state.is_some()), ("cursor", query.cursor.is_some())];
        for (field, _) in given.into_iter().filter(|it| it.1) {
            check.refuse(field, "must be left out where `order` is longest_wait");
        }
    }
    check.finish()?;
    if order == GroupListOrder::LongestWait {
        let limit = i64::from(size.rows());
        let rows = groups::longest_waiting(&app.engine, caller.project_id, &queue, limit).await?;
        let groups = rows.into_iter().map(|it| Group::of(&queue, it)).collect();
        return Ok(Reply(JobGroupPage::of(groups, None)));
    }
    let none = Listed::default();
    let listed = match query.state {
        None => Listed { waiting: true, open: true, paused: true, blocked: true },
        Some(ListedState::Blocked) => Listed { blocked: true, ..none },
        Some(ListedState::Paused) => Listed { paused: true, ..none },
        Some(ListedState::Waiting) => Listed { waiting: true, ..none },
    };
    let filters = (query.state.map(|it| format!("{it:?}")), queue.clone());
    let list = List::of(caller.project_id, "groups").filtered(&filters);
    let after = cursor::read_text(&app, list, query.cursor.as_deref())?.unwrap_or_default();
    let page = (after.as_str(), size.one_more());
    let mut rows = groups::list(&app.engine, caller.project_id, &queue, listed, page).await?;
    let next_cursor = size.cut(&mut rows, |it| cursor::write_text(&app, list, &it.group));
    let groups = rows.into_iter().map(|it| Group::of(&queue, it)).collect();
    Ok(Reply(JobGroupPage::of(groups, next_cursor)))
}

/// Read a group.
#[utoipa::path(
    get, path = "/queues/{queue}/groups/{group}", tag = "queues", operation_id = "queues_get_group",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(
        ("queue" = String, Path, description = "The queue.", example = "default"),
        ("group" = String, Path, description = "The group, percent-encoded.", example = "acme"),
    ),
    responses(
        (status = 200, description = "The group.", body = Group),
        (status = 404, description = "It has no jobs and no rules, and is not paused.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<Read>,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
    GroupInPath(group): GroupInPath,
) -> Result<Reply<Group>, Error> {
    let group = accept(caller.project_id, queue, group, Check::default())?;
    shown(&app, &group).await
}

/// How long to pause a group. No body, or an empty object: until it is resumed.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"seconds": 60}))]
pub struct PauseGroupRequest {
    /// Seconds until it ends by itself. An earlier end than that of a pause under way changes
    /// nothing.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_GROUP_PAUSE_SECONDS)))))]
    seconds: Option<i32>,
}

impl RequestBody for PauseGroupRequest {}

/// Pause a group.
///
/// Its jobs are accepted and wait; running ones continue. It holds on all nodes: a claim that began
/// before the pause may still lease a job.
#[utoipa::path(
    post, path = "/queues/{queue}/groups/{group}/pause", tag = "queues",
    operation_id = "queues_pause_group",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(
        ("queue" = String, Path, description = "The queue.", example = "default"),
        ("group" = String, Path, description = "The group, percent-encoded.", example = "acme"),
    ),
    request_body(content = PauseGroupRequest, description = "Optional."),
    responses(
        (status = 200, description = "The group.", body = Group),
    ),
)]
pub async fn pause(
    caller: Caller<Manage>,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
    GroupInPath(group): GroupInPath,
    OptionalJson(request): OptionalJson<PauseGroupRequest>,
) -> Result<Reply<Group>, Error> {
    let mut check = Check::default();
    if let Some(seconds) = request.seconds {
        check.range("seconds", seconds, 1, limits::MAX_GROUP_PAUSE_SECONDS);
    }
    let group = accept(caller.project_id, queue, group, check)?;
    let end = request.seconds.map_or(PauseEnd::Never, PauseEnd::After);
    groups::pause(&app.engine, &group, end).await?;
    let after = serde_json::json!({"group": group.group, "seconds": request.seconds});
    note(&app, &caller, "group.paused", &group, after).await;
    shown(&app, &group).await
}

/// Resume a group.
#[utoipa::path(
    post, path = "/queues/{queue}/groups/{group}/resume", tag = "queues",
    operation_id = "queues_resume_group",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(
        ("queue" = String, Path, description = "The queue.", example = "default"),
        ("group" = String, Path, description = "The group, percent-encoded.", example = "acme"),
    ),
    responses(
        (status = 200, description = "The group.", body = Group),
        (status = 404, description = "It has no jobs and no rules, and is not paused.", body = ErrorBody),
    ),
)]
pub async fn resume(
    caller: Caller<Manage>,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
    GroupInPath(group): GroupInPath,
) -> Result<Reply<Group>, Error> {
    let group = accept(caller.project_id, queue, group, Check::default())?;
    groups::resume(&app.engine, &group).await?;
    note(&app, &caller, "group.resumed", &group, serde_json::json!({"group": group.group})).await;
    now(&app, group).await
}

/// What becomes of the dead letter that blocks a group.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"head": "retry", "job_id": "job_01m7w3ha3aextt8pkwwdmxsmqw"}))]
pub struct UnblockGroupRequest {
    /// What becomes of it.
    head: HeadAction,
    /// The dead letter that is meant: if another one blocks the group by now, nothing is done.
    /// Default: the one that blocks it.
    #[schema(example = "job_01m7w3ha3aextt8pkwwdmxsmqw")]
    job_id: Option<String>,
}

impl RequestBody for UnblockGroupRequest {}

/// Unblock a group.
///
/// Decides about the dead letter at its head.
#[utoipa::path(
    post, path = "/queues/{queue}/groups/{group}/unblock", tag = "queues",
    operation_id = "queues_unblock_group",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(
        ("queue" = String, Path, description = "The queue.", example = "default"),
        ("group" = String, Path, description = "The group, percent-encoded.", example = "acme"),
    ),
    request_body = UnblockGroupRequest,
    responses(
        (status = 200, description = "The group.", body = Group),
        (status = 404, description = "It has no jobs and no rules, and is not paused.", body = ErrorBody),
        (status = 409, description = "No dead letter blocks it, or its retry is refused.", body = ErrorBody),
    ),
)]
pub async fn unblock(
    caller: Caller<Manage>,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
    GroupInPath(group): GroupInPath,
    Json(request): Json<UnblockGroupRequest>,
) -> Result<Reply<Group>, Error> {
    let group = accept(caller.project_id, queue, group, Check::default())?;
    // A malformed id is answered like that of another job.
    let named = request.job_id.as_deref().map(str::parse).transpose();
    let named = named.map_err(|_| QueueError::GroupNotBlocked)?;
    let (how, by) = ((request.head, named), caller.who.changed_by());
    let id = groups::unblock(&app.engine, &group, how, &by).await?;
    let after = serde_json::json!({
        "group": group.group, "head": request.head, "job_id": id.to_string(),
    });
    note(&app, &caller, "group.unblocked", &group, after).await;
    now(&app, group).await
}

/// The group of a path. `check` is what was found wrong in the rest of the request.
pub(super) fn accept(
    project_id: ProjectId,
    queue: String,
    group: String,
    mut check: Check,
) -> Result<GroupKey, Error> {
    check.name("queue", &queue, limits::MAX_QUEUE_CHARS);
    check.path_name("group", &group, limits::MAX_GROUP_CHARS);
    check.finish()?;
    Ok(GroupKey { project_id, queue, group })
}

pub(super) async fn note(
    app: &App,
    caller: &Caller<Manage>,
    action: &'static str,
    group: &GroupKey,
    after: serde_json::Value,
) {
    let entry = NewAuditEntry::to(action, &*group.queue);
    audit::note(app, caller, NewAuditEntry { after: Some(after.to_string()), ..entry }).await;
}

async fn shown(app: &App, group: &GroupKey) -> Result<Reply<Group>, Error> {
    let row = groups::get(&app.engine, group).await?;
    Ok(Reply(Group::of(&group.queue, row)))
}

/// The group after a change, which may have been the end of its last job.
pub(super) async fn now(app: &App, group: GroupKey) -> Result<Reply<Group>, Error> {
    let row = groups::get_any(&app.engine, &group).await?;
    Ok(Reply(Group::of(&group.queue, row)))
}
