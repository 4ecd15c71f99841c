//! Waiting for a job's end, and noticing changes that other nodes made.

use std::{collections::HashMap, future::Future, sync::Mutex, time::Duration};

use fencepost_domain::{
    error::Error,
    ids::{JobId, JobKey, ProjectId},
    job::StoredState,
};
use fencepost_store::{self as store, jobs::Version};
use tokio::time::{Instant, sleep_until};

use crate::{Engine, jobs};

/// Jobs of one query for changes.
const MAX_LOOKED_AT: usize = 500;

/// Last known versions of watched jobs.
#[derive(Default)]
pub struct Versions(Mutex<HashMap<(ProjectId, JobId), String>>);

/// Waits until a job has ended, at most `wait`, and only while the client is connected.
///
/// # Errors
/// [`Error::JobNotFound`].
pub async fn until_ended(
    engine: &Engine,
    key: JobKey,
    wait: Duration,
    gone: impl Future<Output = ()>,
) -> Result<(), Error> {
    let watch = engine.notifier.feed.watch(key.project_id, key.id);
    let deadline = Instant::now() + wait;
    tokio::pin!(gone);
    loop {
        // Subscribe before reading: an end in between must not be missed.
        let changed = watch.changed();
        tokio::pin!(changed);
        changed.as_mut().enable();
        let row = jobs::find(engine, key).await?;
        let has_ended = matches!(
            row.state,
            StoredState::Succeeded | StoredState::DeadLetter | StoredState::Cancelled
        );
        if has_ended {
            return Ok(());
        }
        tokio::select! {
            () = changed => (),
            () = sleep_until(deadline) => return Ok(()),
            () = &mut gone => return Ok(()),
            () = engine.stopping.cancelled() => return Ok(()),
        }
    }
}

/// One pass over the jobs that are watched on this node: wakes the watchers of jobs that another
/// node has changed.
pub async fn pass(engine: &Engine) -> sqlx::Result<()> {
    let watched = engine.notifier.feed.watched_jobs();
    let mut seen = HashMap::new();
    for jobs in watched.chunks(MAX_LOOKED_AT) {
        let mut conn = engine.pools.background.acquire().await?;
        for Version { project_id, id, version } in store::jobs::versions(&mut conn, jobs).await? {
            seen.insert((project_id, id), version);
        }
    }
    let mut last = engine.versions.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for (key, version) in &seen {
        // A job that was not watched before may have changed since its watcher read it.
        if last.get(key) != Some(version) {
            engine.notifier.feed.nudge(key.0, key.1);
        }
    }
    *last = seen;
    Ok(())
}
