//! How Redis is reached: one server, the master that Sentinels name, or a cluster.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Context;
use rand::seq::IndexedRandom;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionInfo, IntoConnectionInfo, Pipeline, RedisError,
    RedisFuture, RedisResult, TlsCertificates, TlsMode, Value,
    aio::{
        ConnectionLike, ConnectionManager, ConnectionManagerConfig, MultiplexedConnection, PubSub,
    },
    cluster::{ClusterClientBuilder, ClusterConfig},
    cluster_async::ClusterConnection,
    sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType},
};
use secrecy::ExposeSecret;
use tokio::time::timeout;

use fencepost_config::RedisPlace;

const CONNECT_TIMEOUT: Duration = Duration::from_millis(200);
pub(super) const RESPONSE_TIMEOUT: Duration = Duration::from_millis(100);
/// Longest search for the master.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(2);

/// Redis, reached in one of three ways.
pub(super) enum Servers {
    One { client: Box<Client>, manager: ConnectionManager },
    Sentinels(Arc<Sentinels>),
    Cluster { seeds: Vec<Client>, connection: ClusterConnection },
}

/// The Sentinels of a master, and a connection to it.
pub(super) struct Sentinels {
    client: tokio::sync::Mutex<SentinelClient>,
    config: AsyncConnectionConfig,
    current: Mutex<Option<MultiplexedConnection>>,
}

/// A connection for calls.
#[derive(Clone)]
pub(super) enum Connection {
    One(ConnectionManager),
    Master(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl ConnectionLike for Connection {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        match self {
            Self::One(it) => it.req_packed_command(cmd),
            Self::Master(it) => it.req_packed_command(cmd),
            Self::Cluster(it) => it.req_packed_command(cmd),
        }
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        match self {
            Self::One(it) => it.req_packed_commands(pipeline, offset, count),
            Self::Master(it) => it.req_packed_commands(pipeline, offset, count),
            Self::Cluster(it) => it.req_packed_commands(pipeline, offset, count),
        }
    }

    fn get_db(&self) -> i64 {
        match self {
            Self::One(it) => it.get_db(),
            Self::Master(it) => it.get_db(),
            Self::Cluster(it) => it.get_db(),
        }
    }
}

impl Servers {
    /// Connects lazily. A budget longer than the connections' timeouts extends them.
    ///
    /// # Errors
    /// When the URL or the certificate cannot be read. It never repeats the URL, which may hold a
    /// password.
    pub fn open(place: &RedisPlace, budget: Duration) -> anyhow::Result<Self> {
        let (connect, respond) = (CONNECT_TIMEOUT.max(budget), RESPONSE_TIMEOUT.max(budget));
        let ca = place.ca.as_deref();
        match Address::parse(place.url.expose_secret()) {
            Some(address) if address.is_cluster => address.open_cluster(ca, connect, respond),
            Some(address) => address.open_sentinels(ca, connect, respond),
            None => {
                let client = client(place.url.expose_secret(), ca).context(INVALID)?;
                let config = ConnectionManagerConfig::new()
                    .set_connection_timeout(Some(connect))
                    .set_response_timeout(Some(respond))
                    .set_number_of_retries(1)
                    .set_min_delay(Duration::from_millis(50))
                    .set_max_delay(Duration::from_millis(100));
                let manager = client.get_connection_manager_lazy(config);
                Ok(Self::One {
                    manager: manager.context("Redis cannot be used")?,
                    client: client.into(),
                })
            }
        }
    }

    /// A connection for calls.
    pub async fn connection(&self) -> RedisResult<Connection> {
        Ok(match self {
            Self::One { manager, .. } => Connection::One(manager.clone()),
            Self::Sentinels(it) => Connection::Master(it.master().await?),
            Self::Cluster { connection, .. } => Connection::Cluster(connection.clone()),
        })
    }

    /// A call failed: the master may be another one now.
    pub fn forget(&self) {
        if let Self::Sentinels(it) = self {
            *it.current() = None;
        }
    }

    /// A connection for subscriptions. In a cluster any node sends all messages.
    pub async fn pubsub(&self) -> RedisResult<PubSub> {
        match self {
            Self::One { client, .. } => client.get_async_pubsub().await,
            Self::Sentinels(it) => {
                let client = it.client.lock().await.async_get_client().await?;
                client.get_async_pubsub().await
            }
            Self::Cluster { seeds, .. } => any(seeds)?.get_async_pubsub().await,
        }
    }

    /// Description that a server gives of itself.
    pub async fn info(&self) -> RedisResult<String> {
        let mut connection = match self {
            // The answer of a cluster would be one of each node.
            Self::Cluster { seeds, .. } => {
                Connection::Master(any(seeds)?.get_multiplexed_async_connection().await?)
            }
            _ => self.connection().await?,
        };
        redis::cmd("INFO").query_async(&mut connection).await
    }
}

impl Sentinels {
    fn current(&self) -> std::sync::MutexGuard<'_, Option<MultiplexedConnection>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn master(self: &Arc<Self>) -> RedisResult<MultiplexedConnection> {
        if let Some(current) = self.current().clone() {
            return Ok(current);
        }
        // In a task of its own: the search continues after the caller's budget.
        let this = Arc::clone(self);
        let searched = tokio::spawn(async move { timeout(SEARCH_TIMEOUT, this.search()).await });
        searched.await.map_err(std::io::Error::other)?.map_err(std::io::Error::from)?
    }

    async fn search(&self) -> RedisResult<MultiplexedConnection> {
        let mut client = self.client.lock().await;
        if let Some(current) = self.current().clone() {
            return Ok(current);
        }
        let found = client.get_async_connection_with_config(&self.config).await?;
        *self.current() = Some(found.clone());
        Ok(found)
    }
}

