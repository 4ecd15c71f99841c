//! What the end of an attempt leads to.

use std::time::Duration;

use super::{AttemptOutcome, Losses};
use serde::{Deserialize, Serialize};

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
    /// The server releases it, since it was not delivered.
    Undelivered,
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
            | Self::Undelivered
            | Self::WorkerGone
            | Self::TakeBack
            | Self::RateLimited { .. }
            | Self::Snoozed { .. } => AttemptOutcome::Released,
        }
    }

    /// Whether the attempt ended without an outcome: its worker was gone, or the lease was taken.
    #[must_use]
    pub fn is_loss(&self) -> bool {
        matches!(self, Self::LeaseExpired | Self::WorkerGone | Self::TakeBack)
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
            Self::Failed { .. } | Self::Released | Self::Undelivered => {
                return ErrorReport::default();
            }
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
    /// Losses before this one.
    pub losses: Losses,
    /// Losses in a row after which the job is dead-lettered.
    pub max_losses: i32,
    /// Whether this attempt came further than those that were lost before it.
    pub has_progressed: bool,
    /// Whether an expired lease counts as a failure, and other losses not at all.
    pub losses_fail: bool,
    /// Whether it was cancelled meanwhile.
    pub cancel_requested: bool,
    /// How it is retried.
    pub policy: &'a RetryPolicy,
}

/// Why a job was dead-lettered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeadLetterReason {
    /// An attempt failed, and no retry was left or allowed.
    Failed,
    /// It was lost too often: its workers sent no outcome.
    Lost,
    /// It was claimed too often.
    Claims,
}

impl DeadLetterReason {
    /// The name as stored and shown.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Lost => "lost",
            Self::Claims => "claims",
        }
    }

    /// The reason that is stored with a dead letter; what is not stored is a failure.
    #[must_use]
    pub fn stored(stored: Option<&str>) -> Self {
        let all = [Self::Failed, Self::Lost, Self::Claims];
        all.into_iter().find(|it| stored == Some(it.as_str())).unwrap_or(Self::Failed)
    }
}

/// The consequence of an attempt's end. The caller writes it and decides nothing more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Claimable again immediately, at its position in the queue.
    Pending,
    /// Claimable again after a backoff.
    RetryAfter(Duration),
    /// Dead-lettered.
    DeadLetter(DeadLetterReason),
    /// Cancelled.
    Cancelled,
}

/// The new state, and the new numbers of failures and losses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AfterAttempt {
    /// Where the job goes.
    pub next: Next,
    /// Failures, including this one if it is one.
    pub failures: i32,
    /// Losses, including this one if it is one.
    pub losses: Losses,
}

