//! The search line of jobs, as the API, the console and the command line read it:
//! `state:pending queue:mail age:>5m error:"connection refused"`. Conditions are combined with
//! "and".

use std::collections::HashMap;

use chrono::{DateTime, TimeDelta, Utc};
use uuid::Uuid;

use super::job::JobState;
use crate::ids::{BatchId, JobId};

/// Maximum characters of a search line.
pub const MAX_SEARCH_CHARS: usize = 1_000;
/// Maximum characters of an error's text: it is looked for in each error that a page examines.
const MAX_ERROR_CHARS: usize = 100;
/// Longest age in a search line, in days: far above every retention.
const MAX_AGE_DAYS: i64 = 3_650;
/// Characters of the end of an id, from as many as are rarely shared by two jobs to as many as lie
/// in its random part.
const ID_END_CHARS: std::ops::RangeInclusive<usize> = 4..=12;
/// Characters of an id after its prefix.
const ID_CHARS: usize = 26;
/// The digits of ids, in order.
const DIGITS: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
const BITS_PER_DIGIT: usize = 5;
const CONDITIONS: &str =
    "state:, queue:, type:, group:, tag:, label:, batch:, age:, error:, is: or id:";

/// Conditions of a search line. Absent conditions match every job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Search {
    /// `state:a,b`: any of these states; none: any.
    pub states: Vec<JobState>,
    /// `queue:q`.
    pub queue: Option<String>,
    /// `type:t`.
    pub job_type: Option<String>,
    /// `group:g`.
    pub group: Option<String>,
    /// `tag:name=value`, or `tag:name` for any value. All must be there.
    pub tags: Vec<(String, Option<String>)>,
    /// `label:gpu`: its worker must have this label. All must be there.
    pub labels: Vec<String>,
    /// `is:paused`.
    pub is_paused: bool,
    /// `batch:b`.
    pub batch_id: Option<BatchId>,
    /// `age:<5m`: stored at this time or later.
    pub created_after: Option<DateTime<Utc>>,
    /// `age:>5m`: stored before this time.
    pub created_before: Option<DateTime<Utc>>,
    /// `error:word`: text in the last error's type or message, in any case.
    pub error: Option<String>,
    /// `id:…`, or an id without a name.
    pub id: Option<IdPart>,
}

/// An id, or a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdPart {
    /// The whole id.
    Whole(JobId),
    /// Its beginning: ids from `from` to `to`.
    Start {
        /// The smallest id.
        from: Uuid,
        /// The greatest id.
        to: Uuid,
    },
    /// Its end: the last bits of the id, as far as `mask` has them, are `bits`.
    End {
        /// The bits that are known.
        mask: i64,
        /// Their values.
        bits: i64,
    },
}

/// Reads a search line. Ages count back from `now`.
///
/// # Errors
/// The mistake in the line, for its author.
///
/// ```
/// # use fencepost_domain::{job::JobState, search};
/// let now = chrono::DateTime::UNIX_EPOCH;
/// let read = search::read("state:pending queue:mail age:>5m", now).unwrap();
/// assert_eq!(read.states, [JobState::Pending]);
/// assert_eq!(read.created_before, Some(now - chrono::TimeDelta::minutes(5)));
/// assert!(search::read("colour:red", now).is_err());
/// ```
pub fn read(line: &str, now: DateTime<Utc>) -> Result<Search, String> {
    let chars = line.chars().count();
    if chars > MAX_SEARCH_CHARS {
        return Err(format!("must be at most {MAX_SEARCH_CHARS} characters, has {chars}"));
    }
    if line.chars().any(char::is_control) {
        return Err("must not contain control characters".to_owned());
    }
    let mut search = Search::default();
    for word in words(line)? {
        add(&mut search, &word, now)?;
    }
    Ok(search)
}

/// A condition: its name, and its value without quotes.
struct Word {
    name: Option<String>,
    value: String,
}

/// Splits a line at spaces outside of quotes.
fn words(line: &str) -> Result<Vec<Word>, String> {
    let (mut words, mut rest) = (Vec::new(), line.trim_start());
    while !rest.is_empty() {
        let end = rest.find(|it: char| it.is_whitespace() || it == '"' || it == ':');
        let named = end.filter(|at| rest[*at..].starts_with(':'));
        let name = named.map(|at| rest[..at].to_owned());
        rest = named.map_or(rest, |at| &rest[at + 1..]);
        let value = match rest.strip_prefix('"') {
            Some(quoted) => {
                let (value, after) = unquoted(quoted)?;
                rest = after;
                value
            }
            None => {
                let (value, after) =
                    rest.split_at(rest.find(char::is_whitespace).unwrap_or(rest.len()));
                rest = after;
                value.to_owned()
            }
        };
        if value.is_empty() {
            let name = name.unwrap_or_default();
            return Err(format!("`{name}:` needs a value directly behind it"));
        }
        words.push(Word { name, value });
        rest = rest.trim_start();
    }
    Ok(words)
}

