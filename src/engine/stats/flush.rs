//! Writing down what this node has counted.

use crate::{
    engine::Engine,
    store::stats::{self, MAX_ADDED_ROWS},
};

/// Adds what was counted since the last time to the numbers of all nodes. What cannot be written is kept for the next
/// time.
pub async fn write(engine: &Engine) -> sqlx::Result<()> {
    let mut counted = engine.notifier.tally.take();
    while !counted.is_empty() {
        let later = counted.split_off(counted.len().min(MAX_ADDED_ROWS));
        let added = async {
            let mut conn = engine.pools.background.acquire().await?;
            stats::add(&mut conn, &counted).await
        };
        if let Err(error) = added.await {
            // A commit whose answer was lost counts twice: these are numbers to look at, not to decide by.
            counted.extend(later);
            engine.notifier.tally.put_back(counted);
            return Err(error);
        }
        counted = later;
    }
    Ok(())
}
