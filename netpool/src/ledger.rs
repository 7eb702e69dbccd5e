//! The rows of what is lent to whom.

use serde::{Deserialize, Serialize};

use crate::{CpuSet, Slot};

/// What one running sandbox has borrowed. Everything else that belongs to the loan (TAP name, addresses, CID, MAC)
/// follows from the slot and the id: see [`crate::PoolConfig::guest_net`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loan {
    /// The borrower.
    pub sandbox_id: String,
    /// The borrower's run. A release names the run too, so that a late release of an old run frees nothing of a new one.
    pub run: u64,
    /// The slot of the network pool.
    pub slot: Slot,
    /// The host CPUs that the VM may run on.
    pub cpus: CpuSet,
    /// Guest memory in bytes.
    pub memory_bytes: u64,
}

/// Read access to the loans. The gateway implements it over its database and is the only one that writes them, in the
/// transaction that writes the intent which needs the loan.
pub trait Ledger: Send + Sync {
    /// The loan of a sandbox, or `None` when it has borrowed nothing.
    fn loan(&self, sandbox_id: &str) -> Result<Option<Loan>, LedgerError>;

    /// All loans, in any order.
    fn all(&self) -> Result<Vec<Loan>, LedgerError>;

    /// The loan that has a slot. A store that can find it without reading all rows does better than this.
    fn of_slot(&self, slot: Slot) -> Result<Option<Loan>, LedgerError> {
        Ok(self.all()?.into_iter().find(|loan| loan.slot == slot))
    }
}

/// The ledger could not be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the ledger of loans: {source}")]
pub struct LedgerError {
    /// What the store said.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

impl LedgerError {
    /// Wraps what the store said.
    pub fn new(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> LedgerError {
        LedgerError { source: source.into() }
    }
}
