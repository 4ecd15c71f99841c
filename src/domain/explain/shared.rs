//! Limits that the queue of a job keeps together with others.

use chrono::{DateTime, Utc};

use super::{Condition, Facts, Reason, second};

/// A shared limit, as far as a job depends on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedUse {
    /// The name of the limit.
    pub name: String,
    /// The group of the job, if each group has the limit for itself.
    pub group: Option<String>,
    /// Running jobs that it counts together with the job.
    pub running: i64,
    /// How many may run at the same time; none: all.
    pub max: Option<i32>,
    /// When its rates let the next job start; none: they let one start now, or there is none.
    pub full_until: Option<DateTime<Utc>>,
    /// End of a pause; none: it is not paused.
    pub paused_until: Option<DateTime<Utc>>,
}

pub(super) fn condition(facts: &Facts, shared: &SharedUse) -> Condition {
    let ahead = |it: &Option<DateTime<Utc>>| it.filter(|it| *it > facts.now);
    let SharedUse { name, running, max, .. } = shared;
    let named = match &shared.group {
        None => format!("shared limit {name}"),
        Some(group) => format!("group {group} under shared limit {name}"),
    };
    let (paused, full) = (ahead(&shared.paused_until), ahead(&shared.full_until));
    let (reason, is_open, message) = match (paused, max, full) {
        (Some(until), ..) => {
            (Reason::RateLimit, false, format!("{named} is paused until {}", second(until)))
        }
        (None, Some(max), _) if *running >= i64::from(*max) => {
            (Reason::Concurrency, false, format!("{named} {running}/{max} busy"))
        }
        (None, _, Some(until)) => {
            let message = format!("{named} has used its rate until {}", second(until));
            (Reason::RateLimit, false, message)
        }
        (None, Some(max), None) => {
            (Reason::Concurrency, true, format!("{named} {running}/{max} in use"))
        }
        (None, None, None) => (Reason::RateLimit, true, format!("{named} lets a job start")),
    };
    Condition { reason, is_open, message, changes_at: paused.or(full) }
}
