//! Polls that name no queue: they take jobs from any queue of their project that has some.

use std::{future::Future, sync::Arc, time::Duration};

use fencepost_domain::{error::Error, ids::ProjectId};
use fencepost_store as store;
use moka::sync::Cache;
use rand::seq::SliceRandom;
use tokio::{
    pin,
    sync::Mutex,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    park::{self, PollAnswer},
    request::PollSpec,
};
use crate::{Engine, workers::Presence};

/// Maximum number of queues that such a poll searches; queues with jobs come first.
pub const MAX_QUEUES: i64 = 100;
/// How often a waiting poll refreshes its list of queues.
const NEW_QUEUES_PERIOD: Duration = Duration::from_secs(2);
/// How long one list of queues serves all waiting polls of a project.
const QUEUES_KEEP: Duration = Duration::from_secs(1);
/// How long a poll waits for others of its project that read their lists.
const MAX_TURN_WAIT: Duration = Duration::from_secs(3);
/// Projects whose lists of queues one node caches.
const MAX_KNOWN_PROJECTS: u64 = 10_000;

/// Lists of queues by project, with or without empty ones. A list may take a second to read in a
/// project with many queues: each project reads one at a time, for all polls that wait for it.
pub(crate) struct QueueLists(Cache<(ProjectId, bool), Arc<Mutex<Option<Listed>>>>);

impl Default for QueueLists {
    fn default() -> Self {
        let lists = Cache::builder().time_to_idle(QUEUES_KEEP).max_capacity(MAX_KNOWN_PROJECTS);
        Self(lists.build())
    }
}

/// A list of queues.
#[derive(Clone)]
struct Listed {
    queues: Arc<[Arc<str>]>,
    /// It holds whatever was committed by then.
    began_at: Instant,
}

/// Like [`park::poll`], over every queue of the project, up to [`MAX_QUEUES`]. Each round uses
/// another random order, so that no queue is starved.
///
/// # Errors
/// The errors of [`park::poll`], and [`Error::Unavailable`] when the database does not answer.
pub(super) async fn poll(
    engine: &Engine,
    worker: &Presence<'_>,
    spec: PollSpec,
    wait: Duration,
    gone: &CancellationToken,
    revoked: impl Future<Output = Error>,
) -> Result<PollAnswer, Error> {
    pin!(revoked);
    if wait.is_zero() {
        // An older list may lack a queue that just got its first job.
        let queues = shuffled(&list(engine, spec.project_id, false, Instant::now()).await?);
        let spec = PollSpec { queues, ..spec };
        return park::poll(engine, worker, spec, wait, gone.cancelled(), revoked).await;
    }
    let deadline = Instant::now() + wait;
    loop {
        let since = Instant::now() - QUEUES_KEEP;
        let queues = shuffled(&list(engine, spec.project_id, true, since).await?);
        let left = deadline.saturating_duration_since(Instant::now()).min(NEW_QUEUES_PERIOD);
        // Never zero: that would be a poll without a wait.
        let left = left.max(Duration::from_millis(1));
        let spec = PollSpec { queues, ..spec.clone() };
        let answer =
            park::poll(engine, worker, spec, left, gone.cancelled(), revoked.as_mut()).await?;
        let has_ended = deadline <= Instant::now()
            || gone.is_cancelled()
            || engine.stopping.is_cancelled()
            || !answer.jobs().is_empty()
            || answer.directive().is_some();
        if has_ended {
            return Ok(answer);
        }
    }
}

/// The queues of a project, as they were at `since` or later.
async fn list(
    engine: &Engine,
    project_id: ProjectId,
    with_empty: bool,
    since: Instant,
) -> Result<Arc<[Arc<str>]>, Error> {
    let slot = engine.queue_lists.0.get_with((project_id, with_empty), Arc::default);
    let turn = timeout(MAX_TURN_WAIT, slot.lock()).await;
    let mut listed = turn.map_err(|_| Error::Overloaded)?;
    if let Some(it) = listed.as_ref().filter(|it| it.began_at >= since) {
        return Ok(Arc::clone(&it.queues));
    }
    let began_at = Instant::now();
    match (read(engine, project_id, with_empty).await, listed.as_ref()) {
        (Ok(queues), _) => {
            *listed = Some(Listed { queues: Arc::clone(&queues), began_at });
            Ok(queues)
        }
        // The old list serves until the database answers.
        (Err(_), Some(old)) => Ok(Arc::clone(&old.queues)),
        (Err(error), None) => Err(error),
    }
}

async fn read(
    engine: &Engine,
    project_id: ProjectId,
    with_empty: bool,
) -> Result<Arc<[Arc<str>]>, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let names =
        store::queues::counts::busiest_queues(&mut conn, project_id, with_empty, MAX_QUEUES);
    Ok(names.await?.into_iter().map(Arc::from).collect())
}

fn shuffled(queues: &[Arc<str>]) -> Vec<Arc<str>> {
    let mut queues = queues.to_vec();
    queues.shuffle(&mut rand::rng());
    queues
}
