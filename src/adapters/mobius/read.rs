//! Reading attempts and workers.

use axum::{Json as Reply, extract::State};
use chrono::{DateTime, TimeDelta, Utc};
use fencepost_domain::{error::Error, ids::JobKey, limits};
use fencepost_engine::{
    jobs::{self, AttemptRow, JobRow, Payloads},
    workers::{self, WorkerRow},
};
use fencepost_web::{
    app::App,
    auth::{Caller, Read, ReadPayloads},
    wire::validate::stored_json,
};
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::ErrorBody;
use crate::{
    attempt::{self, AttemptId, Stage},
    params::PathParams,
    work,
};

/// A worker counts as stale after this time without a call: the protocol's own number.
const STALE_AFTER: TimeDelta = TimeDelta::minutes(2);

/// An attempt of a job.
#[derive(Debug, Serialize, ToSchema)]
pub struct Job {
    /// Id of the job and its attempt.
    id: String,
    /// Id of the workflow, or of the job if it has none.
    run_id: String,
    /// Key of the job in its workflow, or its type.
    step_name: String,
    /// Type of the job.
    action: String,
    /// Queue.
    queue: String,
    /// Payload; absent in lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    parameters: Option<Box<RawValue>>,
    /// State of the attempt.
    status: Status,
    /// Worker of the attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    claimed_by: Option<String>,
    /// Time when that worker claimed the job.
    #[serde(skip_serializing_if = "Option::is_none")]
    claimed_at: Option<DateTime<Utc>>,
    /// Number of the attempt.
    attempt: i32,
    /// Failures after which the job is dead-lettered.
    max_attempts: i32,
    /// When it may run, or could run.
    scheduled_at: DateTime<Utc>,
    /// Error of a failed attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<String>,
    /// Result of a completed attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    result: Option<Box<RawValue>>,
    /// When the job was stored.
    created_at: DateTime<Utc>,
    /// When the attempt last changed its state.
    updated_at: DateTime<Utc>,
}

/// State of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Pending,
    Claimed,
    Completed,
    Failed,
}

impl Status {
    fn of(stage: &Stage<'_>) -> Self {
        match stage {
            Stage::Pending => Self::Pending,
            Stage::Claimed => Self::Claimed,
            Stage::Completed => Self::Completed,
            Stage::Failed(_) => Self::Failed,
        }
    }
}

impl Job {
    /// One attempt of a job, which was read with its payload or without.
    ///
    /// # Errors
    /// [`Error::JobNotFound`] when the job neither had nor waits for that attempt.
    pub fn of(
        attempt: i32,
        row: JobRow,
        ended: &[AttemptRow],
        payloads: Payloads,
    ) -> Result<Self, Error> {
        let stage = attempt::stage(attempt, &row, ended)?;
        let status = Status::of(&stage);
        let past = if let Stage::Failed(past) = stage { past } else { None };
        let is_held = matches!(status, Status::Claimed | Status::Completed);
        let claimed_at = past.map(|it| it.claimed_at).or(row.claimed_at.filter(|_| is_held));
        // The job's own time is that of its next attempt; the first one's is not kept.
        let due = ended.iter().rev().find(|it| it.attempt < attempt).and_then(|it| it.retry_at);
        let ended_at = past.map(|it| it.ended_at).or(row.completed_at);
        let last_error = match (status, past) {
            (Status::Failed, Some(past)) => Some(attempt::reason(past)),
            (Status::Failed, None) => Some("cancelled".to_owned()),
            _ => None,
        };
        Ok(Self {
            id: AttemptId { job_id: row.id, attempt }.to_string(),
            run_id: row.workflow_id.map_or(row.id.to_string(), |it| it.to_string()),
            step_name: row.workflow_key.unwrap_or_else(|| row.job_type.clone()),
            action: row.job_type,
            queue: row.queue,
            parameters: match payloads {
                Payloads::Shown => Some(work::object(&row.payload)?),
                Payloads::LeftOut => None,
            },
            status,
            claimed_by: past.map(|it| it.worker_id.clone()).or(row.worker_id.filter(|_| is_held)),
            claimed_at,
            attempt,
            max_attempts: row.max_attempts,
            scheduled_at: past
                .filter(|it| it.retry_at.is_some())
                .map_or(row.run_at, |_| due.unwrap_or(row.created_at)),
            last_error,
            result: row
                .result
                .filter(|_| status == Status::Completed)
                .map(stored_json)
                .transpose()?,
            created_at: row.created_at,
            updated_at: ended_at.or(claimed_at).unwrap_or(row.created_at),
        })
    }
}

/// Read an attempt of a job.
#[utoipa::path(
    get, path = "/v1/projects/{project}/jobs/{id}", tag = "Jobs", operation_id = "getJob",
    params(
        ("project" = String, Path, description = "The key's project: its id or slug."),
        ("id" = String, Path, description = "The job and its attempt; or the job alone, for its latest."),
    ),
    responses(
        (status = 200, description = "The attempt.", body = Job),
        (status = 404, description = "No such job.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<ReadPayloads>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<Job>, Error> {
    let named = params.get("id");
    let (id, attempt) = match named.parse::<AttemptId>() {
        Ok(AttemptId { job_id, attempt }) => (job_id, Some(attempt)),
        Err(error) => (named.parse().map_err(|_| error)?, None),
    };
    let key = JobKey { project_id: caller.project_id, id };
    let (row, ended) = jobs::find_with_attempts(&app.engine, key).await?;
    let attempt = attempt.unwrap_or_else(|| attempt::latest_attempt(&row, &ended));
    Job::of(attempt, row, &ended, Payloads::Shown).map(Reply)
}

/// A list of workers.
#[derive(Debug, Serialize, ToSchema)]
pub struct WorkerPage {
    /// Workers by name; the first 200.
    items: Vec<Worker>,
}

/// A worker.
#[derive(Debug, Serialize, ToSchema)]
pub struct Worker {
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    /// When it was last heard, to within a few seconds.
    last_seen_at: DateTime<Utc>,
    /// Job types that it polls for; empty if it takes any.
    capabilities: Vec<String>,
    /// Whether it was silent for more than two minutes.
    stale: bool,
}

impl From<WorkerRow> for Worker {
    fn from(row: WorkerRow) -> Self {
        Self {
            stale: row.now - row.last_seen_at > STALE_AFTER,
            id: row.worker_id,
            name: row.hostname,
            version: row.sdk_version,
            last_seen_at: row.last_seen_at,
            capabilities: row.job_types,
        }
    }
}

/// List workers.
#[utoipa::path(
    get, path = "/v1/projects/{project}/workers", tag = "Workers", operation_id = "listWorkers",
    params(("project" = String, Path, description = "The key's project: its id or slug.")),
    responses((status = 200, description = "The workers.", body = WorkerPage)),
)]
pub async fn workers(
    caller: Caller<Read>,
    State(app): State<App>,
) -> Result<Reply<WorkerPage>, Error> {
    let limit = limits::MAX_PAGE_WORKERS.into();
    let rows = workers::page(&app.engine, caller.project_id, None, None, "", limit).await?;
    Ok(Reply(WorkerPage { items: rows.into_iter().map(Worker::from).collect() }))
}
