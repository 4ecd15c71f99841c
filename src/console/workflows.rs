//! Workflows: as a diagram and as a table.

use askama::Template;
use axum::{extract::Path, response::Response};

use super::{
    diagram::{self, Graph},
    format,
    location::segment,
    page::{Frame, Here, render},
};
use crate::{
    error::Error,
    http::workflows::{Workflow, WorkflowPage, WorkflowSummary},
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
}

/// One workflow, as a diagram and as a table.
pub async fn detail(here: Here, Path((_, id)): Path<(String, String)>) -> Result<Response, Error> {
    let workflow: Workflow = here.get(&format!("/workflows/{}", segment(&id))).await?;
    render(&Detail { graph: diagram::graph(&workflow), workflow, frame: here.frame })
}
