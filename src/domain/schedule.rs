//! When a schedule fires: its ticks, clock changes, missed ticks, and overlapping jobs.
//!
//! A schedule that names its hours follows local (wall-clock) time: a time that a clock change
//! skips fires at the first instant after it, and a time that occurs twice fires the first time
//! only. A schedule whose hour is `*` or `*/n` follows elapsed time: skipped times are not caught
//! up, and times that occur twice fire twice.

pub mod warning;

use std::collections::VecDeque;

use chrono::{
    DateTime, Datelike, LocalResult, NaiveDateTime, Offset, SecondsFormat, TimeDelta, TimeZone, Utc,
};
use croner::Cron;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    cron::{self, InvalidSchedule},
    zones::{Rules, Zone},
};

/// Ticks that are compared to find the shortest period: more than twice the seconds of a minute.
const PERIOD_TICKS: usize = 130;
/// Days in which they are looked for: every day of a year, and of the month after it.
const PERIOD_DAYS: i64 = 400;
/// A tick counts as missed after this many seconds: no node was running.
pub const GRACE_SECONDS: i64 = 30;
/// Missed ticks that are caught up, and recorded one by one.
pub const MAX_CATCH_UP: usize = 100;
/// Missed ticks that are counted; of more, only the last ones are examined.
const MAX_COUNTED_TICKS: u64 = 10_000;
/// Days ahead in which clock changes are searched.
const NOTES_DAYS: i64 = 366;
/// Longest time that a clock change repeats, in hours: three, in Antarctica (Casey).
const MAX_REPEATED_HOURS: i64 = 3;

/// The reason for which an expression with a `?` and numbers of weekdays is refused.
const OTHER_WEEKDAYS: &str = "has a `?` and numbers of weekdays, which Quartz and AWS count from 1 \
     for Sunday: write names, such as MON-FRI, or `*` instead of `?`";

/// A cron expression in a time zone.
#[derive(Debug, Clone)]
pub struct Schedule {
    cron: Cron,
    zone: Zone,
    follows_the_wall: bool,
    /// As it was sent: messages repeat its parts.
    expression: Box<str>,
}

/// Policy for a tick while the job of an earlier one has not ended.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, sqlx::Type, ToSchema,
)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum OverlapPolicy {
    /// Create another job.
    #[default]
    Allow,
    /// Create none.
    Skip,
    /// Create a job that waits for the earlier one; none if one waits already.
    QueueOne,
    /// Cancel the earlier jobs and create another one.
    CancelPrevious,
}

/// Policy for missed ticks.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, sqlx::Type, ToSchema,
)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum CatchUp {
    /// Nothing.
    None,
    /// Fire the last one.
    #[default]
    One,
    /// Fire all, at most the last 100.
    All,
}

/// The outcome of a tick.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, sqlx::Type, ToSchema)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum FireOutcome {
    /// Its job was created.
    Fired,
    /// The job of an earlier tick had not ended.
    SkippedOverlap,
    /// Missed: no node was running, or the project was suspended.
    Missed,
    /// Not a tick: a job created by request.
    Manual,
}

impl FireOutcome {
    /// The name of the outcome.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fired => "fired",
            Self::SkippedOverlap => "skipped_overlap",
            Self::Missed => "missed",
            Self::Manual => "manual",
        }
    }
}

/// Jobs of earlier ticks that have not ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Earlier {
    /// Whether one waits.
    pub waits: bool,
    /// Whether one runs.
    pub runs: bool,
}

impl OverlapPolicy {
    /// Whether a tick fires.
    ///
    /// ```
    /// # use fencepost_domain::schedule::{Earlier, OverlapPolicy::*};
    /// let (none, runs) = (Earlier::default(), Earlier { waits: false, runs: true });
    /// let both = Earlier { waits: true, runs: true };
    /// assert!(Skip.fires(none) && !Skip.fires(runs));
    /// assert!(QueueOne.fires(runs) && !QueueOne.fires(both));
    /// assert!(Allow.fires(both) && CancelPrevious.fires(both));
    /// ```
    #[must_use]
    pub fn fires(self, earlier: Earlier) -> bool {
        match self {
            Self::Allow | Self::CancelPrevious => true,
            Self::Skip => !earlier.waits && !earlier.runs,
            Self::QueueOne => !earlier.waits,
        }
    }
}

/// The ticks of a time range, and what to do with them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DueTicks {
    /// Oldest first.
    pub fire: Vec<DateTime<Utc>>,
    /// Oldest first: the last ones, at most [`MAX_CATCH_UP`] and one.
    pub missed: Vec<DateTime<Utc>>,
    /// Missed ticks before these.
    pub missed_before: u64,
}

impl DueTicks {
    /// The same, with none to fire.
    #[must_use]
    pub fn all_missed(mut self) -> Self {
        self.missed.append(&mut self.fire);
        self.missed.sort();
        self
    }
}

