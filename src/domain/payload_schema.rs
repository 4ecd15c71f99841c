//! JSON Schemas of payloads: those keywords whose check takes time in proportion to the payload.
//! With references or alternatives, a short schema can take hours. So no library is used: they have
//! all keywords, and collect every mistake before they report the first.

mod pattern;

use std::{cmp::Ordering, collections::BTreeMap, slice};

use regex::Regex;
use serde_json::{Number, Value};

/// Maximum bytes of a schema, as it was sent.
pub const MAX_SCHEMA_BYTES: usize = 16 * 1024;
/// Maximum properties, required names, allowed values or `prefixItems` at one path of a schema:
/// each can be compared with each value of a payload.
pub const MAX_ENTRIES: usize = 100;
/// Maximum patterns of a schema: they are compiled for each check.
pub const MAX_PATTERNS: usize = 10;
/// Mistakes that are reported of one payload.
const MAX_REPORTED_MISTAKES: usize = 10;
/// Bytes of a place in a message.
const MAX_PLACE_BYTES: usize = 200;
/// The draft that schemas may name.
const DRAFT: &str = "https://json-schema.org/draft/2020-12/schema";

/// Keywords that only describe.
const DESCRIBING: [&str; 9] = [
    "$comment",
    "title",
    "description",
    "default",
    "examples",
    "format",
    "deprecated",
    "readOnly",
    "writeOnly",
];
const KNOWN: &str = "type, enum, const, required, properties, additionalProperties, items, \
                     prefixItems, pattern, minimum, maximum, exclusiveMinimum, exclusiveMaximum, \
                     minLength, maxLength, minItems, maxItems, minProperties, maxProperties, \
                     or one that describes";

/// A violation of the schema by a payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// Where, as `.address.zip` or `.lines[2]`; empty: the payload itself.
    pub place: String,
    /// The rule that the value must follow.
    pub message: String,
}

/// A schema that was accepted.
#[derive(Debug, Default)]
pub struct PayloadSchema {
    /// Nothing fits: it is `false`.
    is_never: bool,
    types: Vec<Type>,
    /// `enum`, or the one value of `const`.
    choices: Option<Vec<Value>>,
    required: Vec<String>,
    properties: BTreeMap<String, Self>,
    /// Of members that are no properties.
    additional: Option<Box<Self>>,
    prefix: Vec<Self>,
    /// Of items behind the prefix.
    items: Option<Box<Self>>,
    pattern: Option<Regex>,
    bounds: Vec<(Bound, Number)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Type {
    Null,
    Boolean,
    Object,
    Array,
    Number,
    Integer,
    String,
}

/// A limit of a schema on values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bound {
    Minimum,
    Maximum,
    Above,
    Below,
    MinLength,
    MaxLength,
    MinItems,
    MaxItems,
    MinProperties,
    MaxProperties,
}

impl Type {
    const NAMES: [(&str, Self); 7] = [
        ("null", Self::Null),
        ("boolean", Self::Boolean),
        ("object", Self::Object),
        ("array", Self::Array),
        ("number", Self::Number),
        ("integer", Self::Integer),
        ("string", Self::String),
    ];

    fn read(value: &Value) -> Option<Self> {
        Self::NAMES.iter().find(|it| value == it.0).map(|it| it.1)
    }

    fn name(self) -> &'static str {
        Self::NAMES.iter().find(|it| it.1 == self).map_or("", |it| it.0)
    }

    fn has(self, value: &Value) -> bool {
        match (self, value) {
            (Self::Null, Value::Null)
            | (Self::Boolean, Value::Bool(_))
            | (Self::Object, Value::Object(_))
            | (Self::Array, Value::Array(_))
            | (Self::Number, Value::Number(_))
            | (Self::String, Value::String(_)) => true,
            (Self::Integer, Value::Number(it)) => {
                !it.is_f64() || it.as_f64().is_some_and(|it| it.fract() == 0.0)
            }
            _ => false,
        }
    }
}

