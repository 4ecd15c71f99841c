//! The life of a worker, and what it is told.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Where a worker is in its life, or should be.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, sqlx::Type, ToSchema,
)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum WorkerState {
    /// Takes jobs.
    Running,
    /// Takes no more jobs, and finishes those it has.
    Quiet,
    /// Takes no more jobs, and stops after its grace.
    Terminate,
    /// Gone: it has given its leases back.
    Terminated,
}

impl WorkerState {
    /// Whether a worker's polls get nothing, and what it is told with them: it has said itself that it takes
    /// no more, or somebody told it so.
    ///
    /// ```
    /// # use fencepost::domain::worker::WorkerState::{self, *};
    /// assert_eq!(WorkerState::halt(Running, None), None);
    /// assert_eq!(WorkerState::halt(Quiet, None), Some(Quiet));
    /// assert_eq!(WorkerState::halt(Quiet, Some(Terminate)), Some(Terminate));
    /// assert_eq!(WorkerState::halt(Terminated, None), Some(Terminate));
    /// ```
    #[must_use]
    pub fn halt(reported: Self, directive: Option<Self>) -> Option<Self> {
        let reported = reported.min(Self::Terminate);
        let wanted = directive.map_or(reported, |it| it.max(reported));
        (wanted != Self::Running).then_some(wanted)
    }

    /// What a worker is told: what somebody wants of it, unless it is gone.
    ///
    /// ```
    /// # use fencepost::domain::worker::WorkerState::{self, *};
    /// assert_eq!(WorkerState::advice(Running, None), Running);
    /// assert_eq!(WorkerState::advice(Running, Some(Quiet)), Quiet);
    /// // It has stopped itself: nobody wants it to.
    /// assert_eq!(WorkerState::advice(Quiet, None), Running);
    /// assert_eq!(WorkerState::advice(Terminated, None), Terminate);
    /// ```
    #[must_use]
    pub fn advice(reported: Self, directive: Option<Self>) -> Self {
        if reported == Self::Terminated {
            return Self::Terminate;
        }
        directive.unwrap_or(Self::Running)
    }
}
