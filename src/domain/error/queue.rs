//! Refusals that concern a queue or its groups.

use super::Class;

/// Why a call about a queue is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// The queue cannot be deleted.
    #[error("{0}")]
    InUse(&'static str),

    /// The job has a group, whose jobs run in their order.
    #[error("the job has a place in its group, and the order is strict: it keeps its queue")]
    GroupOrdered,

    /// It has no jobs and no rules, and is not paused.
    #[error("no job, pause or rules of this group in the queue")]
    GroupNotFound,

    /// Its head is no dead letter.
    #[error("no dead letter blocks this group, or another one than job_id names")]
    GroupNotBlocked,

    /// The project has no shared limit of this name.
    #[error("no such shared limit in this project")]
    SharedLimitNotFound,

    /// It cannot be deleted.
    #[error("a queue names this shared limit: change the queue first")]
    SharedLimitInUse,
}

impl QueueError {
    /// The class of this error.
    #[must_use]
    pub fn class(self) -> Class {
        match self {
            Self::GroupNotFound | Self::SharedLimitNotFound => Class::NotFound,
            Self::InUse(_)
            | Self::GroupOrdered
            | Self::GroupNotBlocked
            | Self::SharedLimitInUse => Class::Conflict,
        }
    }
}
