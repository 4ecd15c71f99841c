//! What is tested: three nodes, their PostgreSQL with its standby, and their Redis, all of them
//! processes.

use std::{
    ffi::OsString,
    fmt::Write as _,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use fencepost::dev::redis::Redis;
use fencepost_net::seal;
use fencepost_store::{connection::migrate, faults};

use crate::{
    bugs, clients::CALL_TIMEOUT, database::Database, history, killed_with_this, patroni, signal,
};

/// Nodes of a run.
pub const NODES: usize = 3;
/// Tenants of a run.
pub const TENANTS: usize = 2;
/// The first port that a run may have.
const FIRST_PORT: u16 = 21_000;
/// Ports that runs on one machine share.
const PORTS: u16 = 9_000;
/// Each node has two.
const NODE_PORTS: u16 = 2 * NODES as u16;
/// Ports of one run.
const RUN_PORTS: u16 = NODE_PORTS + patroni::PORTS;
/// Longest stop of a node; then it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(40);
/// Longest start of a node.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait for the sockets of a node that starts.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(10);
const LOOK_PERIOD: Duration = Duration::from_millis(50);
/// Commits that come seldom, how many times more often they fail, and how often at most.
const RARE_POINTS: [&str; 6] = ["succeed_parents", "reap", "promote", "fire", "cascade", "ends"];
const RARE_FACTOR: f64 = 10.0;
const MAX_RARE_PERCENT: f64 = 20.0;
/// What gives a process another clock, below a folder for each kind of machine.
const FAKETIME: &str = "faketime/libfaketimeMT.so.1";

/// The names of the two fail points of a commit: before and after it.
#[must_use]
pub fn fail_points_of(commit: &str) -> [String; 2] {
    ["before", "after"].map(|side| format!("{commit}.{side}"))
}

/// A project with its key.
#[derive(Clone)]
pub struct Tenant {
    pub key: String,
}

/// The slug of a project.
#[must_use]
pub fn slug(tenant: usize) -> String {
    format!("tenant-{tenant}")
}

/// The programs of the nodes.
#[derive(Debug, Clone)]
pub struct Programs {
    pub server: PathBuf,
    /// An earlier release: nodes begin with it, and change the release with each stop in order.
    pub previous: Option<PathBuf>,
}

impl Programs {
    fn of(&self, is_previous: bool) -> &Path {
        self.previous.as_deref().filter(|_| is_previous).unwrap_or(&self.server)
    }
}

/// Migrates a database to the schema of a program.
fn migrate_by(program: &Path, database_url: &str) -> anyhow::Result<()> {
    let mut migrate = killed_with_this(program);
    migrate.arg("migrate").env("FENCEPOST_DATABASE_URL", database_url);
    let status = migrate.stdin(Stdio::null()).status()?;
    ensure!(status.success(), "{} migrate: {status}", program.display());
    Ok(())
}

/// Has a program make a project. Returns its key.
fn make_project_by(program: &Path, database_url: &str, slug: &str) -> anyhow::Result<String> {
    let mut make = killed_with_this(program);
    make.args(["keys", "create", "--quiet", "--name", "chaos", "--new-project", slug]);
    let made = make.env("FENCEPOST_DATABASE_URL", database_url).stdin(Stdio::null()).output()?;
    let errors = String::from_utf8_lossy(&made.stderr);
    ensure!(made.status.success(), "{} keys create: {errors}", program.display());
    Ok(String::from_utf8(made.stdout)?.trim().to_owned())
}

/// A clock that is wrong.
#[derive(Debug, Clone, Copy)]
pub enum Clock {
    /// By this many seconds.
    Off(i64),
    /// It stands still.
    Frozen,
}

impl Clock {
    /// The variables that give it to a process; none if `faketime` is not installed.
    pub fn variables(self) -> Vec<(&'static str, OsString)> {
        let Some(library) = Stage::faketime() else { return Vec::new() };
        // A date without a sign is a moment that does not pass.
        let time = match self {
            Self::Off(seconds) => format!("{seconds:+}"),
            Self::Frozen => history::now_utc().format("%Y-%m-%d %H:%M:%S").to_string(),
        };
        vec![
            ("LD_PRELOAD", library.into()),
            ("FAKETIME", time.into()),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".into()),
            ("TZ", "UTC".into()),
        ]
    }
}

/// What is wrong with the nodes on purpose.
#[derive(Debug, Clone, Default)]
pub struct Planted {
    /// The number of a bug; the program must have it.
    pub bug: Option<u8>,
    /// Commits that fail, in percent, on each side of each fail point; of those that are rare,
    /// more.
    pub fail_percent: f64,
}

/// All processes. They are started from the main thread, and end with it.
pub struct Stage {
    dir: PathBuf,
    programs: Programs,
    /// Which nodes run the earlier release.
    run_previous: [bool; NODES],
    /// The schema is that of this code, and no longer of the earlier release.
    is_migrated: bool,
    planted: Planted,
    pub database: Database,
    redis: Option<Redis>,
    nodes: Vec<Option<Child>>,
    first_port: u16,
    master_key: String,
    pub tenants: Vec<Tenant>,
}

impl Stage {
    /// Starts everything in this folder.
    ///
    /// # Errors
    /// When something does not start.
    pub async fn start(
        dir: &Path,
        programs: Programs,
        planted: Planted,
        under_patroni: bool,
    ) -> anyhow::Result<Self> {
        for program in [false, true].map(|it| programs.of(it)) {
            ensure!(program.exists(), "{} is missing: build it first", program.display());
        }
        let run_previous = [programs.previous.is_some(); NODES];
        let redis = Redis::start(&Redis::dir(std::process::id()))?;
        let first_port = free_ports().context("no ports are free for three nodes")?;
        let patroni_port = under_patroni.then_some(first_port + NODE_PORTS);
        let mut stage = Self {
            dir: dir.to_owned(),
            programs,
            run_previous,
            is_migrated: false,
            planted,
            database: Database::start(dir, patroni_port).await?,
            redis: Some(redis),
            nodes: (0..NODES).map(|_| None).collect(),
            first_port,
            master_key: seal::new_master_key(),
            tenants: Vec::new(),
        };
        match stage.programs.previous.as_deref() {
            Some(program) => migrate_by(program, &stage.database.url())?,
            None => stage.migrate().await?,
        }
        // By the program whose schema is there.
        let program = stage.programs.of(true).to_owned();
        for number in 0..TENANTS {
            let key = make_project_by(&program, &stage.database.url(), &slug(number))?;
            stage.tenants.push(Tenant { key });
        }
        for node in 0..NODES {
            stage.start_node(node, None)?;
        }
        stage.until_ready().await?;
        Ok(stage)
    }

    /// Brings the schema to this code, whatever nodes do meanwhile.
    async fn migrate(&mut self) -> anyhow::Result<()> {
        migrate::migrate(&self.database.url()).await?;
        self.is_migrated = true;
        Ok(())
    }

    /// True if this code's schema is there: nodes of the earlier release began without it.
    #[must_use]
    pub fn is_migrated(&self) -> bool {
        self.is_migrated
    }

    /// Where nodes listen.
    #[must_use]
    pub fn urls(&self) -> Vec<String> {
        let ports = (0..NODES).map(|it| self.first_port + it as u16);
        ports.map(|it| format!("http://127.0.0.1:{it}")).collect()
    }

    /// The logs of nodes.
    #[must_use]
    pub fn logs(&self) -> Vec<PathBuf> {
        (0..NODES).map(|it| self.dir.join(format!("node-{it}.log"))).collect()
    }

    /// What gives nodes another clock, if it is installed as Debian does.
    #[must_use]
    pub fn faketime() -> Option<PathBuf> {
        let folders = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten();
        folders.map(|it| it.path().join(FAKETIME)).find(|it| it.exists())
    }

    /// Starts a node, with its own clock or with another one.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn start_node(&mut self, node: usize, clock: Option<Clock>) -> anyhow::Result<()> {
        if self.nodes[node].is_some() {
            return Ok(());
        }
        let log = self.dir.join(format!("node-{node}.log"));
        let log = std::fs::File::options().create(true).append(true).open(log)?;
        let redis_url =
            format!("redis+unix://{}/redis.sock", Redis::dir(std::process::id()).display());
        let operator = self.first_port + NODES as u16 + node as u16;
        let program = self.programs.of(self.run_previous[node]);
        ensure!(program.exists(), "{} is missing", program.display());
        let mut command = killed_with_this(program);
        command
            .args(["serve", "--listen", &self.urls()[node].replace("http://", "")])
            .args(["--metrics-listen", &format!("127.0.0.1:{operator}")])
            .env("FENCEPOST_DATABASE_URL", self.database.url())
            .env("FENCEPOST_REDIS_URL", redis_url)
            .env("FENCEPOST_MASTER_KEY", &self.master_key)
            .env("FENCEPOST_OUTBOUND_ALLOW", "127.0.0.1")
            .env("FENCEPOST_CANARY_SECONDS", "0")
            .env("FENCEPOST_LOG", std::env::var("FENCEPOST_LOG").unwrap_or("warn".to_owned()))
            .env(faults::FAIL_POINTS_VARIABLE, self.fail_points());
        if let Some(number) = self.planted.bug {
            command.env(bugs::VARIABLE, number.to_string());
        }
        command.envs(clock.map(Clock::variables).unwrap_or_default());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = command.spawn().with_context(|| program.display().to_string())?;
        self.nodes[node] = Some(child);
        Ok(())
    }

    /// All fail points, as the nodes read them.
    fn fail_points(&self) -> String {
        let percent = self.planted.fail_percent;
        let mut all = String::new();
        if percent > 0.0 {
            for point in faults::FAIL_POINTS {
                let percent = match RARE_POINTS.contains(&point) {
                    true => percent.max((percent * RARE_FACTOR).min(MAX_RARE_PERCENT)),
                    false => percent,
                };
                for name in fail_points_of(point) {
                    let _ = write!(all, "{name}={percent}%return;");
                }
            }
        }
        all
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

    /// Stops a node in order, as a deploy does: it starts with the other release, if there are two.
    /// Before the first one, the database is migrated, unless it is away. Returns whether the node
    /// ran until then and ended well.
    pub async fn stop_node(&mut self, node: usize) -> bool {
        let is_migrated = self.is_migrated || self.migrate().await.is_ok();
        let is_next_previous = !self.run_previous[node] || !is_migrated;
        self.run_previous[node] = self.programs.previous.is_some() && is_next_previous;
        self.until_listening(node).await;
        let ran = !self.dead_nodes().contains(&node);
        self.signal(node, "TERM");
        let Some(mut child) = self.nodes[node].take() else { return false };
        let deadline = Instant::now() + STOP_TIMEOUT;
        while Instant::now() < deadline {
            if let Ok(Some(status)) = child.try_wait() {
                return ran && status.success();
            }
            tokio::time::sleep(LOOK_PERIOD).await;
        }
        let _ = child.kill();
        let _ = child.wait();
        false
    }

    /// Waits for a node that has just started: until it listens, a signal may come before its
    /// program can handle it.
    async fn until_listening(&self, node: usize) {
        let address = self.urls()[node].replace("http://", "");
        let began = Instant::now();
        while began.elapsed() < LISTEN_TIMEOUT && std::net::TcpStream::connect(&address).is_err() {
            tokio::time::sleep(LOOK_PERIOD).await;
        }
    }

    /// Nodes that should run and do not.
    pub fn dead_nodes(&mut self) -> Vec<usize> {
        let mut dead = Vec::new();
        for (node, child) in self.nodes.iter_mut().enumerate() {
            if child.as_mut().is_some_and(|it| !matches!(it.try_wait(), Ok(None))) {
                dead.push(node);
            }
        }
        dead
    }

    /// Freezes a node, or lets it continue.
    pub fn freeze_node(&self, node: usize, is_frozen: bool) {
        self.signal(node, if is_frozen { "STOP" } else { "CONT" });
    }

    fn signal(&self, node: usize, name: &str) {
        if let Some(child) = &self.nodes[node] {
            signal(name, &[&child.id().to_string()]);
        }
    }

    /// Ends Redis, or starts an empty one.
    ///
    /// # Errors
    /// When it does not start.
    pub fn set_redis(&mut self, is_up: bool) -> anyhow::Result<()> {
        if let Some(redis) = self.redis.take() {
            signal("KILL", &[&redis.pid().to_string()]);
        }
        if is_up {
            self.redis = Some(Redis::start(&Redis::dir(std::process::id()))?);
        }
        Ok(())
    }

    /// Freezes Redis, or lets it continue.
    pub fn freeze_redis(&self, is_frozen: bool) {
        let name = if is_frozen { "STOP" } else { "CONT" };
        self.redis.iter().for_each(|it| signal(name, &[&it.pid().to_string()]));
    }

    /// Waits until every node can serve.
    ///
    /// # Errors
    /// When one cannot in time.
    pub async fn until_ready(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        let client = reqwest::Client::builder().timeout(CALL_TIMEOUT).build()?;
        for url in self.urls() {
            loop {
                let asked = client.get(format!("{url}/readyz")).send().await;
                if asked.is_ok_and(|it| it.status() == 200) {
                    break;
                }
                let dir = self.dir.display();
                ensure!(Instant::now() < deadline, "{url} is not ready: see {dir}");
                tokio::time::sleep(LOOK_PERIOD).await;
            }
        }
        Ok(())
    }
}

/// The first of the ports of this run: runs on one machine must not share them.
fn free_ports() -> Option<u16> {
    let runs = PORTS / RUN_PORTS;
    let own = u16::try_from(std::process::id() % u32::from(runs)).unwrap_or_default();
    let firsts = (0..runs).map(|it| FIRST_PORT + RUN_PORTS * ((own + it) % runs));
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    firsts.into_iter().find(|first| (*first..first + RUN_PORTS).all(is_free))
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.freeze_redis(false);
        (0..NODES).for_each(|it| _ = self.kill_node(it));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rare_commits_have_fail_points() {
        assert!(RARE_POINTS.iter().all(|it| faults::FAIL_POINTS.contains(it)));
    }
}
