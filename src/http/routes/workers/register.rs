//! `POST /v1/workers/register`.

use axum::{
    Json as Reply,
    extract::State,
    response::{IntoResponse, Response},
};
use fencepost_domain::{access::Permission, cron, error::Error, limits, text::printable};
use fencepost_engine::{
    enqueue::quota,
    schedules::{self, RegisteredSchedule},
    workers::{self, Registration},
};
use fencepost_web::{
    app::App,
    auth::{Bound, Caller, Registering},
    wire::{
        audit::{self, NewAuditEntry},
        entries::Entry,
        extract::{Json, RequestBody, UnknownFields},
        openapi::{chars, items, range},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::routes::recurring::facts;

const DEFAULT_CONCURRENCY: i32 = 10;

/// Registration of a worker.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({
    "worker_id": "worker-1", "queues": ["default"], "job_types": ["email.send"]
}))]
pub struct RegisterRequest {
    /// Id that the worker chooses for itself.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_WORKER_ID_CHARS)))))]
    worker_id: String,
    /// Queues that it will poll.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_REGISTERED_NAMES)))))]
    queues: Vec<String>,
    /// Job types that it can run.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_REGISTERED_NAMES)))))]
    job_types: Vec<String>,
    /// Host name.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_WORKER_INFO_CHARS)))))]
    hostname: Option<String>,
    /// Version of its client library.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_WORKER_INFO_CHARS)))))]
    sdk_version: Option<String>,
    /// Number of jobs that it runs at the same time. Default: 10.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_WORKER_CONCURRENCY)))))]
    concurrency: Option<i32>,
    /// Process id.
    #[schema(extensions(("bounds" = json!(range(0, i32::MAX)))))]
    pid: Option<i32>,
    /// Longest time between two of its calls while it runs jobs, in seconds: heartbeats, acks,
    /// polls. After three times that without one it is gone: its jobs return at once, and that is
    /// no failure. Default: not known, so that jobs return when their leases end.
    #[schema(extensions(("bounds" = json!(range(limits::MIN_BEAT_SECONDS, limits::MAX_BEAT_SECONDS)))))]
    beat_seconds: Option<i32>,
    /// Labels, for jobs that require them: at most 16.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_LABELS)))))]
    labels: Option<Vec<String>>,
    /// Schedules to store: at most 100. An invalid one does not fail the call.
    #[schema(max_items = 100, value_type = Vec<RegisteredScheduleRequest>, required = false)]
    recurring_schedules: Option<Vec<Entry<RegisteredScheduleRequest>>>,
}

/// A schedule that a worker registers. Its id is `rjob_` and the part of its job type behind the
/// last `.`, `:`, `/` or `\\`. An omitted field of a stored schedule keeps its value.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RegisteredScheduleRequest {
    /// Job type of its jobs.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_JOB_TYPE_CHARS)))))]
    job_type: String,
    /// Five or six fields, or `@daily` and similar.
    #[schema(example = "0 3 * * *", extensions(("bounds" = json!(chars(1, limits::MAX_CRON_CHARS)))))]
    cron_expression: String,
    /// Queue of its jobs. Default for a new schedule: `default`.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_QUEUE_CHARS)))))]
    queue: Option<String>,
    /// IANA time zone of the expression. Default for a new schedule: UTC.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_NAME_CHARS)))))]
    timezone: Option<String>,
    /// Failures after which its jobs are dead-lettered. Default for a new schedule: 3.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_MAX_ATTEMPTS)))))]
    max_attempts: Option<i32>,
    /// Timeout of one attempt of its jobs, in seconds. Default for a new schedule: 1800.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_TIMEOUT_SECONDS)))))]
    timeout_seconds: Option<i32>,
}

impl RequestBody for RegisterRequest {
    const IS_OF_WORKERS: bool = true;
}

/// Answer to a registration.
#[derive(Debug, Serialize, ToSchema)]
pub struct RegisterReply {
    /// Always `registered`.
    pub status: RegisterStatus,
    /// Rejected schedules; present only if there are any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    pub rejected_schedules: Vec<RejectedSchedule>,
    /// Never sent: the header `Fencepost-Advice` says `unknown-queue`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false, deprecated)]
    pub warnings: Vec<String>,
}

