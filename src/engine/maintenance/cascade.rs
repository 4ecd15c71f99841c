//! Cancelling jobs that can no longer run: children of parents that failed or were cancelled, and
//! jobs whose `expires_at` has passed.

use sqlx::PgConnection;

use crate::{
    domain::history,
    engine::{
        Engine,
        cancel::{cancel_waiting, publish_cancelled},
        isolate::{self, Sweep},
    },
    ids::{JobKey, ProjectId},
    store::{
        cascade,
        control::CancelledJob,
        events::{self, NewEvent},
        sweep::{self, set_aside::Work},
    },
};

/// Seconds until a job that runs past its `expires_at` is checked again.
const RUNNING_PAUSE_SECONDS: i32 = 10;

/// One pass over failed or cancelled parents: cancels their children, whose own children follow in
/// the next pass. Returns whether there may be more.
pub async fn pass(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let parents = sweep::find_with_orphans(&mut conn).await?;
    for parent in &parents {
        // Each in a transaction of its own: it may have many children.
        let parent = std::slice::from_ref(parent);
        for gone in isolate::process(engine, &mut conn, &Orphans, parent).await? {
            publish_cancelled(engine, &gone, history::PARENT_FAILED);
        }
    }
    Ok(!parents.is_empty())
}

/// Cancelling the children of parents that failed.
struct Orphans;

impl Sweep for Orphans {
    type Item = JobKey;
    type Done = Vec<CancelledJob>;
    const WORK: Work = Work::Cascade;

    fn name(item: &JobKey) -> (ProjectId, String) {
        isolate::job_name(*item)
    }

    async fn process(
        &self,
        tx: &mut PgConnection,
        parents: &[JobKey],
    ) -> sqlx::Result<Vec<CancelledJob>> {
        let mut all = Vec::new();
        for parent in parents {
            // The transaction that removes the mark does the work; a retried parent has no mark.
            if cascade::unmark_orphaned(tx, parent.project_id, &[parent.id]).await? == 0 {
                continue;
            }
            let children = cascade::waiting_children(tx, *parent).await?;
            let gone = cancel_waiting(tx, &children, false, Some(parent.id)).await?;
            let payload = format!(r#"{{"parent_id":"{}"}}"#, parent.id);
            let payload = Some(payload.as_str());
            record(tx, &gone, history::PARENT_FAILED, payload).await?;
            all.extend(gone);
        }
        Ok(all)
    }
}

/// One pass over jobs whose `expires_at` has passed: cancels those that wait. Returns whether there
/// may be more.
pub async fn pass_expired(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let outdated: Vec<JobKey> = sweep::find_outdated(&mut conn).await?;
    for gone in isolate::process(engine, &mut conn, &Outdated, &outdated).await? {
        publish_cancelled(engine, &gone, history::EXPIRED);
    }
    Ok(outdated.len() == sweep::MAX_SWEEP_ROWS)
}

/// Cancelling waiting jobs past their `expires_at`.
struct Outdated;

impl Sweep for Outdated {
    type Item = JobKey;
    type Done = Vec<CancelledJob>;
    const WORK: Work = Work::Expire;

    fn name(item: &JobKey) -> (ProjectId, String) {
        isolate::job_name(*item)
    }

    async fn process(
        &self,
        tx: &mut PgConnection,
        outdated: &[JobKey],
    ) -> sqlx::Result<Vec<CancelledJob>> {
        let gone = cancel_waiting(tx, outdated, true, None).await?;
        // Check running ones again: if released, they must not run any more.
        cascade::delete_expiries(tx, outdated).await?;
        cascade::postpone_expiries(tx, outdated, RUNNING_PAUSE_SECONDS).await?;
        record(tx, &gone, history::EXPIRED, None).await?;
        Ok(gone)
    }
}

async fn record(
    tx: &mut PgConnection,
    gone: &[CancelledJob],
    event: &'static str,
    payload: Option<&str>,
) -> sqlx::Result<()> {
    let event = |it: &CancelledJob| NewEvent::new(it.key, event, None, payload.map(str::to_owned));
    events::insert(tx, &gone.iter().map(event).collect::<Vec<_>>()).await?;
    Ok(())
}
