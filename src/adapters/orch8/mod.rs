//! Orch8 external workers: poll, complete, fail, heartbeat, and reading tasks.
//!
//! What the protocol lacks: a worker shows nothing but the task's id, so an id names a job and an
//! attempt (`task_…-2`) and is the fence; `worker_id` and `claim_epoch`, the attempt, are checked
//! if they are sent. A worker without a name holds its lease under a generated one. Two generations
//! of the protocol are distinguished by their fields: `handler_names` and `batch_size` wait and
//! return one task, `handler_name` and `limit` return a list immediately. There is no state for a
//! cancelled job: a heartbeat's answer has `cancelled`, which its own clients do not read. A
//! sequence of steps is sent with the instance that runs it, or stored before. Blocks of other
//! kinds than `step` and `try_catch` are native workflows.

mod fleet;
mod instances;
mod read;
mod sequence;
mod sequences;
mod settle;
mod work;

use fencepost_domain::{error::Error, ids::JobId, job::JobState};
use fencepost_web::{app::App, wire::routes::routes};
pub use sequence::{MAX_JOBS, MAX_STEPS};
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;

use super::{Adapter, attempt::AttemptId, plain_errors};

/// Length of a lease without heartbeats: the protocol's own number.
pub const LEASE_SECONDS: i32 = 60;
/// How long a poll of the first shape waits: the protocol's own number.
pub const WAIT_SECONDS: u64 = 30;
/// Prefix of tasks' ids.
const TASK_PREFIX: &str = "task_";

pub(super) const ADAPTER: Adapter = Adapter {
    name: "orch8",
    routes,
    also_below: &["/api/v1"],
    render_error: plain_errors::render_plain,
    media_type: "application/json",
    document: Orch8Document::openapi,
    error_schema: "ErrorBody",
};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Fencepost: Orch8 external workers",
        description = "The worker protocol of Orch8, for workers written for it. All paths also answer below \
            `/api/v1`. Jobs come from instances, native enqueues and workflows; a task's id names a job and an attempt.",
        license(name = "MIT OR Apache-2.0", identifier = "MIT OR Apache-2.0"),
    ),
    tags(
        (name = "instances", description = "Sequences of steps."),
        (name = "tasks", description = "Register, poll, heartbeat, ack and report."),
        (name = "system", description = "Workers, handlers, and health."),
    )
)]
struct Orch8Document;

fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(work::poll))
        .routes(routes!(work::poll_queue))
        .routes(routes!(settle::complete))
        .routes(routes!(settle::fail))
        .routes(routes!(work::heartbeat))
        .routes(routes!(read::list))
        .routes(routes!(read::stats))
        .routes(routes!(read::attempts))
        .routes(routes!(sequences::create, sequences::list))
        .routes(routes!(sequences::by_name))
        .routes(routes!(sequences::versions))
        .routes(routes!(sequences::get, sequences::delete))
        .routes(routes!(instances::create))
        .routes(routes!(instances::get))
        .routes(routes!(fleet::workers))
        .routes(routes!(fleet::handlers))
        .routes(routes!(fleet::live))
        .routes(routes!(fleet::ready))
}

/// A job's state in this protocol's words.
fn state_name(state: JobState) -> &'static str {
    match state {
        JobState::Scheduled | JobState::Pending => "pending",
        JobState::Processing => "claimed",
        JobState::Succeeded => "completed",
        JobState::DeadLetter | JobState::Cancelled => "failed",
    }
}

/// The id of a job's attempt in this protocol.
fn task_id(job_id: JobId, attempt: i32) -> String {
    let id = AttemptId { job_id, attempt }.to_string();
    format!("{TASK_PREFIX}{}", id.strip_prefix(JobId::PREFIX).unwrap_or_default())
}

/// The job and attempt with a task's id. A malformed id is answered like an unknown one.
fn read_task_id(text: &str) -> Result<AttemptId, Error> {
    let rest = text.strip_prefix(TASK_PREFIX).ok_or(Error::JobNotFound)?;
    format!("{}{rest}", JobId::PREFIX).parse()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tasks_id_reads_back_as_it_was_written() {
        let id = AttemptId { job_id: JobId::generate(), attempt: 3 };
        assert_eq!(read_task_id(&task_id(id.job_id, id.attempt)).ok(), Some(id));
        assert!(read_task_id(&id.to_string()).is_err());
    }
}
