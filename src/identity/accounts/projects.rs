//! Creating and changing projects, and their plans.

use fencepost_domain::{
    access::Role,
    error::Error,
    ids::{AccountId, ProjectPublicId},
    lease::RequireFence,
    plan::{Plans, UNLIMITED},
    text,
};
use fencepost_store::{
    self as store,
    connection::pools::Pool,
    people::{
        audit::{Actor, NewAuditEntry},
        projects::{self, NewProject, Project},
    },
};
use serde_json::{Value, json};
use sqlx::{Acquire, PgConnection};

use super::{Client, author::Author};

/// Tries to find a free slug.
const MAX_SLUG_TRIES: usize = 5;
/// Characters of a slug.
const MAX_SLUG_CHARS: usize = 60;
/// Mode of a project for production.
pub const LIVE: &str = "live";

/// New projects of accounts, on the default plan.
#[derive(Clone)]
pub struct Projects {
    pub(super) pool: Pool,
    pub(super) plans: Plans,
    pub(super) default_plan: String,
}

impl Projects {
    /// Creates a project on the default plan, owned by the account.
    ///
    /// # Errors
    /// [`Error::QuotaExceeded`] when the account owns too many. [`Error::SlugTaken`] when no free
    /// slug was found.
    pub async fn create(
        &self,
        account_id: AccountId,
        (name, mode): (&str, &str),
        client: &Client,
    ) -> Result<Project, Error> {
        let mut conn = self.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        let max = self.plans.limits(&self.default_plan).max_projects();
        let on_plan =
            store::people::members::owned(&mut tx, account_id, &self.default_plan).await?;
        if on_plan >= max {
            return Err(Error::QuotaExceeded { what: "owned projects", max });
        }
        let project = self.insert(&mut tx, account_id, (name, mode), client).await?;
        tx.commit().await?;
        Ok(project)
    }

    pub(super) async fn insert(
        &self,
        conn: &mut PgConnection,
        account_id: AccountId,
        (name, mode): (&str, &str),
        client: &Client,
    ) -> Result<Project, Error> {
        let project = insert_with_free_slug(conn, name, mode, &self.default_plan).await?;
        store::people::members::upsert(conn, project.id, account_id, Role::Owner.name()).await?;
        let entry = NewAuditEntry {
            after: Some(facts(&project)),
            ..NewAuditEntry::to("project.created", project.public_id.to_string())
        };
        let actor = client.actor("account", account_id.to_string());
        store::people::audit::insert(conn, project.id, &actor, &entry).await?;
        Ok(project)
    }
}

async fn insert_with_free_slug(
    conn: &mut PgConnection,
    name: &str,
    mode: &str,
    plan: &str,
) -> Result<Project, Error> {
    let base: String = text::slug(name).chars().take(MAX_SLUG_CHARS).collect();
    let base = if base.is_empty() { "project".to_owned() } else { base };
    let base = base.trim_matches('-').to_owned();
    for _ in 0..MAX_SLUG_TRIES {
        // Always with a suffix: without one, a taken slug would reveal another tenant's project.
        let slug = format!("{base}-{:06x}", rand::random::<u32>() & 0x00ff_ffff);
        let public_id = ProjectPublicId::generate();
        let new = NewProject { public_id, slug: &slug, name, mode, plan };
        if let Some(project) = projects::insert(conn, new).await? {
            return Ok(project);
        }
    }
    Err(Error::SlugTaken)
}

/// Creates a project without limits and without members, for the operator.
///
/// # Errors
/// [`Error::SlugTaken`].
pub async fn create_unlimited(
    conn: &mut PgConnection,
    slug: &str,
    name: &str,
) -> Result<Project, Error> {
    let public_id = ProjectPublicId::generate();
    let new = NewProject { public_id, slug, name, mode: LIVE, plan: UNLIMITED };
    projects::insert(conn, new).await?.ok_or(Error::SlugTaken)
}

/// Changes to a project; none keeps the value.
#[derive(Debug, Clone, Copy, Default)]
pub struct ProjectChange<'a> {
    /// The display name; the slug stays.
    pub name: Option<&'a str>,
    pub require_fence: Option<RequireFence>,
    /// None within: leases last as the timeout of each job demands.
    pub default_lease_seconds: Option<Option<i32>>,
    /// Whether an expired lease counts as a failure.
    pub losses_count_as_failures: Option<bool>,
}

