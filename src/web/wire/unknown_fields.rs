//! Reading JSON without its unknown fields, for clients that send more than this API knows.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

use fencepost_domain::text::printable;
use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, Error, IgnoredAny, IntoDeserializer, MapAccess,
    SeqAccess, Visitor,
};
use serde::forward_to_deserialize_any;

use super::json_words::is_misspelt;

/// Greatest number up to which a fraction has one integer: 2^53.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;

/// The names of a struct's fields; none: of a map, whose keys are data.
type Known = Option<&'static [&'static str]>;

/// Passes the fields of each struct on, at any depth, and skips all others. Alternatives that are
/// read by hand, such as the entries of `depends_on`, stay as strict as they are. Integers may be
/// written as fractions without a remainder: JSON Schema (2020-12, section 6.1.1) calls `1.0` one.
///
/// ```
/// # use fencepost_web::wire::unknown_fields::{KnownFields, Skipped};
/// # use serde::Deserialize;
/// #[derive(Debug, PartialEq, Deserialize)]
/// #[serde(deny_unknown_fields)]
/// struct Ack { job_id: String }
///
/// let json = &mut serde_json::Deserializer::from_str(r#"{"job_id": "a", "sdk": {"x": [1]}}"#);
/// let ack = Ack::deserialize(KnownFields(json, Skipped::All)).unwrap();
/// assert_eq!(ack, Ack { job_id: "a".to_owned() });
/// ```
#[derive(Debug)]
pub struct KnownFields<T>(pub T, pub Skipped);

/// The unknown fields that are skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skipped {
    /// None: a struct gets them, and refuses them.
    None,
    /// All of them.
    All,
    /// All but those that are spelt nearly like a known one: a struct gets these, and refuses them.
    /// Each skipped field is logged once.
    AllButMisspelt,
}

impl<T> KnownFields<T> {
    /// The same filter, around the visitor of a value with these fields.
    fn around<V>(&self, inner: V, known: Known) -> Filter<V> {
        Filter { inner, known, skipped: self.1 }
    }
}

macro_rules! integers {
    ($($method:ident)*) => {
        $(
            fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
                self.0.$method(Integer(visitor))
            }
        )*
    };
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for KnownFields<D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let filter = self.around(visitor, None);
        self.0.deserialize_any(filter)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let filter = self.around(visitor, None);
        self.0.deserialize_option(filter)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        let filter = self.around(visitor, None);
        self.0.deserialize_newtype_struct(name, filter)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        let filter = self.around(visitor, Some(fields));
        self.0.deserialize_struct(name, fields, filter)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        let filter = self.around(visitor, None);
        self.0.deserialize_enum(name, variants, filter)
    }

    // Of a string that is no text: see `ProducedText`.
    fn deserialize_byte_buf<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_byte_buf(visitor)
    }

    integers! {
        deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64
    }

    forward_to_deserialize_any! {
        bool i128 u128 f32 f64 char str string bytes unit unit_struct seq tuple tuple_struct map
        identifier ignored_any
    }
}

/// The visitor of an integer.
struct Integer<V>(V);

