//! Workers: registration, heartbeat times, directives, and timeouts.

mod commits;
mod presence;
pub mod take_back;

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use fencepost_domain::{
    actor::ChangedBy,
    error::{Error, is_faulty_statement},
    ids::{ANONYMOUS, ProjectId},
    job::OutcomeCause,
    limits::MAX_FULL_NAMES_BYTES,
    plan::TEST_MODE,
    worker::WorkerState,
};
use fencepost_signals::{telemetry, wakeups::keyed::KeyedNotify};
use fencepost_store::{
    self as store,
    connection::pools::Pool,
    sweep::{self, set_aside::Work, workers::SilentWorker},
    workers::Sighting,
};
use metrics::counter;
use moka::sync::Cache;
use sqlx::{Acquire, PgConnection};

use super::{
    Engine, isolate,
    settle::{failure, heartbeat},
};

pub use self::commits::{WorkerBeats, WorkerLookups};
pub(crate) use self::presence::Presence;
pub use fencepost_store::workers::{Facts, Registration, WorkerBeat, WorkerRow};

/// Workers that one node caches.
const MAX_KNOWN: u64 = 100_000;
/// TTL of cached worker facts. Changes invalidate them sooner.
const KNOWN_TTL: Duration = Duration::from_secs(600);
/// A worker's calls are recorded at most this often.
const SEEN_PERIOD: Duration = Duration::from_secs(5);
/// Heartbeat times of one statement.
const MAX_SIGHTINGS: usize = 500;
/// Window for changes of workers, in seconds: longer than any pass takes.
const CHANGES_WINDOW_SECONDS: i32 = 20;
/// Leases that one statement ends.
const MAX_ENDED: i64 = 500;

pub type WorkerKey = (ProjectId, Arc<str>);

/// One node's knowledge of workers.
pub struct Registry {
    known: Cache<WorkerKey, Option<Arc<Facts>>>,
    seen: Mutex<HashMap<WorkerKey, KnownWorker>>,
    directives: KeyedNotify<WorkerKey>,
}

struct KnownWorker {
    noted_at: Instant,
    /// The last report of the worker.
    last: Sighting,
    is_waiting: bool,
}

impl Registry {
    pub(super) fn new() -> Self {
        let known = Cache::builder().time_to_live(KNOWN_TTL).max_capacity(MAX_KNOWN).build();
        Self { known, seen: Mutex::default(), directives: KeyedNotify::default() }
    }

    /// Records that a worker was heard; the database learns of it soon.
    pub fn record_seen(&self, key: &WorkerKey, queue_names: &[Arc<str>], job_types: &[String]) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let is_news = |it: &KnownWorker| {
            let queues = it.last.queues.iter().map(String::as_str);
            !queue_names.is_empty()
                && (!queues.eq(queue_names.iter().map(|it| &**it))
                    || it.last.job_types != job_types)
        };
        let known = seen.get(key);
        let is_fresh = known.is_some_and(|it| it.noted_at.elapsed() < SEEN_PERIOD && !is_news(it));
        if is_fresh || (known.is_none() && seen.len() as u64 >= MAX_KNOWN) {
            return;
        }
        let sighting = Sighting {
            project_id: key.0,
            worker_id: key.1.to_string(),
            queues: queue_names.iter().map(ToString::to_string).collect(),
            job_types: job_types.to_vec(),
        };
        let noted = KnownWorker { noted_at: Instant::now(), last: sighting, is_waiting: true };
        seen.insert(key.clone(), noted);
    }

    /// True if a worker was heard on this node lately: the database may not know it yet.
    fn has_seen(&self, key: &WorkerKey) -> bool {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).contains_key(key)
    }

    /// What the database is to learn of a worker; none: nothing.
    fn take_sighting(&self, key: &WorkerKey) -> Option<Sighting> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let known = seen.get_mut(key)?;
        std::mem::take(&mut known.is_waiting).then(|| known.last.clone())
    }

    fn take_sightings(&self) -> Vec<Sighting> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let take =
            |it: &mut KnownWorker| std::mem::take(&mut it.is_waiting).then(|| it.last.clone());
        let waiting: Vec<_> = seen.values_mut().filter_map(take).collect();
        seen.retain(|_, it| it.noted_at.elapsed() < SEEN_PERIOD);
        waiting
    }

    /// Caches facts of a worker, and wakes its parked polls.
    fn learn(&self, key: &WorkerKey, facts: Facts) {
        self.known.insert(key.clone(), Some(Arc::new(facts)));
        self.directives.wake(key);
    }

    /// Drops cached facts of a worker, and wakes its parked polls.
    fn forget(&self, key: &WorkerKey) {
        self.known.invalidate(key);
        self.directives.wake(key);
    }
}

