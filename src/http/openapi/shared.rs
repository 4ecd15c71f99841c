//! What operations and schemas share is written once: responses, headers, names for generators.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

/// Names of responses that most operations have, by status.
const RESPONSES: [(&str, &str); 9] = [
    ("400", "BadRequest"),
    ("401", "Unauthorized"),
    ("403", "Forbidden"),
    ("404", "ProjectNotFound"),
    ("408", "RequestTimeout"),
    ("413", "TooLarge"),
    ("415", "UnsupportedMediaType"),
    ("429", "TooManyRequests"),
    ("503", "Unavailable"),
];
/// A header, its type, and what it says.
const HEADERS: [(&str, &str, &str); 7] = [
    (
        "X-Request-Id",
        "string",
        "Id of the request, as in logs and errors; one that you send is kept.",
    ),
    (
        "Fencepost-Project",
        "string",
        "Id of the project. Send it back with later requests: a proxy may keep them on one node.",
    ),
    ("X-RateLimit-Limit", "integer", "Calls per minute that the tightest limit allows."),
    ("X-RateLimit-Remaining", "integer", "Calls that are left of them."),
    ("X-RateLimit-Reset", "integer", "Time when all calls are left again, in seconds since 1970."),
    ("RateLimit", "string", "The limit in the form of draft-ietf-httpapi-ratelimit-headers."),
    ("Retry-After", "integer", "Seconds to wait before the next try."),
];
/// The description of a body that a handler takes as `OptionalJson`.
const OPTIONAL_BODY: &str = "Optional.";
/// Headers of answers to calls that a limit counts.
const OF_LIMITS: [&str; 4] =
    ["X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset", "RateLimit"];

/// Adds headers, moves what is the same everywhere to the components, and names the values of
/// enums, which Go would otherwise declare twice.
pub fn share(document: &mut Value) {
    mark_optional_bodies(document);
    add_headers(document);
    add_tags(document);
    share_responses(document);
    name_values(document);
}

/// All operations of the document.
pub fn operations(document: &mut Value) -> impl Iterator<Item = &mut Value> {
    let paths = document.get_mut("paths").and_then(Value::as_object_mut);
    let methods = paths.into_iter().flat_map(Map::values_mut).filter_map(Value::as_object_mut);
    methods.flat_map(Map::values_mut)
}

/// The macro calls each body required.
fn mark_optional_bodies(document: &mut Value) {
    for operation in operations(document) {
        let body = operation.get_mut("requestBody").and_then(Value::as_object_mut);
        let Some(body) = body else { continue };
        if body.get("description").is_some_and(|it| it == OPTIONAL_BODY) {
            body.insert("required".to_owned(), json!(false));
        }
    }
}

fn add_headers(document: &mut Value) {
    for operation in operations(document) {
        let is_limited = operation.pointer("/responses/429").is_some();
        let responses = operation.get_mut("responses").and_then(Value::as_object_mut);
        for (status, response) in responses.into_iter().flatten() {
            let mut names = vec!["X-Request-Id"];
            if is_limited && (status.starts_with('2') || status == "429") {
                names.extend(OF_LIMITS);
                names.push("Fencepost-Project");
            }
            if matches!(status.as_str(), "429" | "503") {
                names.push("Retry-After");
            }
            for name in names {
                let place = format!("#/components/headers/{name}");
                response["headers"][name] = json!({ "$ref": place });
            }
        }
    }
    for (name, kind, description) in HEADERS {
        document["components"]["headers"][name] =
            json!({"description": description, "schema": {"type": kind}});
    }
}

