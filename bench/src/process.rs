//! CPU and memory of the server and its PostgreSQL, from Linux.

use std::fs;

use sqlx::{ConnectOptions, Connection, postgres::PgConnectOptions};

/// The kernel's clock ticks per second, as `/proc` counts them.
const TICKS_PER_SECOND: f64 = 100.0;

/// The two groups of processes that are measured.
#[derive(Debug, Clone)]
pub struct Watched {
    pub server_pid: u32,
    pub database_url: String,
}

/// Cores of this machine.
pub fn cores() -> f64 {
    std::thread::available_parallelism().map_or(1.0, |it| it.get() as f64)
}

/// Their usage.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    /// CPU seconds of the server.
    pub server_seconds: f64,
    /// CPU seconds of all PostgreSQL processes.
    pub postgres_seconds: f64,
    /// Transactions that the database has ended.
    pub transactions: f64,
    /// Memory of the server, in bytes.
    pub server_bytes: f64,
    /// Bytes of write-ahead log that PostgreSQL has written.
    pub wal_bytes: f64,
}

impl Usage {
    /// The usage since `before`; of the memory the growth.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            server_seconds: self.server_seconds - before.server_seconds,
            postgres_seconds: self.postgres_seconds - before.postgres_seconds,
            transactions: self.transactions - before.transactions,
            server_bytes: self.server_bytes - before.server_bytes,
            wal_bytes: self.wal_bytes - before.wal_bytes,
        }
    }
}

impl Watched {
    /// Their current usage.
    pub async fn usage(&self) -> anyhow::Result<Usage> {
        let options: PgConnectOptions = self.database_url.parse()?;
        let mut conn = options.connect().await?;
        // Statistics appear when a session ends a transaction and a second has passed.
        let transactions: f64 = sqlx::query_scalar(
            "select sum(xact_commit + xact_rollback)::float8
             from pg_stat_database where datname = current_database()",
        )
        .fetch_one(&mut conn)
        .await?;
        let wal_bytes: f64 =
            sqlx::query_scalar("select (pg_current_wal_insert_lsn() - '0/0')::float8")
                .fetch_one(&mut conn)
                .await?;
        let backend: i32 =
            sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut conn).await?;
        // Of a process that still runs.
        let postmaster = parent_of(u32::try_from(backend)?);
        conn.close().await?;
        Ok(Usage {
            server_seconds: cpu_seconds(self.server_pid),
            postgres_seconds: postmaster.map_or(0.0, family_seconds),
            transactions,
            server_bytes: resident_bytes(self.server_pid),
            wal_bytes,
        })
    }
}

/// The fields of `/proc/PID/stat` after the command, which may hold spaces.
fn stat(pid: u32) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = text.rsplit_once(") ")?;
    Some(fields.split(' ').map(str::to_owned).collect())
}

fn parent_of(pid: u32) -> Option<u32> {
    stat(pid)?.get(1)?.parse().ok()
}

/// User and system time of a process and of its children that have ended.
pub fn cpu_seconds(pid: u32) -> f64 {
    let fields = stat(pid).unwrap_or_default();
    let ticks = fields.get(11..15).unwrap_or_default();
    ticks.iter().filter_map(|it| it.parse::<f64>().ok()).sum::<f64>() / TICKS_PER_SECOND
}

fn family_seconds(parent: u32) -> f64 {
    let children = fs::read_dir("/proc").into_iter().flatten().flatten();
    let children = children
        .filter_map(|it| it.file_name().to_str()?.parse().ok())
        .filter(|it| parent_of(*it) == Some(parent));
    cpu_seconds(parent) + children.map(cpu_seconds).sum::<f64>()
}

/// Anonymous memory: pages of the program's file are loaded when they are first needed, and are no
/// cost of what is measured.
fn resident_bytes(pid: u32) -> f64 {
    const KIB: f64 = 1024.0;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|it| it.strip_prefix("RssAnon:")).unwrap_or_default();
    line.split_whitespace().next().and_then(|it| it.parse::<f64>().ok()).unwrap_or(0.0) * KIB
}
