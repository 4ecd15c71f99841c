//! Webhooks: which events there are, who wants them, how a delivery is signed, and what the answer
//! to it means.
//!
//! Source of headers and signatures: Standard Webhooks 1.0 (<https://www.standardwebhooks.com>).

use base64::{Engine as _, prelude::BASE64_STANDARD};
use chrono::{DateTime, Utc};
use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sha2::Sha256;
use utoipa::ToSchema;

use super::{
    actor::ActorKind,
    alarm::{Details, Rule},
    backoff::{JitterKind, RetryPolicy, RetryStrategy},
};

/// Types of events that an endpoint can ask for, in display order, and when each is sent. The API's
/// document, its checks, the console and the guide follow this table.
pub const EVENT_TYPES: [(&str, &str); 11] = [
    ("job.succeeded", "a job has succeeded"),
    ("job.attempt_failed", "an attempt failed, timed out or lost its lease, also the last one"),
    ("job.dead_lettered", "a job has failed for the last time"),
    (JOB_CANCELLED, "a job was cancelled, or was not needed"),
    (BATCH_SUCCEEDED, "all jobs of a batch have succeeded or were not needed"),
    (BATCH_FAILED, "all jobs of a batch have ended, and some have failed; it can succeed later"),
    ("workflow.succeeded", "a workflow has succeeded; again, if retried jobs change its state"),
    ("workflow.failed", "all jobs of a workflow have ended, and some have failed"),
    ("workflow.cancelled", "a workflow was cancelled, and all of its jobs have ended"),
    (ALARM_TRIGGERED, "an alarm has found something"),
    (ALARM_RESOLVED, "what an alarm has found has ended"),
];
/// The type of an event about a cancelled job.
pub const JOB_CANCELLED: &str = "job.cancelled";
/// The type of an event about a batch whose jobs have succeeded, all of them.
pub const BATCH_SUCCEEDED: &str = "batch.succeeded";
/// And of one whose jobs have ended, some without success.
pub const BATCH_FAILED: &str = "batch.failed";
/// The type of an event about an incident that begins.
pub const ALARM_TRIGGERED: &str = "alarm.triggered";
/// And of one about its end.
pub const ALARM_RESOLVED: &str = "alarm.resolved";
/// The type of what `POST /v1/webhooks/{endpoint_id}/test` sends. Every endpoint gets it.
pub const TEST_EVENT: &str = "endpoint.test";
/// All types.
const EVERYTHING: &str = "*";
/// Bytes of a secret.
pub const SECRET_BYTES: usize = 32;
/// The prefix of a secret's text.
const SECRET_PREFIX: &str = "whsec_";
/// Failures after which a delivery is a dead letter: after about 71 hours.
pub const MAX_DELIVERY_ATTEMPTS: i32 = 20;
/// The longest pause that an answer may ask for, in seconds.
pub const MAX_RETRY_AFTER_SECONDS: u32 = 3_600;
/// Hours without a success after which an endpoint is disabled.
pub const FAILING_HOURS: i32 = 72;
/// And the number of tries that must have failed since.
pub const FAILING_DELIVERIES: i32 = 10;
/// The header that says how many deliveries have led to a request: who enqueues because of one
/// sends it along.
pub const HOP_HEADER: &str = "fencepost-hop";
/// Deliveries that lead to each other. No endpoint is notified of jobs that the last one led to: it
/// may be a loop.
pub const MAX_HOPS: i16 = 5;
/// Characters of an error's message in an event.
pub const MAX_EVENT_MESSAGE_CHARS: usize = 1_024;
/// Bytes of a job's tags, as JSON, that are in an event: each endpoint gets and stores a copy.
pub const MAX_EVENT_TAGS_BYTES: usize = 4_096;
/// Deliveries to one endpoint that may wait. Further events are dropped.
pub const MAX_WAITING_DELIVERIES: i64 = 50_000;
/// Deliveries to one endpoint that may wait before each further one must be small: it leaves out
/// what its job shows, too.
pub const MAX_LARGE_DELIVERIES: i64 = 1_000;
/// Bytes of a delivery that is not small.
pub const MAX_DELIVERY_BYTES: usize = 16 * 1_024;
/// Bytes of a small delivery.
pub const MAX_SMALL_DELIVERY_BYTES: usize = 1_024;
/// Bytes of the deliveries to one endpoint that may wait, in MiB: the numbers above keep them
/// below.
pub const MAX_WAITING_DELIVERIES_MIB: i64 = 64;

const _: () = assert!(
    MAX_LARGE_DELIVERIES * MAX_DELIVERY_BYTES as i64
        + (MAX_WAITING_DELIVERIES - MAX_LARGE_DELIVERIES) * MAX_SMALL_DELIVERY_BYTES as i64
        <= MAX_WAITING_DELIVERIES_MIB * 1_024 * 1_024
);

