//! What a handler's caller must be permitted, and what its calls are counted against: one type for each.

use super::Budget;
use crate::domain::access::Permission;

/// Acks may use so many windows of the budget beyond it: whatever a poll within the limits was handed can be
/// settled, and later polls pay for it.
pub const ACK_OVERDRAFT_WINDOWS: u32 = 10;
/// Heartbeats may use half of that, so that they leave room for acks.
pub const BEAT_OVERDRAFT_WINDOWS: u32 = 5;

/// What a kind of caller may do, and from which budget it pays.
pub trait Permit: Send + Sync + 'static {
    /// What it may do.
    const PERMISSION: Permission;
    /// What its calls are counted against.
    const BUDGET: Budget;
    /// How far beyond the budget it may go.
    const OVERDRAFT_WINDOWS: u32 = 0;
    /// Whether its calls wait, and need a place for that.
    const PARKS: bool = false;
}

macro_rules! permits {
    ($($(#[$doc:meta])* $name:ident: $permission:ident, $budget:ident $(, $constant:ident = $value:expr)*;)*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy)]
            pub struct $name;

            impl Permit for $name {
                const PERMISSION: Permission = Permission::$permission;
                const BUDGET: Budget = Budget::$budget;
                $(permits!(@ $constant $value);)*
            }
        )*
    };
    (@ overdraft $value:expr) => { const OVERDRAFT_WINDOWS: u32 = $value; };
    (@ parks $value:expr) => { const PARKS: bool = $value; };
}

permits! {
    /// Any live key or member.
    Anybody: Any, Manage;
    /// May look.
    Read: Read, Manage;
    /// May enqueue.
    Produce: Produce, Produce;
    /// May be a worker.
    Work: Work, Work;
    /// May be a worker, and waits for jobs.
    Polling: Work, Work, parks = true;
    /// May be a worker, and keeps its leases.
    Beating: Work, Work, overdraft = BEAT_OVERDRAFT_WINDOWS;
    /// May be a worker, and settles its jobs.
    Settling: Work, Work, overdraft = ACK_OVERDRAFT_WINDOWS;
    /// May see whether a job is called off.
    Follow: Follow, Work;
    /// May steer single jobs.
    Control: Control, Manage;
    /// May work with queues, dead letters, schedules and operations.
    Manage: Manage, Manage;
    /// May work with keys, and read the audit log.
    Administer: Administer, Manage;
    /// May work with members and settings.
    Govern: Govern, Manage;
    /// May end the project.
    Own: Own, Manage;
}
