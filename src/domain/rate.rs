//! How many jobs of a queue, or of a group, with rate limits may start. In no window of
//! `per_seconds`, wherever it begins, do more than `count` start.

use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Rate limits of one group at most.
pub const MAX_GROUP_RATES: usize = 4;

/// Starts within this part of the window are stored as one.
const PARTS: i64 = 100;

/// At most `count` jobs start in any window of `per_seconds`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = GroupRate)]
pub struct RateLimit {
    /// Number of jobs.
    #[schema(example = 6)]
    pub count: i32,
    /// Length of the window in seconds.
    #[schema(example = 60)]
    pub per_seconds: i32,
}

/// Jobs that started together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handout {
    /// When; the last one, if several are stored as one.
    pub at: DateTime<Utc>,
    /// How many.
    pub jobs: i32,
}

impl RateLimit {
    fn window(self) -> TimeDelta {
        TimeDelta::seconds(self.per_seconds.max(1).into())
    }

    fn counts(self, handout: &Handout, now: DateTime<Utc>) -> bool {
        now - handout.at < self.window()
    }

    /// Jobs that may start at this moment.
    ///
    /// ```
    /// # use chrono::{DateTime, TimeDelta};
    /// # use fencepost_domain::rate::{Handout, RateLimit};
    /// let (limit, now) = (RateLimit { count: 5, per_seconds: 60 }, DateTime::UNIX_EPOCH);
    /// let at = |seconds| now - TimeDelta::seconds(seconds);
    /// assert_eq!(limit.allows(&[], now), 5);
    /// assert_eq!(limit.allows(&[Handout { at: at(59), jobs: 4 }], now), 1);
    /// assert_eq!(limit.allows(&[Handout { at: at(60), jobs: 4 }], now), 5);
    /// assert_eq!(limit.allows(&[Handout { at: at(1), jobs: 9 }], now), 0); // It was higher.
    /// ```
    #[must_use]
    pub fn allows(self, handouts: &[Handout], now: DateTime<Utc>) -> i32 {
        self.count.saturating_sub(self.started(handouts, now)).max(0)
    }

    /// Jobs that have started in the window that ends now.
    #[must_use]
    pub fn started(self, handouts: &[Handout], now: DateTime<Utc>) -> i32 {
        let counted = handouts.iter().filter(|it| self.counts(it, now));
        counted.fold(0_i32, |sum, it| sum.saturating_add(it.jobs))
    }

    /// How long no job may start; zero if one may. `handouts` are sorted by time.
    #[must_use]
    pub fn wait(self, handouts: &[Handout], now: DateTime<Utc>) -> TimeDelta {
        let live: Vec<_> = handouts.iter().filter(|it| self.counts(it, now)).collect();
        let mut used: i64 = live.iter().map(|it| i64::from(it.jobs)).sum();
        let mut wait = TimeDelta::zero();
        for handout in live {
            if used < i64::from(self.count) {
                break;
            }
            used -= i64::from(handout.jobs);
            wait = handout.at + self.window() - now;
        }
        wait
    }

    /// The record to store after `jobs` more have started: at most about a hundred entries. Starts
    /// that are stored as one count until the last of them leaves the window, so the limit always
    /// holds.
    #[must_use]
    pub fn remember(self, handouts: &[Handout], jobs: i32, now: DateTime<Utc>) -> Vec<Handout> {
        let mut kept: Vec<_> = handouts.iter().filter(|it| self.counts(it, now)).copied().collect();
        let new = Handout { at: now, jobs };
        match kept.last_mut() {
            Some(last) if self.joins(last, &new) => {
                last.at = now;
                last.jobs = last.jobs.saturating_add(jobs);
            }
            _ => kept.push(new),
        }
        kept
    }

    /// Whether two entries are in the same part of the window.
    fn joins(self, one: &Handout, other: &Handout) -> bool {
        let part_ms = (self.window().num_milliseconds() / PARTS).max(1);
        let part = |it: &Handout| it.at.timestamp_millis().div_euclid(part_ms);
        part(one) == part(other)
    }
}

/// Several rate limits that hold at the same time, the one with the shortest window first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RateLimits(Vec<RateLimit>);

impl RateLimits {
    /// These limits, in any order.
    #[must_use]
    pub fn of(mut limits: Vec<RateLimit>) -> Self {
        limits.sort_by_key(|it| it.per_seconds);
        Self(limits)
    }

    /// These and others.
    #[must_use]
    pub fn with(&self, others: &Self) -> Self {
        Self::of(self.0.iter().chain(&others.0).copied().collect())
    }

    /// True if there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Jobs that may start at this moment.
    #[must_use]
    pub fn allows(&self, handouts: &[Handout], now: DateTime<Utc>) -> i32 {
        self.0.iter().map(|it| it.allows(handouts, now)).min().unwrap_or(i32::MAX)
    }

