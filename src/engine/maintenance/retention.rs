//! Deleting finished jobs past their queue's retention.

use fencepost_domain::{
    ids::{JobKey, ProjectId},
    limits::DEFAULT_RETENTION_DAYS,
};
use fencepost_signals::telemetry;
use fencepost_store::sweep::{
    prune::{self, MAX_PRUNED_CHUNKS, MAX_PRUNED_JOBS, OldQueue},
    set_aside::Work,
};
use metrics::counter;
use sqlx::PgConnection;

use crate::{
    Engine,
    isolate::{self, Sweep},
};

/// One pass over queues with old jobs. Returns whether there may be more. A queue that fails does
/// not stop the others.
pub async fn pass(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let old = prune::queues_with_old_jobs(&mut conn, DEFAULT_RETENTION_DAYS).await?;
    drop(conn);
    let (mut is_more, mut failure) = (false, None);
    for queue in &old {
        match retain_queue(engine, queue).await {
            Ok(is_full) => is_more |= is_full,
            Err(error) => failure = Some(error),
        }
    }
    if let Some(error) = failure {
        return Err(error);
    }
    if !is_more {
        forget_empty_queues(engine).await?;
    }
    Ok(is_more)
}

/// Deletes the counts of empty queues: claims without a queue read the counts of all queues.
async fn forget_empty_queues(engine: &Engine) -> sqlx::Result<()> {
    let mut after = Some((ProjectId(0), String::new()));
    while let Some(position) = after {
        // The connection is returned in between: other loops wait for it.
        let mut conn = engine.pools.background.acquire().await?;
        after = prune::prune_empty_queues(&mut conn, &position).await?;
    }
    Ok(())
}

/// One part of one queue. Returns whether it was full.
async fn retain_queue(engine: &Engine, queue: &OldQueue) -> sqlx::Result<bool> {
    // The connection is returned between queues: other loops wait for it.
    let mut conn = engine.pools.background.acquire().await?;
    if prune::prune_logs(&mut conn, queue).await? == MAX_PRUNED_CHUNKS {
        return Ok(true);
    }
    let old = prune::find_old_jobs(&mut conn, queue).await?;
    let key = |id| JobKey { project_id: queue.project_id, id };
    let old: Vec<_> = old.into_iter().map(key).collect();
    let pruned = isolate::process(engine, &mut conn, &Retention { queue }, &old).await?;
    counter!(telemetry::JOBS_PRUNED).increment(pruned.into_iter().sum::<i64>().unsigned_abs());
    Ok(old.len() == MAX_PRUNED_JOBS)
}

/// Deleting finished jobs of a queue.
struct Retention<'a> {
    queue: &'a OldQueue,
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
