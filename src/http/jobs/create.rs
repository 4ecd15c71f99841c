//! `POST /v1/jobs` and `POST /v1/jobs/batch`.

use axum::{
    Extension,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::Response,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    Job,
    request::{EnqueueRequest, accept, traceparent},
};
use crate::{
    app::App,
    auth::{Caller, Produce},
    domain::{limits, plan::Limits},
    engine::{
        enqueue::{
            self,
            dependencies::{EnqueueOutcome, TiedJob},
            quota,
        },
        jobs,
    },
    error::Error,
    http::{
        error::ErrorBody,
        idempotency::{self, Answer, Ids},
    },
    ids::{JobKey, ProjectId},
    wire::{
        RequestId,
        extract::{Fingerprinted, Object, RequestBody},
        validate::Check,
    },
};

/// Jobs to enqueue together, all or none.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"jobs": [{"job_type": "mail.send", "payload": {"to": "ada@example.com"}}]}))]
pub struct EnqueueBatchRequest {
    /// 1 to 500 jobs.
    #[schema(min_items = 1, max_items = 500, value_type = Vec<EnqueueRequest>)]
    jobs: Vec<Object<EnqueueRequest>>,
}

impl RequestBody for EnqueueBatchRequest {
    const MAX_BYTES: usize = limits::MAX_BATCH_BODY_BYTES;
}

/// Stored jobs, in the order in which they were sent.
#[derive(Debug, Serialize, ToSchema)]
pub struct EnqueueBatchReply {
    /// Stored jobs.
    pub jobs: Vec<Job>,
}

/// Enqueue a job.
///
/// Answers after the job is stored durably; `Location` is its path. With `unique` and
/// `"on_conflict": "return_existing"`, an existing job is returned with 200.
#[utoipa::path(
    post, path = "/jobs", tag = "jobs", operation_id = "jobs_create",
    security(("api_key" = ["produce"]), ("session" = ["member"])),
    request_body = EnqueueRequest,
    params(
        ("Idempotency-Key" = Option<String>, Header, description = "A request repeated with the same key within 24 hours gets the first answer.", max_length = 200),
        ("traceparent" = Option<String>, Header, description = "W3C trace context; the worker gets it."),
    ),
    responses(
        (status = 201, description = "The job is stored.", body = Job,
         headers(("Location" = String, description = "The job's path."), ("Idempotent-Replay" = Option<String>, description = "`true` when this is the answer to an earlier request."))),
        (status = 200, description = "The existing live job with the unique key.", body = Job),
        (status = 400, description = "Invalid request.", body = ErrorBody),
        (status = 401, description = "No valid API key.", body = ErrorBody),
        (status = 409, description = "A parent failed or was cancelled, the unique key is taken, or the idempotency key was used with another request.", body = ErrorBody),
        (status = 413, description = "The body or the payload is too large.", body = ErrorBody),
        (status = 415, description = "The body is not JSON.", body = ErrorBody),
        (status = 503, description = "Try again later.", body = ErrorBody),
    ),
)]
pub async fn create(
    caller: Caller<Produce>,
    State(app): State<App>,
    Extension(request_id): Extension<RequestId>,
    headers: HeaderMap,
    Fingerprinted { mut request, fingerprint }: Fingerprinted<EnqueueRequest>,
) -> Result<Response, Error> {
    let key = idempotency::key(&headers, request.idempotency_key.take().as_deref())?;
    let trace = traceparent(&headers).map(str::to_owned);
    let (running, project_id, limits) = (app.clone(), caller.project_id, caller.limits);
    idempotency::once(&app, &caller, key, &fingerprint, &request_id, async move |ids: Ids| {
        let mut check = Check::default();
        let tied =
            accept((project_id, &limits), ids.job(0), request, trace.as_deref(), &mut check)?;
        check.finish()?;
        quota::admit(&running.engine, project_id, 1, limits.waiting_jobs).await?;
        let stored = store_all(&running, project_id, vec![tied]).await?;
        let Some((job, is_new)) = stored.into_iter().next() else { return Err(Error::InDoubt) };
        let location = Some(format!("/v1/jobs/{}", job.id));
        let status = if is_new { StatusCode::CREATED } else { StatusCode::OK };
        Answer::new(status, location, &job)
    })
    .await
}

