//! What running sandboxes have borrowed: rows beside the sandboxes, changed in the same transactions.

use std::{collections::HashSet, sync::Arc};

use rusqlite::{Connection, OptionalExtension as _, Row};
use torpor_netpool::{
    CpuSet, Ledger, LedgerError, Loan, PoolConfig, Slot,
    policy::{Budget, Released, Usage, Want, plan},
};
use torpor_sandbox::{Run, SandboxId};

use super::{Store, StoreError, now};

/// What there is to lend.
#[derive(Clone, Debug)]
pub struct PoolLimits {
    /// Slots: TAP, addresses, vsock CID.
    pub network: PoolConfig,
    /// CPUs and memory.
    pub budget: Budget,
}

/// How much of it is lent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// All slots.
    pub slots_total: u32,
    /// Lent slots.
    pub slots_used: u32,
    /// Slots that rest after their release.
    pub slots_quarantined: u32,
    /// All memory to lend, bytes.
    pub memory_total: u64,
    /// Lent memory, bytes.
    pub memory_used: u64,
    /// CPUs of the host.
    pub cpus_total: u32,
    /// All sandboxes.
    pub sandboxes: u64,
}

fn loan_of(row: &Row<'_>) -> rusqlite::Result<Loan> {
    let cpus: String = row.get(3)?;
    let cpus: CpuSet = cpus.parse().map_err(|e| {
        rusqlite::Error::FromSqlConversionFailure(3, rusqlite::types::Type::Text, Box::new(e))
    })?;
    Ok(Loan {
        sandbox_id: row.get(0)?,
        run: row.get(1)?,
        slot: Slot(row.get(2)?),
        cpus,
        memory_bytes: row.get(4)?,
    })
}

const LOANS: &str = "SELECT sandbox_id, run, slot, cpus, memory_bytes FROM leases";

fn all(conn: &Connection) -> Result<Vec<Loan>, StoreError> {
    Ok(conn.prepare_cached(LOANS)?.query_map([], loan_of)?.collect::<Result<_, _>>()?)
}

fn one(conn: &Connection, id: &str) -> Result<Option<Loan>, StoreError> {
    let sql = format!("{LOANS} WHERE sandbox_id = ?1");
    Ok(conn.prepare_cached(&sql)?.query_row([id], loan_of).optional()?)
}

/// Gives back whatever `id` has borrowed; true when there was something.
pub fn release(conn: &Connection, id: &SandboxId) -> Result<bool, StoreError> {
    let slot: Option<u32> = conn
        .prepare_cached("DELETE FROM leases WHERE sandbox_id = ?1 RETURNING slot")?
        .query_row([id.as_str()], |row| row.get(0))
        .optional()?;
    if let Some(slot) = slot {
        conn.prepare_cached("INSERT OR REPLACE INTO slots VALUES (?1, ?2)")?.execute((slot, now()))?;
    }
    Ok(slot.is_some())
}

fn lend(
    conn: &Connection,
    limits: &PoolLimits,
    id: &SandboxId,
    run: Run,
    want: Want,
) -> Result<Loan, StoreError> {
    if let Some(loan) = one(conn, id.as_str())?
        && loan.run == run.0
    {
        return Ok(loan);
    }
    // A loan of an older run: its compute was seen to be gone, or this run would not be starting.
    release(conn, id)?;
    let loans = all(conn)?;
    let released: Vec<Released> = conn
        .prepare_cached("SELECT slot, released_ms FROM slots")?
        .query_map([], |row| Ok(Released { slot: Slot(row.get(0)?), at_ms: row.get(1)? }))?
        .collect::<Result<_, _>>()?;
    let now_ms = u64::try_from(now()).unwrap_or_default();
    let chosen =
        plan(&limits.network, &limits.budget, &loans, released, now_ms, want).map_err(|e| {
            match e.never_fits() {
                true => StoreError::NeverFits(e.to_string()),
                false => StoreError::Exhausted(e.to_string()),
            }
        })?;
    let loan = Loan {
        sandbox_id: id.to_string(),
        run: run.0,
        slot: chosen.slot.slot,
        cpus: chosen.cpus,
        memory_bytes: want.memory_bytes,
    };
    conn.prepare_cached("INSERT INTO leases VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?.execute((
        &loan.sandbox_id,
        loan.run,
        loan.slot.0,
        loan.cpus.to_string(),
        loan.memory_bytes,
        now(),
    ))?;
    Ok(loan)
}

impl Store {
    /// Lends `id` what its run needs; a repeat for the same run returns the same loan.
    ///
    /// # Errors
    /// `Exhausted` with what ran out.
    pub async fn lend(&self, id: &SandboxId, run: Run, want: Want) -> Result<Loan, StoreError> {
        let (id, limits) = (id.clone(), self.limits.clone());
        self.write(move |conn, _| lend(conn, &limits, &id, run, want)).await
    }

    /// Gives back what `id` has borrowed, its compute being gone.
    ///
    /// # Errors
    /// The database's.
    pub async fn release(&self, id: &SandboxId) -> Result<bool, StoreError> {
        let id = id.clone();
        self.write(move |conn, _| release(conn, &id)).await
    }

    /// Every loan.
    ///
    /// # Errors
    /// The database's.
    pub async fn loans(self: &Arc<Self>) -> Result<Vec<Loan>, StoreError> {
        self.read(all).await
    }

    /// Sums.
    ///
    /// # Errors
    /// The database's.
    pub async fn counters(self: &Arc<Self>) -> Result<Counters, StoreError> {
        let limits = self.limits.clone();
        self.read(move |conn| {
            let loans = all(conn)?;
            let usage = Usage::of(&loans);
            let used: HashSet<u32> = loans.iter().map(|l| l.slot.0).collect();
            let since = now() - i64::try_from(limits.network.quarantine().as_millis()).unwrap_or(i64::MAX);
            let resting: Vec<u32> = conn
                .prepare_cached("SELECT slot FROM slots WHERE released_ms > ?1")?
                .query_map([since], |row| row.get(0))?
                .collect::<Result<_, _>>()?;
            let sandboxes = conn.query_row("SELECT count(*) FROM sandboxes", [], |row| row.get(0))?;
            Ok(Counters {
                slots_total: limits.network.capacity(),
                slots_used: u32::try_from(usage.slots).unwrap_or(u32::MAX),
                slots_quarantined: u32::try_from(resting.iter().filter(|s| !used.contains(s)).count())
                    .unwrap_or(u32::MAX),
                memory_total: limits.budget.memory_bytes,
                memory_used: usage.memory_bytes,
                cpus_total: u32::try_from(limits.budget.cpus.len()).unwrap_or(u32::MAX),
                sandboxes,
            })
        })
        .await
    }
}

impl Ledger for Store {
    fn loan(&self, sandbox_id: &str) -> Result<Option<Loan>, LedgerError> {
        self.read_loans(|conn| one(conn, sandbox_id))
    }

    fn all(&self) -> Result<Vec<Loan>, LedgerError> {
        self.read_loans(all)
    }
}

impl Store {
    /// Drivers read the ledger from any thread, at most once a start.
    fn read_loans<T>(
        &self,
        query: impl FnOnce(&Connection) -> Result<T, StoreError>,
    ) -> Result<T, LedgerError> {
        let conn = self.ledger.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        query(&conn).map_err(LedgerError::new)
    }
}
