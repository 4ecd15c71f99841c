//! Storing jobs with parents, a unique key, a workflow, a batch, an id of the client's or an
//! `expires_at`, and replays. One transaction per request, beside the group commits of ordinary
//! jobs.

use std::collections::{BTreeMap, HashMap, HashSet};

use fencepost_domain::{
    actor::ChangedBy,
    dependency::Dependency,
    error::{Error, FieldError, is_unique_violation},
    history,
    ids::{BatchId, JobId, JobKey, ProjectId},
    limits,
    plan::Tenant,
};
use fencepost_store::{
    self as store, faults,
    jobs::{
        control::{CancelReason, CancelledJob},
        enqueue::StoredJob,
        events::{self, NewEvent},
    },
    workflows::{
        self, batches, cascade, definitions,
        dependencies::{self, Parent, UniqueHolder},
    },
};
use serde_json::json;
use sqlx::{Acquire, PgConnection};

use super::{
    expiries, places, quota, replays,
    stored::{NewJob, latest_run_at, publish, too_far_ahead},
};
use crate::{
    Engine,
    cancel::{cancel_waiting, publish_cancelled},
};

pub use fencepost_store::workflows::{
    NewWorkflow, Rerun,
    dependencies::{Edge, ParentResult},
};

/// Tries of a request that lost a race for a unique key, or a deadlock.
const MAX_TRIES: u32 = 5;

/// The behaviour if a live job has the unique key already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnConflict {
    Reject,
    /// Return the existing job.
    ReturnExisting,
    /// Cancel a waiting job and store the new one; a running one is an error.
    Replace,
}

/// A job with its dependencies and conflict rule.
#[derive(Debug, Clone)]
pub struct JobWithDependencies {
    /// The job. Its unique key and parents are in its extras.
    pub job: NewJob,
    /// Applies to the unique key.
    pub on_conflict: OnConflict,
    /// Its only parent was named by `parent_job_id`.
    pub is_continuation: bool,
    /// The caller chose the id: another job may have it.
    pub is_id_given: bool,
    /// The author of the replay, if it replays an earlier job.
    pub replayed_by: Option<ChangedBy>,
    /// Refused if it expires before it may run; else cancelled then.
    pub must_outlast_start: bool,
    /// The path in the request: `jobs[3].`, or empty.
    pub path: String,
}

impl JobWithDependencies {
    /// A job without parents or workflow.
    #[must_use]
    pub fn new(job: NewJob, on_conflict: OnConflict) -> Self {
        Self {
            job,
            on_conflict,
            is_continuation: false,
            is_id_given: false,
            replayed_by: None,
            must_outlast_start: false,
            path: String::new(),
        }
    }

    /// The field of the request that names a parent.
    #[must_use]
    pub fn parent_field(&self, ordinal: i16) -> String {
        match self.is_continuation {
            true => format!("{}parent_job_id", self.path),
            false => format!("{}depends_on[{ordinal}]", self.path),
        }
    }
}

/// The result for one job of a request.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum EnqueueOutcome {
    Stored(StoredJob),
    Existing(JobId),
}

impl EnqueueOutcome {
    pub(super) fn existing(&self) -> Option<JobId> {
        match self {
            Self::Existing(id) => Some(*id),
            Self::Stored(_) => None,
        }
    }
}

/// Stores jobs, all or none, and returns them in their order.
///
/// # Errors
/// [`Error::Invalid`] when a parent does not exist or has too many children, or a `run_at` lies too
/// far ahead. [`Error::ParentTerminal`], [`Error::UniqueConflict`]. [`Error::QuotaExceeded`] when
/// the workflow has a batch, and the project as many open ones as its plan allows. Nothing is
/// stored then.
pub(super) async fn store(
    engine: &Engine,
    tenant: Tenant,
    jobs: &[JobWithDependencies],
    workflow: Option<&NewWorkflow>,
) -> Result<Vec<EnqueueOutcome>, Error> {
    let (mut tries, mut is_in_doubt) = (0, false);
    loop {
        tries += 1;
        match store_once(engine, tenant, jobs, workflow, is_in_doubt).await {
            Err(Failed::Store(error @ sqlx::Error::Io(_))) if tries < MAX_TRIES => {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "enqueue outcome unknown after a connection error, retrying"
                );
                is_in_doubt = true;
            }
            Err(Failed::Store(error)) if tries < MAX_TRIES && is_worth_another_try(&error) => (),
            Err(Failed::Store(error)) if is_unique_violation(&error) => {
                return Err(Error::UniqueConflict { field: "unique.key".to_owned(), holder: None });
            }
            Err(Failed::Store(error)) => return Err(error.into()),
            Err(Failed::Refused(error)) => return Err(error),
            Ok(outcomes) => return Ok(outcomes),
        }
    }
}

