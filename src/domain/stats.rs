//! Counters of what happened to jobs.

use super::{histogram::Histogram, job::AttemptOutcome};
use crate::ids::ProjectId;

/// Counters of one job type in one queue.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[allow(missing_docs)] // The names say it; comments stand where they do not.
pub struct Counts {
    pub enqueued: i64,
    pub claimed: i64,
    pub succeeded: i64,
    /// Attempts that their workers reported as failed.
    pub failed: i64,
    /// Attempts that exceeded their timeout.
    pub timed_out: i64,
    /// Attempts whose lease expired without an ack.
    pub lease_expired: i64,
    /// Attempts that were released.
    pub released: i64,
    pub dead_lettered: i64,
    pub cancelled: i64,
    /// Time from when a job could first run to its first lease.
    pub wait: Histogram,
    /// Time from lease to end, of attempts that succeeded or that their workers reported as failed.
    pub run: Histogram,
}

impl Counts {
    /// Adds other counters.
    pub fn merge(&mut self, other: &Self) {
        self.enqueued += other.enqueued;
        self.claimed += other.claimed;
        self.succeeded += other.succeeded;
        self.failed += other.failed;
        self.timed_out += other.timed_out;
        self.lease_expired += other.lease_expired;
        self.released += other.released;
        self.dead_lettered += other.dead_lettered;
        self.cancelled += other.cancelled;
        self.wait.merge(&other.wait);
        self.run.merge(&other.run);
    }

    /// Adds the end of an attempt.
    pub fn end(&mut self, outcome: AttemptOutcome, ran_ms: i64) {
        match outcome {
            AttemptOutcome::Succeeded => self.succeeded += 1,
            AttemptOutcome::Failed => self.failed += 1,
            AttemptOutcome::Timeout => self.timed_out += 1,
            AttemptOutcome::LeaseExpired => self.lease_expired += 1,
            AttemptOutcome::Released => self.released += 1,
            // Counted as `cancelled`, when its job ends.
            AttemptOutcome::Cancelled => (),
        }
        if matches!(outcome, AttemptOutcome::Succeeded | AttemptOutcome::Failed) {
            self.run.add(ran_ms);
        }
    }
}

/// Counters of one queue and type, ready to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counted {
    /// Project of the jobs.
    pub project_id: ProjectId,
    /// Queue of the jobs.
    pub queue: String,
    /// Type of the jobs.
    pub job_type: String,
    /// What happened to them.
    pub counts: Counts,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_workers_ended_says_how_long_work_takes() {
        let mut counts = Counts::default();
        for outcome in [
            AttemptOutcome::Succeeded,
            AttemptOutcome::Failed,
            AttemptOutcome::Timeout,
            AttemptOutcome::LeaseExpired,
            AttemptOutcome::Released,
            AttemptOutcome::Cancelled,
        ] {
            counts.end(outcome, 7);
        }
        assert_eq!(counts.run.count(), 2);
        let Counts { succeeded, failed, timed_out, lease_expired, released, cancelled, .. } =
            counts;
        assert_eq!(
            [succeeded, failed, timed_out, lease_expired, released, cancelled],
            [1, 1, 1, 1, 1, 0]
        );
    }
}
