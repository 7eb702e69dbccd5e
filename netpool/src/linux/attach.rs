//! All of a sandbox's network at once, and the repairs of a sweep.

use super::cgroup::CgroupParent;
use super::error::NetError;
use super::firewall::Firewall;
use super::tap::{Tap, TapOptions, delete_tap, list_taps};
use crate::{Guest, GuestNet, Ledger, PoolConfig, Repair};

/// Lets a sandbox's packets through and makes its TAP. When the TAP fails, the firewall element is taken back.
///
/// # Errors
/// What the firewall or the TAP said.
pub fn attach(firewall: &Firewall, net: &GuestNet, options: &TapOptions) -> Result<Tap, NetError> {
    firewall.add(&net.guest())?;
    Tap::create(net, options).inspect_err(|error| {
        // A TAP that is there already may be in use with this very element.
        if !matches!(error, NetError::TapBusy { .. }) {
            // The first error counts; an element that stays is found by the next sweep.
            let _ = firewall.remove(&net.guest());
        }
    })
}

/// Takes a sandbox's network back, once its VM process is gone: deletes the TAP if it is still there, and the firewall
/// element. Repeating it does nothing. Call it while the loan's row still stands: after that, the slot may be another's.
///
/// # Errors
/// What the kernel or the firewall said; both are attempted.
pub fn detach(firewall: &Firewall, net: &GuestNet) -> Result<(), NetError> {
    let tap = delete_tap(&net.tap);
    firewall.remove(&net.guest())?;
    tap.map(drop)
}

/// What the kernel has of the pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// TAPs of the pool.
    pub taps: Vec<String>,
    /// Elements of the firewall.
    pub elements: Vec<Guest>,
    /// Cgroups below the pool's parent.
    pub cgroups: Vec<String>,
}

/// Lists the kernel's objects of the pool, for [`crate::sweep()`]. Call it before reading the ledger.
///
/// # Errors
/// What can't be listed.
pub fn live(
    config: &PoolConfig,
    firewall: &Firewall,
    cgroups: Option<&CgroupParent>,
) -> Result<Live, NetError> {
    Ok(Live {
        taps: list_taps(config)?,
        elements: firewall.list()?,
        cgroups: cgroups.map(CgroupParent::list).transpose()?.unwrap_or_default(),
    })
}

/// Carries out repairs; one that fails doesn't keep the others. The ledger is read again before anything is deleted, so that
/// a slot that was lent since the comparison is left alone; between that reading and the deletion the caller must not
/// let a start write its row (it holds its allocation lock).
pub fn apply(
    config: &PoolConfig,
    firewall: &Firewall,
    cgroups: Option<&CgroupParent>,
    ledger: &dyn Ledger,
    repairs: Vec<Repair>,
) -> Vec<(Repair, Result<(), NetError>)> {
    let one = |repair: &Repair| match repair {
        Repair::DeleteTap { tap, slot } => {
            if ledger.all()?.iter().any(|loan| loan.slot == *slot) {
                return Err(NetError::LentAgain(slot.0));
            }
            delete_tap(tap).map(drop)
        }
        Repair::RemoveElement { guest } => match config.slot_of_tap(&guest.tap) {
            Some(slot) if wanted(config, ledger, guest)? => Err(NetError::LentAgain(slot.0)),
            _ => firewall.remove(guest),
        },
        Repair::AddElement { guest, .. } => match wanted(config, ledger, guest)? {
            true => firewall.add(guest),
            false => Ok(()),
        },
        Repair::RemoveCgroup { name } => match (cgroups, ledger.loan(name)?) {
            (Some(parent), None) => parent.open(name)?.map_or(Ok(()), |cgroup| cgroup.remove()),
            _ => Ok(()),
        },
    };
    repairs.into_iter().map(|repair| (repair.clone(), one(&repair))).collect()
}

/// Whether a loan accounts for the element.
fn wanted(config: &PoolConfig, ledger: &dyn Ledger, guest: &Guest) -> Result<bool, NetError> {
    let net = |loan: &crate::Loan| config.guest_net(&loan.sandbox_id, loan.slot).map(|net| net.guest());
    Ok(ledger.all()?.iter().any(|loan| net(loan).as_ref() == Ok(guest)))
}
