//! What running sandboxes have borrowed: rows beside the sandboxes, changed in the same transactions.

use std::{collections::BTreeMap, sync::Arc};

use rusqlite::{Connection, OptionalExtension as _, Row};
use torpor_netpool::{
    CpuSet, Ledger, LedgerError, Loan, PoolConfig, Slot, Topology,
    policy::{self, Budget, Exhausted, Released, Resource, Want, plan_on},
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
    /// How the CPUs lie together.
    pub topology: Topology,
}

/// How much of it is lent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Each resource by itself.
    pub pool: policy::Counters,
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

/// Counts what is lent, once, on the writer's connection; from then on the sums go with every loan and release, in the
/// same transactions, so that a start looks at no other loan.
pub fn count(conn: &Connection) -> Result<(), StoreError> {
    conn.execute_batch(
        "PRAGMA temp_store = MEMORY;
         CREATE TEMP TABLE lent (what TEXT PRIMARY KEY, amount INTEGER NOT NULL) STRICT, WITHOUT ROWID;",
    )?;
    all(conn)?.iter().try_for_each(|loan| tally(conn, loan, 1))
}

/// Adds a loan to the sums, or takes it off.
fn tally(conn: &Connection, loan: &Loan, sign: i64) -> Result<(), StoreError> {
    let mut add = conn.prepare_cached(
        "INSERT INTO temp.lent VALUES (?1, ?2) ON CONFLICT (what) DO UPDATE SET amount = amount + ?2",
    )?;
    let amount = |amount: u64| i64::try_from(amount).unwrap_or(i64::MAX).saturating_mul(sign);
    add.execute(("slots", sign))?;
    add.execute(("memory", amount(loan.memory_bytes)))?;
    add.execute(("cpus", amount(loan.cpus.len() as u64)))?;
    for cpu in loan.cpus.iter() {
        add.execute((format!("cpu {cpu}"), sign))?;
    }
    Ok(())
}

fn lent(conn: &Connection, what: &str) -> Result<u64, StoreError> {
    let sql = "SELECT amount FROM temp.lent WHERE what = ?1";
    let amount: Option<i64> = conn.prepare_cached(sql)?.query_row([what], |row| row.get(0)).optional()?;
    Ok(u64::try_from(amount.unwrap_or_default()).unwrap_or_default())
}

/// Gives back whatever `id` has borrowed; true when there was something.
pub fn release(conn: &Connection, id: &SandboxId) -> Result<bool, StoreError> {
    let sql = "DELETE FROM leases WHERE sandbox_id = ?1
               RETURNING sandbox_id, run, slot, cpus, memory_bytes";
    let loan = conn.prepare_cached(sql)?.query_row([id.as_str()], loan_of).optional()?;
    if let Some(loan) = &loan {
        conn.prepare_cached("INSERT OR REPLACE INTO slots VALUES (?1, ?2)")?.execute((loan.slot.0, now()))?;
        tally(conn, loan, -1)?;
    }
    Ok(loan.is_some())
}

/// What ran out, with some of the largest borrowers.
fn ran_out(
    conn: &Connection,
    resource: Resource,
    wanted: u64,
    used: u64,
    capacity: u64,
) -> Result<StoreError, StoreError> {
    // The largest borrowers of memory; of anything else, those who have had it the longest.
    let order = if resource == Resource::Memory { "l.memory_bytes DESC" } else { "l.acquired_ms" };
    let sql = format!(
        "SELECT s.name FROM leases l JOIN sandboxes s ON s.id = l.sandbox_id ORDER BY {order}, s.name LIMIT 5"
    );
    let holders = conn.prepare_cached(&sql)?.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
    let exhausted = Exhausted { resource, wanted, used, capacity, holders };
    Ok(match exhausted.never_fits() {
        true => StoreError::NeverFits(exhausted.to_string()),
        false => StoreError::Exhausted(exhausted.to_string()),
    })
}

