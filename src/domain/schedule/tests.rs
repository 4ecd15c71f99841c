//! When schedules fire, compared with the wall clock minute by minute.

use std::{collections::BTreeMap, sync::LazyLock};

use chrono::{NaiveDate, NaiveTime, Timelike};
use proptest::prelude::*;

use super::*;

/// Zones with unusual clock changes, and a year in which they happen.
const ZONES: &[(&str, i32)] = &[
    ("America/New_York", 2026),
    ("Europe/Berlin", 2026),
    // Half an hour.
    ("Australia/Lord_Howe", 2026),
    // The 30th of December never happened.
    ("Pacific/Apia", 2011),
    // Back for Ramadan, and at its end forth again.
    ("Africa/Casablanca", 2026),
    // Midnight does not exist.
    ("America/Sao_Paulo", 2018),
    ("Asia/Beirut", 2026),
    // One minute past midnight.
    ("America/St_Johns", 2010),
    ("Pacific/Chatham", 2026),
    // Two hours.
    ("Antarctica/Troll", 2026),
    ("Asia/Tehran", 2022),
    // The clock never changes.
    ("Asia/Kathmandu", 2026),
];
const EXPRESSIONS: &[&str] = &[
    "30 2 * * *",
    "0 0 * * *",
    "15 1 * * *",
    "*/20 1-3 * * *",
    "0,30 0,2 * * *",
    "10 0-23 * * *",
    "*/15 * * * *",
    "5 */2 * * *",
    "0 9 30 12 *",
    "@hourly",
    "@daily",
    "@weekly",
];
static RULES: LazyLock<Rules> = LazyLock::new(Rules::embedded);

fn parse(expression: &str, timezone: &str) -> Schedule {
    Schedule::parse(expression, timezone, &RULES).expect("it can be read")
}

const MINUTE: TimeDelta = TimeDelta::minutes(1);

/// Minutes around which the zone's clock changes, at least one.
fn windows(zone: &Zone, year: i32) -> Vec<(DateTime<Utc>, DateTime<Utc>)> {
    let start = NaiveDate::from_ymd_opt(year, 1, 1).expect("a day").and_time(NaiveTime::default());
    let hours = (0..366 * 24).map(|it| start.and_utc() + TimeDelta::hours(it));
    let offset = |at: DateTime<Utc>| at.with_timezone(zone).offset().fix();
    let changes = hours.filter(|it| offset(*it) != offset(*it + TimeDelta::hours(1)));
    let around = |it: DateTime<Utc>| (it - TimeDelta::days(2), it + TimeDelta::days(2));
    let windows: Vec<_> = changes.map(around).collect();
    if windows.is_empty() { vec![around(start.and_utc())] } else { windows }
}

/// Minute by minute: the local time, and whether the expression matches it.
fn oracle(
    expression: &str,
    zone: &Zone,
    from: DateTime<Utc>,
    until: DateTime<Utc>,
) -> Vec<DateTime<Utc>> {
    let cron = cron::parse(expression).expect("it can be read");
    let matches = |wall: NaiveDateTime| cron.is_time_matching(&wall.and_utc()).expect("a time");
    let margin = TimeDelta::days(2);
    let mut first_shown = BTreeMap::new();
    let (mut ticks, mut at) = (Vec::new(), from - margin);
    while at <= until + margin {
        let wall = at.with_timezone(zone).naive_local();
        first_shown.entry(wall).or_insert(at);
        if !cron::names_hours(expression) && matches(wall) {
            ticks.push(at);
        }
        at += MINUTE;
    }
    if cron::names_hours(expression) {
        let (mut wall, last) = (
            (from - margin).with_timezone(zone).naive_local(),
            (until + margin).with_timezone(zone).naive_local(),
        );
        while wall < last {
            if matches(wall) {
                // Shown for the first time, or skipped: then the next local time counts.
                ticks.extend(first_shown.range(wall..).next().map(|it| *it.1));
            }
            wall += MINUTE;
        }
    }
    ticks.retain(|it| *it > from && *it <= until);
    ticks.sort();
    ticks.dedup();
    ticks
}

#[test]
fn ticks_are_those_that_a_look_at_the_wall_every_minute_finds() {
    for (name, year) in ZONES {
        let zone = RULES.zone(name).expect("a zone");
        for (from, until) in windows(&zone, *year) {
            for expression in EXPRESSIONS {
                let schedule = parse(expression, name);
                let (mut ticks, mut at) = (Vec::new(), from);
                loop {
                    at = schedule.next_after(at).expect("it fires again");
                    if at > until {
                        break;
                    }
                    ticks.push(at);
                }
                let expected = oracle(expression, &zone, from, until);
                assert_eq!(ticks, expected, "{expression} in {name} after {from}");
            }
        }
    }
}

