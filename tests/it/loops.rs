//! Background loops: due jobs are promoted, expired leases reaped.

use chrono::{DateTime, TimeDelta, Utc};

use fencepost_engine::{Engine, maintenance};
use fencepost_store::sweep::prune::{self, MAX_PRUNED_JOBS};

use crate::harness::{
    LoneProject, TestServer, eventually, fresh_database, limited, run, run_alone, until,
};
use serde_json::{Value, json};

fn time(value: &Value) -> DateTime<Utc> {
    value.as_str().expect("a time").parse().expect("RFC 3339")
}

#[test]
fn a_job_is_offered_when_it_is_due_and_not_before() {
    run(async |t| {
        let mut late = Vec::new();
        for _ in 0..3 {
            let id = t.enqueue(json!({"delay_seconds": 1})).await;
            let due = time(&t.job(&id).await["run_at"]);
            let job = t.wait_and_lease("w").await;
            assert_eq!(job["id"], id);
            late.push((time(&t.job(&id).await["claimed_at"]) - due).num_milliseconds());
        }
        assert!(late.iter().all(|it| *it >= 0), "{late:?}");
        // A busy machine may be late itself, but not each time.
        assert!(late.iter().any(|it| *it < 100), "{late:?}");
    });
}

#[test]
fn an_earlier_job_that_comes_later_is_not_kept_waiting() {
    run(async |t| {
        t.enqueue(json!({"delay_seconds": 3000})).await;
        let soon = t.enqueue(json!({"delay_seconds": 1})).await;
        assert_eq!(t.wait_and_lease("w").await["id"], soon);
    });
}

#[test]
fn a_silent_worker_costs_neither_a_failure_nor_a_wait() {
    run_alone(async |t| {
        let id = t.enqueue(json!({"max_attempts": 2, "max_losses": 2})).await;
        t.lease("silent").await;
        t.expire_leases().await;
        let again = t.wait_and_lease("other").await;
        assert_eq!((&again["attempt"], &again["failures"]), (&json!(2), &json!(0)));
        let job = t.job(&id).await;
        let attempt = &job["attempts"][0];
        assert_eq!(
            (&attempt["outcome"], &attempt["worker_id"]),
            (&json!("lease_expired"), &json!("silent"))
        );
        assert_eq!(job["last_error"]["type"], "lease_expired");
        let message = job["last_error"]["message"].as_str().expect("a message");
        assert!(message.contains("neither a heartbeat nor an ack"), "{message}");
        t.expire_leases().await;
        let job = t.job_becomes(&id, "dead_letter").await;
        assert_eq!((&job["losses"], &job["attempt"]), (&json!(2), &json!(2)));
        assert!(job["completed_at"].is_string());
    });
}

#[test]
fn a_lease_that_is_not_renewed_ends_when_it_says() {
    run_alone(async |t| {
        let mut ids = Vec::new();
        for lease_seconds in 1..=3 {
            ids.push((t.enqueue(json!({})).await, lease_seconds));
            let poll = json!({
                "worker_id": "w", "queues": ["default"], "lease_seconds": lease_seconds,
            });
            assert_eq!(t.polled(poll).await.len(), 1);
        }
        let mut late = Vec::new();
        for (id, lease_seconds) in ids {
            let attempt = eventually(format!("the lease of {id} to end"), async || {
                t.job(&id).await.pointer("/attempts/0").cloned()
            });
            let attempt = attempt.await;
            assert_eq!(attempt["outcome"], "lease_expired");
            let held = time(&attempt["ended_at"]) - time(&attempt["claimed_at"]);
            late.push((held - TimeDelta::seconds(lease_seconds)).num_milliseconds());
        }
        assert!(late.iter().all(|it| *it >= 0), "{late:?}");
        // A busy machine may be late itself, but not each time.
        assert!(late.iter().filter(|it| **it < 400).count() >= 2, "{late:?}");
    });
}

#[test]
fn an_attempt_that_outlives_its_timeout_is_retried_with_a_backoff() {
    run_alone(async |t| {
        let id = t.enqueue(json!({"timeout_seconds": 60})).await;
        t.lease("slow").await;
        t.database
            .execute(
                "update jobs set claimed_at = now() - interval '70001 ms',
                                 lease_expires_at = now() - interval '1 us'",
            )
            .await;
        let job = t.job_becomes(&id, "pending").await;
        assert_eq!(job["waiting_for"], "backoff");
        assert_eq!(job["attempts"][0]["outcome"], "timeout");
        let wait = time(&job["run_at"]) - time(&job["attempts"][0]["ended_at"]);
        assert!((15_000..=18_000).contains(&wait.num_milliseconds()), "{wait}");
    });
}

