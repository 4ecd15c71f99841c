//! Workers: registration, heartbeats, directives.

use axum::extract::State;
use fencepost_domain::{
    error::Error,
    ids::{JobId, JobKey},
    lease::Fence,
    limits,
    worker::WorkerState,
};
use fencepost_engine::{
    settle::heartbeat::{self, Advice, Beat},
    workers::{self, Registration},
};
use fencepost_web::{
    app::App,
    auth::{Beating, Caller, Cost, Registering, Work},
    wire::{
        extract::{Json, RequestBody},
        openapi::{chars, items, range},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::{ErrorBody, Reply, VISIBILITY_SECONDS, fields::time, job_id};

/// Registration of a worker.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OjsRegisterRequest)]
pub struct RegisterRequest {
    /// Id that the worker chooses for itself.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_WORKER_ID_CHARS)))))]
    worker_id: String,
    /// Host name.
    hostname: Option<String>,
    /// Process id.
    pid: Option<i32>,
    /// Queues that it fetches from.
    #[serde(default)]
    queues: Vec<String>,
    /// Number of jobs that it runs at the same time. Default: 10.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_WORKER_CONCURRENCY)))))]
    concurrency: Option<i32>,
    /// Labels.
    #[serde(default)]
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_LABELS)))))]
    labels: Vec<String>,
}

impl RequestBody for RegisterRequest {}

impl RegisterRequest {
    fn registration(self, check: &mut Check) -> Registration {
        const DEFAULT_CONCURRENCY: i32 = 10;
        let hostname = self.hostname.filter(|it| !it.is_empty());
        check.optional_name("hostname", hostname.as_deref(), limits::MAX_WORKER_INFO_CHARS);
        let max = limits::MAX_REGISTERED_NAMES;
        check.names("queues", &self.queues, max, limits::MAX_QUEUE_CHARS);
        let concurrency = self.concurrency.unwrap_or(DEFAULT_CONCURRENCY);
        check.range("concurrency", concurrency, 1, limits::MAX_WORKER_CONCURRENCY);
        let mut labels = self.labels;
        check.names("labels", &labels, limits::MAX_LABELS, limits::MAX_LABEL_CHARS);
        labels.sort();
        labels.dedup();
        Registration {
            worker_id: self.worker_id,
            queues: self.queues,
            job_types: Vec::new(),
            hostname,
            sdk_version: None,
            concurrency,
            pid: self.pid,
            labels,
            beat_seconds: None,
            counts_losses: true,
        }
    }
}

/// Directive of a worker.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OjsWorkerReply)]
pub struct WorkerReply {
    worker_id: String,
    state: WorkerState,
}

/// Register a worker.
#[utoipa::path(
    post, path = "/v1/workers/register", tag = "workers", operation_id = "register",
    request_body = RegisterRequest,
    responses((status = 200, description = "Registered.", body = WorkerReply)),
)]
pub async fn register(
    caller: Caller<Registering>,
    State(app): State<App>,
    Json(request): Json<RegisterRequest>,
) -> Result<Reply<WorkerReply>, Error> {
    let mut check = Check::default();
    check.name("worker_id", &request.worker_id, limits::MAX_WORKER_ID_CHARS);
    let worker = request.registration(&mut check);
    check.finish()?;
    workers::register(&app.engine, caller.project_id, &worker).await?;
    let state = WorkerState::Running;
    Ok(Reply::ok(WorkerReply { worker_id: worker.worker_id, state }))
}

/// Heartbeat of a worker and its jobs.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OjsBeatRequest)]
pub struct BeatRequest {
    /// The worker.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_WORKER_ID_CHARS)))))]
    worker_id: String,
    /// State of the worker. Default: running.
    state: Option<WorkerState>,
    /// Jobs that it runs, at most 500.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_BEAT_JOBS)))))]
    active_job_ids: Option<Vec<String>>,
    /// The same, as the HTTP binding calls it; a number is ignored.
    #[schema(value_type = Option<Vec<String>>)]
    active_jobs: Option<Value>,
    /// One job.
    job_id: Option<String>,
    /// Host name. This field and the ones below register a worker that is not registered.
    hostname: Option<String>,
    /// Process id.
    pid: Option<i32>,
    /// Queues that it fetches from.
    queues: Option<Vec<String>>,
    /// Number of jobs that it runs at the same time.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_WORKER_CONCURRENCY)))))]
    concurrency: Option<i32>,
    /// Labels.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_LABELS)))))]
    labels: Option<Vec<String>>,
}

impl RequestBody for BeatRequest {}

impl BeatRequest {
    /// The jobs that its three fields name.
    fn take_jobs(&mut self) -> Vec<String> {
        let listed = match self.active_jobs.take() {
            Some(Value::Array(jobs)) => {
                jobs.into_iter().filter_map(|it| it.as_str().map(str::to_owned)).collect()
            }
            _ => Vec::new(),
        };
        let named = self.active_job_ids.take().unwrap_or_default().into_iter();
        named.chain(listed).chain(self.job_id.take()).collect()
    }

