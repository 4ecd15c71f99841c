//! Queues as an operator sees them: what is in them, what they are set to, pausing and resuming.

use std::time::{Duration, Instant};

use crate::harness::{
    LoneProject, Sink, TestProject, TestServer, eventually, fresh_database, limited, run, run_alone,
};
use serde_json::{Value, json};
use sqlx::Executor;

async fn queue(t: &TestProject, name: &str) -> Value {
    t.get(&format!("/v1/queues/{name}")).await.is(200)
}

fn poll_of(queue: &str, wait_seconds: u32) -> Value {
    json!({"worker_id": "w", "queues": [queue], "wait_seconds": wait_seconds, "capacity": 50})
}

#[test]
fn a_queue_shows_how_many_jobs_are_where() {
    run(async |t| {
        t.get("/v1/queues/default").await.is_error(404, "queue_not_found");
        for _ in 0..6 {
            t.enqueue(json!({"max_attempts": 1})).await;
        }
        let later = t.enqueue(json!({"delay_seconds": 600})).await;
        let gone = t.enqueue(json!({"delay_seconds": 600})).await;
        let jobs = t.poll("w", 4).await;
        t.ack(&jobs[0], "w", "succeeded").await.is(200);
        t.ack(&jobs[1], "w", "failed").await.is(200);
        t.ack(&jobs[2], "w", "released").await.is(200);
        t.act(&format!("/v1/jobs/{gone}/cancel")).await.is(200);
        let seen = queue(t, "default").await;
        let counts = json!({
            "scheduled": 1, "pending": 3, "backoff": 0, "processing": 1, "dead_letter": 1,
            "succeeded": 1, "cancelled": 1,
        });
        assert_eq!(seen["counts"], counts);
        assert_eq!(seen["rates"]["enqueued"], json!({"last_minute": 8, "last_hour": 8}));
        assert_eq!(seen["rates"]["succeeded"]["last_hour"], 1);
        assert_eq!(seen["rates"]["failed"]["last_hour"], 1);
        assert!(seen["oldest_ready_age_seconds"].as_i64().expect("a number") < 60);
        t.patch(&format!("/v1/jobs/{later}"), json!({"queue": "other", "delay_seconds": 0}))
            .await
            .is(200);
        let retried = jobs[1]["id"].as_str().expect("an id");
        t.act(&format!("/v1/jobs/{retried}/retry")).await.is(200);
        t.act(&format!("/v1/jobs/{gone}/retry")).await.is(200);
        let counts = json!({
            "scheduled": 1, "pending": 4, "backoff": 0, "processing": 1, "dead_letter": 0,
            "succeeded": 1, "cancelled": 0,
        });
        assert_eq!(queue(t, "default").await["counts"], counts);
        assert_eq!(queue(t, "other").await["counts"]["pending"], 1);
    });
}

#[test]
fn what_was_added_up_and_what_was_not_yet_are_counted_once() {
    run_alone(async |t| {
        t.enqueue(json!({})).await;
        assert_eq!(merged(t).await, 1);
        t.enqueue(json!({})).await;
        let seen = queue(t, "default").await;
        assert_eq!(seen["counts"]["pending"], 2);
        assert_eq!(seen["rates"]["enqueued"]["last_hour"], 2);
    });
}

/// Waits until all deltas are merged, and says how many jobs are active.
async fn merged(t: &LoneProject) -> i64 {
    t.database.until("select count(*) from queue_deltas", 0).await;
    t.database.number("select sum(active)::bigint from queue_counts").await
}

#[test]
fn counts_of_a_queue_include_a_change_that_commits_late() {
    run_alone(async |t| {
        let mut conn = t.database.connect().await;
        let late = "begin;
                    insert into queue_deltas (project_id, queue, active)
                    select id, 'default', 5 from projects";
        conn.execute(sqlx::raw_sql(late)).await.expect("it runs");
        t.enqueue(json!({})).await;
        assert_eq!(merged(t).await, 1);
        conn.execute("commit").await.expect("it commits");
        assert_eq!(queue(t, "default").await["counts"]["pending"], 6);
        assert_eq!(merged(t).await, 6);
    });
}

#[test]
fn a_database_restored_from_a_dump_counts_on() {
    run_alone(async |t| {
        // Transactions are numbered anew there.
        t.database.execute("update merged_deltas set merged_before = 1000000000000").await;
        t.enqueue(json!({})).await;
        assert_eq!(queue(t, "default").await["counts"]["pending"], 1);
        assert_eq!(merged(t).await, 1);
        let is_past = "select count(*) from merged_deltas where merged_before < 1000000000000";
        assert_eq!(t.database.number(is_past).await, 1);
    });
}

