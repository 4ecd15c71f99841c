//! The documents say what the code does.

use std::collections::BTreeSet;

use clap::{Command, CommandFactory};

use fencepost::{
    adapters,
    cli::{Cli, settings},
    config,
    domain::{
        access::Scope,
        job, limits,
        schedule::{self, Schedule},
    },
    engine::dispatch::MAX_PARKED_POLLS,
    http::{error::CODES, openapi, server},
    redis_bus,
    serve::DRAIN_TIMEOUT,
    store::{counts, dead_letters, queue_limits},
    telemetry::{Kind, METRICS},
    wire::extract::BODY_TIMEOUT,
};

pub fn read(path: &str) -> String {
    let path = format!("{}/{path}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|_| panic!("{path} is there"))
}

#[test]
fn the_openapi_file_is_the_one_that_the_handlers_make() {
    assert!(
        read("openapi/openapi.json") == openapi::text(),
        "openapi/openapi.json is old: run `make openapi`"
    );
    assert!(
        read("openapi/openapi-3.0.json") == openapi::older_text(),
        "openapi/openapi-3.0.json is old: run `make openapi`"
    );
    for (adapter, document) in adapters::documents() {
        let file = format!("openapi/{adapter}.json");
        assert!(read(&file) == document, "{file} is old: run `make openapi`");
        let listed = format!("| `http://HOST/{adapter}");
        let page = read("docs/protocols.md");
        assert!(page.contains(&listed) && page.contains(&file), "docs/protocols.md: {adapter}");
    }
}

#[test]
fn every_operation_says_what_generators_need() {
    let document = openapi::document();
    assert_eq!(document["openapi"], "3.1.0");
    assert_eq!(document["info"]["license"]["identifier"], "MIT OR Apache-2.0");
    let mut ids = BTreeSet::new();
    for (path, methods) in document["paths"].as_object().expect("paths") {
        for operation in methods.as_object().expect("methods").values() {
            let id = operation["operationId"].as_str().expect("an id");
            assert!(ids.insert(id.to_owned()), "{id} twice");
            assert_eq!(operation["tags"].as_array().map(Vec::len), Some(1), "{path}");
            let responses = operation["responses"].as_object().expect("responses");
            let good: BTreeSet<_> = responses
                .iter()
                .filter(|(status, _)| status.starts_with('2'))
                .map(|(_, response)| response["content"].to_string())
                .collect();
            assert_eq!(good.len(), 1, "{path} answers in one shape");
            assert!(responses.values().all(|it| it["description"].is_string()), "{path}");
            let body = operation.pointer("/requestBody/content/application~1json/schema/$ref");
            if let Some(named) = body.and_then(serde_json::Value::as_str) {
                let schema = document.pointer(named.trim_start_matches('#')).expect("a schema");
                assert!(schema["example"].is_object(), "{id}: its body has no example");
            }
        }
    }
    let text = openapi::text();
    assert!(!text.contains("propertyNames"));
    for line in text.lines().filter_map(|it| it.trim().strip_prefix("\"$ref\": \"#/")) {
        let pointer = format!("/{}", line.trim_end_matches([',', '"']));
        assert!(document.pointer(&pointer).is_some(), "{pointer} is nowhere");
    }
}

/// Where the macros of the document take only numbers.
#[test]
fn bounds_that_are_written_as_numbers_are_those_of_the_checks() {
    let document = openapi::document();
    let lists = [
        ("AckBatchRequest", "acks", limits::MAX_ACK_BATCH),
        ("CreateKeyRequest", "scopes", Scope::ALL.len()),
        ("CreateWorkflowRequest", "jobs", limits::MAX_WORKFLOW_JOBS),
        ("EnqueueBatchRequest", "jobs", limits::MAX_ENQUEUE_BATCH_JOBS),
        ("EventsRequest", "events", limits::MAX_EVENTS),
        ("HeartbeatRequest", "active_jobs", limits::MAX_BEAT_JOBS),
        ("LogsRequest", "chunks", limits::MAX_LOG_CHUNKS),
        ("RegisterRequest", "recurring_schedules", limits::MAX_REGISTERED_SCHEDULES),
    ];
    for (schema, field, max) in lists {
        let list = &document["components"]["schemas"][schema]["properties"][field];
        assert_eq!(list["maxItems"], max, "{schema}.{field}");
    }
    let pages = [
        ("/v1/audit-log", limits::MAX_PAGE_AUDIT),
        ("/v1/dead-letters", limits::MAX_PAGE_DEAD_LETTERS),
        ("/v1/dead-letters/groups", limits::MAX_PAGE_DEAD_LETTERS),
        ("/v1/jobs", limits::MAX_PAGE_JOBS),
        ("/v1/jobs/{job_id}/events", limits::MAX_PAGE_EVENTS),
        ("/v1/jobs/{job_id}/logs", limits::MAX_PAGE_LOGS),
        ("/v1/keys", limits::MAX_PAGE_KEYS),
        ("/v1/operations", limits::MAX_PAGE_OPERATIONS),
        ("/v1/queues", limits::MAX_PAGE_QUEUES),
        ("/v1/recurring", limits::MAX_PAGE_SCHEDULES),
        ("/v1/recurring/{recurring_id}/fires", limits::MAX_PAGE_FIRES),
        ("/v1/workers", limits::MAX_PAGE_WORKERS),
        ("/v1/workflows", limits::MAX_PAGE_WORKFLOWS),
    ];
    for (path, max) in pages {
        let parameters = document["paths"][path]["get"]["parameters"].as_array();
        let limit = parameters.into_iter().flatten().find(|it| it["name"] == "limit");
        assert_eq!(limit.expect(path)["schema"]["maximum"], max, "{path}");
    }
}

#[test]
fn every_error_code_has_a_section_with_its_status_and_no_other_has_one() {
    let page = read("docs/errors.md");
    let sections: Vec<_> = page.split("\n## ").skip(1).collect();
    assert_eq!(sections.len(), CODES.len());
    for (section, (code, status)) in sections.iter().zip(CODES) {
        assert!(section.starts_with(&format!("{code}\n\nStatus {}", status.as_u16())), "{code}");
    }
}

#[test]
fn every_metric_is_listed_with_its_kind_and_its_help() {
    let page = read("docs/metrics.md");
    let (_, page) = page.split_once("## The operator's").expect("a section");
    let listed: Vec<_> = page.lines().filter(|it| it.starts_with("| `")).collect();
    let expected: Vec<_> = METRICS
        .iter()
        .map(|it| {
            let kind = match it.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
                Kind::Seconds => "seconds",
                Kind::BatchSize => "batch size",
            };
            format!("| `{}` | {kind} | {} |", it.name, it.help)
        })
        .collect();
    assert_eq!(listed, expected);
}

