//! All texts that a project stores count as its bytes, in whatever table they are.

use std::ops::Range;

use fencepost_domain::limits::DAILY_CHANGES_PER_MANAGE_CALL;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::harness::{
    ALL_ROWS, LoneProject, TestServer, eventually, fresh_database, limited, run_alone,
};

use super::used;

/// Text that PostgreSQL cannot compress: 32 characters for each part.
fn noise(parts: usize) -> String {
    (0..parts).map(|_| Uuid::new_v4().simple().to_string()).collect()
}

fn names(count: usize, parts: usize) -> Vec<String> {
    (0..count).map(|_| noise(parts)).collect()
}

/// Bytes that counts and rows disagree about: what rows were counted as, in whatever table.
const DRIFT: &str = "
    select (
        coalesce((select sum(bytes) from stored_bytes), 0)
        + coalesce((select sum(bytes) from stored_byte_deltas), 0)
        - (
            select sum(number_of(format('select coalesce(sum(counted_bytes), 0) from %I', name)))
            from (
                select table_name as name
                from information_schema.columns
                where table_schema = 'public' and column_name = 'counted_bytes'
            ) tables
        )
    )::bigint";

/// Settings of each kind, as long as they may be or nearly so: path and body.
fn long_settings() -> Vec<(&'static str, Value)> {
    let callback = json!({"job_type": "after", "payload": noise(1_000)});
    vec![
        ("/v1/job-types/mail", json!({"schema": {"enum": names(30, 15)}})),
        (
            "/v1/recurring/report",
            json!({
                "job_type": noise(15), "cron_expression": "0 0 1 1 *", "payload": noise(2_000),
                "retry": {"non_retryable_types": names(50, 15)},
            }),
        ),
        (
            "/v1/alarms/long",
            json!({"rule": "dead_letters", "threshold": 5, "for_seconds": 60,
            "queues": names(50, 3)}),
        ),
        (
            "/v1/queues/functions/push",
            json!({"url": "http://127.0.0.1:9/", "timeout_seconds": 5,
            "headers": {"x-one": noise(60), "x-two": noise(60)}}),
        ),
        ("/v1/batches", json!({"name": "n", "on_success": callback})),
        (
            "/v1/webhooks",
            json!({"url": "http://127.0.0.1:9/", "events": ["job.dead_lettered"],
            "queues": names(50, 3), "job_types": names(50, 15)}),
        ),
        (
            "/v1/workers/register",
            json!({"worker_id": "long", "queues": names(100, 3),
            "job_types": names(100, 15)}),
        ),
        (
            "/v1/keys",
            json!({"name": "bound", "scopes": ["work"], "queues": names(20, 3),
            "job_types": names(100, 15)}),
        ),
    ]
}

async fn store_settings(t: &LoneProject) {
    for (path, body) in long_settings() {
        let creates = ["/v1/batches", "/v1/webhooks", "/v1/workers/register", "/v1/keys"];
        let reply = match creates.contains(&path) {
            true => t.post(path, body).await,
            false => t.put(path, body).await,
        };
        assert!(reply.status == 200 || reply.status == 201, "{path}: {}", reply.text);
    }
}

#[test]
fn all_texts_of_jobs_and_settings_count_and_are_free_again() {
    run_alone(async |t| {
        let retry = json!({"default_retry": {"non_retryable_types": names(50, 15)}});
        t.patch("/v1/queues/long", retry).await.is(200);
        store_settings(t).await;
        let job = |number: usize| {
            json!({
                "queue": "long", "job_type": noise(15), "labels": names(16, 3), "max_attempts": 2,
                "group": noise(6), "concurrency_key": noise(6), "concurrency_limit": 1, "unique": {"key": noise(6)},
                "idempotency_key": format!("{number}{}", noise(6)),
            })
        };
        for number in 0..40 {
            t.post("/v1/jobs", job(number)).await.is(201);
        }
        for worker in ["a", "b"] {
            let id = t.enqueue(json!({"queue": "failing", "max_attempts": 50})).await;
            for _ in 0..20 {
                let poll = json!({"worker_id": worker, "queues": ["failing"]});
                let leased = t.polled(poll).await.remove(0);
                let error = json!({"error": {"message": noise(10)}, "retry_after_seconds": 0});
                t.ack_with(&leased, worker, "failed", error).await.is(200);
                t.job_becomes(&id, "pending").await;
            }
        }
        let rows = t.database.number(ALL_ROWS).await;
        let stored = eventually("all rows to be counted", async || {
            let stored = used(t, "stored_bytes").await;
            (rows * 10 <= stored * 12).then_some(stored)
        })
        .await;
        assert!(stored < rows * 3, "{stored} are counted for {rows}");

        for path in ["recurring/report", "alarms/long", "queues/functions/push"] {
            let reply = t.delete(&format!("/v1/{path}")).await;
            assert!(reply.status.is_success(), "{path}: {}", reply.text);
        }
        t.put("/v1/job-types/mail", json!({"schema": null})).await.is(200);
        for table in [
            "queues",
            "workers",
            "api_keys",
            "batches",
            "webhook_endpoints",
            "queue_types",
            "incidents",
            "operations",
            "dead_letter_groups",
            "idempotency_keys",
        ] {
            t.database.execute(&format!("delete from {table}")).await;
        }
        t.database.until(DRIFT, 0).await;
        for table in ["attempts", "job_bodies", "job_edges", "job_stats", "schedule_fires"] {
            t.database.execute(&format!("delete from {table}")).await;
        }
        t.database.until(DRIFT, 0).await;
    });
}

