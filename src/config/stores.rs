//! Where a node finds its stores, and the secrets for them.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context;
use clap::Args;
use secrecy::SecretString;

/// Where the database is. `DATABASE_URL` is read when neither flag nor variable is given.
#[derive(Debug, Clone, Args)]
pub struct DatabaseArgs {
    /// PostgreSQL to use, as postgres://user:password@host/database
    #[arg(
        long,
        env = "FENCEPOST_DATABASE_URL",
        hide_env_values = true,
        value_name = "URL",
        global = true
    )]
    pub database_url: Option<String>,

    /// File with the URL of the database
    #[arg(
        long,
        env = "FENCEPOST_DATABASE_URL_FILE",
        value_name = "FILE",
        conflicts_with = "database_url",
        global = true
    )]
    pub database_url_file: Option<PathBuf>,
}

impl DatabaseArgs {
    /// The URL of `--database-url-file` or `--database-url`, from flags or variables, or else of
    /// `DATABASE_URL`.
    ///
    /// # Errors
    /// When none of them is set, or the file cannot be read.
    pub fn url(&self) -> anyhow::Result<String> {
        if let Some(file) = &self.database_url_file {
            return read_secret(file);
        }
        self.database_url
            .clone()
            .or_else(|| std::env::var("DATABASE_URL").ok().filter(|it| !it.is_empty()))
            .ok_or_else(|| {
                anyhow::anyhow!(
                    "no database: give --database-url, --database-url-file, FENCEPOST_DATABASE_URL \
                     or DATABASE_URL"
                )
            })
    }
}

/// The logins of the database roles.
#[derive(Debug, Clone, Default, Args)]
pub struct RoleArgs {
    /// Folder with the passwords of the database roles, in the files hot (workers and producers),
    /// console, people (accounts) and maint (background loops). Nodes log in as the role of each
    /// kind of work; `migrate` creates the roles
    #[arg(long, env = "FENCEPOST_DATABASE_ROLES", value_name = "FOLDER")]
    pub database_roles: Option<PathBuf>,
}

/// The content of a file without its final line break.
///
/// # Errors
/// When it cannot be read, or is empty.
pub fn read_secret(file: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("cannot read the secret in {}", file.display()))?;
    let text = text.trim_end_matches(['\r', '\n']);
    anyhow::ensure!(!text.is_empty(), "the file {} is empty", file.display());
    Ok(text.to_owned())
}

/// The key for secrets in the database.
#[derive(Debug, Clone, Args)]
pub struct MasterKeyArgs {
    /// Master key that encrypts secrets in the database: 32 random bytes in base64. To
    /// replace it, give two, each on a line of its own: the first encrypts, both decrypt
    #[arg(long, env = "FENCEPOST_MASTER_KEY", hide_env_values = true, value_name = "KEY")]
    pub master_key: Option<SecretString>,

    /// File with the master key
    #[arg(
        long,
        env = "FENCEPOST_MASTER_KEY_FILE",
        value_name = "FILE",
        conflicts_with = "master_key"
    )]
    pub master_key_file: Option<PathBuf>,
}

impl MasterKeyArgs {
    /// The keys, if they are given.
    ///
    /// # Errors
    /// When the file cannot be read, or is empty.
    pub fn keys(&self) -> anyhow::Result<Option<SecretString>> {
        secret(self.master_key.as_ref(), self.master_key_file.as_ref())
    }
}

/// A secret, given directly or in a file.
///
/// # Errors
/// When the file cannot be read, or is empty.
pub fn secret(
    value: Option<&SecretString>,
    file: Option<&PathBuf>,
) -> anyhow::Result<Option<SecretString>> {
    match file {
        Some(file) => Ok(Some(SecretString::from(read_secret(file)?))),
        None => Ok(value.cloned()),
    }
}

/// Where Redis is.
#[derive(Debug, Clone)]
pub struct RedisPlace {
    pub url: SecretString,
    /// The certificate authority of its server, as PEM; none: those of the system.
    pub ca: Option<Vec<u8>>,
}

impl From<String> for RedisPlace {
    fn from(url: String) -> Self {
        Self { url: url.into(), ca: None }
    }
}

/// How Redis is reached.
#[derive(Debug, Clone, Args)]
pub struct RedisArgs {
    /// Redis to use: redis://user:password@host:port,
    /// redis+sentinel://…@host:port,host:port/master, redis+cluster://…@host:port,host:port, each
    /// with rediss for TLS, or redis+unix:///path. Nodes share rate limits and wake each other's
    /// polls over it. Without it each node counts rate limits for itself, and finds jobs that were
    /// stored on others up to two seconds later
    #[arg(long, env = "FENCEPOST_REDIS_URL", hide_env_values = true, value_name = "URL")]
    pub redis_url: Option<SecretString>,

    /// File with the URL of Redis
    #[arg(
        long,
        env = "FENCEPOST_REDIS_URL_FILE",
        value_name = "FILE",
        conflicts_with = "redis_url"
    )]
    pub redis_url_file: Option<PathBuf>,

    /// Certificate authority of Redis's TLS certificate, as PEM [default: those of the system]
    #[arg(long, env = "FENCEPOST_REDIS_CA_FILE", value_name = "FILE")]
    pub redis_ca_file: Option<PathBuf>,

    /// Budget of a call to Redis in milliseconds; after it a node continues without Redis
    #[arg(long, env = "FENCEPOST_REDIS_BUDGET_MS", default_value_t = 25, value_name = "N",
          value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub redis_budget_ms: u64,
}

impl RedisArgs {
    /// Where Redis is, if a URL is given.
    pub fn place(&self) -> anyhow::Result<Option<RedisPlace>> {
        let url = secret(self.redis_url.as_ref(), self.redis_url_file.as_ref())?;
        let read = |file: &PathBuf| {
            std::fs::read(file)
                .with_context(|| format!("cannot read the certificate in {}", file.display()))
        };
        let ca = self.redis_ca_file.as_ref().map(read).transpose()?;
        Ok(url.map(|url| RedisPlace { url, ca }))
    }

    /// The budget of a call.
    #[must_use]
    pub fn budget(&self) -> Duration {
        Duration::from_millis(self.redis_budget_ms)
    }
}
