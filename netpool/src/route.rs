//! Reading the kernel's IPv4 route table as `/proc/net/route` prints it (proc(5)): hexadecimal words in host byte order.

use std::net::Ipv4Addr;

use crate::Ipv4Cidr;

struct Route<'a> {
    interface: &'a str,
    network: Ipv4Cidr,
    metric: u32,
}

/// The interface of the default route with the lowest metric, given the text of `/proc/net/route`.
pub fn default_interface(route_table: &str) -> Option<String> {
    let defaults = routes(route_table).filter(|route| route.network.prefix() == 0);
    defaults.min_by_key(|route| route.metric).map(|route| route.interface.to_string())
}

/// A route of somebody else, as `network on interface`, that shares addresses with `range`, given the text of
/// `/proc/net/route`. Default routes and routes by interfaces whose name begins with `tap_prefix` don't count.
pub fn overlapping_route(route_table: &str, range: Ipv4Cidr, tap_prefix: &str) -> Option<String> {
    routes(route_table)
        .filter(|route| route.network.prefix() > 0 && !route.interface.starts_with(tap_prefix))
        .find(|route| route.network.overlaps(range))
        .map(|route| format!("{} on {}", route.network, route.interface))
}

fn routes(route_table: &str) -> impl Iterator<Item = Route<'_>> {
    route_table.lines().skip(1).filter_map(parse_route)
}

/// One line: Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT.
fn parse_route(line: &str) -> Option<Route<'_>> {
    const RTF_UP: u32 = 1;
    let fields: Vec<&str> = line.split_whitespace().collect();
    let hex = |index: usize| fields.get(index).and_then(|field| u32::from_str_radix(field, 16).ok());
    if hex(3)? & RTF_UP == 0 {
        return None;
    }
    let address = Ipv4Addr::from(hex(1)?.to_ne_bytes());
    let prefix = u32::from_ne_bytes(hex(7)?.to_ne_bytes()).count_ones();
    Some(Route {
        interface: fields.first()?,
        network: Ipv4Cidr::containing(address, u8::try_from(prefix).ok()?),
        metric: fields.get(6)?.parse().ok()?,
    })
}

#[cfg(all(test, target_endian = "little"))]
mod tests {
    use super::*;

    const TABLE: &str = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
        wlan0\t00000000\t0102000A\t0003\t0\t0\t600\t00000000\t0\t0\t0\n\
        eth0\t00000000\t010200C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n\
        eth0\t000200C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n\
        vpn0\t0040E70A\t00000000\t0001\t0\t0\t0\t00C0FFFF\t0\t0\t0\n\
        tpr-000000\t0000E70A\t00000000\t0001\t0\t0\t0\tFCFFFFFF\t0\t0\t0\n";

    #[test]
    fn the_default_route_with_the_lowest_metric_is_the_uplink() {
        assert_eq!(default_interface(TABLE).as_deref(), Some("eth0"));
        assert_eq!(default_interface("Iface\tDestination\n"), None);
        assert_eq!(
            default_interface("head\neth0 00000000 0 0000 0 0 0 00000000\n"),
            None,
            "a route that is not up"
        );
    }

    #[test]
    fn a_foreign_route_in_the_range_is_found_and_our_own_taps_are_not() {
        let range: Ipv4Cidr = "10.231.0.0/16".parse().unwrap();
        assert_eq!(overlapping_route(TABLE, range, "tpr-").as_deref(), Some("10.231.64.0/18 on vpn0"));
        let other: Ipv4Cidr = "10.231.0.0/20".parse().unwrap();
        assert_eq!(overlapping_route(TABLE, other, "tpr-"), None);
        assert!(
            overlapping_route(TABLE, other, "tprx-").is_some(),
            "another gateway's TAP counts as foreign"
        );
    }
}
