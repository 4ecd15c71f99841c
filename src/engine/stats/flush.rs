//! Writing this node's counters to the database.

use fencepost_domain::{ids::ProjectId, stats::Counted, usage::Used};
use fencepost_store::{
    people::usage,
    queues::stats::{self, MAX_ADDED_ROWS},
};
use sqlx::Acquire;

use super::usage::of_jobs;
use crate::Engine;

/// Adds the counters since the last flush to the shared statistics, and to the usage of projects.
/// If that fails, they are kept for the next flush.
pub async fn write(engine: &Engine) -> sqlx::Result<()> {
    let mut counted = engine.notifier.tally.take();
    let mut used: Vec<_> = engine.usage.take().into_iter().collect();
    while !counted.is_empty() || !used.is_empty() {
        let later = counted.split_off(counted.len().min(MAX_ADDED_ROWS));
        let used_later = used.split_off(used.len().min(MAX_ADDED_ROWS));
        if let Err(error) = add(engine, &counted, &used).await {
            // After a lost commit the numbers count twice: they are for people, and decide nothing.
            counted.extend(later);
            engine.notifier.tally.put_back(counted);
            used.extend(used_later);
            engine.usage.put_back(used);
            return Err(error);
        }
        (counted, used) = (later, used_later);
    }
    Ok(())
}

async fn add(engine: &Engine, counted: &[Counted], used: &[(ProjectId, Used)]) -> sqlx::Result<()> {
    let mut conn = engine.pools.background.acquire().await?;
    let mut tx = conn.begin().await?;
    stats::add(&mut tx, counted).await?;
    let of_jobs = counted.iter().map(|it| (it.project_id, of_jobs(it)));
    let used: Vec<_> = used.iter().copied().chain(of_jobs).collect();
    usage::add(&mut tx, &used).await?;
    tx.commit().await
}
