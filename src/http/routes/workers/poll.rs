//! `POST /v1/workers/poll`.

use std::{collections::BTreeMap, time::Duration};

use axum::{Extension, extract::State, response::Response};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::Error,
    ids::{PollId, ProjectId},
    job::JobState,
    lease::heartbeat_interval_seconds,
    limits,
    worker::WorkerState,
};
use fencepost_engine::{
    dispatch::{self, DispatchedJob, Poll, PollAnswer},
    enqueue::dependencies::ParentResult,
};
use fencepost_web::{
    app::App,
    auth::{Bound, Caller, Polling, Who},
    wire::{
        ClientGone,
        extract::{Json, RequestBody},
        openapi::{chars, items, range},
        poll_answer,
        validate::{Check, stored_json},
    },
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::routes::jobs::JobError;

/// A poll.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"worker_id": "worker-1", "queues": ["default"], "capacity": 5}))]
pub struct PollRequest {
    /// Id that the worker chooses for itself.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_WORKER_ID_CHARS)))))]
    pub(super) worker_id: String,
    /// Queues to claim from, in this order: while there is capacity, the next one follows.
    #[schema(extensions(("bounds" = json!(items(1, limits::MAX_POLL_QUEUES)))))]
    pub(super) queues: Vec<String>,
    /// Maximum number of jobs to return. Default: 1.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_POLL_CAPACITY)))))]
    pub(super) capacity: Option<u32>,
    /// Only jobs of these types. Default: any.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_POLL_JOB_TYPES)))))]
    pub(super) job_types: Option<Vec<String>>,
    /// Labels of this worker; jobs that need other labels are not returned. Default: the registered
    /// ones.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_LABELS)))))]
    pub(super) labels: Option<Vec<String>>,
    /// Seconds to wait for the first job. Default: 30.
    #[schema(extensions(("bounds" = json!(range(0, limits::MAX_POLL_WAIT_SECONDS)))))]
    pub(super) wait_seconds: Option<u32>,
    /// Length of the leases in seconds. Default: that of the project, or half of the job's timeout,
    /// at least 30; and no less than the default of the queue. In any case at most the job's
    /// timeout and 10 seconds.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_LEASE_SECONDS)))))]
    pub(super) lease_seconds: Option<i32>,
    /// Makes the poll repeatable: while its leases run, the same id returns the same jobs.
    #[schema(value_type = Option<Uuid>)]
    pub(super) poll_id: Option<PollId>,
}

impl RequestBody for PollRequest {
    const IS_OF_WORKERS: bool = true;
}

/// Answer to a poll.
#[derive(Debug, Serialize, ToSchema)]
pub struct PollReply {
    /// Leased jobs, by queue as named and highest priority first; empty after the wait. A repeated
    /// poll may return them in another order.
    pub jobs: Vec<PolledJob>,
    /// Directive; present only if the worker should take no more jobs.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub state: Option<WorkerState>,
    /// Never sent: the header `Fencepost-Advice` says `unknown-queue`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false, deprecated)]
    pub warnings: Vec<String>,
}

/// A leased job.
#[derive(Debug, Serialize, ToSchema)]
pub struct PolledJob {
    /// Id of the job, for acks and heartbeats.
    #[schema(example = "job_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// Job type: the kind of work.
    pub job_type: String,
    /// Payload, byte for byte as it was sent.
    #[schema(value_type = serde_json::Value)]
    pub payload: Box<RawValue>,
    /// Attempt, counted from 1. Show it with each ack and heartbeat.
    pub attempt: i32,
    /// Failures after which the job is dead-lettered.
    pub max_attempts: i32,
    /// Timeout of this attempt, in seconds.
    pub timeout_seconds: i32,
    /// When the job was enqueued.
    pub enqueued_at: DateTime<Utc>,
    /// Queue.
    pub queue: String,
    /// Id of this lease. Show it with each ack and heartbeat.
    pub lease_id: Uuid,
    /// Length of the lease without heartbeats, in seconds.
    pub lease_seconds: i32,
    /// Interval of heartbeats, in seconds: at most the `beat_seconds` that the worker registered.
    pub heartbeat_interval_seconds: i32,
    /// Failed attempts before this one.
    pub failures: i32,
    /// Priority; higher runs first.
    pub priority: i16,
    /// For your own use.
    pub tags: BTreeMap<String, String>,
    /// Group within its queue. Absent: it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub group: Option<String>,
    /// Error of its last failed attempt.
    #[schema(required)]
    pub last_error: Option<JobError>,
    /// How far its earlier attempts have come: the last checkpoint, byte for byte as its worker
    /// sent it. Absent: there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = serde_json::Value, required = false)]
    pub checkpoint: Option<Box<RawValue>>,
    /// Number of that checkpoint. Absent: there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub checkpoint_sequence: Option<i64>,
    /// Results and errors of its parents that have ended, in the order in which it named them.
    pub parent_results: Vec<ParentResultView>,
    /// Trace context, as the producer sent it.
    #[schema(required)]
    pub traceparent: Option<String>,
}

/// Result or error of a parent.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ParentResult)]
pub struct ParentResultView {
    /// Id of the parent.
    #[schema(example = "job_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub job_id: String,
    /// Key of the parent, if both jobs belong to a workflow.
    #[schema(required)]
    pub key: Option<String>,
    /// Job type of the parent.
    pub job_type: String,
    /// State of the parent: `succeeded`, `dead_letter` or `cancelled`.
    pub state: JobState,
    /// Result, byte for byte as its worker sent it.
    #[schema(value_type = serde_json::Value, required)]
    pub result: Option<Box<RawValue>>,
    /// Error of its last failed attempt, without the stack trace; null if it succeeded.
    #[schema(required)]
    pub error: Option<JobError>,
    /// True if the result was left out, because it and the results listed before it are more than
    /// 1 MiB together: read it from the parent job.
    pub omitted: bool,
}

impl ParentResultView {
    fn of(result: &ParentResult) -> Result<Self, Error> {
        Ok(Self {
            job_id: result.parent_id.to_string(),
            key: result.workflow_key.clone(),
            job_type: result.job_type.clone(),
            state: result.state.public(),
            result: result.result.clone().map(stored_json).transpose()?,
            error: JobError::of(result.error.clone()),
            omitted: result.is_omitted,
        })
    }
}

impl PolledJob {
    fn of(handed: &DispatchedJob, beat_seconds: Option<i32>) -> Result<Self, Error> {
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
                beat_seconds,
            ),
            failures: job.failures,
            priority: -job.rank,
            tags: tags.transpose().map_err(Error::internal)?.unwrap_or_default(),
            group: job.group.clone(),
            last_error: handed.last_error.clone().and_then(JobError::of),
            checkpoint: handed
                .checkpoint
                .as_ref()
                .map(|it| stored_json(it.data.clone()))
                .transpose()?,
            checkpoint_sequence: handed.checkpoint.as_ref().map(|it| it.sequence),
            parent_results: handed
                .parent_results
                .iter()
                .map(ParentResultView::of)
                .collect::<Result<_, _>>()?,
            traceparent: job.traceparent.clone(),
        })
    }
}

