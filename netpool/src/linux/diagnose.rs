//! What keeps sandboxes from the network on this host, and the smallest change for each.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::error::NetError;
use super::firewall::{first_line, nft};
use super::fix::{Chain, Fix, failed};
use super::host::{IP_FORWARD, ROUTES, read};
use super::link;
use crate::{PoolConfig, default_interface};

const CONNTRACK_COUNT: &str = "/proc/sys/net/netfilter/nf_conntrack_count";
const CONNTRACK_MAX: &str = "/proc/sys/net/netfilter/nf_conntrack_max";
/// Docker's chain for rules of others, which it calls first and never changes.
const DOCKER_USER: &str = "DOCKER-USER";

/// What was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Check {
    /// The TUN/TAP driver.
    Tun,
    /// The program nft.
    Nft,
    /// The host's uplink.
    Uplink,
    /// IPv4 forwarding.
    Forwarding,
    /// Others' filters of forwarded packets.
    ForeignForward,
    /// Others' filters of packets to the host, where a forwarder of names listens.
    ForeignInput,
    /// The filter of return paths.
    ReturnPath,
    /// The kernel's table of connections.
    Connections,
}

/// Something that is in the way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was looked at.
    pub check: Check,
    /// What is wrong, and what follows from it.
    pub message: String,
    /// The smallest change that helps, when there is one that can be undone.
    pub fix: Option<Fix>,
}

/// Looks at the host, in the network namespace of the calling thread. Changes nothing. What can't be looked at is a
/// finding too.
pub fn diagnose(config: &PoolConfig) -> Vec<Finding> {
    let mut found = Vec::new();
    found.extend(tun());
    found.extend(forwarding());
    found.extend(uplink(config));
    found.extend(return_path(config));
    found.extend(connections());
    match foreign_chains(config) {
        Ok(chains) => found.extend(chains),
        Err(error) => found.push(finding(Check::Nft, error.to_string(), None)),
    }
    found.extend(legacy_tables());
    found
}

fn finding(check: Check, message: String, fix: Option<Fix>) -> Finding {
    Finding { check, message, fix }
}

fn tun() -> Option<Finding> {
    match OpenOptions::new().read(true).write(true).open("/dev/net/tun") {
        Ok(_) => None,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Some(finding(
            Check::Tun,
            "/dev/net/tun is missing: no sandbox can have a network; the module tun isn't loaded".to_string(),
            Some(Fix::Module { name: "tun".to_string() }),
        )),
        Err(error) => Some(finding(Check::Tun, NetError::OpenTun(error).to_string(), None)),
    }
}

fn forwarding() -> Option<Finding> {
    let off = read(IP_FORWARD).is_ok_and(|text| text.trim() == "0");
    let fix = Fix::Sysctl { path: IP_FORWARD.into(), value: "1".to_string() };
    let message =
        "IPv4 forwarding is off: sandboxes reach nothing (the gateway switches it on when it starts)";
    off.then(|| finding(Check::Forwarding, message.to_string(), Some(fix)))
}

fn uplink(config: &PoolConfig) -> Option<Finding> {
    match &config.uplink {
        Some(name) if matches!(link::index_of(name), Ok(None)) => {
            let message = format!("the configured uplink {name} is not there: sandboxes reach nothing");
            Some(finding(Check::Uplink, message, None))
        }
        Some(_) => None,
        None => {
            let routes = read(ROUTES).unwrap_or_default();
            let message =
                "the host has no default route: sandboxes reach only networks that the host has routes to";
            default_interface(&routes).is_none().then(|| finding(Check::Uplink, message.to_string(), None))
        }
    }
}

/// Replies come in by the uplink. Where the host's default route is by another interface, the strict filter drops them.
fn return_path(config: &PoolConfig) -> Option<Finding> {
    let uplink = config.uplink.as_ref()?;
    let default = default_interface(&read(ROUTES).ok()?)?;
    let path = |name: &str| format!("/proc/sys/net/ipv4/conf/{name}/rp_filter");
    let value = |name: &str| read(&path(name)).ok().and_then(|text| text.trim().parse::<u8>().ok());
    // The kernel takes the larger of the two: 1 is strict, 2 is loose.
    let strict = value("all")?.max(value(uplink)?) == 1;
    (strict && default != *uplink).then(|| {
        let message = format!(
            "the return path filter of {uplink} is strict, and the default route is by {default}: replies to sandboxes \
             are dropped"
        );
        let fix = Fix::Sysctl { path: path(uplink).into(), value: "2".to_string() };
        finding(Check::ReturnPath, message, Some(fix))
    })
}

fn connections() -> Option<Finding> {
    let number = |path: &str| read(path).ok().and_then(|text| text.trim().parse::<u64>().ok());
    let (count, max) = (number(CONNTRACK_COUNT)?, number(CONNTRACK_MAX)?);
    full(count, max).map(|wanted| {
        let message = format!(
            "the kernel's table of connections is nearly full ({count} of {max}): new connections fail at random"
        );
        let fix = Fix::Sysctl { path: CONNTRACK_MAX.into(), value: wanted.to_string() };
        finding(Check::Connections, message, Some(fix))
    })
}

