//! Reading requests whose unknown fields are stored, and the specification's times and durations.

use std::collections::BTreeMap;

use chrono::{DateTime, SecondsFormat, Utc};
use fencepost_domain::{error::Error, limits};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::DeserializeOwned};
use serde_json::value::RawValue;
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{Object, RefOr, Schema},
};

use fencepost_web::wire::{
    extract::RequestBody,
    validate::{Check, stored_json},
};

/// An object whose fields are read one by one, and kept as they came.
#[derive(Debug, Clone, Default)]
pub struct Fields(pub BTreeMap<String, Box<RawValue>>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        BTreeMap::deserialize(deserializer).map(Self)
    }
}

impl Serialize for Fields {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl PartialSchema for Fields {
    fn schema() -> RefOr<Schema> {
        Object::new().into()
    }
}

impl ToSchema for Fields {}

impl RequestBody for Fields {}

impl Fields {
    /// Takes a field, if it is present and not null. A wrong type is added to `check`.
    pub fn take<T: DeserializeOwned>(&mut self, name: &str, check: &mut Check) -> Option<T> {
        let value = self.0.remove(name).filter(|it| it.get() != "null")?;
        serde_json::from_str(value.get()).map_err(|error| check.refuse(name, message(&error))).ok()
    }

    /// The same for a required field.
    pub fn need<T: DeserializeOwned>(&mut self, name: &str, check: &mut Check) -> Option<T> {
        if self.0.get(name).is_none_or(|it| it.get() == "null") {
            check.refuse(name, "must be sent");
            return None;
        }
        self.take(name, check)
    }

    /// Takes a field as it came, if it is present and not null.
    pub fn raw(&mut self, name: &str) -> Option<Box<RawValue>> {
        self.0.remove(name).filter(|it| it.get() != "null")
    }

    /// Refuses a field that is not supported.
    pub fn refuse(&self, name: &str, why: &str, check: &mut Check) {
        if self.0.get(name).is_some_and(|it| !["null", "false"].contains(&it.get())) {
            check.refuse(name, why);
        }
    }
}

fn message(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or(&text).to_owned()
}

/// The envelope of a job stored with this protocol: what was sent beside its arguments.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct StoredEnvelope {
    pub ojs: Fields,
}

impl StoredEnvelope {
    /// The stored fields; none for a job of another protocol.
    #[must_use]
    pub fn read(envelope: Option<&str>) -> Fields {
        let kept: Option<Self> = envelope.and_then(|it| serde_json::from_str(it).ok());
        kept.unwrap_or_default().ojs
    }
}

/// A payload as arguments: itself if it is an array, or as the only one.
pub fn args(payload: &str) -> Result<Box<RawValue>, Error> {
    if payload.trim_start().starts_with('[') {
        return stored_json(payload.to_owned());
    }
    stored_json(format!("[{payload}]"))
}

/// The limit of a body with many jobs.
#[derive(Debug, Deserialize, ToSchema)]
pub struct Jobs {
    pub jobs: Vec<Fields>,
}

impl RequestBody for Jobs {
    const MAX_BYTES: usize = limits::MAX_BATCH_BODY_BYTES;
}

/// The limit of a body with a workflow.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct LargeFields(pub Fields);

impl RequestBody for LargeFields {
    const MAX_BYTES: usize = limits::MAX_BATCH_BODY_BYTES;
}

/// A point in time: absolute, or this many milliseconds from the present.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    At(DateTime<Utc>),
    AfterMs(i64),
}

/// Parses `2026-01-31T12:00:00Z`, or `+PT5S`.
pub fn when(text: &str) -> Option<When> {
    match text.strip_prefix('+') {
        Some(duration) => duration_ms(duration).map(When::AfterMs),
        None => DateTime::parse_from_rfc3339(text).ok().map(|it| When::At(it.to_utc())),
    }
}

