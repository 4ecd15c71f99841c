//! New jobs: their fields and checks, for one job, a batch and a workflow.

use std::collections::BTreeMap;

use axum::http::HeaderMap;
use chrono::{DateTime, SubsecRound, Utc};
use fencepost_domain::{
    callbacks::Callbacks,
    constraint_key,
    dependency::Dependency,
    error::Error,
    formats,
    ids::JobId,
    job::{DEFAULT_QUEUE, DEFAULT_TIMEOUT_SECONDS},
    limits, outbound,
    plan::Tenant,
    template::TemplateMode,
    trace::TraceContext,
};
use fencepost_engine::enqueue::{
    self, Extras, NewJob, Start, ToCheck,
    dependencies::{JobWithDependencies, OnConflict},
};
use fencepost_web::wire::{
    extract::{Object, RequestBody},
    openapi::{chars, items, range},
    validate::Check,
};
use serde::Deserialize;
use serde_json::value::RawValue;
use sqlx::types::Json as Stored;
use utoipa::ToSchema;

use super::{
    callbacks::{self, CallbackRequest, SentCallbacks},
    depends_on::DependsOn,
};
use crate::retry::RetryRequest;

const DEFAULT_CONCURRENCY_LIMIT: i32 = 1;
/// Digits of a second that the database keeps.
const MICROSECONDS: u16 = 6;
/// With fewer than one failure a job would never be retried nor dead-lettered.
const MIN_MAX_ATTEMPTS: i32 = 1;

