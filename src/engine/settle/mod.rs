//! The end of an attempt: success moves the job out; failure, release, timeout and an expired lease
//! lead to a retry or to the dead letter.

pub mod attempt_reports;
mod bare;
pub mod checkpoints;
pub(super) mod failure;
mod failures;
pub mod heartbeat;
mod rate_limited;
mod snooze;
mod successes;

use std::{
    collections::HashMap,
    future::Future,
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::{Error, JobStatus},
    group::RateLimitScope,
    ids::{JobId, JobKey, LeaseId, ProjectId},
    job::AttemptOutcome,
    lease::{self, Fence, Refusal},
    limits,
    text::ErrorReport,
};
use fencepost_signals::telemetry;
use fencepost_store::{
    self as store,
    connection::deadline::detached,
    settle::{settle_success::Success, standings::SettledAttempt, uncounted::Uncounted},
};
use metrics::counter;
use sqlx::PgConnection;
use tokio::time::timeout;

pub use self::{
    bare::{BareFences, name_attempt},
    failures::{FailureOrRelease, Failures},
    rate_limited::RateLimited,
    successes::{Parents, SuccessNotes, Successes},
};
use super::{Engine, group_commit::Coalescer};

/// A worker's ack.
#[derive(Debug, Clone)]
pub struct Ack {
    pub job_id: JobId,
    pub fence: Fence,
    pub end: ReportedOutcome,
    pub duration_ms: Option<i64>,
}

/// How an attempt ended, as the worker reports it.
#[derive(Debug, Clone)]
pub enum ReportedOutcome {
    Succeeded {
        /// The JSON as it was sent.
        result: Option<String>,
    },
    Failed(Failure),
    /// The worker releases the job. No failure is counted.
    Released,
    /// The worker puts the job off. No failure is counted.
    Snoozed {
        /// Seconds until it may run again.
        delay_seconds: u32,
    },
    /// The worker has met a rate limit. No failure is counted.
    RateLimited(RateLimited),
}

/// A failure, as the worker reports it.
#[derive(Debug, Clone, Default)]
pub struct Failure {
    pub error: ErrorReport,
    /// Whether another attempt may help.
    pub retryable: bool,
    /// The wait that the worker asks for, in seconds; replaces the backoff.
    pub retry_after_seconds: Option<u32>,
}

/// The result of an ack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Acked {
    /// The job has ended: succeeded, dead-lettered or cancelled.
    Done {
        /// Children that became runnable; none if the job has no children.
        children_activated: Option<i32>,
    },
    Retry {
        at: DateTime<Utc>,
        /// What has been paused by it.
        paused: Option<RateLimitScope>,
    },
}

/// Attempts of a job that do not count and are listed, of each kind.
pub const KEPT_UNCOUNTED_ATTEMPTS: i64 = 100;

/// How long an ack or heartbeat waits for a job that another transaction holds.
const HELD_JOB_TIMEOUT: Duration = Duration::from_secs(2);
/// The first pause before it is tried again. It doubles with each try.
const FIRST_HELD_PAUSE: Duration = Duration::from_millis(2);
/// The longest pause.
const MAX_HELD_PAUSE: Duration = Duration::from_millis(200);

/// Acks in bulk requests of one project that a node settles at the same time. Those of many
/// would all be answered in the same instant, and requests of others would queue behind them.
pub(super) const MAX_BULK_ACKS: usize = 2 * limits::MAX_ACK_BATCH;
/// How long a bulk request of acks waits for its turn among those of its project.
const BULK_TURN_TIMEOUT: Duration = Duration::from_secs(5);

/// Tries to release a job. After that its lease expires.
const MAX_RELEASE_TRIES: u32 = 30;
/// The pause between two tries.
const RELEASE_RETRY_PAUSE: Duration = Duration::from_secs(1);

/// The answer of a group commit about one fence.
#[derive(Debug, Clone)]
pub enum Settling<T> {
    /// It held, and this was done.
    Done(T),
    /// It did not hold; or another transaction holds the job, which was left alone. Boxed: it is
    /// rare, and its bytes would be part of every ack.
    Left(Box<SettledAttempt>),
    /// There is no such job.
    NoJob,
}

/// The answers about fences that a statement left alone: they are explained in the same commit, so
/// that a refusal costs no more than an acceptance.
async fn explain_left<'a, T>(
    conn: &mut PgConnection,
    left: impl Iterator<Item = (JobKey, &'a Fence)> + Clone,
) -> sqlx::Result<HashMap<JobKey, Settling<T>>> {
    if left.clone().next().is_none() {
        return Ok(HashMap::new());
    }
    let found = store::settle::standings::find_standings(conn, left).await?;
    Ok(found.into_iter().map(|(key, it)| (key, Settling::Left(Box::new(it)))).collect())
}

