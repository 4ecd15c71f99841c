//! `fencepost doctor`: what keeps an instance from its work, and the command that ends it. For
//! people on call: it reads, and changes nothing.

use std::{
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::Context;
use clap::Args;
use fencepost_config::secret;
use fencepost_store::{
    connection::{
        migrate::{self, Schema},
        nodes::NODE_SILENCE_SECONDS,
    },
    sweep::doctor::{self, AWAITS_STANDBY, Session, Slot},
};
use secrecy::{ExposeSecret, SecretString};
use sqlx::{ConnectOptions, Connection, PgConnection, postgres::PgConnectOptions};

use super::{
    certificate::{self, Begins},
    findings::Findings,
    target::TargetArgs,
};

/// As the alert `FencepostSnapshotHeld`.
const OLD_SNAPSHOT_SECONDS: i32 = 600;
/// As the alert `FencepostHorizonHeld`.
const MAX_HELD_TRANSACTIONS: i64 = 5_000_000;
/// As the alert `FencepostWalHeld`.
const MAX_HELD_WAL_BYTES: i64 = 10 * 1024 * 1024 * 1024;
/// As the alert `FencepostDeadRows`.
const MAX_DEAD_ROWS: i64 = 500_000;
/// Others wait for a lock for longer than any statement of a node may take.
const BLOCKED_SECONDS: i32 = 5;
/// The release whose nodes do not say which one they are.
const SILENT_RELEASE: &str = "0.2.0";
/// Due work that has waited for longer is late.
const LATE_SECONDS: f64 = 30.0;
/// Mails are tried again for hours.
const LATE_MAIL_SECONDS: f64 = 600.0;
/// Jobs are deleted within an hour of the end of their retention.
const LATE_RETENTION_SECONDS: f64 = 3_600.0;
/// A clock that differs by more makes logs and tokens hard to compare.
const MAX_CLOCK_OFFSET_SECONDS: f64 = 1.0;
/// A certificate that ends within this time is reported.
const CERTIFICATE_SOON: Duration = Duration::from_secs(21 * 86_400);

/// Options of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    target: TargetArgs,

    /// URL of the database for a login that sees and ends all sessions, such as a superuser's
    #[arg(long, env = "FENCEPOST_ADMIN_URL", hide_env_values = true, value_name = "URL")]
    admin_url: Option<String>,

    /// Address of the instance whose certificate is looked at
    #[arg(long, env = "FENCEPOST_PUBLIC_URL", value_name = "URL")]
    public_url: Option<String>,

    /// Redis whose certificates are looked at, as for `serve`
    #[arg(long, env = "FENCEPOST_REDIS_URL", hide_env_values = true, value_name = "URL")]
    redis_url: Option<SecretString>,

    /// File with the URL of Redis
    #[arg(
        long,
        env = "FENCEPOST_REDIS_URL_FILE",
        value_name = "FILE",
        conflicts_with = "redis_url"
    )]
    redis_url_file: Option<PathBuf>,
}

/// Looks at everything, and prints what it finds.
///
/// # Errors
/// When something is wrong; a warning is no error.
pub async fn run(args: DoctorArgs) -> anyhow::Result<()> {
    let mut findings = Findings::default();
    let redis_url = secret(args.redis_url.as_ref(), args.redis_url_file.as_ref())?;
    let mut owner = args.target.connect().await?;
    let mut admin = match &args.admin_url {
        Some(url) => {
            let options: PgConnectOptions = url.parse().context("--admin-url is invalid")?;
            Some(options.connect().await.context("--admin-url: the database does not answer")?)
        }
        None => None,
    };
    let seen_by = admin.as_mut().unwrap_or(&mut owner);
    look_at_sessions(seen_by, &mut findings).await.context("sessions")?;
    look_at_slots(seen_by, &mut findings).await.context("replication")?;
    look_at_archive(seen_by, &mut findings).await.context("the archive")?;
    look_at_tables(&mut owner, &mut findings).await.context("tables")?;
    look_at_nodes(&mut owner, &mut findings).await.context("nodes")?;
    look_at_loops(&mut owner, &mut findings).await.context("loops")?;
    look_at_clock(&mut owner, &mut findings).await.context("the clock")?;
    owner.close().await?;
    if let Some(admin) = admin {
        admin.close().await?;
    }
    if let Some(url) = &args.public_url {
        look_at_certificate(url, certificate::expiry(url).await, &mut findings);
    }
    look_at_database(&args.target.options()?, &mut findings).await;
    if let Some(url) = redis_url {
        look_at_redis(url.expose_secret(), &mut findings).await;
    }
    findings.print()
}

