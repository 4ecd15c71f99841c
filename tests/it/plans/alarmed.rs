//! Alarms begin from what exists: each kind of trouble is found beside 20,000 projects with nothing
//! to look at, and these are not read.

use fencepost_store::sweep::alarmed_projects;

use super::*;

/// Projects with old dead letters and missed ticks, jobs for later, keys, endpoints and pushes.
const IDLE_PROJECTS: i32 = 20_000;
/// Tables that alarms look in.
const TABLES: &[&str] = &[
    "jobs",
    "job_bodies",
    "incidents",
    "dead_letter_groups",
    "queue_types",
    "schedule_fires",
    "webhook_endpoints",
    "queue_pushes",
    "api_keys",
    "alarms",
    "projects",
];
/// Pages that all look-ups together may read.
const MAX_PAGES: i64 = 150;

/// Each project has one row of all that may make trouble, and none does.
async fn fill_idle(database: &Database) {
    let n = IDLE_PROJECTS;
    let statements = [
        format!(
            "insert into projects (public_id, slug, name, plan, mode)
             select gen_random_uuid(), 'idle-' || n, 'p', 'unlimited', 'live'
             from generate_series(1, {n}) n"
        ),
        format!(
            "insert into jobs (project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                               timeout_seconds)
             select n, gen_random_uuid(), 'default', 't', 'scheduled', 0,
                    now() + interval '1 day', 3, 600
             from generate_series(1, {n}) n"
        ),
        "insert into job_bodies (project_id, job_id, payload)
         select project_id, id, 'null' from jobs"
            .to_owned(),
        format!(
            "insert into incidents (project_id, id, alarm, rule, subject, details, mail_to,
                                    resolved_at)
             select n, gen_random_uuid(), 'a', 'dead_letters', 's', '{{}}', 'none', now()
             from generate_series(1, {n}) n"
        ),
        format!(
            "insert into dead_letter_groups (project_id, fingerprint, job_type, sample_job_id,
                                             last_seen_at)
             select n, gen_random_uuid(), 't', gen_random_uuid(), now() - interval '61 minutes'
             from generate_series(1, {n}) n"
        ),
        format!(
            "insert into queue_types (project_id, queue, job_type, streak)
             select n, 'default', 't', 1 from generate_series(1, {n}) n"
        ),
        format!(
            "insert into schedule_fires (project_id, schedule_id, tick, outcome, at)
             select n, 's', now(), 'missed', now() - interval '11 minutes'
             from generate_series(1, {n}) n"
        ),
        format!(
            "insert into webhook_endpoints (project_id, id, url, events, event_types, queues,
                                            job_types, max_in_flight, timeout_seconds, secret)
             select n, gen_random_uuid(), 'https://example.com', '{{}}', '{{}}', '{{}}', '{{}}', 1,
                    1, repeat('s', 32)::bytea
             from generate_series(1, {n}) n"
        ),
        format!(
            "insert into queue_pushes (project_id, queue, url, timeout_seconds, max_in_flight,
                                       secret)
             select n, 'default', 'https://example.com', 1, 1, repeat('s', 32)::bytea
             from generate_series(1, {n}) n"
        ),
        format!(
            "insert into api_keys (project_id, id, name, secret_hash, shown_prefix, shown_end,
                                   scopes, expires_at)
             select n, gen_random_uuid(), 'k', sha256(n::text::bytea), 'fp', 'xx', '{{}}',
                    case when n % 2 = 0 then now() + interval '20 days' end
             from generate_series(1, {n}) n"
        ),
        format!(
            "insert into alarms (project_id, name, rule, threshold, for_seconds)
             select n, 'dead_letters', 'dead_letters', 5, 60 from generate_series(1, {n}) n"
        ),
    ];
    for statement in statements {
        database.execute(&statement).await;
    }
}

