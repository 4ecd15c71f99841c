//! What is described is what fires: words are read back, and compared with a second library.

use std::{collections::BTreeSet, sync::LazyLock};

use chrono::{DateTime, Datelike, TimeDelta, Timelike, Utc};
use proptest::prelude::*;
use regex::{Captures, Regex};

use super::*;
use crate::cron::parse;

fn words(expression: &str) -> String {
    in_words(&parse(expression).expect("it can be read"))
}

#[test]
fn what_the_second_library_cannot_read_is_described() {
    for (expression, expected) in [
        ("0 0 LW * *", "At 00:00, on the last weekday of the month"),
        ("0 0 L * *", "At 00:00, on the last day of the month"),
        ("0 0 1,L * *", "At 00:00, on day 1 of the month and the last day of the month"),
        ("0 0 15W * *", "At 00:00, on the weekday nearest to day 15 of the month"),
        ("0 0 * * 5L", "At 00:00, on the last Friday of the month"),
        ("0 0 * * FRI#2", "At 00:00, on the second Friday of the month"),
        ("0 0 * * 7#1", "At 00:00, on the first Sunday of the month"),
        ("0 0 * * 1,5#5", "At 00:00, on Monday and the fifth Friday of the month"),
        ("0 0 1-7 * +MON", "At 00:00, on days 1 to 7 of the month, only if it is Monday"),
        ("0 0 1 * +1,2", "At 00:00, on day 1 of the month, only if it is Monday or Tuesday"),
        ("0 0 13 * 5", "At 00:00, on day 13 of the month, or on Friday"),
        ("0 0 1-31 * 5", "At 00:00, every day"),
        ("0 0 1-31 * +5", "At 00:00, on Friday"),
        ("0 0 1-15 * +0-6", "At 00:00, on days 1 to 15 of the month"),
        ("* * * * * *", "Every second"),
        ("*/10 * * * * *", "Every 10 seconds"),
        ("5 * * * * *", "At second 5 of every minute"),
        ("30 0 3 * * *", "At 03:00:30, every day"),
        ("*/20 5 * * * *", "Every 20 seconds, in minute 5 of every hour"),
        ("7,8 5 3,4 * * *", "At seconds 7 and 8, in minute 5, in hours 3 and 4"),
        ("* * 9-17 * * 1-5", "Every second, in hours 9 to 17, on Monday to Friday"),
        ("@hourly", "At minute 0 of every hour"),
        ("0 0 * * 6,7", "At 00:00, on Saturday and Sunday"),
        ("0 0,12 1 1,7 *", "At 00:00 and 12:00, on day 1 of the month, in January and July"),
    ] {
        assert_eq!(words(expression), expected, "{expression}");
    }
}

#[test]
fn a_step_beside_another_value_is_not_the_step_alone() {
    let text = words("*/2,1 * * * *");
    assert!(text.starts_with("At minutes 0 to 2, 4, 6, "), "{text}");
    assert!(text.ends_with(", 56 and 58 of every hour"), "{text}");
    // The last time between two is shorter.
    assert_eq!(words("*/25 * * * *"), "At minutes 0, 25 and 50 of every hour");
}

/// The meaning of the words of an expression of five fields.
struct Reading {
    times: Vec<(u32, u32)>,
    days: Option<BTreeSet<u32>>,
    weekdays: Option<BTreeSet<u32>>,
    months: BTreeSet<u32>,
}

static FORM: LazyLock<Regex> = LazyLock::new(|| {
    let list = |item: &str| format!("{item}(?: to {item})?(?:(?:, | and ){item}(?: to {item})?)*");
    let (numbers, names, times) = (list(r"\d+"), list("[A-Z][a-z]+"), list(r"\d\d:\d\d"));
    Regex::new(&format!(
        "^(?:At (?<clock>{times})|Every (?:(?<every>\\d+) )?minutes?|At minutes? \
         (?<minutes>{numbers})(?: of every hour)?)(?:, in hours? (?<hours>{numbers}))?(?:, every \
         day)?(?:, on days? (?<days>{numbers}) of the month)?(?:,(?: or)? on \
         (?<weekdays>{names}))?(?:, in (?<months>{names}))?$"
    ))
    .expect("a form")
});

/// The values of a list, or `all` if it has none.
fn values(found: &Captures<'_>, name: &str, word: impl Fn(&str) -> u32) -> Option<BTreeSet<u32>> {
    let list = found.name(name)?.as_str().replace(" and ", ", ");
    let ranges = list.split(", ").map(|it| it.split_once(" to ").unwrap_or((it, it)));
    Some(ranges.flat_map(|(first, last)| word(first)..=word(last)).collect())
}

