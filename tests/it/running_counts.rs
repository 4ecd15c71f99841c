//! The number of running jobs, where they are too many to be counted one by one.

use fencepost_domain::limits::{MAX_ENQUEUE_BATCH_JOBS, MAX_POLL_CAPACITY};
use fencepost_engine::maintenance::counts;
use fencepost_store::queues::counts::MAX_COUNTED_PROCESSING;
use serde_json::{Value, json};

use crate::harness::{LoneProject, run_alone, until};

/// Jobs beyond those that are counted one by one.
const MORE: i64 = 2_000;
/// Jobs that wait behind them.
const WAITING: i64 = 300;

/// Pending and running jobs, as the queue and as the whole project shows them.
async fn shown(t: &LoneProject) -> [Value; 2] {
    let queue = t.get("/v1/queues/default").await.is(200);
    let all = t.get("/v1/metrics/summary").await.is(200);
    [&queue["counts"], &all["current"]].map(|it| json!([it["pending"], it["processing"]]))
}

#[test]
fn counts_of_running_jobs_are_exact_at_any_number() {
    run_alone(async |t| {
        let running = MAX_COUNTED_PROCESSING + MORE;
        let batch = MAX_ENQUEUE_BATCH_JOBS as i64;
        let mut left = running + WAITING;
        while left > 0 {
            let jobs = vec![json!({"job_type": "t"}); left.min(batch) as usize];
            t.post("/v1/jobs/batch", json!({ "jobs": jobs })).await.is(201);
            left -= batch;
        }
        let (mut claimed, mut held) = (0, Vec::new());
        while claimed < running {
            let jobs = t.poll("w", MAX_POLL_CAPACITY).await;
            claimed += jobs.len() as i64;
            held = jobs;
        }
        assert_eq!(claimed, running, "the capacity divides it");
        assert_eq!(shown(t).await, [json!([WAITING, running]), json!([WAITING, running])]);
        for (job, status) in held.iter().zip(["succeeded", "failed", "released"]) {
            t.ack(job, "w", status).await.is(200);
        }
        let (pending, running) = (WAITING + 2, running - 3);
        assert_eq!(shown(t).await, [json!([pending, running]), json!([pending, running])]);

        // A version that counts no running jobs has claimed and ended some, and merged counts.
        let merged = "select count(*) from unmerged_deltas";
        t.database.until(merged, 0).await;
        t.database.execute("update queue_counts set processing = 7").await;
        let wrong = shown(t).await;
        assert_ne!(wrong[0], json!([pending, running]), "the counter is what is shown");
        let engine = t.database.engine();
        for _ in 0..2 {
            // At first also when the server itself walks.
            until("a walk to end", async || {
                !counts::correct(&engine, -1.0).await.expect("no error")
                    && shown(t).await[0] == json!([pending, running])
            })
            .await;
            assert_eq!(shown(t).await, [json!([pending, running]), json!([pending, running])]);
        }
    });
}
