//! The life of a job: its states, and why it waits. `end.rs` says what the end of an attempt leads
//! to, `losses.rs` how losses count.

mod cancel;
mod end;
mod losses;

use serde::{Deserialize, Serialize};

pub use self::{
    cancel::{CancelDecision, cancel},
    end::{
        AfterAttempt, DeadLetterReason, MAX_CLAIMS, MAX_UNCOUNTED_CLAIMS, Next, OutcomeCause,
        RATE_LIMITED, Running, SNOOZED, after_attempt,
    },
    losses::{DEFAULT_MAX_LOSSES, Losses, TOTAL_LOSSES_PER_ROW, max_losses},
};

/// The queue of jobs that name none.
pub const DEFAULT_QUEUE: &str = "default";
/// Timeout of an attempt of a job that names none, in seconds.
pub const DEFAULT_TIMEOUT_SECONDS: i32 = 1_800;

/// Failures after which a job is dead-lettered, if neither the job nor its queue sets a number.
pub const DEFAULT_MAX_ATTEMPTS: i32 = 3;

/// A job's state, as users see it. The set is frozen: a new value would break generated clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Waits for its `run_at` or for its parents.
    Scheduled,
    /// Claimable, immediately or after a backoff.
    Pending,
    /// A worker holds its lease.
    Processing,
    /// Succeeded. Never changes again.
    Succeeded,
    /// Failed for the last time. Changes only by a manual retry.
    DeadLetter,
    /// Cancelled. Changes only by a manual retry.
    Cancelled,
}

impl JobState {
    /// All of them, in the order of a job's life.
    pub const ALL: [Self; 6] = [
        Self::Scheduled,
        Self::Pending,
        Self::Processing,
        Self::Succeeded,
        Self::DeadLetter,
        Self::Cancelled,
    ];

    /// The name of the state.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Scheduled => "scheduled",
            Self::Pending => "pending",
            Self::Processing => "processing",
            Self::Succeeded => "succeeded",
            Self::DeadLetter => "dead_letter",
            Self::Cancelled => "cancelled",
        }
    }
}

/// A job's state as it is stored. Finer than [`JobState`], so that the index of claimable jobs
/// holds claimable jobs only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::Type)]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum StoredState {
    /// See [`JobState::Scheduled`].
    Scheduled,
    /// Waits after a failure. Shown as `pending`.
    Backoff,
    /// Claimable, immediately or once its conditions are met.
    Pending,
    /// See [`JobState::Processing`].
    Processing,
    /// See [`JobState::Succeeded`].
    Succeeded,
    /// See [`JobState::DeadLetter`].
    DeadLetter,
    /// See [`JobState::Cancelled`].
    Cancelled,
}

impl StoredState {
    /// The state that users see.
    #[must_use]
    pub fn public(self) -> JobState {
        match self {
            Self::Scheduled => JobState::Scheduled,
            Self::Backoff | Self::Pending => JobState::Pending,
            Self::Processing => JobState::Processing,
            Self::Succeeded => JobState::Succeeded,
            Self::DeadLetter => JobState::DeadLetter,
            Self::Cancelled => JobState::Cancelled,
        }
    }

    /// Whether the job has neither started nor ended.
    #[must_use]
    pub fn is_waiting(self) -> bool {
        matches!(self, Self::Scheduled | Self::Backoff | Self::Pending)
    }

    /// Why a job in this state is not running; none if it runs or has ended.
    #[must_use]
    pub fn waiting_for(self, unfinished_parents: i32, closed: Closed) -> Option<WaitingFor> {
        match self {
            Self::Scheduled if closed.is_paused => Some(WaitingFor::JobPaused),
            Self::Scheduled if unfinished_parents > 0 => Some(WaitingFor::Parents),
            Self::Scheduled if closed.waits_for_group => Some(WaitingFor::Group),
            Self::Scheduled => Some(WaitingFor::RunAt),
            Self::Backoff => Some(WaitingFor::Backoff),
            Self::Pending if closed.is_queue_paused => Some(WaitingFor::QueuePaused),
            Self::Pending if closed.is_type_paused => Some(WaitingFor::TypePaused),
            Self::Pending if closed.is_crowded => Some(WaitingFor::Concurrency),
            Self::Pending if closed.is_rate_limited => Some(WaitingFor::RateLimit),
            Self::Pending => Some(WaitingFor::Worker),
            Self::Processing | Self::Succeeded | Self::DeadLetter | Self::Cancelled => None,
        }
    }
}

