//! Firing schedules: one job per tick, on any number of nodes.
//!
//! The jobs of a tick are written shortly before it, in a transaction that waits for the tick by
//! the database's clock and then commits. So ten thousand schedules of one minute fire on time. If
//! the node dies meanwhile, the tick has either fired, or another node fires it.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use chrono::{DateTime, TimeDelta, Utc};
use fencepost_domain::{
    actor::ChangedBy,
    constraint_key,
    error::Error,
    history,
    ids::{JobId, JobKey, ProjectId, TickKey},
    job::StoredState,
    plan::Tenant,
    schedule::{
        DueTicks, Earlier, FireOutcome, GRACE_SECONDS, OverlapPolicy, Schedule, offset_seconds,
    },
    zones::Release,
};
use fencepost_signals::{telemetry, wakeups::BackgroundTask};
use fencepost_store::{
    self as store, faults,
    jobs::{
        control::{CancelReason, CancelledJob},
        events::{self, NewEvent},
    },
    settle::settle_success::WaitingJob,
    sweep::{
        schedules::{self, Advance, DueSchedule, EarlierJob, Fire, MAX_PLANNED},
        set_aside::Work,
    },
};
use metrics::{counter, histogram};
use sqlx::{Acquire, PgConnection};

use crate::{
    Engine,
    cancel::{cancel_waiting, publish_cancelled},
    enqueue::quota,
    isolate::{self, Sweep},
    notify::job_event,
    schedules::zones::Agreed,
};

/// How long before a tick its jobs are written: less than the limit for slow statements.
const LEAD: Duration = Duration::from_millis(900);
/// When another node is about to fire a tick, check again this long after it.
const OTHERS_PAUSE: Duration = Duration::from_millis(20);
/// The pause when another node has locked what is due.
const LOCKED_ELSEWHERE_PAUSE: Duration = Duration::from_millis(50);
/// The longest sleep; the probe wakes the loop for earlier ticks.
const MAX_SLEEP: Duration = Duration::from_secs(30);
/// After this a tick counts as missed: no node was running.
const GRACE: Duration = Duration::from_secs(GRACE_SECONDS.unsigned_abs());
/// A tick fired within this counts as on time.
const NOTED_LATENESS: TimeDelta = TimeDelta::milliseconds(20);
/// Requests of one microsecond that each get a job of their own.
const MAX_TIES: i64 = 10;
/// Ticks of one statement.
const MAX_STATEMENT_FIRES: usize = 500;

/// One pass: fires what is due, and returns how long to sleep. Zero: there may be more.
pub async fn pass(engine: &Engine) -> sqlx::Result<Duration> {
    let mut conn = engine.pools.fire.acquire().await?;
    let Some(wait) = schedules::next_tick_ms(&mut conn).await? else { return Ok(MAX_SLEEP) };
    let lead_ms = LEAD.as_secs_f64() * 1_000.0;
    if wait > lead_ms {
        return Ok(Duration::from_secs_f64((wait - lead_ms) / 1_000.0).min(MAX_SLEEP));
    }
    let has_overdue = wait < GRACE.as_secs_f64() * -1_000.0;
    let caught_up = if has_overdue { catch_up(engine, &mut conn).await } else { Ok(false) };
    let mut tx = conn.begin().await?;
    let due = schedules::lock_next(&mut tx, LEAD.as_millis() as i64).await?;
    if due.is_empty() {
        tx.rollback().await?;
        return Ok(match caught_up? {
            true => Duration::ZERO,
            // Another node has locked them, or they depend on earlier jobs and are locked only at
            // their tick.
            false if wait > 0.0 => Duration::from_secs_f64(wait / 1_000.0) + OTHERS_PAUSE,
            false => LOCKED_ELSEWHERE_PAUSE,
        });
    }
    faults::before_commit("fire")?;
    let fired = fire_each(engine, &mut tx, &due).await?;
    let latest = due.iter().filter_map(|it| it.next_tick).max();
    if let Some(tick) = latest.filter(|it| due.iter().any(|due| due.now < *it)) {
        schedules::sleep_until(&mut tx, tick).await?;
    }
    tx.commit().await?;
    faults::after_commit("fire")?;
    // Publish the jobs first: recording the lateness can wait.
    fired.publish(engine);
    let now = store::schedules::clock(&mut conn).await?;
    let late = fired.fires.iter().filter(|it| it.outcome == FireOutcome::Fired);
    for fire in late.clone() {
        let seconds = (now - fire.tick).as_seconds_f64().max(0.0);
        histogram!(telemetry::SCHEDULE_LATENESS_SECONDS).record(seconds);
    }
    let late: Vec<_> = late.filter(|it| now - it.tick > NOTED_LATENESS).collect();
    for late in late.chunks(MAX_STATEMENT_FIRES) {
        schedules::record_lateness(&mut conn, late).await?;
    }
    // Last: overdue ticks must not delay the next ones.
    caught_up.map(|_| Duration::ZERO)
}

