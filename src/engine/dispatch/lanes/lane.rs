//! One lane: what is known of a queue, for polls with the same types and labels.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use chrono::TimeDelta;
use fencepost_signals::wakeups::Arrival;
use fencepost_store::claims::ClaimKey;

use super::{PlannedClaim, QueueKey, WaiterId};

/// After a short claim from the low-water mark, the next claim begins at the start of the queue,
/// but not sooner than this.
pub(super) const FULL_CLAIM_PAUSE: Duration = Duration::from_millis(250);
/// A claim from the start scans dead rows, and many of them while a snapshot is held. Such claims
/// take at most one part in this many of the time.
const FULL_CLAIM_SHARE: u32 = 10;
/// The longest pause between two claims from the start.
const MAX_FULL_CLAIM_PAUSE: Duration = Duration::from_secs(5);
/// A commit may become visible this much later than its job's `run_at`. Later commits are hinted by
/// this node, and by others over Redis. A larger margin scans more dead rows.
const MARK_MARGIN: TimeDelta = TimeDelta::milliseconds(50);
/// Pause after a failed claim, so that a database in trouble gets no extra load.
pub(super) const FAILURE_PAUSE: Duration = Duration::from_millis(500);
/// Pause after a claim that found every job locked.
pub(super) const CONTENTION_PAUSE: Duration = Duration::from_millis(20);

/// The parts of a poll that decide which jobs of a queue it can see. Polls with the same share a
/// lane.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Signature {
    pub queue: QueueKey,
    pub job_types: Arc<[String]>,
    pub labels: Arc<[String]>,
    pub only_commands: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Supply {
    Unknown,
    /// The last claim returned as many jobs as were wanted.
    Plenty,
    /// Jobs that arrived since the last short claim, less those already planned for.
    Known(u32),
}

#[derive(Debug)]
pub(super) struct Lane {
    pub signature: Signature,
    pub waiters: BTreeSet<WaiterId>,
    pub supply: Supply,
    pub in_flight: u32,
    pub arrived_in_flight: u32,
    /// The first of these arrivals in claim order.
    pub first_in_flight: Option<ClaimKey>,
    /// Whether one of these arrivals has a constraint key.
    pub constrained_in_flight: bool,
    pub mark: ClaimKey,
    pub full_claim_at: Option<Instant>,
    pub full_claim_took: Duration,
    pub touched_at: Instant,
    /// Set after a claim that failed, found every job locked, or met a rate limit.
    pub backoff_until: Option<Instant>,
    /// Rate-limited or paused: do not claim even if new jobs arrive.
    pub is_limited: bool,
    /// The claim in flight started before the last invalidation: ignore that its result is short,
    /// or that it met a pause.
    pub is_stale: bool,
    /// Whether it is in [`super::Lanes`]' `lanes_in_turn`.
    pub is_in_turn: bool,
    /// Whether the next claim must ask for constraint keys.
    pub may_have_constrained: bool,
    /// Whether the last claim that asked found constraint keys.
    pub has_constrained: bool,
    /// When the last answer about constraint keys arrived.
    pub constrained_read_at: Option<Instant>,
}

impl Lane {
    /// A lane about which nothing is known.
    pub fn new(signature: Signature, now: Instant) -> Self {
        Self {
            signature,
            waiters: BTreeSet::new(),
            supply: Supply::Unknown,
            in_flight: 0,
            arrived_in_flight: 0,
            first_in_flight: None,
            constrained_in_flight: false,
            mark: ClaimKey::ZERO,
            full_claim_at: None,
            full_claim_took: Duration::ZERO,
            touched_at: now,
            backoff_until: None,
            is_limited: false,
            is_stale: false,
            is_in_turn: false,
            may_have_constrained: true,
            has_constrained: false,
            constrained_read_at: None,
        }
    }

    /// Whether a claim may start. A second claim in parallel pays off only against a deep backlog,
    /// and never where jobs are selected before they are locked (by type, by command or under
    /// limits): both would select the same jobs.
    pub fn may_be_claimed(&self) -> bool {
        if self.backoff_until.is_some() {
            return false;
        }
        let may_share = self.supply == Supply::Plenty
            && self.signature.job_types.is_empty()
            && !self.signature.only_commands
            && !self.may_have_constrained;
        self.supply != Supply::Known(0) && (self.in_flight == 0 || may_share)
    }

    /// Whether a job of this type may go to a poll of this lane when it is stored: as far as this
    /// node knows, no other job waits, except for those that claims in flight are for.
    pub fn may_match(&self, job_type: &str) -> bool {
        self.supply == Supply::Known(0)
            && self.backoff_until.is_none()
            && !self.may_have_constrained
            && !self.signature.only_commands
            && self.wants(job_type)
    }

    /// Whether its polls take jobs of this type.
    pub fn wants(&self, job_type: &str) -> bool {
        let job_types = &self.signature.job_types;
        job_types.is_empty() || job_types.iter().any(|it| it == job_type)
    }

    /// Whether a claim that comes soon finds this job for sure, unless another claim is faster.
    pub fn surely_finds(&self, arrival: &Arrival) -> bool {
        self.backoff_until.is_none()
            && !self.signature.only_commands
            && !arrival.is_constrained
            && self.wants(&arrival.job_type)
    }

