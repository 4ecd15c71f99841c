//! A job as people read it: where it is, its attempts, its payload and its result.

use std::io::Write;

use chrono::{DateTime, Utc};
use serde::Deserialize;
use serde_json::{Value, value::RawValue};

use crate::{
    cli::{
        table::{self, Columns},
        words::{coloured, word},
    },
    client::Reply,
};

const ATTEMPTS: Columns = &[
    ("ATTEMPT", "/attempt"),
    ("CLAIMED", "/claimed_at"),
    ("ENDED", "/ended_at"),
    ("OUTCOME", "/outcome"),
    ("WORKER", "/worker_id"),
    ("ERROR", "/error/message"),
];
/// Facts that are shown when a job has them, in this order.
const FACTS: &[(&str, &str)] = &[
    ("stored", "created_at"),
    ("runs at", "run_at"),
    ("paused since", "paused_at"),
    ("ready since", "ready_at"),
    ("ended", "completed_at"),
    ("expires at", "expires_at"),
    ("worker", "worker_id"),
    ("lease until", "lease_expires_at"),
    ("progress", "progress"),
    ("tags", "tags"),
    ("labels", "labels"),
    ("parents", "parents"),
    ("batch", "batch_id"),
    ("workflow", "workflow_id"),
    ("replay of", "replay_of"),
    ("unique key", "unique_key"),
    ("concurrency key", "concurrency_key"),
    ("group", "group"),
];

/// Fields of an answer that only the job's own program may be able to parse as a whole.
#[derive(Deserialize)]
struct Opaque {
    payload: Box<RawValue>,
    result: Option<Box<RawValue>>,
}

/// Prints a job, and why it is where it is.
pub fn print(out: &mut impl Write, job: &Reply, why: Option<&str>) -> anyhow::Result<()> {
    let view = job.json();
    let state = coloured(&word(&view["state"]));
    let (kind, queue) = (word(&view["job_type"]), word(&view["queue"]));
    writeln!(out, "{}  {}  {kind} in {queue}", word(&view["id"]), state.trim_end())?;
    if let Some(why) = why {
        writeln!(out, "{why}")?;
    }
    writeln!(out)?;
    let now = now();
    for (name, field) in FACTS {
        if let Some(text) = fact(&view[*field]) {
            let ago = since(now, &view[*field]).map(|it| format!("  ({it} ago)"));
            writeln!(out, "{name:<16} {text}{}", ago.unwrap_or_default())?;
        }
    }
    let (failures, most) = (&view["failures"], &view["max_attempts"]);
    writeln!(out, "{:<16} {} ({failures} of {most} failures)", "attempt", view["attempt"])?;
    if view["snoozes"].as_i64().is_some_and(|it| it > 0) {
        writeln!(out, "{:<16} {} times", "put off", view["snoozes"])?;
    }
    if view["losses"].as_i64().is_some_and(|it| it > 0) {
        writeln!(out, "{:<16} {} times", "lost", view["losses"])?;
    }
    writeln!(out, "{:<16} {}", "priority", view["priority"])?;
    if let Some(change) = last_change(&view["last_change"]) {
        writeln!(out, "{:<16} {change}", "last change")?;
    }
    if view["attempts"].as_array().is_some_and(|it| !it.is_empty()) {
        writeln!(out)?;
        table::print(out, &view["attempts"], ATTEMPTS)?;
    }
    for part in ["type", "message", "stack_trace"] {
        if let Some(text) = view["last_error"][part].as_str() {
            writeln!(out, "\nerror {}:\n{text}", part.replace('_', " "))?;
        }
    }
    if let Ok(opaque) = serde_json::from_str::<Opaque>(&job.text) {
        writeln!(out, "\npayload:\n{}", opaque.payload)?;
        if let Some(result) = opaque.result {
            writeln!(out, "\nresult:\n{result}")?;
        }
    }
    Ok(())
}

/// The type of a change, who made it, and why; none: there was none.
fn last_change(change: &Value) -> Option<String> {
    let kind = change["type"].as_str()?.trim_start_matches("fencepost.").replace('_', " ");
    let actor = &change["actor"];
    let name = actor["name"].as_str().or(actor["id"].as_str());
    let name = name.map(|it| format!(" {it}")).unwrap_or_default();
    let reason = change["reason"].as_str().map(|it| format!(": {it}")).unwrap_or_default();
    Some(format!("{kind} by {}{name}{reason}", word(&actor["kind"])))
}

/// A fact in words; none: the job has no such.
fn fact(value: &Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::Array(items) if items.is_empty() => None,
        Value::Array(items) => Some(items.iter().map(word).collect::<Vec<_>>().join(", ")),
        Value::Object(fields) if fields.is_empty() => None,
        Value::Object(fields) => {
            let fields = fields.iter().map(|(name, value)| format!("{name}={}", word(value)));
            Some(fields.collect::<Vec<_>>().join(", "))
        }
        value => Some(word(value)),
    }
}

/// The time by this machine's clock.
#[expect(clippy::disallowed_methods, reason = "for display only: nothing is decided by it")]
pub fn now() -> DateTime<Utc> {
    Utc::now()
}

/// The time since then in its largest unit; none: it is no time, or it is ahead.
pub fn since(now: DateTime<Utc>, time: &Value) -> Option<String> {
    let time: DateTime<Utc> = time.as_str()?.parse().ok()?;
    let seconds = (now - time).num_seconds();
    let units = [(86_400, "d"), (3_600, "h"), (60, "m")];
    let (length, unit) = units.into_iter().find(|it| seconds >= it.0).unwrap_or((1, "s"));
    (time <= now).then(|| format!("{}{unit}", seconds / length))
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;
    use serde_json::json;

    use super::*;

    #[test]
    fn an_age_is_shown_in_its_largest_unit() {
        let now = now();
        let age = |seconds| since(now, &json!(now - TimeDelta::seconds(seconds)));
        assert_eq!(age(0).as_deref(), Some("0s"));
        assert_eq!(age(59).as_deref(), Some("59s"));
        assert_eq!(age(7_199).as_deref(), Some("1h"));
        assert_eq!(age(200_000).as_deref(), Some("2d"));
        assert_eq!((age(-5), since(now, &json!("soon"))), (None, None));
    }

    #[test]
    fn payload_and_result_are_printed_byte_for_byte() {
        let text = r#"{"id":"job_1","state":"succeeded","job_type":"t","queue":"q","attempt":1,
            "failures":0,"max_attempts":3,"priority":0,"payload":{"n": 12345678901234567890.10},
            "result":"ok","tags":{"a":"1"}}"#;
        let mut out = Vec::new();
        print(&mut out, &Reply { text: text.to_owned() }, Some("done")).expect("memory");
        let text = String::from_utf8(out).expect("text");
        assert!(text.contains("payload:\n{\"n\": 12345678901234567890.10}"), "{text}");
        assert!(text.contains("result:\n\"ok\"") && text.contains("a=1"), "{text}");
        assert!(text.contains("(0 of 3 failures)") && text.contains("\ndone\n"), "{text}");
    }
}
