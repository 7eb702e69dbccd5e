//! The kernel's half of a sweep: listing what there is, and carrying out repairs.

use std::collections::HashMap;

use super::attach::Network;
use super::cgroup::CgroupParent;
use super::error::NetError;
use super::link;
use crate::{Ledger, Live, PoolConfig, Repair, TapNeighbour, TapRoute};

/// Lists the kernel's objects of the pool, for [`crate::sweep()`]. Call it before reading the ledger. It knows nothing of
/// processes: the caller puts them in.
///
/// # Errors
/// What can't be listed.
pub fn live(
    config: &PoolConfig,
    network: &Network,
    cgroups: Option<&CgroupParent>,
) -> Result<Live, NetError> {
    let links = link::links().map_err(NetError::ListLinks)?;
    let taps: HashMap<u32, String> = links
        .into_iter()
        .filter(|link| config.slot_of_tap(&link.name).is_some())
        .map(|link| (link.index, link.name))
        .collect();
    let routes = link::routes().map_err(NetError::link("list routes", "of the pool"))?;
    let routes = routes
        .into_iter()
        .filter_map(|(index, to)| taps.get(&index).map(|tap| TapRoute { tap: tap.clone(), to }));
    let neighbours = link::neighbours().map_err(NetError::link("list neighbours", "of the pool"))?;
    let neighbours = neighbours.into_iter().filter_map(|(index, ip, mac)| {
        taps.get(&index).map(|tap| TapNeighbour { tap: tap.clone(), ip, mac })
    });
    let (routes, neighbours) = (routes.collect(), neighbours.collect());
    let mut taps: Vec<String> = taps.into_values().collect();
    taps.sort();
    let listing = network.firewall().listing()?;
    Ok(Live {
        taps,
        routes,
        neighbours,
        elements: listing.guests,
        strays: listing.strays,
        cgroups: cgroups.map(CgroupParent::list).transpose()?.unwrap_or_default(),
        processes: None,
    })
}

/// Carries out repairs; one that fails doesn't keep the others. The ledger is read again before anything is deleted, so that
/// a slot that was lent since the comparison is left alone; between that reading and the deletion the caller must not
/// let a start write its row (it holds its allocation lock).
pub fn apply(
    config: &PoolConfig,
    network: &Network,
    cgroups: Option<&CgroupParent>,
    ledger: &dyn Ledger,
    repairs: Vec<Repair>,
) -> Vec<(Repair, Result<(), NetError>)> {
    let one = |repair: &Repair| carry_out(config, network, cgroups, ledger, repair);
    repairs.into_iter().map(|repair| (repair.clone(), one(&repair))).collect()
}

fn carry_out(
    config: &PoolConfig,
    network: &Network,
    cgroups: Option<&CgroupParent>,
    ledger: &dyn Ledger,
    repair: &Repair,
) -> Result<(), NetError> {
    match repair {
        Repair::DeleteTap { tap, slot } => {
            if ledger.of_slot(*slot)?.is_some() {
                return Err(NetError::LentAgain(slot.0));
            }
            network.slot_given_back(config, *slot);
            network.stock().release(tap).map(drop)
        }
        Repair::RemoveElement { guest } => {
            let Some(slot) = config.slot_of_tap(&guest.tap) else { return network.firewall().remove(guest) };
            match ledger.of_slot(slot)?.map(|loan| config.guest_net(&loan.sandbox_id, slot)) {
                Some(Ok(net)) if net.guest().is_same(guest) => Err(NetError::LentAgain(slot.0)),
                Some(_) => network.firewall().remove_identity(guest),
                None => network.firewall().remove(guest),
            }
        }
        Repair::AddElement { sandbox_id, guest } => {
            let net = ledger.loan(sandbox_id)?.map(|loan| config.guest_net(sandbox_id, loan.slot));
            match net {
                Some(Ok(net)) if net.guest().is_same(guest) => network.firewall().add(guest),
                _ => Ok(()),
            }
        }
        Repair::ForgetAddress { ip } => {
            let slot = config.slot_of_guest(*ip);
            match slot.map(|slot| ledger.of_slot(slot)).transpose()?.flatten() {
                Some(loan) => Err(NetError::LentAgain(loan.slot.0)),
                None => network.firewall().forget(*ip),
            }
        }
        Repair::RemoveRoute { route: TapRoute { tap, to } } => {
            on_tap(tap, "remove a route", |index| link::delete_route(index, *to))
        }
        Repair::RemoveNeighbour { neighbour: TapNeighbour { tap, ip, .. } } => {
            on_tap(tap, "remove a neighbour", |index| link::delete_neighbour(index, *ip))
        }
        Repair::RemoveCgroup { name } => match (cgroups, ledger.loan(name)?) {
            (Some(parent), None) => parent.open(name)?.map_or(Ok(()), |cgroup| cgroup.remove()),
            _ => Ok(()),
        },
    }
}

/// A change at a TAP; nothing when the TAP or what is to be removed is gone.
fn on_tap(
    tap: &str,
    step: &'static str,
    message: impl FnOnce(u32) -> super::netlink::Message,
) -> Result<(), NetError> {
    let Some(index) = link::index_of(tap).map_err(NetError::link("find the tap", tap))? else {
        return Ok(());
    };
    match link::request(message(index)) {
        Err(error) if matches!(error.raw_os_error(), Some(nix::libc::ESRCH | nix::libc::ENOENT)) => Ok(()),
        result => result.map_err(NetError::link(step, tap)),
    }
}
