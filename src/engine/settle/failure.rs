//! What follows an attempt that did not succeed: decide, write, notify.

use std::time::Duration;

use fencepost_domain::{
    backoff::{Jitter, RetryPolicy},
    job::{
        self, AfterAttempt, AttemptOutcome, DeadLetterReason, Losses, Next, OutcomeCause, Running,
        StoredState,
    },
    text::ErrorReport,
};
use fencepost_signals::telemetry;
use fencepost_store::{
    self as store,
    settle::settle_failure::{AfterOutcome, Held, LossesToWrite, OutcomeToWrite},
};
use metrics::{counter, histogram};
use sqlx::PgConnection;

use crate::{cancel, jobs::dead_letters, notify::Notifier};

/// Decides what the end of a locked job's attempt leads to. Draws the jitter.
pub(crate) fn decide(
    held: &Held,
    cause: &OutcomeCause<'_>,
    error: ErrorReport,
    duration_ms: Option<i64>,
) -> OutcomeToWrite {
    let policy = RetryPolicy::stored(held.retry.as_ref());
    let before = Losses { total: held.losses, in_row: held.losses_in_row };
    let running = Running {
        attempt: held.attempt,
        uncounted_claims: held.uncounted_claims,
        failures: held.failures,
        max_attempts: held.max_attempts,
        losses: before,
        max_losses: job::max_losses(held.max_losses, held.max_attempts),
        has_progressed: held.has_progressed,
        losses_fail: held.losses_fail,
        cancel_requested: held.cancel_requested,
        policy: &policy,
    };
    let jitter = Jitter::new(rand::random());
    let AfterAttempt { next, failures, losses } = job::after_attempt(&running, cause, jitter);
    let (state, wait) = match next {
        Next::Pending => (StoredState::Pending, Duration::ZERO),
        Next::RetryAfter(wait) => (StoredState::Backoff, wait),
        Next::DeadLetter(_) => (StoredState::DeadLetter, Duration::ZERO),
        Next::Cancelled => (StoredState::Cancelled, Duration::ZERO),
    };
    let outcome = if next == Next::Cancelled { AttemptOutcome::Cancelled } else { cause.outcome() };
    let death = match next {
        Next::DeadLetter(reason) => Some(reason).filter(|it| *it != DeadLetterReason::Failed),
        _ => None,
    };
    let is_changed = losses != before || death.is_some();
    let is_loss = losses.total > before.total;
    // One host that dies loses many healthy jobs at once; a payload that kills comes back.
    let is_in_streak =
        is_loss && losses.in_row > 1 && *cause != OutcomeCause::TakeBack && next != Next::Cancelled;
    let losses = is_changed.then_some(LossesToWrite { losses, is_loss, is_in_streak, death });
    let (key, attempt, ran_ms) = (held.key(), held.attempt, held.ran_ms);
    OutcomeToWrite {
        key,
        attempt,
        state,
        failures,
        losses,
        wait,
        outcome,
        error,
        duration_ms,
        ran_ms,
    }
}

/// What is recorded of a release: nothing if the job ends by it, because it was cancelled.
pub(super) fn unreported(held: &Held, cause: &OutcomeCause<'_>) -> ErrorReport {
    match held.cancel_requested {
        true => ErrorReport::default(),
        false => cause.unreported_error(),
    }
}

/// Writes what was decided, in the transaction that holds the locks.
pub(crate) async fn write(
    tx: &mut PgConnection,
    outcomes: &[OutcomeToWrite],
) -> sqlx::Result<Vec<AfterOutcome>> {
    if outcomes.is_empty() {
        return Ok(Vec::new());
    }
    let mut after = store::settle::settle_failure::write_outcomes(tx, outcomes).await?;
    let lost: Vec<_> = outcomes.iter().filter_map(|it| Some((it.key, it.losses?))).collect();
    if !lost.is_empty() {
        store::settle::losses::write(tx, &lost).await?;
    }
    let cancelled: Vec<_> =
        outcomes.iter().filter(|it| it.state == StoredState::Cancelled).map(|it| it.key).collect();
    if !cancelled.is_empty() {
        for gone in cancel::cancel_waiting(tx, &cancelled, cancel::CancelReason::Asked).await? {
            if let Some(after) = after.iter_mut().find(|it| it.job.key() == gone.key) {
                after.has_children = gone.has_children;
                after.has_follow_ups = gone.has_follow_ups;
            }
        }
    }
    let ended = after.iter().filter(|it| it.job.state == StoredState::DeadLetter);
    let parents: Vec<_> = ended.filter(|it| it.has_children).map(|it| it.job.key()).collect();
    if !parents.is_empty() {
        store::workflows::cascade::mark_ended(tx, &parents).await?;
    }
    // Last, because many transactions share the rows of dead-letter groups.
    dead_letters::write(tx, outcomes, &after).await?;
    Ok(after)
}

/// Counts and notifies. Call it after the commit.
pub(crate) fn publish(notifier: &Notifier, outcomes: &[OutcomeToWrite], after: &[AfterOutcome]) {
    for it in outcomes {
        let outcome = it.outcome.as_str();
        counter!(telemetry::JOBS_SETTLED, "outcome" => outcome).increment(1);
        if it.losses.is_some_and(|it| it.is_loss) {
            counter!(telemetry::JOBS_LOST).increment(1);
        }
        match it.state {
            StoredState::DeadLetter => counter!(telemetry::JOBS_DEAD_LETTERED).increment(1),
            StoredState::Cancelled => counter!(telemetry::JOBS_CANCELLED).increment(1),
            StoredState::Backoff if it.outcome != AttemptOutcome::Released => {
                counter!(telemetry::JOBS_RETRIED).increment(1);
            }
            _ => (),
        }
        if it.outcome == AttemptOutcome::Failed {
            histogram!(telemetry::RUN_SECONDS).record(it.ran_ms as f64 / 1_000.0);
        }
    }
    notifier.tally.ended(outcomes, after);
    notifier.ended(outcomes, after);
}
