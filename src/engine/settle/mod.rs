//! The end of an attempt: success moves the job out; failure, release, timeout and an expired lease
//! lead to a retry or to the dead letter.

pub mod attempt_reports;
pub(super) mod failure;
pub mod heartbeat;

use std::{
    collections::HashMap,
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use chrono::{DateTime, Utc};
use metrics::{counter, histogram};
use sqlx::{Acquire, PgConnection, Postgres, pool::PoolConnection};

use super::{
    Engine,
    batch::{Batch, Coalescer},
    breaker::Breakers,
    notify::{Notifier, job_event},
};
use crate::{
    domain::{
        history,
        job::{AttemptOutcome, Ending},
        lease::{self, Fence, Refusal},
        text::ErrorReport,
    },
    error::{self, Error, JobStatus},
    ids::{JobId, JobKey, LeaseId, ProjectId},
    store::{
        self,
        pools::Pool,
        settle_failure::AfterEnd,
        settle_success::{Moved, SettledAttempt, Success},
    },
    telemetry,
};

/// A worker's ack.
#[derive(Debug, Clone)]
pub struct Ack {
    pub job_id: JobId,
    pub fence: Fence,
    pub end: AttemptEnd,
    pub duration_ms: Option<i64>,
}

/// How an attempt ended, as the worker reports it.
#[derive(Debug, Clone)]
pub enum AttemptEnd {
    Succeeded {
        /// The JSON as it was sent.
        result: Option<String>,
    },
    Failed(Failure),
    /// The worker releases the job. No failure is counted.
    Released,
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acked {
    /// The job has ended: succeeded, dead-lettered or cancelled.
    Done {
        /// Children that became runnable; none if the job has no children.
        children_activated: Option<i32>,
    },
    Retry {
        at: DateTime<Utc>,
    },
}

/// Tries of an ack whose lease changes hands between the statement and the explanation.
const MAX_READS: u32 = 3;

/// Tries to release a job. After that its lease expires.
const MAX_RELEASE_TRIES: u32 = 30;
/// The pause between two tries.
const RELEASE_RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Jobs with children that one transaction settles: each may activate a thousand others.
const MAX_PARENTS_SETTLED: usize = 20;

/// Records the end of an attempt, if its fence still holds.
///
/// Repeating an ack that shows its attempt or lease returns the first answer.
///
/// # Errors
/// [`Error::JobNotFound`], [`Error::InvalidState`], [`Error::WorkerMismatch`] or
/// [`Error::StaleLease`] when this worker may not settle the job: nothing is written.
pub async fn ack(engine: &Engine, project_id: ProjectId, ack: Ack) -> Result<Acked, Error> {
    let key = JobKey { project_id, id: ack.job_id };
    let outcome = match &ack.end {
        AttemptEnd::Succeeded { .. } => AttemptOutcome::Succeeded,
        AttemptEnd::Failed(_) => AttemptOutcome::Failed,
        AttemptEnd::Released => AttemptOutcome::Released,
    };
    let fence = ack.fence.clone();
    for _ in 0..MAX_READS {
        if let Some(acked) = submit(engine, key, ack.clone()).await? {
            return Ok(acked);
        }
        let found = read_again(engine, key, &fence).await?;
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
    // The lease changes hands faster than it can be read.
    Err(Error::Overloaded)
}

/// Releases a job that its worker never received; no failure is counted.
pub(super) fn release(
    endings: &Coalescer<Endings>,
    key: JobKey,
    worker_id: &str,
    lease_id: LeaseId,
) -> impl Future<Output = ()> + Send + use<> {
    let worker_id = Some(worker_id.to_owned());
    let fence = Fence { worker_id, attempt: None, lease_id: Some(lease_id) };
    let request = EndRequest { key, fence, failure: None, duration_ms: None };
    let endings = endings.clone();
    async move {
        for _ in 0..MAX_RELEASE_TRIES {
            // It shows its lease, so repeating it is safe.
            match endings.submit(request.clone()).await {
                Ok(_) => return,
                Err(error) => {
                    tracing::warn!(job.id = %key.id, %error, "job release failed, will retry")
                }
            }
            tokio::time::sleep(RELEASE_RETRY_PAUSE).await;
        }
    }
}

/// Why a fence did not match. Boxed: it is rare, and its kilobytes would be part of every ack.
pub(super) fn read_again<'a>(
    engine: &'a Engine,
    key: JobKey,
    fence: &'a Fence,
) -> Pin<Box<dyn Future<Output = Result<SettledAttempt, Error>> + Send + 'a>> {
    Box::pin(async move {
        let mut conn = engine.pools.settle.acquire().await?;
        let found = store::settle_success::find_standing(&mut conn, key, fence).await?;
        found.ok_or(Error::JobNotFound)
    })
}

/// The error for a refusal, with the job's current state.
pub(super) fn refused(refusal: Refusal, standing: &lease::Standing) -> Error {
    let job_status = JobStatus { state: standing.state, attempt: standing.attempt };
    let (reason, error) = match refusal {
        Refusal::InvalidState => ("invalid_state", Error::InvalidState(job_status)),
        Refusal::WorkerMismatch => ("worker_mismatch", Error::WorkerMismatch(job_status)),
        Refusal::StaleLease | Refusal::Moved => ("stale_lease", Error::StaleLease(job_status)),
    };
    counter!(telemetry::FENCES_REFUSED, "reason" => reason).increment(1);
    error
}

async fn submit(engine: &Engine, key: JobKey, ack: Ack) -> Result<Option<Acked>, Error> {
    let Ack { fence, end, duration_ms, .. } = ack;
    let end = match end {
        AttemptEnd::Succeeded { result } => {
            let JobKey { project_id, id: job_id } = key;
            let success = Success { project_id, job_id, fence, result, duration_ms };
            let done = engine.successes.submit(success).await?;
            return Ok(done.map(|children_activated| Acked::Done { children_activated }));
        }
        AttemptEnd::Failed(failure) => {
            EndRequest { key, fence, failure: Some(failure), duration_ms }
        }
        AttemptEnd::Released => EndRequest { key, fence, failure: None, duration_ms },
    };
    engine.endings.submit(end).await
}

/// Whether an ack may be written. After a lost commit only an ack that shows its attempt or lease
/// may be repeated: another could settle the next attempt.
fn may_write(fence: &Fence, is_in_doubt: bool) -> bool {
    !is_in_doubt || fence.names_an_attempt()
}

/// The batch of successes.
pub struct Successes {
    pub(super) pool: Pool,
    pub(super) notifier: Notifier,
    pub(super) settled: Arc<AtomicU64>,
    pub(super) breakers: Arc<Breakers>,
}

impl Batch for Successes {
    type Item = Success;
    /// The number of activated children, if the job has any. None: the fence did not hold.
    type Answer = Option<Option<i32>>;
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
    ) -> sqlx::Result<Vec<Result<Self::Answer, Error>>> {
        let sure: Vec<_> = items.iter().filter(|it| may_write(&it.fence, is_in_doubt)).collect();
        let mut done = self.tell(&store::settle_success::succeed(conn, &sure).await?);
        let left: Vec<_> = sure.into_iter().filter(|it| !done.contains_key(&it.key())).collect();
        let mut parents = Ok(());
        for left in left.chunks(MAX_PARENTS_SETTLED) {
            match settle_parents(conn, left).await {
                Ok(moved) => done.extend(self.tell(&moved)),
                // Nothing was done yet: the whole batch can be repeated.
                Err(error) if done.is_empty() => return Err(error),
                // What was committed stays; only these acks have failed.
                Err(error) => {
                    parents = Err(Error::from(error));
                    break;
                }
            }
        }
        let braked: Vec<_> =
            done.keys().filter(|it| self.breakers.has(it.project_id)).copied().collect();
        if !braked.is_empty() {
            // The acks are recorded. A streak that continues by mistake is harmless.
            let ended = store::dead_letters::end_streaks(conn, &braked).await;
            if let Err(error) = ended {
                counter!(telemetry::STORE_ERRORS, "kind" => "succeed").increment(1);
                tracing::warn!(error = error::chain(&error), "dead-letter streak was not reset");
            }
        }
        let answer = |it: &Success| {
            if !may_write(&it.fence, is_in_doubt) {
                return Err(Error::InDoubt);
            }
            match (done.get(&it.key()), &parents) {
                (None, Err(error)) => Err(error.clone()),
                (children_activated, _) => Ok(children_activated.copied()),
            }
        };
        Ok(items.iter().map(answer).collect())
    }
}

