//! The rows of the page of limits, as the code has them.

use fencepost::{
    scaler::{MAX_JOBS_PER_WORKER, MAX_QUEUES},
    serve::REQUESTS_TIMEOUT,
};
use fencepost_config as config;
use fencepost_domain::{
    job, limits, payload_schema,
    plan::{Limits, Plans},
    schedule, search,
};
use fencepost_engine::{
    dispatch::MAX_PARKED_POLLS,
    enqueue::{full::MAX_OVERDRAFT, quota},
    settle::KEPT_UNCOUNTED_ATTEMPTS,
};
use fencepost_http::server::{self, answers, least_rate};
use fencepost_identity::credentials::bodies::{MAX_NODE_BODY_KIB, MAX_PROJECT_BODY_KIB};
use fencepost_signals::redis_bus;
use fencepost_store::{
    jobs::dead_letters,
    queues::{counts, queue_limits},
    sweep::completions,
};
use fencepost_web::wire::body::{BODY_TIMEOUT, LAST_BODY_TIMEOUT};

use crate::docs::read;

mod alarms;
mod groups;
mod people;
mod webhooks;

pub use alarms::alarm_limits;
use groups::group_limits;
pub use people::people_limits;
pub use webhooks::webhook_limits;

#[test]
fn every_plan_is_listed_with_its_numbers() {
    let page = read("docs/limits.md");
    let plans = Plans::built_in();
    let columns = ["free", "pro", "business"].map(|it| plans.limits(it));
    let number = |limits: &Limits, name: &str| {
        serde_json::to_value(limits).expect("JSON")[name].as_i64().expect("a number")
    };
    let names = serde_json::to_value(columns[0]).expect("JSON");
    for name in names.as_object().expect("limits").keys() {
        let cells = columns.map(|it| number(&it, name).to_string());
        let row = format!("`{name}` | {} |", cells.join(" | "));
        assert!(page.contains(&row), "{row}");
    }
}

#[test]
fn the_notes_on_stored_bytes_name_the_bounds_of_a_full_project() {
    let words: Vec<_> = read("docs/limits.md").split_whitespace().map(str::to_owned).collect();
    let page = words.join(" ");
    for bound in [
        format!("errors above {} bytes", limits::MAX_FULL_ERROR_BYTES),
        format!("body above {} bytes", limits::MAX_FULL_CHANGE_BYTES),
        format!("names of more than {} bytes", limits::MAX_FULL_NAMES_BYTES),
        format!("{} times as many as `manage_per_minute`", limits::DAILY_CHANGES_PER_MANAGE_CALL),
    ] {
        assert!(page.contains(&bound), "docs/limits.md lacks: {bound}");
    }
    assert_eq!(MAX_OVERDRAFT, 2, "the page says twice");
}

/// The rows of "A job" that concern what follows a job, and what its type says of it.
pub fn callback_limits() -> Vec<(&'static str, String)> {
    vec![
        ("a job type's `schema`", format!("{} bytes", payload_schema::MAX_SCHEMA_BYTES)),
        ("entries in one place of a schema", payload_schema::MAX_ENTRIES.to_string()),
        ("patterns of a schema", payload_schema::MAX_PATTERNS.to_string()),
        ("job types whose payloads a batch checks", limits::MAX_CHECKED_TYPES.to_string()),
        ("job types with a schema", limits::MAX_JOB_SCHEMAS.to_string()),
        (
            "callbacks that the end of one job or batch leads to",
            format!("{}, of {} bytes together", limits::MAX_CALLBACKS, limits::MAX_CALLBACKS_BYTES),
        ),
        (
            "places of one template",
            format!(
                "{}, filled with {} bytes, later ones become null",
                limits::MAX_PLACES,
                limits::MAX_FILLED_BYTES
            ),
        ),
        ("callbacks that follow each other", limits::MAX_CALLBACK_DEPTH.to_string()),
        (
            "ends of a project that one pass of the loop processes",
            format!(
                "{}, or as many as {} bytes of callbacks, projects by turns",
                completions::MAX_COMPLETIONS_OF_PROJECT,
                completions::MAX_CALLBACK_BYTES_OF_PROJECT
            ),
        ),
        (
            "batches of one project that have not completed",
            format!("{}, then 429", limits::MAX_OPEN_BATCHES),
        ),
        (
            "a batch that is not sealed, and that no job joins",
            format!(
                "sealed after {} to {} days",
                limits::IDLE_BATCH_DAYS,
                limits::IDLE_BATCH_DAYS + 1
            ),
        ),
        ("a batch that has completed", format!("kept {} days", limits::BATCH_KEEP_DAYS)),
    ]
}

