//! The steps of the statements.

use std::collections::BTreeSet;

use super::{Admission, Event, Job, JobState, Pass, Sender, State, Variant, Worker};

/// One step of one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// The next step of a sender's statement.
    Send(usize),
    /// A worker begins a claim that takes this place, or continues it.
    Claim(usize),
    /// A worker ends its attempt, or commits the end.
    Succeed(usize),
    /// A worker's attempt fails.
    Fail(usize),
    /// The next step of a node's pass.
    Pass(usize),
}

impl State {
    fn of(&mut self, place: u8) -> Option<&mut Job> {
        self.jobs.iter_mut().find(|it| it.place == place)
    }

    fn is(&self, place: u8, wanted: JobState) -> bool {
        self.jobs.iter().any(|it| it.place == place && it.state == wanted)
    }

    fn is_free(&self, place: u8) -> bool {
        self.jobs.iter().any(|it| it.place == place && !it.is_locked)
    }

    fn lock_row(&mut self, place: u8, is_locked: bool) {
        if let Some(job) = self.of(place) {
            job.is_locked = is_locked;
        }
    }

    fn is_used(&self) -> bool {
        self.jobs.iter().any(|it| it.state != JobState::Ended)
    }

    fn note(&mut self) {
        self.notes.insert(self.next_note);
        self.next_note += 1;
    }

    /// Numbers the notes from zero on, with those that passes have seen, so that states that differ
    /// by numbers alone are one.
    fn renumber_notes(&mut self) {
        let mut known = self.notes.clone();
        for notes in self.nodes.iter_mut().filter_map(Pass::notes_mut) {
            known.extend(notes.iter());
        }
        let number = |it: &u8| known.range(..it).count() as u8;
        let renumbered = |notes: &BTreeSet<u8>| notes.iter().map(number).collect();
        self.notes = renumbered(&self.notes);
        for notes in self.nodes.iter_mut().filter_map(Pass::notes_mut) {
            *notes = renumbered(notes);
        }
        self.next_note = known.len() as u8;
    }

    /// Tries to take the lock of the group.
    fn lock(&mut self) -> bool {
        if self.is_locked {
            self.event = Some(Event::LockRefused);
            return false;
        }
        self.is_locked = true;
        true
    }

    /// The job that a claim chooses: the first that its group let run, while none runs.
    fn claimable(&self) -> Option<u8> {
        if self.jobs.iter().any(|it| it.state == JobState::Running) {
            return None;
        }
        let open = self.jobs.iter().filter(|it| it.state == JobState::Open);
        open.map(|it| it.place).min()
    }
}

impl Admission {
    pub(super) fn possible(&self, state: &State, steps: &mut Vec<Step>) {
        for (number, sender) in state.senders.iter().enumerate() {
            if *sender != (Sender::Idle { left: 0 }) {
                steps.push(Step::Send(number));
            }
        }
        for (number, worker) in state.workers.iter().enumerate() {
            match worker {
                Worker::Idle if state.claimable().is_some() => steps.push(Step::Claim(number)),
                Worker::Idle => (),
                Worker::Chose { .. } | Worker::Claims { .. } => steps.push(Step::Claim(number)),
                Worker::Runs { place } if state.is_free(*place) => {
                    steps.push(Step::Succeed(number));
                    if state.failures < self.failures {
                        steps.push(Step::Fail(number));
                    }
                }
                Worker::Runs { .. } => (),
                Worker::Ends { .. } => steps.push(Step::Succeed(number)),
            }
        }
        for (number, pass) in state.nodes.iter().enumerate() {
            if *pass != Pass::Idle || !state.notes.is_empty() {
                steps.push(Step::Pass(number));
            }
        }
    }

    pub(super) fn take(&self, state: &mut State, step: Step) {
        match step {
            Step::Send(number) => self.send(state, number),
            Step::Claim(number) => claim(state, number),
            Step::Succeed(number) | Step::Fail(number) => {
                self.end(state, number, matches!(step, Step::Fail(_)));
            }
            Step::Pass(number) => {
                let pass = std::mem::replace(&mut state.nodes[number], Pass::Idle);
                state.nodes[number] = self.pass(state, pass);
            }
        }
        state.renumber_notes();
    }