/// What keeps a job, besides its time, its parents and the lack of a worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, sqlx::FromRow)]
pub struct Closed {
    /// A person has paused it.
    pub is_paused: bool,
    /// It waits for its group.
    pub waits_for_group: bool,
    /// Its queue is paused.
    pub is_queue_paused: bool,
    /// Its type is paused in its queue.
    pub is_type_paused: bool,
    /// The maximum number of jobs runs under its key, or in its queue.
    pub is_crowded: bool,
    /// Its queue's rate limit is used up.
    pub is_rate_limited: bool,
}

/// Why a job is not running.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum WaitingFor {
    /// A worker that polls for it.
    Worker,
    /// Its `run_at`.
    RunAt,
    /// The end of its backoff.
    Backoff,
    /// The end of its own pause.
    JobPaused,
    /// Its parents.
    Parents,
    /// Jobs ahead of it in its group, or the end of the group's pause.
    Group,
    /// Its queue to be resumed.
    QueuePaused,
    /// Its job type to be resumed.
    TypePaused,
    /// The concurrency limit of its key or queue.
    Concurrency,
    /// The rate limit of its queue.
    RateLimit,
}

/// The outcome of an attempt.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, sqlx::Type, utoipa::ToSchema,
)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum AttemptOutcome {
    /// The worker succeeded.
    Succeeded,
    /// The worker reported a failure.
    Failed,
    /// It ran longer than `timeout_seconds`.
    Timeout,
    /// The lease expired without an ack.
    LeaseExpired,
    /// The lease was released. Not a failure.
    Released,
    /// The job was cancelled.
    Cancelled,
}

impl AttemptOutcome {
    /// The name of the outcome.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Timeout => "timeout",
            Self::LeaseExpired => "lease_expired",
            Self::Released => "released",
            Self::Cancelled => "cancelled",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_waiting_state_says_what_it_waits_for() {
        let open = Closed::default();
        assert_eq!(StoredState::Scheduled.waiting_for(0, open), Some(WaitingFor::RunAt));
        assert_eq!(StoredState::Scheduled.waiting_for(2, open), Some(WaitingFor::Parents));
        let paused = Closed { is_paused: true, ..open };
        assert_eq!(StoredState::Scheduled.waiting_for(2, paused), Some(WaitingFor::JobPaused));
        let grouped = Closed { waits_for_group: true, ..open };
        assert_eq!(StoredState::Scheduled.waiting_for(0, grouped), Some(WaitingFor::Group));
        assert_eq!(StoredState::Backoff.waiting_for(0, open), Some(WaitingFor::Backoff));
        assert_eq!(StoredState::Pending.waiting_for(0, open), Some(WaitingFor::Worker));
        let limited = Closed { is_rate_limited: true, ..open };
        assert_eq!(StoredState::Pending.waiting_for(0, limited), Some(WaitingFor::RateLimit));
        let crowded = Closed { is_crowded: true, ..limited };
        assert_eq!(StoredState::Pending.waiting_for(0, crowded), Some(WaitingFor::Concurrency));
        let type_paused = Closed { is_type_paused: true, ..crowded };
        assert_eq!(StoredState::Pending.waiting_for(0, type_paused), Some(WaitingFor::TypePaused));
        let paused = Closed { is_queue_paused: true, ..type_paused };
        assert_eq!(StoredState::Pending.waiting_for(0, paused), Some(WaitingFor::QueuePaused));
        assert_eq!(StoredState::Processing.waiting_for(0, paused), None);
        assert_eq!(StoredState::Backoff.public(), JobState::Pending);
    }
}
