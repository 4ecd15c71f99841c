//! A schedule that fires, and whose jobs do not run, is said to be so.

use serde_json::{Value, json};

use crate::harness::{LoneProject, run_alone, until};

async fn warning(t: &LoneProject) -> Value {
    let read = t.get("/v1/recurring/report").await.is(200)["warning"].clone();
    let listed = t.get("/v1/recurring").await.is(200);
    assert_eq!(listed["recurring"][0]["warning"], read);
    read
}

async fn warns(t: &LoneProject, text: &str) {
    let warning = warning(t).await;
    assert!(warning.as_str().is_some_and(|it| it.contains(text)), "{warning} lacks {text}");
}

#[test]
fn a_schedule_whose_jobs_do_not_run_says_why() {
    run_alone(async |t| {
        let body = json!({
            "job_type": "report", "queue": "reports", "cron_expression": "0 3 * * *",
            "overlap": "skip",
        });
        t.put("/v1/recurring/report", body).await.is(200);
        warns(t, "no live worker polls queue reports for jobs of type report").await;
        let poll = |job_types: Value| {
            json!({
                "worker_id": "w", "queues": ["reports"], "job_types": job_types, "wait_seconds": 0,
            })
        };
        t.polled(poll(json!(["other"]))).await;
        until("the worker to be listed", async || {
            t.get("/v1/workers").await.is(200)["workers"][0]["worker_id"] == "w"
        })
        .await;
        warns(t, "no live worker").await;
        t.polled(poll(json!(["other", "report"]))).await;
        // A read and a list of this moment may differ.
        until("the warning to end", async || {
            t.get("/v1/recurring/report").await.is(200)["warning"].is_null()
        })
        .await;
        t.act("/v1/workers/w/quiet").await.is(200);
        warns(t, "no live worker").await;
        t.act("/v1/workers/w/resume").await.is(200);
        assert_eq!(warning(t).await, Value::Null);
        for (path, body, text) in [
            ("pause", json!({}), "queue reports is paused"),
            ("resume", json!({}), ""),
            ("pause", json!({"job_type": "report"}), "job type report is paused in queue reports"),
            ("resume", json!({"job_type": "report"}), ""),
        ] {
            t.post(&format!("/v1/queues/reports/{path}"), body).await.is(200);
            match text {
                "" => assert_eq!(warning(t).await, Value::Null),
                text => warns(t, text).await,
            }
        }
        let fire = |minutes: u32, outcome: &str| {
            format!(
                "insert into schedule_fires (project_id, schedule_id, tick, outcome)
                 select project_id, id, now() - interval '{minutes} minutes', '{outcome}'
                 from recurring_schedules"
            )
        };
        t.database.execute(&fire(9, "fired")).await;
        t.database.execute(&fire(8, "skipped_overlap")).await;
        assert_eq!(warning(t).await, Value::Null, "one may be chance");
        t.database.execute(&fire(7, "skipped_overlap")).await;
        warns(t, "its last 2 ticks were skipped").await;
        t.act("/v1/recurring/report/pause").await.is(200);
        assert_eq!(warning(t).await, Value::Null, "it does not fire");
        t.act("/v1/recurring/report/resume").await.is(200);
        t.database.execute(&fire(6, "fired")).await;
        assert_eq!(warning(t).await, Value::Null);
    });
}
