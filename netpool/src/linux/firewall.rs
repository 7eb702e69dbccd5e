//! The nftables table of the pool. Its rules are written with the program `nft`, once; guests are elements of its sets, which
//! come and go by netlink.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write};
use std::net::Ipv4Addr;
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::sys::socket::SockProtocol;

use super::elements::{self, Element, Op};
use super::error::NetError;
use super::netlink::Netlink;
use super::ruleset;
use crate::{Grants, Guest, PoolConfig};

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
/// a guest is elements of sets. A TAP without an element can send nothing.
///
/// The value works in the network namespace of the thread that uses it first, and keeps a netlink socket open there: the
/// kernel makes whoever closes such a socket wait until all that was deleted is freed.
#[derive(Debug)]
pub struct Firewall {
    /// The configuration, with the name servers of the moment.
    config: Mutex<PoolConfig>,
    table: String,
    /// How `nft` lists the table without elements and counters when it is right; known after the first replacement.
    right: Mutex<Option<String>>,
    kernel: Mutex<Kernel>,
}

#[derive(Debug, Default)]
struct Kernel {
    socket: Option<Netlink>,
    /// The elements of allow-lists by guest, as far as this value has written or listed them.
    allowed: Option<HashMap<Ipv4Addr, HashSet<Element>>>,
}

/// What the sets hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// The guests that are let through, sorted.
    pub guests: Vec<Guest>,
    /// Addresses with a policy that no guest has, sorted. They let nothing through.
    pub strays: Vec<Ipv4Addr>,
}

impl Firewall {
    /// The firewall of the pool. Nothing is made before [`Firewall::ensure`].
    pub fn new(config: &PoolConfig) -> Firewall {
        Firewall {
            config: Mutex::new(config.clone()),
            table: config.table_name(),
            right: Mutex::default(),
            kernel: Mutex::default(),
        }
    }

    /// The name servers outside of the host, and the port of the forwarder on it, from now on: they may change while guests run.
    /// `true`: they have changed, and the next [`Firewall::ensure`] makes the table so.
    pub fn set_names(&self, resolvers: &[Ipv4Addr], dns_port: Option<u16>) -> bool {
        let mut config = lock(&self.config);
        if config.resolvers == resolvers && config.dns_port == dns_port {
            return false;
        }
        config.resolvers = resolvers.to_vec();
        config.dns_port = dns_port;
        *lock(&self.right) = None;
        true
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
        let before = self.list_rules()?;
        if before.is_some() && before == *lock(&self.right) {
            return Ok(Ensured::Already);
        }
        let kept = self.list_locked()?.guests;
        let script = ruleset::replace(&lock(&self.config), &kept);
        self.run("replace", &script)?;
        let after = self.list_rules()?;
        let result = match &before {
            None => Ensured::Created,
            Some(_) if before == after => Ensured::Already,
            Some(_) => Ensured::Repaired,
        };
        *lock(&self.right) = after;
        Ok(result)
    }

    /// Lets a guest's packets through to where its grants say, and no longer to where former grants said: one transaction.
    /// Does nothing when it is done already; makes the table when it is missing.
    ///
    /// # Errors
    /// The kernel refused; `nft` is missing.
    pub fn add(&self, guest: &Guest) -> Result<(), NetError> {
        let _writer = lock(&WRITER);
        if self.change(guest.ip, &Element::of(guest), &[]).is_ok() {
            return Ok(());
        }
        self.ensure_locked()?;
        self.change(guest.ip, &Element::of(guest), &[])
    }

