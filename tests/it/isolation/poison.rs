//! A row that fails in a loop's statement: all others are served, it is set aside, and it is tried
//! again.

use fencepost_domain::ids::TickKey;
use fencepost_engine::maintenance;

use crate::harness::{
    Database, LoneProject, TestProject, TestServer, eventually, fresh_database, limited,
};
use serde_json::json;

/// A trigger that refuses rows with this text in this column, before this kind of write.
async fn plant(database: &Database, (table, write): (&str, &str), column: &str, text: &str) {
    let row = if write == "delete" { "old" } else { "new" };
    database
        .execute(&format!(
            "create function poison() returns trigger language plpgsql as $$
             begin raise exception 'poison' using errcode = '22000'; end $$;
             create trigger poison before {write} on {table} for each row
             when ({row}.{column}::text = '{text}') execute function poison()"
        ))
        .await;
}

/// Waits until the one item is set aside; then takes the poison away, and waits until the item is
/// processed after all.
async fn set_aside_and_tried_again(database: &Database, work: &str, item: &str) {
    let listed = format!(
        "select count(*) from set_aside
         where work = '{work}' and item = '{item}' and problem like '%poison%'"
    );
    database.until(&listed, 1).await;
    assert_eq!(database.number("select count(*) from set_aside").await, 1, "nothing else");
    database
        .execute("drop function poison cascade; update set_aside set next_try_at = now()")
        .await;
    database.until("select count(*) from set_aside", 0).await;
}

/// A server with two tenants: one whose row fails, and one that must not notice.
fn with_two_tenants(test: impl AsyncFnOnce(&LoneProject, &LoneProject)) {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (bad, good) = (server.project("bad").await, server.project("good").await);
        test(&bad, &good).await;
        server.stop().await;
    });
}

/// The id of a job as a UUID.
async fn uuid_of(t: &LoneProject, job_type: &str) -> String {
    t.database
        .text(&format!(
            "select id::text from jobs where job_type = '{job_type}'
             union all select id::text from finished_jobs where job_type = '{job_type}'"
        ))
        .await
}

/// A schedule for each second, whose jobs have its id as their type.
async fn schedule(t: &TestProject, id: &str) {
    let schedule = json!({"job_type": id, "cron_expression": "* * * * * *"});
    t.put(&format!("/v1/recurring/{id}"), schedule).await.is(200);
}

#[test]
fn a_tick_that_cannot_be_stored_stops_no_other_schedule() {
    with_two_tenants(async |bad, good| {
        plant(&bad.database, ("jobs", "insert"), "job_type", "poison").await;
        schedule(bad, "poison").await;
        schedule(good, "fine").await;
        for _ in 0..2 {
            assert_eq!(good.wait_and_lease("w").await["job_type"], "fine");
        }
        let listed = bad.get("/v1/recurring/poison").await.is(200);
        let problem = listed["problem"].as_str().expect("a problem");
        assert!(problem.contains("cannot store its ticks"), "{problem}");
        set_aside_and_tried_again(&bad.database, "tick", "poison").await;
        assert_eq!(bad.wait_and_lease("w").await["job_type"], "poison");
    });
}

#[test]
fn a_schedule_that_cannot_be_planned_stops_no_other() {
    with_two_tenants(async |bad, good| {
        plant(&bad.database, ("recurring_schedules", "update"), "id", "poison").await;
        schedule(bad, "poison").await;
        schedule(good, "fine").await;
        assert_eq!(good.wait_and_lease("w").await["job_type"], "fine");
        set_aside_and_tried_again(&bad.database, "plan", "poison").await;
        assert_eq!(bad.wait_and_lease("w").await["job_type"], "poison");
    });
}

