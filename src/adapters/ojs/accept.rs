//! New jobs: validation, and what is stored natively.

use chrono::{DateTime, TimeDelta, Utc};
use fencepost_domain::{
    backoff::{JitterKind, RetryPolicy, RetryStrategy},
    constraint_key,
    error::Error,
    formats::whole_seconds,
    ids::JobId,
    job::{DEFAULT_QUEUE, StoredState},
    limits,
    plan::{Limits, Tenant},
};
use fencepost_engine::{
    enqueue::{
        Extras, NewJob, Start,
        dependencies::{JobWithDependencies, OnConflict},
    },
    jobs::JobRow,
};
use fencepost_web::wire::validate::Check;
use serde_json::value::RawValue;
use sqlx::types::Json as Stored;
use uuid::Uuid;

use super::{
    MAX_ENVELOPE_BYTES, RETRY_FIELD, VISIBILITY_SECONDS,
    fields::{Fields, StoredEnvelope, When, duration, is_queue_name, is_type_name, when},
    unique::{Unique, accept_unique},
};

/// Maximum characters of a job's type.
const MAX_TYPE_CHARS: usize = 255;
/// The specification's default retry policy.
const DEFAULT_RETRY: RetryPolicy = RetryPolicy {
    strategy: RetryStrategy::Exponential,
    initial_seconds: 1,
    multiplier: 2.0,
    max_seconds: 300,
    jitter: JitterKind::Additive,
    jitter_seconds: 1,
    non_retryable_types: Vec::new(),
};
const DEFAULT_MAX_ATTEMPTS: i32 = 3;
const UNKNOWN_STRATEGY: &str = "must be none, linear, exponential or polynomial";
const TIMEOUT_MS: &str = "timeout_ms";
/// Attributes of the specification's job that are options in its HTTP binding. Some clients send
/// them beside `type`.
const BESIDE_TYPE: [&str; 8] = [
    "queue",
    "priority",
    TIMEOUT_MS,
    "delay_until",
    "scheduled_at",
    "expires_at",
    "retry",
    "unique",
];

/// The option of jobs that wait for an activation. Fencepost has no such state, and its own
/// `pending` is another one: these jobs are stored as scheduled.
const PENDING: &str = "pending";
/// The delay that marks such a job: 68 years, more than a client can ask for.
const UNTIL_ACTIVATED_SECONDS: i32 = i32::MAX;
const _: () = assert!(UNTIL_ACTIVATED_SECONDS as i64 > limits::MAX_DELAY_SECONDS);
const UNTIL_ACTIVATED: Start = Start::After(UNTIL_ACTIVATED_SECONDS);

/// An accepted job.
pub struct Accepted {
    pub entry: JobWithDependencies,
    /// Milliseconds after which another job may take the unique key, even if this job still waits
    /// or runs.
    pub unique_ms: Option<i64>,
    /// Expiry in milliseconds from the present: only the database's clock knows the time.
    pub expires_after_ms: Option<i64>,
    /// The rate limit that it sets for its queue, in jobs per second.
    pub max_per_second: Option<i32>,
}

impl Accepted {
    /// Sets the expiry, once the time is known.
    pub fn expire(&mut self, now: DateTime<Utc>) {
        let Some(ms) = self.expires_after_ms else { return };
        let extras = self.entry.job.extras.get_or_insert_default();
        extras.expires_at = now.checked_add_signed(TimeDelta::milliseconds(ms));
    }
}

