//! Calls to URLs of users. `domain/outbound.rs` says where they may go: only to the public internet
//! and to networks that the operator allows, except for those that it denies. They follow no
//! redirects, and everything that comes back has a bound.

mod addresses;
mod connect;
mod retry_after;

use std::{
    error::Error as StdError, iter::successors, net::IpAddr, path::Path, sync::Arc, time::Duration,
};

use anyhow::{Context, ensure};
use bytes::Bytes;
use fencepost_config::OutboundArgs;
use fencepost_domain::{outbound::Allowed, webhook::RetryAfter};
use http_body_util::{BodyExt, Full};
use hyper::{
    Request, Response,
    body::Incoming,
    header::{
        ACCEPT, ACCEPT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, USER_AGENT,
    },
};
use hyper_util::client::legacy;
use ipnet::IpNet;
use rustls::{
    ClientConfig,
    crypto::ring,
    pki_types::{CertificateDer, pem::PemObject},
};
use rustls_platform_verifier::Verifier;
use secrecy::ExposeSecret;
use tokio::time::timeout;
use url::Url;

use self::{
    addresses::{NameServers, NoNameServers, Resolver},
    connect::{HttpClient, ProxyConnector},
};

pub use self::{addresses::Lookup, connect::Proxy};

/// Bytes of an answer's headers.
const MAX_HEADER_BYTES: usize = 16 * 1024;
/// Bytes of an answer's body that are read.
pub const MAX_BODY_BYTES: usize = 64 * 1024;
/// Bytes of an answer's body that are kept as the text of an error.
pub const MAX_KEPT_BYTES: usize = 1024;
/// A header of answers; `false` says that another attempt cannot help.
const RETRYABLE: &str = "fencepost-retryable";
/// A header of answers, on a rate limit: `queue` for all jobs of the queue; else the job's group.
const SCOPE: &str = "fencepost-scope";
/// A header of requests: which instance has sent it.
const INSTANCE: HeaderName = HeaderName::from_static("sender-instance");
/// The user agent of calls.
const AGENT: &str = concat!("Fencepost/", env!("CARGO_PKG_VERSION"));

/// Why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    #[error("the host has an address that calls may not go to")]
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
    /// The type of the error that is recorded for the attempt.
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

/// Networks, certificates, look-ups and proxy, which all outbound calls of a node share.
#[derive(Debug, Clone)]
pub struct Outbound {
    /// Networks that calls may reach besides the public internet, and those that they may not.
    pub allowed: Arc<Allowed>,
    /// True if this node sends webhooks and pushes (`--deliver`).
    pub delivers: bool,
    tls: ClientConfig,
    lookup: Arc<dyn Lookup>,
    proxy: Option<Arc<ProxyConnector>>,
    mark: Option<HeaderValue>,
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
        let allowed = Arc::new(allowed);
        Ok(Self { allowed, delivers: true, tls, lookup, proxy: None, mark: None })
    }

    /// As an operator says. `networks` are those besides the public internet.
    ///
    /// # Errors
    /// When the file of certificates cannot be read, or the proxy's URL is malformed.
    pub fn of_args(args: &OutboundArgs, networks: Vec<IpNet>) -> anyhow::Result<Self> {
        let allowed = Allowed { networks, denied: args.outbound_deny.clone() };
        let outbound = Self::new(allowed, args.outbound_ca.as_deref());
        let proxy = args.outbound_proxy.as_ref().map(|it| Proxy::read(it.expose_secret()));
        let proxy = proxy.transpose().context("--outbound-proxy")?;
        let outbound = Self { delivers: args.deliver, ..outbound.context("--outbound-ca")? };
        Ok(outbound.with_proxy(proxy))
    }

    /// The same with another look-up.
    #[must_use]
    pub fn with_lookup(self, lookup: Arc<dyn Lookup>) -> Self {
        Self { lookup, ..self }
    }

    /// Has calls go through a proxy, except those to networks that the operator allows.
    #[must_use]
    pub fn with_proxy(self, proxy: Option<Proxy>) -> Self {
        let proxy = proxy.map(|it| Arc::new(ProxyConnector::new(it, Arc::clone(&self.lookup))));
        Self { proxy, ..self }
    }

    /// Marks requests as those of this instance, whose nodes refuse them.
    #[must_use]
    pub fn with_mark(self, instance: &str) -> Self {
        Self { mark: HeaderValue::from_str(instance).ok(), ..self }
    }

    /// True if a request with these headers comes from a node of this instance: a job or a webhook
    /// would make further ones without end. Its URL may name the server in any way.
    #[must_use]
    pub fn is_own(&self, headers: &HeaderMap) -> bool {
        self.mark.as_ref().is_some_and(|mark| headers.get(&INSTANCE) == Some(mark))
    }

    /// Whether the proxy takes a connection; none: there is no proxy.
    ///
    /// # Errors
    /// When it takes none in time.
    pub async fn reach_proxy(&self) -> Option<anyhow::Result<()>> {
        Some(self.proxy.as_ref()?.reach().await)
    }

    /// A client for one URL. Its connections are used for this URL only.
    #[must_use]
    pub fn destination(&self, url: Url) -> Destination {
        let resolver = Arc::new(Resolver::new(Arc::clone(&self.allowed), Arc::clone(&self.lookup)));
        let client = connect::client(Arc::clone(&resolver), self.proxy.clone(), self.tls.clone());
        Destination { url, client, resolver, mark: self.mark.clone() }
    }
}

