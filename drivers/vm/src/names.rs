//! Whom guests ask for names: the forwarder on their own gateway address, and the host's real servers after it, or in its
//! place when it can't run. Never a loopback address: that would be the guest's own.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use torpor_netpool::{
    PoolConfig,
    linux::{Forwarder, ForwarderOptions, host_nameservers},
    parse_upstreams,
};

const RESOLV_CONF: &str = "/etc/resolv.conf";
/// The port of name servers.
const PORT: u16 = 53;
/// The most that a resolv.conf(5) may name.
const MOST: usize = 3;
/// Tries at a port that is free for UDP and for TCP.
const TRIES: usize = 8;

/// The name servers of guests, as they are now.
#[derive(Debug)]
pub(crate) struct Names {
    pool: PoolConfig,
    /// In place of the host's.
    own: Vec<Ipv4Addr>,
    resolv_conf: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    forwarder: Option<Running>,
    /// Where it listened last.
    port: Option<u16>,
    /// What was said of it, and is said once.
    trouble: Option<String>,
    warning: Option<String>,
}

#[derive(Debug)]
struct Running {
    upstreams: Vec<SocketAddr>,
    port: u16,
    _forwarder: Forwarder,
}

/// What the firewall has to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Opened {
    /// Servers that guests may ask, whatever networks these are in.
    pub(crate) resolvers: Vec<Ipv4Addr>,
    /// Where the forwarder listens.
    pub(crate) port: Option<u16>,
}

impl Names {
    pub(crate) fn new(pool: &PoolConfig, own: &[Ipv4Addr]) -> Self {
        let (pool, own) = (pool.clone(), own.to_vec());
        Self { pool, own, resolv_conf: RESOLV_CONF.into(), state: Mutex::default() }
    }

    /// Looks at the host's name servers, which change, and sees to it that the forwarder asks these. Blocks.
    pub(crate) fn look(&self) -> Opened {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.tend(&mut state);
        let mut resolvers = self.servers(&mut state);
        resolvers.extend(&self.pool.resolvers);
        Opened { resolvers, port: state.forwarder.as_ref().map(|running| running.port) }
    }

