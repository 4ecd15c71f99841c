//! The actor and the reason of a change of a job.

use serde::{Deserialize, Serialize};

use crate::ids::{AccountId, JobId, KeyId, OperationId};

/// Maximum characters of the reason of a change.
pub const MAX_REASON_CHARS: usize = 500;

/// Kind of an actor.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, sqlx::Type, utoipa::ToSchema,
)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum ActorKind {
    /// An API key.
    Key,
    /// A member of the project.
    Member,
    /// A bulk operation.
    Operation,
    /// A parent of the job.
    Parent,
    /// A schedule.
    Schedule,
    /// The server.
    Server,
}

impl ActorKind {
    /// The name of the kind.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Key => "key",
            Self::Member => "member",
            Self::Operation => "operation",
            Self::Parent => "parent",
            Self::Schedule => "schedule",
            Self::Server => "server",
        }
    }
}

/// The actor of a change of a job, and its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangedBy {
    /// Kind of the actor.
    pub kind: ActorKind,
    /// Public id of the actor; the server has none.
    pub id: Option<String>,
    /// Reason that the actor has given.
    pub reason: Option<String>,
}

impl ChangedBy {
    /// A change that the server makes by itself.
    pub const SERVER: Self = Self { kind: ActorKind::Server, id: None, reason: None };

    fn actor(kind: ActorKind, id: impl Into<String>) -> Self {
        Self { kind, id: Some(id.into()), reason: None }
    }

    /// A change by the holder of a key.
    #[must_use]
    pub fn key(id: KeyId) -> Self {
        Self::actor(ActorKind::Key, id.to_string())
    }

    /// A change by a member of the project.
    #[must_use]
    pub fn member(id: AccountId) -> Self {
        Self::actor(ActorKind::Member, id.to_string())
    }

    /// A change by a bulk operation.
    #[must_use]
    pub fn operation(id: OperationId) -> Self {
        Self::actor(ActorKind::Operation, id.to_string())
    }

    /// A change that follows from that of a parent.
    #[must_use]
    pub fn parent(id: JobId) -> Self {
        Self::actor(ActorKind::Parent, id.to_string())
    }

    /// A change by a schedule.
    #[must_use]
    pub fn schedule(id: &str) -> Self {
        Self::actor(ActorKind::Schedule, id)
    }

    /// The same change, with a reason.
    #[must_use]
    pub fn because(self, reason: Option<String>) -> Self {
        Self { reason, ..self }
    }
}
