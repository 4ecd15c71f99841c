//! The end of an attempt: success moves the job out; failure, release, timeout and silence lead to
//! a retry or to the dead letter.

use std::{
    collections::{HashMap, HashSet},
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use chrono::{DateTime, Utc};
use metrics::counter;
use sqlx::{Acquire, PgConnection, PgPool, Postgres, pool::PoolConnection};

use super::{
    Engine,
    coalesce::{Batch, Coalescer},
};
use crate::{
    domain::{
        backoff::{Jitter, RetryPolicy},
        job::{self, AfterAttempt, Ending, Next, Outcome, Running, StoredState},
        lease::{self, Fence, Refusal},
        text::ErrorReport,
    },
    error::{Error, Whereabouts},
    ids::{JobId, LeaseId, ProjectId},
    store::{
        self,
        acks::{Found, Success},
        endings::{Ended, Held, Rested},
    },
    telemetry,
    wake::{Arrival, Wake},
};

pub use crate::store::acks::JobKey;

/// What a worker says of the end of its attempt.
#[derive(Debug, Clone)]
pub struct Ack {
    /// Which job.
    pub job_id: JobId,
    /// Who says so.
    pub fence: Fence,
    /// How it ended.
    pub end: End,
    /// As the worker measured it.
    pub duration_ms: Option<i64>,
}

/// How an attempt ended, in the worker's words.
#[derive(Debug, Clone)]
pub enum End {
    /// It is done.
    Succeeded {
        /// The bytes that were sent.
        result: Option<String>,
    },
    /// It failed.
    Failed(Failure),
    /// The worker hands the job back. No failure is counted.
    Released,
}

/// A failure, in the worker's words.
#[derive(Debug, Clone, Default)]
pub struct Failure {
    /// Cut to what is kept.
    pub error: ErrorReport,
    /// Whether another attempt may help.
    pub retryable: bool,
    /// The wait the worker asks for, in seconds; replaces the backoff.
    pub retry_after_seconds: Option<u32>,
}

/// What an ack led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acked {
    /// The job has ended, well or in the dead letter.
    Done {
        /// Children that became runnable; none when the job has no children.
        children_activated: Option<i32>,
    },
    /// The job runs again.
    Retry {
        /// When.
        at: DateTime<Utc>,
    },
}

/// How often an ack is tried whose lease changed hands between the statement and the second look.
const MAX_LOOKS: u32 = 3;

/// How often a job is given back to a store that does not take it. Then it waits for its lease's end.
const MAX_GIVE_BACKS: u32 = 30;
/// The pause between two tries.
const GIVE_BACK_PAUSE: Duration = Duration::from_secs(1);

/// Records the end of an attempt, if its fence still holds.
///
/// Repeating an ack that shows its attempt or lease answers as the first time.
///
/// # Errors
/// [`Error::JobNotFound`], [`Error::InvalidState`], [`Error::WorkerMismatch`] or
/// [`Error::StaleLease`] when this worker may not speak for the job: nothing is written.
pub async fn ack(engine: &Engine, project_id: ProjectId, ack: Ack) -> Result<Acked, Error> {
    let key = JobKey { project_id, id: ack.job_id };
    let outcome = match &ack.end {
        End::Succeeded { .. } => Outcome::Succeeded,
        End::Failed(_) => Outcome::Failed,
        End::Released => Outcome::Released,
    };
    let fence = ack.fence.clone();
    for _ in 0..MAX_LOOKS {
        if let Some(acked) = submit(engine, key, ack.clone()).await? {
            return Ok(acked);
        }
        let found = look_again(engine, key, &fence).await?;
        match lease::explain_ack(&fence, outcome, &found.standing) {
            Ok(()) => {
                return Ok(match found.retry_at {
                    Some(at) => Acked::Retry { at },
                    None => Acked::Done { children_activated: found.children_activated },
                });
            }
            Err(Refusal::Moved) => (),
            Err(refusal) => return Err(refused(refusal, &found.standing)),
        }
    }
    // Its lease changes hands faster than it can be looked at.
    Err(Error::Overloaded)
}

/// Hands back a job that nobody is working on; no failure is counted.
pub(super) fn give_back(
    endings: &Coalescer<Endings>,
    key: JobKey,
    worker_id: &str,
    lease_id: LeaseId,
) -> impl Future<Output = ()> + Send + use<> {
    let worker_id = worker_id.to_owned();
    let fence = Fence { worker_id, attempt: None, lease_id: Some(lease_id) };
    let request = EndRequest { key, fence, failure: None, duration_ms: None };
    let endings = endings.clone();
    async move {
        for _ in 0..MAX_GIVE_BACKS {
            // It shows its lease, so it is safe to repeat.
            match endings.submit(request.clone()).await {
                Ok(_) => return,
                Err(error) => {
                    tracing::warn!(job.id = %key.id, %error, "a job was not given back yet")
                }
            }
            tokio::time::sleep(GIVE_BACK_PAUSE).await;
        }
    }
}