/// A value up to its closing quote, and what follows it. A backslash keeps the character after it.
fn unquoted(text: &str) -> Result<(String, &str), String> {
    let (mut value, mut characters) = (String::new(), text.char_indices());
    while let Some((at, character)) = characters.next() {
        match character {
            '\\' => value.extend(characters.next().map(|it| it.1)),
            '"' => {
                let after = &text[at + 1..];
                if after.starts_with(|it: char| !it.is_whitespace()) {
                    return Err("put a space after a closing quote".to_owned());
                }
                return Ok((value, after));
            }
            other => value.push(other),
        }
    }
    Err("a quote is not closed".to_owned())
}

/// A condition as a search line has it, in quotes where it needs them.
///
/// ```
/// # use fencepost_domain::search::condition;
/// assert_eq!(condition("queue", "mail"), "queue:mail");
/// assert_eq!(condition("type", "a \"b\""), r#"type:"a \"b\"""#);
/// ```
#[must_use]
pub fn condition(name: &str, value: &str) -> String {
    let needs_quotes = |it: char| it.is_whitespace() || matches!(it, '"' | '\\');
    if !value.contains(needs_quotes) {
        return format!("{name}:{value}");
    }
    let escaped = value.replace('\\', "\\\\").replace('"', "\\\"");
    format!("{name}:\"{escaped}\"")
}

/// The first word of a line without a name, which can only be a part of an id.
///
/// ```
/// # use fencepost_domain::search::bare_word;
/// assert_eq!(bare_word("queue:mail 48213").as_deref(), Some("48213"));
/// assert_eq!(bare_word("job_01m7w3 tag:48213"), None);
/// ```
#[must_use]
pub fn bare_word(line: &str) -> Option<String> {
    let words = words(line).ok()?;
    let bare = words.into_iter().find(|it| it.name.is_none())?.value;
    (!bare.starts_with(JobId::PREFIX)).then_some(bare)
}

fn add(search: &mut Search, word: &Word, now: DateTime<Utc>) -> Result<(), String> {
    let Word { name, value } = word;
    let text = || value.clone();
    match name.as_deref() {
        Some("state") if search.states.is_empty() => {
            search.states = value.split(',').map(state).collect::<Result<_, _>>()?;
        }
        Some("state") => {
            return Err("`state:` may be given once: state:pending,scheduled".to_owned());
        }
        Some("queue") => once(&mut search.queue, "queue", text())?,
        Some("type") => once(&mut search.job_type, "type", text())?,
        Some("group") => once(&mut search.group, "group", text())?,
        Some("tag") => {
            let tag = match value.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (text(), None),
            };
            search.tags.push(tag);
            if let Some(name) = doubled_tag(&search.tags) {
                return Err(format!("`tag:{name}` may have one value"));
            }
        }
        Some("label") => search.labels.push(text()),
        Some("batch") => {
            let id = value.parse().map_err(|_| format!("`{value}` is not the id of a batch"))?;
            once(&mut search.batch_id, "batch", id)?;
        }
        Some("age") => {
            let (is_older, age) = age(value)?;
            let bound =
                if is_older { &mut search.created_before } else { &mut search.created_after };
            once(bound, if is_older { "age:>" } else { "age:<" }, now - age)?;
        }
        Some("error") => {
            let chars = value.chars().count();
            if chars > MAX_ERROR_CHARS {
                return Err(format!("`error:` takes at most {MAX_ERROR_CHARS} characters"));
            }
            once(&mut search.error, "error", text())?;
        }
        Some("is") if value == "paused" => search.is_paused = true,
        Some("is") => return Err(format!("`is:{value}` is not a condition; use is:paused")),
        Some("id") => {
            let id = id_part(value).ok_or_else(|| not_an_id(value))?;
            once(&mut search.id, "id", id)?;
        }
        None => {
            let id = id_part(value).ok_or_else(|| nameless(value))?;
            once(&mut search.id, "id", id)?;
        }
        Some(name) => {
            let tag = condition("tag", &format!("{name}={value}"));
            return Err(format!("`{name}:` is not a condition; use {CONDITIONS}; a tag is {tag}"));
        }
    }
    Ok(())
}

/// A tag that is wanted with two values: no job has both.
#[must_use]
pub fn doubled_tag(tags: &[(String, Option<String>)]) -> Option<&str> {
    let mut values = HashMap::new();
    let mut valued =
        tags.iter().filter_map(|(name, value)| Some((name.as_str(), value.as_deref()?)));
    let doubled = valued.find(|(name, value)| values.entry(*name).or_insert(*value) != value);
    doubled.map(|it| it.0)
}

