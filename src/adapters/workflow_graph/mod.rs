//! workflow-graph custom workers: register, claim, heartbeat, logs, complete, fail; and workflows.
//!
//! What the protocol lacks: jobs are unique within a workflow only, so a workflow's job is named by
//! its key there, and a job without a workflow is a workflow of one, both with the job's own id. A
//! lease id names job, attempt and lease, and is the fence; which worker sends it is not checked.
//! Its workers run shell commands: jobs whose payload is neither a string nor an object with a
//! string `command` are not offered. It has no queues, so all queues are claimed from, and no
//! waits, so claims answer immediately. Workflows are stored first and run later, possibly several
//! times.

mod logs;
mod make;
mod work;
mod workers;
mod workflows;

use std::{collections::BTreeMap, fmt, str::FromStr};

use fencepost_domain::{
    error::{Error, JobStatus},
    ids::{JobId, JobKey, LeaseId, ProjectId, WorkflowId},
    job::JobState,
    lease::Fence,
};
use fencepost_engine::{Engine, jobs};
use fencepost_web::{
    app::App,
    wire::{produced::ProducedText, routes::routes},
};
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::{OpenApi, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use uuid::Uuid;

use super::{Adapter, plain_errors};

/// Default length of a lease: the protocol's own number.
pub const DEFAULT_LEASE_SECONDS: i32 = 30;

pub(super) const ADAPTER: Adapter = Adapter {
    name: "workflow-graph",
    routes,
    also_below: &[],
    render_error: plain_errors::render_plain,
    media_type: "application/json",
    document: WorkflowGraphDocument::openapi,
    error_schema: "ErrorBody",
};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Fencepost: workflow-graph custom workers",
        description = "The worker protocol of workflow-graph, for workers written for it, with its workflows.",
        license(name = "MIT OR Apache-2.0", identifier = "MIT OR Apache-2.0"),
    ),
    tags(
        (name = "workers", description = "Register, claim, heartbeat, push logs, complete and fail."),
        (name = "workflows", description = "Workflows, their runs, and the logs of their jobs."),
    )
)]
struct WorkflowGraphDocument;

fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(workers::register))
        .routes(routes!(workers::beat))
        .routes(routes!(workers::list))
        .routes(routes!(work::claim))
        .routes(routes!(work::heartbeat))
        .routes(routes!(logs::push))
        .routes(routes!(work::cancelled))
        .routes(routes!(work::complete))
        .routes(routes!(work::fail))
        .routes(routes!(workflows::list, make::create))
        .routes(routes!(make::sample))
        .routes(routes!(workflows::status))
        .routes(routes!(workflows::run))
        .routes(routes!(workflows::cancel))
        .routes(routes!(logs::list))
        .routes(routes!(logs::stream))
}

/// State of a job of a workflow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Waiting.
    Queued,
    /// Leased by a worker.
    Running,
    /// Succeeded.
    Success,
    /// Dead-lettered.
    Failure,
    /// Cancelled because a parent was dead-lettered or skipped.
    Skipped,
    /// Cancelled.
    Cancelled,
}

impl Status {
    /// A job's state in this protocol's words. Only its parents show whether a job was skipped.
    fn of(state: JobState) -> Self {
        match state {
            JobState::Scheduled | JobState::Pending => Self::Queued,
            JobState::Processing => Self::Running,
            JobState::Succeeded => Self::Success,
            JobState::DeadLetter => Self::Failure,
            JobState::Cancelled => Self::Cancelled,
        }
    }
}

/// A lease: its job, its attempt, and its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LeaseName {
    job_id: JobId,
    attempt: i32,
    lease_id: LeaseId,
}

impl fmt::Display for LeaseName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.job_id, self.attempt, self.lease_id.0)
    }
}

impl FromStr for LeaseName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let mut parts = text.split('.');
        let read = (|| {
            let job_id = parts.next()?.parse().ok()?;
            let attempt = parts.next()?.parse().ok()?;
            let lease_id = LeaseId(parts.next()?.parse::<Uuid>().ok()?);
            parts.next().is_none().then_some(Self { job_id, attempt, lease_id })
        })();
        read.ok_or_else(lost)
    }
}

impl LeaseName {
    fn fence(self) -> Fence {
        Fence { worker_id: None, attempt: Some(self.attempt), lease_id: Some(self.lease_id) }
    }

    fn key(self, project_id: ProjectId) -> JobKey {
        JobKey { project_id, id: self.job_id }
    }
}

/// An unknown lease is answered like a lost one: the protocol has one error for both, and shows
/// nothing of the job.
fn lost() -> Error {
    Error::StaleLease(JobStatus { state: JobState::Cancelled, attempt: 0 })
}

/// The same for a job that does not exist any more.
fn or_lost(error: Error) -> Error {
    match error {
        Error::JobNotFound => lost(),
        other => other,
    }
}

/// The ids of a job in this protocol: its workflow and its key there, or its own id twice.
fn params(
    id: JobId,
    workflow_id: Option<WorkflowId>,
    workflow_key: Option<&str>,
) -> (String, String) {
    match (workflow_id, workflow_key) {
        (Some(workflow_id), Some(key)) => (workflow_id.to_string(), key.to_owned()),
        _ => (id.to_string(), id.to_string()),
    }
}

/// The job with these two ids.
async fn find_job(
    engine: &Engine,
    project_id: ProjectId,
    workflow: &str,
    job: &str,
) -> Result<JobKey, Error> {
    let id = match workflow.parse::<WorkflowId>() {
        Ok(workflow_id) => jobs::find_in_workflow(engine, project_id, workflow_id, job).await?,
        Err(_) if workflow == job => job.parse().map_err(|_| Error::JobNotFound)?,
        Err(_) => return Err(Error::JobNotFound),
    };
    Ok(JobKey { project_id, id })
}

/// The command of a payload: itself, or a field of it. The rest of the payload is not parsed: it
/// may be JSON that no program can hold. Invalid text is shown with replacement characters.
fn command(payload: &str) -> Option<String> {
    let payload = payload.trim_start();
    let command = if payload.starts_with('"') {
        payload.to_owned()
    } else {
        let mut fields: BTreeMap<String, Box<RawValue>> = serde_json::from_str(payload).ok()?;
        fields.remove("command")?.get().to_owned()
    };
    if !command.starts_with('"') {
        return None;
    }
    serde_json::from_str::<ProducedText>(&command).ok().map(ProducedText::into_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leases_name_reads_back_as_it_was_written() {
        let name = LeaseName {
            job_id: JobId::generate(),
            attempt: 2,
            lease_id: LeaseId(Uuid::from_u128(7)),
        };
        assert_eq!(name.to_string().parse().ok(), Some(name));
        for odd in ["", "x", "job_x.1.y", &format!("{name}.z")] {
            assert!(odd.parse::<LeaseName>().is_err(), "{odd}");
        }
    }

    #[test]
    fn a_payload_is_a_command_or_has_one() {
        assert_eq!(command(r#""ls""#).as_deref(), Some("ls"));
        assert_eq!(command(r#"{"command": ""}"#).as_deref(), Some(""));
        assert_eq!(command(r#"{"command": 1}"#), None);
        assert_eq!(command(r#"{"cmd": "ls"}"#), None);
        assert_eq!(command("[]"), None);
        assert_eq!(command(r#"{"command": "ls", "n": 1e999}"#).as_deref(), Some("ls"));
        assert_eq!(command(r#""\ud800""#).as_deref(), Some("\u{fffd}"), "it is no text");
    }
}
