//! The work of a target on one node: it polls as a worker would, and sends what it leases. So
//! leases, fences and retries are those of any job: a node that dies loses none, and what it was
//! sending is sent again by another.

use std::{
    collections::BTreeMap,
    future::{Future, pending},
    hash::Hash,
    sync::Arc,
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use fencepost_domain::{
    error, ids::ProjectId, lease::Fence, limits::MAX_POLL_CAPACITY, outbound::read_url,
    webhook::SECRET_BYTES,
};
use fencepost_fair::requests::{Turn, Turns};
use fencepost_net::{
    outbound::{CallError, Destination, Outbound},
    seal::MasterKeys,
};
use fencepost_signals::telemetry;
use metrics::{counter, gauge};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use tokio::{
    sync::Semaphore,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    Engine,
    dispatch::{self, DispatchedJob, Poll},
    settle::{self, Ack, ReportedOutcome},
};

/// The wait of one poll.
const POLL_WAIT: Duration = Duration::from_secs(30);
/// How long a target that is being sent to waits for more of its slots before the next poll.
const COLLECT_PAUSE: Duration = Duration::from_millis(3);
/// How long a target that may be sent no more looks for an answer.
const WINDOW_PAUSE: Duration = Duration::from_millis(20);
/// The pause after a poll that was refused, because the project has stored twice its bytes.
const FULL_PAUSE: Duration = Duration::from_secs(10);
/// The pause after a poll that failed.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);
/// How long a job waits for its turn; then it is tried later. Turns are looked for before it is
/// leased, so this is rare.
const TURN_TIMEOUT: Duration = Duration::from_secs(5);
/// Seconds by which a lease is longer than the target's timeout: for the turn, the look-up of the
/// host, and the ack.
pub(super) const LEASE_MARGIN_SECONDS: i32 = 20;
/// How long requests may still be answered when the node stops; then they are released.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// The queue whose jobs a URL is sent, and how.
pub(super) struct TargetQueue {
    /// Whose turns it takes.
    pub project_id: ProjectId,
    /// Whose jobs are sent: those of this queue.
    pub jobs_of: ProjectId,
    pub queue: String,
    /// The name under which it holds leases; none: it has none.
    pub worker_id: Option<String>,
    /// The longest time of a request.
    pub timeout: Duration,
    pub lease_seconds: Option<i32>,
    pub to: Destination,
    /// Requests that may be sent at a time. A changed target keeps it, unless their number has
    /// changed: those that are under way count.
    pub slots: Arc<Semaphore>,
    pub max_in_flight: usize,
    /// Requests of all such targets of the project take one each; none: they have no number.
    pub of_project: Option<Arc<Semaphore>>,
    /// Cancelled when it changes, or is served no more.
    pub ended: CancellationToken,
}

impl TargetQueue {
    /// A timeout of settings.
    pub(super) fn seconds(timeout_seconds: i32) -> Duration {
        Duration::from_secs(u64::try_from(timeout_seconds).unwrap_or(1))
    }

    /// Keeps the slots of the previous settings if their number is unchanged.
    pub(super) fn slots(before: Option<&Self>, max_in_flight: usize) -> Arc<Semaphore> {
        let same = before.filter(|it| it.max_in_flight == max_in_flight);
        let new = || Arc::new(Semaphore::new(max_in_flight));
        same.map_or_else(new, |it| Arc::clone(&it.slots))
    }
}

/// The stored settings of a target.
pub(super) trait Settings: PartialEq + Send + Sync + 'static {
    type Key: Eq + Hash;

    fn key(&self) -> Self::Key;
    fn updated_at(&self) -> DateTime<Utc>;
}

/// A URL that is sent jobs.
pub(super) trait Target: Send + Sync + 'static {
    type Settings: Settings;

    fn settings(&self) -> &Self::Settings;
    fn target_queue(&self) -> &TargetQueue;

    /// How many may be sent at a time now.
    fn window(&self) -> usize;

    /// Waits while the target has asked for a pause.
    fn rested(&self) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// A poll begins, which ends when this is cancelled.
    fn polls(&self, _polling: &CancellationToken) {}

    /// Sends a job. `turn` is the right to it; it fails when there is none. None: the receiver
    /// settles it.
    fn send(
        &self,
        job: &mut DispatchedJob,
        turn: Result<Turn, NoTurn>,
    ) -> impl Future<Output = Option<ReportedOutcome>> + Send;
}

