//! The pump's memory: which polls wait for what, and what is known of each queue. Plain data, no
//! I/O: the caller passes in the time, runs the planned claims, and reports what they found.
//!
//! A *lane* is one queue of one project, for polls with the same `job_types` and labels. A lane's
//! *supply* is how many jobs may be there. Only lanes with supply are claimed from, so a thousand
//! parked polls on an empty queue cost nothing.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

mod lane;

use fencepost_domain::ids::ProjectId;
use fencepost_signals::wakeups::Arrival;
use fencepost_store::claims::{ClaimKey, MAX_CLAIM_SLOTS};

use self::lane::{Lane, Signature, Supply};
use super::request::{PollSpec, share_slots};

pub use self::lane::Claimed;

/// A lane without parked polls is dropped after this.
const LANE_KEEP: Duration = Duration::from_secs(2);
/// A busy lane is claimed from its start at least this often, or less often where such claims take
/// long ([`Lane::full_claim_pause`]): rows committed late, or on another node, may lie before the
/// low-water mark.
const MARK_KEEP: Duration = Duration::from_secs(1);
/// Lanes of one claim.
const MAX_CLAIMED_LANES: usize = 64;
/// Lanes of one claim that need a statement each: they name job types, want commands only, or had
/// constraint keys at the last claim that asked.
const MAX_SINGLE_CLAIMS: usize = 4;
/// Lease requests that one lane gets at least, however many lanes take turns.
const MIN_LANE_SLOTS: usize = 50;

/// Minimum size of a claim that runs beside another: two half as large cost nearly twice as much.
const MIN_SHARED_SLOTS: usize = 32;

pub use crate::sync_match::WaiterId;

pub type LaneId = u64;
type QueueKey = (ProjectId, Arc<str>);

#[derive(Debug)]
struct LaneWaiter {
    spec: Arc<PollSpec>,
    lanes: Vec<LaneId>,
    is_in_flight: bool,
}

/// The claim of one lane, and the polls that it is for.
#[derive(Debug, Clone)]
pub struct PlannedClaim {
    pub lane: LaneId,
    pub project_id: ProjectId,
    pub queue: Arc<str>,
    /// Only these types, if any are named.
    pub job_types: Arc<[String]>,
    pub labels: Arc<[String]>,
    /// Only jobs whose payload is a command.
    pub only_commands: bool,
    /// Whether the claim must ask if the queue has constraint keys.
    pub may_have_constrained: bool,
    /// Whether the queue had some at the last claim.
    pub had_constrained: bool,
    pub from: ClaimKey,
    pub slots: Vec<(WaiterId, Arc<PollSpec>)>,
    planned_at: Instant,
}

#[derive(Debug, Default)]
pub struct Lanes {
    waiters: HashMap<WaiterId, LaneWaiter>,
    lanes: BTreeMap<LaneId, Lane>,
    lane_ids: HashMap<Signature, LaneId>,
    by_queue: HashMap<QueueKey, Vec<LaneId>>,
    next_lane: LaneId,
    /// Projects take turns, and so do the lanes of each project.
    turns: VecDeque<ProjectId>,
    lanes_in_turn: HashMap<ProjectId, VecDeque<LaneId>>,
}

impl Lanes {
    /// Parks a poll. `must_look` ignores what is known of its queues, except for polls for
    /// commands: those look through all constraint keys, so the last result counts for
    /// [`MARK_KEEP`], or until a job arrives.
    pub fn park(&mut self, id: WaiterId, spec: PollSpec, must_look: bool, now: Instant) {
        let mut lanes = Vec::with_capacity(spec.queues.len());
        for queue in &spec.queues {
            let lane_id = self.lane(
                Signature {
                    queue: (spec.project_id, Arc::clone(queue)),
                    job_types: Arc::clone(&spec.job_types),
                    labels: Arc::clone(&spec.labels),
                    only_commands: spec.only_commands,
                },
                now,
            );
            if let Some(lane) = self.lanes.get_mut(&lane_id) {
                lane.waiters.insert(id);
                lane.touched_at = now;
                let is_fresh = lane.full_claim_at.is_some_and(|it| now - it < MARK_KEEP);
                if must_look && !(lane.signature.only_commands && is_fresh) {
                    lane.mark_stale();
                }
            }
            lanes.push(lane_id);
        }
        let spec = Arc::new(spec);
        self.waiters.insert(id, LaneWaiter { spec, lanes: lanes.clone(), is_in_flight: false });
        for lane in lanes {
            self.consider(lane);
        }
    }

    fn lane(&mut self, signature: Signature, now: Instant) -> LaneId {
        if let Some(id) = self.lane_ids.get(&signature) {
            return *id;
        }
        let id = self.next_lane;
        self.next_lane += 1;
        self.by_queue.entry(signature.queue.clone()).or_default().push(id);
        self.lanes.insert(id, Lane::new(signature.clone(), now));
        self.lane_ids.insert(signature, id);
        id
    }

