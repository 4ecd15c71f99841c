//! A poll in the pump: parked until there are jobs for it, or a reason to answer without.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use fencepost_domain::{error::Error, ids::ProjectId, worker::WorkerState};
use fencepost_signals::telemetry;
use fencepost_store::{
    self as store,
    claims::polls::PollKey,
    connection::pools::{self, Pool},
};
use metrics::gauge;
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    answered::Answered,
    dispatched::{self, DispatchedJob, Releasing},
    lanes::WaiterId,
    pump::{Message, Patience},
    request::PollSpec,
};
use crate::{Engine, group_commit::GroupCommit, workers::Presence};

/// Polls that one node parks at most.
pub const MAX_PARKED_POLLS: usize = 20_000;
/// At shutdown, parked polls are answered within this time, spread evenly.
const STOP_SPREAD: Duration = Duration::from_secs(3);
/// Longest wait for a claim in flight, for a poll that wants its answer now.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a poll looks for jobs of further queues: the leases of the first ones run. A claim in
/// flight is awaited.
const FILL_TIMEOUT: Duration = Duration::from_millis(200);

/// Delay before a quieted worker's long poll is answered, so that a client which ignores the
/// directive does not spin.
const HALTED_PAUSE: Duration = Duration::from_secs(1);

/// The polls' side of the pump.
#[derive(Debug)]
pub(crate) struct Parking {
    pub messages: mpsc::UnboundedSender<Message>,
    releasing: Releasing,
    next_id: AtomicU64,
    /// Polls that are parked, and those on their way out.
    parked: Arc<AtomicUsize>,
}

impl Parking {
    pub fn new(
        messages: mpsc::UnboundedSender<Message>,
        releasing: Releasing,
        parked: Arc<AtomicUsize>,
    ) -> Self {
        Self { messages, releasing, next_id: AtomicU64::new(0), parked }
    }

    /// Releases jobs that were not delivered.
    fn release(&self, jobs: Vec<DispatchedJob>) {
        self.releasing.begin(&jobs);
        let _ = self.messages.send(Message::Release(jobs));
    }
}

/// A parked poll; leaves the pump when dropped.
struct ParkedPoll<'a> {
    parking: &'a Parking,
    id: WaiterId,
    answer: oneshot::Receiver<Answered>,
    /// A later poll with its id took its place.
    is_replaced: bool,
}

impl<'a> ParkedPoll<'a> {
    fn park(
        parking: &'a Parking,
        spec: PollSpec,
        patience: Patience,
        asked_at: Instant,
    ) -> Result<Self, Error> {
        let parked = parking.parked.fetch_add(1, Ordering::Relaxed) + 1;
        gauge!(telemetry::POLLS_PARKED).increment(1);
        let id = parking.next_id.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = oneshot::channel();
        // From here on dropping it removes it from the pump, also on the error paths.
        let this = Self { parking, id, answer, is_replaced: false };
        if parked > MAX_PARKED_POLLS {
            return Err(Error::Overloaded);
        }
        let (spec, asked_at) = (Box::new(spec), asked_at.into_std());
        let message = Message::Park { id, spec, patience, asked_at, answer: sender };
        parking.messages.send(message).map_err(|_| Error::NotReady("the node is stopping"))?;
        Ok(this)
    }

    /// The answer, also to the poll that took its place.
    async fn answered(&mut self) -> Answered {
        match (&mut self.answer).await {
            Ok(Answered::Replaced(mut newest)) => {
                self.is_replaced = true;
                // It carries nothing: it ends when the other poll is answered.
                while newest.changed().await.is_ok() {}
                Answered::Repeated
            }
            Ok(answer) => answer,
            Err(_) => Answered::Failed,
        }
    }

    /// Asks for the answer now. A claim in flight for this poll is awaited.
    async fn answer_now(&mut self) -> Answered {
        if self.is_replaced {
            return Answered::Repeated;
        }
        let _ = self.parking.messages.send(Message::Leave(self.id));
        // A later answer stays in the channel, or its jobs are released.
        match timeout(ANSWER_TIMEOUT, &mut self.answer).await {
            Ok(answer) => answer.unwrap_or(Answered::Failed),
            Err(_) => Answered::Failed,
        }
    }
}

