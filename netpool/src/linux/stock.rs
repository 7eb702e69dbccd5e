//! TAPs in stock. To delete an interface the kernel waits some 20 ms for everyone who may still look at it; so a TAP that comes
//! back is set down, stripped and renamed, and the next sandbox gets it. What is too much is deleted in one group, later.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::libc;

use super::error::NetError;
use super::link::{self, Change, Link};
use super::tap::{self, Tap, TapOptions, delete_tap};
use crate::{GuestNet, PoolConfig};

/// A quarter of the most that are kept is made in advance.
const MADE_IN_ADVANCE: u32 = 4;
/// Above the groups that people number by hand; the low half tells pools apart.
const GROUP: u32 = 0x7470_0000;

/// The stock of a pool's TAPs in one network namespace.
///
/// TAPs in stock belong to nobody but the kernel: they persist without a descriptor, are named by their interface's index,
/// and down. Nothing that a process may still do with one matters: it can send nothing, and one that is held is not lent. One process at a time has the stock, by a lock that ends with it (an abstract socket's name, which is the
/// namespace's own); the next one takes over what it finds. A process that doesn't get the lock makes and deletes its TAPs
/// one by one.
#[derive(Debug)]
pub struct TapStock {
    config: PoolConfig,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    lock: Option<UnixDatagram>,
    /// Interface indexes, the warmest last.
    warm: Vec<u32>,
    surplus: usize,
}

/// What [`TapStock::tend`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tended {
    /// TAPs in stock now.
    pub warm: usize,
    /// TAPs that were made in advance.
    pub made: usize,
    /// TAPs that were too many, deleted as one group.
    pub deleted: usize,
    /// Another process has the stock of this pool.
    pub elsewhere: bool,
}

impl TapStock {
    /// The stock of a pool. Nothing is made or taken over before it is used.
    pub fn new(config: &PoolConfig) -> TapStock {
        TapStock { config: config.clone(), state: Mutex::default() }
    }

    /// The TAP of `net`, up and configured: from the stock, or else a new one. A TAP that an ended process has left for this
    /// slot is taken over. When a step fails, the TAP is deleted.
    ///
    /// # Errors
    /// [`NetError::TapBusy`] when a process holds the TAP; otherwise the step that failed.
    pub fn acquire(&self, net: &GuestNet, options: &TapOptions) -> Result<Tap, NetError> {
        loop {
            let recycled = self.rekey(&net.tap)?;
            let tap = match Tap::tie(net, options, false) {
                // Somebody took hold of it while it was in stock.
                Err(NetError::TapBusy { .. }) if recycled => {
                    delete_tap(&net.tap)?;
                    continue;
                }
                result => result?,
            };
            return match configure(&tap, net, options, recycled) {
                Ok(()) => Ok(tap),
                Err(error) => {
                    // The first error counts; a TAP that stays is found by the next sweep.
                    let _ = delete_tap(&net.tap);
                    Err(error)
                }
            };
        }
    }

