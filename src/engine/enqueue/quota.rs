//! How many jobs of a project or a queue may wait or run, how many bytes a project may store, and
//! how many queues it may have. Each node caches the counts for a moment and adds what it stores
//! itself, so the check costs an enqueue nothing. What other nodes store within that moment may
//! exceed the quota. Open batches alone are counted under a lock.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use fencepost_domain::{
    error::Error,
    ids::ProjectId,
    plan::{Limits, ProjectPlans, Tenant},
};
use fencepost_store::{
    self as store,
    connection::deadline::{detached, detached_query},
    jobs::stored_bytes,
};

use moka::{policy::EvictionPolicy, sync::Cache};
use sqlx::PgConnection;

use super::{NewJob, full::FullProjects};
use crate::Engine;

/// How long a count is trusted.
const COUNT_KEEP: Duration = Duration::from_secs(1);
/// A count that says "full" is read again no sooner.
const RECOUNT_PAUSE: Duration = Duration::from_millis(100);
/// Queues of a project whose `max_waiting` is obeyed.
pub const MAX_BOUNDED_QUEUES: i64 = 1_000;
/// Projects whose count one node caches; the one that was used least lately makes room.
const MAX_CACHED: u64 = 50_000;

#[derive(Debug, Clone)]
struct Backlog {
    /// 0 if they are unlimited.
    jobs: i64,
    /// Whether the project has stored as much as its plan allows.
    has_all_bytes: bool,
    /// Whether the project has as many queues as its plan allows.
    has_all_queues: bool,
    /// Queues with a limit of their own: their live jobs, and the limit.
    bounded_queues: Arc<HashMap<String, (i64, i64)>>,
    counted_at: Instant,
}

impl Backlog {
    fn add_to_queues(&mut self, jobs: &HashMap<&str, i64>) -> Result<(), (String, i64)> {
        let bounded = &self.bounded_queues;
        let full = jobs.iter().find_map(|(queue, more)| {
            let (present, max) = bounded.get(*queue)?;
            (present + more > *max).then(|| ((*queue).to_owned(), *max))
        });
        if let Some(full) = full {
            return Err(full);
        }
        if jobs.keys().any(|it| bounded.contains_key(*it)) {
            let bounded = Arc::make_mut(&mut self.bounded_queues);
            for (queue, more) in jobs {
                if let Some((present, _)) = bounded.get_mut(*queue) {
                    *present += more;
                }
            }
        }
        Ok(())
    }
}

#[derive(Debug)]
pub struct Backlogs {
    counted: Cache<ProjectId, Arc<Mutex<Backlog>>>,
    pub full: FullProjects,
}

impl Default for Backlogs {
    fn default() -> Self {
        Self {
            counted: Cache::builder()
                .max_capacity(MAX_CACHED)
                .eviction_policy(EvictionPolicy::lru())
                .build(),
            full: FullProjects::default(),
        }
    }
}

impl Backlogs {
    /// The last count, and whether the caller is to count again: one does, while the others go by
    /// the old count.
    fn known(&self, project_id: ProjectId, keep: Duration) -> (Option<Backlog>, bool) {
        let known = self.with(project_id, |backlog| {
            let is_old = backlog.counted_at.elapsed() >= keep;
            if is_old {
                backlog.counted_at = Instant::now();
            }
            (Some(backlog.clone()), is_old)
        });
        known.unwrap_or((None, true))
    }

    fn note(&self, project_id: ProjectId, backlog: Backlog) {
        self.counted.insert(project_id, Arc::new(Mutex::new(backlog)));
    }

    fn with<T>(&self, project_id: ProjectId, body: impl FnOnce(&mut Backlog) -> T) -> Option<T> {
        let known = self.counted.get(&project_id)?;
        let mut backlog = known.lock().unwrap_or_else(PoisonError::into_inner);
        Some(body(&mut backlog))
    }

    /// Adds to the count, if it stays within `max`.
    fn add(&self, project_id: ProjectId, jobs: i64, max: i64) -> bool {
        let added = self.with(project_id, |backlog| {
            let has_room = backlog.jobs.saturating_add(jobs) <= max;
            if has_room {
                backlog.jobs += jobs;
            }
            has_room
        });
        added.unwrap_or(false)
    }

    /// Adds to the counts of queues that have a limit, if all stay within theirs; else the first
    /// that would not, and its limit.
    fn add_to_queues(
        &self,
        project_id: ProjectId,
        jobs: &HashMap<&str, i64>,
    ) -> Result<(), (String, i64)> {
        self.with(project_id, |backlog| backlog.add_to_queues(jobs)).unwrap_or(Ok(()))
    }

