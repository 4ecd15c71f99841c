//! Polls: wait for jobs without holding a connection, and deliver them so that none is lost on the
//! way.

pub mod any_queue;
mod claim;
mod delivery;
mod lanes;
mod limited_claim;
mod lost_claims;
pub(super) mod pump;
mod request;

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use metrics::gauge;
use sqlx::{Postgres, pool::PoolConnection};
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};

use self::{lanes::WaiterId, pump::Message};
use super::{Engine, batch::Batch, workers};
use crate::{
    error::Error,
    store::{self, polls::PollKey, pools::Pool},
    telemetry,
};

pub use self::{delivery::LeasedDelivery, request::PollSpec};
pub use crate::store::claims::LeasedJob;

/// Polls that one node parks at most.
pub const MAX_PARKED_POLLS: usize = 20_000;
/// At shutdown, parked polls are answered within this time, spread evenly.
const STOP_SPREAD: Duration = Duration::from_secs(3);
/// Longest wait for a claim in flight, for a poll that wants its answer now.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Delay before a quieted worker's long poll is answered, so that a client which ignores the
/// directive does not spin.
const HALTED_PAUSE: Duration = Duration::from_secs(1);

/// The polls' side of the pump.
#[derive(Debug)]
pub(super) struct Parking {
    pub messages: mpsc::UnboundedSender<Message>,
    next_id: AtomicU64,
    parked: AtomicUsize,
}

impl Parking {
    pub fn new(messages: mpsc::UnboundedSender<Message>) -> Self {
        Self { messages, next_id: AtomicU64::new(0), parked: AtomicUsize::new(0) }
    }
}

/// A parked poll; leaves the pump when dropped.
struct ParkedPoll<'a> {
    parking: &'a Parking,
    id: WaiterId,
    answer: oneshot::Receiver<Option<Vec<LeasedDelivery>>>,
}

impl<'a> ParkedPoll<'a> {
    fn park(parking: &'a Parking, spec: PollSpec, is_patient: bool) -> Result<Self, Error> {
        let parked = parking.parked.fetch_add(1, Ordering::Relaxed) + 1;
        gauge!(telemetry::POLLS_PARKED).increment(1);
        let id = parking.next_id.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = oneshot::channel();
        // From here on dropping it removes it from the pump, also on the error paths.
        let this = Self { parking, id, answer };
        if parked > MAX_PARKED_POLLS {
            return Err(Error::Overloaded);
        }
        let message = Message::Park { id, spec: Box::new(spec), is_patient, answer: sender };
        parking.messages.send(message).map_err(|_| Error::NotReady("the node is stopping"))?;
        Ok(this)
    }

    /// Asks for the answer now. A claim in flight for this poll is awaited.
    async fn answer_now(&mut self) -> Option<Vec<LeasedDelivery>> {
        let _ = self.parking.messages.send(Message::Leave(self.id));
        // A later answer stays in the channel, or its jobs are released.
        match timeout(ANSWER_TIMEOUT, &mut self.answer).await {
            Ok(answer) => answer.unwrap_or(None),
            Err(_) => None,
        }
    }
}

impl Drop for ParkedPoll<'_> {
    fn drop(&mut self) {
        self.answer.close();
        // What was sent before the close is still in the channel.
        if let Ok(Some(jobs)) = self.answer.try_recv()
            && !jobs.is_empty()
        {
            let _ = self.parking.messages.send(Message::Release(jobs));
        }
        let _ = self.parking.messages.send(Message::Leave(self.id));
        self.parking.parked.fetch_sub(1, Ordering::Relaxed);
        gauge!(telemetry::POLLS_PARKED).decrement(1);
    }
}

/// Jobs on their way to a worker. If dropped before [`Delivery::delivered`], they are released at
/// once, without counting a failure.
#[must_use]
pub struct Delivery {
    giver: Option<Engine>,
    jobs: Vec<LeasedDelivery>,
}

impl Delivery {
    /// The jobs to deliver.
    #[must_use]
    pub fn jobs(&self) -> &[LeasedDelivery] {
        &self.jobs
    }

    /// Joins two deliveries.
    pub fn and(mut self, mut more: Self) -> Self {
        self.jobs.append(&mut more.jobs);
        self.giver = self.giver.take().or(more.giver.take());
        self
    }

    /// The worker has them, as far as this side can know.
    pub fn delivered(mut self) {
        self.jobs.clear();
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        let jobs = std::mem::take(&mut self.jobs);
        if let Some(engine) = self.giver.as_ref().filter(|_| !jobs.is_empty()) {
            let _ = engine.parking.messages.send(Message::Release(jobs));
        }
    }
}

