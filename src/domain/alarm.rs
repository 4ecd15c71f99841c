//! Alarms: rules about a project, when an incident begins and ends, and the text of its message.

mod message;

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{access::Permission, limits::MAX_MAX_LOSSES};

pub use self::message::{Details, LosingWorker, summary};

/// Maximum number of alarms that a project has made or changed.
pub const MAX_ALARMS: i64 = 20;
/// Maximum number of queues that one alarm names.
pub const MAX_ALARM_QUEUES: usize = 50;
/// Maximum characters in an alarm's name.
pub const MAX_ALARM_NAME_CHARS: usize = 64;
/// Maximum number of open incidents of a project; further ones are not recorded.
pub const MAX_OPEN_INCIDENTS: i64 = 200;
/// Maximum number of incidents of a project that begin within a day; further ones are not recorded.
pub const MAX_INCIDENTS_A_DAY: i64 = 1_000;
/// Maximum number of mails about incidents that a member gets from one project within a day.
pub const MAX_ALARM_MAILS_A_DAY: i32 = 20;
/// Maximum number of members who get a mail about an incident.
pub const MAX_MAILED_MEMBERS: i64 = 50;
/// Days for which incidents are kept that are resolved.
pub const INCIDENT_KEEP_DAYS: i32 = 90;
/// Longest mute, in seconds (30 days).
pub const MAX_MUTE_SECONDS: i32 = 30 * 86_400;
/// An incident of dead letters, losses or dropped deliveries ends after this many minutes without a
/// new one.
pub const QUIET_MINUTES: i32 = 30;
/// Groups of a queue with dead letters that are looked at, by name: more are not counted.
pub const MAX_BLOCKED_GROUPS: i32 = 100;
/// Groups of a queue with waiting jobs that are looked at, by name: more are not found.
pub const MAX_WAITING_GROUPS: i32 = 100;
/// Jobs of a project that were lost again in the last minutes and are looked at, the last first.
pub const MAX_LOST_JOBS: i64 = 1_000;
/// Minutes for which a loss is looked at: a round of alarms takes less.
pub const LOST_MINUTES: i32 = 5;
/// Workers that an incident of losses names.
pub const MAX_LOSING_WORKERS: i64 = 5;
/// Minutes for which a missed tick is an incident, even if the next one fires.
pub const MISSED_MINUTES: i32 = 10;

/// Every pass of the loop finds a lasting incident; its row is written at most this often.
const TOUCH_SECONDS: i32 = 60;

/// Rule of an alarm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Jobs became dead letters: the first of a new error group, or `threshold` of one group within
    /// `for_seconds`.
    DeadLetters,
    /// The oldest ready job of a queue that is not paused has waited for more than `threshold`
    /// seconds, and this has been so for `for_seconds`.
    OldestReady,
    /// Workers that make no calls have held `threshold` running jobs of a queue or more for
    /// `for_seconds`.
    WorkersSilent,
    /// A job was lost `threshold` times in a row or more: it may kill its workers.
    JobsLost,
    /// In `threshold` groups of a queue or more, jobs have waited behind a dead letter for
    /// `for_seconds`.
    GroupsBlocked,
    /// The first job of a group has waited for its group, or the turn of its group, for more than
    /// `threshold` seconds, and this has been so for `for_seconds`.
    GroupsWaiting,
    /// The circuit breaker of a queue has paused a job type.
    CircuitOpen,
    /// A schedule has missed a tick.
    ScheduleMissed,
    /// An endpoint of webhooks was disabled, because it failed or was gone.
    EndpointDisabled,
    /// Events were not sent to an endpoint, because too many deliveries to it waited.
    DeliveriesDropped,
    /// Requests of a pushed queue have failed for `threshold` seconds.
    PushFailing,
    /// A key expires within `threshold` days.
    KeyExpiring,
}

impl Rule {
    /// All rules, in display order.
    pub const ALL: [Self; 12] = [
        Self::DeadLetters,
        Self::OldestReady,
        Self::WorkersSilent,
        Self::JobsLost,
        Self::GroupsBlocked,
        Self::GroupsWaiting,
        Self::CircuitOpen,
        Self::ScheduleMissed,
        Self::EndpointDisabled,
        Self::DeliveriesDropped,
        Self::PushFailing,
        Self::KeyExpiring,
    ];

