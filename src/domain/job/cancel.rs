//! What cancelling a job leads to.

use super::StoredState;

/// The effect of a request to cancel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CancelDecision {
    /// No worker has it: cancelled immediately.
    CancelNow,
    /// Its worker gets `cancel` in the next heartbeat's answer.
    AskWorker,
    /// It was cancelled before.
    Done,
    /// It has ended otherwise.
    TooLate,
}

/// Decides what cancelling a job in this state leads to.
#[must_use]
pub fn cancel(state: StoredState) -> CancelDecision {
    match state {
        StoredState::Scheduled | StoredState::Backoff | StoredState::Pending => {
            CancelDecision::CancelNow
        }
        StoredState::Processing => CancelDecision::AskWorker,
        StoredState::Cancelled => CancelDecision::Done,
        StoredState::Succeeded | StoredState::DeadLetter => CancelDecision::TooLate,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_live_job_can_be_cancelled() {
        assert_eq!(cancel(StoredState::Scheduled), CancelDecision::CancelNow);
        assert_eq!(cancel(StoredState::Backoff), CancelDecision::CancelNow);
        assert_eq!(cancel(StoredState::Pending), CancelDecision::CancelNow);
        assert_eq!(cancel(StoredState::Processing), CancelDecision::AskWorker);
        assert_eq!(cancel(StoredState::Cancelled), CancelDecision::Done);
        assert_eq!(cancel(StoredState::Succeeded), CancelDecision::TooLate);
        assert_eq!(cancel(StoredState::DeadLetter), CancelDecision::TooLate);
    }
}
