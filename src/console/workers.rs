//! Workers, workflows and operations: what runs, what belongs together, and what goes on in the background.

use askama::Template;
use axum::{extract::Path, response::Response};

use super::{
    api::segment,
    form::{Fields, encode},
    page::{Frame, Here, render},
    picture::{self, Graph},
    show,
};
use crate::{
    domain::operation::State as OperationState,
    error::Error,
    http::{
        operations::{Operation, OperationPage},
        workers::registry::{WorkerPage, WorkerView},
        workflows::{Workflow, WorkflowPage, WorkflowSummary},
    },
};

#[derive(Template)]
#[template(path = "workers.html")]
struct Workers {
    frame: Frame,
    workers: Vec<WorkerView>,
    asked: Fields,
    next: Option<String>,
}

/// The workers, by name.
pub async fn workers(here: Here) -> Result<Response, Error> {
    let query = here.asked.query(&["queue", "label", "cursor"]);
    let page: WorkerPage = here.get(&format!("/workers?{query}")).await?;
    let Here { frame, asked, .. } = here;
    let next = page.next_cursor.map(|cursor| {
        let filters = asked.query(&["queue", "label"]);
        let separator = if filters.is_empty() { "" } else { "&" };
        frame.to(&format!("/workers?{filters}{separator}{}", encode(&[("cursor", &cursor)])))
    });
    render(&Workers { frame, workers: page.workers, asked, next })
}

impl WorkerView {
    /// The word for what it does now: what it says of itself counts only while it is heard.
    fn shown_state(&self) -> String {
        if self.alive { show::word(&self.state) } else { "gone".to_owned() }
    }
}

#[derive(Template)]
#[template(path = "workflows.html")]
struct Workflows {
    frame: Frame,
    workflows: Vec<WorkflowSummary>,
    next: Option<String>,
}

/// The workflows, newest first.
pub async fn workflows(here: Here) -> Result<Response, Error> {
    let cursor = here.asked.query(&["cursor"]);
    let page: WorkflowPage = here.get(&format!("/workflows?{cursor}")).await?;
    let frame = here.frame;
    let next = page
        .next_cursor
        .map(|cursor| frame.to(&format!("/workflows?{}", encode(&[("cursor", &cursor)]))));
    render(&Workflows { frame, workflows: page.workflows, next })
}

#[derive(Template)]
#[template(path = "workflow.html")]
struct WorkflowDetail {
    frame: Frame,
    workflow: Workflow,
    graph: Graph,
}

/// One workflow, as a picture and as a table.
pub async fn workflow(
    here: Here,
    Path((_, id)): Path<(String, String)>,
) -> Result<Response, Error> {
    let workflow: Workflow = here.get(&format!("/workflows/{}", segment(&id))).await?;
    render(&WorkflowDetail { graph: picture::graph(&workflow), workflow, frame: here.frame })
}

#[derive(Template)]
#[template(path = "operations.html")]
struct Operations {
    frame: Frame,
    operations: Vec<Operation>,
    next: Option<String>,
}

/// The operations, newest first.
pub async fn operations(here: Here) -> Result<Response, Error> {
    let cursor = here.asked.query(&["cursor"]);
    let page: OperationPage = here.get(&format!("/operations?{cursor}")).await?;
    let frame = here.frame;
    let next = page
        .next_cursor
        .map(|cursor| frame.to(&format!("/operations?{}", encode(&[("cursor", &cursor)]))));
    render(&Operations { frame, operations: page.operations, next })
}

#[derive(Template)]
#[template(path = "operation.html")]
struct OperationDetail {
    frame: Frame,
    operation: Operation,
}

/// One operation.
pub async fn operation(
    here: Here,
    Path((_, id)): Path<(String, String)>,
) -> Result<Response, Error> {
    let operation: Operation = here.get(&format!("/operations/{}", segment(&id))).await?;
    render(&OperationDetail { frame: here.frame, operation })
}

impl Operation {
    /// Whether it goes on.
    fn is_running(&self) -> bool {
        self.state == OperationState::Running
    }

    /// How far it has come, in hundredths; none: nobody has counted how far it goes.
    fn percent(&self) -> Option<i64> {
        let whole = self.expected.or(self.max)?;
        let dealt_with = self.done + self.skipped;
        Some(if self.state == OperationState::Succeeded {
            100
        } else {
            show::percent(dealt_with, whole)
        })
    }

    /// What it does, in words.
    fn verb(&self) -> &'static str {
        match self.kind.as_str() {
            "queue_purge" => "Purge a queue",
            "dead_letters_retry" => "Retry dead letters",
            "dead_letters_purge" => "Delete dead letters",
            "jobs_cancel" => "Cancel jobs",
            "jobs_retry" => "Retry jobs",
            _ => "Something newer than this console",
        }
    }

    /// Which jobs it deals with, in words.
    fn filter_words(&self) -> String {
        let parts = self.filter.as_object().into_iter().flatten().map(|(name, value)| {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            format!("{} {value}", show::words(name))
        });
        let parts: Vec<_> = parts.collect();
        if parts.is_empty() { "all".to_owned() } else { parts.join(", ") }
    }

    fn state_word(&self) -> &'static str {
        match self.state {
            OperationState::Running => "running",
            OperationState::Succeeded => "succeeded",
            OperationState::Aborted => "aborted",
            OperationState::Failed => "failed",
        }
    }
}
