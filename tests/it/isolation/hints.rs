//! What happens when a node misses a hint.

use crate::harness::run;
use serde_json::json;

#[test]
fn a_rate_limit_that_was_lifted_without_a_hint_does_not_keep_a_poll_waiting() {
    run(async |t| {
        let limit = json!({"rate_limit": {"count": 1, "per_seconds": 86_400}});
        t.patch("/v1/queues/default", limit).await.is(200);
        for _ in 0..2 {
            t.enqueue(json!({})).await;
        }
        t.lease("w").await;
        let poll = json!({"worker_id": "w", "queues": ["default"], "wait_seconds": 20});
        let waiting = {
            let t = t.clone();
            tokio::spawn(async move { t.polled(poll).await })
        };
        // A claim has found the limit used up: it has locked the queue's rules.
        let asked = "select count(*) from pg_stat_activity
                     where pid <> pg_backend_pid() and query like '%queue_handouts%'";
        while t.database.number(asked).await == 0 {}
        t.database
            .execute("update queues set rate_limit_count = null, rate_limit_per_seconds = null")
            .await;
        assert_eq!(waiting.await.expect("an answer").len(), 1);
    });
}
