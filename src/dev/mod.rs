//! `fencepost dev`: everything on one machine, without configuration. Data survive a restart; its
//! processes do not survive it.

mod banner;
pub mod cluster;
mod data_dir;
pub mod redis;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use fencepost_config::{
    DEFAULT_METRICS_LISTEN, DEV_PLAN, NodeArgs, OutboundArgs, RedisPlace, Signup,
};
use fencepost_domain::{
    access::{Role, Scope},
    limits::MAX_LIVE_KEYS,
};
use fencepost_engine::schedules::zones::Zones;
use fencepost_http::deprecation::DEPRECATED;
use fencepost_identity::accounts::{
    author::Author,
    key,
    keys::{self, KeyRequest},
    members, projects,
};
use fencepost_net::{mail::Mailer, outbound::Outbound, seal::MasterKeys};
use fencepost_signals::telemetry;
use fencepost_store::{
    self as store,
    connection::roles::{self, Logins},
    people::projects::Project,
};
use secrecy::{ExposeSecret, SecretString};
use sqlx::{ConnectOptions, Connection, PgConnection, postgres::PgConnectOptions};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub use self::data_dir::{Folder, Ready};

use self::{
    cluster::{Cluster, Durability},
    redis::Redis,
};
use crate::{
    serve::{self, Node, People},
    zone_files,
};

const DATABASE: &str = "fencepost";
const PROJECT: &str = "demo";
const KEY_NAME: &str = "dev";
/// The invited address of the demo project; anyone may use the invitation.
const DEV_EMAIL: &str = "owner@demo.invalid";
/// Connections from this machine: `dev` is not reachable from others.
const DEV_CONNECTIONS: u32 = 20_000;
/// How often the database is checked.
const CHECK_PERIOD: Duration = Duration::from_millis(500);

/// Options of `dev`.
#[derive(Debug, Clone, clap::Args)]
pub struct DevArgs {
    #[command(flatten)]
    pub node: NodeArgs,

    /// Data folder [default: .fencepost here; as root, if the database's user cannot reach that,
    /// /var/lib/fencepost-dev]
    #[arg(long, env = "FENCEPOST_DATA_DIR", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,

    /// Run without Redis: rate limits are local
    #[arg(long)]
    pub no_redis: bool,

    /// Delete all data and the key of earlier runs first
    #[arg(long)]
    pub reset: bool,

    /// When ready, write URL and key into this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub ready_file: Option<PathBuf>,
}

/// Runs until `stop` is cancelled. Call it on the main thread: see [`Cluster::start`].
///
/// # Errors
/// When another `dev` runs in the folder, an address is taken, or PostgreSQL cannot be started.
pub async fn run(args: DevArgs, stop: CancellationToken) -> anyhow::Result<()> {
    let folder = Folder::claim(args.data_dir.clone())?;
    if let Some(path) = &args.ready_file {
        let _ = std::fs::remove_file(path);
    }
    if args.reset {
        Cluster::stop_leftover(&folder.cluster_dir())?;
        folder.reset()?;
    }
    let api = listen(args.node.listen, "--listen").await?;
    let operator = listen_operator(args.node.metrics_listen, DEFAULT_METRICS_LISTEN).await?;
    let mut cluster = Cluster::start(&folder.cluster_dir(), Durability::Safe)?;
    let database_url = cluster.database_url(DATABASE);
    make_database(&cluster).await?;
    let migrated = store::connection::migrate::migrate(&database_url).await;
    migrated.context("with data of an earlier version, use `fencepost dev --reset`")?;
    let logins = make_roles(&args, &folder, &database_url).await?;
    let (project, api_key, invitation) = demo_project(&database_url, &folder).await?;
    let redis = start_redis(&args)?;

    let place = match &redis {
        Some(redis) => Some(RedisPlace::from(redis.url())),
        None if args.no_redis => None,
        None => args.node.redis.place()?,
    };
    let ready = Ready {
        url: format!("http://{}", api.local_addr()?),
        metrics_url: format!("http://{}/metrics", operator.local_addr()?),
        api_key,
        project_id: project.public_id.to_string(),
        pid: std::process::id(),
        database_url: database_url.clone(),
        redis_url: redis.as_ref().map(Redis::url),
    };
    let node = Node {
        api,
        operator: Some((operator, telemetry::install_metrics()?)),
        database_url,
        logins: Some(logins),
        pools: args.node.pools,
        redis_budget: args.node.redis.budget(),
        people: people(&args, &ready.url, &folder)?,
        connections: args.node.connections.limits(DEV_CONNECTIONS),
        canary: args.node.canary(0),
        zones: Zones::new(zone_files::read(args.node.zone_files.as_deref())?),
        outbound: outbound(&args.node.outbound)?,
        deprecated: DEPRECATED,
        linger: Duration::ZERO,
        redis: place,
    };
    folder.write_ready(&ready)?;
    if let Some(path) = &args.ready_file {
        data_dir::write_private(path, &serde_json::to_string(&ready.public())?)?;
    }
    banner::print(&ready, &folder, invitation.as_ref());
    let serving = serve::serve(node, stop.clone());
    let watching = watch(&mut cluster);
    let ended = tokio::select! {
        served = serving => served,
        failed = watching => failed,
    };
    folder.forget_ready();
    if let Some(path) = &args.ready_file {
        let _ = std::fs::remove_file(path);
    }
    drop((redis, cluster));
    ended
}