    /// Gives the name to a TAP of the stock. `false`: there is none, or somebody else has the name.
    fn rekey(&self, name: &str) -> Result<bool, NetError> {
        let mut state = self.claimed()?;
        while let Some(index) = state.warm.pop() {
            // Since Linux 6.2 an interface that is up can be renamed: one with another name may be a running guest's.
            let present = link::link_at(index).map_err(NetError::link("find the tap for", name))?;
            if !present.is_some_and(|link| link.name.starts_with(&self.config.stock_prefix())) {
                continue;
            }
            let change = Change { name: Some(name), ..Change::default() };
            match link::request(link::change(index, &change)) {
                Ok(()) => return Ok(true),
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                    state.warm.push(index);
                    return Ok(false);
                }
                // Somebody has deleted it.
                Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {}
                // Somebody has set it up: before Linux 6.2 it can't be renamed then, and it isn't ours any more.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                    delete_tap(&self.name(true, index))?;
                }
                Err(error) => return Err(NetError::link("give a tap the name", name)(error)),
            }
        }
        Ok(false)
    }

    /// Takes a TAP back, once its process is gone: into stock, or onto the pile that [`TapStock::tend`] deletes. One that a
    /// process still holds is deleted. `false` when there is none.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn release(&self, name: &str) -> Result<bool, NetError> {
        let Some(link) = link::link_named(name).map_err(NetError::link("find the tap", name))? else {
            return Ok(false);
        };
        // A TAP without a process has no carrier. One that persists in spite of its process, or that nobody keeps, goes.
        if link.carrier || self.claimed()?.lock.is_none() {
            return delete_tap(name);
        }
        let down = Change { up: Some(false), ..Change::default() };
        link::request(link::change(link.index, &down)).map_err(NetError::link("set down", name))?;
        tap::strip(name)?;
        self.put_back(link.index, name)?;
        Ok(true)
    }

    fn put_back(&self, index: u32, name: &str) -> Result<(), NetError> {
        let mut state = self.claimed()?;
        let keep = state.warm.len() < self.config.warm_taps as usize;
        let new_name = self.name(keep, index);
        let group = Some(if keep { 0 } else { self.group() });
        let change = Change { name: Some(&new_name), group, ..Change::default() };
        link::request(link::change(index, &change)).map_err(NetError::link("put into stock", name))?;
        match keep {
            true if state.warm.contains(&index) => {}
            true => state.warm.push(index),
            false => state.surplus += 1,
        }
        Ok(())
    }

    /// Off the hot path, every few seconds: deletes what is too much, in one group, and makes some TAPs in advance.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn tend(&self) -> Result<Tended, NetError> {
        let mut done = Tended::default();
        let surplus = {
            let mut state = self.claimed()?;
            done.elsewhere = state.lock.is_none();
            std::mem::take(&mut state.surplus)
        };
        // Nobody waits for this: what is put onto the pile meanwhile goes along, or the next time.
        if surplus > 0 {
            done.deleted = self.delete_surplus()?;
        }
        let wanted = (self.config.warm_taps / MADE_IN_ADVANCE) as usize;
        while !done.elsewhere && self.claimed()?.warm.len() < wanted {
            self.make()?;
            done.made += 1;
        }
        done.warm = self.claimed()?.warm.len();
        Ok(done)
    }

    /// Deletes the whole stock, as one group: for an orderly end.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn clear(&self) -> Result<usize, NetError> {
        let mut state = self.claimed()?;
        for index in std::mem::take(&mut state.warm) {
            let name = self.name(false, index);
            let change = Change { name: Some(&name), group: Some(self.group()), ..Change::default() };
            match link::request(link::change(index, &change)) {
                Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {}
                result => result.map_err(NetError::link("take from stock", &name))?,
            }
            state.surplus += 1;
        }
        let surplus = std::mem::take(&mut state.surplus);
        drop(state);
        if surplus > 0 { self.delete_surplus() } else { Ok(0) }
    }

    /// How many TAPs are in stock.
    ///
    /// # Errors
    /// The interfaces can't be listed.
    pub fn warm(&self) -> Result<usize, NetError> {
        Ok(self.claimed()?.warm.len())
    }

    fn make(&self) -> Result<(), NetError> {
        let template = format!("{}n%d", self.config.tap_prefix());
        let tap = Tap::tie_named(&template).map_err(NetError::link("create a tap", &template))?;
        tap.set_owner(None)?;
        tap.set_identity()?;
        let index = link::index_of(tap.name()).map_err(NetError::link("find the tap", tap.name()))?;
        let Some(index) = index else { return Ok(()) };
        let name = self.name(true, index);
        let change = Change { name: Some(&name), ..Change::default() };
        link::request(link::change(index, &change)).map_err(NetError::link("put into stock", &name))?;
        // Last, so that a TAP that persists has the stock's name.
        tap.set_persist(true)?;
        drop(tap);
        self.claimed()?.warm.push(index);
        Ok(())
    }

    /// Deletes all TAPs that are marked for it.
    fn delete_surplus(&self) -> Result<usize, NetError> {
        let links = link::links().map_err(NetError::ListLinks)?;
        let prefix = self.config.surplus_prefix();
        let (ours, others): (Vec<&Link>, Vec<&Link>) =
            links.iter().partition(|link| link.name.starts_with(&prefix));
        if ours.is_empty() {
            return Ok(0);
        }
        let alone = others.iter().all(|link| link.group != self.group());
        let (grouped, others): (Vec<&Link>, Vec<&Link>) =
            ours.iter().partition(|link| alone && link.group == self.group());
        if !grouped.is_empty() {
            link::request(link::delete_group(self.group()))
                .map_err(NetError::link("delete the group of", &prefix))?;
        }
        // Somebody has put an interface into this very group, or one of ours out of it.
        for link in others {
            delete_tap(&link.name)?;
        }
        Ok(ours.len())
    }

    fn group(&self) -> u32 {
        let hash = |sum: u32, byte: u8| sum.wrapping_mul(31).wrapping_add(u32::from(byte));
        GROUP | (self.config.table_name().bytes().fold(0, hash) & 0xffff)
    }

    /// The name of a TAP in stock, or of one that is too much: unique by the index, at most 15 bytes.
    fn name(&self, keep: bool, index: u32) -> String {
        let prefix = if keep { self.config.stock_prefix() } else { self.config.surplus_prefix() };
        format!("{prefix}{}", base36(index))
    }

    /// The state, with the lock and what was in stock before, if this process can have it.
    fn claimed(&self) -> Result<MutexGuard<'_, State>, NetError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.lock.is_some() || self.config.warm_taps == 0 {
            return Ok(state);
        }
        let name = format!("torpor-taps-{}", self.config.table_name());
        // Where the name is taken, another process has the stock.
        let bound =
            SocketAddr::from_abstract_name(&name).and_then(|address| UnixDatagram::bind_addr(&address));
        let Ok(lock) = bound else { return Ok(state) };
        let (stock, surplus) = (self.config.stock_prefix(), self.config.surplus_prefix());
        // Taken over all at once: what a failed attempt had listed would be listed twice by the next one.
        let mut found = State::default();
        for link in link::links().map_err(NetError::ListLinks)? {
            if link.name.starts_with(&stock) && self.refresh(&link)? {
                found.warm.push(link.index);
            }
            found.surplus += usize::from(link.name.starts_with(&surplus));
        }
        *state = State { lock: Some(lock), ..found };
        Ok(state)
    }

    /// Makes a TAP as it has to be in stock; deletes it when that doesn't work. `false`: it is gone.
    fn refresh(&self, link: &Link) -> Result<bool, NetError> {
        let down = Change { up: Some(false), group: Some(0), ..Change::default() };
        let done = link::request(link::change(link.index, &down))
            .map_err(NetError::link("set down", &link.name))
            .and_then(|()| tap::strip(&link.name))
            .and_then(|()| tap::restrict(&link.name));
        match done {
            Ok(()) => Ok(true),
            Err(_) => delete_tap(&link.name).map(|_| false),
        }
    }
}

