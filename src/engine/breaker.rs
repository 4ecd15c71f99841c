//! Which projects have queues with a brake, as this node knows: only their successes are looked at for rows
//! of dead letters that they end. A glance brings it up to date.

use std::{collections::HashSet, sync::RwLock};

use crate::ids::ProjectId;

#[derive(Debug, Default)]
pub struct Breakers(RwLock<HashSet<ProjectId>>);

impl Breakers {
    /// What the store says.
    pub(super) fn learn(&self, projects: HashSet<ProjectId>) {
        if let Ok(mut known) = self.0.write() {
            *known = projects;
        }
    }

    /// A queue of this project has got one.
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