/// A job to enqueue.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({
    "job_type": "email.send",
    "payload": {"to": "ada@example.com"},
    "queue": "default"
}))]
pub struct EnqueueRequest {
    /// Job type: the kind of work.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_JOB_TYPE_CHARS)))))]
    job_type: String,
    /// Any JSON of at most 256 KiB; workers get it byte for byte. Default: null.
    #[serde(default)]
    #[schema(value_type = serde_json::Value, required = false)]
    payload: Option<Box<RawValue>>,
    /// Queue. Default: `default`. A queue exists from its first use.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_QUEUE_CHARS)))))]
    queue: Option<String>,
    /// Priority; higher runs first. Default: 0.
    #[schema(extensions(("bounds" = json!(range(limits::MIN_PRIORITY, limits::MAX_PRIORITY)))))]
    priority: Option<i16>,
    /// Earliest time of its first attempt, at most 100 years ahead, kept to the microsecond.
    /// Default: immediately.
    #[serde(default, deserialize_with = "formats::optional_time")]
    run_at: Option<DateTime<Utc>>,
    /// Seconds until it may run. Alternative to `run_at`.
    #[schema(extensions(("bounds" = json!(range(0, limits::MAX_DELAY_SECONDS)))))]
    delay_seconds: Option<i64>,
    /// Failures after which it is dead-lettered. Default: the queue's setting, or 3.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_MAX_ATTEMPTS)))))]
    max_attempts: Option<i32>,
    /// Losses in a row after which it is dead-lettered: attempts whose workers sent no outcome.
    /// Default: 5, or 1 if `max_attempts` is 1.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_MAX_LOSSES)))))]
    max_losses: Option<i32>,
    /// Timeout of one attempt, in seconds. Default: 1800.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_TIMEOUT_SECONDS)))))]
    timeout_seconds: Option<i32>,
    /// Retry policy.
    #[schema(value_type = Option<RetryRequest>)]
    retry: Option<Object<RetryRequest>>,
    /// For your own use; at most 32.
    #[serde(default, deserialize_with = "formats::tags")]
    tags: Option<BTreeMap<String, String>>,
    /// Labels that its worker must have, all of them; at most 16.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_LABELS)))))]
    labels: Option<Vec<String>>,
    /// At most `concurrency_limit` jobs of the project with this key run at the same time.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_KEY_CHARS)))))]
    concurrency_key: Option<String>,
    /// With `concurrency_key`: this job starts only while fewer run. Default: 1.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_CONCURRENCY)))))]
    concurrency_limit: Option<i32>,
    /// Group within the queue, such as a customer: its jobs can be found together, be paused, and
    /// run in their order if the queue's `groups` say so.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_GROUP_CHARS)))))]
    group: Option<String>,
    /// Makes it the only live job with its key.
    #[schema(value_type = Option<UniqueRequest>)]
    pub(crate) unique: Option<Object<UniqueRequest>>,
    /// Cancelled if it has not started by this time. Must be later than `run_at`.
    #[serde(default, deserialize_with = "formats::optional_time")]
    expires_at: Option<DateTime<Utc>>,
    /// The parent of the job. Alternative to `depends_on`.
    pub(crate) parent_job_id: Option<String>,
    /// Parents of the job, at most 100. It runs when all have succeeded, or have ended as `when`
    /// says. In a workflow, their keys.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_PARENTS)))))]
    pub(crate) depends_on: Option<Vec<DependsOn>>,
    /// The batch that counts its end.
    #[schema(example = "batch_01m7w3ha3aextt8pkwwdmxsmqw")]
    batch_id: Option<String>,
    /// Enqueued when this job succeeds.
    #[schema(value_type = Option<CallbackRequest>)]
    on_success: Option<Box<Object<CallbackRequest>>>,
    /// Enqueued when this job is dead-lettered or cancelled.
    #[schema(value_type = Option<CallbackRequest>)]
    on_failure: Option<Box<Object<CallbackRequest>>>,
    /// Enqueued when this job ends, in whatever way.
    #[schema(value_type = Option<CallbackRequest>)]
    on_complete: Option<Box<Object<CallbackRequest>>>,
    /// URL to notify when this job ends, in whatever way: that of an endpoint that takes callbacks,
    /// or one below it. It is not shown again.
    #[schema(extensions(("bounds" = json!(chars(1, outbound::MAX_URL_CHARS)))))]
    callback_url: Option<String>,
    /// Refuses the job if its payload does not fit the schema of its job type. Not in a workflow.
    #[serde(default)]
    check_payload: bool,
    /// In a workflow, and only there: its key, unique in the workflow.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_NAME_CHARS)))))]
    pub(crate) key: Option<String>,
    /// In a workflow, and only there: the payload is a template.
    pub(crate) template: Option<TemplateMode>,
    /// Older spelling of the header `Idempotency-Key`.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_IDEMPOTENCY_KEY_CHARS)))))]
    pub(crate) idempotency_key: Option<String>,
}

impl EnqueueRequest {
    /// Its payload, if the request asks for a check.
    pub fn take_check(&mut self, path: String) -> Option<ToCheck> {
        let payload = || self.payload.as_ref().map_or("null", |it| it.get()).to_owned();
        std::mem::take(&mut self.check_payload).then(|| ToCheck {
            path,
            job_type: self.job_type.clone(),
            payload: payload(),
        })
    }
}

/// Makes a job the only live one with its key. A dead letter is not live.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UniqueRequest {
    /// Unique key, within the project.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_KEY_CHARS)))))]
    key: String,
    /// Policy for a key that a live job has. Default: reject.
    on_conflict: Option<OnConflictChoice>,
}

/// Policy for a unique key that a live job has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = OnConflict)]
pub enum OnConflictChoice {
    /// 409, nothing is stored.
    #[default]
    Reject,
    /// 200 with the existing job.
    ReturnExisting,
    /// Replaces a waiting job with the same key; 409 if that job is running.
    Replace,
}

impl RequestBody for EnqueueRequest {}

impl EnqueueRequest {
    /// Counts the jobs that it may become: itself, and its callbacks with theirs.
    #[must_use]
    pub fn jobs(&self) -> usize {
        1 + callbacks::count([&self.on_success, &self.on_failure, &self.on_complete])
    }

