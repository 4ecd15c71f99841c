//! Recurring schedules over HTTP: keeping them, and what becomes of their ticks.

use fencepost_domain::limits;

use crate::harness::{
    LoneProject, Reply, TestProject, TestServer, eventually, fresh_database, limited, run,
    run_alone,
};
use serde_json::{Value, json};

async fn put(t: &TestProject, id: &str, more: Value) -> Reply {
    let mut body = json!({"job_type": "tick", "cron_expression": "0 3 * * *"});
    body.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
    t.put(&format!("/v1/recurring/{id}"), body).await
}

async fn fires(t: &TestProject, id: &str) -> Vec<Value> {
    let page = t.get(&format!("/v1/recurring/{id}/fires")).await.is(200);
    page["fires"].as_array().expect("fires").clone()
}

/// Waits until a schedule has this many fires; returns them, newest first.
async fn wait_for_fires(t: &TestProject, id: &str, count: usize) -> Vec<Value> {
    eventually(format!("{count} ticks"), async || {
        let seen = fires(t, id).await;
        (seen.len() >= count).then_some(seen)
    })
    .await
}

/// Moves the next tick of a daily schedule this far into the past.
async fn neglect(t: &LoneProject, id: &str, days: u32) {
    t.database
        .execute(&format!(
            "update recurring_schedules
             set last_tick = now() - interval '{days} days' - interval '14 hours',
                 next_tick = date_trunc('hour', now()) - interval '{days} days' - interval '12 hours'
             where id = '{id}'"
        ))
        .await;
}

