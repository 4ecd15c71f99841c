//! The fields of a payload, made from the schema of its job type.

use serde_json::Value;

/// One member of a payload.
#[derive(Debug, PartialEq, Eq)]
pub struct PayloadField {
    /// The form's name of it: [`Field::Members`](super::form::Field::Members) reads it.
    pub field: String,
    pub label: String,
    pub description: Option<String>,
    pub example: String,
    /// The type of its input.
    pub input: &'static str,
    /// Values to choose from.
    pub choices: Vec<String>,
    pub is_required: bool,
}

impl PayloadField {
    /// Whether it is written as JSON.
    pub fn is_json(&self) -> bool {
        self.field.starts_with("payload.json.")
    }
}

/// The fields of a schema of objects: those that must be there first; none if it is another one.
pub fn fields(schema: &str) -> Vec<PayloadField> {
    let Ok(schema) = serde_json::from_str::<Value>(schema) else { return Vec::new() };
    let required = schema["required"].as_array().map_or(&[][..], Vec::as_slice);
    let properties = schema["properties"].as_object().into_iter().flatten();
    let mut fields: Vec<_> = properties
        .map(|(name, schema)| field(name, schema, required.iter().any(|it| it == name)))
        .collect();
    fields.sort_by_key(|it| !it.is_required);
    fields
}

fn field(name: &str, schema: &Value, is_required: bool) -> PayloadField {
    let text = |keyword: &str| schema[keyword].as_str().map(str::to_owned);
    let of_texts = |it: &Vec<Value>| it.iter().map(|it| it.as_str().map(str::to_owned)).collect();
    let texts: Option<Vec<String>> = schema["enum"].as_array().and_then(of_texts);
    let (kind, input, choices) = match (schema["type"].as_str(), texts) {
        (_, Some(choices)) => ("text", "text", choices),
        (Some("boolean"), None) => ("json", "text", vec!["true".to_owned(), "false".to_owned()]),
        (Some("integer" | "number"), None) => ("number", "number", Vec::new()),
        (Some("string"), None) => ("text", input(schema["format"].as_str()), Vec::new()),
        _ => ("json", "text", Vec::new()),
    };
    let example = [&schema["examples"][0], &schema["default"]].into_iter().find(|it| !it.is_null());
    PayloadField {
        field: format!("payload.{kind}.{name}"),
        label: text("title").unwrap_or_else(|| name.to_owned()),
        description: text("description"),
        example: example.map_or_else(String::new, |example| {
            example.as_str().map_or_else(|| example.to_string(), str::to_owned)
        }),
        input,
        choices,
        is_required,
    }
}

fn input(format: Option<&str>) -> &'static str {
    match format {
        Some("email") => "email",
        Some("uri") => "url",
        Some("date") => "date",
        _ => "text",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schema_of_objects_becomes_fields_with_those_that_must_be_there_first() {
        let schema = r#"{"required": ["to"], "properties": {
            "n": {"type": "integer", "examples": [5]}, "lines": {"type": "array"},
            "kind": {"enum": ["a", "b"]}, "is_new": {"type": "boolean"},
            "to": {"type": "string", "format": "email", "title": "To", "description": "Who."}
        }}"#;
        let fields = fields(schema);
        let names: Vec<_> = fields.iter().map(|it| &*it.field).collect();
        let expected = [
            "payload.text.to",
            "payload.json.is_new",
            "payload.text.kind",
            "payload.json.lines",
            "payload.number.n",
        ];
        assert_eq!(names, expected);
        assert_eq!((fields[0].input, &*fields[0].label), ("email", "To"));
        assert_eq!(fields[1].choices, ["true", "false"]);
        assert_eq!(fields[4].example, "5");
        assert_eq!(super::fields("true"), []);
        assert_eq!(super::fields("no JSON"), []);
    }
}
