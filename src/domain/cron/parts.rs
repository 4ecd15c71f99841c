//! Parts of an expression that never match: the caller meant something else.

use chrono::{NaiveDate, NaiveTime};
use croner::Cron;

use super::{
    InvalidSchedule, parse,
    words::{WEEKDAYS, numbers},
};

/// Days until the first tick of a schedule at most: ten years, within which there is always a 29th
/// of February.
const MAX_DAYS_TO_TICK: usize = 3_660;
const MAX_DAYS_IN_MONTH: usize = 31;

/// Refuses an expression that does not fire within ten years, or of which a part is empty, never
/// matches, or allows every day in other words than `*` beside other days. Stored ones may have
/// such parts: they fire by their others.
///
/// # Errors
/// [`InvalidSchedule::Never`], or [`InvalidSchedule::Cron`] which names the part or its field.
///
/// ```
/// # use {chrono::NaiveDate, fencepost_domain::cron::{check_parts, parse}};
/// let check = |it| check_parts(it, &parse(it).unwrap(), NaiveDate::default());
/// for good in ["0 0 29 2 *", "0 0 L,15W * 5L,2#1", "0 0 1-7 * +1", "0 0 31 * *", "@yearly"] {
///     assert!(check(good).is_ok(), "{good}");
/// }
/// for (bad, part) in [
///     ("0 0 1 * L", "`L`"), ("0 0 * * 5,L", "`L`"), ("0 0 1,30 2 *", "`30`"),
///     ("0 0 31 2,3 *", "`2`"), ("0 0 1,10 * +FRI#2", "`1`"), ("0 0 L,LW * *", "`L`"),
///     ("0 0 31 feb,MAR *", "`feb`"),
/// ] {
///     let message = check(bad).unwrap_err().to_string();
///     assert!(message.contains(part) && message.contains("never matches"), "{bad}: {message}");
/// }
/// for (all, name) in [
///     ("0 0 */1 * MON", "day of the month `*/1`"),
///     ("0 0 1 * SUN-SAT", "day of the week `SUN-SAT`"),
/// ] {
///     let message = check(all).unwrap_err().to_string();
///     assert!(message.starts_with(&format!("the {name}")), "{all}: {message}");
/// }
/// for good in ["0 0 */1 * *", "0 0 */2 * MON", "0 0 */1 * +MON", "0 0 1 * *"] {
///     assert!(check(good).is_ok(), "{good}");
/// }
/// let message = check("0 0 * * L").unwrap_err().to_string();
/// assert!(message.ends_with("write 5L for the last Friday of the month"), "{message}");
/// assert_eq!(check("0 0 31 2 *").unwrap_err().to_string(), "does not fire within ten years");
/// for gap in ["1,,2 * * * *", ",1 * * * *", "0 0 , * *", "0 0 * * 1,"] {
///     assert!(check(gap).unwrap_err().to_string().contains("empty part"), "{gap}");
/// }
/// ```
pub fn check_parts(expression: &str, cron: &Cron, today: NaiveDate) -> Result<(), InvalidSchedule> {
    let fields: Vec<_> = cron.pattern.as_str().split_whitespace().collect();
    let Some((_, &[days, months, weekdays])) = fields.split_last_chunk() else { return Ok(()) };
    let weekdays = weekdays.trim_start_matches('+');
    // The parser writes numbers for names: messages repeat what was sent.
    let sent: Vec<_> = expression.split_whitespace().collect();
    let sent = if sent.len() == fields.len() { sent } else { fields.clone() };
    let Some((_, &[sent_days, sent_months, sent_weekdays])) = sent.split_last_chunk() else {
        return Ok(());
    };
    let sent_weekdays = sent_weekdays.trim_start_matches('+');
    if let Some(field) = sent.iter().find(|it| has_gap(it)) {
        let gap = format!("`{field}` has an empty part: a value is missing beside a comma");
        return Err(InvalidSchedule::Cron(gap));
    }
    if weekdays.split(',').any(|it| it == "L") {
        return Err(never("day of the week", "L"));
    }
    if !has_day(cron, today) {
        return Err(InvalidSchedule::Never);
    }
    check_restriction(cron, sent_days, sent_weekdays)?;
    // Without a `+`, a day matches by either field: each is tried alone.
    let (days_beside, weekdays_beside, sign) = match cron.pattern.matches_dom_and_dow() {
        true => (days, weekdays, "+"),
        false => ("*", "*", ""),
    };
    let with_day = |it: &str| format!("{it} {months} {sign}{weekdays_beside}");
    let with_weekday = |it: &str| format!("{days_beside} {months} {sign}{it}");
    let with_month = |it: &str| format!("{days} {it} {sign}{weekdays}");
    each("day of the month", (days, sent_days), with_day, today)?;
    each("day of the week", (weekdays, sent_weekdays), with_weekday, today)?;
    each("month", (months, sent_months), with_month, today)?;
    let has = |it: &str| days.split(',').any(|part| part == it);
    if has("L") && has("LW") { Err(never("day of the month", "L")) } else { Ok(()) }
}

/// Refuses a day field that allows every day in other words than `*`: a day matches by either
/// field, so the other one would restrict nothing.
fn check_restriction(cron: &Cron, days: &str, weekdays: &str) -> Result<(), InvalidSchedule> {
    let is_open = |it: &str| matches!(it, "*" | "?");
    if cron.pattern.matches_dom_and_dow() || is_open(days) || is_open(weekdays) {
        return Ok(());
    }
    let (name, text, other) = if numbers(&cron.pattern.days).len() == MAX_DAYS_IN_MONTH {
        ("day of the month", days, "day of the week")
    } else if numbers(&cron.pattern.days_of_week).len() >= WEEKDAYS.len() {
        ("day of the week", weekdays, "day of the month")
    } else {
        return Ok(());
    };
    Err(InvalidSchedule::Cron(format!(
        "the {name} `{text}` allows every day, so the {other} restricts nothing: write `*` for it"
    )))
}

fn has_gap(field: &str) -> bool {
    field.trim_start_matches('+').split(',').any(str::is_empty)
}

/// Checks each part of a field alone. Messages repeat the part that was sent.
fn each(
    field: &str,
    (parts, sent): (&str, &str),
    days_with: impl Fn(&str) -> String,
    today: NaiveDate,
) -> Result<(), InvalidSchedule> {
    for (part, sent) in parts.split(',').zip(sent.split(',')) {
        let alone = parse(&format!("0 0 {}", days_with(part)))?;
        if !has_day(&alone, today) {
            return Err(never(field, sent));
        }
    }
    Ok(())
}

fn never(field: &str, part: &str) -> InvalidSchedule {
    let hint = match (field, part) {
        ("day of the week", "L") => ": write 5L for the last Friday of the month",
        ("day of the month", "L") => " beside LW: make a schedule for each",
        _ => "",
    };
    InvalidSchedule::Cron(format!("the {field} `{part}` never matches{hint}"))
}

/// True if an expression fires within ten years, by its days alone.
fn has_day(cron: &Cron, today: NaiveDate) -> bool {
    let fields: Vec<_> = cron.pattern.as_str().split_whitespace().collect();
    let Some((_, [days, months, weekdays])) = fields.split_last_chunk() else { return true };
    let Ok(midnights) = parse(&format!("0 0 {days} {months} {weekdays}")) else { return true };
    today.iter_days().take(MAX_DAYS_TO_TICK).any(|day| {
        let midnight = day.and_time(NaiveTime::MIN).and_utc();
        midnights.is_time_matching(&midnight).unwrap_or(true)
    })
}