enum Failed {
    Refused(Error),
    Store(sqlx::Error),
}

impl From<sqlx::Error> for Failed {
    fn from(error: sqlx::Error) -> Self {
        Self::Store(error)
    }
}

/// A job that must outlast its start, and its path.
fn outlasting(it: &JobWithDependencies) -> Option<(&NewJob, &str)> {
    it.must_outlast_start.then_some((&it.job, it.path.as_str()))
}

/// Records who replays what.
async fn note_replays(tx: &mut PgConnection, jobs: &[JobWithDependencies]) -> sqlx::Result<()> {
    let noted =
        jobs.iter().filter_map(|it| Some(replays::event(&it.job, it.replayed_by.as_ref()?)));
    let noted: Vec<_> = noted.collect();
    if !noted.is_empty() {
        events::insert(tx, &noted).await?;
    }
    Ok(())
}

/// Another request got the key first: the next try sees its job. A deadlock leaves nothing behind.
fn is_worth_another_try(error: &sqlx::Error) -> bool {
    const DEADLOCK: &str = "40P01";
    let is_deadlock = matches!(
        error, sqlx::Error::Database(it) if it.code().as_deref() == Some(DEADLOCK)
    );
    is_unique_violation(error) || is_deadlock
}

async fn store_once(
    engine: &Engine,
    tenant @ Tenant { project_id, .. }: Tenant,
    jobs: &[JobWithDependencies],
    workflow: Option<&NewWorkflow>,
    is_in_doubt: bool,
) -> Result<Vec<EnqueueOutcome>, Failed> {
    let mut conn = engine.pools.enqueue.acquire_for(project_id).await?;
    let all: Vec<_> = jobs.iter().map(|it| &it.job).collect();
    faults::before_commit("enqueue")?;
    let mut tx = conn.begin().await?;
    let found = store::jobs::stored_before::find_stored(&mut tx, &all).await?;
    // Stored by an earlier try whose answer was lost, or by an earlier request with the same
    // idempotency key. Jobs that were new then exist now; the others are found by their unique
    // keys.
    let earlier: HashMap<_, _> = found.into_iter().map(|it| (it.id, it)).collect();
    let taken = |it: &&JobWithDependencies| it.is_id_given && earlier.contains_key(&it.job.id);
    // Only after a lost commit may the existing job be this very one.
    if let Some(taken) = jobs.iter().find(taken).filter(|_| !is_in_doubt) {
        let field = format!("{}id", taken.path);
        return Err(Failed::Refused(Error::UniqueConflict { field, holder: Some(taken.job.id) }));
    }
    let is_left = |it: &&JobWithDependencies| !earlier.contains_key(&it.job.id);
    let left: Vec<_> = jobs.iter().filter(is_left).cloned().collect();
    if left.is_empty() {
        let stored = all.iter().filter_map(|it| earlier.get(&it.id));
        return Ok(stored.map(|it| EnqueueOutcome::Stored(it.clone())).collect());
    }
    if let Some(batch) = workflow.and_then(|it| it.batch.as_ref()) {
        quota::admit_batch(&mut tx, tenant).await?.map_err(Failed::Refused)?;
        batches::insert(&mut tx, project_id, batch).await?;
    }
    let (existing, replaced) = make_room(&mut tx, project_id, &left).await?;
    let (new, edges) = tie(&mut tx, project_id, &left, &existing).await?;
    join_batches(&mut tx, project_id, &new).await?;
    let latest = vec![latest_run_at(&new); new.len()];
    let refs = match workflow {
        Some(workflow) => places::parents_first(&new, &workflow.edges),
        None => new.iter().collect(),
    };
    let stored = store::jobs::enqueue::insert_jobs(&mut tx, &refs, &latest, &[], &[]).await?;
    if stored.len() < refs.len() {
        return Err(Failed::Refused(too_far_ahead()));
    }
    expiries::check(left.iter().filter_map(outlasting), &stored).map_err(Failed::Refused)?;
    note_replays(&mut tx, &left).await?;
    let stored = continue_attempts(&mut tx, project_id, &left, stored).await?;
    dependencies::insert_edges(&mut tx, project_id, &edges).await?;
    let expires = |it: &NewJob| Some((it.id, it.extras.as_ref()?.expires_at?));
    let expiries: Vec<_> = new.iter().filter_map(expires).collect();
    if !expiries.is_empty() {
        cascade::insert_expiries(&mut tx, project_id, &expiries).await?;
    }
    if let Some(workflow) = workflow {
        store_workflow(&mut tx, project_id, workflow, &new).await?;
    }
    tx.commit().await?;
    faults::after_commit("enqueue")?;
    drop(conn);
    publish_cancelled(engine, &replaced, history::REPLACED);
    let stored: HashMap<_, _> = stored.into_iter().map(|it| (it.id, it)).collect();
    publish(&engine.notifier, new.iter(), &stored);
    let outcome = |it: &JobWithDependencies| {
        let known = stored.get(&it.job.id).or_else(|| earlier.get(&it.job.id));
        known
            .map(|it| EnqueueOutcome::Stored(it.clone()))
            .or_else(|| existing.get(unique_key(&it.job)?).map(|it| EnqueueOutcome::Existing(*it)))
    };
    Ok(jobs.iter().filter_map(outcome).collect())
}

