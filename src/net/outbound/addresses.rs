//! Which address a host has, and whether calls may go to it.

use std::{
    fmt,
    future::Future,
    io,
    net::IpAddr,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use fencepost_domain::outbound::Allowed;
use hickory_resolver::{TokioResolver, config::LookupIpStrategy};
use tokio::time::timeout;
use url::Host;

use super::CallError;

/// Longest look-up of a host's addresses.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which a look-up's addresses are kept. Connections never use older ones.
const ADDRESSES_KEEP: Duration = Duration::from_secs(10);
/// Time for which the failure of a look-up is kept.
const FAILURE_KEEP: Duration = Duration::from_secs(5);
/// The wait for one answer of a name server; each is asked twice.
const NAME_SERVER_TIMEOUT: Duration = Duration::from_secs(2);
/// Addresses of one host that are considered.
const MAX_ADDRESSES: usize = 16;

/// Finds the addresses of a host.
pub trait Lookup: fmt::Debug + Send + Sync {
    /// All addresses of the host.
    fn addresses(
        &self,
        host: String,
    ) -> Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send>>;
}

/// Asks the name servers of the system without a thread for each look-up, so that a slow server
/// cannot use up all threads.
pub(super) struct NameServers(TokioResolver);

impl NameServers {
    pub(super) fn of_system() -> anyhow::Result<Self> {
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
pub(super) struct NoNameServers;

impl Lookup for NoNameServers {
    fn addresses(
        &self,
        _: String,
    ) -> Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send>> {
        Box::pin(async { Err(io::Error::other("the system names no name servers")) })
    }
}

/// Finds the address for connections to one host, which is always the same host.
pub(super) struct Resolver {
    allowed: Arc<Allowed>,
    lookup: Arc<dyn Lookup>,
    kept: Mutex<Option<(Instant, Result<IpAddr, CallError>)>>,
    /// Held by the one look-up that is under way.
    asking: tokio::sync::Mutex<()>,
}

impl Resolver {
    pub(super) fn new(allowed: Arc<Allowed>, lookup: Arc<dyn Lookup>) -> Self {
        Self { allowed, lookup, kept: Mutex::default(), asking: tokio::sync::Mutex::default() }
    }

    pub(super) fn allowed(&self) -> &Allowed {
        &self.allowed
    }

    /// The address of a host, if it is known without a look-up.
    pub(super) fn known_address_of<T>(&self, host: Host<T>) -> Option<IpAddr> {
        match host {
            Host::Ipv4(it) => Some(it.into()),
            Host::Ipv6(it) => Some(it.into()),
            Host::Domain(_) => self.kept()?.ok(),
        }
    }

    /// The address that a call now would go to.
    pub(super) async fn address_of<T: AsRef<str>>(
        &self,
        host: Host<T>,
    ) -> Result<IpAddr, CallError> {
        match host {
            // The URL was checked when it was stored; the operator may allow less now.
            Host::Ipv4(it) => self.choose(&[it.into()]),
            Host::Ipv6(it) => self.choose(&[it.into()]),
            Host::Domain(name) => self.address(name.as_ref()).await,
        }
    }

    /// The address to connect to: the first one of IPv4, or else the first. A host with one address
    /// that may not be reached is refused, since its owner decides which is tried. The connection
    /// uses the same address, so that requests to an address are counted where they go.
    fn choose(&self, found: &[IpAddr]) -> Result<IpAddr, CallError> {
        let found = &found[..found.len().min(MAX_ADDRESSES)];
        let may_all = found.iter().all(|it| self.allowed.may_reach(*it));
        match found.first() {
            None => Err(CallError::NoAddress),
            Some(_) if !may_all => Err(CallError::AddressRefused),
            Some(first) => Ok(*found.iter().find(|it| it.is_ipv4()).unwrap_or(first)),
        }
    }

    /// The result of a recent look-up.
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
            Ok(Ok(found)) => self.choose(&found),
            Ok(Err(_)) | Err(_) => Err(CallError::NoAddress),
        };
        let kept = Some((Instant::now(), found));
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = kept;
        found
    }
}
