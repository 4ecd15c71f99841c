//! The text about an incident.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Rule;

/// Queues that the message of an incident names.
const MAX_NAMED_QUEUES: usize = 10;

/// Names and numbers of an incident, without payloads and messages of errors.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Details {
    /// The queue.
    #[schema(required)]
    pub queue: Option<String>,
    /// The job type.
    #[schema(required)]
    pub job_type: Option<String>,
    /// The type of the error.
    #[schema(required)]
    pub error_type: Option<String>,
    /// A job that shows the trouble.
    #[schema(required)]
    pub job_id: Option<String>,
    /// A group that a dead letter blocks, or whose job waits.
    #[schema(required)]
    pub group: Option<String>,
    /// The schedule.
    #[schema(required)]
    pub schedule: Option<String>,
    /// The host of an endpoint, or the name of a key.
    #[schema(required)]
    pub name: Option<String>,
    /// Number of dead letters, groups, seconds, events or days, as it was found.
    #[schema(required)]
    pub value: Option<i64>,
    /// Time when the last of the jobs that silent workers hold returns.
    #[schema(required)]
    pub return_by: Option<DateTime<Utc>>,
    /// Queues that share an incident: whose jobs wait and that no live worker polls, the longest
    /// waiting first; or whose jobs silent workers hold, the most first. Empty: it has another
    /// cause.
    pub queues: Vec<String>,
    /// Workers that have lost the job, the last first. Empty: it has another cause.
    pub lost_by: Vec<LosingWorker>,
}

/// A worker that has lost a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LosingWorker {
    /// The worker.
    pub worker_id: String,
    /// Its host, as it registered.
    #[schema(required)]
    pub hostname: Option<String>,
    /// Its last call; null: it is no longer known.
    #[schema(required)]
    pub last_seen_at: Option<DateTime<Utc>>,
}

impl LosingWorker {
    fn shown(&self) -> String {
        let Self { worker_id, hostname, last_seen_at } = self;
        let host = hostname.as_ref().map(|it| format!(" on {it}")).unwrap_or_default();
        let seen = last_seen_at.map(|at| format!(", last heard {} UTC", at.format("%H:%M:%S")));
        format!("{worker_id}{host}{}", seen.unwrap_or_default())
    }
}

/// One sentence about an incident.
///
/// ```
/// # use fencepost_domain::alarm::{Details, Rule, summary};
/// let details = Details {
///     job_type: Some("mail.send".to_owned()),
///     error_type: Some("SmtpTimeout".to_owned()),
///     value: Some(1),
///     ..Details::default()
/// };
/// let message = summary(Rule::DeadLetters, &details);
/// assert_eq!(message, "1 job of the type mail.send became a dead letter with SmtpTimeout.");
/// ```
#[must_use]
pub fn summary(rule: Rule, it: &Details) -> String {
    let text = |it: &Option<String>| it.clone().unwrap_or_else(|| "?".to_owned());
    let (queue, job_type) = (text(&it.queue), text(&it.job_type));
    let named = |what: &str| it.name.as_ref().map_or(format!("a {what}"), Clone::clone);
    let key = it.name.as_ref().map_or("A key".to_owned(), |it| format!("The key {it}"));
    let value = it.value.unwrap_or_default();
    match rule {
        Rule::DeadLetters => {
            let error = it.error_type.as_ref().map(|it| format!(" with {it}")).unwrap_or_default();
            match value {
                1 => format!("1 job of the type {job_type} became a dead letter{error}."),
                jobs => format!("{jobs} jobs of the type {job_type} became dead letters{error}."),
            }
        }
        Rule::OldestReady => match it.queues.as_slice() {
            [] => format!("A job of the queue {queue} has been ready for {value} seconds."),
            [only] => format!(
                "No live worker polls the queue {only}: a job has been ready for {value} seconds."
            ),
            queues => format!(
                "No live worker polls {} queues: {}. A job has been ready for {value} seconds.",
                queues.len(),
                named_queues(queues)
            ),
        },
        Rule::WorkersSilent => {
            let queues = match it.queues.as_slice() {
                [] => format!("the queue {queue}"),
                [only] => format!("the queue {only}"),
                queues => format!("{} queues: {}", queues.len(), named_queues(queues)),
            };
            let return_by = it.return_by.map_or("when their leases end".to_owned(), |at| {
                format!("by {} UTC at the latest", at.format("%Y-%m-%d %H:%M:%S"))
            });
            let jobs = if value == 1 { "job is" } else { "jobs are" };
            format!(
                "{value} running {jobs} held by workers that make no calls, in {queues}. Unless \
                 you take them back, they return {return_by}."
            )
        }
        Rule::JobsLost => lost_job(it, &job_type, &queue, value),
        Rule::GroupsBlocked => blocked_groups(&text(&it.group), &queue, value),
        Rule::GroupsWaiting => format!(
            "A job of the group {} has waited in the queue {queue} for {value} seconds: for the \
             order, a limit or the turn of its group.",
            text(&it.group)
        ),
        Rule::CircuitOpen => format!(
            "The circuit breaker of the queue {queue} has paused the job type {job_type}: resume \
             it once its cause is fixed."
        ),
        Rule::ScheduleMissed => format!("The schedule {} has missed a tick.", text(&it.schedule)),
        Rule::EndpointDisabled => format!(
            "The endpoint of {} is disabled: it failed for three days, or is gone.",
            named("webhook")
        ),
        Rule::DeliveriesDropped => format!(
            "Events were not sent to {}, {value} so far: too many deliveries to it waited.",
            named("webhook")
        ),
        Rule::PushFailing => format!(
            "Requests to {} for jobs of the queue {queue} have failed for {value} seconds.",
            named("URL")
        ),
        Rule::KeyExpiring if value == 1 => format!("{key} expires within a day."),
        Rule::KeyExpiring => format!("{key} expires within {value} days."),
    }
}

