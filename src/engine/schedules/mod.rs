//! Schedules: validating, storing and reading them.

pub mod fire;

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use tokio::{sync::Semaphore, time::timeout};

use super::Engine;
use crate::{
    domain::{cron::InvalidSchedule, plan::Limits, schedule::Schedule},
    error::{Error, FieldError},
    ids::ProjectId,
    store::schedules::{self, ScheduleCount},
    wakeups::BackgroundTask,
};

pub use crate::store::schedules::{FireRow, RegisteredSchedule, ScheduleRow, WrittenSchedule};

/// Expressions that a node reads at the same time.
static READERS: Semaphore = Semaphore::const_new(2);
/// How long an expression waits for its turn.
const READ_TIMEOUT: Duration = Duration::from_secs(2);

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

/// Parses a schedule and computes its first ticks: some milliseconds at most, outside of the
/// request's thread. All tenants share [`READERS`], and no caller holds a connection meanwhile.
async fn read(
    expression: &str,
    timezone: &str,
    now: DateTime<Utc>,
    min_period: TimeDelta,
) -> Result<Result<Schedule, InvalidSchedule>, Error> {
    let (expression, timezone) = (expression.to_owned(), timezone.to_owned());
    let turn = timeout(READ_TIMEOUT, READERS.acquire()).await;
    let _turn = turn.map_err(|_| Error::Overloaded)?;
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
/// reason. No connection is held while expressions are read.
///
/// # Errors
/// [`Error::Overloaded`] when others keep reading expressions for too long.
pub async fn store_registered(
    engine: &Engine,
    project_id: ProjectId,
    sent: &[(usize, RegisteredSchedule)],
    limits: &Limits,
) -> Result<Vec<(usize, String)>, Error> {
    let (changed, ScheduleCount { mut schedules, now }) =
        changed_schedules(engine, project_id, sent).await?;
    if changed.is_empty() {
        return Ok(Vec::new());
    }
    let (mut rejected, mut valid) = (Vec::new(), Vec::with_capacity(changed.len()));
    for it in changed {
        let expression = &it.sent.cron_expression;
        match read(expression, &it.timezone, now, limits.min_schedule_period()).await? {
            Err(error) => rejected.push((it.place, format!("{}: {error}", error.field()))),
            Ok(_) => valid.push(it),
        }
    }
    let max = limits.max_schedules();
    let mut conn = engine.pools.read_for(project_id).await?;
    let mut is_changed = false;
    for Changed { place, sent, is_new, .. } in valid {
        if is_new && schedules >= max {
            rejected.push((place, format!("the project has {max} schedules already")));
        } else if !schedules::upsert_registered(&mut conn, project_id, sent).await? {
            let message =
                format!("job_type: the schedule {} exists with another job type", sent.id);
            rejected.push((place, message));
        } else {
            is_changed = true;
            schedules += i64::from(is_new);
        }
    }
    drop(conn);
    if is_changed {
        engine.notifier.wake.ask(BackgroundTask::Plan);
    }
    Ok(rejected)
}

/// A registered schedule that is not stored like this.
struct Changed<'a> {
    place: usize,
    sent: &'a RegisteredSchedule,
    timezone: String,
    is_new: bool,
}

/// Most workers register what is stored already: those are left out.
async fn changed_schedules<'a>(
    engine: &Engine,
    project_id: ProjectId,
    sent: &'a [(usize, RegisteredSchedule)],
) -> Result<(Vec<Changed<'a>>, ScheduleCount), Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let count = schedules::count(&mut conn, project_id).await?;
    let mut changed = Vec::new();
    for (place, sent) in sent {
        let known = schedules::find(&mut conn, project_id, &sent.id).await?;
        if known.as_ref().is_some_and(|it| is_unchanged(sent, it)) {
            continue;
        }
        let is_new = known.is_none();
        let known = known.map(|it| it.timezone);
        let timezone = sent.timezone.clone().or(known).unwrap_or_else(|| "UTC".to_owned());
        changed.push(Changed { place: *place, sent, timezone, is_new });
    }
    Ok((changed, count))
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