    /// As stored and as shown.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::DeadLetters => "dead_letters",
            Self::OldestReady => "oldest_ready",
            Self::WorkersSilent => "workers_silent",
            Self::JobsLost => "jobs_lost",
            Self::GroupsBlocked => "groups_blocked",
            Self::GroupsWaiting => "groups_waiting",
            Self::CircuitOpen => "circuit_open",
            Self::ScheduleMissed => "schedule_missed",
            Self::EndpointDisabled => "endpoint_disabled",
            Self::DeliveriesDropped => "deliveries_dropped",
            Self::PushFailing => "push_failing",
            Self::KeyExpiring => "key_expiring",
        }
    }

    /// The rule with this name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.name() == name)
    }

    /// The least and greatest `threshold`, if the rule has one.
    #[must_use]
    pub const fn thresholds(self) -> Option<(i32, i32)> {
        match self {
            Self::DeadLetters | Self::WorkersSilent => Some((1, 1_000)),
            Self::OldestReady | Self::GroupsWaiting | Self::PushFailing => Some((60, 604_800)),
            Self::JobsLost => Some((2, MAX_MAX_LOSSES)),
            Self::GroupsBlocked => Some((1, MAX_BLOCKED_GROUPS)),
            Self::KeyExpiring => Some((1, 90)),
            _ => None,
        }
    }

    /// The least and greatest `for_seconds`, if the rule has them.
    #[must_use]
    pub const fn periods(self) -> Option<(i32, i32)> {
        match self {
            Self::DeadLetters => Some((60, 3_600)),
            Self::OldestReady | Self::WorkersSilent | Self::GroupsBlocked | Self::GroupsWaiting => {
                Some((0, 86_400))
            }
            _ => None,
        }
    }

    /// Seconds for which an incident lasts after its last finding.
    #[must_use]
    pub const fn ends_after_seconds(self) -> i32 {
        match self {
            Self::DeadLetters | Self::JobsLost | Self::DeliveriesDropped => QUIET_MINUTES * 60,
            _ => 0,
        }
    }

    /// Whether an alarm with this rule can be about some queues only.
    #[must_use]
    pub const fn has_queues(self) -> bool {
        matches!(
            self,
            Self::DeadLetters
                | Self::OldestReady
                | Self::WorkersSilent
                | Self::JobsLost
                | Self::GroupsBlocked
                | Self::GroupsWaiting
                | Self::CircuitOpen
                | Self::PushFailing
        )
    }

    /// Permission to see the key or the host that an incident is about: the one to list such keys
    /// or endpoints.
    #[must_use]
    pub const fn permission(self) -> Permission {
        match self {
            Self::KeyExpiring => Permission::Administer,
            Self::EndpointDisabled | Self::DeliveriesDropped | Self::PushFailing => {
                Permission::Webhooks
            }
            _ => Permission::Read,
        }
    }

    /// In the subject of mails.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Self::DeadLetters => "Jobs became dead letters",
            Self::OldestReady => "Jobs wait for too long",
            Self::WorkersSilent => "Workers make no calls",
            Self::JobsLost => "A job loses its workers",
            Self::GroupsBlocked => "Dead letters block groups",
            Self::GroupsWaiting => "Groups wait for too long",
            Self::CircuitOpen => "A circuit breaker is open",
            Self::ScheduleMissed => "A schedule missed a tick",
            Self::EndpointDisabled => "A webhook is disabled",
            Self::DeliveriesDropped => "Events were dropped",
            Self::PushFailing => "A push fails",
            Self::KeyExpiring => "A key expires",
        }
    }
}

/// Members that get a mail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MailTo {
    /// No one.
    None,
    /// Owners.
    Owners,
    /// Owners and admins.
    Admins,
}

impl MailTo {
    /// As stored.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Owners => "owners",
            Self::Admins => "admins",
        }
    }

    /// The one with this name; owners, if there is none.
    #[must_use]
    pub fn of_name(name: &str) -> Self {
        match name {
            "none" => Self::None,
            "admins" => Self::Admins,
            _ => Self::Owners,
        }
    }
}

/// Members of a project who read what is mailed to them: their addresses are verified.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MailReaders {
    /// The project has members, with such an address or without.
    pub has_members: bool,
    /// An owner is one.
    pub has_owners: bool,
    /// An admin is one.
    pub has_admins: bool,
}

impl MailReaders {
    /// True if such mails are meant to be read, and no one reads them. A project without members
    /// has no one who could verify an address.
    ///
    /// ```
    /// # use fencepost_domain::alarm::{MailReaders, MailTo::{Admins, None, Owners}};
    /// let admins = MailReaders { has_members: true, has_owners: false, has_admins: true };
    /// assert_eq!([None, Owners, Admins].map(|it| admins.miss(it)), [false, true, false]);
    /// assert!(!MailReaders::default().miss(Owners));
    /// ```
    #[must_use]
    pub const fn miss(self, mails: MailTo) -> bool {
        let is_read = match mails {
            MailTo::None => true,
            MailTo::Owners => self.has_owners,
            MailTo::Admins => self.has_owners || self.has_admins,
        };
        self.has_members && !is_read
    }
}

/// The name of a finding: the alarm, and its subject.
pub type Name = (String, String);

