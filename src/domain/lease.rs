//! The fence: which worker may settle a job, and why others may not.
//!
//! A lease is fenced by its attempt. The statements that settle or renew carry the fence in their
//! `where`. If they match nothing, the refusal is explained here.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::job::{AttemptOutcome, JobState};
use crate::ids::LeaseId;

/// Minimum lease if a poll asks for none, in seconds.
pub const MIN_DEFAULT_LEASE_SECONDS: i32 = 30;
/// A lease may outlive its job's `timeout_seconds` by this many seconds, for the last ack.
pub const TIMEOUT_GRACE_SECONDS: i32 = 10;
/// The longest heartbeat interval is a third of the timeout, but at least this, in seconds.
const MIN_TIMEOUT_THIRD_SECONDS: i32 = 10;

/// Maximum sleep of the reaper. Each pass reads which lease expires first within this time.
pub const REAPER_SLEEP: Duration = Duration::from_millis(1_500);

/// True if a lease of this many seconds may expire while the reaper sleeps: it must be woken then.
#[must_use]
pub fn ends_before_next_look(lease_seconds: i32) -> bool {
    u64::try_from(lease_seconds).is_ok_and(|it| Duration::from_secs(it) <= REAPER_SLEEP)
}

/// How often a worker should send a heartbeat, in seconds.
///
/// A third of the lease, so that two may get lost; at least as often as a third of the timeout; and
/// within the `beat_seconds` that the worker registered.
///
/// ```
/// # use fencepost_domain::lease::heartbeat_interval_seconds;
/// assert_eq!(heartbeat_interval_seconds(30, 60, None), 10);
/// assert_eq!(heartbeat_interval_seconds(900, 1800, None), 300);
/// assert_eq!(heartbeat_interval_seconds(900, 15, None), 10);
/// assert_eq!(heartbeat_interval_seconds(1, 1, None), 1);
/// assert_eq!(heartbeat_interval_seconds(900, 1800, Some(5)), 5);
/// assert_eq!(heartbeat_interval_seconds(30, 60, Some(60)), 10);
/// ```
#[must_use]
pub fn heartbeat_interval_seconds(
    lease_seconds: i32,
    timeout_seconds: i32,
    beat_seconds: Option<i32>,
) -> i32 {
    let third = (lease_seconds / 3).min(MIN_TIMEOUT_THIRD_SECONDS.max(timeout_seconds / 3)).max(1);
    beat_seconds.map_or(third, |it| third.min(it))
}

/// Acks and heartbeats of the native API that must show an attempt or a lease.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RequireFence {
    /// Acks and heartbeats that could mean two attempts of the same worker.
    #[default]
    Ambiguous,
    /// All.
    Always,
}

impl RequireFence {
    /// All values.
    pub const ALL: [Self; 2] = [Self::Ambiguous, Self::Always];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ambiguous => "ambiguous",
            Self::Always => "always",
        }
    }

    /// The value of this name; an unknown one is the strictest.
    #[must_use]
    pub fn of_name(name: &str) -> Self {
        Self::ALL.into_iter().find(|it| it.name() == name).unwrap_or(Self::Always)
    }
}

/// The values of a lease that a worker shows, as far as its protocol allows. Each must match.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fence {
    /// The worker that leased the job; none: any. Some protocols do not say.
    pub worker_id: Option<String>,
    /// The leased attempt.
    pub attempt: Option<i32>,
    /// The id of the lease.
    pub lease_id: Option<LeaseId>,
}

/// A recorded attempt: running, settled, or past.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Its worker.
    pub worker_id: String,
    /// Its number.
    pub attempt: i32,
    /// Its lease.
    pub lease_id: LeaseId,
}

impl Fence {
    /// Whether it differs from the fence of another attempt by the same worker.
    #[must_use]
    pub fn names_an_attempt(&self) -> bool {
        self.attempt.is_some() || self.lease_id.is_some()
    }

    fn worker_agrees(&self, holder: &Holder) -> bool {
        self.worker_id.as_ref().is_none_or(|it| *it == holder.worker_id)
    }

    fn attempt_agrees(&self, holder: &Holder) -> bool {
        self.attempt.is_none_or(|it| it == holder.attempt)
            && self.lease_id.is_none_or(|it| it == holder.lease_id)
    }

    fn agrees(&self, holder: &Holder) -> bool {
        self.worker_agrees(holder) && self.attempt_agrees(holder)
    }
}

