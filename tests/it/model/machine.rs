//! The model: what each thing that happens leads to, in plain data.

use fencepost_domain::{
    dependency::{FinalState, When},
    ids::JobId,
    job::{AttemptOutcome, StoredState},
    lease::Fence,
};

use super::Run;

/// What a job waits for.
#[derive(Debug, Clone)]
pub struct Awaited {
    pub parent: usize,
    pub when: When,
    /// The parent has ended so. It counts even if the parent is retried.
    pub is_met: bool,
    /// The parent had not ended when the job was stored.
    pub is_counted: bool,
}

/// One job, as the model has it.
#[derive(Debug, Clone)]
pub struct Model {
    pub id: JobId,
    pub parents: Vec<Awaited>,
    pub state: StoredState,
    /// It was cancelled, because it was not needed.
    pub is_skipped: bool,
    pub attempt: i32,
    pub failures: i32,
    pub max_attempts: i32,
    /// Attempts that were lost, and how many of them in a row.
    pub losses: (i32, i32),
    /// The protocol that leased it counts an expired lease as a failure.
    pub loss_fails: bool,
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
    /// Whether it had ended when callbacks were last compared.
    pub had_ended: bool,
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

impl Model {
    /// How it ended.
    pub fn end(&self) -> Option<FinalState> {
        match self.state {
            StoredState::Succeeded => Some(FinalState::Succeeded),
            StoredState::DeadLetter => Some(FinalState::DeadLetter),
            StoredState::Cancelled if self.is_skipped => Some(FinalState::Skipped),
            StoredState::Cancelled => Some(FinalState::Cancelled),
            _ => None,
        }
    }

    pub fn has_parent(&self, parent: usize) -> bool {
        self.parents.iter().any(|it| it.parent == parent)
    }
}

impl Run {
    fn is_met(&self, it: &Awaited) -> bool {
        it.is_met || self.jobs[it.parent].end().is_some_and(|end| it.when.is_met_by(end))
    }

    /// Whether it waits for nothing more.
    pub fn is_free(&self, job: usize) -> bool {
        self.jobs[job].parents.iter().all(|it| self.is_met(it))
    }

    /// Whether a parent has ended otherwise than it waits for.
    pub fn is_broken(&self, job: usize) -> bool {
        let mut parents = self.jobs[job].parents.iter();
        parents.any(|it| !self.is_met(it) && self.jobs[it.parent].end().is_some())
    }

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
                self.end(job, outcome, false);
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
        let has_children = |it: &Model| {
            it.parents.iter().any(|awaited| awaited.parent == job && awaited.is_counted)
        };
        let activated = self.jobs.iter().any(has_children).then_some(0);
        let freed = self.lead_on(job);
        let activated = activated.map(|_| freed);
        self.jobs[job].activated = activated;
        activated
    }

    /// An attempt ends without success. `is_lost`: nothing came from its worker.
    pub fn end(&mut self, job: usize, outcome: AttemptOutcome, is_lost: bool) {
        let model = &mut self.jobs[job];
        let fence = model.running.take().expect("it runs");
        let is_loss = is_lost && !model.loss_fails;
        let counts = outcome != AttemptOutcome::Released && !is_loss;
        model.failures += i32::from(counts);
        let (all, in_row) = model.losses;
        model.losses = if is_loss { (all + 1, in_row + 1) } else { (all, 0) };
        let max_losses = if model.max_attempts == 1 { 1 } else { 5 };
        let is_lost_too_often = is_loss && model.losses.1 >= max_losses;
        let mut recorded = outcome;
        model.state = if model.cancel_requested {
            recorded = AttemptOutcome::Cancelled;
            StoredState::Cancelled
        } else if counts && model.failures >= model.max_attempts || is_lost_too_often {
            StoredState::DeadLetter
        } else if outcome == AttemptOutcome::Failed || is_loss && model.losses.1 > 1 {
            StoredState::Backoff
        } else {
            StoredState::Pending
        };
        let runs_again = !is_bad(model.state);
        model.recorded.push((fence, recorded, runs_again));
        if is_bad(self.jobs[job].state) {
            self.lead_on(job);
        }
    }

    /// The children of a job that has ended may run, or are cancelled. Returns how many may run
    /// because of it alone.
    pub fn lead_on(&mut self, parent: usize) -> i32 {
        let end = self.jobs[parent].end().expect("it has ended");
        let mut freed = 0;
        for child in 0..self.jobs.len() {
            let awaited = self.jobs[child].parents.iter_mut().find(|it| it.parent == parent);
            let Some(awaited) = awaited.filter(|it| !it.is_met) else { continue };
            awaited.is_met = awaited.when.is_met_by(end);
            let is_met = awaited.is_met;
            if self.jobs[child].state != StoredState::Scheduled {
                continue;
            }
            if !is_met {
                self.jobs[child].state = StoredState::Cancelled;
                self.jobs[child].is_skipped = !end.has_failed();
                self.lead_on(child);
            } else if self.is_free(child) {
                self.jobs[child].state = StoredState::Pending;
                freed += 1;
            }
        }
        freed
    }

    pub fn requeue(&mut self, job: usize) {
        let is_free = self.is_free(job);
        let model = &mut self.jobs[job];
        model.is_skipped = false;
        model.state = if is_free { StoredState::Pending } else { StoredState::Scheduled };
        model.failures = 0;
        model.losses = (0, 0);
        model.cancel_requested = false;
    }
}
