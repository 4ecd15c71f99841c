//! Limits that several queues of a project keep together.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::rate::RateLimit;

/// Shared limits that one queue names at most.
pub const MAX_LIMITS_OF_QUEUE: usize = 3;
/// Shared limits of a project.
pub const MAX_SHARED_LIMITS: i64 = 1_000;
/// Queues that name one shared limit at most: a claim counts the running jobs of all of them.
pub const MAX_QUEUES_OF_LIMIT: usize = 20;

/// Whose jobs a shared limit counts together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SharedBy {
    /// All jobs of the queues that name it.
    All,
    /// The jobs of each group, in all these queues. It does not count jobs without a group.
    Group,
}

/// A limit to store.
#[derive(Debug, Clone)]
pub struct NewSharedLimit {
    /// Its name, by which queues name it.
    pub name: String,
    /// Whose jobs it counts together; none: as it is, or all.
    pub by: Option<SharedBy>,
    /// Jobs that run at the same time at most; none: as many as workers take.
    pub max_running: Option<i32>,
    /// Jobs that start in any window at most.
    pub rates: Vec<RateLimit>,
}

/// Numbers of one group under a shared limit, in place of those of the limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeyRules {
    /// Jobs of it that run at the same time at most; null: as the limit says.
    #[schema(required)]
    pub max_running: Option<i32>,
    /// Jobs of it that start in any window at most; null: as the limit says.
    #[schema(required)]
    pub rates: Option<Vec<RateLimit>>,
    /// Time at which these numbers end by themselves; null: when the group is reset.
    #[schema(required)]
    pub expires_at: Option<DateTime<Utc>>,
}
