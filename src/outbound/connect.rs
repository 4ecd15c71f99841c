//! Connections of calls: to an address that was checked, by way of the operator's proxy if there is
//! one.

use std::{
    fmt,
    future::Future,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
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
use percent_encoding::percent_decode_str;
use rustls::ClientConfig;
use tokio::{net::TcpStream, time::timeout};
use tower::{BoxError, Service};
use url::{Host, Url};

use super::{CallError, addresses::Resolver};

/// Longest set-up of a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a connection is kept without a call.
const IDLE_TIMEOUT: Duration = Duration::from_secs(15);
/// Connections to one URL that are kept without a call.
const MAX_IDLE_CONNECTIONS: usize = 10;
/// Bytes of an answer that are read ahead: more than its headers may have.
const READ_BUFFER_BYTES: usize = 32 * 1024;

/// Sends requests to one host.
pub(super) type HttpClient = Client<Bounded, Full<Bytes>>;

/// A client for one host, which is also its name in TLS.
pub(super) fn client(
    resolver: Arc<Resolver>,
    proxy: Option<Arc<Proxy>>,
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
        // What was sent is sent again by the engine alone.
        .retry_canceled_requests(false)
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
    proxy: Option<Arc<Proxy>>,
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
            let to = SocketAddr::new(resolver.address_of(host).await?, port);
            let stream = match proxy {
                Some(proxy) => proxy.connect(to).await?,
                None => TokioIo::new(TcpStream::connect(to).await?),
            };
            stream.inner().set_nodelay(true)?;
            Ok(stream)
        })
    }
}

/// A proxy that connections to URLs of users go through: it is asked (`CONNECT`) for an address,
/// never for a name, so that what was checked is what is reached.
pub struct Proxy {
    place: Uri,
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
        ensure!(matches!(url.path(), "" | "/"), "must not have a path");
        let port = url.port().context("must have a port, as in http://proxy:3128")?;
        let host = url.host_str().context("must have a host")?;
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
        Ok(Self { place: format!("http://{host}:{port}").parse()?, authorization })
    }

    async fn connect(&self, to: SocketAddr) -> Result<TokioIo<TcpStream>, BoxError> {
        let mut tunnel = Tunnel::new(self.place.clone(), HttpConnector::new());
        if let Some(it) = &self.authorization {
            tunnel = tunnel.with_auth(it.clone());
        }
        let place = Uri::builder().scheme("http").authority(to.to_string()).path_and_query("/");
        Ok(tunnel.call(place.build()?).await?)
    }
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Proxy({})", self.place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_is_a_host_and_a_port_and_its_password_stays_secret() {
        let proxy = Proxy::read("http://fence:s%40crt@proxy.internal:3128").expect("a proxy");
        assert_eq!(proxy.place, "http://proxy.internal:3128/");
        // `fence:s@crt`
        let expected = "Basic ZmVuY2U6c0BjcnQ=";
        assert_eq!(proxy.authorization.as_ref().expect("a password"), expected);
        assert!(!format!("{proxy:?}").contains("crt"));
        for bad in ["", "proxy:3128", "https://proxy:3128", "http://proxy", "http://proxy:1/x"] {
            let error = Proxy::read(bad).expect_err(bad);
            assert!(error.to_string().starts_with("must "), "{bad}: {error}");
        }
    }
}
