//! `fencepost check`: verifies what a node needs, and says how to fix it.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use chrono::Utc;
use clap::Args;
use fencepost_config::{DEFAULT_PLAN, DatabaseArgs, NodeArgs, Signup};
use fencepost_engine::schedules::zones::Zones;
use fencepost_identity::accounts::password::lists::COMMON_SINCE;
use fencepost_net::{mail::Mailer, outbound::Outbound, seal::MasterKeys};
use fencepost_signals::{limiter::Limiter, redis_bus::Bus, traces};
use fencepost_store::connection::{
    migrate::{self, Schema},
    roles::{Logins, Role},
    server,
};
use ipnet::IpNet;
use sqlx::{
    ConnectOptions, PgConnection,
    postgres::{PgConnectOptions, PgSslMode},
};
use tokio::{net::TcpListener, time::timeout};
use uuid::Uuid;

use super::findings::Findings;
use crate::{serve, zone_files};

/// The oldest PostgreSQL that the statements support, as it numbers itself.
const MIN_POSTGRES: i32 = 150_000;
/// Maximum share of the database's connections for one node, in percent.
const MAX_CONNECTIONS_PERCENT: u32 = 80;
/// Host bits of a network of proxies, at most; of IPv6, [`MAX_PROXY_HOST_BITS_V6`].
const MAX_PROXY_HOST_BITS: u8 = 8;
/// The network of one link.
const MAX_PROXY_HOST_BITS_V6: u8 = 64;
/// Timeout for a database or Redis.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// A database with a longer round trip slows everything.
const SLOW_ANSWER: Duration = Duration::from_millis(20);

/// Options of `check`: the same as of `serve`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    #[command(flatten)]
    database: DatabaseArgs,
    #[command(flatten)]
    node: NodeArgs,
}

/// Checks everything, and prints the results.
///
/// # Errors
/// When a check fails; a warning is no error.
pub async fn run(args: CheckArgs) -> anyhow::Result<()> {
    let mut findings = Findings::default();
    check_listeners(&args.node, &mut findings).await;
    check_database(&args, &mut findings).await;
    check_redis(&args.node, &mut findings).await;
    check_traces(&args.node, &mut findings).await;
    check_people(&args.node, &mut findings);
    check_providers(&args.node, &mut findings).await;
    check_outbound(&args.node, &mut findings).await;
    check_zones(&args.node, &mut findings);
    findings.print()
}

async fn check_listeners(node: &NodeArgs, findings: &mut Findings) {
    for (flag, address) in [("--listen", node.listen), ("--metrics-listen", node.metrics_listen)] {
        match TcpListener::bind(address).await {
            Ok(_) => findings.good("address", format!("{address} is free")),
            Err(error) => findings.bad(
                "address",
                format!(
                    "{address}: {error}. If no node of yours runs there, choose another with {flag}"
                ),
            ),
        }
    }
    let is_wide = |it: &&IpNet| {
        let max_bits =
            if it.addr().is_ipv4() { MAX_PROXY_HOST_BITS } else { MAX_PROXY_HOST_BITS_V6 };
        it.max_prefix_len() - it.prefix_len() > max_bits
    };
    if let Some(wide) = node.connections.trusted_proxies.iter().find(is_wide) {
        findings.doubtful(
            "address",
            format!(
                "--trusted-proxies {wide}: a client in this network chooses its own address. Name the proxies alone, or set --trusted-hops"
            ),
        );
    }
    if !node.metrics_listen.ip().is_loopback() {
        findings.doubtful(
            "address",
            "--metrics-listen is not a loopback address: make sure that only your Prometheus reaches it",
        );
    }
}

async fn check_database(args: &CheckArgs, findings: &mut Findings) {
    let url = match args.database.url() {
        Ok(url) => url,
        Err(error) => return findings.bad("database", format!("{error:#}")),
    };
    let options: PgConnectOptions = match url.parse() {
        Ok(options) => options,
        Err(_) => {
            let shape = "postgres://user:password@host/database";
            return findings.bad("database", format!("the URL cannot be read: it must be {shape}"));
        }
    };
    let logins = match Logins::given(args.node.roles.database_roles.as_deref()) {
        Ok(logins) => logins,
        Err(error) => return findings.bad("roles", format!("{error:#}")),
    };
    if let Some(logins) = &logins {
        check_logins(logins, &options, findings).await;
    }
    check_encryption(&options, findings);
    // The owner's login is not given to nodes; each role may read the schema's version.
    let options = match &logins {
        Some(logins) => logins.log_in(&options, Role::People),
        None => options,
    };
    let mut conn = match timeout(ANSWER_TIMEOUT, options.connect()).await {
        Ok(Ok(conn)) => conn,
        Ok(Err(error)) => {
            return findings.bad(
                "database",
                format!("{error}. Is it running, and may this user connect from here?"),
            );
        }
        Err(_) => {
            let seconds = ANSWER_TIMEOUT.as_secs();
            let text = format!("no answer within {seconds} s: is there a firewall in between?");
            return findings.bad("database", text);
        }
    };
    if let Err(error) = check_schema(&mut conn, args, findings).await {
        findings.bad("database", error.to_string());
    }
}

