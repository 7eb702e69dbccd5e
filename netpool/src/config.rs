//! The configuration of the pool, and everything that follows from a slot.

use std::net::Ipv4Addr;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Egress, EgressError, Grants, Ipv4Cidr, Mac, mac_for};

/// The most slots that a pool can have: slot numbers have six decimal digits in a TAP's name.
pub const MAX_SLOTS: u32 = 1_000_000;

/// The prefix length of one guest's network: network, host, guest, broadcast.
const GUEST_PREFIX: u8 = 30;

/// One place in the pool: a number below [`PoolConfig::capacity`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Slot(pub u32);

/// A name that tells the pools of several gateways on one host apart: up to four lower-case letters and digits. It is part of
/// every object's name, so that no gateway's sweep takes the objects of another for leftovers of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Instance(String);

impl Instance {
    /// The text; empty for a host's only gateway.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Instance {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fits = text.len() <= 4 && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        match fits {
            true => Ok(Instance(text.to_string())),
            false => Err(ConfigError::Instance(text.to_string())),
        }
    }
}

impl TryFrom<String> for Instance {
    type Error = ConfigError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Instance> for String {
    fn from(instance: Instance) -> String {
        instance.0
    }
}

/// How the pool is cut. Two gateways on one host need different values of `instance`, `range` and `cid_base`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PoolConfig {
    /// Tells this gateway's objects from those of others on the host; empty by default.
    pub instance: Instance,
    /// The IPv4 range that is cut into one /30 per slot. Default 10.231.0.0/16: 16,384 slots.
    pub range: Ipv4Cidr,
    /// How long a released slot rests before it is lent again, in seconds, as long as others are free. Default 10.
    pub quarantine_seconds: u64,
    /// The only interface that guests may leave by. Default: any interface that is not a guest's.
    pub uplink: Option<String>,
    /// The MTU of TAPs and guests in bytes. Default: the MTU of the uplink.
    pub mtu: Option<u32>,
    /// The vsock CID of slot 0. Default 1000. The CIDs 0 to 2 are taken (vsock(7)).
    pub cid_base: u32,
    /// Where sandboxes may send to that don't say it themselves. Default: public networks.
    pub egress: Egress,
    /// Name servers outside of the host that sandboxes may ask (port 53) although their networks are private. None by
    /// default: the gateway's forwarder asks them for the sandboxes.
    pub resolvers: Vec<Ipv4Addr>,
    /// The port of the host on which the gateway's forwarder answers for name servers: what sandboxes send to port 53 of
    /// their gateway address comes there. `None` (the default): one that is free. 0: there is no forwarder.
    pub dns_port: Option<u16>,
    /// The most TAPs that are kept in stock after use, rather than deleted. Default 32.
    pub warm_taps: u32,
}

impl Default for PoolConfig {
    fn default() -> Self {
        PoolConfig {
            instance: Instance::default(),
            range: Ipv4Cidr::containing(Ipv4Addr::new(10, 231, 0, 0), 16),
            quarantine_seconds: 10,
            uplink: None,
            mtu: None,
            cid_base: 1000,
            egress: Egress::default(),
            resolvers: Vec::new(),
            dns_port: None,
            warm_taps: 32,
        }
    }
}

/// A value of the configuration that can't work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The instance name has a wrong form.
    #[error("instance \"{0}\" must be at most four lower-case letters and digits")]
    Instance(String),
    /// The range is too small or too big.
    #[error("range {0} must have a prefix length of 8 to 30")]
    Range(Ipv4Cidr),
    /// Guests can't have addresses of this range.
    #[error("range {0} is not usable for guests: it overlaps {1}")]
    ReservedRange(Ipv4Cidr, &'static str),
    /// Not the name of an interface.
    #[error("uplink \"{0}\" is not an interface name: 1 to 15 letters, digits, '.', '-', '_', '@' or ':'")]
    Uplink(String),
    /// IPv4 needs at least 576 bytes; a TAP carries at most 65,521.
    #[error("mtu {0} must be between 576 and 65521")]
    Mtu(u32),
    /// CIDs of this range are reserved, or run past the end.
    #[error("cid_base {0} must be at least 3 and leave room for {1} slots below 4294967295")]
    CidBase(u32, u32),
    /// The egress policy can't work.
    #[error(transparent)]
    Egress(#[from] EgressError),
}

/// A slot that the range has no /30 for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "slot {slot} is outside of the pool: range {range} has {capacity} slots; was the range changed while sandboxes ran?"
)]
pub struct SlotOutOfRange {
    /// The slot's number.
    pub slot: u32,
    /// The configured range.
    pub range: Ipv4Cidr,
    /// The number of slots in it.
    pub capacity: u32,
}

