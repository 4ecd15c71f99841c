//! What one project may hold of what projects share, such as the connections of a pool.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use fencepost_domain::ids::ProjectId;

/// Those that hold nothing are forgotten when this many are known.
const MAX_KNOWN: usize = 1_000;

/// The same number of permits for each project. Requests for more wait in their order.
pub type PerProject = Each<ProjectId>;

/// The same number of permits for each of many. Requests for more wait in their order.
#[derive(Debug)]
pub struct Each<Key> {
    permits: usize,
    of_key: Mutex<HashMap<Key, Weak<Semaphore>>>,
}

impl<Key: Copy + Eq + Hash> Each<Key> {
    #[must_use]
    pub fn new(permits: usize) -> Self {
        Self { permits, of_key: Mutex::default() }
    }

    /// Waits for this many of its permits; at most all of them.
    pub async fn take(&self, key: Key, permits: u32) -> OwnedSemaphorePermit {
        take(self.of(key), permits).await
    }

    /// How many it holds.
    fn used(&self, key: Key) -> usize {
        self.permits - self.of(key).available_permits()
    }

    /// Waits until it has a free permit.
    pub async fn until_free(&self, key: Key) {
        drop(take(self.of(key), 1).await);
    }

    /// How many of its permits are free.
    pub fn free(&self, key: Key) -> usize {
        self.of(key).available_permits()
    }

    /// This many of its permits, if they are free.
    pub fn try_take(&self, key: Key, permits: u32) -> Option<OwnedSemaphorePermit> {
        self.of(key).try_acquire_many_owned(permits).ok()
    }

    fn of(&self, key: Key) -> Arc<Semaphore> {
        let mut known = self.of_key.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(semaphore) = known.get(&key).and_then(Weak::upgrade) {
            return semaphore;
        }
        if known.len() >= MAX_KNOWN {
            known.retain(|_, it| it.strong_count() > 0);
        }
        let semaphore = Arc::new(Semaphore::new(self.permits));
        known.insert(key, Arc::downgrade(&semaphore));
        semaphore
    }
}

async fn take(from: Arc<Semaphore>, permits: u32) -> OwnedSemaphorePermit {
    from.acquire_many_owned(permits).await.unwrap_or_else(|_| unreachable!("it is never closed"))
}

/// The shares of all projects in one pool: at most half of its connections each, and all together
/// all but one, which is left to what serves all projects. Further requests wait in their order,
/// without a connection.
#[derive(Debug)]
pub(super) struct Shares {
    of_each: PerProject,
    of_all: Arc<Semaphore>,
}

/// The right to hold one connection, as long as it is kept.
#[derive(Debug)]
pub(super) struct Share {
    _of_project: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

impl Shares {
    /// Of a pool with this many connections.
    pub(super) fn of(connections: u32) -> Self {
        let connections = connections as usize;
        let of_all = Arc::new(Semaphore::new(connections.saturating_sub(1).max(1)));
        Self { of_each: PerProject::new((connections / 2).max(1)), of_all }
    }

    /// Waits until the project may take one more connection. The project's own share comes first:
    /// its waiting requests must not use up that of all.
    pub(super) async fn take(&self, project_id: ProjectId) -> Share {
        Share {
            _of_project: self.of_each.take(project_id, 1).await,
            _of_all: take(Arc::clone(&self.of_all), 1).await,
        }
    }
}

/// Memory for what is under way, which the projects of a node share. The last half is for projects
/// that use less than half of what they may. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Memory {
    of_project: Arc<PerProject>,
    project_kib: usize,
    of_node: Arc<Semaphore>,
    node_kib: usize,
}

/// A part of it, until it is dropped.
#[derive(Debug)]
pub struct Room {
    _of_project: OwnedSemaphorePermit,
    _of_node: OwnedSemaphorePermit,
}

impl Memory {
    /// This many KiB, of which one project may use `project_kib`.
    #[must_use]
    pub fn new(project_kib: usize, node_kib: usize) -> Self {
        Self {
            of_project: Arc::new(PerProject::new(project_kib)),
            project_kib,
            of_node: Arc::new(Semaphore::new(node_kib)),
            node_kib,
        }
    }

