//! The nftables table of the pool, written with the program `nft`: each script is one transaction of the kernel's.

use std::io::{self, Write};
use std::net::Ipv4Addr;
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::error::NetError;
use super::ruleset;
use crate::{Guest, Mac, PoolConfig};

/// One writer at a time in this process, whatever firewall value it uses: replacing the table reads the elements first.
static WRITER: Mutex<()> = Mutex::new(());

/// What [`Firewall::ensure`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ensured {
    /// The table was there, as it should be.
    Already,
    /// There was no table.
    Created,
    /// The table was there but not as it should be: somebody, or an older version, changed it.
    Repaired,
}

/// The firewall of a pool: the table `inet torpor` (with the instance's name, if it has one). The number of rules is constant;
/// a guest is one element of a set. A TAP without an element can send nothing.
#[derive(Debug)]
pub struct Firewall {
    config: PoolConfig,
    /// How `nft` lists the table without elements and counters when it is right; known after the first replacement.
    right: Mutex<Option<String>>,
}

impl Firewall {
    /// The firewall of the pool. Nothing is made before [`Firewall::ensure`].
    pub fn new(config: &PoolConfig) -> Firewall {
        Firewall { config: config.clone(), right: Mutex::new(None) }
    }

    /// Makes the table, or makes it right again, in one transaction that keeps its elements. Touches nothing of others.
    ///
    /// Elements that somebody removed don't come back by this: [`crate::sweep()`] finds them.
    ///
    /// # Errors
    /// `nft` is missing or refused.
    pub fn ensure(&self) -> Result<Ensured, NetError> {
        let _writer = lock(&WRITER);
        self.ensure_locked()
    }

    fn ensure_locked(&self) -> Result<Ensured, NetError> {
        let mut right = lock(&self.right);
        let before = self.list_rules()?;
        if before.is_some() && before == *right {
            return Ok(Ensured::Already);
        }
        // A set of another type (an older version's) is as good as none.
        let kept = self.list_elements().unwrap_or_default();
        self.run("replace", &ruleset::replace(&self.config, &kept))?;
        let after = self.list_rules()?;
        let result = match &before {
            None => Ensured::Created,
            Some(_) if before == after => Ensured::Already,
            Some(_) => Ensured::Repaired,
        };
        *right = after;
        Ok(result)
    }

    /// Lets a guest's packets through. Does nothing when it is done already; makes the table when it is missing.
    ///
    /// # Errors
    /// `nft` is missing or refused.
    pub fn add(&self, guest: &Guest) -> Result<(), NetError> {
        let _writer = lock(&WRITER);
        let script = ruleset::add(&self.config, guest);
        if self.run("add an element to", &script).is_ok() {
            return Ok(());
        }
        self.ensure_locked()?;
        self.run("add an element to", &script)
    }

    /// Stops a guest's packets. Does nothing when it is done already, or when there is no table.
    ///
    /// # Errors
    /// `nft` is missing or refused.
    pub fn remove(&self, guest: &Guest) -> Result<(), NetError> {
        let _writer = lock(&WRITER);
        match self.run("remove an element from", &ruleset::remove(&self.config, guest)) {
            Err(NetError::Nft { .. }) if self.list_rules()?.is_none() => Ok(()),
            result => result,
        }
    }

    /// The guests that are let through, sorted; none when there is no table.
    ///
    /// # Errors
    /// `nft` is missing or printed something unknown.
    pub fn list(&self) -> Result<Vec<Guest>, NetError> {
        let mut guests = self.list_elements()?;
        guests.sort();
        Ok(guests)
    }

    /// Removes the table. Does nothing when there is none.
    ///
    /// # Errors
    /// `nft` is missing or refused.
    pub fn remove_table(&self) -> Result<(), NetError> {
        let _writer = lock(&WRITER);
        let table = self.config.table_name();
        self.run("remove", &format!("add table inet {table}\ndelete table inet {table}\n"))
    }

    /// The table's rules as text, without elements and counters; `None` when there is no table.
    fn list_rules(&self) -> Result<Option<String>, NetError> {
        let table = self.config.table_name();
        let output = self.nft(&["--stateless", "--terse", "list", "table", "inet", &table], "")?;
        match output.status.success() {
            true => Ok(Some(String::from_utf8_lossy(&output.stdout).into_owned())),
            false if is_missing(&output) => Ok(None),
            false => Err(self.refused("list", &output)),
        }
    }

