//! The model: what each thing that happens leads to, in plain data.

use fencepost::{
    domain::{
        job::{AttemptOutcome, StoredState},
        lease::Fence,
    },
    ids::JobId,
};

use super::Run;

/// One job, as the model has it.
#[derive(Debug, Clone)]
pub struct Model {
    pub id: JobId,
    pub parents: Vec<usize>,
    pub state: StoredState,
    pub attempt: i32,
    pub failures: i32,
    pub max_attempts: i32,
    pub cancel_requested: bool,
    /// Who runs it.
    pub running: Option<Fence>,
    /// How past attempts ended.
    /// With whether the job could run again.
    pub recorded: Vec<(Fence, AttemptOutcome, bool)>,
    /// What became of its children when it ended well.
    pub activated: Option<i32>,
    /// Whether it was deleted or pruned. Its state stays: children of it depend on that.
    pub is_gone: bool,
}

/// What an ack is answered with, in the model's words.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    Done(Option<i32>),
    Retry,
    Refused(&'static str),
}

/// Whether a job has ended without success.
pub fn is_bad(state: StoredState) -> bool {
    matches!(state, StoredState::DeadLetter | StoredState::Cancelled)
}

impl Run {
    /// What the model says an ack leads to; and it does.
    pub fn expect_ack(&mut self, job: usize, fence: &Fence, outcome: AttemptOutcome) -> Answer {
        let model = &self.jobs[job];
        let same = |recorded: AttemptOutcome| {
            recorded == outcome
                || (recorded == AttemptOutcome::Cancelled && outcome != AttemptOutcome::Succeeded)
        };
        let names_one = fence.attempt.is_some() || fence.lease_id.is_some();
        let recorded = model.recorded.iter().find(|(it, ..)| names_one && it == fence);
        if let Some((_, recorded, runs_again)) = recorded.filter(|(_, it, _)| same(*it)) {
            return match recorded {
                AttemptOutcome::Succeeded => Answer::Done(model.activated),
                _ if *runs_again => Answer::Retry,
                _ => Answer::Done(None),
            };
        }
        let Some(current) = &model.running else { return Answer::Refused("invalid_state") };
        if fence.worker_id != current.worker_id {
            return Answer::Refused("worker_mismatch");
        }
        let agrees = fence.attempt.is_none_or(|it| Some(it) == current.attempt)
            && fence.lease_id.is_none_or(|it| Some(it) == current.lease_id);
        if !agrees {
            return Answer::Refused("stale_lease");
        }
        match outcome {
            AttemptOutcome::Succeeded => Answer::Done(self.succeed(job)),
            outcome => {
                self.end(job, outcome);
                match self.jobs[job].state {
                    StoredState::Pending | StoredState::Backoff => Answer::Retry,
                    _ => Answer::Done(None),
                }
            }
        }
    }

    pub fn succeed(&mut self, job: usize) -> Option<i32> {
        let fence = self.jobs[job].running.take().expect("it runs");
        self.jobs[job].state = StoredState::Succeeded;
        self.jobs[job].recorded.push((fence, AttemptOutcome::Succeeded, false));
        let mut activated = None;
        for child in 0..self.jobs.len() {
            if !self.jobs[child].parents.contains(&job) {
                continue;
            }
            let count = activated.get_or_insert(0);
            let parents = &self.jobs[child].parents;
            let all_done = parents.iter().all(|it| self.jobs[*it].state == StoredState::Succeeded);
            if self.jobs[child].state == StoredState::Scheduled && all_done {
                self.jobs[child].state = StoredState::Pending;
                *count += 1;
            }
        }
        self.jobs[job].activated = activated;
        activated
    }

    /// An attempt ends without success.
    pub fn end(&mut self, job: usize, outcome: AttemptOutcome) {
        let model = &mut self.jobs[job];
        let fence = model.running.take().expect("it runs");
        let counts = outcome != AttemptOutcome::Released;
        model.failures += i32::from(counts);
        let mut recorded = outcome;
        model.state = if model.cancel_requested {
            recorded = AttemptOutcome::Cancelled;
            StoredState::Cancelled
        } else if counts && model.failures >= model.max_attempts {
            StoredState::DeadLetter
        } else if outcome == AttemptOutcome::Failed {
            StoredState::Backoff
        } else {
            StoredState::Pending
        };
        let runs_again = !is_bad(model.state);
        model.recorded.push((fence, recorded, runs_again));
        if is_bad(self.jobs[job].state) {
            self.cancel_children(job);
        }
    }

    pub fn cancel_children(&mut self, parent: usize) {
        for child in 0..self.jobs.len() {
            let model = &mut self.jobs[child];
            if model.parents.contains(&parent) && model.state == StoredState::Scheduled {
                model.state = StoredState::Cancelled;
                self.cancel_children(child);
            }
        }
    }

    pub fn requeue(&mut self, job: usize) {
        let parents = &self.jobs[job].parents;
        let all_done = parents.iter().all(|it| self.jobs[*it].state == StoredState::Succeeded);
        let model = &mut self.jobs[job];
        model.state = if all_done { StoredState::Pending } else { StoredState::Scheduled };
        model.failures = 0;
        model.cancel_requested = false;
    }
}
