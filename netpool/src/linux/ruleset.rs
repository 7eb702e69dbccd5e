//! The text of the firewall table.
//!
//! Priorities: `prerouting` runs at -310, before connection tracking (-200), raw (-300) and destination NAT (-100), so that
//! a spoofed packet leaves no trace and a port that Docker publishes on the host's address is still the host's address.
//! `input` and `forward` run at -10, just before the filters of others (0). A drop is final wherever it happens; an accept
//! is ours alone, so a drop by others still counts.
//!
//! All of a guest is elements: its addresses in `guests`, its policy in the others, which are looked up by its IP once that is
//! known to be its own. No maps of verdicts: the kernel walks all elements of such a map at every change.

use std::fmt::Write as _;

use super::elements::Element;
use crate::{Guest, PRIVATE_NETWORKS, PoolConfig};

/// The set of guests: interface, MAC and IP of each.
pub(super) const GUESTS: &str = "guests";
/// Guests that may send everywhere.
pub(super) const OPEN: &str = "open";
/// Guests that may send to public networks.
pub(super) const PUBLIC: &str = "public";
/// Guests that may ask name servers.
pub(super) const NAMES: &str = "names";
/// Guests and what they may send anything to.
pub(super) const HOSTS: &str = "hosts";
/// Guests, destinations, protocols and ports.
pub(super) const SERVICES: &str = "services";

/// A script that replaces the whole table, with the elements of `guests`, in one transaction.
pub(super) fn replace(config: &PoolConfig, guests: &[Guest]) -> String {
    let table = config.table_name();
    let range = config.range;
    let taps = format!("\"{}*\"", config.tap_prefix());
    let uplink = match &config.uplink {
        Some(name) => format!("oifname != \"{name}\" counter drop comment \"not the uplink\""),
        None => String::new(),
    };
    let sets = sets(guests);
    let private = PRIVATE_NETWORKS.join(", ");
    let resolvers = match config.resolvers.as_slice() {
        [] => String::new(),
        some => {
            let list: Vec<String> = some.iter().map(ToString::to_string).collect();
            format!(
                "ip saddr @{NAMES} ip daddr {{ {} }} meta l4proto {{ tcp, udp }} th dport 53 accept",
                list.join(", ")
            )
        }
    };
    let Forwarder { ask, redirect, input } = forwarder(config, &taps);
    // "add" before "delete" makes the deletion work whether or not the table is there.
    format!(
        r#"add table inet {table}
delete table inet {table}
table inet {table} {{
{sets}
    chain prerouting {{
        type filter hook prerouting priority -310; policy accept;
        iifname {taps} goto from_guest
    }}
    chain from_guest {{
        meta nfproto ipv4 iifname . ether saddr . ip saddr @{GUESTS} goto destination
        counter drop comment "ipv6, or not this guest's address"
    }}
    chain destination {{
        {ask}
        fib daddr type {{ local, broadcast, multicast, anycast }} counter drop comment "the host's own addresses"
        ip daddr 169.254.0.0/16 counter drop comment "metadata services"
        ip daddr {range} counter drop comment "other guests"
        ip saddr @{OPEN} accept
        ip saddr @{PUBLIC} ip daddr != {{ {private} }} accept
        {resolvers}
        ip saddr . ip daddr @{HOSTS} accept
        ip saddr . ip daddr . meta l4proto . th dport @{SERVICES} accept
        counter drop comment "not in the guest's egress policy"
    }}
    {redirect}
    chain input {{
        type filter hook input priority -10; policy accept;
        {input}
        iifname {taps} counter drop
    }}
    chain forward {{
        type filter hook forward priority -10; policy accept;
        iifname {taps} jump guest_out
        oifname {taps} goto guest_in
    }}
    chain guest_out {{
        meta nfproto != ipv4 counter drop
        oifname {taps} counter drop
        {uplink}
        ct state invalid counter drop
        tcp flags syn tcp option maxseg size set rt mtu
    }}
    chain guest_in {{
        meta nfproto != ipv4 counter drop
        ct state != {{ established, related }} counter drop
        tcp flags syn tcp option maxseg size set rt mtu
    }}
    chain postrouting {{
        type nat hook postrouting priority 100; policy accept;
        ip saddr {range} oifname != {taps} masquerade
    }}
}}
"#
    )
}

/// The rules for a forwarder of names: it gets what guests send to port 53 of their own gateway address, and nobody else's.
#[derive(Default)]
struct Forwarder {
    ask: String,
    redirect: String,
    input: String,
}

fn forwarder(config: &PoolConfig, taps: &str) -> Forwarder {
    let Some(port) = config.dns_port.filter(|port| *port > 0) else { return Forwarder::default() };
    let range = config.range;
    Forwarder {
        ask: format!(
            "ip saddr @{NAMES} ip daddr {range} fib daddr . iif type local meta l4proto {{ tcp, udp }} th dport 53 accept"
        ),
        redirect: format!(
            "chain names_in {{
        type nat hook prerouting priority -101; policy accept;
        iifname {taps} ip daddr {range} meta l4proto {{ tcp, udp }} th dport 53 redirect to :{port}
    }}"
        ),
        input: format!(
            "iifname {taps} meta l4proto {{ tcp, udp }} th dport {port} ct status dnat accept
        iifname != {taps} fib daddr type local meta l4proto {{ tcp, udp }} th dport {port} counter drop"
        ),
    }
}

fn sets(guests: &[Guest]) -> String {
    let types = [
        (GUESTS, "ifname . ether_addr . ipv4_addr", ""),
        (OPEN, "ipv4_addr", ""),
        (PUBLIC, "ipv4_addr", ""),
        (NAMES, "ipv4_addr", ""),
        (HOSTS, "ipv4_addr . ipv4_addr", "flags interval"),
        (SERVICES, "ipv4_addr . ipv4_addr . inet_proto . inet_service", "flags interval"),
    ];
    let elements: Vec<Element> = guests.iter().flat_map(Element::of).collect();
    let mut text = String::new();
    for (name, kind, flags) in types {
        let own: Vec<String> =
            elements.iter().filter(|element| element.set() == name).map(Element::text).collect();
        let own = match own.as_slice() {
            [] => String::new(),
            own => format!("elements = {{ {} }}", own.join(", ")),
        };
        // Writing to a String can't fail.
        let _ =
            writeln!(text, "    set {name} {{\n        type {kind}\n        {flags}\n        {own}\n    }}");
    }
    text
}