#[test]
fn a_schedule_is_kept_read_listed_replaced_and_deleted() {
    run(async |t| {
        t.get("/v1/recurring/report").await.is_error(404, "recurring_job_not_found");
        let sent = json!({
            "timezone": "Europe/Berlin", "queue": "reports", "payload": {"b": 1, "a": 2.50},
            "priority": 7, "overlap": "skip", "catch_up": "all", "spread_seconds": 30,
            "max_attempts": 9, "timeout_seconds": 60, "retry": {"strategy": "constant"},
        });
        let kept = put(t, "report", sent.clone()).await.is(200);
        assert_eq!(t.get("/v1/recurring/report/next").await.is(200)["enabled"], true);
        for (field, value) in sent.as_object().expect("fields") {
            if field != "retry" {
                assert_eq!(&kept[field], value, "{field}");
            }
        }
        assert_eq!((&kept["enabled"], &kept["last_run_at"]), (&json!(true), &Value::Null));
        assert!(kept["next_run_at"].is_string());
        let body =
            r#"{"job_type": "t", "cron_expression": "@daily", "payload": {"b": 1.50, "a":2}}"#;
        let request = t.request(reqwest::Method::PUT, "/v1/recurring/exact").body(body);
        let request = request.header("content-type", "application/json");
        Reply::of(request.send().await.expect("an answer")).await.is(200);
        let reply = t.get("/v1/recurring/exact").await;
        assert!(reply.text.contains(r#""payload":{"b": 1.50, "a":2}"#), "byte for byte");
        t.delete("/v1/recurring/exact").await.is_empty(204);
        let replaced = put(t, "report", json!({"cron_expression": "@daily"})).await.is(200);
        assert_eq!((&replaced["queue"], &replaced["payload"]), (&json!("default"), &Value::Null));
        assert_eq!(
            (&replaced["max_attempts"], &replaced["timeout_seconds"]),
            (&json!(9), &json!(60))
        );
        assert_eq!(replaced["created_at"], kept["created_at"]);
        let other = put(t, "report", json!({"job_type": "other"})).await;
        other.is_error(409, "recurring_job_type_conflict");
        put(t, "a", json!({})).await.is(200);
        let page = t.get("/v1/recurring?limit=1").await.is(200);
        assert_eq!(page["recurring"][0]["id"], "a");
        let next = page["next_cursor"].as_str().expect("a cursor");
        let page = t.get(&format!("/v1/recurring?limit=1&cursor={next}")).await.is(200);
        assert_eq!(page["recurring"][0]["id"], "report");
        assert_eq!(page["has_more"], false);
        t.delete("/v1/recurring/report").await.is_empty(204);
        t.delete("/v1/recurring/report").await.is_error(404, "recurring_job_not_found");
    });
}

#[test]
fn a_schedule_without_a_name_gets_one_and_a_repeated_request_makes_no_second() {
    run(async |t| {
        let body = json!({"job_type": "t", "cron_expression": "@hourly"});
        let create = async || {
            let request = t.request(reqwest::Method::POST, "/v1/recurring").json(&body);
            let request = request.header("idempotency-key", "one");
            Reply::of(request.send().await.expect("an answer")).await
        };
        let reply = create().await;
        let location = reply.headers["location"].to_str().expect("text").to_owned();
        let made = reply.is(201);
        assert!(made["id"].as_str().expect("an id").starts_with("rjob_"));
        assert_eq!(location, format!("/v1/recurring/{}", made["id"].as_str().expect("an id")));
        assert_eq!(create().await.is(201)["id"], made["id"]);
        t.get(&location).await.is(200);
    });
}

#[test]
fn schedules_that_never_fire_are_refused_one_by_one() {
    run(async |t| {
        let schedule = |day: usize| {
            let expression = format!("0 0 {} 2 *", 30 + day % 2);
            json!({"job_type": format!("never{day}"), "cron_expression": expression})
        };
        let mut sent: Vec<_> = (0..limits::MAX_REGISTERED_SCHEDULES - 1).map(schedule).collect();
        sent.push(json!({"job_type": "daily", "cron_expression": "0 3 * * *"}));
        let worker = json!({"worker_id": "w", "queues": [], "job_types": [],
            "recurring_schedules": sent});
        let reply = t.post("/v1/workers/register", worker).await.is(200);
        let rejected = reply["rejected_schedules"].as_array().expect("a list");
        assert_eq!(rejected.len(), limits::MAX_REGISTERED_SCHEDULES - 1);
        assert!(
            rejected
                .iter()
                .all(|it| it["reason"] == "cron_expression: does not fire within ten years")
        );
        let page = t.get("/v1/recurring").await.is(200);
        assert_eq!(page["recurring"].as_array().map(Vec::len), Some(1), "{page}");
    });
}

#[test]
fn a_registration_needs_the_scope_and_never_changes_what_a_person_wrote() {
    run(async |t| {
        let key = async |preset: &str| {
            let made = t.post("/v1/keys", json!({"name": preset, "preset": preset})).await.is(201);
            let api_key = made["secret"].as_str().expect("a key").to_owned();
            (t.with_key(api_key), made["key"]["id"].clone())
        };
        let (worker, _) = key("worker").await;
        let (scheduler, scheduler_id) = key("worker_with_schedules").await;
        let register = async |by: &TestProject, expression: &str| {
            let schedule = json!({"job_type": "payroll", "cron_expression": expression,
                "queue": "evil"});
            let body = json!({"worker_id": "w", "queues": [], "job_types": [],
                "recurring_schedules": [schedule]});
            let reply = by.post("/v1/workers/register", body).await.is(200);
            reply["rejected_schedules"][0]["reason"].as_str().map(str::to_owned)
        };
        let reason = register(&worker, "0 3 * * *").await.expect("a reason");
        assert_eq!(reason, "the key needs the scope `schedules`");
        t.get("/v1/recurring/rjob_payroll").await.is_error(404, "recurring_job_not_found");
        assert_eq!(register(&scheduler, "0 3 * * *").await, None);
        assert_eq!(register(&scheduler, "0 4 * * *").await, None);
        assert_eq!(register(&scheduler, "0 4 * * *").await, None, "nothing changes");
        let stored = t.get("/v1/recurring/rjob_payroll").await.is(200);
        assert_eq!(
            (&stored["registered"], &stored["cron_expression"]),
            (&json!(true), &json!("0 4 * * *"))
        );
        let log = t.get("/v1/audit-log?action=recurring.put").await.is(200);
        let entries = log["entries"].as_array().expect("entries");
        assert_eq!(entries.len(), 2, "{log}");
        assert_eq!(entries[0]["actor"]["id"], scheduler_id, "{log}");
        assert_eq!(entries[0]["before"]["cron_expression"], "0 3 * * *");
        let written = json!({"job_type": "payroll", "cron_expression": "0 0 1 * *"});
        t.put("/v1/recurring/rjob_payroll", written).await.is(200);
        let reason = register(&scheduler, "* * * * *").await.expect("a reason");
        assert!(reason.contains("was written by other means"), "{reason}");
        let stored = t.get("/v1/recurring/rjob_payroll").await.is(200);
        assert_eq!(
            (&stored["registered"], &stored["cron_expression"], &stored["queue"]),
            (&json!(false), &json!("0 0 1 * *"), &json!("default"))
        );
    });
}

#[test]
fn a_schedule_that_cannot_be_kept_is_refused_with_the_reason() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let limits = json!({"min_schedule_period_seconds": 60});
        let t = &server.project_with("main", "unlimited", limits).await;
        let cron = |it: &str| json!({"cron_expression": it});
        let message = async |it: &str| {
            let error = put(t, "x", cron(it)).await.is_error(400, "invalid_cron_expression");
            assert_eq!(error["details"][0]["field"], "cron_expression", "{error}");
            error["message"].as_str().expect("words").to_owned()
        };
        assert!(message("61 * * * *").await.starts_with("cron_expression: "));
        assert_eq!(message("0 0 31 2 *").await, "cron_expression: does not fire within ten years");
        let last =
            "the day of the week `L` never matches: write 5L for the last Friday of the month";
        assert_eq!(message("0 0 1 * L").await, format!("cron_expression: {last}"));
        assert_eq!(message("0 0 * * 5,L").await, format!("cron_expression: {last}"));
        let february = "cron_expression: the day of the month `30` never matches";
        assert_eq!(message("0 0 1,30 2 *").await, february);
        let often = message("*/10 * * * * *").await;
        assert_eq!(often, "cron_expression: fires every 10 s; the shortest period allowed is 60 s");
        message("0 0 1 1 * 2030 1").await;
        put(t, "x", cron("* * * * *")).await.is(200);
        let zone = put(t, "x", json!({"timezone": "Mars/Base"})).await;
        zone.is_error(400, "invalid_timezone");
        let bad = [
            ("overlap", json!({"overlap": "maybe"})),
            ("catch_up", json!({"catch_up": 1})),
            ("spread_seconds", json!({"spread_seconds": 3_601})),
            ("priority", json!({"priority": 101})),
            ("max_attempts", json!({"max_attempts": 0})),
            ("retry.multiplier", json!({"retry": {"multiplier": 0}})),
            ("cron_expression", json!({"cron_expression": ""})),
            ("cron", json!({"cron": "* * * * *"})),
        ];
        for (field, body) in bad {
            put(t, "x", body).await.refuses(field);
        }
        let worker = json!({
            "worker_id": "w", "queues": [], "job_types": [],
            "recurring_schedules": [
                {"job_type": "a", "cron_expression": "* * * * * *"},
                {"job_type": "b", "cron_expression": "0 0 30 2 *"},
                {"job_type": "c", "cron_expression": "* * * * *", "timezone": "x"},
                {"job_type": "d", "cron_expression": "* * * * *"},
            ],
        });
        let reply = t.post("/v1/workers/register", worker).await.is(200);
        let rejected = reply["rejected_schedules"].as_array().expect("some");
        let reasons: Vec<_> =
            rejected.iter().map(|it| it["reason"].as_str().expect("words")).collect();
        assert_eq!(reasons.len(), 3, "{reasons:?}");
        assert_eq!(t.get("/v1/recurring/rjob_d").await.is(200)["enabled"], true);
        server.stop().await;
    });
}

