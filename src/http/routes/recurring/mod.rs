//! `GET` and `POST /v1/recurring`, `PUT`, `GET` and `DELETE /v1/recurring/{recurring_id}`:
//! recurring schedules.

pub mod control;
pub mod times;

use axum::{Json as Reply, extract::State, http::StatusCode, response::Response};
use chrono::{DateTime, SecondsFormat, Utc};
use fencepost_domain::{
    backoff::RetryPolicy,
    error::Error,
    ids::ProjectId,
    job::DEFAULT_QUEUE,
    limits,
    plan::Limits,
    schedule::{CatchUp, OverlapPolicy},
};
use fencepost_engine::{
    Engine,
    schedules::{self, ScheduleRow, WrittenSchedule},
};
use fencepost_web::{
    app::App,
    auth::{Caller, Read, Schedule},
    wire::{
        extract::{Json, NameInPath, Object, Query, RequestBody},
        openapi::{chars, range},
        validate::{Check, stored_json},
    },
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};

use crate::{
    cursor::{self, List},
    error::ErrorBody,
    idempotency::{self, Answer, Ids, Once},
    page::{PageSize, page},
    redact::{self, Redact, shown},
    retry::RetryRequest,
    routes::audit::{self, NewAuditEntry},
    settings::{self, Preconditions, Settings, Tagged},
};

const DEFAULT_TIMEZONE: &str = "UTC";
const DEFAULT_PAGE_SCHEDULES: u32 = 50;

/// A recurring schedule.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct RecurringSchedule {
    /// Id of the schedule.
    #[schema(example = "rjob_CleanupExpiredSessions")]
    pub id: String,
    /// Job type of its jobs.
    pub job_type: String,
    /// Queue of its jobs.
    pub queue: String,
    /// Group of its jobs.
    #[serde(default)]
    #[schema(required, example = "customer-3")]
    pub group: Option<String>,
    /// Cron expression.
    pub cron_expression: String,
    /// IANA time zone of the expression.
    pub timezone: String,
    /// False: the schedule is paused.
    pub enabled: bool,
    /// Last tick that fired; null: none.
    #[schema(required)]
    pub last_run_at: Option<DateTime<Utc>>,
    /// Next tick; null: it is paused, or `problem` says why.
    #[schema(required)]
    pub next_run_at: Option<DateTime<Utc>>,
    /// Why it does not fire; null: it does.
    #[schema(required)]
    pub problem: Option<String>,
    /// What keeps its jobs from running: ticks that are skipped again and again, a paused queue or
    /// type, or no live worker that would take them; null: nothing that is known.
    #[serde(default)]
    #[schema(required)]
    pub warning: Option<String>,
    /// Payload of its jobs, byte for byte.
    #[schema(value_type = serde_json::Value)]
    pub payload: Box<RawValue>,
    /// True if the payload is null because the caller may not read it.
    pub redacted: bool,
    /// Priority of its jobs.
    pub priority: i16,
    /// Retry policy of its jobs; null: the queue's setting, or the default.
    #[schema(required)]
    pub retry: Option<RetryPolicy>,
    /// Policy for a tick while the job of an earlier one has not ended.
    pub overlap: OverlapPolicy,
    /// Policy for missed ticks.
    pub catch_up: CatchUp,
    /// Fixed per-schedule offset of at most this many seconds, to spread load.
    pub spread_seconds: i32,
    /// Failures after which its jobs are dead-lettered.
    pub max_attempts: i32,
    /// Timeout of one attempt of its jobs, in seconds.
    pub timeout_seconds: i32,
    /// True if a worker registered it, and it was not written by other means since: a registration
    /// may change it.
    pub registered: bool,
    /// When it was created.
    pub created_at: DateTime<Utc>,
    /// When it was last changed.
    pub updated_at: DateTime<Utc>,
    /// Version of the settings, also in the header `ETag`. A write with it as `If-Match` is refused
    /// if they have changed since.
    #[serde(default)]
    #[schema(required, example = "\"4f0c2a9d1be87a3355d0c61e\"")]
    pub etag: String,
}

impl Settings for RecurringSchedule {
    const FIELDS: &'static [&'static str] = &[
        "job_type",
        "queue",
        "group",
        "cron_expression",
        "timezone",
        "payload",
        "priority",
        "retry",
        "overlap",
        "catch_up",
        "spread_seconds",
        "enabled",
        "max_attempts",
        "timeout_seconds",
    ];

    fn etag(&mut self) -> &mut String {
        &mut self.etag
    }
}

fn failing(since: DateTime<Utc>) -> String {
    let since = since.to_rfc3339_opts(SecondsFormat::Secs, true);
    format!("the server cannot store its ticks since {since}, and tries again")
}

impl Redact for RecurringSchedule {
    fn redact(&mut self) {
        self.redacted = true;
        self.payload = redact::hidden();
    }
}

