//! The job as the API shows it.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use fencepost_domain::{
    backoff::RetryPolicy,
    callbacks::{CallbackEnd, CallbackJob, Callbacks},
    error::Error,
    explain::Reason,
    job::{AttemptOutcome, DeadLetterReason, JobState, StoredState, WaitingFor, max_losses},
    text::ErrorReport,
};
use fencepost_store::{
    jobs::{AttemptRow, JobRow},
    settle::uncounted::Uncounted,
};
use fencepost_web::wire::validate::stored_json;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::{
    change::ChangeView,
    redact::{self, Redact},
};

/// A job.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// Id of the job.
    #[schema(example = "job_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// State.
    pub state: JobState,
    /// Why it is not running; null if it runs or has ended.
    #[schema(required)]
    pub waiting_for: Option<WaitingFor>,
    /// In a list, of a job that waits for a worker: `no_workers` if no live worker polls its queue
    /// for its type, `labels` if none of those has its labels. Absent otherwise, and where a page
    /// has more than 20 different queues, types and labels. All reasons: `GET …/explain`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub waiting_reason: Option<Reason>,
    /// Job type: the kind of work.
    #[schema(example = "email.send")]
    pub job_type: String,
    /// Queue.
    #[schema(example = "default")]
    pub queue: String,
    /// Priority; higher runs first.
    pub priority: i16,
    /// Payload, byte for byte as it was sent.
    #[schema(value_type = serde_json::Value)]
    pub payload: Box<RawValue>,
    /// Whether payload, result, error messages and stack traces are null because the caller may
    /// not read them: that needs the scope `payload:read`, or a role above viewer.
    pub redacted: bool,
    /// For your own use.
    pub tags: BTreeMap<String, String>,
    /// Labels that its worker must have.
    pub labels: Vec<String>,
    /// At most `concurrency_limit` jobs with this key run at the same time.
    #[schema(required)]
    pub concurrency_key: Option<String>,
    /// Limit of its `concurrency_key`.
    #[schema(required)]
    pub concurrency_limit: Option<i32>,
    /// Group within its queue, such as a customer.
    #[serde(default)]
    #[schema(required, example = "customer-3")]
    pub group: Option<String>,
    /// Unique key: no other live job of the project has it.
    #[schema(required)]
    pub unique_key: Option<String>,
    /// Cancelled if it has not started by this time.
    #[schema(required)]
    pub expires_at: Option<DateTime<Utc>>,
    /// Ids of its parents, ended or not.
    pub parents: Vec<String>,
    /// Batch that counts its end.
    #[schema(required)]
    pub batch_id: Option<String>,
    /// Jobs that its end enqueues. Empty in lists without payloads.
    pub callbacks: Vec<CallbackView>,
    /// Since when it is paused: it starts no attempt until it is resumed. Null if it is not.
    #[serde(default)]
    #[schema(required)]
    pub paused_at: Option<DateTime<Utc>>,
    /// Earlier job that it replays.
    #[schema(required)]
    pub replay_of: Option<String>,
    /// Workflow it belongs to.
    #[schema(required)]
    pub workflow_id: Option<String>,
    /// When it may run, or run again.
    pub run_at: DateTime<Utc>,
    /// Since when it is ready to run: from `run_at` on, or since it was enqueued, was released,
    /// lost its lease, its dependencies were met, its queue was resumed, or it was moved to its
    /// queue, whichever came last. Null unless it is pending and not in backoff.
    #[serde(default)]
    #[schema(required)]
    pub ready_at: Option<DateTime<Utc>>,
    /// When it was stored.
    pub created_at: DateTime<Utc>,
    /// Same as `created_at`, under the name that polls use.
    pub enqueued_at: DateTime<Utc>,
    /// Latest attempt, counted from 1; 0 before the first.
    pub attempt: i32,
    /// Number of failed attempts. The job is dead-lettered when it reaches `max_attempts`.
    pub failures: i32,
    /// Number of attempts whose workers have put the job off.
    #[serde(default)]
    pub snoozes: i32,
    /// Failures after which it is dead-lettered. Released attempts and losses do not count.
    pub max_attempts: i32,
    /// Number of attempts that were lost: no outcome came from their workers.
    #[serde(default)]
    pub losses: i32,
    /// Losses in a row after which it is dead-lettered; ten times as many in total do so as well.
    #[serde(default)]
    pub max_losses: i32,
    /// Why it was dead-lettered; null in other states.
    #[serde(default)]
    #[schema(required)]
    pub dead_letter_reason: Option<DeadLetterReason>,
    /// Timeout of one attempt, in seconds.
    pub timeout_seconds: i32,
    /// Retry policy.
    pub retry: RetryPolicy,
    /// Worker that holds it, or that succeeded.
    #[schema(required)]
    pub worker_id: Option<String>,
    /// Time when that worker claimed the job.
    #[schema(required)]
    pub claimed_at: Option<DateTime<Utc>>,
    /// Time when the lease expires, unless a heartbeat extends it.
    #[schema(required)]
    pub lease_expires_at: Option<DateTime<Utc>>,
    /// Progress from 0 to 1, as its worker reports it.
    #[schema(required)]
    pub progress: Option<f32>,
    /// True if its worker was asked to stop.
    pub cancel_requested: bool,
    /// When it ended.
    #[schema(required)]
    pub completed_at: Option<DateTime<Utc>>,
    /// Result, byte for byte as its worker sent it, after a success.
    #[schema(value_type = serde_json::Value, required)]
    pub result: Option<Box<RawValue>>,
    /// Error of its last attempt that had one: it failed, or lost its lease or its worker.
    #[schema(required)]
    pub last_error: Option<JobError>,
    /// Latest change, with its author: a cancel, retry, replay, pause, resume or change, or a take
    /// back. Null if there was none, and in the answer to an enqueue.
    #[serde(default)]
    #[schema(required)]
    pub last_change: Option<ChangeView>,
    /// How far its attempts have come: the last checkpoint, byte for byte as its worker sent it.
    /// Omitted in lists, and if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = serde_json::Value, required = false)]
    pub checkpoint: Option<Box<RawValue>>,
    /// Number of that checkpoint. Omitted in lists, and if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub checkpoint_sequence: Option<i64>,
    /// Past attempts, oldest first. Omitted in lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub attempts: Option<Vec<AttemptView>>,
}