/// A time with its unit, such as `60 s` or `3 h`.
fn age(seconds: f64) -> String {
    match seconds {
        it if it < 120.0 => format!("{it:.0} s"),
        it if it < 7_200.0 => format!("{:.0} min", it / 60.0),
        it => format!("{:.0} h", it / 3_600.0),
    }
}

fn shown(it: &Session) -> String {
    let Session { pid, user, application, state, .. } = it;
    format!("session {pid} of {user} ({application}, {state})")
}

async fn look_at_sessions(conn: &mut PgConnection, findings: &mut Findings) -> sqlx::Result<()> {
    let hidden = doctor::hidden_sessions(conn).await?;
    if hidden > 0 {
        let text = format!(
            "{hidden} sessions of other roles are hidden from this login. Next: --admin-url, or as a superuser: grant pg_read_all_stats, pg_signal_backend to its role"
        );
        findings.doubtful("sessions", text);
    }
    let old = doctor::old_snapshots(conn, OLD_SNAPSHOT_SECONDS).await?;
    for it in &old {
        let (who, age, pid) = (shown(it), age(it.seconds), it.pid);
        let text = format!(
            "{who} has held a snapshot for {age}: dead rows stay. Next: select pg_terminate_backend({pid})"
        );
        findings.bad("snapshots", text);
    }
    let blockers = doctor::blockers(conn, BLOCKED_SECONDS).await?;
    for it in &blockers {
        let (waiting, waited) = (it.waiting, age(it.waited_seconds));
        let (who, next) = match (it.session.pid, &*it.session.state) {
            (0, _) => (
                "a prepared transaction".to_owned(),
                "select gid from pg_prepared_xacts".to_owned(),
            ),
            (_, AWAITS_STANDBY) => (
                shown(&it.session),
                "start the synchronous standby for which it waits, and do not end it".to_owned(),
            ),
            (pid, _) => (shown(&it.session), format!("select pg_terminate_backend({pid})")),
        };
        let text = format!(
            "{waiting} sessions wait for locks of {who}, the first for {waited}. Next: {next}"
        );
        findings.bad("locks", text);
    }
    let prepared = doctor::prepared(conn, OLD_SNAPSHOT_SECONDS).await?;
    for (name, seconds) in &prepared {
        let age = age(*seconds);
        let text = format!(
            "the prepared transaction {name} is {age} old: dead rows stay. Next: rollback prepared {name}"
        );
        findings.bad("snapshots", text);
    }
    if old.is_empty() && blockers.is_empty() && prepared.is_empty() && hidden == 0 {
        findings.good("sessions", "none holds an old snapshot, or locks that others wait for");
    }
    Ok(())
}

async fn look_at_slots(conn: &mut PgConnection, findings: &mut Findings) -> sqlx::Result<()> {
    for it in doctor::slots(conn).await? {
        let Slot { name, held_bytes, held_transactions, .. } = &it;
        let next = match it.is_slot {
            true => {
                format!("Next: start its reader, or select pg_drop_replication_slot('{name}')")
            }
            false => "Next: set hot_standby_feedback to off there".to_owned(),
        };
        if *held_bytes > MAX_HELD_WAL_BYTES {
            let gib = held_bytes / 1024 / 1024 / 1024;
            findings.bad("slots", format!("{name} retains {gib} GiB of WAL. {next}"));
        } else if *held_transactions > MAX_HELD_TRANSACTIONS {
            let text =
                format!("{name} keeps dead rows of {held_transactions} transactions. {next}");
            findings.bad("slots", text);
        } else if !it.is_active {
            findings.doubtful("slots", format!("{name} has no reader. {next}"));
        }
    }
    let standbys = doctor::standbys(conn).await?;
    match (standbys.is_awaited, standbys.synchronous) {
        (true, Some(0)) => findings.bad(
            "standbys",
            "commits wait for a synchronous standby, and none is connected. Next: start it",
        ),
        (true, Some(count)) => findings.good("standbys", format!("{count} confirm each commit")),
        (true, None) => {
            findings.good("standbys", "commits wait for them; this login does not see which");
        }
        (false, _) => findings.doubtful(
            "standbys",
            format!(
                "no commit waits for one of the {} standbys: if this server is lost, acknowledged jobs are. See docs/high-availability.md",
                standbys.all
            ),
        ),
    }
    Ok(())
}

