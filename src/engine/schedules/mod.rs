//! Schedules: validating, storing and reading them.

pub mod fire;
pub mod zones;

use std::{collections::HashMap, iter::once, sync::LazyLock, time::Duration};

use chrono::{DateTime, TimeDelta, Utc};
use fencepost_domain::{
    cron::InvalidSchedule,
    error::{Error, FieldError},
    ids::ProjectId,
    plan::Limits,
    schedule::Schedule,
};
use fencepost_fair::each::PerProject;
use fencepost_signals::wakeups::BackgroundTask;
use fencepost_store::schedules::{self, ScheduleCount};
use sqlx::{Acquire, PgConnection};
use tokio::{sync::Semaphore, time::timeout};

use super::{Engine, queues};

pub use fencepost_store::schedules::{FireRow, RegisteredSchedule, ScheduleRow, WrittenSchedule};

/// Expressions that a node reads at the same time, one of each project.
static READERS: Semaphore = Semaphore::const_new(2);
static OF_PROJECT: LazyLock<PerProject> = LazyLock::new(|| PerProject::new(1));
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
    engine: &Engine,
    project_id: ProjectId,
    (expression, timezone): (&str, &str),
    now: DateTime<Utc>,
    min_period: TimeDelta,
) -> Result<Result<Schedule, InvalidSchedule>, Error> {
    let (expression, timezone) = (expression.to_owned(), timezone.to_owned());
    let turn = async {
        let of_project = OF_PROJECT.take(project_id, 1).await;
        (of_project, READERS.acquire().await)
    };
    let _turn = timeout(READ_TIMEOUT, turn).await.map_err(|_| Error::Overloaded)?;
    let agreed = engine.zones.agreed();
    let reading = tokio::task::spawn_blocking(move || {
        let schedule = agreed.schedule(&expression, &timezone)?;
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
    project_id: ProjectId,
    (expression, timezone): (&str, &str),
    min_period: TimeDelta,
) -> Result<(Schedule, DateTime<Utc>), Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let now = schedules::clock(&mut conn).await?;
    drop(conn);
    let read = read(engine, project_id, (expression, timezone), now, min_period).await?;
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
    check(engine, project_id, (cron, timezone), limits.min_schedule_period()).await?;
    queues::check_new_names(engine, project_id, once(("", schedule.queue.as_str()))).await?;
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

/// The outcome of the schedules that a worker registered.
#[derive(Debug, Default)]
pub struct Registered {
    /// Stored ones: as they were, unless they are new, and as they are.
    pub changed: Vec<(Option<ScheduleRow>, ScheduleRow)>,
    /// Rejected ones, by index, with the reason.
    pub rejected: Vec<(usize, String)>,
}

/// Stores the schedules that a worker registers. Those that were written by other means stay as
/// they are. No connection is held while expressions are read.
///
/// # Errors
/// [`Error::Overloaded`] when others keep reading expressions for too long.
pub async fn store_registered(
    engine: &Engine,
    project_id: ProjectId,
    sent: &[(usize, RegisteredSchedule)],
    limits: &Limits,
    admit: impl AsyncFnOnce(usize) -> Result<(), Error>,
) -> Result<Registered, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let ScheduleCount { mut schedules, now } = schedules::count(&mut conn, project_id).await?;
    let mut known = find_known(&mut conn, project_id, sent).await?;
    drop(conn);
    let (mut registered, mut valid) = (Registered::default(), Vec::new());
    let mut accepted = Vec::<(usize, &RegisteredSchedule)>::new();
    for (place, sent) in sent {
        if let Some((first, same)) = accepted.iter().find(|it| it.1.id == sent.id) {
            let reason = format!("recurring_schedules[{first}] has the id `{}`, too", sent.id);
            registered.rejected.extend((*same != sent).then_some((*place, reason)));
            continue;
        }
        let checked =
            check_registered(engine, project_id, sent, known.get(&sent.id), (now, limits)).await?;
        match checked {
            Ok(Change::None) => accepted.push((*place, sent)),
            Ok(Change::Store) => match check_queue(engine, project_id, sent).await? {
                Ok(()) => {
                    accepted.push((*place, sent));
                    valid.push((*place, sent));
                }
                Err(reason) => registered.rejected.push((*place, reason)),
            },
            Err(reason) => registered.rejected.push((*place, reason)),
        }
    }
    if valid.is_empty() {
        return Ok(registered);
    }
    if let Err(refusal) = admit(valid.len()).await {
        let refused = valid.into_iter().map(|(place, _)| (place, refusal.to_string()));
        registered.rejected.extend(refused);
        return Ok(registered);
    }
    let (max, mut stored) = (limits.max_schedules(), Vec::new());
    let mut conn = engine.pools.read_for(project_id).await?;
    let mut tx = conn.begin().await?;
    for (place, sent) in valid {
        let is_new = !known.contains_key(&sent.id);
        if is_new && schedules >= max {
            let reason = format!("the project has {max} schedules already");
            registered.rejected.push((place, reason));
        } else if schedules::upsert_registered(&mut tx, project_id, sent).await? {
            schedules += i64::from(is_new);
            stored.push(sent.id.clone());
        } else {
            registered.rejected.push((place, other_job_type(sent)));
        }
    }
    let rows = schedules::find_all(&mut tx, project_id, &stored).await?;
    tx.commit().await?;
    drop(conn);
    registered.changed = rows.into_iter().map(|it| (known.remove(&it.id), it)).collect();
    engine.notifier.wake.ask(BackgroundTask::Plan);
    Ok(registered)
}

async fn find_known(
    conn: &mut PgConnection,
    project_id: ProjectId,
    sent: &[(usize, RegisteredSchedule)],
) -> sqlx::Result<HashMap<String, ScheduleRow>> {
    let ids: Vec<_> = sent.iter().map(|it| it.1.id.clone()).collect();
    let rows = schedules::find_all(conn, project_id, &ids).await?;
    Ok(rows.into_iter().map(|it| (it.id.clone(), it)).collect())
}

/// A change by a registered schedule.
enum Change {
    /// Nothing: most workers register what is stored already.
    None,
    Store,
}

/// The change by a registered schedule, or the reason of its rejection.
async fn check_registered(
    engine: &Engine,
    project_id: ProjectId,
    sent: &RegisteredSchedule,
    known: Option<&ScheduleRow>,
    (now, limits): (DateTime<Utc>, &Limits),
) -> Result<Result<Change, String>, Error> {
    let RegisteredSchedule { id, cron_expression, timezone, .. } = sent;
    match known {
        Some(known) if known.job_type != sent.job_type => {
            return Ok(Err(other_job_type(sent)));
        }
        Some(known) if is_unchanged(sent, known) => return Ok(Ok(Change::None)),
        Some(known) if !known.is_registered => {
            let reason = "was written by other means, and registrations do not change it";
            return Ok(Err(format!("the schedule {id} {reason}")));
        }
        _ => (),
    }
    let known = known.map(|it| it.timezone.as_str());
    let timezone = timezone.as_deref().or(known).unwrap_or("UTC");
    let min_period = limits.min_schedule_period();
    let read = read(engine, project_id, (cron_expression, timezone), now, min_period).await?;
    let reason = |error: InvalidSchedule| format!("{}: {error}", error.field());
    Ok(read.map(|_| Change::Store).map_err(reason))
}

/// The reason of a rejection for the name of its queue.
async fn check_queue(
    engine: &Engine,
    project_id: ProjectId,
    sent: &RegisteredSchedule,
) -> Result<Result<(), String>, Error> {
    let named = sent.queue.iter().map(|it| ("", it.as_str()));
    match queues::check_new_names(engine, project_id, named).await {
        Ok(()) => Ok(Ok(())),
        Err(Error::Invalid(broken)) => {
            let reasons = broken.iter().map(|it| format!("{}: {}", it.field, it.message));
            Ok(Err(reasons.collect::<Vec<_>>().join("; ")))
        }
        Err(error) => Err(error),
    }
}

fn other_job_type(sent: &RegisteredSchedule) -> String {
    format!("job_type: the schedule {} exists with another job type", sent.id)
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
pub fn next_run_at(engine: &Engine, row: &ScheduleRow) -> Option<DateTime<Utc>> {
    if row.is_paused || row.problem.is_some() {
        return None;
    }
    let planned = || {
        let zones = engine.zones.agreed();
        let schedule = zones.schedule(&row.cron_expression, &row.timezone).ok()?;
        schedule.next_after(row.now).ok()
    };
    row.next_tick.or_else(planned)
}