    /// The specification of a parked poll.
    #[must_use]
    pub fn spec(&self, id: WaiterId) -> Option<&PollSpec> {
        self.waiters.get(&id).map(|it| &*it.spec)
    }

    /// Whether a claim for this poll is in flight; then its result must be awaited.
    #[must_use]
    pub fn is_in_flight(&self, id: WaiterId) -> bool {
        self.waiters.get(&id).is_some_and(|it| it.is_in_flight)
    }

    /// Removes a poll.
    pub fn leave(&mut self, id: WaiterId) {
        let Some(waiter) = self.waiters.remove(&id) else { return };
        for lane in waiter.lanes {
            if let Some(lane) = self.lanes.get_mut(&lane) {
                lane.waiters.remove(&id);
            }
        }
    }

    /// Moves a poll to a new id: its successor's.
    pub fn rename(&mut self, old: WaiterId, new: WaiterId) {
        let Some(waiter) = self.waiters.remove(&old) else { return };
        for lane in &waiter.lanes {
            if let Some(lane) = self.lanes.get_mut(lane) {
                lane.waiters.remove(&old);
                lane.waiters.insert(new);
            }
        }
        self.waiters.insert(new, waiter);
    }

    /// Whether no job can be found for this poll now, as far as is known.
    #[must_use]
    pub fn has_no_match_now(&self, id: WaiterId) -> bool {
        self.waiters.get(&id).is_none_or(|waiter| {
            !waiter.is_in_flight && waiter.lanes.iter().all(|it| self.is_empty(*it))
        })
    }

    fn is_empty(&self, lane: LaneId) -> bool {
        self.lanes.get(&lane).is_none_or(Lane::is_empty)
    }

    /// Jobs have arrived.
    pub fn arrived(&mut self, arrivals: &[Arrival]) {
        for arrival in arrivals {
            let queue = (arrival.project_id, Arc::clone(&arrival.queue));
            let Some(lanes) = self.by_queue.get(&queue) else { continue };
            for id in lanes.clone() {
                let Some(lane) = self.lanes.get_mut(&id) else { continue };
                if !lane.wants(&arrival.job_type) {
                    continue;
                }
                let key = ClaimKey { rank: arrival.rank, run_at: arrival.run_at };
                lane.arrive(key, arrival.is_constrained);
                self.consider(id);
            }
        }
    }

    /// Of these arrivals, which [`Self::arrived`] has noted, those that parked polls may be unable
    /// to take: other nodes should know of them.
    #[must_use]
    pub fn beyond_polls(&self, mut arrivals: Vec<Arrival>) -> Vec<Arrival> {
        let mut is_served = HashMap::new();
        arrivals.retain(|arrival| {
            let queue = (arrival.project_id, Arc::clone(&arrival.queue));
            let lanes = self.by_queue.get(&queue).map_or(&[][..], Vec::as_slice);
            !lanes.iter().any(|id| {
                let is_open = self.lanes.get(id).is_some_and(|it| it.surely_finds(arrival));
                is_open && *is_served.entry(*id).or_insert_with(|| self.has_poll_per_job(*id))
            })
        });
        arrivals
    }

    /// Whether there are as many idle polls as jobs are known.
    fn has_poll_per_job(&self, id: LaneId) -> bool {
        let Some(lane) = self.lanes.get(&id) else { return false };
        let Supply::Known(jobs) = lane.supply else { return false };
        let idle = lane.waiters.iter().filter(|it| self.is_next_lane(**it, id));
        idle.take(jobs as usize).count() == jobs as usize
    }

    /// Jobs of this project ended that counted against a limit: jobs with a constraint key may now
    /// start. That counts for lanes without polls, too: a worker polls again after its acks.
    pub fn slots_freed(&mut self, project_id: ProjectId) {
        let constrained = self
            .lanes
            .iter_mut()
            .filter(|(_, it)| it.signature.queue.0 == project_id && it.may_have_constrained);
        let constrained: Vec<_> = constrained
            .map(|(id, lane)| {
                lane.mark_stale();
                *id
            })
            .collect();
        for id in constrained {
            self.consider(id);
        }
    }

    /// Forgets which lanes are empty: of one queue, or of all.
    pub fn mark_stale(&mut self, queue: Option<&QueueKey>) {
        let ids: Vec<_> = match queue {
            Some(queue) => self.by_queue.get(queue).cloned().unwrap_or_default(),
            None => self.lanes.keys().copied().collect(),
        };
        for id in ids {
            let Some(lane) = self.lanes.get_mut(&id) else { continue };
            lane.wake_if_limited();
            lane.mark_stale();
            self.consider(id);
        }
    }

