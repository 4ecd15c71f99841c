//! What a poll asks for, and how the wishes of many share what there is.

use std::sync::Arc;

use uuid::Uuid;

use crate::{ids::ProjectId, store::polls::PollKey};

/// What a poll asks for.
#[derive(Debug, Clone)]
pub struct PollSpec {
    pub project_id: ProjectId,
    /// From these queues, in this order.
    pub queues: Vec<Arc<str>>,
    /// Only of these types, when some are named. Sorted.
    pub job_types: Arc<[String]>,
    /// What the worker has. Sorted. Jobs that ask for more are not for it.
    pub labels: Arc<[String]>,
    /// Only jobs whose payload is a command, or an object that has one.
    pub only_commands: bool,
    pub worker_id: Arc<str>,
    /// At most so many.
    pub capacity: u32,
    /// The lease it wants, in seconds.
    pub lease_seconds: Option<i32>,
    /// Its own name for this poll.
    pub poll_id: Option<Uuid>,
}

impl PollSpec {
    /// Its name, if its worker gave it one.
    #[must_use]
    pub fn poll_key(&self) -> Option<PollKey> {
        let worker_id = Arc::clone(&self.worker_id);
        Some(PollKey { project_id: self.project_id, worker_id, poll_id: self.poll_id? })
    }
}

/// One slot for each taker, then a second for each that has room, and so on.
pub(in crate::engine) fn share_slots<Taker: Copy>(
    takers: &[(Taker, Arc<PollSpec>)],
    max_slots: usize,
) -> Vec<(Taker, Arc<PollSpec>)> {
    let deepest = takers.iter().map(|(_, spec)| spec.capacity).max().unwrap_or(0);
    (0..deepest)
        .flat_map(|round| takers.iter().filter(move |(_, spec)| spec.capacity > round))
        .take(max_slots)
        .cloned()
        .collect()
}
