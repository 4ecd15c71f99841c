//! Entries of a list that fail alone: one that cannot be read does not refuse the others.

use std::{borrow::Cow, collections::BTreeMap, fmt, marker::PhantomData};

use fencepost_domain::error::Error;
use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::{
    extract::{UnknownFields, parse_here},
    produced::unmark,
};

/// An entry that is read later.
pub struct Entry<T> {
    json: Box<RawValue>,
    /// Stands for bytes that are no UTF-8.
    mark: Option<char>,
    content: PhantomData<fn() -> T>,
}

impl<T> fmt::Debug for Entry<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Entry").field(&self.json).finish()
    }
}

impl<'de, T> Deserialize<'de> for Entry<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let json = Box::<RawValue>::deserialize(deserializer)?;
        Ok(Self { json, mark: None, content: PhantomData })
    }
}

impl<T: DeserializeOwned + ToSchema> Entry<T> {
    /// Lets this character stand for bytes that are no UTF-8.
    pub fn set_mark(&mut self, mark: char) {
        self.mark = Some(mark);
    }

    /// Reads the entry at `path`, such as `acks[1]`.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the field that cannot be read.
    pub fn read(&self, unknown: UnknownFields, path: &str) -> Result<T, Error> {
        let text = self.json.get();
        let bytes = match self.mark {
            Some(mark) => Cow::Owned(unmark(text, mark)),
            None => Cow::Borrowed(text.as_bytes()),
        };
        parse_here(&bytes, unknown).map_err(|error| match error {
            Error::Invalid(mut broken) => {
                for it in &mut broken {
                    it.field = match it.field.as_str() {
                        "body" => path.to_owned(),
                        field => format!("{path}.{field}"),
                    };
                }
                Error::Invalid(broken)
            }
            other => other,
        })
    }

    /// The `job_id` of an entry that cannot be read; empty if it is no text either.
    #[must_use]
    pub fn job_id(&self) -> String {
        self.text("job_id").unwrap_or_default()
    }

    /// A field of an entry that cannot be read; none: it is missing, or no text either.
    #[must_use]
    pub fn text(&self, field: &str) -> Option<String> {
        let fields: BTreeMap<String, Box<RawValue>> = serde_json::from_str(self.json.get()).ok()?;
        let text: String = serde_json::from_str(fields.get(field)?.get()).ok()?;
        Some(self.mark.map_or(text.clone(), |mark| text.replace(mark, "\u{FFFD}")))
    }
}