/// What remains to be done for a sandbox; for a TAP that isn't from the stock, everything.
fn configure(tap: &Tap, net: &GuestNet, options: &TapOptions, recycled: bool) -> Result<(), NetError> {
    tap.set_owner(options.owner_uid)?;
    tap.set_offload(options)?;
    if !recycled {
        let index = link::index_of(&net.tap).map_err(NetError::link("find the tap", &net.tap))?;
        let down = Change { up: Some(false), group: Some(0), ..Change::default() };
        link::request(link::change(index.unwrap_or_default(), &down))
            .map_err(NetError::link("set down", &net.tap))?;
        tap::strip(&net.tap)?;
        tap.set_identity()?;
        tap.set_persist(true)?;
    }
    tap.set_up(net, options)
}

fn base36(mut number: u32) -> String {
    let mut digits = Vec::new();
    loop {
        digits.push(char::from_digit(number % 36, 36).unwrap_or('0'));
        number /= 36;
        if number == 0 {
            return digits.iter().rev().collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_stock_fit_and_belong_to_no_slot() {
        let config = PoolConfig { instance: "zzzz".parse().unwrap(), ..PoolConfig::default() };
        let stock = TapStock::new(&config);
        for index in [1, 35, 36, 123_456, i32::MAX as u32] {
            let name = stock.name(true, index);
            assert!(name.len() <= 15, "{name}");
            assert_eq!(config.slot_of_tap(&name), None);
            assert_ne!(name, stock.name(false, index));
        }
        assert_eq!(base36(0), "0");
        assert_ne!(stock.group(), TapStock::new(&PoolConfig::default()).group());
        // Six digits after the prefix name a slot; in stock there is a letter before them.
        assert_eq!(config.slot_of_tap(&format!("{}123456", config.stock_prefix())), None);
    }
}
