//! `POST /v1/workers/heartbeat`.

use axum::{Json as Reply, extract::State};
use fencepost_domain::{
    error::Error,
    ids::{JobKey, LeaseId, ProjectId},
    lease::RequireFence,
    limits,
    worker::WorkerState,
};
use fencepost_engine::{
    reach::Reach,
    settle::{
        self,
        checkpoints::{self, NewCheckpoint, SentCheckpoint},
        heartbeat::{self, Advice, Beat},
    },
    workers,
};
use fencepost_web::{
    app::App,
    auth::{Beating, Bound, Caller, Cost, Who},
    wire::{
        extract::{Json, Object, RequestBody},
        openapi::{at_least, chars, items, range},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::{
    accept_fence, accept_job_id,
    checkpoint::{self, CheckpointStatus},
};
use crate::error::ErrorBody;

/// Why an entry without a fence is refused, where every fence must show an attempt.
const ATTEMPT_REQUIRED: &str =
    "is required: this project or key has require_fence `always`; use active_jobs";

/// The loss of a worker of this API is no failure of its jobs.
const COUNTS_LOSSES: bool = false;

/// A heartbeat of one job (`job_id`), or of a whole worker (`state`, `active_jobs` or
/// `active_job_ids`).
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HeartbeatRequest {
    /// Id of the job; absent in a heartbeat of the whole worker.
    job_id: Option<String>,
    /// Worker that holds the job.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_WORKER_ID_CHARS)))))]
    worker_id: String,
    /// Attempt from the poll's answer.
    #[schema(extensions(("bounds" = json!(at_least(1)))))]
    attempt: Option<i32>,
    /// Lease from the poll's answer.
    #[schema(value_type = Option<uuid::Uuid>)]
    lease_id: Option<LeaseId>,
    /// Progress from 0 to 1.
    #[schema(extensions(("bounds" = json!(range(0, 1)))))]
    progress: Option<f32>,
    /// How far the attempt has come: any JSON of at most 64 KiB. The next lease of the job brings
    /// it. Needs `attempt` or `lease_id`.
    #[serde(default, deserialize_with = "checkpoint::read")]
    #[schema(value_type = serde_json::Value, required = false)]
    checkpoint: Option<Box<RawValue>>,
    /// With `checkpoint`: its number. Only a larger one than the stored one replaces it.
    #[schema(extensions(("bounds" = json!(range(0, limits::MAX_CHECKPOINT_SEQUENCE)))))]
    checkpoint_sequence: Option<i64>,
    /// State of the whole worker. Default: running.
    state: Option<WorkerState>,
    /// Jobs that the whole worker runs, at most 500.
    #[schema(max_items = 500, value_type = Vec<ActiveJobRequest>, required = false)]
    active_jobs: Option<Vec<Object<ActiveJobRequest>>>,
    /// Ids of the jobs that the whole worker runs, instead of `active_jobs`.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_BEAT_JOBS)))))]
    active_job_ids: Option<Vec<String>>,
}

impl RequestBody for HeartbeatRequest {
    const IS_OF_WORKERS: bool = true;
}

/// A job that a worker runs.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ActiveJobRequest {
    /// Id of the job.
    job_id: String,
    /// Attempt from the poll's answer.
    #[schema(extensions(("bounds" = json!(at_least(1)))))]
    attempt: Option<i32>,
    /// Lease from the poll's answer.
    #[schema(value_type = Option<uuid::Uuid>)]
    lease_id: Option<LeaseId>,
    /// Progress from 0 to 1.
    #[schema(extensions(("bounds" = json!(range(0, 1)))))]
    progress: Option<f32>,
    /// How far the attempt has come: any JSON of at most 64 KiB. Needs `attempt` or `lease_id`.
    #[serde(default, deserialize_with = "checkpoint::read")]
    #[schema(value_type = serde_json::Value, required = false)]
    checkpoint: Option<Box<RawValue>>,
    /// With `checkpoint`: its number. Only a larger one than the stored one replaces it.
    #[schema(extensions(("bounds" = json!(range(0, limits::MAX_CHECKPOINT_SEQUENCE)))))]
    checkpoint_sequence: Option<i64>,
}

/// Directives: `status` for one job, `state` and `jobs` for a whole worker.
#[derive(Debug, Default, Serialize, ToSchema)]
#[schema(example = json!({"status": "ok"}))]
pub struct HeartbeatReply {
    /// For one job: continue or stop.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub status: Option<HeartbeatStatus>,
    /// For one job: what became of the checkpoint that was sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub checkpoint: Option<CheckpointStatus>,
    /// For the whole worker: its directive, or its own state if it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub state: Option<WorkerState>,
    /// For the whole worker: the result for each of its jobs.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub jobs: Option<Vec<ActiveJobReply>>,
}

/// Result for one job.
#[derive(Debug, Serialize, ToSchema)]
pub struct ActiveJobReply {
    /// Id of the job.
    #[schema(example = "job_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub job_id: String,
    /// Continue or stop.
    pub status: HeartbeatStatus,
    /// Seconds until the renewed lease expires; null if it is lost.
    #[schema(required)]
    pub lease_seconds: Option<i32>,
    /// What became of the checkpoint that was sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub checkpoint: Option<CheckpointStatus>,
}

/// Continue or stop.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum HeartbeatStatus {
    /// Continue: the lease is renewed.
    Ok,
    /// The job was cancelled: stop, and ack it as failed or released.
    Cancel,
    /// The lease is lost: stop, and do not ack. Only for a whole worker; a heartbeat of one job
    /// gets a 409.
    Lost,
}