/// The rows of "A job".
pub fn job_limits() -> Vec<(&'static str, String)> {
    vec![
        ("`job_type`", format!("1–{} characters", limits::MAX_JOB_TYPE_CHARS)),
        ("`queue`", format!("1–{} characters", limits::MAX_QUEUE_CHARS)),
        (
            "`payload`",
            format!("{} bytes, {} levels deep", limits::MAX_PAYLOAD_BYTES, limits::MAX_JSON_DEPTH),
        ),
        ("`priority`", format!("{}–{}, higher first", limits::MIN_PRIORITY, limits::MAX_PRIORITY)),
        ("`run_at`", format!("{} years of 366 days ahead", limits::MAX_RUN_AT_YEARS)),
        ("`delay_seconds`", format!("0–{} s", limits::MAX_DELAY_SECONDS)),
        ("`max_attempts`", format!("1–{}", limits::MAX_MAX_ATTEMPTS)),
        (
            "`max_losses`: losses in a row; ten times as many in total",
            format!("1–{}", limits::MAX_MAX_LOSSES),
        ),
        ("`timeout_seconds`", format!("1–{} s", limits::MAX_TIMEOUT_SECONDS)),
        (
            "`retry.initial_seconds`, `.max_seconds`, `.jitter_seconds`",
            format!("0–{} s", limits::MAX_RETRY_SECONDS),
        ),
        ("`retry.multiplier`", format!("1–{}", limits::MAX_RETRY_MULTIPLIER)),
        (
            "`retry.non_retryable_types`",
            format!(
                "{} entries of {} characters",
                limits::MAX_NON_RETRYABLE_TYPES,
                limits::MAX_ERROR_TYPE_CHARS
            ),
        ),
        (
            "`tags`",
            format!(
                "{} entries, names of {} characters, values of {}",
                limits::MAX_TAGS,
                limits::MAX_TAG_KEY_CHARS,
                limits::MAX_TAG_VALUE_CHARS
            ),
        ),
        (
            "`labels`",
            format!("{} entries of {} characters", limits::MAX_LABELS, limits::MAX_LABEL_CHARS),
        ),
        ("`group`", format!("1–{} characters, not `.` or `..`", limits::MAX_GROUP_CHARS)),
        ("`concurrency_key`, `unique.key`", format!("1–{} characters", limits::MAX_KEY_CHARS)),
        ("`concurrency_limit`", format!("1–{}", limits::MAX_CONCURRENCY)),
        ("`depends_on`", format!("{} jobs", limits::MAX_PARENTS)),
        ("jobs that wait for one job", limits::MAX_CHILDREN.to_string()),
        ("jobs of one workflow", format!("1–{}", limits::MAX_WORKFLOW_JOBS)),
        ("custom events of one job", limits::MAX_JOB_EVENTS.to_string()),
        (
            "parents' results passed to one job",
            format!(
                "{} bytes, later ones are left out and marked",
                limits::MAX_PARENT_RESULTS_BYTES
            ),
        ),
        (
            "logs of one attempt",
            format!(
                "{} bytes in {} chunks, then cut and marked",
                limits::MAX_LOG_BYTES,
                limits::MAX_LOG_CHUNKS_KEPT
            ),
        ),
    ]
    .into_iter()
    .chain(attempt_limits())
    .collect()
}

