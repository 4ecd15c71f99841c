//! What a parser says of a body or a query, in words for people who send JSON: no names of Rust
//! types, and the name that was probably meant.

use super::bounds::Range;

/// How similar two names must be for a suggestion, from 0 to 1.
const MIN_SIMILARITY: f64 = 0.8;
/// Longer names are compared with none: the comparison costs the product of both lengths.
const MAX_COMPARED_BYTES: usize = 100;
/// Characters that a message repeats of what was sent.
const MAX_SHOWN_CHARS: usize = 60;
/// Names that a message lists at most.
const MAX_LISTED: usize = 12;

/// What chrono says of a text that is no time.
const NO_TIME: [&str; 6] = [
    "input contains invalid characters",
    "input is not enough for unique date and time",
    "input is out of range",
    "no possible date and time matching input",
    "premature end of input",
    "trailing input",
];

/// The message of serde, rewritten.
///
/// ```
/// # use fencepost_web::wire::json_words::rewrite;
/// assert_eq!(rewrite("missing field `queues`"), "is missing");
/// assert_eq!(rewrite("duplicate field `limit`"), "is sent more than once");
/// assert!(rewrite("premature end of input").starts_with("must be a time with its zone"));
/// let message = rewrite(r#"invalid type: string "a", expected a sequence"#);
/// assert_eq!(message, "must be a list, is a string");
/// assert_eq!(
///     rewrite("unknown field `type`, expected one of `job_type`, `queue`"),
///     "is not a field here: did you mean `job_type`?",
/// );
/// assert_eq!(
///     rewrite("unknown variant `success`, expected one of `succeeded`, `failed`"),
///     "must be one of `succeeded`, `failed`, is `success`: did you mean `succeeded`?",
/// );
/// ```
#[must_use]
pub fn rewrite(message: &str) -> String {
    if message.contains("invalid digit found in string") {
        return "must be a whole number, not negative".to_owned();
    }
    if message.contains("number too large to fit") {
        return "is too large a number".to_owned();
    }
    if message.contains("number too small to fit") {
        return "is too small a number".to_owned();
    }
    if message.contains("cannot parse integer from empty string") {
        return "must be a whole number, is empty".to_owned();
    }
    if message.contains("hex escape") {
        return "must be text, has half of a surrogate pair".to_owned();
    }
    if message.starts_with("invalid unicode code point") {
        return "must be valid UTF-8".to_owned();
    }
    if NO_TIME.contains(&message) {
        return "must be a time with its zone, such as 2026-01-31T12:00:00Z".to_owned();
    }
    if message.starts_with("missing field") {
        return "is missing".to_owned();
    }
    if message.starts_with("duplicate field") {
        return "is sent more than once".to_owned();
    }
    // The body is valid JSON by now: an enum is neither a string nor an object.
    if message.starts_with("expected value") {
        return "is of the wrong type".to_owned();
    }
    if let Some(rest) = message.strip_prefix("unknown field ") {
        let (sent, known) = names(rest);
        return match (probably_meant(sent, &known), known.as_slice()) {
            (Some(meant), _) => format!("is not a field here: did you mean `{meant}`?"),
            (None, []) => "is not a field here: no fields are expected".to_owned(),
            (None, known) => format!("is not a field here: expected {}", listed(known)),
        };
    }
    if let Some(rest) = message.strip_prefix("unknown variant ") {
        let (sent, known) = names(rest);
        let meant = probably_meant(sent, &known);
        let meant = meant.map_or(String::new(), |it| format!(": did you mean `{it}`?"));
        let sent: String = sent.chars().take(MAX_SHOWN_CHARS).collect();
        return format!("must be {}, is `{sent}`{meant}", listed(&known));
    }
    let Some((before, expected)) = message.split_once(", expected ") else {
        return message.to_owned();
    };
    let expected = kind(expected);
    match before.strip_prefix("invalid type: ") {
        Some(sent) => format!("must be {expected}, is {}", sent_kind(sent)),
        None => format!("{before}, expected {expected}"),
    }
}

/// A number that does not fit, as a parser's message says.
#[derive(Debug, PartialEq, Eq)]
pub struct Unfit {
    /// What the number must be, before its bounds.
    kind: &'static str,
    /// Sent number; none: the parser names none that is beyond every type.
    sent: Option<String>,
    /// Values of the number's type in the server.
    of_type: Option<(i64, u64)>,
}

impl Unfit {
    /// The message, with the bounds of the number's schema; without one, with those of its type.
    /// None: neither is known.
    ///
    /// ```
    /// # use fencepost_web::wire::{bounds::Range, json_words::unfit_number};
    /// let unfit = unfit_number("invalid value: integer `-1`, expected i32").expect("unfit");
    /// let from_one = Range { min: Some(1.into()), max: None };
    /// assert_eq!(unfit.within(&from_one).unwrap(), "must be between 1 and 2147483647, is -1");
    /// ```
    #[must_use]
    pub fn within(&self, schema: &Range) -> Option<String> {
        let least = self.of_type.map(|it| it.0.into());
        let greatest = self.of_type.map(|it| it.1.into());
        let (min, max) = (schema.min.clone().or(least)?, schema.max.clone().or(greatest)?);
        let sent = self.sent.as_ref().map_or(String::new(), |it| format!(", is {it}"));
        Some(format!("{} {min} and {max}{sent}", self.kind))
    }
}

