//! What the choice of URLs reads while there are more than a node can serve: each target once, and
//! of the counts of queues those of the targets alone.

use fencepost_domain::ids::NodeId;
use fencepost_store::sweep::{pushes::pushed_queues, webhooks::served_endpoints};

use super::*;

/// Projects, each with three pushed queues and three endpoints.
const PROJECTS: i64 = 2_000;
/// Pages of the counts that the look-up of one target may read: three levels of the index, and the
/// row.
const PAGES_OF_A_LOOKUP: i64 = 6;

/// And 200,000 queues with counts, of which no one asks.
async fn fill_targets(database: &Database) {
    database
        .execute(&format!(
            "insert into projects (public_id, slug, name, plan, mode)
             select gen_random_uuid(), 'target-' || n, 'p', 'unlimited', 'live'
             from generate_series(1, 2 * {PROJECTS}) n;
             insert into queue_pushes (
                 project_id, queue, url, timeout_seconds, max_in_flight, secret
             )
             select project_id, 'q' || n, 'https://example.com', 30, 10, repeat('s', 32)::bytea
             from generate_series(1, {PROJECTS}) project_id, generate_series(1, 3) n;
             insert into outboxes (project_id, outbox_id)
             select n, {PROJECTS} + n from generate_series(1, {PROJECTS}) n;
             insert into webhook_endpoints (
                 project_id, id, url, events, event_types, queues, job_types, max_in_flight,
                 timeout_seconds, secret
             )
             select project_id, gen_random_uuid(), 'https://example.com', '{{*}}', '{{}}', '{{}}',
                    '{{}}', 10, 30, repeat('s', 32)::bytea
             from generate_series(1, {PROJECTS}) project_id, generate_series(1, 3) n;
             insert into queue_counts (project_id, queue, active)
             select project_id, 'n' || n, 1
             from generate_series(1, {PROJECTS}) project_id, generate_series(1, 100) n;
             insert into queue_counts (project_id, queue, active)
             select n, 'q1', 1 from generate_series(1, 10) n"
        ))
        .await;
}

/// Sequential scans of the counts, and pages of them that were read.
async fn reads(conn: &mut PgConnection) -> (i64, i64) {
    conn.execute("select pg_stat_force_next_flush()").await.expect("it runs");
    conn.execute("select 1").await.expect("it runs");
    sqlx::query_as(
        "select seq_scan,
                coalesce(heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read, 0)
         from pg_stat_user_tables join pg_statio_user_tables using (relid, relname)
         where relname = 'queue_counts'",
    )
    .fetch_one(conn)
    .await
    .expect("the statistics")
}

#[test]
fn the_choice_of_urls_looks_up_the_counts_of_targets_alone() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    limited(async {
        let database = fresh_database().await;
        fill_targets(&database).await;
        let pools = Pools::new(&database.url, PoolArgs::default(), None).expect("a URL");
        let conn = &mut *pools.background.acquire().await.expect("a connection");
        let node = NodeId::generate();
        // The first plan of a connection reads more.
        pushed_queues(conn, node, 1).await.expect("it runs");
        served_endpoints(conn, node, 1).await.expect("it runs");

        let before = reads(conn).await;
        let queues = pushed_queues(conn, node, 4_000).await.expect("it runs");
        let after = reads(conn).await;
        assert_eq!(queues.len(), 4_000);
        let with_jobs = queues.iter().filter(|it| it.queue == "q1" && it.project_id.0 <= 10);
        assert_eq!(with_jobs.count(), 10, "those with jobs go first");
        assert_eq!(after.0, before.0, "the counts are scanned");
        let pages = after.1 - before.1;
        assert!(pages <= 3 * PROJECTS * PAGES_OF_A_LOOKUP, "{pages} pages for pushed queues");

        let endpoints = served_endpoints(conn, node, 4_000).await.expect("it runs");
        let done = reads(conn).await;
        assert_eq!(endpoints.len(), 4_000);
        assert_eq!(done.0, after.0, "the counts are scanned");
        let pages = done.1 - after.1;
        assert!(pages <= PROJECTS * PAGES_OF_A_LOOKUP, "{pages} pages for endpoints");
    });
}
