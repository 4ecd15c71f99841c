//! The words for what happens to a job. Types that begin with [`RESERVED_PREFIX`] are ours; all others
//! are of workers.

/// No worker's event may begin with this.
pub const RESERVED_PREFIX: &str = "fencepost.";

/// It was stored.
pub const ENQUEUED: &str = "fencepost.enqueued";
/// A worker got it.
pub const CLAIMED: &str = "fencepost.claimed";
/// It is done.
pub const SUCCEEDED: &str = "fencepost.succeeded";
/// It was given up.
pub const DEAD_LETTERED: &str = "fencepost.dead_lettered";
/// Its worker was asked to stop.
pub const CANCEL_REQUESTED: &str = "fencepost.cancel_requested";
/// It was called off.
pub const CANCELLED: &str = "fencepost.cancelled";
/// It was called off because its `expires_at` had passed.
pub const EXPIRED: &str = "fencepost.expired";
/// Another job with its unique key took its place.
pub const REPLACED: &str = "fencepost.replaced";
/// It was called off because a parent had ended without success.
pub const PARENT_FAILED: &str = "fencepost.parent_failed";
/// Somebody brought it back.
pub const RETRIED: &str = "fencepost.retried";
/// It came back with its parent.
pub const REVIVED: &str = "fencepost.revived";
/// Its queue, priority or `run_at` was changed.
pub const CHANGED: &str = "fencepost.changed";
/// A stream has missed events that nobody remembers: read the jobs again.
pub const GAP: &str = "fencepost.gap";

/// The word for the end of an attempt.
///
/// ```
/// # use fencepost::domain::{history::ended, job::AttemptOutcome};
/// assert_eq!(ended(AttemptOutcome::LeaseExpired), "fencepost.lease_expired");
/// ```
#[must_use]
pub fn ended(outcome: super::job::AttemptOutcome) -> String {
    format!("{RESERVED_PREFIX}{}", outcome.as_str())
}
