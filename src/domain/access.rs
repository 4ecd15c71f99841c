//! Who may do what: scopes of keys, roles of members, and the permission that each operation needs.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Permission of a key.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Enqueue jobs and workflows, and cancel, change and retry single jobs.
    Produce,
    /// Register, poll, send heartbeats, ack and report as a worker.
    Work,
    /// Read everything but payloads, keys, members and the audit log.
    Read,
    /// With `read`: also payloads, results, error messages and logs.
    #[serde(rename = "payload:read")]
    PayloadRead,
    /// Manage queues, dead letters, operations and workers' directives, and read the audit log.
    Manage,
    /// Manage recurring schedules, also by registering a worker.
    Schedules,
    /// Manage webhooks: they send what happens to jobs to other hosts.
    Webhooks,
    /// Manage keys: create those with the same scopes or fewer, and revoke them.
    Keys,
}

impl Scope {
    /// All scopes, in display order.
    pub const ALL: [Self; 8] = [
        Self::Produce,
        Self::Work,
        Self::Read,
        Self::PayloadRead,
        Self::Manage,
        Self::Schedules,
        Self::Webhooks,
        Self::Keys,
    ];
    /// Those of a project's first key, which applications will use: it creates no others.
    pub const OF_FIRST_KEY: [Self; 6] =
        [Self::Produce, Self::Work, Self::Read, Self::PayloadRead, Self::Manage, Self::Schedules];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Produce => "produce",
            Self::Work => "work",
            Self::Read => "read",
            Self::PayloadRead => "payload:read",
            Self::Manage => "manage",
            Self::Schedules => "schedules",
            Self::Webhooks => "webhooks",
            Self::Keys => "keys",
        }
    }

    /// The scope of this name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.name() == name)
    }
}

/// Sets of scopes that go together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum KeyPreset {
    /// Every scope.
    Full,
    /// `produce`, `read` and `payload:read`: an application that enqueues.
    Producer,
    /// `work`: a worker.
    Worker,
    /// `work` and `schedules`: a worker that registers its recurring schedules.
    WorkerWithSchedules,
    /// `read`: a dashboard, or an agent with read access only. It sees no payloads.
    ReadOnly,
    /// `read`, `payload:read`, `manage` and `schedules`: a person on call.
    Operator,
}

impl KeyPreset {
    /// Its scopes.
    #[must_use]
    pub const fn scopes(self) -> &'static [Scope] {
        match self {
            Self::Full => &Scope::ALL,
            Self::Producer => &[Scope::Produce, Scope::Read, Scope::PayloadRead],
            Self::Worker => &[Scope::Work],
            Self::WorkerWithSchedules => &[Scope::Work, Scope::Schedules],
            Self::ReadOnly => &[Scope::Read],
            Self::Operator => &[Scope::Read, Scope::PayloadRead, Scope::Manage, Scope::Schedules],
        }
    }
}

/// The role of a member. Each includes the permissions of those before it.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Read access, but for payloads, results, error messages and logs.
    Viewer,
    /// Reads these as well, and manages jobs, queues, dead letters and schedules.
    Member,
    /// Also keys, webhooks, members, settings and the audit log.
    Admin,
    /// Also owners, and deleting the project.
    Owner,
}

impl Role {
    /// All roles, lowest first.
    pub const ALL: [Self; 4] = [Self::Viewer, Self::Member, Self::Admin, Self::Owner];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Member => "member",
            Self::Admin => "admin",
            Self::Owner => "owner",
        }
    }

    /// The role of this name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.name() == name)
    }
}

/// The permission that an operation requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Permission {
    /// Any live key, any member.
    Any,
    /// Read access.
    Read,
    /// Read access, also to payloads, results, error messages and logs.
    ReadPayloads,
    /// Enqueue jobs.
    Produce,
    /// Enqueue jobs with the payloads of earlier ones.
    Replay,
    /// Act as a worker.
    Work,
    /// Check whether a job was cancelled: for its worker, or with read access.
    Follow,
    /// Control single jobs: for producers and managers.
    Control,
    /// Manage queues, dead letters and operations.
    Manage,
    /// Manage recurring schedules.
    Schedule,
    /// Manage webhooks, and read what they sent.
    Webhooks,
    /// Choose where events are sent: error messages are in them.
    Subscribe,
    /// Send the jobs of a queue to a URL: it gets payloads, and settles jobs.
    Push,
    /// Read the audit log.
    Audit,
    /// Manage keys.
    Administer,
    /// Manage members and settings. No key has this permission.
    Govern,
    /// Delete the project. No key has this permission.
    Own,
}

impl Permission {
    /// The missing permission, for the message to a refused caller.
    #[must_use]
    pub const fn needs(self) -> &'static str {
        match self {
            Self::Any => "a live key or a session",
            Self::Read => "the scope `read`",
            Self::ReadPayloads => {
                "the scopes `read` and `payload:read`, or a member's role above viewer"
            }
            Self::Produce => "the scope `produce`",
            Self::Replay => "the scopes `produce` and `read`",
            Self::Work => "the scope `work`",
            Self::Follow => "the scope `work` or `read`",
            Self::Control => "the scope `produce` or `manage`",
            Self::Manage => "the scope `manage`",
            Self::Schedule => "the scope `schedules`",
            Self::Webhooks => "the scope `webhooks`, or the role admin",
            Self::Subscribe => "the scopes `webhooks` and `payload:read`, or the role admin",
            Self::Push => "the scopes `webhooks`, `manage` and `work`, or the role admin",
            Self::Audit => "the scope `manage`, or the role admin",
            Self::Administer => "the scope `keys`, or the role admin",
            Self::Govern => "a session of a member with the role admin",
            Self::Own => "a session of a member with the role owner",
        }
    }
}

