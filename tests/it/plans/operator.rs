//! The same for what operators ask and what loops do for them: queues, dead letters, purges,
//! schedules, and forgetting.

use fencepost_domain::operation::Filter;
use fencepost_store::{
    jobs::dead_letters,
    operations,
    queues::counts,
    sweep::{gauges, probe, prune, schedules},
    workers::{self, ALIVE_SECONDS},
};

use super::*;
use sqlx::Connection;

/// 50,000 dead letters of two types, one of them rare; 50,000 finished jobs; 10,000 schedules, of
/// which 100 are due.
async fn fill_more(database: &Database) {
    database
        .execute(
            "insert into jobs (project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                               timeout_seconds, completed_at)
             select 1, gen_random_uuid(), 'dead', case n when 1 then 'rare' else 'common' end,
                    'dead_letter', 0, now(), 3, 600, now() - n * interval '1 s'
             from generate_series(1, 50000) n;
             insert into dead_letters (project_id, job_id, fingerprint, queue, job_type, died_at)
             select 1, id, md5(job_type)::uuid, queue, job_type, completed_at
             from jobs where queue = 'dead';
             insert into finished_jobs (project_id, id, queue, job_type, state, rank, run_at, created_at,
                                        attempt, failures, max_attempts, timeout_seconds, completed_at,
                                        cancel_requested)
             select 1, gen_random_uuid(), 'default', 'common', 'succeeded', 0, now(), now(), 1, 0, 3, 600,
                    now() - n * interval '1 minute', false
             from generate_series(1, 50000) n;
             insert into queue_counts (project_id, queue, active, succeeded, dead_letter)
             values (1, 'default', 100032, 50000, 0), (1, 'dead', 0, 0, 50000);
             insert into retention_dues
             select 1, 'q' || n, now() + n * interval '1 minute'
             from generate_series(1, 50000) n;
             insert into recurring_schedules (project_id, id, job_type, cron_expression, last_tick, next_tick)
             select 1, 's' || n, 't', '@daily', now(),
                    case when n <= 100 then now() else now() + n * interval '1 minute' end
             from generate_series(1, 10000) n",
        )
        .await;
}

#[test]
fn no_question_of_an_operator_scans_a_table_or_reads_more_than_its_bound() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    limited(async {
        let database = fresh_database().await;
        fill(&database).await;
        fill_more(&database).await;
        let pools = Pools::new(&database.url, PoolArgs::default(), None).expect("a URL");
        let conn = &mut *pools.background.acquire().await.expect("a connection");
        let names = ["default".to_owned(), "dead".to_owned()];
        // The first to come by learns what is dead, if no old transaction may see it; the leaves
        // that hold it are read until a vacuum.
        until_dead_is_known(conn).await;
        counts::queues(conn, PROJECT, &names).await.expect("it runs");
        let rows = costs(conn, "queues", 400, async |conn| {
            counts::queues(conn, PROJECT, &names).await.expect("it runs")
        })
        .await;
        assert_eq!((rows[1].active, rows[0].dead_letter), (100_032, 50_000));
        let paused = ["common".to_owned()];
        queue_limits::open_types(conn, PROJECT, "default", &paused).await.expect("it runs");
        let types = costs(conn, "open types", 400, async |conn| {
            queue_limits::open_types(conn, PROJECT, "default", &paused).await.expect("it runs")
        })
        .await;
        assert_eq!(types, ["rare"]);
        costs(conn, "where jobs wait", 335, async |conn| {
            gauges::places(conn, ALIVE_SECONDS).await.expect("it runs")
        })
        .await;
        ask_for_dead_letters(conn).await;
        let found = costs(conn, "step of a purge", 5_000 * 2, async |conn| {
            operations::waiting_jobs(
                conn,
                PROJECT,
                "none",
                Uuid::nil(),
                chrono::DateTime::UNIX_EPOCH,
                100,
            )
            .await
            .expect("it runs")
        })
        .await;
        assert_eq!((found.examined, found.jobs.len()), (operations::MAX_EXAMINED_JOBS, 0));
        forget(conn).await;
        fire(conn).await;
    });
}

