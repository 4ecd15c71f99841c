//! What can happen next, and what follows from it.

use super::{
    Event, JobState, Message, NODES, Protocol, SKEW_TICKS, State, Variant, WORKERS,
    database::{Fence, Job, Outcome},
};

/// A worker, as it sees itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Worker {
    /// Has begun this many polls.
    Idle { polls: u8 },
    /// Waits for the answer to its latest poll.
    Polling { polls: u8 },
    /// Runs a job.
    Working { polls: u8, job: usize, fence: Fence },
    /// Sends its ack until it is answered.
    Acking { polls: u8, job: usize, fence: Fence, outcome: Outcome },
}

impl Worker {
    const fn polls(self) -> u8 {
        match self {
            Self::Idle { polls }
            | Self::Polling { polls }
            | Self::Working { polls, .. }
            | Self::Acking { polls, .. } => polls,
        }
    }

    /// The job that it believes to hold.
    #[must_use]
    pub const fn job(&self) -> Option<usize> {
        match *self {
            Self::Working { job, .. } | Self::Acking { job, .. } => Some(job),
            _ => None,
        }
    }
}

/// One thing that happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A worker sends a poll to a node, for the first time or again.
    Poll(usize, usize),
    /// A worker sends an ack with this outcome, for the first time or again.
    Ack(usize, usize, Outcome),
    /// A worker sends a heartbeat.
    Heartbeat(usize, usize),
    /// A worker dies, and begins anew.
    Die(usize),
    /// A node runs the statement of a request. Its answer arrives; or it is a lease, and under way.
    /// A poll has two: it looks for its earlier lease, and claims.
    Run(usize, usize),
    /// The same, but the answer is lost.
    RunUnheard(usize, usize),
    /// The same, and the request is under way once more.
    RunTwice(usize, usize),
    /// A lease arrives.
    Arrive(usize, usize),
    /// The same, but the node does not learn of it.
    ArriveUnnoticed(usize, usize),
    /// A node believes that a lease does not arrive, and gives it back.
    Release(usize, usize),
    /// A node reaps an expired lease of a job.
    Reap(usize),
    /// The first and second step of [`Variant::ReapInTwoSteps`].
    ReadExpired(usize),
    ReapRead,
    Tick,
    /// A person retries a dead letter.
    Retry(usize),
    /// The standby catches up, or takes over.
    Replicate,
    Promote,
}

impl Protocol {
    pub(super) fn possible(&self, state: &State, steps: &mut Vec<Step>) {
        for worker in 0..WORKERS {
            if !matches!(state.workers[worker], Worker::Idle { .. }) {
                steps.push(Step::Die(worker));
            }
            for node in 0..NODES {
                self.on_wire(state, (worker, node), steps);
            }
        }
        for (place, job) in state.database.jobs.iter().enumerate() {
            self.on_job(state, (place, job), steps);
        }
        if state.read_by_reaper.is_some() {
            steps.push(Step::ReapRead);
        }
        if state.database.now < self.ticks {
            steps.push(Step::Tick);
        }
        if let Some(standby) = &state.standby {
            if *standby != state.database {
                steps.push(Step::Replicate);
            }
            steps.push(Step::Promote);
        }
    }

    /// What a worker may send, and what may become of what is under way.
    fn on_wire(&self, state: &State, (worker, node): (usize, usize), steps: &mut Vec<Step>) {
        match state.wires[worker][node] {
            Some(Message::Poll(_)) => steps.push(Step::Run(worker, node)),
            Some(Message::Claim(..)) => {
                steps.extend([Step::Run, Step::RunTwice].map(|it| it(worker, node)));
            }
            Some(Message::Ack(..) | Message::Heartbeat(..)) => {
                let all = [Step::Run, Step::RunUnheard, Step::RunTwice];
                steps.extend(all.map(|it| it(worker, node)));
            }
            Some(Message::Leased(..)) => {
                let all = [Step::Arrive, Step::ArriveUnnoticed, Step::Release];
                steps.extend(all.map(|it| it(worker, node)));
            }
            None => (),
        }
        match state.workers[worker] {
            Worker::Idle { polls } if polls < self.polls => steps.push(Step::Poll(worker, node)),
            Worker::Idle { .. } => (),
            Worker::Polling { .. } => steps.push(Step::Poll(worker, node)),
            Worker::Working { .. } => {
                if self.heartbeats {
                    steps.push(Step::Heartbeat(worker, node));
                }
                let outcomes = [Outcome::Succeeded, Outcome::Failed];
                steps.extend(outcomes.map(|it| Step::Ack(worker, node, it)));
            }
            Worker::Acking { outcome, .. } => steps.push(Step::Ack(worker, node, outcome)),
        }
    }

    fn on_job(&self, state: &State, (place, job): (usize, &Job), steps: &mut Vec<Step>) {
        let ahead = if self.variant == Variant::ReapByNodeClock { SKEW_TICKS } else { 0 };
        if job.lease.is_some_and(|it| it.expires_at <= state.database.now + ahead) {
            steps.push(match self.variant {
                Variant::ReapInTwoSteps => Step::ReadExpired(place),
                _ => Step::Reap(place),
            });
        }
        if job.state == JobState::DeadLetter && state.retries < self.retries {
            steps.push(Step::Retry(place));
        }
    }

