//! The loop that cancels deliveries to endpoints that were deleted, or disabled long ago: an
//! operation of the outbox for each, in which the endpoint's id is the queue.

use fencepost_domain::{
    ids::OperationId,
    limits::EMPTY_HOURS,
    operation::{JobFilter, Kind, Which},
};
use fencepost_signals::wakeups::BackgroundTask;
use fencepost_store::{
    operations::{self, NewOperation},
    sweep::webhooks,
};
use sqlx::Acquire;

use crate::Engine;

/// One pass. An operation is begun in the transaction that notes it, so each is begun once.
///
/// # Errors
/// When the database does not answer.
pub async fn pass(engine: &Engine) -> sqlx::Result<()> {
    let mut conn = engine.pools.background.acquire().await?;
    let mut tx = conn.begin().await?;
    let found = webhooks::to_empty(&mut tx, EMPTY_HOURS).await?;
    for it in &found {
        let filter = JobFilter { queue: Some(it.id.to_string()), ..JobFilter::default() };
        let new = NewOperation {
            id: OperationId::generate(),
            kind: Kind::JobsCancel,
            filter: Which::Jobs(filter),
            expected: None,
            max_jobs: None,
            rate_per_second: None,
        };
        operations::insert(&mut tx, it.outbox, &new).await?;
        webhooks::note_emptied(&mut tx, it.project_id, it.id).await?;
    }
    tx.commit().await?;
    if !found.is_empty() {
        engine.notifier.wake.ask(BackgroundTask::Operations);
    }
    Ok(())
}
