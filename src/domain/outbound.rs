//! Where calls to URLs of users may go. A URL is checked when it is stored; the addresses of its
//! host are checked with each connection, since they may change.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use url::{Host, Url};

/// Characters of a URL.
pub const MAX_URL_CHARS: usize = 2_048;
/// Ports below this one belong to services of the system, but for that of HTTPS.
const FIRST_FREE_PORT: u16 = 1_024;
const HTTPS_PORT: u16 = 443;
/// Databases, brokers and control planes, which some firewalls leave open to their neighbours.
const REFUSED_PORTS: [u16; 17] = [
    1433, 1521, 2049, 2375, 2376, 2379, 3306, 3389, 5432, 5900, 5984, 6379, 6443, 9042, 9200,
    11211, 27017,
];

/// IPv4 networks that are not public (IANA's registry of special-purpose addresses), and multicast.
const PRIVATE_V4: [(Ipv4Addr, u32); 17] = [
    (Ipv4Addr::new(0, 0, 0, 0), 8),
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    // The agent of Azure's hosts.
    (Ipv4Addr::new(168, 63, 129, 16), 32),
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 0, 0, 0), 24),
    (Ipv4Addr::new(192, 0, 2, 0), 24),
    (Ipv4Addr::new(192, 31, 196, 0), 24),
    (Ipv4Addr::new(192, 88, 99, 0), 24),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
    (Ipv4Addr::new(198, 51, 100, 0), 24),
    (Ipv4Addr::new(203, 0, 113, 0), 24),
    (Ipv4Addr::new(224, 0, 0, 0), 4),
    (Ipv4Addr::new(240, 0, 0, 0), 4),
];
/// The only IPv6 network with public addresses.
const PUBLIC_V6: (Ipv6Addr, u32) = (Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3);
/// Parts of it that are not, or that lead to an IPv4 address: IETF's own, with Teredo; those of
/// documents; 6to4.
const PRIVATE_V6: [(Ipv6Addr, u32); 4] = [
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23),
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32),
    (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16),
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20),
];

/// Whether a URL is another one or below it: the same scheme, host and port, and a path that is the
/// same or continues it after a slash. Its query may be any. An escaped slash or percent
/// sign in the path is refused, and so is `..;`: some servers read them as something else.
///
/// ```
/// # use fencepost_domain::outbound::is_below;
/// let base = "https://example.com/hooks";
/// assert!(is_below("https://example.com/hooks", base));
/// assert!(is_below("https://example.com/hooks/orders?id=7", base));
/// assert!(!is_below("https://example.com/hooks-of-others", base));
/// assert!(!is_below("https://example.com/hooks/../admin", base));
/// assert!(!is_below("https://example.com/hooks/..%2Fadmin", base));
/// assert!(!is_below("https://example.com/hooks/..;/admin", base));
/// assert!(!is_below("https://example.org/hooks", base));
/// assert!(!is_below("https://example.com:8443/hooks", base));
/// ```
#[must_use]
pub fn is_below(url: &str, base: &str) -> bool {
    let (Ok(url), Ok(base)) = (Url::parse(url), Url::parse(base)) else { return false };
    let rest = url.path().strip_prefix(base.path().trim_end_matches('/'));
    let path = url.path().to_ascii_lowercase();
    let is_plain = url.username().is_empty()
        && url.password().is_none()
        && url.fragment().is_none()
        && !["%2f", "%5c", "%25"].iter().any(|it| path.contains(it))
        && !path.split('/').any(|it| it.split(';').next().is_some_and(is_dots));
    is_plain
        && url.origin() == base.origin()
        && rest.is_some_and(|it| it.is_empty() || it.starts_with('/'))
}

/// Whether a part of a path leads to itself or up, for servers that cut parameters off.
fn is_dots(part: &str) -> bool {
    let part = part.replace("%2e", ".");
    part == "." || part == ".."
}

/// Whether a URL leads to the same host and port as another one.
#[must_use]
pub fn is_same_host(url: &str, other: &str) -> bool {
    let place = |it: &str| {
        let it = Url::parse(it).ok()?;
        Some((it.host_str()?.to_owned(), it.port_or_known_default()))
    };
    place(url).is_some_and(|it| Some(it) == place(other))
}

/// Whether two URLs have the same scheme, host and port.
#[must_use]
pub fn is_same_origin(url: &str, other: &str) -> bool {
    let origin = |it: &str| Url::parse(it).ok().map(|it| it.origin());
    origin(url).is_some_and(|it| Some(it) == origin(other))
}

/// The scheme and host of a URL: the rest can be a secret.
#[must_use]
pub fn shown_host(url: &str) -> String {
    url.split_inclusive('/').take(3).collect()
}