/// Facts of a worker; none if the project has no record of it, or it is anonymous.
pub async fn facts(engine: &Engine, key: &WorkerKey) -> Result<Option<Arc<Facts>>, Error> {
    if key.1.starts_with(ANONYMOUS) {
        return Ok(None);
    }
    if let Some(known) = engine.registry.known.get(key) {
        return Ok(known);
    }
    let found = engine.worker_lookups.submit(key.clone()).await?.map(Arc::new);
    // Changes that arrived meanwhile are newer.
    Ok(engine.registry.known.entry_by_ref(key).or_insert(found).into_value())
}

/// Stores a worker's registration.
///
/// # Errors
/// [`Error::QuotaExceeded`] when it names much, and the project has stored all of its bytes;
/// [`Error::Unavailable`] when the database does not answer.
pub async fn register(
    engine: &Engine,
    project_id: ProjectId,
    worker: &Registration,
) -> Result<(), Error> {
    let lists = [&worker.queues, &worker.job_types, &worker.labels];
    let names: usize = lists.into_iter().flatten().map(String::len).sum();
    if names > MAX_FULL_NAMES_BYTES {
        engine.backlogs.full.admit_more(project_id)?;
    }
    let mut conn = engine.pools.reports.acquire_for(project_id).await?;
    store::workers::upsert(&mut conn, project_id, worker).await?;
    engine.registry.forget(&(project_id, worker.worker_id.as_str().into()));
    Ok(())
}

/// Stores the registration of a worker that is known by its calls alone, and is not registered.
pub async fn register_unknown(
    engine: &Engine,
    project_id: ProjectId,
    worker: &Registration,
) -> Result<(), Error> {
    let mut conn = engine.pools.reports.acquire_for(project_id).await?;
    if store::workers::describe(&mut conn, project_id, worker).await? {
        engine.registry.forget(&(project_id, worker.worker_id.as_str().into()));
    }
    Ok(())
}

/// Records a worker's heartbeat, and renews the given leases. State `terminated` deregisters it.
/// The protocol says whether losses of the worker count, as in [`Registration`].
///
/// # Errors
/// [`Error::Unavailable`] when the database does not answer; some leases may be renewed all the
/// same.
pub async fn beat(
    engine: &Engine,
    key: &WorkerKey,
    (state, counts_losses): (WorkerState, bool),
    beats: Vec<heartbeat::Beat>,
) -> Result<(WorkerState, heartbeat::Leases), Error> {
    if state == WorkerState::Terminated {
        let lost = beats.into_iter().map(|it| (it.key.id, None)).collect();
        deregister(engine, key).await?;
        return Ok((WorkerState::Terminate, lost));
    }
    let beat =
        WorkerBeat { project_id: key.0, worker_id: Arc::clone(&key.1), state, counts_losses };
    let facts = engine.worker_beats.submit(beat).await?;
    let advice = WorkerState::advice(facts.state, facts.directive);
    let was_known = engine.registry.known.get(key).flatten();
    if was_known.as_deref() != Some(&facts) {
        // Either may be newer: the next lookup reads the database.
        engine.registry.forget(key);
    }
    let leases = heartbeat::heartbeat_all(engine, beats).await?;
    Ok((advice, leases))
}

/// Deregisters a worker: releases its leases without counting failures. Returns how many.
///
/// # Errors
/// [`Error::WorkerNotFound`] when no worker of this name is known and none holds a lease.
pub async fn deregister(engine: &Engine, key: &WorkerKey) -> Result<u64, Error> {
    let was_known = terminate(engine, key).await?;
    let ending =
        Ending { cause: OutcomeCause::Released, silence_seconds: None, max: u64::MAX, by: None };
    let released = end_leases(engine, &engine.pools.reports, key, &ending).await?;
    if was_known {
        return Ok(released);
    }
    if released == 0 {
        return Err(Error::WorkerNotFound);
    }
    // Another node has heard its polls, and is about to record it as running.
    record_running(engine, key).await?;
    terminate(engine, key).await?;
    Ok(released)
}

