//! The caller of a request: the holder of a key, or a member.

use std::sync::Arc;

use fencepost_domain::{
    access::{Permission, Role, Scope, key_may, role_may},
    actor::ChangedBy,
    binding::KeyBinding,
    error::Error,
    ids::{AccountId, KeyId, ProjectPublicId},
    lease::RequireFence,
};
use fencepost_identity::{
    accounts::{key, token::Bearer},
    credentials::{KeyGrant, MemberGrant},
};

use super::CallerKind;
use crate::app::App;

/// The holder of a live key, or a member with a live session.
#[derive(Debug, Clone)]
pub enum Who {
    Key(Arc<KeyGrant>, key::SecretHash),
    Member(Arc<MemberGrant>, Bearer),
}

impl Who {
    /// The public id of the project.
    #[must_use]
    pub fn project(&self) -> ProjectPublicId {
        match self {
            Self::Key(it, _) => it.owner.project_public_id,
            Self::Member(it, _) => it.membership.public_id,
        }
    }

    /// The key that was presented.
    pub(super) fn key(&self) -> Option<KeyId> {
        match self {
            Self::Key(it, _) => Some(it.owner.key_id),
            Self::Member(..) => None,
        }
    }

    /// The slug of the project.
    #[must_use]
    pub fn slug(&self) -> &str {
        match self {
            Self::Key(it, _) => &it.owner.project_slug,
            Self::Member(it, _) => &it.membership.slug,
        }
    }

    /// Which acks and heartbeats must show an attempt or a lease.
    #[must_use]
    pub fn require_fence(&self) -> RequireFence {
        RequireFence::of_name(match self {
            Self::Key(it, _) => &it.owner.require_fence,
            Self::Member(it, _) => &it.membership.require_fence,
        })
    }

    /// Length of the project's leases, in seconds, for polls that ask for none.
    #[must_use]
    pub fn default_lease_seconds(&self) -> Option<i32> {
        match self {
            Self::Key(it, _) => it.owner.default_lease_seconds,
            Self::Member(it, _) => it.membership.default_lease_seconds,
        }
    }

    /// The queues and job types that a bound key is bound to. Only handlers that take a `Bound`
    /// caller get one.
    #[must_use]
    pub fn binding(&self) -> Option<&KeyBinding> {
        match self {
            Self::Key(it, _) => it.binding.as_ref(),
            Self::Member(..) => None,
        }
    }

    /// The worker that this caller calls so: those of bound keys have names of their own.
    #[must_use]
    pub fn worker(&self, worker_id: String) -> String {
        match self.binding() {
            Some(binding) => binding.worker(&worker_id),
            None => worker_id,
        }
    }

    /// True if unknown fields in bodies are refused.
    #[must_use]
    pub fn is_strict(&self) -> bool {
        match self {
            Self::Key(it, _) => it.owner.strict,
            Self::Member(..) => true,
        }
    }

    /// Why the credential is refused now: it is no longer valid, or has lost the permission or its
    /// right to payloads, or the project was suspended. If the database does not answer, it counts
    /// as valid.
    pub(super) async fn refusal<P: CallerKind>(&self, app: &App) -> Option<Error> {
        let now = match self {
            Self::Key(_, hash) => {
                app.credentials.key(*hash).await.map(|it| it.map(|it| Self::Key(it, *hash)))
            }
            Self::Member(grant, bearer) => {
                if matches!(app.credentials.is_session_live(*bearer).await, Ok(false)) {
                    return Some(Error::Unauthorized);
                }
                let project = grant.membership.public_id.to_string();
                let now = app.credentials.member(bearer.account_id, &project).await;
                now.map(|it| it.map(|it| Self::Member(it, *bearer)))
            }
        };
        let Ok(now) = now else { return None };
        let has_lost = |now: &Self| {
            !now.may(P::PERMISSION) || (self.may_read_payloads() && !now.may_read_payloads())
        };
        match now {
            Some(now) if has_lost(&now) => Some(Error::Unauthorized),
            Some(now) => now.suspension::<P>(),
            None => Some(Error::Unauthorized),
        }
    }

    /// The refusal of a caller whose project is suspended.
    pub(super) fn suspension<P: CallerKind>(&self) -> Option<Error> {
        let is_suspended = match self {
            Self::Key(it, _) => it.owner.is_suspended,
            Self::Member(it, _) => it.membership.suspended_at.is_some(),
        };
        (is_suspended && !P::WHILE_SUSPENDED).then_some(Error::Suspended { what: "project" })
    }

    /// Id of the key or the account.
    #[must_use]
    pub fn id(&self) -> String {
        match self {
            Self::Key(it, _) => it.owner.key_id.to_string(),
            Self::Member(_, bearer) => bearer.account_id.to_string(),
        }
    }

    /// The author of changes of jobs that this caller makes.
    #[must_use]
    pub fn changed_by(&self) -> ChangedBy {
        match self {
            Self::Key(it, _) => ChangedBy::key(it.owner.key_id),
            Self::Member(_, bearer) => ChangedBy::member(bearer.account_id),
        }
    }

    /// The account; a key has none.
    #[must_use]
    pub fn account_id(&self) -> Option<AccountId> {
        match self {
            Self::Key(..) => None,
            Self::Member(_, bearer) => Some(bearer.account_id),
        }
    }

    /// The scopes that it may grant to keys.
    #[must_use]
    pub fn scopes(&self) -> &[Scope] {
        match self {
            Self::Key(it, _) => &it.scopes,
            Self::Member(..) => &Scope::ALL,
        }
    }

    /// Whether it also has this permission.
    #[must_use]
    pub fn may(&self, permission: Permission) -> bool {
        match self {
            Self::Key(it, _) => key_may(&it.scopes, permission),
            Self::Member(it, _) => role_may(it.role, permission),
        }
    }

    /// Whether payloads, results, error messages and logs are shown to it.
    #[must_use]
    pub fn may_read_payloads(&self) -> bool {
        match self {
            Self::Key(it, _) => it.scopes.contains(&Scope::PayloadRead),
            Self::Member(it, _) => role_may(it.role, Permission::ReadPayloads),
        }
    }

    /// Its role in the project; a key has none.
    #[must_use]
    pub fn role(&self) -> Option<Role> {
        match self {
            Self::Key(..) => None,
            Self::Member(it, _) => Some(it.role),
        }
    }
}
