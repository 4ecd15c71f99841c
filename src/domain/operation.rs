//! Bulk operations in the background: their kinds, filters and steps.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::{formats, job::JobState};
use crate::ids::{BatchId, JobId};

/// Jobs of one step at most.
pub const MAX_STEP_JOBS: i64 = 50;
/// Consecutive failed steps after which an operation has failed.
pub const MAX_FAILED_STEPS: i32 = 10;
/// Steps per second of an operation with a rate limit.
const STEPS_PER_SECOND: i64 = 4;

/// The kind of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, sqlx::Type, ToSchema)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
#[schema(as = OperationKind)]
pub enum Kind {
    /// Cancels the waiting jobs of a queue.
    QueuePurge,
    /// Retries dead letters.
    DeadLettersRetry,
    /// Deletes dead letters.
    DeadLettersPurge,
    /// Cancels live jobs.
    JobsCancel,
    /// Retries dead letters and cancelled jobs.
    JobsRetry,
    /// Enqueues jobs that have ended again, as new ones.
    JobsReplay,
    /// Pauses waiting jobs.
    JobsPause,
    /// Resumes paused jobs.
    JobsResume,
}

/// The state of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, sqlx::Type, ToSchema)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
#[schema(as = OperationState)]
pub enum State {
    /// Steps are being run, on any node.
    Running,
    /// All of its jobs are processed.
    Succeeded,
    /// Aborted by request.
    Aborted,
    /// Its steps failed repeatedly; `last_error` says why.
    Failed,
}

/// A filter that is present. Null is refused: it would select everything, which is hardly meant.
fn named<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

/// Conditions for the jobs of an operation, combined with "and".
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = DeadLettersFilter)]
pub struct Filter {
    /// Only jobs of this queue.
    #[serde(default, deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 100)]
    pub queue: Option<String>,
    /// Only jobs of this type.
    #[serde(default, deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 500)]
    pub job_type: Option<String>,
    /// Only dead letters of this group.
    #[serde(
        default,
        deserialize_with = "formats::named_fingerprint",
        skip_serializing_if = "Option::is_none",
        serialize_with = "uuid::serde::simple::option::serialize"
    )]
    #[schema(value_type = Option<String>)]
    pub fingerprint: Option<Uuid>,
    /// Only jobs dead-lettered at this time or later.
    #[serde(
        default,
        deserialize_with = "formats::named_time",
        skip_serializing_if = "Option::is_none"
    )]
    pub died_after: Option<DateTime<Utc>>,
    /// Only jobs dead-lettered before this time.
    #[serde(
        default,
        deserialize_with = "formats::named_time",
        skip_serializing_if = "Option::is_none"
    )]
    pub died_before: Option<DateTime<Utc>>,
}

/// Conditions for the listed jobs of an operation, combined with "and".
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = JobsFilter)]
pub struct JobFilter {
    /// A search line, as in `GET /v1/jobs?q=`. Ages count back from the start of the operation.
    #[serde(default, deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 1000, example = "queue:mail age:>5m error:refused")]
    pub q: Option<String>,
    /// Only these jobs.
    #[serde(
        default,
        deserialize_with = "formats::named_jobs",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<Vec<String>>, min_items = 1, max_items = 200,
             example = json!(["job_01m7w3ha3aextt8pkwwdmxsmqw"]))]
    pub ids: Option<Vec<JobId>>,
    /// Only jobs in this state.
    #[serde(default, deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    pub state: Option<JobState>,
    /// Only jobs of this queue.
    #[serde(default, deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 100)]
    pub queue: Option<String>,
    /// Only jobs of this type.
    #[serde(default, deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 500)]
    pub job_type: Option<String>,
    /// Only jobs of this group.
    #[serde(default, deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 200)]
    pub group: Option<String>,
    /// Only jobs with this tag: `name:value`, or `name` for any value. A name that has a colon is
    /// found with `q`.
    #[serde(default, deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// Only jobs of this batch.
    #[serde(
        default,
        deserialize_with = "formats::named_batch",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>, example = "batch_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub batch_id: Option<BatchId>,
    /// Only jobs stored at this time or later.
    #[serde(
        default,
        deserialize_with = "formats::named_time",
        skip_serializing_if = "Option::is_none"
    )]
    pub created_after: Option<DateTime<Utc>>,
    /// Only jobs stored before this time.
    #[serde(
        default,
        deserialize_with = "formats::named_time",
        skip_serializing_if = "Option::is_none"
    )]
    pub created_before: Option<DateTime<Utc>>,
}

/// The filter of an operation; its [`Kind`] says which one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = BulkFilter)]
pub enum Which {
    /// A queue's jobs, or dead letters.
    Letters(Filter),
    /// Jobs of a list.
    Jobs(JobFilter),
}