impl Bound {
    const NAMES: [(&str, Self); 10] = [
        ("minimum", Self::Minimum),
        ("maximum", Self::Maximum),
        ("exclusiveMinimum", Self::Above),
        ("exclusiveMaximum", Self::Below),
        ("minLength", Self::MinLength),
        ("maxLength", Self::MaxLength),
        ("minItems", Self::MinItems),
        ("maxItems", Self::MaxItems),
        ("minProperties", Self::MinProperties),
        ("maxProperties", Self::MaxProperties),
    ];

    fn is_of_numbers(self) -> bool {
        matches!(self, Self::Minimum | Self::Maximum | Self::Above | Self::Below)
    }

    /// The figure of a value that the limit is about; none: the value is of another type.
    fn measure(self, value: &Value) -> Option<Number> {
        match (self, value) {
            (Self::MinLength | Self::MaxLength, Value::String(it)) => {
                Some(it.chars().count().into())
            }
            (Self::MinItems | Self::MaxItems, Value::Array(it)) => Some(it.len().into()),
            (Self::MinProperties | Self::MaxProperties, Value::Object(it)) => Some(it.len().into()),
            (_, Value::Number(it)) if self.is_of_numbers() => Some(it.clone()),
            _ => None,
        }
    }

    fn holds(self, measured: &Number, bound: &Number) -> bool {
        let order = compare(measured, bound);
        match self {
            Self::Minimum | Self::MinLength | Self::MinItems | Self::MinProperties => order.is_ge(),
            Self::Maximum | Self::MaxLength | Self::MaxItems | Self::MaxProperties => order.is_le(),
            Self::Above => order.is_gt(),
            Self::Below => order.is_lt(),
        }
    }

    fn message(self, bound: &Number) -> String {
        match self {
            Self::Minimum => format!("must be at least {bound}"),
            Self::Maximum => format!("must be at most {bound}"),
            Self::Above => format!("must be more than {bound}"),
            Self::Below => format!("must be less than {bound}"),
            Self::MinLength => format!("must have at least {bound} characters"),
            Self::MaxLength => format!("must have at most {bound} characters"),
            Self::MinItems => format!("must have at least {bound} items"),
            Self::MaxItems => format!("must have at most {bound} items"),
            Self::MinProperties => format!("must have at least {bound} members"),
            Self::MaxProperties => format!("must have at most {bound} members"),
        }
    }
}

/// Whole numbers exactly, others as doubles.
fn compare(one: &Number, other: &Number) -> Ordering {
    match (one.as_i128(), other.as_i128()) {
        (Some(one), Some(other)) => one.cmp(&other),
        _ => {
            let (one, other) = (one.as_f64(), other.as_f64());
            one.partial_cmp(&other).unwrap_or(Ordering::Equal)
        }
    }
}

/// Whether two values are the same, as 1 and 1.0 are.
fn are_equal(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => compare(one, other).is_eq(),
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|it| are_equal(it.0, it.1))
        }
        (Value::Object(one), Value::Object(other)) => {
            let has = |(name, value): (&String, &Value)| {
                other.get(name).is_some_and(|it| are_equal(value, it))
            };
            one.len() == other.len() && one.iter().all(has)
        }
        _ => one == other,
    }
}

impl PayloadSchema {
    /// Reads a schema.
    ///
    /// # Errors
    /// The first mistake of the schema, and its place.
    pub fn read(schema: &Value) -> Result<Self, String> {
        Self::read_at(schema, "schema", &mut 0)
    }

    fn read_at(schema: &Value, at: &str, patterns: &mut usize) -> Result<Self, String> {
        let keywords = match schema {
            Value::Bool(is_any) => return Ok(Self { is_never: !is_any, ..Self::default() }),
            Value::Object(keywords) => keywords,
            _ => return Err(format!("{at} must be an object")),
        };
        if keywords.contains_key("enum") && keywords.contains_key("const") {
            return Err(format!("{at} must have one of enum and const"));
        }
        let mut read = Self::default();
        for (name, value) in keywords {
            let at = shortened(&format!("{at}.{name}"));
            let entries = value.as_array().map_or(0, Vec::len);
            let entries = value.as_object().map_or(entries, serde_json::Map::len);
            if entries > MAX_ENTRIES {
                return Err(format!("{at} must have at most {MAX_ENTRIES} entries, has {entries}"));
            }
            read.add(name, value, &at, patterns)?;
        }
        Ok(read)
    }

