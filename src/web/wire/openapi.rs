//! What all OpenAPI documents share: bounds of fields, from the constants that the checks use, and
//! responses that an operation has because of what it is.

use serde::Serialize;
use serde_json::{Map, Value, json};

/// The extension in which a field's bounds are written; [`lift_bounds`] puts them into its schema.
pub const BOUNDS: &str = "x-bounds";

/// A text of `min` to `max` characters.
#[must_use]
pub fn chars(min: usize, max: usize) -> Value {
    if min == 0 { json!({"maxLength": max}) } else { json!({"minLength": min, "maxLength": max}) }
}

/// A list of `min` to `max` entries.
#[must_use]
pub fn items(min: usize, max: usize) -> Value {
    if min == 0 { json!({"maxItems": max}) } else { json!({"minItems": min, "maxItems": max}) }
}

/// A number of `min..=max`.
pub fn range<T: Serialize>(min: T, max: T) -> Value {
    json!({"minimum": min, "maximum": max})
}

/// A number without an upper bound.
#[must_use]
pub fn at_least(min: i32) -> Value {
    json!({"minimum": min})
}

/// Puts the bounds of all fields into their schemas.
pub fn lift_bounds(document: &mut Value) {
    let schemas = document.pointer_mut("/components/schemas").and_then(Value::as_object_mut);
    for schema in schemas.into_iter().flat_map(Map::values_mut) {
        let fields = schema.get_mut("properties").and_then(Value::as_object_mut);
        for field in fields.into_iter().flat_map(Map::values_mut).filter_map(Value::as_object_mut) {
            // The macro writes those of a list at its items.
            let of_items = field.get_mut("items").and_then(Value::as_object_mut);
            let of_items = of_items.and_then(|it| it.remove(BOUNDS));
            if let Some(Value::Object(bounds)) = field.remove(BOUNDS).or(of_items) {
                field.extend(bounds);
            }
        }
    }
}

/// Which operations have a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applies {
    /// Operations that need a credential.
    Authenticated,
    /// Operations that need a credential of one project.
    InProject,
    /// Operations with a body that need no credential.
    PublicWithBody,
    /// Operations with a body.
    WithBody,
    /// Operations that take an `Idempotency-Key`.
    Repeatable,
    /// Operations that take an `If-Match`.
    Conditional,
}

/// Status and description of a response, and which operations have it.
pub type DerivedResponse = (Applies, &'static str, &'static str);

/// Responses of any operation with a body.
pub const OF_BODIES: [DerivedResponse; 4] = [
    (Applies::WithBody, "400", "Invalid request."),
    (Applies::WithBody, "408", "The body did not arrive in time."),
    (Applies::WithBody, "413", "The body, or a part of it, is too large."),
    (
        Applies::WithBody,
        "415",
        "The body is not JSON, or compressed in another way than with gzip.",
    ),
];

/// Adds the responses that apply to an operation and that it does not describe itself. `error` is
/// the name of the schema of errors.
pub fn add_responses(operation: &mut Value, derived: &[DerivedResponse], error: &str) {
    let applying: Vec<_> = derived.iter().filter(|it| applies(operation, it.0)).collect();
    let is_repeatable = applies(operation, Applies::Repeatable);
    let Some(responses) = operation.get_mut("responses").and_then(Value::as_object_mut) else {
        return;
    };
    let schema = format!("#/components/schemas/{error}");
    for (_, status, description) in applying {
        responses.entry(*status).or_insert_with(|| {
            let content = json!({"application/json": {"schema": {"$ref": schema}}});
            json!({"description": description, "content": content})
        });
    }
    if is_repeatable {
        add_replay_header(responses);
    }
}

fn applies(operation: &Value, which: Applies) -> bool {
    let security = operation.get("security").and_then(Value::as_array);
    let is_public = security.is_some_and(|it| it.iter().any(|it| *it == json!({})));
    let has_body = operation.get("requestBody").is_some();
    let parameters = || operation.get("parameters").and_then(Value::as_array).into_iter().flatten();
    let has_parameter = |name: &str| parameters().any(|it| it["name"] == name);
    match which {
        Applies::Authenticated => !is_public,
        Applies::InProject => {
            let takes_key = security.into_iter().flatten().any(|it| it.get("api_key").is_some());
            !is_public && (takes_key || has_parameter("project"))
        }
        Applies::PublicWithBody => is_public && has_body,
        Applies::WithBody => has_body,
        Applies::Repeatable => has_parameter("Idempotency-Key"),
        Applies::Conditional => has_parameter("If-Match"),
    }
}

/// Documents the header that marks the answer to a repeated request.
fn add_replay_header(responses: &mut Map<String, Value>) {
    for (_, response) in responses.iter_mut().filter(|it| matches!(it.0.as_str(), "201" | "202")) {
        response["headers"]["Idempotent-Replay"] = json!({
            "description": "`true` when this is the answer to an earlier request.",
            "schema": {"type": ["string", "null"]},
        });
    }
}
