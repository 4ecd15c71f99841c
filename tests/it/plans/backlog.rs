//! What statements that serve all tenants read while one of them has a backlog.

use std::sync::PoisonError;

use fencepost_store::sweep;

use super::{ONE_AT_A_TIME, costs};
use crate::harness::{fresh_database, limited};

#[test]
fn due_jobs_of_a_small_project_are_found_beside_a_large_backlog() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    limited(async {
        let database = fresh_database().await;
        for (project_id, jobs, age) in [(1, 50_000, 60), (2, 30, 60), (2, 50_000, -600)] {
            let statement = format!(
                "insert into jobs (
                     project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                     timeout_seconds
                 )
                 select {project_id}, gen_random_uuid(), 'default', 'test', 'scheduled', 0,
                        now() - interval '{age} s', 3, 60
                 from generate_series(1, {jobs})"
            );
            database.execute(&statement).await;
        }
        database.execute("vacuum (analyze) jobs").await;
        let mut conn = database.connect().await;
        let due = costs(&mut conn, "find due by turns", 400, async |conn| {
            sweep::find_due_by_turns(conn).await.expect("it runs")
        })
        .await;
        assert_eq!(due.iter().filter(|it| it.project_id.0 == 2).count(), 30);
    });
}
