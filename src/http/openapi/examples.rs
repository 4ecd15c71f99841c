//! An example for every answer, made from its schema, so that it always has the fields of the
//! answer. A field has the value of its own schema's example, or else one by its name.

use serde_json::{Map, Value, json};

/// Nothing is nested deeper: a schema may contain itself.
const MAX_DEPTH: usize = 12;
/// Values of fields by name, as JSON. A field that may be null and is not here is null.
const VALUES: &[(&str, &str)] = &[
    ("access_token", r#""eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJhY2N0In0.c2lnbmF0dXJl""#),
    ("address", r#""203.0.113.7""#),
    ("alive", "true"),
    ("attempt", "1"),
    ("avg_duration_ms", "84"),
    ("capacity", "10"),
    ("challenge_token", r#""eyJ0eXAiOiJ2YWx1ZSJ9.eyJhdWQiOiJwYXNza2V5In0.c2lnbmF0dXJl""#),
    (
        "clock_changes",
        r#"["2026-03-29: skipped by a clock change: fires at the first instant after it"]"#,
    ),
    ("concurrency", "10"),
    ("count", "42"),
    ("cron_expression", r#""0 3 * * *""#),
    ("data", r#""sent to ada@example.com\n""#),
    ("depends_on", r#"["fetch"]"#),
    ("description", r#""At 03:00, every day""#),
    ("duration_ms", "84"),
    ("email", r#""ada@example.com""#),
    ("email_verified", "true"),
    ("enabled", "true"),
    ("error_type", r#""SmtpTimeout""#),
    ("header_names", r#"["Authorization"]"#),
    ("existing_job_id", r#""job_01m7w3ha3aextt8pkwwdmxsmqw""#),
    ("expires_in_seconds", "900"),
    ("fingerprint", r#""6f1ed002ab5595859014ebf0951522d9""#),
    ("heartbeat_interval_seconds", "20"),
    ("hostname", r#""worker-host-1""#),
    ("ids", r#"["evt_01m7w3ha3aextt8pkwwdmxsmqw"]"#),
    ("is_current", "true"),
    ("job_id", r#""job_01m7w3ha3aextt8pkwwdmxsmqw""#),
    ("job_type", r#""mail.send""#),
    ("job_types", r#"["mail.send"]"#),
    ("key", r#""fetch""#),
    ("labels", "[]"),
    ("lease_id", r#""0f8fad5b-d9cb-469f-a165-70867728950e""#),
    ("lease_seconds", "60"),
    ("limit", "1000"),
    ("login_token", r#""fp_login_4k7m9qwx2c3dhn5t""#),
    ("max_attempts", "5"),
    ("max_seconds", "3600"),
    ("message", r#""no answer from smtp.example.com""#),
    ("multiplier", "2.0"),
    ("name", r#""nightly import""#),
    ("non_retryable_types", r#"["InvalidAddress"]"#),
    ("parent_job_id", r#""job_01m7w3ha3aextt8pkwwdmxsmqv""#),
    ("parents", "[]"),
    ("paused_types", "[]"),
    ("payload", r#"{"to": "ada@example.com"}"#),
    ("per_seconds", "60"),
    ("processing", "3"),
    ("project_name", r#""Acme""#),
    ("queue", r#""default""#),
    ("queues", r#"["default"]"#),
    ("recovery_codes", r#"["4k7m-9qwx-2c3d-hn5t"]"#),
    ("recovery_codes_left", "10"),
    ("refresh_token", r#""q4xXk2dD0b1mZVw8Yt7RrA""#),
    ("request_id", r#""req_01m7w3ha3aextt8pkwwdmxsmqw""#),
    ("sample_job_id", r#""job_01m7w3ha3aextt8pkwwdmxsmqw""#),
    ("sample_message", r#""no answer from smtp.example.com""#),
    ("scopes", r#"["produce", "read"]"#),
    ("sdk_version", r#""1.4.0""#),
    ("sequence", "1"),
    ("stream", r#""stdout""#),
    ("success_rate", "0.998"),
    ("secret", r#""JBSWY3DPEHPK3PXP""#),
    ("tags", r#"{"customer": "42"}"#),
    ("timeout_seconds", "300"),
    ("timestamp_ms", "1769860800000"),
    ("timezone", r#""Europe/Berlin""#),
    ("token", r#""3vQB7B6MrGQZaxCuFg4oh""#),
    ("total", "42"),
    ("traceparent", r#""00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01""#),
    (
        "uri",
        r#""otpauth://totp/Fencepost:ada%40example.com?secret=JBSWY3DPEHPK3PXP&issuer=Fencepost""#,
    ),
    ("worker_id", r#""worker-1""#),
];
const TIME: &str = "2026-01-31T12:00:00Z";
const UUID: &str = "0f8fad5b-d9cb-469f-a165-70867728950e";

/// Adds an example to each schema of an answer that has none.
pub fn add(document: &mut Value) {
    let mut names = Vec::new();
    for operation in super::shared::operations(document) {
        let responses = operation["responses"].as_object().into_iter().flatten();
        let schemas = responses.filter_map(|it| it.1.pointer("/content/application~1json/schema"));
        names.extend(schemas.filter_map(|it| named(it).map(str::to_owned)));
    }
    names.sort();
    names.dedup();
    for name in names {
        let schema = &document["components"]["schemas"][&name];
        let is_missing = schema.get("example").is_none() && schema.get("oneOf").is_none();
        if let Some(example) = made_of(document, schema, "", 0).filter(|_| is_missing) {
            document["components"]["schemas"][&name]["example"] = example;
        }
    }
}

/// The name of the component that a schema refers to.
fn named(schema: &Value) -> Option<&str> {
    schema["$ref"].as_str()?.rsplit('/').next()
}

/// An example of a schema; none: it would be nested too deep.
fn made_of(document: &Value, schema: &Value, field: &str, depth: usize) -> Option<Value> {
    if let Some(example) = schema.get("example") {
        return Some(example.clone());
    }
    if depth > MAX_DEPTH {
        return None;
    }
    if let Some(name) = named(schema) {
        let schema = &document["components"]["schemas"][name];
        return made_of(document, schema, field, depth + 1);
    }
    let by_name = VALUES.iter().find(|it| it.0 == field);
    let by_name = by_name.and_then(|it| serde_json::from_str(it.1).ok());
    if let Some(value) = by_name.filter(|it| fits(schema, it)) {
        return Some(value);
    }
    if let Some(first) = schema["enum"].as_array().and_then(|it| it.first()) {
        return Some(first.clone());
    }
    let alternatives = ["oneOf", "anyOf", "allOf"].iter().find_map(|it| schema[*it].as_array());
    if let Some(alternatives) = alternatives {
        let is_optional = alternatives.iter().any(|it| it["type"] == "null");
        return match alternatives.first() {
            _ if is_optional => Some(Value::Null),
            first => made_of(document, first?, field, depth + 1),
        };
    }
    match kinds(schema).first().map(String::as_str) {
        _ if kinds(schema).iter().any(|it| it == "null") => Some(Value::Null),
        Some("object") => object(document, schema, depth),
        Some("array") => {
            let item = made_of(document, &schema["items"], field, depth + 1);
            Some(item.map_or(json!([]), |it| json!([it])))
        }
        Some("string") => Some(match schema["format"].as_str() {
            Some("date-time") => json!(TIME),
            Some("uuid") => json!(UUID),
            _ => json!("text"),
        }),
        Some("integer" | "number") => Some(schema.get("minimum").cloned().unwrap_or(json!(0))),
        Some("boolean") => Some(json!(false)),
        _ => Some(json!({})),
    }
}

fn object(document: &Value, schema: &Value, depth: usize) -> Option<Value> {
    let required = schema["required"].as_array().cloned().unwrap_or_default();
    let mut made = Map::new();
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let is_required = required.iter().any(|it| it == name);
        // What a schema may leave out is left out, so that an example shows what always comes.
        if is_required {
            made.insert(name.clone(), made_of(document, field, name, depth + 1)?);
        }
    }
    Some(Value::Object(made))
}

/// The types of a schema; none: any.
fn kinds(schema: &Value) -> Vec<String> {
    match &schema["type"] {
        Value::String(one) => vec![one.clone()],
        Value::Array(all) => all.iter().filter_map(|it| Some(it.as_str()?.to_owned())).collect(),
        _ => Vec::new(),
    }
}

fn fits(schema: &Value, value: &Value) -> bool {
    let mut items = value.as_array().into_iter().flatten();
    if !items.all(|it| fits(&schema["items"], it)) {
        return false;
    }
    let kinds = kinds(schema);
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(it) if it.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let is_any =
        kinds.is_empty() && ["$ref", "oneOf", "enum"].iter().all(|it| schema[*it].is_null());
    is_any || kinds.iter().any(|it| it == kind || it == "number" && kind == "integer")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_answer_has_an_example_with_its_required_fields() {
        let document = super::super::document();
        for (path, methods) in document["paths"].as_object().expect("paths") {
            for operation in methods.as_object().expect("methods").values() {
                for response in operation["responses"].as_object().expect("responses").values() {
                    let schema = response.pointer("/content/application~1json/schema");
                    let Some(name) = schema.and_then(named) else { continue };
                    let schema = &document["components"]["schemas"][name];
                    assert!(schema["example"].is_object(), "{path}: {name}");
                    let text = schema["example"].to_string();
                    assert!(!text.contains("\"text\""), "{name}: say more in VALUES: {text}");
                }
            }
        }
        let job = &document["components"]["schemas"]["Job"];
        let example = job["example"].as_object().expect("an object");
        assert_eq!(example["queue"], "default");
        assert_eq!(example["payload"], json!({"to": "ada@example.com"}));
        for name in job["required"].as_array().expect("a list") {
            assert!(example.contains_key(name.as_str().expect("text")), "{name}");
        }
        for (name, _) in VALUES {
            let is_used = document["components"]["schemas"].to_string();
            assert!(is_used.contains(&format!("\"{name}\":")), "{name}: no field is called so");
        }
    }
}
