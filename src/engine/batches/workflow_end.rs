//! Telling endpoints that a workflow has ended: once, and again if retried jobs change how.

use fencepost_domain::{
    ids::{ProjectId, WorkflowId},
    workflow::{self, WorkflowState},
};
use sqlx::PgConnection;

use fencepost_store::{
    outbound::outbound_events::{self, About},
    workflows::{self, StateCount, workflow_ends},
};

/// Writes the event, if the workflow has ended and this end was not told.
pub(super) async fn tell(
    tx: &mut PgConnection,
    project_id: ProjectId,
    id: WorkflowId,
) -> sqlx::Result<()> {
    // Most ends are not the last one, and need no lock.
    if workflow_ends::has_open_jobs(tx, project_id, id).await? {
        return Ok(());
    }
    let Some(row) = workflow_ends::lock(tx, project_id, id).await? else { return Ok(()) };
    let counts = workflows::count_states(tx, project_id, &[id]).await?;
    let members: Vec<_> = counts.iter().filter_map(StateCount::member).collect();
    let state = workflow::state(&members, row.cancelled_at.is_some());
    if state == WorkflowState::Running || row.told_state.as_deref() == Some(state.as_str()) {
        return Ok(());
    }
    let (kind, url) = (format!("workflow.{}", state.as_str()), row.callback_url);
    let about = [About::Workflow(id)];
    if outbound_events::store(tx, project_id, &kind, &about, url.as_deref()).await? {
        workflow_ends::note_told(tx, project_id, id, state.as_str()).await?;
    }
    Ok(())
}
