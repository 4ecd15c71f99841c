//! Connections: one pool for each kind of work, so that reads cannot starve acks.

use std::{
    ops::{Deref, DerefMut},
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use fencepost_config::PoolArgs;
use fencepost_domain::ids::ProjectId;
use fencepost_fair::connections::{Share, Shares};
use fencepost_signals::telemetry;
use metrics::{counter, histogram};
use sqlx::{
    ConnectOptions, Executor, PgConnection, PgPool, Postgres, Row,
    pool::PoolConnection,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::{
    deadline::{self, Health, Loan},
    roles::{Logins, Role, is_refusal},
};

/// How long a request may wait for a connection before it is shed.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout of the check of a returned connection; after it the connection is closed.
const RELEASE_CHECK_TIMEOUT: Duration = Duration::from_secs(2);
/// Statement timeout of requests, in milliseconds.
const STATEMENT_TIMEOUT_MS: u32 = 4_000;
/// Statement timeout of background work, in milliseconds.
const BACKGROUND_STATEMENT_TIMEOUT_MS: u32 = 60_000;
/// Time from the statement's timeout until a connection without an answer counts as silent.
const SILENCE_MARGIN: Duration = Duration::from_millis(750);
/// How often the database is probed, unless it has answered something else lately.
const PROBE_PERIOD: Duration = Duration::from_millis(500);
/// For how long an answer to another statement makes the probe needless.
const ANSWER_KEEP: Duration = Duration::from_secs(1);
/// A probe has no answer after this time.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Connections are replaced at most this often.
const RENEW_PERIOD: Duration = Duration::from_secs(5);
/// Replaced connections are closed within this time.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of a connection that idles in an open transaction, in milliseconds.
const IDLE_IN_TRANSACTION_TIMEOUT_MS: u32 = 5_000;

/// Claims read jobs in index order. While a snapshot is held and few jobs wait, statistics say that
/// the table is tiny, and the planner would read and sort all rows of a project, including dead
/// ones.
const CLAIM_PLANS: [(&str, &str); 1] = [("enable_bitmapscan", "off")];

/// Statements for many projects must not wait long for a row that is locked.
const SETTLE_LOCK_TIMEOUT: (&str, &str) = ("lock_timeout", "200ms");

/// Connections of a loop with a pool of its own.
const LOOP_CONNECTIONS: u32 = 1;

/// Connections for one kind of work.
#[derive(Debug, Clone)]
pub struct Pool {
    shared: Arc<Shared>,
    name: &'static str,
}

#[derive(Debug)]
struct Shared {
    connections: RwLock<PgPool>,
    shares: Shares,
    max_silence: Duration,
    health: Arc<Health>,
    /// The login, if it has one of its own.
    role: Option<Role>,
    /// Whether the database refused the login, and no connection was acquired since.
    is_refused: AtomicBool,
}

impl Pool {
    /// Takes a connection. The wait is measured.
    ///
    /// # Errors
    /// When none is free in time, or the database does not answer.
    pub async fn acquire(&self) -> sqlx::Result<Connection> {
        self.acquire_since(Instant::now()).await
    }

    async fn acquire_since(&self, started: Instant) -> sqlx::Result<Connection> {
        // Before the connection: it may be older than it seems, but not newer.
        let loan = Loan::new(self.shared.max_silence, &self.shared.health);
        let acquired = self.current().acquire().await;
        histogram!(telemetry::POOL_WAIT_SECONDS, "pool" => self.name)
            .record(started.elapsed().as_secs_f64());
        match &acquired {
            Ok(_) => self.shared.is_refused.store(false, Ordering::Relaxed),
            Err(error) if is_refusal(error) => {
                self.shared.is_refused.store(true, Ordering::Relaxed);
            }
            Err(_) => (),
        }
        let inner = Some(acquired?);
        loan.enter();
        Ok(Connection { inner, loan, share: None })
    }

    /// Takes a connection of the project's share. Take none while you hold another: the project's
    /// requests would wait for each other.
    ///
    /// # Errors
    /// As for [`Self::acquire`].
    pub async fn acquire_for(&self, project_id: ProjectId) -> sqlx::Result<Connection> {
        let started = Instant::now();
        let shared = async {
            let share = self.shared.shares.take(project_id).await;
            let mut conn = self.acquire_since(started).await?;
            conn.share = Some(share);
            Ok(conn)
        };
        timeout(ACQUIRE_TIMEOUT, shared).await.map_err(|_| sqlx::Error::PoolTimedOut)?
    }

    /// The role of this pool, if the database refuses its login.
    async fn refused_role(&self) -> Option<Role> {
        // It may be accepted again, without any work that would notice.
        if self.shared.is_refused.load(Ordering::Relaxed) {
            let _ = self.acquire().await;
        }
        self.shared.role.filter(|_| self.shared.is_refused.load(Ordering::Relaxed))
    }

    fn current(&self) -> PgPool {
        self.shared.connections.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces all connections: those that are borrowed are closed when they come back.
    fn renew(&self) {
        let mut current = self.shared.connections.write().unwrap_or_else(PoisonError::into_inner);
        let new = current.options().clone().connect_lazy_with((*current.connect_options()).clone());
        let old = std::mem::replace(&mut *current, new);
        // Closing waits for connections that may never answer.
        tokio::spawn(timeout(CLOSE_TIMEOUT, async move { old.close().await }));
    }
}

/// A borrowed connection.
#[derive(Debug)]
pub struct Connection {
    /// None only while it is dropped.
    inner: Option<PoolConnection<Postgres>>,
    loan: Arc<Loan>,
    /// Of a project, if it was taken for one.
    share: Option<Share>,
}

impl Connection {
    /// Lets a statement take any time.
    pub fn exempt(&self) {
        self.loan.exempt();
    }

    /// Closes it at once, whatever statement it is in.
    pub fn abandon(mut self) {
        drop(self.inner.take().map(PoolConnection::detach));
    }
}

/// A connection that is kept from one piece of bounded work to the next.
pub trait Kept: Send + Sized {
    /// The connection for this work, unless it must not be used again.
    fn reuse(self) -> Option<Self>;
}

impl Kept for Connection {
    fn reuse(self) -> Option<Self> {
        self.loan.enter();
        (!self.loan.is_stale()).then_some(self)
    }
}

impl Deref for Connection {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        self.inner.as_ref().unwrap_or_else(|| unreachable!("it is there until it is dropped"))
    }
}

impl DerefMut for Connection {
    fn deref_mut(&mut self) -> &mut PgConnection {
        self.inner.as_mut().unwrap_or_else(|| unreachable!("it is there until it is dropped"))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let Some(inner) = self.inner.take() else { return };
        if deadline::is_stopped() {
            // In the middle of a statement: closed at once, without a word to the silent server.
            drop(inner.detach());
        }
    }
}

/// The pools of one node.
#[derive(Debug, Clone)]
pub struct Pools {
    /// The group commits of acks and heartbeats, and nothing else: nothing may delay them.
    pub settle: Pool,
    /// Registrations of workers, and what else workers report, in transactions of their own.
    pub reports: Pool,
    pub claim: Pool,
    pub enqueue: Pool,
    /// Key lookups: junk keys must not delay acks.
    pub keys: Pool,
    /// Reads and rare writes of one project: see [`Self::read_for`].
    read: Pool,
    /// Accounts, and what belongs to no project.
    pub people: Pool,
    pub background: Pool,
    /// Schedules, whose transactions wait for their ticks.
    pub fire: Pool,
    /// The reaper: other loops must not delay it.
    pub reap: Pool,
    /// The promoter, for the same reason.
    pub promote: Pool,
    /// Vacuums, which may take minutes.
    pub vacuum: Pool,
    has_roles: bool,
    /// Of the probe.
    options: PgConnectOptions,
    health: Arc<Health>,
}

impl Pools {
    /// Opens the pools lazily: nothing is connected yet. With `logins`, each pool logs in as the
    /// role of its work.
    ///
    /// # Errors
    /// When `database_url` cannot be read.
    pub fn new(database_url: &str, sizes: PoolArgs, logins: Option<&Logins>) -> sqlx::Result<Self> {
        let owner: PgConnectOptions = database_url.parse()?;
        let health = Arc::new(Health::default());
        let pool = |name, role, size, statement_timeout_ms: u32| {
            let options = match logins {
                Some(logins) if name != "vacuum" || !logins.vacuums_as_owner() => {
                    logins.log_in(&owner, role)
                }
                _ => owner.clone(),
            };
            let options = match name {
                "claim" => options.options(CLAIM_PLANS),
                "settle" | "reports" => options.options([SETTLE_LOCK_TIMEOUT]),
                _ => options,
            };
            let max_silence = Duration::from_millis(statement_timeout_ms.into()) + SILENCE_MARGIN;
            let shared = Shared {
                connections: RwLock::new(pool(options, size, statement_timeout_ms, &health)),
                shares: Shares::of(size),
                max_silence,
                health: Arc::clone(&health),
                role: logins.map(|_| role),
                is_refused: AtomicBool::new(false),
            };
            Pool { name, shared: Arc::new(shared) }
        };
        let hot = |name, size| pool(name, Role::Hot, size, STATEMENT_TIMEOUT_MS);
        let maint = |name, size| pool(name, Role::Maint, size, BACKGROUND_STATEMENT_TIMEOUT_MS);
        Ok(Self {
            settle: hot("settle", sizes.settle_connections),
            reports: hot("reports", sizes.report_connections),
            claim: hot("claim", sizes.claim_connections),
            enqueue: hot("enqueue", sizes.enqueue_connections),
            keys: pool("keys", Role::People, sizes.key_connections, STATEMENT_TIMEOUT_MS),
            read: pool("read", Role::Console, sizes.read_connections, STATEMENT_TIMEOUT_MS),
            people: pool("people", Role::People, sizes.people_connections, STATEMENT_TIMEOUT_MS),
            background: maint("background", sizes.background_connections),
            fire: maint("fire", LOOP_CONNECTIONS),
            reap: maint("reap", LOOP_CONNECTIONS),
            promote: maint("promote", LOOP_CONNECTIONS),
            vacuum: maint("vacuum", LOOP_CONNECTIONS),
            has_roles: logins.is_some(),
            options: logins.map_or_else(|| owner.clone(), |it| it.log_in(&owner, Role::Maint)),
            health,
        })
    }

    /// Watches the database until `stopping`. All connections are replaced when a statement got no
    /// answer in time, and when a probe got none and a new connection does.
    pub async fn watch(&self, stopping: CancellationToken) {
        let options = self.options.clone().application_name("fencepost");
        let mut probe = None;
        let mut renewed_at: Option<Instant> = None;
        let mut had_no_answer = false;
        loop {
            tokio::select! {
                () = stopping.cancelled() => return,
                () = self.health.suspected() => self.renew(&mut renewed_at),
                () = tokio::time::sleep(PROBE_PERIOD) => {
                    if !had_no_answer && self.health.has_answered_within(ANSWER_KEEP) {
                        continue;
                    }
                    match timeout(PROBE_TIMEOUT, ping(probe.take(), &options)).await {
                        Ok(Ok(answered)) => {
                            probe = Some(answered);
                            if had_no_answer {
                                self.renew(&mut renewed_at);
                            }
                            had_no_answer = false;
                        }
                        // An error is an answer too: each pool notices its own.
                        Ok(Err(_)) => (),
                        Err(_) => had_no_answer = true,
                    }
                }
            }
        }
    }

    /// Replaces all connections, unless that was done lately: under load it would cost more than it
    /// helps.
    fn renew(&self, renewed_at: &mut Option<Instant>) {
        if renewed_at.is_some_and(|it| it.elapsed() < RENEW_PERIOD) {
            return;
        }
        *renewed_at = Some(Instant::now());
        counter!(telemetry::POOLS_RENEWED).increment(1);
        tracing::warn!("connections to the database did not answer: all are replaced");
        self.all().into_iter().for_each(Pool::renew);
        self.health.replaced();
    }

    /// A connection for reads and settings of one project. With the roles of `ops/roles.sql` it
    /// sees no row of another project. Take none while you hold another: see
    /// [`Pool::acquire_for`].
    pub async fn read_for(&self, project_id: ProjectId) -> sqlx::Result<Connection> {
        self.read_as(project_id, project_id).await
    }

    /// The same for a project's outbox, of the share of its owner: they are one tenant.
    pub async fn read_outbox(
        &self,
        owner: ProjectId,
        outbox: ProjectId,
    ) -> sqlx::Result<Connection> {
        self.read_as(owner, outbox).await
    }

    async fn read_as(&self, tenant: ProjectId, seen: ProjectId) -> sqlx::Result<Connection> {
        let mut conn = self.read.acquire_for(tenant).await?;
        if self.has_roles {
            let set = sqlx::query("select set_config('app.project_id', $1, false)");
            set.bind(seen.0.to_string()).execute(&mut *conn).await?;
        }
        Ok(conn)
    }

    /// A role whose login the database refuses.
    pub async fn refused_role(&self) -> Option<Role> {
        for pool in self.all() {
            if let Some(role) = pool.refused_role().await {
                return Some(role);
            }
        }
        None
    }

    fn all(&self) -> [&Pool; 12] {
        let Self { settle, claim, enqueue, keys, read, people, background, .. } = self;
        let Self { reports, fire, reap, promote, vacuum, .. } = self;
        [
            settle, reports, claim, enqueue, keys, read, people, background, fire, reap, promote,
            vacuum,
        ]
    }

    /// Connections of each pool: its name, idle ones, and those in use.
    #[must_use]
    pub fn connections(&self) -> [(&'static str, u32, u32); 12] {
        self.all().map(|named| {
            let pool = named.current();
            let idle = u32::try_from(pool.num_idle()).unwrap_or(u32::MAX);
            (named.name, idle, pool.size().saturating_sub(idle))
        })
    }

    /// Closes every connection.
    pub async fn close(&self) {
        for it in self.all() {
            it.current().close().await;
        }
    }
}

fn pool(
    options: PgConnectOptions,
    size: u32,
    statement_timeout_ms: u32,
    health: &Arc<Health>,
) -> PgPool {
    let health = Arc::clone(health);
    let options = options.application_name("fencepost").options([
        ("statement_timeout", statement_timeout_ms.to_string()),
        ("idle_in_transaction_session_timeout", IDLE_IN_TRANSACTION_TIMEOUT_MS.to_string()),
        ("synchronous_commit", "on".to_owned()),
        // Statements that lock rows read what was committed while they waited.
        ("default_transaction_isolation", "read committed".to_owned()),
        // JIT compilation takes longer than any of our statements runs.
        ("jit", "off".to_owned()),
        // Each statement has one good plan, by the keys: planning it every time costs more than
        // running it, and a plan made while a table is small must not scan it forever.
        ("plan_cache_mode", "force_generic_plan".to_owned()),
        ("enable_seqscan", "off".to_owned()),
    ]);
    PgPoolOptions::new()
        .max_connections(size)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        .test_before_acquire(false)
        .after_release(move |conn, _| {
            let health = Arc::clone(&health);
            Box::pin(async move {
                let is_clean = is_clean(conn).await?;
                health.note_answer();
                Ok(is_clean)
            })
        })
        .connect_lazy_with(options)
}

/// Probes the database, on this connection or a new one.
async fn ping(
    probe: Option<PgConnection>,
    options: &PgConnectOptions,
) -> sqlx::Result<PgConnection> {
    let mut probe = match probe {
        Some(probe) => probe,
        None => options.connect().await?,
    };
    probe.execute(sqlx::raw_sql("select")).await?;
    Ok(probe)
}

/// Whether a returned connection is outside of any transaction and its server still answers.
///
/// A future that is dropped while it begins a transaction leaves it open on the pooled connection,
/// and the next borrower's writes would be lost with it. Only a statement of the simple protocol
/// can be used: in a transaction `now()` is older than the statement.
async fn is_clean(conn: &mut PgConnection) -> sqlx::Result<bool> {
    let check = conn.fetch_one(sqlx::raw_sql("select now() = statement_timestamp()"));
    match timeout(RELEASE_CHECK_TIMEOUT, check).await {
        Ok(Ok(row)) => Ok(row.get(0)),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(sqlx::Error::PoolTimedOut),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_unreadable_url_is_reported_before_anything_connects() {
        assert!(Pools::new("nonsense", PoolArgs::default(), None).is_err());
        assert!(Pools::new("postgres://u@localhost/db", PoolArgs::default(), None).is_ok());
    }
}