/// What `plan` of the pool would choose, from the sums: none where these don't tell (slots beyond the range are in use),
/// and the loans have to be looked at one by one.
fn quick_plan(
    conn: &Connection,
    limits: &PoolLimits,
    want: Want,
) -> Result<Option<(Slot, CpuSet)>, StoreError> {
    let budget = &limits.budget;
    let capacity = u64::from(limits.network.capacity());
    let cpus = u64::from(want.cpus.max(1)).min(budget.cpus.len().max(1) as u64);
    for (resource, what, wanted, capacity) in [
        (Resource::Cpus, "cpus", cpus, budget.cpu_capacity()),
        (Resource::Memory, "memory", want.memory_bytes, budget.memory_bytes),
        (Resource::NetworkSlots, "slots", 1, capacity),
    ] {
        let used = lent(conn, what)?;
        if used.saturating_add(wanted) > capacity {
            return Err(ran_out(conn, resource, wanted, used, capacity)?);
        }
    }
    // Slots are lent in order before any is lent again, so what was never lent begins after the highest.
    let highest: Option<u64> = conn
        .prepare_cached("SELECT max(coalesce((SELECT max(slot) FROM leases), -1), coalesce((SELECT max(slot) FROM slots), -1))")?
        .query_row([], |row| row.get::<_, i64>(0).map(|slot| u64::try_from(slot).ok()))?;
    let fresh = highest.map_or(0, |highest| highest + 1);
    let slot = if fresh < capacity {
        u32::try_from(fresh).ok()
    } else if fresh == capacity {
        conn.prepare_cached("SELECT slot FROM slots ORDER BY released_ms, slot LIMIT 1")?
            .query_row([], |row| row.get(0))
            .optional()?
    } else {
        None
    };
    let mut loads = BTreeMap::new();
    for cpu in budget.cpus.iter() {
        loads.insert(cpu, u32::try_from(lent(conn, &format!("cpu {cpu}"))?).unwrap_or(u32::MAX));
    }
    Ok(slot.map(|slot| (Slot(slot), limits.topology.place(&loads, want.cpus).cpus)))
}

/// Looks at every loan.
fn full_plan(conn: &Connection, limits: &PoolLimits, want: Want) -> Result<(Slot, CpuSet), StoreError> {
    let loans = all(conn)?;
    let released: Vec<Released> = conn
        .prepare_cached("SELECT slot, released_ms FROM slots")?
        .query_map([], |row| Ok(Released { slot: Slot(row.get(0)?), at_ms: row.get(1)? }))?
        .collect::<Result<_, _>>()?;
    let now_ms = u64::try_from(now()).unwrap_or_default();
    let chosen = plan_on(&limits.topology, &limits.network, &limits.budget, &loans, released, now_ms, want)
        .map_err(|e| match e.never_fits() {
        true => StoreError::NeverFits(e.to_string()),
        false => StoreError::Exhausted(e.to_string()),
    })?;
    Ok((chosen.slot.slot, chosen.cpus))
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
    let (slot, cpus) = match quick_plan(conn, limits, want)? {
        Some(chosen) => chosen,
        None => full_plan(conn, limits, want)?,
    };
    let loan = Loan { sandbox_id: id.to_string(), run: run.0, slot, cpus, memory_bytes: want.memory_bytes };
    insert(conn, &loan)?;
    Ok(loan)
}

/// Writes a loan.
pub fn insert(conn: &Connection, loan: &Loan) -> Result<(), StoreError> {
    conn.prepare_cached("INSERT INTO leases VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?.execute((
        &loan.sandbox_id,
        loan.run,
        loan.slot.0,
        loan.cpus.to_string(),
        loan.memory_bytes,
        now(),
    ))?;
    conn.prepare_cached("DELETE FROM slots WHERE slot = ?1")?.execute([loan.slot.0])?;
    tally(conn, loan, 1)
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
    pub async fn release(self: &Arc<Self>, id: &SandboxId) -> Result<bool, StoreError> {
        let (id, lent) = (id.clone(), id.to_string());
        // What is at rest is asked for it again and again, and commits nothing by that.
        let lent = self.read(move |conn| {
            let mut found = conn.prepare_cached("SELECT 1 FROM leases WHERE sandbox_id = ?1")?;
            Ok(found.exists([lent])?)
        });
        if !lent.await? {
            return Ok(false);
        }
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
            let since = now() - i64::try_from(limits.network.quarantine().as_millis()).unwrap_or(i64::MAX);
            let resting: Vec<Released> = conn
                .prepare_cached("SELECT slot, released_ms FROM slots WHERE released_ms > ?1")?
                .query_map([since], |row| Ok(Released { slot: Slot(row.get(0)?), at_ms: row.get(1)? }))?
                .collect::<Result<_, _>>()?;
            let sandboxes = conn.query_row("SELECT count(*) FROM sandboxes", [], |row| row.get(0))?;
            let now_ms = u64::try_from(now()).unwrap_or_default();
            Ok(Counters {
                pool: policy::counters(&limits.network, &limits.budget, &loans, resting, now_ms),
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