/// Whether each role can log in.
async fn check_logins(logins: &Logins, options: &PgConnectOptions, findings: &mut Findings) {
    let refused = match timeout(ANSWER_TIMEOUT, logins.refused(options)).await {
        Ok(Ok(refused)) => refused,
        Ok(Err(error)) => return findings.bad("roles", format!("not checked: {error}")),
        Err(_) => return findings.bad("roles", "not checked: the database does not answer"),
    };
    for (role, error) in &refused {
        let text = format!(
            "{} cannot log in: {error}. Run `fencepost migrate --database-roles FOLDER` as the owner",
            role.name()
        );
        findings.bad("roles", text);
    }
    if refused.is_empty() {
        findings.good("roles", "each can log in");
    }
}

/// Whether the way to the database is encrypted, and its server known.
fn check_encryption(options: &PgConnectOptions, findings: &mut Findings) {
    let is_local = options.get_socket().is_some() || is_loopback(options.get_host());
    if !is_local && !matches!(options.get_ssl_mode(), PgSslMode::VerifyFull) {
        findings.doubtful(
            "database",
            "anybody in between can read along: add sslmode=verify-full to its URL, and sslrootcert=FILE if its authority is your own",
        );
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|it: IpAddr| it.is_loopback())
}

async fn check_schema(
    conn: &mut PgConnection,
    args: &CheckArgs,
    findings: &mut Findings,
) -> sqlx::Result<()> {
    let asked = Instant::now();
    let facts = server::inspect(conn).await?;
    let took = asked.elapsed();
    let version = format!("{}.{}", facts.version / 10_000, facts.version % 10_000);
    if facts.version < MIN_POSTGRES {
        let text = format!("PostgreSQL {version} is too old: version 15 or newer is needed");
        findings.bad("database", text);
    } else {
        findings.good("database", format!("PostgreSQL {version} answers in {took:.1?}"));
    }
    if took > SLOW_ANSWER {
        findings.doubtful("database", "high latency: it adds to every request");
    }
    if facts.is_read_only {
        let text = "read-only: is this a standby? Nodes need the primary";
        findings.bad("database", text);
    }
    for setting in facts.unsafe_settings {
        findings.bad("database", format!("{setting} loses acknowledged jobs: turn it on"));
    }
    let (most, wanted) = (facts.max_connections.unsigned_abs(), args.node.pools.total());
    if wanted * 100 > most * MAX_CONNECTIONS_PERCENT {
        let text = format!(
            "one node wants {wanted} connections, and max_connections is {most}: raise it, or lower --settle-connections and similar settings"
        );
        findings.bad("database", text);
    }
    if !facts.awaits_standby {
        findings.doubtful(
            "database",
            "commits wait for no standby: a failover may lose acknowledged jobs, unless its storage is replicated. See docs/high-availability.md",
        );
    }
    if facts.is_superuser {
        findings.doubtful("database", "its user is a superuser: use --database-roles");
    }
    match migrate::schema(conn).await {
        Ok(Schema::Current) => findings.good("schema", "has this version, or a newer one"),
        Ok(Schema::Older) => {
            findings.bad("schema", "is older than this version: run `fencepost migrate`");
        }
        Ok(Schema::Missing) => findings.bad("schema", "missing: run `fencepost migrate`"),
        Ok(Schema::OtherHistory) => findings
            .bad("schema", "was made by a version before the first release: use an empty database"),
        Err(error) => findings.bad("schema", format!("cannot be read: {error}")),
    }
    Ok(())
}

async fn check_redis(node: &NodeArgs, findings: &mut Findings) {
    let bus =
        node.redis.place().and_then(|it| Bus::new(it.as_ref(), Uuid::nil(), node.redis.budget()));
    let bus = match bus {
        Ok(bus) => bus,
        Err(error) => return findings.bad("redis", format!("{error:#}")),
    };
    let facts = async {
        let facts = bus.inspect().await?;
        Limiter::rehearse(&bus).await.context("the counters of limits are refused")?;
        anyhow::Ok(facts)
    };
    match timeout(ANSWER_TIMEOUT, facts).await {
        Ok(Ok(None)) => findings.doubtful(
            "redis",
            "none: with more than one node, set --redis-url, or each node enforces only its share of rate limits, and polls find other nodes' jobs late",
        ),
        Ok(Ok(Some(facts))) => {
            findings.good("redis", format!("Redis {} answers", facts.version));
            if facts.maxmemory_policy != "noeviction" {
                findings.doubtful(
                    "redis",
                    format!(
                        "maxmemory-policy is {}: set it to noeviction, or limits may be lost",
                        facts.maxmemory_policy
                    ),
                );
            }
        }
        Ok(Err(error)) => findings.bad(
            "redis",
            format!("{error:#}. Nodes continue without it, each with its share of rate limits. Is it running, and may this user do what docs/operations.md lists?"),
        ),
        Err(_) => findings.bad("redis", "no answer: is there a firewall in between?"),
    }
}