#[test]
fn a_due_job_that_cannot_be_promoted_stops_no_other() {
    with_two_tenants(async |bad, good| {
        plant(&bad.database, ("jobs", "update"), "job_type", "poison").await;
        let job = bad.enqueue(json!({"job_type": "poison", "delay_seconds": 1})).await;
        good.enqueue(json!({"job_type": "fine", "delay_seconds": 1})).await;
        assert_eq!(good.wait_and_lease("w").await["job_type"], "fine");
        let id = uuid_of(bad, "poison").await;
        let reported = bad.get(&format!("/v1/jobs/{job}/explain")).await.is(200);
        let summary = reported["summary"].as_str().expect("a summary");
        assert!(summary.contains("the server failed to process it"), "{summary}");
        set_aside_and_tried_again(&bad.database, "promote", &id).await;
        assert_eq!(bad.wait_and_lease("w").await["job_type"], "poison");
    });
}

#[test]
fn an_expired_lease_that_cannot_be_ended_stops_no_other() {
    with_two_tenants(async |bad, good| {
        for (t, job_type) in [(bad, "poison"), (good, "fine")] {
            t.enqueue(json!({"job_type": job_type})).await;
            t.lease("silent").await;
        }
        plant(&bad.database, ("jobs", "update"), "job_type", "poison").await;
        // The trigger refuses this update too.
        bad.database
            .execute(
                "alter table jobs disable trigger user;
                 update jobs set lease_expires_at = now() - interval '1 ms';
                 alter table jobs enable trigger user",
            )
            .await;
        assert_eq!(good.wait_and_lease("w").await["job_type"], "fine");
        let id = uuid_of(bad, "poison").await;
        set_aside_and_tried_again(&bad.database, "reap", &id).await;
        assert_eq!(bad.wait_and_lease("w").await["attempt"], 2);
    });
}

#[test]
fn a_parent_whose_children_cannot_be_cancelled_stops_no_other() {
    with_two_tenants(async |bad, good| {
        plant(&bad.database, ("finished_jobs", "insert"), "job_type", "poison").await;
        let mut children = Vec::new();
        for (t, job_type) in [(bad, "poison"), (good, "fine")] {
            let parent = t.enqueue(json!({"job_type": "parent", "max_attempts": 1})).await;
            children.push(t.enqueue(json!({"job_type": job_type, "depends_on": [parent]})).await);
            let leased = t.lease("w").await;
            t.ack(&leased, "w", "failed").await.is(200);
        }
        good.job_becomes(&children[1], "cancelled").await;
        assert_eq!(bad.job(&children[0]).await["state"], "scheduled");
        let parent = uuid_of_dead_letter(bad).await;
        set_aside_and_tried_again(&bad.database, "cascade", &parent).await;
        bad.job_becomes(&children[0], "cancelled").await;
    });
}

/// The retry of a child sees that a parent has met its dependency before that parent's cascade
/// does, which must not count it again.
#[test]
fn a_dependency_that_is_met_late_is_counted_once() {
    with_two_tenants(async |bad, _| {
        let parent = async |job_type: &str| {
            bad.enqueue(json!({"job_type": job_type, "max_attempts": 1})).await
        };
        let (one, two) = (parent("one").await, parent("two").await);
        let three = bad.enqueue(json!({"job_type": "three", "queue": "later"})).await;
        let depends_on = json!([one, {"job_id": two, "when": "ended"}, three]);
        let child = bad.enqueue(json!({"job_type": "child", "depends_on": depends_on})).await;
        let (first, second) = (bad.lease("w").await, bad.lease("w").await);
        assert_eq!((&first["id"], &second["id"]), (&json!(one), &json!(two)));
        bad.ack(&first, "w", "failed").await.is(200);
        bad.job_becomes(&child, "cancelled").await;
        let late = uuid_of(bad, "two").await;
        plant(&bad.database, ("ended_parents", "delete"), "job_id", &late).await;
        bad.ack(&second, "w", "failed").await.is(200);
        bad.database.until("select count(*) from set_aside", 1).await;
        bad.post(&format!("/v1/jobs/{one}/retry"), json!({})).await.is(200);
        assert_eq!(bad.job(&child).await["state"], "scheduled", "it came back");
        set_aside_and_tried_again(&bad.database, "cascade", &late).await;
        let again = bad.wait_and_lease("w").await;
        assert_eq!(again["id"], one);
        bad.ack(&again, "w", "succeeded").await.is(200);
        assert_eq!(bad.job(&child).await["state"], "scheduled", "the third has not ended");
        let poll = json!({"worker_id": "w", "queues": ["later"]});
        let polled = bad.post("/v1/workers/poll", poll).await.is(200);
        bad.ack(&polled["jobs"][0], "w", "succeeded").await.is(200);
        bad.job_becomes(&child, "pending").await;
    });
}

