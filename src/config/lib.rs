//! Settings: each is a flag with a `FENCEPOST_…` variable. `docs/configuration.md` lists them, and
//! a test compares the two.

mod stores;

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    num::NonZeroU8,
    path::PathBuf,
    time::Duration,
};

use anyhow::Context;
use clap::Args;
use fencepost_domain::plan::{self, Plans};
use ipnet::IpNet;
use secrecy::SecretString;

pub use self::stores::{
    DatabaseArgs, MasterKeyArgs, RedisArgs, RedisPlace, RoleArgs, read_secret, secret,
};

/// People who may sign up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Signup {
    /// Anyone.
    Open,
    /// People with an invitation to a project.
    Invite,
    /// No one.
    Closed,
}

/// A URI on one line that begins with one of these.
fn is_contact(text: &str, beginnings: &[&str]) -> bool {
    let is_line = !text.chars().any(|it| it.is_control() || it.is_whitespace());
    is_line && beginnings.iter().any(|it| text.starts_with(it))
}

/// Where people ask for a plan: a page, or an address.
fn plan_contact(text: &str) -> Result<String, &'static str> {
    let is_contact = is_contact(text, &["mailto:", "https://"]);
    is_contact.then(|| text.to_owned()).ok_or("must begin with mailto: or https://")
}

/// A contact as RFC 9116 wants it.
fn security_contact(text: &str) -> Result<String, &'static str> {
    let is_contact = is_contact(text, &["mailto:", "https://", "tel:"]);
    is_contact.then(|| text.to_owned()).ok_or("must begin with mailto:, https:// or tel:")
}

/// Accounts: sign-up, plans, and mail.
#[derive(Debug, Clone, Args)]
pub struct PeopleArgs {
    /// Who may sign up [default: invite; in `dev`, open]
    #[arg(long, env = "FENCEPOST_SIGNUP", value_enum, value_name = "WHO")]
    pub signup: Option<Signup>,

    /// Plans file like ops/plans.toml [default: the built-in plans]
    #[arg(long, env = "FENCEPOST_PLANS", value_name = "FILE")]
    pub plans: Option<PathBuf>,

    /// Plan of new projects [default: free; in `dev`, unlimited]
    #[arg(long, env = "FENCEPOST_DEFAULT_PLAN", value_name = "PLAN")]
    pub default_plan: Option<String>,

    /// Where people ask for a larger plan: a URI that begins with mailto: or https://, shown beside
    /// their limits [default: none]
    #[arg(long, env = "FENCEPOST_PLAN_CONTACT", value_name = "URI", value_parser = plan_contact)]
    pub plan_contact: Option<String>,

    /// File of breached passwords, which new ones must not be: a SHA-1 in hexadecimal on each line,
    /// sorted, as Have I Been Pwned publishes them [default: none; common passwords are refused]
    #[arg(long, env = "FENCEPOST_BREACHED_PASSWORDS", value_name = "FILE")]
    pub breached_passwords: Option<PathBuf>,

    /// Public URL of this API, for links in mails [default: http:// and the address of the API]
    #[arg(long, env = "FENCEPOST_PUBLIC_URL", value_name = "URL")]
    pub public_url: Option<String>,

    /// Contact for a vulnerability of this instance, in /.well-known/security.txt: a URI that
    /// begins with mailto:, https: or tel: [default: none, and the file is not found]
    #[arg(
        long,
        env = "FENCEPOST_SECURITY_CONTACT",
        value_name = "URI",
        value_parser = security_contact
    )]
    pub security_contact: Option<String>,

    /// Public keys of secret scanners that may report leaked keys, as GitHub publishes its own for
    /// partners [default: none]
    #[arg(long, env = "FENCEPOST_SCANNER_KEYS", value_name = "FILE")]
    pub scanner_keys: Option<PathBuf>,

    /// OpenID Connect providers that people may log in with, and issuers whose tokens keys may
    /// trust, as a file in TOML: see docs/accounts.md [default: none]
    #[arg(long, env = "FENCEPOST_OIDC_CONFIG", value_name = "FILE")]
    pub oidc_config: Option<PathBuf>,

    /// Mail server, as smtps://user:password@host:port; without it, no mail is sent (in `dev` it is
    /// printed)
    #[arg(long, env = "FENCEPOST_SMTP_URL", hide_env_values = true, value_name = "URL")]
    pub smtp_url: Option<SecretString>,

    /// File with the URL of the mail server
    #[arg(long, env = "FENCEPOST_SMTP_URL_FILE", value_name = "FILE", conflicts_with = "smtp_url")]
    pub smtp_url_file: Option<PathBuf>,

    /// Sender of mails
    #[arg(
        long,
        env = "FENCEPOST_MAIL_FROM",
        default_value = "Fencepost <no-reply@localhost>",
        value_name = "ADDRESS"
    )]
    pub mail_from: String,
}

