//! PostgreSQL with a synchronous standby: it can crash, fall silent, refuse writes and fail over.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use fencepost::dev::cluster::{self, Cluster, Durability};
use sqlx::{ConnectOptions, Connection, PgConnection, postgres::PgConnectOptions};
use tokio::time::sleep;

use crate::{as_postgres, proxy::Proxy, signal};

/// The name by which the primary knows its standby.
const STANDBY: &str = "standby";
/// Longest wait for a standby that follows, and for its promotion.
const FOLLOW_TIMEOUT: Duration = Duration::from_secs(60);
const LOOK_PERIOD: Duration = Duration::from_millis(20);
/// The largest file of a PostgreSQL whose disk counts as full: far below one of its log's.
const MAX_FILE_BYTES: u64 = 64 * 1024;
/// What a new session of a PostgreSQL without memory may get: less than it needs for its plans.
const SPARE_BYTES: u64 = 3 * 1024 * 1024;
const PAGE_BYTES: u64 = 4_096;

/// One PostgreSQL.
struct Server {
    dir: PathBuf,
    socket_dir: PathBuf,
    cluster: Option<Cluster>,
}

impl Server {
    fn start(dir: PathBuf, number: usize) -> anyhow::Result<Self> {
        let socket_dir = cluster::socket_dir(std::process::id());
        let socket_dir = socket_dir.with_extension(number.to_string());
        let cluster = Cluster::start_at(&dir, Durability::Safe, socket_dir.clone())?;
        Ok(Self { dir, socket_dir, cluster: Some(cluster) })
    }

    fn pid(&self) -> anyhow::Result<String> {
        postmaster(&self.dir)
    }

    async fn connect(&self) -> anyhow::Result<PgConnection> {
        let host = self.socket_dir.display();
        let url = format!("postgres://fencepost@localhost/postgres?host={host}");
        let options: PgConnectOptions = url.parse()?;
        Ok(options.connect().await?)
    }

    async fn execute(&self, sql: &'static str) -> anyhow::Result<()> {
        let mut conn = self.connect().await?;
        sqlx::raw_sql(sql).execute(&mut conn).await?;
        conn.close().await?;
        Ok(())
    }

    /// Waits until a look answers yes.
    async fn until(&self, sql: &'static str) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            let mut conn = self.connect().await?;
            let is_so: bool = sqlx::query_scalar(sql).fetch_one(&mut conn).await?;
            conn.close().await?;
            if is_so {
                return Ok(());
            }
            ensure!(began.elapsed() < FOLLOW_TIMEOUT, "still not so: {sql}");
            sleep(LOOK_PERIOD).await;
        }
    }
}

/// A primary, its standby, and the proxy before them.
pub struct Pair {
    dir: PathBuf,
    primary: Server,
    standby: Option<Server>,
    /// Clusters that were made so far.
    made: usize,
    pub proxy: Proxy,
}

impl Pair {
    /// Starts both. To be called from the main thread.
    ///
    /// # Errors
    /// When one does not start.
    pub async fn start(dir: &Path) -> anyhow::Result<Self> {
        let primary = Server::start(dir.join("postgres-0"), 0)?;
        let own = PathBuf::from(format!("/tmp/fencepost-chaos-{}", std::process::id()));
        let proxy = Proxy::start(own, primary.socket_dir.clone())?;
        let mut pair = Self { dir: dir.to_owned(), primary, standby: None, made: 1, proxy };
        pair.add_standby().await?;
        Ok(pair)
    }