impl Drop for ParkedPoll<'_> {
    fn drop(&mut self) {
        self.answer.close();
        // What was sent before the close is still in the channel.
        if let Ok(Answered::Jobs(jobs)) = self.answer.try_recv()
            && !jobs.is_empty()
        {
            self.parking.release(jobs);
        }
        let _ = self.parking.messages.send(Message::Leave(self.id));
        self.parking.parked.fetch_sub(1, Ordering::Relaxed);
        gauge!(telemetry::POLLS_PARKED).decrement(1);
    }
}

/// Jobs on their way to a worker. If dropped before [`PollAnswer::delivered`], they are released at
/// once, without counting a failure.
#[must_use]
pub struct PollAnswer {
    giver: Option<Engine>,
    jobs: Vec<DispatchedJob>,
    directive: Option<WorkerState>,
    /// The longest time between two calls that the worker registered, in seconds.
    pub beat_seconds: Option<i32>,
}

impl PollAnswer {
    fn empty(directive: Option<WorkerState>) -> Self {
        Self { giver: None, jobs: Vec::new(), directive, beat_seconds: None }
    }

    /// The jobs that earlier polls with this id got, while their leases run. They are not released
    /// when dropped: the worker may have been at them since the first answer.
    async fn repeated(
        engine: &Engine,
        poll_key: PollKey,
        directive: Option<WorkerState>,
    ) -> Result<Self, Error> {
        let jobs = engine.repeats.submit(poll_key).await?;
        Ok(Self { giver: None, jobs, directive, beat_seconds: None })
    }

    /// The jobs to deliver.
    #[must_use]
    pub fn jobs(&self) -> &[DispatchedJob] {
        &self.jobs
    }

    /// The directive, if the worker should take no more jobs.
    #[must_use]
    pub fn directive(&self) -> Option<WorkerState> {
        self.directive
    }

    /// The worker has them, as far as this side can know.
    pub fn delivered(mut self) {
        self.jobs.clear();
    }
}

impl Drop for PollAnswer {
    fn drop(&mut self) {
        let jobs = std::mem::take(&mut self.jobs);
        if let Some(engine) = self.giver.as_ref().filter(|_| !jobs.is_empty()) {
            engine.parking.release(jobs);
        }
    }
}

/// Waits up to `wait` for jobs of the named queues. It ends with jobs, at the deadline, when the
/// client is gone, when its key is revoked, when the worker gets a directive, or at shutdown.
///
/// # Errors
/// The errors of [`super::poll`].
pub(super) async fn poll(
    engine: &Engine,
    worker: &Presence<'_>,
    spec: PollSpec,
    wait: Duration,
    gone: impl Future<Output = ()>,
    revoked: impl Future<Output = Error>,
) -> Result<PollAnswer, Error> {
    let directive = worker.directive().await?;
    let (asked_at, poll_key) = (Instant::now(), spec.poll_key());
    if let Some(poll_key) = &poll_key {
        let answer = PollAnswer::repeated(engine, poll_key.clone(), directive).await?;
        if !answer.jobs.is_empty() {
            return Ok(answer);
        }
    }
    if engine.stopping.is_cancelled() {
        return Ok(PollAnswer::empty(directive));
    }
    let patience = if wait.is_zero() { Patience::LooksOnce } else { Patience::Waits };
    if directive.is_some() {
        tokio::select! {
            () = tokio::time::sleep(wait.min(HALTED_PAUSE)) => (),
            () = gone => (),
            () = engine.stopping.cancelled() => (),
        }
        return Ok(PollAnswer::empty(worker.directive().await?));
    }
    // The pump answers a poll without a wait once its queues were claimed from.
    let wait = if patience == Patience::Waits { wait } else { ANSWER_TIMEOUT };
    engine.notifier.wake.interest.note(spec.project_id);
    let mut parked = ParkedPoll::park(&engine.parking, spec, patience, asked_at)?;
    let answer = tokio::select! {
        biased;
        answer = parked.answered() => answer,
        () = gone => Answered::NOTHING,
        refusal = revoked => return Err(refusal),
        () = tokio::time::sleep(wait) => parked.answer_now().await,
        () = stop(engine) => parked.answer_now().await,
        () = worker.until_directive() => parked.answer_now().await,
    };
    let jobs = match (answer, poll_key) {
        (Answered::Repeated, Some(poll_key)) => {
            return PollAnswer::repeated(engine, poll_key, directive).await;
        }
        (Answered::Failed, _) if patience != Patience::Waits => {
            return Err(Error::NotReady("the database does not answer"));
        }
        (answer, _) => answer.into_jobs(),
    };
    if !jobs.is_empty() {
        worker.record_delivery();
    }
    let giver = Some(engine.clone());
    let mut answer = PollAnswer { giver, jobs, directive: None, beat_seconds: None };
    answer.directive = match worker.directive().await {
        Err(_) if !answer.jobs.is_empty() => None,
        read => read?,
    };
    // A directive arrived while the jobs were on their way: dropping them releases them.
    Ok(if answer.directive.is_some() { PollAnswer::empty(answer.directive) } else { answer })
}

