//! Which new jobs may run at once if their group has no other.
//!
//! To see that, the statement looks for jobs of the group, and locks it. What it reads grows with
//! the jobs of the group that have ended while a snapshot is held, and projects share the
//! statement. So jobs of a group that is used often wait for admission instead.

use std::{
    collections::{HashMap, HashSet},
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use fencepost_domain::ids::ProjectId;
use fencepost_store::jobs::enqueue::NewJob;

/// Groups that one statement may lock: PostgreSQL has few thousand locks for everybody.
const MAX_LOCKED_GROUPS: usize = 50;
/// Groups of one project that one statement may lock.
const MAX_LOCKED_GROUPS_OF_PROJECT: usize = 25;
/// Jobs of a group within [`PERIOD`] that may run at once.
const MAX_ALONE: u8 = 60;
/// Time after which counting begins again.
const PERIOD: Duration = Duration::from_secs(60);
/// Groups are counted by their hashes: those that share one share its number.
const COUNTERS: usize = 65_536;

/// Counts how often each group was looked at within the last minute.
pub struct Alone(Mutex<Counted>);

struct Counted {
    since: Instant,
    counts: Box<[u8]>,
}

impl Default for Alone {
    fn default() -> Self {
        let counts = vec![0; COUNTERS].into_boxed_slice();
        Self(Mutex::new(Counted { since: Instant::now(), counts }))
    }
}

impl Alone {
    /// One entry for each job, or none at all if none has a group: true for the first of its group
    /// here, within the bounds.
    pub fn choose(&self, jobs: &[&NewJob]) -> Vec<bool> {
        if !jobs.iter().any(|job| group_of(job).is_some()) {
            return Vec::new();
        }
        let mut seen = HashSet::new();
        let mut of_project: HashMap<ProjectId, usize> = HashMap::new();
        let mut counted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if counted.since.elapsed() > PERIOD {
            counted.counts.fill(0);
            counted.since = Instant::now();
        }
        let alone = jobs.iter().map(|job| {
            let Some(group) = group_of(job) else { return false };
            let own = of_project.entry(job.project_id).or_default();
            if seen.len() == MAX_LOCKED_GROUPS || *own == MAX_LOCKED_GROUPS_OF_PROJECT {
                return false;
            }
            let key = (job.project_id, job.queue.as_str(), group);
            let counter = counter_of(&key);
            if counted.counts[counter] == MAX_ALONE || !seen.insert(key) {
                return false;
            }
            counted.counts[counter] += 1;
            *own += 1;
            true
        });
        alone.collect()
    }
}

fn group_of(job: &NewJob) -> Option<&str> {
    job.extras.as_ref()?.group.as_deref()
}

/// The counter of a project's group of a queue.
fn counter_of(key: &(ProjectId, &str, &str)) -> usize {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    usize::try_from(hasher.finish() % COUNTERS as u64).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use fencepost_store::jobs::enqueue::{Extras, Start};

    use super::*;

    fn job(project: i32, group: Option<&str>) -> NewJob {
        let extras = group.map(|it| Extras { group: Some(it.to_owned()), ..Extras::default() });
        NewJob {
            project_id: ProjectId(project),
            id: fencepost_domain::ids::JobId(uuid::Uuid::nil()),
            queue: "q".to_owned(),
            job_type: "t".to_owned(),
            rank: 0,
            start: Start::After(0),
            max_attempts: None,
            timeout_seconds: 60,
            payload: "null".to_owned(),
            retry: None,
            tags: None,
            extras: extras.map(Box::new),
        }
    }

    fn chosen(alone: &Alone, jobs: &[NewJob]) -> Vec<bool> {
        alone.choose(&jobs.iter().collect::<Vec<_>>())
    }

    #[test]
    fn the_first_of_each_group_is_alone() {
        let alone = Alone::default();
        assert!(chosen(&alone, &[job(1, None), job(2, None)]).is_empty());
        let jobs = [job(1, Some("a")), job(1, None), job(1, Some("a")), job(2, Some("a"))];
        assert_eq!(chosen(&alone, &jobs), [true, false, false, true]);
    }

    #[test]
    fn a_project_has_its_part_and_a_group_its_number() {
        let alone = Alone::default();
        let many: Vec<_> = (0..80).map(|it| job(1 + it / 40, Some(&it.to_string()))).collect();
        let of = |chosen: &[bool]| chosen.iter().filter(|it| **it).count();
        let first = chosen(&alone, &many);
        assert_eq!((of(&first[..40]), of(&first[40..])), (25, 25));
        let hot: Vec<_> = (0..80).flat_map(|_| chosen(&alone, &[job(9, Some("hot"))])).collect();
        assert_eq!(of(&hot), usize::from(MAX_ALONE));
    }
}
