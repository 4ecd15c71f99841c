//! Enqueueing, reading and cancelling jobs.

use std::collections::BTreeMap;

use axum::{
    extract::State,
    http::{HeaderValue, StatusCode, header::LOCATION},
    response::{IntoResponse, Response},
};
use chrono::TimeDelta;
use fencepost_domain::{
    access::Permission,
    actor::ChangedBy,
    error::{Error, JobStatus},
    ids::JobKey,
    job::StoredState,
    lease::Fence,
    limits,
};
use fencepost_engine::{
    enqueue::{self, Enqueued, dependencies::JobWithDependencies},
    jobs::{self, AttemptRow, JobRow, control},
    queues::{self, SettingsChange},
    settle::{self, Ack, ReportedOutcome},
};
use fencepost_web::{
    app::App,
    auth::{Caller, Control, Cost, Produce, ReadPayloads, Who},
    wire::{
        audit::{self, NewAuditEntry},
        extract::Json,
        validate::Check,
    },
};
use serde::Serialize;
use serde_json::json;
use utoipa::ToSchema;

use super::{
    ErrorBody, Reply,
    accept::{Accepted, accept},
    fields::{Fields, Jobs},
    job_id,
    show::JobView,
};
use crate::params::PathParams;

/// One job.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OjsJobReply)]
pub struct JobReply {
    pub job: JobView,
}

/// Many jobs.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OjsJobsReply)]
pub struct JobsReply {
    pub jobs: Vec<JobView>,
    pub count: usize,
}

/// A job with all its details; without its payload, if the caller may not read it.
///
/// # Errors
/// [`Error::JobNotFound`].
pub async fn find(app: &App, who: &Who, key: JobKey) -> Result<JobReply, Error> {
    let (mut row, mut ended) = jobs::find_with_attempts(&app.engine, key).await?;
    if !who.may_read_payloads() {
        row.redact();
        ended.iter_mut().for_each(AttemptRow::redact);
    }
    Ok(JobReply { job: JobView::read(row, &ended)? })
}

/// Enqueue a job.
#[utoipa::path(
    post, path = "/v1/jobs", tag = "jobs", operation_id = "enqueue",
    request_body(content = Object, description = "`type` and `args`, and what else the specification has; `options`."),
    responses(
        (status = 201, description = "The job is stored.", body = JobReply),
        (status = 200, description = "The existing live job with the same `unique` policy.", body = JobReply),
        (status = 409, description = "A job with this id exists, or a live one with the same `unique` policy.", body = ErrorBody),
        (status = 422, description = "The retry policy is invalid.", body = ErrorBody),
    ),
)]
pub async fn create(
    caller: Caller<Produce>,
    State(app): State<App>,
    Json(sent): Json<Fields>,
) -> Result<Response, Error> {
    let tenant = caller.tenant();
    let mut check = Check::default();
    let mut accepted = accept(tenant, sent, &mut check)?;
    check.finish()?;
    limit_queues(&app, &caller, std::slice::from_ref(&accepted)).await?;
    set_expiries(&app, std::slice::from_mut(&mut accepted)).await?;
    let Enqueued { row, is_new } = store(&app, &caller, &accepted).await?;
    let status = if is_new { StatusCode::CREATED } else { StatusCode::OK };
    let job = JobReply { job: shown(&app, &caller, row, is_new).await? };
    let location = HeaderValue::from_str(&format!("/ojs/v1/jobs/{}", job.job.id));
    let mut response = Reply(status, job).into_response();
    if let Ok(location) = location {
        response.headers_mut().insert(LOCATION, location);
    }
    Ok(response)
}

