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

use anyhow::{Context, ensure};
use hickory_resolver::{TokioResolver, config::LookupIpStrategy};
use reqwest::{
    Client, Response, Url,
    dns::{Addrs, Name, Resolve, Resolving},
    header::{ACCEPT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER, USER_AGENT},
    redirect::Policy,
};
use rustls::{
    ClientConfig,
    crypto::ring,
    pki_types::{CertificateDer, pem::PemObject},
};
use rustls_platform_verifier::Verifier;
use tokio::time::timeout;
use url::Host;

use crate::domain::outbound::Allowed;

/// Longest look-up of a host's addresses.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);
/// How long they are trusted: each new connection goes to addresses that were checked within it.
const ADDRESSES_KEEP: Duration = Duration::from_secs(10);
/// How long a look-up that failed is not repeated.
const FAILURE_KEEP: Duration = Duration::from_secs(5);
/// The wait for one answer of a name server; each is asked twice.
const NAME_SERVER_TIMEOUT: Duration = Duration::from_secs(2);
/// Addresses of one host that are looked at.
const MAX_ADDRESSES: usize = 16;
/// Longest set-up of a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a connection is kept without a call.
const IDLE_TIMEOUT: Duration = Duration::from_secs(15);
/// Connections to one URL that are kept without a call.
const MAX_IDLE_CONNECTIONS: usize = 10;
/// Bytes of an answer's headers.
const MAX_HEADER_BYTES: usize = 16 * 1024;
/// Bytes of an answer's body that are read.
pub const MAX_BODY_BYTES: usize = 64 * 1024;
/// Bytes of it that say what went wrong.
pub const MAX_KEPT_BYTES: usize = 1024;
/// An answer with `false` in it: another attempt cannot help.
const RETRYABLE: &str = "fencepost-retryable";
/// Who calls.
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

/// Asks the name servers of the system, without a thread for each question: those of a slow server
/// must not use up the threads of others.
struct NameServers(TokioResolver);

impl NameServers {
    fn of_system() -> anyhow::Result<Self> {
        let mut resolver = TokioResolver::builder_tokio()?;
        let options = resolver.options_mut();
        options.timeout = NAME_SERVER_TIMEOUT;
        options.attempts = 1;
        options.ip_strategy = LookupIpStrategy::Ipv4thenIpv6;
        Ok(Self(resolver.build()?))
    }
}

impl fmt::Debug for NameServers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NameServers")
    }
}

impl Lookup for NameServers {
    fn addresses(
        &self,
        host: String,
    ) -> Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send>> {
        let resolver = self.0.clone();
        Box::pin(async move {
            let found = resolver.lookup_ip(host).await.map_err(io::Error::other)?;
            Ok(found.iter().collect())
        })
    }
}

/// Finds no host: the system names no name servers.
#[derive(Debug)]
struct NoNameServers;

impl Lookup for NoNameServers {
    fn addresses(
        &self,
        _: String,
    ) -> Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send>> {
        Box::pin(async { Err(io::Error::other("the system names no name servers")) })
    }
}

/// What calls of a node share.
#[derive(Debug, Clone)]
pub struct Outbound {
    /// Networks besides the public internet.
    pub allowed: Arc<Allowed>,
    tls: ClientConfig,
    lookup: Arc<dyn Lookup>,
}

impl Outbound {
    /// With the system's name servers. `authorities` is a file of certificates that are trusted
    /// besides those of the system.
    ///
    /// # Errors
    /// When the file cannot be read, or has no certificates.
    pub fn new(allowed: Allowed, authorities: Option<&Path>) -> anyhow::Result<Self> {
        let mut roots = Vec::new();
        if let Some(file) = authorities {
            let text =
                std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
            let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
            roots = read.with_context(|| file.display().to_string())?;
            ensure!(!roots.is_empty(), "{} has no certificates", file.display());
        }
        let provider = Arc::new(ring::default_provider());
        let verifier = Verifier::new_with_extra_roots(roots, Arc::clone(&provider))?;
        let tls = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_no_client_auth();
        let lookup: Arc<dyn Lookup> = match NameServers::of_system() {
            Ok(it) => Arc::new(it),
            Err(error) => {
                let error = format!("{error:#}");
                tracing::warn!(error, "no name servers: webhooks reach no host by its name");
                Arc::new(NoNameServers)
            }
        };
        Ok(Self { allowed: Arc::new(allowed), tls, lookup })
    }

