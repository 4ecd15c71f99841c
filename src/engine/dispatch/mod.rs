//! Polls: wait for jobs without holding a connection, and deliver them so that none is lost on the
//! way.

mod any_queue;
mod claim;
mod dispatched;
mod lanes;
mod limited_claim;
mod lost_claims;
mod matches;
pub(super) mod park;
pub(super) mod pump;
mod request;

use std::{future::Future, sync::Arc};

use fencepost_domain::error::Error;
use tokio_util::sync::CancellationToken;

use super::{Engine, workers};

pub use self::{
    any_queue::MAX_QUEUES,
    dispatched::DispatchedJob,
    park::{MAX_PARKED_POLLS, PollAnswer},
    request::Poll,
};
pub(super) use self::{any_queue::QueueLists, dispatched::Releasing};
pub use fencepost_store::claims::LeasedJob;

/// Waits for jobs and leases them; tells whether the worker should take more. No jobs is an
/// ordinary answer.
///
/// Jobs come from the named queues in their order: while the poll has room, the next queue follows.
/// Records that the worker was heard. A worker that names no labels has those that it registered.
/// Repeating a poll with its `poll_id` while its leases run returns the same jobs. The wait ends
/// with jobs, at its end, when the client is gone (`gone`), when its key is revoked (`revoked`),
/// when the worker gets a directive, or at shutdown.
///
/// # Errors
/// What `revoked` resolves to, when the key was revoked meanwhile. [`Error::Overloaded`] when too
/// many polls are parked. [`Error::NotReady`] when the poll does not wait and the database does not
/// answer. Jobs leased by a claim in flight are released.
pub async fn poll(
    engine: &Engine,
    poll: Poll,
    gone: &CancellationToken,
    revoked: impl Future<Output = Error>,
) -> Result<PollAnswer, Error> {
    let wait = poll.wait;
    let registered = match &poll.worker_id {
        Some(name) => workers::facts(engine, &(poll.project_id, name.as_str().into())).await?,
        None => None,
    };
    let is_named = poll.worker_id.is_some();
    let spec = poll.spec(registered.as_ref().map_or(&[], |it| &it.labels));
    if is_named {
        let worker = (spec.project_id, Arc::clone(&spec.worker_id));
        engine.registry.record_seen(&worker, &spec.queues, &spec.job_types);
    }
    if spec.queues.is_empty() {
        // Boxed: its bytes would be part of every parked poll.
        return Box::pin(any_queue::poll(engine, spec, wait, gone, revoked)).await;
    }
    let mut answer = park::poll(engine, spec.clone(), wait, gone.cancelled(), revoked).await?;
    park::fill_up(engine, &spec, &mut answer, gone).await;
    Ok(answer)
}