fn at(text: &str) -> DateTime<Utc> {
    text.parse().expect("a time")
}

fn next(expression: &str, zone: &str, after: &str) -> DateTime<Utc> {
    let schedule = parse(expression, zone);
    schedule.next_after(at(after)).expect("it fires")
}

#[test]
fn a_time_that_the_clock_skips_fires_at_the_first_instant_after_it() {
    let berlin = next("30 2 * * *", "Europe/Berlin", "2026-03-29T00:00:00Z");
    assert_eq!(berlin, at("2026-03-29T01:00:00Z"), "03:00 on the wall");
    // A whole day was skipped: its ticks fire when the next day begins.
    let apia = next("0 9 30 12 *", "Pacific/Apia", "2011-12-30T00:00:00Z");
    assert_eq!(apia, at("2011-12-30T10:00:00Z"), "midnight of the 31st");
    let lord_howe = next("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T00:00:00Z");
    assert_eq!(lord_howe, at("2026-10-03T15:30:00Z"), "02:30 on the wall");
}

#[test]
fn a_time_that_happens_twice_fires_the_first_time_only() {
    let first = next("30 1 * * *", "America/New_York", "2026-11-01T00:00:00Z");
    assert_eq!(first, at("2026-11-01T05:30:00Z"));
    let second = next("30 1 * * *", "America/New_York", "2026-11-01T05:30:00Z");
    assert_eq!(second, at("2026-11-02T06:30:00Z"));
    let hourly = next("30 * * * *", "America/New_York", "2026-11-01T05:30:00Z");
    assert_eq!(hourly, at("2026-11-01T06:30:00Z"), "every hour that passes");
}

#[test]
fn schedule_reports_the_effect_of_clock_changes() {
    let schedule = parse("30 2 * * *", "Europe/Berlin");
    let notes = schedule.clock_changes(at("2026-01-01T00:00:00Z"));
    assert_eq!(
        notes,
        [
            "2026-03-29: skipped by a clock change: fires at the first instant after it",
            "2026-10-25: occurs twice: fires the first time only",
        ]
    );
    // At whatever time of the day it is asked.
    for minutes in (0..1_440).step_by(15) {
        let asked = at("2026-01-01T00:00:00Z") + TimeDelta::minutes(minutes);
        assert_eq!(schedule.clock_changes(asked), notes, "{asked}");
    }
    let hourly = parse("30 * * * *", "Europe/Berlin");
    assert_eq!(
        hourly.clock_changes(at("2026-01-01T00:00:00Z")),
        [
            "2026-03-29: a clock change skips 02:30:00: the schedule does not fire",
            "2026-10-25: occurs twice: fires both times",
        ]
    );
    let midday = parse("0 12 * * *", "Europe/Berlin");
    assert!(midday.clock_changes(at("2026-01-01T00:00:00Z")).is_empty());
    let ticks = schedule.preview(at("2026-03-28T12:00:00Z"), 2).expect("it fires");
    assert_eq!(ticks[0].local, "2026-03-29T03:00:00+02:00");
    assert!(ticks[0].note.is_some() && ticks[1].note.is_none());
}

#[test]
fn how_close_ticks_lie_together_is_found() {
    let period = |expression| {
        let schedule = parse(expression, "UTC");
        schedule.period(at("2026-01-01T00:00:00Z")).map(|it| it.map(|it| it.num_seconds()))
    };
    assert_eq!(period("* * * * * *"), Ok(Some(1)));
    assert_eq!(period("0,5 0 0 1 1 *"), Ok(Some(5)));
    assert_eq!(period("59 59 23 * * *"), Ok(Some(86_400)));
    assert_eq!(period("0,59 * * * *"), Ok(Some(60)));
    assert_eq!(period("0 0 29 2 *"), Ok(Some(4 * 365 * 86_400 + 86_400)));
    let of_quartz = period("0 0 12 ? * 2-6").expect_err("other days").to_string();
    assert!(of_quartz.contains("MON-FRI"), "{of_quartz}");
    for never in ["0 0 31 2 *", "0 0 30 2 *", "*/5 * * 31 4,6,9,11 *"] {
        assert_eq!(period(never), Err(InvalidSchedule::Never), "{never}");
    }
}

