//! The job in this protocol's format.

use std::collections::BTreeMap;

use fencepost_domain::{
    backoff::{Jitter, RetryPolicy},
    error::Error,
    job::{AttemptOutcome, StoredState},
    worker::WorkerState,
};
use fencepost_engine::{
    dispatch::DispatchedJob,
    jobs::{AttemptRow, JobRow},
};
use fencepost_web::wire::validate::{Check, stored_json};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::{
    SPEC_VERSION, accept,
    fields::{Fields, StoredEnvelope, args, time},
    state_name,
};

/// Fields that the server sets, so that clients cannot store their own under these names.
const SYSTEM_FIELDS: [&str; 24] = [
    "specversion",
    "id",
    "type",
    "queue",
    "state",
    "args",
    "priority",
    "attempt",
    "max_attempts",
    "timeout_ms",
    "created_at",
    "enqueued_at",
    "scheduled_at",
    "started_at",
    "completed_at",
    "cancelled_at",
    "expires_at",
    "retry_delay_ms",
    "next_attempt_at",
    "error",
    "errors",
    "result",
    "parent_results",
    "worker_id",
];
/// Options that are shown as fields of the job, too.
const SHOWN_OPTIONS: [&str; 5] = ["retry", "unique", "tags", "labels", VISIBILITY];
/// The length of a job's reservations, in milliseconds.
const VISIBILITY: &str = "visibility_timeout_ms";

/// A job: the specification's envelope, with the additional fields that were sent.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OjsJob)]
pub struct JobView {
    specversion: &'static str,
    /// A UUIDv7.
    pub id: String,
    #[serde(rename = "type")]
    pub job_type: String,
    pub queue: String,
    pub state: &'static str,
    #[schema(value_type = Vec<serde_json::Value>)]
    args: Box<RawValue>,
    priority: i16,
    /// Failures, and the current run.
    pub attempt: i32,
    pub max_attempts: i32,
    timeout_ms: i64,
    pub created_at: String,
    enqueued_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    scheduled_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completed_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cancelled_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<String>,
    /// Wait before this attempt, or the next.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_delay_ms: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_attempt_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<JobError>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    errors: Vec<JobError>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    result: Option<Box<RawValue>>,
    /// Results of its parents.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<serde_json::Value>>)]
    parent_results: Option<Vec<Option<Box<RawValue>>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    worker_id: Option<String>,
    /// Additional fields: meta, a schema, options, unknown ones.
    #[serde(flatten)]
    #[schema(value_type = Object)]
    kept: BTreeMap<String, Box<RawValue>>,
}

/// Error of an attempt.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = OjsJobError)]
pub struct JobError {
    code: String,
    #[serde(rename = "type")]
    kind: String,
    message: String,
    attempt: i32,
    occurred_at: String,
}

/// Fields beside the arguments, and the expiry as it was written.
fn kept(envelope: Option<&str>) -> (BTreeMap<String, Box<RawValue>>, Option<String>) {
    let mut fields = StoredEnvelope::read(envelope);
    SYSTEM_FIELDS.iter().for_each(|it| drop(fields.0.remove(*it)));
    let mut ignored = Check::default();
    let options = fields.0.get("options").and_then(|it| serde_json::from_str(it.get()).ok());
    let mut options: Fields = options.unwrap_or_default();
    for name in SHOWN_OPTIONS {
        if let Some(value) = options.raw(name) {
            fields.0.entry(name.to_owned()).or_insert(value);
        }
    }
    let expires_at = options.take::<String>("expires_at", &mut ignored);
    (fields.0, expires_at.filter(|it| !it.starts_with('+')))
}

/// Errors of past attempts, oldest first; releases are left out.
fn errors(ended: &[AttemptRow]) -> Vec<JobError> {
    let failed = ended.iter().filter(|it| it.outcome != AttemptOutcome::Released);
    let error = |(attempt, it): (i32, &AttemptRow)| {
        let kind = it.error_kind.clone().unwrap_or_else(|| it.outcome.as_str().to_owned());
        JobError {
            code: kind.clone(),
            kind,
            message: it.error_message.clone().unwrap_or_else(|| it.outcome.as_str().to_owned()),
            attempt,
            occurred_at: time(it.ended_at),
        }
    };
    (1..).zip(failed).map(error).collect()
}

impl JobView {
    /// The directive that its worker is to get in a test project.
    pub fn test_directive(&self) -> Option<WorkerState> {
        const NAME: &str = "test_directive";
        let options = self.kept.get("options").filter(|it| it.get().contains(NAME))?;
        let options: serde_json::Value = serde_json::from_str(options.get()).ok()?;
        WorkerState::deserialize(options.get("metadata")?.get(NAME)?).ok()
    }