    /// What the guest behind this gateway address is told.
    pub(crate) fn of_guest(&self, gateway: Ipv4Addr) -> Vec<String> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let first = state.forwarder.as_ref().map(|_| gateway);
        let servers = first.into_iter().chain(self.servers(&mut state));
        servers.take(MOST).map(|server| server.to_string()).collect()
    }

    /// Servers that guests reach themselves.
    fn servers(&self, state: &mut State) -> Vec<Ipv4Addr> {
        if !self.own.is_empty() {
            // A loopback address would be the guest's own: such a server is the forwarder's alone.
            let reachable = |server: &&Ipv4Addr| !(server.is_loopback() || server.is_unspecified());
            return self.own.iter().filter(reachable).copied().collect();
        }
        let (servers, warning) = match host_nameservers(&self.resolv_conf) {
            Ok(found) => (found.servers, found.warning),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        if warning != state.warning {
            if let Some(warning) = warning.as_ref().filter(|_| state.forwarder.is_none()) {
                tracing::warn!(%warning, "name servers of guests");
            }
            state.warning = warning;
        }
        servers
    }

    fn upstreams(&self) -> Vec<SocketAddr> {
        let own: Vec<IpAddr> = self.own.iter().copied().map(IpAddr::V4).collect();
        let servers = match own.as_slice() {
            [] => parse_upstreams(&fs::read_to_string(&self.resolv_conf).unwrap_or_default()),
            own => own.to_vec(),
        };
        servers.into_iter().map(|server| SocketAddr::from((server, PORT))).collect()
    }

    fn tend(&self, state: &mut State) {
        if self.pool.dns_port == Some(0) {
            return;
        }
        let upstreams = self.upstreams();
        if state.forwarder.as_ref().is_some_and(|running| running.upstreams == upstreams) {
            return;
        }
        // Its port is to be had again only when it is gone.
        state.forwarder = None;
        match self.start(&upstreams, state.port) {
            Ok((forwarder, port)) => {
                tracing::info!(port, ?upstreams, "a forwarder of names answers sandboxes");
                (state.port, state.trouble) = (Some(port), None);
                state.forwarder = Some(Running { upstreams, port, _forwarder: forwarder });
            }
            Err(trouble) => {
                if state.trouble.as_ref() != Some(&trouble) {
                    tracing::warn!(
                        trouble,
                        "there is no forwarder of names: sandboxes are given the host's own servers"
                    );
                }
                state.trouble = Some(trouble);
            }
        }
    }

    /// On the configured port, else on that which it had, else on a free one.
    fn start(&self, upstreams: &[SocketAddr], before: Option<u16>) -> Result<(Forwarder, u16), String> {
        if upstreams.is_empty() {
            return Err(format!("{} names no server", self.resolv_conf.display()));
        }
        let options = ForwarderOptions { clients: Some(self.pool.range), ..ForwarderOptions::default() };
        let ports: Vec<u16> = match self.pool.dns_port {
            Some(port) => vec![port],
            None => before.into_iter().chain([0; TRIES]).collect(),
        };
        let mut last = String::new();
        for port in ports {
            let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
            match Forwarder::start(&[address], upstreams, &options) {
                Ok(forwarder) => {
                    let port = forwarder.addresses().first().map_or(port, SocketAddr::port);
                    return Ok((forwarder, port));
                }
                Err(error) => last = error.to_string(),
            }
        }
        Err(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 231, 0, 1);

    fn names(text: &str, pool: PoolConfig) -> (tempfile::TempDir, Names) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("resolv.conf");
        fs::write(&path, text).unwrap();
        (folder, Names { resolv_conf: path, ..Names::new(&pool, &[]) })
    }

    #[test]
    fn guests_ask_their_gateway_first_and_the_hosts_stub_is_the_forwarders_alone() {
        let (_folder, names) = names("nameserver 127.0.0.53\nnameserver 192.0.2.53\n", PoolConfig::default());
        let opened = names.look();
        assert!(opened.port.is_some_and(|port| port > 0), "{opened:?}");
        assert_eq!(opened.resolvers, [Ipv4Addr::new(192, 0, 2, 53)]);
        assert_eq!(names.of_guest(GATEWAY), ["10.231.0.1", "192.0.2.53"]);
        assert_eq!(names.look(), opened, "a second look changes nothing");
        let upstreams = names.state.lock().unwrap().forwarder.as_ref().unwrap().upstreams.clone();
        assert_eq!(upstreams, ["127.0.0.53:53".parse().unwrap(), "192.0.2.53:53".parse().unwrap()]);
    }

    #[test]
    fn servers_that_change_are_asked_from_then_on_by_the_same_port() {
        let (_folder, names) = names("nameserver 192.0.2.53\n", PoolConfig::default());
        let before = names.look();
        fs::write(&names.resolv_conf, "nameserver 198.51.100.1\n").unwrap();
        let after = names.look();
        assert_eq!((after.port, after.resolvers), (before.port, vec![Ipv4Addr::new(198, 51, 100, 1)]));
        assert_eq!(names.of_guest(GATEWAY), ["10.231.0.1", "198.51.100.1"]);
    }

    #[test]
    fn without_a_forwarder_guests_get_real_servers_and_never_a_loopback_address() {
        let off = PoolConfig {
            dns_port: Some(0),
            resolvers: vec![Ipv4Addr::new(10, 0, 0, 53)],
            ..PoolConfig::default()
        };
        let (_folder, switched_off) = names("nameserver 127.0.0.1\nnameserver 192.0.2.53\n", off);
        let opened = switched_off.look();
        let resolvers = vec![Ipv4Addr::new(192, 0, 2, 53), Ipv4Addr::new(10, 0, 0, 53)];
        assert_eq!(opened, Opened { resolvers, port: None });
        assert_eq!(switched_off.of_guest(GATEWAY), ["192.0.2.53"]);

        let taken = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let busy = PoolConfig { dns_port: Some(port), ..PoolConfig::default() };
        let (_folder, in_use) = names("nameserver 192.0.2.53\n", busy);
        assert_eq!(in_use.look().port, None);
        assert_eq!(in_use.of_guest(GATEWAY), ["192.0.2.53"]);
        drop(taken);
        assert_eq!(in_use.look().port, Some(port), "it is tried again");

        let configured = [Ipv4Addr::new(127, 0, 0, 5), Ipv4Addr::new(192, 0, 2, 5)];
        let configured = Names::new(&PoolConfig::default(), &configured);
        let opened = configured.look();
        assert_eq!(opened.resolvers, [Ipv4Addr::new(192, 0, 2, 5)]);
        assert_eq!(configured.of_guest(GATEWAY), ["10.231.0.1", "192.0.2.5"]);
        assert_eq!(configured.upstreams().len(), 2, "the forwarder asks both");

        let (_folder, nameless) = names("# nobody\n", PoolConfig::default());
        assert_eq!(nameless.look().port, None);
        assert!(!nameless.of_guest(GATEWAY).iter().any(|server| server.starts_with("127.")));
    }
}
