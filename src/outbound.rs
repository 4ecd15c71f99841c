//! Calls to URLs of users. This file and `domain/outbound.rs` say where they may go: only to the
//! public internet and to networks that the operator allows, without redirects, and with a bound on
//! everything that comes back.

use std::{
    error::Error as StdError,
    fmt,
    future::Future,
    io,
    net::{IpAddr, SocketAddr},
    path::Path,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::Context;
use reqwest::{
    Certificate, Client, Response, Url,
    dns::{Addrs, Name, Resolve, Resolving},
    header::{ACCEPT_ENCODING, HeaderMap, HeaderValue, RETRY_AFTER, USER_AGENT},
    redirect::Policy,
    tls::Version,
};
use tokio::time::timeout;
use url::Host;

use crate::domain::outbound::Allowed;

/// Longest look-up of a host's addresses.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);
/// How long they are trusted: each new connection goes to addresses that were checked within it.
const ADDRESSES_KEEP: Duration = Duration::from_secs(10);
/// Addresses of one host; more are not tried.
const MAX_ADDRESSES: usize = 16;
/// Longest set-up of a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a connection is kept without a call.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of an answer's headers.
const MAX_HEADER_BYTES: usize = 16 * 1024;
/// Bytes of an answer's body that are read, so that its connection can be used again.
const MAX_BODY_BYTES: usize = 64 * 1024;
/// Bytes of it that are kept.
pub const MAX_KEPT_BYTES: usize = 1024;
/// Who calls. The page behind it says how to complain.
const AGENT: &str = concat!("Fencepost/", env!("CARGO_PKG_VERSION"));

/// Why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    #[error("the host has an address that is not on the public internet")]
    AddressRefused,
    #[error("the host has no address")]
    NoAddress,
    #[error("the connection failed")]
    NotConnected,
    #[error("there was no answer in time")]
    Timeout,
    #[error("the headers of the answer have more than 16 KiB")]
    HeadersTooLarge,
    #[error("the answer is not valid HTTP, or ended early")]
    Broken,
}

impl CallError {
    /// As a type of an error.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AddressRefused => "address_refused",
            Self::NoAddress => "no_address",
            Self::NotConnected => "not_connected",
            Self::Timeout => "timeout",
            Self::HeadersTooLarge => "headers_too_large",
            Self::Broken => "broken_answer",
        }
    }
}

/// Finds the addresses of a host.
pub trait Lookup: fmt::Debug + Send + Sync {
    /// All of them.
    fn addresses(
        &self,
        host: String,
    ) -> Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send>>;
}

/// As the operating system does.
#[derive(Debug)]
struct SystemLookup;

impl Lookup for SystemLookup {
    fn addresses(
        &self,
        host: String,
    ) -> Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send>> {
        Box::pin(async move {
            let found = tokio::net::lookup_host((host, 0)).await?;
            Ok(found.map(|it| it.ip()).collect())
        })
    }
}

/// What calls of a node share.
#[derive(Debug, Clone)]
pub struct Outbound {
    /// Networks besides the public internet.
    pub allowed: Arc<Allowed>,
    certificates: Vec<Certificate>,
    lookup: Arc<dyn Lookup>,
}

impl Outbound {
    /// With the addresses that the operating system finds. `authorities` is a file of certificates
    /// that are trusted besides those of the system.
    ///
    /// # Errors
    /// When the file cannot be read, or has no certificates.
    pub fn new(allowed: Allowed, authorities: Option<&Path>) -> anyhow::Result<Self> {
        let certificates = match authorities {
            None => Vec::new(),
            Some(file) => {
                let text = std::fs::read(file)
                    .with_context(|| format!("cannot read {}", file.display()))?;
                Certificate::from_pem_bundle(&text).with_context(|| file.display().to_string())?
            }
        };
        Ok(Self { allowed: Arc::new(allowed), certificates, lookup: Arc::new(SystemLookup) })
    }

    /// The same with another look-up.
    #[must_use]
    pub fn with_lookup(self, lookup: Arc<dyn Lookup>) -> Self {
        Self { lookup, ..self }
    }

    /// A client for one URL. Its connections are used for this URL only.
    ///
    /// # Errors
    /// When TLS cannot be set up.
    pub fn destination(&self, url: Url, connections: usize) -> anyhow::Result<Destination> {
        let resolver = Arc::new(Resolver {
            allowed: Arc::clone(&self.allowed),
            lookup: Arc::clone(&self.lookup),
            kept: Mutex::default(),
        });
        let mut headers = HeaderMap::new();
        headers.insert(USER_AGENT, HeaderValue::from_static(AGENT));
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let client = Client::builder()
            .http1_only()
            .no_proxy()
            .referer(false)
            .redirect(Policy::none())
            .retry(reqwest::retry::never())
            .default_headers(headers)
            .dns_resolver(Checking(Arc::clone(&resolver)))
            .connect_timeout(CONNECT_TIMEOUT)
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_max_idle_per_host(connections)
            .tls_version_min(Version::TLS_1_2)
            .tls_certs_merge(self.certificates.iter().cloned())
            .build()?;
        Ok(Destination { url, client, resolver })
    }
}

