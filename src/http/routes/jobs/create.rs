//! `POST /v1/jobs` and `POST /v1/jobs/batch`.

use axum::{
    extract::State,
    http::{HeaderMap, StatusCode},
    response::Response,
};
use fencepost_domain::{error::Error, limits, plan::Tenant};
use fencepost_engine::enqueue::{self, Enqueued, dependencies::JobWithDependencies};
use fencepost_store::connection::deadline::detached_in;
use fencepost_web::{
    app::App,
    auth::{Bound, Caller, Cost, Produce},
    wire::{
        extract::{Object, RequestBody},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    Job,
    request::{EnqueueRequest, accept, traceparent},
};
use crate::{
    error::ErrorBody,
    idempotency::{self, Answer, Ids, Once, Repeat},
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
        idempotency::Header,
        ("traceparent" = Option<String>, Header, description = "W3C trace context; the worker gets it."),
        ("Fencepost-Hop" = Option<i16>, Header, description = "Copy this header from the webhook delivery that caused this request."),
    ),
    responses(
        (status = 201, description = "The job is stored.", body = Job,
         headers(("Location" = String, description = "The job's path."))),
        (status = 200, description = "The existing live job with the unique key.", body = Job),
        (status = 409, description = "A parent failed or was cancelled, the unique key is taken, or the idempotency key was used with another request.", body = ErrorBody),
    ),
)]
pub async fn create(
    caller: Caller<Bound<Produce>>,
    State(app): State<App>,
    headers: HeaderMap,
    Once { mut request, repeat }: Once<EnqueueRequest>,
) -> Result<Response, Error> {
    let repeat = repeat.or_key(request.idempotency_key.take())?;
    let trace = traceparent(&headers).map(str::to_owned);
    if repeat.has_key() {
        // Its key is written with statements of its own.
        let tasks = app.engine.tasks.clone();
        return detached_in(&tasks, create_once(caller, app, request, repeat, trace)).await?;
    }
    create_once(caller, app, request, repeat, trace).await
}

async fn create_once(
    caller: Caller<Bound<Produce>>,
    app: App,
    mut request: EnqueueRequest,
    repeat: Repeat,
    trace: Option<String>,
) -> Result<Response, Error> {
    caller.charge(&app, "on_complete", Cost::Items(request.jobs())).await?;
    let (running, origin, tenant) = (app.clone(), caller.origin(), caller.tenant());
    repeat
        .once(&app, &caller, async move |ids: Ids| {
            let mut check = Check::default();
            let to_check = request.take_check(String::new());
            let entry = accept(tenant, ids.job(0), request, trace.as_deref(), &mut check)?;
            check.finish()?;
            let origin = origin.checking(to_check.into_iter().collect());
            let mut stored = enqueue::store(&running.engine, tenant, origin, vec![entry]).await?;
            let Enqueued { row, is_new } = stored.pop().ok_or(Error::InDoubt)?;
            let status = if is_new { StatusCode::CREATED } else { StatusCode::OK };
            Ok(Answer::job(status, Job::read(row)?))
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
        idempotency::Header,
        ("traceparent" = Option<String>, Header, description = "W3C trace context; the workers get it."),
        ("Fencepost-Hop" = Option<i16>, Header, description = "Copy this header from the webhook delivery that caused this request."),
    ),
    responses(
        (status = 201, description = "All jobs are stored, except those with a taken unique key: for these the existing jobs are returned.", body = EnqueueBatchReply),
        (status = 400, description = "Invalid request; nothing is stored.", body = ErrorBody),
        (status = 409, description = "A parent failed or was cancelled, a unique key is taken, or the idempotency key was used with another request.", body = ErrorBody),
    ),
)]
pub async fn create_batch(
    caller: Caller<Bound<Produce>>,
    State(app): State<App>,
    headers: HeaderMap,
    Once { mut request, repeat }: Once<EnqueueBatchRequest>,
) -> Result<Response, Error> {
    let jobs = request.jobs.iter().map(|it| it.0.jobs()).sum();
    caller.charge(&app, "jobs", Cost::Items(jobs)).await?;
    let trace = traceparent(&headers).map(str::to_owned);
    let (running, origin, tenant) = (app.clone(), caller.origin(), caller.tenant());
    repeat
        .once(&app, &caller, async move |ids: Ids| {
            let sent = request.jobs.iter_mut().enumerate();
            let to_check = sent.filter_map(|(at, it)| it.0.take_check(format!("jobs[{at}].")));
            let origin = origin.checking(to_check.collect());
            let jobs = accept_batch(tenant, ids, request, trace.as_deref())?;
            let stored = enqueue::store(&running.engine, tenant, origin, jobs).await?;
            let jobs =
                stored.into_iter().map(|it| Job::read(it.row)).collect::<Result<_, Error>>()?;
            Ok(Answer::jobs(StatusCode::CREATED, jobs))
        })
        .await
}

fn accept_batch(
    tenant: Tenant,
    ids: Ids,
    request: EnqueueBatchRequest,
    trace: Option<&str>,
) -> Result<Vec<JobWithDependencies>, Error> {
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
        let entry = accept(tenant, ids.job(index), request, trace, &mut item)?;
        let unique_key = entry.job.extras.as_ref().and_then(|it| it.unique_key.clone());
        if unique_key.is_some_and(|it| !unique_keys.insert(it)) {
            item.refuse("unique.key", "is the key of an earlier job of this batch");
        }
        jobs.push(entry);
        check.absorb(item);
    }
    check.finish()?;
    Ok(jobs)
}
