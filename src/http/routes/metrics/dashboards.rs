//! A Grafana dashboard and alert rules for users. Queues are found when they are looked at, so that
//! those that are made tomorrow have both.

use std::fmt::Write;

use axum::{
    Json as Reply,
    extract::State,
    http::header::{CONTENT_TYPE, HeaderName},
};
use fencepost_domain::error::Error;
use serde_json::{Value, json};

use fencepost_web::{
    app::App,
    auth::{Caller, Read},
};

/// The dashboard template: made by `scripts/dashboards.py`.
const DASHBOARD: &str = include_str!("../../../../ops/grafana/project.json");
/// Where the template names the project.
const SLUG_PLACE: &str = "PROJECT_SLUG";
/// Alert threshold for the age of a ready job, in seconds.
const OLD_SECONDS: u32 = 300;
/// The same for a job that no worker polls for.
const UNPOLLED_SECONDS: u32 = 240;

/// Get a Grafana dashboard.
///
/// Import it into Grafana; it offers this project's queues. It shows the metrics of
/// `/v1/metrics/prometheus`.
#[utoipa::path(
    get, path = "/grafana-dashboard.json", tag = "metrics", operation_id = "metrics_dashboard",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    responses(
        (status = 200, description = "A dashboard in Grafana's JSON.", body = Value,
         example = json!({"title": "Fencepost: main", "uid": "proj_01m7w3ha3aextt8pkwwdmxsmqw", "panels": []})),
    ),
)]
pub async fn dashboard(caller: Caller<Read>) -> Result<Reply<Value>, Error> {
    let project = caller.who.project().to_string();
    fill(&project, caller.who.slug()).map(Reply).map_err(Error::internal)
}

/// The template names the project in its expressions.
fn fill(project: &str, slug: &str) -> serde_json::Result<Value> {
    let mut dashboard: Value = serde_json::from_str(&DASHBOARD.replace(SLUG_PLACE, slug))?;
    dashboard["title"] = json!(format!("Fencepost: {slug}"));
    // Grafana's ids have at most 40 characters.
    dashboard["uid"] = json!(project.chars().take(40).collect::<String>());
    Ok(dashboard)
}

/// Get alert rules.
///
/// For Prometheus: jobs of a queue wait too long, with the reason; no worker polls it; jobs are
/// dead-lettered. They
/// hold for all queues of the project, also for later ones.
#[utoipa::path(
    get, path = "/alert-rules.yaml", tag = "metrics", operation_id = "metrics_alert_rules",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    responses(
        (status = 200, description = "Rules, in the YAML of Prometheus.", body = String, content_type = "text/plain"),
    ),
)]
pub async fn alert_rules(
    caller: Caller<Read>,
    State(app): State<App>,
) -> Result<([(HeaderName, &'static str); 1], String), Error> {
    let text = rules(&app.accounts.public_url, caller.who.slug());
    Ok(([(CONTENT_TYPE, "text/plain; charset=utf-8")], text))
}

/// An alert rule for all queues of a project.
struct Rule {
    alert: &'static str,
    expr: String,
    wait: &'static str,
    severity: &'static str,
    summary: &'static str,
    runbook: &'static str,
}

fn rules_of(slug: &str) -> [Rule; 4] {
    let of = format!("project=\"{slug}\"");
    [
        Rule {
            alert: "FencepostQueueStuck",
            expr: format!(
                "fencepost_project_oldest_ready_seconds{{{of}, reason!~\"queue_paused|no_workers\"}} > {OLD_SECONDS}"
            ),
            // The age is a wait of its own, and another reason would begin it anew.
            wait: "0m",
            severity: "page",
            summary: "jobs of the queue {{ $labels.queue }} have waited {{ $value | humanizeDuration }}: {{ $labels.reason }}",
            runbook: "queue-stuck",
        },
        Rule {
            alert: "FencepostQueueWithoutWorkers",
            expr: format!(
                "fencepost_project_oldest_ready_seconds{{{of}, reason=\"no_workers\"}} > {UNPOLLED_SECONDS}"
            ),
            wait: "0m",
            severity: "page",
            summary: "no worker polls the queue {{ $labels.queue }}, and jobs wait in it",
            runbook: "queue-without-workers",
        },
        Rule {
            alert: "FencepostDeadLetters",
            expr: format!(
                "sum by (project, queue) (increase(fencepost_project_jobs_dead_lettered_total{{{of}}}[10m])) > 0"
            ),
            wait: "0m",
            severity: "ticket",
            summary: "jobs of the queue {{ $labels.queue }} were dead-lettered",
            runbook: "dead-letters",
        },
        Rule {
            alert: "FencepostGroupsBlocked",
            expr: format!("fencepost_project_queue_blocked_groups{{{of}}} > 0"),
            wait: "5m",
            severity: "ticket",
            summary: "dead letters block {{ $value }} groups of the queue {{ $labels.queue }}",
            runbook: "groups-blocked",
        },
    ]
}

/// Texts are written as JSON strings, which YAML reads unchanged.
fn rules(url: &str, slug: &str) -> String {
    let mut text =
        format!("groups:\n  - name: {}\n    rules:\n", json!(format!("fencepost {slug}")));
    for it in rules_of(slug) {
        let _ = write!(
            text,
            "      - alert: {}\n        expr: {}\n        for: {}\n        labels:\n          severity: {}\n        \
             annotations:\n          summary: {}\n          runbook_url: {}\n",
            it.alert,
            json!(it.expr),
            it.wait,
            it.severity,
            json!(it.summary),
            json!(format!("{url}/docs/runbooks/{}", it.runbook)),
        );
    }
    text
}