#[test]
fn every_tick_has_one_job_and_its_lateness_is_measured() {
    run_alone(async |t| {
        let more = json!({"cron_expression": "* * * * * *", "payload": {"n": 1}, "priority": 3});
        put(t, "second", more).await.is(200);
        let seen = wait_for_fires(t, "second", 3).await;
        for (newer, older) in seen.iter().zip(&seen[1..]) {
            let at = |it: &Value| -> chrono::DateTime<chrono::Utc> {
                it["due_at"].as_str().expect("a time").parse().expect("one")
            };
            assert_eq!((at(newer) - at(older)).num_seconds(), 1);
        }
        assert!(
            seen.iter().all(|it| it["outcome"] == "fired" && it["lateness_ms"].as_i64() >= Some(0))
        );
        let job = t.job(seen[0]["job_id"].as_str().expect("an id")).await;
        assert_eq!((&job["job_type"], &job["payload"]), (&json!("tick"), &json!({"n": 1})));
        assert_eq!((&job["priority"], &job["run_at"]), (&json!(3), &seen[0]["due_at"]));
        assert_eq!(job["tags"], json!({"recurring_schedule": "second"}));
        let paused = t.act("/v1/recurring/second/pause").await.is(200);
        assert_eq!((&paused["enabled"], &paused["next_run_at"]), (&json!(false), &Value::Null));
        let fired = fires(t, "second").await.len() as i64;
        let jobs = t.database.number("select count(*) from jobs").await;
        assert_eq!(jobs, fired);
        let counted = t.get("/v1/queues/default").await.is(200)["counts"]["pending"].as_i64();
        assert_eq!(counted, Some(jobs));
        assert!(t.act("/v1/recurring/second/resume").await.is(200)["next_run_at"].is_string());
        wait_for_fires(t, "second", fired as usize + 1).await;
    });
}

