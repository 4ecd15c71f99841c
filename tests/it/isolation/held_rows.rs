//! A row that another transaction holds delays only its own ack or heartbeat.

use std::time::{Duration, Instant};

use fencepost_config::PoolArgs;

use crate::harness::{Database, LoneProject, TestServer, fresh_database, limited, until};
use serde_json::json;
use sqlx::{Connection, Executor, PgConnection};

/// Shorter than any timeout of a statement, longer than any other delay.
const AT_ONCE: Duration = Duration::from_secs(2);

/// Holds rows until it is dropped or rolled back.
async fn hold(database: &Database, rows: &str) -> PgConnection {
    let mut conn = database.connect().await;
    let hold = format!("begin; select from {rows} for update");
    conn.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(hold))).await.expect("the rows are locked");
    conn
}

async fn let_go(holder: PgConnection) {
    holder.close().await.expect("the connection closes");
}

fn with_two_tenants(test: impl AsyncFnOnce(&LoneProject, &LoneProject)) {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (one, other) = (server.project("one").await, server.project("other").await);
        test(&one, &other).await;
        server.stop().await;
    });
}

#[test]
fn acks_and_heartbeats_of_a_held_job_wait_alone() {
    with_two_tenants(async |one, other| {
        for status in ["succeeded", "failed", "heartbeat"] {
            one.enqueue(json!({"job_type": "held"})).await;
            let held = one.lease("w").await;
            let holder = hold(&one.database, "jobs where job_type = 'held'").await;
            let waiting = {
                let (one, held) = (one.clone(), held.clone());
                tokio::spawn(async move {
                    match status {
                        "heartbeat" => one.heartbeat(&held, "w").await,
                        status => one.ack(&held, "w", status).await,
                    }
                })
            };
            for _ in 0..3 {
                other.enqueue(json!({})).await;
                let job = other.lease("w").await;
                let since = Instant::now();
                other.heartbeat(&job, "w").await.is(200);
                other.ack(&job, "w", "succeeded").await.is(200);
                assert!(since.elapsed() < AT_ONCE, "{status}: {:?}", since.elapsed());
            }
            // The rows are held until then: what was skipped has been tried again.
            assert!(!waiting.is_finished(), "{status} waits");
            let_go(holder).await;
            waiting.await.expect("it does not panic").is(200);
            if status == "heartbeat" {
                one.ack(&held, "w", "succeeded").await.is(200);
            }
        }
    });
}

#[test]
fn a_job_that_stays_locked_is_refused_and_nothing_is_written() {
    with_two_tenants(async |one, _| {
        let id = one.enqueue(json!({})).await;
        let job = one.lease("w").await;
        let holder = hold(&one.database, "jobs").await;
        let (ack, beat) = tokio::join!(one.ack(&job, "w", "succeeded"), one.heartbeat(&job, "w"));
        for reply in [&ack, &beat] {
            reply.is_error(503, "unavailable");
            assert_eq!(reply.headers["retry-after"], "1");
        }
        let_go(holder).await;
        assert_eq!(one.job(&id).await["state"], "processing");
        one.ack(&job, "w", "succeeded").await.is(200);
    });
}

#[test]
fn a_held_child_delays_only_its_own_parents() {
    with_two_tenants(async |one, other| {
        let parent = one.enqueue(json!({"job_type": "parent"})).await;
        one.enqueue(json!({"job_type": "child", "depends_on": [parent]})).await;
        let leased = one.lease("w").await;
        let holder = hold(&one.database, "jobs where job_type = 'child'").await;
        let waiting = {
            let (one, leased) = (one.clone(), leased.clone());
            tokio::spawn(async move { one.ack(&leased, "w", "succeeded").await })
        };
        for _ in 0..3 {
            let parent = other.enqueue(json!({})).await;
            other.enqueue(json!({"depends_on": [parent]})).await;
            let job = other.lease("w").await;
            let since = Instant::now();
            let acked = other.ack(&job, "w", "succeeded").await.is(200);
            assert_eq!(acked["children_activated"], 1);
            assert!(since.elapsed() < AT_ONCE, "{:?}", since.elapsed());
            let child = other.lease("w").await;
            other.ack(&child, "w", "succeeded").await.is(200);
        }
        let_go(holder).await;
        let acked = waiting.await.expect("it does not panic").is(200);
        assert_eq!(acked["children_activated"], 1);
    });
}