    /// Takes back what was admitted and not stored.
    pub(super) fn refund(&self, project_id: ProjectId, jobs: usize) {
        let jobs = i64::try_from(jobs).unwrap_or(i64::MAX);
        self.with(project_id, |backlog| backlog.jobs -= jobs);
    }
}

/// The number that new jobs count for: themselves, and the jobs that their ends enqueue, which are
/// never refused later.
pub(super) fn cost<'a>(jobs: impl Iterator<Item = &'a NewJob>) -> usize {
    jobs.map(|it| 1 + it.extras.as_ref().map_or(0, |it| it.callback_count)).sum()
}

/// Admits new jobs.
///
/// # Errors
/// [`Error::QuotaExceeded`] when the project would have too many jobs, has stored too many bytes,
/// or has as many queues as its plan allows and would get another. [`Error::QueueFull`] when a
/// queue would have more jobs than its `max_waiting`.
pub(super) async fn admit(
    engine: &Engine,
    tenant: Tenant,
    jobs: impl Iterator<Item = &NewJob> + Clone,
) -> Result<(), Error> {
    let backlog = known(engine, tenant).await?;
    if backlog.has_all_queues {
        let names: HashSet<String> = jobs.clone().map(|it| it.queue.clone()).collect();
        let names: Vec<_> = names.into_iter().collect();
        check_queues(engine, tenant, &names).await?;
    }
    if !backlog.bounded_queues.is_empty() {
        admit_to_queues(engine, tenant, jobs.clone()).await?;
    }
    admit_count(engine, tenant, cost(jobs)).await
}

/// Admitted jobs that are not stored then count until the next count.
async fn admit_to_queues(
    engine: &Engine,
    tenant: Tenant,
    jobs: impl Iterator<Item = &NewJob>,
) -> Result<(), Error> {
    let project_id = tenant.project_id;
    let mut by_queue: HashMap<&str, i64> = HashMap::new();
    for job in jobs {
        *by_queue.entry(&job.queue).or_default() += 1;
    }
    if engine.backlogs.add_to_queues(project_id, &by_queue).is_ok() {
        return Ok(());
    }
    if engine.backlogs.known(project_id, RECOUNT_PAUSE).1 {
        recount(engine, tenant).await?;
    }
    let added = engine.backlogs.add_to_queues(project_id, &by_queue);
    added.map_err(|(queue, max)| Error::QueueFull { queue, max })
}

/// Whether a project has stored as much as its plan allows.
///
/// # Errors
/// [`Error::Unavailable`] when the database does not answer.
pub async fn has_all_bytes(engine: &Engine, tenant: Tenant) -> Result<bool, Error> {
    Ok(tenant.limits.stored_bytes.is_some() && known(engine, tenant).await?.has_all_bytes)
}

/// Refuses what a project that has stored all of its bytes may not add.
///
/// # Errors
/// [`Error::QuotaExceeded`]; [`Error::Unavailable`] when the database does not answer.
pub async fn require_room(engine: &Engine, tenant: Tenant) -> Result<(), Error> {
    match tenant.limits.stored_bytes {
        Some(max) if has_all_bytes(engine, tenant).await? => {
            Err(Error::QuotaExceeded { what: "stored bytes", max })
        }
        _ => Ok(()),
    }
}

/// Counts the projects that have stored much, or were full.
///
/// # Errors
/// The last one of a project that could not be counted; it is counted by a later pass.
pub async fn count_stored(engine: &Engine, plans: &ProjectPlans) -> sqlx::Result<()> {
    let full = &engine.backlogs.full;
    let mut failed = Ok(());
    for project_id in full.take_to_count() {
        // One project must not stop the others.
        if let Err(error) = count_one(engine, plans, project_id).await {
            full.count_again(project_id);
            failed = Err(error);
        }
    }
    failed
}

async fn count_one(
    engine: &Engine,
    plans: &ProjectPlans,
    project_id: ProjectId,
) -> sqlx::Result<()> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let limits = limits_of_loops(&mut conn, plans, project_id).await?;
    // The counts are of the same share.
    drop(conn);
    if limits.stored_bytes.is_none() {
        // Its plan has changed, or it is gone.
        engine.backlogs.full.remove(project_id);
        return Ok(());
    }
    count(engine, Tenant { project_id, limits }).await.map(drop)
}

