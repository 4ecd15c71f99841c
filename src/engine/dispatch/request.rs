//! What a poll asks for, and how polls share the jobs of a claim.

use std::{sync::Arc, time::Duration};

use fencepost_domain::{
    ids::{ProjectId, anonymous_worker},
    lease::LeaseLength,
};
use uuid::Uuid;

use fencepost_store::claims::polls::PollKey;

/// A poll, in any protocol.
#[derive(Debug, Clone)]
pub struct Poll {
    pub project_id: ProjectId,
    /// None: a worker without a name, which is not registered.
    pub worker_id: Option<String>,
    /// Queues to claim from, in this order; empty: all of the project.
    pub queues: Vec<String>,
    /// Only these types; empty: any.
    pub job_types: Vec<String>,
    /// Labels of the worker; none: the registered ones.
    pub labels: Option<Vec<String>>,
    /// Only jobs whose payload is a command, or an object with one.
    pub only_commands: bool,
    /// Maximum number of jobs.
    pub capacity: u32,
    /// Length of the leases; none: the default of the project.
    pub lease_seconds: Option<i32>,
    /// That default; none: as each job's timeout demands.
    pub default_lease_seconds: Option<i32>,
    /// The worker's own id for this poll: a repeated poll gets the same jobs.
    pub poll_id: Option<Uuid>,
    /// Whether the protocol counts an expired lease as a failure; none: as the project says.
    pub loss_fails: Option<bool>,
    /// How long to wait for the first job.
    pub wait: Duration,
    /// The server itself polls, for a push or its canary: that is no usage of the project.
    pub is_of_server: bool,
}

impl Poll {
    /// A poll for one job of any queue and type, which does not wait.
    #[must_use]
    pub fn new(project_id: ProjectId) -> Self {
        Self {
            project_id,
            worker_id: None,
            queues: Vec::new(),
            job_types: Vec::new(),
            labels: None,
            only_commands: false,
            capacity: 1,
            lease_seconds: None,
            default_lease_seconds: None,
            poll_id: None,
            loss_fails: None,
            wait: Duration::ZERO,
            is_of_server: false,
        }
    }

    /// The poll as the pump needs it. `registered` are the labels that the worker registered.
    pub(super) fn spec(self, registered: &[String]) -> PollSpec {
        let sorted = |mut names: Vec<String>| -> Arc<[String]> {
            names.sort();
            names.dedup();
            names.into()
        };
        let mut queues: Vec<Arc<str>> = Vec::with_capacity(self.queues.len());
        for queue in self.queues {
            if !queues.iter().any(|it| **it == *queue) {
                queues.push(queue.into());
            }
        }
        PollSpec {
            project_id: self.project_id,
            queues,
            job_types: sorted(self.job_types),
            labels: self.labels.map_or_else(|| registered.into(), sorted),
            only_commands: self.only_commands,
            worker_id: self.worker_id.unwrap_or_else(anonymous_worker).into(),
            capacity: self.capacity,
            lease: LeaseLength { asked: self.lease_seconds, default: self.default_lease_seconds },
            poll_id: self.poll_id,
            loss_fails: self.loss_fails,
        }
    }
}

/// A poll as the pump sees it.
#[derive(Debug, Clone)]
pub(crate) struct PollSpec {
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
    pub lease: LeaseLength,
    /// The worker's own id for this poll.
    pub poll_id: Option<Uuid>,
    /// Whether the protocol counts an expired lease as a failure; none: as the project says.
    pub loss_fails: Option<bool>,
}

impl PollSpec {
    /// The key of the poll, if its worker gave it an id.
    #[must_use]
    pub fn poll_key(&self) -> Option<PollKey> {
        let worker_id = Arc::clone(&self.worker_id);
        Some(PollKey { project_id: self.project_id, worker_id, poll_id: self.poll_id? })
    }
}

/// One lease request for each poll, then a second for each with capacity, and so on. Those that a
/// poll was `given` before count.
pub(crate) fn share_slots<Taker: Copy>(
    takers: &[(Taker, Arc<PollSpec>)],
    max_slots: usize,
    given: impl Fn(Taker) -> u32,
) -> Vec<(Taker, Arc<PollSpec>)> {
    let deepest = takers.iter().map(|(_, spec)| spec.capacity).max().unwrap_or(0);
    (0..deepest)
        .flat_map(|round| {
            let has_turn = |(taker, spec): &&(Taker, Arc<PollSpec>)| {
                spec.capacity > round && given(*taker) <= round
            };
            takers.iter().filter(has_turn).collect::<Vec<_>>()
        })
        .take(max_slots)
        .cloned()
        .collect()
}