/// One URL of a user.
pub struct Destination {
    url: Url,
    client: Client,
    resolver: Arc<Resolver>,
}

/// What came back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    /// The header `Retry-After`, if it counts seconds.
    pub retry_after_seconds: Option<u32>,
    /// The beginning of its body.
    pub text: String,
}

impl Destination {
    /// An address that a call now would go to.
    ///
    /// # Errors
    /// When there is none, or the host has one that calls may not go to.
    pub async fn address(&self) -> Result<IpAddr, CallError> {
        match self.url.host() {
            // The URL was checked when it was stored; the operator may allow less now.
            Some(Host::Ipv4(it)) => self.resolver.check(vec![it.into()]),
            Some(Host::Ipv6(it)) => self.resolver.check(vec![it.into()]),
            Some(Host::Domain(name)) => self.resolver.addresses(name).await,
            None => Err(CallError::NoAddress),
        }
        .map(|it| it[0])
    }

    /// Sends a request, and reads the answer within the given time.
    ///
    /// # Errors
    /// See [`CallError`].
    pub async fn post(
        &self,
        headers: HeaderMap,
        body: String,
        within: Duration,
    ) -> Result<Answer, CallError> {
        self.address().await?;
        let request = self.client.post(self.url.clone()).headers(headers).body(body);
        let call = async {
            let response = request.send().await.map_err(|it| classify(&it))?;
            read(response).await
        };
        timeout(within, call).await.unwrap_or(Err(CallError::Timeout))
    }
}

async fn read(mut response: Response) -> Result<Answer, CallError> {
    let sizes = response.headers().iter().map(|(name, it)| name.as_str().len() + it.len());
    if sizes.sum::<usize>() > MAX_HEADER_BYTES {
        return Err(CallError::HeadersTooLarge);
    }
    let retry_after = response.headers().get(RETRY_AFTER).and_then(|it| it.to_str().ok());
    let retry_after_seconds = retry_after.and_then(|it| it.trim().parse().ok());
    let status = response.status().as_u16();
    let (mut kept, mut bytes) = (Vec::new(), 0);
    while let Some(part) = response.chunk().await.map_err(|it| classify(&it))? {
        bytes += part.len();
        let room = MAX_KEPT_BYTES - kept.len();
        kept.extend_from_slice(&part[..part.len().min(room)]);
        if bytes >= MAX_BODY_BYTES {
            break;
        }
    }
    let text = String::from_utf8_lossy(&kept).into_owned();
    Ok(Answer { status, retry_after_seconds, text })
}

fn classify(error: &reqwest::Error) -> CallError {
    let mut cause: Option<&(dyn StdError + 'static)> = Some(error);
    let mut ours = None;
    while let (Some(it), None) = (cause, ours) {
        (cause, ours) = (it.source(), it.downcast_ref::<CallError>());
    }
    match ours {
        Some(it) => *it,
        None if error.is_timeout() => CallError::Timeout,
        None if error.is_connect() => CallError::NotConnected,
        None => CallError::Broken,
    }
}

/// Finds addresses for connections: only those that calls may go to.
struct Resolver {
    allowed: Arc<Allowed>,
    lookup: Arc<dyn Lookup>,
    /// Those of the host, which is always the same.
    kept: Mutex<Option<(Instant, Vec<IpAddr>)>>,
}

impl Resolver {
    /// One address that may not be reached spoils all: the host's owner chooses which is tried.
    fn check(&self, mut found: Vec<IpAddr>) -> Result<Vec<IpAddr>, CallError> {
        found.truncate(MAX_ADDRESSES);
        if found.is_empty() {
            return Err(CallError::NoAddress);
        }
        let may_all = found.iter().all(|it| self.allowed.may_reach(*it));
        if may_all { Ok(found) } else { Err(CallError::AddressRefused) }
    }

    async fn addresses(&self, host: &str) -> Result<Vec<IpAddr>, CallError> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((_, found)) = kept.filter(|(since, _)| since.elapsed() < ADDRESSES_KEEP) {
            return Ok(found);
        }
        let found = timeout(LOOKUP_TIMEOUT, self.lookup.addresses(host.to_owned())).await;
        let found = found.map_err(|_| CallError::NoAddress)?.map_err(|_| CallError::NoAddress)?;
        let found = self.check(found)?;
        let kept = Some((Instant::now(), found.clone()));
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = kept;
        Ok(found)
    }
}

/// The same, as the HTTP client asks for each new connection.
struct Checking(Arc<Resolver>);

impl Resolve for Checking {
    fn resolve(&self, name: Name) -> Resolving {
        let resolver = Arc::clone(&self.0);
        Box::pin(async move {
            let found = resolver.addresses(name.as_str()).await?;
            let found = found.into_iter().map(|it| SocketAddr::new(it, 0));
            Ok(Box::new(found) as Addrs)
        })
    }
}