/// What the firewall lets through a TAP: packets from this MAC and this IP to where they may go.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Guest {
    /// The TAP's name.
    pub tap: String,
    /// The guest's MAC address.
    pub mac: Mac,
    /// The guest's IP address.
    pub ip: Ipv4Addr,
    /// Where it may send to.
    pub grants: Grants,
}

impl Guest {
    /// Whether both are the same sandbox in the same slot, whatever their grants.
    pub fn is_same(&self, other: &Guest) -> bool {
        (&self.tap, self.mac, self.ip) == (&other.tap, other.mac, other.ip)
    }
}

/// All names and addresses of one sandbox in one slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestNet {
    /// The slot.
    pub slot: Slot,
    /// The TAP's name on the host, at most 14 bytes.
    pub tap: String,
    /// The guest's MAC address, the sandbox's own.
    pub mac: Mac,
    /// The host's end of the /30: the guest's gateway.
    pub host_ip: Ipv4Addr,
    /// The guest's end of the /30.
    pub guest_ip: Ipv4Addr,
    /// The prefix length of both.
    pub prefix: u8,
    /// The guest's vsock CID.
    pub cid: u32,
    /// Where the guest may send to: the pool's default until the sandbox's own is put here. `None` comes of records that
    /// know no policy yet: whoever reads one puts the pool's default there, and until then the guest reaches nothing.
    #[serde(default)]
    pub egress: Option<Egress>,
}

impl GuestNet {
    /// What the firewall has to let through for this sandbox.
    pub fn guest(&self) -> Guest {
        let grants = self.egress.as_ref().map(Egress::grants).unwrap_or_default();
        Guest { tap: self.tap.clone(), mac: self.mac, ip: self.guest_ip, grants }
    }
}

