//! The engine: leases, fences and dispatch. It owns the pools, the group commits and the pump;
//! every API, loop and command calls the same functions, which take `&Engine`.
//!
//! It knows no HTTP. Due times, leases and timeouts follow the database's clock only.

pub mod alarms;
pub mod backlog;
pub mod batches;
pub mod canary;
mod cancel;
pub mod dispatch;
pub mod enqueue;
mod group_commit;
pub mod groups;
mod isolate;
pub mod jobs;
pub mod known;
pub mod maintenance;
pub mod notify;
pub mod operations;
pub mod queues;
pub mod reach;
pub mod schedules;
pub mod settings;
pub mod settle;
pub mod shared_limits;
pub mod stats;
mod sync_match;
pub mod webhooks;
pub mod workers;

use std::{
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use chrono::{DateTime, Utc};
use fencepost_domain::{error::Error, ids::TickKey};
use fencepost_fair::each::PerProject;
use fencepost_signals::{telemetry, wakeups};
use fencepost_store::{self as store, connection::pools::Pools};
use metrics::counter;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::{
    dispatch::{
        QueueLists, Releasing,
        park::{Parking, Repeats},
        pump::Message,
    },
    enqueue::Enqueues,
    group_commit::Coalescer,
    isolate::SetAside,
    known::KnownProjects,
    notify::Notifier,
    queues::UsedQueues,
    reach::JobKinds,
    schedules::zones::Zones,
    settle::{BareFences, Failures, Parents, SuccessNotes, Successes, heartbeat::Beats},
    stats::usage::UsageRecorder,
    workers::{Registry, WorkerBeats, WorkerLookups},
};

/// One node's engine. Cheap to clone.
#[derive(Clone)]
pub struct Engine(Arc<Inner>);

/// The parts of an engine.
pub struct Inner {
    pub pools: Pools,
    /// Wakes parked polls and event watchers after a commit.
    pub notifier: Notifier,
    /// Cancelled when the node begins to stop: parked polls are answered.
    pub stopping: CancellationToken,
    /// Tasks that must complete before the node stops, such as releasing jobs.
    pub tasks: TaskTracker,
    has_failed: Arc<AtomicBool>,
    enqueues: Coalescer<Enqueues>,
    successes: Coalescer<Successes>,
    /// Successes of jobs with children.
    parents: Coalescer<Parents>,
    failures: Coalescer<Failures>,
    /// Polls that look for the leases of an earlier try.
    repeats: Coalescer<Repeats>,
    /// Heartbeats about jobs.
    beats: Coalescer<Beats>,
    /// Fences without a worker, as adapters send them.
    bare_fences: Coalescer<BareFences>,
    /// Heartbeats about all jobs of a worker.
    worker_beats: Coalescer<WorkerBeats>,
    worker_lookups: Coalescer<WorkerLookups>,
    /// Queues and types of jobs that a bound key asks for.
    job_kinds: Coalescer<JobKinds>,
    pub registry: Registry,
    /// The rules of time zones.
    pub zones: Zones,
    /// Which projects have queues with a circuit breaker: only their successes can end a streak of
    /// dead letters.
    pub breakers: Arc<KnownProjects>,
    versions: jobs::wait::Versions,
    /// What projects use, until it is flushed.
    pub usage: UsageRecorder,
    /// What projects have of what their plans and queues bound: live jobs, bytes, queues.
    pub backlogs: enqueue::quota::Backlogs,
    parking: Parking,
    queue_lists: QueueLists,
    used_queues: UsedQueues,
    /// Changes of endpoints and pushes, and which of them this node's loops have read.
    pub targets: webhooks::changes::Targets,
    /// Jobs settled since rows of them were vacuumed last.
    settled: Arc<AtomicU64>,
    set_aside: SetAside,
    /// Acks of bulk requests that are under way.
    bulk_acks: PerProject,
    /// The secret from which ids of ticks' jobs are derived.
    tick_key: TickKey,
}

impl Deref for Engine {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

/// A node without its pump cannot deliver jobs: it stops, so that another takes its place.
async fn stop_if_pump_panics(
    pump: JoinHandle<()>,
    stopping: CancellationToken,
    has_failed: Arc<AtomicBool>,
) {
    if let Err(panic) = pump.await {
        counter!(telemetry::PANICS).increment(1);
        let error = &panic as &dyn std::error::Error;
        tracing::error!(error, "the claim pump panicked: this node stops");
        has_failed.store(true, Ordering::Relaxed);
        stopping.cancel();
    }
}

impl Engine {
    /// Starts the group commits and the pump. They end when the engine is dropped.
    #[must_use]
    pub fn start(
        pools: Pools,
        tick_key: TickKey,
        zones: Zones,
        stopping: CancellationToken,
    ) -> Self {
        let (wake, arrivals) = wakeups::channel();
        let settled = Arc::new(AtomicU64::new(0));
        let breakers = Arc::new(KnownProjects::default());
        let (messages, inbox) = mpsc::unbounded_channel();
        let notifier = Notifier::new(wake);
        let settle = || pools.settle.clone();
        let failures = Coalescer::start(Failures { pool: settle(), notifier: notifier.clone() });
        let (tasks, releasing) = (TaskTracker::new(), Releasing::default());
        let (matcher, matches, parked) = sync_match::channel();
        let pump = tokio::spawn(dispatch::pump::run(
            pools.clone(),
            (failures.clone(), releasing.clone()),
            (tasks.clone(), stopping.clone()),
            notifier.clone(),
            inbox,
            (matcher.clone(), matches),
            arrivals,
        ));
        let notes = SuccessNotes {
            notifier: notifier.clone(),
            settled: Arc::clone(&settled),
            breakers: Arc::clone(&breakers),
        };
        let has_failed = Arc::new(AtomicBool::new(false));
        tokio::spawn(stop_if_pump_panics(pump, stopping.clone(), Arc::clone(&has_failed)));
        Self(Arc::new(Inner {
            enqueues: Coalescer::start(Enqueues::new(
                pools.enqueue.clone(),
                notifier.clone(),
                matcher,
            )),
            successes: Coalescer::start(Successes { pool: settle(), notes: notes.clone() }),
            parents: Coalescer::start(Parents { pool: settle(), notes }),
            failures,
            repeats: Coalescer::start(Repeats {
                pool: pools.claim.clone(),
                releasing: releasing.clone(),
            }),
            beats: Coalescer::start(Beats { pool: settle() }),
            bare_fences: Coalescer::start(BareFences { pool: settle() }),
            worker_beats: Coalescer::start(WorkerBeats { pool: pools.reports.clone() }),
            worker_lookups: Coalescer::start(WorkerLookups { pool: pools.claim.clone() }),
            job_kinds: Coalescer::start(JobKinds { pool: pools.claim.clone() }),
            registry: Registry::new(),
            zones,
            breakers,
            usage: UsageRecorder::default(),
            versions: jobs::wait::Versions::default(),
            backlogs: enqueue::quota::Backlogs::default(),
            parking: Parking::new(messages, releasing, parked),
            queue_lists: QueueLists::default(),
            used_queues: UsedQueues::default(),
            targets: webhooks::changes::Targets::default(),
            pools,
            notifier,
            stopping,
            tasks,
            has_failed,
            settled,
            set_aside: SetAside::default(),
            bulk_acks: PerProject::new(settle::MAX_BULK_ACKS),
            tick_key,
        }))
    }

    /// Stops the pump: claims in flight complete, and undelivered jobs are released before this
    /// returns. No job is leased afterwards.
    pub async fn finish(&self) {
        let (done, finished) = oneshot::channel();
        let _ = self.parking.messages.send(Message::Finish(done));
        let _ = finished.await;
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Checks that this node can serve.
    ///
    /// # Errors
    /// [`Error::NotReady`] while it stops. [`Error::Unavailable`] when the database does not
    /// answer.
    pub async fn check_serving(&self) -> Result<(), Error> {
        if self.stopping.is_cancelled() {
            return Err(Error::NotReady("the node is stopping"));
        }
        self.now().await.map(drop)
    }

    /// The time by the database's clock.
    pub async fn now(&self) -> Result<DateTime<Utc>, Error> {
        let mut conn = self.pools.reports.acquire().await?;
        Ok(store::schedules::clock(&mut conn).await?)
    }

    /// Whether the node stops because a part of it has failed permanently.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }
}