/// Settles jobs with children, among those that the first statement left alone. They are locked
/// first, so that the second statement sees every child.
async fn settle_parents(conn: &mut PgConnection, left: &[&Success]) -> sqlx::Result<Vec<Moved>> {
    if left.is_empty() {
        return Ok(Vec::new());
    }
    let mut tx = conn.begin().await?;
    let fences = left.iter().map(|it| (it.key(), &it.fence));
    let held = store::settle_failure::lock_held(&mut tx, fences).await?;
    let held: Vec<_> =
        left.iter().filter(|it| held.iter().any(|held| held.key() == it.key())).copied().collect();
    let moved = match held.as_slice() {
        [] => Vec::new(),
        held => store::settle_success::succeed_parents(&mut tx, held).await?,
    };
    tx.commit().await?;
    Ok(moved)
}

impl Successes {
    /// Counts, notifies, and indexes the results by job.
    fn tell(&self, moved: &[Moved]) -> HashMap<JobKey, Option<i32>> {
        let (mut done, mut freed) = (HashMap::with_capacity(moved.len()), Vec::new());
        let ran = histogram!(telemetry::RUN_SECONDS);
        for it in moved {
            if let Moved::Parent(it) = it {
                done.insert(it.key, it.children_activated);
                freed.extend(it.held_slot.then_some(it.key.project_id));
                ran.record(it.ran_ms as f64 / 1_000.0);
            }
        }
        self.settled.fetch_add(done.len() as u64, Ordering::Relaxed);
        counter!(telemetry::JOBS_SETTLED, "outcome" => "succeeded").increment(done.len() as u64);
        self.notifier.waiting(moved.iter().filter_map(|it| match it {
            Moved::Child(child) => Some(child),
            Moved::Parent(_) => None,
        }));
        self.notifier.tally.succeeded(moved.iter().filter_map(|it| match it {
            Moved::Parent(settled) => Some(settled),
            Moved::Child(_) => None,
        }));
        self.notifier.wake.slots_freed(freed);
        self.notifier.feed.tell(|| {
            let done = done.keys();
            done.map(|key| job_event(*key, history::SUCCEEDED)).collect()
        });
        done
    }
}