/// Webhooks may reach this machine, unless the flag says otherwise.
fn outbound(args: &OutboundArgs) -> anyhow::Result<Outbound> {
    let mut allowed = args.outbound_allow.clone();
    if allowed.is_empty() {
        allowed = vec![
            IpAddr::from(Ipv4Addr::LOCALHOST).into(),
            IpAddr::from(Ipv6Addr::LOCALHOST).into(),
        ];
    }
    Outbound::of_args(args, allowed)
}

/// Creates the database roles, with passwords that the folder keeps if none are given.
async fn make_roles(args: &DevArgs, folder: &Folder, database_url: &str) -> anyhow::Result<Logins> {
    let given = Logins::given(args.node.roles.database_roles.as_deref())?;
    let logins = given.map_or_else(|| folder.logins(), Ok)?;
    roles::install(database_url, &logins).await?;
    // Only the owner may vacuum before PostgreSQL 17, and only this machine reaches `dev`.
    Ok(logins.with_vacuums_by_owner())
}

/// A private one, unless another is configured or none is wanted.
fn start_redis(args: &DevArgs) -> anyhow::Result<Option<Redis>> {
    if args.no_redis {
        tracing::warn!("running without Redis (--no-redis)");
        return Ok(None);
    }
    if args.node.redis.place()?.is_some() {
        return Ok(None);
    }
    anyhow::ensure!(
        Redis::is_installed(),
        "Redis is needed, and `redis-server` is not installed. Install it, or run without:\n\n    \
         sudo apt-get install -y redis-server\n    fencepost dev --no-redis\n"
    );
    Redis::start(&Redis::dir(std::process::id())).map(Some)
}

/// Open sign-up, because only this machine reaches the server; mail is printed.
fn people(args: &DevArgs, url: &str, folder: &Folder) -> anyhow::Result<People> {
    let master_keys = args.node.master_key.keys()?;
    let master_keys = master_keys.map_or_else(|| folder.master_key(), Ok)?;
    let args = &args.node.people;
    let (plans, default_plan) = args.plans(DEV_PLAN)?;
    let mailer = match args.smtp_url()? {
        Some(url) => Mailer::smtp(&url, &args.mail_from)?,
        None => Mailer::Print,
    };
    let public_url = args.public_url.clone().unwrap_or_else(|| url.to_owned());
    Ok(People {
        signup: args.signup.unwrap_or(Signup::Open),
        plans,
        default_plan,
        public_url,
        scanner_keys: serve::scanner_keys(args.scanner_keys.as_deref())?,
        providers: serve::providers(args.oidc_config.as_deref())?,
        security_contact: args.security_contact.clone(),
        plan_contact: args.plan_contact.clone(),
        mailer,
        master_keys: Arc::new(MasterKeys::parse(&master_keys)?),
        breached_passwords: serve::breached_passwords(args.breached_passwords.as_deref())?,
    })
}

async fn listen(address: SocketAddr, flag: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address}; choose another address with {flag}"))
}

