//! The command line: one binary, one command for each thing to do. `--help` is the reference.

mod keys;
mod stop;

use std::{io::Write, time::Duration};

use anyhow::Context;
use clap::{Parser, Subcommand};
use tokio::net::TcpListener;

use crate::{
    bench::{self, BenchArgs},
    config::{DatabaseArgs, NodeArgs},
    dev::{self, DevArgs},
    http::openapi,
    serve::{self, Node},
    store, telemetry,
};

/// A job queue with an HTTP API, over PostgreSQL.
#[derive(Debug, Parser)]
#[command(name = "fencepost", version, about, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run everything on this machine, with a private PostgreSQL; nothing to configure
    Dev(DevArgs),
    /// Run one node over a PostgreSQL of yours
    Serve {
        #[command(flatten)]
        database: DatabaseArgs,
        #[command(flatten)]
        node: NodeArgs,
        /// How long to accept connections once told to stop, so that load balancers see it first
        #[arg(long, env = "FENCEPOST_LINGER_SECONDS", default_value_t = 5, value_name = "N",
              value_parser = clap::value_parser!(u64).range(0..=60))]
        linger_seconds: u64,
    },
    /// Bring the database's schema up to this version
    Migrate {
        #[command(flatten)]
        database: DatabaseArgs,
    },
    /// Create, list and revoke API keys
    Keys(keys::KeysArgs),
    /// Print the OpenAPI document
    Openapi,
    /// Measure a server over HTTP: its own `dev`, or one that runs
    Bench(BenchArgs),
}

impl Cli {
    /// Reads the command line; prints help and ends the process when it cannot be read.
    #[must_use]
    pub fn read() -> Self {
        Self::parse()
    }

    /// Does what was asked for. Call it on the main thread: `dev` starts a child that ends with the
    /// thread that started it.
    ///
    /// # Errors
    /// What went wrong, with its causes, for the person at the terminal.
    pub async fn run(self) -> anyhow::Result<()> {
        match self.command {
            Command::Dev(args) => {
                telemetry::install_logs(&args.node.log)?;
                dev::run(args, stop::on_signal()?).await
            }
            Command::Serve { database, node, linger_seconds } => {
                telemetry::install_logs(&node.log)?;
                let linger = Duration::from_secs(linger_seconds);
                let node = open(&database, node, linger).await?;
                serve::serve(node, stop::on_signal()?).await
            }
            Command::Migrate { database } => {
                store::pools::migrate(&database.url()?).await.context("the migration failed")
            }
            Command::Keys(args) => keys::run(args).await,
            Command::Openapi => Ok(write!(std::io::stdout(), "{}", openapi::text())?),
            Command::Bench(args) => bench::run(args).await,
        }
    }
}

async fn open(database: &DatabaseArgs, node: NodeArgs, linger: Duration) -> anyhow::Result<Node> {
    let database_url = database.url()?;
    let bind = async |address| {
        TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))
    };
    let api = bind(node.listen).await?;
    let operator = bind(node.metrics_listen).await?;
    tracing::info!(
        api.address = %api.local_addr()?,
        metrics.address = %operator.local_addr()?,
        "listening"
    );
    Ok(Node {
        api,
        operator: Some((operator, telemetry::install_metrics()?)),
        database_url,
        pools: node.pools,
        linger,
    })
}