impl Schedule {
    /// Parses a schedule, whose zone has these rules.
    ///
    /// # Errors
    /// [`InvalidSchedule`].
    pub fn parse(expression: &str, timezone: &str, rules: &Rules) -> Result<Self, InvalidSchedule> {
        let cron = cron::parse(expression)?;
        let zone = rules.zone(timezone)?;
        Ok(Self {
            cron,
            zone,
            follows_the_wall: cron::names_hours(expression),
            expression: expression.into(),
        })
    }

    /// The first tick after a time.
    ///
    /// # Errors
    /// [`InvalidSchedule::Never`].
    pub fn next_after(&self, after: DateTime<Utc>) -> Result<DateTime<Utc>, InvalidSchedule> {
        self.next_with_note(after).map(|(tick, _)| tick)
    }

    fn next_with_note(
        &self,
        after: DateTime<Utc>,
    ) -> Result<(DateTime<Utc>, Option<ClockChange>), InvalidSchedule> {
        if !self.follows_the_wall {
            let local = after.with_timezone(&self.zone);
            let next = self.cron.find_next_occurrence(&local, false);
            let next = next.map_err(|_| InvalidSchedule::Never)?;
            let is_twice = matches!(
                self.zone.from_local_datetime(&next.naive_local()),
                LocalResult::Ambiguous(..)
            );
            return Ok((next.to_utc(), is_twice.then_some(ClockChange::Twice)));
        }
        let mut wall = after.with_timezone(&self.zone).naive_local();
        loop {
            // Wall-clock time has no clock changes: as in UTC.
            let next = self.cron.find_next_occurrence(&wall.and_utc(), false);
            wall = next.map_err(|_| InvalidSchedule::Never)?.naive_utc();
            let (tick, change) = match self.zone.from_local_datetime(&wall) {
                LocalResult::Single(tick) => (tick.to_utc(), None),
                LocalResult::Ambiguous(first, _) => (first.to_utc(), Some(ClockChange::Once)),
                LocalResult::None => (self.end_of_gap(wall), Some(ClockChange::Skipped)),
            };
            if tick > after {
                return Ok((tick, change));
            }
        }
    }

    /// The first instant after the gap that contains this local time.
    fn end_of_gap(&self, wall: NaiveDateTime) -> DateTime<Utc> {
        // No zone has ever skipped more than a day.
        let day = TimeDelta::hours(25);
        let (mut before, mut after) = (wall.and_utc() - day - day, wall.and_utc() + day + day);
        let is_past = |it: DateTime<Utc>| it.with_timezone(&self.zone).naive_local() > wall;
        while after - before > TimeDelta::seconds(1) {
            let middle = before + TimeDelta::seconds((after - before).num_seconds() / 2);
            if is_past(middle) { after = middle } else { before = middle }
        }
        after
    }

    /// The next ticks after a time, with the effect of clock changes.
    ///
    /// # Errors
    /// [`InvalidSchedule::Never`] when there is none.
    pub fn preview(
        &self,
        after: DateTime<Utc>,
        count: usize,
    ) -> Result<Vec<PreviewedTick>, InvalidSchedule> {
        let (mut ticks, mut at) = (Vec::with_capacity(count), after);
        while ticks.len() < count {
            match self.next_with_note(at) {
                Ok((tick, change)) => {
                    at = tick;
                    let local = tick.with_timezone(&self.zone);
                    let note = change.map(|it| it.in_words().to_owned());
                    let local = local.to_rfc3339_opts(SecondsFormat::Secs, false);
                    ticks.push(PreviewedTick { at: tick, local, note });
                }
                Err(error) if ticks.is_empty() => return Err(error),
                Err(_) => break,
            }
        }
        Ok(ticks)
    }

    /// The shortest time between two of the first ticks after a time; none if it fires only once.
    ///
    /// # Errors
    /// As for [`cron::check_parts`]: it does not fire, or a part of it never matches. Or its
    /// weekdays mean other days than where it comes from.
    pub fn period(&self, after: DateTime<Utc>) -> Result<Option<TimeDelta>, InvalidSchedule> {
        if cron::counts_weekdays_otherwise(&self.expression) {
            return Err(InvalidSchedule::Cron(OTHER_WEEKDAYS.to_owned()));
        }
        // Before any tick is looked for: that would go on to the end of time.
        let today = after.with_timezone(&self.zone).date_naive();
        cron::check_parts(&self.expression, &self.cron, today)?;
        let first = self.next_after(after)?;
        let (mut last, mut shortest) = (first, None::<TimeDelta>);
        for _ in 0..PERIOD_TICKS {
            let Ok(next) = self.next_after(last) else { break };
            shortest = Some(shortest.map_or(next - last, |it| it.min(next - last)));
            last = next;
            if last - first > TimeDelta::days(PERIOD_DAYS) {
                break;
            }
        }
        Ok(shortest)
    }

