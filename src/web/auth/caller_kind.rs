//! The permission and the budget of a handler: one type for each kind of caller.

use std::marker::PhantomData;

use fencepost_domain::access::Permission;

use super::Budget;

/// Acks may overdraw the budget by this many minutes of it: jobs that were polled within the limits
/// can always be settled, and later polls pay for it.
pub const ACK_OVERDRAFT_WINDOWS: u32 = 10;
/// Heartbeats may overdraw half of that, to leave capacity for acks.
pub const BEAT_OVERDRAFT_WINDOWS: u32 = 5;

/// A kind of caller: its permission and its budget.
pub trait CallerKind: Send + Sync + 'static {
    /// The permission.
    const PERMISSION: Permission;
    /// The budget.
    const BUDGET: Budget;
    /// How far it may overdraw the budget.
    const OVERDRAFT_WINDOWS: u32 = 0;
    /// Whether its calls are parked, and need a permit for that.
    const PARKS: bool = false;
    /// Whether a key with `strict: false` may send fields that this API does not know. Not where a
    /// misspelt filter would select everything.
    const IS_LENIENT: bool = false;
    /// Whether it may be called while the project is suspended: by workers that have jobs, and to
    /// delete the project.
    const WHILE_SUSPENDED: bool = false;
    /// Whether a key that is bound to queues and job types may call it.
    const MAY_BE_BOUND: bool = false;
}

/// A caller whose key may be bound to queues and job types: the handler obeys
/// [`Who::binding`](super::Who::binding).
#[derive(Debug, Clone, Copy)]
pub struct Bound<P>(PhantomData<P>);

impl<P: CallerKind> CallerKind for Bound<P> {
    const PERMISSION: Permission = P::PERMISSION;
    const BUDGET: Budget = P::BUDGET;
    const OVERDRAFT_WINDOWS: u32 = P::OVERDRAFT_WINDOWS;
    const PARKS: bool = P::PARKS;
    const IS_LENIENT: bool = P::IS_LENIENT;
    const WHILE_SUSPENDED: bool = P::WHILE_SUSPENDED;
    const MAY_BE_BOUND: bool = true;
}

macro_rules! caller_kinds {
    ($($(#[$doc:meta])* $name:ident: $permission:ident, $budget:ident $(, $constant:ident = $value:expr)*;)*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy)]
            pub struct $name;

            impl CallerKind for $name {
                const PERMISSION: Permission = Permission::$permission;
                const BUDGET: Budget = Budget::$budget;
                $(caller_kinds!(@ $constant $value);)*
            }
        )*
    };
    (@ overdraft $value:expr) => { const OVERDRAFT_WINDOWS: u32 = $value; };
    (@ parks $value:expr) => { const PARKS: bool = $value; };
    (@ suspended $value:expr) => { const WHILE_SUSPENDED: bool = $value; };
    (@ lenient $value:expr) => { const IS_LENIENT: bool = $value; };
}

caller_kinds! {
    /// Any live key or member.
    Anybody: Any, Manage;
    /// May read.
    Read: Read, Manage;
    /// May read payloads, too.
    ReadPayloads: ReadPayloads, Manage;
    /// May enqueue.
    Produce: Produce, Produce, lenient = true;
    /// May enqueue jobs with the payloads of earlier ones.
    Replay: Replay, Produce;
    /// May act as a worker, and reports or lists.
    Work: Work, Work, lenient = true, suspended = true;
    /// May act as a worker, and registers itself and its schedules.
    Registering: Work, Work, lenient = true;
    /// May act as a worker, and polls.
    Polling: Work, Work, parks = true, lenient = true;
    /// May act as a worker, and renews its leases.
    Beating: Work, Work, overdraft = BEAT_OVERDRAFT_WINDOWS, lenient = true,
        suspended = true;
    /// May act as a worker, and settles its jobs.
    Settling: Work, Work, overdraft = ACK_OVERDRAFT_WINDOWS, lenient = true,
        suspended = true;
    /// May check whether a job was cancelled.
    Follow: Follow, Work, suspended = true;
    /// May control single jobs.
    Control: Control, Manage;
    /// May manage queues, dead letters and operations.
    Manage: Manage, Manage;
    /// May manage recurring schedules.
    Schedule: Schedule, Manage;
    /// May manage webhooks.
    Webhooks: Webhooks, Manage;
    /// May choose where events are sent, and so may see messages of errors.
    Subscribing: Subscribe, Manage;
    /// May send the jobs of a queue to a URL.
    Pushing: Push, Manage;
    /// May read the audit log.
    Audit: Audit, Manage;
    /// May manage keys.
    Administer: Administer, Manage;
    /// May manage members and settings.
    Govern: Govern, Manage;
    /// May delete the project.
    Own: Own, Manage, suspended = true;
}
