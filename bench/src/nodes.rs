//! Several nodes over one database: jobs that are stored on one node while polls are parked on
//! another.

use std::{
    net::TcpListener,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::ensure;
use fencepost::dev::Ready;

use super::{
    client::{SMALL_PAYLOAD_BYTES, Target},
    load,
    server::server_binary,
};

/// The folder of a `dev` that was started here without naming one, and its key of secrets.
const DATA_DIR: &str = ".fencepost";
const MASTER_KEY_FILE: &str = "master.key";
const START_TIMEOUT: Duration = Duration::from_secs(30);
const LOOK_PERIOD: Duration = Duration::from_millis(20);
/// Time after which each node has counted the others, whenever it started: it does so every four
/// seconds.
pub const ACQUAINTANCE: Duration = Duration::from_secs(9);

/// Stores and the key of secrets, which nodes share with the server of this run.
#[derive(Debug, Clone)]
pub struct Stores {
    pub database_url: String,
    pub redis_url: Option<String>,
    pub master_key_file: PathBuf,
}

impl Stores {
    /// The stores of a running `dev` in this folder, or in the default one.
    pub fn of(ready: &Ready, data_dir: Option<PathBuf>) -> Self {
        Self {
            database_url: ready.database_url.clone(),
            redis_url: ready.redis_url.clone(),
            master_key_file: data_dir.unwrap_or_else(|| DATA_DIR.into()).join(MASTER_KEY_FILE),
        }
    }
}

/// A `fencepost serve` of our own.
pub struct Node {
    child: Child,
    authority: String,
}

impl Node {
    /// Starts one, with or without Redis.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start(stores: &Stores) -> anyhow::Result<Self> {
        let free = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let mut command = Command::new(server_binary()?);
        command
            .args(["serve", "--listen", &free.to_string(), "--metrics-listen", "127.0.0.1:0"])
            .args(["--log", "error", "--linger-seconds", "0"])
            .env("FENCEPOST_DATABASE_URL", &stores.database_url)
            .env("FENCEPOST_MASTER_KEY_FILE", &stores.master_key_file)
            .env("FENCEPOST_CANARY_SECONDS", "0")
            .env_remove("FENCEPOST_REDIS_URL")
            .stdout(Stdio::null());
        if let Some(redis_url) = &stores.redis_url {
            command.env("FENCEPOST_REDIS_URL", redis_url);
        }
        let mut node = Self { child: command.spawn()?, authority: free.to_string() };
        let deadline = Instant::now() + START_TIMEOUT;
        while tokio::net::TcpStream::connect(&node.authority).await.is_err() {
            ensure!(node.child.try_wait()?.is_none(), "a node did not start");
            ensure!(Instant::now() < deadline, "a node was not ready in time");
            tokio::time::sleep(LOOK_PERIOD).await;
        }
        Ok(node)
    }

    pub fn authority(&self) -> &str {
        &self.authority
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn target(&self, api_key: &str) -> Target {
        let payload_bytes = SMALL_PAYLOAD_BYTES;
        Target { authority: self.authority.clone(), api_key: api_key.to_owned(), payload_bytes }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Time from an enqueue on one node to a poll that is parked on another: p50 and p99, in
/// milliseconds; with Redis, and then without.
///
/// # Errors
/// When a node does not start, or refuses a request.
pub async fn pickups(
    stores: &Stores,
    api_key: &str,
    queue: &str,
    time: Duration,
) -> anyhow::Result<[(f64, f64); 2]> {
    ensure!(stores.redis_url.is_some(), "the server has no Redis");
    let without = Stores { redis_url: None, ..stores.clone() };
    let mut measured = Vec::new();
    for stores in [stores, &without] {
        let (one, other) = (Node::start(stores).await?, Node::start(stores).await?);
        tokio::time::sleep(ACQUAINTANCE).await;
        let (here, there) = (one.target(api_key), other.target(api_key));
        let queue = format!("{queue}-{}", measured.len());
        measured.push(load::pickup(&here, &there, &queue, time).await?);
    }
    measured.try_into().map_err(|_| anyhow::anyhow!("two are measured"))
}