/// Changes a project's name and settings.
///
/// # Errors
/// [`Error::ProjectNotFound`].
pub async fn change(
    conn: &mut PgConnection,
    author: &Author<'_>,
    change: ProjectChange<'_>,
) -> Result<Project, Error> {
    let mut tx = conn.begin().await?;
    let before = projects::get(&mut tx, author.project_id).await?;
    let require_fence = change.require_fence.map(RequireFence::name);
    let ProjectChange { name, default_lease_seconds, losses_count_as_failures, .. } = change;
    projects::change(
        &mut tx,
        author.project_id,
        name,
        require_fence,
        default_lease_seconds,
        losses_count_as_failures,
    )
    .await?;
    let after = projects::get(&mut tx, author.project_id).await?.ok_or(Error::ProjectNotFound)?;
    let entry = NewAuditEntry {
        action: "project.changed",
        target: Some(after.public_id.to_string()),
        before: before.as_ref().map(facts),
        after: Some(facts(&after)),
    };
    store::people::audit::insert(&mut tx, author.project_id, &author.actor, &entry).await?;
    tx.commit().await?;
    Ok(after)
}

/// Deletes a project; its data are deleted in the background.
///
/// # Errors
/// [`Error::Invalid`] when `confirm` is not its slug. [`Error::ProjectNotFound`].
pub async fn delete(
    conn: &mut PgConnection,
    author: &Author<'_>,
    confirm: &str,
) -> Result<(), Error> {
    let id = author.project_id;
    let project = projects::get(conn, id).await?.ok_or(Error::ProjectNotFound)?;
    if confirm != project.slug {
        return Err(Error::invalid("confirm", "must be the project's slug"));
    }
    let entry = NewAuditEntry {
        before: Some(facts(&project)),
        ..NewAuditEntry::to("project.deleted", project.public_id.to_string())
    };
    let mut tx = conn.begin().await?;
    projects::delete(&mut tx, id).await?;
    store::people::audit::insert(&mut tx, id, &author.actor, &entry).await?;
    tx.commit().await?;
    let by = author.actor.id.as_deref().unwrap_or(author.actor.kind);
    tracing::info!(project.id = %project.public_id, actor.id = by, "project was deleted");
    Ok(())
}

/// Suspends a project, or ends its suspension, for the operator.
///
/// # Errors
/// [`Error::Unavailable`] when the database does not answer.
pub async fn suspend(
    conn: &mut PgConnection,
    project: &Project,
    is_suspended: bool,
    reason: Option<&str>,
) -> Result<(), Error> {
    let action = if is_suspended { "project.suspended" } else { "project.resumed" };
    let entry = NewAuditEntry {
        after: reason.map(|it| json!({ "reason": it }).to_string()),
        ..NewAuditEntry::to(action, project.public_id.to_string())
    };
    let mut tx = conn.begin().await?;
    projects::suspend(&mut tx, project.id, is_suspended).await?;
    store::people::audit::insert(&mut tx, project.id, &Actor::OPERATOR, &entry).await?;
    tx.commit().await?;
    Ok(())
}

/// Sets a project's plan and overrides of its limits, for the operator.
///
/// # Errors
/// [`Error::Unavailable`] when the database does not answer.
pub async fn set_plan(
    conn: &mut PgConnection,
    project: &Project,
    plan: &str,
    overrides: Option<&Value>,
) -> Result<(), Error> {
    let facts = |plan: &str, limits: Option<&Value>| {
        Some(json!({ "plan": plan, "limits": limits }).to_string())
    };
    let entry = NewAuditEntry {
        action: "project.plan_changed",
        target: Some(project.public_id.to_string()),
        before: facts(&project.plan, project.overrides.as_ref()),
        after: facts(plan, overrides),
    };
    let mut tx = conn.begin().await?;
    projects::set_plan(&mut tx, project.id, plan, overrides).await?;
    store::people::audit::insert(&mut tx, project.id, &Actor::OPERATOR, &entry).await?;
    tx.commit().await?;
    Ok(())
}

/// The audit log's view of a project.
fn facts(project: &Project) -> String {
    json!({
        "name": project.name, "slug": project.slug, "mode": project.mode, "plan": project.plan,
        "require_fence": project.require_fence,
        "default_lease_seconds": project.default_lease_seconds,
        "losses_count_as_failures": project.losses_count_as_failures,
    })
    .to_string()
}
