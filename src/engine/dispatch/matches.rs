//! The pump's side of sync matches: reserves polls for jobs that are about to be stored, and
//! delivers the jobs when they are.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Instant,
};

use fencepost_domain::ids::LeaseId;
use fencepost_signals::telemetry;
use metrics::counter;
use uuid::Uuid;

use super::{claim, dispatched::DispatchedJob, lanes::WaiterId, pump::Pump};
use crate::sync_match::{Candidate, Message, ReservedPoll, Settled};

impl Pump {
    /// Answers the messages that have come since the last time.
    pub(super) fn answer_matches(&mut self) {
        for message in std::mem::take(&mut self.match_messages) {
            match message {
                Message::Reserve { jobs, answer } => {
                    let polls = self.reserve(&jobs);
                    self.reserved += polls.iter().flatten().count();
                    if let Err(too_late) = answer.send(self.matcher.reserved(polls)) {
                        too_late.settle([]);
                    }
                }
                Message::Settled(settled) => self.deliver_matches(settled),
                Message::Lost(polls) => self.lose(polls),
            }
        }
    }

    /// A parked poll for each job, as far as there are any. A node that stops leases no more.
    fn reserve(&mut self, jobs: &[Candidate]) -> Vec<Option<ReservedPoll>> {
        let mut polls = vec![None; jobs.len()];
        if self.finished.is_some() {
            return polls;
        }
        // The best first, in the order of the candidates.
        let mut kinds: BTreeMap<_, Vec<usize>> = BTreeMap::new();
        for (number, job) in jobs.iter().enumerate() {
            let kind = (job.rank, job.project_id, &job.queue, &job.job_type);
            kinds.entry(kind).or_default().push(number);
        }
        let mut taken = HashMap::new();
        for ((_, project_id, queue, job_type), numbers) in kinds {
            let kind = (project_id, queue, &**job_type);
            let takers = self.lanes.reserve(kind, numbers.len(), &mut taken);
            for (number, (waiter, spec)) in numbers.into_iter().zip(takers) {
                polls[number] = Some(ReservedPoll {
                    waiter,
                    worker_id: Arc::clone(&spec.worker_id),
                    lease: spec.lease,
                    poll_id: spec.poll_id,
                    loss_fails: spec.loss_fails,
                    lease_id: LeaseId(Uuid::new_v4()),
                });
            }
        }
        polls
    }

    fn deliver_matches(&mut self, Settled { leased, unused }: Settled) {
        self.reserved = self.reserved.saturating_sub(leased.len() + unused.len());
        counter!(telemetry::JOBS_MATCHED).increment(leased.len() as u64);
        let mut jobs_of: HashMap<WaiterId, Vec<DispatchedJob>> = HashMap::new();
        let mut dispatched = Vec::with_capacity(leased.len());
        for (poll, job) in leased {
            claim::count(&job);
            claim::record_span(&job);
            let waiter = self.free(&poll);
            dispatched.push((waiter, DispatchedJob::new(job, poll.worker_id)));
        }
        for poll in unused {
            let waiter = self.free(&poll);
            jobs_of.entry(waiter).or_default();
        }
        self.publish_claimed(dispatched.iter().map(|(_, it)| it));
        for (waiter, job) in dispatched {
            jobs_of.entry(waiter).or_default().push(job);
        }
        self.deliver(jobs_of, Instant::now());
    }

    /// Frees polls whose jobs were not stored, as far as is known. If they were, their leases are
    /// released.
    fn lose(&mut self, polls: Vec<ReservedPoll>) {
        self.reserved = self.reserved.saturating_sub(polls.len());
        // First: a freed poll may be repeated at once.
        self.release_lost(polls.iter().map(|it| it.lease_id).collect());
        let waiters: Vec<_> = polls.iter().map(|it| self.free(it)).collect();
        self.deliver(waiters.into_iter().map(|it| (it, Vec::new())).collect(), Instant::now());
    }

    /// Frees a reserved poll, or the one that has replaced it; returns which.
    fn free(&mut self, poll: &ReservedPoll) -> WaiterId {
        let waiter = self.successor_of(poll.waiter);
        self.lanes.free(waiter);
        waiter
    }
}
