//! `POST /v1/jobs` and `POST /v1/jobs/batch`.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Json as Reply,
    extract::State,
    http::{HeaderMap, StatusCode, header::LOCATION},
};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sqlx::types::Json as Stored;
use utoipa::ToSchema;

use super::Job;
use crate::{
    app::App,
    auth::Caller,
    domain::{
        backoff::{RetryPolicy, Strategy},
        limits,
    },
    engine::enqueue::{self, NewJob, Start},
    error::Error,
    http::{
        error::ErrorBody,
        extract::{Json, Object, RequestBody},
        validate::Check,
    },
    ids::{JobId, ProjectId},
};

const DEFAULT_QUEUE: &str = "default";
const DEFAULT_MAX_ATTEMPTS: i32 = 3;
const DEFAULT_TIMEOUT_SECONDS: i32 = 1_800;
/// Fewer failures than one would never be retried, and never be given up.
const MIN_MAX_ATTEMPTS: i32 = 1;

/// A job to enqueue.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({
    "job_type": "email.send",
    "payload": {"to": "ada@example.com"},
    "queue": "default"
}))]
pub struct EnqueueRequest {
    /// What a worker must be able to do.
    #[schema(min_length = 1, max_length = 500)]
    job_type: String,
    /// Any JSON of at most 256 KiB; workers get it byte for byte. Default: null.
    #[serde(default)]
    #[schema(value_type = serde_json::Value, required = false)]
    payload: Option<Box<RawValue>>,
    /// Where it waits. Default: `default`. A queue exists from its first use.
    #[schema(min_length = 1, max_length = 100)]
    queue: Option<String>,
    /// Higher runs first. Default: 0.
    #[schema(minimum = -100, maximum = 100)]
    priority: Option<i16>,
    /// When it may run, at most one year ahead. Default: at once.
    run_at: Option<DateTime<Utc>>,
    /// When it may run, in seconds from now. Instead of `run_at`.
    #[schema(minimum = 0, maximum = 31_622_400)]
    delay_seconds: Option<i64>,
    /// Failures at which it is given up. Default: 3.
    #[schema(minimum = 1, maximum = 100)]
    max_attempts: Option<i32>,
    /// Longest run of one attempt. Default: 1800.
    #[schema(minimum = 1, maximum = 86_400)]
    timeout_seconds: Option<i32>,
    /// How it is tried again.
    #[schema(value_type = Option<RetryRequest>)]
    retry: Option<Object<RetryRequest>>,
    /// For your own use; at most 32.
    tags: Option<BTreeMap<String, String>>,
}

impl RequestBody for EnqueueRequest {}

/// How a job is tried again. Fields that are not sent have their defaults.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RetryRequest {
    /// How the wait grows. Default: exponential.
    strategy: Option<Strategy>,
    /// The first wait. Default: 15.
    #[schema(minimum = 0, maximum = 2_592_000)]
    initial_seconds: Option<u32>,
    /// The growth of an exponential wait. Default: 2.
    #[schema(minimum = 1, maximum = 100)]
    multiplier: Option<f64>,
    /// The longest wait. Default: 21600.
    #[schema(minimum = 0, maximum = 2_592_000)]
    max_seconds: Option<u32>,
    /// Up to so many seconds are added. Default: 3.
    #[schema(minimum = 0, maximum = 2_592_000)]
    jitter_seconds: Option<u32>,
    /// Error types that go straight to the dead letter: exact, or `prefix.*`; at most 50.
    non_retryable_types: Option<Vec<String>>,
}

/// Jobs to enqueue together, all or none.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EnqueueBatchRequest {
    /// 1 to 500 jobs.
    #[schema(min_items = 1, max_items = 500, value_type = Vec<EnqueueRequest>)]
    jobs: Vec<Object<EnqueueRequest>>,
}

impl RequestBody for EnqueueBatchRequest {
    const MAX_BYTES: usize = limits::MAX_BATCH_BODY_BYTES;
}

/// The jobs that were stored, in the order in which they were sent.
#[derive(Debug, Serialize, ToSchema)]
pub struct EnqueueBatchReply {
    /// The jobs.
    pub jobs: Vec<Job>,
}

