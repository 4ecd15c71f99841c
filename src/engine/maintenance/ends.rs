//! The loop over the ends of jobs with callbacks, a batch or a workflow that is told.

use fencepost_domain::ids::ProjectId;
use fencepost_store::{
    faults,
    sweep::{self, set_aside::Work},
    workflows::ends::{self, EndKey},
};
use sqlx::PgConnection;

use crate::{
    Engine, batches,
    enqueue::NewlyStored,
    isolate::{self, Sweep},
};

/// One pass: projects take turns. Returns whether there may be more.
pub async fn pass(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let found = sweep::ends::find(&mut conn).await?;
    let mut is_full = found.len() == sweep::ends::MAX_ENDS;
    let mut failed = None;
    for of_project in found.chunk_by(|one, other| one.project_id == other.project_id) {
        is_full |= of_project.len() == sweep::ends::MAX_ENDS_OF_PROJECT;
        // Each project in transactions of its own: a batch may be locked for a moment.
        let processing = isolate::process(engine, &mut conn, &Ends, of_project);
        match faults::around_commit("ends", processing).await {
            Ok(done) => {
                done.iter().for_each(|it| it.tell(engine));
                let project_id = of_project.first().map(|it| it.project_id);
                engine.notifier.tell_endpoints(project_id.into_iter());
            }
            // A batch that stays locked must not stop the other projects.
            Err(error) => failed = Some(error),
        }
    }
    failed.map_or(Ok(is_full), Err)
}

/// Processing what has ended.
struct Ends;

impl Sweep for Ends {
    type Item = EndKey;
    type Done = NewlyStored;
    const WORK: Work = Work::Callbacks;

    fn name(item: &EndKey) -> (ProjectId, String) {
        (item.project_id, item.id.to_string())
    }

    async fn process(&self, tx: &mut PgConnection, items: &[EndKey]) -> sqlx::Result<NewlyStored> {
        let Some(project_id) = items.first().map(|it| it.project_id) else {
            return Ok(NewlyStored::default());
        };
        ends::limit_waits(tx).await?;
        let ids: Vec<_> = items.iter().map(|it| it.id).collect();
        let taken = ends::take(tx, project_id, &ids).await?;
        batches::ends::process(tx, project_id, taken).await
    }
}