#[test]
fn the_dashboards_show_every_metric_and_none_that_does_not_exist() {
    let dashboards = ["overview", "queues-and-workers", "store-and-loops", "limits"];
    let read = |it: &str| read(&format!("ops/grafana/dashboards/{it}.json"));
    let dashboard = dashboards.map(read).concat();
    let names: BTreeSet<&str> = METRICS.iter().map(|it| it.name).collect();
    let mut shown = BTreeSet::new();
    for after in dashboard.split("fencepost_").skip(1) {
        let end =
            after.find(|it: char| !it.is_ascii_alphanumeric() && it != '_').unwrap_or(after.len());
        let name = format!("fencepost_{}", &after[..end]);
        let base = ["_bucket", "_sum", "_count"].iter().find_map(|it| name.strip_suffix(it));
        let name = base.filter(|it| names.contains(it)).map_or(name.clone(), str::to_owned);
        assert!(names.contains(name.as_str()), "{name}");
        shown.insert(name);
    }
    assert_eq!(shown.len(), names.len(), "and all of them");
}

#[test]
fn the_page_of_settings_is_the_one_that_the_flags_make() {
    let page = settings::page();
    assert!(read("docs/configuration.md") == page, "it is old: run `make configuration`");
    for known in ["| `--listen` |", "`FENCEPOST_DATABASE_URL`, else", "| `--otlp-endpoint` |"] {
        assert!(page.contains(known), "{known}");
    }
    let rows: Vec<_> = page.lines().filter(|it| it.starts_with("| `--")).collect();
    assert!(rows.iter().all(|it| it.matches(" | ").count() == 4), "{rows:#?}");
}

