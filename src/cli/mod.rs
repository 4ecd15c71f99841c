//! The command line: one binary with subcommands. `--help` is the reference.

mod accounts;
mod api;
mod audit;
mod batches;
mod certificate;
mod check;
mod doctor;
mod enqueue;
mod exposed;
mod findings;
mod jobs;
mod keys;
mod login;
mod projects;
mod ready;
mod recount;
pub mod settings;
mod stop;
mod stuck;
mod table;
mod target;
mod usage;
mod words;

use std::{
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use clap::{CommandFactory, Parser, Subcommand, builder::PossibleValuesParser};
use fencepost_adapters as adapters;
use fencepost_config::{
    DEFAULT_CANARY_SECONDS, DEFAULT_CONNECTIONS_PER_ADDRESS, DEFAULT_PLAN, DatabaseArgs,
    MasterKeyArgs, NodeArgs, RoleArgs, Signup,
};
use fencepost_engine::schedules::zones::Zones;
use fencepost_http::{deprecation::DEPRECATED, openapi};
use fencepost_net::{mail::Mailer, outbound::Outbound, seal::MasterKeys};
use fencepost_signals::{telemetry, traces};
use fencepost_store::{
    self as store,
    connection::roles::{self, Logins},
};
use tokio::net::TcpListener;

use self::target::TargetArgs;
use crate::{
    client::Failure,
    dev::{self, DevArgs},
    scaler::{self, ScalerArgs},
    serve::{self, Node, People},
    worker::{self, WorkerArgs},
    zone_files,
};

/// The log filter of a worker: its commands' output goes to their jobs.
const WORKER_LOG: &str = "warn";
/// The log filter of a scaler.
const SCALER_LOG: &str = "info";

/// A job queue with an HTTP API, over PostgreSQL.
#[derive(Debug, Parser)]
#[command(
    name = "fencepost",
    version,
    about,
    max_term_width = 100,
    after_help = "Exit codes: 0 done, 1 failed, 2 invalid command line, 3 not found, 4 the state does not allow it, 5 the server does not answer, 6 the job has not ended in time."
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run everything on this machine, with a private PostgreSQL; needs no configuration
    Dev(DevArgs),
    /// Run one node with your PostgreSQL
    Serve {
        #[command(flatten)]
        database: DatabaseArgs,
        #[command(flatten)]
        node: NodeArgs,
        /// Seconds to accept connections after a stop request, so that load balancers notice first
        #[arg(long, env = "FENCEPOST_LINGER_SECONDS", default_value_t = 5, value_name = "N",
              value_parser = clap::value_parser!(u64).range(0..=60))]
        linger_seconds: u64,
    },
    /// Migrate the database's schema to this version, as the owner of the database
    Migrate {
        #[command(flatten)]
        database: DatabaseArgs,
        #[command(flatten)]
        roles: RoleArgs,
    },
    /// Ask a node whether it is ready
    Ready {
        /// URL of the node's API
        #[arg(
            long,
            env = "FENCEPOST_URL",
            value_name = "URL",
            default_value = "http://127.0.0.1:7070"
        )]
        url: String,
    },
    /// Compare queue counts and dead letters with the jobs, and correct them
    Recount {
        #[command(flatten)]
        target: TargetArgs,
    },
    /// List the queues of all projects with the longest-waiting ready jobs
    Stuck {
        #[command(flatten)]
        target: TargetArgs,
    },
    /// Check configuration, database, Redis and mail settings, and say how to fix them
    Check(check::CheckArgs),
    /// Look for what keeps an instance from its work, and print the command that ends it
    Doctor(doctor::DoctorArgs),
    /// List projects, set their limits, and suspend them
    Projects(projects::ProjectsArgs),
    /// List accounts, suspend them, and end their sessions
    Accounts(accounts::AccountsArgs),
    /// Print a project's audit log, also of a deleted one
    Audit(audit::AuditArgs),
    /// Print what projects used on the days of a month, as CSV
    Usage(usage::UsageArgs),
    /// Create, list and revoke API keys of any project, as the operator of the database
    Keys(keys::KeysArgs),
    /// Run a command for each job, as a worker in any language
    Worker(WorkerArgs),
    /// Scale workers on Kubernetes: an external scaler of KEDA
    Scaler(ScalerArgs),
    /// Log in to a server in the browser, and keep its key for later commands
    Login(login::LoginArgs),
    /// Forget a server and its key
    Logout(login::LogoutArgs),
    /// Send any request of the API, and print its answer
    Api(api::request::RequestArgs),
    /// Enqueue a job
    Enqueue(enqueue::EnqueueArgs),
    /// List, show, retry and cancel jobs
    Jobs(jobs::JobsArgs),
    /// Create, seal, list and show batches
    Batches(batches::BatchesArgs),
    /// List, show, pause and resume queues
    Queues(api::ApiArgs<api::Queues>),
    /// List, show, pause, resume and unblock groups of jobs
    Groups(api::ApiArgs<api::Groups>),
    /// List, set and reset limits that several queues keep together
    Limits(api::ApiArgs<api::SharedLimits>),
    /// List dead letters and their groups, and retry them
    DeadLetters(api::ApiArgs<api::DeadLetters>),
    /// List workers, and ask them to stop
    Workers(api::ApiArgs<api::Workers>),
    /// List, show, pause, resume and run schedules
    Schedules(api::ApiArgs<api::Schedules>),
    /// List, show and cancel workflows
    Workflows(api::ApiArgs<api::Workflows>),
    /// List, create, rotate and revoke API keys of the project
    ApiKeys(api::ApiArgs<api::ApiKeys>),
    /// Say why a job is not running
    Explain(api::JobArgs),
    /// Print a job's logs
    Logs(api::LogsArgs),
    /// Print the completions of a shell: `source <(fencepost completions bash)`
    Completions {
        /// Shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages into this folder
    Man {
        /// Folder
        dir: PathBuf,
    },
    /// Print the OpenAPI document
    Openapi {
        /// Print an adapter's document
        #[arg(
            long, value_name = "NAME",
            value_parser = PossibleValuesParser::new(adapters::names())
        )]
        adapter: Option<String>,
        /// Print OpenAPI 3.0.3, for generators that do not read 3.1
        #[arg(long, conflicts_with = "adapter")]
        older: bool,
        /// Write all documents into this folder
        #[arg(long, value_name = "DIR", conflicts_with_all = ["adapter", "older"])]
        dir: Option<PathBuf>,
    },
    /// Print the documentation page of all settings
    Configuration,
}

