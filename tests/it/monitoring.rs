//! What operators look at: rules that Prometheus accepts and that fire on what they are for, and
//! dashboards whose every expression returns data of a real server under load, through a real
//! Prometheus.

use std::{
    collections::BTreeSet,
    process::Command,
    time::{Duration, Instant},
};

use fencepost_domain::ids::ProjectId;
use fencepost_http::docs;
use fencepost_signals::telemetry::METRICS;
use fencepost_store::{
    people::projects,
    sweep::gauges::{self, ByState},
};

use crate::{
    docs::read,
    harness::{
        LoneProject, NodeProcess, Process, Sink, TestProject, free_port, fresh_database, limited,
        run_for, scratch, until,
    },
};
use reqwest::StatusCode;
use serde_json::{Value, json};

const DASHBOARDS: [&str; 4] = ["overview", "queues-and-workers", "store-and-loops", "limits"];
/// Two of Prometheus's looks.
const RATE_INTERVAL: &str = "10s";

fn promtool(args: &[&str]) -> String {
    let run = Command::new("promtool").args(args).current_dir(env!("CARGO_MANIFEST_DIR")).output();
    let run = run.expect("promtool is installed");
    let said = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "promtool {args:?}: {said}");
    said.into_owned()
}

#[test]
fn every_alert_is_sound_fires_on_what_it_is_for_and_has_a_runbook() {
    promtool(&["check", "rules", "ops/prometheus/rules.yml"]);
    promtool(&["check", "config", "--syntax-only", "ops/prometheus/prometheus.yml"]);
    promtool(&["test", "rules", "ops/prometheus/rules.test.yml"]);
    let (rules, tests) = (read("ops/prometheus/rules.yml"), read("ops/prometheus/rules.test.yml"));
    let alerts = |text: &str, before: &str| -> BTreeSet<String> {
        text.lines().filter_map(|it| it.trim().strip_prefix(before)).map(str::to_owned).collect()
    };
    let named = alerts(&rules, "- alert: ");
    assert!(named.len() >= 20);
    let fired: BTreeSet<_> = tests
        .split("- eval_time")
        .filter(|it| it.contains("exp_alerts:"))
        .filter_map(|it| it.split("alertname: ").nth(1)?.lines().next())
        .map(str::to_owned)
        .collect();
    assert_eq!(named, fired, "each alert is seen to fire");
    assert_eq!(named, alerts(&tests, "alertname: "));
    let runbooks = alerts(&rules, "runbook_url: https://fencepost.example/docs/");
    for runbook in &runbooks {
        let page = read(&format!("docs/{runbook}.md"));
        assert!(page.contains("## Diagnose") && page.contains("## Fix"), "{runbook}");
        let served = docs::names().any(|it| it == *runbook);
        assert!(served, "{runbook} is not served");
    }
}

/// An expression with the variables of a dashboard filled in.
fn plain(expr: &str) -> String {
    expr.replace("$__rate_interval", RATE_INTERVAL)
        .replace("$queue", ".*")
        .replace("$instance", ".*")
}

fn exprs_of(dashboard: &Value) -> Vec<String> {
    let panels = dashboard["panels"].as_array().expect("panels").iter();
    let targets = panels.flat_map(|it| it["targets"].as_array().expect("targets").clone());
    targets.map(|it| plain(it["expr"].as_str().expect("an expression"))).collect()
}

/// The sides of a rule's comparisons: while all is well, the rule itself says nothing.
fn sides_of_rules() -> Vec<String> {
    let rules = read("ops/prometheus/rules.yml");
    let exprs = rules.split("expr: |-\n").skip(1).filter_map(|it| it.lines().next());
    let comparisons = exprs.flat_map(|expression| {
        expression
            .trim()
            .split(" and ")
            .flat_map(|it| it.split(" or "))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    });
    // What is there is not absent.
    comparisons
        .filter(|it| !it.starts_with("absent("))
        .map(|comparison| {
            let sides = [" > ", " == ", " < "].map(|sign| comparison.rsplit_once(sign));
            let side = sides.into_iter().flatten().next();
            let side = side.unwrap_or_else(|| panic!("{comparison} compares nothing")).0;
            // Nothing has failed yet.
            side.replace("[5m]", "[10s]")
                .replace("[10m]", "[10s]")
                .replace("[15m]", "[10s]")
                .replace("[30m]", "[10s]")
                .replace("[1h]", "[10s]")
                .replace("[6h]", "[10s]")
                .replace(">= 3", ">= 0")
                .replace("status=~\"5..\", ", "")
        })
        .collect()
}

