//! `fencepost recount`: compares counters with the jobs, and corrects them.

use std::io::Write;

use anyhow::Context;
use fencepost_engine::maintenance;
use fencepost_store::sweep::counts;
use sqlx::Connection;

use super::target::TargetArgs;

/// Corrects the counts of queues and the list of dead letters, and prints how many were wrong.
pub async fn run(target: &TargetArgs) -> anyhow::Result<()> {
    let mut conn = target.connect().await?;
    let queues = counts::recount(&mut conn).await.context("the counts were not compared")?;
    let letters = maintenance::relist_dead_letters(&mut conn).await?;
    conn.close().await?;
    writeln!(std::io::stdout(), "corrected: {queues} queues, {letters} dead letters")?;
    Ok(())
}
