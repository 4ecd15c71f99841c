//! `/v1/workers`: register, poll, heartbeat, ack, directives, and taking jobs back.

pub mod ack;
pub mod ack_batch;
pub mod checkpoint;
pub mod heartbeat;
pub mod poll;
pub mod register;
pub mod registry;
pub mod report;
pub mod take_back;
pub mod then_poll;

use axum::{
    http::{HeaderName, HeaderValue},
    response::Response,
};
use fencepost_domain::{
    ids::{JobId, LeaseId, ProjectId},
    lease::Fence,
    limits,
};
use fencepost_engine::queues;

use fencepost_web::{app::App, auth::Who, wire::validate::Check};

/// Reads the fields of a fence of this caller's worker.
fn accept_fence(
    check: &mut Check,
    who: &Who,
    worker_id: String,
    attempt: Option<i32>,
    lease_id: Option<LeaseId>,
) -> Fence {
    check.name("worker_id", &worker_id, limits::MAX_WORKER_ID_CHARS);
    if let Some(attempt) = attempt {
        check.range("attempt", attempt, 1, i32::MAX);
    }
    Fence { worker_id: Some(who.worker(worker_id)), attempt, lease_id }
}

/// A malformed id is answered like an unknown one.
fn accept_job_id(job_id: &str) -> Result<JobId, fencepost_domain::error::Error> {
    job_id.parse().map_err(|_| fencepost_domain::error::Error::JobNotFound.naming(job_id))
}

/// Advice for people in an answer that programs read.
const ADVICE: HeaderName = HeaderName::from_static("fencepost-advice");
/// A queue of the poll has no job on record: its name may be misspelt.
const UNKNOWN_QUEUE: HeaderValue = HeaderValue::from_static("unknown-queue");

/// Advises on queues whose names may be misspelt.
async fn advise(app: &App, project_id: ProjectId, queues: &[String], response: &mut Response) {
    if !queues::never_used(&app.engine, project_id, queues).await.is_empty() {
        response.headers_mut().insert(ADVICE, UNKNOWN_QUEUE);
    }
}