#[test]
fn tags_that_change_are_counted_anew() {
    run_alone(async |t| {
        let id = t.enqueue(json!({"payload": noise(28), "delay_seconds": 600})).await;
        let path = format!("/v1/jobs/{id}");
        let bytes = "select coalesce(sum(counted_bytes), 0)::bigint from job_bodies";
        assert_eq!(t.database.number(bytes).await, 0, "a small job counts as all");
        let tags: serde_json::Map<_, _> =
            (0..30).map(|it| (format!("tag-{it}"), json!(noise(15)))).collect();
        t.patch(&path, json!({ "tags": tags })).await.is(200);
        assert!(t.database.number(bytes).await > 9_000);
        // Events are counted otherwise.
        t.database.execute("delete from job_events").await;
        t.database.until(DRIFT, 0).await;
        t.patch(&path, json!({"tags": {}, "labels": ["gpu"]})).await.is(200);
        assert!(t.database.number(bytes).await < 3_000);
        t.database.execute("delete from job_events").await;
        t.database.until(DRIFT, 0).await;
        t.database.execute("delete from job_bodies").await;
        t.database.until(DRIFT, 0).await;
    });
}

/// Tables of projects that no trigger counts, and why that is no way to store more.
const UNCOUNTED: &[(&str, &str)] = &[
    ("audit_log", "cannot be deleted; short, and bounded by the calls of a day"),
    ("count_corrections", "written by the server alone"),
    ("dead_letters", "counted with the body of the job"),
    ("ended_parents", "until the cascade has run"),
    ("event_subscriptions", "types that the server knows"),
    ("finished_jobs", "counted with the body of the job, and by its result"),
    ("group_notes", "gone within a second"),
    ("invitations", "bounded by the plan, and short"),
    ("job_expiries", "counted with the body of the job"),
    ("job_log_totals", "one of an attempt, which is counted"),
    ("jobs", "counted with the body of the job"),
    ("mails", "bounded for all projects together"),
    ("members", "bounded by the plan, and short"),
    ("outbound_events", "names of a job, until endpoints are notified"),
    ("outboxes", "one of a project"),
    ("queue_counts", "one of a queue, of which the plan bounds the number"),
    ("queue_deltas", "merged within a second"),
    ("queue_handouts", "one of a queue"),
    ("queue_rates", "one of a queue and a minute, for two hours"),
    ("retention_dues", "one of a queue, of which the plan bounds the number"),
    ("revived_parents", "until the cascade has run"),
    ("set_aside", "written by the server alone"),
    ("stored_byte_deltas", "the counts"),
    ("stored_bytes", "the counts"),
    ("usage_days", "one of a day, for 400 days"),
    ("usage_months", "one of a month"),
    ("workflow_jobs", "counted with the body of the job"),
];

#[test]
fn each_table_of_projects_is_counted() {
    run_alone(async |t| {
        let uncounted = "
            select string_agg(it.table_name, ' ' order by it.table_name)
            from information_schema.columns it
            join information_schema.tables using (table_schema, table_name)
            where table_schema = 'public' and table_type = 'BASE TABLE'
                and it.column_name = 'project_id' and it.data_type = 'integer'
                and not exists (
                    select
                    from information_schema.columns counted
                    where counted.table_schema = 'public'
                        and counted.table_name = it.table_name
                        and counted.column_name = 'counted_bytes'
                )
                and it.table_name not in (
                    'job_events', 'job_logs', 'workflows', 'workflow_definitions',
                    'workflow_starts'
                )";
        let found = t.database.text(uncounted).await;
        let explained: Vec<_> = UNCOUNTED.iter().map(|it| it.0).collect();
        assert_eq!(found.split(' ').collect::<Vec<_>>(), explained);
    });
}

