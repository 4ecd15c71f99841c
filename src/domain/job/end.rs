//! What the end of an attempt leads to.

use std::time::Duration;

use super::AttemptOutcome;
use crate::{
    backoff::{Jitter, RetryPolicy},
    text::ErrorReport,
};

/// Claims after which a job is dead-lettered whatever happened: otherwise a job that is always
/// released would circulate forever.
pub const MAX_CLAIMS: i32 = 1_000;

/// Claims that do not count towards these, since the job was put off or met a rate limit, after
/// which it is dead-lettered.
pub const MAX_UNCOUNTED_CLAIMS: i32 = 100_000;

/// The error type of an attempt that has met a rate limit. Its outcome is `released`.
pub const RATE_LIMITED: &str = "rate_limited";

/// The error type of an attempt whose worker has put the job off. Its outcome is `released`.
pub const SNOOZED: &str = "snoozed";

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
    /// The worker has put the job off.
    Snoozed {
        /// Seconds until the job may run again.
        delay_seconds: u32,
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
            Self::Released
            | Self::WorkerGone
            | Self::TakeBack
            | Self::RateLimited { .. }
            | Self::Snoozed { .. } => AttemptOutcome::Released,
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
            Self::Snoozed { .. } => (SNOOZED, "the worker has put the job off"),
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
    /// Claims before it that do not count: the job was put off or met a rate limit.
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
    let is_uncounted =
        matches!(cause, OutcomeCause::RateLimited { .. } | OutcomeCause::Snoozed { .. });
    let uncounted = running.uncounted_claims.saturating_add(i32::from(is_uncounted));
    let claims = running.attempt - uncounted;
    let is_worn = match is_uncounted {
        true => uncounted >= MAX_UNCOUNTED_CLAIMS,
        false => claims >= MAX_CLAIMS,
    };
    if exhausted || is_worn {
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
        OutcomeCause::RateLimited { retry_after_seconds: seconds }
        | OutcomeCause::Snoozed { delay_seconds: seconds } => {
            Next::RetryAfter(Duration::from_secs(seconds.into()))
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
        let snoozed = OutcomeCause::Snoozed { delay_seconds: 7 };
        let waits = AfterAttempt { next: waits(7), failures: 0 };
        for uncounted in [limited, snoozed] {
            for attempt in [MAX_CLAIMS, 2 * MAX_CLAIMS] {
                assert_eq!(after(attempt, 0, 3, &uncounted), waits, "it does not count");
            }
            let policy = RetryPolicy::default();
            let mut running = Running {
                attempt: MAX_UNCOUNTED_CLAIMS,
                uncounted_claims: MAX_UNCOUNTED_CLAIMS - 1,
                failures: 0,
                max_attempts: 3,
                cancel_requested: false,
                policy: &policy,
            };
            let last = after_attempt(&running, &uncounted, Jitter::NONE);
            assert_eq!(last.next, Next::DeadLetter, "{uncounted:?}");
            running.uncounted_claims -= 1;
            assert_eq!(after_attempt(&running, &uncounted, Jitter::NONE), waits);
        }
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
        for cause in [
            FAILED,
            OutcomeCause::Released,
            OutcomeCause::LeaseExpired,
            OutcomeCause::TimedOut,
            OutcomeCause::Snoozed { delay_seconds: 9 },
            OutcomeCause::RateLimited { retry_after_seconds: 9 },
        ] {
            let after = after_attempt(&running, &cause, Jitter::NONE);
            assert_eq!(after.next, Next::Cancelled, "{cause:?}");
        }
    }
}