    pub(super) fn take(&self, state: &mut State, step: Step) {
        match step {
            Step::Poll(worker, node) => {
                let polls = match state.workers[worker] {
                    Worker::Idle { polls } => polls + 1,
                    other => other.polls(),
                };
                state.workers[worker] = Worker::Polling { polls };
                state.wires[worker][node] = Some(Message::Poll(polls));
            }
            Step::Ack(worker, node, outcome) => {
                if let Worker::Working { polls, job, fence } = state.workers[worker] {
                    state.workers[worker] = Worker::Acking { polls, job, fence, outcome };
                }
                if let Worker::Acking { job, fence, outcome, .. } = state.workers[worker] {
                    state.wires[worker][node] = Some(Message::Ack(job, fence, outcome));
                }
            }
            Step::Heartbeat(worker, node) => {
                if let Worker::Working { job, fence, .. } = state.workers[worker] {
                    state.wires[worker][node] = Some(Message::Heartbeat(job, fence));
                }
            }
            Step::Die(worker) => {
                state.workers[worker] = Worker::Idle { polls: state.workers[worker].polls() };
            }
            Step::Run(worker, node) => self.run_and_answer(state, (worker, node)),
            Step::RunUnheard(worker, node) => {
                let request = state.wires[worker][node].take();
                self.run(state, worker, request);
            }
            Step::RunTwice(worker, node) => {
                self.run(state, worker, state.wires[worker][node]);
            }
            Step::Arrive(worker, node) => {
                arrive(state, (worker, node));
                state.wires[worker][node] = None;
            }
            Step::ArriveUnnoticed(worker, node) => arrive(state, (worker, node)),
            Step::Release(worker, node) => release(state, (worker, node)),
            Step::Reap(place) => self.reap(state, place),
            Step::ReadExpired(place) => state.read_by_reaper = Some(place),
            Step::ReapRead => {
                if let Some(place) = state.read_by_reaper.take() {
                    self.reap(state, place);
                }
            }
            Step::Tick => state.database.now += 1,
            Step::Retry(place) => {
                state.retries += 1;
                let job = &mut state.database.jobs[place];
                job.retry();
                if self.variant == Variant::RetryCountsAnew {
                    job.attempt = 0;
                }
            }
            Step::Replicate => {
                state.standby = state.standby.as_ref().map(|_| state.database.clone());
            }
            Step::Promote => promote(state),
        }
    }

    /// Runs the statement of a request. What follows is under way, or its worker hears it.
    fn run_and_answer(&self, state: &mut State, (worker, node): (usize, usize)) {
        let request = state.wires[worker][node].take();
        let Some(answer) = self.run(state, worker, request) else { return };
        match answer {
            Answer::Leased(..) | Answer::NotYet(..) => {
                state.wires[worker][node] = answer.on_wire();
            }
            _ => hear(&mut state.workers[worker], answer),
        }
    }

    /// Runs the statement of a request, and returns its answer.
    fn run(&self, state: &mut State, worker: usize, request: Option<Message>) -> Option<Answer> {
        match request? {
            Message::Poll(poll) => Some(self.look(state, worker, poll)),
            Message::Claim(poll, had_lease) => Some(self.claim(state, worker, (poll, had_lease))),
            Message::Ack(job, fence, outcome) => Some(self.ack(state, job, fence, outcome)),
            Message::Heartbeat(place, fence) => {
                let now = state.database.now;
                let expires_at = now + super::LEASE_TICKS;
                let lease = state.database.jobs[place].lease.as_mut();
                let lease = lease.filter(|it| it.fence == fence && it.expires_at > now);
                let is_held = lease.is_some();
                lease.into_iter().for_each(|it| it.expires_at = expires_at);
                (!is_held).then_some(Answer::Gone(fence))
            }
            Message::Leased(..) => None,
        }
    }

    /// Looks for what an earlier try of this poll has leased.
    fn look(&self, state: &mut State, worker: usize, number: u8) -> Answer {
        let poll = (worker, number);
        let found = match self.variant {
            Variant::PollForgets => None,
            _ => state.database.leased_by(poll),
        };
        let Some((place, fence)) = found else {
            return Answer::NotYet(number, state.database.has_lease_of(poll));
        };
        state.event = Some(Event::RepeatedPoll);
        Answer::Leased(number, place, fence)
    }

