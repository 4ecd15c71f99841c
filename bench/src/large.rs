//! A large instance, made by SQL in minutes: what it costs while nothing happens, and how long
//! pages and loops take, before and after.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use sqlx::{Connection, Executor, PgConnection};

use super::{
    client::{Client, Target},
    operator,
    process::Watched,
    report::{Measure, plain},
    retention, scrape,
};

/// Queues, schedules and finished jobs for each project.
const QUEUES: u32 = 10;
const SCHEDULES: u32 = 10;
const FINISHED: u32 = 100;
/// Half of the finished jobs belong to the project whose pages are read.
const OWN_PART: u32 = 2;
/// Rows of one statement that fills a table.
const FILL_ROWS: u32 = 500_000;
/// Time for which an idle server is observed.
const IDLE_TIME: Duration = Duration::from_secs(60);
/// Caches and statistics settle before.
const SETTLE_TIME: Duration = Duration::from_secs(15);
/// Reads of each page.
const READS: usize = 9;
/// Loops that are printed: those that take longest.
const SHOWN_LOOPS: usize = 6;
/// The loop that deletes finished jobs.
const RETENTION_LOOP: &str = "retention";

/// Pages that people open first.
const PAGES: &[(&str, &str)] = &[
    ("queues", "/v1/queues"),
    ("jobs", "/v1/jobs?limit=50"),
    ("jobs of a common type", "/v1/jobs?job_type=t3&limit=50"),
    ("jobs of a type that none has", "/v1/jobs?job_type=none&limit=50"),
    ("jobs with a tag that none has", "/v1/jobs?tag=none:none&limit=50"),
    ("dead letters", "/v1/dead-letters"),
    ("schedules", "/v1/recurring"),
];

/// Measures a server while it is empty, fills it with this many projects, and measures it again.
///
/// # Errors
/// When the server or the database does not answer.
pub async fn measure(
    target: &Target,
    watched: &Watched,
    metrics_url: &str,
    projects: u32,
) -> anyhow::Result<Vec<Measure>> {
    let mut measures = observe(target, watched, metrics_url, "empty").await?;
    let mut conn = operator::connect(&watched.database_url).await?;
    // Rows as they are after months: triggers would count each as new.
    conn.execute("set session_replication_role = replica").await?;
    let started = Instant::now();
    fill(&mut conn, projects).await?;
    measures.push(plain("loaded in", started.elapsed().as_secs_f64(), "s"));
    measures.extend(sizes(&mut conn).await?);
    conn.close().await?;
    measures.extend(observe(target, watched, metrics_url, "large").await?);
    measures.extend(retention::measure(target, watched, metrics_url).await?);
    Ok(measures)
}

async fn fill(conn: &mut PgConnection, projects: u32) -> anyhow::Result<()> {
    let n = i64::from(projects);
    let run = async |conn: &mut PgConnection, sql: &'static str, rows: i64| {
        sqlx::query(sql).bind(rows).execute(conn).await
    };
    run(
        conn,
        "insert into projects (public_id, slug, name, plan, mode)
         select gen_random_uuid(), 'large-' || n, 'Project ' || n, 'free', 'live'
         from generate_series(1, $1) n",
        n,
    )
    .await?;
    run(
        conn,
        "insert into api_keys (project_id, id, name, secret_hash, shown_prefix, shown_end, scopes)
         select id, gen_random_uuid(), 'k', sha256(public_id::text::bytea), 'fp_live_x', 'zz',
                '{produce,work}'
         from (select id, public_id from projects where slug like 'large-%' limit $1) large",
        n,
    )
    .await?;
    for sql in [
        "insert into queue_counts (project_id, queue, succeeded, updated_at)
         select first.id + n % first.projects, 'q' || n / first.projects, 5, now() - interval '2 days'
         from (
             select min(id) as id, count(*) as projects from projects where slug like 'large-%'
         ) first, generate_series(0, $1 - 1) n",
        "insert into retention_dues (project_id, queue, due_at)
         select first.id + n % first.projects, 'q' || n / first.projects,
                now() + interval '1 day' + n % 518400 * interval '1 s'
         from (
             select min(id) as id, count(*) as projects from projects where slug like 'large-%'
         ) first, generate_series(0, $1 - 1) n",
    ] {
        run(conn, sql, n * i64::from(QUEUES)).await?;
    }
    run(
        conn,
        "insert into recurring_schedules (project_id, id, job_type, cron_expression, next_tick)
         select first.id + n % first.projects, 's' || n / first.projects, 't', '0 3 1 1 *',
                now() + interval '40 days'
         from (
             select min(id) as id, count(*) as projects from projects where slug like 'large-%'
         ) first, generate_series(0, $1 - 1) n",
        n * i64::from(SCHEDULES),
    )
    .await?;
    fill_jobs(conn, projects * FINISHED).await?;
    conn.execute("vacuum analyze").await?;
    conn.execute("checkpoint").await?;
    Ok(())
}

