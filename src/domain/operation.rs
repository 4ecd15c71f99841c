//! Work on many jobs that goes on in the background: what it does, to which jobs, and in which steps.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::{formats, job::JobState};

/// Jobs that one step deals with at the most.
pub const MAX_STEP_JOBS: i64 = 50;
/// Steps that fail in a row end an operation.
pub const MAX_FAILED_STEPS: i32 = 10;
/// Steps into which a second is divided when an operation is not to go too fast.
const STEPS_PER_SECOND: i64 = 4;

/// What an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, sqlx::Type, ToSchema)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
#[schema(as = OperationKind)]
pub enum Kind {
    /// Calls off the waiting jobs of a queue.
    QueuePurge,
    /// Brings dead letters back.
    DeadLettersRetry,
    /// Deletes dead letters for good.
    DeadLettersPurge,
    /// Calls jobs off that have not ended.
    JobsCancel,
    /// Brings dead letters and cancelled jobs back.
    JobsRetry,
}

/// Where an operation is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, sqlx::Type, ToSchema)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
#[schema(as = OperationState)]
pub enum State {
    /// Goes on, on whichever node.
    Running,
    /// Has dealt with all of its jobs.
    Succeeded,
    /// Was ended before it had.
    Aborted,
    /// Its steps failed again and again; `last_error` says how.
    Failed,
}

/// A part that is named. Null is refused: it would mean all, and hardly anybody means that.
fn named<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

/// Which jobs an operation deals with. Every part narrows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = OperationFilter)]
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
    /// Only dead letters that were given up at this time or later.
    #[serde(
        default,
        deserialize_with = "formats::named_time",
        skip_serializing_if = "Option::is_none"
    )]
    pub died_after: Option<DateTime<Utc>>,
    /// Only dead letters that were given up before this time.
    #[serde(
        default,
        deserialize_with = "formats::named_time",
        skip_serializing_if = "Option::is_none"
    )]
    pub died_before: Option<DateTime<Utc>>,
}

/// Which jobs an operation deals with, of all that are listed. Every part narrows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = JobsFilter)]
pub struct JobFilter {
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
    /// Only jobs with this tag: `name:value`, or `name` for any value.
    #[serde(default, deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
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

/// Which jobs an operation deals with: what is kept of it depends on its [`Kind`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Which {
    /// Those of a queue, or dead letters.
    Letters(Filter),
    /// Those that a list of jobs shows.
    Jobs(JobFilter),
}

impl Kind {
    /// The states in which a job can be dealt with at all.
    ///
    /// ```
    /// # use fencepost::domain::{job::JobState, operation::Kind};
    /// assert!(Kind::JobsCancel.states().contains(&JobState::Processing));
    /// assert!(!Kind::JobsRetry.states().contains(&JobState::Succeeded));
    /// ```
    #[must_use]
    pub const fn states(self) -> &'static [JobState] {
        match self {
            Self::QueuePurge => &[JobState::Scheduled, JobState::Pending],
            Self::JobsCancel => &[JobState::Scheduled, JobState::Pending, JobState::Processing],
            Self::JobsRetry => &[JobState::DeadLetter, JobState::Cancelled],
            Self::DeadLettersRetry | Self::DeadLettersPurge => &[JobState::DeadLetter],
        }
    }
}

/// Jobs of the next step: as many as a step may have, as are left, and as the rate allows.
///
/// ```
/// # use fencepost::domain::operation::step_jobs;
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

/// Milliseconds from a step of so many jobs to the next one.
///
/// ```
/// # use fencepost::domain::operation::pause_ms;
/// assert_eq!(pause_ms(50, None), 0);
/// assert_eq!(pause_ms(10, Some(40)), 250);
/// assert_eq!(pause_ms(1, Some(1)), 1_000);
/// ```
#[must_use]
pub fn pause_ms(jobs: i64, rate_per_second: Option<i32>) -> i64 {
    rate_per_second.map_or(0, |rate| jobs * 1_000 / i64::from(rate.max(1)))
}