/// A Prometheus that scrapes a node, and a project on it with the project's own key.
struct Watcher {
    url: String,
    _process: Process,
}

impl Watcher {
    fn start(node: &NodeProcess, t: &TestProject) -> Self {
        let (dir, port) = (scratch("prometheus"), free_port());
        let config = json!({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "scrape_configs": [
                {"job_name": "fencepost",
                 "static_configs": [{"targets": [format!("127.0.0.1:{}", node.operator_port)]}]},
                {"job_name": "project", "metrics_path": "/v1/metrics/prometheus",
                 "authorization": {"credentials": t.api_key},
                 "static_configs": [{"targets": [format!("127.0.0.1:{}", node.port)]}]},
            ],
        });
        let file = dir.join("prometheus.yml");
        std::fs::write(&file, config.to_string()).expect("it is written");
        let process = Process::start(
            Command::new("prometheus")
                .arg(format!("--config.file={}", file.display()))
                .arg(format!("--storage.tsdb.path={}", dir.join("data").display()))
                .arg(format!("--web.listen-address=127.0.0.1:{port}")),
        );
        Self { url: format!("http://127.0.0.1:{port}"), _process: process }
    }

    /// How many series an expression has now.
    async fn series(&self, expr: &str) -> usize {
        let query = [("query", expr)];
        let asked =
            crate::harness::client().get(format!("{}/api/v1/query", self.url)).query(&query);
        let Ok(answer) = asked.send().await else { return 0 };
        // Its port is open before it can answer.
        if answer.status() == StatusCode::SERVICE_UNAVAILABLE {
            return 0;
        }
        let answer: Value = answer.json().await.expect("JSON");
        assert_eq!(answer["status"], "success", "{expr}: {answer}");
        answer["data"]["result"].as_array().expect("a result").len()
    }
}

/// Everything that leaves a trace in the metrics, over and over.
async fn live(t: &LoneProject, round: usize) {
    for number in 0..4 {
        let job = json!({"job_type": format!("type{number}"), "max_attempts": 1 + number % 2});
        t.enqueue(job).await;
    }
    let jobs = t.poll("w", 4).await;
    for (number, job) in jobs.iter().enumerate() {
        let status = ["succeeded", "failed", "released", "succeeded"][number % 4];
        t.ack(job, "w", status).await;
    }
    // A stale ack, an expired lease, a cancelled job.
    if let Some(job) = jobs.first() {
        t.ack(job, "another", "succeeded").await;
    }
    if round == 0 {
        let poll = json!({
            "worker_id": "sleepy", "queues": ["default"], "wait_seconds": 0, "lease_seconds": 1,
        });
        t.enqueue(json!({"priority": 9})).await;
        t.polled(poll).await;
        let id = t.enqueue(json!({"delay_seconds": 600})).await;
        t.act(&format!("/v1/jobs/{id}/cancel")).await.is(200);
        // One that waits for a minute: its reason is reported.
        let old = t.enqueue(json!({"queue": "unpolled"})).await;
        t.database
            .execute(
                "update jobs set created_at = created_at - interval '1 min',
                                 run_at = run_at - interval '1 min'
                 where queue = 'unpolled'",
            )
            .await;
        assert_eq!(t.job(&old).await["state"], "pending");
        let every_second = json!({"job_type": "tick", "cron_expression": "* * * * * *"});
        t.put("/v1/recurring/ticks", every_second).await;
    }
}

