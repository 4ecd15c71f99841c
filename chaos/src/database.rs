//! The PostgreSQL of a run: a pair that the run leads itself, or a cluster that Patroni leads.

use std::path::Path;

use anyhow::bail;
use sqlx::PgConnection;

use crate::{pair::Pair, patroni::Patroni};

/// See the module's comment.
pub enum Database {
    Pair(Box<Pair>),
    Patroni(Patroni),
}

impl Database {
    /// Starts it. Patroni's ports begin with this one. To be called from the main thread.
    ///
    /// # Errors
    /// When something does not start.
    pub async fn start(dir: &Path, patroni_port: Option<u16>) -> anyhow::Result<Self> {
        match patroni_port {
            Some(port) => Ok(Self::Patroni(Patroni::start(dir, port).await?)),
            None => Ok(Self::Pair(Box::new(Pair::start(dir).await?))),
        }
    }

    /// Its URL for nodes.
    #[must_use]
    pub fn url(&self) -> String {
        match self {
            Self::Pair(it) => it.proxy.database_url(),
            Self::Patroni(it) => it.database_url(),
        }
    }

    /// A connection to what leads.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn connect(&self) -> anyhow::Result<PgConnection> {
        match self {
            Self::Pair(it) => it.connect().await,
            Self::Patroni(it) => it.connect().await,
        }
    }

    /// The pair, for what can only be done to one.
    ///
    /// # Errors
    /// When Patroni leads.
    pub fn pair(&mut self) -> anyhow::Result<&mut Pair> {
        match self {
            Self::Pair(it) => Ok(it),
            Self::Patroni(_) => bail!("Patroni leads this run's PostgreSQL"),
        }
    }

    /// Patroni, for what can only be done to it.
    ///
    /// # Errors
    /// When the run leads a pair itself.
    pub fn patroni(&mut self) -> anyhow::Result<&mut Patroni> {
        match self {
            Self::Pair(_) => bail!("Patroni does not lead this run's PostgreSQL"),
            Self::Patroni(it) => Ok(it),
        }
    }

    /// Waits until it could lose its primary: there is a standby that has all commits.
    ///
    /// # Errors
    /// When there is none in time.
    pub async fn until_whole(&mut self) -> anyhow::Result<()> {
        match self {
            Self::Pair(it) => it.restore_standby().await,
            Self::Patroni(it) => it.until_whole().await,
        }
    }
}
