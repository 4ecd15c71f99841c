//! One node, from startup to shutdown.

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::Context;
use fencepost_adapters as adapters;
use fencepost_config::{ConnectionLimits, PoolArgs, RedisPlace, Signup, TrustedProxies};
use fencepost_console as console;
use fencepost_domain::{ids::TickKey, plan::Plans};
use fencepost_engine::{
    self as engine, Engine,
    notify::relay,
    schedules::zones::Zones,
    webhooks::{deliver::Deliverer, pusher::Pusher, sender::Sender},
};
use fencepost_http::{self as http, deprecation::Deprecated};
use fencepost_identity::accounts::{
    Accounts, Parts,
    oidc::Providers,
    password::{Passwords, Turns, lists::BreachedPasswords},
    scanners::ScannerKeys,
    token::Tokens,
};
use fencepost_net::{mail::Mailer, outbound::Outbound, seal::MasterKeys};
use fencepost_signals::{
    limiter::Limiter,
    redis_bus::{Bus, Heard, Topic},
    telemetry,
};
use fencepost_store::{
    self as store,
    connection::{deadline::bounded, pools::Pools, roles::Logins},
    people::projects::Instance,
};
use fencepost_web::app::App;
use futures_util::{FutureExt, future::BoxFuture};
use metrics_exporter_prometheus::PrometheusHandle;
use sqlx::{
    error::DatabaseError,
    postgres::{PgDatabaseError, PgSeverity},
};
use tokio::{
    net::TcpListener,
    time::{Instant, sleep, timeout, timeout_at},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::loops;

/// Requests, releases of undelivered jobs and loops may finish within this time at shutdown.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(25);

/// The part of it for running requests: a client that reads slowly must not use all of it.
pub const REQUESTS_TIMEOUT: Duration = Duration::from_secs(15);

/// Timeout of the final writes and of closing the pools; then the process ends.
pub const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of the first logins.
const DATABASE_TIMEOUT: Duration = Duration::from_secs(10);
/// A database that is restarting or failing over may take this long until it answers a node that
/// starts: Patroni, as it is set up, may take 40 s.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Between two questions to it.
const START_PAUSE: Duration = Duration::from_millis(200);
/// Why a node does not start, or ends.
const NO_ANSWER: &str = "the database does not answer";
/// Connections to the operator's listener from one address.
const OPERATOR_CONNECTIONS: u32 = 256;

/// The parts of a node.
pub struct Node {
    pub api: TcpListener,
    /// The operator's listener and its metrics; none if it is not configured.
    pub operator: Option<(TcpListener, PrometheusHandle)>,
    pub database_url: String,
    /// Logins of the pools; none: all use that of the URL.
    pub logins: Option<Logins>,
    /// Size of each pool.
    pub pools: PoolArgs,
    /// Redis; none: this node counts and wakes alone.
    pub redis: Option<RedisPlace>,
    /// The budget of a call to Redis.
    pub redis_budget: Duration,
    /// Accounts: sign-up, plans, and mail.
    pub people: People,
    pub connections: ConnectionLimits,
    /// The pause between two canaries; none: there are none.
    pub canary: Option<Duration>,
    /// The rules of time zones that this node knows.
    pub zones: Zones,
    /// Calls to URLs of users.
    pub outbound: Outbound,
    /// Operations that will end.
    pub deprecated: &'static [Deprecated],
    /// How long new connections are still accepted at shutdown, so that load balancers notice that
    /// it is not ready.
    pub linger: Duration,
}

/// See [`Node::people`].
#[derive(Clone)]
pub struct People {
    pub signup: Signup,
    pub plans: Plans,
    pub default_plan: String,
    pub public_url: String,
    pub security_contact: Option<String>,
    pub plan_contact: Option<String>,
    pub scanner_keys: Arc<ScannerKeys>,
    pub providers: Arc<Providers>,
    pub mailer: Mailer,
    pub master_keys: Arc<MasterKeys>,
    pub breached_passwords: Option<Arc<BreachedPasswords>>,
}

/// The operator's list of breached passwords, if there is one.
///
/// # Errors
/// When it cannot be read, or is not such a list.
pub fn breached_passwords(file: Option<&Path>) -> anyhow::Result<Option<Arc<BreachedPasswords>>> {
    let list = file.map(BreachedPasswords::open).transpose();
    Ok(list.context("--breached-passwords")?.map(Arc::new))
}

/// The keys of secret scanners that the operator trusts.
///
/// # Errors
/// When the file cannot be read, or has no such keys.
pub fn scanner_keys(file: Option<&Path>) -> anyhow::Result<Arc<ScannerKeys>> {
    let keys = file.map(ScannerKeys::open).transpose().context("--scanner-keys")?;
    Ok(Arc::new(keys.unwrap_or_default()))
}

/// The OpenID Connect providers of the operator.
///
/// # Errors
/// When the file cannot be read, or breaks a rule.
pub fn providers(file: Option<&Path>) -> anyhow::Result<Arc<Providers>> {
    let providers = file.map(Providers::open).transpose().context("--oidc-config")?;
    Ok(Arc::new(providers.unwrap_or_default()))
}

/// Serves until `stop` is cancelled; then drains and returns.
///
/// Shutdown: `readyz` answers 503; parked polls are answered over three seconds (empty, unless a
/// claim for them is in flight); loops end their batch; after `linger` no connection is accepted;
/// running requests finish within [`REQUESTS_TIMEOUT`].
///
/// # Errors
/// When the database cannot be reached at the start, or was not migrated; or when the node stopped
/// because a part of it has failed permanently.
pub async fn serve(node: Node, stop: CancellationToken) -> anyhow::Result<()> {
    match run(node, stop.clone()).await {
        // It was asked to stop while it waited for its database.
        Err(error) if is_stopped(&error) => Ok(()),
        ended => ended,
    }
}

async fn run(node: Node, stop: CancellationToken) -> anyhow::Result<()> {
    let start = Start { until: Instant::now() + START_TIMEOUT, stop: stop.clone() };
    if let Some(logins) = &node.logins {
        start.check_logins(logins, &node.database_url).await?;
    }
    let pools = Pools::new(&node.database_url, node.pools, node.logins.as_ref())
        .context("the database's URL is invalid")?;
    let instance = start.instance(&pools).await?;
    let bus = Bus::new(node.redis.as_ref(), instance.public_id, node.redis_budget)?;
    let tick_key = TickKey::new(&instance.cursor_key);
    let engine = Engine::start(pools.clone(), tick_key, node.zones, stop.clone());
    let outbound = node.outbound.with_mark(&instance.public_id.to_string());
    let app = open(&engine, (&bus, outbound), node.people, instance);
    start.ask(|| app.accounts.signing_keys.refresh().boxed()).await.context(NO_ANSWER)?;
    start.ask(|| app.count_nodes().boxed()).await.context(NO_ANSWER)?;
    bus.publish(Topic::Nodes, "").await;
    let background = TaskTracker::new();
    loops::start(&app, &stop, &background);
    if app.outbound.delivers {
        start_senders(&app, &bus, &engine, &stop, &background);
    }
    if let Some(period) = node.canary {
        loops::start_canary(&engine, &stop, &background, period);
    }
    let (watched, stopping) = (pools.clone(), stop.clone());
    background.spawn(async move { watched.watch(stopping).await });
    join(&app, &stop, &background);
    background.close();
    // Metrics are served until the end.
    let ended = CancellationToken::new();
    if let Some((listener, metrics)) = node.operator {
        let router = http::operator_router(metrics.clone());
        let connections = ConnectionLimits {
            per_address: OPERATOR_CONNECTIONS,
            proxies: TrustedProxies::Networks(Vec::new()),
        };
        let tracker = TaskTracker::new();
        tokio::spawn(http::server::run(listener, router, connections, ended.clone(), tracker));
        tokio::spawn(upkeep(metrics, ended.clone()));
    }
    let closing = CancellationToken::new();
    tokio::spawn(close_later(stop, node.linger, closing.clone()));
    let (connections, handlers) = (TaskTracker::new(), TaskTracker::new());
    let pages = console::router(app.clone(), http::api(app.clone()));
    let adapters = adapters::router().merge(pages);
    let router = http::router(app, adapters, node.deprecated, handlers.clone());
    http::server::run(node.api, router, node.connections, closing, connections.clone()).await;
    drain(&engine, &connections, &handlers, &background).await;
    let closed_by = Instant::now() + CLOSE_TIMEOUT;
    // What was counted since the loop's last step.
    let last_words = async {
        if let Err(error) = engine::stats::flush::write(&engine).await {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "final stats flush failed");
        }
        leave(&pools, &bus).await;
    };
    if timeout_at(closed_by, last_words).await.is_err() {
        tracing::warn!("the database does not answer: final stats flush skipped");
    }
    ended.cancel();
    let has_failed = engine.has_failed();
    // The pump ends with it, which keeps connections for its next claims.
    drop(engine);
    let _ = timeout_at(closed_by, pools.close()).await;
    anyhow::ensure!(!has_failed, "a part of this node has failed permanently");
    Ok(())
}

