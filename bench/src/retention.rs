//! Retention of a long queue, and what another project notices meanwhile.

use std::time::{Duration, Instant};

use anyhow::ensure;
use fencepost::dev;
use sqlx::Connection;

use super::{
    client::{SMALL_PAYLOAD_BYTES, Target},
    isolation, operator,
    process::Watched,
    report::{Measure, plain},
    scrape,
};

/// The queue whose jobs are deleted: a tenth of all jobs of the instance.
const QUEUE: &str = "q0";
/// Time for which the other project works.
const WORK_TIME: Duration = Duration::from_secs(20);
/// The loop looks at least once in this time.
const MAX_START: Duration = Duration::from_secs(90);
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// At the end, jobs must still be deleted within this time.
const STILL_TIME: Duration = Duration::from_secs(1);
/// Counts deleted jobs.
const PRUNED: &str = "fencepost_jobs_pruned_total";

/// Deletes the jobs of [`QUEUE`] while another project works at a low rate.
///
/// # Errors
/// When the server or the database does not answer, or nothing is deleted.
pub async fn measure(
    target: &Target,
    watched: &Watched,
    metrics_url: &str,
) -> anyhow::Result<Vec<Measure>> {
    let mut conn = operator::connect(&watched.database_url).await?;
    let (_, api_key) = dev::make_project(&mut conn, "beside-retention", "bench").await?;
    let authority = target.authority.clone();
    let other = Target { authority, api_key, payload_bytes: SMALL_PAYLOAD_BYTES };
    let quiet = isolation::pickup_ms(&other, WORK_TIME).await?;
    let before = deleted(metrics_url).await?;
    let make_due = "
        with due as (
            select min(id) as project_id
            from projects
            where kind = 'user' and slug not like 'large-%' and slug <> 'beside-retention'
        ), kept as (
            insert into queues (project_id, name, retention_days) select project_id, $1, 1 from due
        )
        insert into retention_dues (project_id, queue, due_at) select project_id, $1, now() from due
        on conflict (project_id, queue) do update set due_at = now()";
    sqlx::query(make_due).bind(QUEUE).execute(&mut conn).await?;
    conn.close().await?;
    let asked = Instant::now();
    while deleted(metrics_url).await? <= before {
        ensure!(asked.elapsed() < MAX_START, "no job was deleted");
        tokio::time::sleep(LOOK_AGAIN).await;
    }
    let (first, started) = (deleted(metrics_url).await?, Instant::now());
    let meanwhile = isolation::pickup_ms(&other, WORK_TIME).await?;
    let (last, seconds) = (deleted(metrics_url).await?, started.elapsed().as_secs_f64());
    tokio::time::sleep(STILL_TIME).await;
    ensure!(deleted(metrics_url).await? > last, "all jobs were deleted before the end");
    Ok(vec![
        plain("retention: jobs deleted", (last - first) / seconds, "jobs/s"),
        plain("others' pickup while it is quiet, p99", quiet, "ms"),
        plain("others' pickup meanwhile, p99", meanwhile, "ms"),
    ])
}

async fn deleted(metrics_url: &str) -> anyhow::Result<f64> {
    Ok(scrape::lines(metrics_url, PRUNED).await?.into_iter().map(|it| it.1).sum())
}