#[test]
fn leases_that_expired_while_no_node_could_reap_are_extended_once() {
    limited(async {
        let database = fresh_database().await;
        let server = TestServer::start(database.clone()).await;
        let t = server.project("main").await;
        for _ in 0..3 {
            t.enqueue(json!({"timeout_seconds": 600})).await;
        }
        let jobs = t.poll("w", 3).await;
        server.stop().await;
        database
            .execute(
                "update jobs set lease_expires_at = now() - interval '2 s';
                 update reaper_state set last_pass_at = now() - interval '6 s'",
            )
            .await;
        let server = TestServer::start(database.clone()).await;
        let t = t.through(&server.url);
        // The first pass has happened when its time is written down.
        while database
            .number("select count(*) from reaper_state where last_pass_at < now() - interval '5 s'")
            .await
            > 0
        {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        for job in &jobs {
            t.heartbeat(job, "w").await.is(200);
        }
        assert_eq!(database.number("select count(*) from attempts").await, 0);
        server.stop().await;
    });
}

#[test]
fn a_job_that_is_only_ever_released_does_not_circle_for_ever() {
    run_alone(async |t| {
        let id = t.enqueue(json!({})).await;
        t.database.execute("update jobs set attempt = 999").await;
        let job = t.lease("w").await;
        assert_eq!(job["attempt"], 1000);
        assert_eq!(t.ack(&job, "w", "released").await.is(200), json!({"action": "done"}));
        assert_eq!(t.job(&id).await["state"], "dead_letter");
    });
}

#[test]
fn a_retry_policy_of_a_newer_server_does_not_stop_retries() {
    run_alone(async |t| {
        let id = t.enqueue(json!({"retry": {"strategy": "linear"}})).await;
        t.database.execute(r#"update job_bodies set retry = '{"strategy": "lunar"}'"#).await;
        let job = t.lease("w").await;
        assert_eq!(t.ack(&job, "w", "failed").await.is(200)["action"], "retry");
        t.database.execute("update jobs set run_at = now()").await;
        t.wait_and_lease("w").await;
        t.expire_leases().await;
        t.job_becomes(&id, "pending").await;
    });
}

#[test]
fn finished_jobs_are_forgotten_after_the_days_their_queue_keeps_them() {
    with_engine_of(async |t, engine| {
        t.patch("/v1/queues/long", json!({"retention_days": 30})).await.is(200);
        let done = async |queue: &str, more: Value| {
            let mut job = json!({"queue": queue});
            job.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
            let id = t.enqueue(job).await;
            let poll = json!({"worker_id": "w", "queues": [queue], "wait_seconds": 0});
            let job = t.polled(poll).await.pop().expect("a job");
            let log = json!({"worker_id": "w", "chunks": [{
                "job_id": job["id"], "attempt": 1, "sequence": 0, "data": "x", "timestamp_ms": 0,
            }]});
            t.post("/v1/workers/logs", log).await.is(200);
            t.ack(&job, "w", "succeeded").await.is(200);
            id
        };
        let old = done("default", json!({})).await;
        let kept = done("long", json!({})).await;
        let parent = t.enqueue(json!({"queue": "family"})).await;
        let child = t
            .enqueue(json!({"queue": "family", "depends_on": [parent], "delay_seconds": 600}))
            .await;
        let poll = json!({"worker_id": "w", "queues": ["family"], "wait_seconds": 0});
        let leased = t.polled(poll).await.pop().expect("the parent");
        t.ack(&leased, "w", "succeeded").await.is(200);
        t.database
            .execute("update finished_jobs set completed_at = now() - interval '8 days'")
            .await;
        let young = done("default", json!({})).await;
        maintenance::counts::pass(engine).await.expect("it runs");
        t.database.execute("update retention_dues set due_at = now()").await;
        while maintenance::retention::pass(engine).await.expect("it runs") {}
        t.get(&format!("/v1/jobs/{old}")).await.is_error(404, "job_not_found");
        for id in [kept, young, parent, child] {
            t.job(&id).await;
        }
        let of_the_old = "select count(*) from job_logs";
        assert_eq!(t.database.number(of_the_old).await, 2);
        let queue = t.get("/v1/queues/default").await.is(200);
        assert_eq!(queue["counts"]["succeeded"], 1);
    });
}

#[test]
fn a_workflow_is_forgotten_with_the_last_of_its_jobs() {
    with_engine_of(async |t, engine| {
        let jobs = json!({"jobs": [{"key": "a", "job_type": "t"}, {"key": "b", "job_type": "t"}]});
        t.post("/v1/workflows", jobs).await.is(201);
        let leased = t.poll("w", 2).await;
        t.ack(&leased[0], "w", "succeeded").await.is(200);
        t.database
            .execute("update finished_jobs set completed_at = now() - interval '8 days'")
            .await;
        maintenance::counts::pass(engine).await.expect("it runs");
        t.database.execute("update retention_dues set due_at = now()").await;
        while maintenance::retention::pass(engine).await.expect("it runs") {}
        assert_eq!(t.database.number("select count(*) from workflows").await, 1);
        t.ack(&leased[1], "w", "succeeded").await.is(200);
        t.database
            .execute("update finished_jobs set completed_at = now() - interval '8 days'")
            .await;
        maintenance::counts::pass(engine).await.expect("it runs");
        t.database.execute("update retention_dues set due_at = now()").await;
        while maintenance::retention::pass(engine).await.expect("it runs") {}
        assert_eq!(t.database.number("select count(*) from workflows").await, 0);
        assert_eq!(t.database.number("select count(*) from workflow_jobs").await, 0);
    });
}

#[test]
fn a_queue_is_looked_at_when_its_oldest_job_is_past_its_retention() {
    with_engine_of(async |t, engine| {
        t.enqueue(json!({})).await;
        let leased = t.lease("w").await;
        t.ack(&leased, "w", "succeeded").await.is(200);
        maintenance::counts::pass(engine).await.expect("it runs");
        t.database.until("select count(*) from retention_dues", 1).await;
        while maintenance::retention::pass(engine).await.expect("it runs") {}
        let in_days = "select round(extract(epoch from due_at - now()) / 86400)::bigint
                       from retention_dues";
        t.database.until(in_days, 7).await;
        t.patch("/v1/queues/default", json!({"retention_days": 2})).await.is(200);
        while maintenance::retention::pass(engine).await.expect("it runs") {}
        t.database.until(in_days, 2).await;
        t.patch("/v1/queues/default", json!({"retention_days": 30})).await.is(200);
        while maintenance::retention::pass(engine).await.expect("it runs") {}
        t.database.until(in_days, 30).await;
        assert_eq!(t.database.number("select count(*) from finished_jobs").await, 1);
    });
}

#[test]
fn a_full_queue_is_pruned_in_parts_beside_many_that_are_not_due() {
    with_engine_of(async |t, engine| {
        let fill = format!(
            "insert into queue_counts (project_id, queue, succeeded)
             select max(id), 'full', {0} from projects;
             insert into queue_counts (project_id, queue, succeeded)
             select max(id), 'other' || number, 1
             from projects, generate_series(1, 1000) number group by number;
             update retention_dues set due_at = now() + interval '1 day' where queue <> 'full';
             insert into finished_jobs (
                 project_id, id, queue, job_type, state, rank, run_at, created_at, attempt,
                 failures, max_attempts, timeout_seconds, completed_at, cancel_requested
             )
             select max(id), gen_random_uuid(), 'full', 'a', 'succeeded', 0, now(), now(), 1, 0, 3,
                    600, now() - interval '8 days', false
             from projects, generate_series(1, {0}) number group by number",
            2 * MAX_PRUNED_JOBS + 1
        );
        t.database.execute(&fill).await;
        until("the full queue to be empty", async || {
            maintenance::retention::pass(engine).await.expect("it runs");
            t.database.number("select count(*) from finished_jobs").await == 0
        })
        .await;
        let looked_at = "select count(*) from retention_dues
                         where queue <> 'full' and due_at < now() + interval '23 hours'";
        assert_eq!(t.database.number(looked_at).await, 0);
    });
}

#[test]
fn an_empty_queue_without_settings_is_forgotten() {
    with_engine_of(async |t, engine| {
        t.patch("/v1/queues/kept", json!({"max_concurrency": 3})).await.is(200);
        for queue in ["gone", "kept", "young", "used"] {
            t.enqueue(json!({"queue": queue})).await;
        }
        for queue in ["gone", "kept", "young"] {
            let poll = json!({"worker_id": "w", "queues": [queue], "wait_seconds": 0});
            let leased = t.polled(poll).await.pop().expect("a job");
            t.ack(&leased, "w", "succeeded").await.is(200);
        }
        t.database
            .execute("update finished_jobs set completed_at = now() - interval '8 days'")
            .await;
        maintenance::counts::pass(engine).await.expect("it runs");
        t.database.execute("update retention_dues set due_at = now()").await;
        while maintenance::retention::pass(engine).await.expect("it runs") {}
        maintenance::counts::pass(engine).await.expect("it runs");
        t.database
            .execute(
                "update queue_counts set updated_at =
                     now() - interval '1 hour' * case queue when 'young' then 23 else 25 end",
            )
            .await;
        maintenance::retention::forget_empty_queues(engine).await.expect("it runs");
        let page = t.get("/v1/queues").await.is(200);
        let queues = page["queues"].as_array().expect("queues").iter();
        let names: Vec<_> = queues.map(|it| it["queue"].as_str().expect("a name")).collect();
        assert_eq!(names, ["kept", "used", "young"]);
    });
}

/// Runs a test with an engine of its own beside the server's, to make steps of loops when it wants.
fn with_engine_of(test: impl AsyncFnOnce(&LoneProject, &Engine)) {
    run_alone(async |t| {
        let engine = t.database.engine();
        test(t, &engine).await;
        engine.finish().await;
    });
}

#[test]
fn attempts_of_deleted_jobs_are_forgotten_after_two_days() {
    limited(async {
        let database = fresh_database().await;
        database
            .execute(
                "insert into deleted_jobs (project_id, job_id, attempt, deleted_at)
                 values (1, gen_random_uuid(), 3, now() - interval '47 h'),
                        (1, gen_random_uuid(), 3, now() - interval '49 h')",
            )
            .await;
        let mut conn = database.connect().await;
        assert_eq!(prune::prune_deleted_jobs(&mut conn).await.expect("it runs"), 1);
        assert_eq!(database.number("select count(*) from deleted_jobs").await, 1);
    });
}
