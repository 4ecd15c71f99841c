//! Answers to parked polls, and which polls with an id are the newest or were answered lately.

use std::{
    collections::{HashMap, hash_map::Entry},
    time::{Duration, Instant},
};

use fencepost_store::claims::polls::PollKey;
use tokio::sync::{oneshot, watch};

use super::{dispatched::DispatchedJob, lanes::WaiterId};

/// The sender of the answer to a parked poll.
pub(crate) type Answer = oneshot::Sender<Answered>;

/// The answer to a parked poll.
#[derive(Debug)]
pub(crate) enum Answered {
    /// These jobs, or none.
    Jobs(Vec<DispatchedJob>),
    /// The claim for the poll failed.
    Failed,
    /// An earlier poll with its id got jobs, after this one had asked the database for them.
    Repeated,
    /// A later poll with its id takes its place. Both get the same jobs, once this is closed.
    Replaced(watch::Receiver<()>),
}

impl Answered {
    /// An answer without jobs.
    pub const NOTHING: Self = Self::Jobs(Vec::new());

    /// The jobs that it has.
    pub fn into_jobs(self) -> Vec<DispatchedJob> {
        match self {
            Self::Jobs(jobs) => jobs,
            Self::Failed | Self::Repeated | Self::Replaced(_) => Vec::new(),
        }
    }
}

/// The newest poll with each id. It gets the jobs, and earlier ones wait for its answer.
#[derive(Debug, Default)]
pub(super) struct NewestPolls {
    by_id: HashMap<PollKey, Newest>,
}

#[derive(Debug)]
struct Newest {
    waiter: WaiterId,
    /// The earlier ones wait until this is gone; none: there are no earlier ones.
    unanswered: Option<watch::Sender<()>>,
}

impl NewestPolls {
    /// Makes a poll the newest one with its id. Returns the one that it replaces, with what ends
    /// when the newest one is answered.
    pub fn replace(
        &mut self,
        key: PollKey,
        waiter: WaiterId,
    ) -> Option<(WaiterId, watch::Receiver<()>)> {
        match self.by_id.entry(key) {
            Entry::Vacant(entry) => {
                entry.insert(Newest { waiter, unanswered: None });
                None
            }
            Entry::Occupied(mut entry) => {
                let newest = entry.get_mut();
                let unanswered =
                    newest.unanswered.get_or_insert_with(|| watch::channel(()).0).subscribe();
                Some((std::mem::replace(&mut newest.waiter, waiter), unanswered))
            }
        }
    }

    /// A poll is answered. Another may have replaced it.
    pub fn remove(&mut self, key: &PollKey, waiter: WaiterId) {
        if self.by_id.get(key).is_some_and(|it| it.waiter == waiter) {
            self.by_id.remove(key);
        }
    }
}

/// An answer is remembered for this time: longer than a poll needs from its question to the
/// database to the pump.
const KEEP: Duration = Duration::from_secs(5);
/// Answers that are remembered. Without room, a repeat that comes at the same time as its first
/// poll may get other jobs.
const MAX_ANSWERED: usize = 50_000;

/// Times at which polls with an id were last answered with jobs.
#[derive(Debug, Default)]
pub(super) struct RecentAnswers {
    at: HashMap<PollKey, Instant>,
}

impl RecentAnswers {
    /// A poll with this id was answered with jobs.
    pub fn note(&mut self, key: PollKey, now: Instant) {
        if self.at.len() < MAX_ANSWERED || self.at.contains_key(&key) {
            self.at.insert(key, now);
        }
    }

    /// True if a poll with this id may have been answered since a repeat of it asked the database.
    pub fn has_since(&self, key: &PollKey, asked_at: Instant, now: Instant) -> bool {
        now - asked_at >= KEEP || self.at.get(key).is_some_and(|it| *it >= asked_at)
    }

    /// Forgets old answers.
    pub fn prune(&mut self, now: Instant) {
        self.at.retain(|_, it| now - *it < KEEP);
    }
}

#[cfg(test)]
mod tests {
    use fencepost_domain::ids::ProjectId;
    use uuid::Uuid;

    use super::*;

    fn key(worker_id: &str) -> PollKey {
        PollKey { project_id: ProjectId(1), worker_id: worker_id.into(), poll_id: Uuid::nil() }
    }

    #[test]
    fn an_answer_counts_for_repeats_that_asked_before_it() {
        let asked_at = Instant::now();
        let answered_at = asked_at + Duration::from_millis(10);
        let later = answered_at + Duration::from_millis(10);
        let mut answers = RecentAnswers::default();
        assert!(!answers.has_since(&key("w"), asked_at, later));
        answers.note(key("w"), answered_at);
        assert!(answers.has_since(&key("w"), asked_at, later));
        assert!(!answers.has_since(&key("w"), later, later), "it has seen the leases");
        assert!(!answers.has_since(&key("other"), asked_at, later));
    }

    #[test]
    fn a_repeat_that_asked_long_ago_asks_again_since_answers_are_forgotten() {
        let asked_at = Instant::now();
        let mut answers = RecentAnswers::default();
        answers.note(key("w"), asked_at);
        answers.prune(asked_at + KEEP);
        assert!(answers.at.is_empty());
        assert!(answers.has_since(&key("w"), asked_at, asked_at + KEEP));
    }
}
