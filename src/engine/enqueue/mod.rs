//! Storing the jobs of one request, with or without dependencies.

pub mod alone;
pub mod callback_url;
pub mod dependencies;
mod expiries;
pub mod full;
mod origin;
mod payloads;
mod places;
pub mod quota;
pub(crate) mod replays;
mod stored;

use std::{collections::HashMap, sync::Arc};

use fencepost_domain::{
    callbacks::CallbackJob,
    error::Error,
    ids::{JobId, ProjectId},
    plan::Tenant,
};
use fencepost_store::{
    self as store,
    connection::deadline::{detached_in, detached_query},
    jobs::{JobRow, Payloads, enqueue::StoredJob},
    workflows::NewWorkflow,
};
use sqlx::PgConnection;

use self::dependencies::{EnqueueOutcome, JobWithDependencies};
use super::Engine;

pub(super) use self::stored::too_far_ahead;
pub use self::{
    origin::Origin,
    payloads::{ToCheck, UNREADABLE},
    stored::{Enqueues, Extras, NewJob, Start},
};

/// A job after its enqueue.
#[derive(Debug, Clone)]
pub struct Enqueued {
    pub row: JobRow,
    /// False: a live job had the unique key already.
    pub is_new: bool,
}

/// Stores jobs, all or none, and returns them in their order, if the project's quota permits.
/// Requests in which no job has dependencies, a unique key, a batch, an id of the client's or an
/// `expires_at`, or is a replay, share a statement with others.
///
/// # Errors
/// Those of its origin. [`Error::QuotaExceeded`], [`Error::QueueFull`]. [`Error::Invalid`] when a
/// `run_at` lies too far ahead, or a parent does not exist or has too many children.
/// [`Error::ParentTerminal`], [`Error::UniqueConflict`], and [`Error::Overloaded`] when too many
/// requests wait. Nothing is stored then. Existing jobs are read after the commit: if that fails,
/// or one was deleted meanwhile ([`Error::JobNotFound`]), the new ones are stored.
pub async fn store(
    engine: &Engine,
    tenant: Tenant,
    origin: Origin,
    mut jobs: Vec<JobWithDependencies>,
) -> Result<Vec<Enqueued>, Error> {
    origin.admit(engine, tenant.project_id, &mut jobs).await?;
    quota::admit(engine, tenant, jobs.iter().map(|it| &it.job)).await?;
    let project_id = tenant.project_id;
    let outcomes = if jobs.iter().any(needs_a_transaction) {
        let (running, jobs) = (engine.clone(), jobs.clone());
        let store = async move { dependencies::store(&running, tenant, &jobs, None).await };
        let stored = detached_in(&engine.tasks, store).await;
        stored.unwrap_or_else(|overdue| Err(overdue.into()))
    } else {
        let plain: Arc<[NewJob]> = jobs.iter().map(|it| it.job.clone()).collect();
        let stored = stored::enqueue(engine, plain).await;
        stored.map(|it| it.into_iter().map(EnqueueOutcome::Stored).collect())
    };
    // If the caller was dropped, what was admitted counts until the next count, a second later.
    let outcomes = outcomes.map_err(|error| {
        engine.backlogs.refund(project_id, quota::cost(jobs.iter().map(|it| &it.job)));
        name_the_latest(error, &jobs)
    })?;
    let existing: Vec<_> = outcomes.iter().filter_map(EnqueueOutcome::existing).collect();
    let found = jobs.iter().zip(&outcomes).filter(|(_, it)| it.existing().is_some());
    engine.backlogs.refund(project_id, quota::cost(found.map(|(it, _)| &it.job)));
    let existing = find_all(engine, project_id, &existing).await?;
    let mut enqueued = Vec::with_capacity(jobs.len());
    for (JobWithDependencies { job, .. }, outcome) in jobs.into_iter().zip(outcomes) {
        enqueued.push(match outcome {
            EnqueueOutcome::Stored(it) => Enqueued { row: it.into_row(job), is_new: true },
            EnqueueOutcome::Existing(id) => {
                // Several jobs of a request may find the same one.
                let row = existing.get(&id).cloned().ok_or(Error::JobNotFound)?;
                Enqueued { row, is_new: false }
            }
        });
    }
    Ok(enqueued)
}