/// Starts the loops that send webhooks and push jobs.
fn start_senders(
    app: &App,
    bus: &Bus,
    engine: &Engine,
    stop: &CancellationToken,
    background: &TaskTracker,
) {
    let keys = Arc::clone(&app.accounts.master_keys);
    let sender = Sender::new(engine.clone(), app.outbound.clone(), keys);
    let deliverer = Deliverer::new(sender.clone(), bus.node());
    loops::start_deliverer(&deliverer, engine, stop, background);
    let pusher = Pusher::new(sender, bus.node(), Arc::clone(&app.plans));
    loops::start_pusher(&pusher, engine, stop, background);
}

/// The start of a node, whose database may be restarting as well, or failing over.
struct Start {
    until: Instant,
    stop: CancellationToken,
}

impl Start {
    /// Asks the database until it answers.
    async fn ask<'a, T>(
        &self,
        ask: impl Fn() -> BoxFuture<'a, sqlx::Result<T>>,
    ) -> sqlx::Result<T> {
        let mut is_reported = false;
        loop {
            let answered = tokio::select! {
                answered = ask() => answered,
                () = self.stop.cancelled() => return Err(sqlx::Error::PoolClosed),
            };
            let error = match answered {
                Err(error) if may_pass(&error) && Instant::now() < self.until => error,
                answered => return answered,
            };
            if !is_reported {
                is_reported = true;
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "{NO_ANSWER} yet");
            }
            sleep(START_PAUSE).await;
        }
    }

    async fn instance(&self, pools: &Pools) -> anyhow::Result<Instance> {
        let instance = self.ask(|| {
            let look = async {
                store::people::projects::instance(&mut *pools.people.acquire().await?).await
            };
            look.boxed()
        });
        let instance = instance.await;
        let is_answer = instance.as_ref().err().is_some_and(is_missing);
        instance.context(match is_answer {
            true => "the database is not migrated: run `fencepost migrate`",
            false => NO_ANSWER,
        })
    }

    /// Whether each role can log in: some pools are not used before the first request.
    async fn check_logins(&self, logins: &Logins, database_url: &str) -> anyhow::Result<()> {
        let options = database_url.parse().context("the database's URL is invalid")?;
        let refused = self.ask(|| {
            let asked = async {
                let asked = timeout(DATABASE_TIMEOUT, logins.refused(&options)).await;
                asked.unwrap_or(Err(sqlx::Error::PoolTimedOut))
            };
            asked.boxed()
        });
        match refused.await.context(NO_ANSWER)?.into_iter().next() {
            Some((role, error)) => Err(error).context(format!("{} cannot log in", role.name())),
            None => Ok(()),
        }
    }
}