/// Handles schedules whose ticks are past their grace, and returns whether there were any.
/// Schedules locked by another node are skipped.
async fn catch_up(engine: &Engine, conn: &mut PgConnection) -> sqlx::Result<bool> {
    let mut tx = conn.begin().await?;
    let due = schedules::lock_overdue(&mut tx).await?;
    let fired = fire_each(engine, &mut tx, &due).await?;
    tx.commit().await?;
    faults::after_commit("fire")?;
    fired.publish(engine);
    Ok(!due.is_empty())
}

/// The result of a pass, to notify about.
#[derive(Default)]
struct Fired {
    jobs: Vec<WaitingJob>,
    cancelled: Vec<CancelledJob>,
    asked_to_stop: Vec<JobKey>,
    fires: Vec<Fire>,
}

impl Fired {
    fn add(mut self, more: Self) -> Self {
        self.jobs.extend(more.jobs);
        self.cancelled.extend(more.cancelled);
        self.asked_to_stop.extend(more.asked_to_stop);
        self.fires.extend(more.fires);
        self
    }

    fn publish(&self, engine: &Engine) {
        counter!(telemetry::JOBS_ENQUEUED).increment(self.jobs.len() as u64);
        engine.notifier.tally.fired(&self.jobs);
        for fire in &self.fires {
            let (outcome, ticks) = (fire.outcome.as_str(), fire.ticks.unsigned_abs());
            counter!(telemetry::SCHEDULE_FIRES, "outcome" => outcome).increment(ticks);
        }
        publish_cancelled(engine, &self.cancelled, history::CANCELLED);
        engine.notifier.waiting(self.jobs.iter());
        engine.notifier.feed.publish(|| {
            let asked = self.asked_to_stop.iter();
            let asked = asked.map(|it| job_event(*it, history::CANCEL_REQUESTED));
            let stored = self.jobs.iter().map(|it| job_event(it.key(), history::ENQUEUED));
            asked.chain(stored).collect()
        });
    }
}

/// Handles the due ticks of locked schedules, in their transaction. A schedule whose tick cannot be
/// stored is set aside.
async fn fire_each(
    engine: &Engine,
    tx: &mut PgConnection,
    due: &[DueSchedule],
) -> sqlx::Result<Fired> {
    let ticks = Ticks { engine, zones: engine.zones.agreed() };
    let fired = isolate::process(engine, tx, &ticks, due).await?;
    Ok(fired.into_iter().fold(Fired::default(), Fired::add))
}

/// Firing the ticks of schedules.
struct Ticks<'a> {
    engine: &'a Engine,
    zones: Agreed,
}

impl Sweep for Ticks<'_> {
    type Item = DueSchedule;
    type Done = Fired;
    const WORK: Work = Work::Tick;

    fn name(item: &DueSchedule) -> (ProjectId, String) {
        (item.project_id, item.id.clone())
    }

    async fn process(&self, tx: &mut PgConnection, due: &[DueSchedule]) -> sqlx::Result<Fired> {
        fire(tx, self, due).await
    }
}

