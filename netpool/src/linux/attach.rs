//! All of a sandbox's network at once.

use super::conntrack::{Connections, Forgotten};
use super::error::NetError;
use super::firewall::{Ensured, Firewall};
use super::stock::{TapStock, Tended};
use super::tap::{Tap, TapOptions, delete_tap};
use crate::{GuestNet, PoolConfig, Slot};

/// The network of a pool in one network namespace: the firewall, the stock of TAPs, and the kernel's memory of connections.
#[derive(Debug)]
pub struct Network {
    firewall: Firewall,
    stock: TapStock,
    connections: Connections,
}

impl Network {
    /// The network of a pool. Nothing is made before it is used.
    pub fn new(config: &PoolConfig) -> Network {
        Network {
            firewall: Firewall::new(config),
            stock: TapStock::new(config),
            connections: Connections::new(config),
        }
    }

    /// The firewall.
    pub fn firewall(&self) -> &Firewall {
        &self.firewall
    }

    /// The stock of TAPs.
    pub fn stock(&self) -> &TapStock {
        &self.stock
    }

    /// Lets a sandbox's packets through to where its egress policy says, and gives it a TAP. When the TAP fails, the firewall's
    /// elements are taken back. Repeating it after a kill takes over what is there. When the kernel doesn't forget the connections of
    /// the address's former guest, that is logged: the quarantine of the slot has to do.
    ///
    /// # Errors
    /// What the firewall or the TAP said.
    pub fn attach(&self, net: &GuestNet, options: &TapOptions) -> Result<Tap, NetError> {
        if self.connections.may_remember(net.guest_ip) {
            self.settled_for(net);
        }
        self.firewall.add(&net.guest())?;
        taken_back(&self.firewall, net, self.stock.acquire(net, options))
    }

    /// The slot was lent, so nobody else has the address: a kernel that can't list connections just now is no reason to
    /// fail a start.
    fn settled_for(&self, net: &GuestNet) {
        if let Err(error) = self.settle() {
            let (address, error) = (net.guest_ip, &error as &dyn std::error::Error);
            tracing::warn!(%address, error, "connections of the address's former guest may still be remembered");
            self.connections.lent_again(address);
        }
    }

    /// Takes a sandbox's network back, once its VM process is gone: the TAP with its addresses, routes and neighbours, and the
    /// firewall's elements. The connections that the kernel remembers of the address are forgotten by the next
    /// [`Network::settle`], which the next [`Network::attach`] of the address waits for. Repeating it does nothing. Call it
    /// while the loan's row still stands: after that, the slot may be another's.
    ///
    /// # Errors
    /// What the kernel said; both are attempted.
    pub fn detach(&self, net: &GuestNet) -> Result<(), NetError> {
        self.connections.given_back(net.guest_ip);
        let tap = self.stock.release(&net.tap);
        self.firewall.remove(&net.guest())?;
        tap.map(drop)
    }

    /// Makes the kernel forget the connections of addresses that were given back; the first time, of all of the pool's that are
    /// not in use.
    ///
    /// # Errors
    /// The kernel refused, for another reason than that it can't.
    pub fn settle(&self) -> Result<Forgotten, NetError> {
        self.connections.settle(|| Ok(self.firewall.list()?.into_iter().map(|guest| guest.ip).collect()))
    }

    /// The address of a slot's guest is nobody's any more.
    pub(super) fn slot_given_back(&self, config: &PoolConfig, slot: Slot) {
        if let Ok(net) = config.guest_net("", slot) {
            self.connections.given_back(net.guest_ip);
        }
    }

    /// Every few seconds, off the hot path: makes the firewall's table right again, looks after the stock, and settles.
    ///
    /// # Errors
    /// What the firewall or the kernel said first; all three are attempted.
    pub fn tend(&self) -> Result<Tend, NetError> {
        let (table, stock, forgotten) = (self.firewall.ensure(), self.stock.tend(), self.settle());
        Ok(Tend { table: table?, stock: stock?, forgotten: forgotten? })
    }
}

/// What [`Network::tend`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tend {
    /// The firewall's table.
    pub table: Ensured,
    /// The stock of TAPs.
    pub stock: Tended,
    /// Connections of addresses that were given back.
    pub forgotten: Forgotten,
}

/// Lets a sandbox's packets through and makes a TAP for it that ends with its descriptor: [`Network::attach`] without a
/// stock. When the TAP fails, the firewall's elements are taken back.
///
/// # Errors
/// What the firewall or the TAP said.
pub fn attach(firewall: &Firewall, net: &GuestNet, options: &TapOptions) -> Result<Tap, NetError> {
    firewall.add(&net.guest())?;
    taken_back(firewall, net, Tap::create(net, options))
}

fn taken_back(firewall: &Firewall, net: &GuestNet, tap: Result<Tap, NetError>) -> Result<Tap, NetError> {
    tap.inspect_err(|error| {
        // A TAP that is there already may be in use with this very element.
        if !matches!(error, NetError::TapBusy { .. }) {
            // The first error counts; an element that stays is found by the next sweep.
            let _ = firewall.remove(&net.guest());
        }
    })
}

/// Takes back what [`attach()`] made, once the VM process is gone: deletes the TAP if it is still there, and the firewall's
/// elements. Repeating it does nothing. Call it while the loan's row still stands: after that, the slot may be another's.
///
/// # Errors
/// What the kernel said; both are attempted.
pub fn detach(firewall: &Firewall, net: &GuestNet) -> Result<(), NetError> {
    let tap = delete_tap(&net.tap);
    firewall.remove(&net.guest())?;
    tap.map(drop)
}