/// Whether [`Start::ask`] was asked to stop.
fn is_stopped(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(sqlx::Error::PoolClosed))
}

/// Whether an error is that of a database without our tables, or without a row in them.
fn is_missing(error: &sqlx::Error) -> bool {
    const UNDEFINED_TABLE: &str = "42P01";
    let code = error.as_database_error().and_then(DatabaseError::code);
    code.is_some_and(|it| it == UNDEFINED_TABLE) || matches!(error, sqlx::Error::RowNotFound)
}

/// Whether an error is one of a database that will soon answer.
fn may_pass(error: &sqlx::Error) -> bool {
    use sqlx::Error::{Io, PoolTimedOut, Protocol};
    match error.as_database_error() {
        Some(it) => {
            // It ends all sessions, and recovers: its log may have no room.
            let postgres = it.try_downcast_ref::<PgDatabaseError>();
            let panics = postgres.is_some_and(|it| it.severity() == PgSeverity::Panic);
            panics || it.code().is_some_and(|it| is_passing_code(&it))
        }
        None => matches!(error, Io(_) | PoolTimedOut | Protocol(_)),
    }
}

/// The database is out of reach (class 08, also from a pooler), stopping or starting (57P), without
/// room (53), has a failing disk (58), or is a standby (25006).
fn is_passing_code(code: &str) -> bool {
    ["08", "53", "57P", "58"].iter().any(|it| code.starts_with(it)) || code == "25006"
}

