//! Groups whose jobs wait for long: who is notified of them, and what metrics say.

use serde_json::{Value, json};

use crate::harness::{LoneProject, TestProject, eventually, run_alone, until};

/// Seconds since all jobs were stored, as the tests set it.
const AGE_SECONDS: f64 = 1_000.0;

/// Lets one of two jobs of a group run, in a queue with these rules, and returns the other. Both
/// look as if they were stored long ago.
async fn let_one_wait(t: &LoneProject, queue: &str, rules: Value) -> String {
    t.patch(&format!("/v1/queues/{queue}"), json!({"groups": rules})).await.is(200);
    let job = || json!({"queue": queue, "group": "a"});
    let ids = [t.enqueue(job()).await, t.enqueue(job()).await];
    let poll = json!({"worker_id": "w", "queues": [queue], "wait_seconds": 5});
    let running = t.polled(poll).await.pop().expect("a job");
    let long_ago = format!("now() - interval '{AGE_SECONDS} s'");
    t.database
        .execute(&format!(
            "update jobs
             set created_at = {long_ago}, run_at = {long_ago},
                 ready_at = least(ready_at, {long_ago})
             where queue = '{queue}' and lease_id is null",
        ))
        .await;
    ids.into_iter().find(|it| running["id"] != it.as_str()).expect("one that waits")
}

/// What a gauge says of a queue.
async fn gauge(t: &TestProject, name: &str, queue: &str) -> f64 {
    let scraped = t.get("/v1/metrics/prometheus").await;
    let (name, label) = (format!("{name}{{"), format!("queue=\"{queue}\""));
    let mut lines = scraped.text.lines();
    let line = lines.find(|it| it.starts_with(&name) && it.contains(&label)).expect("a line");
    line.rsplit(' ').next().expect("a number").parse().expect("a number")
}

async fn waits(t: &TestProject, queue: &str) -> (f64, bool) {
    let limited = gauge(t, "fencepost_project_queue_limited_groups", queue).await;
    let longest = gauge(t, "fencepost_project_queue_group_longest_wait_seconds", queue).await;
    (limited, longest >= AGE_SECONDS)
}

#[test]
fn metrics_say_how_long_groups_wait_and_which_are_limited() {
    run_alone(async |t| {
        let kinds = [
            ("ordered", json!({"order": "strict"}), 0.0),
            ("limited", json!({"max_running": 1}), 1.0),
            ("fair", json!({"fair": true, "max_running": 1}), 1.0),
            ("rated", json!({"fair": true, "rates": [{"count": 1, "per_seconds": 600}]}), 1.0),
        ];
        for (queue, rules, limited) in kinds {
            let_one_wait(t, queue, rules).await;
            let found = format!("the group of {queue} to be found");
            until(found, async || waits(t, queue).await == (limited, true)).await;
            t.act(&format!("/v1/queues/{queue}/groups/a/pause")).await.is(200);
            assert_eq!(waits(t, queue).await, (0.0, false), "{queue}: a pause is no wait");
        }
    });
}

#[test]
fn the_groups_that_wait_longest_are_listed_first() {
    run_alone(async |t| {
        let_one_wait(t, "fair", json!({"fair": true, "max_running": 1})).await;
        for group in ["0", "b"] {
            t.enqueue(json!({"queue": "fair", "group": group})).await;
        }
        let path = "/v1/queues/fair/groups?order=longest_wait";
        let listed = async || {
            let page = t.get(path).await.is(200);
            assert_eq!(page["next_cursor"], Value::Null);
            page["groups"].as_array().expect("groups").clone()
        };
        until("all groups to be in line", async || listed().await.len() == 3).await;
        let groups = listed().await;
        let names: Vec<_> = groups.iter().map(|it| &it["group"]).collect();
        assert_eq!(names, ["a", "0", "b"]);
        let since: Vec<_> = groups.iter().map(|it| it["waiting_since"].to_string()).collect();
        assert!(since.is_sorted(), "{since:?}");
        let waiting = t.get("/v1/queues/fair/groups?state=waiting").await.is(200);
        assert_eq!(waiting["groups"].as_array().map(Vec::len), Some(3));
        let first = t.get(&format!("{path}&limit=1")).await.is(200);
        assert_eq!(first["groups"].as_array().map(Vec::len), Some(1));
        t.get(&format!("{path}&state=paused")).await.refuses("state");
        t.get(&format!("{path}&cursor=x")).await.refuses("cursor");
        t.get("/v1/queues/fair/groups?order=last").await.refuses("order");
    });
}

#[test]
fn people_are_notified_of_a_group_that_waits_until_it_does_not() {
    run_alone(async |t| {
        let alarm = json!({"threshold": 60, "for_seconds": 0});
        t.put("/v1/alarms/groups_waiting", alarm).await.is(200);
        t.put("/v1/alarms/oldest_ready", json!({"enabled": false})).await.is(200);
        let waiting = let_one_wait(t, "ordered", json!({"order": "strict"})).await;
        let incident = eventually("an incident", async || {
            let page = t.get("/v1/incidents?state=open").await.is(200);
            page["incidents"].as_array().expect("a list").first().cloned()
        })
        .await;
        assert_eq!(incident["rule"], "groups_waiting");
        let details = &incident["details"];
        assert_eq!((&details["queue"], &details["group"]), (&json!("ordered"), &json!("a")));
        assert_eq!(details["job_id"], waiting.as_str());
        assert!(details["value"].as_f64().expect("seconds") >= AGE_SECONDS, "{details}");
        t.act(&format!("/v1/jobs/{waiting}/cancel")).await.is(200);
        until("the incident to end", async || {
            t.get("/v1/incidents?state=open").await.is(200)["incidents"] == json!([])
        })
        .await;
    });
}