async fn fire(
    tx: &mut PgConnection,
    Ticks { engine, zones }: &Ticks<'_>,
    due: &[DueSchedule],
) -> sqlx::Result<Fired> {
    let key = &engine.tick_key;
    let mut fired = Fired::default();
    let (mut fires, mut advances) = (Vec::new(), Vec::with_capacity(due.len()));
    let mut known = HashMap::new();
    let mut projects: Vec<_> = due.iter().map(|it| it.project_id).collect();
    projects.dedup();
    let suspended = store::people::projects::suspended(tx, &projects).await?;
    for it in due {
        let read = known
            .entry((&it.cron_expression, &it.timezone))
            .or_insert_with(|| zones.schedule(&it.cron_expression, &it.timezone));
        let (ticks, advance) = match read {
            Ok(schedule) => {
                let (ticks, advance) = due_ticks(it, schedule);
                let is_stopped = suspended.contains(&it.project_id)
                    || engine.backlogs.full.contains(it.project_id);
                (if is_stopped { ticks.all_missed() } else { ticks }, advance)
            }
            Err(error) => (DueTicks::default(), stuck(it, error.to_string())),
        };
        advances.push(advance);
        missed(key, it, &ticks, &mut fires);
        fires.extend(ticks.fire.iter().map(|tick| tick_of(key, it, *tick, FireOutcome::Fired)));
    }
    let earlier = look_back(tx, due, &mut fires).await?;
    for fires in fires.chunks(MAX_STATEMENT_FIRES) {
        fired.jobs.extend(schedules::fire(tx, fires).await?);
    }
    for advances in advances.chunks(MAX_STATEMENT_FIRES) {
        schedules::advance(tx, advances, zones.release.as_str()).await?;
    }
    cancel_earlier(tx, due, &fires, earlier, &mut fired).await?;
    fired.fires = fires;
    Ok(fired)
}

/// The due ticks, and the schedule's position after them.
fn due_ticks(due: &DueSchedule, schedule: &Schedule) -> (DueTicks, Advance) {
    let tick = due.next_tick.unwrap_or(due.now);
    let ticks = match due.now - tick > TimeDelta::seconds(GRACE_SECONDS) {
        // One at a time: the next pass finds the next tick.
        false => DueTicks { fire: vec![tick], ..DueTicks::default() },
        true => {
            let from = tick - TimeDelta::milliseconds(1);
            let after = due.last_tick.map_or(from, |it| it.min(from));
            schedule.due(after, due.now, due.catch_up)
        }
    };
    let last_tick = if ticks.fire == [tick] { tick } else { due.now };
    let advance = match schedule.next_after(last_tick) {
        Ok(next_tick) => Advance {
            project_id: due.project_id,
            id: due.id.clone(),
            last_tick,
            next_tick: Some(next_tick),
            problem: None,
        },
        Err(error) => Advance { last_tick, ..stuck(due, error.to_string()) },
    };
    (ticks, advance)
}

/// A schedule that will not fire again.
fn stuck(due: &DueSchedule, problem: String) -> Advance {
    Advance {
        project_id: due.project_id,
        id: due.id.clone(),
        last_tick: due.last_tick.unwrap_or(due.now),
        next_tick: None,
        problem: Some(problem),
    }
}

fn tick_of(key: &TickKey, due: &DueSchedule, tick: DateTime<Utc>, outcome: FireOutcome) -> Fire {
    let one_at_a_time = due.overlap == OverlapPolicy::QueueOne;
    let concurrency_key = one_at_a_time.then(|| concurrency_key(&due.id));
    Fire {
        project_id: due.project_id,
        schedule_id: due.id.clone(),
        tick,
        outcome,
        ticks: 1,
        job_id: JobId::of_tick(key, due.project_id, &due.id, tick.timestamp_millis()),
        offset_seconds: offset_seconds(&due.id, due.spread_seconds),
        constraint_key: concurrency_key
            .as_deref()
            .and_then(|key| constraint_key::of(&due.job_type, &[], Some((key, 1)))),
        concurrency_key,
    }
}

/// The concurrency key under which a schedule's jobs run one at a time.
fn concurrency_key(schedule_id: &str) -> String {
    format!("fencepost.recurring/{schedule_id}")
}