impl Cli {
    /// Parses the command line; prints help and exits when it is invalid.
    #[must_use]
    pub fn read() -> Self {
        Self::parse()
    }

    /// Runs the command. Call it on the main thread: `dev` starts a child that ends with the thread
    /// that started it.
    ///
    /// # Errors
    /// The error with its causes, for the person at the terminal.
    pub async fn run(self) -> anyhow::Result<()> {
        match self.command {
            Command::Dev(args) => {
                let stop = stop::on_signal()?;
                telemetry::install_logs(&args.node.log)?;
                traces::install(&args.node.traces)?;
                let ended = dev::run(args, stop).await;
                traces::finish();
                ended
            }
            Command::Serve { database, node, linger_seconds } => {
                // First: a signal that comes while it opens its sockets is an orderly stop, too.
                let stop = stop::on_signal()?;
                telemetry::install_logs(&node.log)?;
                traces::install(&node.traces)?;
                let linger = Duration::from_secs(linger_seconds);
                let node = open(&database, node, linger).await?;
                let ended = serve::serve(node, stop).await;
                traces::finish();
                ended
            }
            Command::Migrate { database, roles } => migrate(&database.url()?, &roles).await,
            Command::Ready { url } => ready::run(&url).await,
            Command::Recount { target } => recount::run(&target).await,
            Command::Stuck { target } => stuck::run(&target).await,
            Command::Check(args) => check::run(args).await,
            Command::Doctor(args) => doctor::run(args).await,
            Command::Projects(args) => projects::run(args).await,
            Command::Accounts(args) => accounts::run(args).await,
            Command::Audit(args) => audit::run(args).await,
            Command::Usage(args) => usage::run(args).await,
            Command::Keys(args) => keys::run(args).await,
            Command::Worker(args) => {
                telemetry::install_logs(WORKER_LOG)?;
                worker::run(args).await
            }
            Command::Scaler(args) => scale(args).await,
            Command::Login(args) => login::login(args).await,
            Command::Logout(args) => login::logout(&args),
            Command::Api(args) => api::request::run(args).await,
            Command::Enqueue(args) => enqueue::run(args).await,
            Command::Jobs(args) => jobs::run(args).await,
            Command::Batches(args) => batches::run(args).await,
            Command::Queues(args) => api::run(args).await,
            Command::Groups(args) => api::run(args).await,
            Command::Limits(args) => api::run(args).await,
            Command::DeadLetters(args) => api::run(args).await,
            Command::Workers(args) => api::run(args).await,
            Command::Schedules(args) => api::run(args).await,
            Command::Workflows(args) => api::run(args).await,
            Command::ApiKeys(args) => api::run(args).await,
            Command::Explain(args) => api::explain(args).await,
            Command::Logs(args) => api::logs(args).await,
            Command::Completions { shell } => complete(shell),
            Command::Man { dir } => {
                std::fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
                Ok(clap_mangen::generate_to(Self::command(), dir)?)
            }
            Command::Openapi { older: true, .. } => {
                Ok(write!(std::io::stdout(), "{}", openapi::older_text())?)
            }
            Command::Openapi { dir: Some(dir), .. } => write_documents(&dir),
            Command::Openapi { adapter, .. } => {
                Ok(write!(std::io::stdout(), "{}", document(adapter.as_deref()))?)
            }
            Command::Configuration => Ok(write!(std::io::stdout(), "{}", settings::page())?),
        }
    }
}

