//! One lane: what is known of a queue as polls of one kind see it.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use chrono::TimeDelta;

use super::{PlannedClaim, QueueKey, WaiterId};
use crate::store::claims::ClaimKey;

/// A look from the mark that came back short is repeated from the beginning, but not more often.
pub(super) const FULL_CLAIM_PAUSE: Duration = Duration::from_millis(250);
/// A look from the beginning walks over what has died and cannot be cleared away yet: while a snapshot is held, over very much. It
/// takes a part of the time in so many, at the most.
const FULL_CLAIM_SHARE: u32 = 10;
/// And comes this often, however long it takes.
const MAX_FULL_CLAIM_PAUSE: Duration = Duration::from_secs(5);
/// Commits may become visible this much later than their `run_at` says; what commits later on this node is told of, and on another
/// with Redis as well. Under a held snapshot each look walks over what was done in this time.
const MARK_MARGIN: TimeDelta = TimeDelta::milliseconds(50);
/// After a failed look its lane rests, so that a store in trouble is not hammered.
pub(super) const FAILURE_PAUSE: Duration = Duration::from_millis(500);
/// After a look that found everything taken its lane rests for a moment.
pub(super) const CONTENTION_PAUSE: Duration = Duration::from_millis(20);

/// What polls have in common that see a queue in the same way.
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
    /// The last look came back full.
    Plenty,
    /// So many jobs arrived since a look came back short, less those that were dealt.
    Known(u32),
}

#[derive(Debug)]
pub(super) struct Lane {
    pub signature: Signature,
    pub waiters: BTreeSet<WaiterId>,
    pub supply: Supply,
    pub in_flight: u32,
    pub arrived_in_flight: u32,
    /// The first of them in the order of claims.
    pub first_in_flight: Option<ClaimKey>,
    /// Whether one of them is behind a gate.
    pub gated_in_flight: bool,
    pub mark: ClaimKey,
    pub full_claim_at: Option<Instant>,
    pub full_claim_took: Duration,
    pub touched_at: Instant,
    /// After a look that failed, or found everything taken, or a rate limit used up.
    pub backoff_until: Option<Instant>,
    /// It rests for its rate limit or its pause: nothing can be had, whatever arrives.
    pub is_limited: bool,
    /// What is under way was dealt before somebody asked not to trust it.
    pub is_stale: bool,
    pub is_in_turn: bool,
    /// Whether the next look must ask for gates.
    pub may_have_gates: bool,
    /// Whether the last look that asked has found some.
    pub has_gates: bool,
    /// When somebody last asked, and was answered.
    pub asked_gates_at: Option<Instant>,
}

impl Lane {
    /// A lane of which nothing is known.
    pub fn new(signature: Signature, now: Instant) -> Self {
        Self {
            signature,
            waiters: BTreeSet::new(),
            supply: Supply::Unknown,
            in_flight: 0,
            arrived_in_flight: 0,
            first_in_flight: None,
            gated_in_flight: false,
            mark: ClaimKey::ZERO,
            full_claim_at: None,
            full_claim_took: Duration::ZERO,
            touched_at: now,
            backoff_until: None,
            is_limited: false,
            is_stale: false,
            is_in_turn: false,
            may_have_gates: true,
            has_gates: false,
            asked_gates_at: None,
        }
    }

    /// Whether a look may start. A second look beside one under way pays off only against a deep
    /// backlog; and never where jobs are chosen before they are locked, by type, by payload or behind gates:
    /// both would choose the same.
    pub fn may_be_claimed(&self) -> bool {
        if self.backoff_until.is_some() {
            return false;
        }
        let may_share = self.supply == Supply::Plenty
            && self.signature.job_types.is_empty()
            && !self.signature.only_commands
            && !self.may_have_gates;
        self.supply != Supply::Known(0) && (self.in_flight == 0 || may_share)
    }

    /// The pause between two looks from the beginning, where they are worth `least`.
    pub fn full_claim_pause(&self, least: Duration) -> Duration {
        let share = self.full_claim_took * FULL_CLAIM_SHARE;
        share.min(MAX_FULL_CLAIM_PAUSE).max(least)
    }

