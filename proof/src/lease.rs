//! The lease protocol: workers poll and ack over a network that loses, repeats and reorders; nodes
//! run statements on the database; leases expire, are released and are reaped; a dead letter is
//! retried; a standby that lags may be promoted.
//!
//! What is modelled are the statements of `src/store/claims/mod.rs`, `settle_success.rs`,
//! `settle_failure.rs`, `heartbeats.rs` and `requeue.rs`: each is one atomic step.

mod database;
mod steps;

pub use self::{
    database::{Database, Fence, Job, JobState, Outcome},
    steps::{Step, Worker},
};

use stateright::{Model, Property};

/// How long a lease lasts, in ticks of the database's clock.
pub const LEASE_TICKS: u8 = 1;
/// By how much a node's clock is ahead.
pub const SKEW_TICKS: u8 = 1;
/// Nodes, and workers.
pub const NODES: usize = 2;
/// Workers.
pub const WORKERS: usize = 2;

/// What is wrong with the protocol on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// Nothing.
    Correct,
    /// An ack names the job alone.
    AckByJob,
    /// An ack names the job and the attempt, but not the lease.
    AckByAttempt,
    /// Expired leases are found by the clock of a node.
    ReapByNodeClock,
    /// A reaper reads which leases have expired, and ends them in a later statement, unchecked.
    ReapInTwoSteps,
    /// A retry of a dead letter counts attempts from 1 again.
    RetryCountsAnew,
    /// A repeated ack is refused, because the lease has ended.
    AckOnlyOnce,
    /// A poll that is repeated after its answer was lost is a new one.
    PollForgets,
    /// An ack is accepted although its commit has failed.
    AckBeforeCommit,
    /// A job that has succeeded waits again.
    SuccessWaits,
    /// A job becomes a dead letter one failure late.
    LateDeadLetter,
    /// An expired lease is not taken from its job.
    ReapKeepsLease,
}

/// The protocol, and how far it is followed.
#[derive(Debug, Clone, Copy)]
pub struct Protocol {
    pub variant: Variant,
    /// Jobs.
    pub jobs: usize,
    /// Attempts of each job that are followed.
    pub attempts: u8,
    /// Failures after which a job is a dead letter.
    pub max_failures: u8,
    /// Ticks of the clock that are followed.
    pub ticks: u8,
    /// Polls that each worker begins.
    pub polls: u8,
    /// Retries of dead letters by a person.
    pub retries: u8,
    /// Whether workers send heartbeats.
    pub heartbeats: bool,
    /// Whether a standby that lags may be promoted, once.
    pub promotes: bool,
}

/// Everything at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct State {
    pub database: Database,
    /// What the standby has; none: there is none any more.
    pub standby: Option<Database>,
    pub workers: [Worker; WORKERS],
    /// What is under way between each worker and each node. What is sent there next replaces it: it
    /// is lost.
    pub wires: [[Option<Message>; NODES]; WORKERS],
    /// What the reaper of [`Variant::ReapInTwoSteps`] has read.
    pub read_by_reaper: Option<usize>,
    pub retries: u8,
    pub event: Option<Event>,
}

/// What the last step did, as far as the properties ask for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Event {
    /// Forbidden: a second lease has an attempt's number.
    AttemptTwice,
    /// Forbidden: an ack ended a lease that was not its own.
    ForeignAck,
    /// Forbidden: an ack was accepted, and is not recorded.
    LostAck,
    /// Forbidden: an ack was refused although it is recorded.
    ForgottenAck,
    /// Forbidden: a lease was reaped before it had expired by the database's clock.
    EarlyReap,
    /// Forbidden: a job was leased that has succeeded.
    LeaseAfterSuccess,
    /// Forbidden: a repeated poll that looked after its first lease did not get it.
    LostLease,
    /// A repeated poll that looked before its first lease got another one.
    SecondLease,
    StaleAck,
    LateAck,
    RepeatedAck,
    RepeatedPoll,
    NodeRelease,
    LateRelease,
    Reaped,
}

/// What is under way. Answers other than a lease arrive at once or are lost: a worker that waits
/// for one asks again, which changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Message {
    /// Asks for a job. The number is the same when it is repeated.
    Poll(u8),
    /// A node has looked for an earlier lease of this poll, and will claim. Whether there was one
    /// is known to the properties alone.
    Claim(u8, bool),
    Ack(usize, Fence, Outcome),
    Heartbeat(usize, Fence),
    /// The answer to the poll of this number.
    Leased(u8, usize, Fence),
}

impl State {
    /// The same for all states that differ by the order of workers or nodes alone.
    #[must_use]
    pub fn representative(&self) -> Self {
        let by_workers = [self.clone(), self.with_workers_swapped()];
        let all = by_workers.into_iter().flat_map(|it| [it.with_nodes_swapped(), it]);
        all.min().unwrap_or_else(|| self.clone())
    }

    fn with_workers_swapped(&self) -> Self {
        let mut swapped = self.clone();
        swapped.workers.reverse();
        swapped.wires.reverse();
        let standby = swapped.standby.iter_mut();
        for database in standby.chain([&mut swapped.database]) {
            let leases = database.jobs.iter_mut().filter_map(|it| it.lease.as_mut());
            leases.for_each(|it| it.poll.0 = WORKERS - 1 - it.poll.0);
        }
        swapped
    }

    fn with_nodes_swapped(&self) -> Self {
        let mut swapped = self.clone();
        swapped.wires.iter_mut().for_each(|it| it.reverse());
        swapped
    }
}