/// Whether an address is one of the public internet.
#[must_use]
pub fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(it) => !PRIVATE_V4.iter().any(|net| is_in_v4(it, *net)),
        IpAddr::V6(it) => {
            is_in_v6(it, PUBLIC_V6) && !PRIVATE_V6.iter().any(|net| is_in_v6(it, *net))
        }
    }
}

fn is_in_v4(it: Ipv4Addr, (net, bits): (Ipv4Addr, u32)) -> bool {
    (it.to_bits() ^ net.to_bits()) >> (32 - bits) == 0
}

fn is_in_v6(it: Ipv6Addr, (net, bits): (Ipv6Addr, u32)) -> bool {
    (it.to_bits() ^ net.to_bits()) >> (128 - bits) == 0
}

/// Networks that calls may and may not go to, as the operator says.
#[derive(Debug, Clone, Default)]
pub struct Allowed {
    /// Besides the public internet.
    pub networks: Vec<IpNet>,
    /// Networks of the operator's own that are public. They win over the others.
    pub denied: Vec<IpNet>,
}

impl From<Vec<IpNet>> for Allowed {
    fn from(networks: Vec<IpNet>) -> Self {
        Self { networks, denied: Vec::new() }
    }
}

impl Allowed {
    /// Whether the operator allows this address.
    #[must_use]
    pub fn names(&self, address: IpAddr) -> bool {
        self.networks.iter().any(|it| it.contains(&address)) && !self.denies(address)
    }

    /// Whether a call may go to this address.
    ///
    /// ```
    /// # use fencepost_domain::outbound::Allowed;
    /// let denied = vec!["8.8.0.0/16".parse().unwrap(), "10.1.0.1/32".parse().unwrap()];
    /// let allowed = Allowed { networks: vec!["10.1.0.0/16".parse().unwrap()], denied };
    /// let may_reach = |it: &str| allowed.may_reach(it.parse().unwrap());
    /// assert!(may_reach("1.1.1.1") && may_reach("10.1.0.2"));
    /// assert!(!may_reach("8.8.8.8") && !may_reach("10.1.0.1") && !may_reach("10.2.0.1"));
    /// ```
    #[must_use]
    pub fn may_reach(&self, address: IpAddr) -> bool {
        (is_public(address) && !self.denies(address)) || self.names(address)
    }

    fn denies(&self, address: IpAddr) -> bool {
        self.denied.iter().any(|it| it.contains(&address))
    }
}

/// Reads a URL that will be called.
///
/// # Errors
/// The rule that it breaks.
pub fn read_url(text: &str, allowed: &Allowed) -> Result<Url, String> {
    // A longer text is not read. What is read may be longer than the text: it is escaped.
    let chars = |it: &str| it.chars().count();
    let too_long = |chars| format!("must have at most {MAX_URL_CHARS} characters, has {chars}");
    if chars(text) > MAX_URL_CHARS {
        return Err(too_long(chars(text)));
    }
    let has_spaces = text.chars().any(|it| it.is_whitespace() || it.is_control());
    let url = Url::parse(text).ok().filter(|_| !has_spaces);
    let url = url.ok_or("must be a URL such as https://example.com/hooks")?;
    if chars(url.as_str()) > MAX_URL_CHARS {
        return Err(too_long(chars(url.as_str())));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("must not have a user or a password in it".to_owned());
    }
    if url.fragment().is_some() {
        return Err("must not have a fragment (#…)".to_owned());
    }
    let host = url.host().ok_or("must have a host")?;
    let address = match host {
        Host::Ipv4(it) => Some(IpAddr::V4(it)),
        Host::Ipv6(it) => Some(IpAddr::V6(it)),
        // RFC 6761: it never leaves the machine.
        Host::Domain("localhost") => Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        // RFC 1034, section 3.1: only the root, at the end, has no name.
        Host::Domain(it) if it.trim_end_matches('.').split('.').any(str::is_empty) => {
            return Err("must have a host without empty parts".to_owned());
        }
        Host::Domain(_) => None,
    };
    if address.is_some_and(|it| allowed.names(it)) {
        return match url.scheme() {
            "https" | "http" => Ok(url),
            _ => Err("must begin with https:// or http://".to_owned()),
        };
    }
    if url.scheme() != "https" {
        return Err("must begin with https://".to_owned());
    }
    match (address, host) {
        (Some(it), _) if !allowed.may_reach(it) => {
            return Err("must be a host on the public internet".to_owned());
        }
        (None, Host::Domain(name)) if !name.trim_end_matches('.').contains('.') => {
            return Err("must be a host on the public internet, such as example.com".to_owned());
        }
        _ => (),
    }
    let port = url.port_or_known_default().unwrap_or(HTTPS_PORT);
    if port != HTTPS_PORT && (port < FIRST_FREE_PORT || REFUSED_PORTS.contains(&port)) {
        return Err(format!(
            "must have the port {HTTPS_PORT}, or one from {FIRST_FREE_PORT} on that no database uses"
        ));
    }
    Ok(url)
}
