//! A leased job on its way to a worker: what the claim, the pump and the polls share.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use fencepost_domain::{
    ids::{JobKey, LeaseId},
    job::StoredState,
    raw_json::RawNode,
    template::{self, Place},
    text::ErrorReport,
    trace::{self, AttemptTrace},
    workflow,
};
use fencepost_signals::traces;
use fencepost_store::{self as store, claims::LeasedJob, settle::checkpoints::Checkpoint};
use sqlx::PgConnection;

use crate::enqueue::dependencies::ParentResult;

/// A job as a worker is given it.
#[derive(Debug, Clone)]
pub struct DispatchedJob {
    pub job: LeasedJob,
    pub worker_id: Arc<str>,
    /// The error that the last failed attempt reported.
    pub last_error: Option<ErrorReport>,
    /// Results of the parents, in the order in which they were named.
    pub parent_results: Vec<ParentResult>,
    /// How far its attempts have come.
    pub checkpoint: Option<Checkpoint>,
    /// False if results of parents, templates or checkpoints could not be read: the job is released
    /// instead of delivered.
    pub is_complete: bool,
}

impl DispatchedJob {
    /// A job alone; errors and parents' results are added later. While spans are exported, the
    /// trace continues from the span of this attempt.
    pub(super) fn new(job: LeasedJob, worker_id: Arc<str>) -> Self {
        let trace = trace_of(&job).map(|it| it.own.to_string());
        let traceparent = trace.or(job.traceparent);
        let job = LeasedJob { traceparent, ..job };
        let (last_error, parent_results) = (None, Vec::new());
        let checkpoint = None;
        Self { job, worker_id, last_error, parent_results, checkpoint, is_complete: true }
    }
}

/// Leases that are being released, because their jobs were not delivered: no repeated poll may get
/// them any more.
#[derive(Debug, Clone, Default)]
pub(crate) struct Releasing(Arc<Mutex<HashSet<LeaseId>>>);

impl Releasing {
    fn leases(&self) -> MutexGuard<'_, HashSet<LeaseId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be called before anyone else can learn that the jobs were not delivered.
    pub(super) fn begin(&self, jobs: &[DispatchedJob]) {
        self.begin_leases(jobs.iter().map(|it| it.job.lease_id));
    }

    /// The same for leases whose jobs are not known.
    pub(super) fn begin_leases(&self, leases: impl IntoIterator<Item = LeaseId>) {
        self.leases().extend(leases);
    }

    pub(super) fn end(&self, lease_id: LeaseId) {
        self.leases().remove(&lease_id);
    }

    pub(super) fn has(&self, lease_id: LeaseId) -> bool {
        self.leases().contains(&lease_id)
    }
}

/// The trace context of this attempt, while spans are exported. The job itself keeps the context of
/// its enqueue.
pub(super) fn trace_of(job: &LeasedJob) -> Option<AttemptTrace> {
    let enqueued = job.traceparent.as_deref().filter(|_| traces::is_on())?;
    trace::of_attempt(enqueued, job.attempt, job.lease_id.0)
}

/// Adds the error of the last failed attempt, checkpoints, and the results of parents. If the
/// errors cannot be read, the job is delivered without. If something else cannot be read, the job
/// is marked incomplete and released.
pub(super) async fn add_errors_and_results(
    conn: &mut PgConnection,
    mut jobs: Vec<&mut DispatchedJob>,
) {
    let key = |it: &DispatchedJob| (it.job.project_id, it.job.id);
    let retried: Vec<_> = jobs.iter().filter(|it| it.job.failures > 0).map(|it| key(it)).collect();
    if !retried.is_empty() {
        match store::jobs::last_errors(conn, &retried).await {
            Ok(mut errors) => {
                jobs.iter_mut().for_each(|it| it.last_error = errors.remove(&key(it)));
            }
            Err(error) => warn(&error, "last errors were not read"),
        }
    }
    add_checkpoints(conn, &mut jobs).await;
    let children: Vec<_> = jobs.iter().filter(|it| it.job.has_parents).map(|it| key(it)).collect();
    if !children.is_empty() {
        match store::workflows::dependencies::parent_results(conn, &children).await {
            Ok(results) => {
                for (project_id, result) in results {
                    let child = (project_id, result.child_id);
                    if let Some(job) = jobs.iter_mut().find(|it| key(it) == child) {
                        job.parent_results.push(result);
                    }
                }
            }
            Err(error) => {
                warn(&error, "parents' results were not read");
                jobs.iter_mut().for_each(|it| it.is_complete &= !it.job.has_parents);
            }
        }
        fill_templates(conn, &mut jobs).await;
    }
}

