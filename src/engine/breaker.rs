//! Cache of the projects that have a circuit breaker on some queue. Only their successes can end a
//! streak of dead letters. Refreshed by the probe.

use std::{collections::HashSet, sync::RwLock};

use crate::ids::ProjectId;

#[derive(Debug, Default)]
pub struct Breakers(RwLock<HashSet<ProjectId>>);

impl Breakers {
    /// Replaces the cache.
    pub(super) fn learn(&self, projects: HashSet<ProjectId>) {
        if let Ok(mut known) = self.0.write() {
            *known = projects;
        }
    }

    /// A queue of this project got a circuit breaker.
    pub fn add(&self, project_id: ProjectId) {
        if let Ok(mut known) = self.0.write() {
            known.insert(project_id);
        }
    }

    /// Whether a project has any.
    pub(super) fn has(&self, project_id: ProjectId) -> bool {
        self.0.read().is_ok_and(|known| known.contains(&project_id))
    }
}
