//! The pump's side of sync matches: reserves polls for jobs that are about to be stored, and
//! delivers the jobs when they are.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Instant,
};

use metrics::counter;
use uuid::Uuid;

use super::{claim, delivery::LeasedDelivery, lanes::WaiterId, lost_claims, pump::Pump};
use crate::{
    engine::sync_match::{Candidate, Message, Slot, Used},
    ids::LeaseId,
    telemetry,
};

impl Pump {
    /// Answers what was asked since the last time.
    pub(super) fn answer_matches(&mut self) {
        for message in std::mem::take(&mut self.asked) {
            match message {
                Message::Reserve { jobs, answer } => {
                    let slots = self.reserve(&jobs);
                    self.reserved += slots.iter().flatten().count();
                    if let Err(unheard) = answer.send(slots) {
                        self.lose(unheard.into_iter().flatten().collect(), false);
                    }
                }
                Message::Used(used) => self.deliver_matches(used),
                Message::Lost(slots) => self.lose(slots, true),
            }
        }
    }

    /// A slot for each job that a parked poll waits for. The node that stops leases no more.
    fn reserve(&mut self, jobs: &[Candidate]) -> Vec<Option<Slot>> {
        let mut slots = vec![None; jobs.len()];
        if self.finished.is_some() {
            return slots;
        }
        // The best first, in the order of the candidates.
        let mut groups: BTreeMap<_, Vec<usize>> = BTreeMap::new();
        for (number, job) in jobs.iter().enumerate() {
            let group = (job.rank, job.project_id, &job.queue, &job.job_type);
            groups.entry(group).or_default().push(number);
        }
        for ((_, project_id, queue, job_type), numbers) in groups {
            let takers = self.lanes.reserve((project_id, queue, job_type), numbers.len());
            for (number, (waiter, spec)) in numbers.into_iter().zip(takers) {
                slots[number] = Some(Slot {
                    waiter,
                    worker_id: Arc::clone(&spec.worker_id),
                    lease_seconds: spec.lease_seconds,
                    poll_id: spec.poll_id,
                    lease_id: LeaseId(Uuid::new_v4()),
                });
            }
        }
        slots
    }

    fn deliver_matches(&mut self, Used { leased, unused }: Used) {
        self.reserved = self.reserved.saturating_sub(leased.len() + unused.len());
        counter!(telemetry::JOBS_MATCHED).increment(leased.len() as u64);
        let mut jobs_of: HashMap<WaiterId, Vec<LeasedDelivery>> = HashMap::new();
        let mut deliveries = Vec::with_capacity(leased.len());
        for (slot, job) in leased {
            claim::count(&job);
            claim::record_span(&job);
            let waiter = self.free(&slot);
            jobs_of.entry(waiter).or_default();
            deliveries.push((waiter, LeasedDelivery::new(job, slot.worker_id)));
        }
        for slot in unused {
            let waiter = self.free(&slot);
            jobs_of.entry(waiter).or_default();
        }
        self.publish_claimed(deliveries.iter().map(|(_, it)| it));
        for (waiter, delivery) in deliveries {
            jobs_of.entry(waiter).or_default().push(delivery);
        }
        self.deliver(jobs_of, Instant::now());
    }

    /// Frees polls whose jobs were not stored, as far as is known: if they were, their leases are
    /// released.
    fn lose(&mut self, slots: Vec<Slot>, may_be_leased: bool) {
        self.reserved = self.reserved.saturating_sub(slots.len());
        let waiters = slots.iter().map(|it| self.free(it)).collect::<Vec<_>>();
        if may_be_leased {
            let lease_ids = slots.into_iter().map(|it| it.lease_id).collect();
            let (pool, endings) = (self.background.clone(), self.endings.clone());
            self.tasks.spawn(lost_claims::release(pool, endings, lease_ids));
        }
        self.deliver(waiters.into_iter().map(|it| (it, Vec::new())).collect(), Instant::now());
    }

    /// Returns the poll that has the slot now.
    fn free(&mut self, slot: &Slot) -> WaiterId {
        let waiter = self.successor_of(slot.waiter);
        self.lanes.free(waiter);
        waiter
    }
}
