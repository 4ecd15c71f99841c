//! What a poll asks for, and how polls share the jobs of a claim.

use std::sync::Arc;

use uuid::Uuid;

use crate::{ids::ProjectId, store::polls::PollKey};

/// What a poll asks for.
#[derive(Debug, Clone)]
pub struct PollSpec {
    pub project_id: ProjectId,
    /// Queues to claim from, in this order.
    pub queues: Vec<Arc<str>>,
    /// Only these types, if any are named. Sorted.
    pub job_types: Arc<[String]>,
    /// The worker's labels. Sorted. Jobs with other labels are not delivered.
    pub labels: Arc<[String]>,
    /// Only jobs whose payload is a command, or an object with one.
    pub only_commands: bool,
    pub worker_id: Arc<str>,
    /// Maximum number of jobs.
    pub capacity: u32,
    /// Requested lease, in seconds.
    pub lease_seconds: Option<i32>,
    /// The worker's own id for this poll.
    pub poll_id: Option<Uuid>,
}

impl PollSpec {
    /// The key of the poll, if its worker gave it an id.
    #[must_use]
    pub fn poll_key(&self) -> Option<PollKey> {
        let worker_id = Arc::clone(&self.worker_id);
        Some(PollKey { project_id: self.project_id, worker_id, poll_id: self.poll_id? })
    }
}

/// One lease request for each poll, then a second for each with capacity, and so on.
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