/// The largest delivery that an endpoint can get for which this many wait, in bytes.
///
/// ```
/// # use fencepost_domain::webhook::max_delivery_bytes;
/// assert_eq!(max_delivery_bytes(999), Some(16_384));
/// assert_eq!(max_delivery_bytes(1_000), Some(1_024));
/// assert_eq!(max_delivery_bytes(50_000), None);
/// ```
#[must_use]
pub const fn max_delivery_bytes(waiting: i64) -> Option<usize> {
    match waiting {
        ..MAX_LARGE_DELIVERIES => Some(MAX_DELIVERY_BYTES),
        MAX_LARGE_DELIVERIES..MAX_WAITING_DELIVERIES => Some(MAX_SMALL_DELIVERY_BYTES),
        _ => None,
    }
}

/// The types that a pattern names: one, those of a group such as `job.*`, or all by `*`.
///
/// ```
/// # use fencepost_domain::webhook::named_by;
/// assert_eq!(named_by("job.cancelled"), ["job.cancelled"]);
/// assert_eq!(named_by("job.*").len(), 4);
/// assert!(named_by("job.unknown").is_empty() && named_by("j*").is_empty());
/// ```
#[must_use]
pub fn named_by(pattern: &str) -> Vec<&'static str> {
    let is_named = |it: &&str| match pattern.strip_suffix(EVERYTHING) {
        Some("") => true,
        Some(group) => group.ends_with('.') && it.starts_with(group),
        None => *it == pattern,
    };
    event_types().filter(is_named).collect()
}

/// The names of [`EVENT_TYPES`].
pub fn event_types() -> impl Iterator<Item = &'static str> {
    EVENT_TYPES.into_iter().map(|(name, _)| name)
}

/// Whether a list of names, or of beginnings as in `mail.*`, includes this one. An empty list
/// includes all.
///
/// ```
/// # use fencepost_domain::webhook::includes;
/// let names = ["mail.*".to_owned(), "report".to_owned()];
/// assert!(includes(&names, "mail.send") && includes(&names, "report") && includes(&[], "any"));
/// assert!(!includes(&names, "mail") && !includes(&names, "reports"));
/// ```
#[must_use]
pub fn includes(names: &[String], name: &str) -> bool {
    let fits = |it: &String| match it.strip_suffix(".*") {
        Some(group) => name.strip_prefix(group).is_some_and(|rest| rest.starts_with('.')),
        None => it == name || it == EVERYTHING,
    };
    names.is_empty() || names.iter().any(fits)
}

/// Whether a name of such a list can include anything: `*` stands for all names, or at the end for
/// those that begin so.
///
/// ```
/// # use fencepost_domain::webhook::is_filter;
/// assert!(is_filter("mail.*") && is_filter("*") && is_filter("mail"));
/// assert!(!is_filter("mail*") && !is_filter("*.send") && !is_filter("a*.*"));
/// ```
#[must_use]
pub fn is_filter(name: &str) -> bool {
    name == EVERYTHING || !name.strip_suffix(".*").unwrap_or(name).contains('*')
}

/// How deliveries are retried: 5 s, 15 s, 45 s and so on, at most every six hours.
#[must_use]
pub fn retry_policy() -> RetryPolicy {
    RetryPolicy {
        strategy: RetryStrategy::Exponential,
        initial_seconds: 5,
        multiplier: 3.0,
        max_seconds: 21_600,
        jitter: JitterKind::Equal,
        jitter_seconds: 0,
        non_retryable_types: Vec::new(),
    }
}

/// The text of a secret, as it is shown once and as libraries take it.
#[must_use]
pub fn secret_text(secret: &[u8]) -> String {
    format!("{SECRET_PREFIX}{}", BASE64_STANDARD.encode(secret))
}

/// The header `webhook-signature`: one signature with each secret. `timestamp` counts seconds since
/// 1970.
#[must_use]
pub fn signatures(secrets: &[Vec<u8>], id: &str, timestamp: i64, body: &str) -> String {
    let sign = |secret: &Vec<u8>| {
        let mut mac = Hmac::<Sha256>::new_from_slice(secret)
            .unwrap_or_else(|_| unreachable!("a key of any length will do"));
        mac.update(format!("{id}.{timestamp}.{body}").as_bytes());
        format!("v1,{}", BASE64_STANDARD.encode(mac.finalize().into_bytes()))
    };
    secrets.iter().map(sign).collect::<Vec<_>>().join(" ")
}

