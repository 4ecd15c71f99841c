//! A leased job on its way to a worker: what the claim, the pump and the polls share.

use std::sync::Arc;

use sqlx::PgConnection;

use crate::{
    domain::{
        text::ErrorReport,
        trace::{self, AttemptTrace},
    },
    engine::enqueue::dependencies::ParentResult,
    store::{self, claims::LeasedJob},
    traces,
};

/// A job as a worker is given it.
#[derive(Debug, Clone)]
pub struct LeasedDelivery {
    pub job: LeasedJob,
    pub worker_id: Arc<str>,
    /// What its last failed attempt reported.
    pub last_error: Option<ErrorReport>,
    /// What its parents have made, in the order in which they were named.
    pub parent_results: Vec<ParentResult>,
    /// Whether nothing is missing that it needs.
    pub is_complete: bool,
}

impl LeasedDelivery {
    /// A job by itself; what came before it is still to be looked up.
    /// While spans are sent, its trace goes on from the span of this attempt.
    pub(super) fn new(job: LeasedJob, worker_id: Arc<str>) -> Self {
        let trace = trace_of(&job).map(|it| it.own.to_string());
        let traceparent = trace.or(job.traceparent);
        let job = LeasedJob { traceparent, ..job };
        let (last_error, parent_results) = (None, Vec::new());
        Self { job, worker_id, last_error, parent_results, is_complete: true }
    }
}

/// Where this attempt stands in traces, while spans are sent. The job still has the trace that it was enqueued in.
pub(super) fn trace_of(job: &LeasedJob) -> Option<AttemptTrace> {
    let enqueued = job.traceparent.as_deref().filter(|_| traces::is_on())?;
    trace::of_attempt(enqueued, job.attempt, job.lease_id.0)
}

/// Adds what the last failed attempt of each job reported, and what its parents made. A job is worth
/// more than its last error: when that look fails, the job goes out without. It is nothing without its
/// parents' results: then it is marked, and goes back.
pub(super) async fn add_background(conn: &mut PgConnection, mut handed: Vec<&mut LeasedDelivery>) {
    let key = |it: &LeasedDelivery| (it.job.project_id, it.job.id);
    let retried: Vec<_> =
        handed.iter().filter(|it| it.job.failures > 0).map(|it| key(it)).collect();
    if !retried.is_empty() {
        match store::jobs::last_errors(conn, &retried).await {
            Ok(mut errors) => {
                handed.iter_mut().for_each(|it| it.last_error = errors.remove(&key(it)));
            }
            Err(error) => warn(&error, "last errors were not found"),
        }
    }
    let children: Vec<_> =
        handed.iter().filter(|it| it.job.has_parents).map(|it| key(it)).collect();
    if !children.is_empty() {
        match store::dependencies::parent_results(conn, &children).await {
            Ok(results) => {
                for (project_id, result) in results {
                    let child = (project_id, result.child_id);
                    if let Some(handed) = handed.iter_mut().find(|it| key(it) == child) {
                        handed.parent_results.push(result);
                    }
                }
            }
            Err(error) => {
                warn(&error, "parents' results were not found");
                handed.iter_mut().for_each(|it| it.is_complete = !it.job.has_parents);
            }
        }
    }
}

fn warn(error: &sqlx::Error, message: &str) {
    tracing::warn!(error = error as &dyn std::error::Error, "{message}");
}