/// Waits between tries, until a held job must be abandoned.
struct HeldJob {
    since: Instant,
    pause: Duration,
}

impl HeldJob {
    fn new() -> Self {
        Self { since: Instant::now(), pause: FIRST_HELD_PAUSE }
    }

    /// # Errors
    /// [`Error::JobLocked`] after [`HELD_JOB_TIMEOUT`].
    async fn wait(&mut self) -> Result<(), Error> {
        if self.since.elapsed() > HELD_JOB_TIMEOUT {
            return Err(Error::JobLocked);
        }
        tokio::time::sleep(self.pause).await;
        self.pause = (self.pause * 2).min(MAX_HELD_PAUSE);
        Ok(())
    }
}

/// Waits until the project may settle this many acks more, of one bulk request.
///
/// # Errors
/// [`Error::Overloaded`] when that takes longer than a few seconds.
pub async fn take_turn(
    engine: &Engine,
    project_id: ProjectId,
    acks: usize,
) -> Result<impl Drop, Error> {
    let acks = u32::try_from(acks.min(MAX_BULK_ACKS)).unwrap_or(u32::MAX);
    let turn = engine.bulk_acks.take(project_id, acks);
    timeout(BULK_TURN_TIMEOUT, turn).await.map_err(|_| Error::Overloaded)
}

/// Records the end of an attempt, if its fence still holds.
///
/// Repeating an ack that shows its attempt or lease returns the first answer.
///
/// # Errors
/// [`Error::JobNotFound`], [`Error::InvalidState`], [`Error::WorkerMismatch`] or
/// [`Error::StaleLease`] when this worker may not settle the job: nothing is written.
/// [`Error::JobLocked`] when another transaction holds the job: nothing is written.
pub async fn ack(engine: &Engine, project_id: ProjectId, ack: Ack) -> Result<Acked, Error> {
    let key = JobKey { project_id, id: ack.job_id };
    let ack = cut_if_full(engine, project_id, ack);
    let outcome = match &ack.end {
        ReportedOutcome::Succeeded { .. } => AttemptOutcome::Succeeded,
        ReportedOutcome::Failed(_) => AttemptOutcome::Failed,
        ReportedOutcome::Released
        | ReportedOutcome::Snoozed { .. }
        | ReportedOutcome::RateLimited(_) => AttemptOutcome::Released,
    };
    let uncounted = match &ack.end {
        ReportedOutcome::Snoozed { .. } => Some(Uncounted::Snooze),
        ReportedOutcome::RateLimited(_) => Some(Uncounted::RateLimit),
        _ => None,
    };
    let fence = ack.fence.clone();
    let (mut held, mut has_follow_ups) = (HeldJob::new(), false);
    loop {
        let found = match submit(engine, key, ack.clone(), has_follow_ups).await {
            Ok(Settling::Done(acked)) => return Ok(acked),
            Ok(Settling::NoJob) => return Err(Error::JobNotFound),
            Ok(Settling::Left(found)) => found,
            Err(Error::JobLocked) => {
                held.wait().await?;
                continue;
            }
            Err(error) => return Err(error),
        };
        // All are releases, but one pauses, one waits, and one does neither.
        let is_released = found.standing.recorded.as_ref().map(|it| it.1) == Some(outcome)
            && outcome == AttemptOutcome::Released;
        let is_other = is_released && found.uncounted != uncounted;
        match lease::explain_ack(&fence, outcome, &found.standing) {
            Ok(()) if is_other => {
                let refusal = lease::explain_report(&fence, &found.standing);
                return Err(refused(refusal, &found.standing));
            }
            Ok(()) => {
                return Ok(match found.retry_at {
                    Some(at) => Acked::Retry { at, paused: None },
                    None => Acked::Done { children_activated: found.children_activated },
                });
            }
            Err(Refusal::LostRace) if found.has_follow_ups && !has_follow_ups => {
                has_follow_ups = true;
            }
            Err(Refusal::LostRace) => held.wait().await?,
            Err(refusal) => return Err(refused(refusal, &found.standing)),
        }
    }
}

/// The same, with an error of at most [`limits::MAX_FULL_ERROR_BYTES`] while the project has stored
/// all of its bytes.
fn cut_if_full(engine: &Engine, project_id: ProjectId, mut ack: Ack) -> Ack {
    if let ReportedOutcome::Failed(failure) = &mut ack.end {
        let short = failure.error.shortened();
        if short != failure.error && engine.backlogs.full.contains(project_id) {
            failure.error = short;
        }
    }
    ack
}

