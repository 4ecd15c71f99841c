//! The documents say what the code does.

use std::collections::BTreeSet;

use clap::{Command, CommandFactory};

use fencepost::cli::{Cli, settings};
use fencepost_adapters as adapters;
use fencepost_domain::{
    access::Scope, limits, schedule::Schedule, webhook::EVENT_TYPES, zones::Rules,
};
use fencepost_http::{error::CODES, openapi};
use fencepost_signals::telemetry::{Kind, METRICS};

use crate::limits_page;

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
    assert!(
        read("openapi/openapi-project.json") == openapi::project_text(),
        "openapi/openapi-project.json is old: run `make openapi`"
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
fn the_guide_of_webhooks_lists_the_types_of_events() {
    let guide = read("docs/guides/webhooks.md").replace("[alarm](alarms.md)", "alarm");
    let rows: Vec<_> = guide.lines().filter(|line| line.starts_with("| `")).collect();
    let listed: Vec<_> =
        EVENT_TYPES.map(|(name, when)| format!("| `{name}` | {when} |")).into_iter().collect();
    assert_eq!(rows[..listed.len()], listed);
    assert!(rows[listed.len()].starts_with("| `endpoint.test` |"), "{}", rows[listed.len()]);
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
            let is_reported =
                |it: &serde_json::Value| it.get("$ref").or(it.get("description")).is_some();
            assert!(responses.values().all(is_reported), "{path}");
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
fn bounds_in_the_openapi_document_are_those_of_the_checks() {
    let document = openapi::document();
    let lists = [
        ("AckBatchRequest", "acks", limits::MAX_ACK_BATCH),
        ("CreateKeyRequest", "scopes", Scope::ALL.len()),
        ("CreateWorkflowRequest", "jobs", limits::MAX_WORKFLOW_JOBS),
        ("EnqueueBatchRequest", "jobs", limits::MAX_ENQUEUE_BATCH_JOBS),
        ("EventsRequest", "events", limits::MAX_EVENTS),
        ("WorkerHeartbeatRequest", "active_jobs", limits::MAX_BEAT_JOBS),
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
        .map(|metric| {
            let kind = match metric.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
                Kind::Seconds => "seconds",
                Kind::BatchSize => "batch size",
            };
            format!("| `{}` | {kind} | {} |", metric.name, metric.help)
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
    let of_process = names.iter().filter(|it| !it.starts_with("fencepost_"));
    let of_process = of_process.filter(|it| dashboard.contains(**it));
    let mut shown: BTreeSet<_> = of_process.map(|it| (*it).to_owned()).collect();
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
        limits_page::job_limits(),
        limits_page::callback_limits(),
        limits_page::worker_limits(),
        limits_page::queue_limits(),
        limits_page::bulk_limits(),
        limits_page::webhook_limits(),
        limits_page::alarm_limits(),
        limits_page::request_limits(),
        limits_page::node_limits(),
        limits_page::people_limits(),
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
    let rules = Rules::embedded();
    for row in rows {
        let cells: Vec<_> = row.split('|').map(|it| it.trim().trim_matches('`')).collect();
        let [_, expression, zone, after, fires_at, ..] = cells[..] else { panic!("{row}") };
        let schedule = Schedule::parse(expression, zone, &rules).expect("it can be read");
        let after: chrono::DateTime<chrono::FixedOffset> = after.parse().expect("a time");
        let ticks = schedule.preview(after.to_utc(), 1).expect("it fires");
        assert_eq!(ticks[0].local, fires_at, "{row}");
    }
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