    /// Room for this many bytes, if there is any. What is larger than all that a project may use
    /// takes all of it.
    #[must_use]
    pub fn try_take(&self, project_id: ProjectId, bytes: u64) -> Option<Room> {
        let kib = self.permits(bytes);
        let of_project = self.of_project.try_take(project_id, kib)?;
        self.of_node(project_id, of_project, kib)
    }

    /// Like [`Self::try_take`], but waits for what other requests of the project use.
    pub async fn take(&self, project_id: ProjectId, bytes: u64) -> Option<Room> {
        let kib = self.permits(bytes);
        let of_project = self.of_project.take(project_id, kib).await;
        self.of_node(project_id, of_project, kib)
    }

    fn of_node(
        &self,
        project_id: ProjectId,
        of_project: OwnedSemaphorePermit,
        kib: u32,
    ) -> Option<Room> {
        let uses_much = self.of_project.used(project_id) > self.project_kib / 2;
        if uses_much && self.of_node.available_permits() < self.node_kib / 2 {
            return None;
        }
        let of_node = Arc::clone(&self.of_node).try_acquire_many_owned(kib).ok()?;
        Some(Room { _of_project: of_project, _of_node: of_node })
    }

    fn permits(&self, bytes: u64) -> u32 {
        let kib = usize::try_from(bytes.div_ceil(1024)).unwrap_or(self.project_kib);
        u32::try_from(kib.min(self.project_kib)).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn a_project_takes_at_most_half_and_leaves_the_rest_to_others() {
        let shares = Shares::of(5);
        let (greedy, other) = (ProjectId(1), ProjectId(2));
        let mut held: Vec<_> = (0..2).filter_map(|_| shares.take(greedy).now_or_never()).collect();
        assert_eq!(held.len(), 2);
        assert!(shares.take(greedy).now_or_never().is_none());
        assert!(shares.take(other).now_or_never().is_some());
        held.pop();
        assert!(shares.take(greedy).now_or_never().is_some());
    }

    #[test]
    fn permits_of_one_project_run_out_for_that_project_only() {
        let per_project = PerProject::new(1_000);
        let take = |id, permits| per_project.take(ProjectId(id), permits).now_or_never();
        let held: Vec<_> = [500, 500].into_iter().filter_map(|it| take(1, it)).collect();
        assert_eq!(held.len(), 2);
        assert!(take(1, 1).is_none() && take(2, 1_000).is_some());
        drop(held);
        assert!(take(1, 1_000).is_some());
    }

    #[test]
    fn all_projects_together_leave_one_connection() {
        let shares = Shares::of(4);
        let take = |id| shares.take(ProjectId(id)).now_or_never();
        let held: Vec<_> = [1, 1, 2].into_iter().filter_map(take).collect();
        assert_eq!(held.len(), 3);
        assert!(take(2).is_none() && take(3).is_none());
        drop(held);
        assert!(take(3).is_some());
    }

    #[test]
    fn the_last_half_of_the_memory_is_for_projects_that_use_little() {
        const MIB: u64 = 1024 * 1024;
        let memory = Memory::new(4 * 1024, 8 * 1024);
        let take = |id, bytes| memory.try_take(ProjectId(id), bytes);
        let mut held = vec![take(1, 3 * MIB), take(2, 2 * MIB)];
        assert!(held.iter().all(Option::is_some));
        assert!(take(1, MIB).is_none() && take(2, MIB).is_none());
        held.extend([take(3, MIB), take(3, MIB)]);
        assert!(held.iter().all(Option::is_some));
        assert!(take(4, 2 * MIB).is_none(), "all but 1 MiB is used");
        let mut waits = Box::pin(memory.take(ProjectId(1), 2 * MIB));
        assert!(waits.as_mut().now_or_never().is_none(), "for the rest of the project");
        held.clear();
        assert!(waits.now_or_never().is_some_and(|it| it.is_some()));
        assert!(take(5, 100 * MIB).is_some(), "as much as a project may use");
    }

    #[test]
    fn projects_that_hold_nothing_are_forgotten() {
        let shares = Shares::of(4);
        let take = || shares.take(ProjectId(0)).now_or_never();
        let kept = [take(), take()];
        assert!(kept.iter().all(Option::is_some));
        for id in 1..=3_000 {
            assert!(shares.take(ProjectId(id)).now_or_never().is_some());
        }
        assert!(shares.of_each.of_key.lock().expect("a lock").len() <= MAX_KNOWN);
        assert!(take().is_none(), "its share is kept");
        drop(kept);
    }
}
