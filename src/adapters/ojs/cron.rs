//! Cron jobs. A schedule's name is its id among the project's recurring schedules.

use axum::{extract::State, http::StatusCode};
use fencepost_domain::{
    error::Error,
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
    auth::{Caller, ReadPayloads, Schedule},
    wire::{
        audit::{self, NewAuditEntry},
        extract::Json,
        validate::Check,
    },
};
use serde::Serialize;
use serde_json::{Value, json, value::RawValue};
use utoipa::ToSchema;

use super::{
    ErrorBody, Reply,
    accept::{
        accept_args, accept_queue, accept_rank, accept_retry, accept_timeout, check_type,
        take_options,
    },
    fields::{Fields, args, time},
};
use crate::params::PathParams;

const DEFAULT_TIMEZONE: &str = "UTC";

/// A schedule.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = OjsCron)]
pub struct CronView {
    name: String,
    /// The expression, under both of its names.
    expression: String,
    cron: String,
    timezone: String,
    enabled: bool,
    overlap_policy: &'static str,
    #[serde(rename = "type")]
    job_type: String,
    queue: String,
    #[schema(value_type = Vec<serde_json::Value>)]
    args: Box<RawValue>,
    next_run_at: Option<String>,
    last_run_at: Option<String>,
    created_at: String,
    updated_at: String,
}

/// One schedule.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OjsCronReply)]
pub struct CronReply {
    cron: CronView,
    /// The same, as the HTTP binding calls it.
    cron_job: CronView,
}

/// A list of schedules.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OjsCronsReply)]
pub struct CronsReply {
    crons: Vec<CronView>,
    /// The same, as the HTTP binding calls it.
    cron_jobs: Vec<CronView>,
}

/// The overlap policy, in this protocol's words.
fn policy_name(overlap: OverlapPolicy) -> &'static str {
    match overlap {
        OverlapPolicy::Allow => "allow",
        OverlapPolicy::Skip => "skip",
        OverlapPolicy::QueueOne => "enqueue",
        OverlapPolicy::CancelPrevious => "cancel_previous",
    }
}

impl CronReply {
    fn of(engine: &Engine, row: ScheduleRow) -> Result<Self, Error> {
        let cron = CronView::of(engine, row)?;
        Ok(Self { cron_job: cron.clone(), cron })
    }
}

impl CronView {
    fn of(engine: &Engine, row: ScheduleRow) -> Result<Self, Error> {
        let args = args(&row.payload);
        Ok(Self {
            next_run_at: schedules::next_run_at(engine, &row).map(time),
            name: row.id,
            expression: row.cron_expression.clone(),
            cron: row.cron_expression,
            timezone: row.timezone,
            enabled: !row.is_paused,
            overlap_policy: policy_name(row.overlap),
            job_type: row.job_type,
            queue: row.queue,
            args: args?,
            last_run_at: row.last_run_at.map(time),
            created_at: time(row.created_at),
            updated_at: time(row.updated_at),
        })
    }
}

/// Create or replace a schedule.
#[utoipa::path(
    post, path = "/v1/cron", tag = "cron", operation_id = "put_cron",
    request_body(content = Object, description = "`name`, `expression`, `job_template` with `type`, `args` and `options`; or, without a template, `cron`, `type`, `args`, `options`."),
    responses(
        (status = 201, description = "Created.", body = CronReply),
        (status = 200, description = "Changed.", body = CronReply),
        (status = 409, description = "Another job type has the name.", body = ErrorBody),
        (status = 422, description = "The retry policy is invalid.", body = ErrorBody),
    ),
)]
pub async fn put(
    caller: Caller<Schedule>,
    State(app): State<App>,
    Json(sent): Json<Fields>,
) -> Result<Reply<CronReply>, Error> {
    let schedule = accept(sent, &caller.limits)?;
    let written = schedules::write(&app.engine, caller.project_id, &schedule, &caller.limits);
    let (row, is_new) = written.await?;
    audit::note(&app, &caller, NewAuditEntry::to("recurring.put", &*row.id)).await;
    let status = if is_new { StatusCode::CREATED } else { StatusCode::OK };
    Ok(Reply(status, CronReply::of(&app.engine, row)?))
}

/// The expression, which has two names.
fn accept_expression(sent: &mut Fields, check: &mut Check) -> String {
    let other: Option<String> = sent.take("cron", check);
    let expression: Option<String> = sent.take("expression", check);
    if expression.is_some() && other.is_some() && expression != other {
        check.refuse("cron", "is another value than `expression`: send one of them");
    }
    let expression = expression.or(other).unwrap_or_default();
    check.name("expression", &expression, limits::MAX_CRON_CHARS);
    expression
}

