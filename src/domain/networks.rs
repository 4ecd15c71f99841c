//! Networks from which a key may be used.

use std::net::IpAddr;

use ipnet::IpNet;

/// Reads an address or a network, such as `192.0.2.7` or `2001:db8::/32`. None: it is neither,
/// has bits beyond its length, or is a network of mapped IPv4 addresses.
///
/// ```
/// # use fencepost_domain::networks::parse;
/// assert_eq!(parse("192.0.2.7").map(|it| it.to_string()).as_deref(), Some("192.0.2.7/32"));
/// assert_eq!(parse("192.0.2.7/24"), None);
/// ```
#[must_use]
pub fn parse(text: &str) -> Option<IpNet> {
    let network = match text.parse::<IpAddr>() {
        Ok(address) => IpNet::from(address.to_canonical()),
        Err(_) => text.parse::<IpNet>().ok()?,
    };
    // Addresses are compared as IPv4, if they are mapped ones.
    let is_mapped = matches!(network, IpNet::V6(it) if it.addr().to_ipv4_mapped().is_some());
    (network == network.trunc() && !is_mapped).then_some(network)
}

/// Whether an address is in one of these networks, or there is none: then all are allowed.
#[must_use]
pub fn allow(networks: &[IpNet], address: IpAddr) -> bool {
    let address = address.to_canonical();
    networks.is_empty() || networks.iter().any(|it| it.contains(&address))
}

/// Whether each network of `inner` is in one of `outer`. No networks: all addresses.
#[must_use]
pub fn are_within(inner: &[IpNet], outer: &[IpNet]) -> bool {
    let is_within = |network: &IpNet| outer.iter().any(|it| it.contains(network));
    outer.is_empty() || (!inner.is_empty() && inner.iter().all(is_within))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn networks(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|it| parse(it).expect("a network")).collect()
    }

    #[test]
    fn an_address_is_allowed_by_a_network_of_its_kind() {
        let some = networks(&["192.0.2.0/24", "2001:db8::/32", "198.51.100.7"]);
        let is_allowed = |text: &str| allow(&some, text.parse().expect("an address"));
        for it in ["192.0.2.255", "::ffff:192.0.2.1", "2001:db8:1::1", "198.51.100.7"] {
            assert!(is_allowed(it), "{it}");
        }
        for it in ["192.0.3.0", "198.51.100.8", "2001:db9::1", "::c000:0201"] {
            assert!(!is_allowed(it), "{it}");
        }
        assert!(allow(&[], "203.0.113.1".parse().expect("an address")));
        for junk in [
            "",
            "x",
            "192.0.2.1/24",
            "192.0.2.0/33",
            "192.0.2",
            "10.0.0.0/8 ",
            "::ffff:192.0.2.0/120",
        ] {
            assert_eq!(parse(junk), None, "{junk}");
        }
    }

    #[test]
    fn the_empty_list_is_wider_than_any_other() {
        let within =
            |inner: &[&str], outer: &[&str]| are_within(&networks(inner), &networks(outer));
        assert!(within(&["192.0.2.0/25", "192.0.2.200"], &["192.0.2.0/24"]));
        assert!(within(&["192.0.2.0/24"], &[]) && within(&[], &[]));
        assert!(!within(&[], &["192.0.2.0/24"]));
        assert!(!within(&["192.0.2.0/23"], &["192.0.2.0/24"]));
        assert!(!within(&["192.0.2.1", "192.0.3.1"], &["192.0.2.0/24"]));
    }
}