/// A job as it was read after its fence did not match.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// The job's state now.
    pub state: JobState,
    /// The job's latest attempt.
    pub attempt: i32,
    /// The running lease, and whether it has expired; none unless `processing`.
    pub running: Option<(Holder, bool)>,
    /// The recorded outcome of the attempt that the fence names, if it has ended.
    pub recorded: Option<(Holder, AttemptOutcome)>,
}

/// Why a worker may not settle a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// No worker holds the job.
    InvalidState,
    /// Another worker holds it.
    WorkerMismatch,
    /// This worker's lease has ended, or was another one.
    StaleLease,
    /// The fence matched when the job was read: another transaction held the job, or the lease
    /// changed hands in between. Worth another try.
    LostRace,
}

/// Whether an ack that its statement did not accept was recorded before with this outcome, so that
/// a lost answer can be repeated; and if not, why it is refused.
///
/// # Errors
/// The [`Refusal`], in the order of `docs/guarantees.md`, "The fence".
pub fn explain_ack(fence: &Fence, outcome: AttemptOutcome, seen: &Standing) -> Result<(), Refusal> {
    match &seen.recorded {
        Some((holder, recorded))
            if fence.names_an_attempt() && fence.agrees(holder) && is_same(*recorded, outcome) =>
        {
            Ok(())
        }
        _ => Err(refusal(fence, seen, false)),
    }
}

/// A failure or release of a cancelled job is recorded as `cancelled`.
fn is_same(recorded: AttemptOutcome, outcome: AttemptOutcome) -> bool {
    recorded == outcome
        || recorded == AttemptOutcome::Cancelled
            && [AttemptOutcome::Failed, AttemptOutcome::Released].contains(&outcome)
}

/// Why a heartbeat was refused. Unlike an ack, a heartbeat cannot revive an expired lease.
#[must_use]
pub fn explain_heartbeat(fence: &Fence, seen: &Standing) -> Refusal {
    refusal(fence, seen, true)
}

/// Why an event or log was refused. An attempt whose lease has expired may still report, until it
/// is reaped.
#[must_use]
pub fn explain_report(fence: &Fence, seen: &Standing) -> Refusal {
    refusal(fence, seen, false)
}

fn refusal(fence: &Fence, seen: &Standing, expiry_counts: bool) -> Refusal {
    let Some((holder, expired)) = &seen.running else { return Refusal::InvalidState };
    if !fence.worker_agrees(holder) {
        return Refusal::WorkerMismatch;
    }
    if !fence.attempt_agrees(holder) || (expiry_counts && *expired) {
        return Refusal::StaleLease;
    }
    Refusal::LostRace
}

/// The length of the leases of a poll, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LeaseLength {
    /// Length that the poll asks for.
    pub asked: Option<i32>,
    /// Length that its project has set for polls that ask for none.
    pub default: Option<i32>,
}

