//! Which hints of other nodes this one wants: those of projects whose polls it parks.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::watch;

use fencepost_domain::{ids::ProjectId, limits::MAX_POLL_WAIT_SECONDS};

/// The hints of all projects are spread over this many shards, each with a channel in Redis.
pub const SHARDS: u32 = 256;

/// A shard is wanted for this long after its last poll was parked: longer than a poll waits.
const KEEP: Duration = Duration::from_secs(120);
const _: () = assert!(KEEP.as_secs() > MAX_POLL_WAIT_SECONDS as u64);

/// The shard of a project's hints.
#[must_use]
pub fn shard(project_id: ProjectId) -> u32 {
    project_id.0.unsigned_abs() % SHARDS
}

/// The shards of projects with parked polls. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Interest {
    /// When the last poll was parked.
    parked_at: Arc<Mutex<HashMap<u32, Instant>>>,
    wanted: watch::Sender<BTreeSet<u32>>,
}

impl Interest {
    /// A poll of this project is about to be parked. A shard that is not wanted any more is
    /// forgotten when a new one is.
    pub fn note(&self, project_id: ProjectId) {
        self.note_at(project_id, Instant::now());
    }

    fn note_at(&self, project_id: ProjectId, now: Instant) {
        let mut parked_at = self.parked_at.lock().unwrap_or_else(PoisonError::into_inner);
        if parked_at.insert(shard(project_id), now).is_none() {
            parked_at.retain(|_, it| now.duration_since(*it) < KEEP);
            self.wanted.send_replace(parked_at.keys().copied().collect());
        }
    }

    /// The wanted shards, and each change of them.
    #[must_use]
    pub fn wanted(&self) -> watch::Receiver<BTreeSet<u32>> {
        self.wanted.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_is_wanted_from_its_first_poll_until_a_while_after_its_last() {
        let interest = Interest::default();
        let mut wanted = interest.wanted();
        let start = Instant::now();
        interest.note_at(ProjectId(1), start);
        interest.note_at(ProjectId(2), start);
        assert_eq!(*wanted.borrow_and_update(), BTreeSet::from([1, 2]));
        interest.note_at(ProjectId(2), start + KEEP / 2);
        assert!(!wanted.has_changed().expect("it is open"), "nothing new");
        interest.note_at(ProjectId(3), start + KEEP);
        assert_eq!(*wanted.borrow_and_update(), BTreeSet::from([2, 3]));
    }
}
