//! Replaying: a new job with the work of an earlier one. The earlier one stays as it is.

use std::collections::HashMap;

use fencepost_domain::{
    actor::ChangedBy,
    backoff::RetryPolicy,
    constraint_key,
    error::Error,
    ids::{JobId, JobKey, ProjectId},
    operation::{SkipReason, Skipped},
    plan::Tenant,
};
use fencepost_store::{
    self as store,
    jobs::{JobRow, Payloads, events},
};
use sqlx::PgConnection;

use crate::{
    Engine,
    enqueue::{
        self, Extras, NewJob, NewlyStored, Origin, Start,
        dependencies::{JobWithDependencies, OnConflict},
        replays,
    },
};

/// Changes to the earlier job's work; none keeps it.
#[derive(Debug, Clone)]
pub struct Changes {
    /// The JSON as it was sent.
    pub payload: Option<String>,
    pub job_type: Option<String>,
    pub queue: Option<String>,
    /// Sorted, each once.
    pub labels: Option<Vec<String>>,
    /// Minus the priority.
    pub rank: Option<i16>,
    pub start: Start,
    /// The trace context of the request.
    pub traceparent: Option<String>,
}

/// Stores a new job with the work of an earlier one, in whatever state that is.
///
/// # Errors
/// [`Error::JobNotFound`]. [`Error::Invalid`] when the earlier payload is a template and `changes`
/// have none. Those of [`enqueue::store()`].
pub async fn replay(
    engine: &Engine,
    tenant: Tenant,
    origin: Origin,
    (of, id): (JobId, JobId),
    changes: Changes,
    by: ChangedBy,
) -> Result<JobRow, Error> {
    let key = JobKey { project_id: tenant.project_id, id: of };
    let mut row = super::find(engine, key).await?;
    // Before the copy: its constraint key is made of both.
    row.job_type = changes.job_type.unwrap_or(row.job_type);
    row.labels = changes.labels.or(row.labels);
    if row.is_template && changes.payload.is_none() {
        let message = "must be sent: that of the job is a template of its workflow";
        return Err(Error::invalid("payload", message));
    }
    let mut job = replayed(tenant.project_id, id, &row);
    job.payload = changes.payload.unwrap_or(job.payload);
    job.queue = changes.queue.unwrap_or(job.queue);
    job.rank = changes.rank.unwrap_or(job.rank);
    job.start = changes.start;
    job.extras.get_or_insert_default().traceparent = changes.traceparent;
    let entry = JobWithDependencies::new(job, OnConflict::Reject);
    let entry = JobWithDependencies { replayed_by: Some(by), ..entry };
    let mut stored = enqueue::store(engine, tenant, origin, vec![entry]).await?;
    stored.pop().map(|it| it.row).ok_or(Error::InDoubt)
}

/// Stores replays of these jobs, in a transaction of the caller. Jobs that are gone, and those
/// whose payload is a template, are skipped and counted.
pub(crate) async fn replay_in(
    tx: &mut PgConnection,
    project_id: ProjectId,
    ids: &[JobId],
    by: &ChangedBy,
) -> sqlx::Result<(NewlyStored, Skipped)> {
    let rows = store::jobs::find_all(tx, project_id, ids, Payloads::Shown).await?;
    let templates = rows.iter().filter(|it| it.is_template).count();
    let mut skipped = Skipped::of(SkipReason::JobNotFound, (ids.len() - rows.len()) as i64);
    skipped.add(SkipReason::Template, templates as i64);
    let mut found: HashMap<_, _> = rows.into_iter().map(|it| (it.id, it)).collect();
    let in_order = ids.iter().filter_map(|id| found.remove(id)).filter(|it| !it.is_template);
    let jobs: Vec<_> = in_order.map(|it| replayed(project_id, JobId::generate(), &it)).collect();
    let noted = jobs.iter().map(|it| replays::event(it, by));
    events::insert(tx, &noted.collect::<Vec<_>>()).await?;
    Ok((enqueue::store_in(tx, jobs).await?, skipped))
}

fn replayed(project_id: ProjectId, id: JobId, row: &JobRow) -> NewJob {
    let mut job = copy(project_id, id, row);
    job.extras.get_or_insert_default().replay_of = Some(row.id);
    job
}

/// The same work as a new job, to run immediately. It has no parents, unique key, `expires_at`,
/// batch, callbacks, workflow or trace.
pub(super) fn copy(project_id: ProjectId, id: JobId, row: &JobRow) -> NewJob {
    let retry = row.retry.is_some().then(|| RetryPolicy::stored(row.retry.as_ref()));
    let labels = row.labels.clone().unwrap_or_default();
    let concurrency = row.concurrency_key.as_deref().zip(row.concurrency_limit);
    // Each field is named, so that the compiler asks of a new one whether a replay keeps it.
    let extras = Extras {
        constraint_key: constraint_key::of(&row.job_type, &labels, concurrency),
        labels,
        concurrency_key: row.concurrency_key.clone(),
        concurrency_limit: row.concurrency_limit,
        group: row.group.clone(),
        envelope: row.envelope.clone(),
        unique_key: None,
        expires_at: None,
        traceparent: None,
        hop: None,
        parents: Vec::new(),
        unfinished_parents: 0,
        has_parents: false,
        children: 0,
        workflow_id: None,
        workflow_key: None,
        is_template: false,
        max_losses: row.max_losses,
        batch_id: None,
        replay_of: None,
        callbacks: None,
        callback_count: 0,
        callback_url: None,
    };
    let tags = row.tags.clone().and_then(|it| serde_json::from_value(it).ok());
    NewJob {
        project_id,
        id,
        queue: row.queue.clone(),
        job_type: row.job_type.clone(),
        rank: row.rank,
        start: Start::After(0),
        max_attempts: Some(row.max_attempts),
        timeout_seconds: row.timeout_seconds,
        payload: row.payload.clone(),
        retry: retry.map(sqlx::types::Json),
        tags: tags.map(sqlx::types::Json),
        extras: Some(Box::new(extras)),
    }
}
