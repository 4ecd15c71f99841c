//! Bulk operations in the background: purges and retries, their progress, and their end.

use crate::harness::{
    LoneProject, TestProject, TestServer, eventually, fresh_database, limited, run, run_alone,
    until,
};
use serde_json::{Value, json};

/// This many dead letters.
async fn dead_letter(t: &LoneProject, jobs: usize, job_type: &str) {
    t.database
        .execute(&format!(
            "with new as (
                 insert into jobs (project_id, id, queue, job_type, state, rank, run_at,
                                   max_attempts, timeout_seconds, failures, attempt, completed_at)
                 select projects.id, gen_random_uuid(), 'default', '{job_type}', 'dead_letter', 0,
                        now(), 1, 60, 1, 1, now()
                 from generate_series(1, {jobs}), projects
                 returning *
             ), bodies as (
                 insert into job_bodies (project_id, job_id, payload)
                 select project_id, id, '1' from new
             ), counted as (
                 insert into queue_deltas (project_id, queue, dead_letter)
                 select project_id, queue, count(*) from new group by 1, 2
             ), grouped as (
                 insert into dead_letter_groups (project_id, fingerprint, job_type, sample_job_id, jobs)
                 select project_id, md5('{job_type}')::uuid, '{job_type}', min(id::text)::uuid, count(*)
                 from new group by 1
             )
             insert into dead_letters (project_id, job_id, fingerprint, queue, job_type)
             select project_id, id, md5('{job_type}')::uuid, queue, job_type from new"
        ))
        .await;
}

/// The operation that a request begins.
async fn begun(t: &TestProject, what: &str, request: Value) -> Value {
    let reply = t.post(&format!("/v1/dead-letters/{what}"), request).await.is(202);
    reply["operation"].clone()
}

pub async fn ends(t: &TestProject, operation: &Value) -> Value {
    let id = operation["id"].as_str().expect("an id");
    eventually(format!("the end of operation {id}"), async || {
        let seen = t.get(&format!("/v1/operations/{id}")).await.is(200);
        (seen["state"] != "running").then_some(seen)
    })
    .await
}

#[test]
fn a_purge_cancels_waiting_jobs_only() {
    run(async |t| {
        t.post("/v1/queues/default/purge", json!({"confirm": "default"}))
            .await
            .is_error(404, "queue_not_found");
        let running = t.enqueue(json!({})).await;
        t.lease("w").await;
        let jobs = (0..250).map(|n| json!({"job_type": "t", "delay_seconds": n % 2 * 600}));
        t.post("/v1/jobs/batch", json!({"jobs": jobs.collect::<Vec<_>>()})).await.is(201);
        let gated = t.enqueue(json!({"concurrency_key": "k"})).await;
        let child = t.enqueue(json!({"queue": "other", "depends_on": [gated]})).await;
        let other = t.enqueue(json!({"queue": "other"})).await;
        t.post("/v1/queues/default/purge", json!({})).await.refuses("confirm");
        t.post("/v1/queues/default/purge", json!({"confirm": "other"})).await.refuses("confirm");
        let begun = t.post("/v1/queues/default/purge", json!({"confirm": "default"})).await;
        assert!(
            begun.headers["location"].to_str().expect("text").starts_with("/v1/operations/op_")
        );
        let operation = begun.is(202);
        assert_eq!(
            (&operation["kind"], &operation["expected"]),
            (&json!("queue_purge"), &json!(251))
        );
        let ended = ends(t, &operation).await;
        assert_eq!((&ended["state"], &ended["done"]), (&json!("succeeded"), &json!(251)));
        assert!(ended["ended_at"].is_string());
        let queue = t.get("/v1/queues/default").await.is(200);
        let counts = json!({
            "scheduled": 0, "pending": 0, "backoff": 0, "processing": 1, "dead_letter": 0,
            "succeeded": 0, "cancelled": 251,
        });
        assert_eq!(queue["counts"], counts);
        assert_eq!(t.job(&running).await["state"], "processing");
        assert_eq!(t.job(&other).await["state"], "pending");
        t.job_becomes(&child, "cancelled").await;
        let history = t.get(&format!("/v1/jobs/{gated}/events")).await.is(200);
        assert!(history.to_string().contains("op_"), "{history}");
    });
}

