//! `POST /v1/workers/poll`.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use axum::{Extension, extract::State, response::Response};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{
    app::App,
    auth::{Caller, Polling},
    domain::{lease::heartbeat_interval_seconds, limits, worker::WorkerState},
    engine::{
        dispatch::{self, LeasedDelivery, PollSpec},
        enqueue::dependencies::ParentResult,
        workers,
    },
    error::Error,
    http::{error::ErrorBody, jobs::JobError},
    ids::PollId,
    wire::{
        ClientGone, delivery,
        extract::{Json, RequestBody},
        validate::{Check, stored_json},
    },
};

/// What a worker wants.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"worker_id": "worker-1", "queues": ["default"], "capacity": 5}))]
pub struct PollRequest {
    /// The worker's name for itself.
    #[schema(min_length = 1, max_length = 200)]
    worker_id: String,
    /// Where to look, in this order.
    #[schema(min_items = 1, max_items = 20)]
    queues: Vec<String>,
    /// At most so many jobs. Default: 1.
    #[schema(minimum = 1, maximum = 50)]
    capacity: Option<u32>,
    /// Only jobs of these types. Default: any.
    #[schema(max_items = 100)]
    job_types: Option<Vec<String>>,
    /// What this worker has; it gets no job that asks for more. Default: the registered ones.
    #[schema(max_items = 16)]
    labels: Option<Vec<String>>,
    /// How long to wait for the first job. Default: 30.
    #[schema(minimum = 0, maximum = 30)]
    wait_seconds: Option<u32>,
    /// The length of the leases. Default: half of the job's timeout, at least 30.
    #[schema(minimum = 1, maximum = 86_400)]
    lease_seconds: Option<i32>,
    /// Makes the poll repeatable: while its leases run, the same id is answered with the same jobs.
    #[schema(value_type = Option<Uuid>)]
    poll_id: Option<PollId>,
}

impl RequestBody for PollRequest {}

/// What a worker gets.
#[derive(Debug, Serialize, ToSchema)]
pub struct PollReply {
    /// The jobs, best first; none when the wait is over.
    pub jobs: Vec<PolledJob>,
    /// Only when the worker should take no more jobs: what is wanted of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub state: Option<WorkerState>,
}

/// A job under a lease.
#[derive(Debug, Serialize, ToSchema)]
pub struct PolledJob {
    /// Its id, for ack and heartbeat.
    #[schema(example = "job_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// What to do.
    pub job_type: String,
    /// The bytes that were sent.
    #[schema(value_type = serde_json::Value)]
    pub payload: Box<RawValue>,
    /// Which attempt this is, counted from 1. Show it with each ack and heartbeat.
    pub attempt: i32,
    /// Failures at which the job is given up.
    pub max_attempts: i32,
    /// Longest run of this attempt, in seconds.
    pub timeout_seconds: i32,
    /// When the job was enqueued.
    pub enqueued_at: DateTime<Utc>,
    /// Where it waited.
    pub queue: String,
    /// This lease. Show it with each ack and heartbeat.
    pub lease_id: Uuid,
    /// How long the lease lasts without a heartbeat, in seconds.
    pub lease_seconds: i32,
    /// How often to send a heartbeat, in seconds.
    pub heartbeat_interval_seconds: i32,
    /// Attempts that failed before.
    pub failures: i32,
    /// Higher runs first.
    pub priority: i16,
    /// For its owner's use.
    pub tags: BTreeMap<String, String>,
    /// What its last failed attempt reported.
    #[schema(required)]
    pub last_error: Option<JobError>,
    /// What the jobs that it waited for have made, in the order in which it named them.
    pub parent_results: Vec<ParentResultView>,
    /// The trace that it belongs to, as its producer sent it.
    #[schema(required)]
    pub traceparent: Option<String>,
}

/// What a job has made that another waited for.
#[derive(Debug, Serialize, ToSchema)]
pub struct ParentResultView {
    /// Which job.
    #[schema(example = "job_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub job_id: String,
    /// Its name in the workflow, if they are in one.
    #[schema(required)]
    pub key: Option<String>,
    /// What it did.
    pub job_type: String,
    /// The bytes that its worker sent.
    #[schema(value_type = serde_json::Value, required)]
    pub result: Option<Box<RawValue>>,
    /// Whether the result was left out, because the earlier ones are 1 MiB together: read it from the job.
    pub omitted: bool,
}

impl ParentResultView {
    fn of(result: &ParentResult) -> Result<Self, Error> {
        Ok(Self {
            job_id: result.parent_id.to_string(),
            key: result.workflow_key.clone(),
            job_type: result.job_type.clone(),
            result: result.result.clone().map(stored_json).transpose()?,
            omitted: result.is_omitted,
        })
    }
}