fn once<T>(place: &mut Option<T>, name: &str, value: T) -> Result<(), String> {
    if place.replace(value).is_some() {
        return Err(format!(
            "`{name}{}` may be given once",
            if name.contains(':') { "" } else { ":" }
        ));
    }
    Ok(())
}

fn state(name: &str) -> Result<JobState, String> {
    JobState::ALL.into_iter().find(|it| it.as_str() == name).ok_or_else(|| {
        let all = JobState::ALL.map(JobState::as_str).join(", ");
        format!("`{name}` is not a state; use {all}")
    })
}

/// Whether jobs older than this are meant, and the age.
fn age(value: &str) -> Result<(bool, TimeDelta), String> {
    let message = || {
        format!(
            "`age:{value}` must be < or >, a number of up to {MAX_AGE_DAYS} days, and s, m, h or d: age:>5m"
        )
    };
    let is_older = value.starts_with('>');
    let age = value.strip_prefix(['<', '>']).ok_or_else(message)?;
    let unit = age.chars().next_back().ok_or_else(message)?;
    let number: i64 = age.strip_suffix(unit).and_then(|it| it.parse().ok()).ok_or_else(message)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3_600,
        'd' => 86_400,
        _ => return Err(message()),
    };
    let age = number.checked_mul(seconds).and_then(TimeDelta::try_seconds);
    let is_within = |it: &TimeDelta| (0..=MAX_AGE_DAYS).contains(&it.num_days()) && number >= 0;
    age.filter(is_within).map(|it| (is_older, it)).ok_or_else(message)
}

fn not_an_id(value: &str) -> String {
    let (few, many) = (ID_END_CHARS.start(), ID_END_CHARS.end());
    format!(
        "`{value}` is neither a condition ({CONDITIONS}) nor a job's id, its start with `{}`, or its \
         last {few} to {many} characters",
        JobId::PREFIX
    )
}

/// The error about a word without a name that is no part of an id.
fn nameless(value: &str) -> String {
    let not_an_id = not_an_id(value);
    if value.contains('=') {
        return format!("{not_an_id}; to search for a tag, write {}", condition("tag", value));
    }
    let [job_type, error] = ["type", "error"].map(|it| condition(it, value));
    let tag = condition("tag", &format!("name={value}"));
    format!(
        "{not_an_id}; to search for a type, a tag or an error, write {job_type}, {tag} or {error}"
    )
}

/// A whole id, its start (with `job_`), or its end (with or without `…`).
fn id_part(text: &str) -> Option<IdPart> {
    if let Ok(whole) = text.parse() {
        return Some(IdPart::Whole(whole));
    }
    if let Some(start) = text.strip_prefix(JobId::PREFIX) {
        let known = Some(start.len()).filter(|it| (1..ID_CHARS).contains(it))?;
        let unknown_bits = (ID_CHARS - known) * BITS_PER_DIGIT;
        // The first of 26 digits has three bits only.
        let from = digits(start).filter(|it| it.leading_zeros() as usize >= unknown_bits)?;
        let from = if unknown_bits < 128 { from << unknown_bits } else { 0 };
        let to = from | ((1_u128 << unknown_bits.min(127)) - 1);
        return Some(IdPart::Start { from: Uuid::from_u128(from), to: Uuid::from_u128(to) });
    }
    let end = text.trim_start_matches(['…', '.']);
    Some(()).filter(|()| ID_END_CHARS.contains(&end.len()))?;
    let mask = (1_i64 << (end.len() * BITS_PER_DIGIT)) - 1;
    Some(IdPart::End { mask, bits: i64::try_from(digits(end)?).ok()? })
}

