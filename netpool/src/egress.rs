//! What a sandbox may reach outside of the host.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Ipv4Cidr, ParseCidrError};

/// The most rules of an allow-list: each may become a few elements of a set that is copied at every change.
pub const MAX_ALLOW_RULES: usize = 256;
/// The most elements that the rules may become when they overlap in many ways.
const MAX_ELEMENTS: usize = 1024;

/// Networks that are nobody's on the internet: private (RFC 1918), shared with a provider (RFC 6598), this network,
/// loopback, link-local, protocol assignments, benchmarks, multicast and reserved (RFC 6890).
pub const PRIVATE_NETWORKS: [&str; 10] = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "224.0.0.0/3",
];

/// Where a sandbox's packets may go. Whatever it says: never to the host's own addresses, to other sandboxes, or to
/// 169.254.0.0/16, and never in IPv6.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Egress {
    /// Everywhere.
    Open,
    /// Everywhere but [`PRIVATE_NETWORKS`]; and to the name servers of [`crate::PoolConfig::resolvers`], port 53.
    #[default]
    Public,
    /// To what a rule names, and to nothing else.
    Allow {
        /// The rules.
        rules: Vec<AllowRule>,
        /// Name servers too: the gateway's forwarder and [`crate::PoolConfig::resolvers`]. Names can carry data out.
        names: bool,
    },
    /// Nowhere; no name server either.
    None,
}

impl Egress {
    /// Checks the number of rules, and of elements that they become.
    ///
    /// # Errors
    /// There are more than [`MAX_ALLOW_RULES`], or they overlap in too many ways.
    pub fn validate(&self) -> Result<(), EgressError> {
        match self {
            Egress::Allow { rules, .. } if rules.len() > MAX_ALLOW_RULES => {
                Err(EgressError::TooMany(rules.len()))
            }
            _ => match self.grants().services.len() {
                0..=MAX_ELEMENTS => Ok(()),
                pieces => Err(EgressError::TooIntricate(pieces)),
            },
        }
    }

    /// The same in the form that the firewall holds.
    pub fn grants(&self) -> Grants {
        match self {
            Egress::Open => Grants { open: true, names: true, ..Grants::default() },
            Egress::Public => Grants { public: true, names: true, ..Grants::default() },
            Egress::None => Grants::default(),
            Egress::Allow { rules, names } => Grants {
                names: *names,
                hosts: host_spans(rules),
                services: [Protocol::Tcp, Protocol::Udp]
                    .iter()
                    .flat_map(|p| service_spans(rules, *p))
                    .collect(),
                ..Grants::default()
            },
        }
    }
}

/// A transport protocol with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Protocol {
    /// The number that IP headers carry.
    pub fn number(self) -> u8 {
        match self {
            Protocol::Tcp => 6,
            Protocol::Udp => 17,
        }
    }
}

/// One line of an allow-list. As text: `192.0.2.0/24` (any protocol), `192.0.2.7:443/tcp`, `0.0.0.0/0:8000-8999/udp`,
/// `192.0.2.7:*/tcp`; without a protocol a port is TCP's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AllowRule {
    /// The destinations.
    pub to: Ipv4Cidr,
    /// A protocol and its first and last port; `None`: all protocols.
    pub ports: Option<(Protocol, u16, u16)>,
}

/// A text that is no rule, or too many rules.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EgressError {
    /// The ports can't be read.
    #[error(
        "\"{0}\" is no egress rule: write it like 192.0.2.0/24, 192.0.2.7:443/tcp or 0.0.0.0/0:8000-8999/udp"
    )]
    Form(String),
    /// The network can't be read.
    #[error("\"{rule}\" is no egress rule: {source}")]
    Network {
        /// What was given.
        rule: String,
        /// What is wrong.
        #[source]
        source: ParseCidrError,
    },
    /// The list is too long.
    #[error("an allow-list has at most {MAX_ALLOW_RULES} rules, this one has {0}: name larger networks")]
    TooMany(usize),
    /// The rules overlap so that they become too many.
    #[error(
        "the rules of an allow-list overlap so that they become {0} pieces, of at most {MAX_ELEMENTS}: give \
             networks that overlap the same ports"
    )]
    TooIntricate(usize),
}

impl FromStr for AllowRule {
    type Err = EgressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let form = || EgressError::Form(text.to_string());
        let (network, ports) = match text.split_once(':') {
            Some((network, ports)) => (network, Some(ports)),
            None => (text, None),
        };
        let network = if network.contains('/') { network.to_string() } else { format!("{network}/32") };
        let to = network.parse().map_err(|source| EgressError::Network { rule: text.to_string(), source })?;
        let ports = ports.map(|ports| parse_ports(ports).ok_or_else(form)).transpose()?;
        Ok(AllowRule { to, ports })
    }
}