impl PolledJob {
    fn of(handed: &LeasedDelivery) -> Result<Self, Error> {
        let job = &handed.job;
        let tags = job.tags.clone().map(serde_json::from_value);
        Ok(Self {
            id: job.id.to_string(),
            job_type: job.job_type.clone(),
            payload: stored_json(job.payload.clone())?,
            attempt: job.attempt,
            max_attempts: job.max_attempts,
            timeout_seconds: job.timeout_seconds,
            enqueued_at: job.created_at,
            queue: job.queue.clone(),
            lease_id: job.lease_id.0,
            lease_seconds: job.lease_seconds,
            heartbeat_interval_seconds: heartbeat_interval_seconds(
                job.lease_seconds,
                job.timeout_seconds,
            ),
            failures: job.failures,
            priority: -job.rank,
            tags: tags.transpose().map_err(Error::internal)?.unwrap_or_default(),
            last_error: handed.last_error.clone().and_then(JobError::of),
            parent_results: handed
                .parent_results
                .iter()
                .map(ParentResultView::of)
                .collect::<Result<_, _>>()?,
            traceparent: job.traceparent.clone(),
        })
    }
}

/// Wait for jobs and lease them.
///
/// Held for up to `wait_seconds` until there is a job; an empty list is an ordinary answer.
#[utoipa::path(
    post, path = "/workers/poll", tag = "workers", operation_id = "workers_poll",
    security(("api_key" = ["work"]), ("session" = ["member"])),
    request_body = PollRequest,
    responses(
        (status = 200, description = "Jobs, or none within the wait.", body = PollReply),
        (status = 400, description = "The request cannot be read or breaks a rule.", body = ErrorBody),
        (status = 401, description = "No valid API key.", body = ErrorBody),
        (status = 413, description = "The body is too large.", body = ErrorBody),
        (status = 415, description = "The body is not JSON.", body = ErrorBody),
        (status = 503, description = "Try again later.", body = ErrorBody),
    ),
)]
pub async fn poll(
    caller: Caller<Polling>,
    State(app): State<App>,
    Extension(ClientGone(gone)): Extension<ClientGone>,
    Json(request): Json<PollRequest>,
) -> Result<Response, Error> {
    let (mut spec, wait, has_labels) = accept(&caller, request)?;
    let worker = (spec.project_id, Arc::clone(&spec.worker_id));
    let facts = workers::facts(&app.engine, &worker).await?;
    app.engine.registry.record_seen(&worker, &spec.queues, &spec.job_types);
    if let Some(facts) = facts.filter(|it| !has_labels && !it.labels.is_empty()) {
        spec.labels = facts.labels.as_slice().into();
    }
    let revoked = caller.until_revoked(&app);
    let delivery = dispatch::poll(&app.engine, spec, wait, gone.cancelled(), revoked).await?;
    let jobs = delivery.jobs().iter().map(PolledJob::of).collect::<Result<_, _>>()?;
    let state = workers::halt(&app.engine, &worker).await?;
    delivery::answer(&PollReply { jobs, state }, delivery)
}

/// What it asks for, how long it waits, and whether it names labels.
fn accept(
    caller: &Caller<Polling>,
    request: PollRequest,
) -> Result<(PollSpec, Duration, bool), Error> {
    const DEFAULT_CAPACITY: u32 = 1;
    let mut check = Check::default();
    check.name("worker_id", &request.worker_id, limits::MAX_WORKER_ID_CHARS);
    if request.queues.is_empty() {
        check.refuse("queues", "must name at least one queue");
    }
    check.names("queues", &request.queues, limits::MAX_POLL_QUEUES, limits::MAX_QUEUE_CHARS);
    let mut job_types = request.job_types.unwrap_or_default();
    check.names("job_types", &job_types, limits::MAX_POLL_JOB_TYPES, limits::MAX_JOB_TYPE_CHARS);
    let capacity = request.capacity.unwrap_or(DEFAULT_CAPACITY);
    check.range("capacity", capacity, 1, limits::MAX_POLL_CAPACITY);
    let wait_seconds = request.wait_seconds.unwrap_or(limits::MAX_POLL_WAIT_SECONDS);
    check.range("wait_seconds", wait_seconds, 0, limits::MAX_POLL_WAIT_SECONDS);
    if let Some(lease_seconds) = request.lease_seconds {
        check.range("lease_seconds", lease_seconds, 1, limits::MAX_LEASE_SECONDS);
    }
    let has_labels = request.labels.is_some();
    let mut labels = request.labels.unwrap_or_default();
    check.names("labels", &labels, limits::MAX_LABELS, limits::MAX_LABEL_CHARS);
    check.finish()?;
    labels.sort();
    labels.dedup();
    job_types.sort();
    job_types.dedup();
    let mut queues: Vec<Arc<str>> = Vec::with_capacity(request.queues.len());
    for queue in request.queues {
        if !queues.iter().any(|it| **it == *queue) {
            queues.push(queue.into());
        }
    }
    let spec = PollSpec {
        project_id: caller.project_id,
        queues,
        job_types: job_types.into(),
        labels: labels.into(),
        only_commands: false,
        worker_id: request.worker_id.into(),
        capacity,
        lease_seconds: request.lease_seconds,
        poll_id: request.poll_id.map(|it| it.0),
    };
    Ok((spec, Duration::from_secs(wait_seconds.into()), has_labels))
}