#[test]
fn a_parked_poll_gets_the_job_of_a_tick_when_it_is_due() {
    run(async |t| {
        put(t, "second", json!({"cron_expression": "* * * * * *"})).await.is(200);
        let job = t.wait_and_lease("w").await;
        let fire = wait_for_fires(t, "second", 1).await.pop().expect("one");
        assert_eq!(job["id"], fire["job_id"]);
    });
}

#[test]
fn a_run_that_broke_off_finds_the_job_that_it_had_stored() {
    run_alone(async |t| {
        put(t, "daily", json!({})).await.is(200);
        let run_once = async || {
            let request = t.request(reqwest::Method::POST, "/v1/recurring/daily/run");
            let request = request.header("idempotency-key", "one");
            Reply::of(request.send().await.expect("an answer")).await.is(201)
        };
        let job = run_once().await;
        t.database
            .execute(
                "update idempotency_keys
                 set status = null, body = null, locked_at = now() - interval '5 minutes'",
            )
            .await;
        assert_eq!(run_once().await["id"], job["id"]);
        assert_eq!(t.database.number("select count(*) from jobs").await, 1);
    });
}

#[test]
fn a_schedule_runs_on_request() {
    run(async |t| {
        let more = json!({"enabled": false, "payload": [1], "queue": "q"});
        put(t, "daily", more).await.is(200);
        let run_once = async || {
            let request = t.request(reqwest::Method::POST, "/v1/recurring/daily/run");
            let request = request.header("idempotency-key", "one");
            Reply::of(request.send().await.expect("an answer")).await.is(201)
        };
        let job = run_once().await;
        assert_eq!((&job["queue"], &job["payload"]), (&json!("q"), &json!([1])));
        assert_eq!(run_once().await["id"], job["id"]);
        t.act("/v1/recurring/daily/run").await.is(201);
        let seen = fires(t, "daily").await;
        assert_eq!(seen.len(), 2);
        assert!(seen.iter().all(|it| it["outcome"] == "manual"));
        let page = t.get("/v1/recurring/daily/fires?limit=1").await.is(200);
        let cursor = page["next_cursor"].as_str().expect("a cursor");
        let path = format!("/v1/recurring/daily/fires?cursor={cursor}");
        assert_eq!(t.get(&path).await.is(200)["fires"][0]["due_at"], seen[1]["due_at"]);
        t.get(&format!("/v1/dead-letters?cursor={cursor}")).await.refuses("cursor");
        assert_eq!(t.get("/v1/recurring/daily").await.is(200)["last_run_at"], Value::Null);
        t.act("/v1/recurring/unknown/run").await.is_error(404, "recurring_job_not_found");
    });
}

