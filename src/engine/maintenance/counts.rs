//! Merging the deltas of queue counts.

use fencepost_domain::ids::ProjectId;
use fencepost_store::sweep::{
    counts::{self, MAX_COUNTED_ROWS},
    set_aside::Work,
};
use sqlx::{Acquire, PgConnection};

use crate::{
    Engine,
    isolate::{self, Sweep},
};

/// One pass. Returns whether there may be more.
pub async fn pass(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    if !engine.set_aside.is_any() {
        match counts::merge_counts(&mut conn, None).await {
            Err(error) if isolate::is_of_a_row(&error) => (),
            merged => return Ok(merged? == MAX_COUNTED_ROWS),
        }
    }
    // One by one by name: a queue may fail, or succeed that was set aside.
    let queues = counts::find_queues_with_deltas(&mut conn).await?;
    let merged = isolate::process(engine, &mut conn, &Merge, &queues).await?;
    Ok(merged.into_iter().sum::<i64>() >= MAX_COUNTED_ROWS)
}

/// Corrects how many jobs run in queues in which many do: nodes of versions before 0.3 count none
/// while they run beside newer ones.
pub async fn correct(engine: &Engine) -> sqlx::Result<()> {
    let mut conn = engine.pools.background.acquire().await?;
    let mut tx = conn.begin().await?;
    if !counts::try_lock_corrections(&mut tx).await? {
        return Ok(());
    }
    let queues = counts::correct_processing(&mut tx).await?;
    tx.commit().await?;
    if queues > 0 {
        tracing::info!(queues, "counts of running jobs corrected");
    }
    Ok(())
}

/// Merging the deltas of some queues.
struct Merge;

impl Sweep for Merge {
    type Item = (ProjectId, String);
    type Done = i64;
    const WORK: Work = Work::Counts;

    fn name(item: &(ProjectId, String)) -> (ProjectId, String) {
        item.clone()
    }

    async fn process(
        &self,
        tx: &mut PgConnection,
        queues: &[(ProjectId, String)],
    ) -> sqlx::Result<i64> {
        counts::merge_counts(tx, Some(queues)).await
    }
}
