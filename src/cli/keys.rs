//! `fencepost keys`: API keys over the database, for its operator.

use std::io::Write;

use anyhow::{Context, bail, ensure};
use chrono::{DateTime, SecondsFormat, Utc};
use clap::{Args, Subcommand};
use fencepost_config::MasterKeyArgs;
use fencepost_domain::{
    access::{self, Scope},
    binding::KeyBinding,
    error::{Error, RemainingKey},
    ids::{KeyId, ProjectPublicId},
    limits::{self, MAX_KEY_SECONDS, MAX_LIVE_KEYS},
    networks, text,
};
use fencepost_engine::webhooks;
use fencepost_identity::accounts::{
    author::Author,
    keys::{self, KeyRequest},
    projects, seal_signing_keys, seal_totp_secrets,
};
use fencepost_net::seal::MasterKeys;
use fencepost_store::{self as store, people::projects::Project};
use ipnet::IpNet;
use secrecy::ExposeSecret;
use sqlx::PgConnection;

use super::target::TargetArgs;

const DAY_SECONDS: i64 = 86_400;
/// Keys that a list shows.
const MAX_LISTED_KEYS: i64 = 500;

/// Options of `keys`.
#[derive(Debug, Args)]
pub struct KeysArgs {
    #[command(flatten)]
    target: TargetArgs,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Create a key and print it; it is shown only once
    Create {
        /// Project, by slug or id
        #[arg(long, value_name = "PROJECT", required_unless_present = "new_project")]
        project: Option<String>,
        /// Create this project first
        #[arg(long, value_name = "NAME", conflicts_with = "project")]
        new_project: Option<String>,
        /// Name of the key
        #[arg(long, default_value = "cli")]
        name: String,
        /// Scopes of the key
        #[arg(long, value_enum, default_value = "full", value_name = "PRESET")]
        preset: PresetArg,
        /// Days until the key expires [default: never]
        #[arg(long, value_name = "N",
              value_parser = clap::value_parser!(i64).range(1..=MAX_KEY_SECONDS / DAY_SECONDS))]
        expires_in_days: Option<i64>,
        /// IP address or network from which it may be used; may be repeated [default: all]
        #[arg(long = "allowed-ip", value_name = "NETWORK", value_parser = network)]
        allowed_ips: Vec<IpNet>,
        /// Queue that it is bound to; may be repeated; reduces its scopes [default: all]
        #[arg(long = "queue", value_name = "QUEUE")]
        queues: Vec<String>,
        /// Job type that it is bound to; may be repeated; reduces its scopes [default: all]
        #[arg(long = "job-type", value_name = "TYPE")]
        job_types: Vec<String>,
        /// Print only the key
        #[arg(long)]
        quiet: bool,
    },
    /// List a project's keys, newest first
    List {
        /// Project, by slug or id
        #[arg(long, value_name = "PROJECT")]
        project: String,
    },
    /// Encrypt the keys that sign access tokens, with the first master key
    Seal {
        #[command(flatten)]
        master_key: MasterKeyArgs,
    },
    /// Revoke a key; nodes refuse it within five seconds
    Revoke {
        /// Key id, as `list` shows it
        key_id: String,
        /// Whether keys that it has created are revoked, too; required if there are any
        #[arg(long, value_name = "BOOL")]
        revoke_keys: Option<bool>,
        /// Project, by slug or id
        #[arg(long, value_name = "PROJECT")]
        project: String,
    },
}

/// [`access::KeyPreset`], as the command line names it.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum PresetArg {
    /// Every scope
    Full,
    /// Enqueue and read
    Producer,
    /// Poll, heartbeat and ack
    Worker,
    /// The same, and register recurring schedules
    WorkerWithSchedules,
    /// Read
    ReadOnly,
    /// Read, and manage all but keys
    Operator,
}

impl PresetArg {
    /// As the API names it.
    pub const fn preset(self) -> access::KeyPreset {
        match self {
            Self::Full => access::KeyPreset::Full,
            Self::Producer => access::KeyPreset::Producer,
            Self::Worker => access::KeyPreset::Worker,
            Self::WorkerWithSchedules => access::KeyPreset::WorkerWithSchedules,
            Self::ReadOnly => access::KeyPreset::ReadOnly,
            Self::Operator => access::KeyPreset::Operator,
        }
    }
}

/// Runs the command.
///
/// # Errors
/// When the database does not answer, or the project or key does not exist.
pub async fn run(args: KeysArgs) -> anyhow::Result<()> {
    let mut conn = args.target.connect().await?;
    let mut out = std::io::stdout();
    match args.command {
        Command::Create {
            project,
            new_project,
            name,
            preset,
            expires_in_days,
            allowed_ips,
            queues,
            job_types,
            quiet,
        } => {
            check_name("--name", &name)?;
            let (max, given) = (limits::MAX_KEY_NETWORKS, allowed_ips.len());
            ensure!(given <= max, "--allowed-ip: at most {max}, not {given}");
            let binding = binding(queues, job_types)?;
            let scopes = scopes_of(preset, binding.as_ref())?;
            let request = KeyRequest {
                expires_at: end_after(&mut conn, expires_in_days).await?,
                allowed_ips,
                binding,
                ..KeyRequest::named(name, scopes)
            };
            let project = match (project, new_project) {
                (Some(project), _) => find(&mut conn, &project).await?,
                (None, Some(name)) => make_project(&mut conn, &name).await?,
                (None, None) => bail!("give --project or --new-project"),
            };
            let author = Author::operator(project.id);
            let made = keys::create(&mut conn, &author, request, MAX_LIVE_KEYS).await?;
            let (id, api_key) = (made.listed.id, made.secret.expose_secret());
            if quiet {
                writeln!(out, "{api_key}")?;
            } else {
                writeln!(out, "project  {} ({})", project.slug, project.public_id)?;
                writeln!(out, "key id   {id}")?;
                writeln!(out, "key      {api_key}\n\nIt is shown only once: store it.")?;
            }
        }
        Command::Seal { master_key } => seal(&mut conn, &master_key, &mut out).await?,
        Command::List { project } => {
            let project = find(&mut conn, &project).await?;
            print_keys(&mut conn, &project, &mut out).await?;
        }
        Command::Revoke { key_id, revoke_keys, project } => {
            let project = find(&mut conn, &project).await?;
            let id: KeyId =
                key_id.parse().with_context(|| format!("`{key_id}` is not a key id"))?;
            let author = Author::operator(project.id);
            let revoked = keys::revoke(&mut conn, &author, id, revoke_keys).await;
            let revoked = match revoked {
                Err(Error::KeysRemain(created)) => bail!(remaining(&created)),
                revoked => revoked.with_context(|| format!("project {}", project.slug))?,
            };
            writeln!(out, "revoked {id}, {} keys in all", revoked.len())?;
        }
    }
    Ok(())
}