#[test]
fn dead_letters_are_retried_by_filter_and_counted_first() {
    run_alone(async |t| {
        dead_letter(t, 230, "mail").await;
        dead_letter(t, 5, "report").await;
        let by_type = json!({"filter": {"job_type": "mail"}, "dry_run": true});
        let dry = t.post("/v1/dead-letters/retry", by_type).await.is(200);
        assert_eq!(dry, json!({"count": 230, "is_capped": false, "operation": null}));
        let groups = t.get("/v1/dead-letters/groups").await.is(200);
        let report = groups["groups"].as_array().expect("groups").iter();
        let report = report.clone().find(|it| it["job_type"] == "report").expect("a group");
        let by_group = json!({"filter": {"fingerprint": report["fingerprint"]}, "max": 3});
        let operation = begun(t, "retry", by_group).await;
        assert_eq!(operation["expected"], 3);
        assert_eq!(operation["filter"]["fingerprint"], report["fingerprint"]);
        assert_eq!(ends(t, &operation).await["done"], 3);
        let by_type = json!({"filter": {"job_type": "mail"}});
        let operation = begun(t, "retry", by_type).await;
        let ended = ends(t, &operation).await;
        assert_eq!((&ended["done"], &ended["skipped"]), (&json!(230), &json!(0)));
        let queue = t.get("/v1/queues/default").await.is(200);
        assert_eq!(queue["counts"]["pending"], 233);
        assert_eq!(queue["counts"]["dead_letter"], 2);
        assert_eq!(t.poll("w", 50).await.len(), 50);
        let all = t.get("/v1/operations?limit=1").await.is(200);
        assert_eq!(all["operations"][0]["id"], operation["id"], "newest first");
        let cursor = all["next_cursor"].as_str().expect("a cursor");
        let rest = t.get(&format!("/v1/operations?cursor={cursor}")).await.is(200);
        assert_eq!(rest["operations"].as_array().expect("some").len(), 1);
    });
}

#[test]
fn dead_letters_are_purged_only_when_that_is_confirmed() {
    run_alone(async |t| {
        dead_letter(t, 120, "mail").await;
        let path = "/v1/dead-letters/purge";
        t.post(path, json!({"filter": {}})).await.refuses("confirm");
        t.post(path, json!({"filter": {}, "confirm": "yes"})).await.refuses("confirm");
        t.post(path, json!({"confirm": "purge"})).await.refuses("filter");
        t.post(path, json!({"filter": {"quue": "x"}, "confirm": "purge"}))
            .await
            .refuses("filter.quue");
        let dry = t.post(path, json!({"filter": {}, "dry_run": true})).await.is(200);
        assert_eq!(dry["count"], 120);
        let operation = begun(t, "purge", json!({"filter": {}, "confirm": "purge"})).await;
        assert_eq!(ends(t, &operation).await["done"], 120);
        assert_eq!(t.database.number("select count(*) from jobs").await, 0);
        assert_eq!(t.database.number("select count(*) from job_bodies").await, 0);
        assert_eq!(t.database.number("select count(*) from dead_letter_groups").await, 0);
    });
}

#[test]
fn an_operation_keeps_its_rate_and_ends_when_it_is_aborted() {
    run_alone(async |t| {
        dead_letter(t, 500, "mail").await;
        let slowly = json!({"filter": {}, "rate_per_second": 20});
        let operation = begun(t, "retry", slowly).await;
        let path = format!("/v1/operations/{}", operation["id"].as_str().expect("an id"));
        let started = std::time::Instant::now();
        until("15 jobs to be done", async || {
            let seen = t.get(&path).await.is(200);
            let most = (started.elapsed().as_secs_f64() + 1.0) * 20.0;
            assert!(seen["done"].as_f64().expect("a number") <= most, "{seen}");
            seen["done"].as_i64().expect("a number") >= 15
        })
        .await;
        let aborted = t.act(&format!("{path}/abort")).await.is(200);
        assert_eq!(aborted["state"], "aborted");
        let again = t.act(&format!("{path}/abort")).await.is(200);
        assert_eq!(again, aborted, "it stays as it is");
        let retried = t.database.number("select count(*) from jobs where state = 'pending'").await;
        assert_eq!(aborted["done"], retried);
        t.get("/v1/operations/op_x").await.is_error(404, "operation_not_found");
    });
}

