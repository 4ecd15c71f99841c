//! Payloads and parents' results of leased jobs, as JSON objects.

use std::{borrow::Cow, collections::BTreeMap};

use fencepost_domain::{error::Error, job::JobState};
use fencepost_engine::{dispatch::DispatchedJob, enqueue::dependencies::ParentResult};
use serde::{Serialize, de::IgnoredAny};
use serde_json::value::RawValue;

use fencepost_web::wire::validate::stored_json;

/// A payload or result for protocols with objects only: the same bytes, or `{"value": …}` around
/// them.
pub fn object(json: &str) -> Result<Box<RawValue>, Error> {
    if json.trim_start().starts_with('{') {
        return stored_json(json.to_owned());
    }
    stored_json(format!("{{\"value\":{json}}}"))
}

/// An object with one more field at its end.
///
/// # Errors
/// [`Error::Internal`] when it is not an object.
pub fn with_field(
    object: &RawValue,
    name: &str,
    value: &impl Serialize,
) -> Result<Box<RawValue>, Error> {
    let value = serde_json::to_string(value).map_err(Error::internal)?;
    let inside = object.get().trim_end().strip_suffix('}').unwrap_or_default().trim_end();
    let comma = if inside.ends_with('{') { "" } else { "," };
    stored_json(format!("{inside}{comma}\"{name}\":{value}}}"))
}

/// Returns true if an object has a field.
#[must_use]
pub fn has_field(object: &RawValue, name: &str) -> bool {
    let fields: Option<BTreeMap<Cow<'_, str>, IgnoredAny>> =
        serde_json::from_str(object.get()).ok();
    fields.is_some_and(|it| it.contains_key(name))
}

/// Result or error of a parent.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ParentResultView {
    /// Id of the parent.
    pub job_id: String,
    /// Key of the parent, if both jobs belong to a workflow.
    pub key: Option<String>,
    /// Its job type.
    pub job_type: String,
    /// Result, byte for byte as its worker sent it; null also if it was left out for its size.
    #[schema(value_type = serde_json::Value)]
    pub result: Option<Box<RawValue>>,
    /// State of the parent: `succeeded`, `dead_letter` or `cancelled`.
    pub state: JobState,
    /// Message of its last error; null if it succeeded.
    pub error: Option<String>,
}

/// The results of a job's parents.
///
/// # Errors
/// [`Error::Internal`] when a result is not JSON.
pub fn parent_results(handed: &DispatchedJob) -> Result<Vec<ParentResultView>, Error> {
    let view = |it: &ParentResult| {
        Ok(ParentResultView {
            job_id: it.parent_id.to_string(),
            key: it.workflow_key.clone(),
            job_type: it.job_type.clone(),
            result: it.result.clone().map(stored_json).transpose()?,
            state: it.state.public(),
            error: it.error.message.clone().or_else(|| it.error.kind.clone()),
        })
    };
    handed.parent_results.iter().map(view).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_object_is_put_into_one() {
        let shown = |json: &str| object(json).expect("JSON").get().to_owned();
        assert_eq!(shown(r#"{"a": 1.50}"#), r#"{"a": 1.50}"#);
        assert_eq!(shown("[1, 2]"), r#"{"value":[1, 2]}"#);
        assert_eq!(shown("null"), r#"{"value":null}"#);
    }

    #[test]
    fn a_field_is_added_to_an_object_without_touching_the_others() {
        let added = |json: &str| {
            let object = RawValue::from_string(json.to_owned()).expect("JSON");
            with_field(&object, "b", &[1]).expect("JSON").get().to_owned()
        };
        assert_eq!(added("{}"), r#"{"b":[1]}"#);
        assert_eq!(added(r#"{ "a" : 1.50 }"#), r#"{ "a" : 1.50,"b":[1]}"#);
    }
}
