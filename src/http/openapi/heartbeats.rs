//! A heartbeat is of one job or of a whole worker, at one path. Its request has two schemas, so
//! that a generated client names what it sends. The reply has one: some generators distinguish
//! alternatives apart by required fields alone, and do not enforce those.

use serde_json::{Map, Value, json};

/// The schema of the handler, which has the fields of both.
const WHOLE: &str = "HeartbeatRequest";

/// A schema that stands for it in the document.
struct Part {
    name: &'static str,
    description: &'static str,
    fields: &'static [&'static str],
    /// Fields that are always there.
    required: &'static [&'static str],
    example: &'static str,
}

const PARTS: [Part; 2] = [
    Part {
        name: "JobHeartbeatRequest",
        description: "A heartbeat of one job.",
        fields: &[
            "job_id",
            "worker_id",
            "attempt",
            "lease_id",
            "progress",
            "checkpoint",
            "checkpoint_sequence",
        ],
        required: &["job_id", "worker_id"],
        example: r#"{"job_id": "job_01m7w3ha3aextt8pkwwdmxsmqw", "worker_id": "worker-1",
            "attempt": 1}"#,
    },
    Part {
        name: "WorkerHeartbeatRequest",
        description: "A heartbeat of a whole worker.",
        fields: &["worker_id", "state", "active_jobs", "active_job_ids"],
        required: &["worker_id"],
        example: r#"{"worker_id": "worker-1", "state": "running", "active_jobs":
            [{"job_id": "job_01m7w3ha3aextt8pkwwdmxsmqw", "attempt": 1}]}"#,
    },
];

/// Splits the schema of the request.
pub fn split(document: &mut Value) {
    let schemas = document.pointer_mut("/components/schemas").and_then(Value::as_object_mut);
    let Some(schemas) = schemas else { return };
    let Some(whole) = schemas.get(WHOLE).cloned() else { return };
    let mut alternatives = Vec::new();
    for Part { name, description, fields, required, example } in &PARTS {
        let field = |it: &&str| ((*it).to_owned(), whole["properties"][*it].clone());
        let properties: Map<_, _> = fields.iter().map(field).collect();
        let part = json!({
            "type": "object", "description": description, "properties": properties,
            "required": required, "example": read(example),
            "additionalProperties": whole["additionalProperties"],
        });
        schemas.insert((*name).to_owned(), part);
        alternatives.push(json!({"$ref": format!("#/components/schemas/{name}")}));
    }
    schemas[WHOLE] = json!({
        "description": whole["description"], "oneOf": alternatives,
        "example": read(PARTS[0].example),
    });
}

fn read(example: &str) -> Value {
    serde_json::from_str(example).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use utoipa::PartialSchema;

    use super::*;
    use crate::routes::workers::heartbeat::HeartbeatRequest;

    #[test]
    fn the_two_have_all_fields_of_the_one_and_none_that_it_lacks() {
        let schemas = &super::super::document()["components"]["schemas"];
        assert_eq!(schemas[WHOLE]["oneOf"].as_array().map(Vec::len), Some(2));
        let whole = serde_json::to_value(HeartbeatRequest::schema()).expect("JSON");
        assert_eq!(whole["additionalProperties"], false);
        let names = |it: &Value| -> BTreeSet<String> {
            it.as_object().expect("fields").keys().cloned().collect()
        };
        let fields = PARTS.iter().flat_map(|it| it.fields).map(|it| (*it).to_owned());
        assert_eq!(fields.collect::<BTreeSet<_>>(), names(&whole["properties"]));
        for Part { name, example, .. } in PARTS {
            let own = names(&schemas[name]["properties"]);
            assert!(names(&read(example)).is_subset(&own), "{name}");
        }
    }
}