    /// A job has arrived that polls here may want.
    pub fn arrive(&mut self, key: ClaimKey, is_gated: bool) {
        self.mark = self.mark.min(key);
        self.may_have_gates |= is_gated;
        if self.in_flight > 0 {
            self.gated_in_flight |= is_gated;
            self.arrived_in_flight = self.arrived_in_flight.saturating_add(1);
            self.first_in_flight = Some(self.first_in_flight.map_or(key, |it| it.min(key)));
        }
        if let Supply::Known(jobs) = self.supply {
            self.supply = Supply::Known(jobs.saturating_add(1));
        }
    }

    /// Everything before the last job that was found is taken, but for what arrived meanwhile.
    fn advance(&mut self, last: Option<ClaimKey>) {
        let Some(last) = last else { return };
        let mark = ClaimKey { rank: last.rank, run_at: last.run_at - MARK_MARGIN };
        self.mark = self.first_in_flight.map_or(mark, |it| it.min(mark));
    }

    /// Whether nothing can be found here now, as far as anybody knows.
    pub fn is_empty(&self) -> bool {
        self.supply == Supply::Known(0) || self.is_limited
    }

    /// Ends its rest.
    pub fn wake(&mut self) {
        self.backoff_until = None;
        if std::mem::take(&mut self.is_limited) {
            self.supply = Supply::Unknown;
        }
    }

    /// Ends its rest if that is for a rate limit or a pause: they may be over now.
    pub fn wake_if_limited(&mut self) {
        if self.is_limited {
            self.wake();
        }
    }

    /// Forgets what is known, and what a look under way will say of emptiness.
    pub fn mark_stale(&mut self) {
        self.mark = ClaimKey::ZERO;
        self.is_stale = self.in_flight > 0;
        self.may_have_gates = true;
        if matches!(self.supply, Supply::Known(_)) {
            self.supply = Supply::Unknown;
        }
    }

    /// What a look that came back says of it.
    pub fn learn(&mut self, claim: &PlannedClaim, found: Option<Claimed>, now: Instant) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.touched_at = now;
        let was_from_zero = claim.from == ClaimKey::ZERO;
        if was_from_zero && found.is_some() {
            self.full_claim_at = Some(claim.planned_at);
            self.full_claim_took = now - claim.planned_at;
        }
        if let Some(has_gates) = found.and_then(|it| it.has_gates) {
            self.has_gates = has_gates;
            // What came behind a gate meanwhile was not seen.
            self.may_have_gates = has_gates || self.gated_in_flight;
            self.asked_gates_at = Some(claim.planned_at);
        }
        let is_zero_look_due =
            self.full_claim_at.is_none_or(|it| now - it >= self.full_claim_pause(FULL_CLAIM_PAUSE));
        match found {
            None => {
                // What it would have taken is there again.
                self.mark = ClaimKey::ZERO;
                self.supply = Supply::Unknown;
                self.backoff_until = Some(now + FAILURE_PAUSE);
            }
            Some(Claimed { backoff_for: Some(rest), .. }) if !self.is_stale => {
                self.is_limited = true;
                self.backoff_until = Some(now + rest);
            }
            Some(Claimed { is_short: true, .. })
                if self.is_stale || (!was_from_zero && is_zero_look_due) =>
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
                // Everything that was chosen is held by somebody: it is looked at again, but not at once.
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
            self.gated_in_flight = false;
            self.is_stale = false;
        }
    }
}

/// What a look came back with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claimed {
    /// Fewer jobs were there than were wanted.
    pub is_short: bool,
    /// As many as were wanted were there, but others took some of them.
    pub was_contended: bool,
    /// The last job that was found.
    pub last: Option<ClaimKey>,
    /// Whether the queue has gates; none when nobody asked, or nobody answered.
    pub has_gates: Option<bool>,
    /// The queue's rate limit, or its pause, lets nothing more through for so long.
    pub backoff_for: Option<Duration>,
}
