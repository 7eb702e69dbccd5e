//! MAC addresses of guests.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// An Ethernet address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Mac(pub [u8; 6]);

/// The host's own address on every TAP. One for all, since each TAP is a link of two: a guest that is restored from memory, on
/// another TAP, still has the right entry for its gateway; and udev gives no other to an interface whose address was set.
pub const HOST_MAC: Mac = Mac([0x02, 0x74, 0x70, 0x72, 0x00, 0x01]);

/// A text that is not an Ethernet address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is not a MAC address: write it like 02:00:00:00:00:01")]
pub struct ParseMacError(String);

/// The MAC address of a sandbox: derived from its id alone, so that it is the same after every resume, whatever slot
/// the sandbox then borrows. Locally administered and unicast (IEEE 802: second lowest bit of the first octet set,
/// lowest clear).
pub fn mac_for(sandbox_id: &str) -> Mac {
    let mut hash = Sha256::new();
    hash.update(b"torpor guest mac\0");
    hash.update(sandbox_id.as_bytes());
    let digest = hash.finalize();
    let mut octets = [0; 6];
    octets.copy_from_slice(&digest[..6]);
    octets[0] = (octets[0] & 0xfc) | 0x02;
    Mac(octets)
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for Mac {
    type Err = ParseMacError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseMacError(text.to_string());
        let mut octets = [0; 6];
        let mut parts = text.split(':');
        for octet in &mut octets {
            let part = parts.next().filter(|p| p.len() == 2 && !p.starts_with('+')).ok_or_else(error)?;
            *octet = u8::from_str_radix(part, 16).map_err(|_| error())?;
        }
        if parts.next().is_some() {
            return Err(error());
        }
        Ok(Mac(octets))
    }
}

impl TryFrom<String> for Mac {
    type Error = ParseMacError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Mac> for String {
    fn from(mac: Mac) -> String {
        mac.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mac_is_the_same_for_the_same_sandbox_and_local_unicast() {
        for id in ["", "sb-1", "0192f0c1-aaaa-7bbb-8ccc-000000000001"] {
            let mac = mac_for(id);
            assert_eq!(mac, mac_for(id));
            assert_eq!(mac.0[0] & 0x03, 0x02, "{mac}");
        }
        // Pinned: a change of the derivation would change the network identity of every existing sandbox.
        assert_eq!(mac_for("sb-1").to_string(), "c6:35:bb:b5:47:6a");
    }

    #[test]
    fn macs_of_many_sandboxes_differ() {
        let macs: std::collections::HashSet<Mac> = (0..50_000).map(|n| mac_for(&format!("sb-{n}"))).collect();
        assert_eq!(macs.len(), 50_000);
    }

    #[test]
    fn macs_print_as_they_parse_and_bad_ones_are_refused() {
        assert_eq!("02:0a:ff:00:00:01".parse::<Mac>().unwrap().to_string(), "02:0a:ff:00:00:01");
        for text in [
            "",
            "02:0a:ff:00:00",
            "02:0a:ff:00:00:01:02",
            "2:a:f:0:0:1",
            "02:0a:ff:00:00:+1",
            "zz:0a:ff:00:00:01",
        ] {
            assert!(text.parse::<Mac>().is_err(), "{text}");
        }
    }
}
