//! Runs: a workflow, or a single job, with its jobs and its action log.

use axum::{Json as Reply, extract::State};
use chrono::{DateTime, Utc};
use fencepost_domain::{error::Error, ids::JobId, job::StoredState, limits};
use fencepost_engine::jobs::{self, AttemptRow, JobRow, Payloads, workflows};
use fencepost_web::{
    app::App,
    auth::{Caller, ReadPayloads},
};
use serde::Serialize;
use utoipa::ToSchema;

use super::{ErrorBody, read::Job};
use crate::{
    attempt::{self, AttemptId},
    params::PathParams,
};

/// Attempts read for each job of a list: the latest, and the one before it, which says when the
/// latest was due.
const ATTEMPTS_OF_LISTED: i64 = 2;
// Those of a whole workflow are read: without its last attempt, a dead letter could not be shown.
const _: () =
    assert!(ATTEMPTS_OF_LISTED * limits::MAX_WORKFLOW_JOBS as i64 <= limits::MAX_SHOWN_ATTEMPTS);
/// The protocol has branches in a run; ours have one.
const BRANCH: &str = "main";

/// The jobs of a run.
#[derive(Debug, Serialize, ToSchema)]
pub struct JobList {
    /// The latest attempt of each job, without `parameters` and `result`, which can be large: read
    /// the job for them.
    items: Vec<Job>,
}

/// The action log of a run.
#[derive(Debug, Serialize, ToSchema)]
pub struct ActionLog {
    /// Ended attempts in the order in which they started; of those that failed, the newest 1,000.
    items: Vec<ActionLogEntry>,
}

/// An ended attempt.
#[derive(Debug, Serialize, ToSchema)]
pub struct ActionLogEntry {
    /// Id of the job and its attempt: read the job for its parameters and result.
    #[schema(example = "job_01m7w3ha3aextt8pkwwdmxsmqw-1")]
    id: String,
    /// Type of the job.
    action: String,
    /// Key of the job in its workflow, or its type.
    step_name: String,
    /// Always `main`.
    branch_id: &'static str,
    /// Why it failed; absent if it succeeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// When a worker claimed it.
    started_at: DateTime<Utc>,
    /// Milliseconds from the claim to the end.
    duration_ms: i64,
}

impl ActionLogEntry {
    fn of(
        job: &JobRow,
        attempt: i32,
        span: (DateTime<Utc>, DateTime<Utc>),
        error: Option<String>,
    ) -> Self {
        let (started_at, ended_at) = span;
        Self {
            id: AttemptId { job_id: job.id, attempt }.to_string(),
            action: job.job_type.clone(),
            step_name: job.workflow_key.clone().unwrap_or_else(|| job.job_type.clone()),
            branch_id: BRANCH,
            error,
            started_at,
            duration_ms: (ended_at - started_at).num_milliseconds(),
        }
    }

    /// The attempt with which a job succeeded; none if it has not.
    fn of_success(job: &JobRow) -> Option<Self> {
        let span = (job.claimed_at?, job.completed_at?);
        (job.state == StoredState::Succeeded).then(|| Self::of(job, job.attempt, span, None))
    }
}

/// List the jobs of a run.
#[utoipa::path(
    get, path = "/v1/projects/{project}/runs/{id}/jobs", tag = "Runs", operation_id = "listRunJobs",
    params(
        ("project" = String, Path, description = "The key's project: its id or slug."),
        ("id" = String, Path, description = "The `run_id` of a claim: a workflow or a single job."),
    ),
    responses(
        (status = 200, description = "The jobs.", body = JobList),
        (status = 404, description = "No such run.", body = ErrorBody),
    ),
)]
pub async fn jobs_of_run(
    caller: Caller<ReadPayloads>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<JobList>, Error> {
    let (rows, ended) = read(&app, &caller, &params, ATTEMPTS_OF_LISTED).await?;
    let items = rows.into_iter().map(|row| {
        let own: Vec<_> = attempts_of(&ended, row.id).cloned().collect();
        Job::of(attempt::latest_attempt(&row, &own), row, &own, Payloads::LeftOut)
    });
    Ok(Reply(JobList { items: items.collect::<Result<_, _>>()? }))
}

/// Read the action log of a run.
#[utoipa::path(
    get, path = "/v1/projects/{project}/runs/{id}/action-log", tag = "Runs",
    operation_id = "listRunActionLog",
    params(
        ("project" = String, Path, description = "The key's project: its id or slug."),
        ("id" = String, Path, description = "The `run_id` of a claim: a workflow or a single job."),
    ),
    responses(
        (status = 200, description = "The action log.", body = ActionLog),
        (status = 404, description = "No such run.", body = ErrorBody),
    ),
)]
pub async fn action_log(
    caller: Caller<ReadPayloads>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<ActionLog>, Error> {
    let (rows, ended) = read(&app, &caller, &params, limits::MAX_SHOWN_ATTEMPTS).await?;
    let mut items: Vec<_> = rows.iter().filter_map(ActionLogEntry::of_success).collect();
    for row in &rows {
        items.extend(attempts_of(&ended, row.id).map(|attempt| {
            let span = (attempt.claimed_at, attempt.ended_at);
            ActionLogEntry::of(row, attempt.attempt, span, Some(attempt::reason(attempt)))
        }));
    }
    items.sort_by(|a, b| (a.started_at, &a.id).cmp(&(b.started_at, &b.id)));
    Ok(Reply(ActionLog { items }))
}

fn attempts_of(
    ended: &[(JobId, AttemptRow)],
    job_id: JobId,
) -> impl Iterator<Item = &AttemptRow> + use<'_> {
    ended.iter().filter(move |it| it.0 == job_id).map(|it| &it.1)
}

/// The jobs of a run in the order of their creation, and their attempts that did not succeed.
async fn read(
    app: &App,
    caller: &Caller<ReadPayloads>,
    params: &PathParams,
    per_job: i64,
) -> Result<(Vec<JobRow>, Vec<(JobId, AttemptRow)>), Error> {
    let (project_id, run) = (caller.project_id, params.get("id"));
    let ids: Vec<JobId> = if let Ok(id) = run.parse() {
        let (_, jobs) = workflows::find(&app.engine, project_id, id).await?;
        jobs.into_iter().map(|it| it.id).collect()
    } else {
        vec![run.parse().map_err(|_| Error::WorkflowNotFound)?]
    };
    let found = jobs::find_all_with_attempts(&app.engine, project_id, &ids, per_job).await?;
    let (mut rows, ended) = found;
    if rows.is_empty() {
        return Err(Error::WorkflowNotFound);
    }
    rows.sort_by_key(|it| it.id);
    Ok((rows, ended))
}
