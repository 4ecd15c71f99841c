//! Sync match: a job that is stored while a poll is parked for it is leased by the statement that
//! stores it. So it needs no claim, and its worker has it after one commit.
//!
//! The pump reserves a poll for each such job before the statement, and learns afterwards which of
//! them were used. A reservation that is dropped in between counts as lost: its commit may have
//! happened.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use fencepost_domain::{
    ids::{LeaseId, ProjectId},
    lease::LeaseLength,
};
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};
use uuid::Uuid;

use fencepost_store::claims::{LeaseRequest, LeasedJob};

/// How long a group commit of enqueues waits for the pump; then its jobs are stored without a
/// lease.
const MATCH_TIMEOUT: Duration = Duration::from_millis(10);

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
pub struct ReservedPoll {
    pub waiter: WaiterId,
    pub worker_id: Arc<str>,
    pub lease: LeaseLength,
    pub poll_id: Option<Uuid>,
    pub loss_fails: Option<bool>,
    pub lease_id: LeaseId,
}

impl ReservedPoll {
    /// The lease request for the job.
    #[must_use]
    pub fn lease_request(&self) -> LeaseRequest<'_> {
        let Self { worker_id, lease, poll_id, loss_fails, lease_id, .. } = self;
        LeaseRequest {
            worker_id,
            lease: *lease,
            poll_id: *poll_id,
            loss_fails: *loss_fails,
            lease_id: *lease_id,
        }
    }
}

/// Questions and reports to the pump.
#[derive(Debug)]
pub enum Message {
    /// Reserve a poll for each of these, as far as there are any.
    Reserve { jobs: Vec<Candidate>, answer: oneshot::Sender<Reservation> },
    /// The outcome of reserved polls.
    Settled(Settled),
    /// The statement failed, and may have committed all the same.
    Lost(Vec<ReservedPoll>),
}

/// The outcome of reserved polls.
#[derive(Debug, Default)]
pub struct Settled {
    pub leased: Vec<(ReservedPoll, LeasedJob)>,
    /// Their jobs were not leased, for example because the queue is paused.
    pub unused: Vec<ReservedPoll>,
}

/// Asks the pump. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Matcher {
    messages: mpsc::UnboundedSender<Message>,
    /// Polls that are parked on this node.
    parked: Arc<AtomicUsize>,
}

/// A matcher, the pump's side of it, and the number of parked polls, which is to be kept. Bounded
/// by the group commits of enqueues in flight.
#[must_use]
pub fn channel() -> (Matcher, mpsc::UnboundedReceiver<Message>, Arc<AtomicUsize>) {
    let (messages, inbox) = mpsc::unbounded_channel();
    let parked = Arc::new(AtomicUsize::new(0));
    (Matcher { messages, parked: Arc::clone(&parked) }, inbox, parked)
}

impl Matcher {
    /// Whether any poll is parked on this node.
    #[must_use]
    pub fn has_polls(&self) -> bool {
        self.parked.load(Ordering::Relaxed) > 0
    }

    /// Reserves polls for jobs. None: the pump did not answer in time.
    pub async fn reserve(&self, jobs: Vec<Candidate>) -> Option<Reservation> {
        let (answer, answered) = oneshot::channel();
        self.messages.send(Message::Reserve { jobs, answer }).ok()?;
        timeout(MATCH_TIMEOUT, answered).await.ok()?.ok()
    }

    /// Polls that the pump has reserved.
    #[must_use]
    pub fn reserved(&self, polls: Vec<Option<ReservedPoll>>) -> Reservation {
        Reservation { messages: self.messages.clone(), polls }
    }
}

/// Reserved polls. Wherever it is dropped, the pump learns of it: if it is not settled, they are
/// lost.
#[derive(Debug)]
pub struct Reservation {
    messages: mpsc::UnboundedSender<Message>,
    polls: Vec<Option<ReservedPoll>>,
}

impl Reservation {
    /// In the order of the jobs.
    #[must_use]
    pub fn polls(&self) -> &[Option<ReservedPoll>] {
        &self.polls
    }

    /// The statement has committed: these jobs were leased, by the index of their poll. Without
    /// any, nothing was written.
    pub fn settle(mut self, leased: impl IntoIterator<Item = (usize, LeasedJob)>) {
        let mut settled = Settled::default();
        for (index, job) in leased {
            let poll = self.polls.get_mut(index).and_then(Option::take);
            settled.leased.extend(poll.map(|it| (it, job)));
        }
        settled.unused = std::mem::take(&mut self.polls).into_iter().flatten().collect();
        if !settled.leased.is_empty() || !settled.unused.is_empty() {
            let _ = self.messages.send(Message::Settled(settled));
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let lost: Vec<_> = std::mem::take(&mut self.polls).into_iter().flatten().collect();
        if !lost.is_empty() {
            let _ = self.messages.send(Message::Lost(lost));
        }
    }
}
