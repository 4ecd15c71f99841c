//! After a commit: wake the pump and the loops, publish events, count.

pub mod relay;

use std::sync::Arc;

use fencepost_domain::{
    history,
    ids::{JobKey, ProjectId},
    job::StoredState,
};
use fencepost_signals::{
    events_feed::{EventFeed, JobEvent},
    wakeups::{Arrival, BackgroundTask, Wake, backlog_waits::BacklogWaits},
};
use fencepost_store::settle::{
    settle_failure::{AfterOutcome, OutcomeToWrite},
    settle_success::WaitingJob,
};

use super::{known::KnownProjects, stats::recorder::StatsRecorder};

/// Wakes, publishes and counts. Cheap to clone.
#[derive(Clone)]
pub struct Notifier {
    pub wake: Wake,
    pub feed: EventFeed,
    /// Requests that wait for the first job of a queue.
    pub backlog_waits: BacklogWaits,
    pub tally: StatsRecorder,
    /// Which projects have webhooks that want to know of ends of jobs.
    pub subscribed: Arc<KnownProjects>,
}

impl Notifier {
    /// One that has published nothing yet.
    pub(super) fn new(wake: Wake) -> Self {
        Self {
            wake,
            feed: EventFeed::default(),
            backlog_waits: BacklogWaits::default(),
            tally: StatsRecorder::default(),
            subscribed: Arc::default(),
        }
    }

    /// These jobs wait: some can be claimed, others will be due.
    pub fn waiting<'a>(&self, jobs: impl Iterator<Item = &'a WaitingJob> + Clone) {
        self.wake.arrived(
            jobs.clone()
                .filter(|it| it.state == StoredState::Pending)
                .map(|it| Arrival {
                    project_id: it.project_id,
                    queue: it.queue.as_str().into(),
                    job_type: it.job_type.as_str().into(),
                    rank: it.rank,
                    run_at: it.run_at,
                    is_constrained: it.is_constrained,
                })
                .collect(),
        );
        let is_due_later =
            |it: &WaitingJob| matches!(it.state, StoredState::Scheduled | StoredState::Backoff);
        if jobs.clone().any(is_due_later) {
            self.wake.ask(BackgroundTask::Promote);
        }
        if jobs.clone().any(|it| it.state == StoredState::Scheduled || it.has_noted_turn) {
            self.wake.ask(BackgroundTask::Groups);
        }
    }

    /// Jobs or attempts of these projects ended: webhooks may want to know.
    pub fn notify_endpoints(&self, mut projects: impl Iterator<Item = ProjectId>) {
        if self.subscribed.has_any(&mut projects) {
            self.wake.ask(BackgroundTask::Events);
        }
    }

    /// Attempts ended without success.
    pub fn ended(&self, outcomes: &[OutcomeToWrite], after: &[AfterOutcome]) {
        self.waiting(after.iter().map(|it| &it.job));
        let freed = after.iter().filter(|it| it.held_slot).map(|it| it.job.project_id);
        self.wake.slots_freed(freed.collect());
        if after.iter().any(|it| it.has_follow_ups) {
            self.wake.ask(BackgroundTask::Cascade);
        }
        if after.iter().any(|it| it.has_noted_groups) {
            self.wake.ask(BackgroundTask::Groups);
        }
        self.notify_endpoints(outcomes.iter().map(|it| it.key.project_id));
        self.feed.publish(|| {
            let mut events = Vec::new();
            for it in outcomes {
                let job_event = job_event(it.key, &history::ended(it.outcome));
                let attempt = Some(it.attempt);
                events.push(JobEvent { attempt, worker_id: None, ..job_event });
                match it.state {
                    StoredState::DeadLetter => {
                        events.push(self::job_event(it.key, history::DEAD_LETTERED));
                    }
                    StoredState::Cancelled => {
                        events.push(self::job_event(it.key, history::CANCELLED));
                    }
                    _ => (),
                }
            }
            events
        });
    }
}

/// An event of one job, without details.
#[must_use]
pub fn job_event(key: JobKey, kind: &str) -> JobEvent {
    JobEvent::new(key.project_id, key.id, kind)
}