async fn ask_for_dead_letters(conn: &mut PgConnection) {
    let rare = Filter { job_type: Some("rare".into()), ..Filter::default() };
    let page = costs(conn, "page of dead letters", 2_000 + 200, async |conn| {
        dead_letters::page(conn, PROJECT, &rare, None, 50).await.expect("it runs")
    })
    .await;
    assert!(page[0].is_match && !page[1].is_match, "the newest is the rare one");
    let batch = costs(conn, "step of a retry", 2_000 + 200, async |conn| {
        let until = chrono::DateTime::from_timestamp(4_000_000_000, 0).expect("a time");
        dead_letters::next_batch(conn, PROJECT, &rare, None, until, 50).await.expect("it runs")
    })
    .await;
    assert!(batch.len() == 1 && !batch[0].is_match, "the rare one is the last");
}

async fn forget(conn: &mut PgConnection) {
    let due = costs(conn, "queues that are due", 40, async |conn| {
        prune::take_due_queues(conn, 7).await.expect("it runs")
    })
    .await;
    assert_eq!(due.len(), 2);
    let due = due.iter().find(|it| it.queue == "default").expect("the queue");
    let pruned = costs(conn, "forgetting", prune::MAX_PRUNED_JOBS as i64 * 23, async |conn| {
        let ids = prune::find_old_jobs(conn, due).await.expect("it runs");
        let ids: Vec<_> = ids.iter().map(|it| it.0).collect();
        prune::prune_jobs(conn, due, &ids).await.expect("it runs")
    })
    .await;
    assert_eq!(pruned.jobs, prune::MAX_PRUNED_JOBS as i64);
}

async fn fire(conn: &mut PgConnection) {
    let seen =
        costs(conn, "glance", 60, async |conn| probe::probe(conn, 3_000).await.expect("it runs"))
            .await;
    assert!(seen.next_tick_ms.is_some_and(|it| it <= 0.0) && !seen.has_unplanned);
    let mut tx = conn.begin().await.expect("it begins");
    let due = schedules::lock_next(&mut tx, 0).await.expect("it runs");
    assert_eq!(due.len(), 100);
    tx.rollback().await.expect("it ends");
    let wait = costs(conn, "next tick", 20, async |conn| {
        schedules::next_tick_ms(conn).await.expect("it runs")
    })
    .await;
    assert!(wait.is_some());
    let outdated = costs(conn, "schedules of old zone rules", 500 * 40, async |conn| {
        schedules::unplan_outdated(conn, "2999a").await.expect("it runs")
    })
    .await;
    assert_eq!(outdated, 500);
    let outdated = costs(conn, "no schedule of old zone rules", 40, async |conn| {
        schedules::unplan_outdated(conn, "").await.expect("it runs")
    })
    .await;
    assert_eq!(outdated, 0);
}

#[test]
fn a_plan_made_while_no_job_was_due_reads_due_jobs_by_their_keys() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    limited(async {
        let database = fresh_database().await;
        let pools = Pools::new(&database.url, PoolArgs::default(), None).expect("a URL");
        let conn = &mut *pools.promote.acquire().await.expect("a connection");
        assert!(sweep::promote(conn, &[]).await.expect("it runs").is_empty());
        fill(&database).await;
        database.execute("update jobs set run_at = now() where queue = 'later'").await;
        let due = sweep::find_due(conn).await.expect("it runs");
        let promoted = costs(conn, "promote", due.len() as i64 * 50, async |conn| {
            sweep::promote(conn, &due).await.expect("it runs")
        })
        .await;
        assert_eq!(promoted.len(), sweep::MAX_DUE_ROWS);
    });
}

/// A worker that has sent no heartbeat for a minute, and got its leases since.
pub async fn look_at_silent_worker(conn: &mut PgConnection) {
    const SILENCE_SECONDS: i32 = 60;
    conn.execute(
        "insert into workers (project_id, worker_id, queues, job_types, concurrency, last_seen_at,
                              last_beat_at)
         values (1, 'w', '{gated}', '{}', 1, now() - interval '1 h', now() - interval '1 h')",
    )
    .await
    .expect("it runs");
    let held = costs(conn, "leases of a silent worker", 600 * 5, async |conn| {
        let silence = Some(SILENCE_SECONDS);
        settle_failure::lock_held_by(conn, PROJECT, "w", 500, silence).await.expect("it runs")
    })
    .await;
    assert_eq!(held.len(), 0);
    let is_lost = costs(conn, "a worker that may be lost", 600 * 5, async |conn| {
        workers::mark_lost(conn, PROJECT, "w", SILENCE_SECONDS).await.expect("it runs")
    })
    .await;
    assert!(!is_lost);
}
