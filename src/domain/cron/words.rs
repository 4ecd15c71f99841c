//! A cron expression in words. They are made of the values that fire, not of the text, so that
//! `*/2,1` reads as what it does.

use croner::{Cron, CronComponent, CronPattern};

/// More times of a day are described by their hours and minutes.
const MAX_TIMES: usize = 6;
/// Fewer values in a row are named one by one.
const MIN_RUN: usize = 3;
/// Mark of `croner` on a value of a field: the last such day of the month.
const LAST: u8 = 1 << 6;
/// Mark of `croner` on a day of the month: the weekday that is nearest to it.
const NEAREST: u8 = 1 << 7;
const NTH: [&str; 5] = ["first", "second", "third", "fourth", "fifth"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// Sunday comes last.
pub(super) const WEEKDAYS: [&str; 7] =
    ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// An expression in words.
///
/// ```
/// # use fencepost_domain::cron::{in_words, parse};
/// let words = |it| in_words(&parse(it).unwrap());
/// assert_eq!(words("@daily"), "At 00:00, every day");
/// assert_eq!(words("0 7 * * MON-FRI"), "At 07:00, on Monday to Friday");
/// assert_eq!(words("*/15 9-17 * jan *"), "Every 15 minutes, in hours 9 to 17, in January");
/// assert_eq!(words("5 * 1 * *"), "At minute 5 of every hour, on day 1 of the month");
/// assert_eq!(words("0 0 LW * *"), "At 00:00, on the last weekday of the month");
/// ```
#[must_use]
pub fn in_words(cron: &Cron) -> String {
    let pattern = &cron.pattern;
    let months = numbers(&pattern.months);
    let (mut text, is_clock) = match clock(pattern) {
        Some(times) => (format!("At {times}"), true),
        None => (frequency(pattern), false),
    };
    match days(pattern) {
        Some(days) => text += &format!(", on {days}"),
        None if is_clock => text += ", every day",
        None => (),
    }
    if months.len() < MONTHS.len() {
        let names = list(&months, |it| name(&MONTHS, it - 1));
        text += &format!(", in {names}");
    }
    text
}

/// The values of a field that fire.
pub(super) fn numbers(field: &CronComponent) -> Vec<usize> {
    marked(field, 1)
}

/// The values of a field that have a mark.
fn marked(field: &CronComponent, mark: u8) -> Vec<usize> {
    field.get_set_values(mark).into_iter().map(usize::from).collect()
}

fn name(names: &[&str], place: usize) -> String {
    names.get(place).copied().unwrap_or_default().to_owned()
}

/// The times of a day, if they are few.
fn clock(pattern: &CronPattern) -> Option<String> {
    let (hours, minutes) = (numbers(&pattern.hours), numbers(&pattern.minutes));
    let [second] = numbers(&pattern.seconds)[..] else { return None };
    if hours.len() * minutes.len() > MAX_TIMES {
        return None;
    }
    let seconds = if second == 0 { String::new() } else { format!(":{second:02}") };
    let times = hours.iter().flat_map(|hour| {
        let at = |minute: &usize| format!("{hour:02}:{minute:02}{seconds}");
        minutes.iter().map(at).collect::<Vec<_>>()
    });
    Some(join(times.collect()))
}

/// The times of a day by its hours and minutes.
fn frequency(pattern: &CronPattern) -> String {
    let seconds = Unit { name: "second", field: &pattern.seconds };
    let minutes = Unit { name: "minute", field: &pattern.minutes };
    let hours = Unit { name: "hour", field: &pattern.hours };
    match (numbers(&pattern.seconds)[..] == [0], minutes.is_all()) {
        (true, _) => minutes.words() + &hours.around(&minutes),
        (false, true) => seconds.words() + &minutes.around(&seconds) + &hours.within(),
        (false, false) if hours.is_all() => {
            format!("{}{} of every hour", seconds.words(), minutes.within())
        }
        (false, false) => seconds.words() + &minutes.within() + &hours.within(),
    }
}

/// A field of the time of day.
struct Unit<'a> {
    name: &'static str,
    field: &'a CronComponent,
}

