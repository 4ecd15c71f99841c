//! Who waits for what, and what is known of each queue: the pump's memory. Plain data, no I/O: the
//! caller passes in the time, runs the looks that are dealt, and reports what they found.
//!
//! A *lane* is one queue of one project as polls of the same `job_types` see it. A lane's *supply*
//! is what may be found there; only lanes with supply are looked at, so a thousand parked polls on
//! an empty queue cost nothing.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use super::wish::{Wish, deal_slots};
use crate::{
    ids::ProjectId,
    store::claims::{ClaimKey, MAX_CLAIM_SLOTS},
    wake::Arrival,
};
use chrono::TimeDelta;

/// What is known of a queue that nobody waits at is forgotten after this.
const LANE_KEEP: Duration = Duration::from_secs(2);
/// A lane is looked at from its very beginning at least this often while it is busy: rows that were
/// committed late or on another node may lie before the low-water mark.
const MARK_KEEP: Duration = Duration::from_secs(1);
/// A look from the mark that came back short is repeated from the beginning, but not more often.
const ZERO_LOOK_PAUSE: Duration = Duration::from_millis(250);
/// Commits may become visible this much later than their `run_at` says.
const MARK_MARGIN: TimeDelta = TimeDelta::milliseconds(200);
/// Looks of one claim.
const MAX_LOOKS: usize = 64;
/// Looks of one claim that name job types: each is a statement of its own.
const MAX_TYPED_LOOKS: usize = 4;
/// After a failed look its lane rests, so that a store in trouble is not hammered.
const FAILURE_PAUSE: Duration = Duration::from_millis(500);
/// After a look that found everything taken its lane rests for a moment.
const CONTENTION_PAUSE: Duration = Duration::from_millis(20);
/// Slots that one lane is dealt at least, however many lanes want their turn.
const MIN_LANE_SLOTS: usize = 50;

/// One parked poll.
pub type WaiterId = u64;
type LaneId = u64;
type QueueKey = (ProjectId, Arc<str>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Supply {
    /// Nobody has looked yet.
    Unknown,
    /// The last look came back full.
    Plenty,
    /// So many jobs arrived since a look came back short, less those that were dealt.
    Known(u32),
}

#[derive(Debug)]
struct Lane {
    queue: QueueKey,
    job_types: Arc<[String]>,
    waiters: BTreeSet<WaiterId>,
    supply: Supply,
    /// Looks that are under way.
    flights: u32,
    arrived_in_flight: u32,
    mark: ClaimKey,
    looked_from_zero_at: Option<Instant>,
    touched_at: Instant,
    /// After a look that failed, or found everything taken.
    rests_until: Option<Instant>,
    /// What is under way was dealt before somebody asked not to trust it.
    is_distrusted: bool,
    is_in_turn: bool,
}

impl Lane {
    /// Whether a look may start. A second look beside one under way pays off only against a deep
    /// backlog; and never where jobs are chosen before they are locked, by type: both would choose
    /// the same.
    fn may_be_looked_at(&self) -> bool {
        if self.rests_until.is_some() {
            return false;
        }
        let may_share = self.supply == Supply::Plenty && self.job_types.is_empty();
        self.supply != Supply::Known(0) && (self.flights == 0 || may_share)
    }
}

impl Lane {
    /// Forgets what is known, and what a look under way will say of emptiness.
    fn distrust(&mut self) {
        self.mark = ClaimKey::ZERO;
        self.is_distrusted = self.flights > 0;
        if matches!(self.supply, Supply::Known(_)) {
            self.supply = Supply::Unknown;
        }
    }
}

#[derive(Debug)]
struct Waiter {
    wish: Arc<Wish>,
    lanes: Vec<LaneId>,
    is_in_flight: bool,
}

/// One look of a claim: whom it is for, and where.
#[derive(Debug, Clone)]
pub struct DealtLook {
    lane: LaneId,
    /// Whose queue.
    pub project_id: ProjectId,
    /// Which queue.
    pub queue: Arc<str>,
    /// Only these types, when some are named.
    pub job_types: Arc<[String]>,
    /// The low-water mark.
    pub from: ClaimKey,
    /// Who gets what is found.
    pub slots: Vec<(WaiterId, Arc<Wish>)>,
    dealt_at: Instant,
}

/// What a look came back with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finding {
    /// Fewer jobs were there than were wanted.
    pub is_short: bool,
    /// As many as were wanted were there, but others took some of them.
    pub was_contended: bool,
    /// The last job that was found.
    pub last: Option<ClaimKey>,
}