async fn store_workflow(
    tx: &mut PgConnection,
    project_id: ProjectId,
    workflow: &NewWorkflow,
    jobs: &[NewJob],
) -> Result<(), Failed> {
    workflows::insert_workflow(tx, project_id, workflow).await?;
    if let Some(Rerun { original, replaced }) = workflow.rerun
        && !workflows::succeed(tx, project_id, original, replaced, workflow.id).await?
    {
        // Another request has re-run it at the same moment.
        return Err(Failed::Refused(Error::Overloaded));
    }
    if let Some(start) = &workflow.start {
        if let Some(key) = &start.request_key {
            definitions::free_key(tx, project_id, key).await?;
        }
        if !definitions::note_start(tx, project_id, workflow.id, start).await? {
            // Another request has used its key at the same moment.
            return Err(Failed::Refused(Error::Overloaded));
        }
    }
    dependencies::insert_edges(tx, project_id, &workflow.edges).await?;
    let keyed =
        jobs.iter().filter_map(|it| Some((it.extras.as_ref()?.workflow_key.as_deref()?, it.id)));
    let keyed: Vec<_> = keyed.collect();
    workflows::insert_workflow_jobs(tx, project_id, workflow.id, &keyed).await?;
    Ok(())
}

/// An ack of an attempt of a deleted job must not settle an attempt of its successor.
async fn continue_attempts(
    tx: &mut PgConnection,
    project_id: ProjectId,
    sent: &[JobWithDependencies],
    mut stored: Vec<StoredJob>,
) -> sqlx::Result<Vec<StoredJob>> {
    let given: HashSet<_> = sent.iter().filter(|it| it.is_id_given).map(|it| it.job.id).collect();
    // Jobs that exist already, and may run, are left alone.
    let new: Vec<_> = stored.iter().map(|it| it.id).filter(|it| given.contains(it)).collect();
    if new.is_empty() {
        return Ok(stored);
    }
    let last: HashMap<_, _> = store::jobs::stored_before::continue_attempts(tx, project_id, &new)
        .await?
        .into_iter()
        .collect();
    for job in &mut stored {
        job.attempt = last.get(&job.id).copied().unwrap_or(job.attempt);
    }
    Ok(stored)
}

fn unique_key(job: &NewJob) -> Option<&str> {
    job.extras.as_ref()?.unique_key.as_deref()
}

/// Finds the live jobs with these unique keys. Cancels those to be replaced, and returns those to
/// be reused, by key.
async fn make_room(
    tx: &mut PgConnection,
    project_id: ProjectId,
    jobs: &[JobWithDependencies],
) -> Result<(HashMap<String, JobId>, Vec<CancelledJob>), Failed> {
    let keys: Vec<_> = jobs.iter().filter_map(|it| unique_key(&it.job)).collect();
    if keys.is_empty() {
        return Ok(Default::default());
    }
    let holders = dependencies::lock_unique(tx, project_id, &keys).await?;
    let (mut existing, mut replaced) = (HashMap::new(), HashMap::new());
    for UniqueHolder { unique_key: key, id, state } in holders {
        let Some(wanted) = jobs.iter().find(|it| unique_key(&it.job) == Some(&key)) else {
            continue;
        };
        match wanted.on_conflict {
            OnConflict::ReturnExisting => {
                existing.insert(key, id);
            }
            OnConflict::Replace if state.is_waiting() => {
                replaced.insert(JobKey { project_id, id }, wanted.job.id);
            }
            OnConflict::Reject | OnConflict::Replace => {
                let field = format!("{}unique.key", wanted.path);
                return Err(Failed::Refused(Error::UniqueConflict { field, holder: Some(id) }));
            }
        }
    }
    let keys: Vec<_> = replaced.keys().copied().collect();
    let gone = cancel_waiting(tx, &keys, CancelReason::Asked).await?;
    let noted = gone.iter().map(|it| NewEvent {
        payload: replaced.get(&it.key).map(|by| json!({ "replaced_by": by }).to_string()),
        ..NewEvent::change(it.key, history::REPLACED, &ChangedBy::SERVER)
    });
    events::insert(tx, &noted.collect::<Vec<_>>()).await?;
    Ok((existing, gone))
}