/// Each missed tick gets a row, except for the oldest of many, which share one.
fn missed(key: &TickKey, due: &DueSchedule, ticks: &DueTicks, fires: &mut Vec<Fire>) {
    let first = fires.len();
    fires.extend(ticks.missed.iter().map(|tick| tick_of(key, due, *tick, FireOutcome::Missed)));
    if let Some(oldest) = fires.get_mut(first) {
        oldest.ticks += i64::try_from(ticks.missed_before).unwrap_or(i64::MAX - 1);
    }
}

/// Finds jobs of earlier ticks, where the schedule's overlap policy asks for it, and marks the
/// ticks that are skipped. When several missed ticks are caught up, each counts as an earlier one
/// for the next.
async fn look_back(
    tx: &mut PgConnection,
    due: &[DueSchedule],
    fires: &mut [Fire],
) -> sqlx::Result<Vec<EarlierJob>> {
    let asks = due.iter().filter(|it| it.overlap != OverlapPolicy::Allow);
    let asks: HashMap<_, _> =
        asks.map(|it| ((it.project_id, it.id.as_str()), it.overlap)).collect();
    if asks.is_empty() {
        return Ok(Vec::new());
    }
    let keys: Vec<_> = asks.keys().copied().collect();
    let jobs = schedules::earlier_jobs(tx, &keys).await?;
    let mut earlier: HashMap<(ProjectId, String), Earlier> = HashMap::new();
    for job in &jobs {
        let seen = earlier.entry((job.project_id, job.schedule_id.clone())).or_default();
        seen.runs |= job.state == StoredState::Processing;
        seen.waits |= job.state != StoredState::Processing;
    }
    for fire in fires.iter_mut().filter(|it| it.outcome == FireOutcome::Fired) {
        let Some(overlap) = asks.get(&(fire.project_id, fire.schedule_id.as_str())) else {
            continue;
        };
        let seen = earlier.entry((fire.project_id, fire.schedule_id.clone())).or_default();
        if overlap.fires(*seen) {
            seen.waits = true;
        } else {
            fire.outcome = FireOutcome::SkippedOverlap;
        }
    }
    Ok(jobs)
}

/// Cancels jobs of earlier ticks where the overlap policy says so: waiting jobs at once, running
/// ones through their workers.
async fn cancel_earlier(
    tx: &mut PgConnection,
    due: &[DueSchedule],
    fires: &[Fire],
    earlier: Vec<EarlierJob>,
    fired: &mut Fired,
) -> sqlx::Result<()> {
    let cancels = due.iter().filter(|it| it.overlap == OverlapPolicy::CancelPrevious);
    let cancels: HashSet<_> = cancels.map(|it| (it.project_id, it.id.as_str())).collect();
    let has_fired = fires.iter().filter(|it| it.outcome == FireOutcome::Fired);
    let has_fired: HashSet<_> =
        has_fired.map(|it| (it.project_id, it.schedule_id.as_str())).collect();
    let must_go = |it: &&EarlierJob| {
        let schedule = (it.project_id, it.schedule_id.as_str());
        cancels.contains(&schedule) && has_fired.contains(&schedule)
    };
    let (running, waiting): (Vec<_>, Vec<_>) =
        earlier.iter().filter(must_go).partition(|it| it.state == StoredState::Processing);
    let key = |it: &&EarlierJob| JobKey { project_id: it.project_id, id: it.id };
    let by: HashMap<_, _> =
        earlier.iter().map(|it| (key(&it), ChangedBy::schedule(&it.schedule_id))).collect();
    let event = |key, kind| NewEvent::change(key, kind, by.get(&key).unwrap_or(&ChangedBy::SERVER));
    let mut waiting: Vec<_> = waiting.iter().map(key).collect();
    waiting.sort_by_key(|it| (it.project_id, it.id));
    if !waiting.is_empty() {
        fired.cancelled = cancel_waiting(tx, &waiting, CancelReason::Asked).await?;
        let gone = fired.cancelled.iter();
        let noted = gone.map(|it| event(it.key, history::CANCELLED));
        events::insert(tx, &noted.collect::<Vec<_>>()).await?;
    }
    let running: Vec<_> = running.iter().map(key).collect();
    if !running.is_empty() {
        let asked = store::jobs::control::request_cancels(tx, &running).await?;
        let noted = asked.iter().map(|(key, attempt)| NewEvent {
            attempt: Some(*attempt),
            ..event(*key, history::CANCEL_REQUESTED)
        });
        events::insert(tx, &noted.collect::<Vec<_>>()).await?;
        fired.asked_to_stop = asked.into_iter().map(|it| it.0).collect();
    }
    Ok(())
}

