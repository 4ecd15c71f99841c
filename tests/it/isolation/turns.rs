//! Projects take turns.

use fencepost_store::sweep;

use std::time::{Duration, Instant};

use crate::harness::{Database, TestProject, TestServer, fresh_database, limited};
use serde_json::json;

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
        assert_eq!(oldest.len(), sweep::MAX_DUE_ROWS);
        let turns = sweep::find_due_by_turns(&mut conn).await.expect("it runs");
        let of = |project| turns.iter().filter(|it| it.project_id.0 == project).count();
        assert_eq!((of(1), of(2), of(7)), (sweep::MAX_TURN_ROWS, 3, sweep::MAX_TURN_ROWS));
        assert_eq!(sweep::promote(&mut conn, &turns).await.expect("it runs").len(), turns.len());
    });
}

/// Parks a poll. Returns when it was answered, with one job.
fn parked(t: &TestProject) -> tokio::task::JoinHandle<Instant> {
    let t = t.clone();
    tokio::spawn(async move {
        let poll = json!({"worker_id": "w", "queues": ["q"], "wait_seconds": 20});
        assert_eq!(t.polled(poll).await.len(), 1);
        Instant::now()
    })
}

#[test]
fn a_slow_claim_delays_no_other_of_the_same_flight() {
    const SLOW: Duration = Duration::from_secs(3);
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (slow, other) = (server.project("slow").await, server.project("other").await);
        let (slow_poll, other_poll) = (parked(&slow), parked(&other));
        server.database.until_at_least("select count(distinct project_id) from workers", 2).await;
        // Stored without a hint, so that the next look for work finds both at once.
        server
            .database
            .execute(&format!(
                "create function linger() returns trigger language plpgsql as $$
                 begin
                     perform pg_sleep({});
                     return new;
                 end $$;
                 create trigger linger before update on jobs for each row
                 when (new.state = 'processing' and new.constraint_key is not null)
                 execute function linger();
                 with new as (
                     insert into jobs (
                         project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                         timeout_seconds, constraint_key
                     )
                     select id, gen_random_uuid(), 'q', 't', 'pending', 0, now(), 3, 60,
                            case slug when 'slow' then gen_random_uuid() end
                     from projects
                     where slug in ('slow', 'other')
                     returning project_id, id
                 )
                 insert into job_bodies (project_id, job_id, payload)
                 select project_id, id, '1' from new",
                SLOW.as_secs()
            ))
            .await;
        let answered = other_poll.await.expect("an answer");
        let waited = slow_poll.await.expect("an answer") - answered;
        assert!(waited > SLOW / 2, "the other was answered {waited:?} before");
        server.stop().await;
    });
}