    /// Queues believed empty that have parked polls: worth a fallback query.
    #[must_use]
    pub fn believed_empty(&self) -> Vec<QueueKey> {
        let waiting = self.lanes.values().filter(|lane| {
            let is_empty = lane.supply == Supply::Known(0) && lane.backoff_until.is_none();
            !lane.waiters.is_empty() && is_empty && lane.in_flight == 0
        });
        waiting.map(|it| it.signature.queue.clone()).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Drops lanes without parked polls.
    pub fn prune(&mut self, now: Instant) {
        let is_stale = |it: &Lane| {
            it.waiters.is_empty() && it.in_flight == 0 && now - it.touched_at >= LANE_KEEP
        };
        let stale: Vec<_> =
            self.lanes.iter().filter(|(_, it)| is_stale(it)).map(|(id, _)| *id).collect();
        for id in stale {
            let Some(lane) = self.lanes.remove(&id) else { continue };
            if let Some(ids) = self.by_queue.get_mut(&lane.signature.queue) {
                ids.retain(|it| *it != id);
                if ids.is_empty() {
                    self.by_queue.remove(&lane.signature.queue);
                }
            }
            self.lane_ids.remove(&lane.signature);
        }
    }

    /// When the first backoff ends.
    #[must_use]
    pub fn backoff_ends_at(&self) -> Option<Instant> {
        self.lanes.values().filter_map(|it| it.backoff_until).min()
    }

    /// Ends the backoffs that are due.
    pub fn end_backoffs(&mut self, now: Instant) {
        let rested =
            self.lanes.iter_mut().filter(|(_, it)| it.backoff_until.is_some_and(|it| it <= now));
        let rested: Vec<_> = rested
            .map(|(id, lane)| {
                lane.wake();
                *id
            })
            .collect();
        for id in rested {
            self.consider(id);
        }
    }

    /// Gives a lane its turn, if it may have jobs and has parked polls.
    fn consider(&mut self, id: LaneId) {
        let Some(lane) = self.lanes.get_mut(&id) else { return };
        if lane.is_in_turn || lane.waiters.is_empty() || !lane.may_be_claimed() {
            return;
        }
        lane.is_in_turn = true;
        let project_id = lane.signature.queue.0;
        let lanes = self.lanes_in_turn.entry(project_id).or_default();
        if lanes.is_empty() {
            self.turns.push_back(project_id);
        }
        lanes.push_back(id);
    }

    fn next_turn(&mut self) -> Option<LaneId> {
        let project_id = self.turns.pop_front()?;
        let lanes = self.lanes_in_turn.get_mut(&project_id)?;
        let lane = lanes.pop_front();
        if lanes.is_empty() {
            self.lanes_in_turn.remove(&project_id);
        } else {
            self.turns.push_back(project_id);
        }
        lane
    }

    /// Plans the next claim: projects take turns, and within a lane each idle worker gets one job
    /// before any gets two. Empty: there is nothing to claim.
    pub fn plan(&mut self, now: Instant) -> Vec<PlannedClaim> {
        let in_turn = self.lanes_in_turn.values().map(VecDeque::len).sum::<usize>();
        let share = (MAX_CLAIM_SLOTS / in_turn.max(1)).max(MIN_LANE_SLOTS);
        let (mut claims, mut later): (Vec<PlannedClaim>, Vec<LaneId>) = (Vec::new(), Vec::new());
        let mut left = MAX_CLAIM_SLOTS;
        for _ in 0..in_turn {
            if left == 0 || claims.len() == MAX_CLAIMED_LANES {
                break;
            }
            let Some(id) = self.next_turn() else { break };
            let Some(lane) = self.lanes.get_mut(&id) else { continue };
            lane.is_in_turn = false;
            later.push(id);
            // Each of these needs at least one statement of its own.
            let Signature { job_types, only_commands, .. } = &lane.signature;
            let is_single = !job_types.is_empty() || *only_commands || lane.has_constrained;
            let is_single_claim = |it: &&PlannedClaim| {
                !it.job_types.is_empty() || it.only_commands || it.had_constrained
            };
            if is_single && claims.iter().filter(is_single_claim).count() == MAX_SINGLE_CLAIMS {
                continue;
            }
            if let Some(claim) = self.plan_lane(id, left.min(share), now) {
                left -= claim.slots.len();
                claims.push(claim);
            }
        }
        for id in later {
            self.consider(id);
        }
        claims
    }

    fn plan_lane(&mut self, id: LaneId, max_slots: usize, now: Instant) -> Option<PlannedClaim> {
        let lane = self.lanes.get(&id).filter(|it| it.may_be_claimed())?;
        let wanted = match lane.supply {
            Supply::Known(jobs) => max_slots.min(jobs as usize),
            Supply::Unknown | Supply::Plenty => max_slots,
        };
        let takers: Vec<_> = lane
            .waiters
            .iter()
            .filter(|it| self.is_next_lane(**it, id))
            .take(wanted)
            .filter_map(|it| self.waiters.get(it).map(|waiter| (*it, Arc::clone(&waiter.spec))))
            .collect();
        let slots = share_slots(&takers, wanted, |_| 0);
        let is_too_small = lane.in_flight > 0 && slots.len() < MIN_SHARED_SLOTS;
        if slots.is_empty() || is_too_small {
            return None;
        }
        for (waiter, _) in &takers {
            if let Some(waiter) = self.waiters.get_mut(waiter) {
                waiter.is_in_flight = true;
            }
        }
        let lane = self.lanes.get_mut(&id)?;
        lane.in_flight += 1;
        if let Supply::Known(jobs) = lane.supply {
            let planned = u32::try_from(slots.len()).unwrap_or(u32::MAX);
            lane.supply = Supply::Known(jobs.saturating_sub(planned));
        }
        let keep = lane.full_claim_pause(MARK_KEEP);
        let is_mark_fresh = lane.full_claim_at.is_some_and(|it| now - it < keep);
        let from = if is_mark_fresh { lane.mark } else { ClaimKey::ZERO };
        Some(PlannedClaim {
            lane: id,
            project_id: lane.signature.queue.0,
            queue: Arc::clone(&lane.signature.queue.1),
            job_types: Arc::clone(&lane.signature.job_types),
            labels: Arc::clone(&lane.signature.labels),
            only_commands: lane.signature.only_commands,
            may_have_constrained: lane.may_have_constrained
                || lane.constrained_read_at.is_none_or(|it| now - it >= MARK_KEEP),
            had_constrained: lane.has_constrained,
            from,
            slots,
            planned_at: now,
        })
    }

    /// Polls for jobs that are about to be stored in one queue with one type, at most `wanted`.
    /// They are in flight until they are freed. Only where no other job waits for them, as far as
    /// is known. `taken` has the polls that were reserved for other jobs of the same commit, and
    /// how many each got.
    pub fn reserve(
        &mut self,
        (project_id, queue, job_type): (ProjectId, &Arc<str>, &str),
        wanted: usize,
        taken: &mut HashMap<WaiterId, u32>,
    ) -> Vec<(WaiterId, Arc<PollSpec>)> {
        let lanes = self.by_queue.get(&(project_id, Arc::clone(queue)));
        let mut takers = Vec::new();
        for id in lanes.into_iter().flatten() {
            let Some(lane) = self.lanes.get(id).filter(|it| it.may_match(job_type)) else {
                continue;
            };
            let idle = lane.waiters.iter().filter(|it| self.is_next_lane(**it, *id)).take(wanted);
            let begun = lane.waiters.iter().filter(|it| taken.contains_key(it));
            let with_spec = |it: &WaiterId| Some((*it, Arc::clone(&self.waiters.get(it)?.spec)));
            takers.extend(idle.chain(begun).filter_map(with_spec));
        }
        let given = |it| taken.get(&it).copied().unwrap_or_default();
        let reserved = share_slots(&takers, wanted, given);
        for (id, _) in &reserved {
            *taken.entry(*id).or_default() += 1;
            if let Some(waiter) = self.waiters.get_mut(id) {
                waiter.is_in_flight = true;
            }
        }
        reserved
    }

    /// A reserved poll is idle again.
    pub fn free(&mut self, id: WaiterId) {
        let Some(waiter) = self.waiters.get_mut(&id) else { return };
        waiter.is_in_flight = false;
        // Jobs may have arrived meanwhile.
        for lane in waiter.lanes.clone() {
            self.consider(lane);
        }
    }

    /// Whether this poll is idle, and all queues that it named before this one are empty.
    fn is_next_lane(&self, waiter: WaiterId, lane: LaneId) -> bool {
        self.waiters.get(&waiter).is_some_and(|waiter| {
            !waiter.is_in_flight
                && waiter.lanes.iter().take_while(|it| **it != lane).all(|it| self.is_empty(*it))
        })
    }

    /// A claim has completed; none: it failed.
    pub fn complete(&mut self, claim: &PlannedClaim, found: Option<Claimed>, now: Instant) {
        for (id, _) in &claim.slots {
            if let Some(waiter) = self.waiters.get_mut(id) {
                waiter.is_in_flight = false;
            }
        }
        if let Some(lane) = self.lanes.get_mut(&claim.lane) {
            lane.learn(claim, found, now);
        }
        self.consider(claim.lane);
    }
}

#[cfg(test)]
mod hint_tests;
#[cfg(test)]
mod low_water_mark_tests;
#[cfg(test)]
mod reserve_tests;
#[cfg(test)]
mod tests;