/// Half of the jobs belong to the first project, and a tenth of them have a tag.
async fn fill_jobs(conn: &mut PgConnection, jobs: u32) -> anyhow::Result<()> {
    let mut from = 0;
    while from < jobs {
        let until = jobs.min(from + FILL_ROWS);
        let sql = "
            with place as materialized (
                select min(id) filter (where slug not like 'large-%' and kind = 'user') as own,
                       min(id) filter (where slug like 'large-%') as first,
                       count(*) filter (where slug like 'large-%') as projects
                from projects
            ), job as materialized (
                select case when n % $3 = 0 then own else first + n % projects end as project_id,
                       -- In the order of their ids, as they were stored.
                       (lpad(to_hex((extract(epoch from now()) * 1000)::bigint
                           - 604800000 + n * 500000000 / $4), 12, '0') || '7000' || '8000'
                           || lpad(to_hex(n), 12, '0'))::uuid as id,
                       n
                from place, generate_series($1, $2 - 1) n
            ), finished as (
                insert into finished_jobs (
                    project_id, id, queue, job_type, state, rank, run_at, created_at, attempt,
                    failures, max_attempts, timeout_seconds, cancel_requested, lease_id, worker_id,
                    claimed_at, completed_at, duration_ms, result
                )
                select project_id, id, 'q' || n % 10, 't' || n % 10, 'succeeded', 0,
                       now() - interval '2 days', now() - interval '2 days', 1, 0, 3, 1800, false,
                       gen_random_uuid(), 'w' || n % 50, now() - interval '2 days',
                       now() - interval '2 days', 12, '{\"ok\":true}'
                from job
            )
            insert into job_bodies (project_id, job_id, payload, tags)
            select project_id, id,
                   '{\"n\":1,\"text\":\"0123456789012345678901234567890123456789\"}',
                   case when n % 10 = 0 then jsonb_build_object('customer', 'c' || n % 1000) end
            from job";
        let mut insert = sqlx::query(sql);
        for number in [from, until, OWN_PART, jobs] {
            insert = insert.bind(i64::from(number));
        }
        insert.execute(&mut *conn).await?;
        from = until;
    }
    Ok(())
}

/// Bytes of a row, with its part of the indexes.
async fn sizes(conn: &mut PgConnection) -> anyhow::Result<Vec<Measure>> {
    let tables = [
        ("finished job", "finished_jobs"),
        ("body of a job", "job_bodies"),
        ("schedule", "recurring_schedules"),
        ("project", "projects"),
        ("key", "api_keys"),
        ("queue", "queue_counts"),
    ];
    let mut measures = Vec::new();
    for (name, table) in tables {
        let bytes: f64 = sqlx::query_scalar(
            "select pg_total_relation_size(oid) / greatest(reltuples, 1)
             from pg_class where oid = $1::text::regclass",
        )
        .bind(table)
        .fetch_one(&mut *conn)
        .await?;
        measures.push(plain(format!("size of a {name}, with indexes"), bytes, "bytes"));
    }
    let bytes: f64 = sqlx::query_scalar("select pg_database_size(current_database())::float8")
        .fetch_one(&mut *conn)
        .await?;
    measures.push(plain("size of the database", bytes / 1024.0 / 1024.0 / 1024.0, "GiB"));
    Ok(measures)
}

async fn observe(
    target: &Target,
    watched: &Watched,
    metrics_url: &str,
    label: &str,
) -> anyhow::Result<Vec<Measure>> {
    tokio::time::sleep(SETTLE_TIME).await;
    let (before, steps) = (watched.usage().await?, loops(metrics_url).await?);
    let started = Instant::now();
    tokio::time::sleep(IDLE_TIME).await;
    let used = watched.usage().await?.since(before);
    let percent = |seconds: f64| seconds / started.elapsed().as_secs_f64() * 100.0;
    let mut measures = vec![
        plain(format!("{label}, idle: server"), percent(used.server_seconds), "% of a core"),
        plain(format!("{label}, idle: PostgreSQL"), percent(used.postgres_seconds), "% of a core"),
    ];
    let mut took: Vec<_> = loops(metrics_url).await?.into_iter().collect();
    for (name, seconds) in &mut took {
        *seconds -= steps.get(name).copied().unwrap_or_default();
    }
    if let Some((_, seconds)) = took.iter().find(|it| it.0 == RETENTION_LOOP) {
        let minutes = started.elapsed().as_secs_f64() / 60.0;
        let name = format!("{label}, idle: retention, a minute");
        measures.push(plain(name, seconds * 1_000.0 / minutes, "ms"));
    }
    took.sort_by(|a, b| b.1.total_cmp(&a.1));
    for (name, seconds) in took.into_iter().take(SHOWN_LOOPS) {
        let name = format!("{label}, idle: loop {name}");
        measures.push(plain(name, percent(seconds), "% of the time"));
    }
    for (name, path) in PAGES {
        // The server closes connections that are idle for so much time.
        let mut client = Client::connect(target).await?;
        let mut times = Vec::with_capacity(READS);
        for _ in 0..READS {
            let started = Instant::now();
            client.get(path).await?;
            times.push(started.elapsed().as_secs_f64() * 1_000.0);
        }
        times.sort_by(f64::total_cmp);
        measures.push(plain(format!("{label}: {name}, median"), times[READS / 2], "ms"));
    }
    Ok(measures)
}

/// Seconds that each loop has taken so far.
async fn loops(metrics_url: &str) -> anyhow::Result<BTreeMap<String, f64>> {
    let sums = scrape::lines(metrics_url, "fencepost_loop_duration_seconds_sum").await?;
    let named = sums.into_iter().filter_map(|(labels, seconds)| {
        let name = labels.split("loop=\"").nth(1)?.split('"').next()?;
        Some((name.to_owned(), seconds))
    });
    Ok(named.collect())
}
