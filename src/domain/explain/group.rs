//! What a job's group waits for.

use chrono::{DateTime, Utc};

use super::{Condition, Facts, Reason, second};
use crate::{ids::JobId, job::StoredState};

/// A group, for a job that waits for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupLine {
    /// Its name.
    pub name: String,
    /// Whether it is paused.
    pub is_paused: bool,
    /// End of its pause; none: until it is resumed.
    pub paused_until: Option<DateTime<Utc>>,
    /// The job that is first in line, unless that is this job.
    pub ahead: Option<JobAhead>,
    /// What limits how many of its jobs run; none: nothing, or its order does.
    pub limit: Option<GroupLimit>,
}

/// What limits how many jobs of a group run or start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupLimit {
    /// Jobs of it that run.
    pub running: i64,
    /// How many may run at the same time; none: all.
    pub max: Option<i32>,
    /// When its rates let the next job start; none: they let one start now, or there is none.
    pub full_until: Option<DateTime<Utc>>,
}

/// The job that is first in line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobAhead {
    /// Its id.
    pub id: JobId,
    /// Its state.
    pub state: StoredState,
    /// When it may run, or could from.
    pub run_at: DateTime<Utc>,
    /// A person has paused it.
    pub is_paused: bool,
    /// Whether it waits for parents.
    pub waits_for_parents: bool,
}

pub(super) fn condition(facts: &Facts, line: &GroupLine) -> Condition {
    let GroupLine { name, is_paused, paused_until, ahead, limit } = line;
    let (reason, message, changes_at) = match (is_paused, paused_until, limit, ahead) {
        (true, None, ..) => {
            (Reason::GroupHeld, format!("its group {name} is paused: resume it"), None)
        }
        (true, Some(until), ..) => {
            let message = format!("its group {name} is paused until {}", second(*until));
            (Reason::GroupHeld, message, Some(*until))
        }
        (false, _, Some(GroupLimit { running, max: Some(max), .. }), _)
            if *running >= i64::from(*max) =>
        {
            let message = format!("{running} jobs of its group {name} run: max_running is {max}");
            (Reason::Group, message, None)
        }
        (false, _, Some(GroupLimit { full_until: Some(until), .. }), _) if *until > facts.now => {
            let until = *until;
            let message = format!("its group {name} has used its rate until {}", second(until));
            (Reason::Group, message, Some(until))
        }
        (false, _, Some(_), _) => {
            (Reason::Group, format!("it is among the next of its group {name}"), None)
        }
        (false, _, None, Some(ahead)) => behind(facts, ahead),
        (false, _, None, None) => {
            (Reason::Group, format!("it is the next of its group {name}"), None)
        }
    };
    Condition { reason, is_open: false, message, changes_at }
}

/// What a person can do about a dead letter.
pub(super) fn remedy(facts: &Facts) -> String {
    match &facts.blocks_group {
        Some(group) => format!("it blocks its group {group}, so retry it or unblock the group"),
        None => "retry it manually".to_owned(),
    }
}

fn behind(facts: &Facts, ahead: &JobAhead) -> (Reason, String, Option<DateTime<Utc>>) {
    let at = (ahead.run_at > facts.now).then_some(ahead.run_at);
    let does = match (ahead.state, at) {
        (StoredState::DeadLetter, _) => {
            let message = format!(
                "job {} is ahead in its group and dead-lettered: unblock the group",
                ahead.id
            );
            return (Reason::GroupHeld, message, None);
        }
        (StoredState::Processing, _) => "runs".to_owned(),
        _ if ahead.is_paused => {
            let message = format!("job {} is ahead in its group and paused: resume it", ahead.id);
            return (Reason::GroupHeld, message, None);
        }
        _ if ahead.waits_for_parents => "waits for its parents".to_owned(),
        (StoredState::Backoff, Some(at)) => format!("retries at {}", second(at)),
        (_, Some(at)) => format!("runs at {}", second(at)),
        _ => "has not begun".to_owned(),
    };
    (Reason::Group, format!("job {} is ahead in its group and {does}", ahead.id), at)
}