async fn look_at_archive(conn: &mut PgConnection, findings: &mut Findings) -> sqlx::Result<()> {
    let Some(archiver) = doctor::archiver(conn).await? else { return Ok(()) };
    match archiver.failed_wal {
        Some(wal) => {
            let text = format!(
                "{wal} could not be archived: WAL stays, and a restore would lack it. Next: read PostgreSQL's log, and see whether the archive is full or not mounted"
            );
            findings.bad("archive", text);
        }
        None => findings.good("archive", format!("{} is the last WAL in it", archiver.last_wal)),
    }
    Ok(())
}

async fn look_at_tables(conn: &mut PgConnection, findings: &mut Findings) -> anyhow::Result<()> {
    match migrate::schema(conn).await? {
        Schema::Current => findings.good("schema", "has this version, or a newer one"),
        _ => findings.bad("schema", "is not of this version. Next: fencepost migrate"),
    }
    let vacuum = doctor::vacuum(conn, MAX_DEAD_ROWS).await?;
    if !vacuum.is_automatic {
        findings.bad(
            "vacuum",
            "autovacuum is off. Next: alter system set autovacuum = on; select pg_reload_conf()",
        );
    }
    for (table, rows) in &vacuum.dead {
        let text = format!(
            "{table} has {rows} dead rows. Next: end what holds a snapshot, then vacuum (verbose) {table}"
        );
        findings.bad("vacuum", text);
    }
    if vacuum.is_automatic && vacuum.dead.is_empty() {
        findings.good("vacuum", format!("no table has more than {MAX_DEAD_ROWS} dead rows"));
    }
    for index in doctor::invalid_indexes(conn).await? {
        let next = match index.contains("_ccnew") || index.contains("_ccold") {
            true => format!("drop index concurrently {index}"),
            false => format!("reindex index concurrently {index}"),
        };
        findings.bad("indexes", format!("{index} was not built to its end. Next: {next}"));
    }
    Ok(())
}

async fn look_at_nodes(conn: &mut PgConnection, findings: &mut Findings) -> sqlx::Result<()> {
    #[expect(clippy::cast_possible_truncation, reason = "a few seconds")]
    let nodes = doctor::nodes(conn, NODE_SILENCE_SECONDS as i32).await?;
    if nodes.is_empty() {
        findings.bad("nodes", "none is running. Next: fencepost ready, and the logs of the nodes");
        return Ok(());
    }
    let mut versions: Vec<_> =
        nodes.iter().map(|it| it.version.as_deref().unwrap_or(SILENT_RELEASE)).collect();
    versions.sort_unstable();
    versions.dedup();
    let text = format!("{} of version {}", nodes.len(), versions.join(" and "));
    match versions.len() {
        1 => findings.good("nodes", text),
        _ => findings.doubtful("nodes", format!("{text}. Next: finish the upgrade")),
    }
    let mut rules: Vec<_> = nodes.iter().filter_map(|it| it.zone_rules.as_deref()).collect();
    rules.sort_unstable();
    rules.dedup();
    if let [oldest, _, ..] = rules[..] {
        let text = format!(
            "nodes have the rules of {}; all use {oldest}. Next: update tzdata on those with the oldest",
            rules.join(", ")
        );
        findings.doubtful("zones", text);
    }
    Ok(())
}