/// Statements that make trouble, in one project each.
const TROUBLES: &[(&str, &str)] = &[
    ("a ready job", "update jobs set state = 'pending', run_at = now() where project_id = $"),
    (
        "a ready job with a constraint",
        "update jobs set state = 'pending', run_at = now(), constraint_key = gen_random_uuid()
         where project_id = $",
    ),
    (
        "a job that waits for its group",
        "update jobs
         set group_key = 'a', group_place = 1, waits_for_group = true, unfinished_parents = 1
         where project_id = $",
    ),
    (
        "a running job",
        "update jobs
         set state = 'processing', attempt = 1, lease_id = gen_random_uuid(), worker_id = 'w',
             claimed_at = now(), lease_seconds = 300, lease_expires_at = now() + interval '300 s'
         where project_id = $",
    ),
    (
        "a job that was lost again",
        "update job_bodies set lost_again_at = now() where project_id = $",
    ),
    ("an open incident", "update incidents set resolved_at = null where project_id = $"),
    (
        "a new dead letter",
        "update dead_letter_groups set last_seen_at = now() where project_id = $",
    ),
    (
        "a paused type",
        "update queue_types set paused_at = now(), paused_by = 'brake' where project_id = $",
    ),
    ("a missed tick", "update schedule_fires set at = now() where project_id = $"),
    (
        "a disabled endpoint",
        "update webhook_endpoints set disabled_at = now(), disabled_reason = 'failing'
         where project_id = $",
    ),
    ("a dropped event", "update webhook_endpoints set dropped_at = now() where project_id = $"),
    ("a push that fails", "update queue_pushes set failing_since = now() where project_id = $"),
    (
        "a key that expires",
        "update api_keys set expires_at = now() + interval '10 days' where project_id = $",
    ),
    (
        "a key that expires for its own alarm",
        "insert into alarms (project_id, name, rule, threshold, for_seconds)
         values ($, 'key_expiring', 'key_expiring', 30, 0)",
    ),
];

/// Sequential scans of each table that alarms look in, and pages of it that were read.
async fn reads(conn: &mut PgConnection) -> BTreeMap<String, (i64, i64)> {
    conn.execute("select pg_stat_force_next_flush()").await.expect("it runs");
    conn.execute("select 1").await.expect("it runs");
    let rows = sqlx::query_as::<_, (String, i64, i64)>(
        "select relname::text, seq_scan,
                (coalesce(heap_blks_hit + heap_blks_read, 0)
                    + coalesce(idx_blks_hit + idx_blks_read, 0))::bigint
         from pg_stat_user_tables join pg_statio_user_tables using (relid, relname)
         where relname = any($1)",
    )
    .bind(TABLES)
    .fetch_all(conn)
    .await
    .expect("the statistics");
    rows.into_iter().map(|(table, scans, pages)| (table, (scans, pages))).collect()
}

#[test]
fn alarms_find_each_trouble_and_read_no_idle_project() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    limited(async {
        let database = fresh_database().await;
        fill_idle(&database).await;
        let in_trouble: Vec<_> = (1..).map(|it| it * 1_000).zip(TROUBLES).collect();
        for (project, (_, trouble)) in &in_trouble {
            database.execute(&trouble.replace('$', &project.to_string())).await;
        }
        let pools = Pools::new(&database.url, PoolArgs::default(), None).expect("a URL");
        let conn = &mut *pools.background.acquire().await.expect("a connection");
        // The first plan of a connection reads more, and the first reader marks what is dead.
        until_dead_is_known(conn).await;
        alarmed_projects::find(conn, ProjectId(0)).await.expect("it runs");

        let before = reads(conn).await;
        let found = alarmed_projects::find(conn, ProjectId(0)).await.expect("it runs");
        let after = reads(conn).await;
        for (project, (trouble, _)) in &in_trouble {
            assert!(found.contains(&ProjectId(*project)), "{trouble} is not found");
        }
        assert_eq!(found.len(), TROUBLES.len(), "{found:?}");
        let used = |table: &String, (scans, pages): (i64, i64)| {
            let (scans_before, pages_before) = before[table];
            (scans - scans_before, pages - pages_before)
        };
        let used: BTreeMap<_, _> =
            after.iter().map(|(table, it)| (table.as_str(), used(table, *it))).collect();
        assert!(used.values().all(|it| it.0 == 0), "a table is scanned: {used:?}");
        let pages: i64 = used.values().map(|it| it.1).sum();
        assert!(pages <= MAX_PAGES, "{pages} pages: {used:?}");

        let later = alarmed_projects::find(conn, ProjectId(2_000)).await.expect("it runs");
        assert_eq!(later, found[2..], "in their order, after the one that is named");
    });
}
