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

/// The pause between two walks that correct counts of running jobs, in seconds.
pub const CORRECTION_PAUSE_SECONDS: f64 = 300.0;

/// One step of the walk that corrects how many jobs run: nodes of versions before 0.3 count none
/// while they run beside newer ones. Returns whether there may be more queues; not if another node
/// walks, or if a walk has ended less than `pause_seconds` ago.
pub async fn correct(engine: &Engine, pause_seconds: f64) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let mut tx = conn.begin().await?;
    let place = counts::lock_corrections(&mut tx, pause_seconds).await?;
    let Some((project_id, queue)) = place else { return Ok(false) };
    let (is_more, queues) = counts::correct_processing(&mut tx, (project_id, &queue)).await?;
    tx.commit().await?;
    if queues > 0 {
        tracing::info!(queues, "counts of running jobs corrected");
    }
    Ok(is_more)
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