/// The header `Retry-After` of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryAfter {
    /// The answer has no such header.
    Absent,
    /// The header asks for a pause of this many seconds.
    Seconds(u32),
    /// The header is neither seconds nor a date.
    Unreadable,
}

impl RetryAfter {
    /// The pause that it asks for, up to [`MAX_RETRY_AFTER_SECONDS`].
    #[must_use]
    pub fn asked_seconds(self) -> Option<u32> {
        match self {
            Self::Seconds(seconds) => Some(seconds.min(MAX_RETRY_AFTER_SECONDS)),
            Self::Absent | Self::Unreadable => None,
        }
    }
}

/// The meaning of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The endpoint has it.
    Delivered,
    /// It is tried again; after this many seconds, if the answer named them.
    Failed(Option<u32>),
    /// The endpoint wants nothing more.
    Gone,
}

/// The meaning of a status, and of the header `Retry-After` beside it.
///
/// ```
/// # use fencepost_domain::webhook::{RetryAfter::{Absent, Seconds, Unreadable}, Verdict, verdict};
/// assert_eq!(verdict(204, Absent), Verdict::Delivered);
/// assert_eq!(verdict(302, Absent), Verdict::Failed(None));
/// assert_eq!(verdict(503, Seconds(9_999)), Verdict::Failed(Some(3_600)));
/// assert_eq!(verdict(503, Unreadable), Verdict::Failed(None));
/// assert_eq!(verdict(500, Seconds(60)), Verdict::Failed(None));
/// assert_eq!(verdict(410, Absent), Verdict::Gone);
/// ```
#[must_use]
pub fn verdict(status: u16, retry_after: RetryAfter) -> Verdict {
    match status {
        200..=299 => Verdict::Delivered,
        410 => Verdict::Gone,
        429 | 503 => Verdict::Failed(retry_after.asked_seconds()),
        _ => Verdict::Failed(None),
    }
}

/// Body of a request to an endpoint.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct WebhookEvent {
    /// Type of the event. The API's document lists [`EVENT_TYPES`] here.
    #[serde(rename = "type")]
    #[schema(example = "job.dead_lettered")]
    pub kind: String,
    /// When it happened.
    pub timestamp: DateTime<Utc>,
    /// Subject of the event.
    pub data: WebhookData,
}

impl WebhookEvent {
    /// Leaves out the longest texts of people's own that the job shows, too.
    #[must_use]
    pub fn shortened(mut self) -> Self {
        if let Some(job) = &mut self.data.job {
            job.tags_cut |= job.tags.take().is_some();
            job.group = None;
        }
        if let Some(error) = &mut self.data.error {
            error.message = None;
        }
        if let Some(cause) = &mut self.data.cancelled_by {
            cause.reason = None;
        }
        self
    }
}

/// Subject of an event.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct WebhookData {
    /// The project.
    pub project: WebhookProject,
    /// The job; null if it is about none.
    #[schema(required)]
    pub job: Option<WebhookJob>,
    /// The error of the attempt; null if it did not fail.
    #[schema(required)]
    pub error: Option<WebhookError>,
    /// Author and reason of a cancellation; null in events of other types, and if they are not
    /// known.
    #[serde(default)]
    #[schema(required)]
    pub cancelled_by: Option<WebhookChange>,
    /// The batch; null in events of other types.
    #[serde(default)]
    #[schema(required)]
    pub batch: Option<WebhookBatch>,
    /// The workflow that the event is about; null in events of other types.
    #[serde(default)]
    #[schema(required)]
    pub workflow: Option<WebhookWorkflow>,
    /// Finding of an alarm; null in events of other types.
    #[serde(default)]
    #[schema(required)]
    pub incident: Option<WebhookIncident>,
}

/// Cause of a change of a job.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct WebhookChange {
    /// Kind of the actor.
    pub kind: ActorKind,
    /// Id of the key, the account, the operation, the parent job or the schedule.
    #[schema(required, example = "key_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: Option<String>,
    /// Name of a key; null for others.
    #[schema(required, example = "deploy")]
    pub name: Option<String>,
    /// Reason that the author has given; null, too, while many deliveries to the endpoint wait.
    #[schema(required)]
    pub reason: Option<String>,
}

/// The batch of an event, as it was when the event was read.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct WebhookBatch {
    /// Id of the batch.
    #[schema(example = "batch_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// Display name; null: it has none, or the batch was deleted.
    #[schema(required)]
    pub name: Option<String>,
    /// Number of its jobs; null: the batch was deleted, and so in the fields below.
    #[schema(required)]
    pub total_jobs: Option<i64>,
    /// Number of jobs that have succeeded.
    #[schema(required)]
    pub succeeded_jobs: Option<i64>,
    /// Number of dead-lettered jobs.
    #[schema(required)]
    pub dead_letter_jobs: Option<i64>,
    /// Number of cancelled jobs.
    #[schema(required)]
    pub cancelled_jobs: Option<i64>,
    /// Number of skipped jobs.
    #[schema(required)]
    pub skipped_jobs: Option<i64>,
}

