//! Gauges of the whole instance: waiting work, pools, and the database. Every node reports the same
//! numbers of the database; dashboards take the maximum.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use fencepost_domain::explain::Reason;
use fencepost_signals::telemetry;
use fencepost_store::{
    connection::pools::Pools,
    sweep::{
        gauges::{self, ReadyQueue, Server, Table},
        set_aside::{self, Work},
    },
    workers::ALIVE_SECONDS,
};
use metrics::{counter, gauge};

use crate::{Engine, jobs::explain};

/// Queues whose oldest job is explained in one pass, the longest-waiting ones first; not counting
/// those that are paused or have no workers.
const MAX_EXPLAINED_QUEUES: usize = 20;
/// Explained jobs of one project: it must not hide the others.
const MAX_EXPLAINED_OF_PROJECT: usize = 2;
/// Jobs that have waited less are not explained: where work flows, it costs nothing.
const MIN_EXPLAINED_SECONDS: f64 = 30.0;
/// The reason in the others.
const UNEXPLAINED: &str = "unexplained";

/// Sets the gauges of this node's pools.
pub fn show_pools(pools: &Pools) {
    for (pool, idle, used) in pools.connections() {
        gauge!(telemetry::POOL_CONNECTIONS, "pool" => pool, "state" => "idle").set(idle);
        gauge!(telemetry::POOL_CONNECTIONS, "pool" => pool, "state" => "used").set(used);
    }
}

/// Reads and sets the gauges that are the same on all nodes. Returns how long the database was
/// busy with the counts of all queues, which is more the more queues there are.
pub async fn refresh(engine: &Engine) -> sqlx::Result<Duration> {
    let mut conn = engine.pools.background.acquire().await?;
    let started = Instant::now();
    let queues = gauges::places(&mut conn, ALIVE_SECONDS).await?;
    let jobs = gauges::by_state(&mut conn).await?;
    let took = started.elapsed();
    let max = (MAX_EXPLAINED_QUEUES, MAX_EXPLAINED_OF_PROJECT);
    let reasons = explain::oldest(&mut conn, &queues, MIN_EXPLAINED_SECONDS, max).await?;
    show_waiting(&queues, &reasons);
    let states = [
        ("scheduled", jobs.scheduled),
        ("active", jobs.active),
        ("backoff", jobs.backoff),
        ("dead_letter", jobs.dead_letter),
    ];
    for (state, jobs) in states {
        gauge!(telemetry::JOBS, "state" => state).set(jobs as f64);
    }
    let set_aside = set_aside::count(&mut conn).await?;
    for work in Work::ALL.map(Work::as_str) {
        let items = set_aside.iter().find(|it| it.0 == work).map_or(0, |it| it.1);
        gauge!(telemetry::SET_ASIDE, "work" => work).set(items as f64);
    }
    gauges::tables(&mut conn).await?.into_iter().for_each(show_table);
    show_server(gauges::server(&mut conn).await?);
    Ok(took)
}

/// The oldest ready job by the reason for which it waits: only `ready` is the server's affair.
fn show_waiting(queues: &[ReadyQueue], reasons: &[Option<(Reason, String)>]) {
    let named = Reason::OF_READY_JOBS.map(|it| (it.name(), Some(it)));
    for (name, reason) in named.into_iter().chain([(UNEXPLAINED, None)]) {
        let explained = queues.iter().zip(reasons);
        let of_these = explained.filter(|(_, it)| it.as_ref().map(|it| it.0) == reason);
        let oldest = of_these.map(|(it, _)| it.age_seconds).fold(0.0, f64::max);
        gauge!(telemetry::OLDEST_READY_SECONDS, "reason" => name).set(oldest);
    }
}

fn show_table(table: Table) {
    let Table { name, table_bytes, index_bytes, dead_rows } = table;
    let size = |part, bytes: i64| {
        gauge!(telemetry::TABLE_BYTES, "table" => name.clone(), "part" => part).set(bytes as f64);
    };
    size("table", table_bytes);
    size("indexes", index_bytes);
    gauge!(telemetry::TABLE_DEAD_ROWS, "table" => name).set(dead_rows as f64);
}

fn show_server(server: Server) {
    gauge!(telemetry::SNAPSHOT_SECONDS).set(server.oldest_snapshot_seconds);
    gauge!(telemetry::SNAPSHOT_TRANSACTIONS).set(server.oldest_snapshot_transactions as f64);
    gauge!(telemetry::POSTGRES_CONNECTIONS).set(server.connections as f64);
    gauge!(telemetry::POSTGRES_MAX_CONNECTIONS).set(server.max_connections as f64);
    gauge!(telemetry::HELD_WAL_BYTES).set(server.held_wal_bytes as f64);
    gauge!(telemetry::STANDBYS).set(server.standbys as f64);
    gauge!(telemetry::ARCHIVE_FAILING_SECONDS).set(server.archive_failing_seconds);
    count(telemetry::WAL_BYTES, &WAL_BYTES_SEEN, server.wal_bytes);
    count(telemetry::POSTGRES_COMMITS, &COMMITS_SEEN, server.commits);
    count(telemetry::POSTGRES_DEADLOCKS, &DEADLOCKS_SEEN, server.deadlocks);
}

static WAL_BYTES_SEEN: AtomicU64 = AtomicU64::new(0);
static COMMITS_SEEN: AtomicU64 = AtomicU64::new(0);
static DEADLOCKS_SEEN: AtomicU64 = AtomicU64::new(0);

/// Adds the database's counter to ours. It restarts after a failover, or when its statistics are
/// reset.
fn count(name: &'static str, seen: &AtomicU64, now: i64) {
    let now = now.unsigned_abs();
    let before = seen.swap(now, Ordering::Relaxed);
    counter!(name).increment(now.checked_sub(before).unwrap_or(now));
}