/// Sends an empty request to a collector, and checks the answer.
async fn check_traces(node: &NodeArgs, findings: &mut Findings) {
    let Some(endpoint) = &node.traces.otlp_endpoint else { return };
    let url = traces::url(endpoint);
    let client = reqwest::Client::builder().timeout(ANSWER_TIMEOUT).build();
    let asked =
        async { client?.post(&url).header("content-type", "application/x-protobuf").send().await };
    match asked.await {
        Ok(answer) if answer.status().is_success() => {
            findings.good("traces", format!("{url} accepts spans"));
        }
        Ok(answer) => findings.bad(
            "traces",
            format!("{url} answers {}: is it a collector's OTLP/HTTP endpoint?", answer.status()),
        ),
        Err(error) => findings.bad("traces", format!("{error}. Spans would be lost, nothing else")),
    }
}

/// Whether webhooks could be sent: their settings, and the proxy.
async fn check_outbound(node: &NodeArgs, findings: &mut Findings) {
    let args = &node.outbound;
    let outbound = match Outbound::of_args(args, args.outbound_allow.clone()) {
        Ok(outbound) => outbound,
        Err(error) => return findings.bad("webhooks", format!("{error:#}")),
    };
    match outbound.reach_proxy().await {
        None => (),
        Some(Ok(())) => findings.good("webhooks", "the proxy takes connections"),
        Some(Err(error)) => findings.bad("webhooks", format!("the proxy: {error:#}")),
    }
}

/// Checks that the rules of time zones are up to date.
fn check_zones(node: &NodeArgs, findings: &mut Findings) {
    let host = match zone_files::read(node.zone_files.as_deref()) {
        Ok(host) => host,
        Err(error) => return findings.bad("zones", format!("{error:#}")),
    };
    let of_host = host.as_ref().map(|rules| rules.release().to_string());
    let of_host = of_host.unwrap_or_else(|| "none".to_owned());
    // Before it knows of other nodes, a node uses its newest.
    let zones = Zones::new(host).agreed();
    let release = zones.rules().release();
    let text = format!("time zones have the rules of {release}; the host has {of_host}");
    #[expect(clippy::disallowed_methods, reason = "a year is compared, before there is a database")]
    let today = Utc::now().date_naive();
    if zones.rules().is_old(today) {
        findings.doubtful("zones", format!("{text}. They are older than a year: update tzdata"));
    } else {
        findings.good("zones", text);
    }
}

async fn check_providers(node: &NodeArgs, findings: &mut Findings) {
    let providers = match serve::providers(node.people.oidc_config.as_deref()) {
        Ok(providers) => providers,
        Err(error) => return findings.bad("logins", format!("{error:#}")),
    };
    for (name, fault) in providers.check().await {
        match fault {
            None => findings.good("logins", format!("{name}: its keys are known")),
            Some(fault) => findings.bad("logins", format!("{name}: {fault}")),
        }
    }
}

fn check_people(node: &NodeArgs, findings: &mut Findings) {
    let people = &node.people;
    match node.master_key.keys().and_then(|it| it.as_ref().map(MasterKeys::parse).transpose()) {
        Ok(Some(_)) => findings.good("secrets", "the master key can be used"),
        Ok(None) => findings.doubtful(
            "secrets",
            "no master key: who reads a backup can forge access tokens. Set --master-key-file",
        ),
        Err(error) => findings.bad("secrets", format!("{error:#}")),
    }
    match serve::breached_passwords(people.breached_passwords.as_deref()) {
        Ok(None) => findings
            .good("passwords", format!("those that were common in {COMMON_SINCE} are refused")),
        Ok(Some(_)) => findings.good("passwords", "the list of breached ones can be read"),
        Err(error) => findings.bad("passwords", format!("{error:#}")),
    }
    if let Err(error) = serve::scanner_keys(people.scanner_keys.as_deref()) {
        findings.bad("scanners", format!("{error:#}"));
    }
    match people.plans(DEFAULT_PLAN) {
        Ok((plans, plan)) => {
            let names = plans.names().join(", ");
            findings.good("plans", format!("{names}; new projects are on {plan}"));
        }
        Err(error) => findings.bad("plans", format!("{error:#}")),
    }
    match people.smtp_url() {
        Err(error) => findings.bad("mail", format!("{error:#}")),
        Ok(None) => findings.doubtful(
            "mail",
            "no mail server: set --smtp-url, or addresses cannot be verified nor passwords reset, \
             and new projects have all rates and bytes of their plan without a verified address",
        ),
        Ok(Some(url)) => match Mailer::smtp(&url, &people.mail_from) {
            Ok(_) => findings.good(
                "mail",
                format!(
                    "from {}; new projects have a tenth of their rates and bytes until an owner \
                     has verified an address",
                    people.mail_from
                ),
            ),
            Err(error) => findings.bad("mail", format!("{error:#}")),
        },
    }
    let signup = people.signup.unwrap_or(Signup::Invite);
    let is_public = people.public_url.as_deref().is_some_and(|it| it.starts_with("https://"));
    if signup == Signup::Open && !is_public {
        findings.doubtful(
            "people",
            "sign-up is open, and --public-url is not https://: passwords must not be sent unencrypted",
        );
    }
}
