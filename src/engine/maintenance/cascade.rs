//! Cancelling jobs that can no longer run: children of parents that failed or were cancelled, and
//! jobs whose `expires_at` has passed.

use sqlx::Acquire;

use crate::{
    domain::history,
    engine::{
        Engine,
        cancel::{cancel_waiting, publish_cancelled},
    },
    ids::JobKey,
    store::{
        cascade,
        events::{self, NewEvent},
        sweep,
    },
};

/// Seconds until a job that runs past its `expires_at` is checked again.
const RUNNING_PAUSE_SECONDS: i32 = 10;

/// One pass over failed or cancelled parents: cancels their children, whose own children follow in
/// the next pass. Returns whether there may be more.
pub async fn pass(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let parents = sweep::find_with_orphans(&mut conn).await?;
    let is_more = !parents.is_empty();
    for parent in parents {
        let mut tx = conn.begin().await?;
        // The transaction that removes the mark does the work; a retried parent has no mark.
        if cascade::unmark_orphaned(&mut tx, parent.project_id, &[parent.id]).await? == 0 {
            continue;
        }
        let children = cascade::waiting_children(&mut tx, parent).await?;
        let gone = cancel_waiting(&mut tx, &children, false, Some(parent.id)).await?;
        let payload = format!(r#"{{"parent_id":"{}"}}"#, parent.id);
        let noted: Vec<_> = gone
            .iter()
            .map(|it| NewEvent::new(it.key, history::PARENT_FAILED, None, Some(payload.clone())))
            .collect();
        events::insert(&mut tx, &noted).await?;
        tx.commit().await?;
        publish_cancelled(engine, &gone, history::PARENT_FAILED);
    }
    Ok(is_more)
}

/// One pass over jobs whose `expires_at` has passed: cancels those that wait. Returns whether there
/// may be more.
pub async fn pass_expired(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let outdated: Vec<JobKey> = sweep::find_outdated(&mut conn).await?;
    if outdated.is_empty() {
        return Ok(false);
    }
    let mut tx = conn.begin().await?;
    let gone = cancel_waiting(&mut tx, &outdated, true, None).await?;
    // Check running ones again: if released, they must not run any more.
    cascade::delete_expiries(&mut tx, &outdated).await?;
    cascade::postpone_expiries(&mut tx, &outdated, RUNNING_PAUSE_SECONDS).await?;
    let noted: Vec<_> =
        gone.iter().map(|it| NewEvent::new(it.key, history::EXPIRED, None, None)).collect();
    events::insert(&mut tx, &noted).await?;
    tx.commit().await?;
    publish_cancelled(engine, &gone, history::EXPIRED);
    Ok(outdated.len() == sweep::MAX_SWEEP_ROWS)
}