    /// The ticks to fire after a time, until `now`, and the missed ones. If the oldest is within
    /// its grace, all fire. Otherwise ticks were missed, and `catch_up` decides about all of them;
    /// the newest fires in any case if it is within its own grace.
    #[must_use]
    pub fn due(&self, after: DateTime<Utc>, now: DateTime<Utc>, catch_up: CatchUp) -> DueTicks {
        let (mut newest, mut all, mut at) = (VecDeque::new(), 0_u64, after);
        let mut is_late = false;
        while let Ok(tick) = self.next_after(at) {
            if tick > now {
                break;
            }
            if all == MAX_COUNTED_TICKS {
                // The kept ticks cover about this range.
                let period = (at - after) / i32::try_from(all).unwrap_or(i32::MAX);
                let far = now - period * (MAX_CATCH_UP as i32 * 2);
                if far > at {
                    (at, all) = (far, all + 1);
                    continue;
                }
            }
            is_late |= all == 0 && now - tick > TimeDelta::seconds(GRACE_SECONDS);
            if newest.len() > MAX_CATCH_UP {
                newest.pop_front();
            }
            newest.push_back(tick);
            (at, all) = (tick, all + 1);
        }
        let is_fresh = |it: &DateTime<Utc>| now - *it <= TimeDelta::seconds(GRACE_SECONDS);
        let fire = match catch_up {
            _ if !is_late => newest.len(),
            CatchUp::None => usize::from(newest.back().is_some_and(is_fresh)),
            CatchUp::One => 1,
            CatchUp::All => MAX_CATCH_UP,
        };
        let mut missed: Vec<_> = newest.into();
        let fire = missed.split_off(missed.len().saturating_sub(fire));
        let kept = (fire.len() + missed.len()) as u64;
        DueTicks { fire, missed, missed_before: all - kept }
    }

    /// The effects of the next year's clock changes.
    #[must_use]
    pub fn clock_changes(&self, from: DateTime<Utc>) -> Vec<String> {
        let offset = |at: DateTime<Utc>| at.with_timezone(&self.zone).offset().fix();
        let mut notes = Vec::new();
        for day in 0..NOTES_DAYS {
            let (start, end) = (from + TimeDelta::days(day), from + TimeDelta::days(day + 1));
            if offset(start) == offset(end) {
                continue;
            }
            if let Some(wall) = self.lost(start, end) {
                notes.push(format!(
                    "{}: a clock change skips {}: the schedule does not fire",
                    wall.date(),
                    wall.time()
                ));
            }
            // What is repeated begins before the change, perhaps before this day's begin.
            let mut at = from.max(start - TimeDelta::hours(MAX_REPEATED_HOURS));
            while let Ok((tick, change)) = self.next_with_note(at) {
                if tick > end {
                    break;
                }
                at = tick;
                let Some(change) = change else { continue };
                let local = tick.with_timezone(&self.zone);
                let (year, month, day) = (local.year(), local.month(), local.day());
                notes.push(format!("{year}-{month:02}-{day:02}: {}", change.in_words()));
                break;
            }
        }
        notes
    }

    /// The first local time that a clock change between two times skips, and that fires at no other
    /// time.
    fn lost(&self, start: DateTime<Utc>, end: DateTime<Utc>) -> Option<NaiveDateTime> {
        if self.follows_the_wall {
            return None;
        }
        let mut wall = start.with_timezone(&self.zone).naive_local();
        let last = end.with_timezone(&self.zone).naive_local();
        loop {
            wall = self.cron.find_next_occurrence(&wall.and_utc(), false).ok()?.naive_utc();
            if wall >= last {
                return None;
            }
            if matches!(self.zone.from_local_datetime(&wall), LocalResult::None) {
                return Some(wall);
            }
        }
    }

    /// The expression in words.
    #[must_use]
    pub fn in_words(&self) -> String {
        cron::in_words(&self.cron)
    }
}

/// The effect of a clock change on a tick.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClockChange {
    Skipped,
    Once,
    Twice,
}

impl ClockChange {
    fn in_words(self) -> &'static str {
        match self {
            Self::Skipped => "skipped by a clock change: fires at the first instant after it",
            Self::Once => "occurs twice: fires the first time only",
            Self::Twice => "occurs twice: fires both times",
        }
    }
}

/// A future tick.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreviewedTick {
    /// Time of the tick.
    pub at: DateTime<Utc>,
    /// The same in its zone.
    pub local: String,
    /// The effect of a clock change.
    pub note: Option<String>,
}

/// How much later than its tick a schedule's job starts: constant for a schedule and below
/// `spread_seconds`, so that schedules do not all start at once.
///
/// ```
/// # use fencepost_domain::schedule::offset_seconds;
/// assert_eq!(offset_seconds("rjob_a", 0), 0);
/// assert_eq!(offset_seconds("rjob_a", 60), offset_seconds("rjob_a", 60));
/// assert!((0..60).contains(&offset_seconds("rjob_b", 60)));
/// ```
#[must_use]
pub fn offset_seconds(schedule_id: &str, spread_seconds: i32) -> i32 {
    use sha2::{Digest, Sha256};
    let hash = Sha256::digest(schedule_id.as_bytes());
    let number = hash.first_chunk::<4>().map_or(0, |it| u32::from_be_bytes(*it));
    let spread = u32::try_from(spread_seconds).unwrap_or(0).max(1);
    i32::try_from(number % spread).unwrap_or(0)
}

#[cfg(test)]
mod tests;
