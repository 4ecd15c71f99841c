//! How much of a project the loop over the ends of jobs takes.

use fencepost_store::sweep::completions;
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection};

use super::{callbacks, end, lease_from, with};
use crate::harness::{TestServer, fresh_database, limited, run_alone};

#[test]
fn ends_with_callbacks_wait_while_their_project_has_all_jobs_that_it_may() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (full, other) = (server.project("full").await, server.project("other").await);
        let more = with(json!({"queue": "q"}), &callbacks());
        full.enqueue(more.clone()).await;
        for _ in 0..2 {
            full.enqueue(json!({"queue": "rest"})).await;
        }
        let allow = async |jobs: i32| {
            let set = format!(
                "update projects set plan = 'free', overrides = '{{\"waiting_jobs\": {jobs}}}'
                 where slug = 'full'"
            );
            full.database.execute(&set).await;
        };
        allow(2).await;
        end(&full, "q", "succeeded").await;
        other.enqueue(more).await;
        end(&other, "q", "succeeded").await;
        lease_from(&other, "success").await;
        // The pass that stored these has met the other end, too.
        let left = "select count(*) from job_ends join projects on projects.id = project_id
                    where slug = 'full'";
        assert_eq!(full.database.number(left).await, 1);
        allow(3).await;
        lease_from(&full, "success").await;
        server.stop().await;
    });
}

#[test]
fn an_end_with_many_callbacks_takes_as_much_of_a_pass_as_many_ends() {
    run_alone(async |t| {
        let mut conn = t.database.connect().await;
        let store = |bytes: usize| {
            format!(
                "insert into job_ends (project_id, callbacks)
                 select id, repeat('x', {bytes}) from projects where slug = 'main'"
            )
        };
        let mut tx = conn.begin().await.expect("a transaction");
        for bytes in [20_000, 20_000, 10] {
            sqlx::query(AssertSqlSafe(store(bytes))).execute(&mut *tx).await.expect("it runs");
        }
        let found = completions::find(&mut tx).await.expect("it runs");
        assert_eq!(found.len(), 2, "the second exceeds what a pass takes");
        tx.rollback().await.expect("it is undone");
    });
}
