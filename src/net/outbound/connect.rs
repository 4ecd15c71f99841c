//! Connections of calls: to an address that was checked, by way of the operator's proxy if there is
//! one.

use std::{
    error::Error as StdError,
    fmt,
    future::Future,
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use fencepost_domain::{error, outbound::Allowed};
use http_body_util::Full;
use hyper::{Uri, http::HeaderValue};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::{
    client::legacy::{
        Client,
        connect::{HttpConnector, proxy::Tunnel},
    },
    rt::{TokioExecutor, TokioIo, TokioTimer},
};
use ipnet::IpNet;
use percent_encoding::percent_decode_str;
use rustls::ClientConfig;
use tokio::{net::TcpStream, time::timeout};
use tower::{BoxError, Service};
use url::{Host, Url};

use super::{
    CallError,
    addresses::{Lookup, Resolver},
};

/// Longest set-up of a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest set-up of one by way of the proxy, so that the proxy's silence is reported.
const PROXY_TIMEOUT: Duration = Duration::from_secs(4);
/// How long a connection is kept without a call.
const IDLE_TIMEOUT: Duration = Duration::from_secs(15);
/// Connections to one URL that are kept without a call.
const MAX_IDLE_CONNECTIONS: usize = 10;
/// Bytes of an answer that are read ahead: more than its headers may have.
const READ_BUFFER_BYTES: usize = 32 * 1024;

/// How often the other side of a silent connection is asked whether it is there, as NATs forget
/// connections within minutes.
const KEEPALIVE_PERIOD: Duration = Duration::from_secs(15);
/// How often it may not answer.
const KEEPALIVE_TRIES: u32 = 3;
/// How long what was sent may wait to be acknowledged by the other side's system.
#[cfg(target_os = "linux")]
const UNACKNOWLEDGED_TIMEOUT: Duration = Duration::from_secs(30);
/// The pause between two warnings about the proxy.
const WARNING_PAUSE: Duration = Duration::from_secs(60);

/// Sends requests to one host.
pub(super) type HttpClient = Client<Bounded, Full<Bytes>>;

/// A client for one host, which is also its name in TLS.
pub(super) fn client(
    resolver: Arc<Resolver>,
    proxy: Option<Arc<ProxyConnector>>,
    tls: ClientConfig,
) -> HttpClient {
    let encrypted = HttpsConnectorBuilder::new()
        .with_tls_config(tls)
        .https_or_http()
        .enable_http1()
        .wrap_connector(Connector { resolver, proxy });
    Client::builder(TokioExecutor::new())
        .pool_idle_timeout(IDLE_TIMEOUT)
        .pool_max_idle_per_host(MAX_IDLE_CONNECTIONS)
        .pool_timer(TokioTimer::new())
        .http1_max_buf_size(READ_BUFFER_BYTES)
        .build(Bounded(encrypted))
}

/// Opens connections within their time, TLS included.
#[derive(Clone)]
pub(super) struct Bounded(HttpsConnector<Connector>);

impl Service<Uri> for Bounded {
    type Response = MaybeHttpsStream<TokioIo<TcpStream>>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, place: Uri) -> Self::Future {
        let connected = self.0.call(place);
        Box::pin(async { timeout(CONNECT_TIMEOUT, connected).await? })
    }
}

/// Opens connections to one host.
#[derive(Clone)]
pub(super) struct Connector {
    resolver: Arc<Resolver>,
    proxy: Option<Arc<ProxyConnector>>,
}

impl Service<Uri> for Connector {
    type Response = TokioIo<TcpStream>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, place: Uri) -> Self::Future {
        let Self { resolver, proxy } = self.clone();
        Box::pin(async move {
            let host = Host::parse(place.host().ok_or(CallError::NoAddress)?)?;
            let port = match (place.port_u16(), place.scheme_str()) {
                (Some(it), _) => it,
                (None, Some("https")) => 443,
                (None, _) => 80,
            };
            let address = resolver.address_of(host).await?;
            let to = SocketAddr::new(address, port);
            // The operator's own networks are not behind a way to the internet.
            match proxy.filter(|_| !resolver.allowed().names(address)) {
                Some(proxy) => proxy.connect(to).await,
                None => Ok(tcp().call(uri(to)?).await?),
            }
        })
    }
}

/// Opens connections that notice when the other side is gone, while a long request is under way.
fn tcp() -> HttpConnector {
    let mut tcp = HttpConnector::new();
    tcp.set_nodelay(true);
    tcp.set_keepalive(Some(KEEPALIVE_PERIOD));
    tcp.set_keepalive_interval(Some(KEEPALIVE_PERIOD));
    tcp.set_keepalive_retries(Some(KEEPALIVE_TRIES));
    #[cfg(target_os = "linux")]
    tcp.set_tcp_user_timeout(Some(UNACKNOWLEDGED_TIMEOUT));
    tcp
}

fn uri(to: SocketAddr) -> Result<Uri, BoxError> {
    Ok(format!("http://{to}/").parse()?)
}

