//! Caches of the projects that have something rare. Refreshed by the probe.

use std::{collections::HashSet, sync::RwLock};

use fencepost_domain::ids::ProjectId;

#[derive(Debug, Default)]
pub struct KnownProjects(RwLock<HashSet<ProjectId>>);

impl KnownProjects {
    /// Replaces the cache.
    pub(super) fn learn(&self, projects: HashSet<ProjectId>) {
        if let Ok(mut known) = self.0.write() {
            *known = projects;
        }
    }

    /// A project has it from now on.
    pub fn add(&self, project_id: ProjectId) {
        if let Ok(mut known) = self.0.write() {
            known.insert(project_id);
        }
    }

    /// Whether a project has it.
    pub(super) fn has(&self, project_id: ProjectId) -> bool {
        self.0.read().is_ok_and(|known| known.contains(&project_id))
    }

    /// Whether one of these has it.
    pub(super) fn has_any(&self, mut projects: impl Iterator<Item = ProjectId>) -> bool {
        self.0.read().is_ok_and(|known| {
            !known.is_empty() && projects.any(|project_id| known.contains(&project_id))
        })
    }
}