    /// Stops a guest's packets. Does nothing when it is done already, or when there is no table.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn remove(&self, guest: &Guest) -> Result<(), NetError> {
        let _writer = lock(&WRITER);
        let own = Element::Guest { tap: guest.tap.clone(), mac: guest.mac, ip: guest.ip };
        absent(self.change(guest.ip, &[], &[own]))
    }

    /// Takes a policy away whose guest is gone.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn forget(&self, ip: Ipv4Addr) -> Result<(), NetError> {
        let _writer = lock(&WRITER);
        absent(self.change(ip, &[], &[]))
    }

    /// Stops packets of a guest whose address is another guest's now: that one's policy stays.
    ///
    /// # Errors
    /// The kernel refused.
    pub(super) fn remove_identity(&self, guest: &Guest) -> Result<(), NetError> {
        let _writer = lock(&WRITER);
        let own = Element::Guest { tap: guest.tap.clone(), mac: guest.mac, ip: guest.ip };
        let ops = [Op { add: true, element: &own }, Op { add: false, element: &own }];
        absent(self.with_kernel("change", |_, socket, table| elements::transact(socket, table, &ops)))
    }

    /// The guests that are let through, sorted; none when there is no table.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn list(&self) -> Result<Vec<Guest>, NetError> {
        Ok(self.listing()?.guests)
    }

    /// All that the sets hold.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn listing(&self) -> Result<Listing, NetError> {
        let _writer = lock(&WRITER);
        self.list_locked()
    }

    /// Removes the table. Does nothing when there is none.
    ///
    /// # Errors
    /// `nft` is missing or refused.
    pub fn remove_table(&self) -> Result<(), NetError> {
        let _writer = lock(&WRITER);
        lock(&self.kernel).allowed = None;
        let table = &self.table;
        self.run("remove", &format!("add table inet {table}\ndelete table inet {table}\n"))
    }

    /// Makes the elements of `ip` those of `wanted`, and deletes `unwanted` too.
    fn change(&self, ip: Ipv4Addr, wanted: &[Element], unwanted: &[Element]) -> Result<(), NetError> {
        self.with_kernel("change", |allowed, socket, table| {
            let known = match allowed.take() {
                Some(known) => known,
                None => read_allowed(socket, table)?,
            };
            let mut known = known;
            let mut result = exchange(socket, table, ip, wanted, unwanted, known.get(&ip));
            if result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
                // Another program has changed the sets since they were read.
                known = read_allowed(socket, table)?;
                result = exchange(socket, table, ip, wanted, unwanted, known.get(&ip));
            }
            if result.is_ok() {
                let lists: HashSet<Element> = wanted.iter().filter(|e| is_listed(e)).cloned().collect();
                known.remove(&ip);
                if !lists.is_empty() {
                    known.insert(ip, lists);
                }
                *allowed = Some(known);
            }
            result
        })
    }

    fn list_locked(&self) -> Result<Listing, NetError> {
        self.with_kernel("list", |allowed, socket, table| {
            let mut all = Vec::new();
            for set in Element::SETS {
                all.extend(elements::list(socket, table, set)?);
            }
            *allowed = Some(group(all.iter().filter(|element| is_listed(element)).cloned()));
            Ok(listing_of(all))
        })
    }

    fn with_kernel<T>(
        &self,
        what: &'static str,
        work: impl FnOnce(&mut Option<HashMap<Ipv4Addr, HashSet<Element>>>, &mut Netlink, &str) -> io::Result<T>,
    ) -> Result<T, NetError> {
        let table = self.table.clone();
        let mut kernel = lock(&self.kernel);
        let Kernel { socket, allowed } = &mut *kernel;
        let result = match socket {
            Some(socket) => work(allowed, socket, &table),
            None => Netlink::open(SockProtocol::NetlinkNetFilter)
                .and_then(|opened| work(allowed, socket.insert(opened), &table)),
        };
        result.map_err(|source| NetError::Elements { what, table, source })
    }

    /// The table's rules as text, without elements and counters; `None` when there is no table.
    fn list_rules(&self) -> Result<Option<String>, NetError> {
        let output = nft(&["--stateless", "--terse", "list", "table", "inet", &self.table], "")?;
        match output.status.success() {
            true => Ok(Some(String::from_utf8_lossy(&output.stdout).into_owned())),
            false if is_missing(&output) => Ok(None),
            false => Err(self.refused("list", &output)),
        }
    }

    fn run(&self, what: &'static str, script: &str) -> Result<(), NetError> {
        let output = nft(&["--file", "-"], script)?;
        if output.status.success() { Ok(()) } else { Err(self.refused(what, &output)) }
    }

    fn refused(&self, what: &'static str, output: &Output) -> NetError {
        NetError::Nft { what, table: self.table.clone(), message: first_line(output) }
    }
}