    /// The job that an end enqueues, to be checked as every other.
    pub(super) fn of_callback(sent: CallbackRequest) -> Self {
        Self {
            job_type: sent.job_type,
            payload: sent.payload,
            queue: sent.queue,
            priority: sent.priority,
            max_attempts: sent.max_attempts,
            timeout_seconds: sent.timeout_seconds,
            retry: sent.retry,
            tags: sent.tags,
            labels: sent.labels,
            group: sent.group,
            on_success: sent.on_success,
            on_failure: sent.on_failure,
            on_complete: sent.on_complete,
            ..Self::default()
        }
    }
}

/// Checks a job and prepares it to be stored.
///
/// # Errors
/// [`Error::FieldTooLarge`]; other broken rules are added to `check`.
pub fn accept(
    tenant: Tenant,
    id: JobId,
    mut request: EnqueueRequest,
    traceparent: Option<&str>,
    check: &mut Check,
) -> Result<JobWithDependencies, Error> {
    let Tenant { project_id, limits } = tenant;
    if request.check_payload {
        check.refuse("check_payload", "must not be set in a workflow");
    }
    check.name("job_type", &request.job_type, limits::MAX_JOB_TYPE_CHARS);
    let queue = request.queue.take().unwrap_or_else(|| DEFAULT_QUEUE.to_owned());
    check.name("queue", &queue, limits::MAX_QUEUE_CHARS);
    let priority = request.priority.unwrap_or(0);
    check.range("priority", priority, limits::MIN_PRIORITY, limits::MAX_PRIORITY);
    if let Some(max_attempts) = request.max_attempts {
        check.range("max_attempts", max_attempts, MIN_MAX_ATTEMPTS, limits::MAX_MAX_ATTEMPTS);
    }
    if let Some(max_losses) = request.max_losses {
        check.range("max_losses", max_losses, 1, limits::MAX_MAX_LOSSES);
    }
    let timeout_seconds = request.timeout_seconds.unwrap_or(DEFAULT_TIMEOUT_SECONDS);
    check.range("timeout_seconds", timeout_seconds, 1, limits::MAX_TIMEOUT_SECONDS);
    let payload = match request.payload.take() {
        Some(payload) => {
            check.size("payload", &payload, limits.max_payload_bytes())?;
            check.depth("payload", &payload);
            Box::<str>::from(payload).into_string()
        }
        None => "null".to_owned(),
    };
    let on_conflict = match request.unique.as_ref().and_then(|Object(it)| it.on_conflict) {
        None | Some(OnConflictChoice::Reject) => OnConflict::Reject,
        Some(OnConflictChoice::ReturnExisting) => OnConflict::ReturnExisting,
        Some(OnConflictChoice::Replace) => OnConflict::Replace,
    };
    let is_continuation = request.parent_job_id.is_some();
    let sent = SentCallbacks {
        on_success: request.on_success.take(),
        on_failure: request.on_failure.take(),
        on_complete: request.on_complete.take(),
        url: request.callback_url.take(),
    };
    let callbacks = accept_callbacks(tenant, sent, traceparent, check)?;
    let extras = accept_extras(&mut request, traceparent, check).with_callbacks(&callbacks);
    let job = NewJob {
        project_id,
        id,
        queue,
        job_type: request.job_type,
        rank: priority.saturating_neg(),
        start: start(request.run_at, request.delay_seconds, check),
        max_attempts: request.max_attempts,
        timeout_seconds,
        payload,
        retry: request.retry.map(|Object(it)| Stored(it.accept("retry", check))),
        tags: accept_tags(request.tags, check),
        extras: (extras != Extras::default()).then(|| Box::new(extras)),
    };
    let path = check.path().to_owned();
    let named = JobWithDependencies::new(job, on_conflict);
    Ok(JobWithDependencies { is_continuation, must_outlast_start: true, path, ..named })
}

