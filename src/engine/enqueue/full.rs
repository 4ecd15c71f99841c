//! Projects that have stored all bytes of their plan. What asks here does not wait for a count: a
//! project that has stored much is counted soon, and one that is full, until it is not.

use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use fencepost_domain::{error::Error, ids::ProjectId};

/// The age at which the count of a project that has stored much is made again.
const RECOUNT_AFTER: Duration = Duration::from_secs(30);
/// Projects that one pass counts.
const MAX_COUNTED_AT_ONCE: usize = 500;
/// Projects whose counts are remembered.
const MAX_REMEMBERED: usize = 20_000;
/// A project that has stored this many times its bytes polls no more.
pub const MAX_OVERDRAFT: i64 = 2;

/// A project that has stored all of its bytes.
#[derive(Debug, Clone, Copy)]
struct Full {
    /// The bytes of its plan.
    max: i64,
    /// True if it has stored [`MAX_OVERDRAFT`] times as many.
    is_overdrawn: bool,
}

impl Full {
    fn refusal(self) -> Error {
        Error::QuotaExceeded { what: "stored bytes", max: self.max }
    }
}

#[derive(Debug, Default)]
struct Known {
    full: HashMap<ProjectId, Full>,
    to_count: HashSet<ProjectId>,
    counted_at: HashMap<ProjectId, Instant>,
}

/// The full projects that this node knows.
#[derive(Debug, Default)]
pub struct FullProjects(Mutex<Known>);

impl FullProjects {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the project was full when it was last counted.
    pub(crate) fn contains(&self, project_id: ProjectId) -> bool {
        self.lock().full.contains_key(&project_id)
    }

    /// Refuses what is not needed to run jobs, such as a retry by request or a long registration,
    /// if the project was full when it was last counted.
    ///
    /// # Errors
    /// [`Error::QuotaExceeded`].
    pub(crate) fn admit_more(&self, project_id: ProjectId) -> Result<(), Error> {
        let full = self.lock().full.get(&project_id).copied();
        full.map_or(Ok(()), |it| Err(it.refusal()))
    }

    /// Refuses a poll of a project that has stored twice its bytes: what its jobs leave, and what
    /// their ends lead to, is stored also while it is full.
    ///
    /// # Errors
    /// [`Error::QuotaExceeded`].
    pub(crate) fn admit_poll(&self, project_id: ProjectId) -> Result<(), Error> {
        let full = self.lock().full.get(&project_id).copied();
        full.filter(|it| it.is_overdrawn).map_or(Ok(()), |it| Err(it.refusal()))
    }

    /// Notes how many bytes a project has stored, of those of its plan.
    pub(super) fn note(&self, project_id: ProjectId, stored: i64, max: i64) {
        let mut known = self.lock();
        if stored < max {
            known.full.remove(&project_id);
        } else if known.full.len() < MAX_REMEMBERED || known.full.contains_key(&project_id) {
            let is_overdrawn = stored >= max.saturating_mul(MAX_OVERDRAFT);
            known.full.insert(project_id, Full { max, is_overdrawn });
        }
    }

    /// Has projects counted that have stored much, unless that was done lately.
    pub fn note_stored(&self, projects: Vec<ProjectId>) {
        let mut known = self.lock();
        if known.counted_at.len() >= MAX_REMEMBERED {
            known.counted_at.clear();
        }
        for project_id in projects {
            let counted_at = known.counted_at.get(&project_id);
            let is_old = counted_at.is_none_or(|it| it.elapsed() >= RECOUNT_AFTER);
            if is_old && known.to_count.len() < MAX_REMEMBERED {
                known.to_count.insert(project_id);
            }
        }
    }

    /// Has a project counted by the next pass, since this one could not.
    pub(super) fn count_again(&self, project_id: ProjectId) {
        self.lock().to_count.insert(project_id);
    }

    /// Forgets a project without a limit.
    pub(super) fn remove(&self, project_id: ProjectId) {
        self.lock().full.remove(&project_id);
    }

    /// Projects to be counted, also those that are full: the ones whose count is oldest.
    pub(super) fn take_to_count(&self) -> Vec<ProjectId> {
        let mut known = self.lock();
        let Known { full, to_count, counted_at } = &mut *known;
        to_count.extend(full.keys());
        let mut now: Vec<_> = to_count.iter().copied().collect();
        now.sort_by_key(|it| counted_at.get(it).copied());
        now.truncate(MAX_COUNTED_AT_ONCE);
        for project_id in &now {
            to_count.remove(project_id);
            counted_at.insert(*project_id, Instant::now());
        }
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROJECT: ProjectId = ProjectId(1);

    #[test]
    fn a_project_is_full_and_overdrawn_by_its_last_count() {
        let full = FullProjects::default();
        let is = |stored| {
            full.note(PROJECT, stored, 100);
            (
                full.contains(PROJECT),
                full.admit_more(PROJECT).is_err(),
                full.admit_poll(PROJECT).is_err(),
            )
        };
        assert_eq!(is(99), (false, false, false));
        assert_eq!(is(100), (true, true, false));
        assert_eq!(is(200), (true, true, true));
        assert_eq!(is(199), (true, true, false));
        assert_eq!(is(0), (false, false, false));
    }

    #[test]
    fn a_full_project_is_counted_until_it_is_not_and_others_once_in_a_while() {
        let full = FullProjects::default();
        full.note_stored(vec![PROJECT]);
        assert_eq!(full.take_to_count(), [PROJECT]);
        full.note_stored(vec![PROJECT]);
        assert_eq!(full.take_to_count(), [], "it was counted just now");
        full.note(PROJECT, 100, 100);
        assert_eq!(full.take_to_count(), [PROJECT]);
        assert_eq!(full.take_to_count(), [PROJECT]);
        full.note(PROJECT, 99, 100);
        assert_eq!(full.take_to_count(), []);
    }

    #[test]
    fn full_projects_take_turns_to_be_counted() {
        let full = FullProjects::default();
        let projects = (1..).map(ProjectId).take(3 * MAX_COUNTED_AT_ONCE);
        projects.for_each(|it| full.note(it, 100, 100));
        let counted: HashSet<_> = (0..3).flat_map(|_| full.take_to_count()).collect();
        assert_eq!(counted.len(), 3 * MAX_COUNTED_AT_ONCE);
    }
}
