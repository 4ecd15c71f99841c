//! `fencepost stuck`: the longest-waiting queues of all projects. For people on call.

use std::io::Write;

use anyhow::Context;
use fencepost_engine::jobs::explain;
use fencepost_store::{sweep::gauges, workers::ALIVE_SECONDS};
use sqlx::Connection;

use super::target::TargetArgs;

/// Number of queues listed.
const MAX_LISTED: usize = 20;

/// Lists queues with ready jobs: how long the first one waits, and why.
pub async fn run(target: &TargetArgs) -> anyhow::Result<()> {
    let mut conn = target.connect().await?;
    let mut queues =
        gauges::places(&mut conn, ALIVE_SECONDS).await.context("the queues were not read")?;
    queues.truncate(MAX_LISTED);
    let reasons = explain::oldest(&mut conn, &queues, 0.0, (MAX_LISTED, MAX_LISTED)).await?;
    conn.close().await?;
    let mut out = std::io::stdout();
    if queues.is_empty() {
        writeln!(out, "no ready job waits")?;
    }
    for (it, reason) in queues.iter().zip(reasons) {
        let why = reason.map_or_else(|| "it has just started".to_owned(), |it| it.1);
        writeln!(out, "{:>10.0} s  {}  {}  ({why})", it.age_seconds, it.project, it.queue)?;
    }
    Ok(())
}