/// The outcomes of a schedule's ticks, newest first, after one more was due.
async fn after_a_tick(t: &LoneProject, id: &str) -> Vec<Value> {
    let before = fires(t, id).await.len();
    t.database
        .execute(&format!(
            "update recurring_schedules set next_tick = date_trunc('milliseconds', now())
             where id = '{id}'"
        ))
        .await;
    let seen = wait_for_fires(t, id, before + 1).await;
    seen.iter().map(|it| it["outcome"].clone()).collect()
}

#[test]
fn a_tick_is_skipped_while_the_last_job_is_not_done() {
    run_alone(async |t| {
        put(t, "s", json!({"overlap": "skip"})).await.is(200);
        t.act("/v1/recurring/s/run").await.is(201);
        assert_eq!(
            after_a_tick(t, "s").await,
            ["fired", "manual"],
            "what was asked for does not count"
        );
        assert_eq!(after_a_tick(t, "s").await[0], "skipped_overlap");
        t.poll("other", 1).await;
        let job = t.lease("w").await;
        assert_eq!(after_a_tick(t, "s").await[0], "skipped_overlap");
        t.ack(&job, "w", "succeeded").await.is(200);
        assert_eq!(after_a_tick(t, "s").await[0], "fired");
        let skipped = &fires(t, "s").await[1];
        assert_eq!(skipped["job_id"], Value::Null);
    });
}

#[test]
fn one_job_waits_for_the_last_one_and_no_more() {
    run_alone(async |t| {
        put(t, "s", json!({"overlap": "queue_one"})).await.is(200);
        after_a_tick(t, "s").await;
        let first = t.lease("w").await;
        assert_eq!(after_a_tick(t, "s").await[0], "fired");
        assert_eq!(after_a_tick(t, "s").await[0], "skipped_overlap");
        assert!(t.poll("w", 1).await.is_empty(), "one at a time");
        t.ack(&first, "w", "succeeded").await.is(200);
        t.wait_and_lease("w").await;
    });
}

#[test]
fn the_last_job_is_cancelled_for_the_next_one() {
    run_alone(async |t| {
        put(t, "s", json!({"overlap": "cancel_previous"})).await.is(200);
        after_a_tick(t, "s").await;
        let running = t.lease("w").await;
        assert_eq!(after_a_tick(t, "s").await, ["fired", "fired"]);
        assert_eq!(t.heartbeat(&running, "w").await.is(200)["status"], "cancel");
        let waiting = fires(t, "s").await[0]["job_id"].as_str().expect("an id").to_owned();
        assert_eq!(after_a_tick(t, "s").await, ["fired", "fired", "fired"]);
        let job = t.job_becomes(&waiting, "cancelled").await;
        assert_eq!(job["last_change"]["actor"]["id"], "s");
        assert_eq!(t.poll("w", 5).await.len(), 1);
    });
}

#[test]
fn missed_ticks_are_caught_up_as_the_schedule_says() {
    limited(async {
        let database = fresh_database().await;
        let server = TestServer::start(database.clone()).await;
        let t = server.project("main").await;
        for policy in ["none", "one", "all"] {
            // Twelve hours from now: the newest tick is not within its grace.
            let hour = database
                .number("select (extract(hour from now() at time zone 'UTC')::bigint + 12) % 24")
                .await;
            let more = json!({"cron_expression": format!("0 {hour} * * *"), "catch_up": policy});
            put(&t, policy, more).await.is(200);
            // Its first tick is found out.
            while t.get(&format!("/v1/recurring/{policy}")).await.is(200)["next_run_at"].is_null() {
            }
        }
        server.stop().await;
        for policy in ["none", "one", "all"] {
            neglect(&t, policy, 5).await;
        }
        let server = TestServer::start(database).await;
        let t = t.through(&server.url);
        let outcomes = async |id: &str| {
            let seen = wait_for_fires(&t, id, 5).await;
            seen.iter()
                .map(|it| it["outcome"].as_str().expect("a word").to_owned())
                .collect::<Vec<_>>()
        };
        let count = |seen: &[String], what: &str| seen.iter().filter(|it| *it == what).count();
        let (none, one, all) =
            (outcomes("none").await, outcomes("one").await, outcomes("all").await);
        assert_eq!((count(&none, "missed"), count(&none, "fired")), (none.len(), 0), "{none:?}");
        assert_eq!((one[0].as_str(), count(&one, "fired")), ("fired", 1), "{one:?}");
        assert_eq!(count(&all, "fired"), all.len(), "{all:?}");
        server.stop().await;
    });
}

