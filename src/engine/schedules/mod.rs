//! Schedules: validating, storing and reading them.

pub mod fire;

use chrono::{DateTime, TimeDelta, Utc};

use super::Engine;
use crate::{
    domain::{cron::InvalidSchedule, plan::Limits, schedule::Schedule},
    error::{Error, FieldError},
    ids::ProjectId,
    store::schedules::{self, ScheduleCount},
    wakeups::BackgroundTask,
};

pub use crate::store::schedules::{FireRow, RegisteredSchedule, ScheduleRow, WrittenSchedule};

/// Why a schedule is refused, as an error of the API.
#[must_use]
pub fn refusal(error: &InvalidSchedule) -> Error {
    let field = FieldError::new(error.field(), error.to_string());
    match error {
        InvalidSchedule::Cron(_) | InvalidSchedule::Never | InvalidSchedule::TooOften(..) => {
            Error::InvalidCron(field)
        }
        InvalidSchedule::Zone(_) => Error::InvalidTimezone(field),
        InvalidSchedule::Name => Error::Invalid(vec![field]),
    }
}

/// Parses a schedule and computes its first ticks. An expression that never fires takes tens of
/// milliseconds, so this runs outside the request's thread.
async fn read(
    expression: &str,
    timezone: &str,
    now: DateTime<Utc>,
    min_period: TimeDelta,
) -> Result<Result<Schedule, InvalidSchedule>, Error> {
    let (expression, timezone) = (expression.to_owned(), timezone.to_owned());
    let reading = tokio::task::spawn_blocking(move || {
        let schedule = Schedule::parse(&expression, &timezone)?;
        match schedule.period(now)? {
            Some(period) if period < min_period => {
                Err(InvalidSchedule::TooOften(period.num_seconds(), min_period.num_seconds()))
            }
            _ => Ok(schedule),
        }
    });
    reading.await.map_err(Error::internal)
}

/// A valid schedule, and the database's clock.
///
/// # Errors
/// [`Error::InvalidCron`], [`Error::InvalidTimezone`].
pub async fn check(
    engine: &Engine,
    expression: &str,
    timezone: &str,
    min_period: TimeDelta,
) -> Result<(Schedule, DateTime<Utc>), Error> {
    let mut conn = engine.pools.people.acquire().await?;
    let now = schedules::clock(&mut conn).await?;
    drop(conn);
    let read = read(expression, timezone, now, min_period).await?;
    read.map(|it| (it, now)).map_err(|error| refusal(&error))
}

/// Stores a schedule, and returns it with whether it is new.
///
/// # Errors
/// [`Error::InvalidCron`], [`Error::InvalidTimezone`]. [`Error::ScheduleTypeConflict`] when another
/// job type has the id. [`Error::QuotaExceeded`] when the project has as many as its plan allows.
pub async fn write(
    engine: &Engine,
    project_id: ProjectId,
    schedule: &WrittenSchedule,
    limits: &Limits,
) -> Result<(ScheduleRow, bool), Error> {
    let (cron, timezone) = (&schedule.cron_expression, &schedule.timezone);
    check(engine, cron, timezone, limits.min_schedule_period()).await?;
    let mut conn = engine.pools.read_for(project_id).await?;
    let ScheduleCount { schedules: many, .. } = schedules::count(&mut conn, project_id).await?;
    let is_known = schedules::find(&mut conn, project_id, &schedule.id).await?.is_some();
    let max = limits.max_schedules();
    if !is_known && many >= max {
        return Err(Error::QuotaExceeded { what: "recurring schedules", max });
    }
    let kept = schedules::upsert(&mut conn, project_id, schedule).await?;
    let is_new = kept.ok_or(Error::ScheduleTypeConflict)?;
    let row = schedules::find(&mut conn, project_id, &schedule.id).await?;
    drop(conn);
    engine.notifier.wake.ask(BackgroundTask::Plan);
    Ok((row.ok_or(Error::ScheduleNotFound)?, is_new))
}

