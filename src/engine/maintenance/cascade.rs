//! What the end of a job means for its children: they may run, or are cancelled. And cancelling
//! jobs whose `expires_at` has passed.

use fencepost_domain::{
    actor::ChangedBy,
    dependency::FinalState,
    history,
    ids::{JobKey, ProjectId},
};
use fencepost_store::{
    faults,
    jobs::{
        control::{CancelReason, CancelledJob},
        events::{self, NewEvent},
    },
    settle::settle_success::WaitingJob,
    sweep::{self, set_aside::Work},
    workflows::cascade,
};
use sqlx::PgConnection;

use crate::{
    Engine,
    cancel::{cancel_waiting, publish_cancelled},
    isolate::{self, Sweep},
};

/// Seconds until a job that runs past its `expires_at` is checked again.
const RUNNING_PAUSE_SECONDS: i32 = 10;

/// One pass over ended parents: releases and cancels their children. The children of cancelled ones
/// follow in the next pass. Returns whether there may be more.
pub async fn pass(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let parents = sweep::find_ended_parents(&mut conn).await?;
    for parent in &parents {
        // Each in a transaction of its own: it may have many children.
        let parent = std::slice::from_ref(parent);
        let cascading = isolate::process(engine, &mut conn, &EndedParents, parent);
        for done in faults::around_commit("cascade", cascading).await? {
            engine.notifier.waiting(done.freed.iter());
            publish_cancelled(engine, &done.failed, history::PARENT_FAILED);
            publish_cancelled(engine, &done.skipped, history::CONDITION_NOT_MET);
        }
    }
    Ok(!parents.is_empty())
}

/// The effects of parents' ends.
#[derive(Default)]
struct Cascaded {
    /// Children that wait for nothing more.
    freed: Vec<WaitingJob>,
    /// Children cancelled because a parent failed.
    failed: Vec<CancelledJob>,
    /// Children cancelled because they were not needed.
    skipped: Vec<CancelledJob>,
}

/// Releasing and cancelling the children of ended jobs.
struct EndedParents;

impl Sweep for EndedParents {
    type Item = JobKey;
    type Done = Cascaded;
    const WORK: Work = Work::Cascade;

    fn name(item: &JobKey) -> (ProjectId, String) {
        isolate::job_name(*item)
    }

    async fn process(&self, tx: &mut PgConnection, parents: &[JobKey]) -> sqlx::Result<Cascaded> {
        let mut all = Cascaded::default();
        for parent in parents {
            // The transaction that removes the mark does the work; a retried parent has no mark.
            if cascade::unmark_ended(tx, parent.project_id, &[parent.id]).await? == 0 {
                continue;
            }
            let Some(end) = cascade::find_end(tx, *parent).await? else { continue };
            // A success has met its dependencies in the ack's own statement.
            if end != FinalState::Succeeded {
                all.freed.extend(cascade::meet(tx, *parent, end).await?);
            }
            let children = cascade::broken_children(tx, *parent, end).await?;
            let has_failed = end.has_failed();
            let reason = CancelReason::Parent { id: parent.id, has_failed };
            let gone = cancel_waiting(tx, &children, reason).await?;
            let payload = format!(r#"{{"parent_id":"{}"}}"#, parent.id);
            let by = ChangedBy::parent(parent.id);
            let (event, cancelled) = match has_failed {
                true => (history::PARENT_FAILED, &mut all.failed),
                false => (history::CONDITION_NOT_MET, &mut all.skipped),
            };
            record(tx, &gone, (event, Some(&payload)), &by).await?;
            cancelled.extend(gone);
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
        let gone = cancel_waiting(tx, outdated, CancelReason::Expired).await?;
        // Check running ones again: if released, they must not run any more.
        cascade::delete_expiries(tx, outdated).await?;
        cascade::postpone_expiries(tx, outdated, RUNNING_PAUSE_SECONDS).await?;
        record(tx, &gone, (history::EXPIRED, None), &ChangedBy::SERVER).await?;
        Ok(gone)
    }
}

async fn record(
    tx: &mut PgConnection,
    gone: &[CancelledJob],
    (kind, payload): (&'static str, Option<&str>),
    by: &ChangedBy,
) -> sqlx::Result<()> {
    let event = |it: &CancelledJob| NewEvent {
        payload: payload.map(str::to_owned),
        ..NewEvent::change(it.key, kind, by)
    };
    events::insert(tx, &gone.iter().map(event).collect::<Vec<_>>()).await?;
    Ok(())
}
