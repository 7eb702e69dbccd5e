//! IPv4 networks in CIDR notation.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An IPv4 network: an address whose host bits are zero, and a prefix length of 0 to 32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Ipv4Cidr {
    network: Ipv4Addr,
    prefix: u8,
}

/// Why a text is not an IPv4 network.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseCidrError {
    /// Not of the form address/length.
    #[error("\"{0}\" is not an IPv4 network: write it like 10.231.0.0/16")]
    Form(String),
    /// An address inside a network was given in place of the network.
    #[error("\"{given}\" has bits set below its prefix: did you mean {meant}?")]
    HostBits {
        /// What was given.
        given: String,
        /// The network that holds the address.
        meant: Ipv4Cidr,
    },
}

impl Ipv4Cidr {
    /// The network of `prefix` bits that holds `address`. A prefix above 32 counts as 32.
    pub fn containing(address: Ipv4Addr, prefix: u8) -> Ipv4Cidr {
        let prefix = prefix.min(32);
        Ipv4Cidr { network: Ipv4Addr::from_bits(address.to_bits() & mask(prefix)), prefix }
    }

    /// The first address of the network.
    pub fn network(self) -> Ipv4Addr {
        self.network
    }

    /// The prefix length in bits.
    pub fn prefix(self) -> u8 {
        self.prefix
    }

    /// The last address of the network.
    pub fn last(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.network.to_bits() | !mask(self.prefix))
    }

    /// Whether `address` lies in the network.
    pub fn contains(self, address: Ipv4Addr) -> bool {
        address.to_bits() & mask(self.prefix) == self.network.to_bits()
    }

    /// Whether the two networks share an address.
    pub fn overlaps(self, other: Ipv4Cidr) -> bool {
        self.contains(other.network) || other.contains(self.network)
    }
}

/// The netmask of a prefix length of at most 32.
fn mask(prefix: u8) -> u32 {
    u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0)
}

impl fmt::Display for Ipv4Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network, self.prefix)
    }
}

impl FromStr for Ipv4Cidr {
    type Err = ParseCidrError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let form = || ParseCidrError::Form(text.to_string());
        let (address, prefix) = text.split_once('/').ok_or_else(form)?;
        let address: Ipv4Addr = address.parse().map_err(|_| form())?;
        let prefix: u8 = prefix.parse().map_err(|_| form())?;
        if prefix > 32 {
            return Err(form());
        }
        let meant = Ipv4Cidr::containing(address, prefix);
        if meant.network != address {
            return Err(ParseCidrError::HostBits { given: text.to_string(), meant });
        }
        Ok(meant)
    }
}

impl TryFrom<String> for Ipv4Cidr {
    type Error = ParseCidrError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Ipv4Cidr> for String {
    fn from(cidr: Ipv4Cidr) -> String {
        cidr.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_print_as_they_parse() {
        for text in ["0.0.0.0/0", "10.231.0.0/16", "192.0.2.4/30", "192.0.2.9/32"] {
            assert_eq!(text.parse::<Ipv4Cidr>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn bad_networks_are_refused_with_the_right_form() {
        for text in ["", "10.0.0.0", "10.0.0.0/33", "10.0.0/8", "10.0.0.0/x", "10.0.0.0/-1"] {
            assert!(matches!(text.parse::<Ipv4Cidr>(), Err(ParseCidrError::Form(_))), "{text}");
        }
        let error = "10.231.7.0/16".parse::<Ipv4Cidr>().unwrap_err();
        assert!(error.to_string().contains("did you mean 10.231.0.0/16"), "{error}");
    }

    #[test]
    fn overlap_is_seen_from_both_sides() {
        let wide: Ipv4Cidr = "10.0.0.0/8".parse().unwrap();
        let narrow: Ipv4Cidr = "10.231.0.0/16".parse().unwrap();
        let other: Ipv4Cidr = "192.168.0.0/16".parse().unwrap();
        assert!(wide.overlaps(narrow) && narrow.overlaps(wide));
        assert!(!other.overlaps(narrow) && !narrow.overlaps(other));
    }
}