/// Reads a message that says that a number does not fit. A parser takes integers of more than 64
/// bits for fractions.
///
/// ```
/// # use fencepost_web::wire::{bounds::Range, json_words::unfit_number};
/// let percent = Range { min: Some(0.into()), max: Some(100.into()) };
/// let message = |it: &str| unfit_number(it).expect("unfit").within(&percent).expect("bounds");
/// let negative = message("invalid value: integer `-1`, expected u32");
/// assert_eq!(negative, "must be between 0 and 100, is -1");
/// let fraction = message("invalid type: floating point `1.5`, expected i32");
/// assert_eq!(fraction, "must be an integer between 0 and 100, is 1.5");
/// let large = message("invalid type: floating point `100000000000000000000.0`, expected i32");
/// assert!(large.ends_with("is 1e20"));
/// assert_eq!(message("number out of range"), "must be between 0 and 100");
/// assert_eq!(unfit_number("invalid type: integer `1`, expected a string"), None);
/// ```
#[must_use]
pub fn unfit_number(message: &str) -> Option<Unfit> {
    let kind = "must be between";
    if message.starts_with("number out of range") {
        return Some(Unfit { kind, sent: None, of_type: None });
    }
    let (before, expected) = message.split_once(", expected ")?;
    let of_type = range(expected);
    if let Some(sent) = unfit_integer(before) {
        return Some(Unfit { kind, sent: Some(sent.to_owned()), of_type });
    }
    let sent = before.strip_prefix("invalid type: floating point `")?.trim_end_matches('`');
    let value: f64 = of_type.and_then(|_| sent.parse().ok())?;
    let is_large = value.abs() > u64::MAX as f64;
    let sent = if is_large { format!("{value:e}") } else { sent.to_owned() };
    Some(Unfit { kind: "must be an integer between", sent: Some(sent), of_type })
}

/// The integer that was sent, if the message says that it does not fit.
fn unfit_integer(message: &str) -> Option<&str> {
    message.strip_prefix("invalid value: integer `")?.split('`').next()
}

/// The first name in backquotes, and the others.
fn names(text: &str) -> (&str, Vec<&str>) {
    let mut quoted = text.split('`').skip(1).step_by(2);
    (quoted.next().unwrap_or_default(), quoted.collect())
}

fn listed(known: &[&str]) -> String {
    let shown: Vec<_> = known.iter().take(MAX_LISTED).map(|it| format!("`{it}`")).collect();
    let more = if known.len() > MAX_LISTED { ", …" } else { "" };
    match shown.as_slice() {
        [one] => one.clone(),
        _ => format!("one of {}{more}", shown.join(", ")),
    }
}

/// The name that is most similar to what was sent, or of which one contains the other.
///
/// ```
/// # use fencepost_web::wire::json_words::probably_meant;
/// let known = ["job_type", "queue", "run_at"];
/// assert_eq!(probably_meant("type", &known), Some("job_type"));
/// assert_eq!(probably_meant("jobType", &known), Some("job_type"));
/// assert_eq!(probably_meant("que", &known), Some("queue"));
/// assert_eq!(probably_meant("runat", &known), Some("run_at"));
/// assert_eq!(probably_meant("x", &known), None);
/// ```
#[must_use]
pub fn probably_meant<'a>(sent: &str, known: &[&'a str]) -> Option<&'a str> {
    const MIN_PART_CHARS: usize = 3;
    if sent.len() > MAX_COMPARED_BYTES {
        return None;
    }
    let sent = plain(sent);
    let similarity = |name: &str| {
        let name = plain(name);
        let is_part = sent.len() >= MIN_PART_CHARS && name.contains(&sent)
            || name.len() >= MIN_PART_CHARS && sent.contains(&name);
        strsim::jaro_winkler(&sent, &name) + f64::from(u8::from(is_part))
    };
    let scored = known.iter().map(|it| (similarity(it), *it));
    let best = scored.max_by(|one, other| one.0.total_cmp(&other.0))?;
    (best.0 >= MIN_SIMILARITY).then_some(best.1)
}

/// Returns true if an unknown field is nearly spelt like a known one.
///
/// ```
/// # use fencepost_web::wire::json_words::is_misspelt;
/// let known = ["attempt", "pid"];
/// assert!(["atempt", "Attempt", "attemtp"].iter().all(|it| is_misspelt(it, &known)));
/// assert!(["attempt_token", "id", "region"].iter().all(|it| !is_misspelt(it, &known)));
/// ```
#[must_use]
pub fn is_misspelt(sent: &str, known: &[&str]) -> bool {
    /// Characters of the known name that permit one edit.
    const CHARS_OF_AN_EDIT: usize = 4;
    const MAX_EDITS: usize = 2;
    if sent.len() > MAX_COMPARED_BYTES {
        return false;
    }
    let sent = plain(sent);
    known.iter().any(|name| {
        let name = plain(name);
        let edits = (name.len() / CHARS_OF_AN_EDIT).min(MAX_EDITS);
        strsim::osa_distance(&sent, &name) <= edits
    })
}