/// Why a job cannot be sent now.
#[derive(Debug, Clone, Copy)]
pub(super) enum NoTurn {
    /// Too many requests of the project, or to the host, are under way.
    Busy,
    NoAddress(CallError),
}

/// Counts a request that is under way.
pub(super) struct InFlight;

impl InFlight {
    pub(super) fn begin() -> Self {
        gauge!(telemetry::WEBHOOK_IN_FLIGHT).increment(1);
        Self
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        gauge!(telemetry::WEBHOOK_IN_FLIGHT).decrement(1);
    }
}

/// Sends to all targets of one node: a node has one, which endpoints and pushes share.
#[derive(Clone)]
pub struct Sender {
    pub(super) engine: Engine,
    outbound: Outbound,
    master_keys: Arc<MasterKeys>,
    turns: Arc<Turns>,
}

impl Sender {
    #[must_use]
    pub fn new(engine: Engine, outbound: Outbound, master_keys: Arc<MasterKeys>) -> Self {
        Self { engine, outbound, master_keys, turns: Arc::new(Turns::default()) }
    }

    /// Where a URL leads, and the secrets that sign what is sent there. `place` is where they are
    /// stored.
    pub(super) fn open(
        &self,
        url: &str,
        place: &str,
        (secret, old): (&Vec<u8>, Option<&Vec<u8>>),
    ) -> anyhow::Result<(Destination, Vec<Vec<u8>>)> {
        let url = read_url(url, &self.outbound.allowed).map_err(anyhow::Error::msg)?;
        let to = self.outbound.destination(url);
        let stored = [Some(secret), old].into_iter().flatten();
        let secrets = stored.map(|it| self.master_keys.open(place, it, SECRET_BYTES));
        Ok((to, secrets.collect::<Result<_, _>>()?))
    }

    /// Headers that are stored as JSON. `place` is where.
    pub(super) fn open_headers(
        &self,
        place: &str,
        stored: Option<&[u8]>,
    ) -> anyhow::Result<HeaderMap> {
        let Some(stored) = stored else { return Ok(HeaderMap::new()) };
        let text = self.master_keys.open_object(place, stored)?;
        let plain: BTreeMap<String, String> = serde_json::from_slice(&text)?;
        let read = |(name, value): (String, String)| -> anyhow::Result<_> {
            let mut value = HeaderValue::try_from(value)?;
            value.set_sensitive(true);
            Ok((HeaderName::try_from(name)?, value))
        };
        plain.into_iter().map(read).collect()
    }

    /// Works for a target until it is served no more, in a task of its own.
    pub(super) fn begin<T: Target>(&self, target: Arc<T>) {
        let this = self.clone();
        self.engine.tasks.spawn(async move {
            let working = async {
                loop {
                    match this.work_once(&target).await {
                        Ok(()) => (),
                        // The project has stored too much: its calls say so.
                        Err(error::Error::QuotaExceeded { .. }) => sleep(FULL_PAUSE).await,
                        Err(error) => {
                            tracing::warn!(
                                error = error::chain(&error),
                                "webhook sender failed to poll for deliveries"
                            );
                            sleep(FAILURE_PAUSE).await;
                        }
                    }
                }
            };
            tokio::select! {
                () = this.engine.stopping.cancelled() => (),
                () = target.target_queue().ended.cancelled() => (),
                () = working => (),
            }
        });
    }