/// Decides what the end of an attempt leads to.
///
/// Retries count `failures`, not attempts, so a release uses up none, and neither does the loss of
/// a worker: losses in a row have a bound of their own. After a loss the retry is immediate, or
/// soon: the worker died, not the job. A cancelled job is not retried, whatever the end. Source:
/// `docs/guarantees.md`, "Retries" and "Cancelling".
#[must_use]
pub fn after_attempt(
    running: &Running<'_>,
    cause: &OutcomeCause<'_>,
    jitter: Jitter,
) -> AfterAttempt {
    let is_loss = cause.is_loss() && !running.losses_fail;
    let is_failure = !is_loss && cause.outcome() != AttemptOutcome::Released;
    let failures = running.failures.saturating_add(i32::from(is_failure));
    let losses = match cause {
        // Nothing was heard of it.
        OutcomeCause::Undelivered => running.losses,
        _ if is_loss => running.losses.with_another(running.has_progressed),
        _ => running.losses.after_outcome(),
    };
    let after = |next| AfterAttempt { next, failures, losses };
    if running.cancel_requested {
        return after(Next::Cancelled);
    }
    if is_failure && failures >= running.max_attempts {
        return after(Next::DeadLetter(DeadLetterReason::Failed));
    }
    // Who takes a job back wants it to run again.
    let is_take_back = matches!(cause, OutcomeCause::TakeBack);
    if is_loss && !is_take_back && losses.are_too_many(running.max_losses) {
        return after(Next::DeadLetter(DeadLetterReason::Lost));
    }
    if is_worn(running, cause) {
        return after(Next::DeadLetter(DeadLetterReason::Claims));
    }
    after(match *cause {
        OutcomeCause::Failed { retryable, error_kind, retry_after_seconds } => {
            if !retryable || running.policy.is_final_for(error_kind) {
                Next::DeadLetter(DeadLetterReason::Failed)
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
        OutcomeCause::Released | OutcomeCause::Undelivered | OutcomeCause::TakeBack => {
            Next::Pending
        }
        OutcomeCause::LeaseExpired | OutcomeCause::WorkerGone => {
            losses.wait(jitter).map_or(Next::Pending, Next::RetryAfter)
        }
    })
}

/// Whether a job has been claimed as often as it may be.
fn is_worn(running: &Running<'_>, cause: &OutcomeCause<'_>) -> bool {
    let is_uncounted =
        matches!(cause, OutcomeCause::RateLimited { .. } | OutcomeCause::Snoozed { .. });
    let uncounted = running.uncounted_claims.saturating_add(i32::from(is_uncounted));
    match is_uncounted {
        true => uncounted >= MAX_UNCOUNTED_CLAIMS,
        false => running.attempt - uncounted >= MAX_CLAIMS,
    }
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
        let running = Running { attempt, failures, max_attempts, ..running(&policy) };
        after_attempt(&running, cause, Jitter::NONE)
    }

    fn running(policy: &RetryPolicy) -> Running<'_> {
        Running {
            attempt: 1,
            uncounted_claims: 0,
            failures: 0,
            max_attempts: 3,
            losses: Losses::default(),
            max_losses: 5,
            has_progressed: false,
            losses_fail: false,
            cancel_requested: false,
            policy,
        }
    }

    fn failed(next: Next, failures: i32) -> AfterAttempt {
        AfterAttempt { next, failures, losses: Losses::default() }
    }

    const DEAD: Next = Next::DeadLetter(DeadLetterReason::Failed);

    fn waits(seconds: u64) -> Next {
        Next::RetryAfter(Duration::from_secs(seconds))
    }

    #[test]
    fn a_failed_attempt_waits_longer_each_time_and_the_last_goes_to_the_dead_letter() {
        assert_eq!(after(1, 0, 3, &FAILED), failed(waits(15), 1));
        assert_eq!(after(2, 1, 3, &FAILED), failed(waits(30), 2));
        assert_eq!(after(3, 2, 3, &FAILED), failed(DEAD, 3));
        assert_eq!(after(1, 0, 1, &FAILED), failed(DEAD, 1));
    }

    #[test]
    fn failures_count_and_attempts_do_not() {
        assert_eq!(after(9, 0, 3, &FAILED), failed(waits(15), 1));
        assert_eq!(after(9, 2, 3, &OutcomeCause::Released), failed(Next::Pending, 2));
    }

    #[test]
    fn what_cannot_succeed_is_not_tried_again() {
        let fatal = OutcomeCause::Failed {
            retryable: true,
            error_kind: Some("Fatal"),
            retry_after_seconds: None,
        };
        assert_eq!(after(1, 0, 3, &fatal).next, DEAD);
        let refused = OutcomeCause::Failed {
            retryable: false,
            error_kind: None,
            retry_after_seconds: Some(1),
        };
        assert_eq!(after(1, 0, 3, &refused).next, DEAD);
    }

    #[test]
    fn a_worker_may_choose_the_wait() {
        let later = OutcomeCause::Failed {
            retryable: true,
            error_kind: None,
            retry_after_seconds: Some(99),
        };
        assert_eq!(after(2, 1, 3, &later).next, waits(99));
        assert_eq!(after(3, 2, 3, &later).next, DEAD);
    }

    #[test]
    fn a_lost_worker_costs_no_failure_and_a_timeout_costs_one_and_a_wait() {
        let lost = after(1, 2, 3, &OutcomeCause::LeaseExpired);
        let losses = Losses { total: 1, in_row: 1 };
        assert_eq!(lost, AfterAttempt { next: Next::Pending, failures: 2, losses });
        assert_eq!(after(1, 0, 3, &OutcomeCause::TimedOut), failed(waits(15), 1));
        let policy = RetryPolicy::default();
        let often = Running { losses: Losses { total: 8, in_row: 4 }, ..running(&policy) };
        for cause in [OutcomeCause::LeaseExpired, OutcomeCause::WorkerGone] {
            let last = after_attempt(&often, &cause, Jitter::NONE);
            assert_eq!(last.next, Next::DeadLetter(DeadLetterReason::Lost), "{cause:?}");
            let further = Running { has_progressed: true, ..often };
            let next = after_attempt(&further, &cause, Jitter::NONE);
            assert_eq!(next.next, Next::Pending, "it came further: {cause:?}");
            assert_eq!(next.losses, Losses { total: 9, in_row: 1 });
        }
        let taken = after_attempt(&often, &OutcomeCause::TakeBack, Jitter::NONE);
        let losses = Losses { total: 9, in_row: 5 };
        assert_eq!(taken, AfterAttempt { next: Next::Pending, failures: 0, losses });
        let ended = after_attempt(&often, &FAILED, Jitter::NONE);
        assert_eq!(ended.losses, Losses { total: 8, in_row: 0 }, "an outcome ends the row");
        let unseen = after_attempt(&often, &OutcomeCause::Undelivered, Jitter::NONE);
        assert_eq!((unseen.next, unseen.losses), (Next::Pending, often.losses));
        let second = Running { losses: Losses { total: 1, in_row: 1 }, ..running(&policy) };
        let waits = after_attempt(&second, &OutcomeCause::LeaseExpired, Jitter::FULL).next;
        assert_eq!(waits, Next::RetryAfter(Duration::from_secs(1)));
    }

    #[test]
    fn where_losses_count_as_failures_an_expired_lease_costs_one_but_no_wait() {
        let policy = RetryPolicy::default();
        let at = |failures| Running { losses_fail: true, failures, ..running(&policy) };
        let after = |failures, cause| after_attempt(&at(failures), &cause, Jitter::NONE);
        assert_eq!(after(0, OutcomeCause::LeaseExpired), failed(Next::Pending, 1));
        assert_eq!(after(2, OutcomeCause::LeaseExpired), failed(DEAD, 3));
        assert_eq!(after(2, OutcomeCause::WorkerGone), failed(Next::Pending, 2));
        assert_eq!(after(2, OutcomeCause::TakeBack), failed(Next::Pending, 2));
    }

    #[test]
    fn no_job_is_claimed_for_ever() {
        let last = after(MAX_CLAIMS, 0, 3, &OutcomeCause::Released);
        let worn = Next::DeadLetter(DeadLetterReason::Claims);
        assert_eq!(last, failed(worn, 0));
        assert_eq!(after(MAX_CLAIMS - 1, 0, 3, &OutcomeCause::Released).next, Next::Pending);
        let limited = OutcomeCause::RateLimited { retry_after_seconds: 7 };
        let snoozed = OutcomeCause::Snoozed { delay_seconds: 7 };
        let waits = failed(waits(7), 0);
        for uncounted in [limited, snoozed] {
            for attempt in [MAX_CLAIMS, 2 * MAX_CLAIMS] {
                assert_eq!(after(attempt, 0, 3, &uncounted), waits, "it does not count");
            }
            let policy = RetryPolicy::default();
            let mut running = Running {
                attempt: MAX_UNCOUNTED_CLAIMS,
                uncounted_claims: MAX_UNCOUNTED_CLAIMS - 1,
                ..running(&policy)
            };
            let last = after_attempt(&running, &uncounted, Jitter::NONE);
            assert_eq!(last.next, worn, "{uncounted:?}");
            running.uncounted_claims -= 1;
            assert_eq!(after_attempt(&running, &uncounted, Jitter::NONE), waits);
        }
    }

    #[test]
    fn a_cancelled_job_is_not_retried() {
        let policy = RetryPolicy::default();
        let running = Running { cancel_requested: true, ..running(&policy) };
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
