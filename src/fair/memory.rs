//! Memory of a node that projects share.

use std::sync::Arc;

use fencepost_domain::ids::ProjectId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::each::PerProject;

/// Memory for what is under way, which the projects of a node share. The last half is for projects
/// that use at most half of what they may, with what they ask for. Cheap to clone.
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
}
