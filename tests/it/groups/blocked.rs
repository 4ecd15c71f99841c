//! Blocked groups: who is notified of them, and what metrics say.

use serde_json::{Value, json};

use super::order::{enqueue, order, starts};
use crate::harness::{Sink, TestProject, eventually, run_alone, until};

/// Makes a dead letter of a new job of this group.
async fn fail(t: &TestProject, group: &str) -> String {
    let id = enqueue(t, group).await;
    let job = starts(t, &id).await;
    t.ack_with(&job, "w", "failed", json!({"retryable": false})).await.is(200);
    t.job_becomes(&id, "dead_letter").await;
    id
}

async fn open_incident(t: &TestProject, groups: i64) -> Value {
    eventually("an incident", async || {
        let page = t.get("/v1/incidents?state=open").await.is(200);
        let all = page["incidents"].as_array().expect("a list").clone();
        let of_groups = |it: &Value| {
            it["rule"] == "groups_blocked" && it["details"]["value"].as_i64() == Some(groups)
        };
        all.into_iter().find(of_groups)
    })
    .await
}

async fn blocked_groups(t: &TestProject) -> Option<String> {
    let scraped = t.get("/v1/metrics/prometheus").await;
    let mut lines = scraped.text.lines();
    let line = lines.find(|it| it.starts_with("fencepost_project_queue_blocked_groups{"))?;
    line.rsplit(' ').next().map(ToOwned::to_owned)
}

#[test]
fn people_are_notified_of_blocked_groups_until_none_is() {
    run_alone(async |t| {
        let sink = Sink::start().await;
        let events = ["alarm.triggered", "alarm.resolved", "job.dead_lettered"];
        t.post("/v1/webhooks", json!({"url": sink.url, "events": events})).await.is(201);
        let alarm = json!({"threshold": 2, "for_seconds": 0});
        t.put("/v1/alarms/groups_blocked", alarm).await.is(200);
        t.put("/v1/alarms/dead_letters", json!({"enabled": false})).await.is(200);
        order(t, "block").await;
        for group in ["a", "b", "without more jobs"] {
            fail(t, group).await;
        }
        assert_eq!(blocked_groups(t).await.as_deref(), Some("0"), "no job waits");
        enqueue(t, "a").await;
        enqueue(t, "b").await;
        let incident = open_incident(t, 2).await;
        let details = &incident["details"];
        assert_eq!((&details["queue"], &details["group"]), (&json!("default"), &json!("a")));
        let summary = incident["summary"].as_str().expect("a sentence");
        assert!(summary.starts_with("Dead letters block 2 groups, a among them"), "{summary}");
        assert_eq!(blocked_groups(t).await.as_deref(), Some("2"));
        for group in ["a", "b"] {
            let path = format!("/v1/queues/default/groups/{group}/unblock");
            t.post(&path, json!({"head": "skip"})).await.is(200);
        }
        until("the incident to end", async || {
            t.get("/v1/incidents?state=open").await.is(200)["incidents"] == json!([])
        })
        .await;
        assert_eq!(blocked_groups(t).await.as_deref(), Some("0"));
        let mut groups = Vec::new();
        let mut alarms = Vec::new();
        while groups.len() < 3 || alarms.len() < 2 {
            let event = sink.next().await.body();
            match event["data"]["job"]["group"].as_str() {
                Some(group) => groups.push(group.to_owned()),
                None => alarms.push(event["type"].clone()),
            }
        }
        groups.sort();
        assert_eq!(groups, ["a", "b", "without more jobs"]);
        alarms.sort_by_key(Value::to_string);
        assert_eq!(alarms, ["alarm.resolved", "alarm.triggered"]);
    });
}
