//! Retrying large families: the descendants that were cancelled with a retried job, step by step.

use fencepost_domain::{
    error::is_unique_violation,
    history,
    ids::{JobId, JobKey, ProjectId},
};
use fencepost_store::{
    settle::settle_success::WaitingJob,
    sweep::{self, set_aside::Work},
    workflows::cascade,
};
use sqlx::{Acquire, PgConnection};

use crate::{
    Engine,
    isolate::{self, Sweep},
    jobs::control::requeue_children,
    notify::job_event,
};

/// Children of one step.
const STEP_JOBS: usize = 100;

/// One step of one family of each project. Returns whether there may be more.
pub async fn pass(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let parents = sweep::find_revived(&mut conn).await?;
    let mut is_any = false;
    for parent in &parents {
        let parent = std::slice::from_ref(parent);
        for Stepped { is_any: is_one, jobs } in
            isolate::process(engine, &mut conn, &Families, parent).await?
        {
            is_any |= is_one;
            engine.notifier.waiting(jobs.iter());
            let revived = || jobs.iter().map(|it| job_event(it.key(), history::REVIVED));
            engine.notifier.feed.publish(|| revived().collect());
        }
    }
    Ok(is_any)
}

/// The result of a step.
#[derive(Default)]
struct Stepped {
    /// False: another node had the families.
    is_any: bool,
    jobs: Vec<WaitingJob>,
}

/// Retrying the children of retried jobs.
struct Families;

impl Sweep for Families {
    type Item = JobKey;
    type Done = Stepped;
    const WORK: Work = Work::Cascade;

    fn name(item: &JobKey) -> (ProjectId, String) {
        isolate::job_name(*item)
    }

    async fn process(&self, tx: &mut PgConnection, parents: &[JobKey]) -> sqlx::Result<Stepped> {
        let mut stepped = Stepped::default();
        for parent in parents {
            let Some(after) = cascade::lock_revived(tx, *parent).await? else { continue };
            let (project_id, ids) = (parent.project_id, [parent.id]);
            let children =
                cascade::cancelled_children(tx, project_id, &ids, after, STEP_JOBS).await?;
            let requeued = requeue_possible(tx, *parent, &children).await?;
            let back: Vec<_> = requeued.iter().map(|it| it.id).collect();
            cascade::mark_revived(tx, project_id, &back).await?;
            let last = children.last().filter(|_| children.len() == STEP_JOBS);
            cascade::advance_revived(tx, *parent, last.copied()).await?;
            stepped.is_any = true;
            stepped.jobs.extend(requeued);
        }
        Ok(stepped)
    }
}

/// Retries those whose unique keys are free: all at once, or else one by one.
async fn requeue_possible(
    tx: &mut PgConnection,
    parent: JobKey,
    children: &[JobId],
) -> sqlx::Result<Vec<WaitingJob>> {
    if let Some(requeued) = requeue_all(tx, parent, children).await? {
        return Ok(requeued);
    }
    let mut all = Vec::new();
    for child in children {
        let requeued = requeue_all(tx, parent, std::slice::from_ref(child)).await?;
        all.extend(requeued.unwrap_or_default());
    }
    Ok(all)
}

/// None: a live job has the unique key of one of them.
async fn requeue_all(
    tx: &mut PgConnection,
    parent: JobKey,
    children: &[JobId],
) -> sqlx::Result<Option<Vec<WaitingJob>>> {
    let mut inner = tx.begin().await?;
    match requeue_children(&mut inner, parent, children).await {
        Ok(requeued) => {
            inner.commit().await?;
            Ok(Some(requeued))
        }
        Err(error) if is_unique_violation(&error) => {
            inner.rollback().await?;
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