/// Enqueue a job.
///
/// Answers after the job is on disk. `Location` leads to it.
#[utoipa::path(
    post, path = "/jobs", tag = "jobs", operation_id = "jobs_create",
    request_body = EnqueueRequest,
    responses(
        (status = 201, description = "The job is stored.", body = Job,
         headers(("Location" = String, description = "The job's path."))),
        (status = 400, description = "The request cannot be read or breaks a rule.", body = ErrorBody),
        (status = 401, description = "No valid API key.", body = ErrorBody),
        (status = 413, description = "The body or the payload is too large.", body = ErrorBody),
        (status = 415, description = "The body is not JSON.", body = ErrorBody),
        (status = 503, description = "Try again later.", body = ErrorBody),
    ),
)]
pub async fn create(
    caller: Caller,
    State(app): State<App>,
    headers: HeaderMap,
    Json(request): Json<EnqueueRequest>,
) -> Result<(StatusCode, [(axum::http::HeaderName, String); 1], Reply<Job>), Error> {
    refuse_idempotency_key(&headers)?;
    let mut check = Check::default();
    let job = accept(caller.project_id, request, &mut check)?;
    check.finish()?;
    let jobs: Arc<[NewJob]> = Arc::new([job]);
    let stored = enqueue::enqueue(&app.engine, Arc::clone(&jobs)).await?;
    let (Some(job), Some(stored)) = (jobs.first(), stored.first()) else {
        return Err(Error::InDoubt);
    };
    let job = Job::stored(job, stored)?;
    let location = [(LOCATION, format!("/v1/jobs/{}", job.id))];
    Ok((StatusCode::CREATED, location, Reply(job)))
}

/// Enqueue many jobs.
///
/// All are stored, or none: a job that breaks a rule is named by its index.
#[utoipa::path(
    post, path = "/jobs/batch", tag = "jobs", operation_id = "jobs_create_batch",
    request_body = EnqueueBatchRequest,
    responses(
        (status = 201, description = "All jobs are stored.", body = EnqueueBatchReply),
        (status = 400, description = "The request cannot be read or breaks a rule; nothing is stored.", body = ErrorBody),
        (status = 401, description = "No valid API key.", body = ErrorBody),
        (status = 413, description = "The body or a payload is too large.", body = ErrorBody),
        (status = 415, description = "The body is not JSON.", body = ErrorBody),
        (status = 503, description = "Try again later.", body = ErrorBody),
    ),
)]
pub async fn create_batch(
    caller: Caller,
    State(app): State<App>,
    headers: HeaderMap,
    Json(request): Json<EnqueueBatchRequest>,
) -> Result<(StatusCode, Reply<EnqueueBatchReply>), Error> {
    refuse_idempotency_key(&headers)?;
    let mut check = Check::default();
    let sent = request.jobs.len();
    check.range("jobs", sent, 1, limits::MAX_ENQUEUE_BATCH_JOBS);
    check.finish().map_err(|_| {
        let max = limits::MAX_ENQUEUE_BATCH_JOBS;
        Error::invalid("jobs", format!("must have between 1 and {max} entries, has {sent}"))
    })?;
    let mut check = Check::default();
    let mut jobs = Vec::with_capacity(sent);
    for (index, Object(request)) in request.jobs.into_iter().enumerate() {
        let mut item = Check::below(format!("jobs[{index}]."));
        jobs.push(accept(caller.project_id, request, &mut item)?);
        check.absorb(item);
    }
    check.finish()?;
    let jobs: Arc<[NewJob]> = jobs.into();
    let stored = enqueue::enqueue(&app.engine, Arc::clone(&jobs)).await;
    let stored = stored.map_err(|error| name_the_latest(error, &jobs))?;
    let jobs = jobs.iter().zip(&stored).map(|(job, stored)| Job::stored(job, stored));
    let jobs = jobs.collect::<Result<_, _>>()?;
    Ok((StatusCode::CREATED, Reply(EnqueueBatchReply { jobs })))
}