/// Only an attempt that is not the first can have one. A later statement than the claim reads it:
/// no earlier attempt can send another.
async fn add_checkpoints(conn: &mut PgConnection, jobs: &mut [&mut DispatchedJob]) {
    let key = |it: &DispatchedJob| JobKey { project_id: it.job.project_id, id: it.job.id };
    let is_later = |it: &DispatchedJob| it.job.attempt > 1;
    let later: Vec<_> = jobs.iter().filter(|it| is_later(it)).map(|it| key(it)).collect();
    if later.is_empty() {
        return;
    }
    match store::settle::checkpoints::find(conn, &later).await {
        Ok(found) => {
            for checkpoint in found {
                let of = JobKey { project_id: checkpoint.project_id, id: checkpoint.job_id };
                if let Some(job) = jobs.iter_mut().find(|it| key(it) == of) {
                    job.checkpoint = Some(checkpoint);
                }
            }
        }
        Err(error) => {
            warn(&error, "checkpoints were not read");
            jobs.iter_mut().filter(|it| is_later(it)).for_each(|it| it.is_complete = false);
        }
    }
}

/// Fills the places of payloads with the workflow's input and the results of parents. If these
/// cannot be read, jobs with parents are marked incomplete and released.
async fn fill_templates(conn: &mut PgConnection, jobs: &mut [&mut DispatchedJob]) {
    let mut children: Vec<_> = jobs.iter_mut().filter(|it| it.job.has_parents).collect();
    let keys: Vec<_> = children.iter().map(|it| (it.job.project_id, it.job.id)).collect();
    match store::workflows::templates(conn, &keys).await {
        Ok(templates) => {
            for (project_id, id, input) in templates {
                let own = children
                    .iter_mut()
                    .find(|it| (it.job.project_id, it.job.id) == (project_id, id));
                if let Some(it) = own
                    && let Some(filled) =
                        filled(&it.job.payload, input.as_deref(), &it.parent_results)
                {
                    it.job.payload = filled;
                }
            }
        }
        Err(error) => {
            warn(&error, "templates were not read");
            children.iter_mut().for_each(|it| it.is_complete = false);
        }
    }
}

/// None: the payload is not a valid template, which its enqueue has refused.
fn filled(payload: &str, input: Option<&str>, parents: &[ParentResult]) -> Option<String> {
    let input = RawNode::read(input.unwrap_or(template::NULL));
    fn result(it: &ParentResult) -> Option<(&str, RawNode<'_>)> {
        Some((it.workflow_key.as_deref()?, RawNode::read(it.result.as_deref()?)))
    }
    let results: HashMap<_, _> = parents.iter().filter_map(result).collect();
    let has_succeeded = |key: &str| {
        let mut of_key = parents.iter().filter(|it| it.workflow_key.as_deref() == Some(key));
        of_key.any(|it| it.state == StoredState::Succeeded)
    };
    // A fallback takes the place of a parent that has failed.
    let result_of = |key: &str| {
        let fallback = || results.get(workflow::fallback_key(key).as_str());
        if has_succeeded(key) { results.get(key) } else { fallback() }
    };
    let filled = template::fill(payload, &mut |place| {
        let value = match place {
            Place::Input(path) => template::at(&input, path),
            Place::Step { key, path } => result_of(key).and_then(|it| template::at(it, path)),
        };
        Ok(Some(value.unwrap_or(template::NULL)))
    });
    filled.ok().map(|it| it.payload)
}

fn warn(error: &sqlx::Error, message: &str) {
    tracing::warn!(error = error as &dyn std::error::Error, "{message}");
}

/// How many of these jobs each group has; empty: those without a group.
pub(super) fn count_by_group(jobs: &[LeasedJob]) -> HashMap<&str, i32> {
    let mut counts = HashMap::new();
    for group in jobs.iter().map(|it| it.group.as_deref().unwrap_or_default()) {
        *counts.entry(group).or_default() += 1;
    }
    counts
}