impl PoolConfig {
    /// Checks all values.
    ///
    /// # Errors
    /// The first value that can't work.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if !(8..=GUEST_PREFIX).contains(&self.range.prefix()) {
            return Err(ConfigError::Range(self.range));
        }
        for (network, prefix, name) in [
            (Ipv4Addr::new(0, 0, 0, 0), 8, "0.0.0.0/8, this network"),
            (Ipv4Addr::LOCALHOST, 8, "127.0.0.0/8, loopback"),
            (Ipv4Addr::new(169, 254, 0, 0), 16, "169.254.0.0/16, link-local"),
            (Ipv4Addr::new(224, 0, 0, 0), 3, "224.0.0.0/3, multicast and reserved"),
        ] {
            if self.range.overlaps(Ipv4Cidr::containing(network, prefix)) {
                return Err(ConfigError::ReservedRange(self.range, name));
            }
        }
        if let Some(uplink) = self.uplink.as_ref().filter(|name| !is_interface_name(name)) {
            return Err(ConfigError::Uplink(uplink.clone()));
        }
        if let Some(mtu) = self.mtu.filter(|mtu| !(576..=65521).contains(mtu)) {
            return Err(ConfigError::Mtu(mtu));
        }
        // 4294967295 is VMADDR_CID_ANY (vsock(7)).
        let fits = self.cid_base.checked_add(self.capacity()).is_some();
        if self.cid_base < 3 || !fits {
            return Err(ConfigError::CidBase(self.cid_base, self.capacity()));
        }
        self.egress.validate()?;
        Ok(())
    }

    /// How many slots the range has: at most [`MAX_SLOTS`].
    pub fn capacity(&self) -> u32 {
        match GUEST_PREFIX.checked_sub(self.range.prefix()) {
            Some(bits) => 1u32.checked_shl(u32::from(bits)).unwrap_or(MAX_SLOTS).min(MAX_SLOTS),
            None => 0,
        }
    }

    /// How long a released slot rests.
    pub fn quarantine(&self) -> Duration {
        Duration::from_secs(self.quarantine_seconds)
    }

    /// What the names of this pool's TAPs begin with.
    pub fn tap_prefix(&self) -> String {
        format!("tpr{}-", self.instance.as_str())
    }

    /// The TAP of a slot: the prefix and six digits. The same length for every slot and at most 14 bytes (IFNAMSIZ
    /// leaves 15).
    pub fn tap_name(&self, slot: Slot) -> String {
        format!("{}{:06}", self.tap_prefix(), slot.0)
    }

    /// The slot of one of this pool's TAPs, or `None` when the name is somebody else's.
    pub fn slot_of_tap(&self, name: &str) -> Option<Slot> {
        let digits = name.strip_prefix(&self.tap_prefix())?;
        let ours = digits.len() == 6 && digits.bytes().all(|b| b.is_ascii_digit());
        ours.then(|| digits.parse().ok().map(Slot)).flatten()
    }

    /// The slot of a guest's address, or `None` when it isn't a guest's.
    pub fn slot_of_guest(&self, ip: Ipv4Addr) -> Option<Slot> {
        let offset = ip.to_bits().checked_sub(self.range.network().to_bits())?;
        (offset % 4 == 2 && offset / 4 < self.capacity()).then_some(Slot(offset / 4))
    }

    /// What the names of TAPs in stock begin with. Not followed by six digits: no slot has such a name.
    pub(crate) fn stock_prefix(&self) -> String {
        format!("{}w", self.tap_prefix())
    }

    /// What the names of TAPs begin with that are to be deleted.
    pub(crate) fn surplus_prefix(&self) -> String {
        format!("{}x", self.tap_prefix())
    }

    /// The nftables table (family inet) of this pool, and the name of its parent cgroup.
    pub fn table_name(&self) -> String {
        match self.instance.as_str() {
            "" => "torpor".to_string(),
            instance => format!("torpor_{instance}"),
        }
    }

    /// All names and addresses of a sandbox in a slot.
    ///
    /// # Errors
    /// The range has no such slot.
    pub fn guest_net(&self, sandbox_id: &str, slot: Slot) -> Result<GuestNet, SlotOutOfRange> {
        let (range, capacity) = (self.range, self.capacity());
        if slot.0 >= capacity {
            return Err(SlotOutOfRange { slot: slot.0, range, capacity });
        }
        let network = range.network().to_bits() + slot.0 * 4;
        Ok(GuestNet {
            slot,
            tap: self.tap_name(slot),
            mac: mac_for(sandbox_id),
            host_ip: Ipv4Addr::from_bits(network + 1),
            guest_ip: Ipv4Addr::from_bits(network + 2),
            prefix: GUEST_PREFIX,
            cid: self.cid_base.saturating_add(slot.0),
            egress: Some(self.egress.clone()),
        })
    }
}

