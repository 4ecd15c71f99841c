//! What is tested: three nodes, their PostgreSQL and their Redis, all of them processes.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use fencepost::{
    dev::{
        self,
        cluster::{Cluster, Durability},
        redis::Redis,
    },
    store::migrate,
};
use sqlx::{ConnectOptions, Connection, PgConnection, postgres::PgConnectOptions};

/// Nodes of a run.
pub const NODES: usize = 3;
/// Tenants of a run.
pub const TENANTS: usize = 2;
/// The first port of a node, if the process has a number of zero.
const FIRST_PORT: u16 = 21_000;
/// Ports that runs on one machine share.
const PORTS: u16 = 9_000;
/// Ports of one run: each node has two.
const NODE_PORTS: u16 = 2 * NODES as u16;
/// Longest stop of a node; then it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(40);
/// Longest start of a node.
const START_TIMEOUT: Duration = Duration::from_secs(60);
const LOOK_PERIOD: Duration = Duration::from_millis(50);

/// A project with its key.
#[derive(Clone)]
pub struct Tenant {
    pub key: String,
}

/// All processes. They are started from the main thread, and end with it.
pub struct Stage {
    dir: PathBuf,
    program: PathBuf,
    cluster: Option<Cluster>,
    redis: Option<Redis>,
    nodes: Vec<Option<Child>>,
    first_port: u16,
    pub tenants: Vec<Tenant>,
}

impl Stage {
    /// Starts everything in this folder.
    ///
    /// # Errors
    /// When something does not start.
    pub async fn start(dir: &Path, program: PathBuf) -> anyhow::Result<Self> {
        ensure!(program.exists(), "{} is missing: build it first", program.display());
        let cluster = Cluster::start(&dir.join("postgres"), Durability::Safe)?;
        let redis = Redis::start(&Redis::dir(std::process::id()))?;
        let runs = u32::from(PORTS / NODE_PORTS);
        let number = u16::try_from(std::process::id() % runs).unwrap_or_default();
        let mut stage = Self {
            dir: dir.to_owned(),
            program,
            cluster: Some(cluster),
            redis: Some(redis),
            nodes: (0..NODES).map(|_| None).collect(),
            first_port: FIRST_PORT + NODE_PORTS * number,
            tenants: Vec::new(),
        };
        migrate::migrate(&stage.database_url()).await?;
        let mut conn = stage.connect().await?;
        for number in 0..TENANTS {
            let made = dev::make_project(&mut conn, &format!("tenant-{number}"), "chaos").await?;
            stage.tenants.push(Tenant { key: made.1 });
        }
        conn.close().await?;
        for node in 0..NODES {
            stage.start_node(node)?;
        }
        stage.until_ready().await?;
        Ok(stage)
    }

    fn database_url(&self) -> String {
        self.cluster.as_ref().map(|it| it.database_url("postgres")).unwrap_or_default()
    }

    /// A connection past the nodes.
    ///
    /// # Errors
    /// When PostgreSQL does not answer.
    pub async fn connect(&self) -> anyhow::Result<PgConnection> {
        let options: PgConnectOptions = self.database_url().parse()?;
        Ok(options.connect().await?)
    }

    /// Where a node listens.
    #[must_use]
    pub fn urls(&self) -> Vec<String> {
        let ports = (0..NODES).map(|it| self.first_port + it as u16);
        ports.map(|it| format!("http://127.0.0.1:{it}")).collect()
    }

    /// # Errors
    /// When the program cannot be started.
    pub fn start_node(&mut self, node: usize) -> anyhow::Result<()> {
        if self.nodes[node].is_some() {
            return Ok(());
        }
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.dir.join(format!("node-{node}.log")))?;
        let redis_url =
            format!("redis+unix://{}/redis.sock", Redis::dir(std::process::id()).display());
        let redis_url = self.redis.as_ref().map_or(redis_url, Redis::url);
        let operator = self.first_port + NODES as u16 + node as u16;
        let child = Command::new(&self.program)
            .args(["serve", "--listen", &self.urls()[node].replace("http://", "")])
            .args(["--metrics-listen", &format!("127.0.0.1:{operator}")])
            .env("FENCEPOST_DATABASE_URL", self.database_url())
            .env("FENCEPOST_REDIS_URL", redis_url)
            .env("FENCEPOST_CANARY_SECONDS", "0")
            .env(
                "FENCEPOST_LOG",
                std::env::var("FENCEPOST_LOG").unwrap_or_else(|_| "warn".to_owned()),
            )
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .with_context(|| self.program.display().to_string())?;
        self.nodes[node] = Some(child);
        Ok(())
    }

    /// Kills a node: nothing is finished. Returns whether it ran until then.
    pub fn kill_node(&mut self, node: usize) -> bool {
        if let Some(mut child) = self.nodes[node].take() {
            let ran = matches!(child.try_wait(), Ok(None));
            let _ = child.kill();
            let _ = child.wait();
            return ran;
        }
        false
    }

    /// Stops a node in order, as a deploy does. Returns whether it ended by itself.
    pub fn stop_node(&mut self, node: usize) -> bool {
        self.signal(node, "TERM");
        let Some(mut child) = self.nodes[node].take() else { return false };
        let deadline = Instant::now() + STOP_TIMEOUT;
        while Instant::now() < deadline {
            if matches!(child.try_wait(), Ok(Some(_))) {
                return true;
            }
            std::thread::sleep(LOOK_PERIOD);
        }
        let _ = child.kill();
        let _ = child.wait();
        false
    }

    /// Freezes a node, or lets it go on.
    pub fn freeze_node(&self, node: usize, is_frozen: bool) {
        self.signal(node, if is_frozen { "STOP" } else { "CONT" });
    }

    fn signal(&self, node: usize, name: &str) {
        if let Some(child) = &self.nodes[node] {
            signal(name, &child.id().to_string());
        }
    }

    /// Kills PostgreSQL, and starts it again: what was not committed is gone.
    ///
    /// # Errors
    /// When it does not start again.
    pub fn crash_postgres(&mut self) -> anyhow::Result<()> {
        let dir = self.dir.join("postgres");
        let pid = std::fs::read_to_string(dir.join("postmaster.pid"))?;
        signal("KILL", pid.lines().next().unwrap_or_default().trim());
        drop(self.cluster.take());
        self.cluster = Some(Cluster::start(&dir, Durability::Safe)?);
        Ok(())
    }

    /// Ends Redis, or starts an empty one.
    ///
    /// # Errors
    /// When it does not start.
    pub fn set_redis(&mut self, is_up: bool) -> anyhow::Result<()> {
        if let Some(redis) = self.redis.take() {
            signal("KILL", &redis.pid().to_string());
        }
        if is_up {
            self.redis = Some(Redis::start(&Redis::dir(std::process::id()))?);
        }
        Ok(())
    }

    /// Waits until every node can serve.
    ///
    /// # Errors
    /// When one cannot in time.
    pub async fn until_ready(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        for url in self.urls() {
            loop {
                let asked = reqwest::get(format!("{url}/readyz")).await;
                if asked.is_ok_and(|it| it.status() == 200) {
                    break;
                }
                ensure!(
                    Instant::now() < deadline,
                    "{url} is not ready: see {}",
                    self.dir.display()
                );
                tokio::time::sleep(LOOK_PERIOD).await;
            }
        }
        Ok(())
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        (0..NODES).for_each(|it| _ = self.kill_node(it));
    }
}

fn signal(name: &str, pid: &str) {
    let _ = Command::new("kill").args([&format!("-{name}"), pid]).status();
}
