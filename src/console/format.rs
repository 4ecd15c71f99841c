//! Formats of numbers, times and states on pages. Nothing is decided here.

use std::fmt::Display;

use askama::filters::{Escaper, Html, Safe};
use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;

use fencepost_domain::job::WaitingFor;

/// Spaces of indentation per level of JSON.
const INDENT: usize = 2;

/// A value, or a reference to one: templates pass either.
pub trait Plain<T> {
    /// The value.
    fn plain(self) -> T;
}

impl<T: Copy> Plain<T> for T {
    fn plain(self) -> T {
        self
    }
}

impl<T: Copy> Plain<T> for &T {
    fn plain(self) -> T {
        *self
    }
}

impl<T: Copy> Plain<T> for &&T {
    fn plain(self) -> T {
        **self
    }
}

/// The local clock, for display only.
#[expect(clippy::disallowed_methods, reason = "for display only: nothing is decided by it")]
pub fn now() -> DateTime<Utc> {
    Utc::now()
}

/// A duration, in its two largest units.
pub fn seconds(seconds: impl Plain<i64>) -> String {
    const UNITS: [(i64, &str); 4] = [(86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")];
    let seconds = seconds.plain().max(0);
    let Some(first) = UNITS.iter().position(|(unit, _)| seconds >= *unit) else {
        return "0 s".to_owned();
    };
    let (unit, name) = UNITS[first];
    let rest = UNITS.get(first + 1).map(|(small, small_name)| (seconds % unit / small, small_name));
    match rest {
        Some((small, small_name)) if small > 0 => {
            format!("{} {name} {small} {small_name}", seconds / unit)
        }
        _ => format!("{} {name}", seconds / unit),
    }
}

/// A duration that may be short.
pub fn millis(millis: impl Plain<i64>) -> String {
    let millis = millis.plain();
    match millis {
        ..1_000 => format!("{} ms", millis.max(0)),
        1_000..60_000 => format!("{}.{} s", millis / 1_000, millis % 1_000 / 100),
        _ => seconds(millis / 1_000),
    }
}

/// A count, in groups of three digits.
pub fn count(number: impl Plain<i64>) -> String {
    let number = number.plain();
    let digits = number.unsigned_abs().to_string();
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3 + 1);
    if number < 0 {
        grouped.push('-');
    }
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            grouped.push('\u{202f}');
        }
        grouped.push(digit);
    }
    grouped
}

/// A count, with its noun.
pub fn things(number: impl Plain<i64>, one: &str, many: &str) -> String {
    let number = number.plain();
    format!("{} {}", count(number), if number == 1 { one } else { many })
}

/// How long ago, or how far ahead.
pub fn distance(now: DateTime<Utc>, at: DateTime<Utc>) -> String {
    let passed = now - at;
    if passed.abs() < TimeDelta::seconds(1) {
        "now".to_owned()
    } else if passed > TimeDelta::zero() {
        format!("{} ago", seconds(passed.num_seconds()))
    } else {
        format!("in {}", seconds(-passed.num_seconds()))
    }
}

/// A UTC time, to the second.
pub fn exact(at: impl Plain<DateTime<Utc>>) -> String {
    at.plain().format("%Y-%m-%d %H:%M:%S UTC").to_string()
}

/// A UTC time that a script shows in the visitor's zone.
pub fn exact_time(at: impl Plain<DateTime<Utc>>) -> Safe<String> {
    let at = at.plain();
    let (machine, exact) = (at.to_rfc3339(), exact(at));
    Safe(format!("<time datetime=\"{machine}\" title=\"{exact}\" data-exact>{exact}</time>"))
}

/// A time relative to the present; the exact one is its title.
pub fn time(now: impl Plain<DateTime<Utc>>, at: impl Plain<DateTime<Utc>>) -> Safe<String> {
    let (now, at) = (now.plain(), at.plain());
    let (machine, exact, words) = (at.to_rfc3339(), exact(at), distance(now, at));
    Safe(format!("<time datetime=\"{machine}\" title=\"{exact}\">{words}</time>"))
}