    /// The pause between two claims from the start, at least `least`.
    pub fn full_claim_pause(&self, least: Duration) -> Duration {
        let share = self.full_claim_took * FULL_CLAIM_SHARE;
        share.min(MAX_FULL_CLAIM_PAUSE).max(least)
    }

    /// A job arrived that polls of this lane may want.
    pub fn arrive(&mut self, key: ClaimKey, is_constrained: bool) {
        self.mark = self.mark.min(key);
        self.may_have_constrained |= is_constrained;
        if self.in_flight > 0 {
            self.constrained_in_flight |= is_constrained;
            self.arrived_in_flight = self.arrived_in_flight.saturating_add(1);
            self.first_in_flight = Some(self.first_in_flight.map_or(key, |it| it.min(key)));
        }
        if let Supply::Known(jobs) = self.supply {
            self.supply = Supply::Known(jobs.saturating_add(1));
        }
    }

    /// Everything up to the last job found is claimed, except for what arrived meanwhile.
    fn advance(&mut self, last: Option<ClaimKey>) {
        let Some(last) = last else { return };
        let mark = ClaimKey { rank: last.rank, run_at: last.run_at - MARK_MARGIN };
        self.mark = self.first_in_flight.map_or(mark, |it| it.min(mark));
    }

    /// Whether no job can be found now, as far as is known.
    pub fn is_empty(&self) -> bool {
        self.supply == Supply::Known(0) || self.is_limited
    }

    /// Ends the backoff.
    pub fn wake(&mut self) {
        self.backoff_until = None;
        if std::mem::take(&mut self.is_limited) {
            self.supply = Supply::Unknown;
        }
    }

    /// Ends the backoff if it is for a rate limit or a pause: either may have changed.
    pub fn wake_if_limited(&mut self) {
        if self.is_limited {
            self.wake();
        }
    }

    /// Forgets what is known, and ignores that the result of a claim in flight is short, or that it
    /// meets a pause.
    pub fn mark_stale(&mut self) {
        self.mark = ClaimKey::ZERO;
        self.is_stale = self.in_flight > 0;
        self.may_have_constrained = true;
        if matches!(self.supply, Supply::Known(_)) {
            self.supply = Supply::Unknown;
        }
    }

    /// Updates the lane from a completed claim.
    pub fn learn(&mut self, claim: &PlannedClaim, found: Option<Claimed>, now: Instant) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.touched_at = now;
        let was_full = claim.from == ClaimKey::ZERO;
        if was_full && found.is_some() {
            self.full_claim_at = Some(claim.planned_at);
            self.full_claim_took = now - claim.planned_at;
        }
        if let Some(has_constrained) = found.and_then(|it| it.has_constrained) {
            self.has_constrained = has_constrained;
            // Arrivals with a constraint key were not seen by this claim.
            self.may_have_constrained = has_constrained || self.constrained_in_flight;
            self.constrained_read_at = Some(claim.planned_at);
        }
        let is_full_claim_due =
            self.full_claim_at.is_none_or(|it| now - it >= self.full_claim_pause(FULL_CLAIM_PAUSE));
        match found {
            None => {
                // The jobs that it was planned for are still there.
                self.mark = ClaimKey::ZERO;
                self.supply = Supply::Unknown;
                self.backoff_until = Some(now + FAILURE_PAUSE);
            }
            Some(Claimed { pause_for: Some(rest), .. }) if !self.is_stale => {
                self.is_limited = true;
                self.backoff_until = Some(now + rest);
            }
            Some(Claimed { is_short: true, .. })
                if self.is_stale || (!was_full && is_full_claim_due) =>
            {
                self.mark = ClaimKey::ZERO;
                self.supply = Supply::Unknown;
            }
            Some(Claimed { is_short: true, last, .. }) => {
                self.supply = Supply::Known(self.arrived_in_flight);
                self.advance(last);
            }
            Some(Claimed { was_contended: true, last, .. }) => {
                self.supply = Supply::Unknown;
                // Every selected job is locked by another claim: try again after a pause.
                self.backoff_until = last.is_none().then(|| now + CONTENTION_PAUSE);
            }
            Some(Claimed { last, .. }) => {
                if self.supply == Supply::Unknown {
                    self.supply = Supply::Plenty;
                }
                self.advance(last);
            }
        }
        if self.in_flight == 0 {
            self.arrived_in_flight = 0;
            self.first_in_flight = None;
            self.constrained_in_flight = false;
            self.is_stale = false;
        }
    }
}

/// The findings of a completed claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claimed {
    /// Fewer jobs than wanted were there.
    pub is_short: bool,
    /// Enough jobs were there, but other claims locked some of them.
    pub was_contended: bool,
    /// The last job found, in claim order.
    pub last: Option<ClaimKey>,
    /// Whether the queue has constraint keys; none if that is unknown.
    pub has_constrained: Option<bool>,
    /// The rate limit or pause allows nothing more for this long.
    pub pause_for: Option<Duration>,
}
