//! The job as users see it.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::{
    domain::{
        backoff::RetryPolicy,
        job::{AttemptOutcome, Closed, JobState, StoredState, WaitingFor},
        text::ErrorReport,
    },
    engine::enqueue::{NewJob, StoredJob},
    error::Error,
    store::jobs::{AttemptRow, JobRow},
    wire::validate::stored_json,
};

/// A job.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// Its id.
    #[schema(example = "job_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// Where it is in its life.
    pub state: JobState,
    /// Why it is not running; null when it runs or has ended.
    #[schema(required)]
    pub waiting_for: Option<WaitingFor>,
    /// What a worker must be able to do.
    #[schema(example = "email.send")]
    pub job_type: String,
    /// Where it waits.
    #[schema(example = "default")]
    pub queue: String,
    /// Higher runs first.
    pub priority: i16,
    /// The bytes that were sent.
    #[schema(value_type = serde_json::Value)]
    pub payload: Box<RawValue>,
    /// For its owner's use.
    pub tags: BTreeMap<String, String>,
    /// What its worker must have.
    pub labels: Vec<String>,
    /// Jobs that share it run at most `concurrency_limit` at a time.
    #[schema(required)]
    pub concurrency_key: Option<String>,
    /// Goes with `concurrency_key`.
    #[schema(required)]
    pub concurrency_limit: Option<i32>,
    /// No other live job of the project has it.
    #[schema(required)]
    pub unique_key: Option<String>,
    /// It is called off if it has not begun by then.
    #[schema(required)]
    pub expires_at: Option<DateTime<Utc>>,
    /// The jobs it waits for, or waited for.
    pub parents: Vec<String>,
    /// The workflow it is part of.
    #[schema(required)]
    pub workflow_id: Option<String>,
    /// When it may run, or runs again.
    pub run_at: DateTime<Utc>,
    /// When it was stored.
    pub created_at: DateTime<Utc>,
    /// The same as `created_at`, under the name that polls use.
    pub enqueued_at: DateTime<Utc>,
    /// Its latest attempt, counted from 1; 0 before the first.
    pub attempt: i32,
    /// Attempts that failed. The job is given up when they reach `max_attempts`.
    pub failures: i32,
    /// Failures at which it is given up.
    pub max_attempts: i32,
    /// Longest run of one attempt, in seconds.
    pub timeout_seconds: i32,
    /// How it is tried again.
    pub retry: RetryPolicy,
    /// Who has it, or had it when it succeeded.
    #[schema(required)]
    pub worker_id: Option<String>,
    /// When that worker got it.
    #[schema(required)]
    pub claimed_at: Option<DateTime<Utc>>,
    /// When it is taken back unless a heartbeat comes.
    #[schema(required)]
    pub lease_expires_at: Option<DateTime<Utc>>,
    /// How far its worker is, 0 to 1.
    #[schema(required)]
    pub progress: Option<f32>,
    /// Whether its worker was asked to stop.
    pub cancel_requested: bool,
    /// When it ended.
    #[schema(required)]
    pub completed_at: Option<DateTime<Utc>>,
    /// The bytes that its worker sent, once it has succeeded.
    #[schema(value_type = serde_json::Value, required)]
    pub result: Option<Box<RawValue>>,
    /// What its last failed attempt reported.
    #[schema(required)]
    pub last_error: Option<JobError>,
    /// Its past attempts, oldest first. Left out in lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub attempts: Option<Vec<AttemptView>>,
}

/// An error as a worker reported it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct JobError {
    /// The kind of error.
    #[serde(rename = "type")]
    #[schema(required, example = "TimeoutError")]
    pub kind: Option<String>,
    /// What went wrong.
    #[schema(required, example = "Connection refused")]
    pub message: Option<String>,
    /// Where it went wrong.
    #[schema(required)]
    pub stack_trace: Option<String>,
    /// Whether something was cut away to keep within the bound.
    pub truncated: bool,
}

impl JobError {
    /// None when nothing was reported.
    #[must_use]
    pub fn of(report: ErrorReport) -> Option<Self> {
        let ErrorReport { kind, message, stack_trace, truncated } = report;
        let is_empty = kind.is_none() && message.is_none() && stack_trace.is_none();
        (!is_empty).then_some(Self { kind, message, stack_trace, truncated })
    }
}