impl PeopleArgs {
    /// The mail server's URL, if one is given.
    pub fn smtp_url(&self) -> anyhow::Result<Option<SecretString>> {
        secret(self.smtp_url.as_ref(), self.smtp_url_file.as_ref())
    }

    /// The plans, and the one of new projects.
    ///
    /// # Errors
    /// When the file cannot be used, or the plan does not exist.
    pub fn plans(&self, default: &str) -> anyhow::Result<(Plans, String)> {
        let plans = match &self.plans {
            Some(file) => {
                let text = std::fs::read_to_string(file)
                    .with_context(|| format!("cannot read {}", file.display()))?;
                Plans::parse(&text).with_context(|| file.display().to_string())?
            }
            None => Plans::built_in(),
        };
        let plan = self.default_plan.clone().unwrap_or_else(|| default.to_owned());
        anyhow::ensure!(
            plans.has(&plan),
            "--default-plan: no such plan: `{plan}`; plans are {}",
            plans.names().join(", ")
        );
        Ok((plans, plan))
    }
}

/// The default plan of new projects.
pub const DEFAULT_PLAN: &str = "free";
/// The same in `dev`.
pub const DEV_PLAN: &str = plan::UNLIMITED;

/// Limits of connections.
#[derive(Debug, Clone, Args)]
pub struct ConnectionArgs {
    /// Maximum open connections of one client address (of IPv6: one /64); trusted proxies are not
    /// limited [default: 256; in `dev`, 20000]
    #[arg(long, env = "FENCEPOST_MAX_CONNECTIONS_PER_ADDRESS", value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub max_connections_per_address: Option<u32>,

    /// Address or network (10.0.0.0/8) of a proxy whose X-Forwarded-For is trusted; may be repeated
    #[arg(long, env = "FENCEPOST_TRUSTED_PROXIES", value_name = "ADDR", value_delimiter = ',',
          value_parser = read_network)]
    pub trusted_proxies: Vec<IpNet>,

    /// Number of proxies in front of this node, each of which adds its client to X-Forwarded-For.
    /// Only if nothing else can reach the node
    #[arg(
        long,
        env = "FENCEPOST_TRUSTED_HOPS",
        value_name = "N",
        conflicts_with = "trusted_proxies"
    )]
    pub trusted_hops: Option<NonZeroU8>,
}

/// A network; a single address is a network of one.
fn read_network(text: &str) -> Result<IpNet, String> {
    let alone = || text.parse::<IpAddr>().map(IpNet::from);
    text.parse()
        .or_else(|_| alone())
        .map_err(|_| "must be an address or a network such as 10.0.0.0/8".to_owned())
}

/// Default maximum of open connections of one client address.
pub const DEFAULT_CONNECTIONS_PER_ADDRESS: u32 = 256;

impl ConnectionArgs {
    /// The limits; `default` applies to each address if none is set.
    #[must_use]
    pub fn limits(&self, default: u32) -> ConnectionLimits {
        ConnectionLimits {
            per_address: self.max_connections_per_address.unwrap_or(default),
            proxies: match self.trusted_hops {
                Some(hops) => TrustedProxies::Hops(hops),
                None => TrustedProxies::Networks(self.trusted_proxies.clone()),
            },
        }
    }
}

/// Proxies whose `X-Forwarded-For` is trusted.
#[derive(Debug, Clone)]
pub enum TrustedProxies {
    /// From these networks.
    Networks(Vec<IpNet>),
    /// This many, one behind the other, and every connection comes from the last.
    Hops(NonZeroU8),
}

/// Limits of connections.
#[derive(Debug, Clone)]
pub struct ConnectionLimits {
    /// Of one client address.
    pub per_address: u32,
    /// Their connections have no limit.
    pub proxies: TrustedProxies,
}

/// Where the operator's listener is unless a flag says otherwise.
pub const DEFAULT_METRICS_LISTEN: SocketAddr =
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 7071);

/// Seconds between two canaries, unless a flag says otherwise.
pub const DEFAULT_CANARY_SECONDS: u64 = 10;
/// Rarer canaries would page too late.
const MAX_CANARY_SECONDS: u64 = 600;

