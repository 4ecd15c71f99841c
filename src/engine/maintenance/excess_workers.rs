//! Deletes the workers of a project that have been silent for longest, if there are more than its
//! plan allows: names that are used once must not fill the table.

use fencepost_domain::{limits::MIN_PROJECT_WORKERS, plan::Plans};
use fencepost_store::{self as store, sweep};

use crate::Engine;

/// Maximum workers deleted by one statement.
const MAX_FORGOTTEN: i64 = 5_000;

/// One pass over all projects. Returns whether there may be more.
///
/// # Errors
/// When the database does not answer.
pub async fn pass(engine: &Engine, plans: &Plans) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let found = sweep::workers::projects_with_more(&mut conn, MIN_PROJECT_WORKERS).await?;
    drop(conn);
    let mut is_more = false;
    for (project_id, workers) in found {
        // The connection is returned in between: other loops wait for it.
        let mut conn = engine.pools.background.acquire().await?;
        let Some(project) = store::people::projects::get(&mut conn, project_id).await? else {
            continue;
        };
        // The strictest limits apply to a plan that this node does not know: they would delete too
        // many.
        if !plans.has(&project.plan) {
            continue;
        }
        let limits = plans.of(&project.plan, project.overrides.as_ref());
        let more = workers - limits.max_workers();
        if more > 0 {
            let some = more.min(MAX_FORGOTTEN);
            let forgotten =
                sweep::workers::forget_silent_workers(&mut conn, project_id, some).await?;
            tracing::debug!(project.id = project_id.0, forgotten, "too many workers");
            is_more |= forgotten == MAX_FORGOTTEN.unsigned_abs();
        }
    }
    Ok(is_more)
}