/// Stores the schedules that a worker registers. Returns the rejected ones, by index, with the
/// reason.
pub async fn store_registered(
    engine: &Engine,
    project_id: ProjectId,
    sent: &[(usize, RegisteredSchedule)],
    limits: &Limits,
) -> Result<Vec<(usize, String)>, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let ScheduleCount { mut schedules, now } = schedules::count(&mut conn, project_id).await?;
    let (mut rejected, mut is_changed) = (Vec::new(), false);
    let (min_period, max) = (limits.min_schedule_period(), limits.max_schedules());
    for (place, schedule) in sent {
        let known = schedules::find(&mut conn, project_id, &schedule.id).await?;
        // Most workers register what is stored already: skip the write.
        if known.as_ref().is_some_and(|it| is_unchanged(schedule, it)) {
            continue;
        }
        let timezone = schedule.timezone.as_deref();
        let timezone = timezone.or(known.as_ref().map(|it| it.timezone.as_str())).unwrap_or("UTC");
        let read = read(&schedule.cron_expression, timezone, now, min_period).await?;
        if let Err(error) = read {
            rejected.push((*place, format!("{}: {error}", error.field())));
        } else if known.is_none() && schedules >= max {
            rejected.push((*place, format!("the project has {max} schedules already")));
        } else if !schedules::upsert_registered(&mut conn, project_id, schedule).await? {
            rejected.push((
                *place,
                format!("job_type: the schedule {} exists with another job type", schedule.id),
            ));
        } else {
            is_changed = true;
            schedules += i64::from(known.is_none());
        }
    }
    if is_changed {
        engine.notifier.wake.ask(BackgroundTask::Plan);
    }
    Ok(rejected)
}

/// Whether a registered schedule equals the stored one.
fn is_unchanged(sent: &RegisteredSchedule, kept: &ScheduleRow) -> bool {
    let agrees = |sent: &Option<String>, kept: &str| sent.as_ref().is_none_or(|it| it == kept);
    sent.job_type == kept.job_type
        && sent.cron_expression == kept.cron_expression
        && agrees(&sent.timezone, &kept.timezone)
        && agrees(&sent.queue, &kept.queue)
        && sent.max_attempts.is_none_or(|it| it == kept.max_attempts)
        && sent.timeout_seconds.is_none_or(|it| it == kept.timeout_seconds)
        && kept.problem.is_none()
}

/// One schedule.
///
/// # Errors
/// [`Error::ScheduleNotFound`].
pub async fn find(engine: &Engine, project_id: ProjectId, id: &str) -> Result<ScheduleRow, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    schedules::find(&mut conn, project_id, id).await?.ok_or(Error::ScheduleNotFound)
}

/// The schedules of a project after `after`, by id.
pub async fn page(
    engine: &Engine,
    project_id: ProjectId,
    after: &str,
    limit: i64,
) -> Result<Vec<ScheduleRow>, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    Ok(schedules::page(&mut conn, project_id, after, limit).await?)
}

/// Deletes a schedule; its jobs stay.
///
/// # Errors
/// [`Error::ScheduleNotFound`].
pub async fn delete(engine: &Engine, project_id: ProjectId, id: &str) -> Result<(), Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    match schedules::delete(&mut conn, project_id, id).await? {
        true => Ok(()),
        false => Err(Error::ScheduleNotFound),
    }
}

/// Pauses or resumes a schedule. Ticks that pass while it is paused do not fire.
///
/// # Errors
/// [`Error::ScheduleNotFound`].
pub async fn set_paused(
    engine: &Engine,
    project_id: ProjectId,
    id: &str,
    is_paused: bool,
) -> Result<ScheduleRow, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    if !schedules::set_paused(&mut conn, project_id, id, is_paused).await? {
        return Err(Error::ScheduleNotFound);
    }
    drop(conn);
    engine.notifier.wake.ask(BackgroundTask::Plan);
    find(engine, project_id, id).await
}

/// The next tick; none while the schedule is paused, or if it never fires again.
#[must_use]
pub fn next_run_at(row: &ScheduleRow) -> Option<DateTime<Utc>> {
    if row.is_paused || row.problem.is_some() {
        return None;
    }
    let planned = || {
        let schedule = Schedule::parse(&row.cron_expression, &row.timezone).ok()?;
        schedule.next_after(row.now).ok()
    };
    row.next_tick.or_else(planned)
}