impl From<Advice> for HeartbeatStatus {
    fn from(advice: Advice) -> Self {
        match advice {
            Advice::Continue => Self::Ok,
            Advice::Cancel => Self::Cancel,
        }
    }
}

/// Send a heartbeat.
///
/// Renews a lease by its own length, but never past the job's `timeout_seconds` and 10 s of grace.
/// After a 409 the lease is lost: stop working on the job. Only `fence_required` asks for the
/// attempt.
///
/// Without `job_id` it is a heartbeat of the whole worker, best sent every 5 s: it renews all jobs
/// that it names, and returns the worker's directive, or its own state if it has none. A worker
/// that has sent one and then is silent for 30 s is lost: its leases end. With the state
/// `terminated` its leases are released, as by `POST /v1/workers/deregister`.
#[utoipa::path(
    post, path = "/workers/heartbeat", tag = "workers", operation_id = "workers_heartbeat",
    security(("api_key" = ["work"]), ("session" = ["member"])),
    request_body = HeartbeatRequest,
    responses(
        (status = 200, description = "The lease is renewed.", body = HeartbeatReply),
        (status = 404, description = "The project has no such job.", body = ErrorBody),
        (status = 409, description = "The lease no longer belongs to this worker.", body = ErrorBody),
    ),
)]
pub async fn heartbeat(
    caller: Caller<Bound<Beating>>,
    State(app): State<App>,
    Json(request): Json<HeartbeatRequest>,
) -> Result<Reply<HeartbeatReply>, Error> {
    let Some(job_id) = request.job_id.clone() else {
        return beat(&caller, &app, request).await;
    };
    let mut check = Check::default();
    let of_workers = [
        ("state", request.state.is_some()),
        ("active_jobs", request.active_jobs.is_some()),
        ("active_job_ids", request.active_job_ids.is_some()),
    ];
    for (field, _) in of_workers.into_iter().filter(|it| it.1) {
        check.refuse(field, "must not be sent together with job_id");
    }
    let fence =
        accept_fence(&mut check, &caller.who, request.worker_id, request.attempt, request.lease_id);
    check_progress(&mut check, request.progress);
    let sent = (request.checkpoint, request.checkpoint_sequence);
    let sent = checkpoint::accept(&mut check, sent.0, sent.1)?;
    check.finish()?;
    let worker = fence.worker_id.as_deref().unwrap_or_default().into();
    app.engine.registry.record_seen(&(caller.project_id, worker), &[], &[]);
    let key = JobKey { project_id: caller.project_id, id: accept_job_id(&job_id)? };
    let binding = caller.who.binding();
    Reach::read(&app.engine, key.project_id, binding, [key.id]).await?.check(key.id)?;
    if sent.is_some() {
        checkpoints::require_fence(&app.engine, key, &fence).await?;
    }
    let fence = settle::name_attempt(&app.engine, key, fence, caller.who.require_fence()).await?;
    let beat = Beat { key, fence: fence.clone(), progress: request.progress };
    let status = Some(heartbeat::heartbeat(&app.engine, beat).await?.into());
    // The lease is renewed, whatever becomes of it. A repeated call is safe.
    let checkpoint = match sent {
        Some(sent) => checkpoint::save(&app, &caller, key, &fence, sent).await?.map(Into::into),
        None => None,
    };
    Ok(Reply(HeartbeatReply { status, checkpoint, ..HeartbeatReply::default() }))
}

