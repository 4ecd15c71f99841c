//! `GET /v1/queues` and `/v1/queues/{queue}`: depth, throughput and settings.

pub mod backlog;
pub mod change;
pub mod control;
pub mod delete;
pub mod group_rules;
pub mod groups;
pub mod push;

use std::cmp::Reverse;

use axum::{Json as Reply, extract::State};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    backoff::RetryPolicy,
    error::Error,
    explain::Reason,
    group::GroupRules,
    ids::{JobId, ProjectId},
    limits,
    rate::RateLimit,
};
use fencepost_engine::jobs::explain;
use fencepost_store::{
    self as store,
    queues::{TypeRow, counts::QueueRow},
};
use fencepost_web::{
    app::App,
    auth::{Caller, Read},
    wire::{
        extract::{NameInPath, Query},
        openapi::range,
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{
    cursor::{self, List},
    error::ErrorBody,
    page::{PageSize, page},
    settings::{Settings, Tagged},
};

const DEFAULT_PAGE_QUEUES: u32 = 50;
/// Queues of a page whose oldest job is explained.
const MAX_EXPLAINED_QUEUES: usize = 10;
/// A ready job that waits longer than this deserves an explanation.
pub const LONG_WAIT_SECONDS: i64 = 60;

/// A queue.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Queue {
    /// Name.
    pub queue: String,
    /// Paused since; null: not paused.
    #[schema(required)]
    pub paused_at: Option<DateTime<Utc>>,
    /// Paused job types.
    pub paused_types: Vec<PausedType>,
    /// Number of jobs by state.
    pub counts: Counts,
    /// Since when the longest-waiting ready job waits; null: no job is ready.
    #[schema(required)]
    pub oldest_ready_at: Option<DateTime<Utc>>,
    /// Id of that job: `/explain` says why it is not running.
    #[schema(required)]
    pub oldest_ready_job_id: Option<String>,
    /// Age of that job in seconds.
    #[schema(required)]
    pub oldest_ready_age_seconds: Option<i64>,
    /// Why that job waits. In a list, only of the ten queues whose oldest job waits longest, and
    /// only after a minute; null otherwise.
    #[schema(required)]
    pub oldest_ready_reason: Option<Reason>,
    /// The reason in one sentence, as `/explain` gives it.
    #[schema(required)]
    pub oldest_ready_summary: Option<String>,
    /// Throughput.
    pub rates: Rates,
    /// Live workers that poll it.
    pub workers: i64,
    /// Running jobs whose workers make no calls; null: there are none.
    #[serde(default)]
    #[schema(required)]
    pub silent: Option<SilentView>,
    /// Maximum number of running jobs; null: unlimited.
    #[schema(required)]
    pub max_concurrency: Option<i32>,
    /// Rate limit of starting jobs; null: unlimited.
    #[schema(required)]
    pub rate_limit: Option<RateLimitView>,
    /// Minimum lease in seconds when the poll sets none. Default: 30 if the job's timeout decides.
    #[schema(required)]
    pub default_lease_seconds: Option<i32>,
    /// Retention of its finished jobs, in days.
    pub retention_days: i32,
    /// Default `max_attempts` for jobs that do not set it; null: 3.
    #[schema(required)]
    pub default_max_attempts: Option<i32>,
    /// Default retry policy for jobs that do not set one; null: the defaults of `retry`.
    #[schema(required)]
    pub default_retry: Option<RetryPolicy>,
    /// Consecutive dead letters and losses of one job type that pause it (circuit breaker); null:
    /// off.
    #[schema(required)]
    pub brake_after: Option<i32>,
    /// Jobs that may wait or run: enqueues beyond it are refused; null: as many as the plan allows.
    #[schema(required)]
    pub max_waiting: Option<i32>,
    /// Rules of its groups; null: jobs of a group run as others do.
    #[serde(default)]
    #[schema(required)]
    pub groups: Option<GroupRules>,
    /// Names of the limits that it keeps together with other queues.
    #[serde(default)]
    pub shared_limits: Vec<String>,
    /// Time of the last change of its settings; null: never.
    #[schema(required)]
    pub updated_at: Option<DateTime<Utc>>,
    /// Version of the settings, also in the header `ETag`. A write with it as `If-Match` is refused
    /// if they have changed since.
    #[serde(default)]
    #[schema(required, example = "\"4f0c2a9d1be87a3355d0c61e\"")]
    pub etag: String,
}

impl Settings for Queue {
    const FIELDS: &'static [&'static str] = &[
        "max_concurrency",
        "rate_limit",
        "default_lease_seconds",
        "retention_days",
        "default_max_attempts",
        "default_retry",
        "brake_after",
        "max_waiting",
        "groups",
        "shared_limits",
    ];

    fn etag(&mut self) -> &mut String {
        &mut self.etag
    }
}