/// Adds jobs of the poll's other queues, in their order, while it has room: a claim takes from one
/// queue only. A repeated poll, whose leases are older, is left as it is. If the client is gone,
/// the jobs are released at once: its next poll must not get what is on its way back.
pub(super) async fn fill_up(
    engine: &Engine,
    spec: &PollSpec,
    answer: &mut PollAnswer,
    gone: &CancellationToken,
) {
    let deadline = Instant::now() + FILL_TIMEOUT;
    for _ in 1..spec.queues.len() {
        let found = u32::try_from(answer.jobs.len()).unwrap_or(u32::MAX);
        let capacity = spec.capacity.saturating_sub(found);
        let is_done = found == 0 || capacity == 0 || answer.giver.is_none();
        if is_done || Instant::now() >= deadline {
            return;
        }
        let more = PollSpec { capacity, ..spec.clone() };
        let parked = ParkedPoll::park(&engine.parking, more, Patience::FillsUp, Instant::now());
        let Ok(mut parked) = parked else { return };
        let answered = async {
            tokio::select! {
                biased;
                answer = &mut parked.answer => answer.unwrap_or(Answered::Failed),
                () = tokio::time::sleep_until(deadline) => parked.answer_now().await,
                () = engine.stopping.cancelled() => parked.answer_now().await,
            }
        };
        let jobs = tokio::select! {
            biased;
            () = gone.cancelled() => {
                *answer = PollAnswer::empty(None);
                return;
            }
            answer = answered => answer.into_jobs(),
        };
        if jobs.is_empty() {
            return;
        }
        answer.jobs.extend(jobs);
    }
}

async fn stop(engine: &Engine) {
    engine.stopping.cancelled().await;
    tokio::time::sleep(STOP_SPREAD.mul_f64(rand::random())).await;
}

/// The group commit of repeated polls: what each was given before and still holds.
pub struct Repeats {
    pub(crate) pool: Pool,
    pub(crate) releasing: Releasing,
}

impl GroupCommit for Repeats {
    type Item = PollKey;
    type Answer = Vec<DispatchedJob>;
    type Key = PollKey;
    type Connection = pools::Connection;

    const KIND: &'static str = "repeat";
    const MAX_ROWS: usize = 250;

    fn bytes(_: &PollKey) -> usize {
        0
    }

    fn key(item: &PollKey) -> PollKey {
        item.clone()
    }

    fn project(item: &PollKey) -> ProjectId {
        item.project_id
    }

    async fn connect(&self) -> sqlx::Result<Self::Connection> {
        self.pool.acquire().await
    }

    async fn flush(
        &self,
        conn: &mut Self::Connection,
        items: &[PollKey],
        _: bool,
    ) -> sqlx::Result<Vec<Result<Vec<DispatchedJob>, Error>>> {
        let mut found = store::claims::polls::leased_by_polls(conn, items).await?;
        found.retain(|it| !self.releasing.has(it.lease_id));
        let mut answers: Vec<Vec<DispatchedJob>> = items.iter().map(|_| Vec::new()).collect();
        for job in found {
            let poll = job.slot.and_then(|it| usize::try_from(it).ok());
            let Some((poll, item)) = poll.and_then(|it| Some((it, items.get(it)?))) else {
                continue;
            };
            let worker_id = item.worker_id.clone();
            answers[poll].push(DispatchedJob::new(job, worker_id));
        }
        dispatched::add_errors_and_results(conn, answers.iter_mut().flatten().collect()).await;
        if answers.iter().flatten().any(|it| !it.is_complete) {
            return Err(sqlx::Error::PoolTimedOut);
        }
        Ok(answers.into_iter().map(Ok).collect())
    }
}