    /// Leases as many jobs as may be sent now, and sends each in a task of its own.
    async fn work_once<T: Target>(&self, target: &Arc<T>) -> Result<(), error::Error> {
        let target_queue = target.target_queue();
        target.rested().await;
        // One is taken for the wait, and others that are free with it.
        let Ok(first) = Arc::clone(&target_queue.slots).acquire_owned().await else {
            return Ok(());
        };
        if target_queue.slots.available_permits() + 1 < target_queue.max_in_flight {
            // Others will be free in a moment: leases are cheaper together.
            sleep(COLLECT_PAUSE).await;
        }
        let under_way =
            target_queue.max_in_flight.saturating_sub(target_queue.slots.available_permits() + 1);
        let window = target.window().saturating_sub(under_way);
        if window == 0 {
            sleep(WINDOW_PAUSE).await;
            return Ok(());
        }
        let address = target_queue.to.known_address();
        let room = self.turns.room(target_queue.project_id, address, target_queue.timeout).await;
        let room = room.min(target_queue.slots.available_permits() + 1).min(window);
        let poll = Poll {
            worker_id: target_queue.worker_id.clone(),
            queues: vec![target_queue.queue.clone()],
            capacity: u32::try_from(room).unwrap_or(1).min(MAX_POLL_CAPACITY),
            lease_seconds: target_queue.lease_seconds,
            wait: POLL_WAIT,
            is_of_server: true,
            ..Poll::new(target_queue.jobs_of)
        };
        let gone = target_queue.ended.child_token();
        target.polls(&gone);
        let polled = dispatch::poll(&self.engine, poll, &gone, pending()).await?;
        let mut slot = Some(first);
        for job in polled.jobs() {
            let slot =
                slot.take().or_else(|| Arc::clone(&target_queue.slots).try_acquire_owned().ok());
            let (this, target, job) = (self.clone(), Arc::clone(target), job.clone());
            self.engine.tasks.spawn(async move {
                this.send(&*target, job).await;
                drop(slot);
            });
        }
        polled.delivered();
        Ok(())
    }

    /// Sends a job, and settles it.
    async fn send<T: Target>(&self, target: &T, mut job: DispatchedJob) {
        let (target_queue, started) = (target.target_queue(), Instant::now());
        let sending = async {
            // Two targets may have leased for the same permit. No turn is held meanwhile.
            let permit = match &target_queue.of_project {
                Some(of_project) => timeout(TURN_TIMEOUT, of_project.acquire()).await.map(Some),
                None => Ok(None),
            };
            let turn = match &permit {
                Ok(_) => self.turn(target_queue, started).await,
                Err(_) => Err(NoTurn::Busy),
            };
            target.send(&mut job, turn).await
        };
        let sent = tokio::select! {
            sent = sending => sent,
            () = self.stopped() => Some(ReportedOutcome::Released),
        };
        let outcome = match &sent {
            Some(ReportedOutcome::Succeeded { .. }) => "delivered",
            Some(ReportedOutcome::Failed(_)) => "failed",
            Some(
                ReportedOutcome::Released
                | ReportedOutcome::Snoozed { .. }
                | ReportedOutcome::RateLimited(_),
            ) => "released",
            None => "taken",
        };
        counter!(telemetry::WEBHOOK_DELIVERIES, "outcome" => outcome).increment(1);
        let Some(end) = sent else { return };
        let duration_ms = i64::try_from(started.elapsed().as_millis()).ok();
        let (attempt, lease_id) = (Some(job.job.attempt), Some(job.job.lease_id));
        let fence = Fence { worker_id: target_queue.worker_id.clone(), attempt, lease_id };
        let ack = Ack { job_id: job.job.id, fence, end, duration_ms };
        if let Err(error) = settle::ack(&self.engine, target_queue.jobs_of, ack).await {
            // Its lease ends, and it is sent again.
            let id = job.job.id.0.to_string();
            tracing::warn!(
                id,
                error = error::chain(&error),
                "webhook delivery was sent and not acknowledged"
            );
        }
    }

    async fn turn(&self, target_queue: &TargetQueue, since: Instant) -> Result<Turn, NoTurn> {
        let address = target_queue.to.address().await.map_err(NoTurn::NoAddress)?;
        let turn = self.turns.take(target_queue.project_id, address, target_queue.timeout);
        let mut turn = timeout(TURN_TIMEOUT, turn).await.map_err(|_| NoTurn::Busy)?;
        turn.waited = since.elapsed();
        Ok(turn)
    }

    async fn stopped(&self) {
        self.engine.stopping.cancelled().await;
        sleep(STOP_GRACE).await;
    }
}
