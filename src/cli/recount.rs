//! `fencepost recount`: compares counters with the jobs, and corrects them.

use std::io::Write;

use anyhow::Context;
use sqlx::Connection;

use super::target::TargetArgs;
use crate::store::sweep::counts;

/// Corrects the counts of queues and the list of dead letters, and prints how many were wrong.
pub async fn run(target: &TargetArgs) -> anyhow::Result<()> {
    let mut conn = target.connect().await?;
    let queues = counts::recount(&mut conn).await.context("the counts were not compared")?;
    let mut tx = conn.begin().await?;
    // Settlements with dead letters wait meanwhile.
    counts::lock_dead_letters(&mut tx).await?;
    let letters = counts::relist_dead_letters(&mut tx).await?;
    counts::regroup_dead_letters(&mut tx).await?;
    tx.commit().await?;
    conn.close().await?;
    writeln!(std::io::stdout(), "corrected: {queues} queues, {letters} dead letters")?;
    Ok(())
}