    fn add(
        &mut self,
        name: &str,
        value: &Value,
        at: &str,
        patterns: &mut usize,
    ) -> Result<(), String> {
        let wrong = |must: &str| format!("{at} must be {must}");
        let mut below = |at: &str, value: &Value| Self::read_at(value, at, patterns);
        let bound = Bound::NAMES.iter().find(|it| it.0 == name).map(|it| it.1);
        match (name, value) {
            ("$schema", Value::String(draft)) if draft.trim_end_matches('#') == DRAFT => {}
            ("$schema", _) => return Err(wrong(DRAFT)),
            ("type" | "enum", Value::Array(none)) if none.is_empty() => {
                return Err(wrong("a list of at least one entry"));
            }
            ("type", sent) => {
                let sent = sent.as_array().map_or_else(|| slice::from_ref(sent), Vec::as_slice);
                let types = sent.iter().map(Type::read).collect::<Option<_>>();
                let names = || Type::NAMES.map(|it| format!("`{}`", it.0)).join(" or ");
                self.types = types.ok_or_else(|| wrong(&names()))?;
            }
            ("enum", Value::Array(choices)) => self.choices = Some(choices.clone()),
            ("const", only) => self.choices = Some(vec![only.clone()]),
            ("required", Value::Array(names)) => {
                let names = names.iter().map(|it| it.as_str().map(str::to_owned)).collect();
                self.required = Option::ok_or_else(names, || wrong("a list of names"))?;
            }
            ("properties", Value::Object(properties)) => {
                for (name, value) in properties {
                    let property = below(&format!("{at}.{name}"), value)?;
                    self.properties.insert(name.clone(), property);
                }
            }
            ("prefixItems", Value::Array(items)) => {
                for (index, value) in items.iter().enumerate() {
                    self.prefix.push(below(&format!("{at}[{index}]"), value)?);
                }
            }
            ("additionalProperties", value) => self.additional = Some(below(at, value)?.into()),
            ("items", value) => self.items = Some(below(at, value)?.into()),
            ("pattern", Value::String(pattern)) => {
                *patterns += 1;
                if *patterns > MAX_PATTERNS {
                    return Err(format!("{at} is one of more than {MAX_PATTERNS} patterns"));
                }
                self.pattern =
                    Some(pattern::compiled(pattern).map_err(|error| format!("{at}: {error}"))?);
            }
            (_, Value::Number(number)) if bound.is_some_and(|it| may_be(it, number)) => {
                self.bounds.extend(bound.map(|it| (it, number.clone())));
            }
            (name, _) if DESCRIBING.contains(&name) => {}
            _ if bound.is_some_and(|it| !it.is_of_numbers()) => {
                return Err(wrong("a whole number of at least 0"));
            }
            _ if bound.is_some() => return Err(wrong("a number")),
            ("enum" | "required" | "prefixItems", _) => return Err(wrong("a list")),
            ("properties", _) => return Err(wrong("an object")),
            ("pattern", _) => return Err(wrong("a text")),
            _ => return Err(format!("{at} is not a supported keyword; use {KNOWN}")),
        }
        Ok(())
    }

    /// Mistakes of a payload, up to `MAX_REPORTED_MISTAKES`. Its values are not repeated.
    #[must_use]
    pub fn mistakes(&self, payload: &Value) -> Vec<Mistake> {
        let mut found = Vec::new();
        self.look(payload, &mut String::new(), &mut found);
        found
    }

