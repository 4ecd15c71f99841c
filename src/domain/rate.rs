//! How many jobs a queue with a rate limit may start. In no window of `per_seconds`, wherever it
//! begins, do more than `count` start.

use chrono::{DateTime, TimeDelta, Utc};

/// Starts within this part of the window are stored as one.
const PARTS: i64 = 100;

/// At most `count` jobs in any `per_seconds`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateLimit {
    /// Jobs.
    pub count: i32,
    /// Length of the window.
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
        let used = handouts.iter().filter(|it| self.counts(it, now));
        let used = used.fold(0_i32, |sum, it| sum.saturating_add(it.jobs));
        self.count.saturating_sub(used).max(0)
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
        let part_ms = (self.window().num_milliseconds() / PARTS).max(1);
        let part = |it: DateTime<Utc>| it.timestamp_millis().div_euclid(part_ms);
        match kept.last_mut() {
            Some(last) if part(last.at) == part(now) => {
                last.at = now;
                last.jobs = last.jobs.saturating_add(jobs);
            }
            _ => kept.push(Handout { at: now, jobs }),
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
    }
}