fn lost_job(it: &Details, job_type: &str, queue: &str, losses: i64) -> String {
    let workers: Vec<_> = it.lost_by.iter().map(LosingWorker::shown).collect();
    let workers =
        if workers.is_empty() { String::new() } else { format!(": {}", workers.join("; ")) };
    format!(
        "A job of the type {job_type} in the queue {queue} was lost {losses} times in a row by \
         its workers{workers}. It may end what runs it."
    )
}

fn blocked_groups(group: &str, queue: &str, groups: i64) -> String {
    match groups {
        1 => format!(
            "A dead letter blocks the group {group} in the queue {queue}: jobs wait until it is \
             retried, skipped or deleted."
        ),
        _ => format!(
            "Dead letters block {groups} groups, {group} among them, in the queue {queue}: jobs \
             wait until they are retried, skipped or deleted."
        ),
    }
}

/// The first of these, and how many more there are.
fn named_queues(queues: &[String]) -> String {
    let named = queues.iter().take(MAX_NAMED_QUEUES).map(String::as_str).collect::<Vec<_>>();
    match queues.len() - named.len() {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_incident_about_silent_workers_says_when_the_jobs_return() {
        let return_by = DateTime::from_timestamp(1_800_000_000, 0);
        let details = |value| Details {
            queue: Some("mail".to_owned()),
            value: Some(value),
            return_by,
            ..Details::default()
        };
        assert_eq!(
            summary(Rule::WorkersSilent, &details(3_100)),
            "3100 running jobs are held by workers that make no calls, in the queue mail. Unless \
             you take them back, they return by 2027-01-15 08:00:00 UTC at the latest."
        );
        let one = summary(Rule::WorkersSilent, &details(1));
        assert!(one.starts_with("1 running job is held"), "{one}");
    }

    #[test]
    fn an_incident_of_a_lost_job_names_hosts_and_when_their_workers_were_heard() {
        let worker = |worker_id: &str, hostname: Option<&str>, seconds| LosingWorker {
            worker_id: worker_id.to_owned(),
            hostname: hostname.map(str::to_owned),
            last_seen_at: DateTime::from_timestamp(seconds, 0),
        };
        let details = Details {
            queue: Some("video".to_owned()),
            job_type: Some("transcode".to_owned()),
            value: Some(3),
            lost_by: vec![
                worker("w-2", Some("host-b"), 1_800_000_000),
                worker("w-1", None, i64::MAX),
            ],
            ..Details::default()
        };
        assert_eq!(
            summary(Rule::JobsLost, &details),
            "A job of the type transcode in the queue video was lost 3 times in a row by its \
             workers: w-2 on host-b, last heard 08:00:00 UTC; w-1. It may end what runs it."
        );
    }

    #[test]
    fn an_incident_of_waiting_groups_names_the_one_that_waits_longest() {
        let details = Details {
            queue: Some("mail".to_owned()),
            group: Some("customer:42".to_owned()),
            value: Some(90),
            ..Details::default()
        };
        assert_eq!(
            summary(Rule::GroupsWaiting, &details),
            "A job of the group customer:42 has waited in the queue mail for 90 seconds: for the \
             order, a limit or the turn of its group."
        );
    }

    #[test]
    fn an_incident_of_blocked_groups_names_one() {
        let details = |value| Details {
            queue: Some("mail".to_owned()),
            group: Some("customer:42".to_owned()),
            value: Some(value),
            ..Details::default()
        };
        assert_eq!(
            summary(Rule::GroupsBlocked, &details(1)),
            "A dead letter blocks the group customer:42 in the queue mail: jobs wait until it is \
             retried, skipped or deleted."
        );
        assert_eq!(
            summary(Rule::GroupsBlocked, &details(3)),
            "Dead letters block 3 groups, customer:42 among them, in the queue mail: jobs wait \
             until they are retried, skipped or deleted."
        );
    }

    #[test]
    fn an_incident_of_many_queues_names_the_first() {
        let details = |queues: usize| {
            let queues = (1..=queues).map(|it| format!("q{it}")).collect();
            Details { value: Some(900), queues, ..Details::default() }
        };
        let says = |queues, text: &str| {
            let message = summary(Rule::OldestReady, &details(queues));
            assert!(message.starts_with(text), "{message}");
        };
        says(1, "No live worker polls the queue q1: a job has been ready for 900 seconds.");
        says(2, "No live worker polls 2 queues: q1, q2. A job");
        says(12, "No live worker polls 12 queues: q1, q2, q3, q4, q5, q6, q7, q8, q9, q10 and 2");
    }
}