    fn look(&self, value: &Value, place: &mut String, found: &mut Vec<Mistake>) {
        if found.len() >= MAX_REPORTED_MISTAKES {
            return;
        }
        if let Some(message) = self.mistake_of(value) {
            found.push(Mistake { place: shortened(place), message });
        }
        let end = place.len();
        let mut below = |schema: Option<&Self>, name: std::fmt::Arguments<'_>, value: &Value| {
            let Some(schema) = schema else { return };
            place.push_str(&name.to_string());
            schema.look(value, place, found);
            place.truncate(end);
        };
        match value {
            Value::Object(members) => {
                for (name, value) in members {
                    let schema = self.properties.get(name).or(self.additional.as_deref());
                    below(schema, format_args!(".{name}"), value);
                }
            }
            Value::Array(items) => {
                for (index, value) in items.iter().enumerate() {
                    let schema = self.prefix.get(index).or(self.items.as_deref());
                    below(schema, format_args!("[{index}]"), value);
                }
            }
            _ => {}
        }
    }

    /// The first thing that is wrong with a value itself.
    fn mistake_of(&self, value: &Value) -> Option<String> {
        if self.is_never {
            return Some("must be left out".to_owned());
        }
        if !self.types.is_empty() && !self.types.iter().any(|it| it.has(value)) {
            let names: Vec<_> = self.types.iter().map(|it| it.name()).collect();
            return Some(format!("must be of type {}", names.join(" or ")));
        }
        if self.choices.as_ref().is_some_and(|all| !all.iter().any(|it| are_equal(it, value))) {
            return Some("is none of the values that its schema lists".to_owned());
        }
        if let Value::Object(members) = value
            && let Some(name) = self.required.iter().find(|it| !members.contains_key(*it))
        {
            return Some(format!("must have `{}`", shortened(name)));
        }
        if let (Value::String(text), Some(pattern)) = (value, &self.pattern)
            && !pattern.is_match(text)
        {
            return Some("must match the pattern of its schema".to_owned());
        }
        let broken = |(kind, bound): &(Bound, Number)| {
            let measured = kind.measure(value)?;
            (!kind.holds(&measured, bound)).then(|| kind.message(bound))
        };
        self.bounds.iter().find_map(broken)
    }
}

/// Sizes are whole and not negative.
fn may_be(bound: Bound, number: &Number) -> bool {
    bound.is_of_numbers() || number.as_u64().is_some()
}

