//! The rows about alarms.

use fencepost_domain::{alarm, limits};

/// The rows of "An alarm".
pub fn alarm_limits() -> Vec<(&'static str, String)> {
    let range = |bounds: Option<(i32, i32)>| {
        let (min, max) = bounds.expect("bounds");
        format!("{min}–{max}")
    };
    let letters = alarm::Rule::DeadLetters;
    let ready = alarm::Rule::OldestReady;
    assert_eq!(ready.thresholds(), alarm::Rule::PushFailing.thresholds());
    let silent = alarm::Rule::WorkersSilent;
    assert_eq!((silent.thresholds(), silent.periods()), (letters.thresholds(), ready.periods()));
    let blocked = alarm::Rule::GroupsBlocked;
    assert_eq!(blocked.periods(), ready.periods());
    let waiting = alarm::Rule::GroupsWaiting;
    assert_eq!((waiting.thresholds(), waiting.periods()), (ready.thresholds(), ready.periods()));
    vec![
        ("alarms that a project makes or changes", alarm::MAX_ALARMS.to_string()),
        ("an alarm's name", format!("{} of a–z, 0–9 and _", alarm::MAX_ALARM_NAME_CHARS)),
        ("an alarm's `queues`", alarm::MAX_ALARM_QUEUES.to_string()),
        ("`threshold` of `dead_letters` and `workers_silent`", range(letters.thresholds())),
        ("`threshold` of `jobs_lost`", range(alarm::Rule::JobsLost.thresholds())),
        ("`threshold` of `groups_blocked`", range(blocked.thresholds())),
        (
            "`threshold` of `oldest_ready`, `groups_waiting` and `push_failing`",
            range(ready.thresholds()) + " s",
        ),
        ("`threshold` of expiring keys", range(alarm::Rule::KeyExpiring.thresholds()) + " days"),
        ("`for_seconds` of dead letters", range(letters.periods()) + " s"),
        (
            "`for_seconds` of `oldest_ready`, `workers_silent`, `groups_blocked` and \
             `groups_waiting`",
            range(ready.periods()) + " s",
        ),
        ("incidents of a project that are open", alarm::MAX_OPEN_INCIDENTS.to_string()),
        (
            "incidents of a project that begin within a day",
            format!("{}, then they are not noted", alarm::MAX_INCIDENTS_A_DAY),
        ),
        (
            "mails about incidents to a member",
            format!("{} of a project a day", alarm::MAX_ALARM_MAILS_A_DAY),
        ),
        ("members who get such a mail", alarm::MAX_MAILED_MEMBERS.to_string()),
        ("a mute", format!("0–{} s", alarm::MAX_MUTE_SECONDS)),
        ("incidents that have ended", format!("kept {} days", alarm::INCIDENT_KEEP_DAYS)),
        ("incidents of one page", limits::MAX_PAGE_INCIDENTS.to_string()),
    ]
}
