//! What this node's projects use, in memory until it is flushed.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use fencepost_domain::{ids::ProjectId, stats::Counted, usage::Used};

/// Projects that a node counts between two flushes. More are not counted: what is not written
/// while the database is away must not fill the memory.
const MAX_COUNTED_PROJECTS: usize = 100_000;

/// One node's counts.
#[derive(Debug, Default)]
pub struct UsageRecorder(Mutex<HashMap<ProjectId, Used>>);

impl UsageRecorder {
    fn book(&self) -> MutexGuard<'_, HashMap<ProjectId, Used>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, project_id: ProjectId, more: Used) {
        let mut book = self.book();
        if book.len() < MAX_COUNTED_PROJECTS || book.contains_key(&project_id) {
            *book.entry(project_id).or_default() += more;
        }
    }

    /// A call of the API was answered.
    pub fn answered(&self, project_id: ProjectId) {
        self.add(project_id, Used { requests: 1, ..Used::default() });
    }

    /// Logs were stored.
    pub(crate) fn logged(&self, project_id: ProjectId, bytes: i64) {
        self.add(project_id, Used { log_bytes: bytes, ..Used::default() });
    }

    /// A poll waits from now until the answer is dropped.
    pub(crate) fn waiting(&self, project_id: ProjectId) -> WaitingPoll<'_> {
        WaitingPoll { recorder: self, project_id, since: Instant::now() }
    }

    fn waited(&self, project_id: ProjectId, took: Duration) {
        let poll_ms = i64::try_from(took.as_millis()).unwrap_or(i64::MAX);
        self.add(project_id, Used { poll_ms, ..Used::default() });
    }

    /// Takes what was counted since the last call.
    pub(super) fn take(&self) -> HashMap<ProjectId, Used> {
        std::mem::take(&mut self.book())
    }

    /// Adds back what could not be written.
    pub(super) fn put_back(&self, counted: Vec<(ProjectId, Used)>) {
        counted.into_iter().for_each(|(project_id, used)| self.add(project_id, used));
    }
}

/// A poll that waits.
pub(crate) struct WaitingPoll<'a> {
    recorder: &'a UsageRecorder,
    project_id: ProjectId,
    since: Instant,
}

impl Drop for WaitingPoll<'_> {
    fn drop(&mut self) {
        self.recorder.waited(self.project_id, self.since.elapsed());
    }
}

/// The part of statistics that is usage.
pub(super) fn of_jobs(counted: &Counted) -> Used {
    let counts = &counted.counts;
    Used {
        enqueued: counts.enqueued,
        claimed: counts.claimed,
        succeeded: counts.succeeded,
        dead_lettered: counts.dead_lettered,
        ..Used::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_counts_a_bounded_number_of_projects_between_two_flushes() {
        let recorder = UsageRecorder::default();
        for number in 0..MAX_COUNTED_PROJECTS as i32 + 5 {
            recorder.answered(ProjectId(number));
        }
        recorder.answered(ProjectId(1));
        let mut taken = recorder.take();
        assert_eq!(taken.len(), MAX_COUNTED_PROJECTS);
        assert_eq!(taken.remove(&ProjectId(1)).map(|it| it.requests), Some(2));
        assert!(recorder.take().is_empty());
    }

    #[test]
    fn a_poll_counts_for_as_long_as_it_waits_also_without_its_client() {
        let recorder = UsageRecorder::default();
        let mut waits = recorder.waiting(ProjectId(1));
        waits.since -= Duration::from_secs(20);
        drop(waits);
        let taken = recorder.take();
        let poll_ms = taken[&ProjectId(1)].poll_ms;
        assert!((20_000..30_000).contains(&poll_ms), "{poll_ms}");
        recorder.put_back(taken.into_iter().collect());
        assert_eq!(recorder.take()[&ProjectId(1)].poll_ms, poll_ms);
    }
}