#[test]
fn a_preview_says_what_a_schedule_would_do_and_keeps_nothing() {
    run(async |t| {
        let body =
            json!({"cron_expression": "30 2 * * *", "timezone": "Europe/Berlin", "count": 3});
        let shown = t.post("/v1/recurring/preview", body).await.is(200);
        assert_eq!(shown["times"].as_array().expect("times").len(), 3);
        assert_eq!(shown["description"], "At 02:30, every day");
        assert_eq!(shown["clock_changes"].as_array().expect("changes").len(), 2);
        let bad = json!({"cron_expression": "0 0 30 2 *"});
        t.post("/v1/recurring/preview", bad).await.is_error(400, "invalid_cron_expression");
        t.post("/v1/recurring/preview", json!({"cron_expression": "@daily", "count": 101}))
            .await
            .refuses("count");
        assert_eq!(t.get("/v1/recurring").await.is(200)["recurring"], json!([]));
        put(t, "x", json!({})).await.is(200);
        let next = t.get("/v1/recurring/x/next?count=2").await.is(200);
        let kept = t.get("/v1/recurring/x").await.is(200);
        assert_eq!(next["times"][0]["at"], kept["next_run_at"]);
        assert_eq!(next["times"].as_array().expect("times").len(), 2);
        t.get("/v1/recurring/x/next?count=0").await.refuses("count");
    });
}

#[test]
fn a_plan_bounds_the_payload_of_a_schedule() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = &server.project_with("main", "free", json!({"payload_bytes": 10})).await;
        put(t, "x", json!({"payload": "12345678"})).await.is(200);
        let large = put(t, "x", json!({"payload": "123456789"})).await;
        let error = large.is_error(413, "payload_too_large");
        assert_eq!(error["details"][0]["field"], "payload");
        server.stop().await;
    });
}

#[test]
fn jobs_of_a_spread_schedule_start_later_than_their_ticks() {
    run(async |t| {
        let more = json!({"cron_expression": "* * * * * *", "spread_seconds": 3_600});
        put(t, "spread", more).await.is(200);
        let fire = wait_for_fires(t, "spread", 1).await.pop().expect("one");
        let job = t.job(fire["job_id"].as_str().expect("an id")).await;
        assert_eq!(job["state"], "scheduled");
        assert!(job["run_at"].as_str() > fire["due_at"].as_str());
    });
}

#[test]
fn two_nodes_fire_each_tick_once() {
    limited(async {
        let database = fresh_database().await;
        let (one, other) =
            (TestServer::start(database.clone()).await, TestServer::start(database.clone()).await);
        let t = one.project("main").await;
        for number in 0..20 {
            put(&t, &format!("s{number}"), json!({"cron_expression": "* * * * * *"})).await.is(200);
        }
        wait_for_fires(&t, "s19", 3).await;
        one.stop().await;
        other.stop().await;
        let fired =
            database.number("select count(*) from schedule_fires where outcome = 'fired'").await;
        assert_eq!(database.number("select count(*) from jobs").await, fired);
        let torn = "select count(*) from (
            select from schedule_fires group by schedule_id
            having count(*) <> extract(epoch from max(tick) - min(tick)) + 1
        ) torn";
        assert_eq!(database.number(torn).await, 0, "no tick is left out");
    });
}