#[test]
fn an_operation_survives_a_restart_and_another_node_continues_it() {
    limited(async {
        let database = fresh_database().await;
        let server = TestServer::start(database.clone()).await;
        let t = server.project("main").await;
        dead_letter(&t, 300, "mail").await;
        let slowly = json!({"filter": {}, "rate_per_second": 60});
        let operation = begun(&t, "retry", slowly).await;
        database.until_at_least("select done from operations", 1).await;
        server.stop().await;
        let done = database.number("select done from operations").await;
        assert!((1..300).contains(&done), "{done}");
        let back = "select count(*) from jobs where state = 'pending'";
        assert_eq!(database.number(back).await, done, "what is done is written down");
        let server = TestServer::start(database.clone()).await;
        let t = t.through(&server.url);
        database.execute("update operations set rate_per_second = null").await;
        let ended = ends(&t, &operation).await;
        assert_eq!((&ended["done"], &ended["state"]), (&json!(300), &json!("succeeded")));
        server.stop().await;
    });
}

#[test]
fn a_repeated_request_begins_no_second_operation() {
    run_alone(async |t| {
        dead_letter(t, 3, "mail").await;
        let retry = async || {
            let request = t.request(reqwest::Method::POST, "/v1/dead-letters/retry");
            let request = request.header("idempotency-key", "once").json(&json!({"filter": {}}));
            crate::harness::Reply::of(request.send().await.expect("an answer")).await.is(202)
        };
        assert_eq!(retry().await["operation"]["id"], retry().await["operation"]["id"]);
        assert_eq!(t.database.number("select count(*) from operations").await, 1);
    });
}

#[test]
fn a_step_that_fails_again_and_again_ends_its_operation_and_says_why() {
    run_alone(async |t| {
        dead_letter(t, 3, "mail").await;
        t.database
            .execute(
                "create function refuse() returns trigger language plpgsql as $$
                 begin raise exception 'no'; end $$;
                 create trigger refuse before update on jobs
                     for each statement execute function refuse()",
            )
            .await;
        let operation = begun(t, "retry", json!({"filter": {}})).await;
        let path = format!("/v1/operations/{}", operation["id"].as_str().expect("an id"));
        let failing = eventually("the operation to fail", async || {
            let seen = t.get(&path).await.is(200);
            seen["last_error"].is_string().then_some(seen)
        })
        .await;
        assert_eq!(failing["state"], "running", "once is not always");
        t.database.execute("update operations set failed_steps = 9, next_step_at = now()").await;
        let ended = ends(t, &operation).await;
        assert_eq!((&ended["state"], &ended["done"]), (&json!("failed"), &json!(0)));
    });
}

#[test]
fn an_operation_that_only_a_newer_release_can_read_keeps_no_other_waiting() {
    run_alone(async |t| {
        dead_letter(t, 3, "mail").await;
        t.database
            .execute(
                "insert into operations (project_id, id, kind, filter, next_step_at)
                 select id, gen_random_uuid(), 'jobs_sing', '{\"song\": 1}', now() - interval '1 day'
                 from projects",
            )
            .await;
        let operation = begun(t, "retry", json!({"filter": {}})).await;
        assert_eq!(ends(t, &operation).await["done"], 3);
        let all = t.get("/v1/operations").await.is(200);
        assert_eq!(
            all["operations"].as_array().expect("some").len(),
            2,
            "it is shown all the same"
        );
    });
}

#[test]
fn running_operations_of_a_project_are_bounded() {
    run_alone(async |t| {
        dead_letter(t, 1, "mail").await;
        let max = fencepost_domain::limits::MAX_RUNNING_OPERATIONS;
        t.database
            .execute(&format!(
                "insert into operations (project_id, id, kind, filter, next_step_at)
                 select projects.id, gen_random_uuid(), 'dead_letters_retry', '{{}}', now() + interval '1 day'
                 from projects, generate_series(1, {max})"
            ))
            .await;
        let refused = t.post("/v1/dead-letters/retry", json!({"filter": {}})).await;
        assert_eq!(refused.headers["retry-after"], "1");
        refused.is_error(429, "quota_exceeded");
    });
}