/// See the module's comment.
#[derive(Debug, Default)]
pub struct Lanes {
    waiters: HashMap<WaiterId, Waiter>,
    lanes: BTreeMap<LaneId, Lane>,
    lane_ids: HashMap<(QueueKey, Arc<[String]>), LaneId>,
    by_queue: HashMap<QueueKey, Vec<LaneId>>,
    next_lane: LaneId,
    /// Projects take turns, and each project's lanes take turns.
    turns: VecDeque<ProjectId>,
    lanes_in_turn: HashMap<ProjectId, VecDeque<LaneId>>,
}

impl Lanes {
    /// Parks a poll. One that `must_look` does not trust what is known of its queues.
    pub fn park(&mut self, id: WaiterId, wish: Wish, must_look: bool, now: Instant) {
        let mut lanes = Vec::with_capacity(wish.queues.len());
        for queue in &wish.queues {
            let lane_id = self.lane((wish.project_id, Arc::clone(queue)), &wish.job_types, now);
            if let Some(lane) = self.lanes.get_mut(&lane_id) {
                lane.waiters.insert(id);
                lane.touched_at = now;
                if must_look {
                    lane.distrust();
                }
            }
            lanes.push(lane_id);
        }
        let wish = Arc::new(wish);
        self.waiters.insert(id, Waiter { wish, lanes: lanes.clone(), is_in_flight: false });
        for lane in lanes {
            self.consider(lane);
        }
    }

    fn lane(&mut self, queue: QueueKey, job_types: &Arc<[String]>, now: Instant) -> LaneId {
        let key = (queue, Arc::clone(job_types));
        if let Some(id) = self.lane_ids.get(&key) {
            return *id;
        }
        let id = self.next_lane;
        self.next_lane += 1;
        let lane = Lane {
            queue: key.0.clone(),
            job_types: Arc::clone(job_types),
            waiters: BTreeSet::new(),
            supply: Supply::Unknown,
            flights: 0,
            arrived_in_flight: 0,
            mark: ClaimKey::ZERO,
            looked_from_zero_at: None,
            touched_at: now,
            rests_until: None,
            is_distrusted: false,
            is_in_turn: false,
        };
        self.lanes.insert(id, lane);
        self.by_queue.entry(key.0.clone()).or_default().push(id);
        self.lane_ids.insert(key, id);
        id
    }

    /// What a parked poll asks for.
    #[must_use]
    pub fn wish(&self, id: WaiterId) -> Option<&Wish> {
        self.waiters.get(&id).map(|it| &*it.wish)
    }

    /// Whether a claim for this poll is under way; then it must be waited for.
    #[must_use]
    pub fn is_in_flight(&self, id: WaiterId) -> bool {
        self.waiters.get(&id).is_some_and(|it| it.is_in_flight)
    }

    /// Takes a poll out.
    pub fn leave(&mut self, id: WaiterId) {
        let Some(waiter) = self.waiters.remove(&id) else { return };
        for lane in waiter.lanes {
            if let Some(lane) = self.lanes.get_mut(&lane) {
                lane.waiters.remove(&id);
            }
        }
    }

    /// Gives a poll another name: its successor's.
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

    /// Whether nothing can be found for this poll now, as far as anybody knows.
    #[must_use]
    pub fn is_hopeless(&self, id: WaiterId) -> bool {
        self.waiters.get(&id).is_none_or(|waiter| {
            !waiter.is_in_flight && waiter.lanes.iter().all(|it| self.is_empty(*it))
        })
    }

    fn is_empty(&self, lane: LaneId) -> bool {
        self.lanes.get(&lane).is_none_or(|it| it.supply == Supply::Known(0))
    }

    /// Jobs have arrived.
    pub fn arrived(&mut self, arrivals: &[Arrival]) {
        for arrival in arrivals {
            let queue = (arrival.project_id, Arc::clone(&arrival.queue));
            let Some(lanes) = self.by_queue.get(&queue) else { continue };
            for id in lanes.clone() {
                let Some(lane) = self.lanes.get_mut(&id) else { continue };
                let is_wanted = lane.job_types.is_empty()
                    || lane.job_types.iter().any(|it| **it == *arrival.job_type);
                if !is_wanted {
                    continue;
                }
                lane.mark = lane.mark.min(ClaimKey { rank: arrival.rank, run_at: arrival.run_at });
                if lane.flights > 0 {
                    lane.arrived_in_flight = lane.arrived_in_flight.saturating_add(1);
                }
                if let Supply::Known(jobs) = lane.supply {
                    lane.supply = Supply::Known(jobs.saturating_add(1));
                }
                self.consider(id);
            }
        }
    }