/// Whether the element is of an allow-list.
fn is_listed(element: &Element) -> bool {
    matches!(element, Element::Host(..) | Element::Service(..))
}

fn group(elements: impl Iterator<Item = Element>) -> HashMap<Ipv4Addr, HashSet<Element>> {
    let mut by_guest: HashMap<Ipv4Addr, HashSet<Element>> = HashMap::new();
    for element in elements {
        by_guest.entry(element.ip()).or_default().insert(element);
    }
    by_guest
}

fn read_allowed(socket: &mut Netlink, table: &str) -> io::Result<HashMap<Ipv4Addr, HashSet<Element>>> {
    let mut all = elements::list(socket, table, ruleset::HOSTS)?;
    all.extend(elements::list(socket, table, ruleset::SERVICES)?);
    Ok(group(all.into_iter()))
}

/// The transaction that leaves `ip` with the wanted elements, given the elements of allow-lists that it has.
fn exchange(
    socket: &mut Netlink,
    table: &str,
    ip: Ipv4Addr,
    wanted: &[Element],
    unwanted: &[Element],
    known: Option<&HashSet<Element>>,
) -> io::Result<()> {
    let policies = [Element::Open(ip), Element::Public(ip), Element::Names(ip)];
    let gone = policies.iter().chain(unwanted).filter(|element| !wanted.contains(element));
    let mut ops = Vec::new();
    for element in gone {
        // Added first, it can be deleted whether or not it was there.
        ops.extend([Op { add: true, element }, Op { add: false, element }]);
    }
    let stale = known.into_iter().flatten().filter(|element| !wanted.contains(element));
    ops.extend(stale.map(|element| Op { add: false, element }));
    let new = wanted.iter().filter(|element| !known.is_some_and(|known| known.contains(element)));
    ops.extend(new.map(|element| Op { add: true, element }));
    elements::transact(socket, table, &ops)
}

fn listing_of(all: Vec<Element>) -> Listing {
    let mut grants: HashMap<Ipv4Addr, Grants> = HashMap::new();
    let mut guests = Vec::new();
    for element in all {
        let ip = element.ip();
        match element {
            Element::Guest { tap, mac, ip } => guests.push((tap, mac, ip)),
            Element::Open(_) => grants.entry(ip).or_default().open = true,
            Element::Public(_) => grants.entry(ip).or_default().public = true,
            Element::Names(_) => grants.entry(ip).or_default().names = true,
            Element::Host(_, span) => grants.entry(ip).or_default().hosts.push(span),
            Element::Service(_, service) => grants.entry(ip).or_default().services.push(service),
        }
    }
    for grants in grants.values_mut() {
        grants.hosts.sort();
        grants.services.sort_by_key(|service| (service.protocol, service.to, service.first_port));
    }
    let known: HashSet<Ipv4Addr> = guests.iter().map(|(_, _, ip)| *ip).collect();
    let mut strays: Vec<Ipv4Addr> = grants.keys().filter(|ip| !known.contains(ip)).copied().collect();
    let granted = |ip| grants.get(&ip).cloned().unwrap_or_default();
    let mut guests: Vec<Guest> =
        guests.into_iter().map(|(tap, mac, ip)| Guest { tap, mac, ip, grants: granted(ip) }).collect();
    guests.sort();
    strays.sort();
    Listing { guests, strays }
}

/// Deleting what a missing table would hold is done.
fn absent(result: Result<(), NetError>) -> Result<(), NetError> {
    match result {
        Err(NetError::Elements { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What the mutexes guard is replaced as a whole: a panic elsewhere leaves nothing half-done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn is_missing(output: &Output) -> bool {
    String::from_utf8_lossy(&output.stderr).contains("No such file or directory")
}

pub(super) fn first_line(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).lines().next().unwrap_or("no message").trim().to_string()
}

/// Runs the program `nft`.
pub(super) fn nft(arguments: &[&str], input: &str) -> Result<Output, NetError> {
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
