//! The database of an operator's command.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use fencepost_config::DatabaseArgs;
use sqlx::{ConnectOptions, PgConnection, postgres::PgConnectOptions};

use crate::dev::Ready;

/// The database.
#[derive(Debug, Args)]
pub struct TargetArgs {
    #[command(flatten)]
    database: DatabaseArgs,

    /// Folder of a running `fencepost dev`, instead of a database's URL
    #[arg(long, env = "FENCEPOST_DATA_DIR", value_name = "DIR", global = true)]
    data_dir: Option<PathBuf>,
}

impl TargetArgs {
    /// Connects to it.
    ///
    /// # Errors
    /// When none is configured, or it does not answer.
    pub async fn connect(&self) -> anyhow::Result<PgConnection> {
        self.options()?.connect().await.context("the database does not answer")
    }

    /// The options by which it is reached.
    ///
    /// # Errors
    /// When none is configured, or its URL is invalid.
    pub fn options(&self) -> anyhow::Result<PgConnectOptions> {
        self.url()?.parse().context("the database's URL is invalid")
    }

    /// The configured database; else that of a running `dev`; else `DATABASE_URL`, which may be
    /// meant for something else.
    fn url(&self) -> anyhow::Result<String> {
        if self.database.database_url.is_some() || self.database.database_url_file.is_some() {
            return self.database.url();
        }
        match Ready::of_running(self.data_dir.clone()) {
            Ok(ready) => Ok(ready.database_url),
            Err(error) if self.data_dir.is_some() => Err(error),
            Err(error) => self.database.url().with_context(|| format!("{error}")),
        }
    }
}
