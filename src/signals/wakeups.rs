//! Hints that wake the pump and the loops. They are never the truth: a lost hint costs up to one
//! fallback query (about two seconds), never a job.

pub mod backlog_waits;
pub mod interest;
pub mod keyed;

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering},
};

use chrono::{DateTime, Utc};
use fencepost_domain::ids::ProjectId;
use tokio::sync::{Notify, mpsc};

use self::interest::Interest;

/// Hints that may wait for the pump; beyond that it claims everywhere.
const MAX_WAITING_HINTS: usize = 4_096;

/// A job that has become claimable by a committed transaction.
#[derive(Debug, Clone)]
pub struct Arrival {
    pub project_id: ProjectId,
    pub queue: Arc<str>,
    pub job_type: Arc<str>,
    /// Its position in the claim order.
    pub rank: i16,
    /// Its position in the claim order, after the rank.
    pub run_at: DateTime<Utc>,
    /// Whether it has a constraint key.
    pub is_constrained: bool,
}

/// The sending side, shared by all code whose commits make jobs claimable or due.
#[derive(Debug, Clone)]
pub struct Wake {
    hints: mpsc::Sender<Hint>,
    overflow: Arc<AtomicBool>,
    chores: Arc<[Notify; BACKGROUND_TASKS]>,
    others: Arc<OnceLock<Others>>,
    /// Which hints of other nodes are wanted.
    pub interest: Interest,
}

/// The hints for other nodes.
#[derive(Debug)]
struct Others {
    hints: mpsc::Sender<Hint>,
    overflow: Arc<AtomicBool>,
}

/// Background loops that can be woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackgroundTask {
    /// A lease ends sooner than the reaper looks again.
    Reap,
    /// A job has a new due time.
    Promote,
    Cascade,
    /// A large family is retried.
    Revive,
    /// Waiting jobs are past their `expires_at`.
    Expire,
    /// An operation's next step is due.
    MergeCounts,
    /// A schedule's next tick is not planned.
    Operations,
    /// A schedule has a new next tick.
    Plan,
    /// Some schedule's next tick is new.
    Fire,
    /// Events wait for their deliveries.
    Events,
    /// Mails wait to be sent.
    Mails,
    /// Endpoints were changed.
    Endpoints,
    /// Pushes of queues were changed.
    Pushes,
    /// Groups are noted: their next jobs may run.
    Groups,
}

/// Number of background tasks.
const BACKGROUND_TASKS: usize = 14;

/// The pump's side.
#[derive(Debug)]
pub struct Hints {
    receiver: mpsc::Receiver<Hint>,
    overflow: Arc<AtomicBool>,
}

/// A hint for the pump.
#[derive(Debug, Clone)]
pub enum Hint {
    /// Jobs have arrived by a commit of this node.
    Arrived(Vec<Arrival>),
    /// Jobs have arrived by a commit of another node, whose polls could not take all of them.
    ArrivedElsewhere(Vec<Arrival>),
    /// Jobs of these projects that counted against a limit have ended.
    SlotsFreed(Vec<ProjectId>),
    /// The settings of this queue have changed.
    QueueChanged(ProjectId, Arc<str>),
    /// Endpoints or pushes have changed.
    TargetsChanged,
    /// Too many arrivals for single hints: claim everywhere.
    Everywhere,
}

/// A new pair.
#[must_use]
pub fn channel() -> (Wake, Hints) {
    let (sender, receiver) = mpsc::channel(MAX_WAITING_HINTS);
    let overflow = Arc::new(AtomicBool::new(false));
    let wake = Wake {
        hints: sender,
        overflow: Arc::clone(&overflow),
        chores: Arc::new(std::array::from_fn(|_| Notify::new())),
        others: Arc::default(),
        interest: Interest::default(),
    };
    (wake, Hints { receiver, overflow })
}

impl Wake {
    /// Hints that jobs can be claimed. Call it after the commit. The pump notifies other nodes of
    /// those that its polls cannot take.
    pub fn arrived(&self, arrivals: Vec<Arrival>) {
        if arrivals.is_empty() {
            return;
        }
        if let Err(unsent) = self.hints.try_send(Hint::Arrived(arrivals)) {
            self.overflow.store(true, Ordering::Release);
            self.hint_others(unsent.into_inner());
        }
    }