const INVALID: &str = "the URL of Redis is invalid";

/// The URL of Sentinels or of a cluster: `redis+sentinel://user:password@host:port,host:port/name`,
/// or `redis+cluster://user:password@host:port,host:port`; with TLS `rediss+…`.
struct Address<'a> {
    is_cluster: bool,
    scheme: &'static str,
    /// With its `@`.
    credentials: &'a str,
    hosts: Vec<&'a str>,
    path: &'a str,
    query: &'a str,
}

impl<'a> Address<'a> {
    /// None: the URL is of another kind.
    fn parse(url: &'a str) -> Option<Self> {
        const SCHEMES: [(&str, bool, &str); 4] = [
            ("redis+sentinel://", false, "redis"),
            ("rediss+sentinel://", false, "rediss"),
            ("redis+cluster://", true, "redis"),
            ("rediss+cluster://", true, "rediss"),
        ];
        let (rest, is_cluster, scheme) = SCHEMES
            .iter()
            .find_map(|(prefix, kind, scheme)| Some((url.strip_prefix(prefix)?, *kind, *scheme)))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let at = authority.rfind('@').map_or(0, |it| it + 1);
        let (credentials, hosts) = authority.split_at(at);
        Some(Self {
            is_cluster,
            scheme,
            credentials,
            hosts: hosts.split(',').collect(),
            path,
            query,
        })
    }

    fn of(&self, host: &str, credentials: &str) -> RedisResult<ConnectionInfo> {
        format!("{}://{credentials}{host}", self.scheme).into_connection_info()
    }

    /// How each host is reached.
    fn infos(&self, credentials: &str) -> anyhow::Result<Vec<ConnectionInfo>> {
        let infos = self.hosts.iter().map(|it| self.of(it, credentials));
        infos.collect::<RedisResult<_>>().context(INVALID)
    }

    fn has_tls(&self) -> bool {
        self.scheme == "rediss"
    }

    fn open_cluster(
        &self,
        ca: Option<&[u8]>,
        connect: Duration,
        respond: Duration,
    ) -> anyhow::Result<Servers> {
        let infos = self.infos(self.credentials)?;
        let mut builder = ClusterClientBuilder::new(infos.clone()).retries(1);
        if let Some(certificates) = certificates(ca).filter(|_| self.has_tls()) {
            builder = builder.certs(certificates);
        }
        let cluster = builder.build().context(INVALID)?;
        let config =
            ClusterConfig::new().set_connection_timeout(connect).set_response_timeout(respond);
        let seeds = infos.into_iter().map(|it| client(it, ca)).collect::<RedisResult<_>>();
        Ok(Servers::Cluster {
            seeds: seeds.context(INVALID)?,
            connection: cluster.get_pending_async_connection_with_config(config),
        })
    }

    fn open_sentinels(
        &self,
        ca: Option<&[u8]>,
        connect: Duration,
        respond: Duration,
    ) -> anyhow::Result<Servers> {
        let (name, db) = self.path.split_once('/').unwrap_or((self.path, "0"));
        anyhow::ensure!(
            !name.is_empty(),
            "the URL of Redis lacks the master's name after the hosts"
        );
        let addresses: Vec<_> = self.infos("")?.iter().map(|it| it.addr().clone()).collect();
        let mut builder = SentinelClientBuilder::new(addresses, name, SentinelServerType::Master)
            .context(INVALID)?
            .set_client_to_redis_db(db.parse().context("the database of Redis is a number")?);
        let master = self.of("host", self.credentials).context(INVALID)?;
        if let Some(username) = master.redis_settings().username() {
            builder = builder.set_client_to_redis_username(username);
        }
        if let Some(password) = master.redis_settings().password() {
            builder = builder.set_client_to_redis_password(password);
        }
        let value = |name: &str| {
            let mut pairs = self.query.split('&').filter_map(|it| it.split_once('='));
            pairs.find(|it| it.0 == name).map_or("", |it| it.1)
        };
        let (username, password) = (value("sentinel_username"), value("sentinel_password"));
        let sentinel = self.of("host", &format!("{username}:{password}@")).context(INVALID)?;
        if let Some(username) = sentinel.redis_settings().username().filter(|it| !it.is_empty()) {
            builder = builder.set_client_to_sentinel_username(username);
        }
        if let Some(password) = sentinel.redis_settings().password().filter(|it| !it.is_empty()) {
            builder = builder.set_client_to_sentinel_password(password);
        }
        if self.has_tls() {
            builder = builder
                .set_client_to_redis_tls_mode(TlsMode::Secure)
                .set_client_to_sentinel_tls_mode(TlsMode::Secure);
            if let Some(certificates) = certificates(ca) {
                builder = builder
                    .set_client_to_redis_certificates(certificates.clone())
                    .set_client_to_sentinel_certificates(certificates);
            }
        }
        Ok(Servers::Sentinels(Arc::new(Sentinels {
            client: builder.build().context(INVALID)?.into(),
            config: AsyncConnectionConfig::new()
                .set_connection_timeout(Some(connect))
                .set_response_timeout(Some(respond)),
            current: Mutex::default(),
        })))
    }
}

fn certificates(ca: Option<&[u8]>) -> Option<TlsCertificates> {
    ca.map(|it| TlsCertificates { client_tls: None, root_cert: Some(it.to_vec()) })
}

fn client(server: impl IntoConnectionInfo, ca: Option<&[u8]>) -> RedisResult<Client> {
    match certificates(ca) {
        Some(certificates) => Client::build_with_tls(server, certificates),
        None => Client::open(server),
    }
}

fn any(seeds: &[Client]) -> RedisResult<&Client> {
    let none = || RedisError::from(std::io::Error::other("the cluster has no nodes"));
    seeds.choose(&mut rand::rng()).ok_or_else(none)
}