/// What became of a job whose fence did not match. Boxed: it is rare, and its kilobytes would be
/// part of every ack.
pub(super) fn look_again<'a>(
    engine: &'a Engine,
    key: JobKey,
    fence: &'a Fence,
) -> Pin<Box<dyn Future<Output = Result<Found, Error>> + Send + 'a>> {
    Box::pin(async move {
        let mut conn = engine.pools.settle.acquire().await?;
        let found = store::acks::find_standing(&mut conn, key, fence).await?;
        found.ok_or(Error::JobNotFound)
    })
}

/// The error for a refusal, with where the job stands.
pub(super) fn refused(refusal: Refusal, standing: &lease::Standing) -> Error {
    let whereabouts = Whereabouts { state: standing.state, attempt: standing.attempt };
    let (reason, error) = match refusal {
        Refusal::InvalidState => ("invalid_state", Error::InvalidState(whereabouts)),
        Refusal::WorkerMismatch => ("worker_mismatch", Error::WorkerMismatch(whereabouts)),
        Refusal::StaleLease | Refusal::Moved => ("stale_lease", Error::StaleLease(whereabouts)),
    };
    counter!(telemetry::FENCES_REFUSED, "reason" => reason).increment(1);
    error
}

async fn submit(engine: &Engine, key: JobKey, ack: Ack) -> Result<Option<Acked>, Error> {
    let Ack { fence, end, duration_ms, .. } = ack;
    let end = match end {
        End::Succeeded { result } => {
            let JobKey { project_id, id: job_id } = key;
            let success = Success { project_id, job_id, fence, result, duration_ms };
            let is_done = engine.successes.submit(success).await?;
            return Ok(is_done.then_some(Acked::Done { children_activated: None }));
        }
        End::Failed(failure) => EndRequest { key, fence, failure: Some(failure), duration_ms },
        End::Released => EndRequest { key, fence, failure: None, duration_ms },
    };
    engine.endings.submit(end).await
}

/// Whether an ack may be written. After a commit whose answer was lost, only one that shows its
/// attempt or lease: another might settle the attempt after the one it meant.
fn may_write(fence: &Fence, is_in_doubt: bool) -> bool {
    !is_in_doubt || fence.names_an_attempt()
}

/// The batch of successes.
pub struct Successes {
    pub(super) pool: PgPool,
    pub(super) settled: Arc<AtomicU64>,
}

impl Batch for Successes {
    type Item = Success;
    /// Whether the fence held.
    type Answer = bool;
    type Key = JobKey;
    type Connection = PoolConnection<Postgres>;

    const KIND: &'static str = "succeed";
    const MAX_ROWS: usize = 500;

    fn bytes(item: &Success) -> usize {
        item.result.as_ref().map_or(0, String::len)
    }

    fn key(item: &Success) -> JobKey {
        item.key()
    }

    async fn connect(&self) -> sqlx::Result<Self::Connection> {
        self.pool.acquire().await
    }

    async fn flush(
        &self,
        conn: &mut Self::Connection,
        items: &[Success],
        is_in_doubt: bool,
    ) -> sqlx::Result<Vec<Result<bool, Error>>> {
        let sure: Vec<_> = items.iter().filter(|it| may_write(&it.fence, is_in_doubt)).collect();
        let moved: HashSet<_> = store::acks::succeed(conn, &sure).await?.into_iter().collect();
        self.settled.fetch_add(moved.len() as u64, Ordering::Relaxed);
        counter!(telemetry::JOBS_SETTLED, "outcome" => "succeeded").increment(moved.len() as u64);
        let answer = |it: &Success| {
            if !may_write(&it.fence, is_in_doubt) {
                return Err(Error::InDoubt);
            }
            Ok(moved.contains(&it.key()))
        };
        Ok(items.iter().map(answer).collect())
    }
}

/// A failure or a release to record, if its fence still holds.
#[derive(Debug, Clone)]
pub struct EndRequest {
    pub(super) key: JobKey,
    pub(super) fence: Fence,
    /// None: a release.
    pub(super) failure: Option<Failure>,
    pub(super) duration_ms: Option<i64>,
}

impl EndRequest {
    fn ending(&self) -> Ending<'_> {
        self.failure.as_ref().map_or(Ending::Released, |it| Ending::Failed {
            retryable: it.retryable,
            error_kind: it.error.kind.as_deref(),
            retry_after_seconds: it.retry_after_seconds,
        })
    }
}

