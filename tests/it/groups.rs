//! Groups of jobs: named by whatever enqueues one, shown and found wherever jobs are.

mod blocked;
mod crashes;
mod histories;
mod limits;
mod order;
mod pauses;
mod turn_edges;
mod turns;
mod waits;

use crate::harness::{TestProject, run, until};
use serde_json::{Value, json};

/// The groups of a list's jobs, in its order.
async fn groups(t: &TestProject, query: &str) -> Vec<Value> {
    let page = t.get(&format!("/v1/jobs?order=oldest&{query}")).await.is(200);
    page["jobs"].as_array().expect("jobs").iter().map(|it| it["group"].clone()).collect()
}

#[test]
fn whatever_enqueues_a_job_names_its_group() {
    run(async |t| {
        let job = |group: &str| json!({"job_type": "t", "group": group});
        let first = t.post("/v1/jobs", job("a/1")).await.is(201);
        assert_eq!(first["group"], "a/1");
        let both = json!({"jobs": [job("b"), {"job_type": "t"}]});
        let stored = t.post("/v1/jobs/batch", both).await.is(201);
        assert_eq!(stored["jobs"][0]["group"], "b");
        assert_eq!(stored["jobs"][1]["group"], Value::Null);
        let leased = t.lease("w").await;
        assert_eq!(leased["group"], "a/1", "its worker sees it");
        t.ack(&leased, "w", "succeeded").await.is(200);
        let id = first["id"].as_str().expect("an id");
        assert_eq!(t.get(&format!("/v1/jobs/{id}")).await.is(200)["group"], "a/1", "ended");
        let replayed = t.post(&format!("/v1/jobs/{id}/replay"), json!({})).await.is(201);
        assert_eq!(replayed["group"], "a/1");
        let steps = json!({"jobs": [{"key": "one", "job_type": "t", "group": "c"}]});
        t.post("/v1/workflows", steps).await.is(201);
        assert_eq!(groups(t, "group=c").await, ["c"]);
        let schedule = json!({"job_type": "t", "cron_expression": "0 3 1 1 *", "group": "d"});
        let schedule = t.put("/v1/recurring/yearly", schedule).await.is(200);
        assert_eq!(schedule["group"], "d");
        t.act("/v1/recurring/yearly/run").await.is(201);
        assert_eq!(groups(t, "group=d").await, ["d"]);
        let callback = json!({"job_type": "after", "group": "e", "queue": "later"});
        t.enqueue(json!({"queue": "now", "on_complete": callback})).await;
        let poll = json!({"worker_id": "w", "queues": ["now"], "wait_seconds": 0});
        let job = t.polled(poll).await.remove(0);
        t.ack(&job, "w", "succeeded").await.is(200);
        until("the callback to be stored", async || groups(t, "group=e").await == ["e"]).await;
    });
}

#[test]
fn jobs_are_found_by_their_group() {
    run(async |t| {
        for (group, queue) in [("acme", "mail"), ("acme", "sms"), ("two words", "mail")] {
            t.enqueue(json!({"group": group, "queue": queue})).await;
        }
        t.enqueue(json!({"queue": "mail"})).await;
        assert_eq!(groups(t, "group=acme").await, ["acme", "acme"]);
        assert_eq!(groups(t, "q=group:acme%20queue:sms").await, ["acme"]);
        assert_eq!(groups(t, "q=group:%22two%20words%22").await, ["two words"]);
        assert_eq!(groups(t, "group=none").await, Vec::<Value>::new());
        t.get("/v1/jobs?group=a&q=group:b").await.refuses("q");
        let dry = json!({"filter": {"group": "acme"}, "dry_run": true});
        assert_eq!(t.post("/v1/jobs/cancel", dry).await.is(200)["count"], 2);
        let cancel = json!({"filter": {"group": "acme"}});
        t.post("/v1/jobs/cancel", cancel).await.is(202);
        until("both to be cancelled", async || {
            groups(t, "state=cancelled&group=acme").await.len() == 2
        })
        .await;
        let long = "g".repeat(201);
        for group in ["", &long, "a\u{1}b"] {
            let body = json!({"job_type": "t", "group": group});
            t.post("/v1/jobs", body).await.refuses("group");
            let schedule = json!({"job_type": "t", "cron_expression": "@daily", "group": group});
            t.put("/v1/recurring/daily", schedule).await.refuses("group");
        }
        t.get(&format!("/v1/jobs?group={long}")).await.refuses("group");
        let filter = json!({"filter": {"group": long}});
        t.post("/v1/jobs/cancel", filter).await.refuses("filter.group");
    });
}
