//! Alarms: what they found, and their settings.

use askama::Template;
use axum::response::Response;
use fencepost_domain::{
    alarm::{MAX_ALARM_NAME_CHARS, MailTo, Rule},
    error::Error,
};
use fencepost_http::routes::alarms::{
    Alarm, AlarmList,
    incidents::{Incident, IncidentPage, IncidentState},
};

use super::{
    format,
    location::segment,
    page::{Frame, Here, render},
};

/// For how many seconds a button mutes.
const MUTE_SECONDS: i32 = 86_400;

#[derive(Template)]
#[template(path = "alarms.html")]
struct Page {
    frame: Frame,
    alarms: Vec<Alarm>,
    incidents: Vec<Incident>,
    next: Option<String>,
    /// Names of alarms that reach no one.
    unheard: Vec<String>,
}

/// The page.
pub async fn page(here: Here) -> Result<Response, Error> {
    let (page, _): (IncidentPage, _) = here.list("/incidents", &[]).await?;
    let AlarmList { alarms, unheard } = here.get("/alarms").await?;
    let frame = here.frame;
    let next = frame.next("/alarms", "", page.next_cursor.as_deref());
    render(&Page { frame, alarms, incidents: page.incidents, next, unheard })
}

impl Page {
    /// Where the subject of an incident is shown, if that has a page.
    fn place_of(&self, it: &Incident) -> Option<String> {
        if !self.frame.may(it.rule.permission()) {
            return None;
        }
        let path = match it.rule {
            Rule::DeadLetters => format!("/dead-letters/list?fingerprint={}", it.subject),
            Rule::JobsLost => format!("/jobs/{}", segment(it.details.job_id.as_deref()?)),
            Rule::OldestReady
            | Rule::WorkersSilent
            | Rule::GroupsBlocked
            | Rule::GroupsWaiting
            | Rule::CircuitOpen => format!("/queues/{}", segment(it.details.queue.as_deref()?)),
            Rule::PushFailing => format!("/queues/{}/push", segment(&it.subject)),
            Rule::ScheduleMissed => format!("/recurring/s/{}", segment(&it.subject)),
            Rule::EndpointDisabled | Rule::DeliveriesDropped => {
                format!("/webhooks/{}", segment(&it.subject))
            }
            Rule::KeyExpiring => "/keys".to_owned(),
        };
        Some(self.frame.to(&path))
    }
}

/// A number of a form. Unlike others it is always sent: what a request leaves out is as the rule
/// has it.
struct Number {
    name: &'static str,
    label: &'static str,
    bounds: (i32, i32),
    value: Option<i32>,
}

/// Adds to [`Incident`] what pages show of it.
trait IncidentExt {
    fn is_muted(&self, frame: &Frame) -> bool;

    fn is_open(&self) -> bool;
}

impl IncidentExt for Incident {
    fn is_muted(&self, frame: &Frame) -> bool {
        self.muted_until.is_some_and(|it| it > frame.now)
    }

    fn is_open(&self) -> bool {
        self.state == IncidentState::Open
    }
}

/// Adds to [`Alarm`] what pages show of it.
trait AlarmExt {
    /// Its settings in words, for people.
    fn says(&self) -> String;

    /// The numbers that its rule has.
    fn numbers(&self) -> Vec<Number>;

    fn is_mailed_to(&self, who: MailTo) -> bool;
}

impl AlarmExt for Alarm {
    fn says(&self) -> String {
        let threshold = self.threshold.unwrap_or_default();
        let for_seconds = self.for_seconds.unwrap_or_default();
        match self.rule {
            Rule::DeadLetters => format!(
                "the first dead letter of an error group, or {threshold} of one within \
                 {for_seconds} s"
            ),
            Rule::OldestReady => {
                format!("a job is ready for more than {threshold} s, and so for {for_seconds} s")
            }
            Rule::WorkersSilent => format!(
                "workers that make no calls hold {threshold} running jobs of a queue or more for \
                 {for_seconds} s"
            ),
            Rule::JobsLost => format!("a job is lost {threshold} times in a row or more"),
            Rule::GroupsBlocked => format!(
                "dead letters block {threshold} groups of a queue or more for {for_seconds} s"
            ),
            Rule::GroupsWaiting => format!(
                "a job waits for its group for more than {threshold} s, and so for {for_seconds} s"
            ),
            Rule::CircuitOpen => "a circuit breaker pauses a job type".to_owned(),
            Rule::ScheduleMissed => "a schedule misses a tick".to_owned(),
            Rule::EndpointDisabled => "a webhook fails for three days, or is gone".to_owned(),
            Rule::DeliveriesDropped => "events are not sent to a webhook".to_owned(),
            Rule::PushFailing => format!("requests of a pushed queue fail for {threshold} s"),
            Rule::KeyExpiring => format!("a key expires within {threshold} days"),
        }
    }

    fn numbers(&self) -> Vec<Number> {
        let (threshold, period) = match self.rule {
            Rule::DeadLetters => ("Dead letters", "Within these seconds"),
            Rule::KeyExpiring => ("Days", ""),
            Rule::WorkersSilent => ("Running jobs", "For these seconds"),
            Rule::JobsLost => ("Losses in a row", ""),
            Rule::GroupsBlocked => ("Groups", "For these seconds"),
            _ => ("Seconds", "For these seconds"),
        };
        let number = |name, label, bounds: Option<_>, value| {
            bounds.map(|bounds| Number { name, label, bounds, value })
        };
        let numbers = [
            number("threshold", threshold, self.rule.thresholds(), self.threshold),
            number("for_seconds", period, self.rule.periods(), self.for_seconds),
        ];
        numbers.into_iter().flatten().collect()
    }

    fn is_mailed_to(&self, who: MailTo) -> bool {
        self.mail_to == who
    }
}