/// A rejected schedule.
#[derive(Debug, Serialize, ToSchema)]
pub struct RejectedSchedule {
    /// Index in the request, from 0.
    pub index: usize,
    /// Job type, if it has one.
    #[schema(required)]
    pub job_type: Option<String>,
    /// Why it was rejected.
    pub reason: String,
}

/// Status of a registration.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RegisterStatus {
    /// The worker is registered.
    Registered,
}

/// Register a worker.
///
/// A worker may poll without a registration. A further one of the same `worker_id` replaces it.
/// Invalid schedules are listed in the answer; the others are stored.
#[utoipa::path(
    post, path = "/workers/register", tag = "workers", operation_id = "workers_register",
    security(("api_key" = ["work"]), ("session" = ["member"])),
    request_body = RegisterRequest,
    responses(
        (status = 200, description = "Registered.", body = RegisterReply,
         headers(("Fencepost-Advice" = Option<String>, description = "`unknown-queue`: a queue never had a job. Is its name right?"))),
    ),
)]
pub async fn register(
    caller: Caller<Bound<Registering>>,
    State(app): State<App>,
    unknown: UnknownFields,
    Json(mut request): Json<RegisterRequest>,
) -> Result<Response, Error> {
    let sent = request.recurring_schedules.take().unwrap_or_default();
    let mut worker = accept(request, sent.len())?;
    if let Some(binding) = caller.who.binding() {
        worker.job_types = binding.narrow(&worker.queues, worker.job_types)?;
        worker.worker_id = binding.worker(&worker.worker_id);
    }
    workers::register(&app.engine, caller.project_id, &worker).await?;
    let rejected_schedules =
        keep_schedules(&app, &caller, &worker.worker_id, (&sent, unknown)).await?;
    let (status, warnings) = (RegisterStatus::Registered, Vec::new());
    let reply = RegisterReply { status, rejected_schedules, warnings };
    let mut response = Reply(reply).into_response();
    super::advise(&app, caller.project_id, &worker.queues, &mut response).await;
    Ok(response)
}

async fn keep_schedules(
    app: &App,
    caller: &Caller<Bound<Registering>>,
    worker_id: &str,
    (sent, unknown): (&[Entry<RegisteredScheduleRequest>], UnknownFields),
) -> Result<Vec<RejectedSchedule>, Error> {
    let (mut kept, mut rejected) = (Vec::new(), Vec::new());
    let permission = Permission::Schedule;
    for (index, schedule) in sent.iter().enumerate() {
        if !caller.who.may(permission) {
            rejected.push((index, format!("the key needs {}", permission.needs())));
            continue;
        }
        let path = format!("recurring_schedules[{index}]");
        // A schedule without a setting that was sent would fire in another way, so it is listed.
        let unknown = match unknown {
            UnknownFields::Ignored => UnknownFields::Ignored,
            UnknownFields::Refused | UnknownFields::Logged => UnknownFields::Refused,
        };
        match schedule.read(unknown, &path).and_then(accept_schedule) {
            Ok(schedule) => kept.push((index, schedule)),
            Err(error) => rejected.push((index, reason(error, &path))),
        }
    }
    if !kept.is_empty() {
        let (project_id, limits) = (caller.project_id, &caller.limits);
        let admit = async |changes: usize| {
            quota::require_room(&app.engine, caller.tenant()).await?;
            caller.charge_changes(app, changes).await
        };
        let done =
            schedules::store_registered(&app.engine, project_id, &kept, limits, admit).await?;
        rejected.extend(done.rejected);
        for (before, after) in done.changed {
            let id = after.id.clone();
            let (before, after) = (before.as_ref().map(facts), Some(facts(&after)));
            let entry = NewAuditEntry { before, after, ..NewAuditEntry::to("recurring.put", id) };
            audit::note_charged(app, caller, entry).await;
        }
    }
    rejected.sort();
    let rejected = rejected.into_iter().map(|(index, reason)| {
        let job_type = sent.get(index).and_then(|it| it.text("job_type"));
        tracing::warn!(
            worker.id = worker_id,
            job.r#type = job_type.as_deref().map(printable),
            schedule.index = index,
            reason,
            "recurring schedule was rejected"
        );
        RejectedSchedule { index, job_type, reason }
    });
    Ok(rejected.collect())
}