/// Settings of a node.
#[derive(Debug, Clone, Args)]
pub struct NodeArgs {
    /// Address of the API
    #[arg(long, env = "FENCEPOST_LISTEN", default_value = "127.0.0.1:7070", value_name = "ADDR")]
    pub listen: SocketAddr,

    /// Address of the operator's listener (/metrics); never expose it
    #[arg(
        long,
        env = "FENCEPOST_METRICS_LISTEN",
        default_value_t = DEFAULT_METRICS_LISTEN,
        value_name = "ADDR"
    )]
    pub metrics_listen: SocketAddr,

    /// Seconds between two jobs of the server's own, which show that it works; 0: none
    /// [default: 10; in `dev`, 0]
    #[arg(long, env = "FENCEPOST_CANARY_SECONDS", value_name = "SECONDS",
          value_parser = clap::value_parser!(u64).range(0..=MAX_CANARY_SECONDS))]
    pub canary_seconds: Option<u64>,

    /// Folder with the rules of time zones, as the package tzdata installs them; the newer of these
    /// and the compiled ones apply [default: /usr/share/zoneinfo]
    #[arg(long, env = "FENCEPOST_ZONE_FILES", value_name = "DIR")]
    pub zone_files: Option<PathBuf>,

    /// Log filter: a level, or tracing directives such as info,fencepost=debug
    #[arg(long, env = "FENCEPOST_LOG", default_value = "info", value_name = "FILTER")]
    pub log: String,

    #[command(flatten)]
    pub traces: TraceArgs,

    #[command(flatten)]
    pub redis: RedisArgs,

    #[command(flatten)]
    pub people: PeopleArgs,

    #[command(flatten)]
    pub connections: ConnectionArgs,

    #[command(flatten)]
    pub roles: RoleArgs,

    #[command(flatten)]
    pub master_key: MasterKeyArgs,

    #[command(flatten)]
    pub outbound: OutboundArgs,

    #[command(flatten)]
    pub pools: PoolArgs,
}

impl NodeArgs {
    /// The pause between two canaries; none: there are none.
    #[must_use]
    pub fn canary(&self, default_seconds: u64) -> Option<Duration> {
        let seconds = self.canary_seconds.unwrap_or(default_seconds);
        (seconds > 0).then(|| Duration::from_secs(seconds))
    }
}

/// Calls to URLs of users: webhooks.
#[derive(Debug, Clone, Args)]
pub struct OutboundArgs {
    /// Whether this node sends the deliveries of webhooks: it needs a way to the internet, port 443
    #[arg(long, env = "FENCEPOST_DELIVER", default_value_t = true, value_name = "BOOL",
          action = clap::ArgAction::Set)]
    pub deliver: bool,

    /// Address or network (10.0.0.0/8) that webhooks may reach besides the public internet, also by
    /// http; may be repeated [default: none; in `dev`, this machine]
    #[arg(long, env = "FENCEPOST_OUTBOUND_ALLOW", value_name = "ADDR", value_delimiter = ',',
          value_parser = read_network)]
    pub outbound_allow: Vec<IpNet>,

    /// Address or network that webhooks may not reach, although it is on the public internet: the
    /// operator's own, such as addresses of pods and load balancers; may be repeated [default:
    /// none]
    #[arg(long, env = "FENCEPOST_OUTBOUND_DENY", value_name = "ADDR", value_delimiter = ',',
          value_parser = read_network)]
    pub outbound_deny: Vec<IpNet>,

    /// File of certificates, in PEM, of authorities that are trusted for webhooks besides those of
    /// the system [default: none]
    #[arg(long, env = "FENCEPOST_OUTBOUND_CA", value_name = "FILE")]
    pub outbound_ca: Option<PathBuf>,

    /// HTTP proxy for webhooks and pushes, as http://user:password@host:port: it is asked (CONNECT)
    /// for addresses that were checked before [default: none]
    #[arg(long, env = "FENCEPOST_OUTBOUND_PROXY", hide_env_values = true, value_name = "URL")]
    pub outbound_proxy: Option<SecretString>,
}

/// Export of spans.
#[derive(Debug, Clone, Args)]
pub struct TraceArgs {
    /// OpenTelemetry collector for spans over OTLP/HTTP, as http://host:4318; without it none are
    /// exported
    #[arg(long, env = "FENCEPOST_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,

