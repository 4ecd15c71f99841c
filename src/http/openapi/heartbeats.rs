//! A heartbeat is of one job or of a whole worker, at one path: two schemas each for its request
//! and its reply, so that no generated client has to tell them apart by what is absent.

use serde_json::{Map, Value, json};

/// A schema that is one of two, and what of it each has: the name, what it is, its fields, those
/// that it always has, and an example.
struct Split {
    schema: &'static str,
    parts: [Part; 2],
}

struct Part {
    name: &'static str,
    description: &'static str,
    fields: &'static [&'static str],
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
    use super::*;

    #[test]
    fn the_two_heartbeats_have_all_fields_of_the_one_and_none_that_it_lacks() {
        let schemas = &super::super::document()["components"]["schemas"];
        for Split { schema, parts } in SPLITS {
            assert_eq!(schemas[schema]["oneOf"].as_array().map(Vec::len), Some(2), "{schema}");
            for Part { name, fields, example, .. } in parts {
                let properties = &schemas[name]["properties"];
                let example: Value = serde_json::from_str(example).expect("JSON");
                for field in fields {
                    assert!(properties[field].is_object(), "{name}: {field}");
                }
                for field in example.as_object().expect("an object").keys() {
                    assert!(properties[field].is_object(), "{name}: {field}");
                }
            }
        }
    }
}