impl<'de, V: Visitor<'de>> Visitor<'de> for Integer<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.expecting(f)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<V::Value, E> {
        self.0.visit_i64(value)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<V::Value, E> {
        self.0.visit_u64(value)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<V::Value, E> {
        let is_integer = value.fract() == 0.0 && value.abs() <= MAX_EXACT;
        if is_integer { self.0.visit_i64(value as i64) } else { self.0.visit_f64(value) }
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for KnownFields<S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<S::Value, D::Error> {
        self.0.deserialize(KnownFields(deserializer, self.1))
    }
}

/// A visitor, a map or a list, with the fields that it may see.
struct Filter<T> {
    inner: T,
    known: Known,
    skipped: Skipped,
}

macro_rules! pass_on {
    ($($visit:ident: $value:ty;)*) => {
        $(
            fn $visit<E: Error>(self, value: $value) -> Result<V::Value, E> {
                self.inner.$visit(value)
            }
        )*
    };
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Filter<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inner.expecting(f)
    }

    pass_on! {
        visit_bool: bool;
        visit_i64: i64;
        visit_u64: u64;
        visit_f64: f64;
        visit_str: &str;
        visit_borrowed_str: &'de str;
        visit_string: String;
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        self.inner.visit_some(KnownFields(deserializer, self.skipped))
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> Result<V::Value, D::Error> {
        self.inner.visit_newtype_struct(KnownFields(deserializer, self.skipped))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<V::Value, A::Error> {
        self.inner.visit_seq(Filter { inner: list, known: None, skipped: self.skipped })
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        self.inner.visit_map(Filter { inner: map, known: self.known, skipped: self.skipped })
    }

    fn visit_enum<A: EnumAccess<'de>>(self, variant: A) -> Result<V::Value, A::Error> {
        self.inner.visit_enum(variant)
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Filter<A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, A::Error> {
        self.inner.next_element_seed(KnownFields(seed, self.skipped))
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Filter<A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, A::Error> {
        let known = self.known.filter(|_| self.skipped != Skipped::None);
        let Some(known) = known else { return self.inner.next_key_seed(seed) };
        while let Some(name) = self.inner.next_key::<String>()? {
            let is_strict = self.skipped == Skipped::AllButMisspelt;
            if known.contains(&name.as_str()) || is_strict && is_misspelt(&name, known) {
                return seed.deserialize(name.into_deserializer()).map(Some);
            }
            if is_strict {
                log_once(&name);
            }
            self.inner.next_value::<IgnoredAny>()?;
        }
        Ok(None)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        self.inner.next_value_seed(KnownFields(seed, self.skipped))
    }
}

/// Fields that are logged: callers choose their names.
const MAX_LOGGED_FIELDS: usize = 100;

/// Logs a field that a worker sends, and that this server does not know, once.
fn log_once(field: &str) {
    static LOGGED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let field = printable(field);
    let mut logged = LOGGED.lock().unwrap_or_else(PoisonError::into_inner);
    if logged.len() < MAX_LOGGED_FIELDS && !logged.contains(&field) {
        tracing::info!(field, "a worker sends a field that this server does not know");
        logged.insert(field);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;
    use serde_json::value::RawValue;

    use super::*;
    use crate::wire::extract::Object;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Outer {
        payload: Option<Box<RawValue>>,
        tags: BTreeMap<String, String>,
        inner: Vec<Object<Inner>>,
        rate: f64,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Inner {
        kind: Kind,
        size: Option<u8>,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Kind {
        Small,
    }

    fn read<'a, T: Deserialize<'a>>(json: &'a str) -> Result<T, serde_json::Error> {
        T::deserialize(KnownFields(&mut serde_json::Deserializer::from_str(json), Skipped::All))
    }

    #[test]
    fn unknown_fields_are_skipped_at_any_depth_and_data_is_kept() {
        let json = r#"{"x": null, "payload": {"any": 1.50}, "tags": {"any": "b"}, "rate": 2,
            "inner": [{"kind": "small", "y": [{}]}, {"size": 3, "kind": "small"}]}"#;
        let read = read::<Object<Outer>>(json).expect("an object").0;
        assert_eq!(read.payload.expect("a payload").get(), r#"{"any": 1.50}"#);
        assert_eq!((read.tags["any"].as_str(), read.rate), ("b", 2.0));
        let sizes: Vec<_> = read.inner.into_iter().map(|it| it.0.size).collect();
        assert_eq!(sizes, [None, Some(3)]);
    }

    #[test]
    fn what_is_known_is_checked_as_always() {
        assert!(read::<Object<Inner>>(r#"{"size": 3}"#).is_err());
        assert!(read::<Object<Inner>>(r#"{"kind": "large"}"#).is_err());
        assert!(read::<Object<Inner>>(r#"{"kind": "small", "size": "3"}"#).is_err());
        assert!(read::<Object<Inner>>(r#"["small", 3]"#).is_err());
    }

    #[test]
    fn an_integer_may_be_written_as_a_fraction_without_a_remainder() {
        let size = |json: &str| {
            let json = format!(r#"{{"kind": "small", "size": {json}}}"#);
            read::<Inner>(&json).map(|it| it.size)
        };
        for (json, value) in [("1.0", 1), ("1e2", 100), ("-0", 0), ("20.50e1", 205)] {
            assert_eq!(size(json).expect("an integer"), Some(value), "{json}");
        }
        for json in ["1.5", "1e3", "-1.0", "1e30"] {
            assert!(size(json).is_err(), "{json}");
        }
    }

    #[test]
    fn a_misspelt_field_is_passed_on_behind_any_other() {
        let read = |json: &str| {
            let json = &mut serde_json::Deserializer::from_str(json);
            Inner::deserialize(KnownFields(json, Skipped::AllButMisspelt))
        };
        assert!(read(r#"{"a": 1, "kind": "small", "zone": 2}"#).is_ok());
        let refused = read(r#"{"a": 1, "kind": "small", "siez": 2}"#).expect_err("refused");
        assert!(refused.to_string().starts_with("unknown field `siez`"), "{refused}");
    }
}