impl RecurringSchedule {
    fn of(engine: &Engine, row: ScheduleRow) -> Result<Self, Error> {
        Ok(Self {
            next_run_at: schedules::next_run_at(engine, &row),
            warning: row.outlook().warning(&row.queue, &row.job_type),
            payload: stored_json(row.payload)?,
            redacted: false,
            id: row.id,
            job_type: row.job_type,
            queue: row.queue,
            group: row.group,
            cron_expression: row.cron_expression,
            timezone: row.timezone,
            enabled: !row.is_paused,
            last_run_at: row.last_run_at,
            problem: row.problem.or_else(|| row.failing_since.map(failing)),
            priority: -row.rank,
            retry: row.retry.as_ref().map(|it| RetryPolicy::stored(Some(it))),
            overlap: row.overlap,
            catch_up: row.catch_up,
            spread_seconds: row.spread_seconds,
            max_attempts: row.max_attempts,
            timeout_seconds: row.timeout_seconds,
            registered: row.is_registered,
            created_at: row.created_at,
            updated_at: row.updated_at,
            etag: String::new(),
        }
        .tagged())
    }
}

/// The audit log's view of it, without the payload.
pub(super) fn facts(row: &ScheduleRow) -> String {
    serde_json::json!({
        "job_type": row.job_type, "queue": row.queue, "group": row.group,
        "cron_expression": row.cron_expression,
        "timezone": row.timezone, "priority": -row.rank, "overlap": row.overlap,
        "catch_up": row.catch_up, "enabled": !row.is_paused, "max_attempts": row.max_attempts,
        "timeout_seconds": row.timeout_seconds, "registered": row.is_registered,
    })
    .to_string()
}

/// A recurring schedule to store.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({
    "job_type": "report.daily", "cron_expression": "0 7 * * MON-FRI", "timezone": "Europe/Berlin"
}))]
pub struct RecurringScheduleRequest {
    /// Job type of its jobs.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_JOB_TYPE_CHARS)))))]
    job_type: String,
    /// Five fields, six with seconds first, or `@daily` and similar.
    #[schema(example = "0 3 * * *", extensions(("bounds" = json!(chars(1, limits::MAX_CRON_CHARS)))))]
    cron_expression: String,
    /// IANA time zone of the expression. Default: UTC.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_NAME_CHARS)))))]
    timezone: Option<String>,
    /// Queue of its jobs. Default: `default`.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_QUEUE_CHARS)))))]
    queue: Option<String>,
    /// Group of its jobs within the queue.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_GROUP_CHARS)))))]
    group: Option<String>,
    /// Payload of its jobs: any JSON of at most 256 KiB, or less by plan. Default: null.
    #[serde(default)]
    #[schema(value_type = serde_json::Value, required = false)]
    payload: Option<Box<RawValue>>,
    /// Priority of its jobs. Default: 0.
    #[schema(extensions(("bounds" = json!(range(limits::MIN_PRIORITY, limits::MAX_PRIORITY)))))]
    priority: Option<i16>,
    /// Retry policy of its jobs. Default: the queue's setting.
    #[schema(value_type = Option<RetryRequest>)]
    retry: Option<Object<RetryRequest>>,
    /// Policy for a tick while the job of an earlier one has not ended. Default: allow.
    overlap: Option<OverlapPolicy>,
    /// Policy for missed ticks. Default: one.
    catch_up: Option<CatchUp>,
    /// Fixed per-schedule offset of at most this many seconds, to spread load. Default: 0.
    #[schema(extensions(("bounds" = json!(range(0, limits::MAX_SPREAD_SECONDS)))))]
    spread_seconds: Option<i32>,
    /// False stores the schedule paused. Default: true.
    enabled: Option<bool>,
    /// Failures after which its jobs are dead-lettered. Default: 3, or the stored value.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_MAX_ATTEMPTS)))))]
    max_attempts: Option<i32>,
    /// Timeout of one attempt of its jobs, in seconds. Default: 1800, or the stored value.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_TIMEOUT_SECONDS)))))]
    timeout_seconds: Option<i32>,
}

impl RequestBody for RecurringScheduleRequest {}