/// Checks a job and prepares it to be stored. All that was sent but `args`, `type` and `id` is kept
/// as its envelope.
///
/// # Errors
/// [`Error::FieldTooLarge`]; other broken rules are added to `check`.
pub fn accept(tenant: Tenant, mut sent: Fields, check: &mut Check) -> Result<Accepted, Error> {
    let kept = sent.clone();
    let job_type: Option<String> = sent.need("type", check);
    job_type.iter().for_each(|it| check_type(it, check));
    let job_type = job_type.unwrap_or_default();
    let payload = accept_args(&mut sent, &tenant.limits, check)?;
    let given = sent.take::<String>("id", check);
    let id = given.as_deref().map(|it| accept_id(it, check));
    let mut options = take_options(&mut sent, check);
    let mut inner = Check::below(format!("{}options.", check.path()));
    let queue = accept_queue(&mut options, &mut inner);
    let rank = accept_rank(&mut options, &mut inner);
    let timeout_seconds = accept_timeout(&mut options, &mut inner);
    let start = accept_start(&mut options, &mut inner);
    let expiry = accept_expiry(&mut options, &mut inner);
    let (expires_at, expires_after_ms) = match expiry {
        Some(When::At(at)) => (Some(at), None),
        Some(When::AfterMs(ms)) => (None, Some(ms)),
        None => (None, None),
    };
    let (retry, max_attempts) = accept_retry(&mut options, &mut inner);
    let unique = accept_unique(&mut options, (&job_type, &queue, &kept), &mut inner);
    let awaits_activation = options.take::<bool>(PENDING, &mut inner).unwrap_or(false);
    let start = if awaits_activation { UNTIL_ACTIVATED } else { start };
    let labels = accept_labels(&mut options, &mut inner);
    check_visibility(&mut options, &mut inner);
    let max_per_second = accept_rate_limit(&mut options, &mut inner);
    check.absorb(inner);
    let envelope = envelope(kept, check)?;
    let (unique_key, on_conflict, unique_ms) = match unique {
        Some(Unique { key, on_conflict, period_ms }) => (Some(key), on_conflict, period_ms),
        None => (None, OnConflict::Reject, None),
    };
    let extras = Extras {
        constraint_key: constraint_key::of(&job_type, &labels, None),
        labels,
        unique_key,
        expires_at,
        envelope: Some(envelope),
        ..Extras::default()
    };
    let job = NewJob {
        project_id: tenant.project_id,
        id: id.flatten().unwrap_or_else(JobId::generate),
        queue,
        job_type,
        rank,
        start,
        max_attempts: Some(max_attempts),
        timeout_seconds,
        payload,
        retry: Some(Stored(retry)),
        tags: None,
        extras: Some(Box::new(extras)),
    };
    let path = check.path().to_owned();
    let entry = JobWithDependencies {
        is_id_given: given.is_some(),
        path,
        ..JobWithDependencies::new(job, on_conflict)
    };
    Ok(Accepted { entry, unique_ms, expires_after_ms, max_per_second })
}

/// Whether a job waits to be activated.
pub fn awaits_activation(row: &JobRow) -> bool {
    let waits = (row.run_at - row.created_at).num_seconds() == i64::from(UNTIL_ACTIVATED_SECONDS);
    if row.state != StoredState::Scheduled || !waits {
        return false;
    }
    stored_options(row).take(PENDING, &mut Check::default()).unwrap_or(false)
}

/// The options that a stored job was sent with. They were checked then.
pub fn stored_options(row: &JobRow) -> Fields {
    take_options(&mut StoredEnvelope::read(row.envelope.as_deref()), &mut Check::default())
}

/// The options of a job, or of a schedule's jobs, with those that were sent beside its type.
pub fn take_options(sent: &mut Fields, check: &mut Check) -> Fields {
    let mut options: Fields = sent.take("options", check).unwrap_or_default();
    let mut beside: Vec<_> =
        BESIDE_TYPE.iter().filter_map(|it| Some((*it, *it, sent.raw(it)?))).collect();
    // The attribute has seconds, and 0 is the default.
    if let Some(seconds) = sent.take::<i64>("timeout", check).filter(|it| *it != 0) {
        check.range("timeout", seconds, 1, i64::from(limits::MAX_TIMEOUT_SECONDS));
        let ms = RawValue::from_string(seconds.saturating_mul(1_000).to_string());
        beside.push(("timeout", TIMEOUT_MS, ms.unwrap_or_default()));
    }
    for (field, option, value) in beside {
        let kept = options.0.entry(option.to_owned()).or_insert_with(|| value.clone());
        if kept.get() != value.get() {
            check.refuse(field, format!("is another value than `options.{option}`"));
        }
    }
    options
}

/// Labels that its worker must have.
fn accept_labels(options: &mut Fields, check: &mut Check) -> Vec<String> {
    let mut labels: Vec<String> = options.take("labels", check).unwrap_or_default();
    check.names("labels", &labels, limits::MAX_LABELS, limits::MAX_LABEL_CHARS);
    labels.sort();
    labels.dedup();
    labels
}

fn check_visibility(options: &mut Fields, check: &mut Check) {
    const NAME: &str = "visibility_timeout_ms";
    if let Some(ms) = options.take::<i64>(NAME, check) {
        // It stays in the envelope. At a fetch it can only shorten the default lease.
        check.range(NAME, ms, 1, i64::from(VISIBILITY_SECONDS) * 1_000);
    }
}