impl Kind {
    /// The states in which a job can be processed.
    ///
    /// ```
    /// # use fencepost_domain::{job::JobState, operation::Kind};
    /// assert!(Kind::JobsCancel.states().contains(&JobState::Processing));
    /// assert!(!Kind::JobsRetry.states().contains(&JobState::Succeeded));
    /// ```
    #[must_use]
    pub const fn states(self) -> &'static [JobState] {
        match self {
            Self::QueuePurge | Self::JobsPause => &[JobState::Scheduled, JobState::Pending],
            Self::JobsResume => &[JobState::Scheduled],
            Self::JobsCancel => &[JobState::Scheduled, JobState::Pending, JobState::Processing],
            Self::JobsRetry => &[JobState::DeadLetter, JobState::Cancelled],
            Self::JobsReplay => &[JobState::Succeeded, JobState::DeadLetter, JobState::Cancelled],
            Self::DeadLettersRetry | Self::DeadLettersPurge => &[JobState::DeadLetter],
        }
    }

    /// True: it selects only paused jobs; false: only others; none: both.
    #[must_use]
    pub const fn of_paused(self) -> Option<bool> {
        match self {
            Self::JobsPause => Some(false),
            Self::JobsResume => Some(true),
            _ => None,
        }
    }
}

/// The reason for which an operation skips a job. All but one are codes of errors: a request for
/// that job alone would be refused with the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SkipReason {
    /// It was deleted meanwhile.
    JobNotFound,
    /// The job was in another state by then.
    InvalidState,
    /// It would wait for a parent that has ended in another way.
    ParentTerminal,
    /// A live job has its unique key.
    UniqueConflict,
    /// The payload is a template of the workflow.
    Template,
}

impl SkipReason {
    const fn as_str(self) -> &'static str {
        match self {
            Self::JobNotFound => "job_not_found",
            Self::InvalidState => "invalid_state",
            Self::ParentTerminal => "parent_terminal",
            Self::UniqueConflict => "unique_conflict",
            Self::Template => "template",
        }
    }
}

/// Skipped jobs by the name of a [`SkipReason`]: a newer version may have counted others.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped(pub BTreeMap<String, i64>);

impl Skipped {
    /// This many jobs for one reason.
    #[must_use]
    pub fn of(reason: SkipReason, jobs: i64) -> Self {
        let mut skipped = Self::default();
        skipped.add(reason, jobs);
        skipped
    }

    /// Counts jobs.
    pub fn add(&mut self, reason: SkipReason, jobs: i64) {
        if jobs > 0 {
            *self.0.entry(reason.as_str().to_owned()).or_default() += jobs;
        }
    }

    /// The sum of both.
    ///
    /// ```
    /// # use fencepost_domain::operation::{SkipReason::{InvalidState, UniqueConflict}, Skipped};
    /// let both = Skipped::of(InvalidState, 2).and(&Skipped::of(UniqueConflict, 1));
    /// assert_eq!(both.and(&Skipped::of(InvalidState, 3)).total(), 6);
    /// ```
    #[must_use]
    pub fn and(mut self, other: &Self) -> Self {
        for (reason, jobs) in &other.0 {
            *self.0.entry(reason.clone()).or_default() += jobs;
        }
        self
    }

    /// Jobs that were skipped for any reason.
    #[must_use]
    pub fn total(&self) -> i64 {
        self.0.values().sum()
    }
}

/// Jobs of the next step: at most a full step, what is left, and what the rate allows.
///
/// ```
/// # use fencepost_domain::operation::step_jobs;
/// assert_eq!(step_jobs(0, None, None), 50);
/// assert_eq!(step_jobs(95, Some(100), None), 5);
/// assert_eq!(step_jobs(0, None, Some(1)), 1);
/// assert_eq!(step_jobs(0, None, Some(40)), 10);
/// assert_eq!(step_jobs(100, Some(100), Some(1)), 0);
/// ```
#[must_use]
pub fn step_jobs(done: i64, max_jobs: Option<i64>, rate_per_second: Option<i32>) -> i64 {
    let left = max_jobs.map_or(MAX_STEP_JOBS, |it| (it - done).max(0));
    let drip =
        rate_per_second.map_or(MAX_STEP_JOBS, |it| (i64::from(it) / STEPS_PER_SECOND).max(1));
    left.min(drip).min(MAX_STEP_JOBS)
}

/// Milliseconds from a step of this many jobs to the next one.
///
/// ```
/// # use fencepost_domain::operation::pause_ms;
/// assert_eq!(pause_ms(50, None), 0);
/// assert_eq!(pause_ms(10, Some(40)), 250);
/// assert_eq!(pause_ms(1, Some(1)), 1_000);
/// ```
#[must_use]
pub fn pause_ms(jobs: i64, rate_per_second: Option<i32>) -> i64 {
    rate_per_second.map_or(0, |rate| jobs * 1_000 / i64::from(rate.max(1)))
}
