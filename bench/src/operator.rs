//! What operators wait for: a queue with very many jobs, and schedules that fire in the same
//! minute.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use sqlx::{ConnectOptions, Connection, Executor, PgConnection, postgres::PgConnectOptions};

use super::{
    client::{Client, Target},
    report::{Measure, plain},
};

/// Schedules that fire in the same minute.
const SCHEDULES: u32 = 10_000;
/// Measured reads of a queue.
const READS: usize = 200;
/// Jobs of one statement that fills a queue.
const FILL_JOBS: u64 = 500_000;
/// How often it is checked which ticks have fired.
const LOOK_PERIOD: Duration = Duration::from_millis(2);
/// All schedules must have fired within this.
const FIRE_TIMEOUT: Duration = Duration::from_secs(90);

/// Lateness of schedules of one minute, and reading a queue with this many jobs.
///
/// # Errors
/// When the server or the database does not answer.
pub async fn measure(
    target: &Target,
    database_url: &str,
    [schedules, large]: &[String; 2],
    jobs: u64,
) -> anyhow::Result<Vec<Measure>> {
    let late = fire(target, database_url, schedules, SCHEDULES).await?;
    let read = read_queue(target, database_url, large, jobs).await?;
    Ok(vec![
        plain("10,000 schedules of a minute: late, p50", late.0, "ms"),
        plain("10,000 schedules of a minute: late, p99", late.1, "ms"),
        plain("read a queue with many jobs, p50", read.0, "ms"),
        plain("read a queue with many jobs, p99", read.1, "ms"),
    ])
}

/// Time to read a queue with this many pending jobs: p50 and p99, in milliseconds.
async fn read_queue(
    target: &Target,
    database_url: &str,
    queue: &str,
    jobs: u64,
) -> anyhow::Result<(f64, f64)> {
    // One job over HTTP: it creates the queue.
    Client::connect(target).await?.post_job(queue).await?;
    let mut conn = connect(database_url).await?;
    let project: i32 = sqlx::query_scalar("select project_id from jobs where queue = $1")
        .bind(queue)
        .fetch_one(&mut conn)
        .await?;
    let mut left = jobs;
    while left > 0 {
        let some = left.min(FILL_JOBS);
        let sql =
            "insert into jobs (project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                                     timeout_seconds)
                   select $1, gen_random_uuid(), $2, 'bench', 'pending', n % 5, now(), 3, 600
                   from generate_series(1, $3) n";
        let many = i64::try_from(some)?;
        sqlx::query(sql).bind(project).bind(queue).bind(many).execute(&mut conn).await?;
        left -= some;
    }
    let counted = "insert into queue_deltas (project_id, queue, active) values ($1, $2, $3)";
    let many = i64::try_from(jobs)?;
    sqlx::query(counted).bind(project).bind(queue).bind(many).execute(&mut conn).await?;
    conn.close().await?;
    // The server closes connections that are idle for so much time.
    let mut client = Client::connect(target).await?;
    let path = format!("/v1/queues/{queue}");
    let mut times = Vec::with_capacity(READS);
    for _ in 0..READS {
        let started = Instant::now();
        let reply = client.get(&path).await?;
        times.push(started.elapsed().as_secs_f64() * 1_000.0);
        let seen: serde_json::Value = serde_json::from_slice(&reply)?;
        ensure!(seen["counts"]["pending"].as_u64() == Some(jobs + 1), "it shows {seen}");
    }
    Ok(percentiles(times))
}

/// Lateness of this many schedules of one minute: how long after their tick 50 % and 99 % of their
/// jobs can be claimed, in milliseconds by the database's clock.
///
/// # Errors
/// When the server or the database does not answer, or not all fire.
async fn fire(
    target: &Target,
    database_url: &str,
    queue: &str,
    schedules: u32,
) -> anyhow::Result<(f64, f64)> {
    Client::connect(target).await?.post_job(queue).await?;
    let mut conn = connect(database_url).await?;
    let sql = "insert into recurring_schedules (project_id, id, job_type, cron_expression, queue, last_tick)
               select jobs.project_id, $1 || '-' || n, 'bench', '* * * * *', $1, now()
               from jobs, generate_series(1, $2) n
               where jobs.queue = $1";
    let many = i32::try_from(schedules)?;
    sqlx::query(sql).bind(queue).bind(many).execute(&mut conn).await?;
    let started = Instant::now();
    let mut late = Vec::with_capacity(schedules as usize);
    while late.len() < schedules as usize {
        ensure!(started.elapsed() < FIRE_TIMEOUT, "{} of {schedules} have fired", late.len());
        tokio::time::sleep(LOOK_PERIOD).await;
        // The clock at the start of the query: rows that it sees were there by then.
        let look = "select count(*), extract(epoch from statement_timestamp() - max(run_at))::float8 * 1000
                    from jobs where queue = $1 and job_type = 'bench'";
        let (seen, ms): (i64, Option<f64>) =
            sqlx::query_as(look).bind(queue).fetch_one(&mut conn).await?;
        let more = usize::try_from(seen)?.saturating_sub(late.len());
        late.extend(std::iter::repeat_n(ms.unwrap_or_default(), more));
    }
    let forget = "delete from recurring_schedules where queue = $1";
    sqlx::query(forget).bind(queue).execute(&mut conn).await?;
    conn.close().await?;
    Ok(percentiles(late))
}

/// A connection whose commits wait for no disk.
pub async fn connect(database_url: &str) -> anyhow::Result<PgConnection> {
    let options: PgConnectOptions = database_url.parse()?;
    let mut conn = options.connect().await.context("the database does not answer")?;
    conn.execute("set synchronous_commit = off").await?;
    Ok(conn)
}

fn percentiles(mut values: Vec<f64>) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let at = |part: f64| values[((values.len() - 1) as f64 * part) as usize];
    (at(0.5), at(0.99))
}