    fn send(&self, state: &mut State, number: usize) {
        let next = match state.senders[number] {
            Sender::Idle { left } => {
                let place = state.next_place;
                state.next_place += 1;
                Sender::Looked { left: left - 1, place, is_used: state.is_used() }
            }
            Sender::Looked { left, place, is_used: false } if self.variant == Variant::NoLock => {
                Sender::Decided { left, place, waits: false, has_lock: false }
            }
            Sender::Looked { left, place, is_used } => {
                if !is_used && state.lock() {
                    Sender::Locked { left, place }
                } else {
                    Sender::Decided { left, place, waits: true, has_lock: false }
                }
            }
            Sender::Locked { left, place } => {
                let waits = state.is_used() && self.variant != Variant::LookOnce;
                state.event = waits.then_some(Event::UsedMeanwhile);
                Sender::Decided { left, place, waits, has_lock: true }
            }
            Sender::Decided { left, place, waits, has_lock } => {
                let job = if waits { JobState::Waiting } else { JobState::Open };
                let sender = Some(number);
                let stored = Job { place, sender, state: job, is_locked: false };
                state.jobs.push(stored);
                state.jobs.sort_by_key(|it| it.place);
                if waits && self.variant != Variant::WaitWithoutNote {
                    state.note();
                }
                if !waits {
                    state.event = Some(Event::OpenAtOnce);
                }
                state.is_locked &= !has_lock;
                Sender::Idle { left }
            }
        };
        state.senders[number] = next;
    }

    fn end(&self, state: &mut State, number: usize, fails: bool) {
        state.workers[number] = match state.workers[number] {
            Worker::Runs { place } => {
                state.lock_row(place, true);
                state.failures += u8::from(fails);
                Worker::Ends { place, fails }
            }
            Worker::Ends { place, fails } => {
                if let Some(job) = state.of(place) {
                    let again = if job.sender.is_none() { JobState::Stray } else { JobState::Open };
                    job.state = if fails { again } else { JobState::Ended };
                    job.is_locked = false;
                }
                if self.variant != Variant::EndWithoutNote {
                    state.note();
                }
                Worker::Idle
            }
            other => other,
        };
    }

    fn pass(&self, state: &mut State, pass: Pass) -> Pass {
        match pass {
            Pass::Idle => find(state),
            Pass::Nothing { seen } if state.lock() => Pass::Forgets { seen },
            Pass::Forgets { seen } => {
                if self.variant == Variant::ForgetAllIdle {
                    state.notes.clear();
                }
                state.notes.retain(|it| !seen.contains(it));
                state.is_locked = false;
                state.event = Some(Event::Forgotten);
                Pass::Idle
            }
            Pass::Found { seen } if state.lock() => Pass::Locked { seen },
            Pass::Nothing { .. } | Pass::Found { .. } => Pass::Idle,
            Pass::Locked { seen } => {
                // Those that are visible by now, from the first to the last that was found.
                let last = seen.last().copied().unwrap_or_default();
                Pass::Forgot { notes: state.notes.range(..=last).copied().collect() }
            }
            Pass::Forgot { notes } => close(state, notes),
            Pass::Closed { notes, places, is_unfinished } => {
                self.open(state, notes, places, is_unfinished)
            }
            Pass::Opened { notes, closed, place, is_unfinished } => {
                for place in closed {
                    state.lock_row(place, false);
                    if let Some(job) = state.of(place) {
                        job.state = JobState::Waiting;
                    }
                }
                if let Some(job) = place.and_then(|it| state.of(it)) {
                    (job.state, job.is_locked) = (JobState::Open, false);
                    state.event = Some(Event::OpenedByAPass);
                }
                match self.variant {
                    Variant::ForgetAtCommit => state.notes.clear(),
                    _ => state.notes.retain(|it| !notes.contains(it)),
                }
                if is_unfinished {
                    state.note();
                }
                state.is_locked = false;
                Pass::Idle
            }
        }
    }