/// Something that an alarm found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The name that its incident has.
    pub name: Name,
    /// Whether it is beyond the threshold; else it only keeps an incident open.
    pub is_beyond: bool,
    /// Seconds for which it must stay beyond the threshold before it is reported.
    pub for_seconds: i32,
}

/// An incident that is not resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Open {
    /// Its alarm and subject.
    pub name: Name,
    /// Seconds since it began.
    pub seconds: i32,
    /// Seconds since the last finding that was recorded.
    pub silent_seconds: i32,
    /// Seconds without a finding after which it has ended.
    pub ends_after_seconds: i32,
    /// Whether it is reported.
    pub is_triggered: bool,
}

/// Changes of a project's incidents.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Changes {
    /// Incidents that begin, and are reported at once.
    pub trigger_new: Vec<Name>,
    /// Incidents that begin, and are reported if they last.
    pub begin: Vec<Name>,
    /// Open incidents that were found again.
    pub touch: Vec<Name>,
    /// Open incidents to report: they have lasted long enough.
    pub trigger: Vec<Name>,
    /// Unreported incidents to delete: they did not last long enough.
    pub forget: Vec<Name>,
    /// Reported incidents that have ended.
    pub resolve: Vec<Name>,
}

impl Changes {
    /// Whether nothing changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Decides what becomes of the incidents of a project: an incident begins with a finding beyond the
/// threshold, is reported once that has lasted, and ends when nothing is found any more.
#[must_use]
pub fn judge(open: &[Open], found: &[Finding]) -> Changes {
    let mut changes = Changes::default();
    for it in found.iter().filter(|it| it.is_beyond) {
        let is_long = |seconds| seconds >= it.for_seconds;
        match open.iter().find(|open| open.name == it.name) {
            None if is_long(0) => changes.trigger_new.push(it.name.clone()),
            None => changes.begin.push(it.name.clone()),
            Some(open) if !open.is_triggered && is_long(open.seconds) => {
                changes.trigger.push(it.name.clone());
            }
            Some(_) => (),
        }
    }
    let beyond: HashSet<_> = found.iter().filter(|it| it.is_beyond).map(|it| &it.name).collect();
    let held: HashSet<_> = found.iter().map(|it| &it.name).collect();
    for it in open {
        let is_held = held.contains(&it.name);
        if it.is_triggered && !is_held && it.silent_seconds >= it.ends_after_seconds {
            changes.resolve.push(it.name.clone());
        } else if it.is_triggered && is_held && it.silent_seconds >= TOUCH_SECONDS {
            changes.touch.push(it.name.clone());
        } else if !it.is_triggered && !beyond.contains(&it.name) {
            changes.forget.push(it.name.clone());
        }
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(subject: &str) -> Name {
        ("alarm".to_owned(), subject.to_owned())
    }

    fn found(subject: &str, is_beyond: bool, for_seconds: i32) -> Finding {
        Finding { name: name(subject), is_beyond, for_seconds }
    }

    fn open(subject: &str, seconds: i32, is_triggered: bool) -> Open {
        let name = name(subject);
        Open { name, seconds, silent_seconds: seconds, ends_after_seconds: 0, is_triggered }
    }

    #[test]
    fn an_incident_is_reported_once_it_has_lasted() {
        let beyond = [found("a", true, 120), found("b", true, 0)];
        let changes = judge(&[], &beyond);
        assert_eq!((changes.begin, changes.trigger_new), (vec![name("a")], vec![name("b")]));
        assert!(judge(&[open("a", 119, false), open("b", 0, true)], &beyond).is_empty());
        let changes = judge(&[open("a", 120, false), open("b", 9, true)], &beyond);
        assert_eq!(changes, Changes { trigger: vec![name("a")], ..Changes::default() });
    }

    #[test]
    fn an_incident_ends_when_nothing_is_found_and_not_between_its_thresholds() {
        let between = [found("a", false, 120), found("b", false, 0)];
        assert!(judge(&[], &between).is_empty());
        let changes = judge(&[open("a", 10, false), open("b", 10, true)], &between);
        assert_eq!(changes, Changes { forget: vec![name("a")], ..Changes::default() });
        let changes = judge(&[open("b", 10, true)], &[]);
        assert_eq!(changes, Changes { resolve: vec![name("b")], ..Changes::default() });
    }

    #[test]
    fn an_incident_can_need_silence_to_end() {
        let lasts = Open { ends_after_seconds: 1_800, ..open("b", 1_799, true) };
        assert!(judge(&[lasts], &[]).is_empty());
        let ended = Open { ends_after_seconds: 1_800, ..open("b", 1_800, true) };
        assert_eq!(judge(std::slice::from_ref(&ended), &[]).resolve, [name("b")]);
        let changes = judge(&[ended], &[found("b", false, 0)]);
        assert_eq!(changes, Changes { touch: vec![name("b")], ..Changes::default() });
    }
}
