//! What a job waits for: an end of each of its parents.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The end of a parent that lets its child run.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, sqlx::Type,
)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum When {
    /// It has succeeded.
    #[default]
    Succeeded,
    /// It was dead-lettered or cancelled.
    Failed,
    /// It has succeeded, or was not needed.
    NotFailed,
    /// It has ended, in whatever way.
    Ended,
}

/// How a parent ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::Type)]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum FinalState {
    /// With success.
    Succeeded,
    /// Cancelled because it was not needed: its own parent ended otherwise than it waited for.
    Skipped,
    /// Cancelled by a caller, by its `expires_at`, or because a parent failed.
    Cancelled,
    /// Dead-lettered.
    DeadLetter,
}

impl FinalState {
    /// Whether jobs that wait for its failure may run.
    #[must_use]
    pub fn has_failed(self) -> bool {
        matches!(self, Self::Cancelled | Self::DeadLetter)
    }
}

impl When {
    /// Whether this end lets the child run. The database decides by its function
    /// `dependency_standing`; a test compares the two.
    #[must_use]
    pub fn is_met_by(self, end: FinalState) -> bool {
        match self {
            Self::Succeeded => end == FinalState::Succeeded,
            Self::Failed => end.has_failed(),
            Self::NotFailed => !end.has_failed(),
            Self::Ended => true,
        }
    }

    /// The name in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::NotFailed => "not_failed",
            Self::Ended => "ended",
        }
    }
}

/// A parent, and what the child waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dependency<T> {
    /// Its id; in a workflow its key, or its index in the request.
    pub parent: T,
    /// Which of its ends lets the child run.
    pub when: When,
}

impl<T> Dependency<T> {
    /// A parent that must succeed.
    pub fn on_success(parent: T) -> Self {
        Self { parent, when: When::Succeeded }
    }
}
