//! Who should look again, and for what: a hint, never the truth. A hint that is lost costs up to
//! one fallback look (about two seconds), never a job.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering},
};

use chrono::{DateTime, Utc};
use tokio::sync::{Notify, mpsc};

use crate::ids::ProjectId;

/// Hints that may wait for the pump; beyond that it is told to look everywhere.
const MAX_WAITING_HINTS: usize = 4_096;

/// A job that has just become claimable. The commit that made it so is over.
#[derive(Debug, Clone)]
pub struct Arrival {
    pub project_id: ProjectId,
    pub queue: Arc<str>,
    pub job_type: Arc<str>,
    /// Its place in the order of claims.
    pub rank: i16,
    /// Its place in the order of claims, after the rank.
    pub run_at: DateTime<Utc>,
    /// Whether not every worker may have it at any time.
    pub is_gated: bool,
}

/// The sending side, shared by everyone whose commit makes jobs claimable or due.
#[derive(Debug, Clone)]
pub struct Wake {
    hints: mpsc::Sender<Hint>,
    overflow: Arc<AtomicBool>,
    chores: Arc<[Notify; BACKGROUND_TASKS]>,
    others: Arc<OnceLock<Others>>,
}

/// The way to the other nodes.
#[derive(Debug)]
struct Others {
    hints: mpsc::Sender<Hint>,
    overflow: Arc<AtomicBool>,
}

/// What a background loop may be asked to do before its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackgroundTask {
    /// Some job's due time is new.
    Promote,
    Cascade,
    /// Waiting jobs are past their `expires_at`.
    Expire,
    /// Counts have changed that nobody has added up.
    MergeCounts,
    /// An operation's next step is due.
    Operations,
    /// The next tick of a schedule is to be found out.
    Plan,
    /// Some schedule's next tick is new.
    Fire,
}

/// How many kinds of chores there are.
const BACKGROUND_TASKS: usize = 7;

/// The pump's side.
#[derive(Debug)]
pub struct Hints {
    receiver: mpsc::Receiver<Hint>,
    overflow: Arc<AtomicBool>,
}

/// What the pump is told.
#[derive(Debug, Clone)]
pub enum Hint {
    Arrived(Vec<Arrival>),
    /// Jobs of these projects have ended that counted against a limit.
    SlotsFreed(Vec<ProjectId>),
    /// What may be handed out of this queue has changed.
    QueueChanged(ProjectId, Arc<str>),
    /// More arrived than could be told: look everywhere.
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
    };
    (wake, Hints { receiver, overflow })
}

impl Wake {
    /// Tells the pump that jobs can be claimed. Call it after the commit.
    pub fn arrived(&self, arrivals: Vec<Arrival>) {
        if !arrivals.is_empty() {
            self.hint(Hint::Arrived(arrivals));
        }
    }

    /// Tells the pump that jobs have ended that counted against a limit. Call it after the commit.
    pub fn slots_freed(&self, mut projects: Vec<ProjectId>) {
        projects.sort();
        projects.dedup();
        if !projects.is_empty() {
            self.hint(Hint::SlotsFreed(projects));
        }
    }

    /// Tells the pump that what may be handed out of a queue has changed.
    pub fn queue_changed(&self, project_id: ProjectId, queue: &str) {
        self.hint(Hint::QueueChanged(project_id, queue.into()));
    }

    /// From now on what this node's pump is told is told to whoever reads the answer, too. Only the first call
    /// counts.
    #[must_use]
    pub fn subscribe(&self) -> Hints {
        let (sender, receiver) = mpsc::channel(MAX_WAITING_HINTS);
        let overflow = Arc::new(AtomicBool::new(false));
        let _ = self.others.set(Others { hints: sender, overflow: Arc::clone(&overflow) });
        Hints { receiver, overflow }
    }

    fn hint(&self, hint: Hint) {
        if let Some(others) = self.others.get()
            && others.hints.try_send(hint.clone()).is_err()
        {
            others.overflow.store(true, Ordering::Release);
        }
        self.hint_here(hint);
    }

    /// Tells this node's pump alone: another node has told it.
    pub fn hint_here(&self, hint: Hint) {
        if self.hints.try_send(hint).is_err() {
            self.overflow.store(true, Ordering::Release);
        }
    }

    /// Asks for a chore. Call it after the commit that made it necessary.
    pub fn ask(&self, chore: BackgroundTask) {
        self.chores[chore as usize].notify_one();
    }

    /// Waits until a chore is asked for; an [`Self::ask`] since the last wait counts.
    pub async fn asked(&self, chore: BackgroundTask) {
        self.chores[chore as usize].notified().await;
    }
}

impl Hints {
    /// The next hint; none when every [`Wake`] is gone.
    pub async fn next(&mut self) -> Option<Hint> {
        let hint = self.receiver.recv().await?;
        Some(self.widen(hint))
    }

    /// The next hint, if there is one already.
    pub fn try_next(&mut self) -> Option<Hint> {
        let hint = self.receiver.try_recv().ok()?;
        Some(self.widen(hint))
    }

    fn widen(&self, hint: Hint) -> Hint {
        if self.overflow.swap(false, Ordering::AcqRel) {
            return Hint::Everywhere;
        }
        hint
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
            is_gated: false,
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