/// Names the field below the schedule: its index stands beside the reason.
fn reason(error: Error, path: &str) -> String {
    let Error::Invalid(broken) = error else { return error.to_string() };
    let Some(first) = broken.into_iter().next() else { return String::new() };
    let below = first.field.strip_prefix(path).unwrap_or(&first.field).trim_start_matches('.');
    if below.is_empty() { first.message } else { format!("{below}: {}", first.message) }
}

fn accept_schedule(request: RegisteredScheduleRequest) -> Result<RegisteredSchedule, Error> {
    let mut check = Check::default();
    check.name("job_type", &request.job_type, limits::MAX_JOB_TYPE_CHARS);
    check.name("cron_expression", &request.cron_expression, limits::MAX_CRON_CHARS);
    check.optional_name("queue", request.queue.as_deref(), limits::MAX_QUEUE_CHARS);
    check.optional_name("timezone", request.timezone.as_deref(), limits::MAX_CRON_CHARS);
    if let Some(max_attempts) = request.max_attempts {
        check.range("max_attempts", max_attempts, 1, limits::MAX_MAX_ATTEMPTS);
    }
    if let Some(timeout_seconds) = request.timeout_seconds {
        check.range("timeout_seconds", timeout_seconds, 1, limits::MAX_TIMEOUT_SECONDS);
    }
    check.finish()?;
    let id = cron::registered_id(&request.job_type);
    let id = id.map_err(|error| Error::invalid(error.field(), error.to_string()))?;
    let RegisteredScheduleRequest {
        job_type,
        cron_expression,
        queue,
        timezone,
        max_attempts,
        timeout_seconds,
    } = request;
    Ok(RegisteredSchedule {
        id,
        job_type,
        cron_expression,
        timezone,
        queue,
        max_attempts,
        timeout_seconds,
    })
}

fn accept(request: RegisterRequest, schedules: usize) -> Result<Registration, Error> {
    let max = limits::MAX_REGISTERED_NAMES;
    let mut check = Check::default();
    check.path_name("worker_id", &request.worker_id, limits::MAX_WORKER_ID_CHARS);
    check.names("queues", &request.queues, max, limits::MAX_QUEUE_CHARS);
    check.names("job_types", &request.job_types, max, limits::MAX_JOB_TYPE_CHARS);
    let names = request.queues.iter().chain(&request.job_types);
    let bytes: usize = names.map(String::len).sum();
    let max = limits::MAX_REGISTERED_NAMES_BYTES;
    if bytes > max {
        let message = format!("must have at most {max} bytes together with queues, has {bytes}");
        check.refuse("job_types", &message);
    }
    check.optional_name("hostname", request.hostname.as_deref(), limits::MAX_WORKER_INFO_CHARS);
    check.optional_name(
        "sdk_version",
        request.sdk_version.as_deref(),
        limits::MAX_WORKER_INFO_CHARS,
    );
    let concurrency = request.concurrency.unwrap_or(DEFAULT_CONCURRENCY);
    check.range("concurrency", concurrency, 1, limits::MAX_WORKER_CONCURRENCY);
    if let Some(pid) = request.pid {
        check.range("pid", pid, 0, i32::MAX);
    }
    if let Some(seconds) = request.beat_seconds {
        check.range("beat_seconds", seconds, limits::MIN_BEAT_SECONDS, limits::MAX_BEAT_SECONDS);
    }
    let mut labels = request.labels.unwrap_or_default();
    check.names("labels", &labels, limits::MAX_LABELS, limits::MAX_LABEL_CHARS);
    labels.sort();
    labels.dedup();
    if schedules > limits::MAX_REGISTERED_SCHEDULES {
        let max = limits::MAX_REGISTERED_SCHEDULES;
        let message = format!("must have at most {max} entries, has {schedules}");
        check.refuse("recurring_schedules", message);
    }
    check.finish()?;
    Ok(Registration {
        worker_id: request.worker_id,
        queues: request.queues,
        job_types: request.job_types,
        hostname: request.hostname,
        sdk_version: request.sdk_version,
        concurrency,
        pid: request.pid,
        labels,
        beat_seconds: request.beat_seconds,
        counts_losses: false,
    })
}