/// Enqueue many jobs.
///
/// All are stored, or none: an invalid job is named by its index.
#[utoipa::path(
    post, path = "/jobs/batch", tag = "jobs", operation_id = "jobs_create_batch",
    security(("api_key" = ["produce"]), ("session" = ["member"])),
    request_body = EnqueueBatchRequest,
    params(
        ("Idempotency-Key" = Option<String>, Header, description = "A request repeated with the same key within 24 hours gets the first answer.", max_length = 200),
        ("traceparent" = Option<String>, Header, description = "W3C trace context; the workers get it."),
    ),
    responses(
        (status = 201, description = "All jobs are stored, except those with a taken unique key: for these the existing jobs are returned.", body = EnqueueBatchReply),
        (status = 400, description = "Invalid request; nothing is stored.", body = ErrorBody),
        (status = 401, description = "No valid API key.", body = ErrorBody),
        (status = 409, description = "A parent failed or was cancelled, a unique key is taken, or the idempotency key was used with another request.", body = ErrorBody),
        (status = 413, description = "The body or a payload is too large.", body = ErrorBody),
        (status = 415, description = "The body is not JSON.", body = ErrorBody),
        (status = 503, description = "Try again later.", body = ErrorBody),
    ),
)]
pub async fn create_batch(
    caller: Caller<Produce>,
    State(app): State<App>,
    Extension(request_id): Extension<RequestId>,
    headers: HeaderMap,
    Fingerprinted { request, fingerprint }: Fingerprinted<EnqueueBatchRequest>,
) -> Result<Response, Error> {
    let key = idempotency::key(&headers, None)?;
    let trace = traceparent(&headers).map(str::to_owned);
    let (running, project_id, limits) = (app.clone(), caller.project_id, caller.limits);
    idempotency::once(&app, &caller, key, &fingerprint, &request_id, async move |ids: Ids| {
        let jobs = accept_batch((project_id, &limits), ids, request, trace.as_deref())?;
        quota::admit(&running.engine, project_id, jobs.len(), limits.waiting_jobs).await?;
        let jobs = store_all(&running, project_id, jobs).await?;
        let jobs = jobs.into_iter().map(|it| it.0).collect();
        Answer::new(StatusCode::CREATED, None, &EnqueueBatchReply { jobs })
    })
    .await
}

fn accept_batch(
    tenant: (ProjectId, &Limits),
    ids: Ids,
    request: EnqueueBatchRequest,
    trace: Option<&str>,
) -> Result<Vec<TiedJob>, Error> {
    let (sent, max) = (request.jobs.len(), limits::MAX_ENQUEUE_BATCH_JOBS);
    if !(1..=max).contains(&sent) {
        let message = format!("must have between 1 and {max} entries, has {sent}");
        return Err(Error::invalid("jobs", message));
    }
    let mut check = Check::default();
    let (mut jobs, mut unique_keys) = (Vec::with_capacity(sent), std::collections::HashSet::new());
    for (index, Object(request)) in request.jobs.into_iter().enumerate() {
        let mut item = Check::below(format!("jobs[{index}]."));
        if request.idempotency_key.is_some() {
            item.refuse("idempotency_key", "must be sent as the header of the whole batch");
        }
        let tied = accept(tenant, ids.job(index), request, trace, &mut item)?;
        let unique_key = tied.job.extras.as_ref().and_then(|it| it.unique_key.clone());
        if unique_key.is_some_and(|it| !unique_keys.insert(it)) {
            item.refuse("unique.key", "is the key of an earlier job of this batch");
        }
        jobs.push(tied);
        check.absorb(item);
    }
    check.finish()?;
    Ok(jobs)
}

/// Stores jobs, all or none. Returns each as it is stored, and whether it is new.
async fn store_all(
    app: &App,
    project_id: ProjectId,
    jobs: Vec<TiedJob>,
) -> Result<Vec<(Job, bool)>, Error> {
    let outcomes = enqueue::store(&app.engine, project_id, &jobs).await?;
    let mut stored = Vec::with_capacity(jobs.len());
    for (TiedJob { job, .. }, outcome) in jobs.iter().zip(outcomes) {
        stored.push(match outcome {
            EnqueueOutcome::Stored(it) => (Job::stored(job, &it)?, true),
            EnqueueOutcome::Existing(id) => {
                let row = jobs::find(&app.engine, JobKey { project_id, id }).await?;
                (Job::read(row)?, false)
            }
        });
    }
    Ok(stored)
}