/// Whether the text can be an interface's name and stand in quotes in an nftables script.
fn is_interface_name(text: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b".-_@:".contains(&b);
    (1..=15).contains(&text.len()) && text.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn slots_have_unique_names_addresses_and_cids_of_fixed_length() {
        let config = PoolConfig { range: "10.0.0.0/8".parse().unwrap(), ..PoolConfig::default() };
        config.validate().unwrap();
        let nets: Vec<GuestNet> = (0..100_000).map(|n| config.guest_net("sb", Slot(n)).unwrap()).collect();
        assert!(nets.iter().all(|net| net.tap.len() == 10 && net.cid > 2));
        assert_eq!(nets.iter().map(|net| &net.tap).collect::<HashSet<_>>().len(), nets.len());
        assert_eq!(nets.iter().map(|net| net.cid).collect::<HashSet<_>>().len(), nets.len());
        let ips: HashSet<_> = nets.iter().flat_map(|net| [net.guest_ip, net.host_ip]).collect();
        assert_eq!(ips.len(), 2 * nets.len());
        assert!(nets.iter().all(|net| config.slot_of_tap(&net.tap) == Some(net.slot)));
        assert!(nets.iter().all(|net| config.slot_of_guest(net.guest_ip) == Some(net.slot)));
        assert!(nets.iter().all(|net| config.slot_of_guest(net.host_ip).is_none()));
    }

    #[test]
    fn the_first_and_last_slot_lie_in_the_range() {
        let config = PoolConfig::default();
        assert_eq!(config.capacity(), 16_384);
        let first = config.guest_net("sb", Slot(0)).unwrap();
        assert_eq!(
            (first.host_ip, first.guest_ip, first.prefix),
            ([10, 231, 0, 1].into(), [10, 231, 0, 2].into(), 30)
        );
        let last = config.guest_net("sb", Slot(16_383)).unwrap();
        assert_eq!(last.guest_ip, Ipv4Addr::new(10, 231, 255, 254));
        let error = config.guest_net("sb", Slot(16_384)).unwrap_err();
        assert!(error.to_string().contains("slot 16384"), "{error}");
    }

    #[test]
    fn the_mac_belongs_to_the_sandbox_and_the_address_to_the_slot() {
        let config = PoolConfig::default();
        let (before, after) =
            (config.guest_net("a", Slot(1)).unwrap(), config.guest_net("a", Slot(2)).unwrap());
        assert_eq!(before.mac, after.mac);
        assert_ne!(before.guest_ip, after.guest_ip);
        assert_ne!(before.mac, config.guest_net("b", Slot(1)).unwrap().mac);
    }

    #[test]
    fn instances_do_not_take_each_others_taps() {
        let one = PoolConfig::default();
        let two = PoolConfig { instance: "d42x".parse().unwrap(), ..PoolConfig::default() };
        let (tap_one, tap_two) = (one.tap_name(Slot(7)), two.tap_name(Slot(7)));
        assert!(tap_two.len() <= 15, "{tap_two}");
        assert_eq!(one.slot_of_tap(&tap_two), None);
        assert_eq!(two.slot_of_tap(&tap_one), None);
        assert_ne!(one.table_name(), two.table_name());
        for name in ["eth0", "tpr-", "tpr-12345", "tpr-1234567", "tpr-12345x", "tpr-+12345"] {
            assert_eq!(one.slot_of_tap(name), None, "{name}");
        }
    }

    #[test]
    fn values_that_cannot_work_are_refused_by_name() {
        let with = |change: fn(&mut PoolConfig)| {
            let mut config = PoolConfig::default();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        assert!(with(|c| c.range = "10.0.0.0/31".parse().unwrap()).starts_with("range"));
        assert!(with(|c| c.range = "0.0.0.0/0".parse().unwrap()).starts_with("range"));
        assert!(with(|c| c.range = "169.254.0.0/20".parse().unwrap()).contains("link-local"));
        assert!(with(|c| c.range = "127.0.0.0/16".parse().unwrap()).contains("loopback"));
        assert!(with(|c| c.uplink = Some("eth0\" accept".to_string())).starts_with("uplink"));
        assert!(with(|c| c.mtu = Some(100)).starts_with("mtu"));
        assert!(with(|c| c.cid_base = 2).starts_with("cid_base"));
        assert!(with(|c| c.cid_base = u32::MAX - 10).starts_with("cid_base"));
        assert!("Ab".parse::<Instance>().is_err() && "abcde".parse::<Instance>().is_err());
        PoolConfig::default().validate().unwrap();
    }

    #[test]
    fn unknown_keys_of_the_configuration_are_refused() {
        let config: PoolConfig = serde_json::from_str(r#"{"range": "10.9.0.0/24", "mtu": 1400}"#).unwrap();
        assert_eq!((config.capacity(), config.mtu), (64, Some(1400)));
        let error = serde_json::from_str::<PoolConfig>(r#"{"rnage": "10.9.0.0/24"}"#).unwrap_err();
        assert!(error.to_string().contains("rnage"), "{error}");
    }
}
