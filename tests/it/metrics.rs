//! A project's own numbers: as JSON, for its Prometheus, and what its people import.

use std::time::{Duration, Instant};

use crate::harness::{
    LoneProject, TestProject, TestServer, eventually, fresh_database, limited, run, run_alone,
    scratch, until,
};
use serde_json::{Value, json};

/// Waits until a node has written down what it has counted, and answers with the summary.
async fn summary_with(t: &TestProject, field: &str, wanted: i64) -> Value {
    eventually(format!("{field} to be {wanted}"), async || {
        let summary = t.get("/v1/metrics/summary?period=1h").await.is(200);
        (summary[field] == wanted).then_some(summary)
    })
    .await
}

/// One job that succeeds, one that fails and is retried, one that is dead-lettered, one that is
/// cancelled, and two that wait.
async fn work(t: &TestProject) {
    let gone = t.enqueue(json!({"delay_seconds": 600})).await;
    t.enqueue(json!({"job_type": "good"})).await;
    t.enqueue(json!({"job_type": "bad"})).await;
    t.enqueue(json!({"job_type": "bad", "max_attempts": 1})).await;
    let jobs = t.poll("w", 3).await;
    t.ack(&jobs[0], "w", "succeeded").await.is(200);
    t.ack(&jobs[1], "w", "failed").await.is(200);
    t.ack(&jobs[2], "w", "failed").await.is(200);
    t.enqueue(json!({"queue": "mail"})).await;
    // Last: when it is counted, all is.
    t.act(&format!("/v1/jobs/{gone}/cancel")).await.is(200);
}

#[test]
fn metrics_of_a_project_count_jobs_by_outcome_in_sum_and_by_bucket() {
    run(async |t| {
        work(t).await;
        let summary = summary_with(t, "cancelled", 1).await;
        let expected = json!({
            "pending": 2, "scheduled": 0, "processing": 0, "succeeded": 1, "failed": 1,
            "cancelled": 1, "dead_letter": 1, "total": 6, "period": "1h", "success_rate": 0.3333,
        });
        for (field, value) in expected.as_object().expect("fields") {
            assert_eq!(&summary[field], value, "{field}: {summary}");
        }
        for number in ["/avg_duration_ms", "/run/p99_ms", "/wait/p50_ms"] {
            assert!(summary.pointer(number).is_some_and(Value::is_i64), "{number}: {summary}");
        }
        // Every period and granularity counts the same.
        for (path, buckets) in [
            ("period=1h", 61),
            ("period=24h", 25),
            ("period=7d", 169),
            ("period=30d", 31),
            ("period=30d&granularity=hour", 721),
        ] {
            let seen = t.get(&format!("/v1/metrics/throughput?{path}")).await.is(200);
            let list = seen["buckets"].as_array().expect("buckets");
            assert_eq!(list.len(), buckets, "{path}");
            let sum = |field: &str| list.iter().filter_map(|it| it[field].as_i64()).sum::<i64>();
            assert_eq!((sum("enqueued"), sum("claimed")), (5, 3), "{path}");
            assert_eq!((sum("failed"), sum("dead_letter")), (2, 1), "{path}");
        }
        let mail = t.get("/v1/metrics/throughput?period=1h&queue=mail").await.is(200);
        let last =
            mail["buckets"].as_array().and_then(|it| it.iter().find(|it| it["enqueued"] == 1));
        assert!(last.is_some_and(|it| it["p50_ms"].is_null()), "{mail}");
        let bad = t.get("/v1/metrics/throughput?job_type=bad").await.is(200);
        assert!(bad.to_string().contains("\"failed\":2"), "{bad}");
    });
}

#[test]
fn jobs_of_a_schedule_are_counted_as_enqueued() {
    run(async |t| {
        let every_second = json!({"job_type": "tick", "cron_expression": "* * * * * *"});
        t.put("/v1/recurring/ticks", every_second).await.is(200);
        until("a tick to be counted", async || {
            let seen = t.get("/v1/metrics/throughput?period=1h&job_type=tick").await.is(200);
            let buckets = seen["buckets"].as_array().expect("buckets");
            buckets.iter().any(|it| it["enqueued"].as_i64() > Some(0))
        })
        .await;
    });
}

#[test]
fn a_job_whose_time_is_long_past_waits_since_it_was_stored() {
    run(async |t| {
        t.enqueue(json!({"run_at": "2001-01-01T00:00:00Z"})).await;
        let queue = t.get("/v1/queues/default").await.is(200);
        assert!(queue["oldest_ready_age_seconds"].as_i64() < Some(60), "{queue}");
        let backlog = t.get("/v1/queues/default/backlog").await.is(200);
        assert!(backlog["oldest_ready_age_seconds"].as_i64() < Some(60), "{backlog}");
    });
}