fn digits(text: &str) -> Option<u128> {
    text.bytes().try_fold(0_u128, |sum, it| {
        let digit = DIGITS.iter().position(|digit| *digit == it.to_ascii_lowercase())?;
        Some((sum << BITS_PER_DIGIT) | digit as u128)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ID: &str = "job_01m7w3ha3aextt8pkwwdmxsmqw";

    fn now() -> DateTime<Utc> {
        DateTime::from_timestamp(1_800_000_000, 0).expect("a time")
    }

    fn refusal(line: &str) -> String {
        read(line, now()).expect_err(line)
    }

    #[test]
    fn each_condition_is_read() {
        let line = r#"state:pending,dead_letter queue:mail type:"send mail" group:g tag:customer=3 tag:eu
            label:gpu batch:batch_01m7w3ha3aextt8pkwwdmxsmqw age:>5m age:<2d error:"timed out"
            is:paused"#;
        let read = read(&line.replace('\n', " "), now()).expect("it reads");
        let expected = Search {
            states: vec![JobState::Pending, JobState::DeadLetter],
            queue: Some("mail".into()),
            job_type: Some("send mail".into()),
            group: Some("g".into()),
            tags: vec![("customer".into(), Some("3".into())), ("eu".into(), None)],
            labels: vec!["gpu".into()],
            is_paused: true,
            batch_id: "batch_01m7w3ha3aextt8pkwwdmxsmqw".parse().ok(),
            created_after: Some(now() - TimeDelta::days(2)),
            created_before: Some(now() - TimeDelta::minutes(5)),
            error: Some("timed out".into()),
            id: None,
        };
        assert_eq!(read, expected);
        assert_eq!(super::read("  ", now()), Ok(Search::default()));
    }

    #[test]
    fn a_value_may_contain_colons() {
        let read = read("type:app:mail:send error:http://x", now()).expect("it reads");
        assert_eq!(read.job_type.as_deref(), Some("app:mail:send"));
        assert_eq!(read.error.as_deref(), Some("http://x"));
    }

    #[test]
    fn what_cannot_be_read_is_refused_with_what_to_write() {
        for (line, message) in [
            ("colour:red", "`colour:` is not a condition"),
            ("state:ready", "`ready` is not a state"),
            ("queue:", "`queue:` needs a value"),
            ("queue: mail", "`queue:` needs a value"),
            ("queue:a queue:b", "`queue:` may be given once"),
            ("age:>1h age:>2h", "`age:>` may be given once"),
            ("state:pending state:scheduled", "`state:` may be given once"),
            ("error:\"open", "a quote is not closed"),
            ("error:\"a\"b", "put a space"),
            ("age:5m", "`age:5m` must be"),
            ("age:>5", "`age:>5` must be"),
            ("age:>-5m", "`age:>-5m` must be"),
            ("age:>5ä", "`age:>5ä` must be"),
            ("age:>99999999999999d", "must be"),
            ("tag:a=1 tag:a=2", "`tag:a` may have one value"),
            ("batch:5", "`5` is not the id of a batch"),
            ("smtp!", "write type:smtp!, tag:name=smtp! or error:smtp!"),
            ("\"smtp error!\"", "write type:\"smtp error!\", tag:\"name=smtp error!\""),
            ("customer=48213", "write tag:customer=48213"),
            ("customer:48213", "a tag is tag:customer=48213"),
            ("id:abc", "neither a condition"),
            ("a\u{7}", "control characters"),
        ] {
            assert!(refusal(line).contains(message), "{line}: {}", refusal(line));
        }
        assert!(refusal(&format!("error:{}", "x".repeat(101))).contains("at most 100 characters"));
        assert!(refusal(&"x".repeat(MAX_SEARCH_CHARS + 1)).contains("at most 1000"));
    }

    fn matches(part: IdPart, id: JobId) -> bool {
        match part {
            IdPart::Whole(whole) => whole == id,
            IdPart::Start { from, to } => (from..=to).contains(&id.0),
            IdPart::End { mask, bits } => (id.0.as_u128() & mask as u128) == bits as u128,
        }
    }

    #[test]
    fn an_id_is_found_by_each_of_its_starts_and_ends() {
        let id: JobId = ID.parse().expect("an id");
        for chars in 1..=ID_CHARS {
            let start = &ID[..JobId::PREFIX.len() + chars];
            assert!(matches(id_part(start).expect(start), id), "{start}");
        }
        for chars in ID_END_CHARS {
            let end = &ID[ID.len() - chars..];
            assert!(matches(id_part(end).expect(end), id), "{end}");
            let (first, rest) = end.split_at(1);
            let other = format!("{}{rest}", if first == "0" { "1" } else { "0" });
            assert!(!matches(id_part(&other).expect(&other), id), "{other}");
        }
        assert_eq!(id_part("…MXSMQW"), id_part("mxsmqw"));
        assert_eq!(id_part("job_8"), None, "no id starts with it");
        assert!(!matches(id_part("job_01m7w3hb").expect("a start"), id));
    }

    proptest! {
        #[test]
        fn a_written_condition_is_read_as_it_was(value in "[ -~äß→]{1,40}") {
            let line = condition("type", &value);
            let read = read(&line, now()).expect("it reads");
            prop_assert_eq!(read.job_type, Some(value));
        }

        #[test]
        fn no_line_panics(line in "\\PC{0,40}") {
            let _ = read(&line, now());
        }

        #[test]
        fn ids_are_found_by_their_parts(bits in any::<u128>(), start in 1_usize..26, end in 4_usize..=12) {
            let id = JobId(Uuid::from_u128(bits & !(0xf << 76) | (7 << 76)));
            let text = id.to_string();
            prop_assert!(matches(id_part(&text[..4 + start]).expect("a start"), id));
            prop_assert!(matches(id_part(&text[text.len() - end..]).expect("an end"), id));
        }
    }
}
