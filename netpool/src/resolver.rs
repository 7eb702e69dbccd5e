//! The name servers that guests are given: real ones, since guests reach neither the host's loopback nor its own addresses.

use std::net::{IpAddr, Ipv4Addr};

/// Name servers for guests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nameservers {
    /// IPv4 addresses in the host's order, without duplicates; at most three, as resolv.conf(5) allows no more.
    pub servers: Vec<Ipv4Addr>,
    /// What a user should know when names won't resolve in guests as they do on the host.
    pub warning: Option<String>,
}

/// The name servers of a resolv.conf(5) that a guest can reach over IPv4: no loopback, link-local or unspecified ones.
pub fn parse_nameservers(resolv_conf: &str) -> Vec<Ipv4Addr> {
    let mut servers = Vec::new();
    for address in listed(resolv_conf) {
        if let IpAddr::V4(address) = address
            && !(address.is_loopback() || address.is_link_local() || address.is_unspecified())
            && !servers.contains(&address)
        {
            servers.push(address);
        }
    }
    servers.truncate(3);
    servers
}

/// The host's name servers for guests: those of `resolv_conf`, or when it names only such that a guest can't reach (the
/// stub resolver 127.0.0.53), those of systemd-resolved's `upstream` file. When both have none, the list is empty and
/// the warning says so: no public server is put in silently.
pub fn choose_nameservers(resolv_conf: &str, upstream: Option<&str>) -> Nameservers {
    let own = parse_nameservers(resolv_conf);
    if !own.is_empty() {
        return Nameservers { servers: own, warning: None };
    }
    let servers = upstream.map(parse_nameservers).unwrap_or_default();
    let warning = servers.is_empty().then(|| {
        let named: Vec<String> = listed(resolv_conf).map(|address| address.to_string()).collect();
        let named = if named.is_empty() { "none".to_string() } else { named.join(", ") };
        format!(
            "the host names no IPv4 name server that guests can reach (it names: {named}): names won't resolve in \
             sandboxes; set the name servers in the gateway's configuration"
        )
    });
    Nameservers { servers, warning }
}

/// The name servers that a forwarder on the host asks: all that the host's own programs ask, loopback too (a stub resolver such as
/// 127.0.0.53 answers the host), in order, without duplicates, at most three (resolv.conf(5)).
pub fn parse_upstreams(resolv_conf: &str) -> Vec<IpAddr> {
    let mut servers = Vec::new();
    for address in listed(resolv_conf) {
        // A link-local address needs the zone that was cut off.
        let zoned = matches!(address, IpAddr::V6(v6) if v6.segments()[0] & 0xffc0 == 0xfe80);
        if !(address.is_unspecified() || zoned || servers.contains(&address)) {
            servers.push(address);
        }
    }
    servers.truncate(3);
    servers
}

fn listed(resolv_conf: &str) -> impl Iterator<Item = IpAddr> + '_ {
    resolv_conf.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let address = (words.next()? == "nameserver").then(|| words.next()).flatten()?;
        // An IPv6 address may carry a zone (fe80::1%eth0).
        address.split('%').next()?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn real_servers_of_the_host_are_taken_in_order() {
        let text = "# by hand\nsearch example.org\nnameserver 192.0.2.53\nnameserver 127.0.0.1\n nameserver\t198.51.100.1 \
                    # second\nnameserver 192.0.2.53\nnameserver fd00::1\noptions edns0\n";
        let found = choose_nameservers(text, Some("nameserver 203.0.113.9\n"));
        assert_eq!(found.servers, [Ipv4Addr::new(192, 0, 2, 53), Ipv4Addr::new(198, 51, 100, 1)]);
        assert_eq!(found.warning, None);
    }

    #[test]
    fn a_loopback_resolver_is_replaced_by_its_upstream_servers() {
        let found = choose_nameservers("nameserver 127.0.0.53\n", Some("nameserver 203.0.113.9\n"));
        assert_eq!(found, Nameservers { servers: vec![Ipv4Addr::new(203, 0, 113, 9)], warning: None });
    }

    #[test]
    fn a_forwarder_asks_whom_the_host_asks() {
        let text = "nameserver 127.0.0.53\nnameserver fe80::1%eth0\nnameserver fd00::1\nnameserver 0.0.0.0\n\
                    nameserver 127.0.0.53\nnameserver 192.0.2.1\nnameserver 192.0.2.2\n";
        let expected: [IpAddr; 3] =
            ["127.0.0.53", "fd00::1", "192.0.2.1"].map(|address| address.parse().unwrap());
        assert_eq!(parse_upstreams(text), expected);
    }

    #[test]
    fn without_any_reachable_server_the_list_is_empty_and_says_why() {
        for upstream in [None, Some("nameserver 169.254.169.253\n")] {
            let found = choose_nameservers("nameserver 127.0.0.53\nnameserver fe80::1%eth0\n", upstream);
            assert!(found.servers.is_empty());
            let warning = found.warning.unwrap();
            assert!(warning.contains("127.0.0.53, fe80::1"), "{warning}");
        }
    }
}