/// The last rows of "A job".
fn attempt_limits() -> [(&'static str, String); 4] {
    let (counted, uncounted) = (job::MAX_CLAIMS, job::MAX_UNCOUNTED_CLAIMS);
    [
        ("claims of one job", format!("{counted}, then the dead letter")),
        (
            "claims of one job that end since it was put off or met a rate limit",
            format!("{uncounted} beside these, then the dead letter"),
        ),
        ("past attempts of each of these two kinds", format!("the last {KEPT_UNCOUNTED_ATTEMPTS}")),
        ("past attempts shown", format!("{}, the newest", limits::MAX_SHOWN_ATTEMPTS)),
    ]
}

/// The rows of "A worker".
pub fn worker_limits() -> Vec<(&'static str, String)> {
    vec![
        ("`worker_id`", format!("1–{} characters", limits::MAX_WORKER_ID_CHARS)),
        ("queues of one poll", format!("1–{}", limits::MAX_POLL_QUEUES)),
        ("job types of one poll", limits::MAX_POLL_JOB_TYPES.to_string()),
        (
            "a trigger of `fencepost scaler`",
            format!("1–{MAX_QUEUES} queues, `jobsPerWorker` 1–{MAX_JOBS_PER_WORKER}"),
        ),
        ("`capacity`", format!("1–{}", limits::MAX_POLL_CAPACITY)),
        ("`wait_seconds`", format!("0–{} s", limits::MAX_POLL_WAIT_SECONDS)),
        ("`lease_seconds`", format!("1–{} s", limits::MAX_LEASE_SECONDS)),
        ("`result`", json_of(limits::MAX_RESULT_BYTES)),
        ("`checkpoint`", json_of(limits::MAX_CHECKPOINT_BYTES)),
        ("`checkpoint_sequence`", format!("0–{}", limits::MAX_CHECKPOINT_SEQUENCE)),
        (
            "`error`, its three texts together",
            format!(
                "{} bytes, then cut and marked `truncated`; {} while `stored_bytes` are used up",
                limits::MAX_ERROR_BYTES,
                limits::MAX_FULL_ERROR_BYTES
            ),
        ),
        (
            "`retry_after_seconds`",
            format!("0–{} s; with `rate_limited` {}", limits::MAX_RETRY_SECONDS, rate_limited()),
        ),
        ("`delay_seconds` of an ack", format!("0–{} s", limits::MAX_SNOOZE_SECONDS)),
        ("`duration_ms`", format!("0–{} ms", limits::MAX_DURATION_MS)),
        (
            "queues and job types of one registration",
            format!(
                "{} each, {} bytes together",
                limits::MAX_REGISTERED_NAMES,
                limits::MAX_REGISTERED_NAMES_BYTES
            ),
        ),
        ("`hostname`, `sdk_version`", format!("{} characters", limits::MAX_WORKER_INFO_CHARS)),
        ("`concurrency`", format!("1–{}", limits::MAX_WORKER_CONCURRENCY)),
        (
            "labels of one worker",
            format!("{} entries of {} characters", limits::MAX_LABELS, limits::MAX_LABEL_CHARS),
        ),
        ("schedules of one registration", limits::MAX_REGISTERED_SCHEDULES.to_string()),
        ("jobs of one heartbeat for a whole worker", limits::MAX_BEAT_JOBS.to_string()),
        (
            "silence after which such a worker is lost",
            format!("{} s", limits::WORKER_SILENCE_SECONDS),
        ),
        (
            "`beat_seconds`",
            format!(
                "{}–{} s; lost after {} times that",
                limits::MIN_BEAT_SECONDS,
                limits::MAX_BEAT_SECONDS,
                limits::MISSED_BEATS
            ),
        ),
        ("events of one report", format!("1–{}", limits::MAX_EVENTS)),
        ("an event's `type`", format!("1–{} characters", limits::MAX_EVENT_TYPE_CHARS)),
        ("an event's `payload`", format!("{} bytes", limits::MAX_EVENT_PAYLOAD_BYTES)),
        ("log chunks of one report", format!("1–{}", limits::MAX_LOG_CHUNKS)),
        ("a log chunk's `data`", format!("{} bytes", limits::MAX_LOG_CHUNK_BYTES)),
        ("jobs of one log report", limits::MAX_LOG_JOBS.to_string()),
        ("a silent worker", format!("forgotten after {} s", limits::WORKER_KEEP_SECONDS)),
    ]
}

fn json_of(bytes: usize) -> String {
    format!("{bytes} bytes, {} levels deep", limits::MAX_JSON_DEPTH)
}

fn rate_limited() -> String {
    let (max, default) = (limits::MAX_RATE_LIMITED_SECONDS, limits::DEFAULT_RATE_LIMITED_SECONDS);
    format!("1–{max} s, {default} if it is not set")
}

/// The rows of "A queue".
pub fn queue_limits() -> Vec<(&'static str, String)> {
    let mut rows = vec![
        ("`max_concurrency`", format!("0–{}", limits::MAX_CONCURRENCY)),
        ("`rate_limit.count`", format!("1–{}", limits::MAX_RATE_LIMIT_COUNT)),
        ("`rate_limit.per_seconds`", format!("1–{} s", limits::MAX_RATE_LIMIT_SECONDS)),
        ("`default_lease_seconds`", format!("1–{} s", limits::MAX_LEASE_SECONDS)),
        ("`default_max_attempts`", format!("1–{}", limits::MAX_MAX_ATTEMPTS)),
        ("`brake_after`", format!("1–{}", limits::MAX_BRAKE_AFTER)),
        ("`max_waiting`", format!("1–{}", limits::MAX_MAX_WAITING)),
        (
            "queues of a project whose `max_waiting` is obeyed",
            format!("{}, the first by name", quota::MAX_BOUNDED_QUEUES),
        ),
        (
            "`retention_days`",
            format!(
                "1–{} days, {} if it is not set",
                limits::MAX_RETENTION_DAYS,
                limits::DEFAULT_RETENTION_DAYS
            ),
        ),
        (
            "running jobs of a queue that are counted one by one",
            format!("{}; more are known from counters", counts::MAX_COUNTED_PROCESSING),
        ),
        (
            "workers of a project, whatever its plan",
            format!("{} to {}", limits::MIN_PROJECT_WORKERS, limits::MAX_PROJECT_WORKERS),
        ),
        ("queues of a project, and queues with settings", limits::MAX_PROJECT_QUEUES.to_string()),
        ("types that are paused in a queue", limits::MAX_PAUSED_TYPES.to_string()),
        ("job types considered while some are paused", queue_limits::MAX_OPEN_TYPES.to_string()),
        (
            "queues, and types of a queue, that a node counts by name",
            format!("{}, later ones as `other`", limits::MAX_COUNTED_NAMES),
        ),
        (
            "pairs of a queue and a type that a node counts by name",
            format!("{} of one project, later ones as `other`", limits::MAX_COUNTED_PAIRS),
        ),
        ("values of a label that a Prometheus scrapes", limits::MAX_LABEL_VALUES.to_string()),
    ];
    rows.extend(group_limits());
    rows
}

/// The rows of "Recurring schedules and bulk work".
pub fn bulk_limits() -> Vec<(&'static str, String)> {
    vec![
        ("recurring schedules of one project", limits::MAX_SCHEDULES.to_string()),
        (
            "the id of a recurring schedule",
            format!("1–{} characters", limits::MAX_SCHEDULE_ID_CHARS),
        ),
        ("`cron_expression`, `timezone`", format!("1–{} characters", limits::MAX_CRON_CHARS)),
        ("`spread_seconds`", format!("0–{} s", limits::MAX_SPREAD_SECONDS)),
        (
            "a tick that no node has handled",
            format!("is missed after {} s", schedule::GRACE_SECONDS),
        ),
        ("missed ticks that `catch_up` can fire", format!("{}, the last", schedule::MAX_CATCH_UP)),
        ("the record of a tick", format!("kept {} days", limits::FIRE_KEEP_DAYS)),
        ("fire times shown for a schedule", format!("1–{}", limits::MAX_SHOWN_TIMES)),
        ("running operations of one project", limits::MAX_RUNNING_OPERATIONS.to_string()),
        ("an operation that has ended", format!("kept {} days", limits::OPERATION_KEEP_DAYS)),
        ("`max` of a bulk request", format!("1–{}", limits::MAX_OPERATION_JOBS)),
        ("`rate_per_second` of a bulk request", format!("1–{}", limits::MAX_OPERATION_RATE)),
        ("dead letters that are counted", dead_letters::MAX_COUNTED.to_string()),
    ]
}

/// The rows of "A request".
pub fn request_limits() -> Vec<(&'static str, String)> {
    vec![
        ("body", format!("{} bytes", limits::MAX_BODY_BYTES)),
        ("body of a batch", format!("{} bytes", limits::MAX_BATCH_BODY_BYTES)),
        ("jobs of one batch", format!("1–{}", limits::MAX_ENQUEUE_BATCH_JOBS)),
        ("acks of one batch", format!("1–{}", limits::MAX_ACK_BATCH)),
        ("a search line", format!("1–{} characters", search::MAX_SEARCH_CHARS)),
        ("jobs chosen for one operation", format!("1–{}", limits::MAX_PAGE_JOBS)),
        ("jobs on one page", format!("1–{}", limits::MAX_PAGE_JOBS)),
        (
            "rows examined for one page of jobs",
            (limits::MAX_PAGE_LOOKS * limits::MAX_PAGE_EXAMINED_ROWS).to_string(),
        ),
        (
            "payloads, results, logs and names on one page, which ends there",
            format!("{} bytes", limits::MAX_PAGE_BYTES),
        ),
        ("workers on one page", format!("1–{}", limits::MAX_PAGE_WORKERS)),
        ("workflows on one page", format!("1–{}", limits::MAX_PAGE_WORKFLOWS)),
        ("batches on one page", format!("1–{}", limits::MAX_PAGE_BATCHES)),
        ("events on one page of a job's history", format!("1–{}", limits::MAX_PAGE_EVENTS)),
        ("log chunks on one page", format!("1–{}", limits::MAX_PAGE_LOGS)),
        ("queues on one page", format!("1–{}", limits::MAX_PAGE_QUEUES)),
        (
            "dead letters, or groups of them, on one page",
            format!("1–{}", limits::MAX_PAGE_DEAD_LETTERS),
        ),
        ("operations on one page", format!("1–{}", limits::MAX_PAGE_OPERATIONS)),
        ("recurring schedules on one page", format!("1–{}", limits::MAX_PAGE_SCHEDULES)),
        ("ticks on one page", format!("1–{}", limits::MAX_PAGE_FIRES)),
        (
            "an idempotency key",
            format!(
                "1–{} characters, kept {} s",
                limits::MAX_IDEMPOTENCY_KEY_CHARS,
                limits::IDEMPOTENCY_KEEP_SECONDS
            ),
        ),
        (
            "an interrupted request with an idempotency key",
            format!("may run again after {} s", limits::IDEMPOTENCY_LOCK_SECONDS),
        ),
        ("time for the body to arrive", format!("{} s", BODY_TIMEOUT.as_secs())),
    ]
}

/// The rows of "A node".
pub fn node_limits() -> Vec<(&'static str, String)> {
    let mut rows = vec![
        ("parked polls", format!("{MAX_PARKED_POLLS}, then 503")),
        (
            "event streams of one node",
            format!(
                "{}, then 503; the last {} for projects that have none there",
                limits::MAX_STREAMS,
                limits::RESERVED_STREAMS
            ),
        ),
        (
            "event streams of one project on one node, whatever the plan",
            format!("{}, then 429", limits::MAX_PROJECT_STREAMS),
        ),
        (
            "events of one project kept for streams that reconnect",
            format!(
                "{}, {} bytes, and an equal part of {} bytes of a node",
                limits::MAX_REMEMBERED_EVENTS,
                limits::MAX_PROJECT_REMEMBERED_BYTES,
                limits::MAX_REMEMBERED_BYTES
            ),
        ),
        (
            "an event's payload in a project's stream",
            format!(
                "{} bytes, larger ones are in the job's history only",
                limits::MAX_STREAMED_PAYLOAD_BYTES
            ),
        ),
        ("connections", server::MAX_CONNECTIONS.to_string()),
        (
            "time for a connection's first byte",
            format!("{} s", server::FIRST_BYTE_TIMEOUT.as_secs()),
        ),
        (
            "time for request headers, and idle time between requests",
            format!("{} s", server::HEADER_TIMEOUT.as_secs()),
        ),
        (
            "time in which a client must read something",
            format!("{} s", server::WRITE_TIMEOUT.as_secs()),
        ),
    ];
    rows.extend(connection_limits());
    rows
}

/// Those of connections.
fn connection_limits() -> Vec<(&'static str, String)> {
    vec![
        (
            "bytes of a large answer that a client must read while it waits",
            format!("{} per second, after 10 s", least_rate::LEAST_BYTES_PER_SECOND),
        ),
        (
            "large answers to reads and polls that clients have not taken, per project and per node",
            format!("{} and {} KiB, then 503", answers::MAX_PROJECT_KIB, answers::MAX_NODE_KIB),
        ),
        (
            "request bodies above 65536 bytes under way, per project and per node",
            format!(
                "{MAX_PROJECT_BODY_KIB} and {MAX_NODE_BODY_KIB} KiB, as many again of acks; then 503"
            ),
        ),
        (
            "connections of one IP address",
            format!("{}, proxies excepted", config::DEFAULT_CONNECTIONS_PER_ADDRESS),
        ),
        (
            "time for which a credential is cached",
            format!("{} s", fencepost_identity::credentials::CREDENTIAL_TTL.as_secs()),
        ),
        (
            "timeout of a Redis call, and pause after a failed call",
            format!(
                "{} ms, {} s",
                redis_bus::DEFAULT_BUDGET.as_millis(),
                redis_bus::BREAK.as_secs()
            ),
        ),
        (
            "time for requests to finish when the node stops, and for the rest of a body to arrive then",
            format!("{} s, {} s", REQUESTS_TIMEOUT.as_secs(), LAST_BODY_TIMEOUT.as_secs()),
        ),
    ]
}