    /// A connection to the primary, past the proxy.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn connect(&self) -> anyhow::Result<PgConnection> {
        self.primary.connect().await
    }

    /// Copies the primary to a standby that commits wait for.
    async fn add_standby(&mut self) -> anyhow::Result<()> {
        let dir = self.dir.join(format!("postgres-{}", self.made));
        let cluster = self.primary.cluster.as_ref().context("the primary is down")?;
        cluster.copy_to(&dir, STANDBY)?;
        // It is a copy of the primary's: as a primary it must not wait for a standby.
        let mut settings =
            fs::File::options().append(true).open(dir.join("postgresql.auto.conf"))?;
        writeln!(settings, "synchronous_standby_names = ''")?;
        self.standby = Some(Server::start(dir, self.made)?);
        self.made += 1;
        let follows = "select exists (select from pg_stat_replication where state = 'streaming')";
        self.primary.until(follows).await?;
        // A primary that has recovered must still have what its standby lacks.
        self.primary.execute("alter system set wal_keep_size = '1GB'").await?;
        let waits = "alter system set synchronous_standby_names = 'standby'";
        self.primary.execute(waits).await?;
        self.primary.execute("select pg_reload_conf()").await?;
        let is_sync = "select exists (select from pg_stat_replication where sync_state = 'sync')";
        self.primary.until(is_sync).await
    }

    /// Kills the primary with all its sessions: what was not committed is gone.
    ///
    /// # Errors
    /// When it does not run.
    pub async fn kill(&mut self) -> anyhow::Result<()> {
        let children = kill_processes_of(&self.primary.pid()?)?;
        drop(self.primary.cluster.take());
        // A start before they are gone is refused.
        while children.iter().any(|it| Path::new("/proc").join(it).exists()) {
            sleep(LOOK_PERIOD).await;
        }
        Ok(())
    }

    /// Starts the primary that was killed.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start_again(&mut self) -> anyhow::Result<()> {
        let socket_dir = self.primary.socket_dir.clone();
        let cluster = Cluster::start_at(&self.primary.dir, Durability::Safe, socket_dir)?;
        self.primary.cluster = Some(cluster);
        Ok(())
    }

    /// Freezes the primary, promotes the standby in its place, and lets the old one wake up where
    /// no node reaches it.
    ///
    /// After a crash, a primary shows commits that its standby may lack: only a standby that has
    /// all of them is promoted, as an operator would check.
    ///
    /// # Errors
    /// When the standby does not take over.
    pub async fn promote(&mut self) -> anyhow::Result<()> {
        self.until_standby_has_all().await?;
        let standby = self.standby.take().context("there is no standby")?;
        let old = self.primary.pid()?;
        signal_processes_of(&old, "STOP")?;
        let promoted = async {
            standby.execute("select pg_promote()").await?;
            standby.until("select not pg_is_in_recovery()").await
        };
        let promoted = promoted.await;
        self.proxy.point_to(standby.socket_dir.clone());
        signal_processes_of(&old, "CONT")?;
        self.primary = standby;
        promoted
    }

    async fn until_standby_has_all(&self) -> anyhow::Result<()> {
        let mut conn = self.primary.connect().await?;
        let now: String =
            sqlx::query_scalar("select pg_current_wal_lsn()::text").fetch_one(&mut conn).await?;
        let has_all = "select exists (
                select from pg_stat_replication
                where sync_state = 'sync' and flush_lsn >= $1::pg_lsn
            )";
        let began = Instant::now();
        while !sqlx::query_scalar(has_all).bind(&now).fetch_one(&mut conn).await? {
            ensure!(began.elapsed() < FOLLOW_TIMEOUT, "the standby does not follow");
            sleep(LOOK_PERIOD).await;
        }
        conn.close().await?;
        Ok(())
    }

    /// Gives the new primary a standby, and deletes the old primary.
    ///
    /// # Errors
    /// When there is none in time.
    pub async fn restore_standby(&mut self) -> anyhow::Result<()> {
        if self.standby.is_some() {
            return Ok(());
        }
        self.add_standby().await?;
        let used = [Some(&self.primary), self.standby.as_ref()];
        let used: Vec<_> = used.into_iter().flatten().map(|it| it.dir.clone()).collect();
        for number in 0..self.made {
            let dir = self.dir.join(format!("postgres-{number}"));
            if !used.contains(&dir) && dir.exists() {
                fs::remove_dir_all(dir)?;
            }
        }
        Ok(())
    }

    /// Freezes all processes of the primary, or lets them continue.
    ///
    /// # Errors
    /// When it does not run.
    pub fn freeze(&self, is_frozen: bool) -> anyhow::Result<()> {
        signal_processes_of(&self.primary.pid()?, if is_frozen { "STOP" } else { "CONT" })
    }

    /// Refuses writes in transactions that begin from now on, or takes them again.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn set_read_only(&self, is_read_only: bool) -> anyhow::Result<()> {
        let mut conn = self.connect().await?;
        let statements: &'static str = match is_read_only {
            true => "alter system set default_transaction_read_only = on",
            false => "alter system reset default_transaction_read_only",
        };
        sqlx::raw_sql(statements).execute(&mut conn).await?;
        sqlx::raw_sql("select pg_reload_conf()").execute(&mut conn).await?;
        conn.close().await?;
        Ok(())
    }

    /// Lets the primary write no file beyond its first 64 KiB. Its log has files of 16 MiB, so it
    /// panics, as it does when the disk is full.
    ///
    /// # Errors
    /// When it does not run.
    pub fn fill_disk(&self) -> anyhow::Result<()> {
        limit_files(&self.primary.pid()?, &MAX_FILE_BYTES.to_string())
    }

    /// Lifts that limit. A primary that could not recover by then has ended: it is started again.
    ///
    /// # Errors
    /// When it does not answer in time.
    pub async fn free_disk(&mut self) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            let runs = self.primary.cluster.as_mut().is_some_and(|it| it.check().is_ok());
            if !runs {
                drop(self.primary.cluster.take());
                return self.start_again();
            }
            if let Ok(postmaster) = self.primary.pid() {
                limit_files(&postmaster, "unlimited")?;
            }
            if self.connect().await.is_ok() {
                return Ok(());
            }
            ensure!(began.elapsed() < FOLLOW_TIMEOUT, "PostgreSQL does not recover");
            sleep(LOOK_PERIOD).await;
        }
    }

    /// Gives sessions that begin from now on too little memory, or enough again.
    ///
    /// # Errors
    /// When the primary does not run.
    pub async fn limit_memory(&self, is_short: bool) -> anyhow::Result<()> {
        let postmaster = self.primary.pid()?;
        let sizes = fs::read_to_string(format!("/proc/{postmaster}/statm"))?;
        let pages: u64 = sizes.split(' ').next().unwrap_or_default().parse()?;
        let most = pages * PAGE_BYTES + SPARE_BYTES;
        let limit = if is_short { most.to_string() } else { "unlimited".to_owned() };
        limit_process(&postmaster, &format!("--as={limit}:unlimited"))?;
        if is_short {
            self.end_sessions().await;
            return Ok(());
        }
        children_of(&postmaster)?.iter().try_for_each(|it| limit_process(it, "--as=unlimited"))
    }

    /// Takes all connections that are free, until they are dropped.
    pub async fn take_connections(&self, most: usize) -> Vec<PgConnection> {
        let mut taken = Vec::new();
        while taken.len() < most
            && let Ok(conn) = self.connect().await
        {
            taken.push(conn);
        }
        taken
    }

    /// Ends one of two sessions.
    pub async fn end_sessions(&self) {
        let sql = "select pg_terminate_backend(pid) from pg_stat_activity
                   where pid <> pg_backend_pid() and backend_type = 'client backend'
                       and pid % 2 = 0";
        let Ok(mut conn) = self.connect().await else { return };
        let _ = sqlx::query(sql).execute(&mut conn).await;
        let _ = conn.close().await;
    }
}