    /// Hints that jobs which counted against a limit have ended. Call it after the commit.
    pub fn slots_freed(&self, mut projects: Vec<ProjectId>) {
        projects.sort();
        projects.dedup();
        if !projects.is_empty() {
            self.hint(Hint::SlotsFreed(projects));
        }
    }

    /// Hints that the settings of a queue have changed.
    pub fn queue_changed(&self, project_id: ProjectId, queue: &str) {
        self.hint(Hint::QueueChanged(project_id, queue.into()));
    }

    /// Hints that endpoints or pushes have changed: the loops that serve them look.
    pub fn targets_changed(&self) {
        self.hint_others(Hint::TargetsChanged);
        self.look_at_targets();
    }

    /// Wakes the loops that serve endpoints and pushes.
    pub fn look_at_targets(&self) {
        self.ask(BackgroundTask::Endpoints);
        self.ask(BackgroundTask::Pushes);
    }

    /// Subscribes to the hints for other nodes. Only the first call subscribes.
    #[must_use]
    pub fn subscribe(&self) -> Hints {
        let (sender, receiver) = mpsc::channel(MAX_WAITING_HINTS);
        let overflow = Arc::new(AtomicBool::new(false));
        let _ = self.others.set(Others { hints: sender, overflow: Arc::clone(&overflow) });
        Hints { receiver, overflow }
    }

    fn hint(&self, hint: Hint) {
        self.hint_others(hint.clone());
        self.hint_here(hint);
    }

    /// Hints the pumps of other nodes.
    pub fn hint_others(&self, hint: Hint) {
        if let Some(others) = self.others.get()
            && others.hints.try_send(hint).is_err()
        {
            others.overflow.store(true, Ordering::Release);
        }
    }

    /// Hints this node's pump alone: the hint came from another node.
    pub fn hint_here(&self, hint: Hint) {
        if self.hints.try_send(hint).is_err() {
            self.overflow.store(true, Ordering::Release);
        }
    }

    /// Wakes a loop. Call it after the commit that made it necessary.
    pub fn ask(&self, chore: BackgroundTask) {
        self.chores[chore as usize].notify_one();
    }

    /// Waits until this task is asked for; an [`Self::ask`] since the last wait counts.
    pub async fn asked(&self, chore: BackgroundTask) {
        self.chores[chore as usize].notified().await;
    }
}

impl Hints {
    /// The next hint; none when every [`Wake`] is gone.
    pub async fn next(&mut self) -> Option<Hint> {
        match self.widened() {
            Some(hint) => Some(hint),
            None => self.receiver.recv().await,
        }
    }

    /// The next hint, if one is waiting.
    pub fn try_next(&mut self) -> Option<Hint> {
        self.widened().or_else(|| self.receiver.try_recv().ok())
    }

    fn widened(&self) -> Option<Hint> {
        self.overflow.swap(false, Ordering::AcqRel).then_some(Hint::Everywhere)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrival() -> Arrival {
        Arrival {
            project_id: ProjectId(1),
            queue: "q".into(),
            job_type: "t".into(),
            rank: 0,
            run_at: DateTime::UNIX_EPOCH,
            is_constrained: false,
        }
    }

    #[tokio::test]
    async fn a_flood_of_arrivals_ends_in_a_look_everywhere() {
        let (wake, mut arrivals) = channel();
        for _ in 0..=MAX_WAITING_HINTS {
            wake.arrived(vec![arrival()]);
        }
        assert!(matches!(arrivals.next().await, Some(Hint::Everywhere)));
        assert!(matches!(arrivals.next().await, Some(Hint::Arrived(_))));
    }

    #[tokio::test]
    async fn what_was_asked_for_before_the_wait_is_not_missed() {
        let (wake, _arrivals) = channel();
        wake.ask(BackgroundTask::Fire);
        wake.asked(BackgroundTask::Fire).await;
    }
}
