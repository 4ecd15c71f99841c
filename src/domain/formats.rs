//! Formats of single values in requests: each malformed value is answered with a message that says
//! what is wanted, not with the parser's words.

use std::{collections::BTreeMap, fmt};

use chrono::{DateTime, Utc};
use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, Visitor},
};
use uuid::Uuid;

use crate::{
    ids::{BatchId, JobId},
    job::JobState,
};

const TIME: &str = "must be a time with its zone, as in RFC 3339: 2026-01-31T12:00:00Z";
const FINGERPRINT: &str = "must be the fingerprint of a group";
const JOBS: &str = "must be a list of ids of jobs: [\"job_01m7w3ha3aextt8pkwwdmxsmqw\"]";
const BATCH: &str = "must be the id of a batch";

/// Characters of a name that a message repeats.
const MAX_SHOWN_CHARS: usize = 60;

/// A time, for `#[serde(deserialize_with)]`. Null is no time.
pub fn optional_time<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<DateTime<Utc>>, D::Error> {
    let text = Option::<String>::deserialize(from).map_err(|_| D::Error::custom(TIME))?;
    text.map(|it| parse_time(&it)).transpose()
}

/// States of jobs that are separated by commas.
pub fn job_states<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<JobState>, D::Error> {
    let text = String::deserialize(from)?;
    let state = |name: &str| JobState::ALL.into_iter().find(|it| it.as_str() == name.trim());
    let states = text.split(',').map(|name| {
        state(name).ok_or_else(|| {
            let names = JobState::ALL.map(JobState::as_str).join(", ");
            let name: String = name.chars().take(MAX_SHOWN_CHARS).collect();
            D::Error::custom(format!("must be of {names}, separated by commas, has `{name}`"))
        })
    });
    states.collect()
}

/// A time where null is refused.
pub fn named_time<'de, D: Deserializer<'de>>(from: D) -> Result<Option<DateTime<Utc>>, D::Error> {
    let text = String::deserialize(from).map_err(|_| D::Error::custom(TIME))?;
    parse_time(&text).map(Some)
}

/// The fingerprint of a group of dead letters where null is refused.
pub fn named_fingerprint<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Uuid>, D::Error> {
    let text = String::deserialize(from).map_err(|_| D::Error::custom(FINGERPRINT))?;
    text.parse().map(Some).map_err(|_| D::Error::custom(FINGERPRINT))
}

/// The id of a batch. Null is no batch.
pub fn optional_batch<'de, D: Deserializer<'de>>(from: D) -> Result<Option<BatchId>, D::Error> {
    let text = Option::<String>::deserialize(from).map_err(|_| D::Error::custom(BATCH))?;
    text.map(|it| it.parse().map_err(|_| D::Error::custom(BATCH))).transpose()
}

/// The id of a batch where null is refused.
pub fn named_batch<'de, D: Deserializer<'de>>(from: D) -> Result<Option<BatchId>, D::Error> {
    let text = String::deserialize(from).map_err(|_| D::Error::custom(BATCH))?;
    text.parse().map(Some).map_err(|_| D::Error::custom(BATCH))
}

/// The ids of jobs where null is refused.
pub fn named_jobs<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<JobId>>, D::Error> {
    let texts = Vec::<String>::deserialize(from).map_err(|_| D::Error::custom(JOBS))?;
    let ids = texts.iter().map(|it| it.parse().map_err(|_| D::Error::custom(JOBS)));
    ids.collect::<Result<_, _>>().map(Some)
}

/// Tags. A name that is given twice is refused: one of its values would be lost.
pub fn tags<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<BTreeMap<String, String>>, D::Error> {
    struct Tags(BTreeMap<String, String>);

    impl<'de> Deserialize<'de> for Tags {
        fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
            from.deserialize_map(TagsVisitor)
        }
    }

    struct TagsVisitor;

    impl<'de> Visitor<'de> for TagsVisitor {
        type Value = Tags;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a map")
        }

        fn visit_map<M: MapAccess<'de>>(self, mut from: M) -> Result<Tags, M::Error> {
            let mut tags = BTreeMap::new();
            while let Some((name, value)) = from.next_entry::<String, String>()? {
                if tags.contains_key(&name) {
                    let shown: String = name.chars().take(MAX_SHOWN_CHARS).collect();
                    return Err(M::Error::custom(format!("has `{shown}` twice")));
                }
                tags.insert(name, value);
            }
            Ok(Tags(tags))
        }
    }

    Ok(Option::<Tags>::deserialize(from)?.map(|it| it.0))
}

fn parse_time<E: Error>(text: &str) -> Result<DateTime<Utc>, E> {
    text.parse().map_err(|_| E::custom(TIME))
}

/// Milliseconds as seconds, rounded up: other protocols count in milliseconds.
///
/// ```
/// # use fencepost_domain::formats::whole_seconds;
/// assert_eq!((whole_seconds(1), whole_seconds(1_000), whole_seconds(0)), (1, 1, 0));
/// ```
#[must_use]
pub fn whole_seconds(ms: i64) -> i64 {
    const MS_PER_SECOND: i64 = 1_000;
    ms.div_euclid(MS_PER_SECOND) + i64::from(ms.rem_euclid(MS_PER_SECOND) > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct Request {
        #[serde(default, deserialize_with = "optional_time")]
        run_at: Option<DateTime<Utc>>,
        #[serde(default, deserialize_with = "named_time")]
        since: Option<DateTime<Utc>>,
        #[serde(default, deserialize_with = "named_fingerprint")]
        fingerprint: Option<Uuid>,
        #[serde(default, deserialize_with = "optional_batch")]
        batch_id: Option<BatchId>,
        #[serde(default, deserialize_with = "named_batch")]
        named_batch_id: Option<BatchId>,
        #[serde(default, deserialize_with = "named_jobs")]
        ids: Option<Vec<JobId>>,
    }

    #[test]
    fn a_malformed_value_is_answered_with_what_is_wanted() {
        let check = |json: &str, message: &str| {
            let error = serde_json::from_str::<Request>(json).expect_err(json).to_string();
            assert!(error.starts_with(message), "{json}: {error}");
        };
        check(r#"{"run_at": "tomorrow"}"#, TIME);
        check(r#"{"run_at": 5}"#, TIME);
        check(r#"{"since": null}"#, TIME);
        check(r#"{"fingerprint": "abc"}"#, FINGERPRINT);
        check(r#"{"fingerprint": null}"#, FINGERPRINT);
        check(r#"{"batch_id": "job_01m7w3ha3aextt8pkwwdmxsmqw"}"#, BATCH);
        check(r#"{"named_batch_id": null}"#, BATCH);
        check(r#"{"ids": null}"#, JOBS);
        check(r#"{"ids": ["batch_01m7w3ha3aextt8pkwwdmxsmqw"]}"#, JOBS);
    }

    #[test]
    fn a_value_may_be_missing_and_a_time_may_be_null() {
        let read: Request =
            serde_json::from_str(r#"{"run_at": null, "batch_id": null}"#).expect("it reads");
        assert!(read.batch_id.is_none() && read.named_batch_id.is_none() && read.ids.is_none());
        assert!(read.run_at.is_none() && read.since.is_none() && read.fingerprint.is_none());
        let read: Request =
            serde_json::from_str(r#"{"run_at": "2026-01-31T12:00:00+01:00"}"#).expect("it reads");
        assert_eq!(
            read.run_at.map(|it| it.to_rfc3339()).as_deref(),
            Some("2026-01-31T11:00:00+00:00")
        );
    }
}
