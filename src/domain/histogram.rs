//! Times in buckets, and percentiles of them.

/// Upper bounds of the buckets, in milliseconds; one more bucket has no bound.
pub const BOUNDS_MS: [i64; 21] = [
    1, 2, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 120_000,
    300_000, 900_000, 3_600_000, 14_400_000, 86_400_000,
];

/// Number of buckets.
pub const BUCKETS: usize = BOUNDS_MS.len() + 1;

/// Measured times, each in one bucket.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Histogram {
    /// Their sum, in milliseconds.
    pub sum_ms: i64,
    /// The number of times in each bucket alone.
    pub buckets: [i64; BUCKETS],
}

impl Histogram {
    /// From stored buckets: missing ones are empty, extra ones are ignored.
    #[must_use]
    pub fn stored(sum_ms: i64, stored: &[i64]) -> Self {
        let mut buckets = [0; BUCKETS];
        for (bucket, stored) in buckets.iter_mut().zip(stored) {
            *bucket = *stored;
        }
        Self { sum_ms, buckets }
    }

    /// Adds one time. A negative time counts as 0: clocks may be set back.
    pub fn add(&mut self, ms: i64) {
        let ms = ms.max(0);
        let bucket = BOUNDS_MS.partition_point(|it| *it < ms);
        self.buckets[bucket] += 1;
        self.sum_ms = self.sum_ms.saturating_add(ms);
    }

    /// Adds the times of another histogram.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.buckets.iter_mut().zip(other.buckets) {
            *mine += theirs;
        }
        self.sum_ms = self.sum_ms.saturating_add(other.sum_ms);
    }

    /// Number of times.
    #[must_use]
    pub fn count(&self) -> i64 {
        self.buckets.iter().sum()
    }

    /// The mean, in milliseconds; none without times.
    ///
    /// ```
    /// # use fencepost_domain::histogram::Histogram;
    /// let mut times = Histogram::default();
    /// assert_eq!(times.mean_ms(), None);
    /// times.add(10);
    /// times.add(30);
    /// assert_eq!(times.mean_ms(), Some(20));
    /// ```
    #[must_use]
    pub fn mean_ms(&self) -> Option<i64> {
        self.sum_ms.checked_div(self.count())
    }

    /// The percentile `share` (0.95: p95), in milliseconds: exact to its bucket, in which times are
    /// assumed to be spread evenly, but not above what their sum allows. Beyond the last bound:
    /// that bound.
    ///
    /// ```
    /// # use fencepost_domain::histogram::Histogram;
    /// let mut times = Histogram::default();
    /// assert_eq!(times.quantile_ms(0.5), None);
    /// for _ in 0..100 {
    ///     times.add(80);
    /// }
    /// assert_eq!(times.quantile_ms(0.5), Some(75), "the middle of the bucket from 50 to 100");
    /// assert_eq!(times.quantile_ms(1.0), Some(100));
    /// times.add(4_000);
    /// assert_eq!(times.quantile_ms(1.0), Some(5_000), "the sum allows it");
    /// let mut one = Histogram::default();
    /// one.add(70_000);
    /// assert_eq!(one.quantile_ms(0.95), Some(70_000), "and not 120,000");
    /// ```
    #[must_use]
    pub fn quantile_ms(&self, share: f64) -> Option<i64> {
        let wanted = (share * self.count() as f64).max(1.0);
        let lower_bound = |number: usize| number.checked_sub(1).map_or(0, |it| BOUNDS_MS[it]);
        let numbered = || self.buckets.iter().enumerate();
        let least = numbered().map(|(number, many)| lower_bound(number).saturating_mul(*many));
        // No time exceeds its lower bound by more than all of them do together.
        let beyond = self.sum_ms.saturating_sub(least.fold(0, i64::saturating_add)).max(0);
        let mut before = 0;
        for (number, many) in numbered().filter(|(_, many)| **many > 0) {
            if (before + many) as f64 >= wanted {
                let lower = lower_bound(number);
                let upper = BOUNDS_MS.get(number).copied().unwrap_or(lower);
                let upper = upper.min(lower.saturating_add(beyond));
                let inside = (wanted - before as f64) / *many as f64;
                return Some(lower + ((upper - lower) as f64 * inside).round() as i64);
            }
            before += many;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(times_ms: &[i64]) -> Histogram {
        let mut all = Histogram::default();
        times_ms.iter().for_each(|it| all.add(*it));
        all
    }

    #[test]
    fn a_time_on_a_bound_is_within_it_and_a_negative_one_is_none() {
        for (number, bound) in BOUNDS_MS.into_iter().enumerate() {
            assert_eq!(of(&[bound]).buckets[number], 1, "{bound}");
            assert_eq!(of(&[bound + 1]).buckets[number + 1], 1, "{bound} and one");
        }
        assert_eq!(of(&[-5]), of(&[0]));
        assert_eq!(of(&[i64::MAX]).buckets[BUCKETS - 1], 1);
    }

    #[test]
    fn the_tail_is_where_the_slow_ones_are() {
        let mut times = vec![3; 98];
        times.extend([700, 90_000_000]);
        let times = of(&times);
        assert_eq!(times.quantile_ms(0.5), Some(4));
        assert_eq!(times.quantile_ms(0.99), Some(1_000));
        assert_eq!(times.quantile_ms(1.0), Some(86_400_000), "beyond the last bound");
    }

    #[test]
    fn two_halves_are_as_good_as_the_whole() {
        let mut half = of(&[1, 20, 300]);
        half.merge(&of(&[4_000, 50_000]));
        assert_eq!(half, of(&[1, 20, 300, 4_000, 50_000]));
        assert_eq!(Histogram::stored(half.sum_ms, &half.buckets), half);
        assert_eq!(Histogram::stored(7, &[1, 2]).count(), 3, "stored with fewer buckets");
    }
}
