//! A node that is killed between any two steps loses no event.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde_json::json;

use super::endpoint;
use crate::harness::{
    LoneProject, NodeProcess, Sink, TestProject, free_port, fresh_database, run_for,
};

/// Jobs that end before the kill: some in each step.
const JOBS: usize = 12;

async fn succeeds(t: &TestProject) -> String {
    let id = t.enqueue(json!({})).await;
    let job = t.lease("w").await;
    t.ack(&job, "w", "succeeded").await.is(200);
    id
}

#[test]
fn a_node_that_is_killed_between_any_two_steps_loses_no_event() {
    run_for(Duration::from_secs(120), async {
        let database = fresh_database().await;
        let sink = Sink::start().await;
        let port = free_port();
        let start = || NodeProcess::start_at(&database, port, &["--outbound-allow", "127.0.0.1"]);
        let mut node = start();
        node.until_ready().await;
        let t = LoneProject::at(&node.url(), &database, "main").await;
        endpoint(&t, &sink, json!({"events": ["job.succeeded"], "max_in_flight": 1})).await;
        // One is sent and not answered, so that others wait behind it.
        sink.hold(true);
        let mut ended = BTreeSet::from([succeeds(&t).await]);
        let first = sink.next().await;
        while ended.len() < JOBS - 1 {
            ended.insert(succeeds(&t).await);
        }
        let waiting = "select count(*) from jobs where state = 'pending'";
        database.until_at_least(waiting, 1).await;
        // The last one ends in the moment of the kill.
        ended.insert(succeeds(&t).await);
        node.kill();
        let stored = "select (select count(*) from outbound_events)
                          + (select count(*) from jobs where job_type = 'job.succeeded')";
        assert_eq!(database.number(stored).await, i64::try_from(JOBS).expect("a number"));
        sink.hold(false);
        let mut node = start();
        node.until_ready().await;
        let mut reported: BTreeMap<String, Vec<String>> = BTreeMap::new();
        while reported.len() < JOBS {
            let request = tokio::select! {
                request = sink.next() => request,
                // The lease of the one that was sent; the first reaper extends it once.
                () = tokio::time::sleep(Duration::from_millis(500)) => {
                    t.expire_leases().await;
                    continue;
                }
            };
            let job = request.body()["data"]["job"]["id"].as_str().expect("an id").to_owned();
            reported.entry(job).or_default().push(request.header("webhook-id").to_owned());
        }
        assert_eq!(reported.keys().cloned().collect::<BTreeSet<_>>(), ended);
        let first_job = first.body()["data"]["job"]["id"].as_str().expect("an id").to_owned();
        let again = &reported[&first_job];
        assert!(again.iter().all(|it| it == first.header("webhook-id")), "it has the same id");
    });
}
