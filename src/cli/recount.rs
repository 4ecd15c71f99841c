//! `fencepost recount`: compares the counters with what they count, and corrects them.

use std::{io::Write, path::PathBuf};

use anyhow::Context;
use sqlx::{ConnectOptions, Connection, postgres::PgConnectOptions};

use crate::{config::DatabaseArgs, dev::Ready, store::sweep::counts};

/// Corrects the counts of queues and the list of dead letters, and says how much was wrong.
///
/// # Errors
/// When the database does not answer, or is not migrated.
pub async fn run(database: &DatabaseArgs, data_dir: Option<PathBuf>) -> anyhow::Result<()> {
    let url = match data_dir {
        Some(dir) => Ready::of_running(Some(dir))?.database_url,
        None => database.url()?,
    };
    let options: PgConnectOptions = url.parse().context("the database's URL cannot be read")?;
    let mut conn = options.connect().await.context("the database does not answer")?;
    let queues = counts::recount(&mut conn).await.context("the counts could not be compared")?;
    let mut tx = conn.begin().await?;
    // Settlements that give jobs up wait meanwhile.
    counts::lock_dead_letters(&mut tx).await?;
    let letters = counts::relist_dead_letters(&mut tx).await?;
    counts::regroup_dead_letters(&mut tx).await?;
    tx.commit().await?;
    conn.close().await?;
    writeln!(std::io::stdout(), "corrected: {queues} queues, {letters} dead letters")?;
    Ok(())
}