    /// The registration that the beat describes; none if it has no field of one.
    fn take_registration(&mut self, check: &mut Check) -> Option<Registration> {
        let request = RegisterRequest {
            worker_id: self.worker_id.clone(),
            hostname: self.hostname.take(),
            pid: self.pid,
            queues: self.queues.take().unwrap_or_default(),
            concurrency: self.concurrency,
            labels: self.labels.take().unwrap_or_default(),
        };
        let is_described = request.hostname.is_some()
            || request.pid.is_some()
            || request.concurrency.is_some()
            || !request.queues.is_empty()
            || !request.labels.is_empty();
        is_described.then(|| request.registration(check))
    }
}

/// Directive of the worker, and which of its jobs it still holds.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OjsBeatReply)]
pub struct BeatReply {
    /// `running`, `quiet` or `terminate`.
    state: WorkerState,
    /// Shortest reservation of its jobs, in seconds.
    visibility_timeout: i32,
    /// Jobs whose reservation was renewed.
    jobs_extended: Vec<String>,
    /// Cancelled ones among them: stop.
    jobs_cancelled: Vec<String>,
    server_time: String,
}

/// Send a heartbeat, best every 5 s. A worker that has sent one and then is silent for 30 s is
/// terminated, and its jobs are available again.
#[utoipa::path(
    post, path = "/v1/workers/heartbeat", tag = "workers", operation_id = "heartbeat",
    request_body = BeatRequest,
    responses((status = 200, description = "Recorded.", body = BeatReply)),
)]
pub async fn beat(
    caller: Caller<Beating>,
    State(app): State<App>,
    Json(mut request): Json<BeatRequest>,
) -> Result<Reply<BeatReply>, Error> {
    let mut check = Check::default();
    let about = request.take_registration(&mut check);
    let named = request.take_jobs();
    let (worker_id, project_id) = (request.worker_id, caller.project_id);
    check.name("worker_id", &worker_id, limits::MAX_WORKER_ID_CHARS);
    if named.len() > limits::MAX_BEAT_JOBS {
        let max = limits::MAX_BEAT_JOBS;
        let message = format!("must have at most {max} entries, has {}", named.len());
        check.refuse("active_job_ids", message);
    }
    check.finish()?;
    caller.charge(&app, "active_job_ids", Cost::Leases(named.len())).await?;
    let mut ids: Vec<JobId> = named.iter().filter_map(|it| job_id(it).ok()).collect();
    ids.sort();
    ids.dedup();
    let beats = |ids: &[JobId]| -> Vec<Beat> {
        let fence = Fence { worker_id: Some(worker_id.clone()), ..Fence::default() };
        let beat = |id: &JobId| Beat {
            key: JobKey { project_id, id: *id },
            fence: fence.clone(),
            progress: None,
        };
        ids.iter().map(beat).collect()
    };
    let key = (project_id, worker_id.as_str().into());
    let said = request.state.unwrap_or(WorkerState::Running);
    if said == WorkerState::Terminated {
        // The jobs that it lists are its own, and are released with the rest.
        heartbeat::adopt(&app.engine, project_id, &worker_id, &ids).await?;
    }
    let counts_losses = true;
    let (state, mut leases) =
        workers::beat(&app.engine, &key, (said, counts_losses), beats(&ids)).await?;
    if said != WorkerState::Terminated {
        if let Some(about) = about {
            workers::register_unknown(&app.engine, project_id, &about).await?;
        }
        let lost: Vec<_> = leases.iter().filter(|it| it.1.is_none()).map(|it| it.0).collect();
        let adopted = heartbeat::adopt(&app.engine, project_id, &worker_id, &lost).await?;
        leases.extend(heartbeat::heartbeat_all(&app.engine, beats(&adopted)).await?);
    }
    let shortest = leases.iter().filter_map(|it| Some(it.1?.1)).min();
    let kept = leases.into_iter().filter_map(|(id, lease)| Some((id.0.to_string(), lease?.0)));
    let kept: Vec<_> = kept.collect();
    let cancelled = kept.iter().filter(|it| it.1 == Advice::Cancel);
    Ok(Reply::ok(BeatReply {
        state,
        visibility_timeout: shortest.unwrap_or(VISIBILITY_SECONDS),
        jobs_cancelled: cancelled.map(|it| it.0.clone()).collect(),
        jobs_extended: kept.into_iter().map(|it| it.0).collect(),
        server_time: time(app.engine.now().await?),
    }))
}

/// Deregistration of a worker.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OjsDeregisterRequest)]
pub struct DeregisterRequest {
    /// The worker.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_WORKER_ID_CHARS)))))]
    worker_id: String,
}

impl RequestBody for DeregisterRequest {}

/// Deregister a worker: the jobs it still holds are available again, and no failure is counted.
#[utoipa::path(
    post, path = "/v1/workers/deregister", tag = "workers", operation_id = "deregister",
    request_body = DeregisterRequest,
    responses(
        (status = 200, description = "Deregistered.", body = WorkerReply),
        (status = 404, description = "No worker with this id is known.", body = ErrorBody),
    ),
)]
pub async fn deregister(
    caller: Caller<Work>,
    State(app): State<App>,
    Json(request): Json<DeregisterRequest>,
) -> Result<Reply<WorkerReply>, Error> {
    let mut check = Check::default();
    check.name("worker_id", &request.worker_id, limits::MAX_WORKER_ID_CHARS);
    check.finish()?;
    let key = (caller.project_id, request.worker_id.as_str().into());
    workers::deregister(&app.engine, &key).await?;
    let state = WorkerState::Terminated;
    Ok(Reply::ok(WorkerReply { worker_id: request.worker_id, state }))
}