/// A past attempt.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct AttemptView {
    /// Its number, counted from 1.
    pub attempt: i32,
    /// Who had it.
    pub worker_id: String,
    /// When that worker got it.
    pub claimed_at: DateTime<Utc>,
    /// When it ended.
    pub ended_at: DateTime<Utc>,
    /// How it ended.
    pub outcome: AttemptOutcome,
    /// What the worker reported.
    #[schema(required)]
    pub error: Option<JobError>,
    /// When the job could run again; null when it was the end.
    #[schema(required)]
    pub retry_at: Option<DateTime<Utc>>,
    /// How long it took, as the worker measured it.
    #[schema(required)]
    pub duration_ms: Option<i64>,
}

impl AttemptView {
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

impl Job {
    /// A job that has just been stored.
    pub fn stored(new: &NewJob, stored: &StoredJob) -> Result<Self, Error> {
        let extras = new.extras.as_deref().cloned().unwrap_or_default();
        // A new job that is due and yet `scheduled` waits for its parents.
        let unfinished_parents = i32::from(!extras.parents.is_empty());
        let closed = Closed {
            is_queue_paused: stored.is_queue_paused,
            is_type_paused: stored.is_type_paused,
            ..Closed::default()
        };
        Ok(Self {
            id: new.id.to_string(),
            state: stored.state.public(),
            waiting_for: stored.state.waiting_for(unfinished_parents, closed),
            job_type: new.job_type.clone(),
            queue: new.queue.clone(),
            priority: -new.rank,
            payload: stored_json(new.payload.clone())?,
            tags: new.tags.as_ref().map(|it| it.0.clone()).unwrap_or_default(),
            labels: extras.labels,
            concurrency_key: extras.concurrency_key,
            concurrency_limit: extras.concurrency_limit,
            unique_key: extras.unique_key,
            expires_at: extras.expires_at,
            parents: extras.parents.iter().map(ToString::to_string).collect(),
            workflow_id: extras.workflow_id.map(|it| it.to_string()),
            run_at: stored.run_at,
            created_at: stored.created_at,
            enqueued_at: stored.created_at,
            attempt: 0,
            failures: 0,
            max_attempts: stored.max_attempts,
            timeout_seconds: new.timeout_seconds,
            retry: RetryPolicy::stored(stored.retry.as_ref()),
            worker_id: None,
            claimed_at: None,
            lease_expires_at: None,
            progress: None,
            cancel_requested: false,
            completed_at: None,
            result: None,
            last_error: None,
            attempts: None,
        })
    }

    /// A job that was read.
    pub fn read(row: JobRow) -> Result<Self, Error> {
        let closed = row.closed();
        let tags = row.tags.map(serde_json::from_value).transpose().map_err(Error::internal)?;
        Ok(Self {
            id: row.id.to_string(),
            state: row.state.public(),
            waiting_for: row.state.waiting_for(row.unfinished_parents, closed),
            job_type: row.job_type,
            queue: row.queue,
            priority: -row.rank,
            payload: stored_json(row.payload)?,
            tags: tags.unwrap_or_default(),
            labels: row.labels.unwrap_or_default(),
            concurrency_key: row.concurrency_key,
            concurrency_limit: row.concurrency_limit,
            unique_key: row.unique_key,
            expires_at: row.expires_at,
            parents: row.parents.iter().map(ToString::to_string).collect(),
            workflow_id: row.workflow_id.map(|it| it.to_string()),
            run_at: row.run_at,
            created_at: row.created_at,
            enqueued_at: row.created_at,
            attempt: row.attempt,
            failures: row.failures,
            max_attempts: row.max_attempts,
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
            attempts: None,
        })
    }

    /// Adds its past attempts, and what the last of them reported. A success leaves no row of its
    /// own: it is the job's.
    #[must_use]
    pub fn with_attempts(
        mut self,
        rows: Vec<AttemptRow>,
        state: StoredState,
        duration_ms: Option<i64>,
    ) -> Self {
        let mut attempts: Vec<_> = rows.into_iter().map(AttemptView::of).collect();
        self.last_error = attempts.iter().rev().find_map(|it| it.error.clone());
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
