//! What a project uses, as a bill would count it.

use std::ops::AddAssign;

use chrono::NaiveDate;

/// Amounts of a project in some time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)] // The names say it; comments stand where they do not.
pub struct Used {
    pub enqueued: i64,
    /// Attempts that began.
    pub claimed: i64,
    pub succeeded: i64,
    pub dead_lettered: i64,
    /// Calls of the API.
    pub requests: i64,
    /// Time that polls of workers took, in milliseconds.
    pub poll_ms: i64,
    /// Bytes of stored logs.
    pub log_bytes: i64,
    /// Stored bytes, looked at once an hour.
    pub byte_hours: i64,
}

impl Used {
    /// Time that polls of workers took, in whole seconds.
    #[must_use]
    pub const fn poll_seconds(&self) -> i64 {
        self.poll_ms / 1_000
    }
}

impl AddAssign for Used {
    fn add_assign(&mut self, more: Self) {
        self.enqueued += more.enqueued;
        self.claimed += more.claimed;
        self.succeeded += more.succeeded;
        self.dead_lettered += more.dead_lettered;
        self.requests += more.requests;
        self.poll_ms += more.poll_ms;
        self.log_bytes += more.log_bytes;
        self.byte_hours += more.byte_hours;
    }
}

/// The first day of a month, as in `2026-11`.
#[must_use]
pub fn month(text: &str) -> Option<NaiveDate> {
    let (year, month) = text.split_once('-')?;
    let is_whole = year.len() == 4 && month.len() == 2 && !text.contains('+');
    let (year, month) = (year.parse().ok()?, month.parse().ok()?);
    NaiveDate::from_ymd_opt(year, month, 1).filter(|_| is_whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_month_has_four_and_two_digits() {
        assert_eq!(month("2026-11"), NaiveDate::from_ymd_opt(2026, 11, 1));
        for junk in ["", "2026", "2026-13", "2026-1", "26-11", "2026-11-01", "x-y", "+026-11"] {
            assert_eq!(month(junk), None, "{junk}");
        }
    }
}
