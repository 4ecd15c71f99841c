//! Sync match: a job that is stored while a poll is parked for it is leased by the statement that
//! stores it. So it needs no claim, and its worker has it after one commit.
//!
//! The pump reserves a poll for each such job before the statement, and is told afterwards which of
//! them were used. A reservation that is dropped in between counts as lost: its commit may have
//! happened.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use crate::{
    ids::{LeaseId, ProjectId},
    store::claims::{LeaseRequest, LeasedJob},
};

/// The id of a parked poll.
pub type WaiterId = u64;

/// A job that is about to be stored, and could run at once.
#[derive(Debug, Clone)]
pub struct Candidate {
    pub project_id: ProjectId,
    pub queue: Arc<str>,
    pub job_type: Arc<str>,
    /// Minus the priority.
    pub rank: i16,
}

/// A parked poll that is reserved for one job.
#[derive(Debug, Clone)]
pub struct Slot {
    pub waiter: WaiterId,
    pub worker_id: Arc<str>,
    pub lease_seconds: Option<i32>,
    pub poll_id: Option<Uuid>,
    pub lease_id: LeaseId,
}

impl Slot {
    /// What the statement leases the job with.
    #[must_use]
    pub fn lease_request(&self) -> LeaseRequest<'_> {
        let Self { worker_id, lease_seconds, poll_id, lease_id, .. } = self;
        LeaseRequest {
            worker_id,
            lease_seconds: *lease_seconds,
            poll_id: *poll_id,
            lease_id: *lease_id,
        }
    }
}

/// What the pump is asked and told.
#[derive(Debug)]
pub enum Message {
    /// Reserve a poll for each of these, as far as there are any.
    Reserve { jobs: Vec<Candidate>, answer: oneshot::Sender<Vec<Option<Slot>>> },
    /// The statement has committed.
    Used(Used),
    /// It failed, and may have committed all the same.
    Lost(Vec<Slot>),
}

/// What became of reserved polls.
#[derive(Debug, Default)]
pub struct Used {
    pub leased: Vec<(Slot, LeasedJob)>,
    /// Their jobs could not be leased, for example because the queue is paused.
    pub unused: Vec<Slot>,
}

/// Asks the pump. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Matcher {
    messages: mpsc::UnboundedSender<Message>,
    /// Polls that are parked on this node.
    parked: Arc<AtomicUsize>,
}

/// A matcher, and the pump's side of it. Bounded by the batches of enqueues in flight.
#[must_use]
pub fn channel(parked: Arc<AtomicUsize>) -> (Matcher, mpsc::UnboundedReceiver<Message>) {
    let (messages, inbox) = mpsc::unbounded_channel();
    (Matcher { messages, parked }, inbox)
}

impl Matcher {
    /// Whether any poll is parked on this node.
    #[must_use]
    pub fn has_polls(&self) -> bool {
        self.parked.load(Ordering::Relaxed) > 0
    }

    /// Reserves polls for jobs: one slot for each job, or none.
    pub async fn reserve(&self, jobs: Vec<Candidate>) -> Reservation {
        let (answer, answered) = oneshot::channel();
        let asked = self.messages.send(Message::Reserve { jobs, answer });
        let slots = match asked {
            Ok(()) => answered.await.unwrap_or_default(),
            Err(_) => Vec::new(),
        };
        Reservation { messages: self.messages.clone(), slots }
    }
}

/// Reserved polls. Lost if it is dropped before it is settled.
#[derive(Debug)]
pub struct Reservation {
    messages: mpsc::UnboundedSender<Message>,
    slots: Vec<Option<Slot>>,
}

impl Reservation {
    /// In the order of the jobs.
    #[must_use]
    pub fn slots(&self) -> &[Option<Slot>] {
        &self.slots
    }

    /// The statement has committed: these jobs were leased, by the index of their slot.
    pub fn settle(mut self, leased: impl IntoIterator<Item = (usize, LeasedJob)>) {
        let mut used = Used::default();
        for (index, job) in leased {
            let slot = self.slots.get_mut(index).and_then(Option::take);
            used.leased.extend(slot.map(|it| (it, job)));
        }
        used.unused = std::mem::take(&mut self.slots).into_iter().flatten().collect();
        if !used.leased.is_empty() || !used.unused.is_empty() {
            let _ = self.messages.send(Message::Used(used));
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let lost: Vec<_> = std::mem::take(&mut self.slots).into_iter().flatten().collect();
        if !lost.is_empty() {
            let _ = self.messages.send(Message::Lost(lost));
        }
    }
}
