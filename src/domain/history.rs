//! The names of job events. Types that begin with [`RESERVED_PREFIX`] are ours; all others belong
//! to workers.

/// No worker's event may begin with this.
pub const RESERVED_PREFIX: &str = "fencepost.";

/// Enqueued.
pub const ENQUEUED: &str = "fencepost.enqueued";
/// Claimed by a worker.
pub const CLAIMED: &str = "fencepost.claimed";
/// Succeeded.
pub const SUCCEEDED: &str = "fencepost.succeeded";
/// Dead-lettered.
pub const DEAD_LETTERED: &str = "fencepost.dead_lettered";
/// Its worker was asked to stop.
pub const CANCEL_REQUESTED: &str = "fencepost.cancel_requested";
/// Cancelled.
pub const CANCELLED: &str = "fencepost.cancelled";
/// Cancelled because its `expires_at` had passed.
pub const EXPIRED: &str = "fencepost.expired";
/// Replaced by another job with its unique key.
pub const REPLACED: &str = "fencepost.replaced";
/// Cancelled because a parent failed or was cancelled.
pub const PARENT_FAILED: &str = "fencepost.parent_failed";
/// Cancelled because it was not needed: a parent ended otherwise than it waited for.
pub const CONDITION_NOT_MET: &str = "fencepost.condition_not_met";
/// Retried by request.
pub const RETRIED: &str = "fencepost.retried";
/// Enqueued as a replay of an earlier job.
pub const REPLAYED: &str = "fencepost.replayed";
/// Released by request, since its worker does not release it.
pub const TAKE_BACK: &str = "fencepost.take_back";
/// Retried together with its parent.
pub const REVIVED: &str = "fencepost.revived";
/// Its queue, priority or `run_at` was changed.
pub const CHANGED: &str = "fencepost.changed";
/// Paused by request.
pub const PAUSED: &str = "fencepost.paused";
/// Resumed by request.
pub const RESUMED: &str = "fencepost.resumed";
/// The events by which a job is cancelled.
pub const CANCELLATIONS: [&str; 6] =
    [CANCEL_REQUESTED, CANCELLED, EXPIRED, REPLACED, PARENT_FAILED, CONDITION_NOT_MET];
/// The stream has missed events: read the jobs again.
pub const GAP: &str = "fencepost.gap";

/// The event for the end of an attempt.
///
/// ```
/// # use fencepost_domain::{history::ended, job::AttemptOutcome};
/// assert_eq!(ended(AttemptOutcome::LeaseExpired), "fencepost.lease_expired");
/// ```
#[must_use]
pub fn ended(outcome: super::job::AttemptOutcome) -> String {
    format!("{RESERVED_PREFIX}{}", outcome.as_str())
}