impl Unit<'_> {
    fn len(&self) -> usize {
        usize::from(self.field.max - self.field.min) + 1
    }

    fn is_all(&self) -> bool {
        numbers(self.field).len() == self.len()
    }

    /// The constant time between two values, also from the last to the first.
    fn period(&self) -> Option<usize> {
        let values = numbers(self.field);
        let period = self.len() / values.len().max(1);
        let is_even = values.iter().enumerate().all(|(place, it)| *it == place * period);
        (values.len() > 1 && is_even && period * values.len() == self.len()).then_some(period)
    }

    /// The values at the begin of a sentence.
    fn words(&self) -> String {
        match self.period() {
            Some(1) => format!("Every {}", self.name),
            Some(period) => format!("Every {period} {}s", self.name),
            None => format!("At {}", self.listed()),
        }
    }

    fn listed(&self) -> String {
        let values = numbers(self.field);
        let plural = if values.len() == 1 { "" } else { "s" };
        format!("{}{plural} {}", self.name, list(&values, |it| it.to_string()))
    }

    /// The values, after those of a shorter unit.
    fn within(&self) -> String {
        if self.is_all() { String::new() } else { format!(", in {}", self.listed()) }
    }

    /// The same right after the shorter unit. If that is a list, and this unit is all, it says "of
    /// every hour": "At minute 5 of every hour".
    fn around(&self, shorter: &Self) -> String {
        if self.is_all() && shorter.period().is_none() {
            format!(" of every {}", self.name)
        } else {
            self.within()
        }
    }
}

/// The days on which it fires. None: on all.
fn days(pattern: &CronPattern) -> Option<String> {
    let of_month = (!pattern.is_dom_wildcard()).then(|| days_of_month(&pattern.days));
    let of_week = (!pattern.is_dow_wildcard()).then(|| days_of_week(&pattern.days_of_week));
    match (of_month, of_week) {
        (None, None) => None,
        (Some(days), None) | (None, Some(days)) => days,
        (Some(of_month), Some(of_week)) => match (of_month, of_week) {
            (Some(of_month), Some(of_week)) if pattern.matches_dom_and_dow() => {
                let of_week = of_week.replace(" and ", " or ");
                Some(format!("{of_month}, only if it is {of_week}"))
            }
            (Some(of_month), Some(of_week)) => Some(format!("{of_month}, or on {of_week}")),
            // One of them has all days.
            (of_month, of_week) if pattern.matches_dom_and_dow() => of_month.or(of_week),
            _ => None,
        },
    }
}

/// Days of the month. None: all.
fn days_of_month(field: &CronComponent) -> Option<String> {
    let (days, near) = (numbers(field), marked(field, NEAREST));
    if days.len() == usize::from(field.max) {
        return None;
    }
    let mut parts = Vec::new();
    if !days.is_empty() {
        let plural = if days.len() == 1 { "" } else { "s" };
        parts.push(format!("day{plural} {} of the month", list(&days, |it| it.to_string())));
    }
    parts.extend(near.iter().map(|it| format!("the weekday nearest to day {it} of the month")));
    let is_weekday = field.is_feature_enabled(NEAREST);
    if field.is_feature_enabled(LAST) {
        let last = if is_weekday { "the last weekday" } else { "the last day" };
        parts.push(format!("{last} of the month"));
    }
    Some(join(parts))
}

/// Days of the week. None: all.
fn days_of_week(field: &CronComponent) -> Option<String> {
    let sunday_last = |days: Vec<usize>| {
        let mut days: Vec<_> = days.into_iter().map(|it| (it + 6) % WEEKDAYS.len()).collect();
        days.sort_unstable();
        list(&days, |it| name(&WEEKDAYS, it))
    };
    let days = numbers(field);
    if days.len() == WEEKDAYS.len() {
        return None;
    }
    let mut parts = Vec::new();
    if !days.is_empty() {
        parts.push(sunday_last(days));
    }
    let nth = NTH.iter().enumerate().map(|(place, nth)| (1 << (place + 1), *nth));
    for (mark, which) in nth.chain([(LAST, "last")]) {
        let days = marked(field, mark);
        if !days.is_empty() {
            parts.push(format!("the {which} {} of the month", sunday_last(days)));
        }
    }
    Some(join(parts))
}

/// Values in words; those in a row as the first and the last of them.
fn list(values: &[usize], word: impl Fn(usize) -> String) -> String {
    let runs = values.chunk_by(|a, b| a + 1 == *b);
    let words = runs.flat_map(|run| match (run.first(), run.last()) {
        (Some(first), Some(last)) if run.len() >= MIN_RUN => {
            vec![format!("{} to {}", word(*first), word(*last))]
        }
        _ => run.iter().map(|it| word(*it)).collect(),
    });
    join(words.collect())
}

fn join(mut words: Vec<String>) -> String {
    match words.pop() {
        Some(last) if words.is_empty() => last,
        Some(last) => format!("{} and {last}", words.join(", ")),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests;
