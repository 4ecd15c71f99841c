//! Connections that are lost, and transactions that nobody ended.

use std::time::Duration;

use fencepost::{config::PoolArgs, store::pools::Pools};
use serde_json::json;
use tokio::time::timeout;

use crate::harness::{Proxy, TestProject, fresh_database, limited, run};

#[test]
fn a_transaction_begun_by_a_future_that_was_dropped_swallows_nobodys_write() {
    limited(async {
        let database = fresh_database().await;
        database.execute("create table written (n integer)").await;
        let sizes = PoolArgs { settle_connections: 2, ..PoolArgs::default() };
        let pools = Pools::new(&database.url, sizes).expect("a URL");
        for n in 0..40 {
            // Dropped at another point each time, most of them while `begin` is under way.
            let _ = timeout(Duration::from_micros(n * 15), pools.settle.begin()).await;
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
    run(async |t| {
        t.database
            .execute(
                "create sequence kills;
                 create function kill() returns trigger language plpgsql as $$
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

#[test]
fn a_commit_whose_answer_was_lost_stores_its_job_once() {
    run(async |t| {
        let proxy = Proxy::start(&t.database).await;
        let behind = proxy.server().await;
        let t = TestProject { url: behind.url.clone(), ..t.clone() };
        t.enqueue(json!({"queue": "warm"})).await;
        proxy.swallow_next_insert();
        let id = t.enqueue(json!({})).await;
        assert!(proxy.has_swallowed(), "the answer was lost");
        assert_eq!(t.database.number("select count(*) from jobs where queue = 'default'").await, 1);
        assert_eq!(t.lease("w").await["id"], id);
        behind.stop().await;
    });
}

#[test]
fn a_store_that_is_away_is_told_with_a_time_to_come_back() {
    run(async |t| {
        t.database.execute("alter table jobs rename to elsewhere").await;
        // A statement that the store refuses is our mistake; the caller learns no details of it.
        let error = t.post("/v1/jobs", json!({"job_type": "t"})).await.is_error(500, "internal");
        assert!(
            !error.to_string().contains("elsewhere") && !error.to_string().contains("jobs\\\"")
        );
        t.database.execute("alter table elsewhere rename to jobs").await;
        t.enqueue(json!({})).await;
    });
}
