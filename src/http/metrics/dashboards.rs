//! A Grafana dashboard and alert rules for users, filled with the project's queues.

use std::fmt::Write;

use axum::{
    Json as Reply,
    extract::State,
    http::header::{CONTENT_TYPE, HeaderName},
};
use serde_json::{Value, json};

use super::prometheus::queues;
use crate::{
    app::App,
    auth::{Caller, Read},
    error::Error,
};

/// The dashboard template: made by `scripts/dashboards.py`.
const DASHBOARD: &str = include_str!("../../../ops/grafana/project.json");
/// Alert threshold for the age of a ready job, in seconds.
const OLD_SECONDS: u32 = 300;

/// Get a Grafana dashboard.
///
/// Import it into Grafana; it offers this project's busiest queues. It shows the metrics of
/// `/v1/metrics/prometheus`.
#[utoipa::path(
    get, path = "/grafana-dashboard.json", tag = "metrics", operation_id = "metrics_dashboard",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    responses(
        (status = 200, description = "A dashboard in Grafana's JSON.", body = Value),
    ),
)]
pub async fn dashboard(
    caller: Caller<Read>,
    State(app): State<App>,
) -> Result<Reply<Value>, Error> {
    let (named, _) = queues(&app, caller.project_id).await?;
    let names: Vec<_> = named.iter().map(|it| it.queue.as_str()).collect();
    let project = caller.who.project().to_string();
    fill(&project, &names).map(Reply).map_err(Error::internal)
}

fn fill(project: &str, queues: &[&str]) -> serde_json::Result<Value> {
    let mut dashboard: Value = serde_json::from_str(DASHBOARD)?;
    dashboard["title"] = json!(format!("Fencepost: {project}"));
    // Grafana's ids have at most 40 characters.
    dashboard["uid"] = json!(project.chars().take(40).collect::<String>());
    let variables = dashboard.pointer_mut("/templating/list").and_then(Value::as_array_mut);
    let queue = variables.into_iter().flatten().find(|it| it["name"] == "queue");
    if let Some(queue) = queue {
        // Grafana splits the value at commas, and inserts the selection into an expression.
        let escaped: Vec<_> = queues.iter().map(|it| it.replace(',', "\\,")).collect();
        queue["query"] = json!(escaped.join(","));
        queue["options"] =
            queues.iter().map(|it| json!({"text": it, "value": it, "selected": false})).collect();
    }
    Ok(dashboard)
}

/// Get alert rules.
///
/// For Prometheus, one group for each of this project's busiest queues: jobs wait too long, no
/// worker polls, jobs are dead-lettered.
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
    let (named, _) = queues(&app, caller.project_id).await?;
    let names: Vec<_> = named.iter().map(|it| it.queue.as_str()).collect();
    let text = rules(&app.accounts.public_url, &names);
    Ok(([(CONTENT_TYPE, "text/plain; charset=utf-8")], text))
}

/// Alert rule of one queue.
struct Rule {
    alert: &'static str,
    expr: String,
    wait: &'static str,
    severity: &'static str,
    summary: String,
    runbook: &'static str,
}

fn rules_of(queue: &str) -> [Rule; 3] {
    // A PromQL string is escaped like a JSON string.
    let of = format!("queue={}", json!(queue));
    [
        Rule {
            alert: "FencepostQueueStuck",
            expr: format!(
                "fencepost_project_queue_oldest_ready_age_seconds{{{of}}} > {OLD_SECONDS} and on (queue, instance) \
                 fencepost_project_queue_paused{{{of}}} == 0"
            ),
            wait: "1m",
            severity: "page",
            summary: format!(
                "jobs of the queue {queue} wait for longer than {OLD_SECONDS} seconds"
            ),
            runbook: "queue-stuck",
        },
        Rule {
            alert: "FencepostQueueWithoutWorkers",
            expr: format!(
                "fencepost_project_queue_jobs{{{of}, state=\"ready\"}} > 0 and on (queue, instance) \
                 fencepost_project_queue_workers{{{of}}} == 0"
            ),
            wait: "5m",
            severity: "page",
            summary: format!("no worker polls the queue {queue}, and jobs wait in it"),
            runbook: "queue-without-workers",
        },
        Rule {
            alert: "FencepostDeadLetters",
            expr: format!(
                "sum by (queue) (increase(fencepost_project_jobs_dead_lettered_total{{{of}}}[10m])) > 0"
            ),
            wait: "0m",
            severity: "ticket",
            summary: format!("jobs of the queue {queue} were dead-lettered"),
            runbook: "dead-letters",
        },
    ]
}

/// Texts are written as JSON strings, which YAML reads unchanged.
fn rules(url: &str, queues: &[&str]) -> String {
    let mut text = String::from("groups:\n");
    if queues.is_empty() {
        text = "groups: []\n".to_owned();
    }
    for (number, queue) in queues.iter().enumerate() {
        // A Prometheus template begins with two braces.
        let plain = queue.replace('{', "(").replace('}', ")");
        let _ = writeln!(
            text,
            "  - name: {}\n    rules:",
            json!(format!("fencepost {number}: {queue}"))
        );
        for it in rules_of(queue) {
            let summary = it.summary.replace(queue, &plain);
            let _ = write!(
                text,
                "      - alert: {}\n        expr: {}\n        for: {}\n        labels:\n          severity: {}\n          queue: {}\n        \
                 annotations:\n          summary: {}\n          runbook_url: {}\n",
                it.alert,
                json!(it.expr),
                it.wait,
                it.severity,
                json!(plain),
                json!(summary),
                json!(format!("{url}/docs/runbooks/{}", it.runbook)),
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dashboard_has_the_queues_to_choose_from() {
        let filled = fill("proj_x", &["default", "a,b"]).expect("a dashboard");
        let queue = &filled["templating"]["list"][1];
        assert_eq!(queue["query"], "default,a\\,b");
        assert_eq!(queue["options"][1]["value"], "a,b");
    }

    #[test]
    fn no_name_of_a_queue_ends_its_rule() {
        let text = rules("https://q.example", &["a\"b: c\n- alert: {{x}}"]);
        assert_eq!(text.matches("\n      - alert: ").count(), 3, "{text}");
        assert!(!text.contains("{{x}} wait"), "{text}");
        assert_eq!(rules("https://q.example", &[]), "groups: []\n");
    }
}