    /// Opens the first that waits, if no other is open. What this pass has closed waits.
    fn open(
        &self,
        state: &mut State,
        notes: BTreeSet<u8>,
        closed: Vec<u8>,
        is_unfinished: bool,
    ) -> Pass {
        let waits = |it: &&Job| it.state == JobState::Waiting || closed.contains(&it.place);
        let is_stray = |it: &Job| it.state == JobState::Stray;
        let mut open = state.jobs.iter().filter(|it| it.state.is_open() && !waits(it));
        let has_open = match self.variant {
            Variant::OpenBesideStrays => open.any(|it| !is_stray(it)),
            _ => open.next().is_some(),
        };
        let next = state.jobs.iter().filter(waits).map(|it| it.place).min();
        let next = next.filter(|_| !has_open);
        // It has the locks of what it has closed.
        let held = next.filter(|it| closed.contains(it) || state.is_free(*it));
        if let Some(place) = held {
            state.lock_row(place, true);
        }
        let is_unfinished = is_unfinished || next != held;
        Pass::Opened { notes, closed, place: held, is_unfinished }
    }
}

fn claim(state: &mut State, number: usize) {
    state.workers[number] = match state.workers[number] {
        Worker::Idle => match state.claimable() {
            Some(place) => Worker::Chose { place, is_early: false },
            None => Worker::Idle,
        },
        // The row is looked at again once it is locked.
        Worker::Chose { place, is_early } => {
            let wanted = if is_early { JobState::Stray } else { JobState::Open };
            if state.is(place, wanted) && state.is_free(place) {
                state.lock_row(place, true);
                Worker::Claims { place }
            } else {
                Worker::Idle
            }
        }
        Worker::Claims { place } => {
            if state.jobs.iter().any(|it| it.state == JobState::Running) {
                state.event = Some(Event::Beside);
            }
            let sender = state.jobs.iter().find(|it| it.place == place).map(|it| it.sender);
            let is_ahead = |it: &Job| {
                it.place < place && it.state != JobState::Ended && Some(it.sender) == sender
            };
            if state.jobs.iter().any(is_ahead) {
                state.event = Some(Event::Overtaken);
            }
            if let Some(job) = state.of(place) {
                (job.state, job.is_locked) = (JobState::Running, false);
            }
            Worker::Runs { place }
        }
        other => other,
    };
}

/// What the statement that finds notes sees of the group.
fn find(state: &State) -> Pass {
    let seen = state.notes.clone();
    let waits = state.jobs.iter().any(|it| it.state == JobState::Waiting);
    let strays = state.jobs.iter().any(|it| it.state == JobState::Stray);
    let open = state.jobs.iter().filter(|it| it.state.is_open()).count();
    if waits || strays || open > 1 { Pass::Found { seen } } else { Pass::Nothing { seen } }
}

/// Sets open jobs that no worker has back to waiting, but for the first in line if none runs.
fn close(state: &mut State, notes: BTreeSet<u8>) -> Pass {
    let is_running = state.jobs.iter().any(|it| it.state == JobState::Running);
    let first = state.jobs.iter().filter(|it| it.state != JobState::Ended).map(|it| it.place).min();
    let is_excess = |it: &&Job| match it.state {
        JobState::Stray => true,
        JobState::Open => is_running || Some(it.place) > first,
        _ => false,
    };
    let excess: Vec<_> = state.jobs.iter().filter(is_excess).map(|it| it.place).collect();
    let places: Vec<_> = excess.iter().copied().filter(|it| state.is_free(*it)).collect();
    for place in &places {
        state.lock_row(*place, true);
    }
    let is_unfinished = places.len() < excess.len();
    if is_unfinished {
        state.event = Some(Event::RowSkipped);
    }
    Pass::Closed { notes, places, is_unfinished }
}
