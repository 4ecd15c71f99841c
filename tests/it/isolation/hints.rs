//! What happens when a node misses a hint.

use crate::harness::run_alone;
use serde_json::json;

#[test]
fn a_rate_limit_that_was_lifted_without_a_hint_does_not_keep_a_poll_waiting() {
    run_alone(async |t| {
        let limit = json!({"rate_limit": {"count": 1, "per_seconds": 86_400}});
        t.patch("/v1/queues/default", limit).await.is(200);
        for _ in 0..2 {
            t.enqueue(json!({})).await;
        }
        t.lease("w").await;
        // The claim reads the limit, and then waits for what was claimed under it.
        let mut holder = t.database.connect().await;
        for sql in ["begin", "lock table queue_handouts in access exclusive mode"] {
            sqlx::query(sql).execute(&mut holder).await.expect("it runs");
        }
        let poll = json!({"worker_id": "w", "queues": ["default"], "wait_seconds": 20});
        let waiting = {
            let t = t.clone();
            tokio::spawn(async move { t.polled(poll).await })
        };
        let asks = "select count(*) from pg_stat_activity
                    where datname = current_database() and wait_event_type = 'Lock'
                        and query like '%statement_timestamp()%'";
        t.database.until_at_least(asks, 1).await;
        t.database
            .execute("update queues set rate_limit_count = null, rate_limit_per_seconds = null")
            .await;
        sqlx::query("commit").execute(&mut holder).await.expect("it runs");
        assert_eq!(waiting.await.expect("an answer").len(), 1);
    });
}
