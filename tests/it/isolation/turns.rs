//! Projects take turns.

use fencepost::store::sweep;

use crate::harness::{Database, fresh_database, limited};

/// Stores due jobs, without a server that would promote them.
async fn due_jobs(database: &Database, project_id: i32, jobs: i32, age_seconds: i32) {
    database
        .execute(&format!(
            "insert into jobs (
                 project_id, id, queue, job_type, state, rank, run_at, max_attempts, timeout_seconds
             )
             select {project_id}, gen_random_uuid(), 'default', 'test', 'scheduled', 0,
                    now() - make_interval(secs => {age_seconds}), 3, 60
             from generate_series(1, {jobs})"
        ))
        .await;
}

#[test]
fn a_project_with_many_due_jobs_does_not_delay_those_of_others() {
    limited(async {
        let database = fresh_database().await;
        due_jobs(&database, 1, 3_000, 60).await;
        due_jobs(&database, 2, 3, 1).await;
        due_jobs(&database, 7, 400, 30).await;
        let mut conn = database.connect().await;
        let oldest = sweep::find_due(&mut conn).await.expect("it runs");
        assert!(oldest.iter().all(|it| it.project_id.0 == 1), "a full batch of the oldest");
        assert_eq!(oldest.len(), sweep::MAX_SWEEP_ROWS);
        let turns = sweep::find_due_by_turns(&mut conn).await.expect("it runs");
        let of = |project| turns.iter().filter(|it| it.project_id.0 == project).count();
        assert_eq!((of(1), of(2), of(7)), (249, 3, 248));
        assert_eq!(sweep::promote(&mut conn, &turns).await.expect("it runs").len(), turns.len());
    });
}