/// A larger maximum, when nine tenths are used. A maximum of 0 is none.
fn full(count: u64, max: u64) -> Option<u64> {
    (max > 0 && count >= max / 10 * 9).then(|| max.saturating_mul(2))
}

/// Chains of others at the hooks that guests' packets pass, that drop what they don't know.
fn foreign_chains(config: &PoolConfig) -> Result<Vec<Finding>, NetError> {
    let arguments = ["--json", "list", "chains"];
    let output = nft(&arguments, "")?;
    if !output.status.success() {
        return Err(failed("nft --json list chains", &first_line(&output)));
    }
    let listed: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| failed("nft --json list chains", &error.to_string()))?;
    let objects = listed["nftables"].as_array().cloned().unwrap_or_default();
    let chains: Vec<&Value> = objects.iter().filter_map(|object| object.get("chain")).collect();
    let mut found = Vec::new();
    for chain in &chains {
        let text = |key: &str| chain[key].as_str().unwrap_or_default();
        let check = match text("hook") {
            "forward" => Check::ForeignForward,
            "input" if config.dns_port != Some(0) => Check::ForeignInput,
            _ => continue,
        };
        let (family, table) = (text("family"), text("table"));
        if !matches!(family, "ip" | "inet") || table == config.table_name() {
            continue;
        }
        let base = Chain { family, table, chain: text("name") };
        let beside = |chain: &&&Value| {
            chain["family"] == family && chain["table"] == table && chain["name"] == DOCKER_USER
        };
        let has_docker = check == Check::ForeignForward && chains.iter().any(|chain| beside(&chain));
        let target = Chain { family, table, chain: if has_docker { DOCKER_USER } else { base.chain } };
        let prefix = config.tap_prefix();
        if !(text("policy") == "drop" || ends_in_drop(&base)?)
            || target.accepts(&prefix)?
            || base.accepts(&prefix)?
        {
            continue;
        }
        let what = if check == Check::ForeignForward { "reach nothing" } else { "can't resolve names" };
        let message = format!(
            "chain {} of table {family} {table} drops what it doesn't know: sandboxes {what}",
            base.chain
        );
        let fix = Fix::Accept {
            family: family.to_string(),
            table: table.to_string(),
            chain: target.chain.to_string(),
            tap_prefix: prefix,
        };
        found.push(finding(check, message, Some(fix)));
    }
    Ok(found)
}

/// Whether the last rule drops or rejects whatever comes to it, as firewalld's does.
fn ends_in_drop(chain: &Chain<'_>) -> Result<bool, NetError> {
    let rules = chain.rules()?;
    Ok(rules.last().is_some_and(drops_all))
}

fn drops_all(rule: &Value) -> bool {
    let statements = rule["expr"].as_array().map(Vec::as_slice).unwrap_or_default();
    let verdict = |statement: &Value| statement.get("drop").is_some() || statement.get("reject").is_some();
    statements.last().is_some_and(verdict)
        && !statements.iter().any(|statement| statement.get("match").is_some())
}

/// Rules of the older iptables are no business of nft's: they are found, and left to the host's administrator.
fn legacy_tables() -> Option<Finding> {
    let names = fs::read_to_string(Path::new("/proc/thread-self/net/ip_tables_names")).unwrap_or_default();
    if !names.lines().any(|name| name == "filter") || !loads_legacy() {
        return None;
    }
    let message = "the older iptables (legacy) filters forwarded packets on this host: if its FORWARD chain drops, sandboxes \
                   reach nothing; then run \"iptables-legacy -I FORWARD -i tpr+ -j ACCEPT\" and the same with -o";
    Some(finding(Check::ForeignForward, message.to_string(), None))
}

/// Whether the host has the program of the older iptables; without it nobody has filled those tables.
fn loads_legacy() -> bool {
    let folders = ["/usr/sbin", "/sbin", "/usr/local/sbin"].map(PathBuf::from);
    folders.iter().any(|folder| folder.join("iptables-legacy").exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_table_of_connections_is_doubled() {
        assert_eq!(full(89, 100), None);
        assert_eq!(full(90, 100), Some(200));
        assert_eq!(full(0, 0), None);
    }

    #[test]
    fn a_last_rule_without_a_condition_drops_all() {
        let rule = |text: &str| drops_all(&serde_json::from_str(text).unwrap());
        assert!(rule(r#"{"expr": [{"counter": {"packets": 0}}, {"drop": null}]}"#));
        assert!(rule(r#"{"expr": [{"reject": {"type": "icmpx"}}]}"#));
        assert!(!rule(r#"{"expr": [{"match": {"op": "=="}}, {"drop": null}]}"#));
        assert!(!rule(r#"{"expr": [{"accept": null}]}"#));
        assert!(!rule("{}"));
    }
}