/// Checks callbacks, and those that follow them.
///
/// # Errors
/// [`Error::FieldTooLarge`]; other broken rules are added to `check`.
pub fn accept_callbacks(
    tenant: Tenant,
    sent: SentCallbacks,
    traceparent: Option<&str>,
    check: &mut Check,
) -> Result<Callbacks, Error> {
    let mut one = |name: &str, sent: Option<Box<Object<CallbackRequest>>>| {
        let Some(sent) = sent else { return Ok::<_, Error>(None) };
        let mut inner = Check::below(format!("{}{name}.", check.path()));
        let request = EnqueueRequest::of_callback(sent.0);
        let job = accept(tenant, JobId::generate(), request, traceparent, &mut inner)?.job;
        check.absorb(inner);
        Ok(Some(Box::new(enqueue::callback(job))))
    };
    let callbacks = Callbacks {
        on_success: one("on_success", sent.on_success)?,
        on_failure: one("on_failure", sent.on_failure)?,
        on_complete: one("on_complete", sent.on_complete)?,
        url: sent.url,
    };
    if let Some(url) = &callbacks.url {
        check.name("callback_url", url, outbound::MAX_URL_CHARS);
    }
    let (count, depth) = (callbacks.count(), callbacks.depth());
    if count == 0 {
        return Ok(callbacks);
    }
    let bytes = serde_json::to_string(&callbacks).map_or(0, |it| it.len());
    let bounds = [
        (count, limits::MAX_CALLBACKS, "callbacks"),
        (depth, limits::MAX_CALLBACK_DEPTH, "callbacks that follow each other"),
        (bytes, limits::MAX_CALLBACKS_BYTES, "bytes of callbacks"),
    ];
    let field = match &callbacks {
        Callbacks { on_success: Some(_), .. } => "on_success",
        Callbacks { on_failure: Some(_), .. } => "on_failure",
        Callbacks { .. } => "on_complete",
    };
    for (has, max, what) in bounds.into_iter().filter(|it| it.0 > it.1) {
        check.refuse(field, format!("must lead to at most {max} {what}, leads to {has}"));
    }
    Ok(callbacks)
}

/// Fields that most jobs do not use.
fn accept_extras(
    request: &mut EnqueueRequest,
    traceparent: Option<&str>,
    check: &mut Check,
) -> Extras {
    if request.key.is_some() {
        check.refuse("key", "is for the jobs of a workflow only");
    }
    if request.template.is_some() {
        check.refuse("template", "is for the jobs of a workflow only");
    }
    let mut labels = request.labels.take().unwrap_or_default();
    check.names("labels", &labels, limits::MAX_LABELS, limits::MAX_LABEL_CHARS);
    labels.sort();
    labels.dedup();
    let concurrency_key = request.concurrency_key.take();
    check.optional_name("concurrency_key", concurrency_key.as_deref(), limits::MAX_KEY_CHARS);
    let concurrency_limit = request.concurrency_limit;
    if let Some(limit) = concurrency_limit {
        check.range("concurrency_limit", limit, 1, limits::MAX_CONCURRENCY);
        if concurrency_key.is_none() {
            check.refuse("concurrency_limit", "must be sent together with concurrency_key");
        }
    }
    let group = request.group.take();
    if let Some(group) = &group {
        check.path_name("group", group, limits::MAX_GROUP_CHARS);
    }
    let unique_key = request.unique.take().map(|Object(it)| it.key);
    check.optional_name("unique.key", unique_key.as_deref(), limits::MAX_KEY_CHARS);
    check.time("expires_at", request.expires_at);
    // As the database keeps it.
    let expires_at = request.expires_at.map(|it| it.trunc_subsecs(MICROSECONDS));
    let run_at = request.run_at.map(|it| it.trunc_subsecs(MICROSECONDS));
    if expires_at.zip(run_at).is_some_and(|(expires_at, run_at)| expires_at <= run_at) {
        check.refuse("expires_at", "must be later than run_at");
    }
    let batch_id = request.batch_id.take().map(|it| it.parse());
    if matches!(batch_id, Some(Err(_))) {
        check.refuse("batch_id", "must be the id of a batch of this project");
    }
    let parents = accept_parents(request, check);
    let concurrency = concurrency_key
        .as_deref()
        .map(|key| (key, concurrency_limit.unwrap_or(DEFAULT_CONCURRENCY_LIMIT)));
    Extras {
        max_losses: request.max_losses,
        constraint_key: constraint_key::of(&request.job_type, &labels, concurrency),
        labels,
        concurrency_limit: concurrency.map(|it| it.1),
        concurrency_key,
        group,
        unique_key,
        expires_at,
        traceparent: traceparent.map(str::to_owned),
        batch_id: batch_id.and_then(Result::ok),
        has_parents: !parents.is_empty(),
        parents,
        ..Extras::default()
    }
}