#[test]
fn a_callback_that_cannot_be_stored_stops_no_other() {
    with_two_tenants(async |bad, good| {
        plant(&bad.database, ("jobs", "insert"), "job_type", "poison").await;
        for (t, callback) in [(bad, "poison"), (bad, "fine"), (good, "fine")] {
            t.enqueue(json!({"on_success": {"job_type": callback, "queue": "after"}})).await;
        }
        for (t, jobs) in [(bad, 2), (good, 1)] {
            for _ in 0..jobs {
                let job = t.wait_and_lease("w").await;
                t.ack(&job, "w", "succeeded").await.is(200);
            }
            t.job_becomes(&stored(t, "fine").await, "pending").await;
        }
        let set_aside = "select item from set_aside where work = 'callbacks'";
        bad.database.until("select count(*) from set_aside", 1).await;
        let item = bad.database.text(set_aside).await;
        set_aside_and_tried_again(&bad.database, "callbacks", &item).await;
        bad.job_becomes(&stored(bad, "poison").await, "pending").await;
    });
}

/// The id of the job of this type, once it is stored.
async fn stored(t: &TestProject, job_type: &str) -> String {
    eventually(format!("a job of type {job_type}"), async || {
        let listed = t.get(&format!("/v1/jobs?job_type={job_type}")).await.is(200);
        listed["jobs"][0]["id"].as_str().map(ToOwned::to_owned)
    })
    .await
}

/// The parent of the child that cannot be cancelled.
async fn uuid_of_dead_letter(t: &LoneProject) -> String {
    t.database
        .text(
            "select parent_id::text from job_edges
             join jobs on jobs.project_id = job_edges.project_id and id = child_id
             where job_type = 'poison'",
        )
        .await
}

#[test]
fn a_job_past_its_expiry_that_cannot_be_cancelled_stops_no_other() {
    with_two_tenants(async |bad, good| {
        plant(&bad.database, ("finished_jobs", "insert"), "job_type", "poison").await;
        let mut jobs = Vec::new();
        for (t, job_type) in [(bad, "poison"), (good, "fine")] {
            jobs.push(t.enqueue_expired(json!({"job_type": job_type})).await);
        }
        good.job_becomes(&jobs[1], "cancelled").await;
        let id = uuid_of(bad, "poison").await;
        set_aside_and_tried_again(&bad.database, "expire", &id).await;
        bad.job_becomes(&jobs[0], "cancelled").await;
    });
}

#[test]
fn a_lost_worker_whose_leases_cannot_end_stops_no_other_worker() {
    with_two_tenants(async |bad, good| {
        for (t, job_type) in [(bad, "poison"), (good, "fine")] {
            t.enqueue(json!({"job_type": job_type})).await;
            t.lease(job_type).await;
            t.post("/v1/workers/heartbeat", json!({"worker_id": job_type})).await.is(200);
        }
        // What they did before is in the store once their neighbour is.
        good.poll("neighbour", 1).await;
        let neighbour = "select count(*) from workers where worker_id = 'neighbour'";
        bad.database.until(neighbour, 1).await;
        bad.database
            .execute(
                "update jobs set claimed_at = claimed_at - interval '2 min',
                     lease_expires_at = lease_expires_at - interval '2 min'",
            )
            .await;
        plant(&bad.database, ("jobs", "update"), "job_type", "poison").await;
        bad.database
            .execute(
                "update workers set last_beat_at = now() - interval '2 min',
                                    last_seen_at = now() - interval '2 min'",
            )
            .await;
        assert_eq!(good.wait_and_lease("w").await["job_type"], "fine");
        set_aside_and_tried_again(&bad.database, "lost_worker", "poison").await;
        assert_eq!(bad.wait_and_lease("w").await["attempt"], 2);
    });
}