async fn look_at_loops(conn: &mut PgConnection, findings: &mut Findings) -> sqlx::Result<()> {
    let mut is_late = false;
    for (name, seconds) in doctor::late_loops(conn).await? {
        let allowed = match &*name {
            "mails" => LATE_MAIL_SECONDS,
            "retention" => LATE_RETENTION_SECONDS,
            _ => LATE_SECONDS,
        };
        if seconds > allowed {
            is_late = true;
            let text = format!(
                "{name}: the first due item has waited for {}. Next: see its failures in the log, and docs/runbooks/loop-stalled.md",
                age(seconds)
            );
            findings.bad("loops", text);
        }
    }
    for (work, count) in doctor::set_aside(conn).await? {
        let text = format!(
            "{count} items of {work} failed, and are tried again. Next: docs/runbooks/items-set-aside.md"
        );
        findings.doubtful("loops", text);
    }
    if !is_late {
        findings.good("loops", "no due work is late");
    }
    Ok(())
}

/// The clock here, since 1970.
#[expect(clippy::disallowed_methods, reason = "it is compared with the database's")]
fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

async fn look_at_clock(conn: &mut PgConnection, findings: &mut Findings) -> sqlx::Result<()> {
    let before = now().as_secs_f64();
    let there = doctor::clock(conn).await?;
    let offset = there - f64::midpoint(before, now().as_secs_f64());
    if offset.abs() > MAX_CLOCK_OFFSET_SECONDS {
        let text = format!(
            "the database's clock differs from the one here by {offset:.1} s. Next: check NTP (chronyc tracking) on both"
        );
        findings.doubtful("clock", text);
    } else {
        findings.good("clock", format!("differs from the database's by {:.0} ms", offset * 1e3));
    }
    Ok(())
}

/// PostgreSQL without TLS is no finding: it is in a network of one's own.
async fn look_at_database(database: &PgConnectOptions, findings: &mut Findings) {
    if database.get_socket().is_some() || database.get_host().starts_with('/') {
        return;
    }
    let (host, port) = (database.get_host(), database.get_port());
    let end = certificate::expiry_of_server(host, port, Begins::AsPostgres).await;
    if !matches!(end, Ok(None)) {
        look_at_certificate(&format!("PostgreSQL at {host}:{port}"), end, findings);
    }
}

async fn look_at_redis(url: &str, findings: &mut Findings) {
    for (host, port) in certificate::tls_hosts(url) {
        let end = certificate::expiry_of_server(&host, port, Begins::AtOnce).await;
        look_at_certificate(&format!("Redis at {host}:{port}"), end, findings);
    }
}

fn look_at_certificate(of: &str, end: anyhow::Result<Option<Duration>>, findings: &mut Findings) {
    match end {
        Ok(None) => findings.doubtful("tls", format!("{of} is not encrypted")),
        Ok(Some(end)) => {
            let left = end.saturating_sub(now());
            let days = left.as_secs() / 86_400;
            let text = format!("that of {of} ends in {days} days");
            match left < CERTIFICATE_SOON {
                true => findings.bad("tls", format!("{text}. Next: renew it")),
                false => findings.good("tls", text),
            }
        }
        Err(error) => findings.bad("tls", format!("{of}: {error:#}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The alert rules of this repository.
    const RULES: &str = include_str!("../../ops/prometheus/rules.yml");

    /// The bound of the rule about a metric, which may be a product.
    fn bound(metric: &str) -> i64 {
        let rule = RULES.lines().find(|it| it.contains(metric)).expect("a rule");
        let (_, bound) = rule.rsplit_once('>').expect("a bound");
        bound.split('*').map(|it| it.trim().parse::<i64>().expect("a number")).product()
    }

    #[test]
    fn its_bounds_are_those_of_the_alerts() {
        for (metric, own) in [
            ("fencepost_postgres_oldest_snapshot_seconds", OLD_SNAPSHOT_SECONDS.into()),
            ("fencepost_postgres_oldest_snapshot_transactions", MAX_HELD_TRANSACTIONS),
            ("fencepost_postgres_held_wal_bytes", MAX_HELD_WAL_BYTES),
            ("fencepost_postgres_dead_rows", MAX_DEAD_ROWS),
        ] {
            assert_eq!(bound(metric), own, "{metric}");
        }
    }
}
