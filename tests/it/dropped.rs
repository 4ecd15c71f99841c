//! Clients that disconnect while a statement for their request runs: the statement completes, its
//! connection serves others, and nothing is lost.

use crate::harness::{LoneProject, TestProject, run_alone, until};
use reqwest::Method;
use serde_json::{Value, json};

/// Statements that sleep, and lookups of keys that wait for a lock.
const HELD: &str = "select (select count(*) from pg_stat_activity
                            where datname = current_database() and wait_event = 'PgSleep')
                        + (select count(*) from pg_locks
                           join pg_database on pg_database.oid = pg_locks.database
                           where not granted and relation = 'api_keys'::regclass
                               and datname = current_database())";
/// More than the pools of these statements have connections.
const TIMES: usize = 9;

/// Makes statements on a table slow.
fn slow(table: &str, event: &str) -> String {
    format!(
        "create function slow() returns trigger language plpgsql as $$
         begin
             perform pg_sleep(1);
             return null;
         end $$;
         create trigger slow after {event} on {table} for each statement execute function slow()"
    )
}

/// Sends a request, and disconnects when one more statement is held than before.
async fn drop_in_the_middle(t: &LoneProject, path: &str, body: Value) {
    let before = t.database.number(HELD).await;
    let sending = tokio::spawn(t.request(Method::POST, path).json(&body).send());
    while t.database.number(HELD).await <= before {
        assert!(!sending.is_finished(), "it was in its statement");
    }
    sending.abort();
    let _ = sending.await;
}

/// Waits until no statement is held.
async fn complete(t: &LoneProject) {
    t.database.until(HELD, 0).await;
}

/// All leases are given, and the server answers as before.
async fn assert_still_serves(t: &LoneProject) {
    t.database.execute("drop function slow() cascade").await;
    for _ in 0..TIMES {
        t.enqueue(json!({"queue": "after"})).await;
        let poll = json!({"worker_id": "after", "queues": ["after"], "wait_seconds": 10});
        let job = t.polled(poll).await.pop().expect("a job");
        t.ack(&job, "after", "succeeded").await.is(200);
    }
}

#[test]
fn jobs_of_dropped_enqueues_are_stored() {
    run_alone(async |t| {
        t.database.execute(&slow("job_bodies", "insert")).await;
        for _ in 0..TIMES {
            drop_in_the_middle(t, "/v1/jobs", json!({"job_type": "t"})).await;
            complete(t).await;
        }
        let with_key = json!({"job_type": "t", "idempotency_key": "once"});
        drop_in_the_middle(t, "/v1/jobs", with_key.clone()).await;
        complete(t).await;
        drop_in_the_middle(t, "/v1/jobs", json!({"job_type": "t", "unique": {"key": "u"}})).await;
        let stored = "select count(*) from jobs";
        t.database.until_at_least(stored, TIMES as i64 + 2).await;
        assert_still_serves(t).await;
        t.post("/v1/jobs", with_key).await.is(201);
        assert_eq!(t.database.number(stored).await, TIMES as i64 + 2, "the key was kept");
    });
}

#[test]
fn dropped_acks_are_recorded() {
    run_alone(async |t| {
        let mut jobs = Vec::new();
        for _ in 0..TIMES + 4 {
            t.enqueue(json!({})).await;
            jobs.push(t.lease("w").await);
        }
        t.database.execute(&slow("finished_jobs", "insert")).await;
        for job in &jobs[..TIMES] {
            let ack = TestProject::ack_body(job, "w", "succeeded");
            drop_in_the_middle(t, "/v1/workers/ack", ack).await;
            complete(t).await;
        }
        let mut then_poll = TestProject::ack_body(&jobs[TIMES], "w", "succeeded");
        then_poll["then_poll"] =
            json!({"queues": ["default"], "poll_id": "0190c6b0-0000-7000-8000-000000000007"});
        drop_in_the_middle(t, "/v1/workers/ack", then_poll).await;
        complete(t).await;
        let acks: Vec<_> = jobs[TIMES + 1..]
            .iter()
            .map(|it| TestProject::ack_body(it, "w", "succeeded"))
            .collect();
        drop_in_the_middle(t, "/v1/workers/ack/batch", json!({"acks": acks})).await;
        let done = "select count(*) from finished_jobs";
        t.database.until_at_least(done, jobs.len() as i64).await;
        assert_still_serves(t).await;
    });
}

#[test]
fn jobs_of_dropped_polls_are_released() {
    run_alone(async |t| {
        for _ in 0..TIMES {
            t.enqueue(json!({})).await;
        }
        t.database
            .execute(
                "create function slow() returns trigger language plpgsql as $$
                 begin
                     if new.worker_id = 'slow' then perform pg_sleep(1); end if;
                     return new;
                 end $$;
                 create trigger slow before update on jobs for each row execute function slow()",
            )
            .await;
        for _ in 0..TIMES {
            let poll = json!({"worker_id": "slow", "queues": ["default"]});
            drop_in_the_middle(t, "/v1/workers/poll", poll).await;
            complete(t).await;
        }
        assert_still_serves(t).await;
        for _ in 0..TIMES {
            let job = t.wait_and_lease("w").await;
            assert_eq!(job["failures"], 0);
        }
    });
}

#[test]
fn dropped_lookups_of_keys_leave_the_pool_whole() {
    run_alone(async |t| {
        for _ in 0..TIMES {
            let mut holder = t.database.connect().await;
            for sql in ["begin", "lock table api_keys in access exclusive mode"] {
                sqlx::query(sql).execute(&mut holder).await.expect("it runs");
            }
            let api_key = fencepost_identity::accounts::key::generate("live");
            let unknown = t.with_key(api_key);
            drop_in_the_middle(&unknown, "/v1/jobs", json!({"job_type": "t"})).await;
            sqlx::query("commit").execute(&mut holder).await.expect("it runs");
        }
        t.enqueue(json!({})).await;
        t.lease("w").await;
    });
}

#[test]
fn a_job_that_was_leased_to_a_dropped_poll_as_it_was_stored_is_released() {
    run_alone(async |t| {
        t.database
            .execute(
                "create function slow() returns trigger language plpgsql as $$
                 begin
                     if new.worker_id = 'slow' then perform pg_sleep(1); end if;
                     return new;
                 end $$;
                 create trigger slow before insert on jobs for each row execute function slow()",
            )
            .await;
        let poll = json!({"worker_id": "slow", "queues": ["default"], "wait_seconds": 20});
        // Until the poll is parked when the job is stored.
        let id = loop {
            let polling =
                tokio::spawn(t.request(Method::POST, "/v1/workers/poll").json(&poll).send());
            let sending = {
                let t = t.clone();
                tokio::spawn(async move { t.enqueue(json!({})).await })
            };
            until("the enqueue to be held, or the poll to be answered", async || {
                t.database.number(HELD).await > 0 || polling.is_finished()
            })
            .await;
            let was_matched = !polling.is_finished();
            polling.abort();
            let id = sending.await.expect("no panic");
            if was_matched {
                break id;
            }
            t.database.execute("delete from jobs").await;
        };
        let job = t.wait_and_lease("w").await;
        assert_eq!(
            (&job["id"], &job["attempt"], &job["failures"]),
            (&json!(id), &json!(2), &json!(0))
        );
    });
}