impl Queue {
    /// Settings that the audit log shows.
    fn settings(&self) -> String {
        serde_json::json!({
            "max_concurrency": self.max_concurrency, "rate_limit": self.rate_limit,
            "default_lease_seconds": self.default_lease_seconds,
            "retention_days": self.retention_days,
            "default_max_attempts": self.default_max_attempts,
            "default_retry": self.default_retry, "brake_after": self.brake_after,
            "max_waiting": self.max_waiting, "groups": self.groups,
            "shared_limits": self.shared_limits,
        })
        .to_string()
    }
}

/// A paused job type of a queue.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct PausedType {
    /// Job type.
    pub job_type: String,
    /// Paused since.
    pub paused_at: DateTime<Utc>,
    /// `operator`, or `brake`: the circuit breaker.
    pub paused_by: String,
    /// Dead letters and repeated losses since its last success, counted while the queue has a
    /// circuit breaker.
    pub dead_letters_in_a_row: i32,
}

/// Jobs of a queue by state.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = QueueCounts)]
pub struct Counts {
    /// Jobs that wait for their `run_at` or for parents.
    pub scheduled: i64,
    /// Jobs that wait for a worker or for the end of a backoff.
    pub pending: i64,
    /// Pending jobs that wait for the end of a backoff.
    pub backoff: i64,
    /// Running jobs.
    pub processing: i64,
    /// Dead letters.
    pub dead_letter: i64,
    /// Succeeded jobs that are still retained.
    pub succeeded: i64,
    /// Cancelled jobs that are still retained.
    pub cancelled: i64,
}

/// Throughput of a queue.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = QueueRates)]
pub struct Rates {
    /// Enqueued jobs.
    pub enqueued: Rate,
    /// Succeeded jobs.
    pub succeeded: Rate,
    /// Failed attempts.
    pub failed: Rate,
}

/// Counts of a time window.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = QueueRate)]
pub struct Rate {
    /// In the last minute, in whole minutes.
    pub last_minute: i64,
    /// In the last hour.
    pub last_hour: i64,
}

/// At most `count` jobs start in any window of `per_seconds`.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = RateLimit)]
pub struct RateLimitView {
    /// Number of jobs.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_RATE_LIMIT_COUNT)))))]
    pub count: i32,
    /// Length of the window in seconds.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_RATE_LIMIT_SECONDS)))))]
    pub per_seconds: i32,
}

