//! Admission: jobs of one group with a strict order are stored, claimed and ended by statements
//! that overlap, while two nodes decide which job may run. ADR 17 has the design.
//!
//! What is modelled are the statements of `src/store/jobs/enqueue.rs`, `claims/limited_claims.rs`,
//! `settle/` and `sweep/groups/`, and the functions that they call. A statement sees what was
//! committed before it began, and others see what it does when its transaction commits; so each has
//! a step for what it sees, one for each lock, and one for its commit.
//!
//! A note is a row of `group_notes`: it says that admission must look at a group. To open a job is
//! to let it run; to close it is to make it wait again.

mod steps;

use std::collections::BTreeSet;

use stateright::{Model, Property};

pub use self::steps::Step;

/// Nodes.
pub const NODES: usize = 2;
/// Workers.
pub const WORKERS: usize = 2;

/// What is wrong with the protocol on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// Nothing.
    Correct,
    /// The statement that stores a job, and has got the lock of its group, does not look once more.
    LookOnce,
    /// A job that sees an empty group runs without the lock.
    NoLock,
    /// A job that waits leaves no note.
    WaitWithoutNote,
    /// The end of an attempt leaves no note.
    EndWithoutNote,
    /// A pass forgets notes that were left after it had decided.
    ForgetAtCommit,
    /// A pass that has found nothing to decide deletes notes that came meanwhile, too.
    ForgetAllIdle,
    /// Admission opens a job beside those that were stored before the order began.
    OpenBesideStrays,
}

/// The protocol, and how far it is followed.
#[derive(Debug, Clone, Copy)]
pub struct Admission {
    pub variant: Variant,
    /// Jobs that each sender sends, each after the answer to the one before.
    pub sent: [u8; 2],
    /// Jobs that were stored before the order began. A claim that began before it takes the first.
    pub strays: u8,
    /// Attempts that fail.
    pub failures: u8,
}

/// What is committed of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum JobState {
    /// It waits for its group.
    Waiting,
    /// Its group let it run.
    Open,
    /// It was stored before the order: only a claim that began before the order may take it.
    Stray,
    Running,
    Ended,
}

impl JobState {
    /// Whether it may run or runs.
    fn is_open(self) -> bool {
        matches!(self, Self::Open | Self::Stray | Self::Running)
    }
}

/// A job that is committed. Its place is unique.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Job {
    pub place: u8,
    /// Who sent it; none: it was stored before the order.
    pub sender: Option<usize>,
    pub state: JobState,
    /// Whether a transaction that is not committed has locked its row.
    pub is_locked: bool,
}

/// What a sender does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sender {
    /// Jobs that it has not sent.
    Idle { left: u8 },
    /// Its statement has seen whether the group has jobs.
    Looked { left: u8, place: u8, is_used: bool },
    /// It has the lock.
    Locked { left: u8, place: u8 },
    /// It commits next.
    Decided { left: u8, place: u8, waits: bool, has_lock: bool },
}

/// What a worker does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Worker {
    Idle,
    /// Its claim has chosen the job of this place. `is_early`: it began before the order.
    Chose {
        place: u8,
        is_early: bool,
    },
    /// It has locked the row, and commits the claim next.
    Claims {
        place: u8,
    },
    Runs {
        place: u8,
    },
    /// It has locked the row, and commits the end of the attempt next.
    Ends {
        place: u8,
        fails: bool,
    },
}

/// What a pass of admission has done.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Pass {
    Idle,
    /// Nothing is to be decided, as it has seen.
    Nothing {
        seen: BTreeSet<u8>,
    },
    /// The same with the lock: it deletes the notes next.
    Forgets {
        seen: BTreeSet<u8>,
    },
    /// It has seen notes, and tries the lock next.
    Found {
        seen: BTreeSet<u8>,
    },
    /// It has the lock.
    Locked {
        seen: BTreeSet<u8>,
    },
    /// The notes are deleted.
    Forgot {
        notes: BTreeSet<u8>,
    },
    /// It has closed the jobs of these places. `is_unfinished`: it could not lock all.
    Closed {
        notes: BTreeSet<u8>,
        places: Vec<u8>,
        is_unfinished: bool,
    },
    /// It commits next.
    Opened {
        notes: BTreeSet<u8>,
        closed: Vec<u8>,
        place: Option<u8>,
        is_unfinished: bool,
    },
}

