//! A heartbeat is of one job or of a whole worker, at one path. Its request and its reply have two
//! schemas each, so that no generated client tells them apart by what is absent.

use serde_json::{Map, Value, json};

/// A schema of the handlers, and the two that stand for it in the document.
struct Split {
    schema: &'static str,
    parts: [Part; 2],
}

struct Part {
    name: &'static str,
    description: &'static str,
    fields: &'static [&'static str],
    /// Fields that are always there.
    required: &'static [&'static str],
    example: &'static str,
}

const SPLITS: [Split; 2] = [
    Split {
        schema: "HeartbeatRequest",
        parts: [
            Part {
                name: "JobHeartbeatRequest",
                description: "A heartbeat of one job.",
                fields: &["job_id", "worker_id", "attempt", "lease_id", "progress"],
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
        ],
    },
    Split {
        schema: "HeartbeatReply",
        parts: [
            Part {
                name: "JobHeartbeatReply",
                description: "To a heartbeat of one job.",
                fields: &["status"],
                required: &["status"],
                example: r#"{"status": "ok"}"#,
            },
            Part {
                name: "WorkerHeartbeatReply",
                description: "To a heartbeat of a whole worker.",
                fields: &["state", "jobs"],
                required: &["state", "jobs"],
                example: r#"{"state": "running", "jobs":
                    [{"job_id": "job_01m7w3ha3aextt8pkwwdmxsmqw", "status": "ok",
                      "lease_seconds": 60}]}"#,
            },
        ],
    },
];

/// Splits the schemas of heartbeats.
pub fn split(document: &mut Value) {
    let Some(schemas) = document.pointer_mut("/components/schemas").and_then(Value::as_object_mut)
    else {
        return;
    };
    for Split { schema, parts } in SPLITS {
        let Some(whole) = schemas.get(schema).cloned() else { continue };
        let mut alternatives = Vec::new();
        for Part { name, description, fields, required, example } in &parts {
            let properties: Map<_, _> = fields
                .iter()
                .map(|it| ((*it).to_owned(), whole["properties"][*it].clone()))
                .collect();
            let mut part = json!({
                "type": "object", "description": *description, "properties": properties,
                "required": *required,
                "example": serde_json::from_str::<Value>(example).unwrap_or_default(),
            });
            if let Some(closed) = whole.get("additionalProperties") {
                part["additionalProperties"] = closed.clone();
            }
            schemas.insert((*name).to_owned(), part);
            alternatives.push(json!({"$ref": format!("#/components/schemas/{name}")}));
        }
        let [of_job, _] = &parts;
        schemas[schema] = json!({
            "description": whole["description"], "oneOf": alternatives,
            "example": serde_json::from_str::<Value>(of_job.example).unwrap_or_default(),
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use utoipa::PartialSchema;

    use super::*;
    use crate::http::workers::heartbeat::{HeartbeatReply, HeartbeatRequest};

    #[test]
    fn the_two_have_all_fields_of_the_one_and_none_that_it_lacks() {
        let schemas = &super::super::document()["components"]["schemas"];
        let wholes = [HeartbeatRequest::schema(), HeartbeatReply::schema()];
        for (Split { schema, parts }, whole) in SPLITS.into_iter().zip(wholes) {
            assert_eq!(schemas[schema]["oneOf"].as_array().map(Vec::len), Some(2), "{schema}");
            let whole = serde_json::to_value(whole).expect("JSON");
            let whole: BTreeSet<_> =
                whole["properties"].as_object().expect("fields").keys().collect();
            let fields = parts.iter().flat_map(|it| it.fields).map(|it| (*it).to_owned());
            let fields: BTreeSet<String> = fields.collect();
            assert_eq!(fields.iter().collect::<BTreeSet<_>>(), whole, "{schema}");
            for Part { name, example, .. } in parts {
                let example: Value = serde_json::from_str(example).expect("JSON");
                for field in example.as_object().expect("an object").keys() {
                    assert!(schemas[name]["properties"][field].is_object(), "{name}: {field}");
                }
            }
        }
    }
}