#[test]
fn an_operator_finds_the_queue_that_is_stuck_and_why() {
    run_alone(async |t| {
        let stuck = async || {
            let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_fencepost"));
            let run = command.args(["stuck", "--database-url", &t.database.url]).output().await;
            String::from_utf8(run.expect("it runs").stdout).expect("text")
        };
        assert_eq!(stuck().await, "no ready job waits\n");
        t.enqueue(json!({"queue": "mail"})).await;
        t.enqueue(json!({"queue": "mail", "priority": 5, "run_at": "2001-01-01T00:00:00Z"})).await;
        // Counters are added up within a second.
        let alone = eventually("the job type to be stuck", async || {
            let said = stuck().await;
            said.contains("mail").then_some(said)
        })
        .await;
        assert!(alone.contains("main  mail  (no worker takes its jobs)"), "{alone}");
        let seconds: i64 =
            alone.split_whitespace().next().and_then(|it| it.parse().ok()).expect("a time");
        assert!(seconds < 60, "{alone}");
        t.polled(json!({"worker_id": "w", "queues": ["mail"], "wait_seconds": 0})).await;
        // Workers are written down a moment later.
        until("a worker that has not said what it takes", async || {
            stuck().await.contains("(1 live worker with 1 job, and not all have reported")
        })
        .await;
        t.act("/v1/queues/mail/pause").await.is(200);
        assert!(stuck().await.contains("(paused)"));
    });
}

#[test]
fn a_wrong_period_is_refused_by_name() {
    run(async |t| {
        t.get("/v1/metrics/summary?period=2h").await.refuses("period");
        t.get("/v1/metrics/throughput?granularity=second").await.refuses("granularity");
        let message =
            t.get("/v1/metrics/throughput?granularity=minute").await.refuses("granularity");
        assert!(message.contains("1h"), "{message}");
        t.get("/v1/metrics/throughput?period=1h&granularity=day").await.refuses("granularity");
        t.get("/v1/metrics/throughput?queue=").await.refuses("queue");
        t.get("/v1/metrics/throughput?typo=1").await.is_error(400, "invalid_request");
    });
}

#[test]
fn a_project_scrapes_only_its_own_metrics() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (ours, theirs) = (server.project("ours").await, server.project("theirs").await);
        let t = &ours;
        theirs.enqueue(json!({"queue": "secret"})).await;
        work(t).await;
        summary_with(t, "cancelled", 1).await;
        let scraped = t.get("/v1/metrics/prometheus").await;
        assert_eq!(scraped.status, 200, "{}", scraped.text);
        let kind = scraped.headers["content-type"].to_str().expect("text");
        assert!(kind.starts_with("text/plain; version=0.0.4"), "{kind}");
        for line in [
            "fencepost_project_queue_jobs{project=\"ours\",queue=\"default\",state=\"backoff\"} 1",
            "fencepost_project_queue_jobs{project=\"ours\",queue=\"mail\",state=\"ready\"} 1",
            "fencepost_project_queue_paused{project=\"ours\",queue=\"mail\"} 0",
            "fencepost_project_jobs_enqueued_total{project=\"ours\",queue=\"default\",job_type=\"bad\"} 2",
            "fencepost_project_attempts_total{project=\"ours\",queue=\"default\",job_type=\"bad\",outcome=\"failed\"} 2",
            "fencepost_project_jobs_dead_lettered_total{project=\"ours\",queue=\"default\",job_type=\"bad\"} 1",
            "fencepost_project_job_wait_seconds_count{project=\"ours\",queue=\"default\"} 3",
            "fencepost_project_job_run_seconds_count{project=\"ours\",job_type=\"good\"} 1",
        ] {
            assert!(scraped.text.lines().any(|it| it == line), "{line}\n{}", scraped.text);
        }
        assert!(!scraped.text.contains("secret"));
        let page = crate::docs::read("docs/metrics.md");
        let named =
            scraped.text.lines().filter_map(|it| it.strip_prefix("# TYPE ")?.split(' ').next());
        for name in named {
            assert!(page.contains(&format!("`{name}`")), "{name} is not explained");
        }
        server.stop().await;
    });
}

#[test]
fn an_autoscaler_sees_the_backlog_of_a_queue_even_before_its_first_job() {
    run(async |t| {
        let empty = t.get("/v1/queues/mail/backlog").await.is(200);
        assert_eq!((&empty["backlog"], &empty["workers"]), (&json!(0), &json!(0)));
        for _ in 0..3 {
            t.enqueue(json!({})).await;
        }
        t.lease("w").await;
        let seen = t.get("/v1/queues/default/backlog").await.is(200);
        assert_eq!(
            (&seen["backlog"], &seen["ready"], &seen["processing"]),
            (&json!(3), &json!(2), &json!(1))
        );
        t.patch("/v1/queues/default", json!({"max_concurrency": 2})).await.is(200);
        let limited = t.get("/v1/queues/default/backlog").await.is(200);
        assert_eq!(limited["backlog"], 2, "more workers would have nothing to do");
        t.act("/v1/queues/default/pause").await.is(200);
        let paused = t.get("/v1/queues/default/backlog").await.is(200);
        assert_eq!((&paused["backlog"], paused["paused_at"].is_string()), (&json!(1), true));
        assert_eq!(paused["oldest_ready_age_seconds"], 0);
    });
}

