//! Who changes a project's members, invitations or keys.

use fencepost_domain::{
    access::{Role, Scope},
    error::Error,
    ids::{AccountId, KeyId, ProjectId},
};
use sqlx::PgConnection;

use fencepost_store::{self as store, people::audit::Actor};

/// The author of a change.
#[derive(Debug)]
pub struct Author<'a> {
    pub project_id: ProjectId,
    /// As the audit log names them.
    pub actor: Actor,
    pub rights: Rights<'a>,
}

/// On which rights a change is made. They may have changed since the request began, so whatever
/// grants rights reads them again, with their row locked.
#[derive(Debug, Clone, Copy)]
pub enum Rights<'a> {
    /// Rights of a member's role.
    Member(AccountId),
    /// Rights of a key, with these scopes.
    Key(KeyId, &'a [Scope]),
    /// All: the command line.
    Operator,
}

impl Author<'static> {
    /// The operator, at the command line.
    #[must_use]
    pub fn operator(project_id: ProjectId) -> Self {
        Self { project_id, actor: Actor::OPERATOR, rights: Rights::Operator }
    }
}

impl Rights<'_> {
    /// The scopes that its keys may have.
    pub(super) fn scopes(&self) -> &[Scope] {
        match self {
            Self::Key(_, scopes) => scopes,
            Self::Member(_) | Self::Operator => &Scope::ALL,
        }
    }

    /// The account; none for keys and the operator.
    pub(super) fn account_id(&self) -> Option<AccountId> {
        match self {
            Self::Member(id) => Some(*id),
            Self::Key(..) | Self::Operator => None,
        }
    }
}

/// The roles of a project's members, with their rows locked.
pub(super) struct Roles(Vec<(AccountId, String)>);

impl Roles {
    pub async fn lock(conn: &mut PgConnection, project_id: ProjectId) -> sqlx::Result<Self> {
        Ok(Self(store::people::members::lock_roles(conn, project_id).await?))
    }

    pub fn of(&self, id: AccountId) -> Option<Role> {
        self.0.iter().find(|it| it.0 == id).and_then(|it| Role::of_name(&it.1))
    }

    /// The role on which the author acts.
    ///
    /// # Errors
    /// [`Error::ProjectNotFound`] when it is no member.
    pub fn of_author(&self, author: &Author<'_>) -> Result<Role, Error> {
        match author.rights {
            Rights::Operator => Ok(Role::Owner),
            Rights::Member(id) => self.of(id).ok_or(Error::ProjectNotFound),
            Rights::Key(..) => Err(Error::ProjectNotFound),
        }
    }

    pub fn owners(&self) -> usize {
        self.0.iter().filter(|it| Role::of_name(&it.1) == Some(Role::Owner)).count()
    }
}