/// Releases a job that its worker never received; no failure is counted.
pub(super) fn release(
    failures: &Coalescer<Failures>,
    key: JobKey,
    worker_id: &str,
    lease_id: LeaseId,
) -> impl Future<Output = ()> + Send + use<> {
    let worker_id = Some(worker_id.to_owned());
    let fence = Fence { worker_id, attempt: None, lease_id: Some(lease_id) };
    let request =
        FailureOrRelease { key, fence, failure: None, is_undelivered: true, duration_ms: None };
    let failures = failures.clone();
    async move {
        for _ in 0..MAX_RELEASE_TRIES {
            // It shows its lease, so repeating it is safe.
            match failures.submit(request.clone()).await {
                Ok(Settling::Left(found)) if is_held(&request.fence, &found) => (),
                Ok(_) => return,
                Err(error) => {
                    tracing::warn!(job.id = %key.id, %error, "job release failed, will retry");
                }
            }
            tokio::time::sleep(RELEASE_RETRY_PAUSE).await;
        }
    }
}

/// Whether the fence holds, so that only another transaction kept the job from being settled.
fn is_held(fence: &Fence, found: &SettledAttempt) -> bool {
    let recorded = AttemptOutcome::Released;
    lease::explain_ack(fence, recorded, &found.standing) == Err(Refusal::LostRace)
}

/// Why a fence of a report did not match.
pub(super) async fn read_again(
    engine: &Engine,
    key: JobKey,
    fence: &Fence,
) -> Result<SettledAttempt, Error> {
    let mut conn = engine.pools.reports.acquire_for(key.project_id).await?;
    let fences = std::iter::once((key, fence));
    let found = store::settle::standings::find_standings(&mut conn, fences).await?;
    found.into_iter().next().map(|it| it.1).ok_or(Error::JobNotFound)
}

/// The error for a refusal, with the job's current state.
pub(super) fn refused(refusal: Refusal, standing: &lease::Standing) -> Error {
    let job_status = JobStatus { state: standing.state, attempt: standing.attempt };
    let (reason, error) = match refusal {
        Refusal::InvalidState => ("invalid_state", Error::InvalidState(job_status)),
        Refusal::WorkerMismatch => ("worker_mismatch", Error::WorkerMismatch(job_status)),
        Refusal::StaleLease | Refusal::LostRace => ("stale_lease", Error::StaleLease(job_status)),
    };
    counter!(telemetry::FENCES_REFUSED, "reason" => reason).increment(1);
    error
}

async fn submit(
    engine: &Engine,
    key: JobKey,
    ack: Ack,
    has_follow_ups: bool,
) -> Result<Settling<Acked>, Error> {
    let Ack { fence, end, duration_ms, .. } = ack;
    let end = match end {
        ReportedOutcome::Succeeded { result } => {
            let JobKey { project_id, id: job_id } = key;
            let success = Success { project_id, job_id, fence, result, duration_ms };
            let settled = match has_follow_ups {
                true => engine.parents.submit(success).await?,
                false => engine.successes.submit(success).await?,
            };
            return Ok(match settled {
                Settling::Done(children_activated) => {
                    Settling::Done(Acked::Done { children_activated })
                }
                Settling::Left(found) => Settling::Left(found),
                Settling::NoJob => Settling::NoJob,
            });
        }
        ReportedOutcome::Failed(failure) => {
            let failure = Some(failure);
            FailureOrRelease { key, fence, failure, is_undelivered: false, duration_ms }
        }
        ReportedOutcome::Released => {
            FailureOrRelease { key, fence, failure: None, is_undelivered: false, duration_ms }
        }
        ReportedOutcome::Snoozed { delay_seconds } => {
            let engine = engine.clone();
            let settling = async move {
                snooze::settle(&engine, key, &fence, delay_seconds, duration_ms).await
            };
            return detached(settling).await?;
        }
        ReportedOutcome::RateLimited(limited) => {
            let engine = engine.clone();
            let settling = async move {
                rate_limited::settle(&engine, key, &fence, limited, duration_ms).await
            };
            return detached(settling).await?;
        }
    };
    engine.failures.submit(end).await
}

/// Whether an ack may be written. After a lost commit only an ack that shows its attempt or lease
/// may be repeated: another could settle the next attempt.
fn may_write(fence: &Fence, is_in_doubt: bool) -> bool {
    !is_in_doubt || fence.names_an_attempt()
}