/// Waits for requests, undelivered jobs and loops, in this order and within [`DRAIN_TIMEOUT`].
async fn drain(
    engine: &Engine,
    connections: &TaskTracker,
    handlers: &TaskTracker,
    background: &TaskTracker,
) {
    let drained_by = Instant::now() + DRAIN_TIMEOUT;
    let requests = timeout(REQUESTS_TIMEOUT, async {
        connections.wait().await;
        // A handler may outlive its client's connection.
        handlers.close();
        handlers.wait().await;
    });
    if requests.await.is_err() {
        tracing::warn!(connections = connections.len(), "stopped with requests unfinished");
    }
    // Before the loops: a lease that is not released waits for its end.
    let parts = async {
        engine.finish().await;
        background.wait().await;
    };
    if timeout_at(drained_by, parts).await.is_err() {
        tracing::warn!("stopped before all loops had ended");
    }
}

/// Puts together what requests need.
fn open(
    engine: &Engine,
    (bus, outbound): (&Bus, Outbound),
    people: People,
    instance: Instance,
) -> App {
    if !bus.has_redis() {
        tracing::warn!(
            "no Redis: each node enforces its share of rate limits, and polls find jobs of other nodes within two seconds"
        );
    }
    if !people.mailer.is_used() {
        tracing::warn!("no mail server: addresses cannot be verified, nor passwords reset");
    }
    if !people.master_keys.can_seal() {
        tracing::warn!(
            "no master key: who reads a backup of the database can forge access tokens. The next \
             release requires one: set --master-key-file"
        );
    }
    let accounts = Accounts::new(Parts {
        pool: engine.pools.people.clone(),
        limiter: Limiter::new(bus.clone()),
        passwords: Passwords::new(people.breached_passwords, Turns::default()),
        tokens: Tokens::default(),
        master_keys: people.master_keys,
        mailer: people.mailer,
        signup: people.signup,
        // Everything below it begins with a slash.
        public_url: people.public_url.trim_end_matches('/').to_owned(),
        security_contact: people.security_contact,
        plan_contact: people.plan_contact,
        scanner_keys: people.scanner_keys,
        providers: people.providers,
        default_plan: people.default_plan,
        plans: people.plans,
        wake: engine.notifier.wake.clone(),
    });
    App::new(engine.clone(), accounts, (bus.clone(), outbound), instance.cursor_key)
}

/// Publishes to the other nodes, and receives their messages.
fn join(app: &App, stop: &CancellationToken, tracker: &TaskTracker) {
    if !app.bus.has_redis() {
        return;
    }
    let hints = app.engine.notifier.wake.subscribe();
    tracker.spawn(relay::publish(app.bus.clone(), hints, stop.clone()));
    let (app, stop) = (app.clone(), stop.clone());
    tracker.spawn(async move {
        let on = |heard| match heard {
            Heard::Joined => relay::rejoin(&app.engine),
            Heard::Wake(text) => relay::hear(&app.engine, &app.bus, &text),
            Heard::Evict(text) => {
                let app = app.clone();
                tokio::spawn(bounded(async move { app.credentials.on_message(&text).await }));
            }
            Heard::Nodes => {
                let app = app.clone();
                tokio::spawn(bounded(async move { app.count_nodes().await }));
            }
        };
        app.bus.listen(stop, app.engine.notifier.wake.interest.wanted(), on).await;
    });
}

/// The others take over its share of limits at once.
async fn leave(pools: &Pools, bus: &Bus) {
    if let Ok(mut conn) = pools.people.acquire().await {
        let _ = store::connection::nodes::leave(&mut conn, bus.node()).await;
    }
    bus.publish(Topic::Nodes, "").await;
}

async fn close_later(stop: CancellationToken, linger: Duration, closing: CancellationToken) {
    stop.cancelled().await;
    tracing::info!("stopping: answering parked polls and finishing requests");
    sleep(linger).await;
    closing.cancel();
}

async fn upkeep(metrics: PrometheusHandle, ended: CancellationToken) {
    while timeout(telemetry::UPKEEP_PERIOD, ended.cancelled()).await.is_err() {
        metrics.run_upkeep();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_waits_for_what_passes_by_itself_alone() {
        for code in ["08006", "08P01", "53300", "57P01", "57P03", "58030", "25006"] {
            assert!(is_passing_code(code), "{code}");
        }
        for code in ["28P01", "3D000", "42P01", "57014", "25001", "XX000"] {
            assert!(!is_passing_code(code), "{code}");
        }
    }
}