/// Only the rate of a queue is supported: rates of single keys have no native equivalent.
fn accept_rate_limit(options: &mut Fields, check: &mut Check) -> Option<i32> {
    let mut sent = options.take::<Fields>("rate_limit", check)?;
    let path = check.path().to_owned();
    let mut inner = Check::below(format!("{path}rate_limit."));
    let count = sent.need::<i32>("max_per_second", &mut inner);
    if let Some(count) = count {
        inner.range("max_per_second", count, 1, limits::MAX_RATE_LIMIT_COUNT);
    }
    for name in ["key", "concurrency", "rate", "throttle", "on_limit"] {
        sent.refuse(name, "is not supported: max_per_second limits the queue", &mut inner);
    }
    check.absorb(inner);
    count
}

/// Checks the type of a job, or of a schedule's jobs.
pub fn check_type(job_type: &str, check: &mut Check) {
    check.name("type", job_type, MAX_TYPE_CHARS);
    if !job_type.is_empty() && !is_type_name(job_type) {
        check.refuse("type", "must be dotted lower case, such as email.send");
    }
}

/// The arguments, as they came.
///
/// # Errors
/// [`Error::FieldTooLarge`].
pub fn accept_args(sent: &mut Fields, plan: &Limits, check: &mut Check) -> Result<String, Error> {
    let args = match sent.0.remove("args") {
        Some(args) if args.get().starts_with('[') => args,
        Some(_) => {
            check.refuse("args", "must be an array");
            return Ok("[]".to_owned());
        }
        None => {
            check.refuse("args", "must be sent");
            return Ok("[]".to_owned());
        }
    };
    check.size("args", &args, plan.max_payload_bytes())?;
    check.depth("args", &args);
    Ok(Box::<str>::from(args).into_string())
}

/// The queue of jobs and schedules.
pub fn accept_queue(options: &mut Fields, check: &mut Check) -> String {
    let queue = options.take("queue", check).unwrap_or_else(|| DEFAULT_QUEUE.to_owned());
    check.name("queue", &queue, limits::MAX_QUEUE_CHARS);
    if !queue.is_empty() && !is_queue_name(&queue) {
        check.refuse("queue", "must be made of a to z, 0 to 9, `-` and `.`");
    }
    queue
}

/// The timeout of jobs and schedules, in seconds.
pub fn accept_timeout(options: &mut Fields, check: &mut Check) -> i32 {
    const MAX_TIMEOUT_MS: i64 = limits::MAX_TIMEOUT_SECONDS as i64 * 1_000;
    let timeout_ms = options.take(TIMEOUT_MS, check).unwrap_or(MAX_TIMEOUT_MS);
    check.range(TIMEOUT_MS, timeout_ms, 1, MAX_TIMEOUT_MS);
    i32::try_from(whole_seconds(timeout_ms)).unwrap_or(limits::MAX_TIMEOUT_SECONDS)
}

/// The negated priority of jobs and schedules.
pub fn accept_rank(options: &mut Fields, check: &mut Check) -> i16 {
    let priority: i16 = options.take("priority", check).unwrap_or(0);
    check.range("priority", priority, limits::MIN_PRIORITY, limits::MAX_PRIORITY);
    priority.saturating_neg()
}

fn accept_id(text: &str, check: &mut Check) -> Option<JobId> {
    const VERSION: usize = 7;
    let id = text.parse::<Uuid>().ok().filter(|it| it.get_version_num() == VERSION);
    let id = id.filter(|it| it.to_string() == text);
    if id.is_none() {
        check.refuse("id", "must be a UUIDv7 in lower case");
    }
    id.map(JobId)
}

/// When a job may run.
pub fn accept_start(options: &mut Fields, check: &mut Check) -> Start {
    let mut start = Start::After(0);
    for name in ["delay_until", "scheduled_at"] {
        let Some(text) = options.take::<String>(name, check) else { continue };
        match when(&text) {
            Some(When::At(at)) => {
                check.time(name, Some(at));
                start = Start::At(at);
            }
            Some(When::AfterMs(ms)) => {
                let seconds = whole_seconds(ms);
                check.range(name, seconds, 0, limits::MAX_DELAY_SECONDS);
                start = Start::After(i32::try_from(seconds).unwrap_or(i32::MAX));
            }
            None => check.refuse(name, "must be a time as in RFC 3339, or `+` and a duration"),
        }
    }
    start
}