    /// `had_lease`: there was one when the node looked.
    fn claim(&self, state: &mut State, worker: usize, (number, had_lease): (u8, bool)) -> Answer {
        let poll = (worker, number);
        let is_second = state.database.has_lease_of(poll);
        let Some((place, fence)) = state.database.claim(poll, self.attempts) else {
            return Answer::Empty(number);
        };
        let book = &state.database.jobs[place].book;
        if book.iter().any(|it| it.0.attempt == fence.attempt) {
            state.event = Some(Event::AttemptTwice);
        } else if book.iter().any(|it| it.1 == Outcome::Succeeded) {
            state.event = Some(Event::LeaseAfterSuccess);
        } else if had_lease {
            state.event = Some(Event::LostLease);
        } else if is_second {
            state.event = Some(Event::SecondLease);
        }
        Answer::Leased(number, place, fence)
    }

    fn ack(&self, state: &mut State, place: usize, fence: Fence, outcome: Outcome) -> Answer {
        let now = state.database.now;
        let job = &mut state.database.jobs[place];
        let is_fit = |of: Fence| match self.variant {
            Variant::AckByJob => true,
            Variant::AckByAttempt => of.attempt == fence.attempt,
            _ => of == fence,
        };
        let recorded = job.book_of(fence);
        if let Some(lease) = job.lease.filter(|it| is_fit(it.fence)) {
            if self.variant != Variant::AckBeforeCommit {
                job.end(outcome);
            }
            self.spoil(job);
            state.event = match job.book_of(fence) {
                _ if lease.fence != fence => Some(Event::ForeignAck),
                Some(it) if it == outcome => (lease.expires_at <= now).then_some(Event::LateAck),
                _ => Some(Event::LostAck),
            };
        } else if recorded == Some(outcome) && self.variant != Variant::AckOnlyOnce {
            state.event = Some(Event::RepeatedAck);
        } else {
            let is_recorded = recorded == Some(outcome);
            let event = if is_recorded { Event::ForgottenAck } else { Event::StaleAck };
            state.event = Some(event);
            return Answer::Refused(fence);
        }
        Answer::Accepted(fence)
    }

    /// What a broken statement does to a job whose attempt has ended.
    fn spoil(&self, job: &mut Job) {
        let is_spoilt = match self.variant {
            Variant::SuccessWaits => job.state == JobState::Succeeded,
            Variant::LateDeadLetter => job.failures == job.max_failures,
            _ => false,
        };
        if is_spoilt {
            job.state = JobState::Pending;
        }
    }

    fn reap(&self, state: &mut State, place: usize) {
        let now = state.database.now;
        let job = &mut state.database.jobs[place];
        let Some(lease) = job.lease else { return };
        let is_early = now < lease.expires_at;
        job.end(Outcome::Expired);
        self.spoil(job);
        if self.variant == Variant::ReapKeepsLease {
            job.lease = Some(lease);
        }
        state.event = Some(if is_early { Event::EarlyReap } else { Event::Reaped });
    }
}

/// What a node answers. It names what it answers, as a connection does.
#[derive(Debug, Clone, Copy)]
enum Answer {
    Leased(u8, usize, Fence),
    /// To a look: the node claims next.
    NotYet(u8, bool),
    Empty(u8),
    Accepted(Fence),
    Refused(Fence),
    /// To a heartbeat: the lease has ended.
    Gone(Fence),
}

impl Answer {
    const fn on_wire(self) -> Option<Message> {
        match self {
            Self::Leased(poll, job, fence) => Some(Message::Leased(poll, job, fence)),
            Self::NotYet(poll, had_lease) => Some(Message::Claim(poll, had_lease)),
            _ => None,
        }
    }
}

/// A worker hears an answer to what it waits for, and ignores any other.
fn hear(worker: &mut Worker, answer: Answer) {
    let polls = worker.polls();
    *worker = match (*worker, answer) {
        (Worker::Polling { .. }, Answer::Leased(poll, job, fence)) if poll == polls => {
            Worker::Working { polls, job, fence }
        }
        (Worker::Polling { .. }, Answer::Empty(poll)) if poll == polls => Worker::Idle { polls },
        (Worker::Acking { fence: own, .. }, Answer::Accepted(fence) | Answer::Refused(fence))
            if own == fence =>
        {
            Worker::Idle { polls }
        }
        (Worker::Working { fence: own, .. }, Answer::Gone(fence)) if own == fence => {
            Worker::Idle { polls }
        }
        (same, _) => same,
    };
}

fn arrive(state: &mut State, (worker, node): (usize, usize)) {
    if let Some(Message::Leased(poll, job, fence)) = state.wires[worker][node] {
        hear(&mut state.workers[worker], Answer::Leased(poll, job, fence));
    }
}

fn release(state: &mut State, (worker, node): (usize, usize)) {
    let Some(Message::Leased(_, place, fence)) = state.wires[worker][node].take() else { return };
    let job = &mut state.database.jobs[place];
    if job.lease.is_some_and(|it| it.fence == fence) {
        job.end(Outcome::Released);
        state.event = Some(Event::NodeRelease);
    } else {
        state.event = Some(Event::LateRelease);
    }
}

/// What the standby does not have is lost, but for ids: they are random.
fn promote(state: &mut State) {
    let Some(standby) = state.standby.take() else { return };
    let next_lease = state.database.next_lease;
    state.database = standby;
    state.database.next_lease = next_lease;
}
