//! The text of the firewall table.
//!
//! Priorities: `prerouting` runs at -310, before connection tracking (-200), raw (-300) and destination NAT (-100), so that
//! a spoofed packet leaves no trace and a port that Docker publishes on the host's address is still the host's address.
//! `input` and `forward` run at -10, just before the filters of others (0). A drop is final wherever it happens; an accept
//! is ours alone, so a drop by others still counts.

use std::fmt::Write as _;

use crate::{Guest, PoolConfig};

/// The set of guests: interface, MAC and IP of each.
pub(super) const GUESTS: &str = "guests";

/// A script that replaces the whole table, with `guests` as the set's elements, in one transaction.
pub(super) fn replace(config: &PoolConfig, guests: &[Guest]) -> String {
    let table = config.table_name();
    let range = config.range;
    let taps = format!("\"{}*\"", config.tap_prefix());
    let uplink = match &config.uplink {
        Some(name) => format!("oifname != \"{name}\" counter drop comment \"not the uplink\""),
        None => String::new(),
    };
    let elements = match guests {
        [] => String::new(),
        guests => format!("elements = {{ {} }}", elements(guests)),
    };
    // "add" before "delete" makes the deletion work whether or not the table is there.
    format!(
        r#"add table inet {table}
delete table inet {table}
table inet {table} {{
    set {GUESTS} {{
        type ifname . ether_addr . ipv4_addr
        {elements}
    }}
    chain prerouting {{
        type filter hook prerouting priority -310; policy accept;
        iifname {taps} goto from_guest
    }}
    chain from_guest {{
        meta nfproto ipv4 iifname . ether saddr . ip saddr @{GUESTS} goto destination
        counter drop comment "ipv6, or not this guest's address"
    }}
    chain destination {{
        fib daddr type {{ local, broadcast, multicast, anycast }} counter drop comment "the host's own addresses"
        ip daddr 169.254.0.0/16 counter drop comment "metadata services"
        ip daddr {range} counter drop comment "other guests"
    }}
    chain input {{
        type filter hook input priority -10; policy accept;
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

/// A script that adds one element; nothing happens when it is there.
pub(super) fn add(config: &PoolConfig, guest: &Guest) -> String {
    let (table, element) = (config.table_name(), elements(std::slice::from_ref(guest)));
    format!("add element inet {table} {GUESTS} {{ {element} }}\n")
}

/// A script that removes one element; nothing happens when it isn't there, since it is added first in the same transaction.
pub(super) fn remove(config: &PoolConfig, guest: &Guest) -> String {
    let (table, element) = (config.table_name(), elements(std::slice::from_ref(guest)));
    format!(
        "add element inet {table} {GUESTS} {{ {element} }}\ndelete element inet {table} {GUESTS} {{ {element} }}\n"
    )
}

fn elements(guests: &[Guest]) -> String {
    let mut text = String::new();
    for Guest { tap, mac, ip } in guests {
        let separator = if text.is_empty() { "" } else { ", " };
        // Writing to a String can't fail.
        let _ = write!(text, "{separator}\"{tap}\" . {mac} . {ip}");
    }
    text
}
