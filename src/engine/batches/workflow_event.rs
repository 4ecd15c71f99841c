//! The event of a completed workflow: once, and again if retried jobs change its state.

use fencepost_domain::{
    ids::{ProjectId, WorkflowId},
    workflow::{self, WorkflowState},
};
use sqlx::PgConnection;

use fencepost_store::{
    outbound::outbound_events::{self, About, NewEvent},
    workflows::{self, StateCount, workflow_events},
};

/// Writes the event, if the workflow has ended and this state was not sent. `hop`: how many
/// deliveries have led to one of its jobs.
pub(super) async fn store_event(
    tx: &mut PgConnection,
    project_id: ProjectId,
    (id, hop): (WorkflowId, Option<i16>),
) -> sqlx::Result<()> {
    // Most ends are not the last one, and need no lock.
    if workflow_events::has_open_jobs(tx, project_id, id).await? {
        return Ok(());
    }
    let Some(row) = workflow_events::lock(tx, project_id, id).await? else { return Ok(()) };
    let counts = workflows::count_states(tx, project_id, &[id]).await?;
    let members: Vec<_> = counts.iter().filter_map(StateCount::member).collect();
    let state = workflow::state(&members, row.cancelled_at.is_some());
    if state == WorkflowState::Running || row.told_state.as_deref() == Some(state.as_str()) {
        return Ok(());
    }
    let (kind, url) = (format!("workflow.{}", state.as_str()), row.callback_url);
    let about = &[About::Workflow(id)];
    let event = NewEvent { kind: &kind, about, url: url.as_deref(), hop };
    if outbound_events::store(tx, project_id, event).await? {
        workflow_events::note_notified(tx, project_id, id, state.as_str()).await?;
    }
    Ok(())
}