/// The workflow of an event, as it was when the event was read.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct WebhookWorkflow {
    /// Id of the workflow.
    #[schema(example = "wf_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// Display name; null: it has none, or the workflow was deleted.
    #[schema(required)]
    pub name: Option<String>,
    /// Number of its jobs, including pruned ones; 0: the workflow was deleted.
    pub total_jobs: i64,
    /// Number of jobs that have succeeded.
    pub succeeded_jobs: i64,
}

/// An incident of an event, as it was when the event was read.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct WebhookIncident {
    /// Id of the incident.
    #[schema(example = "inc_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// The alarm.
    #[schema(example = "dead_letters")]
    pub alarm: String,
    /// Rule of the alarm.
    pub rule: Rule,
    /// Subject of the incident: an error group, a queue, a schedule, an endpoint or a key.
    pub subject: String,
    /// The incident in a sentence.
    pub summary: String,
    /// The summary in fields for programs, as it was when the incident began.
    pub details: Details,
    /// Time when the incident began.
    pub began_at: DateTime<Utc>,
    /// Time of its end; null: the incident lasts.
    #[schema(required)]
    pub resolved_at: Option<DateTime<Utc>>,
}

/// The project of an event.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct WebhookProject {
    /// Id of the project.
    #[schema(example = "proj_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// Slug.
    #[schema(example = "shop")]
    pub slug: String,
}

/// The job of an event, as it was when the event was read: it may have changed since.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct WebhookJob {
    /// Id of the job.
    #[schema(example = "job_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// Queue of the job.
    pub queue: String,
    /// Type of the job.
    pub job_type: String,
    /// Group of the job; null, too, while many deliveries to the endpoint wait.
    #[serde(default)]
    #[schema(required, example = "customer:42")]
    pub group: Option<String>,
    /// The attempt that the event is about; 0: it was never claimed.
    pub attempt: i32,
    /// Failures after which it is a dead letter; null: the job was deleted meanwhile, and so in all
    /// that follows.
    #[schema(required)]
    pub max_attempts: Option<i32>,
    /// When it was enqueued.
    #[schema(required)]
    pub created_at: Option<DateTime<Utc>>,
    /// Tags; null, too, if they were left out.
    #[schema(required, value_type = Option<std::collections::BTreeMap<String, String>>)]
    pub tags: Option<Box<RawValue>>,
    /// True if the tags were left out, because they have more than 4,096 bytes, or because many
    /// deliveries to the endpoint wait: read the job.
    #[serde(default)]
    #[schema(required)]
    pub tags_cut: bool,
    /// The batch that it belongs to.
    #[schema(required)]
    pub batch_id: Option<String>,
    /// The workflow that it belongs to.
    #[schema(required)]
    pub workflow_id: Option<String>,
}

/// Why an attempt failed.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct WebhookError {
    /// Outcome of the attempt: `failed`, `timeout`, `lease_expired` or `released`.
    pub outcome: String,
    /// Type of the error, as the worker reported it.
    #[serde(rename = "type")]
    #[schema(required, example = "SmtpTimeout")]
    pub kind: Option<String>,
    /// Message of the error, cut to 1,024 characters; null, too, while many deliveries to the
    /// endpoint wait.
    #[schema(required)]
    pub message: Option<String>,
    /// Time of the next attempt; null: the job is a dead letter.
    #[schema(required)]
    pub retry_at: Option<DateTime<Utc>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_as_the_specification_computes_it() {
        // The example of the specification.
        let secret = BASE64_STANDARD.decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").expect("base64");
        let body = r#"{"test": 2432232314}"#;
        let id = "msg_p5jXN8AQM9LWM0D4loKWxJek";
        let one = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";
        let secrets = vec![secret.clone(), secret];
        assert_eq!(signatures(&secrets[..1], id, 1_614_265_330, body), one);
        assert_eq!(signatures(&secrets, id, 1_614_265_330, body), format!("{one} {one}"));
    }

    #[test]
    fn deliveries_are_retried_for_about_three_days() {
        let policy = retry_policy();
        let hours = |jitter| {
            let waits = (1..MAX_DELIVERY_ATTEMPTS).map(|it| policy.delay(it, jitter));
            waits.map(|it| it.as_secs_f64()).sum::<f64>() / 3_600.0
        };
        let longest = hours(crate::backoff::Jitter::FULL);
        assert!((60.0..75.0).contains(&longest), "{longest}");
    }
}