impl Protocol {
    /// One job, exhaustively.
    #[must_use]
    pub const fn one_job() -> Self {
        Self {
            variant: Variant::Correct,
            jobs: 1,
            attempts: 3,
            max_failures: 2,
            ticks: 2,
            polls: 2,
            retries: 1,
            heartbeats: true,
            promotes: false,
        }
    }

    /// The same with two attempts, one poll of each worker, and no retry by a person.
    #[must_use]
    pub const fn one_job_quickly() -> Self {
        Self { attempts: 2, polls: 1, retries: 0, ..Self::one_job() }
    }

    /// One job, while a standby takes over that lacks the last statements.
    #[must_use]
    pub const fn promotion() -> Self {
        Self {
            attempts: 2,
            ticks: 1,
            polls: 1,
            retries: 0,
            heartbeats: false,
            promotes: true,
            ..Self::one_job()
        }
    }

    /// The same with one attempt, and a dead letter after one failure.
    #[must_use]
    pub const fn promotion_quickly() -> Self {
        Self { attempts: 1, max_failures: 1, ..Self::promotion() }
    }

    /// Two jobs, followed less far.
    #[must_use]
    pub const fn two_jobs() -> Self {
        Self { jobs: 2, attempts: 2, polls: 1, retries: 0, heartbeats: false, ..Self::one_job() }
    }

    /// The same with one attempt, less time, and a dead letter after one failure.
    #[must_use]
    pub const fn two_jobs_quickly() -> Self {
        Self { attempts: 1, ticks: 1, max_failures: 1, ..Self::two_jobs() }
    }

    /// What a broken variant needs to show itself.
    #[must_use]
    pub fn broken(variant: Variant) -> Self {
        Self {
            variant,
            jobs: if variant == Variant::PollForgets { 2 } else { 1 },
            promotes: variant == Variant::AckByAttempt,
            ..Self::one_job()
        }
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let database = Database::new(self.jobs, self.max_failures);
        vec![State {
            standby: self.promotes.then(|| database.clone()),
            database,
            workers: [Worker::Idle { polls: 0 }; WORKERS],
            wires: [[None; NODES]; WORKERS],
            read_by_reaper: None,
            retries: 0,
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
        let mut all = always();
        all.extend(sometimes());
        if self.jobs > 1 {
            all.push(Property::sometimes("a poll gets two leases", |_, it: &State| {
                it.event == Some(Event::SecondLease)
            }));
        }
        // One worker is left with a lease that has ended, and the other gets the next attempt; or
        // both get the same one, on both sides of a promotion.
        if self.attempts > 1 || self.promotes {
            all.push(Property::sometimes("two workers believe in one job", |_, it: &State| {
                let mut jobs = it.workers.iter().filter_map(Worker::job);
                jobs.next().is_some_and(|first| jobs.any(|it| it == first))
            }));
        }
        all
    }
}

/// What must hold at every moment.
fn always() -> Vec<Property<Protocol>> {
    fn is_free_of(state: &State, event: Event) -> bool {
        state.event != Some(event)
    }
    vec![
        Property::always("an attempt has one lease", |_, it: &State| {
            is_free_of(it, Event::AttemptTwice)
        }),
        Property::always("an ack ends its own lease alone", |_, it: &State| {
            is_free_of(it, Event::ForeignAck)
        }),
        Property::always("an accepted ack is recorded", |_, it: &State| {
            is_free_of(it, Event::LostAck)
        }),
        Property::always("a repeated ack gets the same answer", |_, it: &State| {
            is_free_of(it, Event::ForgottenAck)
        }),
        Property::always("no lease is reaped early", |_, it: &State| {
            is_free_of(it, Event::EarlyReap)
        }),
        Property::always("what succeeded is not leased again", |_, it: &State| {
            is_free_of(it, Event::LeaseAfterSuccess)
        }),
        Property::always("a poll gets its earlier lease", |_, it: &State| {
            is_free_of(it, Event::LostLease)
        }),
        Property::always("failures are within their bound", |_, it: &State| {
            it.database.jobs.iter().all(|it| it.failures <= it.max_failures)
        }),
        Property::always("a job is leased or it is not", |_, it: &State| {
            let is_whole = |it: &Job| it.lease.is_some() == (it.state == JobState::Processing);
            it.database.jobs.iter().all(is_whole)
        }),
    ]
}

/// What must happen in some order of events, or the model is too small to say anything.
fn sometimes() -> Vec<Property<Protocol>> {
    fn is(state: &State, event: Event) -> bool {
        state.event == Some(event)
    }
    vec![
        Property::sometimes("a job succeeds", |_, it: &State| {
            it.database.jobs.iter().any(|it| it.state == JobState::Succeeded)
        }),
        Property::sometimes("a job is a dead letter", |_, it: &State| {
            it.database.jobs.iter().any(|it| it.state == JobState::DeadLetter)
        }),
        Property::sometimes("a stale ack is refused", |_, it: &State| is(it, Event::StaleAck)),
        Property::sometimes("a late ack is accepted", |_, it: &State| is(it, Event::LateAck)),
        Property::sometimes("an ack is repeated", |_, it: &State| is(it, Event::RepeatedAck)),
        Property::sometimes("a poll is repeated", |_, it: &State| is(it, Event::RepeatedPoll)),
        Property::sometimes("a lease is released", |_, it: &State| is(it, Event::NodeRelease)),
        Property::sometimes("a lease is released too late", |_, it: &State| {
            is(it, Event::LateRelease)
        }),
        Property::sometimes("a lease is reaped", |_, it: &State| is(it, Event::Reaped)),
    ]
}
