//! Every SQL statement: one per function, with the connection first and the tenant in every row it
//! touches. Nothing is decided here: statements carry fences and limits that callers decided.

use chrono::{DateTime, Utc};
use uuid::Uuid;

pub mod account_log;
pub mod accounts;
pub mod alarms;
pub mod audit;
pub mod batches;
pub mod cascade;
pub mod claims;
pub mod control;
pub mod counts;
pub mod dead_letters;
pub mod deadline;
pub mod dependencies;
pub mod device_logins;
pub mod email_changes;
pub mod ends;
pub mod enqueue;
pub mod events;
pub mod faults;
pub mod fences;
pub mod heartbeats;
pub mod idempotency;
pub mod identities;
pub mod incidents;
pub mod invitations;
pub mod job_types;
pub mod jobs;
pub mod keys;
pub mod leased;
pub mod limited_claims;
pub mod logs;
pub mod mails;
pub mod members;
pub mod migrate;
pub mod nodes;
pub mod operations;
pub mod outbound_events;
pub mod passkeys;
pub mod polls;
pub mod pools;
pub mod projects;
pub mod pushes;
pub mod queue_limits;
pub mod queues;
pub mod requeue;
pub mod roles;
pub mod schedules;
pub mod second_factors;
pub mod server;
pub mod sessions;
pub mod set_aside;
pub mod settle_failure;
pub mod settle_success;
pub mod shares;
pub mod stats;
pub mod stored_bytes;
pub mod sweep;
pub mod usage;
pub mod webhooks;
pub mod workers;
pub mod workflow_ends;
pub mod workflows;

/// A row's position in a list that is ordered by time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TimePosition {
    pub at: DateTime<Utc>,
    /// Orders the rows of one moment.
    pub id: Uuid,
}
