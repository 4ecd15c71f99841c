//! Several nodes over one database: jobs that are stored on one node while polls are parked on
//! another, and what three nodes do on the cores of one.

use std::{
    net::TcpListener,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};

use super::{
    client::{SMALL_PAYLOAD_BYTES, Target},
    load::{self, Step},
    server::server_binary,
};

const START_TIMEOUT: Duration = Duration::from_secs(30);
const LOOK_PERIOD: Duration = Duration::from_millis(20);
/// Time after which each node has counted the others twice.
const ACQUAINTANCE: Duration = Duration::from_secs(9);

/// A `fencepost serve` of our own.
pub struct Node {
    child: Child,
    authority: String,
}

impl Node {
    /// Starts one, with or without this Redis.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start(database_url: &str, redis_url: Option<&str>) -> anyhow::Result<Self> {
        let free = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let mut command = Command::new(server_binary()?);
        command
            .args(["serve", "--listen", &free.to_string(), "--metrics-listen", "127.0.0.1:0"])
            .args(["--log", "error", "--linger-seconds", "0"])
            .env("FENCEPOST_DATABASE_URL", database_url)
            .env("FENCEPOST_CANARY_SECONDS", "0")
            .env_remove("FENCEPOST_REDIS_URL")
            .stdout(Stdio::null());
        if let Some(redis_url) = redis_url {
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
    database_url: &str,
    redis_url: Option<&str>,
    api_key: &str,
    queue: &str,
    time: Duration,
) -> anyhow::Result<[(f64, f64); 2]> {
    let redis_url = redis_url.context("the server has no Redis")?;
    let mut measured = Vec::new();
    for redis_url in [Some(redis_url), None] {
        let one = Node::start(database_url, redis_url).await?;
        let other = Node::start(database_url, redis_url).await?;
        tokio::time::sleep(ACQUAINTANCE).await;
        let (here, there) = (one.target(api_key), other.target(api_key));
        let queue = format!("{queue}-{}", measured.len());
        measured.push(load::pickup(&here, &there, &queue, time).await?);
    }
    measured.try_into().map_err(|_| anyhow::anyhow!("two are measured"))
}

/// Lifecycles per second over one node, and over three that share its cores and its database.
///
/// # Errors
/// When a node does not start, or a job is lost.
pub async fn rates(
    database_url: &str,
    redis_url: Option<&str>,
    api_key: &str,
    queue: &str,
    time: Duration,
) -> anyhow::Result<[f64; 2]> {
    let mut measured = [0.0; 2];
    for (rate, count) in measured.iter_mut().zip([1, 3]) {
        let mut nodes = Vec::new();
        for _ in 0..count {
            nodes.push(Node::start(database_url, redis_url).await?);
        }
        tokio::time::sleep(ACQUAINTANCE).await;
        let targets: Vec<_> = nodes.iter().map(|it| it.target(api_key)).collect();
        let queue = format!("{queue}-{count}");
        let (jobs, ledger) = load::rate(&targets, Step::Lifecycle, &queue, time).await?;
        ledger.check(&targets[0], &queue).await?;
        *rate = jobs;
    }
    Ok(measured)
}