#[test]
fn every_expression_of_every_dashboard_and_rule_returns_data() {
    run_for(Duration::from_secs(120), async {
        let database = fresh_database().await;
        let args = ["--canary-seconds", "1", "--outbound-allow", "127.0.0.1"];
        let mut node = NodeProcess::start_at(&database, free_port(), &args);
        node.until_ready().await;
        let t = LoneProject::at(&node.url(), &database, "main").await;
        let sink = Sink::start().await;
        let reported = json!({"url": sink.url, "events": ["*"]});
        t.post("/v1/webhooks", reported).await.is(201);
        let watcher = Watcher::start(&node, &t);
        let mut wanted: BTreeSet<String> = sides_of_rules().into_iter().collect();
        for name in DASHBOARDS {
            let dashboard = read(&format!("ops/grafana/dashboards/{name}.json"));
            wanted.extend(exprs_of(&serde_json::from_str(&dashboard).expect("a dashboard")));
        }
        wanted.extend(exprs_of(&t.get("/v1/grafana-dashboard.json").await.is(200)));
        assert!(wanted.len() > 80);
        let patience = Instant::now() + Duration::from_secs(60);
        for round in 0.. {
            live(&t, round).await;
            let mut silent = BTreeSet::new();
            for expr in wanted {
                if watcher.series(&expr).await == 0 {
                    silent.insert(expr);
                }
            }
            wanted = silent;
            if wanted.is_empty() {
                return;
            }
            assert!(Instant::now() < patience, "these return nothing: {wanted:#?}");
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    });
}

#[test]
fn what_the_operator_scrapes_is_well_formed_and_complete() {
    limited(async {
        let database = fresh_database().await;
        let mut node = NodeProcess::start(&database);
        node.until_ready().await;
        let text = node.metrics().await;
        let file = scratch("metrics").join("metrics.txt");
        std::fs::write(&file, &text).expect("it is written");
        let sh = format!("promtool check metrics < {}", file.display());
        let checked = Command::new("sh").args(["-c", &sh]).output().expect("it runs");
        let said = String::from_utf8_lossy(&checked.stderr);
        assert!(checked.status.success(), "{said}");
        let unnamed: Vec<_> = METRICS.iter().filter(|it| it.help.is_empty()).collect();
        assert!(unnamed.is_empty());
    });
}

/// The value of a metric, as a scrape shows it.
async fn scraped(node: &NodeProcess, series: &str) -> Option<f64> {
    let text = node.metrics().await;
    let line = text.lines().find_map(|it| it.strip_prefix(series)?.strip_prefix(' '));
    line.map(|it| it.trim().parse().expect("a number"))
}

async fn becomes(node: &NodeProcess, series: &str, is_wanted: fn(f64) -> bool) {
    until(format!("{series} to be as wanted"), async || {
        scraped(node, series).await.is_some_and(is_wanted)
    })
    .await;
}

#[test]
fn the_canary_is_missed_when_jobs_do_not_get_through_and_is_seen_nowhere_else() {
    limited(async {
        let database = fresh_database().await;
        let mut node = NodeProcess::start_at(&database, free_port(), &["--canary-seconds", "1"]);
        node.until_ready().await;
        let misses = "fencepost_canary_consecutive_misses";
        becomes(&node, "fencepost_canary_runs_total{outcome=\"ok\"}", |it| it >= 2.0).await;
        becomes(&node, "fencepost_canary_duration_seconds_count", |it| it >= 2.0).await;
        let of_canary = "from finished_jobs where queue like 'canary-%' and state = 'succeeded'";
        assert!(database.number(&format!("select count(*) {of_canary}")).await >= 2);
        let mut conn = database.connect().await;
        let listed = projects::list(&mut conn, ProjectId(0), 10).await.expect("it runs");
        assert_eq!(listed, []);
        assert_eq!(projects::find(&mut conn, ".canary", None).await.expect("it runs"), None);
        database
            .execute(
                "create function stop() returns trigger language plpgsql as
                 $$ begin raise exception 'no job is stored'; end $$;
                 create trigger stop before insert on jobs for each row execute function stop()",
            )
            .await;
        becomes(&node, misses, |it| it >= 2.0).await;
        assert_eq!(gauges::by_state(&mut conn).await.expect("it runs"), ByState::default());
        database.execute("drop trigger stop on jobs").await;
        becomes(&node, misses, |it| it == 0.0).await;
        node.terminate().await;
    });
}