/// Documents the header of answers that are the settings themselves: it equals their `etag`.
fn add_tags(document: &mut Value) {
    const METHODS: [&str; 3] = ["get", "patch", "put"];
    let schemas = document["components"]["schemas"].as_object().into_iter().flatten();
    let tagged = schemas.filter(|(_, schema)| schema.pointer("/properties/etag").is_some());
    let tagged: Vec<_> =
        tagged.map(|(name, _)| json!(format!("#/components/schemas/{name}"))).collect();
    let paths = document["paths"].as_object_mut().into_iter().flatten();
    let operations = paths.filter_map(|(_, path)| path.as_object_mut()).flatten();
    for (_, operation) in operations.filter(|(method, _)| METHODS.contains(&method.as_str())) {
        let Some(response) = operation.pointer_mut("/responses/200") else { continue };
        let schema = response.pointer("/content/application~1json/schema/$ref");
        if schema.is_some_and(|it| tagged.contains(it)) {
            response["headers"]["ETag"] = json!({
                "description": "Version of the settings.", "schema": {"type": "string"},
            });
        }
    }
}

/// Moves the most common response of each status to the components.
fn share_responses(document: &mut Value) {
    for (status, name) in RESPONSES {
        let mut counted: BTreeMap<String, (usize, Value)> = BTreeMap::new();
        for response in operations(document).filter_map(|it| it["responses"].get(status)) {
            counted.entry(response.to_string()).or_insert_with(|| (0, response.clone())).0 += 1;
        }
        let Some((_, common)) = counted.into_values().max_by_key(|it| it.0) else { continue };
        let place = json!({"$ref": format!("#/components/responses/{name}")});
        for operation in operations(document) {
            let response = operation["responses"].get_mut(status);
            if let Some(response) = response.filter(|it| **it == common) {
                *response = place.clone();
            }
        }
        document["components"]["responses"][name] = common;
    }
}

/// Names the values of enums by their schema: `JOB_STATE_PENDING`.
fn name_values(document: &mut Value) {
    let schemas = document.pointer_mut("/components/schemas").and_then(Value::as_object_mut);
    for (name, schema) in schemas.into_iter().flatten() {
        let Some(values) = schema.get("enum").and_then(Value::as_array) else { continue };
        let prefix = screaming(name);
        let names = values.iter().filter_map(Value::as_str);
        let names: Vec<_> = names.map(|it| format!("{prefix}_{}", screaming(it))).collect();
        schema["x-enum-varnames"] = json!(names);
    }
}

/// `JobState` and `dead-letter` as `JOB_STATE` and `DEAD_LETTER`.
fn screaming(name: &str) -> String {
    let mut text = String::with_capacity(name.len() + 4);
    for (number, letter) in name.chars().enumerate() {
        if letter.is_uppercase() && number > 0 {
            text.push('_');
        }
        text.push(if letter.is_alphanumeric() { letter.to_ascii_uppercase() } else { '_' });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_most_operations_answer_is_written_once() {
        let document = super::super::document();
        for (status, name) in RESPONSES {
            let place = format!("#/components/responses/{name}");
            let shared = &document["components"]["responses"][name];
            assert!(shared["content"]["application/json"].is_object(), "{status}: {shared}");
            let users = document["paths"].to_string().matches(&place).count();
            assert!(users > 10, "{name}: {users}");
        }
        let unavailable = &document["components"]["responses"]["Unavailable"];
        assert!(unavailable["headers"]["Retry-After"].is_object(), "{unavailable}");
    }

    #[test]
    fn a_body_that_may_be_missing_is_not_called_required() {
        let document = super::super::document();
        let is_required = |path: &str| {
            let body = &document["paths"][path]["post"]["requestBody"];
            body["required"].as_bool()
        };
        assert_eq!(is_required("/v1/queues/{queue}/pause"), Some(false));
        assert_eq!(is_required("/v1/keys/{key_id}/rotate"), Some(false));
        assert_eq!(is_required("/v1/jobs"), Some(true));
    }

    #[test]
    fn values_of_enums_have_names_of_their_own() {
        let schemas = &super::super::document()["components"]["schemas"];
        let names = &schemas["JobState"]["x-enum-varnames"];
        assert_eq!(names[0], "JOB_STATE_SCHEDULED", "{names}");
        assert_eq!(screaming("MetricsPeriod"), "METRICS_PERIOD");
    }
}
