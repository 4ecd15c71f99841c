//! Caches of the projects that have something rare. The probe adds what is new, and a loop of its
//! own reads all of them now and then: those that have it no more cost a question that is answered
//! with nothing.

use std::{collections::HashSet, sync::RwLock};

use fencepost_domain::ids::ProjectId;

#[derive(Debug, Default)]
pub struct KnownProjects(RwLock<Known>);

#[derive(Debug, Default)]
struct Known {
    projects: HashSet<ProjectId>,
    /// Projects that were added since the last reading of all began, which may have missed them.
    added: HashSet<ProjectId>,
}

impl KnownProjects {
    /// All projects are read from now on.
    pub(super) fn begin_reading(&self) {
        if let Ok(mut known) = self.0.write() {
            known.added.clear();
        }
    }

    /// Replaces the cache, but for what was added meanwhile.
    pub(super) fn learn(&self, mut projects: HashSet<ProjectId>) {
        if let Ok(mut known) = self.0.write() {
            projects.extend(&known.added);
            known.projects = projects;
        }
    }

    /// A project has it from now on.
    pub fn add(&self, project_id: ProjectId) {
        if let Ok(mut known) = self.0.write() {
            known.projects.insert(project_id);
            known.added.insert(project_id);
        }
    }

    /// Whether a project has it.
    pub(super) fn has(&self, project_id: ProjectId) -> bool {
        self.0.read().is_ok_and(|known| known.projects.contains(&project_id))
    }

    /// Whether one of these has it.
    pub(super) fn has_any(&self, mut projects: impl Iterator<Item = ProjectId>) -> bool {
        self.0.read().is_ok_and(|known| {
            !known.projects.is_empty() && projects.any(|it| known.projects.contains(&it))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_added_while_all_are_read_is_kept_and_the_rest_is_forgotten() {
        let known = KnownProjects::default();
        known.add(ProjectId(1));
        known.begin_reading();
        known.add(ProjectId(2));
        known.learn(HashSet::from([ProjectId(3)]));
        let has = |known: &KnownProjects| [1, 2, 3].map(|it| known.has(ProjectId(it)));
        assert_eq!(has(&known), [false, true, true]);
        known.begin_reading();
        known.learn(HashSet::new());
        assert_eq!(has(&known), [false; 3]);
    }
}
