//! Losses: attempts that ended without an outcome, because their worker was gone or the lease was
//! taken from it. They say more about workers than about the job, so they are no failures.

use std::time::Duration;

use crate::backoff::{Jitter, JitterKind, RetryPolicy, RetryStrategy};

/// Losses in a row after which a job is dead-lettered, if it sets no number. One where one failure
/// is enough.
pub const DEFAULT_MAX_LOSSES: i32 = 5;

/// A job may be lost this many times as often in total as it may be in a row.
pub const TOTAL_LOSSES_PER_ROW: i32 = 10;

/// The wait after the second loss in a row. It doubles with each further one.
const FIRST_WAIT_SECONDS: u32 = 1;
/// The longest wait.
const MAX_WAIT_SECONDS: u32 = 60;

/// The losses of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Losses {
    /// All since it was enqueued or retried by request.
    pub total: i32,
    /// Those since the last outcome or progress.
    pub in_row: i32,
}

/// Losses in a row after which a job is dead-lettered.
#[must_use]
pub fn max_losses(asked: Option<i32>, max_attempts: i32) -> i32 {
    asked.unwrap_or(if max_attempts == 1 { 1 } else { DEFAULT_MAX_LOSSES })
}

impl Losses {
    /// The same with one more. An attempt that came further than those before it begins a new row.
    #[must_use]
    pub fn with_another(self, has_progressed: bool) -> Self {
        let before = if has_progressed { 0 } else { self.in_row };
        Self { total: self.total.saturating_add(1), in_row: before.saturating_add(1) }
    }

    /// The same after an outcome that a worker has reported, or a timeout.
    #[must_use]
    pub fn after_outcome(self) -> Self {
        Self { in_row: 0, ..self }
    }

    /// Whether a job with this bound is dead-lettered.
    #[must_use]
    pub fn are_too_many(self, max_in_row: i32) -> bool {
        self.in_row >= max_in_row || self.total >= max_in_row.saturating_mul(TOTAL_LOSSES_PER_ROW)
    }

    /// The wait after the last of them: none after the first in a row.
    #[must_use]
    pub fn wait(self, jitter: Jitter) -> Option<Duration> {
        let policy = RetryPolicy {
            strategy: RetryStrategy::Exponential,
            initial_seconds: FIRST_WAIT_SECONDS,
            multiplier: 2.0,
            max_seconds: MAX_WAIT_SECONDS,
            jitter: JitterKind::Equal,
            jitter_seconds: 0,
            non_retryable_types: Vec::new(),
        };
        (self.in_row > 1).then(|| policy.delay(self.in_row - 1, jitter))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_may_be_lost_a_few_times_in_a_row_and_ten_times_as_often() {
        assert_eq!(max_losses(None, 3), 5);
        assert_eq!(max_losses(None, 1), 1);
        assert_eq!(max_losses(Some(2), 1), 2);
        let four = Losses { total: 4, in_row: 4 };
        assert!(!four.are_too_many(5));
        assert!(four.with_another(false).are_too_many(5));
        assert!(!four.with_another(true).are_too_many(5));
        assert!(!Losses { total: 49, in_row: 1 }.are_too_many(5));
        assert!(Losses { total: 50, in_row: 1 }.are_too_many(5));
        assert_eq!(four.after_outcome(), Losses { total: 4, in_row: 0 });
    }

    #[test]
    fn the_first_loss_waits_for_nothing_and_later_ones_up_to_a_minute() {
        let wait = |in_row, jitter| Losses { total: in_row, in_row }.wait(jitter);
        let seconds = |it: f64| Some(Duration::from_secs_f64(it));
        assert_eq!(wait(1, Jitter::FULL), None);
        assert_eq!(wait(2, Jitter::FULL), seconds(1.0));
        assert_eq!(wait(2, Jitter::NONE), seconds(0.5));
        assert_eq!(wait(3, Jitter::FULL), seconds(2.0));
        assert_eq!(wait(5, Jitter::FULL), seconds(8.0));
        assert_eq!(wait(100, Jitter::FULL), seconds(60.0));
    }
}