    /// When the next job may start; none: one may now. `handouts` are sorted by time.
    ///
    /// ```
    /// # use chrono::{DateTime, TimeDelta};
    /// # use fencepost_domain::rate::{Handout, RateLimit, RateLimits};
    /// let limit = |count, per_seconds| RateLimit { count, per_seconds };
    /// let limits = RateLimits::of(vec![limit(10, 3_600), limit(2, 60)]);
    /// let now = DateTime::UNIX_EPOCH;
    /// let started = [Handout { at: now - TimeDelta::seconds(20), jobs: 2 }];
    /// assert_eq!(limits.next_at(&started, now), Some(now + TimeDelta::seconds(40)));
    /// assert_eq!(limits.next_at(&started, now + TimeDelta::seconds(40)), None);
    /// ```
    #[must_use]
    pub fn next_at(&self, handouts: &[Handout], now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let wait = self.0.iter().map(|it| it.wait(handouts, now)).max().unwrap_or_default();
        (wait > TimeDelta::zero()).then(|| now + wait)
    }

    /// When more jobs may start than now, as the first start leaves a window; none: all windows are
    /// empty.
    #[must_use]
    pub fn grows_at(&self, handouts: &[Handout], now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let leaves = |limit: &RateLimit| {
            let first = handouts.iter().find(|it| limit.counts(it, now))?;
            Some(first.at + limit.window())
        };
        self.0.iter().filter_map(leaves).min()
    }

    /// When all windows are empty; none: they are.
    #[must_use]
    pub fn empty_at(&self, handouts: &[Handout], now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let longest = self.0.last()?.window();
        handouts.last().map(|it| it.at + longest).filter(|it| *it > now)
    }

    /// The record to store after `jobs` more have started: about a hundred entries for each window
    /// at most, and so that each limit holds.
    #[must_use]
    pub fn remember(&self, handouts: &[Handout], jobs: i32, now: DateTime<Utc>) -> Vec<Handout> {
        // Two entries become one only if the same windows count them: else one of them would count
        // in a window that it has left.
        let window = |it: &Handout| self.0.iter().position(|limit| limit.counts(it, now));
        let mut kept: Vec<Handout> = Vec::with_capacity(handouts.len() + 1);
        for next in handouts.iter().chain([&Handout { at: now, jobs }]) {
            let Some(of_next) = window(next) else { continue };
            match kept.last_mut() {
                Some(last)
                    if window(last) == Some(of_next) && self.0[of_next].joins(last, next) =>
                {
                    last.at = next.at;
                    last.jobs = last.jobs.saturating_add(next.jobs);
                }
                _ => kept.push(*next),
            }
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_window_ever_holds_more_than_the_limit_and_a_wait_is_never_in_vain(
            count in 1..20,
            per_seconds in 1..20,
            steps in prop::collection::vec((0_i64..3_000, 1..10), 1..200),
        ) {
            let limit = RateLimit { count, per_seconds };
            let (mut now, mut memory, mut all) = (DateTime::UNIX_EPOCH, Vec::new(), Vec::new());
            for (pause_ms, wanted) in steps {
                now += TimeDelta::milliseconds(pause_ms);
                let jobs = limit.allows(&memory, now).min(wanted);
                prop_assert_eq!(limit.wait(&memory, now) > TimeDelta::zero(), jobs == 0);
                if jobs == 0 {
                    now += limit.wait(&memory, now);
                    prop_assert!(limit.allows(&memory, now) > 0);
                    continue;
                }
                memory = limit.remember(&memory, jobs, now);
                prop_assert!(memory.len() <= PARTS as usize + 2);
                all.push(Handout { at: now, jobs });
                let in_window: i32 =
                    all.iter().filter(|it| limit.counts(it, now)).map(|it| it.jobs).sum();
                prop_assert!(in_window <= count, "{} of {}", in_window, count);
            }
        }

        #[test]
        fn several_limits_hold_at_the_same_time_and_a_wait_is_never_in_vain(
            limits in prop::collection::vec((1..40, 1..200), 1..=MAX_GROUP_RATES),
            steps in prop::collection::vec((0_i64..9_000, 1..10), 1..200),
        ) {
            let limit = |(count, per_seconds)| RateLimit { count, per_seconds };
            let limits = RateLimits::of(limits.into_iter().map(limit).collect());
            let (mut now, mut memory, mut all) = (DateTime::UNIX_EPOCH, Vec::new(), Vec::new());
            for (pause_ms, wanted) in steps {
                now += TimeDelta::milliseconds(pause_ms);
                let jobs = limits.allows(&memory, now).min(wanted);
                prop_assert_eq!(limits.next_at(&memory, now).is_some(), jobs == 0);
                if let Some(at) = limits.next_at(&memory, now) {
                    now = at;
                    prop_assert!(limits.allows(&memory, now) > 0);
                    continue;
                }
                memory = limits.remember(&memory, jobs, now);
                prop_assert!(memory.len() <= (PARTS as usize + 2) * MAX_GROUP_RATES);
                all.push(Handout { at: now, jobs });
                for limit in &limits.0 {
                    let started = all.iter().filter(|it| limit.counts(it, now));
                    let in_window: i32 = started.map(|it| it.jobs).sum();
                    prop_assert!(in_window <= limit.count, "{} of {:?}", in_window, limit);
                }
            }
            prop_assert!(limits.empty_at(&memory, now).is_none_or(|it| it > now));
            prop_assert!(limits.grows_at(&memory, now) <= limits.empty_at(&memory, now));
        }
    }
}
