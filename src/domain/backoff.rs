//! How long a failed job waits before its next attempt.
//!
//! The default: `15 · 2^(failures−1)` seconds, capped at six hours, plus 0–3
//! seconds of jitter (`docs/guarantees.md`, "Retries").

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A share of the jitter, from 0 to 1. The caller picks the random number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Jitter(f64);

impl Jitter {
    /// No jitter.
    pub const NONE: Self = Self(0.0);
    /// The full jitter.
    pub const FULL: Self = Self(1.0);

    /// `share` of the jitter, clamped to 0..=1.
    #[must_use]
    pub fn new(share: f64) -> Self {
        Self(if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 })
    }
}

/// Growth of the wait with each failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RetryStrategy {
    /// `initial · multiplier^(failures−1)`.
    #[default]
    Exponential,
    /// `initial · failures`.
    Linear,
    /// `initial · failures^multiplier`.
    Polynomial,
    /// Always `initial`.
    Constant,
}

/// Spread of waits, so that jobs that failed together do not return together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JitterKind {
    /// The wait, and up to `jitter_seconds` more.
    #[default]
    Additive,
    /// Half of the wait to all of it.
    Equal,
    /// No wait to all of it.
    Full,
}

/// Policy of retries.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct RetryPolicy {
    /// Growth of the wait with each failure.
    pub strategy: RetryStrategy,
    /// The first wait, in seconds.
    pub initial_seconds: u32,
    /// The factor of an exponential wait; the exponent of a polynomial one.
    pub multiplier: f64,
    /// The longest wait in seconds, before additive jitter.
    pub max_seconds: u32,
    /// Spread of waits.
    #[serde(default)]
    pub jitter: JitterKind,
    /// Maximum additive jitter in seconds.
    pub jitter_seconds: u32,
    /// Error types that go straight to the dead letter: exact, or `prefix.*`.
    pub non_retryable_types: Vec<String>,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            strategy: RetryStrategy::Exponential,
            initial_seconds: 15,
            multiplier: 2.0,
            max_seconds: 21_600,
            jitter: JitterKind::Additive,
            jitter_seconds: 3,
            non_retryable_types: Vec::new(),
        }
    }
}

impl RetryPolicy {
    /// The policy as it is stored with a job; none: the default. A shape that only a newer version
    /// knows reads as the default, too: it must not keep a job from being retried.
    #[must_use]
    pub fn stored(stored: Option<&serde_json::Value>) -> Self {
        stored.and_then(|it| Self::deserialize(it).ok()).unwrap_or_default()
    }

    /// The wait after the `failures`-th failure, counted from 1.
    ///
    /// Total: every input has an answer, and no answer exceeds `max_seconds` by more than the
    /// additive jitter. That is added after the cap: jobs at the cap must not return together.
    ///
    /// ```
    /// # use fencepost_domain::backoff::{Jitter, RetryPolicy};
    /// # let s = std::time::Duration::from_secs;
    /// let policy = RetryPolicy::default();
    /// assert_eq!(policy.delay(1, Jitter::NONE), s(15));
    /// assert_eq!(policy.delay(1, Jitter::FULL), s(18));
    /// assert_eq!(policy.delay(4, Jitter::NONE), s(120));
    /// assert_eq!(policy.delay(i32::MAX, Jitter::NONE), s(21_600));
    /// assert_eq!(policy.delay(i32::MAX, Jitter::FULL), s(21_603));
    /// assert_eq!(policy.delay(i32::MIN, Jitter::NONE), s(15));
    /// ```
    #[must_use]
    pub fn delay(&self, failures: i32, jitter: Jitter) -> Duration {
        let earlier = failures.saturating_sub(1).max(0);
        let initial = f64::from(self.initial_seconds);
        let grown = match self.strategy {
            // Finite, because 0 · ∞ would not be a number.
            RetryStrategy::Exponential => {
                initial * self.multiplier.max(1.0).powi(earlier).min(f64::MAX)
            }
            RetryStrategy::Linear => initial * (f64::from(earlier) + 1.0),
            RetryStrategy::Polynomial => {
                initial * (f64::from(earlier) + 1.0).powf(self.multiplier.max(1.0)).min(f64::MAX)
            }
            RetryStrategy::Constant => initial,
        };
        // `min` also brings an infinite product back to the cap.
        let wait = grown.min(f64::from(self.max_seconds)).max(0.0);
        let seconds = match self.jitter {
            JitterKind::Additive => wait + f64::from(self.jitter_seconds) * jitter.0,
            JitterKind::Equal => wait * (1.0 + jitter.0) / 2.0,
            JitterKind::Full => wait * jitter.0,
        };
        Duration::from_millis((seconds * 1000.0).round() as u64)
    }

