//! Workflows: as a diagram and as a table.

use askama::Template;
use axum::{extract::Path, response::Response};
use fencepost_domain::{error::Error, job::JobState, limits::MAX_PAGE_JOBS};
use fencepost_http::routes::workflows::{Workflow, WorkflowJob, WorkflowPage, WorkflowSummary};

use super::{
    diagram::{self, Graph},
    format,
    location::segment,
    page::{Frame, Here, render},
};

#[derive(Template)]
#[template(path = "workflows.html")]
struct List {
    frame: Frame,
    workflows: Vec<WorkflowSummary>,
    next: Option<String>,
}

/// The workflows, newest first.
pub async fn list(here: Here) -> Result<Response, Error> {
    let (page, _): (WorkflowPage, _) = here.list("/workflows", &[]).await?;
    let frame = here.frame;
    let next = frame.next("/workflows", "", page.next_cursor.as_deref());
    render(&List { frame, workflows: page.workflows, next })
}

#[derive(Template)]
#[template(path = "workflow.html")]
struct Detail {
    frame: Frame,
    workflow: Workflow,
    graph: Graph,
    /// The first dead letters, as many as one bulk operation takes by their ids.
    failed: Vec<String>,
}

/// One workflow, as a diagram and as a table.
pub async fn detail(here: Here, Path((_, id)): Path<(String, String)>) -> Result<Response, Error> {
    let workflow: Workflow = here.get(&format!("/workflows/{}", segment(&id))).await?;
    let is_dead = |it: &&WorkflowJob| it.state == Some(JobState::DeadLetter);
    let failed = workflow.jobs.iter().filter(is_dead).map(|it| it.id.clone());
    let failed = failed.take(MAX_PAGE_JOBS as usize).collect();
    render(&Detail { failed, graph: diagram::graph(&workflow), workflow, frame: here.frame })
}