/// Prints the completions of a shell.
fn complete(shell: clap_complete::Shell) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "fencepost", &mut script);
    Ok(std::io::stdout().write_all(&script)?)
}

async fn scale(args: ScalerArgs) -> anyhow::Result<()> {
    let stop = stop::on_signal()?;
    telemetry::install_logs(SCALER_LOG)?;
    scaler::run(args, stop).await
}

/// Migrates, and creates the database roles if their passwords are given.
async fn migrate(database_url: &str, args: &RoleArgs) -> anyhow::Result<()> {
    let logins = Logins::given(args.database_roles.as_deref())?;
    store::connection::migrate::migrate(database_url).await.context("the migration failed")?;
    match logins {
        Some(logins) => roles::install(database_url, &logins).await,
        None => Ok(()),
    }
}

/// The master keys, if any are given.
fn master_keys(args: &MasterKeyArgs) -> anyhow::Result<MasterKeys> {
    args.keys()?.map_or_else(|| Ok(MasterKeys::default()), |it| MasterKeys::parse(&it))
}

/// The OpenAPI document of the native API, or of an adapter.
fn document(adapter: Option<&str>) -> String {
    let mut adapters = adapters::documents().into_iter();
    let found = adapters.find(|it| Some(it.0) == adapter);
    found.map_or_else(openapi::text, |it| it.1)
}

fn write_documents(dir: &Path) -> anyhow::Result<()> {
    let native = [
        ("openapi", openapi::text()),
        ("openapi-3.0", openapi::older_text()),
        ("openapi-project", openapi::project_text()),
    ];
    for (name, text) in native.into_iter().chain(adapters::documents()) {
        let file = dir.join(format!("{name}.json"));
        std::fs::write(&file, text).with_context(|| file.display().to_string())?;
    }
    Ok(())
}

/// The exit code of a failure, as `--help` lists them.
#[must_use]
pub fn exit_code(error: &anyhow::Error) -> u8 {
    if let Some(jobs::NotSucceeded::Unfinished(_)) = error.downcast_ref() {
        return 6;
    }
    match error.downcast_ref::<Failure>() {
        Some(Failure::Refused { status, .. }) if status.as_u16() == 404 => 3,
        Some(Failure::Refused { status, .. }) if status.as_u16() == 409 => 4,
        Some(failure) if failure.is_transient() => 5,
        _ => 1,
    }
}

async fn open(database: &DatabaseArgs, node: NodeArgs, linger: Duration) -> anyhow::Result<Node> {
    for flag in exposed::passwords(std::env::args_os().filter_map(|it| it.into_string().ok())) {
        tracing::warn!(
            flag,
            "other users of this machine can read this password: use a file or a variable"
        );
    }
    let database_url = database.url()?;
    let bind = async |address| {
        TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))
    };
    let api = bind(node.listen).await?;
    let operator = bind(node.metrics_listen).await?;
    tracing::info!(
        api.address = %api.local_addr()?,
        metrics.address = %operator.local_addr()?,
        "listening"
    );
    let canary = node.canary(DEFAULT_CANARY_SECONDS);
    let (plans, default_plan) = node.people.plans(DEFAULT_PLAN)?;
    let mailer = match node.people.smtp_url()? {
        Some(url) => Mailer::smtp(&url, &node.people.mail_from)?,
        None => Mailer::Nowhere,
    };
    let public_url = node.people.public_url.clone();
    let people = People {
        signup: node.people.signup.unwrap_or(Signup::Invite),
        plans,
        default_plan,
        public_url: public_url.unwrap_or(format!("http://{}", api.local_addr()?)),
        scanner_keys: serve::scanner_keys(node.people.scanner_keys.as_deref())?,
        providers: serve::providers(node.people.oidc_config.as_deref())?,
        security_contact: node.people.security_contact.clone(),
        plan_contact: node.people.plan_contact.clone(),
        mailer,
        master_keys: Arc::new(master_keys(&node.master_key)?),
        breached_passwords: serve::breached_passwords(node.people.breached_passwords.as_deref())?,
    };
    Ok(Node {
        api,
        operator: Some((operator, telemetry::install_metrics()?)),
        database_url,
        logins: Logins::given(node.roles.database_roles.as_deref())?,
        pools: node.pools,
        redis: node.redis.place()?,
        redis_budget: node.redis.budget(),
        people,
        connections: node.connections.limits(DEFAULT_CONNECTIONS_PER_ADDRESS),
        canary,
        zones: Zones::new(zone_files::read(node.zone_files.as_deref())?),
        outbound: Outbound::of_args(&node.outbound, node.outbound.outbound_allow.clone())?,
        deprecated: DEPRECATED,
        linger,
    })
}