impl LeaseLength {
    /// The length in a queue that has set a minimum for polls that ask for none. None: as the
    /// timeout of each job demands.
    ///
    /// ```
    /// # use fencepost_domain::lease::LeaseLength;
    /// let default = LeaseLength { asked: None, default: Some(60) };
    /// assert_eq!(default.seconds(None), Some(60));
    /// assert_eq!(default.seconds(Some(300)), Some(300));
    /// assert_eq!(LeaseLength { asked: Some(30), ..default }.seconds(Some(300)), Some(30));
    /// assert_eq!(LeaseLength::default().seconds(Some(300)), None);
    /// ```
    #[must_use]
    pub fn seconds(self, minimum: Option<i32>) -> Option<i32> {
        self.asked.or_else(|| self.default.map(|it| it.max(minimum.unwrap_or_default())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    const LEASE: LeaseId = LeaseId(Uuid::from_u128(7));
    const OTHER_LEASE: LeaseId = LeaseId(Uuid::from_u128(8));

    fn fence(worker: &str, attempt: Option<i32>, lease_id: Option<LeaseId>) -> Fence {
        Fence { worker_id: Some(worker.into()), attempt, lease_id }
    }

    fn holder(worker: &str, attempt: i32) -> Holder {
        Holder { worker_id: worker.into(), attempt, lease_id: LEASE }
    }

    fn running(expired: bool) -> Standing {
        Standing {
            state: JobState::Processing,
            attempt: 2,
            running: Some((holder("ann", 2), expired)),
            recorded: None,
        }
    }

    fn settled(outcome: AttemptOutcome) -> Standing {
        Standing {
            state: JobState::Succeeded,
            attempt: 2,
            running: None,
            recorded: Some((holder("ann", 2), outcome)),
        }
    }

    #[test]
    fn another_worker_is_reported_before_another_attempt() {
        let refused = |it: Fence| explain_ack(&it, AttemptOutcome::Succeeded, &running(false));
        assert_eq!(refused(fence("bob", Some(1), None)), Err(Refusal::WorkerMismatch));
        assert_eq!(refused(fence("ann", Some(1), None)), Err(Refusal::StaleLease));
        assert_eq!(refused(fence("ann", None, Some(OTHER_LEASE))), Err(Refusal::StaleLease));
        assert_eq!(refused(fence("ann", Some(2), Some(LEASE))), Err(Refusal::LostRace));
    }

    #[test]
    fn a_fence_without_a_worker_is_judged_by_what_it_shows() {
        let shown = |attempt| Fence { attempt, ..Fence::default() };
        let refused = |it: Fence| explain_ack(&it, AttemptOutcome::Succeeded, &running(false));
        assert_eq!(refused(shown(Some(1))), Err(Refusal::StaleLease));
        assert_eq!(refused(shown(Some(2))), Err(Refusal::LostRace));
        assert_eq!(refused(Fence::default()), Err(Refusal::LostRace));
        let again =
            |it: Fence| explain_ack(&it, AttemptOutcome::Failed, &settled(AttemptOutcome::Failed));
        assert_eq!(again(shown(Some(2))), Ok(()));
        assert_eq!(again(Fence::default()), Err(Refusal::InvalidState));
    }

    #[test]
    fn a_repeated_ack_is_answered_again_only_with_its_attempt_and_its_outcome() {
        let again =
            |it: Fence, outcome| explain_ack(&it, outcome, &settled(AttemptOutcome::Succeeded));
        assert_eq!(again(fence("ann", Some(2), None), AttemptOutcome::Succeeded), Ok(()));
        assert_eq!(again(fence("ann", None, Some(LEASE)), AttemptOutcome::Succeeded), Ok(()));
        let refused = Err(Refusal::InvalidState);
        assert_eq!(again(fence("ann", None, None), AttemptOutcome::Succeeded), refused);
        assert_eq!(again(fence("ann", Some(2), None), AttemptOutcome::Failed), refused);
        assert_eq!(again(fence("bob", Some(2), None), AttemptOutcome::Succeeded), refused);
        assert_eq!(again(fence("ann", Some(1), None), AttemptOutcome::Succeeded), refused);
        assert_eq!(
            again(fence("ann", Some(2), Some(OTHER_LEASE)), AttemptOutcome::Succeeded),
            refused
        );
    }

    #[test]
    fn an_earlier_failure_can_be_repeated_while_the_next_attempt_runs() {
        let mut seen = running(false);
        seen.recorded = Some((
            Holder { worker_id: "ann".into(), attempt: 1, lease_id: OTHER_LEASE },
            AttemptOutcome::Failed,
        ));
        assert_eq!(
            explain_ack(&fence("ann", Some(1), None), AttemptOutcome::Failed, &seen),
            Ok(())
        );
        let other = explain_ack(&fence("ann", Some(1), None), AttemptOutcome::Succeeded, &seen);
        assert_eq!(other, Err(Refusal::StaleLease));
    }

    #[test]
    fn the_end_of_a_cancelled_attempt_can_be_repeated_in_its_own_words() {
        let again = |outcome| {
            let seen = settled(AttemptOutcome::Cancelled);
            explain_ack(&fence("ann", Some(2), None), outcome, &seen)
        };
        assert_eq!(again(AttemptOutcome::Failed), Ok(()));
        assert_eq!(again(AttemptOutcome::Released), Ok(()));
        assert_eq!(again(AttemptOutcome::Succeeded), Err(Refusal::InvalidState));
    }

    #[test]
    fn an_expired_lease_cannot_be_renewed() {
        let mine = fence("ann", Some(2), Some(LEASE));
        assert_eq!(explain_heartbeat(&mine, &running(true)), Refusal::StaleLease);
        assert_eq!(
            explain_heartbeat(&mine, &settled(AttemptOutcome::Succeeded)),
            Refusal::InvalidState
        );
        let foreign = fence("bob", Some(2), Some(LEASE));
        assert_eq!(explain_heartbeat(&foreign, &running(true)), Refusal::WorkerMismatch);
    }
}