#[test]
fn every_limit_is_listed_with_its_number() {
    let page = read("docs/limits.md");
    let rows = [
        job_limits(),
        worker_limits(),
        queue_limits(),
        bulk_limits(),
        request_limits(),
        node_limits(),
        crate::limits_page::people_limits(),
    ];
    let rows = rows.concat();
    // The plans come first, and are compared by themselves.
    let (_, page) = page.split_once("## A job").expect("a section");
    let listed: Vec<_> =
        page.lines().filter(|it| it.starts_with("| ") && !it.starts_with("| what")).collect();
    let expected: Vec<_> =
        rows.iter().map(|(what, limit)| format!("| {what} | {limit} |")).collect();
    assert_eq!(listed, expected);
    let keys = format!(
        "at most {} live keys, whatever its plan; names of projects and keys have at most {} characters",
        limits::MAX_LIVE_KEYS,
        limits::MAX_NAME_CHARS
    );
    assert!(page.contains(&keys));
}

#[test]
fn clock_changes_are_as_the_page_shows_them() {
    let page = read("docs/schedules.md");
    let rows: Vec<_> = page.lines().filter(|it| it.starts_with("| `")).collect();
    assert!(rows.len() >= 10);
    for row in rows {
        let cells: Vec<_> = row.split('|').map(|it| it.trim().trim_matches('`')).collect();
        let [_, expression, zone, after, fires_at, ..] = cells[..] else { panic!("{row}") };
        let schedule = Schedule::parse(expression, zone).expect("it can be read");
        let after: chrono::DateTime<chrono::FixedOffset> = after.parse().expect("a time");
        let ticks = schedule.preview(after.to_utc(), 1).expect("it fires");
        assert_eq!(ticks[0].local, fires_at, "{row}");
    }
}

/// The rows of "A job".
fn job_limits() -> Vec<(&'static str, String)> {
    vec![
        ("`job_type`", format!("1–{} characters", limits::MAX_JOB_TYPE_CHARS)),
        ("`queue`", format!("1–{} characters", limits::MAX_QUEUE_CHARS)),
        (
            "`payload`",
            format!("{} bytes, {} levels deep", limits::MAX_PAYLOAD_BYTES, limits::MAX_JSON_DEPTH),
        ),
        ("`priority`", format!("{}–{}, higher first", limits::MIN_PRIORITY, limits::MAX_PRIORITY)),
        ("`run_at`, `delay_seconds`", format!("{} s ahead", limits::MAX_DELAY_SECONDS)),
        ("`max_attempts`", format!("1–{}", limits::MAX_MAX_ATTEMPTS)),
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
        (
            "claims of one job, whatever happened",
            format!("{}, then the dead letter", job::MAX_CLAIMS),
        ),
        ("past attempts shown", format!("{}, the newest", limits::MAX_SHOWN_ATTEMPTS)),
    ]
}