/// Parses an ISO 8601 duration into milliseconds. Months and years have no fixed length: refused.
pub fn duration_ms(text: &str) -> Option<i64> {
    const SECOND: i64 = 1_000;
    const DAY: i64 = 86_400 * SECOND;
    // The parser ignores text after a duration, and accepts one that ends with its `T`.
    let (rest, duration) = iso8601::parsers::parse_duration(text.as_bytes()).ok()?;
    if !rest.is_empty() || text.ends_with('T') {
        return None;
    }
    match duration {
        iso8601::Duration::Weeks(weeks) => i64::from(weeks).checked_mul(7 * DAY),
        iso8601::Duration::YMDHMS { year: 0, month: 0, day, hour, minute, second, millisecond } => {
            let parts = [
                (day, DAY),
                (hour, 3_600 * SECOND),
                (minute, 60 * SECOND),
                (second, SECOND),
                (millisecond, 1),
            ];
            parts.iter().try_fold(0_i64, |sum, (many, length)| {
                sum.checked_add(i64::from(*many).checked_mul(*length)?)
            })
        }
        iso8601::Duration::YMDHMS { .. } => None,
    }
}

/// Reads an ISO 8601 duration in milliseconds. Refuses the field if it has another text.
pub fn duration(name: &str, text: &str, check: &mut Check) -> Option<i64> {
    let ms = duration_ms(text);
    if ms.is_none() {
        check.refuse(name, "must be an ISO 8601 duration, such as PT1S");
    }
    ms
}

/// A time in this protocol's format.
pub fn time(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(SecondsFormat::Millis, true)
}

/// A queue name: lower case, digits, `-` and `.`.
pub fn is_queue_name(name: &str) -> bool {
    let is_plain = |it: u8| it.is_ascii_lowercase() || it.is_ascii_digit();
    name.bytes().next().is_some_and(is_plain)
        && name.bytes().all(|it| is_plain(it) || b"-.".contains(&it))
}

/// A dotted type: each part begins with a letter.
pub fn is_type_name(name: &str) -> bool {
    let is_part = |it: &str| {
        it.bytes().next().is_some_and(|it| it.is_ascii_lowercase())
            && it
                .bytes()
                .all(|it| it.is_ascii_lowercase() || it.is_ascii_digit() || b"_-".contains(&it))
    };
    name.split('.').all(is_part)
}

/// A list separated by commas.
pub fn listed(text: Option<&str>) -> Vec<String> {
    let names = text.unwrap_or_default().split(',').map(str::trim);
    names.filter(|it| !it.is_empty()).map(str::to_owned).collect()
}

/// # Errors
/// [`Error::Invalid`] when the page is out of bounds.
pub fn page(limit: Option<u32>, offset: Option<u32>, max: u32) -> Result<(u32, u32), Error> {
    const DEFAULT_LIMIT: u32 = 50;
    const MAX_OFFSET: u32 = 1_000;
    let (limit, offset) = (limit.unwrap_or(DEFAULT_LIMIT), offset.unwrap_or(0));
    let mut check = Check::default();
    check.range("limit", limit, 1, max);
    check.range("offset", offset, 0, MAX_OFFSET);
    check.finish()?;
    Ok((limit, offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_in_milliseconds() {
        assert_eq!(duration_ms("PT1S"), Some(1_000));
        assert_eq!(duration_ms("PT5M"), Some(300_000));
        assert_eq!(duration_ms("P1DT2H"), Some(93_600_000));
        assert_eq!(duration_ms("PT0.5S"), Some(500));
        assert_eq!(duration_ms("P1W"), Some(604_800_000));
        assert_eq!(duration_ms("P1M"), None);
        for odd in ["5s", "PT", "PT1Sfoo", "PT1H30", "P1W2D", ""] {
            assert_eq!(duration_ms(odd), None, "{odd}");
        }
    }

    #[test]
    fn times_are_absolute_or_from_now() {
        assert_eq!(when("+PT2S"), Some(When::AfterMs(2_000)));
        assert!(matches!(when("2020-01-01T00:00:00Z"), Some(When::At(_))));
        assert_eq!(when("tomorrow"), None);
    }

    #[test]
    fn names_are_those_of_the_specification() {
        let types = ["email.send", "dlq.test.list-first", "a"];
        assert!(types.iter().all(|it| is_type_name(it)));
        let odd = ["Email.Send", "email send", "1email.send", "", "email@send!", "a..b"];
        assert!(odd.iter().all(|it| !is_type_name(it)));
        assert!(["default", "0-a.b"].iter().all(|it| is_queue_name(it)));
        assert!(
            ["Default", "my_queue!", "-invalid", "my queue", ""]
                .iter()
                .all(|it| !is_queue_name(it))
        );
    }
}