async fn print_keys(
    conn: &mut PgConnection,
    project: &Project,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    writeln!(out, "{:<31} {:<17} {:<20} NAME, STATE", "KEY ID", "KEY", "CREATED")?;
    let time = |it: DateTime<Utc>| it.to_rfc3339_opts(SecondsFormat::Secs, true);
    for key in store::people::keys::list(conn, project.id, false, None, MAX_LISTED_KEYS).await? {
        let state = match (key.is_live, key.revoked_at, key.expires_at) {
            (true, ..) => "live".to_owned(),
            (_, Some(it), _) => format!("revoked {}", time(it)),
            (_, _, Some(it)) => format!("expired {}", time(it)),
            _ => "inactive".to_owned(),
        };
        let shown = format!("{}…{}", key.shown_prefix, key.shown_end);
        let (id, created) = (key.id.to_string(), time(key.created_at));
        writeln!(out, "{id:<31} {shown:<17} {created:<20} {}, {state}", key.name)?;
    }
    Ok(())
}

fn remaining(created: &[RemainingKey]) -> String {
    let created: Vec<_> = created.iter().map(|it| format!("{} ({})", it.id, it.name)).collect();
    let created = created.join(", ");
    format!("it has created live keys: {created}; say --revoke-keys true or --revoke-keys false")
}

async fn end_after(
    conn: &mut PgConnection,
    days: Option<i64>,
) -> sqlx::Result<Option<DateTime<Utc>>> {
    match days {
        Some(days) => {
            store::people::keys::end_within(conn, days * DAY_SECONDS, &[]).await.map(Some)
        }
        None => Ok(None),
    }
}

fn scopes_of(preset: PresetArg, binding: Option<&KeyBinding>) -> anyhow::Result<Vec<Scope>> {
    let may_have = |it: &Scope| binding.is_none() || KeyBinding::SCOPES.contains(it);
    let scopes: Vec<_> = preset.preset().scopes().iter().copied().filter(may_have).collect();
    ensure!(!scopes.is_empty(), "--preset: none of its scopes is for a bound key");
    Ok(scopes)
}

fn binding(queues: Vec<String>, job_types: Vec<String>) -> anyhow::Result<Option<KeyBinding>> {
    let given = [
        ("--queue", &queues, limits::MAX_KEY_QUEUES, limits::MAX_QUEUE_CHARS),
        ("--job-type", &job_types, limits::MAX_KEY_JOB_TYPES, limits::MAX_JOB_TYPE_CHARS),
    ];
    for (flag, names, max, max_chars) in given {
        ensure!(names.len() <= max, "{flag}: at most {max}, not {}", names.len());
        for name in names {
            text::check_name(name, max_chars).with_context(|| flag.to_owned())?;
        }
    }
    Ok(KeyBinding::of(queues, job_types))
}

fn network(text: &str) -> Result<IpNet, &'static str> {
    networks::parse(text).ok_or("must be an IP address, or a network such as 192.0.2.0/24")
}

/// Encrypts what the database has of secrets with the first master key.
async fn seal(
    conn: &mut PgConnection,
    master_key: &MasterKeyArgs,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let keys = master_key.keys()?.context("give --master-key-file")?;
    let keys = MasterKeys::parse(&keys)?;
    let sealed = seal_signing_keys(conn, &keys).await?;
    writeln!(out, "{sealed} signing keys encrypted")?;
    let sealed = seal_totp_secrets(conn, &keys).await?;
    writeln!(out, "{sealed} secrets of authenticator apps encrypted")?;
    let sealed = webhooks::seal_secrets(conn, &keys).await?;
    writeln!(out, "secrets of {sealed} endpoints and pushes encrypted")?;
    Ok(())
}

pub(super) async fn find(conn: &mut PgConnection, project: &str) -> anyhow::Result<Project> {
    let public_id: Option<ProjectPublicId> = project.parse().ok();
    let found = store::people::projects::find(conn, project, public_id).await?;
    found.with_context(|| format!("no such project: `{project}`"))
}

async fn make_project(conn: &mut PgConnection, name: &str) -> anyhow::Result<Project> {
    check_name("--new-project", name)?;
    let slug = text::slug(name);
    ensure!(!slug.is_empty(), "--new-project: `{name}` has no letter or digit for a slug");
    match projects::create_unlimited(conn, &slug, name).await {
        Err(Error::SlugTaken) => {
            bail!("the project `{slug}` exists already: use --project {slug}")
        }
        made => Ok(made?),
    }
}

fn check_name(flag: &str, name: &str) -> anyhow::Result<()> {
    text::check_name(name, limits::MAX_NAME_CHARS).with_context(|| flag.to_owned())
}
