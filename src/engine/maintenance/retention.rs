//! Deleting finished jobs past their queue's retention.

use fencepost_domain::{
    ids::{JobKey, ProjectId},
    limits::DEFAULT_RETENTION_DAYS,
};
use fencepost_signals::telemetry;
use fencepost_store::sweep::{
    prune::{self, DueQueue, MAX_DUE_QUEUES, MAX_PRUNED_CHUNKS, MAX_PRUNED_JOBS},
    set_aside::Work,
};
use metrics::counter;
use sqlx::PgConnection;

use crate::{
    Engine,
    isolate::{self, Sweep},
};

/// One pass over queues that are due. Returns whether there may be more. A queue that fails does
/// not stop the others: it is due again after a while.
pub async fn pass(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let due = prune::take_due_queues(&mut conn, DEFAULT_RETENTION_DAYS).await?;
    drop(conn);
    let (mut is_more, mut failed) = (due.len() == MAX_DUE_QUEUES, Ok(()));
    for queue in &due {
        match retain_queue(engine, queue).await {
            Ok(is_full) => is_more |= is_full,
            Err(error) => failed = Err(error),
        }
    }
    failed.map(|()| is_more)
}

/// Deletes the counts of empty queues: claims without a queue read the counts of all queues.
pub async fn forget_empty_queues(engine: &Engine) -> sqlx::Result<()> {
    let mut after = Some((ProjectId(0), String::new()));
    while let Some(position) = after {
        // The connection is returned in between: other loops wait for it.
        let mut conn = engine.pools.background.acquire().await?;
        after = prune::prune_empty_queues(&mut conn, &position).await?;
    }
    Ok(())
}

/// One part of one queue. Returns whether it has more: that comes after all other queues that are
/// due.
async fn retain_queue(engine: &Engine, queue: &DueQueue) -> sqlx::Result<bool> {
    // The connection is returned between queues: other loops wait for it.
    let mut conn = engine.pools.background.acquire().await?;
    let has_logs = prune::prune_logs(&mut conn, queue).await? == MAX_PRUNED_CHUNKS;
    let is_more = has_logs || prune_part(engine, &mut conn, queue).await?;
    prune::set_due(&mut conn, queue, is_more).await?;
    Ok(is_more)
}

async fn prune_part(
    engine: &Engine,
    conn: &mut PgConnection,
    queue: &DueQueue,
) -> sqlx::Result<bool> {
    let old = prune::find_old_jobs(conn, queue).await?;
    let key = |id| JobKey { project_id: queue.project_id, id };
    let old: Vec<_> = old.into_iter().map(key).collect();
    let pruned = isolate::process(engine, conn, &Retention { queue }, &old).await?;
    counter!(telemetry::JOBS_PRUNED).increment(pruned.into_iter().sum::<i64>().unsigned_abs());
    Ok(old.len() == MAX_PRUNED_JOBS)
}

/// Deleting finished jobs of a queue.
struct Retention<'a> {
    queue: &'a DueQueue,
}

impl Sweep for Retention<'_> {
    type Item = JobKey;
    type Done = i64;
    const WORK: Work = Work::Retention;

    fn name(item: &JobKey) -> (ProjectId, String) {
        isolate::job_name(*item)
    }

    async fn process(&self, tx: &mut PgConnection, old: &[JobKey]) -> sqlx::Result<i64> {
        let ids: Vec<_> = old.iter().map(|it| it.id.0).collect();
        let pruned = prune::prune_jobs(tx, self.queue, &ids).await?;
        if !pruned.workflows.is_empty() {
            prune::prune_workflows(tx, self.queue.project_id, &pruned.workflows).await?;
        }
        Ok(pruned.jobs)
    }
}
