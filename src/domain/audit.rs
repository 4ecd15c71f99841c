//! Shortening of the states that entries of the audit log keep.

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::limits::{MAX_AUDIT_STATE_BYTES, MAX_AUDIT_VALUE_BYTES};

/// The JSON of a state, of at most [`MAX_AUDIT_STATE_BYTES`]. In a longer one, each field of more
/// than [`MAX_AUDIT_VALUE_BYTES`] becomes its SHA-256 and its length: a change is still seen.
///
/// ```
/// # use fencepost_domain::audit::shorten;
/// assert_eq!(shorten(r#"{"name":"mail"}"#), r#"{"name":"mail"}"#);
/// let long = format!(r#"{{"name":"mail","schema":"{}"}}"#, "x".repeat(5_000));
/// assert!(shorten(&long).starts_with(r#"{"name":"mail","schema":{"bytes":5002,"sha256":""#));
/// ```
#[must_use]
pub fn shorten(state: &str) -> String {
    if state.len() <= MAX_AUDIT_STATE_BYTES {
        return state.to_owned();
    }
    let short = serde_json::from_str::<Map<String, Value>>(state).map(|fields| {
        let fields = fields.into_iter().map(|(name, value)| {
            let text = value.to_string();
            (name, if text.len() > MAX_AUDIT_VALUE_BYTES { hashed(&text) } else { value })
        });
        Value::Object(fields.collect()).to_string()
    });
    // It is no object, or has many fields.
    short
        .ok()
        .filter(|it| it.len() <= MAX_AUDIT_STATE_BYTES)
        .unwrap_or_else(|| hashed(state).to_string())
}

fn hashed(json: &str) -> Value {
    let hash: String = Sha256::digest(json).iter().map(|it| format!("{it:02x}")).collect();
    json!({"bytes": json.len(), "sha256": hash})
}