impl Queue {
    fn of(row: QueueRow, paused: &[TypeRow]) -> Self {
        let rate = |last_minute, last_hour| Rate { last_minute, last_hour };
        let paused = paused.iter().filter(|it| it.queue == row.queue);
        let limit = row.rate_limit_count.zip(row.rate_limit_per_seconds);
        let groups = row.group_order.zip(row.group_on_dead);
        let rates = row.group_rate_counts.iter().flatten();
        let rates = rates.zip(row.group_rate_seconds.iter().flatten());
        let rates = rates.map(|(&count, &per_seconds)| RateLimit { count, per_seconds }).collect();
        let max_running = row.group_max_running;
        let fair = row.group_fair.unwrap_or_default();
        let groups =
            groups.map(|(order, on_dead)| GroupRules { order, on_dead, max_running, rates, fair });
        Self {
            paused_at: row.paused_at,
            paused_types: paused.filter_map(PausedType::of).collect(),
            counts: Counts {
                scheduled: row.scheduled,
                pending: (row.active - row.processing).max(0),
                backoff: row.backoff,
                processing: row.processing,
                dead_letter: row.dead_letter,
                succeeded: row.succeeded,
                cancelled: row.cancelled,
            },
            oldest_ready_at: row.oldest_ready_at,
            oldest_ready_job_id: row.oldest_ready_job_id.map(|it| it.to_string()),
            oldest_ready_age_seconds: row.oldest_ready_at.map(|it| (row.now - it).num_seconds()),
            oldest_ready_reason: None,
            oldest_ready_summary: None,
            rates: Rates {
                enqueued: rate(row.enqueued_minute, row.enqueued_hour),
                succeeded: rate(row.succeeded_minute, row.succeeded_hour),
                failed: rate(row.failed_minute, row.failed_hour),
            },
            workers: row.workers,
            silent: row.silent_until.map(|return_by| SilentView {
                jobs: row.silent_jobs,
                workers: row.silent_workers,
                return_by,
            }),
            max_concurrency: row.max_concurrency,
            rate_limit: limit.map(|(count, per_seconds)| RateLimitView { count, per_seconds }),
            default_lease_seconds: row.default_lease_seconds,
            retention_days: row.retention_days.unwrap_or(limits::DEFAULT_RETENTION_DAYS),
            default_max_attempts: row.default_max_attempts,
            default_retry: row.default_retry.as_ref().map(|it| RetryPolicy::stored(Some(it))),
            brake_after: row.brake_after,
            max_waiting: row.max_waiting,
            shared_limits: row.shared_limits.unwrap_or_default(),
            groups: groups.filter(|it| *it != GroupRules::default()),
            updated_at: row.updated_at,
            queue: row.queue,
            etag: String::new(),
        }
        .tagged()
    }
}

/// Running jobs of a queue whose workers have made no call for a minute, or for three times their
/// `beat_seconds`, among 200 workers with leases.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = SilentWorkers)]
pub struct SilentView {
    /// Number of these jobs, up to 10,000 of each worker.
    pub jobs: i64,
    /// Number of these workers.
    pub workers: i64,
    /// The last of the jobs has returned by then, unless a heartbeat comes.
    /// `POST …/queues/{queue}/take-back` releases them at once.
    pub return_by: DateTime<Utc>,
}

impl PausedType {
    fn of(row: &TypeRow) -> Option<Self> {
        Some(Self {
            job_type: row.job_type.clone(),
            paused_at: row.paused_at?,
            paused_by: row.paused_by.clone()?,
            dead_letters_in_a_row: row.streak,
        })
    }
}

/// Page of queues.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct QueuesQuery {
    /// Maximum number of queues to return. Default: 50.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

page! {
    /// A page of queues, by name.
    QueuePage {
        /// Queues of the page.
        queues: Queue
    }
}