fn parse_ports(text: &str) -> Option<(Protocol, u16, u16)> {
    let (ports, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    let protocol = match protocol {
        "tcp" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        _ => return None,
    };
    let number = |text: &str| text.parse::<u16>().ok().filter(|_| !text.starts_with('+'));
    let (first, last) = match ports.split_once('-') {
        _ if ports == "*" => (0, u16::MAX),
        Some((first, last)) => (number(first)?, number(last)?),
        None => (number(ports)?, number(ports)?),
    };
    (first <= last).then_some((protocol, first, last))
}

impl fmt::Display for AllowRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.to)?;
        let Some((protocol, first, last)) = self.ports else { return Ok(()) };
        match (first, last) {
            (0, u16::MAX) => f.write_str(":*")?,
            (first, last) if first == last => write!(f, ":{first}")?,
            (first, last) => write!(f, ":{first}-{last}")?,
        }
        f.write_str(if protocol == Protocol::Tcp { "/tcp" } else { "/udp" })
    }
}

impl TryFrom<String> for AllowRule {
    type Error = EgressError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<AllowRule> for String {
    fn from(rule: AllowRule) -> String {
        rule.to_string()
    }
}

/// Addresses from the first to the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Span {
    /// The first address.
    pub first: Ipv4Addr,
    /// The last address.
    pub last: Ipv4Addr,
}

impl Span {
    fn of(network: Ipv4Cidr) -> Span {
        Span { first: network.network(), last: network.last() }
    }
}

/// A protocol's ports at some addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Service {
    /// The addresses.
    pub to: Span,
    /// The protocol's number in IP headers.
    pub protocol: u8,
    /// The first port.
    pub first_port: u16,
    /// The last port.
    pub last_port: u16,
}

/// What a sandbox may reach, as elements of the firewall's sets: sorted, and without overlaps, which such a set refuses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Grants {
    /// Everything.
    pub open: bool,
    /// Everything public.
    pub public: bool,
    /// Name servers.
    pub names: bool,
    /// Addresses, whatever the protocol.
    pub hosts: Vec<Span>,
    /// Ports.
    pub services: Vec<Service>,
}

/// The union of the rules for all protocols.
fn host_spans(rules: &[AllowRule]) -> Vec<Span> {
    let mut spans: Vec<Span> =
        rules.iter().filter(|rule| rule.ports.is_none()).map(|rule| Span::of(rule.to)).collect();
    spans.sort();
    let mut merged: Vec<Span> = Vec::new();
    for span in spans {
        match merged.last_mut() {
            Some(last) if span.first.to_bits() <= last.last.to_bits().saturating_add(1) => {
                last.last = last.last.max(span.last);
            }
            _ => merged.push(span),
        }
    }
    merged
}

/// The union of one protocol's rules as boxes that don't overlap: the addresses are cut at every end of a rule, each piece
/// has the merged ports of the rules that cover it, and neighbours with the same ports become one.
fn service_spans(rules: &[AllowRule], protocol: Protocol) -> Vec<Service> {
    let of_protocol = rules.iter().filter_map(|rule| match rule.ports {
        Some((found, first, last)) if found == protocol => Some((Span::of(rule.to), first, last)),
        _ => None,
    });
    let rules: Vec<(Span, u16, u16)> = of_protocol.collect();
    let edges = rules
        .iter()
        .flat_map(|(span, ..)| [u64::from(span.first.to_bits()), u64::from(span.last.to_bits()) + 1]);
    let mut edges: Vec<u64> = edges.collect();
    edges.sort_unstable();
    edges.dedup();
    let mut pieces: Vec<(Span, Vec<(u16, u16)>)> = Vec::new();
    for edge in edges.windows(2) {
        let address = |bits: u64| Ipv4Addr::from_bits(u32::try_from(bits).unwrap_or(u32::MAX));
        let piece = Span { first: address(edge[0]), last: address(edge[1] - 1) };
        let covering = rules.iter().filter(|(span, ..)| span.first <= piece.first && piece.last <= span.last);
        let ports = merge_ports(covering.map(|(_, first, last)| (*first, *last)).collect());
        match pieces.last_mut() {
            _ if ports.is_empty() => {}
            Some((span, same)) if *same == ports && follows(span.last, piece.first) => span.last = piece.last,
            _ => pieces.push((piece, ports)),
        }
    }
    let services = pieces.into_iter().flat_map(|(to, ports)| {
        let service =
            move |(first_port, last_port)| Service { to, protocol: protocol.number(), first_port, last_port };
        ports.into_iter().map(service)
    });
    services.collect()
}