#[test]
fn bulk_cancel_cancels_every_job_that_the_filter_matches() {
    run(async |t| {
        let running = t.enqueue(json!({"tags": {"customer": "42"}})).await;
        t.lease("w").await;
        let jobs = (0..120).map(|n| {
            let customer = if n % 2 == 0 { "42" } else { "7" };
            json!({"job_type": "t", "delay_seconds": n % 3 * 600, "tags": {"customer": customer}})
        });
        t.post("/v1/jobs/batch", json!({"jobs": jobs.collect::<Vec<_>>()})).await.is(201);
        let filter = json!({"queue": "default", "tag": "customer:42"});
        let counted = t.post("/v1/jobs/cancel", json!({"filter": filter, "dry_run": true})).await;
        let counted = counted.is(200);
        assert_eq!((&counted["count"], &counted["is_capped"]), (&json!(61), &json!(false)));
        assert_eq!(counted["operation"], Value::Null);
        let begun = t.post("/v1/jobs/cancel", json!({"filter": filter})).await.is(202);
        assert_eq!(begun["operation"]["kind"], json!("jobs_cancel"));
        assert_eq!(begun["operation"]["filter"], filter);
        // What comes later is not meant.
        let late = t.enqueue(json!({"tags": {"customer": "42"}})).await;
        let ended = ends(t, &begun["operation"]).await;
        assert_eq!((&ended["done"], &ended["skipped"]), (&json!(61), &json!(0)));
        let running = t.job(&running).await;
        assert_eq!(
            (&running["state"], &running["cancel_requested"]),
            (&json!("processing"), &json!(true))
        );
        assert_eq!(t.job(&late).await["state"], json!("pending"));
        let counts = t.get("/v1/queues/default").await.is(200)["counts"].clone();
        assert_eq!((&counts["cancelled"], &counts["scheduled"]), (&json!(60), &json!(40)));
    });
}

#[test]
fn dead_letters_and_cancelled_jobs_that_a_filter_shows_come_back() {
    run(async |t| {
        for _ in 0..3 {
            t.enqueue(json!({"job_type": "email.send", "max_attempts": 1})).await;
            let job = t.lease("w").await;
            t.ack(&job, "w", "failed").await.is(200);
        }
        let cancelled = t.enqueue(json!({"job_type": "email.send"})).await;
        t.act(&format!("/v1/jobs/{cancelled}/cancel")).await.is(200);
        let other = t.enqueue(json!({"job_type": "other"})).await;
        t.act(&format!("/v1/jobs/{other}/cancel")).await.is(200);
        let filter = json!({"job_type": "email.send"});
        let first = t.post("/v1/jobs/retry", json!({"filter": filter, "max": 1})).await.is(202);
        assert_eq!(first["count"], json!(1));
        assert_eq!(ends(t, &first["operation"]).await["done"], json!(1));
        let rest = t.post("/v1/jobs/retry", json!({"filter": filter})).await.is(202);
        assert_eq!(ends(t, &rest["operation"]).await["done"], json!(3));
        assert_eq!(t.job(&cancelled).await["state"], json!("pending"));
        assert_eq!(t.job(&other).await["state"], json!("cancelled"));
        let letters = t.get("/v1/dead-letters").await.is(200);
        assert_eq!(letters["dead_letters"], json!([]));
        let groups = t.get("/v1/dead-letters/groups").await.is(200);
        assert_eq!(groups["groups"], json!([]));
    });
}

#[test]
fn a_filter_of_jobs_names_what_is_wrong_with_it() {
    run(async |t| {
        let ask = async |what: &str, filter: Value| {
            t.post(&format!("/v1/jobs/{what}"), json!({"filter": filter, "dry_run": true})).await
        };
        let states = ask("cancel", json!({"state": "succeeded"})).await.refuses("filter.state");
        assert_eq!(states, "must be one of: scheduled, pending, processing");
        let states = ask("retry", json!({"state": "pending"})).await.refuses("filter.state");
        assert_eq!(states, "must be one of: dead_letter, cancelled");
        ask("cancel", json!({"queue": ""})).await.refuses("filter.queue");
        ask("cancel", json!({"queue": null})).await.refuses("filter.queue");
        ask("cancel", json!({"tag": "x".repeat(1_000)})).await.refuses("filter.tag");
        ask("cancel", json!({"fingerprint": "x"})).await.refuses("filter.fingerprint");
        t.post("/v1/jobs/retry", json!({"filter": {}, "max": 0})).await.refuses("max");
        t.post("/v1/jobs/retry", json!({})).await.refuses("filter");
        let none = ask("retry", json!({"queue": "nowhere"})).await.is(200);
        assert_eq!(none["count"], json!(0));
    });
}