/// Poll for jobs.
///
/// Waits up to `wait_seconds` for a job. An empty list is an ordinary answer.
#[utoipa::path(
    post, path = "/workers/poll", tag = "workers", operation_id = "workers_poll",
    security(("api_key" = ["work"]), ("session" = ["member"])),
    request_body = PollRequest,
    responses(
        (status = 200, description = "Leased jobs; empty if none came during the wait.", body = PollReply,
         headers(("Fencepost-Advice" = Option<String>, description = "`unknown-queue`: no jobs came, and a queue never had one. Is its name right?"))),
    ),
)]
pub async fn poll(
    caller: Caller<Bound<Polling>>,
    State(app): State<App>,
    Extension(ClientGone(gone)): Extension<ClientGone>,
    Json(request): Json<PollRequest>,
) -> Result<Response, Error> {
    let poll = request.accept(caller.project_id, Check::default())?;
    let poll = of_caller(poll, &caller.who)?;
    let queues = poll.queues.clone();
    let (reply, answer) = poll_for(&app, &caller, poll, &gone).await?;
    let mut response = poll_answer::respond(&reply, answer)?;
    if reply.jobs.is_empty() {
        super::advise(&app, caller.project_id, &queues, &mut response).await;
    }
    Ok(response)
}

/// The poll of this caller: within the queues and job types of a bound key, and with the default
/// lease of the project.
///
/// # Errors
/// [`Error::OutOfBounds`] when it asks for others.
pub(super) fn of_caller(poll: Poll, who: &Who) -> Result<Poll, Error> {
    let poll = Poll { default_lease_seconds: who.default_lease_seconds(), ..poll };
    let Some(binding) = who.binding() else { return Ok(poll) };
    let job_types = binding.narrow(&poll.queues, poll.job_types)?;
    let worker_id = poll.worker_id.map(|it| binding.worker(&it));
    Ok(Poll { worker_id, job_types, ..poll })
}

/// Polls, and makes the answer. Until that is sent, the jobs can be released.
pub(super) async fn poll_for(
    app: &App,
    caller: &Caller<Bound<Polling>>,
    poll: Poll,
    gone: &CancellationToken,
) -> Result<(PollReply, PollAnswer), Error> {
    let revoked = caller.until_revoked(app);
    let answer = dispatch::poll(&app.engine, poll, gone, revoked).await?;
    let jobs = answer.jobs().iter().map(|it| PolledJob::of(it, answer.beat_seconds));
    let jobs = jobs.collect::<Result<Vec<_>, _>>()?;
    let state = answer.directive();
    Ok((PollReply { jobs, state, warnings: Vec::new() }, answer))
}

impl PollRequest {
    /// Checks it; `check` knows where it stands in the request.
    pub(super) fn accept(self, project_id: ProjectId, mut check: Check) -> Result<Poll, Error> {
        if self.queues.is_empty() {
            check.refuse("queues", "must name at least one queue");
        }
        let wait_seconds = self.wait_seconds.unwrap_or(limits::MAX_POLL_WAIT_SECONDS);
        check.range("wait_seconds", wait_seconds, 0, limits::MAX_POLL_WAIT_SECONDS);
        let capacity = self.capacity.unwrap_or(1);
        check.range("capacity", capacity, 1, limits::MAX_POLL_CAPACITY);
        if let Some(lease_seconds) = self.lease_seconds {
            check.range("lease_seconds", lease_seconds, 1, limits::MAX_LEASE_SECONDS);
        }
        let poll = Poll {
            worker_id: Some(self.worker_id),
            queues: self.queues,
            job_types: self.job_types.unwrap_or_default(),
            labels: self.labels,
            capacity,
            lease_seconds: self.lease_seconds,
            poll_id: self.poll_id.map(|it| it.0),
            wait: Duration::from_secs(wait_seconds.into()),
            ..Poll::new(project_id)
        };
        check.poll(&poll, "queues", "job_types");
        check.finish()?;
        Ok(poll)
    }
}