fn read(text: &str) -> Reading {
    let found = FORM.captures(text).unwrap_or_else(|| panic!("{text}"));
    let number = |it: &str| it.parse().expect("a number");
    let place = |names: &'static [&str]| {
        move |it: &str| names.iter().position(|name| *name == it).expect(it) as u32 + 1
    };
    let times = match found.name("clock") {
        Some(clock) => {
            let list = clock.as_str().replace(" and ", ", ");
            let times = list.split(", ").map(|it| it.split_once(':').expect("a time"));
            times.map(|(hour, minute)| (number(hour), number(minute))).collect()
        }
        None => {
            let every = found.name("every").map_or(1, |it| number(it.as_str()) as usize);
            let minutes = values(&found, "minutes", number);
            let minutes = minutes.unwrap_or_else(|| (0..60).step_by(every).collect());
            let hours = values(&found, "hours", number).unwrap_or_else(|| (0..24).collect());
            hours.iter().flat_map(|hour| minutes.iter().map(|it| (*hour, *it))).collect()
        }
    };
    Reading {
        times,
        days: values(&found, "days", number),
        weekdays: values(&found, "weekdays", place(&WEEKDAYS)),
        months: values(&found, "months", place(&MONTHS)).unwrap_or_else(|| (1..=12).collect()),
    }
}

impl Reading {
    fn has(&self, at: DateTime<Utc>) -> bool {
        let is_day = match (&self.days, &self.weekdays) {
            (None, None) => true,
            (days, weekdays) => {
                let weekday = at.weekday().number_from_monday();
                days.as_ref().is_some_and(|it| it.contains(&at.day()))
                    || weekdays.as_ref().is_some_and(|it| it.contains(&weekday))
            }
        };
        is_day
            && self.months.contains(&at.month())
            && self.times.contains(&(at.hour(), at.minute()))
    }
}

/// Parts of a field that are no `*`: cron of Vixie's kind takes a day field that begins with it for
/// one without a restriction.
fn part(min: u32, max: u32) -> impl Strategy<Value = String> {
    prop_oneof![
        (min..=max).prop_map(|it| it.to_string()),
        (min..=max, min..=max).prop_map(|(a, b)| format!("{}-{}", a.min(b), a.max(b))),
        (min..=max, min..=max, 1..max).prop_map(|(a, b, step)| format!(
            "{}-{}/{step}",
            a.min(b),
            a.max(b)
        )),
    ]
}

fn parts(min: u32, max: u32) -> impl Strategy<Value = String> {
    prop::collection::vec(part(min, max), 1..4).prop_map(|it| it.join(","))
}

fn field(min: u32, max: u32) -> impl Strategy<Value = String> {
    prop_oneof![
        2 => Just("*".to_owned()),
        1 => (2..max).prop_map(|it| format!("*/{it}")),
        1 => ((2..max), part(min, max)).prop_map(|(step, part)| format!("*/{step},{part}")),
        4 => parts(min, max),
    ]
}

fn day(min: u32, max: u32) -> impl Strategy<Value = String> {
    prop_oneof![Just("*".to_owned()), parts(min, max)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, ..ProptestConfig::default() })]

    #[test]
    fn what_is_described_is_what_fires_in_two_libraries(
        minute in field(0, 59), hour in field(0, 23), days in day(1, 28), month in field(1, 12),
        weekdays in day(0, 7), seconds in 1_700_000_000_i64..2_000_000_000,
        minutes in prop::collection::vec(0_i64..600_000, 8),
    ) {
        let expression = format!("{minute} {hour} {days} {month} {weekdays}");
        let cron = parse(&expression).expect("it can be read");
        let text = in_words(&cron);
        let reading = read(&text);
        let other = cronexpr::parse_crontab(&format!("{expression} UTC")).expect("it can be read");
        let fires = |at: DateTime<Utc>| other.matches(at.to_rfc3339().as_str()).expect("a time");
        let mut at = DateTime::from_timestamp(seconds - seconds % 60, 0).expect("a time");
        let mut looks: Vec<_> = minutes.iter().map(|it| at + TimeDelta::minutes(*it)).collect();
        for _ in 0..3 {
            let next = other.find_next(at.to_rfc3339().as_str()).expect("it fires").timestamp();
            at = cron.find_next_occurrence(&at, false).expect("it fires");
            prop_assert_eq!(at.timestamp(), next.as_second(), "{}", &expression);
            let around = [TimeDelta::minutes(1), TimeDelta::hours(1), TimeDelta::days(1)];
            looks.extend(around.iter().flat_map(|it| [at, at + *it, at - *it]));
        }
        for look in looks {
            prop_assert_eq!(reading.has(look), fires(look), "{}: {} at {}", &expression, &text, look);
        }
    }
}