#[test]
fn the_oldest_ready_job_is_found_whatever_its_priority_and_behind_a_gate_too() {
    run_alone(async |t| {
        for priority in [5, 0, -5] {
            t.enqueue(json!({"priority": priority})).await;
        }
        t.enqueue(json!({"labels": ["gpu"], "queue": "gated"})).await;
        t.database
            .execute("update jobs set run_at = now() - interval '90 s', created_at = now() - interval '90 s'
                      where rank = 5 or constraint_key is not null")
            .await;
        for name in ["default", "gated"] {
            let seen = queue(t, name).await;
            let age = seen["oldest_ready_age_seconds"].as_i64().expect("an age");
            assert!((90..120).contains(&age), "{age}");
            let oldest = t.job(seen["oldest_ready_job_id"].as_str().expect("an id")).await;
            assert_eq!(oldest["run_at"], seen["oldest_ready_at"]);
        }
    });
}

#[test]
fn queues_are_listed_by_name_page_by_page() {
    run(async |t| {
        t.enqueue(json!({"queue": "b"})).await;
        t.patch("/v1/queues/a", json!({"max_concurrency": 3})).await.is(200);
        t.polled(poll_of("c", 0)).await;
        let names = |page: &Value| {
            let queues = page["queues"].as_array().expect("queues").iter();
            queues.map(|it| it["queue"].as_str().expect("a name").to_owned()).collect::<Vec<_>>()
        };
        // A worker is written down a moment after its poll.
        let all = eventually("three queues", async || {
            let all = t.get("/v1/queues").await.is(200);
            (names(&all).len() == 3).then_some(all)
        })
        .await;
        assert_eq!(names(&all), ["a", "b", "c"]);
        assert_eq!(all["queues"][2]["workers"], 1);
        let workers = t.get("/v1/workers?queue=c").await.is(200);
        assert_eq!(workers["workers"][0]["worker_id"], "w");
        assert_eq!(t.get("/v1/workers?queue=a").await.is(200)["workers"], json!([]));
        assert_eq!((&all["has_more"], &all["next_cursor"]), (&json!(false), &Value::Null));
        let first = t.get("/v1/queues?limit=2").await.is(200);
        assert_eq!(names(&first), ["a", "b"]);
        let cursor = first["next_cursor"].as_str().expect("a cursor");
        let second = t.get(&format!("/v1/queues?limit=2&cursor={cursor}")).await.is(200);
        assert_eq!(names(&second), ["c"]);
        t.get("/v1/queues?limit=101").await.refuses("limit");
        t.get("/v1/queues?page=2").await.refuses("page");
    });
}

#[test]
fn settings_are_kept_one_by_one_and_taken_away_by_null() {
    run(async |t| {
        let all = json!({
            "max_concurrency": 7, "rate_limit": {"count": 5, "per_seconds": 60},
            "default_lease_seconds": 120, "retention_days": 30, "default_max_attempts": 5,
            "default_retry": {"strategy": "constant", "initial_seconds": 9}, "brake_after": 10,
            "max_waiting": 1_000,
        });
        let set = t.patch("/v1/queues/q", all.clone()).await.is(200);
        for (field, value) in all.as_object().expect("fields") {
            match field.as_str() {
                "default_retry" => assert_eq!(set[field]["initial_seconds"], 9),
                _ => assert_eq!(&set[field], value, "{field}"),
            }
        }
        let set = t.patch("/v1/queues/q", json!({"brake_after": 11})).await.is(200);
        assert_eq!((&set["brake_after"], &set["max_concurrency"]), (&json!(11), &json!(7)));
        let none = json!({
            "max_concurrency": null, "rate_limit": null, "default_lease_seconds": null,
            "retention_days": null, "default_max_attempts": null, "default_retry": null,
            "brake_after": null, "max_waiting": null,
        });
        let set = t.patch("/v1/queues/q", none).await.is(200);
        assert_eq!((&set["rate_limit"], &set["retention_days"]), (&Value::Null, &json!(7)));
        let bad = [
            ("rate_limit.count", json!({"rate_limit": {"count": 0, "per_seconds": 1}})),
            ("rate_limit.per_seconds", json!({"rate_limit": {"count": 1, "per_seconds": 86_401}})),
            ("rate_limit.per_seconds", json!({"rate_limit": {"count": 1}})),
            ("default_lease_seconds", json!({"default_lease_seconds": 0})),
            ("retention_days", json!({"retention_days": 3_651})),
            ("default_max_attempts", json!({"default_max_attempts": 101})),
            ("default_retry.multiplier", json!({"default_retry": {"multiplier": 0.5}})),
            ("brake_after", json!({"brake_after": 0})),
            ("max_waiting", json!({"max_waiting": 0})),
            ("body", json!({})),
            ("rate", json!({"rate": 1})),
        ];
        for (field, body) in bad {
            t.patch("/v1/queues/q", body).await.refuses(field);
        }
    });
}

#[test]
fn a_job_that_does_not_say_has_what_its_queue_says() {
    run(async |t| {
        let defaults = json!({
            "default_max_attempts": 9, "default_lease_seconds": 2_000,
            "default_retry": {"strategy": "constant", "initial_seconds": 1, "jitter_seconds": 0},
        });
        t.patch("/v1/queues/default", defaults).await.is(200);
        let job = t.post("/v1/jobs", json!({"job_type": "a"})).await.is(201);
        assert_eq!(
            (&job["max_attempts"], &job["retry"]["initial_seconds"]),
            (&json!(9), &json!(1))
        );
        let own = json!({"job_type": "b", "max_attempts": 2, "retry": {"initial_seconds": 3}});
        let job = t.post("/v1/jobs", own).await.is(201);
        assert_eq!(
            (&job["max_attempts"], &job["retry"]["initial_seconds"]),
            (&json!(2), &json!(3))
        );
        let leased = t.poll("w", 1).await;
        assert_eq!(leased[0]["lease_seconds"], 1_810, "never past the timeout and its grace");
        t.enqueue(json!({"timeout_seconds": 7_200})).await;
        assert_eq!(t.poll("w", 2).await[1]["lease_seconds"], 3_600, "half of its timeout is more");
        let failed = t.ack(&leased[0], "w", "failed").await.is(200);
        assert_eq!(failed["action"], "retry");
        t.job_becomes(leased[0]["id"].as_str().expect("an id"), "pending").await;
    });
}

#[test]
fn a_paused_queue_takes_jobs_and_hands_out_none_until_it_is_resumed() {
    run(async |t| {
        t.act("/v1/queues/defualt/resume").await.is_error(404, "queue_not_found");
        let paused = t.act("/v1/queues/default/pause").await.is(200);
        assert!(paused["paused_at"].is_string());
        let again = t.act("/v1/queues/default/pause").await.is(200);
        assert_eq!(again["paused_at"], paused["paused_at"], "since when it was");
        let job = t.post("/v1/jobs", json!({"job_type": "a"})).await.is(201);
        assert_eq!(job["waiting_for"], "queue_paused");
        assert!(t.poll("w", 5).await.is_empty());
        let id = job["id"].as_str().expect("an id");
        assert_eq!(t.job(id).await["waiting_for"], "queue_paused");
        let listed = t.get("/v1/jobs").await.is(200);
        assert_eq!(listed["jobs"][0]["waiting_for"], "queue_paused");
        let why = t.get(&format!("/v1/jobs/{id}/explain")).await.is(200);
        assert!(
            why["summary"].as_str().expect("words").starts_with("queue default is paused since")
        );
        let parked = {
            let t = t.clone();
            tokio::spawn(async move { t.wait_and_lease("w").await })
        };
        t.act("/v1/queues/default/resume").await.is(200);
        assert_eq!(parked.await.expect("it ends")["id"], id);
    });
}

#[test]
fn a_paused_type_waits_while_all_others_go_on() {
    run(async |t| {
        t.post("/v1/queues/default/pause", json!({"job_type": "mail"})).await.is(200);
        let mail = t.enqueue(json!({"job_type": "mail", "priority": 9})).await;
        let gated = t.enqueue(json!({"job_type": "mail", "concurrency_key": "k"})).await;
        let report = t.enqueue(json!({"job_type": "report"})).await;
        let other = t.enqueue(json!({"job_type": "report", "concurrency_key": "k"})).await;
        let jobs = t.poll("w", 5).await;
        assert_eq!(jobs.iter().map(|it| &it["id"]).collect::<Vec<_>>(), [&*report, &*other]);
        let typed = json!({
            "worker_id": "w", "queues": ["default"], "wait_seconds": 0, "job_types": ["mail"],
        });
        assert!(t.polled(typed).await.is_empty());
        assert_eq!(t.job(&mail).await["waiting_for"], "type_paused");
        let why = t.get(&format!("/v1/jobs/{mail}/explain")).await.is(200);
        assert!(why["summary"].as_str().expect("words").ends_with("paused manually"));
        let seen = queue(t, "default").await;
        assert_eq!(seen["paused_types"][0]["job_type"], "mail");
        assert_eq!(seen["paused_types"][0]["paused_by"], "operator");
        assert_eq!(seen["paused_at"], Value::Null);
        t.post("/v1/queues/default/resume", json!({"job_type": "mail"})).await.is(200);
        assert_eq!(t.lease("w").await["id"], mail);
        t.ack(&jobs[1], "w", "succeeded").await.is(200);
        assert_eq!(t.wait_and_lease("w").await["id"], gated);
        t.post("/v1/queues/default/pause", json!({"job_type": ""})).await.refuses("job_type");
        t.post("/v1/queues/default/pause", json!({"type": "x"})).await.refuses("type");
    });
}

#[test]
fn a_queue_hands_out_no_more_than_its_rate_and_a_parked_poll_gets_the_next_in_time() {
    run_alone(async |t| {
        t.patch("/v1/queues/default", json!({"rate_limit": {"count": 2, "per_seconds": 1}}))
            .await
            .is(200);
        for _ in 0..5 {
            t.enqueue(json!({})).await;
        }
        let waiting = t.enqueue(json!({"queue": "second"})).await;
        assert_eq!(t.poll("w", 5).await.len(), 2);
        assert!(t.poll("w", 5).await.is_empty());
        let both = json!({"worker_id": "w", "queues": ["default", "second"], "wait_seconds": 0});
        assert_eq!(t.polled(both).await[0]["id"], waiting, "the next queue does not wait for it");
        let started = Instant::now();
        assert_eq!(t.polled(poll_of("default", 10)).await.len(), 2);
        assert!(started.elapsed() < Duration::from_secs(5));
        let handed = "select coalesce(sum(n), 0)::bigint
                      from (select unnest(jobs) n from queue_handouts) handed";
        assert!(t.database.number(handed).await <= 4);
    });
}

#[test]
fn a_used_up_rate_limit_says_so_and_a_higher_one_counts_at_once() {
    run(async |t| {
        t.patch("/v1/queues/default", json!({"rate_limit": {"count": 1, "per_seconds": 3_600}}))
            .await
            .is(200);
        for _ in 0..2 {
            t.enqueue(json!({})).await;
        }
        t.lease("w").await;
        assert!(t.poll("w", 1).await.is_empty());
        let waiting = t.get("/v1/jobs?state=pending").await.is(200);
        assert_eq!(waiting["jobs"][0]["waiting_for"], "rate_limit");
        let id = waiting["jobs"][0]["id"].as_str().expect("an id").to_owned();
        let why = t.get(&format!("/v1/jobs/{id}/explain")).await.is(200);
        assert_eq!(why["summary"], "queue default has started 1 of 1 jobs in 3600 s");
        assert!(why["next_change_at"].is_string());
        let parked = {
            let t = t.clone();
            tokio::spawn(async move { t.wait_and_lease("w").await })
        };
        t.patch("/v1/queues/default", json!({"rate_limit": {"count": 2, "per_seconds": 3_600}}))
            .await
            .is(200);
        assert_eq!(parked.await.expect("it ends")["id"], id);
    });
}

#[test]
fn a_pause_on_one_node_is_obeyed_by_another_and_so_is_the_end_of_it() {
    limited(async {
        let database = fresh_database().await;
        let (one, other) =
            (TestServer::start(database.clone()).await, TestServer::start(database).await);
        let t = one.project("main").await;
        let there = t.through(&other.url);
        // What the other node believes of the queue is as old as can be.
        assert!(there.poll("w", 1).await.is_empty());
        t.act("/v1/queues/default/pause").await.is(200);
        there.enqueue(json!({})).await;
        assert!(there.poll("w", 1).await.is_empty(), "at once");
        let parked = tokio::spawn(async move { there.wait_and_lease("w").await });
        let resumed = Instant::now();
        t.act("/v1/queues/default/resume").await.is(200);
        parked.await.expect("it ends");
        assert!(resumed.elapsed() < Duration::from_secs(3), "long before the poll's deadline");
        one.stop().await;
        other.stop().await;
    });
}

#[test]
fn two_who_pause_types_of_one_queue_at_once_both_do() {
    run_alone(async |t| {
        let pause = async |job_type: String| {
            t.post("/v1/queues/default/pause", json!({"job_type": job_type})).await.is(200);
        };
        futures_util::future::join_all((0..20).map(|n| pause(format!("t{n}")))).await;
        let paused = "select cardinality(paused_types)::bigint from queues";
        assert_eq!(t.database.number(paused).await, 20);
        assert_eq!(queue(t, "default").await["paused_types"].as_array().expect("types").len(), 20);
    });
}

#[test]
fn a_queue_without_jobs_is_deleted_with_its_settings() {
    const QUEUE: &str = "/v1/queues/defualt";
    run(async |t| {
        t.delete(QUEUE).await.is_error(404, "queue_not_found");
        t.patch(QUEUE, json!({"max_concurrency": 5})).await.is(200);
        t.delete(QUEUE).await.is_empty(204);
        t.get(QUEUE).await.is_error(404, "queue_not_found");
        t.patch(QUEUE, json!({"max_concurrency": 5})).await.is(200);
        let id = t.enqueue(json!({"queue": "defualt", "max_attempts": 1})).await;
        t.delete(QUEUE).await.is_error(409, "queue_in_use");
        let job = t.polled(poll_of("defualt", 0)).await.remove(0);
        t.delete(QUEUE).await.is_error(409, "queue_in_use");
        t.ack(&job, "w", "failed").await.is(200);
        t.delete(QUEUE).await.is_error(409, "queue_in_use");
        t.delete(&format!("/v1/dead-letters/{id}")).await.is_empty(204);
        t.delete(QUEUE).await.is_empty(204);
        t.enqueue(json!({"queue": "defualt"})).await;
        let again = queue(t, "defualt").await;
        assert_eq!(
            (&again["counts"]["pending"], &again["max_concurrency"]),
            (&json!(1), &json!(null))
        );
        let sink = Sink::start().await;
        t.put("/v1/queues/pushed/push", json!({"url": sink.url})).await.is(201);
        t.patch("/v1/queues/pushed", json!({"max_concurrency": 5})).await.is(200);
        let refused = t.delete("/v1/queues/pushed").await.is_error(409, "queue_in_use");
        assert_eq!(refused["message"], "the queue has a push: end it first");
    });
}

#[test]
fn a_new_queue_is_not_called_like_another() {
    run_alone(async |t| {
        let odd = [
            (" ", "%20", "U+0020"),
            ("mail\u{a0}", "mail%C2%A0", "U+00A0"),
            ("ma\u{200b}il", "ma%E2%80%8Bil", "U+200B"),
            ("\u{202e}liam", "%E2%80%AEliam", "U+202E"),
        ];
        let (job, sink) = (t.enqueue(json!({"delay_seconds": 60})).await, Sink::start().await);
        for (name, in_path, code) in odd {
            let refused = t.post("/v1/jobs", json!({"job_type": "t", "queue": name})).await;
            assert!(refused.refuses("queue").contains(code), "{}", refused.text);
            let jobs = json!({"jobs": [{"job_type": "t"}, {"job_type": "t", "queue": name}]});
            t.post("/v1/jobs/batch", jobs).await.refuses("jobs[1].queue");
            let path = format!("/v1/queues/{in_path}");
            t.patch(&path, json!({"max_concurrency": 1})).await.refuses("queue");
            t.act(&format!("{path}/pause")).await.refuses("queue");
            t.put(&format!("{path}/push"), json!({"url": sink.url})).await.refuses("queue");
            let schedule = json!({"job_type": "t", "cron_expression": "@daily", "queue": name});
            t.put("/v1/recurring/nightly", schedule).await.refuses("queue");
            t.patch(&format!("/v1/jobs/{job}"), json!({"queue": name})).await.refuses("queue");
            let workflow = json!({"jobs": [{"key": "a", "job_type": "t", "queue": name}]});
            t.post("/v1/workflows", workflow).await.refuses("jobs[0].queue");
            t.post("/v1/batches", json!({"on_complete": {"job_type": "t", "queue": name}}))
                .await
                .refuses("on_complete.queue");
            let callback = json!({"job_type": "t", "on_success": {"job_type": "t", "queue": name}});
            t.post("/v1/jobs", callback).await.refuses("on_success.queue");
            let schedule = json!({"job_type": "t", "cron_expression": "@daily", "queue": name});
            let worker = json!({
                "worker_id": "w", "queues": ["default"], "job_types": [],
                "recurring_schedules": [schedule],
            });
            let registered = t.post("/v1/workers/register", worker).await.is(200);
            assert!(registered.to_string().contains(code), "{registered}");
        }
        assert_eq!(t.get("/v1/queues").await.is(200)["queues"].as_array().map(Vec::len), Some(1));
        // One from before.
        t.database
            .execute("insert into queues (project_id, name) select project_id, ' ' from jobs")
            .await;
        t.enqueue(json!({"queue": " "})).await;
        assert_eq!(t.polled(poll_of(" ", 0)).await.len(), 1);
    });
}
