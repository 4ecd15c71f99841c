//! The loop over the ends of jobs with callbacks, a batch or a workflow with an endpoint.

use fencepost_domain::{ids::ProjectId, plan::ProjectPlans};
use fencepost_store::{
    self as store, faults,
    sweep::{self, completions::WaitingEnd, set_aside::Work},
    workflows::completions,
};
use sqlx::PgConnection;

use crate::{
    Engine, batches,
    enqueue::{NewlyStored, quota::limits_of_loops},
    isolate::{self, Sweep},
};

/// One pass: projects take turns. Returns whether there may be more.
pub async fn pass(engine: &Engine, plans: &ProjectPlans) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let mut found = sweep::completions::find(&mut conn).await?;
    found.sort_by_key(|it| (it.project_id, it.id));
    let (mut taken, mut failed) = (0, None);
    for of_project in found.chunk_by_mut(|one, other| one.project_id == other.project_id) {
        let Some(project_id) = of_project.first().map(|it| it.project_id) else { continue };
        // Those that enqueue nothing come first, in their order.
        of_project.sort_by_key(|it| (it.enqueues, it.id));
        let mut open = of_project.partition_point(|it| !it.enqueues);
        if open < of_project.len() && has_room(&mut conn, plans, project_id).await? {
            open = of_project.len();
        }
        if open == 0 {
            continue;
        }
        // Each project in transactions of its own: a batch may be locked for a moment.
        let processing = isolate::process(engine, &mut conn, &Completions, &of_project[..open]);
        match faults::around_commit("ends", processing).await {
            Ok(done) => {
                for part in done {
                    taken += part.taken;
                    part.stored.publish(engine);
                }
                engine.notifier.notify_endpoints(std::iter::once(project_id));
            }
            // A batch that stays locked must not stop the other projects.
            Err(error) => failed = Some(error),
        }
    }
    // What another node has taken is not found again.
    failed.map_or(Ok(taken > 0), Err)
}

/// Checks that the plan leaves room for more jobs. Ends that enqueue some wait while it does not,
/// as enqueues are refused. What the last pass stored may exceed it.
async fn has_room(
    conn: &mut PgConnection,
    plans: &ProjectPlans,
    project_id: ProjectId,
) -> sqlx::Result<bool> {
    let limits = limits_of_loops(conn, plans, project_id).await?;
    let Some(max) = limits.waiting_jobs else { return Ok(true) };
    Ok(store::queues::counts::waiting(conn, project_id).await? < max)
}

/// The result of some ends.
#[derive(Default)]
struct Processed {
    taken: usize,
    stored: NewlyStored,
}

/// Processing what has ended.
struct Completions;

impl Sweep for Completions {
    type Item = WaitingEnd;
    type Done = Processed;
    const WORK: Work = Work::Callbacks;

    fn name(item: &WaitingEnd) -> (ProjectId, String) {
        (item.project_id, item.id.to_string())
    }

    async fn process(
        &self,
        tx: &mut PgConnection,
        items: &[WaitingEnd],
    ) -> sqlx::Result<Processed> {
        let Some(project_id) = items.first().map(|it| it.project_id) else {
            return Ok(Processed::default());
        };
        completions::limit_waits(tx).await?;
        let ids: Vec<_> = items.iter().map(|it| it.id).collect();
        let ends = completions::take(tx, project_id, &ids).await?;
        let taken = ends.len();
        let stored = batches::completions::process(tx, project_id, ends).await?;
        Ok(Processed { taken, stored })
    }
}
