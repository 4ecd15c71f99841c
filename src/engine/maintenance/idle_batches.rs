//! Batches that were never sealed, and that no job has joined for a month: they are sealed, or they
//! would stay open for good.

use fencepost_domain::{
    ids::{BatchId, ProjectId},
    limits::IDLE_BATCH_DAYS,
};
use fencepost_store::sweep::{
    completions::{self, MAX_IDLE_BATCHES},
    set_aside::Work,
};
use sqlx::PgConnection;

use crate::{
    Engine,
    batches::completions as completions_of_batches,
    enqueue::NewlyStored,
    isolate::{self, Sweep},
};

/// Seals some of them, each in a transaction of its own. Returns whether there may be more.
///
/// # Errors
/// When the database does not answer.
pub async fn pass(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let idle = completions::idle_batches(&mut conn, IDLE_BATCH_DAYS).await?;
    for batch in idle.chunks(1) {
        let sealed = isolate::process(engine, &mut conn, &Sealing, batch).await?;
        sealed.iter().flatten().for_each(|it| it.publish(engine));
        engine.notifier.notify_endpoints(batch.iter().map(|it| it.0));
    }
    Ok(idle.len() >= MAX_IDLE_BATCHES)
}

/// Sealing batches.
struct Sealing;

impl Sweep for Sealing {
    type Item = (ProjectId, BatchId);
    type Done = Vec<NewlyStored>;
    const WORK: Work = Work::Seal;

    fn name(item: &(ProjectId, BatchId)) -> (ProjectId, String) {
        (item.0, item.1.0.to_string())
    }

    async fn process(
        &self,
        tx: &mut PgConnection,
        batches: &[(ProjectId, BatchId)],
    ) -> sqlx::Result<Vec<NewlyStored>> {
        let mut enqueued = Vec::new();
        for (project_id, id) in batches {
            enqueued.extend(completions_of_batches::seal(tx, *project_id, *id).await?);
        }
        Ok(enqueued)
    }
}
