//! The backlog of a queue, for autoscalers, and the wait for its first job.

use std::{future::Future, time::Duration};

use fencepost_domain::{error::Error, ids::ProjectId};
use fencepost_store::queues::counts::{self, QueueRow};
use tokio::time::{Instant, sleep_until};

use super::Engine;

/// A wait reads again after this time, because a hint can be lost on its way.
const LOOK_AGAIN: Duration = Duration::from_secs(15);
/// A wait reads at most once in this time: jobs that arrive in a paused queue are no backlog.
const MIN_PAUSE: Duration = Duration::from_millis(500);

/// Jobs that wait for a worker, a concurrency key, a rate limit or labels; 0 while the queue is
/// paused.
#[must_use]
pub fn ready(queue: &QueueRow) -> i64 {
    match queue.paused_at {
        Some(_) => 0,
        None => (queue.active - queue.backoff - queue.processing).max(0),
    }
}

/// Jobs that need workers: more than `max_concurrency` would only wait.
#[must_use]
pub fn size(queue: &QueueRow) -> i64 {
    let most = queue.max_concurrency.map_or(i64::MAX, i64::from);
    (ready(queue) + queue.processing).min(most.max(queue.processing))
}

/// Reads a queue once its backlog is not 0, or when `wait` has passed. It holds no connection
/// meanwhile, and waits only while the client is connected.
///
/// # Errors
/// Those of the database.
pub async fn until_any(
    engine: &Engine,
    project_id: ProjectId,
    queue: &str,
    wait: Duration,
    gone: impl Future<Output = ()>,
) -> Result<QueueRow, Error> {
    if wait.is_zero() {
        return read(engine, project_id, queue).await;
    }
    let watch = engine.notifier.backlog_waits.watch(project_id, queue);
    let deadline = Instant::now() + wait;
    tokio::pin!(gone);
    loop {
        engine.notifier.wake.interest.note(project_id);
        // Before the read: an arrival in between must not be missed.
        let arrival = watch.arrival();
        tokio::pin!(arrival);
        arrival.as_mut().enable();
        let row = read(engine, project_id, queue).await?;
        let now = Instant::now();
        if size(&row) > 0 || now >= deadline {
            return Ok(row);
        }
        let look_again = async {
            tokio::select! {
                () = arrival => sleep_until(now + MIN_PAUSE).await,
                () = sleep_until(now + LOOK_AGAIN) => (),
            }
        };
        tokio::select! {
            () = look_again => (),
            () = sleep_until(deadline) => (),
            () = &mut gone => return Ok(row),
            () = engine.stopping.cancelled() => return Ok(row),
        }
    }
}

async fn read(engine: &Engine, project_id: ProjectId, queue: &str) -> Result<QueueRow, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let rows = counts::queues(&mut conn, project_id, &[queue.to_owned()]).await?;
    rows.into_iter().next().ok_or(Error::QueueNotFound)
}