/// A percentage from 0 to 100.
pub fn percent(part: i64, whole: i64) -> i64 {
    if whole <= 0 { 0 } else { (part.max(0) * 100 / whole).min(100) }
}

/// An enum value, as the API writes it.
pub fn word(value: &impl Serialize) -> String {
    let json = serde_json::to_value(value).unwrap_or_default();
    json.as_str().unwrap_or_default().to_owned()
}

/// A name of the API in plain words.
pub fn words(word: impl AsRef<str>) -> String {
    word.as_ref().replace('_', " ")
}

/// Why a job is not running, beside its state.
pub fn waiting(why: impl Plain<WaitingFor>) -> &'static str {
    match why.plain() {
        WaitingFor::Worker => "waits for a worker",
        WaitingFor::RunAt => "runs",
        WaitingFor::Backoff => "retried",
        WaitingFor::JobPaused => "paused",
        WaitingFor::Parents => "waits for other jobs",
        WaitingFor::Group => "waits for its group",
        WaitingFor::QueuePaused => "its queue is paused",
        WaitingFor::TypePaused => "its job type is paused",
        WaitingFor::Concurrency => "at a concurrency limit",
        WaitingFor::RateLimit => "at a rate limit",
    }
}

/// Whether it waits for a time.
pub fn waits_for_time(why: impl Plain<WaitingFor>) -> bool {
    matches!(why.plain(), WaitingFor::RunAt | WaitingFor::Backoff)
}

/// A state: a word, an icon and a colour, so that none of them is needed alone.
pub fn chip(word: impl AsRef<str>) -> Safe<String> {
    let word = word.as_ref();
    let (icon, tone) = face(word);
    let text = escape(&words(word));
    Safe(format!(
        "<span class=\"chip {tone}\"><svg class=\"icon\" aria-hidden=\"true\"><use href=\"#i-{icon}\"/></svg>{text}</span>"
    ))
}

/// The icon and the tone of a state; unknown ones are neutral.
fn face(word: &str) -> (&'static str, &'static str) {
    match word {
        "scheduled" | "run_at" | "backoff" | "parents" => ("clock", "calm"),
        "pending" | "worker" | "trial" => ("hourglass", "wait"),
        "processing" | "running" => ("play", "run"),
        "succeeded" | "enabled" | "live" | "fired" | "alive" | "ok" => ("check", "good"),
        "dead_letter" | "failed" | "lost" => ("cross", "bad"),
        "timeout" | "lease_expired" | "aborted" | "terminate" | "expired" | "warning" => {
            ("warn", "warn")
        }
        "cancelled" | "revoked" | "terminated" | "gone" => ("ban", "off"),
        "paused" | "queue_paused" | "type_paused" | "quiet" => ("pause", "warn"),
        "concurrency" | "rate_limit" => ("gauge", "wait"),
        _ => ("dot", "calm"),
    }
}

/// Text within HTML.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    // A String takes everything.
    let _ = Html.write_escaped_str(&mut escaped, text);
    escaped
}

/// A number in a form; empty if there is none.
#[must_use]
pub fn or_empty<Number: Display>(number: &Option<Number>) -> String {
    number.as_ref().map_or_else(String::new, ToString::to_string)
}

/// The time of day of a worker's clock, UTC.
pub fn clock(millis: impl Plain<i64>) -> String {
    let at = DateTime::<Utc>::from_timestamp_millis(millis.plain());
    at.map(|it| it.format("%H:%M:%S%.3f").to_string()).unwrap_or_default()
}

/// Bytes of JSON that a page shows, with line breaks and indentation.
pub const MAX_SHOWN_BYTES: usize = 64 * 1024;

/// JSON as a page shows it, possibly cut.
pub struct ShownJson {
    pub text: String,
    /// Size of the stored JSON, if it was cut.
    pub cut_from: Option<usize>,
}

