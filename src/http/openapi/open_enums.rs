//! Enums of answers that may grow, as `docs/versions.md` promises it. They are marked with
//! `x-extensible-enum`, as the code of an error is, so that generators and readers expect further
//! values.

use std::collections::BTreeSet;

use serde_json::{Value, json};

/// Enums without further values within `/v1`: workers and producers decide by them.
const CLOSED: [&str; 2] = ["AckAction", "JobState"];
const SCHEMAS: &str = "#/components/schemas/";
const RESPONSES: &str = "#/components/responses/";

/// Marks the enums of answers that are not closed.
pub fn mark(document: &mut Value) {
    for name in answered(document) {
        let schema = &mut document["components"]["schemas"][&name];
        if CLOSED.contains(&name.as_str()) || schema["enum"].is_null() {
            continue;
        }
        schema["x-extensible-enum"] = schema["enum"].clone();
        let description = schema["description"].as_str().unwrap_or_default();
        let description = format!("{description}\n\nLater versions may add values.");
        schema["description"] = json!(description.trim_start());
    }
}

/// Names of the schemas that answers have, at any depth.
fn answered(document: &Value) -> BTreeSet<String> {
    let components = &document["components"];
    let paths = document["paths"].as_object().into_iter().flatten();
    let operations = paths.filter_map(|path| path.1.as_object()).flatten();
    let mut open: Vec<_> = operations.map(|operation| &operation.1["responses"]).collect();
    let mut found = BTreeSet::new();
    while let Some(value) = open.pop() {
        match value {
            Value::Object(fields) => open.extend(fields.values()),
            Value::Array(items) => open.extend(items),
            Value::String(text) => {
                if let Some(name) = text.strip_prefix(RESPONSES) {
                    open.push(&components["responses"][name]);
                } else if let Some(name) = text.strip_prefix(SCHEMAS)
                    && found.insert(name.to_owned())
                {
                    open.push(&components["schemas"][name]);
                }
            }
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {

    #[test]
    fn enums_of_answers_may_grow_but_for_states_of_jobs_and_actions_of_acks() {
        let schemas = &super::super::document()["components"]["schemas"];
        let is_open = |name: &str| schemas[name]["x-extensible-enum"] == schemas[name]["enum"];
        for name in ["WaitingReason", "AttemptOutcome", "Rule", "HeartbeatStatus", "WorkerState"] {
            assert!(schemas[name]["enum"].is_array(), "{name}");
            assert!(is_open(name), "{name}");
            let description = schemas[name]["description"].as_str().unwrap();
            assert!(description.ends_with("Later versions may add values."), "{description}");
        }
        // Only requests have the last two.
        for name in ["JobState", "AckAction", "AckStatus", "ReplayedDeliveries"] {
            assert!(schemas[name]["enum"].is_array(), "{name}");
            assert!(schemas[name]["x-extensible-enum"].is_null(), "{name}");
        }
    }
}