#[test]
fn a_full_project_adds_no_more_by_changes_ticks_or_errors() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project_with("small", "free", json!({"stored_bytes": 60_000})).await;
        let schedule = json!({
            "job_type": "tick", "cron_expression": "* * * * *", "payload": noise(10),
        });
        t.put("/v1/recurring/minutely", schedule).await.is(200);
        t.enqueue(json!({"max_attempts": 1})).await;
        let leased = t.lease("w").await;
        t.enqueue(json!({"queue": "other", "payload": noise(1_900)})).await;
        let large = json!({"default_retry": {"non_retryable_types": names(30, 15)}});
        let refused = eventually("the storage to be full", async || {
            let reply = t.patch("/v1/queues/long", large.clone()).await;
            (reply.status != 200).then_some(reply)
        })
        .await;
        let error = refused.is_error(429, "quota_exceeded");
        assert!(error["message"].as_str().is_some_and(|it| it.contains("stored bytes")), "{error}");
        t.patch("/v1/queues/long", json!({"retention_days": 1})).await.is(200);
        for path in ["pause", "resume"] {
            t.act(&format!("/v1/queues/long/{path}")).await.is(200);
        }
        t.act("/v1/recurring/minutely/run").await.is_error(429, "quota_exceeded");
        let worker = json!({"worker_id": "w", "queues": ["q"], "job_types": names(10, 15)});
        t.post("/v1/workers/register", worker).await.is_error(429, "quota_exceeded");
        let worker = json!({"worker_id": "w", "queues": ["q"], "job_types": ["a"]});
        t.post("/v1/workers/register", worker).await.is(200);
        let ids = vec![leased["id"].clone(); 100];
        t.post("/v1/jobs/cancel", json!({"filter": {"ids": ids}, "dry_run": true})).await.is(200);

        let error = json!({"error": {"type": "Refused", "message": noise(100)}});
        t.ack_with(&leased, "w", "failed", error).await.is(200);
        let id = leased["id"].as_str().expect("an id");
        let job = t.job_becomes(id, "dead_letter").await;
        let kept = &job["attempts"][0]["error"];
        assert_eq!((&kept["type"], &kept["truncated"]), (&json!("Refused"), &json!(true)));
        let message = kept["message"].as_str().map_or(0, str::len);
        assert!((1_000..=1_024).contains(&message), "{message}");

        let due = "update recurring_schedules set next_tick = date_trunc('second', now())";
        eventually("a tick to be missed", async || {
            t.database.execute(due).await;
            let page = t.get("/v1/recurring/minutely/fires").await.is(200);
            page["fires"].as_array()?.iter().any(|it| it["outcome"] == "missed").then_some(())
        })
        .await;
        let retry = t.act(&format!("/v1/dead-letters/{id}/retry")).await;
        retry.is_error(429, "quota_exceeded");
        let all = t.post("/v1/dead-letters/retry", json!({"filter": {}})).await;
        all.is_error(429, "quota_exceeded");
        let poll = json!({"worker_id": "w", "queues": ["other"]});
        assert_eq!(t.polled(poll.clone()).await.len(), 1, "what was stored runs");
        let double = "insert into stored_byte_deltas select id, 60000 from projects";
        t.database.execute(double).await;
        eventually("polls to be refused", async || {
            t.post("/v1/jobs", json!({"job_type": "a"})).await.is_error(429, "quota_exceeded");
            let reply = t.post("/v1/workers/poll", poll.clone()).await;
            (reply.status != 200).then(|| reply.is_error(429, "quota_exceeded"))
        })
        .await;
        server.stop().await;
    });
}

#[test]
fn the_audit_log_keeps_a_bounded_number_of_states_in_a_day() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project_with("small", "free", json!({"manage_per_minute": 1})).await;
        let register = async |types: Range<u32>| {
            let schedule =
                |it| json!({"job_type": format!("a{it}"), "cron_expression": "0 0 1 1 *"});
            let schedules: Vec<_> = types.map(schedule).collect();
            let worker = json!({
                "worker_id": "w", "queues": ["q"], "job_types": ["a"],
                "recurring_schedules": schedules,
            });
            let reply = t.post("/v1/workers/register", worker).await.is(200);
            reply["rejected_schedules"].as_array().cloned().unwrap_or_default()
        };
        assert_eq!(register(0..DAILY_CHANGES_PER_MANAGE_CALL).await, Vec::<Value>::new());
        let stated = "select count(*) from audit_log where after is not null";
        let all = i64::from(DAILY_CHANGES_PER_MANAGE_CALL);
        assert_eq!(t.database.number(stated).await, all, "each is charged once");
        assert_eq!(register(0..1).await, Vec::<Value>::new(), "nothing changes");
        let rejected = register(0..DAILY_CHANGES_PER_MANAGE_CALL + 1).await;
        let reason = rejected[0]["reason"].as_str().expect("a reason");
        assert!(rejected.len() == 1 && reason.contains("too many requests"), "{rejected:?}");
        t.patch("/v1/queues/q", json!({"retention_days": 1})).await.is(200);
        let last = "select action || ' ' || coalesce(after, 'nothing') from audit_log
                    order by id desc limit 1";
        assert_eq!(t.database.text(last).await, "queue.changed nothing");
        server.stop().await;
    });
}

#[test]
fn the_audit_log_keeps_hashes_of_what_is_long() {
    run_alone(async |t| {
        let change = json!({
            "max_waiting": 7, "default_retry": {"non_retryable_types": names(50, 15)},
        });
        t.patch("/v1/queues/long", change).await.is(200);
        let entry = t.get("/v1/audit-log").await.is(200)["entries"][0].clone();
        assert_eq!(
            (&entry["action"], &entry["after"]["max_waiting"]),
            (&json!("queue.changed"), &json!(7))
        );
        let retry = &entry["after"]["default_retry"];
        assert!(retry["bytes"].as_u64().is_some_and(|it| it > 24_000), "{retry}");
        assert_eq!(retry["sha256"].as_str().map(str::len), Some(64));
    });
}
