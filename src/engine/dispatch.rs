//! Polls: wait for jobs without holding a connection, and hand them over so that none is lost on
//! the way.

use std::{
    collections::HashMap,
    future::Future,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    time::Duration,
};

use metrics::gauge;
use sqlx::PgConnection;
use tokio::sync::{mpsc, oneshot};

use super::{Engine, lanes::WaiterId, pump::Message};
use crate::{domain::text::ErrorReport, error::Error, store, telemetry};

pub use super::{lanes::Wish, pump::Handed};
pub use crate::store::claims::LeasedJob;

/// Polls one node parks at a time.
pub const MAX_PARKED_POLLS: usize = 20_000;
/// When the server stops, parked polls are answered within this, spread evenly.
const STOP_SPREAD: Duration = Duration::from_secs(3);
/// A poll that does not wait is answered by the pump within one look; this is only a safeguard.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

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

    /// Polls that are parked now.
    pub fn parked(&self) -> usize {
        self.parked.load(Ordering::Relaxed)
    }
}

/// A parked poll; leaves the pump when dropped.
struct Parked<'a> {
    parking: &'a Parking,
    id: WaiterId,
    answer: oneshot::Receiver<Vec<Handed>>,
}

impl<'a> Parked<'a> {
    fn park(parking: &'a Parking, wish: Wish, is_patient: bool) -> Result<Self, Error> {
        let parked = parking.parked.fetch_add(1, Ordering::Relaxed) + 1;
        gauge!(telemetry::POLLS_PARKED).set(parked as f64);
        let id = parking.next_id.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = oneshot::channel();
        // From here on dropping it takes it out again, also on the error paths.
        let this = Self { parking, id, answer };
        if parked > MAX_PARKED_POLLS {
            return Err(Error::Overloaded);
        }
        let message = Message::Park { id, wish: Box::new(wish), is_patient, answer: sender };
        parking.messages.send(message).map_err(|_| Error::NotReady("the node is stopping"))?;
        Ok(this)
    }

    /// Asks for the answer now. A claim that is under way for this poll is waited for.
    async fn answer_now(&mut self) -> Vec<Handed> {
        let _ = self.parking.messages.send(Message::Leave(self.id));
        (&mut self.answer).await.unwrap_or_default()
    }
}

impl Drop for Parked<'_> {
    fn drop(&mut self) {
        self.answer.close();
        // What was sent before the close is still in the channel.
        if let Ok(jobs) = self.answer.try_recv()
            && !jobs.is_empty()
        {
            let _ = self.parking.messages.send(Message::GiveBack(jobs));
        }
        let _ = self.parking.messages.send(Message::Leave(self.id));
        let parked = self.parking.parked.fetch_sub(1, Ordering::Relaxed) - 1;
        gauge!(telemetry::POLLS_PARKED).set(parked as f64);
    }
}

/// Jobs on their way to a worker. Dropped before [`Delivery::delivered`], they go back at once,
/// with no failure counted.
#[must_use]
pub struct Delivery {
    engine: Engine,
    jobs: Vec<Handed>,
}

impl Delivery {
    /// What is being handed over.
    #[must_use]
    pub fn jobs(&self) -> &[Handed] {
        &self.jobs
    }

    /// The worker has them, as far as this side can know.
    pub fn delivered(mut self) {
        self.jobs.clear();
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        let jobs = std::mem::take(&mut self.jobs);
        if !jobs.is_empty() {
            let _ = self.engine.parking.messages.send(Message::GiveBack(jobs));
        }
    }
}

/// Waits up to `wait` for jobs and leases them. No jobs is an ordinary answer.
///
/// Repeating a poll with its `poll_id` while its leases run answers with the same jobs. Ways out:
/// jobs, the deadline, `gone` (the client), `revoked` (its key), the server's shutdown.
///
/// # Errors
/// [`Error::Unauthorized`] when the key was revoked meanwhile. [`Error::Overloaded`] when too many
/// polls are parked. No job is leased then.
pub async fn poll(
    engine: &Engine,
    wish: Wish,
    wait: Duration,
    gone: impl Future<Output = ()>,
    revoked: impl Future<Output = ()>,
) -> Result<Delivery, Error> {
    let deliver = |jobs| Ok(Delivery { engine: engine.clone(), jobs });
    if wish.poll_id.is_some() {
        // Boxed, so that it is no part of a parked poll.
        let jobs = Box::pin(repeat(engine, &wish)).await?;
        if !jobs.is_empty() {
            return deliver(jobs);
        }
    }
    if engine.stopping.is_cancelled() {
        return deliver(Vec::new());
    }
    let is_patient = !wait.is_zero();
    // A poll that does not wait is answered by the pump after one look.
    let wait = if is_patient { wait } else { ANSWER_TIMEOUT };
    let mut parked = Parked::park(&engine.parking, wish, is_patient)?;
    let jobs = tokio::select! {
        biased;
        jobs = &mut parked.answer => jobs.unwrap_or_default(),
        () = gone => Vec::new(),
        () = revoked => return Err(Error::Unauthorized),
        () = tokio::time::sleep(wait) => parked.answer_now().await,
        () = stop(engine) => parked.answer_now().await,
    };
    deliver(jobs)
}

async fn stop(engine: &Engine) {
    engine.stopping.cancelled().await;
    tokio::time::sleep(STOP_SPREAD.mul_f64(rand::random())).await;
}

/// What an earlier poll with this id was given and still holds.
async fn repeat(engine: &Engine, wish: &Wish) -> Result<Vec<Handed>, Error> {
    let Some(poll_id) = wish.poll_id else { return Ok(Vec::new()) };
    let mut conn = engine.pools.claim.acquire().await?;
    let worker_id = &wish.worker_id;
    let jobs =
        store::claims::leased_by_poll(&mut conn, wish.project_id, worker_id, poll_id).await?;
    let mut handed: Vec<_> = jobs
        .into_iter()
        .map(|job| Handed { job, worker_id: worker_id.clone(), last_error: None })
        .collect();
    let mut retried: Vec<_> = handed.iter_mut().filter(|it| it.job.failures > 0).collect();
    add_last_errors(&mut conn, &mut retried).await;
    Ok(handed)
}

/// Adds what the last failed attempt of each job reported. A job is worth more than its history:
/// when the look fails, the jobs go out without.
pub(super) async fn add_last_errors(conn: &mut PgConnection, retried: &mut [&mut Handed]) {
    if retried.is_empty() {
        return;
    }
    let keys: Vec<_> = retried.iter().map(|it| (it.job.project_id, it.job.id)).collect();
    let errors = match store::jobs::last_errors(conn, &keys).await {
        Ok(errors) => errors,
        Err(error) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "last errors were not found");
            return;
        }
    };
    let mut errors: HashMap<_, _> = errors.into_iter().map(|it| (it.job_id, it)).collect();
    for handed in retried {
        handed.last_error = errors.remove(&handed.job.id).map(|it| ErrorReport {
            kind: it.kind,
            message: it.message,
            stack_trace: it.stack_trace,
            truncated: it.truncated,
        });
    }
}
