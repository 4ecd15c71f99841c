//! `fencepost stuck`: the longest-waiting queues of all projects. For people on call.

use std::io::Write;

use anyhow::Context;
use sqlx::Connection;

use super::target::TargetArgs;
use crate::store::{sweep::gauges, workers::ALIVE_SECONDS};

/// Number of queues listed.
const MAX_LISTED: usize = 20;

/// Lists queues with ready jobs: how long the first one waits, and whether workers poll.
pub async fn run(target: &TargetArgs) -> anyhow::Result<()> {
    let mut conn = target.connect().await?;
    let places =
        gauges::places(&mut conn, ALIVE_SECONDS).await.context("the queues were not read")?;
    conn.close().await?;
    let mut out = std::io::stdout();
    if places.is_empty() {
        writeln!(out, "no ready job waits")?;
    }
    for it in places.iter().take(MAX_LISTED) {
        let why = match (it.is_paused, it.is_polled) {
            (true, _) => "paused",
            (false, true) => "workers poll it",
            (false, false) => "no worker polls it",
        };
        writeln!(out, "{:>10.0} s  {}  {}  ({why})", it.age_seconds, it.project, it.queue)?;
    }
    Ok(())
}