    /// The same with another look-up.
    #[must_use]
    pub fn with_lookup(self, lookup: Arc<dyn Lookup>) -> Self {
        Self { lookup, ..self }
    }

    /// A client for one URL. Its connections are used for this URL only.
    ///
    /// # Errors
    /// When the client cannot be made.
    pub fn destination(&self, url: Url) -> anyhow::Result<Destination> {
        let resolver = Arc::new(Resolver {
            allowed: Arc::clone(&self.allowed),
            lookup: Arc::clone(&self.lookup),
            kept: Mutex::default(),
            asking: tokio::sync::Mutex::default(),
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
            .pool_max_idle_per_host(MAX_IDLE_CONNECTIONS)
            .tls_backend_preconfigured(self.tls.clone())
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
    pub content_type: Option<String>,
    /// Whether it says that another attempt cannot help.
    pub is_final: bool,
    /// The beginning of its body.
    pub text: String,
    /// Whether the body has more.
    pub is_cut: bool,
}

impl Answer {
    /// What it says, if something went wrong.
    #[must_use]
    pub fn first_text(&self) -> &str {
        let end = self.text.floor_char_boundary(MAX_KEPT_BYTES.min(self.text.len()));
        &self.text[..end]
    }
}

impl Destination {
    /// The address that a call now would go to, if it is known without a look-up.
    pub fn known_address(&self) -> Option<IpAddr> {
        match self.url.host()? {
            Host::Ipv4(it) => Some(it.into()),
            Host::Ipv6(it) => Some(it.into()),
            Host::Domain(_) => self.resolver.kept()?.ok(),
        }
    }

    /// The address that a call now would go to.
    ///
    /// # Errors
    /// When there is none, or the host has one that calls may not go to.
    pub async fn address(&self) -> Result<IpAddr, CallError> {
        match self.url.host() {
            // The URL was checked when it was stored; the operator may allow less now.
            Some(Host::Ipv4(it)) => self.resolver.check(&[it.into()]),
            Some(Host::Ipv6(it)) => self.resolver.check(&[it.into()]),
            Some(Host::Domain(name)) => self.resolver.address(name).await,
            None => Err(CallError::NoAddress),
        }
    }

    /// Sends a request, and reads the answer within the given time. Of its body at most
    /// `kept_bytes` are kept.
    ///
    /// # Errors
    /// See [`CallError`].
    pub async fn post(
        &self,
        headers: HeaderMap,
        body: String,
        within: Duration,
        kept_bytes: usize,
    ) -> Result<Answer, CallError> {
        self.post_to(self.url.clone(), headers, body, within, kept_bytes).await
    }

    /// The same to another URL with the same scheme, host and port.
    ///
    /// # Errors
    /// See [`CallError`].
    pub async fn post_to(
        &self,
        url: Url,
        headers: HeaderMap,
        body: String,
        within: Duration,
        kept_bytes: usize,
    ) -> Result<Answer, CallError> {
        if url.origin() != self.url.origin() {
            return Err(CallError::AddressRefused);
        }
        self.address().await?;
        let request = self.client.post(url).headers(headers).body(body);
        let call = async {
            let response = request.send().await.map_err(|it| classify(&it))?;
            read(response, kept_bytes).await
        };
        timeout(within, call).await.unwrap_or(Err(CallError::Timeout))
    }
}

async fn read(mut response: Response, kept_bytes: usize) -> Result<Answer, CallError> {
    let sizes = response.headers().iter().map(|(name, it)| name.as_str().len() + it.len());
    if sizes.sum::<usize>() > MAX_HEADER_BYTES {
        return Err(CallError::HeadersTooLarge);
    }
    let header = |name: &str| response.headers().get(name).and_then(|it| it.to_str().ok());
    let retry_after_seconds = header(RETRY_AFTER.as_str()).and_then(|it| it.trim().parse().ok());
    let content_type = header(CONTENT_TYPE.as_str()).map(str::to_owned);
    let is_final = header(RETRYABLE).is_some_and(|it| it.trim().eq_ignore_ascii_case("false"));
    let status = response.status().as_u16();
    let (mut kept, mut bytes) = (Vec::new(), 0);
    while let Some(part) = response.chunk().await.map_err(|it| classify(&it))? {
        bytes += part.len();
        let room = kept_bytes - kept.len();
        kept.extend_from_slice(&part[..part.len().min(room)]);
        if bytes >= MAX_BODY_BYTES {
            break;
        }
    }
    let is_cut = bytes > kept.len();
    let text = String::from_utf8_lossy(&kept).into_owned();
    Ok(Answer { status, retry_after_seconds, content_type, is_final, text, is_cut })
}

fn classify(error: &reqwest::Error) -> CallError {
    let mut cause: Option<&(dyn StdError + 'static)> = Some(error);
    let mut ours = None;
    while let (Some(it), None) = (cause, ours) {
        (cause, ours) = (it.source(), it.downcast_ref::<CallError>());
    }
    match ours {
        Some(it) => *it,
        // A host that takes no connection in time is both.
        None if error.is_connect() => CallError::NotConnected,
        None if error.is_timeout() => CallError::Timeout,
        None => CallError::Broken,
    }
}

/// Finds the address for connections to one host, which is always the same host.
struct Resolver {
    allowed: Arc<Allowed>,
    lookup: Arc<dyn Lookup>,
    kept: Mutex<Option<(Instant, Result<IpAddr, CallError>)>>,
    /// Held by the one look-up that is under way.
    asking: tokio::sync::Mutex<()>,
}

impl Resolver {
    /// One address that may not be reached spoils all: the host's owner chooses which is tried. The
    /// first one is used, also by the connection: requests to an address are counted.
    fn check(&self, found: &[IpAddr]) -> Result<IpAddr, CallError> {
        let found = &found[..found.len().min(MAX_ADDRESSES)];
        let may_all = found.iter().all(|it| self.allowed.may_reach(*it));
        match found.first() {
            None => Err(CallError::NoAddress),
            Some(_) if !may_all => Err(CallError::AddressRefused),
            Some(first) => Ok(*found.iter().find(|it| it.is_ipv4()).unwrap_or(first)),
        }
    }

    /// What a look-up found lately.
    fn kept(&self) -> Option<Result<IpAddr, CallError>> {
        let kept = *self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, found) = kept?;
        let keep = if found.is_ok() { ADDRESSES_KEEP } else { FAILURE_KEEP };
        (since.elapsed() < keep).then_some(found)
    }

    async fn address(&self, host: &str) -> Result<IpAddr, CallError> {
        if let Some(found) = self.kept() {
            return found;
        }
        let _asking = self.asking.lock().await;
        if let Some(found) = self.kept() {
            return found;
        }
        let found = timeout(LOOKUP_TIMEOUT, self.lookup.addresses(host.to_owned())).await;
        let found = match found {
            Ok(Ok(found)) => self.check(&found),
            Ok(Err(_)) | Err(_) => Err(CallError::NoAddress),
        };
        let kept = Some((Instant::now(), found));
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = kept;
        found
    }
}

/// The same, as the HTTP client asks for each new connection.
struct Checking(Arc<Resolver>);

impl Resolve for Checking {
    fn resolve(&self, name: Name) -> Resolving {
        let resolver = Arc::clone(&self.0);
        Box::pin(async move {
            let address = resolver.address(name.as_str()).await?;
            Ok(Box::new(std::iter::once(SocketAddr::new(address, 0))) as Addrs)
        })
    }
}
