//! `on_success`, `on_failure` and `on_complete`: jobs that an end enqueues.

use std::collections::BTreeMap;

use fencepost_domain::{formats, limits};
use fencepost_web::wire::{
    extract::Object,
    openapi::{chars, items, range},
};
use serde::Deserialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::retry::RetryRequest;

/// A job that an end enqueues. An object payload gets the field `ended`, which says what has ended.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"job_type": "report.failed", "payload": {"report": 7}}))]
pub struct CallbackRequest {
    /// Job type: the kind of work.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_JOB_TYPE_CHARS)))))]
    pub(super) job_type: String,
    /// Any JSON. Default: an object with the field `ended`.
    #[serde(default)]
    #[schema(value_type = serde_json::Value, required = false)]
    pub(super) payload: Option<Box<RawValue>>,
    /// Queue. Default: `default`.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_QUEUE_CHARS)))))]
    pub(super) queue: Option<String>,
    /// Priority; higher runs first. Default: 0.
    #[schema(extensions(("bounds" = json!(range(limits::MIN_PRIORITY, limits::MAX_PRIORITY)))))]
    pub(super) priority: Option<i16>,
    /// Failures after which it is dead-lettered. Default: the queue's setting, or 3.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_MAX_ATTEMPTS)))))]
    pub(super) max_attempts: Option<i32>,
    /// Timeout of one attempt, in seconds. Default: 1800.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_TIMEOUT_SECONDS)))))]
    pub(super) timeout_seconds: Option<i32>,
    /// Retry policy.
    #[schema(value_type = Option<RetryRequest>)]
    pub(super) retry: Option<Object<RetryRequest>>,
    /// For your own use; at most 32.
    #[serde(default, deserialize_with = "formats::tags")]
    pub(super) tags: Option<BTreeMap<String, String>>,
    /// Labels that its worker must have, all of them; at most 16.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_LABELS)))))]
    pub(super) labels: Option<Vec<String>>,
    /// Group within the queue.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_GROUP_CHARS)))))]
    pub(super) group: Option<String>,
    /// Enqueued when this job succeeds.
    #[schema(value_type = Option<CallbackRequest>, no_recursion)]
    pub(super) on_success: Option<Box<Object<CallbackRequest>>>,
    /// Enqueued when this job is dead-lettered or cancelled.
    #[schema(value_type = Option<CallbackRequest>, no_recursion)]
    pub(super) on_failure: Option<Box<Object<CallbackRequest>>>,
    /// Enqueued when this job ends, in whatever way.
    #[schema(value_type = Option<CallbackRequest>, no_recursion)]
    pub(super) on_complete: Option<Box<Object<CallbackRequest>>>,
}

/// The callbacks of a request, as they were sent.
#[derive(Debug, Default)]
pub struct SentCallbacks {
    /// Enqueued when the job succeeds.
    pub on_success: Option<Box<Object<CallbackRequest>>>,
    /// Enqueued when the job is dead-lettered or cancelled.
    pub on_failure: Option<Box<Object<CallbackRequest>>>,
    /// Enqueued when the job ends, in whatever way.
    pub on_complete: Option<Box<Object<CallbackRequest>>>,
    /// Called when the job ends, in whatever way.
    pub url: Option<String>,
}

impl CallbackRequest {
    fn callbacks(&self) -> usize {
        count([&self.on_success, &self.on_failure, &self.on_complete])
    }
}

/// Counts the jobs that these callbacks are, with those that follow them. They count against the
/// budget of who names them: later they are not refused.
pub fn count<'a>(
    sent: impl IntoIterator<Item = &'a Option<Box<Object<CallbackRequest>>>>,
) -> usize {
    sent.into_iter().flatten().map(|it| 1 + it.0.callbacks()).sum()
}
