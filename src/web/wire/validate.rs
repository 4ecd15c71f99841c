//! Validation of request fields against `domain::limits`: each broken rule becomes a line that
//! names the field and the bound.

use chrono::{DateTime, Datelike, Utc};
use fencepost_domain::{
    error::{Error, FieldError},
    limits,
    text::{self, json_depth},
};
use serde_json::value::RawValue;

use fencepost_engine::dispatch::Poll;

/// Collects broken rules, below one path.
#[derive(Debug, Default)]
pub struct Check {
    prefix: String,
    broken: Vec<FieldError>,
}

impl Check {
    /// For fields below `prefix`, such as `jobs[3].`.
    #[must_use]
    pub fn below(prefix: impl Into<String>) -> Self {
        Self { prefix: prefix.into(), broken: Vec::new() }
    }

    /// The path below which the fields are.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.prefix
    }

    /// Adds a broken rule.
    pub fn refuse(&mut self, field: &str, message: impl Into<String>) {
        self.broken.push(FieldError::new(format!("{}{field}", self.prefix), message));
    }

    /// Refuses a name of no or more than `max_chars` characters, or with control characters.
    pub fn name(&mut self, field: &str, value: &str, max_chars: usize) {
        if let Err(error) = text::check_name(value, max_chars) {
            self.refuse(field, error.to_string());
        }
    }

    /// Like [`Self::name`], of a name that stands in paths, of which `.` and `..` are steps.
    pub fn path_name(&mut self, field: &str, value: &str, max_chars: usize) {
        self.name(field, value, max_chars);
        if text::is_path_step(value) {
            self.refuse(field, text::PATH_STEP);
        }
    }

    /// Like [`Self::name`], of a name that people outside the project see: see
    /// [`text::check_public_name`].
    pub fn public_name(&mut self, field: &str, value: &str, max_chars: usize) {
        if let Err(error) = text::check_public_name(value, max_chars) {
            self.refuse(field, error.to_string());
        }
    }

    /// Like [`Self::name`], when there is one.
    pub fn optional_name(&mut self, field: &str, value: Option<&str>, max_chars: usize) {
        if let Some(value) = value {
            self.name(field, value, max_chars);
        }
    }

    /// Refuses more than `max` names, and each that [`Self::name`] refuses.
    pub fn names(&mut self, field: &str, values: &[String], max: usize, max_chars: usize) {
        if values.len() > max {
            self.refuse(field, format!("must have at most {max} entries, has {}", values.len()));
            return;
        }
        for (index, value) in values.iter().enumerate() {
            self.name(&format!("{field}[{index}]"), value, max_chars);
        }
    }

    /// The names in a poll; `queues` and `job_types` are what its protocol calls these fields.
    pub fn poll(&mut self, poll: &Poll, queues: &str, job_types: &str) {
        if let Some(worker_id) = &poll.worker_id {
            self.path_name("worker_id", worker_id, limits::MAX_WORKER_ID_CHARS);
        }
        self.names(queues, &poll.queues, limits::MAX_POLL_QUEUES, limits::MAX_QUEUE_CHARS);
        let (max, max_chars) = (limits::MAX_POLL_JOB_TYPES, limits::MAX_JOB_TYPE_CHARS);
        self.names(job_types, &poll.job_types, max, max_chars);
        let labels = poll.labels.as_deref().unwrap_or_default();
        self.names("labels", labels, limits::MAX_LABELS, limits::MAX_LABEL_CHARS);
    }

    /// Refuses a list of no or more than `max` entries.
    pub fn count(&mut self, field: &str, sent: usize, max: usize) {
        if !(1..=max).contains(&sent) {
            self.refuse(field, format!("must have between 1 and {max} entries, has {sent}"));
        }
    }

    /// The type of a custom event, without a reserved prefix.
    pub fn event_type(&mut self, field: &str, kind: &str, reserved: &[&str]) {
        self.name(field, kind, limits::MAX_EVENT_TYPE_CHARS);
        let is_plain = |it: char| it.is_ascii_alphanumeric() || "_.-".contains(it);
        if !kind.chars().all(is_plain) {
            self.refuse(field, "must be made of letters, digits, `_`, `.` and `-`");
        }
        if let Some(prefix) = reserved.iter().find(|it| kind.starts_with(**it)) {
            self.refuse(field, format!("must not begin with `{prefix}`"));
        }
    }

    /// Refuses a value outside of `min..=max`.
    pub fn range<T: PartialOrd + std::fmt::Display>(
        &mut self,
        field: &str,
        value: T,
        min: T,
        max: T,
    ) {
        // Written so that NaN is refused.
        if !(value >= min && value <= max) {
            self.refuse(field, format!("must be between {min} and {max}, is {value}"));
        }
    }

    /// A time that can be stored; the database's clock checks how far ahead it may lie.
    pub fn time(&mut self, field: &str, value: Option<DateTime<Utc>>) {
        const YEARS: std::ops::RangeInclusive<i32> = 1970..=9999;
        if value.is_some_and(|it| !YEARS.contains(&it.year())) {
            self.refuse(
                field,
                format!("must be in the years {} to {}", YEARS.start(), YEARS.end()),
            );
        }
    }

    /// Refuses a JSON value that is nested too deeply. Returns whether it is accepted.
    pub fn depth(&mut self, field: &str, value: &RawValue) -> bool {
        let (depth, max) = (json_depth(value.get()), limits::MAX_JSON_DEPTH);
        if depth > max {
            self.refuse(field, format!("must be nested at most {max} levels deep, is {depth}"));
        }
        depth <= max
    }

    /// A JSON value of at most `limit_bytes`, as sent.
    ///
    /// # Errors
    /// [`Error::FieldTooLarge`]: size has a code of its own.
    pub fn size(&self, field: &str, value: &RawValue, limit_bytes: usize) -> Result<(), Error> {
        self.bytes(field, value.get().len(), limit_bytes)
    }

    /// At most `limit_bytes`, as stored.
    ///
    /// # Errors
    /// [`Error::FieldTooLarge`], as [`Self::size`].
    pub fn bytes(&self, field: &str, kept_bytes: usize, limit_bytes: usize) -> Result<(), Error> {
        if kept_bytes <= limit_bytes {
            return Ok(());
        }
        Err(Error::FieldTooLarge { field: format!("{}{field}", self.prefix), limit_bytes })
    }

    /// Adds the rules that another check found broken.
    pub fn absorb(&mut self, other: Self) {
        self.broken.extend(other.broken);
    }

    /// # Errors
    /// [`Error::Invalid`] when any rule was broken.
    pub fn finish(self) -> Result<(), Error> {
        if self.broken.is_empty() { Ok(()) } else { Err(Error::Invalid(self.broken)) }
    }
}

/// Stored JSON, byte for byte as it was sent.
pub fn stored_json(text: String) -> Result<Box<RawValue>, Error> {
    RawValue::from_string(text).map_err(Error::internal)
}
