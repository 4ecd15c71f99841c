//! The life of a worker, and its directives.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The state of a worker, or the one that it is asked for.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, sqlx::Type, ToSchema,
)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum WorkerState {
    /// Claims jobs.
    Running,
    /// Claims no more jobs, and finishes those it has.
    Quiet,
    /// Claims no more jobs, and stops after its grace period.
    Terminate,
    /// Deregistered: its leases are released.
    Terminated,
}

impl WorkerState {
    /// The directive for a worker whose polls get no jobs: its own state, or the one that it was
    /// asked for.
    ///
    /// ```
    /// # use fencepost_domain::worker::WorkerState::{self, *};
    /// assert_eq!(WorkerState::halt(Running, None), None);
    /// assert_eq!(WorkerState::halt(Quiet, None), Some(Quiet));
    /// assert_eq!(WorkerState::halt(Quiet, Some(Terminate)), Some(Terminate));
    /// assert_eq!(WorkerState::halt(Quiet, Some(Running)), Some(Quiet));
    /// assert_eq!(WorkerState::halt(Terminated, None), Some(Terminate));
    /// ```
    #[must_use]
    pub fn halt(reported: Self, directive: Option<Self>) -> Option<Self> {
        let reported = reported.min(Self::Terminate);
        let wanted = directive.map_or(reported, |it| it.max(reported));
        (wanted != Self::Running).then_some(wanted)
    }

    /// The directive for a heartbeat's answer: a worker without one gets its own state, since
    /// another would change it. A worker that is resumed gets `running`.
    ///
    /// ```
    /// # use fencepost_domain::worker::WorkerState::{self, *};
    /// assert_eq!(WorkerState::advice(Running, Some(Quiet)), Quiet);
    /// assert_eq!(WorkerState::advice(Quiet, None), Quiet);
    /// assert_eq!(WorkerState::advice(Terminate, Some(Quiet)), Terminate);
    /// assert_eq!(WorkerState::advice(Quiet, Some(Running)), Running);
    /// // It has deregistered itself.
    /// assert_eq!(WorkerState::advice(Terminated, Some(Running)), Terminate);
    /// ```
    #[must_use]
    pub fn advice(reported: Self, directive: Option<Self>) -> Self {
        match directive {
            _ if reported == Self::Terminated => Self::Terminate,
            Some(Self::Running) => Self::Running,
            _ => directive.map_or(reported, |it| it.max(reported)),
        }
    }
}