/// Bytes that a project has stored, deliveries of its webhooks among them.
pub async fn stored_bytes(engine: &Engine, project_id: ProjectId) -> sqlx::Result<i64> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let own = stored_bytes::of_project(&mut conn, project_id).await?;
    // The next one is of the same share.
    drop(conn);
    match own.outbox {
        Some(outbox) => Ok(own.bytes + delivered_bytes(engine, project_id, outbox).await?),
        None => Ok(own.bytes),
    }
}

/// Bytes of the deliveries of a project.
pub async fn delivered_bytes(
    engine: &Engine,
    project_id: ProjectId,
    outbox: ProjectId,
) -> sqlx::Result<i64> {
    let mut conn = engine.pools.read_outbox(project_id, outbox).await?;
    Ok(stored_bytes::of_project(&mut conn, outbox).await?.bytes)
}

async fn known(engine: &Engine, tenant: Tenant) -> Result<Backlog, Error> {
    match engine.backlogs.known(tenant.project_id, COUNT_KEEP) {
        (Some(known), false) => Ok(known),
        // The old count serves until the database answers.
        (Some(known), true) => Ok(recount(engine, tenant).await.unwrap_or(known)),
        (None, _) => recount(engine, tenant).await,
    }
}

/// Admits this many new jobs, whatever their queues.
///
/// # Errors
/// [`Error::QuotaExceeded`] when the project would have too many jobs, or has stored too many
/// bytes.
pub async fn admit_count(engine: &Engine, tenant: Tenant, count: usize) -> Result<(), Error> {
    let Tenant { project_id, limits } = tenant;
    let max = limits.waiting_jobs.unwrap_or(i64::MAX);
    let count = i64::try_from(count).unwrap_or(i64::MAX);
    let backlog = known(engine, tenant).await?;
    if let Some(max) = limits.stored_bytes.filter(|_| backlog.has_all_bytes) {
        return Err(Error::QuotaExceeded { what: "stored bytes", max });
    }
    if engine.backlogs.add(project_id, count, max) {
        return Ok(());
    }
    if engine.backlogs.known(project_id, RECOUNT_PAUSE).1 {
        recount(engine, tenant).await?;
        if engine.backlogs.add(project_id, count, max) {
            return Ok(());
        }
    }
    Err(Error::QuotaExceeded { what: "live jobs", max })
}

/// Counts, even if the caller is dropped.
async fn recount(engine: &Engine, tenant: Tenant) -> Result<Backlog, Error> {
    let engine = engine.clone();
    detached(async move { Ok(count(&engine, tenant).await?) }).await?
}

async fn count(engine: &Engine, tenant: Tenant) -> sqlx::Result<Backlog> {
    let Tenant { project_id, limits } = tenant;
    let mut conn = engine.pools.read_for(project_id).await?;
    let jobs = match limits.waiting_jobs {
        Some(_) => store::queues::counts::waiting(&mut conn, project_id).await?,
        None => 0,
    };
    let max = limits.max_queues();
    let queues = store::queues::counts::count_queues(&mut conn, project_id, max).await?;
    let bounded_queues = store::queues::bounded(&mut conn, project_id, MAX_BOUNDED_QUEUES).await?;
    // The next one is of the same share.
    drop(conn);
    let has_all_bytes = match limits.stored_bytes {
        Some(max) => {
            let stored = stored_bytes(engine, project_id).await?;
            engine.backlogs.full.note(project_id, stored, max);
            stored >= max
        }
        None => false,
    };
    let bounded_queues = bounded_queues.into_iter().map(|it| (it.queue, (it.jobs, it.max)));
    let backlog = Backlog {
        jobs,
        has_all_bytes,
        has_all_queues: queues >= max,
        bounded_queues: Arc::new(bounded_queues.collect()),
        counted_at: Instant::now(),
    };
    engine.backlogs.note(project_id, backlog.clone());
    Ok(backlog)
}

/// Whether a job may be moved to this queue.
///
/// # Errors
/// [`Error::QuotaExceeded`] when the project has as many as its plan allows, and this is none of
/// them.
pub async fn admit_queue(engine: &Engine, tenant: Tenant, queue: &str) -> Result<(), Error> {
    let max = tenant.limits.max_queues();
    let mut conn = engine.pools.read_for(tenant.project_id).await?;
    let queues = store::queues::counts::count_queues(&mut conn, tenant.project_id, max).await?;
    drop(conn);
    if queues >= max {
        check_queues(engine, tenant, &[queue.to_owned()]).await?;
    }
    Ok(())
}

