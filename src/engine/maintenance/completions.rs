//! The loop over the ends of jobs with callbacks, a batch or a workflow with an endpoint.

use fencepost_domain::ids::ProjectId;
use fencepost_store::{
    faults,
    sweep::{self, set_aside::Work},
    workflows::completions::{self, CompletionKey},
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
    let found = sweep::completions::find(&mut conn).await?;
    let mut is_full = found.len() == sweep::completions::MAX_COMPLETIONS;
    let mut failed = None;
    for of_project in found.chunk_by(|one, other| one.project_id == other.project_id) {
        is_full |= of_project.len() == sweep::completions::MAX_COMPLETIONS_OF_PROJECT;
        // Each project in transactions of its own: a batch may be locked for a moment.
        let processing = isolate::process(engine, &mut conn, &Completions, of_project);
        match faults::around_commit("ends", processing).await {
            Ok(done) => {
                done.iter().for_each(|it| it.publish(engine));
                let project_id = of_project.first().map(|it| it.project_id);
                engine.notifier.notify_endpoints(project_id.into_iter());
            }
            // A batch that stays locked must not stop the other projects.
            Err(error) => failed = Some(error),
        }
    }
    failed.map_or(Ok(is_full), Err)
}

/// Processing what has ended.
struct Completions;

impl Sweep for Completions {
    type Item = CompletionKey;
    type Done = NewlyStored;
    const WORK: Work = Work::Callbacks;

    fn name(item: &CompletionKey) -> (ProjectId, String) {
        (item.project_id, item.id.to_string())
    }

    async fn process(
        &self,
        tx: &mut PgConnection,
        items: &[CompletionKey],
    ) -> sqlx::Result<NewlyStored> {
        let Some(project_id) = items.first().map(|it| it.project_id) else {
            return Ok(NewlyStored::default());
        };
        completions::limit_waits(tx).await?;
        let ids: Vec<_> = items.iter().map(|it| it.id).collect();
        let taken = completions::take(tx, project_id, &ids).await?;
        batches::completions::process(tx, project_id, taken).await
    }
}