impl Pass {
    /// The notes that it knows.
    fn notes_mut(&mut self) -> Option<&mut BTreeSet<u8>> {
        match self {
            Self::Idle => None,
            Self::Nothing { seen: notes }
            | Self::Forgets { seen: notes }
            | Self::Found { seen: notes }
            | Self::Locked { seen: notes }
            | Self::Forgot { notes }
            | Self::Closed { notes, .. }
            | Self::Opened { notes, .. } => Some(notes),
        }
    }
}

/// Everything at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    pub jobs: Vec<Job>,
    /// Notes that are committed.
    pub notes: BTreeSet<u8>,
    pub next_note: u8,
    pub next_place: u8,
    /// Whether a transaction has the lock of the group.
    pub is_locked: bool,
    pub senders: [Sender; 2],
    pub workers: [Worker; WORKERS],
    pub nodes: [Pass; NODES],
    pub failures: u8,
    pub event: Option<Event>,
}

/// What the last step did, as far as the properties ask for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// Forbidden: a job began while another ran.
    Beside,
    /// Forbidden: a job began before one that its sender had sent earlier has ended.
    Overtaken,
    /// A job was open when it was stored.
    OpenAtOnce,
    /// A job waits for its group, though its sender saw none.
    UsedMeanwhile,
    LockRefused,
    Forgotten,
    OpenedByAPass,
    RowSkipped,
}

impl Admission {
    /// Two senders, of whom one sends two jobs.
    #[must_use]
    pub const fn three_jobs() -> Self {
        Self { variant: Variant::Correct, sent: [2, 1], strays: 0, failures: 1 }
    }

    /// The same without failures.
    #[must_use]
    pub const fn three_jobs_without_failures() -> Self {
        Self { failures: 0, ..Self::three_jobs() }
    }

    /// An order that begins while two jobs are there, and one comes.
    #[must_use]
    pub const fn order_begins() -> Self {
        Self { sent: [1, 0], strays: 2, failures: 0, ..Self::three_jobs() }
    }

    /// What a broken variant needs to show itself.
    #[must_use]
    pub fn broken(variant: Variant) -> Self {
        let protocol = match variant {
            Variant::OpenBesideStrays => Self::order_begins(),
            _ => Self::three_jobs_without_failures(),
        };
        Self { variant, ..protocol }
    }
}

impl Model for Admission {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let stray = |place| Job { place, sender: None, state: JobState::Stray, is_locked: false };
        let mut workers = [Worker::Idle; WORKERS];
        if self.strays > 0 {
            workers[0] = Worker::Chose { place: 0, is_early: true };
        }
        // The change of the rules notes the group.
        let notes: BTreeSet<u8> = (self.strays > 0).then_some(0).into_iter().collect();
        vec![State {
            jobs: (0..self.strays).map(stray).collect(),
            next_note: notes.len() as u8,
            notes,
            next_place: self.strays,
            is_locked: false,
            senders: self.sent.map(|left| Sender::Idle { left }),
            workers,
            nodes: [Pass::Idle, Pass::Idle],
            failures: 0,
            event: None,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        self.possible(state, steps);
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        next.event = None;
        self.take(&mut next, step);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut all = vec![
            Property::always("one job runs at a time", |_, it: &State| {
                it.event != Some(Event::Beside)
            }),
            Property::always("no job overtakes another", |_, it: &State| {
                it.event != Some(Event::Overtaken)
            }),
            Property::always("no job waits for ever", |model: &Self, it: &State| {
                let mut steps = Vec::new();
                model.possible(it, &mut steps);
                !steps.is_empty() || it.jobs.iter().all(|it| it.state == JobState::Ended)
            }),
            Property::sometimes("a pass opens a job", |_, it: &State| {
                it.event == Some(Event::OpenedByAPass)
            }),
            Property::sometimes("notes about nothing are forgotten", |_, it: &State| {
                it.event == Some(Event::Forgotten)
            }),
            Property::sometimes("a lock is refused", |_, it: &State| {
                it.event == Some(Event::LockRefused)
            }),
        ];
        if self.strays > 0 {
            all.push(Property::sometimes("a row is skipped", |_, it: &State| {
                it.event == Some(Event::RowSkipped)
            }));
        } else {
            all.push(Property::sometimes("a job is open at once", |_, it: &State| {
                it.event == Some(Event::OpenAtOnce)
            }));
            all.push(Property::sometimes("a group is used meanwhile", |_, it: &State| {
                it.event == Some(Event::UsedMeanwhile)
            }));
        }
        all
    }
}