/// Only the database's clock can say that a `run_at` lies too far ahead, and it looks at the latest of
/// a request.
fn name_the_latest(error: Error, jobs: &[NewJob]) -> Error {
    let Error::Invalid(mut fields) = error else { return error };
    let starts = jobs.iter().enumerate().filter_map(|(index, job)| match job.start {
        Start::At(run_at) => Some((run_at, index)),
        Start::After(_) => None,
    });
    if let (Some((_, index)), Some(field)) = (starts.max(), fields.first_mut()) {
        field.field = format!("jobs[{index}].{}", field.field);
    }
    Error::Invalid(fields)
}

/// A header that promises to store a job once must not be ignored.
fn refuse_idempotency_key(headers: &HeaderMap) -> Result<(), Error> {
    const HEADER: &str = "Idempotency-Key";
    if headers.contains_key(HEADER) {
        return Err(Error::invalid(HEADER, "is not supported yet; send the request without it"));
    }
    Ok(())
}

fn accept(
    project_id: ProjectId,
    request: EnqueueRequest,
    check: &mut Check,
) -> Result<NewJob, Error> {
    check.name("job_type", &request.job_type, limits::MAX_JOB_TYPE_CHARS);
    let queue = request.queue.unwrap_or_else(|| DEFAULT_QUEUE.to_owned());
    check.name("queue", &queue, limits::MAX_QUEUE_CHARS);
    let priority = request.priority.unwrap_or(0);
    check.range("priority", priority, limits::MIN_PRIORITY, limits::MAX_PRIORITY);
    let max_attempts = request.max_attempts.unwrap_or(DEFAULT_MAX_ATTEMPTS);
    check.range("max_attempts", max_attempts, MIN_MAX_ATTEMPTS, limits::MAX_MAX_ATTEMPTS);
    let timeout_seconds = request.timeout_seconds.unwrap_or(DEFAULT_TIMEOUT_SECONDS);
    check.range("timeout_seconds", timeout_seconds, 1, limits::MAX_TIMEOUT_SECONDS);
    let payload = match request.payload {
        Some(payload) => {
            check.size("payload", &payload, limits::MAX_PAYLOAD_BYTES)?;
            check.depth("payload", &payload);
            Box::<str>::from(payload).into_string()
        }
        None => "null".to_owned(),
    };
    Ok(NewJob {
        project_id,
        id: JobId::generate(),
        queue,
        job_type: request.job_type,
        rank: priority.saturating_neg(),
        start: start(request.run_at, request.delay_seconds, check),
        max_attempts,
        timeout_seconds,
        payload,
        retry: request.retry.map(|Object(it)| Stored(accept_retry(it, check))),
        tags: accept_tags(request.tags, check),
    })
}

fn start(run_at: Option<DateTime<Utc>>, delay_seconds: Option<i64>, check: &mut Check) -> Start {
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

fn accept_retry(request: RetryRequest, check: &mut Check) -> RetryPolicy {
    let default = RetryPolicy::default();
    let policy = RetryPolicy {
        strategy: request.strategy.unwrap_or(default.strategy),
        initial_seconds: request.initial_seconds.unwrap_or(default.initial_seconds),
        multiplier: request.multiplier.unwrap_or(default.multiplier),
        max_seconds: request.max_seconds.unwrap_or(default.max_seconds),
        jitter_seconds: request.jitter_seconds.unwrap_or(default.jitter_seconds),
        non_retryable_types: request.non_retryable_types.unwrap_or_default(),
    };
    let seconds = [
        ("retry.initial_seconds", policy.initial_seconds),
        ("retry.max_seconds", policy.max_seconds),
        ("retry.jitter_seconds", policy.jitter_seconds),
    ];
    for (field, value) in seconds {
        check.range(field, i64::from(value), 0, limits::MAX_RETRY_SECONDS);
    }
    check.range("retry.multiplier", policy.multiplier, 1.0, limits::MAX_RETRY_MULTIPLIER);
    check.names(
        "retry.non_retryable_types",
        &policy.non_retryable_types,
        limits::MAX_NON_RETRYABLE_TYPES,
        limits::MAX_ERROR_TYPE_CHARS,
    );
    policy
}

fn accept_tags(
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
        check.name("tags", key, limits::MAX_TAG_KEY_CHARS);
        if let Err(error) = crate::domain::text::check_text(value, limits::MAX_TAG_VALUE_CHARS) {
            check.refuse(&format!("tags.{key}"), error.to_string());
        }
    }
    Some(Stored(tags))
}