#[test]
fn a_finished_job_that_cannot_be_deleted_stops_no_other() {
    with_two_tenants(async |bad, good| {
        for (t, job_type) in [(bad, "poison"), (bad, "second"), (good, "fine")] {
            t.enqueue(json!({"job_type": job_type})).await;
            let leased = t.lease("w").await;
            t.ack(&leased, "w", "succeeded").await.is(200);
        }
        let database = &bad.database;
        plant(database, ("finished_jobs", "delete"), "job_type", "poison").await;
        database.execute("update finished_jobs set completed_at = now() - interval '8 days'").await;
        let engine = database.engine();
        maintenance::counts::pass(&engine).await.expect("it runs");
        let retain = || async {
            database.execute("update retention_dues set due_at = now()").await;
            maintenance::retention::pass(&engine).await.expect("it runs")
        };
        database.until("select count(*) from queue_counts where succeeded > 0", 2).await;
        retain().await;
        let left = "select count(*) from finished_jobs where job_type = 'poison'";
        assert_eq!(database.number("select count(*) from finished_jobs").await, 1);
        assert_eq!(database.number(left).await, 1);
        database
            .execute("drop function poison cascade; update set_aside set next_try_at = now()")
            .await;
        retain().await;
        assert_eq!(database.number(left).await, 0);
        assert_eq!(database.number("select count(*) from set_aside").await, 0);
        engine.finish().await;
    });
}

#[test]
fn counts_that_cannot_be_merged_stop_no_others() {
    with_two_tenants(async |bad, good| {
        plant(&bad.database, ("queue_counts", "insert"), "queue", "poison").await;
        for (t, queue) in [(bad, "poison"), (good, "fine")] {
            t.enqueue(json!({"queue": queue})).await;
        }
        let merged = |queue| format!("select count(*) from queue_counts where queue = '{queue}'");
        good.database.until(&merged("fine"), 1).await;
        let listed = bad.get("/v1/queues/poison").await.is(200);
        assert_eq!(listed["counts"]["pending"], 1, "what is not merged is counted");
        set_aside_and_tried_again(&bad.database, "counts", "poison").await;
        bad.database.until(&merged("poison"), 1).await;
    });
}

#[test]
fn a_client_cannot_take_the_id_of_a_tick() {
    with_two_tenants(async |bad, _| {
        schedule(bad, "each_second").await;
        let first = bad.wait_and_lease("w").await;
        let project = bad.database.number("select id::bigint from projects where slug = 'bad'");
        let project = i32::try_from(project.await).expect("a small number");
        let first = bad.job(first["id"].as_str().expect("an id")).await;
        let run_at = first["run_at"].as_str().expect("a time");
        let tick: chrono::DateTime<chrono::Utc> = run_at.parse().expect("a time");
        let guessed = fencepost_domain::ids::JobId::of_tick(
            &TickKey::new(b""),
            fencepost_domain::ids::ProjectId(project),
            "each_second",
            tick.timestamp_millis(),
        );
        assert_ne!(first["id"], guessed.to_string(), "the instance's key is part of it");
    });
}

#[test]
fn a_project_whose_incident_cannot_be_stored_keeps_no_alarm_from_others() {
    with_two_tenants(async |bad, good| {
        let number = "select id::text from projects where slug = 'bad'";
        let number = bad.database.text(number).await;
        plant(&bad.database, ("incidents", "insert"), "project_id", &number).await;
        for t in [bad, good] {
            let id = t.enqueue(json!({"max_attempts": 1})).await;
            let job = t.lease("w").await;
            t.ack(&job, "w", "failed").await.is(200);
            t.job_becomes(&id, "dead_letter").await;
        }
        let incidents = "select count(*) from incidents where alarm = 'dead_letters'";
        good.database.until(incidents, 1).await;
        set_aside_and_tried_again(&bad.database, "alarms", "all").await;
        bad.database.until(incidents, 2).await;
    });
}