fn check_progress(check: &mut Check, progress: Option<f32>) {
    if let Some(progress) = progress {
        check.range("progress", progress, 0.0, 1.0);
    }
}

/// What a heartbeat of a whole worker says of its jobs.
struct WholeBeat {
    /// The field that names the jobs.
    field: &'static str,
    beats: Vec<Beat>,
    names: Vec<NamedJob>,
    checkpoints: Vec<SentCheckpoint>,
}

/// A job as it was named.
struct NamedJob {
    job_id: String,
    /// The place of its beat; none: no job has such an id.
    place: Option<usize>,
    /// Whether it came with a checkpoint.
    has_checkpoint: bool,
}

impl WholeBeat {
    /// Checks the request, but for the worker's state.
    fn accept(who: &Who, project_id: ProjectId, request: HeartbeatRequest) -> Result<Self, Error> {
        let mut check = Check::default();
        check.name("worker_id", &request.worker_id, limits::MAX_WORKER_ID_CHARS);
        let of_jobs = [
            ("attempt", request.attempt.is_some()),
            ("lease_id", request.lease_id.is_some()),
            ("progress", request.progress.is_some()),
            ("checkpoint", request.checkpoint.is_some()),
            ("checkpoint_sequence", request.checkpoint_sequence.is_some()),
        ];
        for (field, _) in of_jobs.into_iter().filter(|it| it.1) {
            check.refuse(field, "must be sent together with job_id, or in active_jobs");
        }
        let (field, named) = named_jobs(request.active_jobs, request.active_job_ids, &mut check);
        let mut whole =
            Self { field, beats: Vec::new(), names: Vec::new(), checkpoints: Vec::new() };
        for (index, job) in named.into_iter().enumerate() {
            let mut item = Check::below(format!("{field}[{index}]."));
            let worker_id = request.worker_id.clone();
            let fence = accept_fence(&mut item, who, worker_id, job.attempt, job.lease_id);
            if who.require_fence() == RequireFence::Always && !fence.names_an_attempt() {
                item.refuse("attempt", ATTEMPT_REQUIRED);
            }
            check_progress(&mut item, job.progress);
            let sent = checkpoint::accept(&mut item, job.checkpoint, job.checkpoint_sequence)?;
            let has_checkpoint = sent.is_some();
            if has_checkpoint && !fence.names_an_attempt() {
                item.refuse("attempt", "or lease_id must be sent together with checkpoint");
            }
            let key = job.job_id.parse().ok().map(|id| JobKey { project_id, id });
            let is_of = |it: &SentCheckpoint| key.is_some_and(|key| key.id == it.job_id);
            if has_checkpoint && whole.checkpoints.iter().any(is_of) {
                item.refuse("checkpoint", "another entry of this job has one");
            }
            check.absorb(item);
            let place = key.map(|key| whole.add(Beat { key, fence, progress: job.progress }, sent));
            whole.names.push(NamedJob { job_id: job.job_id, place, has_checkpoint });
        }
        check.finish()?;
        Ok(whole)
    }

