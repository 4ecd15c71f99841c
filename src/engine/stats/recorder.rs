//! In-memory counters by project, queue and job type, until they are flushed. Counting costs the
//! hot path a few additions. A killed node loses the last seconds of statistics; nothing is decided
//! by them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use fencepost_domain::{
    ids::ProjectId,
    job::{AttemptOutcome, StoredState},
    limits::{MAX_COUNTED_NAMES, MAX_COUNTED_PAIRS},
    stats::{Counted, Counts},
};

use fencepost_store::{
    claims::LeasedJob,
    jobs::{control::CancelledJob, enqueue::NewJob},
    settle::{
        settle_failure::{AfterOutcome, OutcomeToWrite},
        settle_success::{Settled, WaitingJob},
    },
};

/// The name under which everything beyond the limit is counted.
pub const OTHER: &str = "other";
/// Pairs of queue and job type that are counted separately, over all projects.
const MAX_CACHED: usize = 20_000;
/// Flushes without activity after which a pair is dropped, to make space for another.
const IDLE_STEPS: u32 = 720;

/// Counters of a job type, and the number of flushes without activity.
#[derive(Debug, Default)]
struct TypeCounts {
    counts: Counts,
    idle_steps: u32,
}

type Types = HashMap<Box<str>, TypeCounts>;

/// The queues of one project and their job types.
#[derive(Debug, Default)]
struct ProjectCounts {
    queues: HashMap<Box<str>, Types>,
    pairs: usize,
}

#[derive(Debug, Default)]
struct Counters {
    projects: HashMap<ProjectId, ProjectCounts>,
    pairs: usize,
}

impl Counters {
    fn of(&mut self, project_id: ProjectId, queue: &str, job_type: &str) -> &mut Counts {
        let names = self.projects.entry(project_id).or_default();
        let is_known = names.queues.get(queue).is_some_and(|it| it.contains_key(job_type));
        let is_full = names.pairs >= MAX_COUNTED_PAIRS || self.pairs >= MAX_CACHED;
        let is_other = !is_known && is_full;
        let queue = if is_other { OTHER } else { known_or_other(&names.queues, queue) };
        let types = names.queues.entry(queue.into()).or_default();
        let job_type = if is_other { OTHER } else { known_or_other(types, job_type) };
        let kept = types.entry(job_type.into()).or_insert_with(|| {
            names.pairs += 1;
            self.pairs += 1;
            TypeCounts::default()
        });
        &mut kept.counts
    }

    /// Takes all counters. Names stay for a while, so that the same ones are used next time.
    fn take(&mut self) -> Vec<Counted> {
        let mut taken = Vec::new();
        for (project_id, names) in &mut self.projects {
            for (queue, types) in &mut names.queues {
                for (job_type, kept) in &mut *types {
                    let counts = std::mem::take(&mut kept.counts);
                    if counts == Counts::default() {
                        kept.idle_steps += 1;
                        continue;
                    }
                    kept.idle_steps = 0;
                    let (queue, job_type) = (queue.to_string(), job_type.to_string());
                    taken.push(Counted { project_id: *project_id, queue, job_type, counts });
                }
                types.retain(|_, it| it.idle_steps < IDLE_STEPS);
            }
            names.queues.retain(|_, types| !types.is_empty());
            names.pairs = names.queues.values().map(HashMap::len).sum();
        }
        self.projects.retain(|_, names| names.pairs > 0);
        self.pairs = self.projects.values().map(|it| it.pairs).sum();
        taken
    }
}

fn known_or_other<'a, T>(known: &HashMap<Box<str>, T>, name: &'a str) -> &'a str {
    if known.contains_key(name) || known.len() < MAX_COUNTED_NAMES { name } else { OTHER }
}

/// One node's counts. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct StatsRecorder(Arc<Mutex<Counters>>);

