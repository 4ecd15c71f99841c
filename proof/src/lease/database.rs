//! The database: each function is one statement, and so one atomic step.

use super::LEASE_TICKS;

/// What an ack shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fence {
    pub attempt: u8,
    /// Unique: a standby that is promoted makes no lease with the id of one that was lost.
    pub lease: u8,
}

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Outcome {
    Succeeded,
    Failed,
    Expired,
    Released,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum JobState {
    Pending,
    Processing,
    Succeeded,
    DeadLetter,
}

/// A lease of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lease {
    pub fence: Fence,
    /// The worker and its poll, by which a repeated poll is known.
    pub poll: (usize, u8),
    pub expires_at: u8,
}

/// A job, with the book of its attempts.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Job {
    pub state: JobState,
    pub attempt: u8,
    pub failures: u8,
    /// Failures after which it is a dead letter.
    pub max_failures: u8,
    pub lease: Option<Lease>,
    /// How each attempt ended, in order.
    pub book: Vec<(Fence, Outcome)>,
}

impl Job {
    /// How the attempt of this lease ended.
    #[must_use]
    pub fn book_of(&self, fence: Fence) -> Option<Outcome> {
        self.book.iter().find(|it| it.0 == fence).map(|it| it.1)
    }

    /// Ends the attempt that runs.
    pub(super) fn end(&mut self, outcome: Outcome) {
        let Some(lease) = self.lease.take() else { return };
        self.book.push((lease.fence, outcome));
        if matches!(outcome, Outcome::Failed | Outcome::Expired) {
            self.failures += 1;
        }
        self.state = match outcome {
            Outcome::Succeeded => JobState::Succeeded,
            Outcome::Failed | Outcome::Expired if self.failures >= self.max_failures => {
                JobState::DeadLetter
            }
            _ => JobState::Pending,
        };
    }

    /// The job of a dead letter waits again.
    pub(super) fn retry(&mut self) {
        (self.state, self.failures) = (JobState::Pending, 0);
    }
}

/// All jobs, and the clock by which leases end.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Database {
    pub jobs: Vec<Job>,
    pub now: u8,
    /// Makes ids of leases.
    pub next_lease: u8,
}

impl Database {
    pub(super) fn new(jobs: usize, max_failures: u8) -> Self {
        let job = Job {
            state: JobState::Pending,
            attempt: 0,
            failures: 0,
            max_failures,
            lease: None,
            book: Vec::new(),
        };
        Self { jobs: vec![job; jobs], now: 0, next_lease: 0 }
    }

    /// Leases the first job that waits.
    pub(super) fn claim(&mut self, poll: (usize, u8), max_attempts: u8) -> Option<(usize, Fence)> {
        let (now, lease) = (self.now, self.next_lease);
        let is_ready = |it: &Job| it.state == JobState::Pending && it.attempt < max_attempts;
        let place = self.jobs.iter().position(is_ready)?;
        let job = &mut self.jobs[place];
        job.attempt += 1;
        job.state = JobState::Processing;
        let fence = Fence { attempt: job.attempt, lease };
        job.lease = Some(Lease { fence, poll, expires_at: now + LEASE_TICKS });
        self.next_lease += 1;
        Some((place, fence))
    }

    /// Whether a job has a lease of this poll that still runs.
    pub(super) fn has_lease_of(&self, poll: (usize, u8)) -> bool {
        self.leased_by(poll).is_some()
    }

    /// What an earlier try of this poll has leased, if it still runs.
    pub(super) fn leased_by(&self, poll: (usize, u8)) -> Option<(usize, Fence)> {
        let runs = |it: &Lease| it.poll == poll && it.expires_at > self.now;
        let of = |it: &Job| Some(it.lease.filter(runs)?.fence);
        self.jobs.iter().enumerate().find_map(|(place, it)| Some((place, of(it)?)))
    }
}