    fn list_elements(&self) -> Result<Vec<Guest>, NetError> {
        let table = self.config.table_name();
        let output = self.nft(&["--json", "list", "set", "inet", &table, ruleset::GUESTS], "")?;
        match output.status.success() {
            true => parse_elements(&output.stdout).map_err(|reason| NetError::NftOutput { table, reason }),
            false if is_missing(&output) => Ok(Vec::new()),
            false => Err(self.refused("list", &output)),
        }
    }

    fn run(&self, what: &'static str, script: &str) -> Result<(), NetError> {
        let output = self.nft(&["--file", "-"], script)?;
        if output.status.success() { Ok(()) } else { Err(self.refused(what, &output)) }
    }

    fn refused(&self, what: &'static str, output: &Output) -> NetError {
        let text = String::from_utf8_lossy(&output.stderr);
        let message = text.lines().next().unwrap_or("no message").trim().to_string();
        NetError::Nft { what, table: self.config.table_name(), message }
    }

    fn nft(&self, arguments: &[&str], input: &str) -> Result<Output, NetError> {
        let spawn = |program| {
            let mut command = Command::new(program);
            command.args(arguments).env("LC_ALL", "C");
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
        };
        let mut child = match spawn("nft") {
            // Debian's PATH of ordinary users, and some services', has no sbin.
            Err(error) if error.kind() == io::ErrorKind::NotFound => spawn("/usr/sbin/nft"),
            result => result,
        }
        .map_err(NetError::NftMissing)?;
        // nft reads its whole input before it prints anything, so that this can't block on both sides. When it ends without
        // reading, its exit code and message say why.
        let written = child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(input.as_bytes()));
        let output = child.wait_with_output().map_err(NetError::NftMissing)?;
        match written {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(NetError::NftMissing(error)),
            _ => Ok(output),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What the mutexes guard is replaced as a whole: a panic elsewhere leaves nothing half-done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_missing(output: &Output) -> bool {
    String::from_utf8_lossy(&output.stderr).contains("No such file or directory")
}

/// Elements of `nft --json list set` (libnftables-json(5)): `{"nftables": [.., {"set": {"elem": [{"concat": [tap, mac, ip]}]}}]}`.
fn parse_elements(json: &[u8]) -> Result<Vec<Guest>, String> {
    let value: serde_json::Value = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    let objects = value["nftables"].as_array().ok_or("no list of objects")?;
    let set = objects.iter().find_map(|object| object.get("set")).ok_or("no set")?;
    let Some(elements) = set.get("elem") else { return Ok(Vec::new()) };
    elements.as_array().ok_or("elements are no list")?.iter().map(parse_element).collect()
}

fn parse_element(element: &serde_json::Value) -> Result<Guest, String> {
    // An element with a counter, a timeout or a comment is wrapped once more.
    let element = element.get("elem").map_or(element, |wrapped| &wrapped["val"]);
    let part = |index: usize| element["concat"][index].as_str();
    let guest = match (part(0), part(1), part(2)) {
        (Some(tap), Some(mac), Some(ip)) => {
            mac.parse::<Mac>().ok().zip(ip.parse::<Ipv4Addr>().ok()).map(|found| (tap, found))
        }
        _ => None,
    };
    let (tap, (mac, ip)) = guest.ok_or_else(|| format!("element {element}"))?;
    Ok(Guest { tap: tap.to_string(), mac, ip })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_read_from_nfts_json() {
        let json = r#"{"nftables": [{"metainfo": {"version": "1.0.6"}}, {"set": {"family": "inet", "name": "guests", "elem": [
            {"concat": ["tpr-000001", "02:00:00:00:00:01", "10.231.0.2"]},
            {"elem": {"val": {"concat": ["tpr-000002", "02:00:00:00:00:02", "10.231.0.6"]}, "comment": "x"}}]}}]}"#;
        let guests = parse_elements(json.as_bytes()).unwrap();
        assert_eq!(guests.len(), 2);
        assert_eq!((guests[1].tap.as_str(), guests[1].ip), ("tpr-000002", Ipv4Addr::new(10, 231, 0, 6)));
        assert_eq!(parse_elements(br#"{"nftables": [{"set": {"name": "guests"}}]}"#).unwrap(), []);
        for bad in ["", "{}", r#"{"nftables": [{"set": {"elem": ["10.0.0.1"]}}]}"#] {
            assert!(parse_elements(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