/// Sets the rate limits of queues that jobs ask for, before they are stored.
///
/// # Errors
/// [`Error::Forbidden`] when a limit would change, and the caller may not manage queues.
async fn limit_queues(app: &App, caller: &Caller<Produce>, jobs: &[Accepted]) -> Result<(), Error> {
    let wanted: BTreeMap<&str, i32> = jobs
        .iter()
        .filter_map(|it| Some((it.entry.job.queue.as_str(), it.max_per_second?)))
        .collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let shown = |limit: Option<(i32, i32)>| {
        let (count, per_seconds) = limit?;
        let limit = json!({"count": count, "per_seconds": per_seconds});
        Some(json!({ "rate_limit": limit }).to_string())
    };
    let names: Vec<String> = wanted.keys().map(ToString::to_string).collect();
    for row in queues::find(&app.engine, caller.project_id, &names).await? {
        let limit = wanted.get(row.queue.as_str()).map(|it| (*it, 1));
        let before = row.rate_limit_count.zip(row.rate_limit_per_seconds);
        if limit == before {
            continue;
        }
        if !caller.who.may(Permission::Manage) {
            return Err(Error::Forbidden { needs: Permission::Manage.needs() });
        }
        caller.charge_changes(app, 1).await?;
        let change = SettingsChange { rate_limit: Some(limit), ..SettingsChange::default() };
        queues::change_settings(&app.engine, caller.project_id, &row.queue, &change).await?;
        let (before, after) = (shown(before), shown(limit));
        let entry =
            NewAuditEntry { before, after, ..NewAuditEntry::to("queue.changed", row.queue) };
        audit::note_charged(app, caller, entry).await;
    }
    Ok(())
}

/// Sets the expiry of jobs that count from the present.
pub async fn set_expiries(app: &App, jobs: &mut [Accepted]) -> Result<(), Error> {
    if jobs.iter().all(|it| it.expires_after_ms.is_none()) {
        return Ok(());
    }
    let now = app.engine.now().await?;
    jobs.iter_mut().for_each(|it| it.expire(now));
    Ok(())
}

/// A job after its enqueue; an existing one with its past attempts.
async fn shown(
    app: &App,
    caller: &Caller<Produce>,
    row: JobRow,
    is_new: bool,
) -> Result<JobView, Error> {
    if is_new {
        return JobView::read(row, &[]);
    }
    let key = JobKey { project_id: caller.project_id, id: row.id };
    Ok(find(app, &caller.who, key).await?.job)
}

/// Stores a job. A duplicate that is older than the policy's period does not count: it loses its
/// unique key, and stays live.
async fn store(
    app: &App,
    caller: &Caller<Produce>,
    accepted: &Accepted,
) -> Result<Enqueued, Error> {
    let Accepted { entry, unique_ms, .. } = accepted;
    let once = async || {
        let stored =
            enqueue::store(&app.engine, caller.tenant(), caller.origin(), vec![entry.clone()]);
        stored.await?.pop().ok_or(Error::InDoubt)
    };
    let outcome = once().await;
    let holder = match &outcome {
        Ok(Enqueued { row, is_new: false }) => Some(row.id),
        Err(Error::UniqueConflict { holder, field }) if field.ends_with("unique.key") => *holder,
        _ => None,
    };
    let (Some(holder), Some(period_ms)) = (holder, unique_ms) else { return outcome };
    let key = JobKey { project_id: caller.project_id, id: holder };
    let stored_at = match jobs::find(&app.engine, key).await {
        Ok(row) => row.created_at,
        // It was deleted meanwhile.
        Err(Error::JobNotFound) => return once().await,
        Err(error) => return Err(error),
    };
    if app.engine.now().await? - stored_at < TimeDelta::milliseconds(*period_ms) {
        return outcome;
    }
    control::forget_unique_key(&app.engine, key).await?;
    once().await
}

