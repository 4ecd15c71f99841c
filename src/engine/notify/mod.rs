//! After a commit: who should look again, who is watching, and what is counted.

pub mod relay;

use super::stats::recorder::Tally;
use crate::{
    domain::{history, job::StoredState},
    events_feed::{Happening, News},
    ids::JobKey,
    store::{
        settle_failure::{AfterEnd, Ended},
        settle_success::Rested,
    },
    wakeups::{Arrival, Chore, Wake},
};

/// Whoever wants to know. Cheap to clone.
#[derive(Clone)]
pub struct Tidings {
    pub wake: Wake,
    pub news: News,
    pub tally: Tally,
}

impl Tidings {
    /// These jobs wait: some can be claimed, others will be due.
    pub fn waiting<'a>(&self, jobs: impl Iterator<Item = &'a Rested> + Clone) {
        self.wake.arrived(
            jobs.clone()
                .filter(|it| it.state == StoredState::Pending)
                .map(|it| Arrival {
                    project_id: it.key.project_id,
                    queue: it.queue.as_str().into(),
                    job_type: it.job_type.as_str().into(),
                    rank: it.rank,
                    run_at: it.run_at,
                    is_gated: it.is_gated,
                })
                .collect(),
        );
        let is_due_later =
            |it: &Rested| matches!(it.state, StoredState::Scheduled | StoredState::Backoff);
        if jobs.clone().any(is_due_later) {
            self.wake.ask(Chore::Promote);
        }
    }

    /// Attempts have ended without success.
    pub fn ended(&self, ends: &[Ended], after: &[AfterEnd]) {
        self.waiting(after.iter().map(|it| &it.job));
        let freed = after.iter().filter(|it| it.held_slot).map(|it| it.job.key.project_id);
        self.wake.slots_freed(freed.collect());
        if after.iter().any(|it| it.has_orphans) {
            self.wake.ask(Chore::Orphans);
        }
        self.news.tell(|| {
            let mut told = Vec::new();
            for end in ends {
                let happening = happening(end.key, &history::ended(end.outcome));
                let attempt = Some(end.attempt);
                told.push(Happening { attempt, worker_id: None, ..happening });
                match end.state {
                    StoredState::DeadLetter => {
                        told.push(self::happening(end.key, history::DEAD_LETTERED));
                    }
                    StoredState::Cancelled => {
                        told.push(self::happening(end.key, history::CANCELLED));
                    }
                    _ => (),
                }
            }
            told
        });
    }
}

/// Something that happened to one job, without details.
#[must_use]
pub fn happening(key: JobKey, kind: &str) -> Happening {
    Happening::new(key.project_id, key.id, kind)
}
