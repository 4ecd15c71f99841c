//! A node of the tests: polls park at its pump, and jobs arrive in its table.

use std::time::Instant;

use fencepost_domain::ids::{JobId, ProjectId};
use tokio::{
    sync::{mpsc, oneshot},
    task::yield_now,
};

use super::{
    answered::Answered,
    dispatched::Releasing,
    pump::{self, Message, Patience},
    request::Poll,
};
use crate::{
    engine::{
        group_commit::Coalescer,
        notify::{NoListeners, Notifier},
        settle::Failures,
        sync_match::{self, Candidate, Matcher},
    },
    store::connection::pools::{Pool, Pools, Table},
    tokio_util::{sync::CancellationToken, task::TaskTracker},
    wakeups::{self, Wake},
};

/// See the module's comment.
#[derive(Clone)]
pub struct Node {
    messages: mpsc::UnboundedSender<Message>,
    wake: Wake,
    matcher: Matcher,
    pub table: Table,
}

const PROJECT: ProjectId = ProjectId(1);
const QUEUE: &str = "q";

/// A poll that was parked. Dropping it is what happens when its client is gone.
pub struct Parked {
    id: u64,
    messages: mpsc::UnboundedSender<Message>,
    answered: oneshot::Receiver<Answered>,
}

impl Parked {
    /// Waits for its jobs. Empty: it was asked to leave.
    pub async fn jobs(mut self) -> Vec<JobId> {
        let answer = (&mut self.answered).await.expect("the pump answers");
        answer.into_jobs().into_iter().map(|it| it.job.id).collect()
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        self.answered.close();
        // As a poll of the server does: what was sent before is still in the channel.
        if let Ok(Answered::Jobs(jobs)) = self.answered.try_recv()
            && !jobs.is_empty()
        {
            let _ = self.messages.send(Message::Release(jobs));
        }
        let _ = self.messages.send(Message::Leave(self.id));
    }
}

impl Node {
    /// Starts its pump.
    #[must_use]
    pub fn start() -> Self {
        let (wake, hints) = wakeups::channel();
        let table = Table::default();
        let pool = Pool { table: table.clone() };
        let failures = Coalescer::start(Failures { pool: pool.clone(), wake: wake.clone() });
        let notifier = Notifier {
            wake: wake.clone(),
            feed: NoListeners,
            tally: NoListeners,
            backlog_waits: NoListeners,
        };
        let (messages, inbox) = mpsc::unbounded_channel();
        let (matcher, matches, parked) = sync_match::channel();
        // The number of parked polls is not kept here.
        parked.store(1, std::sync::atomic::Ordering::Relaxed);
        let pools = Pools { claim: pool.clone(), background: pool };
        let tasks = (TaskTracker, CancellationToken);
        let releases = (failures, Releasing::default());
        let matching = (matcher.clone(), matches);
        tokio::spawn(pump::run(pools, releases, tasks, notifier, inbox, matching, hints));
        Self { messages, wake, matcher, table }
    }

    /// Parks a poll for one job.
    #[must_use]
    pub fn park(&self, id: u64) -> Parked {
        let mut poll = Poll::new(PROJECT);
        poll.queues = vec![QUEUE.to_owned()];
        poll.worker_id = Some(format!("worker-{id}"));
        let (answer, answered) = oneshot::channel();
        let (spec, patience) = (Box::new(poll.spec(&[])), Patience::Waits);
        let asked_at = Instant::now();
        self.send(Message::Park { id, spec, patience, asked_at, answer });
        Parked { id, messages: self.messages.clone(), answered }
    }

    /// A parked poll does not wait any longer.
    pub fn leave(&self, parked: &Parked) {
        self.send(Message::Leave(parked.id));
    }

    /// Stores a job, and publishes it after the commit, as a group commit of enqueues does.
    pub async fn store(&self) -> JobId {
        let id = JobId::generate();
        yield_now().await;
        self.table.insert((PROJECT, QUEUE), id);
        yield_now().await;
        self.wake.arrived(vec![Table::arrival((PROJECT, QUEUE))]);
        id
    }

    /// Stores a job, leased by a poll that is parked for it, if there is one.
    pub async fn store_matched(&self) -> JobId {
        let job = Candidate {
            project_id: PROJECT,
            queue: QUEUE.into(),
            job_type: Table::JOB_TYPE.into(),
            rank: 0,
        };
        let reservation = self.matcher.reserve(vec![job]).await;
        let Some(reservation) = reservation else { return self.store().await };
        let Some(Some(poll)) = reservation.polls().first() else { return self.store().await };
        let (id, lease_id) = (JobId::generate(), poll.lease_id);
        yield_now().await;
        let leased = self.table.insert_leased((PROJECT, QUEUE), id, lease_id);
        yield_now().await;
        reservation.settle([(0, leased)]);
        id
    }

    /// Stops the pump, and waits until it has ended.
    pub async fn finish(&self) {
        let (finished, is_finished) = oneshot::channel();
        self.send(Message::Finish(finished));
        is_finished.await.expect("the pump finishes");
    }

    fn send(&self, message: Message) {
        assert!(self.messages.send(message).is_ok(), "the pump runs");
    }
}
