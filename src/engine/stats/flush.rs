//! Writing this node's counters to the database.

use fencepost_store::{
    people::usage,
    queues::stats::{self, MAX_ADDED_ROWS},
};
use sqlx::Acquire;

use crate::Engine;

/// Adds the counters since the last flush to the shared statistics. If that fails, they are kept
/// for the next flush.
pub async fn write(engine: &Engine) -> sqlx::Result<()> {
    let mut counted = engine.notifier.tally.take();
    while !counted.is_empty() {
        let later = counted.split_off(counted.len().min(MAX_ADDED_ROWS));
        let added = async {
            let mut conn = engine.pools.background.acquire().await?;
            let mut tx = conn.begin().await?;
            stats::add(&mut tx, &counted).await?;
            usage::add(&mut tx, &counted).await?;
            tx.commit().await
        };
        if let Err(error) = added.await {
            // After a lost commit the numbers count twice: they are for people, and decide nothing.
            counted.extend(later);
            engine.notifier.tally.put_back(counted);
            return Err(error);
        }
        counted = later;
    }
    Ok(())
}
