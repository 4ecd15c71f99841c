//! What the ends of jobs enqueue: their callbacks, and those of their batches. The end itself has
//! left a row in its own transaction; here the row is deleted in the transaction that stores the
//! callbacks, so each is stored exactly once.

use std::collections::BTreeMap;

use fencepost_domain::{
    callbacks::{self, BatchCounts, CallbackJob, Callbacks, EndedBatch, EndedJob},
    constraint_key,
    dependency::{FinalState, When},
    ids::{BatchId, JobId, ProjectId, WorkflowId},
    job::StoredState,
    webhook::{BATCH_FAILED, BATCH_SUCCEEDED},
};
use fencepost_signals::telemetry;
use fencepost_store::{
    outbound::outbound_events::{self, About, NewEvent},
    workflows::{
        batches::{self, BatchRow, Delta},
        completions::{self, Completion},
        dependencies::{self, Edge},
    },
};
use metrics::counter;
use sqlx::PgConnection;

use super::workflow_event;
use crate::enqueue::{Extras, NewJob, NewlyStored, Start, store_in};

/// Stores what these ends enqueue. They were taken in the same transaction.
pub(crate) async fn process(
    tx: &mut PgConnection,
    project_id: ProjectId,
    taken: Vec<Completion>,
) -> sqlx::Result<NewlyStored> {
    let (mut jobs, mut edges) = (Vec::new(), Vec::new());
    let mut deltas: BTreeMap<BatchId, Delta> = BTreeMap::new();
    let mut workflows: BTreeMap<WorkflowId, Option<i16>> = BTreeMap::new();
    for end in &taken {
        if let Some(id) = end.workflow_id {
            let most = workflows.entry(id).or_default();
            *most = end.hop.max(*most);
        }
    }
    for end in taken {
        if let Some(batch_id) = end.batch_id {
            add(deltas.entry(batch_id).or_default(), &end);
        }
        callbacks_of_job(tx, end, &mut jobs, &mut edges).await?;
    }
    for (batch_id, delta) in deltas {
        if batches::merge(tx, project_id, batch_id, &delta).await? {
            let callbacks = callbacks_of_batch(tx, project_id, batch_id).await?;
            jobs.extend(callbacks);
        }
    }
    for workflow in workflows {
        workflow_event::store_event(tx, project_id, workflow).await?;
    }
    let enqueued = store_in(tx, jobs).await?;
    if !edges.is_empty() {
        dependencies::insert_edges(tx, project_id, &edges).await?;
    }
    Ok(enqueued)
}

fn add(delta: &mut Delta, end: &Completion) {
    delta.jobs += i64::from(end.jobs);
    delta.succeeded += i64::from(end.succeeded);
    delta.dead_letter += i64::from(end.dead_letter);
    delta.cancelled += i64::from(end.cancelled);
    delta.skipped += i64::from(end.skipped);
    delta.hop = end.hop.max(delta.hop);
}

/// The event about an end.
const fn event_of(end: FinalState) -> &'static str {
    match end {
        FinalState::Succeeded => "job.succeeded",
        FinalState::DeadLetter => "job.dead_lettered",
        _ => "job.cancelled",
    }
}

async fn callbacks_of_job(
    tx: &mut PgConnection,
    end: Completion,
    jobs: &mut Vec<NewJob>,
    edges: &mut Vec<Edge>,
) -> sqlx::Result<()> {
    let (Some(parent), Some(declared)) = (end.job_id, &end.callbacks) else { return Ok(()) };
    let (state, how) = match (end.succeeded, end.dead_letter, end.skipped) {
        (1.., ..) => (StoredState::Succeeded, FinalState::Succeeded),
        (_, 1.., _) => (StoredState::DeadLetter, FinalState::DeadLetter),
        (.., 1..) => (StoredState::Cancelled, FinalState::Skipped),
        _ => (StoredState::Cancelled, FinalState::Cancelled),
    };
    let end_number = completions::count_end(tx, end.project_id, parent).await?;
    let state = state.public().as_str();
    let final_state = match how {
        FinalState::Skipped => "skipped",
        FinalState::Cancelled if completions::has_expired(tx, end.project_id, parent).await? => {
            "expired"
        }
        _ => state,
    };
    let ended = EndedJob { job_id: parent.to_string(), state, final_state, end_number };
    let mut declared = read(declared)?;
    if let Some(url) = declared.url.take() {
        let key = (end.project_id, parent);
        if !outbound_events::call_back(tx, key, event_of(how), &url).await? {
            counter!(telemetry::EVENTS_DROPPED).increment(1);
        }
    }
    for callback in declared.of_end(how) {
        let mut job = new_job(end.project_id, callback, &ended, end.hop);
        job.extras.get_or_insert_default().has_parents = true;
        // It gets the result or the error as that of a parent.
        let (child, when) = (job.id, When::Ended);
        edges.push(Edge { parent, child, ordinal: 0, when, is_met: true });
        jobs.push(job);
    }
    Ok(())
}

