//! Calling jobs off that nobody wants any more: children of parents that ended without success, and
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

/// A job that runs while its `expires_at` passes is looked at again after so many seconds.
const RUNNING_PAUSE_SECONDS: i32 = 10;

/// One pass over parents that ended without success: calls their children off, whose own children
/// follow in the next pass. Answers whether there may be more.
pub async fn pass(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let parents = sweep::find_with_orphans(&mut conn).await?;
    let is_more = !parents.is_empty();
    for parent in parents {
        let mut tx = conn.begin().await?;
        // Whoever takes the mark off does the work; a parent that came back meanwhile has no mark.
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

/// One pass over jobs whose `expires_at` has passed: calls off those that wait. Answers whether there may
/// be more.
pub async fn pass_expired(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let outdated: Vec<JobKey> = sweep::find_outdated(&mut conn).await?;
    if outdated.is_empty() {
        return Ok(false);
    }
    let mut tx = conn.begin().await?;
    let gone = cancel_waiting(&mut tx, &outdated, true, None).await?;
    // Those that run are looked at again: handed back, nobody may have them any more.
    cascade::delete_expiries(&mut tx, &outdated).await?;
    cascade::postpone_expiries(&mut tx, &outdated, RUNNING_PAUSE_SECONDS).await?;
    let noted: Vec<_> =
        gone.iter().map(|it| NewEvent::new(it.key, history::EXPIRED, None, None)).collect();
    events::insert(&mut tx, &noted).await?;
    tx.commit().await?;
    publish_cancelled(engine, &gone, history::EXPIRED);
    Ok(outdated.len() == sweep::MAX_SWEEP_ROWS)
}