#[test]
fn an_operation_says_for_which_reason_it_skipped_jobs() {
    run(async |t| {
        let keyed = json!({"unique": {"key": "k"}, "max_attempts": 1});
        for _ in 0..2 {
            t.enqueue(keyed.clone()).await;
            let job = t.lease("w").await;
            t.ack(&job, "w", "failed").await.is(200);
        }
        t.enqueue(keyed).await;
        let operation = begun(t, "retry", json!({"filter": {}})).await;
        assert!(operation.get("skipped_by").is_none(), "{operation}");
        let ended = ends(t, &operation).await;
        assert_eq!((&ended["done"], &ended["skipped"]), (&json!(0), &json!(2)));
        assert_eq!(ended["skipped_by"], json!({"unique_conflict": 2}));
        let job = t.enqueue(json!({"queue": "twice"})).await;
        let twice = json!({"filter": {"ids": [job, job]}});
        let begun = t.post("/v1/jobs/cancel", twice).await.is(202);
        assert_eq!(begun["count"], 1, "it is one job");
        let ended = ends(t, &begun["operation"]).await;
        assert_eq!((&ended["done"], &ended["skipped"]), (&json!(1), &json!(0)));
    });
}

#[test]
fn what_was_cancelled_together_comes_back_together_however_slowly() {
    run(async |t| {
        let graph = json!({"jobs": [
            {"key": "a", "job_type": "t"}, {"key": "b", "job_type": "t", "depends_on": ["a"]},
            {"key": "c", "job_type": "t", "depends_on": ["b"]}
        ]});
        let workflow = t.post("/v1/workflows", graph).await.is(201);
        let ids: Vec<_> = workflow["jobs"].as_array().expect("jobs").iter().collect();
        let begun = t.post("/v1/jobs/cancel", json!({"filter": {"job_type": "t"}})).await.is(202);
        ends(t, &begun["operation"]).await;
        for job in &ids {
            t.job_becomes(job["id"].as_str().expect("an id"), "cancelled").await;
        }
        // A job a step.
        let slowly = json!({"filter": {"job_type": "t"}, "rate_per_second": 4});
        let begun = t.post("/v1/jobs/retry", slowly).await.is(202);
        ends(t, &begun["operation"]).await;
        for (job, state) in ids.iter().zip(["pending", "scheduled", "scheduled"]) {
            assert_eq!(t.job(job["id"].as_str().expect("an id")).await["state"], json!(state));
        }
        let path = format!("/v1/jobs/{}/events", ids[0]["id"].as_str().expect("an id"));
        let history = t.get(&path).await.is(200).to_string();
        assert!(history.contains("operation_id"), "{history}");
    });
}

#[test]
fn a_walk_continues_where_its_bound_stopped_it() {
    run_alone(async |t| {
        let first = t.enqueue(json!({"queue": "rare"})).await;
        // More than one step looks at, made as old as their ids say.
        t.database
            .execute(
                "with new as (
                     insert into jobs (project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                                       timeout_seconds)
                     select projects.id,
                            (lpad(to_hex((extract(epoch from now()) * 1000)::bigint), 12, '0')
                             || '70008' || lpad(to_hex(number), 15, '0'))::uuid,
                            'common', 't', 'pending', 0, now(), 1, 60
                     from generate_series(1, 4500) number, projects
                     returning project_id, id
                 ), bodies as (
                     insert into job_bodies (project_id, job_id, payload) select project_id, id, '1' from new
                 )
                 insert into queue_deltas (project_id, queue, active)
                 select project_id, 'common', count(*) from new group by 1",
            )
            .await;
        let last = t.enqueue(json!({"queue": "rare"})).await;
        let counted = json!({"filter": {"queue": "rare"}, "dry_run": true});
        assert_eq!(t.post("/v1/jobs/cancel", counted).await.is(200)["count"], json!(2));
        let begun = t.post("/v1/jobs/cancel", json!({"filter": {"queue": "rare"}})).await.is(202);
        let ended = ends(t, &begun["operation"]).await;
        assert_eq!((&ended["done"], &ended["skipped"]), (&json!(2), &json!(0)));
        for id in [&first, &last] {
            assert_eq!(t.job(id).await["state"], json!("cancelled"));
        }
        assert_eq!(t.get("/v1/queues/common").await.is(200)["counts"]["pending"], json!(4500));
    });
}