/// A failure or release to record, if its fence still holds.
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
    pub(super) pool: Pool,
    pub(super) notifier: Notifier,
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
        let held = store::settle_failure::lock_held(&mut tx, fences).await?;
        let requests: HashMap<_, _> = items.iter().map(|it| (it.key, it)).collect();
        let ends: Vec<_> = held
            .into_iter()
            .filter_map(|held| requests.get(&held.key()).map(|it| (held, *it)))
            .map(|(held, it)| {
                let error = it.failure.as_ref().map(|it| it.error.clone()).unwrap_or_default();
                failure::decide(&held, &it.ending(), error, it.duration_ms)
            })
            .collect();
        let ended = failure::write(&mut tx, &ends).await?;
        tx.commit().await?;
        failure::tell(&self.notifier, &ends, &ended);
        let by_key: HashMap<_, _> = ended.iter().map(|it| (it.job.key(), acked(it))).collect();
        let answer = |it: &EndRequest| {
            if !may_write(&it.fence, is_in_doubt) {
                return Err(Error::InDoubt);
            }
            Ok(by_key.get(&it.key).copied())
        };
        Ok(items.iter().map(answer).collect())
    }
}

fn acked(ended: &AfterEnd) -> Acked {
    ended.retry_at.map_or(Acked::Done { children_activated: None }, |at| Acked::Retry { at })
}