impl Drop for Pair {
    /// A frozen process would not end.
    fn drop(&mut self) {
        let _ = self.freeze(false);
    }
}

/// The process of the PostgreSQL that has its data in this folder.
///
/// # Errors
/// When it does not run.
pub fn postmaster(data_dir: &Path) -> anyhow::Result<String> {
    let file = fs::read_to_string(data_dir.join("postmaster.pid"))?;
    let pid = file.lines().next().unwrap_or_default().trim().to_owned();
    // One that was killed leaves its file.
    let command = fs::read_to_string(format!("/proc/{pid}/cmdline"))?;
    ensure!(command.contains("postgres"), "{pid} is another program");
    Ok(pid)
}

/// Signals a postmaster and its children: it first, so that no child comes in between.
///
/// # Errors
/// When it does not run.
pub fn signal_processes_of(postmaster: &str, name: &str) -> anyhow::Result<()> {
    signal(name, &[postmaster]);
    let children = children_of(postmaster)?;
    signal(name, &children.iter().map(String::as_str).collect::<Vec<_>>());
    Ok(())
}

/// Kills a postmaster and its children, and returns these.
///
/// # Errors
/// When it does not run.
pub fn kill_processes_of(postmaster: &str) -> anyhow::Result<Vec<String>> {
    // Its children are no longer listed once it is gone.
    signal("STOP", &[postmaster]);
    let children = children_of(postmaster)?;
    let all = std::iter::once(postmaster).chain(children.iter().map(String::as_str));
    signal("KILL", &all.collect::<Vec<_>>());
    Ok(children)
}

/// Limits the files of a postmaster and its children: it first, since those to come inherit it.
fn limit_files(postmaster: &str, limit: &str) -> anyhow::Result<()> {
    let limit = format!("--fsize={limit}:unlimited");
    limit_process(postmaster, &limit)?;
    let children = children_of(postmaster).unwrap_or_default();
    children.iter().try_for_each(|it| limit_process(it, &limit))
}

/// Limits a process, if it still runs.
fn limit_process(pid: &str, limit: &str) -> anyhow::Result<()> {
    // Its own user may do so, and root not everywhere.
    let reported = as_postgres("prlimit")?.args(["--pid", pid, limit]).output()?;
    let has_ended = !Path::new("/proc").join(pid).exists();
    let refusal = String::from_utf8_lossy(&reported.stderr);
    ensure!(reported.status.success() || has_ended, "prlimit {limit}: {refusal}");
    Ok(())
}

fn children_of(postmaster: &str) -> anyhow::Result<Vec<String>> {
    let file = format!("/proc/{postmaster}/task/{postmaster}/children");
    let children = fs::read_to_string(&file).with_context(|| file)?;
    Ok(children.split_whitespace().map(str::to_owned).collect())
}
