//! Polls that name no queue: they take jobs from any queue of their project that has some.

use std::{future::Future, sync::Arc, time::Duration};

use moka::sync::Cache;
use rand::seq::SliceRandom;
use tokio::{pin, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{
    park::{self, Delivery},
    request::PollSpec,
};
use crate::{engine::Engine, error::Error, ids::ProjectId, store};

/// Maximum number of queues that such a poll searches; queues with jobs come first.
pub const MAX_QUEUES: i64 = 100;
/// How often a waiting poll refreshes its list of queues.
const NEW_QUEUES_PERIOD: Duration = Duration::from_secs(2);
/// How long one list of queues serves all polls of a project.
const QUEUES_KEEP: Duration = Duration::from_secs(1);
/// Projects whose lists of queues one node caches.
const MAX_KNOWN_PROJECTS: u64 = 10_000;

/// Lists of queues by project, cached for a moment.
pub(in crate::engine) struct QueueLists(Cache<ProjectId, Arc<[Arc<str>]>>);

impl Default for QueueLists {
    fn default() -> Self {
        let lists = Cache::builder().time_to_live(QUEUES_KEEP).max_capacity(MAX_KNOWN_PROJECTS);
        Self(lists.build())
    }
}

/// Like [`park::poll`], over every queue of the project, up to [`MAX_QUEUES`]. Each round uses
/// another random order, so that no queue is starved.
///
/// # Errors
/// Those of [`park::poll`], and [`Error::Unavailable`] when the database does not answer.
pub(super) async fn poll(
    engine: &Engine,
    spec: PollSpec,
    wait: Duration,
    gone: &CancellationToken,
    revoked: impl Future<Output = ()>,
) -> Result<Delivery, Error> {
    pin!(revoked);
    if wait.is_zero() {
        // The cached list may lack a queue that just got its first job.
        let queues = shuffled(&read_queues(engine, spec.project_id, false).await?);
        let spec = PollSpec { queues, ..spec };
        return park::poll(engine, spec, wait, gone.cancelled(), revoked).await;
    }
    let deadline = Instant::now() + wait;
    loop {
        let queues = shuffled(&known_queues(engine, spec.project_id).await?);
        let left = deadline.saturating_duration_since(Instant::now()).min(NEW_QUEUES_PERIOD);
        // Never zero: that would be a poll without a wait.
        let left = left.max(Duration::from_millis(1));
        let spec = PollSpec { queues, ..spec.clone() };
        let delivery = park::poll(engine, spec, left, gone.cancelled(), revoked.as_mut()).await?;
        let has_ended = deadline <= Instant::now()
            || gone.is_cancelled()
            || engine.stopping.is_cancelled()
            || !delivery.jobs().is_empty()
            || delivery.directive().is_some();
        if has_ended {
            return Ok(delivery);
        }
    }
}

async fn known_queues(engine: &Engine, project_id: ProjectId) -> Result<Arc<[Arc<str>]>, Error> {
    if let Some(known) = engine.queue_lists.0.get(&project_id) {
        return Ok(known);
    }
    let queues = read_queues(engine, project_id, true).await?;
    engine.queue_lists.0.insert(project_id, Arc::clone(&queues));
    Ok(queues)
}

async fn read_queues(
    engine: &Engine,
    project_id: ProjectId,
    with_empty: bool,
) -> Result<Arc<[Arc<str>]>, Error> {
    let mut conn = engine.pools.claim.acquire().await?;
    let queues =
        store::counts::busiest_queues(&mut conn, project_id, with_empty, MAX_QUEUES).await?;
    Ok(queues.into_iter().map(Arc::from).collect())
}

fn shuffled(queues: &[Arc<str>]) -> Vec<Arc<str>> {
    let mut queues = queues.to_vec();
    queues.shuffle(&mut rand::rng());
    queues
}