/// Notes that a worker is deregistered. Returns whether it was known.
async fn terminate(engine: &Engine, key: &WorkerKey) -> Result<bool, Error> {
    let mut conn = engine.pools.reports.acquire_for(key.0).await?;
    record_sighting(engine, &mut conn, key).await?;
    let was_known = store::workers::terminate(&mut conn, key.0, &key.1).await?;
    drop(conn);
    engine.registry.forget(key);
    Ok(was_known)
}

/// Records at once what this node has heard of a worker: its polls are recorded later otherwise,
/// and would begin it anew.
async fn record_sighting(
    engine: &Engine,
    conn: &mut PgConnection,
    key: &WorkerKey,
) -> sqlx::Result<()> {
    match engine.registry.take_sighting(key) {
        Some(sighting) => store::workers::record_seen(conn, &[sighting]).await,
        None => Ok(()),
    }
}

/// Records that a worker runs, though it may not be known yet: polls are recorded later.
async fn record_running(engine: &Engine, key: &WorkerKey) -> Result<(), Error> {
    let (state, counts_losses) = (WorkerState::Running, false);
    let beat =
        WorkerBeat { project_id: key.0, worker_id: Arc::clone(&key.1), state, counts_losses };
    engine.worker_beats.submit(beat).await?;
    Ok(())
}

/// Sets a worker's directive; `running` resumes it.
///
/// # Errors
/// [`Error::WorkerNotFound`].
pub async fn direct(engine: &Engine, key: &WorkerKey, directive: WorkerState) -> Result<(), Error> {
    let mut conn = engine.pools.read_for(key.0).await?;
    record_sighting(engine, &mut conn, key).await?;
    let facts = store::workers::direct(&mut conn, key.0, &key.1, directive).await?;
    engine.registry.learn(key, facts.ok_or(Error::WorkerNotFound)?);
    Ok(())
}

/// Gives a worker a directive that one of its jobs asks for, so that clients can be tested. Only in
/// test projects: elsewhere directives come from operators alone.
pub async fn rehearse(
    engine: &Engine,
    key: &WorkerKey,
    directive: WorkerState,
) -> Result<(), Error> {
    let mut conn = engine.pools.read_for(key.0).await?;
    let project = store::people::projects::get(&mut conn, key.0).await?;
    drop(conn);
    if project.is_none_or(|it| it.mode != TEST_MODE) {
        return Ok(());
    }
    record_running(engine, key).await?;
    direct(engine, key, directive).await
}

/// The way in which leases of a worker are ended.
struct Ending<'a> {
    cause: OutcomeCause<'a>,
    /// Only while the worker has been silent for that long.
    silence_seconds: Option<i32>,
    /// No further ones once this many have ended.
    max: u64,
    /// The author of a take back; none: the leases end for another cause.
    by: Option<&'a ChangedBy>,
}

/// Ends the leases of a worker in the same way. Returns how many there were.
async fn end_leases(
    engine: &Engine,
    pool: &Pool,
    key: &WorkerKey,
    &Ending { ref cause, silence_seconds, max, by }: &Ending<'_>,
) -> sqlx::Result<u64> {
    let mut ended = 0;
    loop {
        let mut conn = pool.acquire_for(key.0).await?;
        let mut tx = conn.begin().await?;
        if let Some(silence) = silence_seconds
            && !store::workers::lock_silent(&mut tx, key.0, &key.1, silence).await?
        {
            return Ok(ended);
        }
        let held = store::settle::settle_failure::lock_held_by(
            &mut tx,
            key.0,
            &key.1,
            MAX_ENDED,
            silence_seconds,
        );
        let held = held.await?;
        let outcomes: Vec<_> = held
            .iter()
            .map(|it| failure::decide(it, cause, cause.unreported_error(), None))
            .collect();
        let rested = failure::write(&mut tx, &outcomes).await?;
        if let Some(by) = by {
            take_back::note(&mut tx, &held, by).await?;
        }
        tx.commit().await?;
        drop(conn);
        failure::publish(&engine.notifier, &outcomes, &rested);
        ended += outcomes.len() as u64;
        if (outcomes.len() as i64) < MAX_ENDED || ended >= max {
            return Ok(ended);
        }
    }
}