fn accept_expiry(options: &mut Fields, check: &mut Check) -> Option<When> {
    let text = options.take::<String>("expires_at", check)?;
    let expiry = when(&text);
    match expiry {
        Some(When::At(at)) => check.time("expires_at", Some(at)),
        Some(When::AfterMs(ms)) => {
            check.range("expires_at", whole_seconds(ms), 0, limits::MAX_DELAY_SECONDS);
        }
        None => {
            check.refuse("expires_at", "must be a time as in RFC 3339, or `+` and a duration");
        }
    }
    expiry
}

/// The retry policy of jobs and schedules, and their number of attempts.
pub fn accept_retry(options: &mut Fields, check: &mut Check) -> (RetryPolicy, i32) {
    let Some(mut sent) = options.take::<Fields>("retry", check) else {
        return (DEFAULT_RETRY, DEFAULT_MAX_ATTEMPTS);
    };
    let prefix = check.path().strip_suffix("options.").unwrap_or_default();
    let mut inner = Check::below(format!("{prefix}{RETRY_FIELD}."));
    let max_attempts = sent.take("max_attempts", &mut inner).unwrap_or(DEFAULT_MAX_ATTEMPTS);
    inner.range("max_attempts", max_attempts, 0, limits::MAX_MAX_ATTEMPTS);
    let multiplier =
        sent.take("backoff_coefficient", &mut inner).unwrap_or(DEFAULT_RETRY.multiplier);
    inner.range("backoff_coefficient", multiplier, 1.0, limits::MAX_RETRY_MULTIPLIER);
    let initial_seconds =
        interval(&mut sent, "initial_interval", DEFAULT_RETRY.initial_seconds, &mut inner);
    let max_seconds = interval(&mut sent, "max_interval", DEFAULT_RETRY.max_seconds, &mut inner);
    let non_retryable: Vec<String> =
        sent.take("non_retryable_errors", &mut inner).unwrap_or_default();
    let (max, max_chars) = (limits::MAX_NON_RETRYABLE_TYPES, limits::MAX_ERROR_TYPE_CHARS);
    inner.names("non_retryable_errors", &non_retryable, max, max_chars);
    let strategy = sent.take::<String>("backoff_strategy", &mut inner);
    let strategy = strategy.or_else(|| sent.take("backoff_type", &mut inner));
    let strategy = match strategy.as_deref() {
        None | Some("exponential") => RetryStrategy::Exponential,
        Some("linear") => RetryStrategy::Linear,
        Some("polynomial") => RetryStrategy::Polynomial,
        Some("none" | "constant") => RetryStrategy::Constant,
        Some(_) => {
            inner.refuse("backoff_strategy", UNKNOWN_STRATEGY);
            RetryStrategy::Exponential
        }
    };
    let has_jitter = sent.take("jitter", &mut inner).unwrap_or(true);
    check.absorb(inner);
    let policy = RetryPolicy {
        strategy,
        initial_seconds,
        multiplier,
        max_seconds,
        // Up to half of the first wait.
        jitter: JitterKind::Additive,
        jitter_seconds: if has_jitter { initial_seconds.div_ceil(2) } else { 0 },
        non_retryable_types: non_retryable,
    };
    (policy, max_attempts.max(1))
}

/// A wait in seconds, from an ISO 8601 duration, or from the field in milliseconds.
fn interval(sent: &mut Fields, name: &str, default: u32, check: &mut Check) -> u32 {
    let text = sent.take::<String>(name, check);
    let in_ms = format!("{name}_ms");
    let ms = match text {
        Some(text) => duration(name, &text, check),
        None => sent.take(&in_ms, check),
    };
    let seconds = ms.map_or(i64::from(default), whole_seconds);
    check.range(name, seconds, 0, limits::MAX_RETRY_SECONDS);
    u32::try_from(seconds).unwrap_or(default)
}

/// The envelope that is stored beside the arguments: everything else that was sent.
fn envelope(mut kept: Fields, check: &mut Check) -> Result<String, Error> {
    for core in ["args", "type", "id"] {
        kept.0.remove(core);
    }
    for (name, value) in &kept.0 {
        check.depth(name, value);
    }
    let text = serde_json::to_string(&StoredEnvelope { ojs: kept }).map_err(Error::internal)?;
    check.bytes("meta", text.len(), MAX_ENVELOPE_BYTES)?;
    Ok(text)
}