fn accept(mut sent: Fields, plan: &Limits) -> Result<WrittenSchedule, Error> {
    let mut check = Check::default();
    let name: Option<String> = sent.need("name", &mut check);
    check.optional_name("name", name.as_deref(), limits::MAX_SCHEDULE_ID_CHARS);
    let expression = accept_expression(&mut sent, &mut check);
    let timezone: Option<String> = sent.take("timezone", &mut check);
    check.optional_name("timezone", timezone.as_deref(), limits::MAX_CRON_CHARS);
    let overlap = match sent.take::<String>("overlap_policy", &mut check).as_deref() {
        None | Some("skip") => OverlapPolicy::Skip,
        Some("allow") => OverlapPolicy::Allow,
        Some("enqueue") => OverlapPolicy::QueueOne,
        Some("cancel_previous") => OverlapPolicy::CancelPrevious,
        Some(_) => {
            check.refuse("overlap_policy", "must be skip, allow, enqueue or cancel_previous");
            OverlapPolicy::Skip
        }
    };
    let is_enabled = sent.take("enabled", &mut check).unwrap_or(true);
    let template: Option<Fields> = sent.take("job_template", &mut check);
    for fields in template.iter().chain([&sent]) {
        for name in ["meta", "labels"] {
            fields.refuse(name, "is not supported for schedules", &mut check);
        }
    }
    let mut template = template.unwrap_or(sent);
    let job_type: Option<String> = template.need("type", &mut check);
    job_type.iter().for_each(|it| check_type(it, &mut check));
    let payload = accept_args(&mut template, plan, &mut check)?;
    let mut options: Fields = take_options(&mut template, &mut check);
    let mut inner = Check::below("options.");
    let queue = accept_queue(&mut options, &mut inner);
    let rank = accept_rank(&mut options, &mut inner);
    let timeout_seconds = accept_timeout(&mut options, &mut inner);
    let refused = [
        "rate_limit",
        "unique",
        "labels",
        "meta",
        "pending",
        "expires_at",
        "delay_until",
        "scheduled_at",
    ];
    for name in refused {
        options.refuse(name, "is not supported for schedules' jobs", &mut inner);
    }
    let (retry, max_attempts) = accept_retry(&mut options, &mut inner);
    check.absorb(inner);
    check.finish()?;
    Ok(WrittenSchedule {
        id: name.unwrap_or_default(),
        job_type: job_type.unwrap_or_default(),
        cron_expression: expression,
        timezone: timezone.unwrap_or_else(|| DEFAULT_TIMEZONE.to_owned()),
        queue,
        group: None,
        payload,
        rank,
        retry: Some(retry),
        overlap,
        catch_up: CatchUp::One,
        spread_seconds: 0,
        is_paused: !is_enabled,
        max_attempts: Some(max_attempts),
        timeout_seconds: Some(timeout_seconds),
    })
}

/// List schedules: the first 200, by name.
#[utoipa::path(
    get, path = "/v1/cron", tag = "cron", operation_id = "list_cron",
    responses((status = 200, description = "The schedules.", body = CronsReply)),
)]
pub async fn list(
    caller: Caller<ReadPayloads>,
    State(app): State<App>,
) -> Result<Reply<CronsReply>, Error> {
    let limit = limits::MAX_PAGE_SCHEDULES.into();
    let rows = schedules::page(&app.engine, caller.project_id, "", limit).await?;
    let crons: Vec<_> =
        rows.into_iter().map(|it| CronView::of(&app.engine, it)).collect::<Result<_, _>>()?;
    Ok(Reply::ok(CronsReply { cron_jobs: crons.clone(), crons }))
}

/// Read a schedule.
#[utoipa::path(
    get, path = "/v1/cron/{name}", tag = "cron", operation_id = "get_cron",
    params(("name" = String, Path, description = "The schedule.")),
    responses(
        (status = 200, description = "The schedule.", body = CronReply),
        (status = 404, description = "No such schedule.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<ReadPayloads>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<CronReply>, Error> {
    let row = schedules::find(&app.engine, caller.project_id, params.get("name")).await?;
    Ok(Reply::ok(CronReply::of(&app.engine, row)?))
}

/// Delete a schedule; its jobs stay.
#[utoipa::path(
    delete, path = "/v1/cron/{name}", tag = "cron", operation_id = "delete_cron",
    params(("name" = String, Path, description = "The schedule.")),
    responses(
        (status = 200, description = "Deleted.", body = Object),
        (status = 404, description = "No such schedule.", body = ErrorBody),
    ),
)]
pub async fn delete(
    caller: Caller<Schedule>,
    State(app): State<App>,
    params: PathParams,
) -> Result<Reply<Value>, Error> {
    let name = params.get("name");
    let mut row = schedules::find(&app.engine, caller.project_id, name).await?;
    if !caller.who.may_read_payloads() {
        "null".clone_into(&mut row.payload);
    }
    schedules::delete(&app.engine, caller.project_id, name).await?;
    audit::note(&app, &caller, NewAuditEntry::to("recurring.deleted", name)).await;
    Ok(Reply::ok(json!({"deleted": true, "name": name, "cron": CronView::of(&app.engine, row)?})))
}