/// The batch of failures and releases.
pub struct Endings {
    pub(super) pool: PgPool,
    pub(super) wake: Wake,
}

impl Batch for Endings {
    type Item = EndRequest;
    /// None: the fence did not hold.
    type Answer = Option<Acked>;
    type Key = JobKey;
    type Connection = PoolConnection<Postgres>;

    const KIND: &'static str = "end";
    const MAX_ROWS: usize = 500;

    fn bytes(item: &EndRequest) -> usize {
        let Some(failure) = &item.failure else { return 0 };
        let texts = [&failure.error.kind, &failure.error.message, &failure.error.stack_trace];
        texts.iter().map(|it| it.as_ref().map_or(0, String::len)).sum()
    }

    fn key(item: &EndRequest) -> JobKey {
        item.key
    }

    async fn connect(&self) -> sqlx::Result<Self::Connection> {
        self.pool.acquire().await
    }

    async fn flush(
        &self,
        conn: &mut Self::Connection,
        items: &[EndRequest],
        is_in_doubt: bool,
    ) -> sqlx::Result<Vec<Result<Option<Acked>, Error>>> {
        let mut tx = conn.begin().await?;
        let sure = items.iter().filter(|it| may_write(&it.fence, is_in_doubt));
        let fences = sure.map(|it| (it.key, &it.fence));
        let held = store::endings::lock_held(&mut tx, fences).await?;
        let requests: HashMap<_, _> = items.iter().map(|it| (it.key, it)).collect();
        let ends: Vec<_> = held
            .into_iter()
            .filter_map(|held| requests.get(&held.key()).map(|it| (held, *it)))
            .map(|(held, it)| {
                let error = it.failure.as_ref().map(|it| it.error.clone()).unwrap_or_default();
                decide(&held, &it.ending(), error, it.duration_ms)
            })
            .collect();
        let rested = write_down(&mut tx, &ends).await?;
        tx.commit().await?;
        tell(&self.wake, &ends, &rested);
        let by_key: HashMap<_, _> = rested
            .iter()
            .map(|it| (JobKey { project_id: it.project_id, id: it.id }, acked(it)))
            .collect();
        let answer = |it: &EndRequest| {
            if !may_write(&it.fence, is_in_doubt) {
                return Err(Error::InDoubt);
            }
            Ok(by_key.get(&it.key).copied())
        };
        Ok(items.iter().map(answer).collect())
    }
}

fn acked(rested: &Rested) -> Acked {
    rested.retry_at.map_or(Acked::Done { children_activated: None }, |at| Acked::Retry { at })
}

/// Decides what the end of a locked job's attempt leads to. Throws the dice for the backoff.
pub(super) fn decide(
    held: &Held,
    ending: &Ending<'_>,
    error: ErrorReport,
    duration_ms: Option<i64>,
) -> Ended {
    let policy = RetryPolicy::stored(held.retry.as_ref());
    let running = Running {
        attempt: held.attempt,
        failures: held.failures,
        max_attempts: held.max_attempts,
        policy: &policy,
    };
    let jitter = Jitter::new(rand::random());
    let AfterAttempt { next, failures } = job::after_attempt(&running, ending, jitter);
    let (state, wait) = match next {
        Next::Pending => (StoredState::Pending, Duration::ZERO),
        Next::RetryAfter(wait) => (StoredState::Backoff, wait),
        Next::DeadLetter => (StoredState::DeadLetter, Duration::ZERO),
    };
    let outcome = ending.outcome();
    Ended { key: held.key(), state, failures, wait, outcome, error, duration_ms }
}

/// Writes down what was decided, in the transaction that holds the locks.
pub(super) async fn write_down(tx: &mut PgConnection, ends: &[Ended]) -> sqlx::Result<Vec<Rested>> {
    if ends.is_empty() {
        return Ok(Vec::new());
    }
    store::endings::end_attempts(tx, ends).await
}

/// Counts and wakes, after the commit.
pub(super) fn tell(wake: &Wake, ends: &[Ended], rested: &[Rested]) {
    for end in ends {
        let outcome = end.outcome.as_str();
        counter!(telemetry::JOBS_SETTLED, "outcome" => outcome).increment(1);
        if end.state == StoredState::DeadLetter {
            counter!(telemetry::JOBS_DEAD_LETTERED).increment(1);
        }
    }
    let arrivals = rested.iter().filter(|it| it.state == StoredState::Pending);
    wake.arrived(
        arrivals
            .map(|it| Arrival {
                project_id: it.project_id,
                queue: it.queue.as_str().into(),
                job_type: it.job_type.as_str().into(),
                rank: it.rank,
                run_at: it.run_at,
            })
            .collect(),
    );
    if rested.iter().any(|it| it.state == StoredState::Backoff) {
        wake.due_time_changed();
    }
}