/// Indented JSON, cut to the maximum. Nothing else changes: numbers keep all digits, and objects
/// the order of their fields.
pub fn pretty(json: &str) -> ShownJson {
    let mut out = String::with_capacity(json.len().min(MAX_SHOWN_BYTES) * 2);
    let (mut depth, mut in_string, mut is_escaped) = (0_usize, false, false);
    // JSON has them as white space alone, between its values.
    let mut characters = json.chars().filter(|it| !it.is_ascii_control()).peekable();
    let line = |out: &mut String, depth: usize| {
        out.push('\n');
        out.extend(std::iter::repeat_n(' ', depth * INDENT));
    };
    while out.len() <= MAX_SHOWN_BYTES
        && let Some(character) = characters.next()
    {
        if in_string {
            out.push(character);
            in_string = is_escaped || character != '"';
            is_escaped = !is_escaped && character == '\\';
            continue;
        }
        match character {
            '"' => {
                in_string = true;
                out.push('"');
            }
            '{' | '[' => {
                out.push(character);
                while characters.next_if(|it| it.is_whitespace()).is_some() {}
                if let Some(end) = characters.next_if(|it| matches!(it, '}' | ']')) {
                    out.push(end);
                } else {
                    depth += 1;
                    line(&mut out, depth);
                }
            }
            '}' | ']' => {
                depth = depth.saturating_sub(1);
                line(&mut out, depth);
                out.push(character);
            }
            ',' => {
                out.push(',');
                line(&mut out, depth);
            }
            ':' => out.push_str(": "),
            space if space.is_whitespace() => (),
            other => out.push(other),
        }
    }
    let is_cut = out.len() > MAX_SHOWN_BYTES;
    if is_cut {
        out.truncate(out.floor_char_boundary(MAX_SHOWN_BYTES));
    }
    ShownJson { text: out, cut_from: is_cut.then_some(json.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_of_time_have_their_two_largest_units() {
        let check = |length, expected: &str| assert_eq!(seconds(length), expected);
        check(-1, "0 s");
        check(0, "0 s");
        check(59, "59 s");
        check(60, "1 min");
        check(61, "1 min 1 s");
        check(3_600 + 59, "1 h");
        check(3_661, "1 h 1 min");
        check(90_000, "1 d 1 h");
        assert_eq!(millis(999), "999 ms");
        assert_eq!(millis(1_250), "1.2 s");
        assert_eq!(millis(61_000), "1 min 1 s");
    }

    #[test]
    fn distances_have_a_direction() {
        let at = |seconds| DateTime::from_timestamp(seconds, 0).expect("a time");
        assert_eq!(distance(at(100), at(40)), "1 min ago");
        assert_eq!(distance(at(100), at(105)), "in 5 s");
        assert_eq!(distance(at(100), at(100)), "now");
    }

    #[test]
    fn json_keeps_its_digits_its_order_and_its_strings() {
        let json =
            r#"{"b":12345678901234567890.10,"a":[ ],"s":"{\"x\":[1,2]}\\","n":{"k":[1,true]}}"#;
        let expected = "{\n  \"b\": 12345678901234567890.10,\n  \"a\": [],\n  \"s\": \"{\\\"x\\\":[1,2]}\\\\\",\n  \
                        \"n\": {\n    \"k\": [\n      1,\n      true\n    ]\n  }\n}";
        assert_eq!(pretty(json).text, expected);
        assert_eq!(pretty("null").text, "null");
        assert_eq!(pretty(" { } ").text, "{}");
    }

    #[test]
    fn long_json_is_cut_between_characters_and_however_deep_it_is() {
        let long = format!("\"{}\"", "é".repeat(MAX_SHOWN_BYTES));
        let shown = pretty(&long);
        assert_eq!((shown.text.len(), shown.cut_from), (MAX_SHOWN_BYTES - 1, Some(long.len())));
        let deep = format!("{}1{}{}", "[".repeat(100), ",1".repeat(10_000), "]".repeat(100));
        let shown = pretty(&deep);
        assert_eq!((shown.text.len(), shown.cut_from), (MAX_SHOWN_BYTES, Some(deep.len())));
        assert!(pretty("\"short\"").cut_from.is_none());
    }

    #[test]
    fn numbers_are_grouped() {
        assert_eq!(count(1_234_567), "1\u{202f}234\u{202f}567");
        assert_eq!((count(-12).as_str(), count(999).as_str()), ("-12", "999"));
        assert_eq!((percent(1, 3), percent(5, 0), percent(9, 3)), (33, 0, 100));
    }
}
