//! Settings: each is a flag with a `FENCEPOST_…` variable. `docs/configuration.md` lists them, and
//! a test compares the two.

use std::net::SocketAddr;

use clap::Args;

/// Where the database is. `DATABASE_URL` is read when neither flag nor variable is given.
#[derive(Debug, Clone, Args)]
pub struct DatabaseArgs {
    /// PostgreSQL to use, as postgres://user:password@host/database
    #[arg(
        long,
        env = "FENCEPOST_DATABASE_URL",
        hide_env_values = true,
        value_name = "URL",
        global = true
    )]
    pub database_url: Option<String>,
}

impl DatabaseArgs {
    /// The URL from flag, `FENCEPOST_DATABASE_URL` or `DATABASE_URL`, in this order.
    ///
    /// # Errors
    /// When none of the three is given.
    pub fn url(&self) -> anyhow::Result<String> {
        self.database_url
            .clone()
            .or_else(|| std::env::var("DATABASE_URL").ok().filter(|it| !it.is_empty()))
            .ok_or_else(|| {
                anyhow::anyhow!(
                    "no database: give --database-url, FENCEPOST_DATABASE_URL or DATABASE_URL"
                )
            })
    }
}

/// What a node needs to know to serve.
#[derive(Debug, Clone, Args)]
pub struct NodeArgs {
    /// Address of the API
    #[arg(long, env = "FENCEPOST_LISTEN", default_value = "127.0.0.1:7070", value_name = "ADDR")]
    pub listen: SocketAddr,

    /// Address of the operator's listener (/metrics); never expose it
    #[arg(
        long,
        env = "FENCEPOST_METRICS_LISTEN",
        default_value = "127.0.0.1:7071",
        value_name = "ADDR"
    )]
    pub metrics_listen: SocketAddr,

    /// What to log: a level, or tracing directives such as info,fencepost=debug
    #[arg(long, env = "FENCEPOST_LOG", default_value = "info", value_name = "FILTER")]
    pub log: String,

    /// Shortest period of a recurring schedule, in seconds; one that fires more often is refused
    #[arg(long, env = "FENCEPOST_MIN_SCHEDULE_PERIOD_SECONDS", default_value_t = 10, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub min_schedule_period_seconds: u32,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub pools: PoolArgs,
}

const SETTLE_CONNECTIONS: u32 = 8;
const CLAIM_CONNECTIONS: u32 = 6;
const ENQUEUE_CONNECTIONS: u32 = 4;
const KEY_CONNECTIONS: u32 = 2;
const READ_CONNECTIONS: u32 = 4;
const BACKGROUND_CONNECTIONS: u32 = 3;

/// Connections of each pool. They are apart so that reads can never starve acks.
#[derive(Debug, Clone, Copy, Args)]
pub struct PoolArgs {
    /// Connections for acks and heartbeats
    #[arg(long, env = "FENCEPOST_SETTLE_CONNECTIONS", default_value_t = SETTLE_CONNECTIONS, value_name = "N",
          value_parser = clap::value_parser!(u32).range(2..=100))]
    pub settle_connections: u32,

    /// Connections for handing out jobs
    #[arg(long, env = "FENCEPOST_CLAIM_CONNECTIONS", default_value_t = CLAIM_CONNECTIONS, value_name = "N",
          value_parser = clap::value_parser!(u32).range(2..=100))]
    pub claim_connections: u32,

    /// Connections for enqueues
    #[arg(long, env = "FENCEPOST_ENQUEUE_CONNECTIONS", default_value_t = ENQUEUE_CONNECTIONS, value_name = "N",
          value_parser = clap::value_parser!(u32).range(2..=100))]
    pub enqueue_connections: u32,

    /// Connections for looking up API keys
    #[arg(long, env = "FENCEPOST_KEY_CONNECTIONS", default_value_t = KEY_CONNECTIONS, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    pub key_connections: u32,

    /// Connections for reads
    #[arg(long, env = "FENCEPOST_READ_CONNECTIONS", default_value_t = READ_CONNECTIONS, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    pub read_connections: u32,

    /// Connections for background work
    #[arg(long, env = "FENCEPOST_BACKGROUND_CONNECTIONS", default_value_t = BACKGROUND_CONNECTIONS, value_name = "N",
          value_parser = clap::value_parser!(u32).range(2..=100))]
    pub background_connections: u32,
}

impl Default for PoolArgs {
    fn default() -> Self {
        Self {
            settle_connections: SETTLE_CONNECTIONS,
            claim_connections: CLAIM_CONNECTIONS,
            enqueue_connections: ENQUEUE_CONNECTIONS,
            key_connections: KEY_CONNECTIONS,
            read_connections: READ_CONNECTIONS,
            background_connections: BACKGROUND_CONNECTIONS,
        }
    }
}
