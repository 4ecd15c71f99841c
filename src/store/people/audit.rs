//! The audit log: entries are added, and changed only when their project is deleted: then addresses
//! of invited people are forgotten. Retention deletes old ones.

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, Postgres, QueryBuilder};

use fencepost_domain::{
    audit::shorten,
    ids::{AuditId, ProjectId},
};

/// The account, key or operator that made the change, or the server itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Actor {
    /// `account`, `key`, `operator` or `system`.
    pub kind: &'static str,
    pub id: Option<String>,
    pub request_id: Option<String>,
    pub address: Option<String>,
}

impl Actor {
    /// A person with access to the database.
    pub const OPERATOR: Self = Self { kind: "operator", id: None, request_id: None, address: None };
    /// The server itself.
    pub const SYSTEM: Self = Self { kind: "system", id: None, request_id: None, address: None };
}

/// A change.
#[derive(Debug, Clone, Default)]
pub struct NewAuditEntry {
    /// The name of the change, such as `key.revoked`.
    pub action: &'static str,
    pub target: Option<String>,
    /// The state before, as JSON without secrets.
    pub before: Option<String>,
    /// The state after, as JSON without secrets.
    pub after: Option<String>,
}

impl NewAuditEntry {
    /// An entry about one target.
    #[must_use]
    pub fn to(action: &'static str, target: impl Into<String>) -> Self {
        Self { action, target: Some(target.into()), ..Self::default() }
    }
}

/// An entry of the log.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct AuditRow {
    pub id: AuditId,
    pub at: DateTime<Utc>,
    pub actor_kind: String,
    pub actor_id: Option<String>,
    pub action: String,
    pub target: Option<String>,
    pub request_id: Option<String>,
    pub address: Option<String>,
    pub before: Option<String>,
    pub after: Option<String>,
}

/// Filter of entries.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditFilter {
    /// Only this action; with `.*` at its end all that begin with what stands before the `*`.
    pub action: Option<String>,
    /// Only of this actor.
    pub actor_id: Option<String>,
    /// Only on this target.
    pub target: Option<String>,
    /// At this time or later.
    pub created_after: Option<DateTime<Utc>>,
    /// Before this time.
    pub created_before: Option<DateTime<Utc>>,
}

/// Adds an entry. Long states are shortened, as [`shorten`] says.
pub async fn insert(
    conn: &mut PgConnection,
    project_id: ProjectId,
    actor: &Actor,
    entry: &NewAuditEntry,
) -> sqlx::Result<()> {
    let [before, after] = [&entry.before, &entry.after].map(|it| it.as_deref().map(shorten));
    sqlx::query!(
        "
        insert into audit_log (
            project_id, id, actor_kind, actor_id, action, target, request_id, address, before, after
        )
        values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
        ",
        project_id.0,
        AuditId::generate().0,
        actor.kind,
        actor.id,
        entry.action,
        entry.target,
        actor.request_id,
        actor.address,
        before,
        after,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Which entries follow, and in which order.
#[derive(Debug, Clone, Copy)]
pub enum Place {
    /// The newest one and those before it.
    Newest,
    /// Entries before this one, newest first.
    Before(AuditId),
    /// Entries after this one, oldest first, without those of the last [`SETTLE_SECONDS`].
    After(AuditId),
}

/// Entries of one moment are stored in no order: clocks differ, and transactions take their time.
/// After this many seconds none comes before one that was read.
pub const SETTLE_SECONDS: i64 = 60;

/// A page of a project's entries.
pub async fn page(
    conn: &mut PgConnection,
    project_id: ProjectId,
    filter: &AuditFilter,
    place: Place,
    limit: i64,
) -> sqlx::Result<Vec<AuditRow>> {
    let mut query = QueryBuilder::<Postgres>::new(
        "select id, at, actor_kind, actor_id, action, target, request_id, address, before, after
         from audit_log where project_id = ",
    );
    query.push_bind(project_id.0);
    let order = match place {
        Place::Newest => "desc",
        Place::Before(id) => {
            query.push(" and id < ").push_bind(id.0);
            "desc"
        }
        Place::After(id) => {
            query.push(" and id > ").push_bind(id.0);
            query.push(" and at < now() - make_interval(secs => ");
            query.push_bind(SETTLE_SECONDS as f64).push(")");
            "asc"
        }
    };
    match filter.action.as_deref().map(|it| (it, it.strip_suffix(".*"))) {
        Some((_, Some(family))) => {
            query.push(" and starts_with(action, ").push_bind(format!("{family}.")).push(")");
        }
        Some((action, None)) => {
            query.push(" and action = ").push_bind(action.to_owned());
        }
        None => (),
    }
    if let Some(actor_id) = &filter.actor_id {
        query.push(" and actor_id = ").push_bind(actor_id.clone());
    }
    if let Some(target) = &filter.target {
        query.push(" and target = ").push_bind(target.clone());
    }
    if let Some(after) = filter.created_after {
        query.push(" and at >= ").push_bind(after);
    }
    if let Some(before) = filter.created_before {
        query.push(" and at < ").push_bind(before);
    }
    query.push(format_args!(" order by id {order} limit ")).push_bind(limit);
    query.build_query_as().fetch_all(conn).await
}