/// The callbacks of a batch that may be complete; none if it is not.
async fn callbacks_of_batch(
    tx: &mut PgConnection,
    project_id: ProjectId,
    id: BatchId,
) -> sqlx::Result<Vec<NewJob>> {
    // From here on no job is added. What others have taken and not merged is still counted as a
    // row, so the counts are exact.
    batches::lock(tx, project_id, id).await?;
    let Some(batch) = batches::find(tx, project_id, id).await? else { return Ok(Vec::new()) };
    let has_succeeded = batch.succeeded + batch.skipped >= batch.jobs;
    let failed = batch.dead_letter + batch.cancelled;
    let has_ended = batch.succeeded + batch.skipped + failed >= batch.jobs;
    let is_news = batch.completed_at.is_none() || has_succeeded && batch.succeeded_at.is_none();
    if batch.sealed_at.is_none() || !has_ended || !is_news {
        return Ok(Vec::new());
    }
    batches::complete(tx, project_id, id, has_succeeded).await?;
    let mut declared = read(batch.callbacks.as_deref().unwrap_or("{}"))?;
    let kind = if has_succeeded { BATCH_SUCCEEDED } else { BATCH_FAILED };
    let url = declared.url.take();
    let (about, hop) = (&[About::Batch(id)], batch.hop);
    let event = NewEvent { kind, about, url: url.as_deref(), hop };
    outbound_events::store(tx, project_id, event).await?;
    if batch.completed_at.is_some() {
        declared.on_complete = None;
    }
    let how = if has_succeeded { FinalState::Succeeded } else { FinalState::DeadLetter };
    let ended = ended_batch(&batch);
    Ok(declared.of_end(how).map(|it| new_job(project_id, it, &ended, hop)).collect())
}

/// Seals a batch. It completes at once if all of its jobs have ended.
///
/// # Errors
/// When the database fails. None: there is no such batch.
pub(crate) async fn seal(
    tx: &mut PgConnection,
    project_id: ProjectId,
    id: BatchId,
) -> sqlx::Result<Option<NewlyStored>> {
    if !batches::lock(tx, project_id, id).await? {
        return Ok(None);
    }
    batches::seal(tx, project_id, id).await?;
    let jobs = callbacks_of_batch(tx, project_id, id).await?;
    store_in(tx, jobs).await.map(Some)
}

fn ended_batch(batch: &BatchRow) -> EndedBatch {
    EndedBatch {
        batch_id: batch.id.to_string(),
        jobs: batch.jobs,
        succeeded: batch.succeeded,
        dead_letter: batch.dead_letter,
        cancelled: batch.cancelled,
        skipped: batch.skipped,
        counts: BatchCounts {
            total_jobs: batch.jobs,
            succeeded_jobs: batch.succeeded,
            dead_letter_jobs: batch.dead_letter,
            cancelled_jobs: batch.cancelled,
            skipped_jobs: batch.skipped,
        },
    }
}

fn read(declared: &str) -> sqlx::Result<Callbacks> {
    serde_json::from_str(declared).map_err(|error| sqlx::Error::Decode(error.into()))
}

/// The job of a callback, to which as many deliveries have led as to what has ended.
fn new_job(
    project_id: ProjectId,
    of: CallbackJob,
    ended: &impl serde::Serialize,
    hop: Option<i16>,
) -> NewJob {
    let extras = Extras {
        hop,
        constraint_key: constraint_key::of(&of.job_type, &of.labels, None),
        labels: of.labels,
        group: of.group,
        traceparent: of.traceparent,
        envelope: of.envelope,
        ..Extras::default()
    };
    NewJob {
        project_id,
        id: JobId::generate(),
        queue: of.queue,
        job_type: of.job_type,
        rank: of.rank,
        start: Start::After(0),
        max_attempts: of.max_attempts,
        timeout_seconds: of.timeout_seconds,
        payload: callbacks::payload(of.payload, ended),
        retry: of.retry.map(sqlx::types::Json),
        tags: of.tags.map(sqlx::types::Json),
        extras: Some(Box::new(extras.with_callbacks(&of.callbacks))),
    }
}