fn shortened(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_PLACE_BYTES)].to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn mistakes(schema: Value, payload: Value) -> Vec<String> {
        let schema = PayloadSchema::read(&schema).expect("a schema");
        let mistakes = schema.mistakes(&payload).into_iter();
        mistakes.map(|it| format!("{} {}", it.place, it.message)).collect()
    }

    #[test]
    fn a_payload_is_compared_with_each_keyword() {
        let none: [&str; 0] = [];
        for (schema, fits, breaks, message) in [
            (json!({"type": "integer"}), json!(1.0), json!(1.5), "must be of type integer"),
            (json!({"type": ["null", "string"]}), json!(null), json!(1), "null or string"),
            (json!({"enum": [1, [2]]}), json!([2.0]), json!([3]), "none of the values"),
            (json!({"const": {"a": 1}}), json!({"a": 1}), json!({"a": 2}), "none of the values"),
            (json!({"required": ["a"]}), json!({"a": 0}), json!({}), "must have `a`"),
            (json!({"pattern": "^a"}), json!("ab"), json!("b"), "must match the pattern"),
            (json!({"minimum": 2}), json!(2), json!(1.9), "must be at least 2"),
            (json!({"maximum": 2}), json!(2), json!(3), "must be at most 2"),
            (json!({"exclusiveMinimum": 2}), json!(2.1), json!(2), "must be more than 2"),
            (json!({"exclusiveMaximum": 2}), json!(1), json!(2), "must be less than 2"),
            (json!({"minLength": 2}), json!("äö"), json!("ä"), "at least 2 characters"),
            (json!({"maxLength": 1}), json!("ä"), json!("äö"), "at most 1 characters"),
            (json!({"minItems": 1}), json!([0]), json!([]), "at least 1 items"),
            (json!({"maxItems": 0}), json!([]), json!([0]), "at most 0 items"),
            (json!({"minProperties": 1}), json!({"a": 0}), json!({}), "at least 1 members"),
            (json!({"maxProperties": 0}), json!({}), json!({"a": 0}), "at most 0 members"),
            (
                json!({"properties": {"a": false}}),
                json!({"b": 0}),
                json!({"a": 0}),
                ".a must be left",
            ),
            (json!({"additionalProperties": false}), json!({}), json!({"a": 0}), ".a must be left"),
            (json!({"items": {"type": "null"}}), json!([null]), json!([null, 1]), "[1] must be of"),
            (
                json!({"prefixItems": [{"type": "null"}], "items": false}),
                json!([null]),
                json!([null, null]),
                "[1] must be left out",
            ),
            (
                json!({"maximum": 9_007_199_254_740_992_u64}),
                json!(1),
                json!(9_007_199_254_740_993_u64),
                "at most",
            ),
        ] {
            assert_eq!(mistakes(schema.clone(), fits), none, "{schema}");
            let found = mistakes(schema.clone(), breaks);
            assert!(found.len() == 1 && found[0].contains(message), "{schema}: {found:?}");
        }
        assert_eq!(mistakes(json!({"minimum": 5, "minLength": 5}), json!([])), none);
    }

    #[test]
    fn a_few_mistakes_are_reported_of_a_payload_with_very_many() {
        let names: Vec<_> = (0..MAX_ENTRIES).map(|it| it.to_string()).collect();
        let many = json!(vec![json!({}); 80_000]);
        let found = mistakes(json!({"items": {"required": names}}), many);
        assert_eq!(found.len(), MAX_REPORTED_MISTAKES);
        assert_eq!(found[9], "[9] must have `0`");
        let secret = mistakes(json!({"items": {"maxLength": 2}}), json!(["secret"]));
        assert!(!secret[0].contains("secret"));
    }

    #[test]
    fn what_could_take_long_or_is_unknown_is_refused_by_its_place() {
        let many: Vec<_> = (0..=MAX_ENTRIES).collect();
        let patterns: Vec<_> = (0..=MAX_PATTERNS).map(|_| json!({"pattern": "a"})).collect();
        for (schema, message) in [
            (json!([]), "schema must be an object"),
            (json!({"$ref": "#"}), "schema.$ref is not a supported keyword"),
            (json!({"items": {"anyOf": []}}), "schema.items.anyOf is not a supported keyword"),
            (
                json!({"properties": {"a": {"uniqueItems": true}}}),
                "schema.properties.a.uniqueItems",
            ),
            (json!({"prefixItems": [{"not": {}}]}), "schema.prefixItems[0].not"),
            (json!({"properties": []}), "schema.properties must be an object"),
            (json!({"enum": many}), "at most 100 entries, has 101"),
            (json!({"type": "text"}), "schema.type must be `null` or `boolean`"),
            (json!({"items": {"enum": []}}), "schema.items.enum must be a list of at least one"),
            (json!({"required": [1]}), "schema.required must be a list of names"),
            (json!({"minLength": -1}), "schema.minLength must be a whole number of at least 0"),
            (json!({"maximum": "1"}), "schema.maximum must be a number"),
            (json!({"pattern": "("}), "schema.pattern: the pattern is not a regular"),
            (
                json!({"pattern": "((a{100}){100}){100}"}),
                "the pattern needs more than 262144 bytes",
            ),
            (json!({"prefixItems": patterns}), "more than 10 patterns"),
            (
                json!({"$schema": "http://json-schema.org/draft-07/schema#"}),
                "schema.$schema must be",
            ),
        ] {
            let refused = PayloadSchema::read(&schema).expect_err(message);
            assert!(refused.contains(message), "{schema}: {refused}");
        }
        let address = json!({"$schema": DRAFT, "pattern": r"^[\w.]+@[\w.]+$", "format": "email"});
        assert!(PayloadSchema::read(&address).is_ok());
    }
}