    /// Whether an error of this type must not be retried.
    ///
    /// ```
    /// # use fencepost_domain::backoff::RetryPolicy;
    /// let policy = RetryPolicy {
    ///     non_retryable_types: vec!["billing.*".into(), "NotFound".into()],
    ///     ..RetryPolicy::default()
    /// };
    /// assert!(policy.is_final_for(Some("NotFound")));
    /// assert!(policy.is_final_for(Some("billing.CardDeclined")));
    /// assert!(!policy.is_final_for(Some("billing")));
    /// assert!(!policy.is_final_for(None));
    /// ```
    #[must_use]
    pub fn is_final_for(&self, error_kind: Option<&str>) -> bool {
        let Some(kind) = error_kind else { return false };
        self.non_retryable_types.iter().any(|pattern| match pattern.strip_suffix(".*") {
            Some(prefix) => kind.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('.')),
            None => pattern == kind,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{prop_assert, proptest};

    fn policy(strategy: RetryStrategy, initial: u32, multiplier: f64, max: u32) -> RetryPolicy {
        RetryPolicy {
            strategy,
            initial_seconds: initial,
            multiplier,
            max_seconds: max,
            jitter: JitterKind::Additive,
            jitter_seconds: 0,
            non_retryable_types: Vec::new(),
        }
    }

    fn check(policy: &RetryPolicy, failures: i32, seconds: u64) {
        assert_eq!(policy.delay(failures, Jitter::NONE), Duration::from_secs(seconds));
    }

    #[test]
    fn each_strategy_grows_in_its_own_way_up_to_the_cap() {
        let exponential = policy(RetryStrategy::Exponential, 10, 3.0, 200);
        check(&exponential, 1, 10);
        check(&exponential, 2, 30);
        check(&exponential, 3, 90);
        check(&exponential, 4, 200);
        let linear = policy(RetryStrategy::Linear, 10, 3.0, 25);
        check(&linear, 1, 10);
        check(&linear, 2, 20);
        check(&linear, 3, 25);
        let polynomial = policy(RetryStrategy::Polynomial, 10, 2.0, 200);
        check(&polynomial, 1, 10);
        check(&polynomial, 2, 40);
        check(&polynomial, 3, 90);
        check(&polynomial, i32::MAX, 200);
        let constant = policy(RetryStrategy::Constant, 10, 3.0, 200);
        check(&constant, 1, 10);
        check(&constant, 99, 10);
        check(&policy(RetryStrategy::Exponential, 0, 100.0, 200), i32::MAX, 0);
    }

    #[test]
    fn jitter_is_added_from_none_to_all() {
        let policy = RetryPolicy::default();
        assert_eq!(policy.delay(2, Jitter::new(0.5)), Duration::from_millis(31_500));
        assert_eq!(policy.delay(2, Jitter::new(7.0)), policy.delay(2, Jitter::FULL));
        assert_eq!(policy.delay(2, Jitter::new(f64::NAN)), policy.delay(2, Jitter::NONE));
    }

    #[test]
    fn jobs_at_the_cap_do_not_return_together() {
        let capped = policy(RetryStrategy::Exponential, 15, 2.0, 100);
        let spread = |jitter, share| {
            let policy = RetryPolicy { jitter, jitter_seconds: 3, ..capped.clone() };
            policy.delay(1_000, Jitter::new(share)).as_millis()
        };
        let ends = |jitter| (spread(jitter, 0.0), spread(jitter, 0.5), spread(jitter, 1.0));
        assert_eq!(ends(JitterKind::Additive), (100_000, 101_500, 103_000));
        assert_eq!(ends(JitterKind::Equal), (50_000, 75_000, 100_000));
        assert_eq!(ends(JitterKind::Full), (0, 50_000, 100_000));

        let (jobs, mut by_second) = (10_000, [0_u32; 101]);
        for _ in 0..jobs {
            by_second[spread(JitterKind::Full, rand::random()) as usize / 1_000] += 1;
        }
        let mean = jobs / 100;
        assert!(by_second.iter().all(|it| *it <= 3 * mean), "{by_second:?}");
    }

    proptest! {
        #[test]
        fn a_wait_without_jitter_beyond_its_cap_never_exceeds_it_and_never_shrinks_with_failures(
            initial in 0_u32..3_000_000, multiplier in 0.0_f64..200.0, max in 0_u32..3_000_000,
            failures in i32::MIN..i32::MAX, share in 0.0_f64..1.0,
        ) {
            use JitterKind::{Additive, Equal, Full};
            use RetryStrategy::{Constant, Exponential, Linear, Polynomial};
            let strategies = [Exponential, Linear, Polynomial, Constant];
            let kinds = [Additive, Equal, Full];
            let all = strategies.into_iter().flat_map(|it| kinds.map(|jitter| (it, jitter)));
            for (strategy, jitter) in all {
                let policy = RetryPolicy { jitter, ..policy(strategy, initial, multiplier, max) };
                let wait = policy.delay(failures, Jitter::new(share));
                prop_assert!(wait <= Duration::from_secs(u64::from(max)));
                prop_assert!(wait <= policy.delay(failures.saturating_add(1), Jitter::new(share)));
            }
        }
    }
}