    /// Adds a beat, and returns its place. A worker may hold two attempts of one job, the first of
    /// which is lost.
    fn add(&mut self, beat: Beat, checkpoint: Option<NewCheckpoint>) -> usize {
        let (job_id, fence) = (beat.key.id, beat.fence.clone());
        let sent = checkpoint.map(|checkpoint| SentCheckpoint { job_id, fence, checkpoint });
        self.checkpoints.extend(sent);
        let is_same = |it: &Beat| it.key == beat.key && it.fence == beat.fence;
        if let Some(there) = self.beats.iter().position(is_same) {
            return there;
        }
        self.beats.push(beat);
        self.beats.len() - 1
    }
}

/// The jobs of a whole worker, with the field that names them.
fn named_jobs(
    active_jobs: Option<Vec<Object<ActiveJobRequest>>>,
    active_job_ids: Option<Vec<String>>,
    check: &mut Check,
) -> (&'static str, Vec<ActiveJobRequest>) {
    let bare = |job_id| ActiveJobRequest { job_id, ..ActiveJobRequest::default() };
    let (field, named): (_, Vec<_>) = match (active_jobs, active_job_ids) {
        (Some(_), Some(_)) => {
            check.refuse("active_job_ids", "must not be sent together with active_jobs");
            ("active_jobs", Vec::new())
        }
        (Some(jobs), None) => ("active_jobs", jobs.into_iter().map(|Object(it)| it).collect()),
        (None, ids) => ("active_job_ids", ids.unwrap_or_default().into_iter().map(bare).collect()),
    };
    if named.len() > limits::MAX_BEAT_JOBS {
        let max = limits::MAX_BEAT_JOBS;
        check.refuse(field, format!("must have at most {max} entries, has {}", named.len()));
    }
    (field, named)
}

/// A heartbeat of a whole worker.
async fn beat(
    caller: &Caller<Bound<Beating>>,
    app: &App,
    request: HeartbeatRequest,
) -> Result<Reply<HeartbeatReply>, Error> {
    let (worker_id, state) = (request.worker_id.clone(), request.state);
    let whole = WholeBeat::accept(&caller.who, caller.project_id, request)?;
    let WholeBeat { field, mut beats, names, mut checkpoints } = whole;
    caller.charge(app, field, Cost::Leases(names.len())).await?;
    let key: workers::WorkerKey = (caller.project_id, caller.who.worker(worker_id).into());
    let state = state.unwrap_or(WorkerState::Running);
    let binding = caller.who.binding();
    let ids = beats.iter().map(|it| it.key.id);
    let reach = Reach::read(&app.engine, caller.project_id, binding, ids).await?;
    let is_mine: Vec<_> = beats.iter().map(|it| reach.includes(it.key.id)).collect();
    beats.retain(|it| reach.includes(it.key.id));
    checkpoints.retain(|it| reach.includes(it.job_id));
    let (wanted, leases) = workers::beat(&app.engine, &key, (state, COUNTS_LOSSES), beats).await?;
    let is_held = |id| leases.iter().any(|it| it.0 == id && it.1.is_some());
    checkpoints.retain(|it| is_held(it.job_id));
    let saved = checkpoints::save(&app.engine, caller.tenant(), checkpoints).await?;
    let leases = leases_of(&is_mine, leases);
    let reply = |NamedJob { job_id, place, has_checkpoint }| {
        let lease = place.and_then(|it| leases[it]);
        let status = lease.map_or(HeartbeatStatus::Lost, |it| it.0.into());
        let checkpoint = job_id.parse().ok().and_then(|it| saved.get(&it)).copied();
        let is_kept = has_checkpoint && lease.is_some();
        let checkpoint = checkpoint.filter(|_| is_kept).map(Into::into);
        ActiveJobReply { job_id, status, lease_seconds: lease.map(|it| it.1), checkpoint }
    };
    let jobs = Some(names.into_iter().map(reply).collect());
    Ok(Reply(HeartbeatReply { state: Some(wanted), jobs, ..HeartbeatReply::default() }))
}

/// The lease of each beat; none: it is lost, or its job is not for this key.
fn leases_of(is_mine: &[bool], leases: heartbeat::Leases) -> Vec<Option<(Advice, i32)>> {
    let mut leases = leases.into_iter();
    let of_beat = is_mine.iter().map(|is_mine| is_mine.then(|| leases.next()?.1).flatten());
    of_beat.collect()
}