/// A page of workers, by name.
pub async fn page(
    engine: &Engine,
    project_id: ProjectId,
    label: Option<&str>,
    queue: Option<&str>,
    after: &str,
    limit: i64,
) -> Result<Vec<WorkerRow>, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    Ok(store::workers::page(&mut conn, project_id, label, queue, after, limit).await?)
}

/// One pass: records heartbeat times, reads directives set on other nodes, and ends the leases of
/// workers that timed out. A failed part does not stop the others; the first error is returned.
pub async fn pass(engine: &Engine) -> sqlx::Result<()> {
    let noted = write_sightings(engine).await;
    let learned = learn_changes(engine).await;
    let expired = expire_silent_workers(engine).await;
    noted.and(learned).and(expired)
}

async fn write_sightings(engine: &Engine) -> sqlx::Result<()> {
    let sightings = engine.registry.take_sightings();
    if sightings.is_empty() {
        return Ok(());
    }
    let mut conn = engine.pools.background.acquire().await?;
    for sightings in sightings.chunks(MAX_SIGHTINGS) {
        match store::workers::record_seen(&mut conn, sightings).await {
            // One that cannot be stored must not block the others.
            Err(error) if is_faulty_statement(&error) => {
                for one in sightings {
                    if let Err(error) =
                        store::workers::record_seen(&mut conn, std::slice::from_ref(one)).await
                    {
                        let error = &error as &dyn std::error::Error;
                        tracing::warn!(error, "worker heartbeat time was not recorded");
                    }
                }
            }
            noted => noted?,
        }
    }
    Ok(())
}

async fn learn_changes(engine: &Engine) -> sqlx::Result<()> {
    let mut conn = engine.pools.background.acquire().await?;
    let changed = sweep::workers::changed_workers(&mut conn, CHANGES_WINDOW_SECONDS).await?;
    let changed: HashSet<WorkerKey> =
        changed.into_iter().map(|(project_id, it)| (project_id, it.into())).collect();
    changed.iter().for_each(|it| engine.registry.forget(it));
    Ok(())
}

async fn expire_silent_workers(engine: &Engine) -> sqlx::Result<()> {
    loop {
        let mut conn = engine.pools.background.acquire().await?;
        let silent = sweep::workers::find_silent_workers(&mut conn).await?;
        drop(conn);
        let is_full = silent.len() == sweep::workers::MAX_SILENT_WORKERS;
        let mut has_progress = false;
        for worker in silent {
            match expire_silent_worker(engine, &worker).await {
                Ok(is_lost) => has_progress |= is_lost,
                Err(error) => {
                    let name = (worker.project_id, worker.worker_id.as_str());
                    isolate::set_aside(engine, Work::LostWorker, name, error).await?;
                    has_progress = true;
                }
            }
        }
        // Those that are back are found again until it is written that they were heard.
        if !is_full || !has_progress {
            return Ok(());
        }
    }
}

/// Returns whether it is lost.
async fn expire_silent_worker(engine: &Engine, worker: &SilentWorker) -> sqlx::Result<bool> {
    let (pool, silence) = (&engine.pools.background, worker.silence_seconds);
    let key: &WorkerKey = &(worker.project_id, worker.worker_id.as_str().into());
    let cause = match worker.counts_losses {
        true => OutcomeCause::LeaseExpired,
        false => OutcomeCause::WorkerGone,
    };
    let ending = Ending { cause, silence_seconds: Some(silence), max: u64::MAX, by: None };
    let ended = end_leases(engine, pool, key, &ending).await?;
    // Last, so that an interrupted pass is repeated.
    let mut conn = pool.acquire().await?;
    let is_lost = store::workers::mark_lost(&mut conn, key.0, &key.1, silence).await?;
    if is_lost {
        counter!(telemetry::WORKERS_LOST).increment(1);
        tracing::info!(leases = ended, "worker timed out; leases expired");
    }
    isolate::succeeded(engine, &mut conn, Work::LostWorker, (key.0, &key.1)).await?;
    Ok(is_lost)
}