    /// The length of its reservations in milliseconds, if it names one.
    pub fn visibility_ms(&self) -> Option<i64> {
        serde_json::from_str(self.kept.get(VISIBILITY)?.get()).ok()
    }

    /// A job that was just fetched.
    pub fn handed(handed: &DispatchedJob) -> Result<Self, Error> {
        let job = &handed.job;
        let (kept, _) = kept(job.envelope.as_deref());
        let policy = RetryPolicy::stored(job.retry.as_ref());
        let delay = || policy.delay(job.failures, Jitter::NONE).as_millis();
        let results = || {
            let made = handed.parent_results.iter().map(|it| it.result.clone());
            made.map(|it| it.map(stored_json).transpose()).collect::<Result<Vec<_>, _>>()
        };
        Ok(Self {
            specversion: SPEC_VERSION,
            id: job.id.0.to_string(),
            job_type: job.job_type.clone(),
            queue: job.queue.clone(),
            state: state_name(StoredState::Processing, 0),
            args: args(&job.payload)?,
            priority: -job.rank,
            attempt: job.failures + 1,
            max_attempts: job.max_attempts,
            timeout_ms: timeout_ms(job.timeout_seconds),
            created_at: time(job.created_at),
            enqueued_at: time(job.created_at),
            scheduled_at: None,
            started_at: Some(time(job.claimed_at)),
            completed_at: None,
            cancelled_at: None,
            expires_at: None,
            retry_delay_ms: (job.failures > 0).then(|| i64::try_from(delay()).unwrap_or(i64::MAX)),
            next_attempt_at: None,
            error: None,
            errors: Vec::new(),
            result: None,
            parent_results: job.has_parents.then(results).transpose()?,
            worker_id: Some(handed.worker_id.to_string())
                .filter(|it| !it.starts_with(fencepost_domain::ids::ANONYMOUS)),
            kept,
        })
    }

    /// A job that was read.
    pub fn read(row: JobRow, ended: &[AttemptRow]) -> Result<Self, Error> {
        let (kept, expires_at) = kept(row.envelope.as_deref());
        let all = errors(ended);
        // Cancelled because it had not started in time: the protocol has no other state for that.
        let has_expired = row.state == StoredState::Cancelled
            && ended.is_empty()
            && row.expires_at.zip(row.completed_at).is_some_and(|(expiry, end)| expiry <= end);
        let awaits_activation = accept::awaits_activation(&row);
        let state = if awaits_activation {
            "pending"
        } else if has_expired {
            state_name(StoredState::DeadLetter, 0)
        } else {
            state_name(row.state, row.unfinished_parents)
        };
        let has_ended = matches!(row.state, StoredState::Succeeded | StoredState::DeadLetter);
        let is_running = row.state == StoredState::Processing;
        let attempt = match row.state {
            StoredState::Cancelled => i32::try_from(all.len()).unwrap_or(i32::MAX),
            StoredState::Processing | StoredState::Succeeded => row.failures + 1,
            _ => row.failures,
        };
        let started_at = row.claimed_at.or(ended.last().map(|it| it.claimed_at));
        let last = ended.last().filter(|_| row.state == StoredState::Backoff);
        let wait = last.and_then(|it| Some((it.retry_at? - it.ended_at).num_milliseconds()));
        let is_ahead = row.state == StoredState::Scheduled
            && row.unfinished_parents == 0
            && !awaits_activation;
        Ok(Self {
            specversion: SPEC_VERSION,
            id: row.id.0.to_string(),
            job_type: row.job_type,
            queue: row.queue,
            state,
            args: args(&row.payload)?,
            priority: -row.rank,
            attempt,
            max_attempts: row.max_attempts,
            timeout_ms: timeout_ms(row.timeout_seconds),
            created_at: time(row.created_at),
            enqueued_at: time(row.created_at),
            scheduled_at: is_ahead.then(|| time(row.run_at)),
            started_at: started_at.map(time),
            completed_at: row.completed_at.filter(|_| has_ended).map(time),
            cancelled_at: row.completed_at.filter(|_| !has_ended && !has_expired).map(time),
            expires_at: expires_at.or(row.expires_at.map(time)),
            retry_delay_ms: wait,
            next_attempt_at: last.and_then(|it| it.retry_at).map(time),
            error: all
                .last()
                .filter(|_| row.state != StoredState::Succeeded && !is_running)
                .cloned(),
            errors: all,
            result: row.result.map(stored_json).transpose()?,
            parent_results: None,
            worker_id: row.worker_id.filter(|it| !it.starts_with(fencepost_domain::ids::ANONYMOUS)),
            kept,
        })
    }
}

fn timeout_ms(seconds: i32) -> i64 {
    const MS_PER_SECOND: i64 = 1_000;
    i64::from(seconds) * MS_PER_SECOND
}
