//! Ports of sandboxes that the gateway's host listens for.

use std::{net::SocketAddr, sync::Arc, time::SystemTime};

use rusqlite::{Connection, OptionalExtension as _, Row};
use torpor_sandbox::{Phase, SandboxId, spec::unqualified};

use super::{Record, Store, StoreError, from_millis, now, sandboxes::load};

/// Ports of one sandbox; each takes a socket of the host, asleep or awake.
const MOST: u64 = 64;

/// A port of a sandbox that is a port of the host too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exposed {
    /// Whose port.
    pub sandbox: SandboxId,
    /// Its name.
    pub name: String,
    /// The sandbox's port.
    pub port: u16,
    /// Where the host listens.
    pub host: SocketAddr,
    /// A connection resumes the sandbox.
    pub wake: bool,
    /// Since when.
    pub created: SystemTime,
}

const SELECT: &str = "SELECT e.sandbox_id, s.name, e.port, e.host, e.wake, e.created_ms
                      FROM exposed e JOIN sandboxes s ON s.id = e.sandbox_id";

fn row(row: &Row<'_>) -> rusqlite::Result<Exposed> {
    let unreadable = |column, error: Box<dyn std::error::Error + Send + Sync>| {
        rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, error)
    };
    let (id, host): (String, String) = (row.get(0)?, row.get(3)?);
    Ok(Exposed {
        sandbox: id.parse().map_err(|e: torpor_sandbox::InvalidName| unreadable(0, Box::new(e)))?,
        name: row.get(1)?,
        port: row.get(2)?,
        host: host.parse().map_err(|e: std::net::AddrParseError| unreadable(3, Box::new(e)))?,
        wake: row.get(4)?,
        created: from_millis(row.get(5)?),
    })
}

fn one(conn: &Connection, id: &SandboxId, port: u16) -> Result<Option<Exposed>, StoreError> {
    let sql = format!("{SELECT} WHERE e.sandbox_id = ?1 AND e.port = ?2");
    Ok(conn.prepare_cached(&sql)?.query_row((id.as_str(), port), row).optional()?)
}

/// A port that is to be exposed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewExposed {
    /// The sandbox's port.
    pub port: u16,
    /// Where the host listens.
    pub host: SocketAddr,
    /// A connection resumes the sandbox.
    pub wake: bool,
}

/// Writes that a port is exposed, in place of how it was before.
pub(super) fn insert(conn: &Connection, record: &Record, new: &NewExposed) -> Result<(), StoreError> {
    let (id, &NewExposed { port, host, wake }) = (&record.id, new);
    let holder = format!("{SELECT} WHERE e.host = ?1");
    let holder = conn.prepare_cached(&holder)?.query_row([host.to_string()], row).optional()?;
    if let Some(other) = holder.filter(|other| (&other.sandbox, other.port) != (id, port)) {
        let same = unqualified(&other.name).0 == unqualified(&record.name).0;
        return Err(StoreError::HostTaken { host, holder: same.then_some((other.name, other.port)) });
    }
    let count: u64 = conn
        .prepare_cached("SELECT count(*) FROM exposed WHERE sandbox_id = ?1 AND port != ?2")?
        .query_row((id.as_str(), port), |row| row.get(0))?;
    if count >= MOST {
        return Err(StoreError::TooManyPorts { name: record.name.clone(), most: MOST });
    }
    conn.prepare_cached(
        "INSERT INTO exposed VALUES (?1, ?2, ?3, ?4, ?5)
         ON CONFLICT (sandbox_id, port) DO UPDATE SET host = ?3, wake = ?4",
    )?
    .execute((id.as_str(), port, host.to_string(), wake, now()))?;
    Ok(())
}

impl Store {
    /// Writes that a port is exposed, in place of how it was before.
    ///
    /// # Errors
    /// `NotFound`, `Deleting`, `HostTaken`, `TooManyPorts`, or the database's.
    pub async fn expose(
        &self,
        id: &SandboxId,
        port: u16,
        host: SocketAddr,
        wake: bool,
    ) -> Result<Exposed, StoreError> {
        let id = id.clone();
        self.write_if_possible(move |conn, _| {
            let record = load(conn, id.as_str())?;
            if record.state.phase == Phase::Deleting {
                return Err(StoreError::Deleting(record.name));
            }
            insert(conn, &record, &NewExposed { port, host, wake })?;
            one(conn, &id, port)?.ok_or_else(|| StoreError::NotFound(id.to_string()))
        })
        .await
    }

    /// One exposed port.
    ///
    /// # Errors
    /// The database's.
    pub async fn exposed_port(
        self: &Arc<Self>,
        id: &SandboxId,
        port: u16,
    ) -> Result<Option<Exposed>, StoreError> {
        let id = id.clone();
        self.read(move |conn| one(conn, &id, port)).await
    }

    /// The exposed ports of a sandbox, or of all.
    ///
    /// # Errors
    /// The database's.
    pub async fn exposed(self: &Arc<Self>, id: Option<&SandboxId>) -> Result<Vec<Exposed>, StoreError> {
        let id = id.map(ToString::to_string);
        self.read(move |conn| {
            let sql = format!("{SELECT} WHERE ?1 IS NULL OR e.sandbox_id = ?1 ORDER BY s.name, e.port");
            let mut statement = conn.prepare_cached(&sql)?;
            let rows = statement.query_map([id], row)?.collect::<Result<_, _>>()?;
            Ok(rows)
        })
        .await
    }

    /// Takes a port back; true when it was exposed.
    ///
    /// # Errors
    /// The database's.
    pub async fn unexpose(&self, id: &SandboxId, port: u16) -> Result<bool, StoreError> {
        let id = id.clone();
        self.write_if_possible(move |conn, _| {
            let sql = "DELETE FROM exposed WHERE sandbox_id = ?1 AND port = ?2";
            Ok(conn.prepare_cached(sql)?.execute((id.as_str(), port))? > 0)
        })
        .await
    }
}
