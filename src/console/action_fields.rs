//! The fields of requests that forms with several fields send.

use super::form::Field;

/// The reason for a change of a job.
pub const REASON: &[Field] = &[Field::Text("reason")];
/// Fields of a new job.
pub const NEW_JOB: &[Field] = &[
    Field::Text("job_type"),
    Field::Text("queue"),
    Field::Json("payload"),
    Field::Members("payload"),
    Field::Flag("check_payload"),
    Field::Number("priority"),
    Field::Number("delay_seconds"),
    Field::Number("max_attempts"),
    Field::Number("timeout_seconds"),
    Field::Text("concurrency_key"),
    Field::Text("group"),
    Field::Text("unique.key"),
    Field::Words("labels"),
    Field::Pairs("tags"),
];
/// Fields of a bulk operation on listed jobs.
pub const JOBS: &[Field] = &[
    Field::Text("filter.q"),
    Field::Words("filter.ids"),
    Field::Text("filter.state"),
    Field::Text("filter.queue"),
    Field::Text("filter.job_type"),
    Field::Text("filter.group"),
    Field::Text("filter.tag"),
    Field::Text("filter.batch_id"),
    Field::Time("filter.created_after"),
    Field::Time("filter.created_before"),
    Field::Object("filter"),
    Field::Number("max"),
    Field::Number("rate_per_second"),
    Field::Flag("dry_run"),
];
/// Fields of a bulk operation on dead letters.
pub const REDRIVE: &[Field] = &[
    Field::Text("filter.queue"),
    Field::Text("filter.job_type"),
    Field::Text("filter.fingerprint"),
    Field::Object("filter"),
    Field::Number("max"),
    Field::Number("rate_per_second"),
    Field::Flag("dry_run"),
];
pub const PURGE: &[Field] = &[
    Field::Text("filter.queue"),
    Field::Text("filter.job_type"),
    Field::Text("filter.fingerprint"),
    Field::Object("filter"),
    Field::Flag("dry_run"),
    Field::Text("confirm"),
];
pub const QUEUE: &[Field] = &[
    Field::NumberOrNull("max_concurrency"),
    Field::NumberOrNull("rate_limit.count"),
    Field::NumberOrNull("rate_limit.per_seconds"),
    Field::NumberOrNull("default_lease_seconds"),
    Field::NumberOrNull("retention_days"),
    Field::NumberOrNull("default_max_attempts"),
    Field::NumberOrNull("brake_after"),
    Field::NumberOrNull("max_waiting"),
    Field::Text("groups.order"),
    Field::Text("groups.on_dead"),
    Field::Json("groups.max_running"),
    Field::Json("groups.fair"),
    Field::AllWords("shared_limits"),
];
/// Rules of a group.
pub const GROUP: &[Field] = &[Field::Number("weight"), Field::Number("max_running")];
/// A shared limit, and the numbers of one group under it.
pub const SHARED_LIMIT: &[Field] =
    &[Field::Text("by"), Field::Number("max_running"), Field::Json("rates")];
pub const GROUP_OF_LIMIT: &[Field] =
    &[Field::Number("max_running"), Field::Json("rates"), Field::Text("expires_at")];
/// An endpoint of webhooks.
pub const ENDPOINT: &[Field] = &[
    Field::Text("url"),
    Field::Choices("events"),
    Field::List("queues"),
    Field::List("job_types"),
    Field::Text("description"),
    Field::Json("callbacks"),
    Field::Number("max_in_flight"),
    Field::Number("timeout_seconds"),
    Field::Json("enabled"),
];
/// Deliveries that are sent again.
pub const REPLAY: &[Field] = &[
    Field::Time("since"),
    Field::Time("until"),
    Field::Text("which"),
    Field::Number("rate_per_second"),
];
/// An alarm.
pub const ALARM: &[Field] = &[
    Field::Text("rule"),
    Field::List("queues"),
    Field::Number("threshold"),
    Field::Number("for_seconds"),
    Field::Text("mail_to"),
    Field::Json("enabled"),
];
/// The schema of a job type.
pub const SCHEMA: &[Field] = &[Field::Json("schema")];
/// A job type of a queue, or the whole queue.
pub const TYPE: &[Field] = &[Field::Text("job_type")];
/// The pause of a group, and what becomes of the dead letter that blocks one.
pub const PAUSE: &[Field] = &[Field::Number("seconds")];
pub const HEAD: &[Field] = &[Field::Text("head"), Field::Text("job_id")];
