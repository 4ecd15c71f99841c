//! JSON Schemas of payloads. Only keywords whose check takes time in proportion to the payload are
//! accepted: with references or alternatives, a short schema can take hours.

use jsonschema::{Draft, PatternOptions, Validator};
use serde_json::Value;

/// Maximum bytes of a schema, as it was sent.
pub const MAX_SCHEMA_BYTES: usize = 16 * 1024;
/// Maximum properties, required names, allowed values or positions in one place of a schema: each
/// can be compared with each value of a payload.
pub const MAX_ENTRIES: usize = 100;
/// Maximum bytes of a compiled pattern: more would take long to compile.
const MAX_PATTERN_BYTES: usize = 64 * 1024;
/// Mistakes that are told of one payload.
const MAX_TOLD_MISTAKES: usize = 10;
/// Bytes of a told mistake, which may quote the schema.
const MAX_TOLD_BYTES: usize = 300;

/// Keywords without schemas in them.
const PLAIN: [&str; 25] = [
    "$schema",
    "$comment",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "format",
    "type",
    "const",
    "enum",
    "required",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minLength",
    "maxLength",
    "pattern",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
];
/// Keywords with one schema.
const WITH_SCHEMA: [&str; 2] = ["items", "additionalProperties"];

/// What is wrong with a payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// Where, as `.address.zip` or `.lines[2]`; empty: the payload itself.
    pub place: String,
    /// What is wrong there.
    pub message: String,
}

/// A schema that was accepted.
#[derive(Debug)]
pub struct PayloadSchema(Validator);

impl PayloadSchema {
    /// Reads a schema.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn read(schema: &Value) -> Result<Self, String> {
        check(schema, "schema")?;
        jsonschema::options()
            .with_draft(Draft::Draft202012)
            .with_pattern_options(PatternOptions::regex().size_limit(MAX_PATTERN_BYTES))
            .build(schema)
            .map(Self)
            .map_err(|error| shortened(&format!("schema{}: {}", error.instance_path(), error)))
    }

    /// What is wrong with a payload, up to ten mistakes. Values of the payload are not repeated.
    #[must_use]
    pub fn mistakes(&self, payload: &Value) -> Vec<Mistake> {
        let errors = self.0.iter_errors(payload).take(MAX_TOLD_MISTAKES);
        let told = errors.map(|error| Mistake {
            place: place(error.instance_path().as_str(), payload),
            message: shortened(&error.masked().to_string()),
        });
        told.collect()
    }
}

fn shortened(message: &str) -> String {
    message[..message.floor_char_boundary(MAX_TOLD_BYTES)].to_owned()
}

/// A JSON pointer as the path of a field.
fn place(pointer: &str, payload: &Value) -> String {
    let (mut path, mut at) = (String::new(), Some(payload));
    for part in pointer.split('/').skip(1) {
        let name = part.replace("~1", "/").replace("~0", "~");
        let is_list = at.is_some_and(Value::is_array);
        path.push_str(&if is_list { format!("[{name}]") } else { format!(".{name}") });
        at = at.and_then(|it| match it {
            Value::Array(items) => items.get(name.parse::<usize>().ok()?),
            other => other.get(&name),
        });
    }
    shortened(&path)
}

/// Checks that a schema has known keywords only. The library checks their values.
fn check(schema: &Value, at: &str) -> Result<(), String> {
    let keywords = match schema {
        Value::Bool(_) => return Ok(()),
        Value::Object(keywords) => keywords,
        _ => return Err(format!("{at} must be an object")),
    };
    for (name, value) in keywords {
        let at = shortened(&format!("{at}.{name}"));
        let entries = match value {
            Value::Array(items) => items.len(),
            Value::Object(properties) => properties.len(),
            _ => 0,
        };
        if entries > MAX_ENTRIES {
            return Err(format!("{at} must have at most {MAX_ENTRIES} entries, has {entries}"));
        }
        match (&**name, value) {
            ("properties", Value::Object(properties)) => {
                for (name, schema) in properties {
                    check(schema, &format!("{at}.{name}"))?;
                }
            }
            ("prefixItems", Value::Array(items)) => {
                for (index, schema) in items.iter().enumerate() {
                    check(schema, &format!("{at}[{index}]"))?;
                }
            }
            ("properties" | "prefixItems", _) => return Err(format!("{at} has the wrong type")),
            (name, _) if WITH_SCHEMA.contains(&name) => check(value, &at)?,
            (name, _) if PLAIN.contains(&name) => {}
            _ => {
                let (plain, with) = (PLAIN.join(", "), WITH_SCHEMA.join(", "));
                return Err(format!(
                    "{at} is not a supported keyword; use {plain}, properties, prefixItems, {with}"
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn mistakes(schema: Value, payload: Value) -> Vec<(String, String)> {
        let schema = PayloadSchema::read(&schema).expect("a schema");
        schema.mistakes(&payload).into_iter().map(|it| (it.place, it.message)).collect()
    }

    #[test]
    fn a_payload_is_compared_with_its_schema() {
        let schema = json!({
            "type": "object",
            "required": ["to"],
            "additionalProperties": false,
            "properties": {
                "to": {"type": "string", "pattern": "^[^@]+@[^@]+$"},
                "lines": {"type": "array", "items": {"type": "integer", "minimum": 1}},
            },
        });
        assert_eq!(mistakes(schema.clone(), json!({"to": "a@b", "lines": [1]})), []);
        let [missing] = &mistakes(schema.clone(), json!({}))[..] else { panic!("one") };
        assert!(missing.0.is_empty() && missing.1.contains("\"to\" is a required property"));
        let found = mistakes(schema.clone(), json!({"to": "secret", "lines": [1, 0]}));
        let places: Vec<_> = found.iter().map(|it| &*it.0).collect();
        assert_eq!(places, [".lines[1]", ".to"]);
        assert!(!format!("{found:?}").contains("secret"), "{found:?}");
        assert_eq!(mistakes(schema, json!({"to": "a@b", "cc": 1})).len(), 1);
        assert_eq!(mistakes(json!({"items": {"type": "string"}}), json!(vec![1; 50])).len(), 10);
    }

    #[test]
    fn what_could_take_long_or_is_unknown_is_refused_by_its_place() {
        let many: Vec<_> = (0..=MAX_ENTRIES).collect();
        for (schema, told) in [
            (json!([]), "schema must be an object"),
            (json!({"$ref": "#"}), "schema.$ref is not a supported keyword"),
            (json!({"items": {"anyOf": []}}), "schema.items.anyOf is not a supported keyword"),
            (
                json!({"properties": {"a": {"uniqueItems": true}}}),
                "schema.properties.a.uniqueItems",
            ),
            (json!({"prefixItems": [{"not": {}}]}), "schema.prefixItems[0].not"),
            (json!({"properties": []}), "schema.properties has the wrong type"),
            (json!({"enum": many}), "at most 100 entries, has 101"),
            (json!({"type": "text"}), "schema/type"),
            (json!({"pattern": "("}), "schema/pattern"),
            (json!({"pattern": "((a{100}){100}){100}"}), "schema"),
        ] {
            let refused = PayloadSchema::read(&schema).expect_err(told);
            assert!(refused.contains(told), "{schema}: {refused}");
        }
    }
}
