//! Leasing jobs, and their payloads and parents' results as JSON objects.

use std::{sync::Arc, time::Duration};

use serde::Serialize;
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;

use crate::{
    app::App,
    auth::{Caller, Polling},
    domain::limits,
    engine::{
        dispatch::{self, Delivery, LeasedDelivery, PollSpec, any_queue},
        enqueue::dependencies::ParentResult,
        workers,
    },
    error::Error,
    ids::anonymous_worker,
    wire::validate::{Check, stored_json},
};

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

/// Result of a parent.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ParentResultView {
    /// Id of the parent.
    pub job_id: String,
    /// Its key, if both belong to a workflow.
    pub key: Option<String>,
    /// Its job type.
    pub job_type: String,
    /// Result, byte for byte as its worker sent it; null also if it was left out for its size.
    #[schema(value_type = serde_json::Value)]
    pub result: Option<Box<RawValue>>,
}

/// The results of a job's parents.
///
/// # Errors
/// [`Error::Internal`] when a result is not JSON.
pub fn parent_results(handed: &LeasedDelivery) -> Result<Vec<ParentResultView>, Error> {
    let view = |it: &ParentResult| {
        Ok(ParentResultView {
            job_id: it.parent_id.to_string(),
            key: it.workflow_key.clone(),
            job_type: it.job_type.clone(),
            result: it.result.clone().map(stored_json).transpose()?,
        })
    };
    handed.parent_results.iter().map(view).collect()
}

/// What a worker polls for, in any protocol.
#[derive(Debug, Clone, Default)]
pub struct LeaseSpec {
    /// None: a worker without a name, which is not registered.
    pub worker_id: Option<String>,
    /// Queues to claim from, in this order; empty: all.
    pub queues: Vec<String>,
    /// Only these types; empty: any.
    pub job_types: Vec<String>,
    /// Its labels; none: the registered ones.
    pub labels: Option<Vec<String>>,
    /// Only jobs whose payload is a command.
    pub only_commands: bool,
    /// Maximum number of jobs.
    pub capacity: u32,
    /// Length of the leases.
    pub lease_seconds: i32,
    /// How long to wait for the first job.
    pub wait: Duration,
}

impl LeaseSpec {
    /// Checks it against the limits of all polls.
    pub fn check(&self, check: &mut Check, queues: &str, job_types: &str) {
        check.optional_name("worker_id", self.worker_id.as_deref(), limits::MAX_WORKER_ID_CHARS);
        check.names(queues, &self.queues, limits::MAX_POLL_QUEUES, limits::MAX_QUEUE_CHARS);
        let (max, max_chars) = (limits::MAX_POLL_JOB_TYPES, limits::MAX_JOB_TYPE_CHARS);
        check.names(job_types, &self.job_types, max, max_chars);
        let labels = self.labels.as_deref().unwrap_or_default();
        check.names("labels", labels, limits::MAX_LABELS, limits::MAX_LABEL_CHARS);
    }
}

/// Waits for jobs and leases them.
///
/// # Errors
/// Those of [`dispatch::poll`].
pub async fn lease(
    app: &App,
    caller: &Caller<Polling>,
    wanted: LeaseSpec,
    gone: &CancellationToken,
) -> Result<Delivery, Error> {
    let worker_id: Arc<str> = wanted.worker_id.clone().unwrap_or_else(anonymous_worker).into();
    let sorted = |mut params: Vec<String>| -> Arc<[String]> {
        params.sort();
        params.dedup();
        params.into()
    };
    let mut queues: Vec<Arc<str>> = Vec::with_capacity(wanted.queues.len());
    for queue in wanted.queues {
        if !queues.iter().any(|it| **it == *queue) {
            queues.push(queue.into());
        }
    }
    let mut spec = PollSpec {
        project_id: caller.project_id,
        queues,
        job_types: sorted(wanted.job_types),
        labels: sorted(wanted.labels.clone().unwrap_or_default()),
        only_commands: wanted.only_commands,
        worker_id: Arc::clone(&worker_id),
        capacity: wanted.capacity,
        lease_seconds: Some(wanted.lease_seconds),
        poll_id: None,
    };
    if wanted.worker_id.is_some() {
        let worker = (caller.project_id, worker_id);
        let facts = workers::facts(&app.engine, &worker).await?;
        app.engine.registry.record_seen(&worker, &spec.queues, &spec.job_types);
        if let Some(facts) = facts.filter(|_| wanted.labels.is_none()) {
            spec.labels = facts.labels.as_slice().into();
        }
    }
    let revoked = caller.until_revoked(app);
    if spec.queues.is_empty() {
        return any_queue::poll(&app.engine, spec, wanted.wait, gone, revoked).await;
    }
    dispatch::poll(&app.engine, spec, wanted.wait, gone.cancelled(), revoked).await
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