/// Whether a key with these scopes has this permission.
///
/// ```
/// # use fencepost_domain::access::{key_may, Permission, Scope};
/// assert!(key_may(&[Scope::Manage], Permission::Control));
/// assert!(!key_may(&[Scope::Manage, Scope::Work], Permission::Schedule));
/// assert!(!key_may(&[Scope::Work], Permission::Produce));
/// assert!(!key_may(&[Scope::Produce], Permission::Replay));
/// assert!(!key_may(&[Scope::Read], Permission::ReadPayloads));
/// assert!(!key_may(&Scope::ALL, Permission::Govern));
/// ```
#[must_use]
pub fn key_may(scopes: &[Scope], permission: Permission) -> bool {
    let has = |scope| scopes.contains(&scope);
    match permission {
        Permission::Any => true,
        Permission::Read => has(Scope::Read),
        Permission::ReadPayloads => has(Scope::Read) && has(Scope::PayloadRead),
        Permission::Produce => has(Scope::Produce),
        Permission::Replay => has(Scope::Produce) && has(Scope::Read),
        Permission::Work => has(Scope::Work),
        Permission::Follow => has(Scope::Work) || has(Scope::Read),
        Permission::Control => has(Scope::Produce) || has(Scope::Manage),
        Permission::Manage | Permission::Audit => has(Scope::Manage),
        Permission::Schedule => has(Scope::Schedules),
        Permission::Webhooks => has(Scope::Webhooks),
        Permission::Subscribe => has(Scope::Webhooks) && has(Scope::PayloadRead),
        Permission::Push => has(Scope::Webhooks) && has(Scope::Manage) && has(Scope::Work),
        Permission::Administer => has(Scope::Keys),
        Permission::Govern | Permission::Own => false,
    }
}

/// Whether a member with this role has this permission.
///
/// ```
/// # use fencepost_domain::access::{role_may, Permission, Role};
/// assert!(role_may(Role::Member, Permission::Manage));
/// assert!(!role_may(Role::Viewer, Permission::Produce));
/// assert!(!role_may(Role::Admin, Permission::Own));
/// ```
#[must_use]
pub fn role_may(role: Role, permission: Permission) -> bool {
    let least = match permission {
        Permission::Any | Permission::Read | Permission::Follow => Role::Viewer,
        Permission::ReadPayloads
        | Permission::Produce
        | Permission::Replay
        | Permission::Work
        | Permission::Control
        | Permission::Manage
        | Permission::Schedule => Role::Member,
        Permission::Webhooks
        | Permission::Subscribe
        | Permission::Push
        | Permission::Audit
        | Permission::Administer
        | Permission::Govern => Role::Admin,
        Permission::Own => Role::Owner,
    };
    role >= least
}

/// Whether a member with the role `actor` may change a member's role from `from` (none: not a
/// member) to `to`. No member may grant or revoke more than they have.
#[must_use]
pub fn may_change_member(actor: Role, from: Option<Role>, to: Option<Role>) -> bool {
    let highest = from.max(to).unwrap_or(Role::Viewer);
    role_may(actor, Permission::Govern) && actor >= highest
}

/// Whether a key with the scopes `own` may create, rename or revoke one with the scopes `wanted`.
#[must_use]
pub fn may_grant(own: &[Scope], wanted: &[Scope]) -> bool {
    wanted.iter().all(|it| own.contains(it))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        assert!(Scope::ALL.into_iter().all(|it| Scope::of_name(it.name()) == Some(it)));
        assert!(Role::ALL.into_iter().all(|it| Role::of_name(it.name()) == Some(it)));
        assert_eq!((Scope::of_name("root"), Role::of_name("root")), (None, None));
    }

    #[test]
    fn no_member_grants_or_revokes_more_than_they_have() {
        assert!(may_change_member(Role::Admin, None, Some(Role::Admin)));
        assert!(!may_change_member(Role::Admin, None, Some(Role::Owner)));
        assert!(!may_change_member(Role::Admin, Some(Role::Owner), None));
        assert!(may_change_member(Role::Owner, Some(Role::Owner), Some(Role::Viewer)));
        assert!(!may_change_member(Role::Member, None, Some(Role::Viewer)));
        assert!(!may_grant(&[Scope::Manage], &[Scope::Produce]));
        assert!(may_grant(&Scope::ALL, &[Scope::Produce, Scope::Read]));
    }

    #[test]
    fn a_higher_role_may_all_that_a_lower_one_may() {
        let permissions = [
            Permission::Any,
            Permission::Read,
            Permission::ReadPayloads,
            Permission::Produce,
            Permission::Replay,
            Permission::Work,
            Permission::Follow,
            Permission::Control,
            Permission::Manage,
            Permission::Schedule,
            Permission::Webhooks,
            Permission::Subscribe,
            Permission::Push,
            Permission::Audit,
            Permission::Administer,
            Permission::Govern,
            Permission::Own,
        ];
        for pair in Role::ALL.windows(2) {
            for permission in permissions {
                assert!(!role_may(pair[0], permission) || role_may(pair[1], permission));
            }
        }
    }
}
