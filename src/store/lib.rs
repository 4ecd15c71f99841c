//! Every SQL statement: one per function, with the connection first and the tenant in every row it
//! touches. Nothing is decided here: statements carry fences and limits that callers decided.

use chrono::{DateTime, Utc};
use uuid::Uuid;

pub mod claims;
pub mod connection;
pub mod faults;
pub mod groups;
pub mod idempotency;
pub mod jobs;
pub mod operations;
pub mod outbound;
pub mod people;
pub mod queues;
pub mod schedules;
pub mod set_aside;
pub mod settings_turns;
pub mod settle;
pub mod shared_limits;
pub mod sweep;
pub mod workers;
pub mod workflows;

/// A row's position in a list that is ordered by time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TimePosition {
    pub at: DateTime<Utc>,
    /// Orders the rows of one moment.
    pub id: Uuid,
}
