//! Lost connections, and transactions that were left open.

use std::time::Duration;

use fencepost_config::PoolArgs;
use fencepost_domain::ids::JobId;
use fencepost_store::connection::pools::Pools;

use crate::harness::{LoneProject, Proxy, TestServer, fresh_database, limited, run_alone};
use serde_json::{Value, json};
use sqlx::Acquire;
use tokio::time::timeout;

#[test]
fn a_transaction_begun_by_a_future_that_was_dropped_swallows_nobodys_write() {
    limited(async {
        let database = fresh_database().await;
        database.execute("create table written (n integer)").await;
        let sizes = PoolArgs { settle_connections: 2, ..PoolArgs::default() };
        let pools = Pools::new(&database.url, sizes, None).expect("a URL");
        for n in 0..40 {
            // Dropped at another point each time, most of them while `begin` is under way.
            let begin = async { pools.settle.acquire().await?.begin().await.map(drop) };
            let _ = timeout(Duration::from_micros(n * 15), begin).await;
            let mut conn = pools.settle.acquire().await.expect("a connection");
            sqlx::query("insert into written values (1)")
                .execute(&mut *conn)
                .await
                .expect("it runs");
        }
        assert_eq!(database.number("select count(*) from written").await, 40);
    });
}

#[test]
fn a_connection_lost_in_the_middle_costs_a_retry_and_no_job() {
    run_alone(async |t| {
        t.database
            .execute(
                "create sequence kills;
                 create function kill() returns trigger language plpgsql security definer as $$
                 begin
                     if nextval('kills') in (1, 3) then
                         perform pg_terminate_backend(pg_backend_pid());
                     end if;
                     return null;
                 end $$;
                 create trigger kill after insert on jobs for each statement execute function kill();
                 create trigger kill after insert on finished_jobs
                     for each statement execute function kill()",
            )
            .await;
        let id = t.enqueue(json!({})).await;
        assert_eq!(t.database.number("select count(*) from jobs").await, 1);
        let job = t.lease("w").await;
        t.ack(&job, "w", "succeeded").await.is(200);
        assert_eq!(t.job(&id).await["state"], "succeeded");
        assert_eq!(t.database.number("select last_value from kills").await, 4);
    });
}

/// A project on a server whose database is behind a proxy.
async fn behind_a_proxy(t: &LoneProject) -> (Proxy, TestServer, LoneProject) {
    let proxy = Proxy::start(&t.database).await;
    let server = proxy.server().await;
    let t = t.through(&server.url);
    (proxy, server, t)
}

#[test]
fn a_commit_whose_answer_was_lost_stores_its_job_once() {
    run_alone(async |t| {
        let (proxy, server, t) = behind_a_proxy(t).await;
        t.enqueue(json!({"queue": "warm"})).await;
        proxy.swallow_answer_to(b"whose answer is lost");
        let id = t.enqueue(json!({"payload": "whose answer is lost"})).await;
        assert!(proxy.has_swallowed(), "the answer was lost");
        assert_eq!(t.database.number("select count(*) from jobs where queue = 'default'").await, 1);
        assert_eq!(t.lease("w").await["id"], id);
        server.stop().await;
    });
}

/// A job's id, as statements carry it.
fn uuid_of(job: &Value) -> [u8; 16] {
    let id: JobId = job["id"].as_str().expect("an id").parse().expect("a job's");
    *id.0.as_bytes()
}

#[test]
fn an_ack_whose_answer_was_lost_is_recorded_once_and_answered() {
    run_alone(async |t| {
        let (proxy, server, t) = behind_a_proxy(t).await;
        for _ in 0..2 {
            t.enqueue(json!({})).await;
        }
        let (fenced, bare) = (t.lease("w").await, t.lease("w").await);
        proxy.swallow_answer_to(&uuid_of(&fenced));
        assert_eq!(t.ack(&fenced, "w", "succeeded").await.is(200), json!({"action": "done"}));
        assert!(proxy.has_swallowed(), "the answer was lost");
        proxy.swallow_answer_to(&uuid_of(&bare));
        let ack = json!({"job_id": bare["id"], "worker_id": "w", "status": "succeeded"});
        // The server knew which attempt it could mean.
        let reply = t.post("/v1/workers/ack", ack).await;
        assert_eq!(reply.is(200), json!({"action": "done"}));
        assert!(proxy.has_swallowed(), "the answer was lost");
        for job in [fenced, bare] {
            let job = t.job(job["id"].as_str().expect("an id")).await;
            assert_eq!((&job["state"], &job["attempt"]), (&json!("succeeded"), &json!(1)));
        }
        server.stop().await;
    });
}

#[test]
fn jobs_of_a_lost_claim_are_released_without_a_failure() {
    run_alone(async |t| {
        let (proxy, server, t) = behind_a_proxy(t).await;
        let id = t.enqueue(json!({"payload": "swallow-me"})).await;
        proxy.swallow_next("swallow-me");
        let job = t.wait_and_lease("w").await;
        assert!(proxy.has_swallowed(), "the answer was lost");
        assert_eq!(
            (&job["id"], &job["attempt"], &job["failures"]),
            (&json!(id), &json!(2), &json!(0))
        );
        server.stop().await;
    });
}

#[test]
fn a_store_that_is_away_is_reported_with_a_time_to_come_back() {
    run_alone(async |t| {
        let (proxy, server, t) = behind_a_proxy(t).await;
        t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        proxy.cut(true);
        let poll = json!({"worker_id": "w", "queues": ["default"], "wait_seconds": 0});
        // It may be stored all the same: in a queue that no worker polls.
        let enqueue = json!({"job_type": "t", "queue": "away"});
        for (path, body) in [("/v1/jobs", enqueue), ("/v1/workers/poll", poll)] {
            let reply = t.post(path, body).await;
            reply.is_error(503, "unavailable");
            assert_eq!(reply.headers["retry-after"], "1", "{path}");
        }
        t.ack(&job, "w", "succeeded").await.is_error(503, "unavailable");
        t.get("/v1/jobs").await.is_error(503, "unavailable");
        proxy.cut(false);
        t.ack(&job, "w", "succeeded").await.is(200);
        let id = t.enqueue(json!({})).await;
        assert_eq!(t.wait_and_lease("w").await["id"], id);
        server.stop().await;
    });
}

#[test]
fn a_refusal_of_the_store_is_our_mistake_and_reveals_nothing() {
    run_alone(async |t| {
        t.database.execute("alter table jobs rename to elsewhere").await;
        let error = t.post("/v1/jobs", json!({"job_type": "t"})).await.is_error(500, "internal");
        assert!(!error.to_string().contains("relation"), "{error}");
        t.database.execute("alter table elsewhere rename to jobs").await;
        t.enqueue(json!({})).await;
    });
}
