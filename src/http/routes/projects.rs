//! `/v1/projects` and `/v1/projects/{project}`.

use axum::{Extension, Json as Reply, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use fencepost_domain::{access::Role, error::Error, lease::RequireFence, limits};
use fencepost_identity::{
    accounts::{
        Client,
        projects::{self, ProjectChange},
    },
    credentials::Evict,
};
use fencepost_store::{self as store, people::members::Membership};
use fencepost_web::{
    app::App,
    auth::{Anybody, Caller, Govern, Own, Person},
    wire::{
        extract::{self, Json, Query, RequestBody},
        openapi::{chars, range},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{
    error::ErrorBody,
    settings::{self, Preconditions, Settings, Tagged},
};

/// Maximum number of projects in one answer, oldest first.
const MAX_SHOWN_PROJECTS: i64 = 1_000;

/// Purpose of a project.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProjectMode {
    /// Production. Its keys begin with `fp_live_`.
    Live,
    /// Testing. Its keys begin with `fp_test_`.
    Test,
}

impl ProjectMode {
    /// Whether it is for testing.
    #[must_use]
    pub fn is_test(&self) -> bool {
        matches!(self, Self::Test)
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Test => "test",
        }
    }
}

/// A project: a tenant with its own jobs, queues and keys.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Project {
    /// Id of the project.
    #[schema(example = "proj_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// Slug, used in paths.
    #[schema(example = "acme")]
    pub slug: String,
    /// Display name.
    pub name: String,
    /// Purpose.
    pub mode: ProjectMode,
    /// Acks and heartbeats of the project that must show `attempt` or `lease_id`.
    pub require_fence: RequireFence,
    /// Length of leases in seconds, for polls that ask for none. Null: half of the job's timeout,
    /// at least 30.
    #[serde(default)]
    #[schema(required, example = 60)]
    pub default_lease_seconds: Option<i32>,
    /// Whether an expired lease counts as a failure. If not, it is a loss.
    #[serde(default)]
    pub losses_count_as_failures: bool,
    /// Plan: see `GET /v1/limits`.
    #[schema(example = "free")]
    pub plan: String,
    /// Your role; null for a key.
    #[schema(required)]
    pub role: Option<Role>,
    /// When it was created.
    pub created_at: DateTime<Utc>,
    /// Time when the operator of the server suspended the project; null: it is not suspended.
    #[schema(required)]
    pub suspended_at: Option<DateTime<Utc>>,
    /// Version of the settings, also in the header `ETag`. A write with it as `If-Match` is refused
    /// if they have changed since.
    #[serde(default)]
    #[schema(required, example = "\"4f0c2a9d1be87a3355d0c61e\"")]
    pub etag: String,
}

impl Settings for Project {
    const FIELDS: &'static [&'static str] =
        &["name", "require_fence", "default_lease_seconds", "losses_count_as_failures"];

    fn etag(&mut self) -> &mut String {
        &mut self.etag
    }
}

impl Project {
    /// A project, as a member with this role sees it.
    #[must_use]
    pub fn of(row: store::people::projects::Project, role: Option<Role>) -> Self {
        Self {
            id: row.public_id.to_string(),
            slug: row.slug,
            name: row.name,
            mode: mode(&row.mode),
            require_fence: RequireFence::of_name(&row.require_fence),
            default_lease_seconds: row.default_lease_seconds,
            losses_count_as_failures: row.losses_count_as_failures,
            plan: row.plan,
            role,
            created_at: row.created_at,
            suspended_at: row.suspended_at,
            etag: String::new(),
        }
        .tagged()
    }
}

impl From<Membership> for Project {
    fn from(row: Membership) -> Self {
        Self {
            id: row.public_id.to_string(),
            slug: row.slug,
            name: row.name,
            mode: mode(&row.mode),
            require_fence: RequireFence::of_name(&row.require_fence),
            default_lease_seconds: row.default_lease_seconds,
            losses_count_as_failures: row.losses_count_as_failures,
            plan: row.plan,
            role: Role::of_name(&row.role),
            created_at: row.created_at,
            suspended_at: row.suspended_at,
            etag: String::new(),
        }
        .tagged()
    }
}

fn mode(name: &str) -> ProjectMode {
    if name == ProjectMode::Test.name() { ProjectMode::Test } else { ProjectMode::Live }
}

/// Projects.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct ProjectList {
    /// Oldest first.
    pub projects: Vec<Project>,
}

/// List your projects.
#[utoipa::path(
    get, path = "/projects", tag = "projects", operation_id = "projects_list", security(("session" = [])),
    responses((status = 200, description = "Your projects.", body = ProjectList)),
)]
pub async fn list(person: Person, State(app): State<App>) -> Result<Reply<ProjectList>, Error> {
    let mut conn = app.engine.pools.people.acquire().await?;
    let id = person.bearer.account_id;
    let rows = store::people::members::of_account(&mut conn, id, MAX_SHOWN_PROJECTS).await?;
    Ok(Reply(ProjectList { projects: rows.into_iter().map(Project::from).collect() }))
}

/// A project to create.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"name": "Acme staging", "mode": "test"}))]
pub struct CreateProjectRequest {
    /// Display name; the slug is derived from it.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_NAME_CHARS)))))]
    name: String,
    /// Purpose. Default: `live`.
    mode: Option<ProjectMode>,
}

impl RequestBody for CreateProjectRequest {}