/// Finds the parents of new jobs, counts the dependencies that are not met yet, and counts the new
/// children of each parent.
async fn tie(
    tx: &mut PgConnection,
    project_id: ProjectId,
    jobs: &[JobWithDependencies],
    existing: &HashMap<String, JobId>,
) -> Result<(Vec<NewJob>, Vec<Edge>), Failed> {
    let is_new = |it: &&JobWithDependencies| {
        unique_key(&it.job).is_none_or(|key| !existing.contains_key(key))
    };
    let new: Vec<_> = jobs.iter().filter(is_new).collect();
    let parents_of = |job: &NewJob| job.extras.as_ref().map_or(Vec::new(), |it| it.parents.clone());
    let mut wanted: Vec<_> =
        new.iter().flat_map(|it| parents_of(&it.job)).map(|it| it.parent).collect();
    wanted.sort();
    wanted.dedup();
    let mut found = HashMap::new();
    if !wanted.is_empty() {
        // Live parents first: one that ends in between is found among the ended.
        for parent in dependencies::lock_parents(tx, project_id, &wanted).await? {
            found.insert(parent.id, parent);
        }
        for parent in dependencies::ended_parents(tx, project_id, &wanted).await? {
            found.entry(parent.id).or_insert(parent);
        }
    }
    let (mut edges, mut more, mut entries) = (Vec::new(), HashMap::new(), Vec::new());
    for it in new {
        let mut job = it.job.clone();
        for (ordinal, dependency) in (0_i16..).zip(parents_of(&job)) {
            let field = it.parent_field(ordinal);
            let Dependency { parent, when } = dependency;
            let is_met = is_met(found.get(&parent), dependency, field)?;
            if !is_met {
                let added: &mut i32 = more.entry(parent).or_default();
                *added += 1;
            }
            if let Some(extras) = &mut job.extras {
                extras.unfinished_parents += i32::from(!is_met);
            }
            edges.push(Edge { parent, child: job.id, ordinal, when, is_met });
        }
        entries.push(job);
    }
    for (parent, added) in &more {
        let children = found.get(parent).map_or(0, |it| it.children);
        if children + added > limits::MAX_CHILDREN {
            let message = format!("{parent} has {} children, its limit", limits::MAX_CHILDREN);
            return Err(Failed::Refused(Error::invalid("depends_on", message)));
        }
    }
    if !more.is_empty() {
        let more: Vec<_> = more.into_iter().collect();
        dependencies::add_children(tx, project_id, &more).await?;
    }
    Ok((entries, edges))
}

/// Counts new jobs of batches.
async fn join_batches(
    tx: &mut PgConnection,
    project_id: ProjectId,
    jobs: &[NewJob],
) -> Result<(), Failed> {
    let mut added: BTreeMap<BatchId, i32> = BTreeMap::new();
    for batch_id in jobs.iter().filter_map(|it| it.extras.as_ref()?.batch_id) {
        *added.entry(batch_id).or_default() += 1;
    }
    if added.is_empty() {
        return Ok(());
    }
    let ids: Vec<_> = added.keys().copied().collect();
    let found: HashMap<_, _> =
        batches::lock_open(tx, project_id, &ids).await?.into_iter().collect();
    for id in ids {
        match found.get(&id) {
            Some(true) => (),
            Some(false) => return Err(Failed::Refused(Error::BatchCompleted(id))),
            None => {
                let message = format!("the project has no batch {id}");
                return Err(Failed::Refused(Error::invalid("batch_id", message)));
            }
        }
    }
    let added: Vec<_> = added.into_iter().collect();
    batches::add_jobs(tx, project_id, &added).await?;
    Ok(())
}

/// The refusal of a dependency on a job that the project does not have.
#[must_use]
pub fn no_parent(field: String, parent: JobId) -> Error {
    Error::invalid(field, format!("the project has no job {parent}"))
}

/// Whether a dependency is met already.
fn is_met(
    found: Option<&Parent>,
    Dependency { parent, when }: Dependency<JobId>,
    field: String,
) -> Result<bool, Failed> {
    let Some(found) = found else {
        return Err(Failed::Refused(no_parent(field, parent)));
    };
    match found.end {
        None => Ok(false),
        Some(end) if when.is_met_by(end) => Ok(true),
        Some(_) => {
            let message = format!("{parent} is {}", found.state.public().as_str());
            let fields = vec![FieldError::new(field, message)];
            Err(Failed::Refused(Error::ParentTerminal(fields)))
        }
    }
}