/// A proxy that connections to URLs of users go through: it is asked (`CONNECT`) for an address,
/// never for a name, so that what was checked is what is reached.
pub struct Proxy {
    host: Host,
    port: u16,
    authorization: Option<HeaderValue>,
}

impl Proxy {
    /// Reads `http://host:port`, also with `user:password@` in it.
    ///
    /// # Errors
    /// When it is not such a URL. The error does not repeat it.
    pub fn read(text: &str) -> anyhow::Result<Self> {
        let url = Url::parse(text).context("must be a URL such as http://proxy:3128")?;
        ensure!(url.scheme() == "http", "must begin with http://");
        let is_place = matches!(url.path(), "" | "/");
        ensure!(
            is_place && url.query().is_none() && url.fragment().is_none(),
            "must have nothing behind the port"
        );
        let port = url.port_or_known_default().context("must have a port")?;
        // Hosts of schemes that `url` does not know as those of the web are not parsed.
        let host = Host::parse(url.host_str().context("must have a host")?)?;
        let authorization = match (url.username(), url.password()) {
            ("", None) => None,
            (user, password) => {
                let decoded = |it| percent_decode_str(it).decode_utf8_lossy();
                let pair = format!("{}:{}", decoded(user), decoded(password.unwrap_or_default()));
                let mut value =
                    HeaderValue::try_from(format!("Basic {}", BASE64_STANDARD.encode(pair)))?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        Ok(Self { host, port, authorization })
    }
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Proxy({}:{})", self.host, self.port)
    }
}

/// Opens connections through a proxy, for all calls of a node.
pub(super) struct ProxyConnector {
    proxy: Proxy,
    /// Of the proxy's own host, wherever it is.
    resolver: Resolver,
    warned_at: Mutex<Option<Instant>>,
}

impl ProxyConnector {
    pub(super) fn new(proxy: Proxy, lookup: Arc<dyn Lookup>) -> Self {
        let anywhere = [IpAddr::from([0; 4]), IpAddr::from([0; 16])];
        let anywhere = anywhere.into_iter().filter_map(|it| IpNet::new(it, 0).ok());
        let resolver = Resolver::new(Arc::new(Allowed::from(anywhere.collect::<Vec<_>>())), lookup);
        Self { proxy, resolver, warned_at: Mutex::default() }
    }

    /// Connects to the proxy itself, and asks it for nothing.
    pub(super) async fn reach(&self) -> anyhow::Result<()> {
        let reached = async {
            let address = self.resolver.address_of(self.proxy.host.clone()).await?;
            TcpStream::connect((address, self.proxy.port)).await.map_err(anyhow::Error::from)
        };
        timeout(CONNECT_TIMEOUT, reached).await??;
        Ok(())
    }

    async fn connect(&self, to: SocketAddr) -> Result<TokioIo<TcpStream>, BoxError> {
        let connected = timeout(PROXY_TIMEOUT, self.tunnel(to)).await;
        let connected = connected.unwrap_or_else(|it| Err(it.into()));
        // Not an error of the host that was asked for, so not by its name.
        connected.map_err(|error| {
            self.warn(&*error);
            io::Error::other(error).into()
        })
    }

    async fn tunnel(&self, to: SocketAddr) -> Result<TokioIo<TcpStream>, BoxError> {
        let address = self.resolver.address_of(self.proxy.host.clone()).await?;
        let place = SocketAddr::new(address, self.proxy.port);
        let mut tunnel = Tunnel::new(uri(place)?, tcp());
        if let Some(it) = &self.proxy.authorization {
            tunnel = tunnel.with_auth(it.clone());
        }
        Ok(tunnel.call(uri(to)?).await?)
    }

    /// Users see only that there is no connection: the operator must learn why, but not of each.
    fn warn(&self, error: &(dyn StdError + 'static)) {
        let mut warned_at = self.warned_at.lock().unwrap_or_else(PoisonError::into_inner);
        if warned_at.is_none_or(|it| it.elapsed() >= WARNING_PAUSE) {
            *warned_at = Some(Instant::now());
            let error = error::chain(error);
            tracing::warn!(error, "the proxy of webhooks made no connection");
        }
    }
}

impl fmt::Debug for ProxyConnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.proxy.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_is_a_host_and_a_port_and_its_password_stays_secret() {
        let proxy = Proxy::read("http://fence:s%40crt@proxy.internal:3128").expect("a proxy");
        assert_eq!(format!("{proxy:?}"), "Proxy(proxy.internal:3128)");
        // `fence:s@crt`
        let expected = "Basic ZmVuY2U6c0BjcnQ=";
        assert_eq!(proxy.authorization.as_ref().expect("a password"), expected);
        assert_eq!(Proxy::read("http://proxy").expect("a proxy").port, 80);
        assert_eq!(Proxy::read("http://[::1]:3128").expect("a proxy").port, 3128);
        for bad in ["", "proxy:3128", "https://proxy:3128", "http://p:1/x", "http://p:1/?x"] {
            let error = Proxy::read(bad).expect_err(bad);
            assert!(error.to_string().starts_with("must "), "{bad}: {error}");
        }
    }
}