/// The operator's listener. If the default address is taken, as by another `dev`, any free port
/// does: the banner shows it.
async fn listen_operator(address: SocketAddr, default: SocketAddr) -> anyhow::Result<TcpListener> {
    match listen(address, "--metrics-listen").await {
        Err(_) if address == default => {
            listen(SocketAddr::new(address.ip(), 0), "--metrics-listen").await
        }
        listening => listening,
    }
}

async fn watch(cluster: &mut Cluster) -> anyhow::Result<()> {
    loop {
        tokio::time::sleep(CHECK_PERIOD).await;
        cluster.check()?;
    }
}

async fn make_database(cluster: &Cluster) -> anyhow::Result<()> {
    let options: PgConnectOptions = cluster.database_url("postgres").parse()?;
    let mut conn = options.connect().await?;
    if !store::connection::server::database_exists(&mut conn, DATABASE).await? {
        store::connection::server::create_database(&mut conn, DATABASE).await?;
    }
    conn.close().await?;
    Ok(())
}

/// The demo project, a valid key, and an invitation while it has no member. Project and key are
/// created once.
async fn demo_project(
    database_url: &str,
    folder: &Folder,
) -> anyhow::Result<(Project, String, Option<SecretString>)> {
    let options: PgConnectOptions = database_url.parse()?;
    let mut conn = options.connect().await?;
    let project = store::people::projects::find(&mut conn, PROJECT, None).await?;
    let (project, secret) = match project {
        Some(project) => {
            let secret = known_key(&mut conn, &project, folder).await?;
            (project, secret)
        }
        None => {
            let (project, secret) = make_project(&mut conn, PROJECT, KEY_NAME).await?;
            folder.write_key(&secret)?;
            (project, secret)
        }
    };
    let is_nobodys = store::people::members::list(&mut conn, project.id, 1).await?.is_empty();
    let invitation = if is_nobodys { Some(invite_owner(&mut conn, &project).await?) } else { None };
    Ok((project, secret, invitation))
}

async fn known_key(
    conn: &mut PgConnection,
    project: &Project,
    folder: &Folder,
) -> anyhow::Result<String> {
    if let Some(api_key) = folder.read_key() {
        let owner = store::people::keys::find_by_secret(conn, &key::hash(&api_key)).await?;
        if owner.is_some_and(|it| it.project_id == project.id) {
            return Ok(api_key);
        }
    }
    let secret = full_key(conn, project, KEY_NAME).await?;
    folder.write_key(&secret)?;
    Ok(secret)
}

/// Its link makes the visitor an owner: only this machine reaches `dev`.
async fn invite_owner(conn: &mut PgConnection, project: &Project) -> anyhow::Result<SecretString> {
    let author = Author::operator(project.id);
    let invited = members::invite(conn, &author, (DEV_EMAIL, Role::Owner), i64::MAX).await?;
    Ok(invited.1)
}

/// Creates a project without limits and a key with all scopes, and returns both.
///
/// # Errors
/// When the database does not answer, or the slug is taken.
pub async fn make_project(
    conn: &mut PgConnection,
    slug: &str,
    key_name: &str,
) -> anyhow::Result<(Project, String)> {
    let made = projects::create_unlimited(conn, slug, slug).await;
    let project = made.with_context(|| format!("project `{slug}`"))?;
    let secret = full_key(conn, &project, key_name).await?;
    Ok((project, secret))
}

async fn full_key(
    conn: &mut PgConnection,
    project: &Project,
    name: &str,
) -> anyhow::Result<String> {
    let request = KeyRequest::named(name.to_owned(), Scope::ALL.to_vec());
    let target = (project.id, &*project.mode);
    let made = keys::insert_first(conn, target, request, None, MAX_LIVE_KEYS).await?;
    Ok(made.secret.expose_secret().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_a_default_address_that_is_taken_is_replaced() {
        let first = listen("127.0.0.1:0".parse().expect("an address"), "").await.expect("a port");
        let taken = first.local_addr().expect("its address");
        let second = listen_operator(taken, taken).await.expect("another port");
        assert_ne!(second.local_addr().expect("its address"), taken);
        let asked_for = listen_operator(taken, DEFAULT_METRICS_LISTEN).await;
        assert!(asked_for.is_err_and(|it| it.to_string().contains("--metrics-listen")));
    }
}