/// A job that the end of another enqueues.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Callback)]
pub struct CallbackView {
    /// The end that enqueues it.
    pub on: CallbackEnd,
    /// Job type: the kind of work.
    #[schema(example = "report.failed")]
    pub job_type: String,
    /// Queue.
    #[schema(example = "default")]
    pub queue: String,
}

impl CallbackView {
    fn list(stored: Option<&str>) -> Result<Vec<Self>, Error> {
        let Some(stored) = stored else { return Ok(Vec::new()) };
        let callbacks: Callbacks = serde_json::from_str(stored).map_err(Error::internal)?;
        let view = |(on, job): (CallbackEnd, &CallbackJob)| {
            let CallbackJob { job_type, queue, .. } = job;
            Self { on, job_type: job_type.clone(), queue: queue.clone() }
        };
        Ok(callbacks.each().map(view).collect())
    }
}

/// An error as a worker reported it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct JobError {
    /// Type of the error.
    #[serde(rename = "type")]
    #[schema(required, example = "TimeoutError")]
    pub kind: Option<String>,
    /// Message.
    #[schema(required, example = "Connection refused")]
    pub message: Option<String>,
    /// Stack trace.
    #[schema(required)]
    pub stack_trace: Option<String>,
    /// True if any of the texts was cut.
    pub truncated: bool,
}

impl JobError {
    /// None if nothing was reported.
    #[must_use]
    pub fn of(report: ErrorReport) -> Option<Self> {
        let ErrorReport { kind, message, stack_trace, truncated } = report;
        let is_empty = kind.is_none() && message.is_none() && stack_trace.is_none();
        (!is_empty).then_some(Self { kind, message, stack_trace, truncated })
    }
}

impl Redact for JobError {
    fn redact(&mut self) {
        self.message = None;
        self.stack_trace = None;
    }
}

/// A past attempt.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Attempt)]
pub struct AttemptView {
    /// Number of the attempt, counted from 1.
    pub attempt: i32,
    /// Worker.
    pub worker_id: String,
    /// Time when that worker claimed the job.
    pub claimed_at: DateTime<Utc>,
    /// When it ended.
    pub ended_at: DateTime<Utc>,
    /// Outcome.
    pub outcome: AttemptOutcome,
    /// Error that the worker reported.
    #[schema(required)]
    pub error: Option<JobError>,
    /// Time from which the job could run again; null if it ended.
    #[schema(required)]
    pub retry_at: Option<DateTime<Utc>>,
    /// Duration as the worker measured it, in milliseconds.
    #[schema(required)]
    pub duration_ms: Option<i64>,
}

