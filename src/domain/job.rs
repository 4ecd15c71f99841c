//! The life of a job: its states, why it waits, and what the end of an attempt leads to.

mod cancel;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    backoff::{Jitter, RetryPolicy},
    text::ErrorReport,
};

pub use self::cancel::{CancelDecision, cancel};

/// The queue of jobs that name none.
pub const DEFAULT_QUEUE: &str = "default";
/// Timeout of an attempt of a job that names none, in seconds.
pub const DEFAULT_TIMEOUT_SECONDS: i32 = 1_800;

/// Claims after which a job is dead-lettered whatever happened: otherwise a job that is always
/// released would circulate forever.
pub const MAX_CLAIMS: i32 = 1_000;

/// The error type of an attempt that has met a rate limit. Its outcome is `released`.
pub const RATE_LIMITED: &str = "rate_limited";

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

/// The cause of an attempt's end, other than success.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OutcomeCause<'a> {
    /// The worker reports a failure.
    Failed {
        /// Whether the worker considers it retryable.
        retryable: bool,
        /// The type of the error, matched against `non_retryable_types`.
        error_kind: Option<&'a str>,
        /// The wait the worker asks for, in seconds; replaces the backoff.
        retry_after_seconds: Option<u32>,
    },
    /// The attempt exceeded its `timeout_seconds`.
    TimedOut,
    /// The lease expired without an ack.
    LeaseExpired,
    /// The worker released the job.
    Released,
    /// The worker has made no call for as long as it said, or may say, it would.
    WorkerGone,
    /// A person has released it, since its worker does not.
    TakeBack,
    /// The worker has met a rate limit.
    RateLimited {
        /// Seconds until the job may run again.
        retry_after_seconds: u32,
    },
}

impl OutcomeCause<'_> {
    /// The outcome that is recorded for this end.
    #[must_use]
    pub fn outcome(&self) -> AttemptOutcome {
        match self {
            Self::Failed { .. } => AttemptOutcome::Failed,
            Self::TimedOut => AttemptOutcome::Timeout,
            Self::LeaseExpired => AttemptOutcome::LeaseExpired,
            Self::Released | Self::WorkerGone | Self::TakeBack | Self::RateLimited { .. } => {
                AttemptOutcome::Released
            }
        }
    }

    /// True if it counts as a failure of the job.
    #[must_use]
    pub fn is_failure(&self) -> bool {
        self.outcome() != AttemptOutcome::Released
    }

    /// The error of an end that no worker reported.
    #[must_use]
    pub fn unreported_error(&self) -> ErrorReport {
        let (kind, message) = match self {
            Self::TimedOut => ("timeout", "the timeout of the job passed without an ack"),
            Self::LeaseExpired => (
                "lease_expired",
                "the lease expired: the worker sent neither a heartbeat nor an ack",
            ),
            Self::WorkerGone => ("worker_gone", "the worker has made no call for too long"),
            Self::TakeBack => ("take_back", "the lease was released by request, not by its worker"),
            Self::RateLimited { .. } => (RATE_LIMITED, "the worker has met a rate limit"),
            Self::Failed { .. } | Self::Released => return ErrorReport::default(),
        };
        ErrorReport::bounded(Some(kind), Some(message), None)
    }
}

/// The state of a job when an attempt ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Running<'a> {
    /// The attempt that ends; also the number of claims.
    pub attempt: i32,
    /// Claims before it that do not count: they have met a rate limit.
    pub uncounted_claims: i32,
    /// Failures before this one.
    pub failures: i32,
    /// Failures after which the job is dead-lettered.
    pub max_attempts: i32,
    /// Whether it was cancelled meanwhile.
    pub cancel_requested: bool,
    /// How it is retried.
    pub policy: &'a RetryPolicy,
}

/// The consequence of an attempt's end. The caller writes it and decides nothing more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Claimable again immediately, at its position in the queue.
    Pending,
    /// Claimable again after a backoff.
    RetryAfter(Duration),
    /// Dead-lettered.
    DeadLetter,
    /// Cancelled.
    Cancelled,
}

/// The new state, and the new number of failures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AfterAttempt {
    /// Where the job goes.
    pub next: Next,
    /// Failures, including this one if it is one.
    pub failures: i32,
}

