//! `POST /v1/workers/heartbeat`.

use axum::{Json as Reply, extract::State};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::{accept_fence, accept_job_id};
use crate::{
    app::App,
    auth::Caller,
    engine::{
        heartbeat::{self, Advice, Beat},
        settle::JobKey,
    },
    error::Error,
    http::{
        error::ErrorBody,
        extract::{Json, RequestBody},
        validate::Check,
    },
};

/// A sign of life.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({
    "job_id": "job_01m7w3ha3aextt8pkwwdmxsmqw", "worker_id": "worker-1", "attempt": 1
}))]
pub struct HeartbeatRequest {
    /// The job.
    job_id: String,
    /// The worker that has it.
    #[schema(min_length = 1, max_length = 200)]
    worker_id: String,
    /// The attempt that the poll answered.
    #[schema(minimum = 1)]
    attempt: Option<i32>,
    /// The lease that the poll answered.
    lease_id: Option<Uuid>,
    /// How far the work is.
    #[schema(minimum = 0, maximum = 1)]
    progress: Option<f32>,
}

impl RequestBody for HeartbeatRequest {}

/// What to do next.
#[derive(Debug, Serialize, ToSchema)]
pub struct HeartbeatReply {
    /// Go on, or stop.
    pub status: HeartbeatStatus,
}

/// Go on, or stop.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum HeartbeatStatus {
    /// Go on: the lease is renewed.
    Ok,
    /// The job was called off: stop, and ack it as failed.
    Cancel,
}

/// Keep a lease.
///
/// Renews it by its own length, but never past the job's `timeout_seconds` and 10 s of grace. After
/// a 409 the lease is lost: stop working on the job.
#[utoipa::path(
    post, path = "/workers/heartbeat", tag = "workers", operation_id = "workers_heartbeat",
    request_body = HeartbeatRequest,
    responses(
        (status = 200, description = "The lease is renewed.", body = HeartbeatReply),
        (status = 400, description = "The request cannot be read or breaks a rule.", body = ErrorBody),
        (status = 401, description = "No valid API key.", body = ErrorBody),
        (status = 404, description = "The project has no such job.", body = ErrorBody),
        (status = 409, description = "The lease is not this worker's any more.", body = ErrorBody),
        (status = 413, description = "The body is too large.", body = ErrorBody),
        (status = 415, description = "The body is not JSON.", body = ErrorBody),
        (status = 503, description = "Try again later.", body = ErrorBody),
    ),
)]
pub async fn heartbeat(
    caller: Caller,
    State(app): State<App>,
    Json(request): Json<HeartbeatRequest>,
) -> Result<Reply<HeartbeatReply>, Error> {
    let mut check = Check::default();
    let fence = accept_fence(&mut check, request.worker_id, request.attempt, request.lease_id);
    if let Some(progress) = request.progress {
        check.range("progress", progress, 0.0, 1.0);
    }
    check.finish()?;
    let key = JobKey { project_id: caller.project_id, id: accept_job_id(&request.job_id)? };
    let beat = Beat { key, fence, progress: request.progress };
    let status = match heartbeat::heartbeat(&app.engine, beat).await? {
        Advice::Continue => HeartbeatStatus::Ok,
        Advice::Cancel => HeartbeatStatus::Cancel,
    };
    Ok(Reply(HeartbeatReply { status }))
}