    /// Forgets what is known to be empty: of one queue, or of all.
    pub fn distrust(&mut self, queue: Option<&QueueKey>) {
        let ids: Vec<_> = match queue {
            Some(queue) => self.by_queue.get(queue).cloned().unwrap_or_default(),
            None => self.lanes.keys().copied().collect(),
        };
        for id in ids {
            let Some(lane) = self.lanes.get_mut(&id) else { continue };
            lane.distrust();
            self.consider(id);
        }
    }

    /// Queues that are believed empty and have somebody waiting: worth a fallback look.
    #[must_use]
    pub fn believed_empty(&self) -> Vec<QueueKey> {
        let waiting = self.lanes.values().filter(|it| {
            !it.waiters.is_empty() && it.supply == Supply::Known(0) && it.flights == 0
        });
        waiting.map(|it| it.queue.clone()).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Forgets lanes at which nobody waits any more.
    pub fn prune(&mut self, now: Instant) {
        let is_stale = |it: &Lane| {
            it.waiters.is_empty() && it.flights == 0 && now - it.touched_at >= LANE_KEEP
        };
        let stale: Vec<_> =
            self.lanes.iter().filter(|(_, it)| is_stale(it)).map(|(id, _)| *id).collect();
        for id in stale {
            let Some(lane) = self.lanes.remove(&id) else { continue };
            if let Some(ids) = self.by_queue.get_mut(&lane.queue) {
                ids.retain(|it| *it != id);
                if ids.is_empty() {
                    self.by_queue.remove(&lane.queue);
                }
            }
            self.lane_ids.remove(&(lane.queue, lane.job_types));
        }
    }

    /// When the first of the lanes that rest may go on.
    #[must_use]
    pub fn rest_ends_at(&self) -> Option<Instant> {
        self.lanes.values().filter_map(|it| it.rests_until).min()
    }

    /// Lets lanes go on whose rest is over.
    pub fn wake_rested(&mut self, now: Instant) {
        let rested =
            self.lanes.iter_mut().filter(|(_, it)| it.rests_until.is_some_and(|it| it <= now));
        let rested: Vec<_> = rested
            .map(|(id, lane)| {
                lane.rests_until = None;
                *id
            })
            .collect();
        for id in rested {
            self.consider(id);
        }
    }

    /// Puts a lane in turn if there is anything to look for and anybody to look for it.
    fn consider(&mut self, id: LaneId) {
        let Some(lane) = self.lanes.get_mut(&id) else { return };
        if lane.is_in_turn || lane.waiters.is_empty() || !lane.may_be_looked_at() {
            return;
        }
        lane.is_in_turn = true;
        let project_id = lane.queue.0;
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

    /// Deals the next claim: projects take turns, and in a lane idle workers get one job each
    /// before one gets two. Empty: nothing to look for.
    pub fn deal(&mut self, now: Instant) -> Vec<DealtLook> {
        let in_turn = self.lanes_in_turn.values().map(VecDeque::len).sum::<usize>();
        let share = (MAX_CLAIM_SLOTS / in_turn.max(1)).max(MIN_LANE_SLOTS);
        let (mut looks, mut later): (Vec<DealtLook>, Vec<LaneId>) = (Vec::new(), Vec::new());
        let mut left = MAX_CLAIM_SLOTS;
        for _ in 0..in_turn {
            if left == 0 || looks.len() == MAX_LOOKS {
                break;
            }
            let Some(id) = self.next_turn() else { break };
            let Some(lane) = self.lanes.get_mut(&id) else { continue };
            lane.is_in_turn = false;
            later.push(id);
            let typed_looks = looks.iter().filter(|it| !it.job_types.is_empty()).count();
            if !lane.job_types.is_empty() && typed_looks == MAX_TYPED_LOOKS {
                continue;
            }
            if let Some(look) = self.deal_lane(id, left.min(share), now) {
                left -= look.slots.len();
                looks.push(look);
            }
        }
        for id in later {
            self.consider(id);
        }
        looks
    }

    fn deal_lane(&mut self, id: LaneId, max_slots: usize, now: Instant) -> Option<DealtLook> {
        let lane = self.lanes.get(&id).filter(|it| it.may_be_looked_at())?;
        let wanted = match lane.supply {
            Supply::Known(jobs) => max_slots.min(jobs as usize),
            Supply::Unknown | Supply::Plenty => max_slots,
        };
        let takers: Vec<_> = lane
            .waiters
            .iter()
            .filter(|it| self.is_next_lane(**it, id))
            .take(wanted)
            .filter_map(|it| self.waiters.get(it).map(|waiter| (*it, Arc::clone(&waiter.wish))))
            .collect();
        let slots = deal_slots(&takers, wanted);
        if slots.is_empty() {
            return None;
        }
        for (waiter, _) in &takers {
            if let Some(waiter) = self.waiters.get_mut(waiter) {
                waiter.is_in_flight = true;
            }
        }
        let lane = self.lanes.get_mut(&id)?;
        lane.flights += 1;
        if let Supply::Known(jobs) = lane.supply {
            let dealt = u32::try_from(slots.len()).unwrap_or(u32::MAX);
            lane.supply = Supply::Known(jobs.saturating_sub(dealt));
        }
        let is_mark_fresh = lane.looked_from_zero_at.is_some_and(|it| now - it < MARK_KEEP);
        Some(DealtLook {
            lane: id,
            project_id: lane.queue.0,
            queue: Arc::clone(&lane.queue.1),
            job_types: Arc::clone(&lane.job_types),
            from: if is_mark_fresh { lane.mark } else { ClaimKey::ZERO },
            slots,
            dealt_at: now,
        })
    }

    /// Whether this poll is idle and all queues it named before this one are known to be empty.
    fn is_next_lane(&self, waiter: WaiterId, lane: LaneId) -> bool {
        self.waiters.get(&waiter).is_some_and(|it| {
            !it.is_in_flight
                && it.lanes.iter().take_while(|it| **it != lane).all(|it| self.is_empty(*it))
        })
    }

    /// A look has come back; none: it failed.
    pub fn landed(&mut self, look: &DealtLook, found: Option<Finding>, now: Instant) {
        for (id, _) in &look.slots {
            if let Some(waiter) = self.waiters.get_mut(id) {
                waiter.is_in_flight = false;
            }
        }
        if let Some(lane) = self.lanes.get_mut(&look.lane) {
            learn(lane, look, found, now);
        }
        self.consider(look.lane);
    }
}

/// What a look that came back says of its lane.
fn learn(lane: &mut Lane, look: &DealtLook, found: Option<Finding>, now: Instant) {
    lane.flights = lane.flights.saturating_sub(1);
    lane.touched_at = now;
    let was_from_zero = look.from == ClaimKey::ZERO;
    if was_from_zero && found.is_some() {
        lane.looked_from_zero_at = Some(look.dealt_at);
    }
    let is_zero_look_due = lane.looked_from_zero_at.is_none_or(|it| now - it >= ZERO_LOOK_PAUSE);
    match found {
        None => {
            lane.supply = Supply::Unknown;
            lane.rests_until = Some(now + FAILURE_PAUSE);
        }
        Some(Finding { is_short: true, .. })
            if lane.is_distrusted || (!was_from_zero && is_zero_look_due) =>
        {
            lane.mark = ClaimKey::ZERO;
            lane.supply = Supply::Unknown;
        }
        Some(Finding { is_short: true, .. }) => lane.supply = Supply::Known(lane.arrived_in_flight),
        Some(Finding { was_contended: true, last, .. }) => {
            lane.supply = Supply::Unknown;
            // Everything that was chosen is held by somebody: it is looked at again, but not at once.
            lane.rests_until = last.is_none().then(|| now + CONTENTION_PAUSE);
        }
        Some(Finding { last, .. }) => {
            if lane.supply == Supply::Unknown {
                lane.supply = Supply::Plenty;
            }
            // What arrived in flight may lie before the last job that was found.
            if let Some(last) = last.filter(|_| lane.arrived_in_flight == 0) {
                lane.mark = ClaimKey { rank: last.rank, run_at: last.run_at - MARK_MARGIN };
            }
        }
    }
    if lane.flights == 0 {
        lane.arrived_in_flight = 0;
        lane.is_distrusted = false;
    }
}

#[cfg(test)]
mod tests;