impl StatsRecorder {
    fn book(&self) -> MutexGuard<'_, Counters> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Jobs were stored.
    pub(crate) fn enqueued<'a>(&self, jobs: impl Iterator<Item = &'a NewJob>) {
        let mut book = self.book();
        for it in jobs {
            book.of(it.project_id, &it.queue, &it.job_type).enqueued += 1;
        }
    }

    /// Jobs of schedules were stored.
    pub(crate) fn fired(&self, jobs: &[WaitingJob]) {
        let mut book = self.book();
        for it in jobs {
            book.of(it.project_id, &it.queue, &it.job_type).enqueued += 1;
        }
    }

    /// Jobs were leased.
    pub(crate) fn claimed<'a>(&self, jobs: impl Iterator<Item = &'a LeasedJob>) {
        let mut book = self.book();
        for it in jobs {
            let counts = book.of(it.project_id, &it.queue, &it.job_type);
            counts.claimed += 1;
            if let Some(waited) = it.waited() {
                counts.wait.add(waited.num_milliseconds());
            }
        }
    }

    /// Jobs have succeeded.
    pub(crate) fn succeeded<'a>(&self, jobs: impl Iterator<Item = &'a Settled>) {
        let mut book = self.book();
        for it in jobs {
            let counts = book.of(it.key.project_id, &it.queue, &it.job_type);
            counts.end(AttemptOutcome::Succeeded, it.ran_ms);
        }
    }

    /// Attempts ended without success.
    pub(crate) fn ended(&self, outcomes: &[OutcomeToWrite], after: &[AfterOutcome]) {
        let jobs: HashMap<_, _> = after.iter().map(|it| (it.job.key(), &it.job)).collect();
        let mut book = self.book();
        for it in outcomes {
            let Some(job) = jobs.get(&it.key) else { continue };
            let counts = book.of(it.key.project_id, &job.queue, &job.job_type);
            counts.end(it.outcome, it.ran_ms);
            match it.state {
                StoredState::DeadLetter => counts.dead_lettered += 1,
                StoredState::Cancelled => counts.cancelled += 1,
                _ => (),
            }
        }
    }

    /// Waiting jobs were cancelled.
    pub(crate) fn cancelled(&self, gone: &[CancelledJob]) {
        let mut book = self.book();
        for it in gone {
            book.of(it.key.project_id, &it.queue, &it.job_type).cancelled += 1;
        }
    }

    /// Takes what was counted since the last call.
    #[must_use]
    pub(crate) fn take(&self) -> Vec<Counted> {
        self.book().take()
    }

    /// Adds back what could not be written.
    pub(crate) fn put_back(&self, counted: Vec<Counted>) {
        let mut book = self.book();
        for it in counted {
            book.of(it.project_id, &it.queue, &it.job_type).merge(&it.counts);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROJECT: ProjectId = ProjectId(1);

    #[test]
    fn names_beyond_the_bound_are_counted_together_and_stay_so() {
        let mut book = Counters::default();
        for number in 0..MAX_COUNTED_NAMES + 20 {
            book.of(PROJECT, "default", &format!("type {number}")).enqueued += 1;
        }
        let taken = book.take();
        assert_eq!(taken.len(), MAX_COUNTED_NAMES + 1);
        let others: Vec<_> = taken.iter().filter(|it| it.job_type == OTHER).collect();
        assert!(matches!(others[..], [it] if it.counts.enqueued == 20), "{others:?}");
        book.of(PROJECT, "default", "type 3").enqueued += 1;
        book.of(PROJECT, "default", "type 110").enqueued += 1;
        let mut names: Vec<_> = book.take().into_iter().map(|it| it.job_type).collect();
        names.sort();
        assert_eq!(names, [OTHER, "type 3"]);
    }

    #[test]
    fn what_was_taken_is_gone_and_what_was_put_back_is_there_again() {
        let tally = StatsRecorder::default();
        tally.book().of(PROJECT, "default", "mail").wait.add(40);
        let taken = tally.take();
        assert_eq!(tally.take(), []);
        tally.put_back(taken.clone());
        assert_eq!(tally.take(), taken);
    }

    #[test]
    fn a_node_counts_a_bounded_number_of_names_and_drops_idle_ones() {
        let mut book = Counters::default();
        for number in 0..MAX_CACHED as i32 + 5 {
            book.of(ProjectId(number), "default", "mail").claimed += 1;
        }
        let taken = book.take();
        assert_eq!(taken.iter().filter(|it| it.job_type == OTHER).count(), 5);
        for _ in 1..IDLE_STEPS {
            book.of(PROJECT, "default", "mail").claimed += 1;
            book.take();
        }
        assert!(book.pairs > 1);
        book.take();
        assert_eq!((book.pairs, book.projects.len()), (1, 1), "only one was seen all the while");
    }
}