impl AttemptView {
    fn is_uncounted(&self) -> bool {
        let kind = self.error.as_ref().and_then(|error| error.kind.as_deref());
        Uncounted::of(self.outcome, kind).is_some()
    }

    fn of(row: AttemptRow) -> Self {
        let error = JobError::of(ErrorReport {
            kind: row.error_kind,
            message: row.error_message,
            stack_trace: row.error_stack_trace,
            truncated: row.error_truncated,
        });
        Self {
            attempt: row.attempt,
            worker_id: row.worker_id,
            claimed_at: row.claimed_at,
            ended_at: row.ended_at,
            outcome: row.outcome,
            error,
            retry_at: row.retry_at,
            duration_ms: row.duration_ms,
        }
    }
}

impl Redact for Job {
    fn redact(&mut self) {
        self.redacted = true;
        self.payload = redact::hidden();
        self.result = None;
        self.checkpoint = self.checkpoint.take().map(|_| redact::hidden());
        self.last_error.redact();
        for attempt in self.attempts.iter_mut().flatten() {
            attempt.error.redact();
        }
    }
}

impl Job {
    /// A job that was read.
    pub fn read(row: JobRow) -> Result<Self, Error> {
        let closed = row.closed();
        let tags = row.tags.map(serde_json::from_value).transpose().map_err(Error::internal)?;
        Ok(Self {
            id: row.id.to_string(),
            state: row.state.public(),
            waiting_for: row.state.waiting_for(row.unfinished_parents, closed),
            waiting_reason: None,
            job_type: row.job_type,
            queue: row.queue,
            priority: -row.rank,
            payload: stored_json(row.payload)?,
            redacted: false,
            tags: tags.unwrap_or_default(),
            labels: row.labels.unwrap_or_default(),
            concurrency_key: row.concurrency_key,
            concurrency_limit: row.concurrency_limit,
            group: row.group,
            unique_key: row.unique_key,
            expires_at: row.expires_at,
            parents: row.parents.iter().map(ToString::to_string).collect(),
            workflow_id: row.workflow_id.map(|it| it.to_string()),
            batch_id: row.batch_id.map(|it| it.to_string()),
            callbacks: CallbackView::list(row.callbacks.as_deref())?,
            replay_of: row.replay_of.map(|it| it.to_string()),
            paused_at: row.paused_at,
            run_at: row.run_at,
            ready_at: row.ready_at,
            created_at: row.created_at,
            enqueued_at: row.created_at,
            attempt: row.attempt,
            failures: row.failures,
            snoozes: row.snoozes,
            max_attempts: row.max_attempts,
            losses: row.losses,
            max_losses: max_losses(row.max_losses, row.max_attempts),
            dead_letter_reason: (row.state == StoredState::DeadLetter)
                .then(|| DeadLetterReason::stored(row.death.as_deref())),
            timeout_seconds: row.timeout_seconds,
            retry: RetryPolicy::stored(row.retry.as_ref()),
            worker_id: row.worker_id,
            claimed_at: row.claimed_at,
            lease_expires_at: row.lease_expires_at,
            progress: row.progress,
            cancel_requested: row.cancel_requested,
            completed_at: row.completed_at,
            result: row.result.map(stored_json).transpose()?,
            last_error: None,
            last_change: None,
            checkpoint: None,
            checkpoint_sequence: None,
            attempts: None,
        })
    }

    /// Adds its past attempts, and the error of the last one. A success has no row of its own: it
    /// is part of the job.
    #[must_use]
    pub fn with_attempts(
        mut self,
        rows: Vec<AttemptRow>,
        state: StoredState,
        duration_ms: Option<i64>,
    ) -> Self {
        let mut attempts: Vec<_> = rows.into_iter().map(AttemptView::of).collect();
        // A job that was put off, or met a rate limit, is in no trouble.
        let mut counted = attempts.iter().rev().filter(|it| !it.is_uncounted());
        self.last_error = counted.find_map(|it| it.error.clone());
        let ended = self.worker_id.clone().zip(self.claimed_at).zip(self.completed_at);
        if let Some(((worker_id, claimed_at), ended_at)) = ended
            && state == StoredState::Succeeded
        {
            let attempt = self.attempt;
            let outcome = AttemptOutcome::Succeeded;
            let (error, retry_at) = (None, None);
            attempts.push(AttemptView {
                attempt,
                worker_id,
                claimed_at,
                ended_at,
                outcome,
                error,
                retry_at,
                duration_ms,
            });
        }
        self.attempts = Some(attempts);
        self
    }
}