#[test]
fn a_job_that_fails_while_its_workflow_is_cancelled_does_not_survive() {
    with_two_tenants(async |t, _| {
        let job = |key: &str| json!({"key": key, "job_type": key});
        let graph = json!({"jobs": [job("runs"), job("waits")]});
        let workflow = t.post("/v1/workflows", graph).await.is(201);
        let poll = json!({"worker_id": "w", "queues": ["default"], "job_types": ["runs"]});
        let running = t.polled(poll).await.remove(0);
        let holder = hold(&t.database, "jobs where job_type = 'waits'").await;
        let path = format!("/v1/workflows/{}/cancel", workflow["id"].as_str().expect("an id"));
        let cancelling = {
            let t = t.clone();
            tokio::spawn(async move { t.act(&path).await })
        };
        let waits = "select count(*) from pg_stat_activity
                     where wait_event_type = 'Lock' and datname = current_database()";
        t.database.until_at_least(waits, 1).await;
        let failing = {
            let (t, running) = (t.clone(), running.clone());
            tokio::spawn(async move { t.ack(&running, "w", "failed").await })
        };
        // Time for the ack, if nothing holds it back.
        let _ = tokio::time::timeout(AT_ONCE / 4, async {
            until("the ack to be answered", async || failing.is_finished()).await;
        })
        .await;
        let_go(holder).await;
        assert!(cancelling.await.expect("it does not panic").status.is_success());
        failing.await.expect("it does not panic").is(200);
        let id = running["id"].as_str().expect("an id");
        assert_eq!(t.job(id).await["state"], "cancelled");
    });
}

#[test]
fn enqueues_that_wait_for_a_held_job_leave_connections_to_others() {
    with_two_tenants(async |one, other| {
        let unique = |key: &str| json!({"key": key, "on_conflict": "return_existing"});
        let taken = json!({"job_type": "held", "unique": unique("k")});
        one.enqueue(taken.clone()).await;
        let holder = hold(&one.database, "jobs where job_type = 'held'").await;
        let wait = || {
            let (one, taken) = (one.clone(), taken.clone());
            tokio::spawn(async move { one.post("/v1/jobs", taken).await })
        };
        let waiting: Vec<_> = (0..20).map(|_| wait()).collect();
        let share = i64::from(PoolArgs::default().enqueue_connections / 2);
        let waits = "select count(*) from pg_stat_activity
                     where datname = current_database() and wait_event_type = 'Lock'";
        one.database.until_at_least(waits, share).await;
        for key in ["a", "b", "c"] {
            let since = Instant::now();
            other.enqueue(json!({"unique": unique(key)})).await;
            assert!(since.elapsed() < AT_ONCE, "{:?}", since.elapsed());
        }
        assert_eq!(one.database.number(waits).await, share);
        let_go(holder).await;
        for it in waiting {
            it.await.expect("it does not panic").is(200);
        }
    });
}

#[test]
fn cancels_that_wait_for_a_held_job_leave_reads_to_others() {
    with_two_tenants(async |one, other| {
        let id = one.enqueue(json!({"job_type": "held"})).await;
        let holder = hold(&one.database, "jobs where job_type = 'held'").await;
        let wait = || {
            let (one, path) = (one.clone(), format!("/v1/jobs/{id}/cancel"));
            tokio::spawn(async move { one.act(&path).await })
        };
        let waiting: Vec<_> = (0..20).map(|_| wait()).collect();
        let share = i64::from(PoolArgs::default().read_connections / 2);
        let waits = "select count(*) from pg_stat_activity
                     where datname = current_database() and wait_event_type = 'Lock'";
        one.database.until_at_least(waits, share).await;
        for path in ["/v1/jobs", "/v1/keys", "/v1/queues"] {
            let since = Instant::now();
            other.get(path).await.is(200);
            assert!(since.elapsed() < AT_ONCE, "{path}: {:?}", since.elapsed());
        }
        assert_eq!(one.database.number(waits).await, share);
        let_go(holder).await;
        for it in waiting {
            let reply = it.await.expect("it does not panic");
            assert!(reply.status.is_success(), "{}", reply.text);
        }
    });
}