/// A name as its spelling is compared.
fn plain(name: &str) -> String {
    name.to_lowercase().replace(['_', '-'], "")
}

fn kind(expected: &str) -> &str {
    match expected {
        "a sequence" => "a list",
        "a map" | "an object" => "an object",
        "a boolean" => "true or false",
        "i8" | "i16" | "i32" | "i64" | "u8" | "u16" | "u32" | "u64" | "usize" => "an integer",
        "f32" | "f64" => "a number",
        it if it.starts_with("struct ") || it.starts_with("enum ") => "an object",
        other => other,
    }
}

/// The values of a type of numbers.
fn range(expected: &str) -> Option<(i64, u64)> {
    Some(match expected {
        "i8" => (i8::MIN.into(), i8::MAX as u64),
        "i16" => (i16::MIN.into(), i16::MAX as u64),
        "i32" => (i32::MIN.into(), i32::MAX as u64),
        "i64" => (i64::MIN, i64::MAX as u64),
        "u8" => (0, u8::MAX.into()),
        "u16" => (0, u16::MAX.into()),
        "u32" => (0, u32::MAX.into()),
        "u64" | "usize" => (0, u64::MAX),
        _ => return None,
    })
}

fn sent_kind(sent: &str) -> &str {
    match sent.split(' ').next().unwrap_or_default() {
        "string" => "a string",
        "integer" => "an integer",
        "floating" => "a number",
        "boolean" => "true or false",
        "sequence" => "a list",
        "map" => "an object",
        "null" => "null",
        _ => sent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_integer_that_does_not_fit_is_named_with_the_bounds() {
        let without_bounds = Range { min: None, max: None };
        let within = |it: &str| unfit_number(it).and_then(|it| it.within(&without_bounds));
        let negative = within("invalid value: integer `-1`, expected u32").expect("bounds");
        assert_eq!(negative, "must be between 0 and 4294967295, is -1");
        let large = within("invalid value: integer `2147483648`, expected i32").expect("bounds");
        assert_eq!(large, "must be between -2147483648 and 2147483647, is 2147483648");
        assert_eq!(within("number out of range"), None);
    }

    #[test]
    fn an_unlike_name_is_not_suggested() {
        assert_eq!(probably_meant("desc", &["newest", "oldest"]), None);
    }

    #[test]
    fn what_is_no_text_is_said_in_words() {
        let half = rewrite("unexpected end of hex escape");
        assert_eq!(half, "must be text, has half of a surrogate pair");
        assert_eq!(rewrite("lone leading surrogate in hex escape"), half);
        assert_eq!(rewrite("invalid unicode code point"), "must be valid UTF-8");
    }

    #[test]
    fn a_type_is_named_in_words_of_json() {
        let message = |sent: &str, expected: &str| {
            rewrite(&format!("invalid type: {sent}, expected {expected}"))
        };
        assert_eq!(message("integer `5`", "a string"), "must be a string, is an integer");
        assert_eq!(message("string \"x\"", "u32"), "must be an integer, is a string");
        assert_eq!(message("map", "a boolean"), "must be true or false, is an object");
        assert_eq!(message("null", "struct AckError"), "must be an object, is null");
        assert_eq!(message("floating point `1.5`", "i64"), "must be an integer, is a number");
    }

    #[test]
    fn a_name_of_any_length_is_answered_at_once_and_not_repeated() {
        let long = "a".repeat(8_000_000);
        assert_eq!(probably_meant(&long, &["job_type", "queue"]), None);
        let message = rewrite(&format!("unknown variant `{long}`, expected one of `a`, `b`"));
        assert!(message.len() < 200, "{} bytes", message.len());
    }

    #[test]
    fn without_a_similar_name_the_known_ones_are_listed() {
        let message = rewrite("unknown field `zzz`, expected one of `a`, `b`");
        assert_eq!(message, "is not a field here: expected one of `a`, `b`");
        assert_eq!(
            rewrite("unknown field `zzz`, expected `acks`"),
            "is not a field here: expected `acks`"
        );
        assert_eq!(
            rewrite("unknown field `zzz`, there are no fields"),
            "is not a field here: no fields are expected"
        );
        let many: Vec<_> = (0..40).map(|it| format!("`field{it:02}x`")).collect();
        let message = rewrite(&format!("unknown field `q`, expected one of {}", many.join(", ")));
        assert!(
            message.ends_with(", …")
                && message.contains("`field11x`")
                && !message.contains("`field12x`")
        );
    }
}