/// Enqueue many jobs, all or none.
#[utoipa::path(
    post, path = "/v1/jobs/batch", tag = "jobs", operation_id = "enqueue_batch",
    request_body(content = Object, description = "`jobs`: 1 to 500 of them."),
    responses(
        (status = 201, description = "The jobs are stored.", body = JobsReply),
        (status = 409, description = "A job with one of the ids exists, or a live one with the same `unique` policy.", body = ErrorBody),
        (status = 422, description = "A retry policy is invalid.", body = ErrorBody),
    ),
)]
pub async fn create_batch(
    caller: Caller<Produce>,
    State(app): State<App>,
    Json(sent): Json<Jobs>,
) -> Result<Reply<JobsReply>, Error> {
    let tenant = caller.tenant();
    let mut check = Check::default();
    check.count("jobs", sent.jobs.len(), limits::MAX_ENQUEUE_BATCH_JOBS);
    let mut all: Vec<Accepted> = Vec::with_capacity(sent.jobs.len());
    for (index, job) in sent.jobs.into_iter().take(limits::MAX_ENQUEUE_BATCH_JOBS).enumerate() {
        let mut item = Check::below(format!("jobs[{index}]."));
        let accepted = accept(tenant, job, &mut item)?;
        if all.iter().any(|it| it.entry.job.id == accepted.entry.job.id) {
            item.refuse("id", "is the id of an earlier job of this batch");
        }
        all.push(accepted);
        check.absorb(item);
    }
    check.finish()?;
    caller.charge(&app, "jobs", Cost::Items(all.len())).await?;
    limit_queues(&app, &caller, &all).await?;
    set_expiries(&app, &mut all).await?;
    let entries: Vec<JobWithDependencies> = all.into_iter().map(|it| it.entry).collect();
    let mut jobs = Vec::with_capacity(entries.len());
    for Enqueued { row, is_new } in
        enqueue::store(&app.engine, tenant, caller.origin(), entries).await?
    {
        jobs.push(shown(&app, &caller, row, is_new).await?);
    }
    let count = jobs.len();
    Ok(Reply(StatusCode::CREATED, JobsReply { jobs, count }))
}

/// Read a job.
#[utoipa::path(
    get, path = "/v1/jobs/{id}", tag = "jobs", operation_id = "get_job",
    params(("id" = String, Path, description = "The job.")),
    responses(
        (status = 200, description = "The job.", body = JobReply),
        (status = 404, description = "No such job.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<ReadPayloads>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<JobReply>, Error> {
    let key = JobKey { project_id: caller.project_id, id: job_id(params.get("id"))? };
    find(&app, &caller.who, key).await.map(Reply::ok)
}

/// Cancel a job. If a worker holds it, the lease ends immediately.
#[utoipa::path(
    delete, path = "/v1/jobs/{id}", tag = "jobs", operation_id = "cancel_job",
    params(("id" = String, Path, description = "The job.")),
    responses(
        (status = 200, description = "The job, cancelled.", body = JobReply),
        (status = 404, description = "No such job.", body = ErrorBody),
        (status = 409, description = "It has ended.", body = ErrorBody),
    ),
)]
pub async fn cancel(
    caller: Caller<Control>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<JobReply>, Error> {
    let key = JobKey { project_id: caller.project_id, id: job_id(params.get("id"))? };
    let row = jobs::find(&app.engine, key).await?;
    if row.state == StoredState::Cancelled {
        let (state, attempt) = (row.state.public(), row.attempt);
        return Err(Error::InvalidState(JobStatus { state, attempt }));
    }
    cancel_waiting(&app, key, &caller.who.changed_by()).await?;
    find(&app, &caller.who, key).await.map(Reply::ok)
}

/// Cancels a job without waiting for its worker, which loses its lease: in this protocol
/// `cancelled` is final.
///
/// # Errors
/// [`Error::JobNotFound`]. [`Error::InvalidState`] when it has succeeded or is a dead letter.
pub async fn cancel_waiting(app: &App, key: JobKey, by: &ChangedBy) -> Result<(), Error> {
    control::cancel(&app.engine, key, by).await?;
    let row = jobs::find(&app.engine, key).await?;
    if row.state != StoredState::Processing {
        return Ok(());
    }
    let ack = Ack {
        job_id: key.id,
        fence: Fence { attempt: Some(row.attempt), ..Fence::default() },
        end: ReportedOutcome::Released,
        duration_ms: None,
    };
    match settle::ack(&app.engine, key.project_id, ack).await {
        // Its worker was faster: the job has ended.
        Ok(_) | Err(Error::InvalidState(_) | Error::StaleLease(_)) => Ok(()),
        Err(error) => Err(error),
    }
}