/// Decides what the end of an attempt leads to.
///
/// Retries count `failures`, not attempts, so a release uses up none, and neither does the loss of
/// a worker. After an expired lease the retry is immediate: the worker died, not the job. A
/// cancelled job is not retried, whatever the end. Source: `docs/guarantees.md`, "Retries" and
/// "Cancelling".
#[must_use]
pub fn after_attempt(
    running: &Running<'_>,
    cause: &OutcomeCause<'_>,
    jitter: Jitter,
) -> AfterAttempt {
    let counts = cause.is_failure();
    let failures = running.failures.saturating_add(i32::from(counts));
    if running.cancel_requested {
        return AfterAttempt { next: Next::Cancelled, failures };
    }
    let exhausted = counts && failures >= running.max_attempts;
    let is_uncounted = matches!(cause, OutcomeCause::RateLimited { .. });
    let claims = running.attempt - running.uncounted_claims - i32::from(is_uncounted);
    if exhausted || claims >= MAX_CLAIMS {
        return AfterAttempt { next: Next::DeadLetter, failures };
    }
    let next = match *cause {
        OutcomeCause::Failed { retryable, error_kind, retry_after_seconds } => {
            if !retryable || running.policy.is_final_for(error_kind) {
                Next::DeadLetter
            } else {
                Next::RetryAfter(retry_after_seconds.map_or_else(
                    || running.policy.delay(failures, jitter),
                    |it| Duration::from_secs(u64::from(it)),
                ))
            }
        }
        OutcomeCause::TimedOut => Next::RetryAfter(running.policy.delay(failures, jitter)),
        OutcomeCause::RateLimited { retry_after_seconds } => {
            Next::RetryAfter(Duration::from_secs(retry_after_seconds.into()))
        }
        OutcomeCause::LeaseExpired
        | OutcomeCause::Released
        | OutcomeCause::WorkerGone
        | OutcomeCause::TakeBack => Next::Pending,
    };
    AfterAttempt { next, failures }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAILED: OutcomeCause<'static> =
        OutcomeCause::Failed { retryable: true, error_kind: None, retry_after_seconds: None };

    fn after(
        attempt: i32,
        failures: i32,
        max_attempts: i32,
        cause: &OutcomeCause<'_>,
    ) -> AfterAttempt {
        let policy =
            RetryPolicy { non_retryable_types: vec!["Fatal".into()], ..Default::default() };
        let cancel_requested = false;
        let running = Running {
            attempt,
            uncounted_claims: 0,
            failures,
            max_attempts,
            cancel_requested,
            policy: &policy,
        };
        after_attempt(&running, cause, Jitter::NONE)
    }

    fn waits(seconds: u64) -> Next {
        Next::RetryAfter(Duration::from_secs(seconds))
    }

    #[test]
    fn a_failed_attempt_waits_longer_each_time_and_the_last_goes_to_the_dead_letter() {
        assert_eq!(after(1, 0, 3, &FAILED), AfterAttempt { next: waits(15), failures: 1 });
        assert_eq!(after(2, 1, 3, &FAILED), AfterAttempt { next: waits(30), failures: 2 });
        assert_eq!(after(3, 2, 3, &FAILED), AfterAttempt { next: Next::DeadLetter, failures: 3 });
        assert_eq!(after(1, 0, 1, &FAILED), AfterAttempt { next: Next::DeadLetter, failures: 1 });
    }

    #[test]
    fn failures_count_and_attempts_do_not() {
        assert_eq!(after(9, 0, 3, &FAILED), AfterAttempt { next: waits(15), failures: 1 });
        assert_eq!(
            after(9, 2, 3, &OutcomeCause::Released),
            AfterAttempt { next: Next::Pending, failures: 2 }
        );
    }

    #[test]
    fn what_cannot_succeed_is_not_tried_again() {
        let fatal = OutcomeCause::Failed {
            retryable: true,
            error_kind: Some("Fatal"),
            retry_after_seconds: None,
        };
        assert_eq!(after(1, 0, 3, &fatal).next, Next::DeadLetter);
        let refused = OutcomeCause::Failed {
            retryable: false,
            error_kind: None,
            retry_after_seconds: Some(1),
        };
        assert_eq!(after(1, 0, 3, &refused).next, Next::DeadLetter);
    }

    #[test]
    fn a_worker_may_choose_the_wait() {
        let later = OutcomeCause::Failed {
            retryable: true,
            error_kind: None,
            retry_after_seconds: Some(99),
        };
        assert_eq!(after(2, 1, 3, &later).next, waits(99));
        assert_eq!(after(3, 2, 3, &later).next, Next::DeadLetter);
    }

    #[test]
    fn a_lost_worker_costs_a_failure_but_no_wait_and_a_timeout_costs_both() {
        assert_eq!(
            after(1, 0, 3, &OutcomeCause::LeaseExpired),
            AfterAttempt { next: Next::Pending, failures: 1 }
        );
        assert_eq!(after(3, 2, 3, &OutcomeCause::LeaseExpired).next, Next::DeadLetter);
        assert_eq!(
            after(1, 0, 3, &OutcomeCause::TimedOut),
            AfterAttempt { next: waits(15), failures: 1 }
        );
    }

    #[test]
    fn no_job_is_claimed_for_ever() {
        let last = after(MAX_CLAIMS, 0, 3, &OutcomeCause::Released);
        assert_eq!(last, AfterAttempt { next: Next::DeadLetter, failures: 0 });
        assert_eq!(after(MAX_CLAIMS - 1, 0, 3, &OutcomeCause::Released).next, Next::Pending);
        let limited = OutcomeCause::RateLimited { retry_after_seconds: 7 };
        let waits = AfterAttempt { next: waits(7), failures: 0 };
        assert_eq!(after(MAX_CLAIMS, 0, 3, &limited), waits, "it does not count");
    }

    #[test]
    fn a_cancelled_job_is_not_retried() {
        let policy = RetryPolicy::default();
        let running = Running {
            uncounted_claims: 0,
            attempt: 1,
            failures: 0,
            max_attempts: 3,
            cancel_requested: true,
            policy: &policy,
        };
        for cause in
            [FAILED, OutcomeCause::Released, OutcomeCause::LeaseExpired, OutcomeCause::TimedOut]
        {
            let after = after_attempt(&running, &cause, Jitter::NONE);
            assert_eq!(after.next, Next::Cancelled, "{cause:?}");
        }
    }

    #[test]
    fn every_waiting_state_says_what_it_waits_for() {
        let open = Closed::default();
        assert_eq!(StoredState::Scheduled.waiting_for(0, open), Some(WaitingFor::RunAt));
        assert_eq!(StoredState::Scheduled.waiting_for(2, open), Some(WaitingFor::Parents));
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