/// A project that has as many queues as it may can use these only.
async fn check_queues(engine: &Engine, tenant: Tenant, names: &[String]) -> Result<(), Error> {
    let Tenant { project_id, limits } = tenant;
    let (pools, asked) = (engine.pools.clone(), names.to_vec());
    let used = detached_query(async move {
        let mut conn = pools.read_for(project_id).await?;
        let asked: Vec<&str> = asked.iter().map(String::as_str).collect();
        store::queues::counts::used_queues(&mut conn, project_id, &asked).await
    });
    let used = used.await?;
    if used.len() < names.len() {
        return Err(Error::QuotaExceeded { what: "queues", max: limits.max_queues() });
    }
    Ok(())
}

/// Admits one more batch, or says why not. Others that make a batch of the project wait until the
/// transaction ends, so that two do not pass the limit together.
///
/// # Errors
/// When the database does not answer. Inside, [`Error::QuotaExceeded`] when the project has as many
/// batches that have not completed as its plan allows.
pub async fn admit_batch(tx: &mut PgConnection, tenant: Tenant) -> sqlx::Result<Result<(), Error>> {
    let Tenant { project_id, limits } = tenant;
    let max = limits.max_open_batches();
    store::settings_turns::take(tx, project_id, "batches").await?;
    let open = store::workflows::batches::count_open(tx, project_id, max).await?;
    Ok(match open < max {
        true => Ok(()),
        false => Err(Error::QuotaExceeded { what: "open batches", max }),
    })
}

/// The limits that loops keep to for a project; none, if it is gone.
pub(crate) async fn limits_of_loops(
    conn: &mut PgConnection,
    plans: &ProjectPlans,
    project_id: ProjectId,
) -> sqlx::Result<Limits> {
    let Some(project) = store::people::projects::get(conn, project_id).await? else {
        return Ok(Limits::default());
    };
    let is_verified = !plans.needs_verification(&project.plan)
        || !store::people::members::is_unverified(conn, project_id).await?;
    Ok(plans.limits_of_loops(&project.plan, project.overrides.as_ref(), is_verified))
}

/// How many jobs of a project wait or run.
pub async fn waiting(engine: &Engine, project_id: ProjectId) -> Result<i64, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    Ok(store::queues::counts::waiting(&mut conn, project_id).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backlog(jobs: i64) -> Backlog {
        Backlog {
            jobs,
            has_all_bytes: false,
            has_all_queues: false,
            bounded_queues: Arc::new(HashMap::from([("mail".to_owned(), (3, 5))])),
            counted_at: Instant::now(),
        }
    }

    #[test]
    fn a_queue_takes_no_more_than_its_own_limit() {
        let (backlogs, project) = (Backlogs::default(), ProjectId(1));
        backlogs.note(project, backlog(0));
        let jobs = |mail: i64| HashMap::from([("mail", mail), ("other", 100)]);
        assert_eq!(backlogs.add_to_queues(project, &jobs(3)), Err(("mail".to_owned(), 5)));
        assert_eq!(backlogs.add_to_queues(project, &jobs(2)), Ok(()));
        assert_eq!(backlogs.add_to_queues(project, &jobs(1)), Err(("mail".to_owned(), 5)));
        assert_eq!(backlogs.add_to_queues(project, &HashMap::from([("other", 1)])), Ok(()));
    }

    #[test]
    fn one_call_counts_again_while_the_others_go_by_the_old_count() {
        let (backlogs, project) = (Backlogs::default(), ProjectId(1));
        assert!(backlogs.known(project, COUNT_KEEP).1, "nothing is known");
        backlogs.note(project, backlog(5));
        assert!(!backlogs.known(project, COUNT_KEEP).1);
        let keeps = [Duration::ZERO, COUNT_KEEP, COUNT_KEEP];
        let counts_again = keeps.map(|keep| backlogs.known(project, keep).1);
        assert_eq!(counts_again, [true, false, false]);
    }

    #[test]
    fn what_was_admitted_and_not_stored_can_be_admitted_again() {
        const MAX: i64 = 10;
        let (backlogs, project) = (Backlogs::default(), ProjectId(1));
        backlogs.note(project, backlog(MAX - 1));
        assert!(backlogs.add(project, 1, MAX));
        assert!(!backlogs.add(project, 1, MAX));
        backlogs.refund(project, 1);
        assert!(backlogs.add(project, 1, MAX));
    }
}