#[test]
fn a_wait_for_a_backlog_ends_with_the_first_job_on_any_node() {
    limited(async {
        let database = fresh_database().await;
        let (server, other) =
            (TestServer::start(database.clone()).await, TestServer::start(database).await);
        let t = server.project("main").await;
        let wait = |t: TestProject| async move {
            t.get("/v1/queues/mail/backlog?wait_seconds=30").await.is(200)["backlog"].clone()
        };
        let there = t.through(&other.url);
        let [here, elsewhere] = [(*t).clone(), (*there).clone()].map(|it| tokio::spawn(wait(it)));
        // Without a hint, a node looks again after 15 s. Another node hears none before it has
        // subscribed to them.
        let by_a_hint = Duration::from_secs(10);
        let enqueued = Instant::now();
        t.enqueue(json!({"queue": "reports"})).await;
        t.enqueue(json!({"queue": "mail"})).await;
        assert_eq!(here.await.expect("an answer"), 1);
        assert!(enqueued.elapsed() < by_a_hint);
        assert_eq!(elsewhere.await.expect("an answer"), 1);
        t.act("/v1/queues/mail/pause").await.is(200);
        let resumed = tokio::spawn(wait((*t).clone()));
        let path = |seconds: &str| format!("/v1/queues/mail/backlog?wait_seconds={seconds}");
        assert_eq!(t.get(&path("1")).await.is(200)["backlog"], 0, "it is paused");
        let asked = Instant::now();
        t.act("/v1/queues/mail/resume").await.is(200);
        assert_eq!(resumed.await.expect("an answer"), 1);
        assert!(asked.elapsed() < by_a_hint);
        t.get(&path("31")).await.refuses("wait_seconds");
        server.stop().await;
        other.stop().await;
    });
}

#[test]
fn job_types_are_listed_by_what_they_did_in_the_last_day() {
    run_alone(async |t| {
        for (queue, number) in [("a", 0), ("b", 1), ("a", 2)] {
            t.enqueue(json!({"job_type": "mail", "queue": queue, "payload": number})).await;
        }
        t.enqueue(json!({"job_type": "report", "queue": "a", "max_attempts": 1})).await;
        for status in ["succeeded", "succeeded", "failed"] {
            let poll = json!({"worker_id": "w", "queues": ["a"], "wait_seconds": 5});
            let job = t.polled(poll).await.remove(0);
            t.ack(&job, "w", status).await.is(200);
        }
        let theirs = LoneProject::at(&t.url, &t.database, "theirs").await;
        theirs.enqueue(json!({"job_type": "secret"})).await;
        let types = eventually("the counts of both types", async || {
            let seen = t.get("/v1/job-types").await.is(200)["job_types"].clone();
            (seen[1]["dead_letter"] == 1 && seen[0]["succeeded"] == 2).then_some(seen)
        })
        .await;
        assert_eq!(types.as_array().expect("types").len(), 2, "{types}");
        assert_eq!((&types[0]["job_type"], &types[0]["enqueued"]), (&json!("mail"), &json!(3)));
        assert_eq!(types[0]["queues"], json!(["a", "b"]));
        assert_eq!((&types[1]["job_type"], &types[1]["failed"]), (&json!("report"), &json!(1)));
        assert!(types[0]["run"]["p95_ms"].is_i64() && types[0]["wait"]["p50_ms"].is_i64());
    });
}

#[test]
fn the_dashboard_and_the_rules_are_of_the_project_and_hold_for_later_queues() {
    run(async |t| {
        let dashboard = t.get("/v1/grafana-dashboard.json").await.is(200);
        let variable = &dashboard["templating"]["list"][1];
        let project = format!("{{project=\"{}\"}}", t.slug);
        let values = format!("label_values(fencepost_project_queue_jobs{project}, queue)");
        assert_eq!(variable["query"]["query"], values);
        assert_eq!(dashboard["title"], format!("Fencepost: {}", t.slug));
        assert!(!dashboard.to_string().contains("PROJECT_SLUG"));
        let rules = t.get("/v1/alert-rules.yaml").await;
        assert_eq!(rules.status, 200);
        assert_eq!(rules.headers["content-type"], "text/plain; charset=utf-8");
        for part in [
            "- alert: FencepostQueueStuck",
            &format!("project=\\\"{}\\\"", t.slug),
            &format!("{}/docs/runbooks/queue-stuck", t.url),
        ] {
            assert!(rules.text.contains(part), "{part}\n{}", rules.text);
        }
        let file = scratch("alert-rules").join("rules.yml");
        std::fs::write(&file, &rules.text).expect("it is written");
        let mut promtool = tokio::process::Command::new("promtool");
        let checked = promtool.args(["check", "rules"]).arg(file).output().await.expect("it runs");
        let said = String::from_utf8_lossy(&checked.stdout);
        assert!(checked.status.success() && said.contains("4 rules found"), "{said}{}", rules.text);
    });
}