fn follows(last: Ipv4Addr, first: Ipv4Addr) -> bool {
    last.to_bits().checked_add(1) == Some(first.to_bits())
}

fn merge_ports(mut ports: Vec<(u16, u16)>) -> Vec<(u16, u16)> {
    ports.sort_unstable();
    let mut merged: Vec<(u16, u16)> = Vec::new();
    for (first, last) in ports {
        match merged.last_mut() {
            Some(before) if first <= before.1.saturating_add(1) => before.1 = before.1.max(last),
            _ => merged.push((first, last)),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rules(texts: &[&str]) -> Vec<AllowRule> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn rules_are_read_and_printed_and_wrong_ones_are_named() {
        for (given, printed) in [
            ("192.0.2.0/24", "192.0.2.0/24"),
            ("192.0.2.7", "192.0.2.7/32"),
            ("192.0.2.7:443", "192.0.2.7/32:443/tcp"),
            ("0.0.0.0/0:8000-8999/udp", "0.0.0.0/0:8000-8999/udp"),
            ("192.0.2.7:*/tcp", "192.0.2.7/32:*/tcp"),
        ] {
            let rule: AllowRule = given.parse().unwrap();
            assert_eq!(rule.to_string(), printed);
            assert_eq!(printed.parse::<AllowRule>().unwrap(), rule);
        }
        for bad in
            ["", "a", "1.2.3.4:", "1.2.3.4:80-79", "1.2.3.4:70000", "1.2.3.4:80/icmp", "1.2.3.4/8", "::1"]
        {
            let error = bad.parse::<AllowRule>().unwrap_err().to_string();
            assert!(error.contains(&format!("\"{bad}\"")), "{error}");
        }
        let many = Egress::Allow { rules: rules(&["192.0.2.7"]).repeat(257), names: false };
        assert!(many.validate().unwrap_err().to_string().contains("257"));
    }

    #[test]
    fn overlapping_rules_become_boxes_that_do_not_overlap() {
        let list =
            rules(&["10.0.0.0/8:443", "10.1.0.0/16:80-500", "10.0.0.0/8:444/tcp", "10.2.0.0/16:53/udp"]);
        let grants = Egress::Allow { rules: list, names: false }.grants();
        let shown: Vec<String> = grants
            .services
            .iter()
            .map(|s| format!("{}-{} {} {}-{}", s.to.first, s.to.last, s.protocol, s.first_port, s.last_port))
            .collect();
        let expected = [
            "10.0.0.0-10.0.255.255 6 443-444",
            "10.1.0.0-10.1.255.255 6 80-500",
            "10.2.0.0-10.255.255.255 6 443-444",
            "10.2.0.0-10.2.255.255 17 53-53",
        ];
        assert_eq!(shown, expected);
        let list = rules(&["192.0.2.0/25", "192.0.2.128/25", "192.0.2.5", "0.0.0.0/32"]);
        assert_eq!(Egress::Allow { rules: list, names: true }.grants().hosts.len(), 2);
    }

    fn rule() -> impl Strategy<Value = AllowRule> {
        let ports = prop::option::of((any::<bool>(), 0u16..12, 0u16..6));
        (0u32..64, 26u8..=32, ports).prop_map(|(bits, prefix, ports)| AllowRule {
            to: Ipv4Cidr::containing(Ipv4Addr::from_bits(bits), prefix),
            ports: ports.map(|(tcp, first, more)| {
                (if tcp { Protocol::Tcp } else { Protocol::Udp }, first, first + more)
            }),
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn grants_allow_exactly_what_the_rules_allow_and_nothing_twice(list in prop::collection::vec(rule(), 0..8)) {
            let grants = Egress::Allow { rules: list.clone(), names: false }.grants();
            for bits in 0..64 {
                let to = Ipv4Addr::from_bits(bits);
                let inside = |span: &Span| span.first <= to && to <= span.last;
                let by_rule = list.iter().any(|rule| rule.ports.is_none() && rule.to.contains(to));
                prop_assert_eq!(grants.hosts.iter().filter(|span| inside(span)).count(), usize::from(by_rule));
                for protocol in [Protocol::Tcp, Protocol::Udp] {
                    for port in 0..20 {
                        let by_rule = list.iter().any(|rule| rule.to.contains(to)
                            && rule.ports.is_some_and(|(p, first, last)| p == protocol && first <= port && port <= last));
                        let hits = grants.services.iter().filter(|s| inside(&s.to)
                            && s.protocol == protocol.number() && s.first_port <= port && port <= s.last_port);
                        prop_assert_eq!(hits.count(), usize::from(by_rule));
                    }
                }
            }
        }
    }
}
