//! Rules of the groups of a queue.

use std::fmt;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::rate::RateLimit;

/// In which order jobs of a group run.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, sqlx::Type,
)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum GroupOrder {
    /// As jobs without a group, at the same time.
    #[default]
    None,
    /// One at a time, as they were stored, also over retries.
    Strict,
}

/// What a dead letter means for the jobs behind it in its group, in a queue with strict order.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, sqlx::Type,
)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum OnDead {
    /// They wait until it is retried, passed over or deleted.
    #[default]
    Block,
    /// The next one runs.
    Skip,
}

/// Rules of the groups of a queue.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({"order": "strict", "on_dead": "block", "max_running": null, "rates": [], "fair": false}))]
pub struct GroupRules {
    /// The order in which jobs of a group run.
    pub order: GroupOrder,
    /// The effect of a dead letter on its group.
    pub on_dead: OnDead,
    /// Jobs of a group that run at the same time at most; null: as many as workers take.
    #[schema(required)]
    pub max_running: Option<i32>,
    /// Jobs of a group that start in any window at most, of each window. Empty: as many as workers
    /// take.
    pub rates: Vec<RateLimit>,
    /// Whether groups take turns by their weights; the jobs without a group are one of them.
    pub fair: bool,
}

/// Rules of one group, in place of those of its queue, where groups take turns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GroupOverride {
    /// Its share beside other groups: one of weight 2 starts twice as many jobs as one of weight 1.
    pub weight: i16,
    /// Jobs of it that run at the same time at most; null: as its queue says.
    #[schema(required)]
    pub max_running: Option<i32>,
    /// Jobs of it that start in any window at most; null: as its queue says.
    #[schema(required)]
    pub rates: Option<Vec<RateLimit>>,
    /// Time at which these rules end by themselves; null: when the group is reset.
    #[schema(required)]
    pub expires_at: Option<DateTime<Utc>>,
}

/// What a worker's rate limit pauses.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum RateLimitScope {
    /// The job's group.
    Group,
    /// The whole queue.
    Queue,
    /// What a shared limit of this name counts together with the job.
    SharedLimit(String),
}

const OF_SHARED_LIMIT: &str = "shared_limit:";

impl RateLimitScope {
    /// Its kind, in metrics.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Group => "group",
            Self::Queue => "queue",
            Self::SharedLimit(_) => "shared_limit",
        }
    }
}

/// As in requests and the audit log.
impl fmt::Display for RateLimitScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Group | Self::Queue => f.write_str(self.kind()),
            Self::SharedLimit(name) => write!(f, "{OF_SHARED_LIMIT}{name}"),
        }
    }
}

/// ```
/// # use fencepost_domain::group::RateLimitScope;
/// let read = |text: &str| RateLimitScope::try_from(text.to_owned());
/// assert_eq!(read("queue"), Ok(RateLimitScope::Queue));
/// assert_eq!(read("shared_limit:stripe"), Ok(RateLimitScope::SharedLimit("stripe".into())));
/// assert!(read("shared_limit:").is_err() && read("job").is_err());
/// ```
impl TryFrom<String> for RateLimitScope {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, &'static str> {
        match (text.as_str(), text.strip_prefix(OF_SHARED_LIMIT)) {
            ("group", _) => Ok(Self::Group),
            ("queue", _) => Ok(Self::Queue),
            (_, Some(name)) if !name.is_empty() => Ok(Self::SharedLimit(name.to_owned())),
            _ => Err("must be group, queue, or shared_limit: and the name of a shared limit"),
        }
    }
}

/// What becomes of a dead letter that blocks its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum HeadAction {
    /// It is retried, before all others of its group.
    Retry,
    /// It stays a dead letter, and the next job runs. A later retry puts it at the end.
    Skip,
    /// It is deleted.
    Delete,
}