#[test]
fn the_last_day_of_a_month_and_the_first_of_a_week_are_days() {
    for expression in ["0 0 L 2 *", "0 0 * * 1#1", "0 0 15W * *", "@yearly", "0 12 31 12 5"] {
        let schedule = parse(expression, "Asia/Kathmandu");
        assert!(schedule.period(at("2099-06-01T00:00:00Z")).is_ok(), "{expression}");
    }
}

#[test]
fn ticks_within_their_grace_all_fire_and_older_ones_as_the_schedule_says() {
    let schedule = parse("* * * * * *", "UTC");
    let now = at("2026-01-01T00:00:00Z");
    let due = |seconds: i64, catch_up| {
        let due = schedule.due(now - TimeDelta::seconds(seconds), now, catch_up);
        (due.fire.len(), due.missed.len(), due.missed_before)
    };
    assert_eq!(due(GRACE_SECONDS, CatchUp::None), (30, 0, 0));
    assert_eq!(due(60, CatchUp::None), (1, 59, 0));
    assert_eq!(due(60, CatchUp::One), (1, 59, 0));
    assert_eq!(due(60, CatchUp::All), (60, 0, 0));
    assert_eq!(due(1_000, CatchUp::All), (100, 1, 899));
    assert_eq!(due(1_000, CatchUp::One), (1, 100, 899));
    let (fired, missed, before) = due(10_000_000, CatchUp::One);
    assert_eq!((fired, missed), (1, 100), "the last, though not all were counted");
    assert!(before >= MAX_COUNTED_TICKS - 100);
    let last = schedule.due(now - TimeDelta::days(100), now, CatchUp::One);
    assert_eq!(last.fire, [now]);
    let daily = parse("0 12 * * *", "UTC");
    let late = daily.due(now - TimeDelta::days(3), now, CatchUp::None);
    assert_eq!((late.fire.len(), late.missed.len()), (0, 3));
    assert_eq!(daily.due(now - TimeDelta::days(3), now, CatchUp::One).fire.len(), 1);
    assert_eq!(daily.due(now, now, CatchUp::All), DueTicks::default());
}

fn field(max: u32) -> impl Strategy<Value = String> {
    prop_oneof![
        Just("*".to_owned()),
        (0..max).prop_map(|it| it.to_string()),
        (1..max).prop_map(|it| format!("*/{it}")),
        (0..max, 0..max).prop_map(|(a, b)| format!("{}-{}", a.min(b), a.max(b))),
        (0..max, 0..max).prop_map(|(a, b)| format!("{a},{b}")),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn ticks_go_forward_and_nothing_lies_between_them(
        minute in field(60), hour in field(24), zone in prop::sample::select(ZONES),
        seconds in 0_i64..4_000_000_000,
    ) {
        let expression = format!("{minute} {hour} * * *");
        let schedule = parse(&expression, zone.0);
        let after = DateTime::from_timestamp(seconds, 0).expect("a time");
        let first = schedule.next_after(after).expect("it fires");
        prop_assert!(first > after);
        prop_assert!(first - after <= TimeDelta::hours(24 + 25));
        // From any instant in between, the next tick is the same.
        let middle = after + (first - after) / 2;
        prop_assert_eq!(schedule.next_after(middle).expect("it fires"), first);
        prop_assert_eq!(first.second(), 0);
    }

    #[test]
    fn due_ticks_are_returned_once_and_none_is_lost(
        minutes in 1_i64..5_000, back in 0_i64..40, catch_up in prop::sample::select(
            &[CatchUp::None, CatchUp::One, CatchUp::All][..]
        ),
    ) {
        let schedule = parse("*/3 * * * *", "UTC");
        let now = DateTime::from_timestamp(1_800_000_000 + back, 0).expect("a time");
        let due = schedule.due(now - TimeDelta::minutes(minutes), now, catch_up);
        let all: Vec<_> = due.missed.iter().chain(&due.fire).copied().collect();
        prop_assert!(all.windows(2).all(|it| it[0] < it[1]));
        let ticks = schedule.due(now - TimeDelta::minutes(minutes), now, CatchUp::All);
        let ticks_of = |it: &DueTicks| it.missed_before + (it.missed.len() + it.fire.len()) as u64;
        prop_assert_eq!(ticks_of(&due), ticks_of(&ticks));
        prop_assert!(due.fire.len() <= MAX_CATCH_UP);
    }
}