/// Waits up to `wait` for jobs and leases them. No jobs is an ordinary answer.
///
/// Repeating a poll with its `poll_id` while its leases run returns the same jobs. It ends with
/// jobs, at the deadline, when the client is gone (`gone`), when its key is revoked (`revoked`),
/// when the worker gets a directive, or at shutdown.
///
/// # Errors
/// [`Error::Unauthorized`] when the key was revoked meanwhile. [`Error::Overloaded`] when too many
/// polls are parked. [`Error::NotReady`] when the poll does not wait and the database does not
/// answer. Jobs leased by a claim in flight are released.
pub async fn poll(
    engine: &Engine,
    spec: PollSpec,
    wait: Duration,
    gone: impl Future<Output = ()>,
    revoked: impl Future<Output = ()>,
) -> Result<Delivery, Error> {
    if let Some(poll_key) = spec.poll_key() {
        let jobs = engine.repeats.submit(poll_key).await?;
        if !jobs.is_empty() {
            // Not released when dropped: the worker may have been at them since the first answer.
            return Ok(Delivery { giver: None, jobs });
        }
    }
    let deliver = |jobs| Ok(Delivery { giver: Some(engine.clone()), jobs });
    if engine.stopping.is_cancelled() {
        return deliver(Vec::new());
    }
    let is_patient = !wait.is_zero();
    let worker = (spec.project_id, Arc::clone(&spec.worker_id));
    if workers::halt(engine, &worker).await?.is_some() {
        tokio::select! {
            () = tokio::time::sleep(wait.min(HALTED_PAUSE)) => (),
            () = gone => (),
            () = engine.stopping.cancelled() => (),
        }
        return deliver(Vec::new());
    }
    // The pump answers a poll without a wait once its queues were claimed from.
    let wait = if is_patient { wait } else { ANSWER_TIMEOUT };
    let mut parked = ParkedPoll::park(&engine.parking, spec, is_patient)?;
    let answer = tokio::select! {
        biased;
        answer = &mut parked.answer => answer.unwrap_or(None),
        () = gone => Some(Vec::new()),
        () = revoked => return Err(Error::Unauthorized),
        () = tokio::time::sleep(wait) => parked.answer_now().await,
        () = stop(engine) => parked.answer_now().await,
        () = workers::until_halted(engine, &worker) => parked.answer_now().await,
    };
    match answer {
        Some(jobs) => {
            let has_jobs = !jobs.is_empty();
            let delivery = deliver(jobs)?;
            // The directive arrived while the jobs were on their way: release them.
            if has_jobs && workers::halt(engine, &worker).await.is_ok_and(|it| it.is_some()) {
                drop(delivery);
                return deliver(Vec::new());
            }
            Ok(delivery)
        }
        None if is_patient => deliver(Vec::new()),
        None => Err(Error::NotReady("the database does not answer")),
    }
}

async fn stop(engine: &Engine) {
    engine.stopping.cancelled().await;
    tokio::time::sleep(STOP_SPREAD.mul_f64(rand::random())).await;
}

/// The batch of repeated polls: what each was given before and still holds.
pub struct Repeats {
    pub(super) pool: Pool,
}

impl Batch for Repeats {
    type Item = PollKey;
    type Answer = Vec<LeasedDelivery>;
    type Key = PollKey;
    type Connection = PoolConnection<Postgres>;

    const KIND: &'static str = "repeat";
    const MAX_ROWS: usize = 250;

    fn bytes(_: &PollKey) -> usize {
        0
    }

    fn key(item: &PollKey) -> PollKey {
        item.clone()
    }

    async fn connect(&self) -> sqlx::Result<Self::Connection> {
        self.pool.acquire().await
    }

    async fn flush(
        &self,
        conn: &mut Self::Connection,
        items: &[PollKey],
        _: bool,
    ) -> sqlx::Result<Vec<Result<Vec<LeasedDelivery>, Error>>> {
        let found = store::polls::leased_by_polls(conn, items).await?;
        let mut answers: Vec<Vec<LeasedDelivery>> = items.iter().map(|_| Vec::new()).collect();
        for job in found {
            let poll = job.slot.and_then(|it| usize::try_from(it).ok());
            let Some((poll, item)) = poll.and_then(|it| Some((it, items.get(it)?))) else {
                continue;
            };
            let worker_id = item.worker_id.clone();
            answers[poll].push(LeasedDelivery::new(job, worker_id));
        }
        delivery::add_background(conn, answers.iter_mut().flatten().collect()).await;
        if answers.iter().flatten().any(|it| !it.is_complete) {
            return Err(sqlx::Error::PoolTimedOut);
        }
        Ok(answers.into_iter().map(Ok).collect())
    }
}