/// Create a project.
///
/// You become its owner. Create keys for it at `/v1/projects/{project}/keys`.
#[utoipa::path(
    post, path = "/projects", tag = "projects", operation_id = "projects_create", security(("session" = [])),
    request_body = CreateProjectRequest,
    responses(
        (status = 201, description = "The project.", body = Project),
        (status = 409, description = "No free slug could be derived from the name.", body = ErrorBody),
    ),
)]
pub async fn create(
    person: Person,
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<CreateProjectRequest>,
) -> Result<(StatusCode, Reply<Project>), Error> {
    let mut check = Check::default();
    check.public_name("name", &request.name, limits::MAX_NAME_CHARS);
    check.finish()?;
    let mode = request.mode.unwrap_or(ProjectMode::Live).name();
    let (account_id, named) = (person.bearer.account_id, (&*request.name, mode));
    let project = app.accounts.projects.create(account_id, named, &client).await?;
    Ok((StatusCode::CREATED, Reply(Project::of(project, Some(Role::Owner)))))
}

/// Read a project.
#[utoipa::path(
    get, path = "", tag = "projects", operation_id = "projects_get",
    security(("api_key" = []), ("session" = ["viewer"])),
    params(("project" = String, Path, description = "The project's id or slug.", example = "acme")),
    responses(
        (status = 200, description = "The project.", body = Project),
    ),
)]
pub async fn get(
    caller: Caller<Anybody>,
    State(app): State<App>,
) -> Result<Tagged<Project>, Error> {
    let project = find(&app, &caller).await?;
    project.map(Tagged).ok_or(Error::ProjectNotFound)
}

async fn find<S>(app: &App, caller: &Caller<S>) -> Result<Option<Project>, Error> {
    let mut conn = app.engine.pools.people.acquire_for(caller.project_id).await?;
    let row = store::people::projects::get(&mut conn, caller.project_id).await?;
    Ok(row.map(|it| Project::of(it, caller.who.role())))
}

/// Changes to a project.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"name": "Main"}))]
pub struct ChangeProjectRequest {
    /// New display name; the slug stays.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_NAME_CHARS)))))]
    name: Option<String>,
    /// Acks and heartbeats that must show `attempt` or `lease_id`. A key may require more.
    require_fence: Option<RequireFence>,
    /// Length of leases in seconds, for polls of this API that ask for none. Null: half of the
    /// job's timeout, at least 30. A queue's `default_lease_seconds` is a minimum for it.
    #[serde(default, deserialize_with = "extract::sent")]
    #[schema(value_type = Option<i32>, required = false, extensions(("bounds" = json!(range(1, limits::MAX_LEASE_SECONDS)))))]
    default_lease_seconds: Option<Option<i32>>,
    /// Whether an expired lease counts as a failure, as it did up to version 0.2. Default: no.
    losses_count_as_failures: Option<bool>,
}

impl RequestBody for ChangeProjectRequest {}

/// Change a project's name or settings.
///
/// Omitted fields keep their values.
#[utoipa::path(
    patch, path = "", tag = "projects", operation_id = "projects_update", security(("session" = ["admin"])),
    params(("project" = String, Path, description = "The project's id or slug.", example = "acme"), settings::Header),
    request_body = ChangeProjectRequest,
    responses(
        (status = 200, description = "The project.", body = Project),
    ),
)]
pub async fn change(
    caller: Caller<Govern>,
    State(app): State<App>,
    conditions: Preconditions,
    Json(request): Json<ChangeProjectRequest>,
) -> Result<Tagged<Project>, Error> {
    let mut check = Check::default();
    if let Some(name) = &request.name {
        check.public_name("name", name, limits::MAX_NAME_CHARS);
    }
    if let Some(Some(seconds)) = request.default_lease_seconds {
        check.range("default_lease_seconds", seconds, 1, limits::MAX_LEASE_SECONDS);
    }
    check.finish()?;
    let ChangeProjectRequest { name, require_fence, default_lease_seconds, .. } = &request;
    let change = ProjectChange {
        name: name.as_deref(),
        require_fence: *require_fence,
        default_lease_seconds: *default_lease_seconds,
        losses_count_as_failures: request.losses_count_as_failures,
    };
    let write = async {
        let mut conn = app.engine.pools.people.acquire_for(caller.project_id).await?;
        projects::change(&mut conn, &caller.author(), change).await
    };
    let about = (caller.project_id, "project".to_owned());
    let after = conditions.write(&app, about, find(&app, &caller), write).await?;
    if require_fence.is_some() || default_lease_seconds.is_some() {
        app.credentials.evict(Evict::KeysAndMembers).await;
    }
    Ok(Tagged(Project::of(after, caller.who.role())))
}

/// Confirmation of a deletion.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct DeleteProjectQuery {
    /// The project's slug, as a confirmation.
    confirm: String,
}

/// Delete a project.
///
/// Its keys stop working within five seconds; its jobs and all other data are deleted in the
/// background.
#[utoipa::path(
    delete, path = "", tag = "projects", operation_id = "projects_delete", security(("session" = ["owner"])),
    params(("project" = String, Path, description = "The project's id or slug.", example = "acme"), DeleteProjectQuery),
    responses(
        (status = 204, description = "Deleted."),
        (status = 400, description = "The confirmation is not the slug.", body = ErrorBody),
    ),
)]
pub async fn delete(
    caller: Caller<Own>,
    State(app): State<App>,
    Query(query): Query<DeleteProjectQuery>,
) -> Result<StatusCode, Error> {
    caller.require_step_up(&app).await?;
    let mut conn = app.engine.pools.people.acquire_for(caller.project_id).await?;
    projects::delete(&mut conn, &caller.author(), &query.confirm).await?;
    drop(conn);
    app.credentials.evict(Evict::KeysAndMembers).await;
    Ok(StatusCode::NO_CONTENT)
}