/// Plans schedules that have no next tick, or one by rules of zones that the nodes do not use any
/// more: a batch of them. Returns whether there may be more.
pub async fn plan(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let mut tx = conn.begin().await?;
    let zones = engine.zones.agreed();
    let outdated = schedules::unplan_outdated(&mut tx, zones.release.as_str()).await?;
    let unplanned = schedules::lock_unplanned(&mut tx).await?;
    if unplanned.is_empty() {
        tx.rollback().await?;
        return Ok(false);
    }
    let plan = |it: &DueSchedule| {
        let after = it.last_tick.unwrap_or(it.now);
        let schedule = zones.schedule(&it.cron_expression, &it.timezone);
        match schedule.and_then(|schedule| schedule.next_after(after)) {
            Ok(next_tick) => Advance {
                project_id: it.project_id,
                id: it.id.clone(),
                last_tick: after,
                next_tick: Some(next_tick),
                problem: None,
            },
            Err(error) => stuck(it, error.to_string()),
        }
    };
    let advances: Vec<_> = unplanned.iter().map(plan).collect();
    isolate::process(engine, &mut tx, &Plans { release: &zones.release }, &advances).await?;
    tx.commit().await?;
    engine.notifier.wake.ask(BackgroundTask::Fire);
    Ok(unplanned.len().max(outdated) >= MAX_PLANNED)
}

/// Storing when schedules fire next.
struct Plans<'a> {
    /// The release of the zone rules by which they were planned.
    release: &'a Release,
}

impl Sweep for Plans<'_> {
    type Item = Advance;
    type Done = ();
    const WORK: Work = Work::Plan;

    fn name(item: &Advance) -> (ProjectId, String) {
        (item.project_id, item.id.clone())
    }

    async fn process(&self, tx: &mut PgConnection, advances: &[Advance]) -> sqlx::Result<()> {
        schedules::advance(tx, advances, self.release.as_str()).await
    }
}

/// Creates a job of a schedule immediately, whatever its ticks are. Returns its id.
///
/// # Errors
/// [`Error::ScheduleNotFound`]; [`Error::QuotaExceeded`] as for an enqueue.
pub async fn run_now(
    engine: &Engine,
    tenant: Tenant,
    schedule_id: &str,
    job_id: JobId,
) -> Result<JobId, Error> {
    let project_id = tenant.project_id;
    let mut conn = engine.pools.read_for(project_id).await?;
    let found = store::schedules::find(&mut conn, project_id, schedule_id).await?;
    let found = found.ok_or(Error::ScheduleNotFound)?;
    // An earlier try of the same request has stored it.
    if store::jobs::find(&mut conn, project_id, job_id).await?.is_some() {
        return Ok(job_id);
    }
    // The connection is returned first: the check takes its own.
    drop(conn);
    quota::admit_count(engine, tenant, 1).await?;
    let mut conn = engine.pools.read_for(project_id).await?;
    let fire = |tie| Fire {
        project_id,
        schedule_id: schedule_id.to_owned(),
        tick: found.now + TimeDelta::microseconds(tie),
        outcome: FireOutcome::Manual,
        ticks: 1,
        job_id,
        offset_seconds: 0,
        concurrency_key: None,
        constraint_key: None,
    };
    // Another request of the same microsecond has the same key.
    for tie in 0..MAX_TIES {
        let fires = vec![fire(tie)];
        let jobs = schedules::fire(&mut conn, &fires).await?;
        if !jobs.is_empty() {
            drop(conn);
            Fired { jobs, fires, ..Fired::default() }.publish(engine);
            return Ok(job_id);
        }
    }
    Err(Error::ScheduleNotFound)
}