/// The rows of "A worker".
fn worker_limits() -> Vec<(&'static str, String)> {
    vec![
        ("`worker_id`", format!("1–{} characters", limits::MAX_WORKER_ID_CHARS)),
        ("queues of one poll", format!("1–{}", limits::MAX_POLL_QUEUES)),
        ("job types of one poll", limits::MAX_POLL_JOB_TYPES.to_string()),
        ("`capacity`", format!("1–{}", limits::MAX_POLL_CAPACITY)),
        ("`wait_seconds`", format!("0–{} s", limits::MAX_POLL_WAIT_SECONDS)),
        ("`lease_seconds`", format!("1–{} s", limits::MAX_LEASE_SECONDS)),
        (
            "`result`",
            format!("{} bytes, {} levels deep", limits::MAX_RESULT_BYTES, limits::MAX_JSON_DEPTH),
        ),
        (
            "`error`, its three texts together",
            format!("{} bytes, then cut and marked `truncated`", limits::MAX_ERROR_BYTES),
        ),
        ("`retry_after_seconds`", format!("0–{} s", limits::MAX_RETRY_SECONDS)),
        ("`duration_ms`", format!("0–{} ms", limits::MAX_DURATION_MS)),
        (
            "queues and job types of one registration",
            format!("{} each", limits::MAX_REGISTERED_NAMES),
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
        ("events of one report", format!("1–{}", limits::MAX_EVENTS)),
        ("an event's `type`", format!("1–{} characters", limits::MAX_EVENT_TYPE_CHARS)),
        ("an event's `payload`", format!("{} bytes", limits::MAX_EVENT_PAYLOAD_BYTES)),
        ("log chunks of one report", format!("1–{}", limits::MAX_LOG_CHUNKS)),
        ("a log chunk's `data`", format!("{} bytes", limits::MAX_LOG_CHUNK_BYTES)),
        ("jobs of one log report", limits::MAX_LOG_JOBS.to_string()),
        ("a silent worker", format!("forgotten after {} s", limits::WORKER_KEEP_SECONDS)),
    ]
}

/// The rows of "A queue".
fn queue_limits() -> Vec<(&'static str, String)> {
    vec![
        ("`max_concurrency`", format!("0–{}", limits::MAX_CONCURRENCY)),
        ("`rate_limit.count`", format!("1–{}", limits::MAX_RATE_LIMIT_COUNT)),
        ("`rate_limit.per_seconds`", format!("1–{} s", limits::MAX_RATE_LIMIT_SECONDS)),
        ("`default_lease_seconds`", format!("1–{} s", limits::MAX_LEASE_SECONDS)),
        ("`default_max_attempts`", format!("1–{}", limits::MAX_MAX_ATTEMPTS)),
        ("`brake_after`", format!("1–{}", limits::MAX_BRAKE_AFTER)),
        (
            "`retention_days`",
            format!(
                "1–{} days, {} if it is not set",
                limits::MAX_RETENTION_DAYS,
                limits::DEFAULT_RETENTION_DAYS
            ),
        ),
        (
            "running jobs that are counted",
            format!("{}, more are shown as pending", counts::MAX_COUNTED_PROCESSING),
        ),
        ("queues of a project", limits::MAX_PROJECT_QUEUES.to_string()),
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
    ]
}

/// The rows of "Recurring schedules and bulk work".
fn bulk_limits() -> Vec<(&'static str, String)> {
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
fn request_limits() -> Vec<(&'static str, String)> {
    vec![
        ("body", format!("{} bytes", limits::MAX_BODY_BYTES)),
        ("body of a batch", format!("{} bytes", limits::MAX_BATCH_BODY_BYTES)),
        ("jobs of one batch", format!("1–{}", limits::MAX_ENQUEUE_BATCH_JOBS)),
        ("acks of one batch", format!("1–{}", limits::MAX_ACK_BATCH)),
        ("jobs on one page", format!("1–{}", limits::MAX_PAGE_JOBS)),
        ("rows examined for one page", limits::MAX_PAGE_EXAMINED_ROWS.to_string()),
        ("workers on one page", format!("1–{}", limits::MAX_PAGE_WORKERS)),
        ("workflows on one page", format!("1–{}", limits::MAX_PAGE_WORKFLOWS)),
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
fn node_limits() -> Vec<(&'static str, String)> {
    vec![
        ("parked polls", format!("{MAX_PARKED_POLLS}, then 503")),
        ("event streams", format!("{}, then 503", limits::MAX_STREAMS)),
        ("event streams of one project", format!("{}, then 429", limits::MAX_PROJECT_STREAMS)),
        (
            "events of one project kept for streams that reconnect",
            limits::MAX_REMEMBERED_EVENTS.to_string(),
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
        (
            "connections of one IP address",
            format!("{}, proxies excepted", config::DEFAULT_CONNECTIONS_PER_ADDRESS),
        ),
        (
            "time for which a credential is cached",
            format!("{} s", fencepost::credentials::CREDENTIAL_TTL.as_secs()),
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
            "time for requests to finish when the node stops",
            format!("{} s", DRAIN_TIMEOUT.as_secs()),
        ),
    ]
}

#[test]
fn every_command_and_flag_explains_itself() {
    fn check(command: &Command) {
        assert!(command.get_about().is_some(), "{}", command.get_name());
        for argument in command.get_arguments() {
            assert!(argument.get_help().is_some(), "{} {}", command.get_name(), argument.get_id());
        }
        command.get_subcommands().for_each(check);
    }
    check(&Cli::command());
}