async fn find_all(
    engine: &Engine,
    project_id: ProjectId,
    ids: &[JobId],
) -> Result<HashMap<JobId, JobRow>, Error> {
    if ids.is_empty() {
        return Ok(HashMap::new());
    }
    let (pools, ids) = (engine.pools.clone(), ids.to_vec());
    let rows = detached_query(async move {
        let mut conn = pools.read_for(project_id).await?;
        store::jobs::find_all(&mut conn, project_id, &ids, Payloads::Shown).await
    });
    let rows = rows.await?;
    Ok(rows.into_iter().map(|it| (it.id, it)).collect())
}

/// Stores a workflow with its jobs, all or none, if the project's quota permits.
///
/// # Errors
/// As for [`store()`]. [`Error::Overloaded`] when another request has re-run the same workflow, or
/// used the same key of a start, at the same moment.
pub async fn store_workflow(
    engine: &Engine,
    tenant: Tenant,
    origin: Origin,
    workflow: &NewWorkflow,
    mut jobs: Vec<JobWithDependencies>,
) -> Result<(), Error> {
    origin.admit(engine, tenant.project_id, &mut jobs).await?;
    quota::admit(engine, tenant, jobs.iter().map(|it| &it.job)).await?;
    let stored = dependencies::store(engine, tenant, &jobs, Some(workflow)).await;
    if stored.is_err() {
        engine.backlogs.refund(tenant.project_id, quota::cost(jobs.iter().map(|it| &it.job)));
    }
    stored.map(drop)
}

/// Jobs that were stored in a transaction of the caller.
#[derive(Debug, Default)]
pub struct NewlyStored {
    jobs: Vec<NewJob>,
    stored: HashMap<JobId, StoredJob>,
}

impl NewlyStored {
    /// How many they are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Counts and notifies. Call it after the commit.
    pub fn publish(&self, engine: &Engine) {
        if !self.is_empty() {
            stored::publish(&engine.notifier, self.jobs.iter(), &self.stored);
        }
    }
}

/// Stores jobs without dependencies in a transaction of the caller, whatever the project's quota.
pub(super) async fn store_in(
    tx: &mut PgConnection,
    jobs: Vec<NewJob>,
) -> sqlx::Result<NewlyStored> {
    if jobs.is_empty() {
        return Ok(NewlyStored::default());
    }
    let refs: Vec<_> = jobs.iter().collect();
    let stored =
        store::jobs::enqueue::insert_jobs(tx, &refs, &vec![None; refs.len()], &[], &[]).await?;
    let stored = stored.into_iter().map(|it| (it.id, it)).collect();
    Ok(NewlyStored { jobs, stored })
}

/// The same job, to be enqueued by an end.
#[must_use]
pub fn callback(job: NewJob) -> CallbackJob {
    let extras = job.extras.map(|it| *it).unwrap_or_default();
    let callbacks = extras.callbacks.and_then(|it| serde_json::from_str(&it).ok());
    CallbackJob {
        queue: job.queue,
        job_type: job.job_type,
        payload: job.payload,
        rank: job.rank,
        max_attempts: job.max_attempts,
        timeout_seconds: job.timeout_seconds,
        retry: job.retry.map(|it| it.0),
        tags: job.tags.map(|it| it.0),
        labels: extras.labels,
        group: extras.group,
        traceparent: extras.traceparent,
        envelope: extras.envelope,
        callbacks: callbacks.unwrap_or_default(),
    }
}

fn needs_a_transaction(it: &JobWithDependencies) -> bool {
    let extras = it.job.extras.as_ref();
    it.is_id_given
        || it.replayed_by.is_some()
        || extras.is_some_and(|extras| {
            extras.unique_key.is_some()
                || extras.has_parents
                || extras.expires_at.is_some()
                || extras.batch_id.is_some()
        })
}

/// Only the database's clock can decide that a `run_at` is too far ahead, and it checks the latest
/// one of a request.
fn name_the_latest(error: Error, jobs: &[JobWithDependencies]) -> Error {
    let Error::Invalid(mut fields) = error else { return error };
    let starts = jobs.iter().filter_map(|it| match it.job.start {
        Start::At(run_at) => Some((run_at, it)),
        Start::After(_) => None,
    });
    if let (Some((_, latest)), Some(field)) = (starts.max_by_key(|it| it.0), fields.first_mut())
        && field.field == "run_at"
    {
        field.field = format!("{}{}", latest.path, field.field);
    }
    Error::Invalid(fields)
}