    /// Sampling ratio (0–1) for callers' traces which they sample themselves
    #[arg(long, env = "FENCEPOST_CALLER_TRACE_RATIO", default_value_t = 1.0, value_name = "SHARE",
          value_parser = read_share)]
    pub caller_trace_ratio: f64,

    /// Sampling ratio (0–1) for traces started here
    #[arg(long, env = "FENCEPOST_TRACE_RATIO", default_value_t = 0.1, value_name = "SHARE",
          value_parser = read_share)]
    pub trace_ratio: f64,
}

fn read_share(text: &str) -> Result<f64, String> {
    let share: Option<f64> = text.parse().ok();
    share.filter(|it| (0.0..=1.0).contains(it)).ok_or_else(|| "must be between 0 and 1".to_owned())
}

/// Acks, failures, heartbeats and fences: five kinds of group commits. Few are in flight at a time.
const SETTLE_CONNECTIONS: u32 = 8;
const REPORT_CONNECTIONS: u32 = 4;
const CLAIM_CONNECTIONS: u32 = 6;
const ENQUEUE_CONNECTIONS: u32 = 4;
const KEY_CONNECTIONS: u32 = 2;
const READ_CONNECTIONS: u32 = 4;
const PEOPLE_CONNECTIONS: u32 = 4;
const BACKGROUND_CONNECTIONS: u32 = 3;

/// Connections of each pool. They are separate so that reads can never starve acks.
#[derive(Debug, Clone, Copy, Args)]
pub struct PoolArgs {
    /// Connections for acks and heartbeats
    #[arg(long, env = "FENCEPOST_SETTLE_CONNECTIONS", default_value_t = SETTLE_CONNECTIONS, value_name = "N",
          value_parser = clap::value_parser!(u32).range(8..=100))]
    pub settle_connections: u32,

    /// Connections for registrations and reports of workers
    #[arg(long, env = "FENCEPOST_REPORT_CONNECTIONS", default_value_t = REPORT_CONNECTIONS, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    pub report_connections: u32,

    /// Connections for claims
    #[arg(long, env = "FENCEPOST_CLAIM_CONNECTIONS", default_value_t = CLAIM_CONNECTIONS, value_name = "N",
          value_parser = clap::value_parser!(u32).range(2..=100))]
    pub claim_connections: u32,

    /// Connections for enqueues
    #[arg(long, env = "FENCEPOST_ENQUEUE_CONNECTIONS", default_value_t = ENQUEUE_CONNECTIONS, value_name = "N",
          value_parser = clap::value_parser!(u32).range(2..=100))]
    pub enqueue_connections: u32,

    /// Connections for API key lookups
    #[arg(long, env = "FENCEPOST_KEY_CONNECTIONS", default_value_t = KEY_CONNECTIONS, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    pub key_connections: u32,

    /// Connections for reads
    #[arg(long, env = "FENCEPOST_READ_CONNECTIONS", default_value_t = READ_CONNECTIONS, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    pub read_connections: u32,

    /// Connections for accounts and members
    #[arg(long, env = "FENCEPOST_PEOPLE_CONNECTIONS", default_value_t = PEOPLE_CONNECTIONS, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    pub people_connections: u32,

    /// Connections for background work
    #[arg(long, env = "FENCEPOST_BACKGROUND_CONNECTIONS", default_value_t = BACKGROUND_CONNECTIONS, value_name = "N",
          value_parser = clap::value_parser!(u32).range(2..=100))]
    pub background_connections: u32,
}

impl PoolArgs {
    /// Maximum connections of one node, including those of loops.
    #[must_use]
    pub const fn total(&self) -> u32 {
        /// Fire, reap, promote and vacuum, and the probe of the database.
        const LOOPS: u32 = 5;
        self.settle_connections
            + self.report_connections
            + self.claim_connections
            + self.enqueue_connections
            + self.key_connections
            + self.read_connections
            + self.people_connections
            + self.background_connections
            + LOOPS
    }
}

impl Default for PoolArgs {
    fn default() -> Self {
        Self {
            settle_connections: SETTLE_CONNECTIONS,
            report_connections: REPORT_CONNECTIONS,
            claim_connections: CLAIM_CONNECTIONS,
            enqueue_connections: ENQUEUE_CONNECTIONS,
            key_connections: KEY_CONNECTIONS,
            read_connections: READ_CONNECTIONS,
            people_connections: PEOPLE_CONNECTIONS,
            background_connections: BACKGROUND_CONNECTIONS,
        }
    }
}
