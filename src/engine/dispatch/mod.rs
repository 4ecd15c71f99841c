//! Polls: wait for jobs without holding a connection, and deliver them so that none is lost on the
//! way.

mod answered;
mod any_queue;
mod claim;
mod dispatched;
mod lanes;
mod limited_claim;
mod limited_groups;
mod lost_claims;
mod matches;
pub(super) mod park;
pub(super) mod pump;
mod request;
mod shared_claim;
mod turn_claim;

use std::future::Future;

use fencepost_domain::error::Error;
use tokio_util::sync::CancellationToken;

use super::{Engine, workers::Presence};

pub use self::{
    any_queue::MAX_QUEUES,
    dispatched::DispatchedJob,
    park::{MAX_PARKED_POLLS, PollAnswer},
    request::Poll,
};
pub(super) use self::{any_queue::QueueLists, dispatched::Releasing};
pub use fencepost_store::claims::LeasedJob;

/// Waits for jobs and leases them; returns whether the worker should take more. No jobs is an
/// ordinary answer.
///
/// Jobs come from the named queues in their order: while the poll has room, the next queue follows.
/// Records that the worker was heard. A worker that names no labels has those that it registered.
/// Repeating a poll with its `poll_id` while its leases run returns the same jobs. The wait ends
/// with jobs, at its end, when the client is gone (`gone`), when its key is revoked (`revoked`),
/// when the worker gets a directive, or at shutdown.
///
/// # Errors
/// The error of `revoked`, when the key was revoked meanwhile. [`Error::QuotaExceeded`] when the
/// project has stored twice its bytes. [`Error::Overloaded`] when too many polls are parked.
/// [`Error::NotReady`] when the poll does not wait and the database does not answer. Jobs leased by
/// a claim in flight are released.
pub async fn poll(
    engine: &Engine,
    poll: Poll,
    gone: &CancellationToken,
    revoked: impl Future<Output = Error>,
) -> Result<PollAnswer, Error> {
    engine.backlogs.full.admit_poll(poll.project_id)?;
    let _waits = (!poll.is_of_server).then(|| engine.usage.waiting(poll.project_id));
    let wait = poll.wait;
    let worker = Presence::of(engine, poll.project_id, poll.worker_id.as_deref()).await?;
    let spec = poll.spec(worker.labels());
    worker.record(&spec.queues, &spec.job_types);
    let mut answer = if spec.queues.is_empty() {
        // Boxed: its bytes would be part of every parked poll.
        Box::pin(any_queue::poll(engine, &worker, spec, wait, gone, revoked)).await?
    } else {
        let polled = park::poll(engine, &worker, spec.clone(), wait, gone.cancelled(), revoked);
        let mut answer = polled.await?;
        park::fill_up(engine, &spec, &mut answer, gone).await;
        answer
    };
    answer.beat_seconds = worker.beat_seconds();
    Ok(answer)
}