/// One URL of a user.
pub struct Destination {
    url: Url,
    client: HttpClient,
    resolver: Arc<Resolver>,
    mark: Option<HeaderValue>,
}

/// The answer to a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub retry_after: RetryAfter,
    pub content_type: Option<String>,
    /// Whether it says that another attempt cannot help.
    pub is_final: bool,
    /// Whether it says that a rate limit is that of the whole queue.
    pub is_about_queue: bool,
    /// The beginning of its body.
    pub text: String,
    /// Whether the body has more.
    pub is_cut: bool,
    /// False if characters of `text` stand for bytes that are no text.
    pub is_utf8: bool,
}

impl Answer {
    /// The beginning of its text, to be kept as that of an error.
    #[must_use]
    pub fn first_text(&self) -> &str {
        let end = self.text.floor_char_boundary(MAX_KEPT_BYTES.min(self.text.len()));
        &self.text[..end]
    }
}

impl Destination {
    /// The address that a call now would go to, if it is known without a look-up.
    pub fn known_address(&self) -> Option<IpAddr> {
        self.resolver.known_address_of(self.url.host()?)
    }

    /// The address that a call now would go to.
    ///
    /// # Errors
    /// When there is none, or the host has one that calls may not go to.
    pub async fn address(&self) -> Result<IpAddr, CallError> {
        self.resolver.address_of(self.url.host().ok_or(CallError::NoAddress)?).await
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

    /// Sends a request as [`Self::post`] does, to another URL with the same scheme, host and port.
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
        let mut request = Request::post(url.as_str())
            .body(Full::new(Bytes::from(body)))
            .map_err(|_| CallError::Broken)?;
        *request.headers_mut() = headers;
        request.headers_mut().entry(ACCEPT).or_insert(HeaderValue::from_static("*/*"));
        if let Some(mark) = &self.mark {
            request.headers_mut().insert(INSTANCE, mark.clone());
        }
        request.headers_mut().insert(USER_AGENT, HeaderValue::from_static(AGENT));
        request.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let call = async {
            let response = self.client.request(request).await.map_err(|it| classify(&it))?;
            read(response, kept_bytes).await
        };
        timeout(within, call).await.unwrap_or(Err(CallError::Timeout))
    }
}

async fn read(mut response: Response<Incoming>, kept_bytes: usize) -> Result<Answer, CallError> {
    let sizes = response.headers().iter().map(|(name, it)| name.as_str().len() + it.len());
    if sizes.sum::<usize>() > MAX_HEADER_BYTES {
        return Err(CallError::HeadersTooLarge);
    }
    let header = |name: &str| response.headers().get(name).and_then(|it| it.to_str().ok());
    let retry_after = retry_after::read(response.headers());
    let content_type = header(CONTENT_TYPE.as_str()).map(str::to_owned);
    let is_final = header(RETRYABLE).is_some_and(|it| it.trim().eq_ignore_ascii_case("false"));
    let is_about_queue = header(SCOPE).is_some_and(|it| it.trim().eq_ignore_ascii_case("queue"));
    let status = response.status().as_u16();
    let (mut kept, mut bytes) = (Vec::new(), 0);
    while let Some(frame) = response.frame().await {
        let frame = frame.map_err(|_| CallError::Broken)?;
        let Ok(part) = frame.into_data() else { continue };
        bytes += part.len();
        let room = kept_bytes - kept.len();
        kept.extend_from_slice(&part[..part.len().min(room)]);
        if bytes >= MAX_BODY_BYTES {
            break;
        }
    }
    let is_cut = bytes > kept.len();
    let is_utf8 = std::str::from_utf8(&kept).is_ok();
    let text = String::from_utf8_lossy(&kept).into_owned();
    Ok(Answer {
        status,
        retry_after,
        content_type,
        is_final,
        is_about_queue,
        text,
        is_cut,
        is_utf8,
    })
}

fn classify(error: &legacy::Error) -> CallError {
    let first: &(dyn StdError + 'static) = error;
    let mut causes = successors(Some(first), |&it| it.source());
    let is = |it: &(dyn StdError + 'static), kind: fn(&hyper::Error) -> bool| {
        it.downcast_ref().is_some_and(kind)
    };
    if let Some(ours) = causes.clone().find_map(|it| it.downcast_ref::<CallError>()) {
        *ours
    } else if error.is_connect() || causes.clone().any(|it| is(it, hyper::Error::is_canceled)) {
        // Canceled: the connection was closed before anything was sent.
        CallError::NotConnected
    } else if causes.any(|it| is(it, hyper::Error::is_parse_too_large)) {
        CallError::HeadersTooLarge
    } else {
        CallError::Broken
    }
}
