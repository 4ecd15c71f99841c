//! Attempts as ids, for protocols on which a bare id must be a fence.

use std::{fmt, str::FromStr};

use fencepost_domain::{
    error::Error,
    ids::{JobId, JobKey, ProjectId},
    job::{AttemptOutcome, StoredState},
    lease::Fence,
};

use fencepost_engine::jobs::{AttemptRow, JobRow};

/// A job and one of its attempts, as one id that is a fence: `job_…-2`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttemptId {
    /// Id of the job.
    pub job_id: JobId,
    /// Number of the attempt, from 1. The job waits for the one that follows its last.
    pub attempt: i32,
}

impl fmt::Display for AttemptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.job_id, self.attempt)
    }
}

impl FromStr for AttemptId {
    type Err = Error;

    /// A malformed id is answered like an unknown job.
    fn from_str(text: &str) -> Result<Self, Error> {
        let (job_id, attempt) = text.rsplit_once('-').ok_or(Error::JobNotFound)?;
        let job_id = job_id.parse().map_err(|_| Error::JobNotFound)?;
        let attempt = attempt.parse().map_err(|_| Error::JobNotFound)?;
        Ok(Self { job_id, attempt })
    }
}

impl AttemptId {
    /// The job's key.
    #[must_use]
    pub fn key(self, project_id: ProjectId) -> JobKey {
        JobKey { project_id, id: self.job_id }
    }

    /// The fence of this id, with what else the caller shows. A caller that shows two different
    /// attempts matches none.
    #[must_use]
    pub fn fence(self, worker_id: Option<String>, attempt: Option<i32>) -> Fence {
        const NO_ATTEMPT: i32 = 0;
        let agrees = attempt.is_none_or(|it| it == self.attempt);
        let attempt = Some(if agrees { self.attempt } else { NO_ATTEMPT });
        Fence { worker_id, attempt, lease_id: None }
    }
}

/// The stage of an attempt.
#[derive(Debug, Clone, Copy)]
pub enum Stage<'a> {
    /// Not started.
    Pending,
    /// A worker holds it.
    Claimed,
    /// It succeeded.
    Completed,
    /// It ended otherwise. No row: the job was cancelled before this attempt began.
    Failed(Option<&'a AttemptRow>),
}

/// The stage of one attempt of a job; an error if the job neither had nor waits for it.
///
/// # Errors
/// [`Error::JobNotFound`].
pub fn stage<'a>(attempt: i32, job: &JobRow, ended: &'a [AttemptRow]) -> Result<Stage<'a>, Error> {
    if let Some(row) = ended.iter().find(|it| it.attempt == attempt) {
        return Ok(Stage::Failed(Some(row)));
    }
    let is_next = attempt == job.attempt.saturating_add(1);
    let last = ended.iter().find(|it| it.attempt == job.attempt);
    let was_cancelled = last.is_some_and(|it| it.outcome == AttemptOutcome::Cancelled);
    match job.state {
        StoredState::Processing if attempt == job.attempt => Ok(Stage::Claimed),
        StoredState::Succeeded if attempt == job.attempt => Ok(Stage::Completed),
        // Cancelled before it started; not if an earlier attempt was cancelled.
        StoredState::Cancelled if is_next && !was_cancelled => Ok(Stage::Failed(None)),
        it if it.is_waiting() && is_next => Ok(Stage::Pending),
        _ => Err(Error::JobNotFound),
    }
}

/// The attempt that a job runs, waits for, or ended with.
#[must_use]
pub fn latest_attempt(job: &JobRow, ended: &[AttemptRow]) -> i32 {
    let last = ended.iter().find(|it| it.attempt == job.attempt);
    let never_began = job.state == StoredState::Cancelled
        && last.is_none_or(|it| it.outcome != AttemptOutcome::Cancelled);
    job.attempt + i32::from(job.state.is_waiting() || never_began)
}

/// The error of an attempt, in one line.
#[must_use]
pub fn reason(ended: &AttemptRow) -> String {
    match (&ended.error_message, &ended.error_kind) {
        (Some(message), _) => message.clone(),
        (None, Some(kind)) => kind.clone(),
        (None, None) if ended.outcome == AttemptOutcome::Failed => "failed".to_owned(),
        (None, None) => ended.outcome.as_str().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempts_id_reads_back_as_it_was_written() {
        let id = AttemptId { job_id: JobId::generate(), attempt: 12 };
        assert_eq!(id.to_string().parse::<AttemptId>().ok(), Some(id));
        for odd in ["", "job_x-1", "-", &id.job_id.to_string(), &format!("{}-x", id.job_id)] {
            assert!(odd.parse::<AttemptId>().is_err(), "{odd}");
        }
    }

    #[test]
    fn an_attempt_shown_twice_must_be_the_same() {
        let id = AttemptId { job_id: JobId::generate(), attempt: 2 };
        assert_eq!(id.fence(None, None).attempt, Some(2));
        assert_eq!(id.fence(None, Some(2)).attempt, Some(2));
        assert_eq!(id.fence(None, Some(1)).attempt, Some(0));
    }
}
