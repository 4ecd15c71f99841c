//! Exact delivery: each job that was stored is acknowledged once, and none is lost.

use std::collections::HashSet;

use anyhow::ensure;

use super::{
    bulk,
    client::{self, Client, Job, Target},
};

/// Jobs of one poll while the rest of a queue is worked off.
const CAPACITY: usize = 50;
/// The wait of each of these polls: the next job of a group may start some milliseconds later.
const WAIT_SECONDS: u64 = 1;
/// Empty polls after which a queue is empty: a job whose answer was lost comes back later.
const EMPTY_POLLS: usize = 2;
/// The worker that works off the rest.
const WORKER: usize = 1_000_000;

/// What one run has stored and acknowledged in its queue.
#[derive(Debug, Default)]
pub struct Ledger {
    /// Jobs whose storing was confirmed.
    pub stored: u64,
    /// Jobs whose ack was confirmed.
    pub acked: Vec<String>,
}

impl Ledger {
    /// Notes the ack of a polled job.
    pub fn ack(&mut self, job: &Job) {
        self.acked.push(job.id.clone());
    }

    /// Adds what another connection has done.
    pub fn add(&mut self, other: Self) {
        self.stored += other.stored;
        self.acked.extend(other.acked);
    }

    /// Works off what is left in the queue, then compares.
    ///
    /// # Errors
    /// When a job was acknowledged twice, or is missing.
    pub async fn check(mut self, target: &Target, queue: &str) -> anyhow::Result<()> {
        let mut client = Client::connect(target).await?;
        let mut empty_polls = 0;
        while empty_polls < EMPTY_POLLS {
            let jobs = client.poll(queue, WORKER, CAPACITY, WAIT_SECONDS).await?;
            if jobs.is_empty() {
                empty_polls += 1;
                continue;
            }
            let acks: Vec<_> = jobs.iter().map(|it| client::ack(it, WORKER)).collect();
            let body = format!(r#"{{"acks":[{}]}}"#, acks.join(","));
            let answer = client.post("/v1/workers/ack/batch", body).await?;
            bulk::check_statuses(&answer, 200)?;
            jobs.iter().for_each(|it| self.ack(it));
        }
        self.compare()
    }

    fn compare(&self) -> anyhow::Result<()> {
        let distinct: HashSet<_> = self.acked.iter().collect();
        let (stored, acked) = (self.stored, self.acked.len() as u64);
        ensure!(distinct.len() as u64 == acked, "a job was acknowledged twice");
        ensure!(stored == acked, "{stored} jobs were stored, but {acked} acknowledged");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger(stored: u64, acked: &[&str]) -> Ledger {
        Ledger { stored, acked: acked.iter().map(|it| (*it).to_owned()).collect() }
    }

    #[test]
    fn a_lost_or_doubled_job_fails_the_run() {
        assert!(ledger(2, &["a", "b"]).compare().is_ok());
        assert!(ledger(3, &["a", "b"]).compare().is_err());
        assert!(ledger(2, &["a", "a"]).compare().is_err());
        assert!(ledger(1, &["a", "b"]).compare().is_err());
    }
}