impl RecurringScheduleRequest {
    fn accept(self, id: String, plan: &Limits) -> Result<WrittenSchedule, Error> {
        let mut check = Check::default();
        check.path_name("recurring_id", &id, limits::MAX_SCHEDULE_ID_CHARS);
        check.name("job_type", &self.job_type, limits::MAX_JOB_TYPE_CHARS);
        check.name("cron_expression", &self.cron_expression, limits::MAX_CRON_CHARS);
        check.optional_name("timezone", self.timezone.as_deref(), limits::MAX_CRON_CHARS);
        check.optional_name("queue", self.queue.as_deref(), limits::MAX_QUEUE_CHARS);
        if let Some(group) = &self.group {
            check.path_name("group", group, limits::MAX_GROUP_CHARS);
        }
        let priority = self.priority.unwrap_or(0);
        check.range("priority", priority, limits::MIN_PRIORITY, limits::MAX_PRIORITY);
        let spread_seconds = self.spread_seconds.unwrap_or(0);
        check.range("spread_seconds", spread_seconds, 0, limits::MAX_SPREAD_SECONDS);
        if let Some(max_attempts) = self.max_attempts {
            check.range("max_attempts", max_attempts, 1, limits::MAX_MAX_ATTEMPTS);
        }
        if let Some(timeout_seconds) = self.timeout_seconds {
            check.range("timeout_seconds", timeout_seconds, 1, limits::MAX_TIMEOUT_SECONDS);
        }
        let payload = match self.payload {
            Some(payload) => {
                check.size("payload", &payload, plan.max_payload_bytes())?;
                check.depth("payload", &payload);
                Box::<str>::from(payload).into_string()
            }
            None => "null".to_owned(),
        };
        let retry = self.retry.map(|Object(it)| it.accept("retry", &mut check));
        check.finish()?;
        Ok(WrittenSchedule {
            id,
            job_type: self.job_type,
            cron_expression: self.cron_expression,
            timezone: self.timezone.unwrap_or_else(|| DEFAULT_TIMEZONE.to_owned()),
            queue: self.queue.unwrap_or_else(|| DEFAULT_QUEUE.to_owned()),
            group: self.group,
            payload,
            rank: -priority,
            retry,
            overlap: self.overlap.unwrap_or_default(),
            catch_up: self.catch_up.unwrap_or_default(),
            spread_seconds,
            is_paused: !self.enabled.unwrap_or(true),
            max_attempts: self.max_attempts,
            timeout_seconds: self.timeout_seconds,
        })
    }
}

/// Create or replace a schedule.
///
/// Omitted fields are reset to their defaults, except `max_attempts` and `timeout_seconds`. A
/// changed schedule takes effect immediately; missed ticks are not caught up.
#[utoipa::path(
    put, path = "/recurring/{recurring_id}", tag = "recurring", operation_id = "recurring_upsert",
    security(("api_key" = ["schedules"]), ("session" = ["member"])),
    params(("recurring_id" = String, Path, description = "The schedule: a name of your choice.", example = "rjob_report"), settings::Header),
    request_body = RecurringScheduleRequest,
    responses(
        (status = 200, description = "The schedule.", body = RecurringSchedule),
        (status = 400, description = "Invalid request, or the expression cannot be read, never fires, or fires too often.", body = ErrorBody),
        (status = 409, description = "The schedule belongs to another job type.", body = ErrorBody),
    ),
)]
pub async fn put(
    caller: Caller<Schedule>,
    State(app): State<App>,
    NameInPath(id): NameInPath,
    conditions: Preconditions,
    Json(request): Json<RecurringScheduleRequest>,
) -> Result<Tagged<RecurringSchedule>, Error> {
    let schedule = request.accept(id, &caller.limits)?;
    let about = (caller.project_id, format!("schedule {}", schedule.id));
    let current = if_stored(&app, caller.project_id, &schedule.id);
    let write = write(&app, &caller, &schedule);
    let row = conditions.write(&app, about, current, write).await?;
    Ok(Tagged(shown(&caller.who, RecurringSchedule::of(&app.engine, row)?)))
}

async fn if_stored(
    app: &App,
    project_id: ProjectId,
    id: &str,
) -> Result<Option<RecurringSchedule>, Error> {
    match schedules::find(&app.engine, project_id, id).await {
        Ok(row) => RecurringSchedule::of(&app.engine, row).map(Some),
        Err(Error::ScheduleNotFound) => Ok(None),
        Err(error) => Err(error),
    }
}

async fn write(
    app: &App,
    caller: &Caller<Schedule>,
    schedule: &WrittenSchedule,
) -> Result<ScheduleRow, Error> {
    let before = schedules::find(&app.engine, caller.project_id, &schedule.id).await.ok();
    let (row, _) =
        schedules::write(&app.engine, caller.project_id, schedule, &caller.limits).await?;
    let (before, after) = (before.as_ref().map(facts), Some(facts(&row)));
    let entry = NewAuditEntry { before, after, ..NewAuditEntry::to("recurring.put", &*row.id) };
    audit::note(app, caller, entry).await;
    Ok(row)
}