fn accept_parents(request: &mut EnqueueRequest, check: &mut Check) -> Vec<Dependency<JobId>> {
    let named = match (request.parent_job_id.take(), request.depends_on.take()) {
        (Some(_), Some(_)) => {
            check.refuse("parent_job_id", "must not be sent together with depends_on");
            return Vec::new();
        }
        (Some(parent), None) => {
            vec![("parent_job_id".to_owned(), Dependency::on_success(parent))]
        }
        (None, many) => {
            let many = many.unwrap_or_default();
            if many.len() > limits::MAX_PARENTS {
                let max = limits::MAX_PARENTS;
                check.refuse(
                    "depends_on",
                    format!("must have at most {max} entries, has {}", many.len()),
                );
                return Vec::new();
            }
            many.into_iter()
                .enumerate()
                .map(|(place, it)| (format!("depends_on[{place}]"), it.by_id(place, check)))
                .collect()
        }
    };
    let mut parents: Vec<Dependency<JobId>> = Vec::with_capacity(named.len());
    for (field, Dependency { parent, when }) in named {
        match parent.parse() {
            Ok(id) if parents.iter().any(|it| it.parent == id) => {
                check.refuse(&field, "is named twice");
            }
            Ok(parent) => parents.push(Dependency { parent, when }),
            Err(_) => check.refuse(&field, "must be the id of a job of this project"),
        }
    }
    parents
}

/// The trace context of a request. A malformed one is ignored, as the W3C recommendation asks.
#[must_use]
pub fn traceparent(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get("traceparent")?.to_str().ok()?;
    TraceContext::parse(value).map(|_| value)
}

pub(super) fn start(
    run_at: Option<DateTime<Utc>>,
    delay_seconds: Option<i64>,
    check: &mut Check,
) -> Start {
    check.time("run_at", run_at);
    match (run_at, delay_seconds) {
        (Some(_), Some(_)) => {
            check.refuse("delay_seconds", "must not be sent together with run_at");
            Start::After(0)
        }
        (Some(run_at), None) => Start::At(run_at),
        (None, delay_seconds) => {
            let seconds = delay_seconds.unwrap_or(0);
            check.range("delay_seconds", seconds, 0, limits::MAX_DELAY_SECONDS);
            Start::After(i32::try_from(seconds).unwrap_or(i32::MAX))
        }
    }
}

pub(super) fn accept_tags(
    tags: Option<BTreeMap<String, String>>,
    check: &mut Check,
) -> Option<Stored<BTreeMap<String, String>>> {
    let tags = tags.filter(|it| !it.is_empty())?;
    if tags.len() > limits::MAX_TAGS {
        check.refuse(
            "tags",
            format!("must have at most {} entries, has {}", limits::MAX_TAGS, tags.len()),
        );
        return None;
    }
    for (key, value) in &tags {
        if let Err(error) = fencepost_domain::text::check_name(key, limits::MAX_TAG_KEY_CHARS) {
            check.refuse("tags", format!("has a name that {error}"));
        }
        if let Err(error) = fencepost_domain::text::check_text(value, limits::MAX_TAG_VALUE_CHARS) {
            check.refuse(&format!("tags.{key}"), error.to_string());
        }
    }
    Some(Stored(tags))
}
