//! What Fencepost is: leases, fences and dispatch. The engine owns the pools, the coalescers and
//! the pump; every wire, loop and command calls the same functions, which take `&Engine`.
//!
//! It never knows HTTP, and never decides by a clock of its own.

mod coalesce;
pub mod dispatch;
pub mod enqueue;
pub mod heartbeat;
mod lanes;
pub mod promote;
mod pump;
pub mod reap;
pub mod registry;
pub mod settle;

use std::{
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use metrics::counter;
use tokio::{sync::mpsc, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use self::{
    coalesce::Coalescer, dispatch::Parking, enqueue::Enqueues, heartbeat::Beats, settle::Endings,
    settle::Successes,
};
use crate::{
    store::{self, pools::Pools},
    telemetry,
    wake::{self, Wake},
};

/// One node's engine. Cheap to clone.
#[derive(Clone)]
pub struct Engine(Arc<Inner>);

/// The parts of an engine.
pub struct Inner {
    /// The database.
    pub pools: Pools,
    /// Who should look again.
    pub wake: Wake,
    /// Cancelled when the node begins to stop: parked polls are answered.
    pub stopping: CancellationToken,
    enqueues: Coalescer<Enqueues>,
    successes: Coalescer<Successes>,
    endings: Coalescer<Endings>,
    beats: Coalescer<Beats>,
    parking: Parking,
    settled: Arc<AtomicU64>,
}

impl Deref for Engine {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

/// A node without its pump hands out nothing: it stops, so that another takes its place.
async fn outlive(pump: JoinHandle<()>, stopping: CancellationToken) {
    if let Err(panic) = pump.await {
        counter!(telemetry::PANICS).increment(1);
        let error = &panic as &dyn std::error::Error;
        tracing::error!(error, "the claim pump panicked: this node stops");
        stopping.cancel();
    }
}

/// Settled rows after which the hot table is vacuumed.
const VACUUM_AFTER_ROWS: u64 = 20_000;

impl Engine {
    /// Starts the coalescers and the pump. They end when the engine is dropped.
    #[must_use]
    pub fn start(pools: Pools, stopping: CancellationToken) -> Self {
        let (wake, arrivals) = wake::channel();
        let settled = Arc::new(AtomicU64::new(0));
        let (messages, inbox) = mpsc::unbounded_channel();
        let endings = Coalescer::start(Endings { pool: pools.settle.clone(), wake: wake.clone() });
        let pump = tokio::spawn(pump::run(pools.claim.clone(), endings.clone(), inbox, arrivals));
        tokio::spawn(outlive(pump, stopping.clone()));
        Self(Arc::new(Inner {
            enqueues: Coalescer::start(Enqueues {
                pool: pools.enqueue.clone(),
                wake: wake.clone(),
            }),
            successes: Coalescer::start(Successes {
                pool: pools.settle.clone(),
                settled: Arc::clone(&settled),
            }),
            endings,
            beats: Coalescer::start(Beats { pool: pools.settle.clone() }),
            parking: Parking::new(messages),
            pools,
            wake,
            stopping,
            settled,
        }))
    }

    /// Polls that are parked now.
    #[must_use]
    pub fn parked_polls(&self) -> usize {
        self.parking.parked()
    }

    /// Vacuums the hot table once enough rows have left it. Answers whether it did.
    ///
    /// # Errors
    /// Only those of the store; the step can be repeated.
    pub async fn vacuum_if_due(&self) -> sqlx::Result<bool> {
        if self.settled.load(Ordering::Relaxed) < VACUUM_AFTER_ROWS {
            return Ok(false);
        }
        self.settled.store(0, Ordering::Relaxed);
        let mut conn = self.pools.background.acquire().await?;
        store::sweep::vacuum_jobs(&mut conn).await?;
        Ok(true)
    }
}
