//! A database that falls silent: nothing arrives, and no connection is closed.

use std::time::{Duration, Instant};

use crate::harness::{
    LoneProject, Proxy, Reply, Silence, TestProject, TestServer, fresh_database, limited,
};
use serde_json::{Value, json};

/// A request is answered within this time, whatever the database does.
const ANSWERED: Duration = Duration::from_secs(5);
/// What a busy machine may add.
const SLACK: Duration = Duration::from_secs(2);

/// A project on a server behind a proxy, and a project of the same server that is used to look at
/// the database.
async fn stage() -> (Proxy, TestServer, LoneProject) {
    let database = fresh_database().await;
    let proxy = Proxy::start(&database).await;
    let server = proxy.server().await;
    let project = LoneProject::at(&server.url, &database, "main").await;
    (proxy, server, project)
}

/// The status of an answer that comes in time: a success, or 503.
async fn in_time(call: impl Future<Output = Reply>) -> u16 {
    let since = Instant::now();
    let reply = call.await;
    assert!(since.elapsed() < ANSWERED + SLACK, "{:?}: {}", since.elapsed(), reply.text);
    let status = reply.status.as_u16();
    assert!([200, 201, 503].contains(&status), "{status}: {}", reply.text);
    status
}

/// Calls of each kind at the same time: their statuses.
async fn call_all(t: &TestProject, held: &Value) -> [u16; 5] {
    let poll = json!({"worker_id": "p", "queues": ["none"], "wait_seconds": 0});
    let calls = tokio::join!(
        in_time(t.post("/v1/jobs", json!({"job_type": "more", "queue": "more"}))),
        in_time(t.get("/v1/queues")),
        in_time(t.post("/v1/workers/poll", poll)),
        in_time(t.heartbeat(held, "w")),
        in_time(t.patch("/v1/queues/some", json!({"max_concurrency": 5}))),
    );
    calls.into()
}

/// Waits until every kind of call succeeds, and the loops work; at most five seconds and slack.
async fn is_back(t: &LoneProject, held: &Value) {
    let since = Instant::now();
    while call_all(t, held).await.contains(&503) {
        assert!(since.elapsed() < ANSWERED + SLACK, "requests are back: {:?}", since.elapsed());
    }
    let due = t.enqueue(json!({"delay_seconds": 1, "queue": "due"})).await;
    let poll = json!({"worker_id": "w", "queues": ["due"], "wait_seconds": 20});
    let job = t.polled(poll).await.pop().expect("the promoter works");
    assert_eq!(job["id"], due);
    let fired = "select count(*) from schedule_fires where outcome = 'fired'";
    let before = t.database.number(fired).await;
    while t.database.number(fired).await == before {
        assert!(since.elapsed() < 2 * (ANSWERED + SLACK), "schedules fire again");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn some_work(t: &TestProject) -> Value {
    let schedule = json!({"job_type": "tick", "cron_expression": "* * * * * *", "queue": "ticks"});
    t.put("/v1/recurring/tick", schedule).await.is(200);
    t.enqueue(json!({"timeout_seconds": 600})).await;
    t.lease("w").await
}

#[test]
fn connections_that_fall_silent_are_replaced() {
    limited(async {
        let (proxy, server, t) = stage().await;
        let held = some_work(&t).await;
        proxy.silence(Silence::OfOpen);
        call_all(&t, &held).await;
        is_back(&t, &held).await;
        server.stop().await;
    });
}

#[test]
#[ignore = "takes long: `make nightly` runs it"]
fn a_silent_database_is_reported_in_time_and_used_again_when_it_is_back() {
    limited(async {
        let (proxy, server, t) = stage().await;
        let held = some_work(&t).await;
        proxy.silence(Silence::OfAll);
        let since = Instant::now();
        while since.elapsed() < Duration::from_secs(12) {
            call_all(&t, &held).await;
        }
        proxy.silence(Silence::None);
        is_back(&t, &held).await;
        server.stop().await;
    });
}

#[test]
#[ignore = "takes long: `make nightly` runs it"]
fn a_node_stops_within_its_grace_while_the_database_is_silent() {
    limited(async {
        let (proxy, server, t) = stage().await;
        some_work(&t).await;
        proxy.silence(Silence::OfAll);
        let since = Instant::now();
        server.stop().await;
        // 25 seconds for requests and loops, 5 for the last writes.
        assert!(since.elapsed() < Duration::from_secs(30) + SLACK, "{:?}", since.elapsed());
    });
}