/// Create a schedule.
///
/// Its id is generated. To choose the id yourself, use `PUT`.
#[utoipa::path(
    post, path = "/recurring", tag = "recurring", operation_id = "recurring_create",
    security(("api_key" = ["schedules"]), ("session" = ["member"])),
    params(idempotency::Header),
    request_body = RecurringScheduleRequest,
    responses(
        (status = 201, description = "The schedule is stored.", body = RecurringSchedule,
         headers(("Location" = String, description = "The schedule's path."))),
        (status = 400, description = "Invalid request, or the expression cannot be read, never fires, or fires too often.", body = ErrorBody),
    ),
)]
pub async fn create(
    caller: Caller<Schedule>,
    State(app): State<App>,
    Once { request, repeat }: Once<RecurringScheduleRequest>,
) -> Result<Response, Error> {
    let (running, by) = (app.clone(), caller.clone());
    repeat
        .once(&app, &caller, async move |ids: Ids| {
            let (engine, limits) = (&running.engine, &by.limits);
            let schedule = request.accept(ids.schedule().to_string(), limits)?;
            let (row, _) = schedules::write(engine, by.project_id, &schedule, limits).await?;
            let entry = NewAuditEntry {
                after: Some(facts(&row)),
                ..NewAuditEntry::to("recurring.put", &*row.id)
            };
            audit::note(&running, &by, entry).await;
            let location = Some(format!("/v1/recurring/{}", row.id));
            Answer::new(
                StatusCode::CREATED,
                location,
                &shown(&by.who, RecurringSchedule::of(engine, row)?),
            )
        })
        .await
}

/// Page of schedules.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct RecurringQuery {
    /// Maximum number of schedules to return. Default: 50.
    #[param(minimum = 1, maximum = 200)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

page! {
    /// A page of recurring schedules, by id.
    RecurringPage {
        /// Schedules of the page.
        recurring: RecurringSchedule
    }
}

/// List schedules.
///
/// Schedules created with the API and those that workers have registered, by id.
#[utoipa::path(
    get, path = "/recurring", tag = "recurring", operation_id = "recurring_list",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(RecurringQuery),
    responses(
        (status = 200, description = "A page of schedules.", body = RecurringPage),
    ),
)]
pub async fn list(
    caller: Caller<Read>,
    State(app): State<App>,
    Query(query): Query<RecurringQuery>,
) -> Result<Reply<RecurringPage>, Error> {
    let mut check = Check::default();
    let size =
        PageSize::read(query.limit, DEFAULT_PAGE_SCHEDULES, limits::MAX_PAGE_SCHEDULES, &mut check);
    check.finish()?;
    let list = List::of(caller.project_id, "recurring");
    let after = cursor::read_text(&app, list, query.cursor.as_deref())?.unwrap_or_default();
    let mut rows = schedules::page(&app.engine, caller.project_id, &after, size.one_more()).await?;
    let next_cursor = size.cut_by_bytes(
        &mut rows,
        |it| it.payload.len(),
        |it| cursor::write_text(&app, list, &it.id),
    );
    let recurring = rows
        .into_iter()
        .map(|it| RecurringSchedule::of(&app.engine, it))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(Reply(RecurringPage::of(shown(&caller.who, recurring), next_cursor)))
}

/// Read a schedule.
#[utoipa::path(
    get, path = "/recurring/{recurring_id}", tag = "recurring", operation_id = "recurring_get",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(("recurring_id" = String, Path, description = "The schedule.", example = "rjob_report")),
    responses(
        (status = 200, description = "The schedule.", body = RecurringSchedule),
        (status = 404, description = "The project has no such schedule.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<Read>,
    State(app): State<App>,
    NameInPath(id): NameInPath,
) -> Result<Tagged<RecurringSchedule>, Error> {
    let row = schedules::find(&app.engine, caller.project_id, &id).await?;
    Ok(Tagged(shown(&caller.who, RecurringSchedule::of(&app.engine, row)?)))
}

/// Delete a schedule.
///
/// Its jobs stay. Its fires are kept for 30 days, and belong to a new schedule with the same id.
#[utoipa::path(
    delete, path = "/recurring/{recurring_id}", tag = "recurring", operation_id = "recurring_delete",
    security(("api_key" = ["schedules"]), ("session" = ["member"])),
    params(("recurring_id" = String, Path, description = "The schedule.", example = "rjob_report"), settings::Header),
    responses(
        (status = 204, description = "Deleted."),
        (status = 404, description = "The project has no such schedule.", body = ErrorBody),
    ),
)]
pub async fn delete(
    caller: Caller<Schedule>,
    State(app): State<App>,
    NameInPath(id): NameInPath,
    conditions: Preconditions,
) -> Result<StatusCode, Error> {
    let about = (caller.project_id, format!("schedule {id}"));
    let current = if_stored(&app, caller.project_id, &id);
    let delete = schedules::delete(&app.engine, caller.project_id, &id);
    conditions.write(&app, about, current, delete).await?;
    audit::note(&app, &caller, NewAuditEntry::to("recurring.deleted", id)).await;
    Ok(StatusCode::NO_CONTENT)
}