/// List queues.
///
/// Queues that were ever used, have settings, or are polled, by name.
#[utoipa::path(
    get, path = "/queues", tag = "queues", operation_id = "queues_list",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(QueuesQuery),
    responses(
        (status = 200, description = "A page of queues.", body = QueuePage),
    ),
)]
pub async fn list(
    caller: Caller<Read>,
    State(app): State<App>,
    Query(query): Query<QueuesQuery>,
) -> Result<Reply<QueuePage>, Error> {
    let mut check = Check::default();
    let size =
        PageSize::read(query.limit, DEFAULT_PAGE_QUEUES, limits::MAX_PAGE_QUEUES, &mut check);
    check.finish()?;
    let list = List::of(caller.project_id, "queues");
    let after = cursor::read_text(&app, list, query.cursor.as_deref())?.unwrap_or_default();
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let mut names =
        store::queues::counts::queue_names(&mut conn, caller.project_id, &after, size.one_more())
            .await?;
    drop(conn);
    let next_cursor = size.cut(&mut names, |it| cursor::write_text(&app, list, it));
    let queues = read(&app, caller.project_id, &names).await?;
    let mut queues: Vec<_> = queues.into_iter().map(|(queue, _)| queue).collect();
    let waits = |it: &Queue| it.oldest_ready_age_seconds.unwrap_or(0);
    let mut slow: Vec<_> = queues.iter_mut().filter(|it| waits(it) > LONG_WAIT_SECONDS).collect();
    slow.sort_by_key(|it| Reverse(waits(it)));
    slow.truncate(MAX_EXPLAINED_QUEUES);
    explain_oldest(&app, caller.project_id, slow).await?;
    Ok(Reply(QueuePage::of(queues, next_cursor)))
}

/// Read a queue.
#[utoipa::path(
    get, path = "/queues/{queue}", tag = "queues", operation_id = "queues_get",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(("queue" = String, Path, description = "The queue.", example = "default")),
    responses(
        (status = 200, description = "The queue.", body = Queue),
        (status = 400, description = "The name is invalid.", body = ErrorBody),
        (status = 404, description = "The queue does not exist.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<Read>,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
) -> Result<Tagged<Queue>, Error> {
    let mut check = Check::default();
    check.name("queue", &queue, limits::MAX_QUEUE_CHARS);
    check.finish()?;
    known(&app, caller.project_id, &queue).await.map(Tagged)
}

/// One queue, if it exists.
async fn known(app: &App, project_id: ProjectId, queue: &str) -> Result<Queue, Error> {
    let known = if_known(app, project_id, queue).await?;
    let mut queue = known.ok_or(Error::QueueNotFound)?;
    explain_oldest(app, project_id, vec![&mut queue]).await?;
    Ok(queue)
}

/// One queue, if it exists; without the reason why its oldest job waits.
pub(super) async fn if_known(
    app: &App,
    project_id: ProjectId,
    queue: &str,
) -> Result<Option<Queue>, Error> {
    let found = read(app, project_id, &[queue.to_owned()]).await?;
    Ok(found.into_iter().find(|(_, is_known)| *is_known).map(|it| it.0))
}

/// Says why the oldest ready jobs of these queues wait.
async fn explain_oldest(
    app: &App,
    project_id: ProjectId,
    queues: Vec<&mut Queue>,
) -> Result<(), Error> {
    let oldest = |it: &Queue| it.oldest_ready_job_id.as_ref()?.parse().ok();
    let ids: Vec<JobId> = queues.iter().filter_map(|it| oldest(it)).collect();
    let mut reasons = explain::reasons(&app.engine, project_id, &ids).await?;
    for queue in queues {
        let found = oldest(queue).and_then(|id| reasons.remove(&id));
        (queue.oldest_ready_reason, queue.oldest_ready_summary) = found.unzip();
    }
    Ok(())
}

/// One queue that is known to exist.
async fn one(app: &App, project_id: ProjectId, queue: String) -> Result<Reply<Queue>, Error> {
    let found = read(app, project_id, &[queue]).await?;
    found.into_iter().next().map(|(queue, _)| Reply(queue)).ok_or(Error::QueueNotFound)
}

/// Queues, and whether they exist.
async fn read(
    app: &App,
    project_id: ProjectId,
    names: &[String],
) -> Result<Vec<(Queue, bool)>, Error> {
    let mut conn = app.engine.pools.read_for(project_id).await?;
    let rows = store::queues::counts::queues(&mut conn, project_id, names).await?;
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let paused = store::queues::paused_types(&mut conn, project_id, &names).await?;
    let with_knowledge = |row: QueueRow| {
        let is_known = row.is_known;
        (Queue::of(row, &paused), is_known)
    };
    Ok(rows.into_iter().map(with_knowledge).collect())
}
