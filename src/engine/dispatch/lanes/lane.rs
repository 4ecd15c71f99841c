//! One lane: what is known of a queue as polls of one kind see it.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use chrono::TimeDelta;

use super::{DealtLook, QueueKey, WaiterId};
use crate::store::claims::ClaimKey;

/// A look from the mark that came back short is repeated from the beginning, but not more often.
pub(super) const ZERO_LOOK_PAUSE: Duration = Duration::from_millis(250);
/// A look from the beginning walks over what has died and cannot be cleared away yet: while a snapshot is held, over very much. It
/// takes a part of the time in so many, at the most.
const ZERO_LOOK_SHARE: u32 = 10;
/// And comes this often, however long it takes.
const MAX_ZERO_LOOK_PAUSE: Duration = Duration::from_secs(5);
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
    pub flights: u32,
    pub arrived_in_flight: u32,
    /// The first of them in the order of claims.
    pub first_in_flight: Option<ClaimKey>,
    /// Whether one of them is behind a gate.
    pub gated_in_flight: bool,
    pub mark: ClaimKey,
    pub looked_from_zero_at: Option<Instant>,
    pub zero_look_took: Duration,
    pub touched_at: Instant,
    /// After a look that failed, or found everything taken, or a rate limit used up.
    pub rests_until: Option<Instant>,
    /// It rests for its rate limit or its pause: nothing can be had, whatever arrives.
    pub is_spent: bool,
    /// What is under way was dealt before somebody asked not to trust it.
    pub is_distrusted: bool,
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
            flights: 0,
            arrived_in_flight: 0,
            first_in_flight: None,
            gated_in_flight: false,
            mark: ClaimKey::ZERO,
            looked_from_zero_at: None,
            zero_look_took: Duration::ZERO,
            touched_at: now,
            rests_until: None,
            is_spent: false,
            is_distrusted: false,
            is_in_turn: false,
            may_have_gates: true,
            has_gates: false,
            asked_gates_at: None,
        }
    }

    /// Whether a look may start. A second look beside one under way pays off only against a deep
    /// backlog; and never where jobs are chosen before they are locked, by type, by payload or behind gates:
    /// both would choose the same.
    pub fn may_be_looked_at(&self) -> bool {
        if self.rests_until.is_some() {
            return false;
        }
        let may_share = self.supply == Supply::Plenty
            && self.signature.job_types.is_empty()
            && !self.signature.only_commands
            && !self.may_have_gates;
        self.supply != Supply::Known(0) && (self.flights == 0 || may_share)
    }

    /// The pause between two looks from the beginning, where they are worth `least`.
    pub fn zero_look_pause(&self, least: Duration) -> Duration {
        let share = self.zero_look_took * ZERO_LOOK_SHARE;
        share.min(MAX_ZERO_LOOK_PAUSE).max(least)
    }

    /// A job has arrived that polls here may want.
    pub fn arrive(&mut self, key: ClaimKey, is_gated: bool) {
        self.mark = self.mark.min(key);
        self.may_have_gates |= is_gated;
        if self.flights > 0 {
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
        self.supply == Supply::Known(0) || self.is_spent
    }

    /// Ends its rest.
    pub fn wake(&mut self) {
        self.rests_until = None;
        if std::mem::take(&mut self.is_spent) {
            self.supply = Supply::Unknown;
        }
    }

    /// Ends its rest if that is for a rate limit or a pause: they may be over now.
    pub fn wake_if_spent(&mut self) {
        if self.is_spent {
            self.wake();
        }
    }

    /// Forgets what is known, and what a look under way will say of emptiness.
    pub fn distrust(&mut self) {
        self.mark = ClaimKey::ZERO;
        self.is_distrusted = self.flights > 0;
        self.may_have_gates = true;
        if matches!(self.supply, Supply::Known(_)) {
            self.supply = Supply::Unknown;
        }
    }

    /// What a look that came back says of it.
    pub fn learn(&mut self, look: &DealtLook, found: Option<Finding>, now: Instant) {
        self.flights = self.flights.saturating_sub(1);
        self.touched_at = now;
        let was_from_zero = look.from == ClaimKey::ZERO;
        if was_from_zero && found.is_some() {
            self.looked_from_zero_at = Some(look.dealt_at);
            self.zero_look_took = now - look.dealt_at;
        }
        if let Some(has_gates) = found.and_then(|it| it.has_gates) {
            self.has_gates = has_gates;
            // What came behind a gate meanwhile was not seen.
            self.may_have_gates = has_gates || self.gated_in_flight;
            self.asked_gates_at = Some(look.dealt_at);
        }
        let is_zero_look_due = self
            .looked_from_zero_at
            .is_none_or(|it| now - it >= self.zero_look_pause(ZERO_LOOK_PAUSE));
        match found {
            None => {
                // What it would have taken is there again.
                self.mark = ClaimKey::ZERO;
                self.supply = Supply::Unknown;
                self.rests_until = Some(now + FAILURE_PAUSE);
            }
            Some(Finding { rests_for: Some(rest), .. }) if !self.is_distrusted => {
                self.is_spent = true;
                self.rests_until = Some(now + rest);
            }
            Some(Finding { is_short: true, .. })
                if self.is_distrusted || (!was_from_zero && is_zero_look_due) =>
            {
                self.mark = ClaimKey::ZERO;
                self.supply = Supply::Unknown;
            }
            Some(Finding { is_short: true, last, .. }) => {
                self.supply = Supply::Known(self.arrived_in_flight);
                self.advance(last);
            }
            Some(Finding { was_contended: true, last, .. }) => {
                self.supply = Supply::Unknown;
                // Everything that was chosen is held by somebody: it is looked at again, but not at once.
                self.rests_until = last.is_none().then(|| now + CONTENTION_PAUSE);
            }
            Some(Finding { last, .. }) => {
                if self.supply == Supply::Unknown {
                    self.supply = Supply::Plenty;
                }
                self.advance(last);
            }
        }
        if self.flights == 0 {
            self.arrived_in_flight = 0;
            self.first_in_flight = None;
            self.gated_in_flight = false;
            self.is_distrusted = false;
        }
    }
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
    /// Whether the queue has gates; none when nobody asked, or nobody answered.
    pub has_gates: Option<bool>,
    /// The queue's rate limit, or its pause, lets nothing more through for so long.
    pub rests_for: Option<Duration>,
}
