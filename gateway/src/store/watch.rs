//! Changes, in order, for those who watch.

use std::{fmt, str::FromStr, sync::Arc};

use rusqlite::Connection;

use super::{Record, Store, StoreError, sandboxes, schema};

/// Deletions that are remembered for watchers who were away.
const TOMBSTONES: i64 = 20_000;

/// One committed change.
#[derive(Clone, Debug)]
pub struct Change {
    /// Its number.
    pub number: u64,
    /// The record after it; of a deletion, the last one.
    pub record: Arc<Record>,
    /// The record went away.
    pub gone: bool,
}

/// The number of the last change that a watcher has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cursor(pub u64);

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "c1.{}", self.0)
    }
}

impl FromStr for Cursor {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let number = text.strip_prefix("c1.").and_then(|n| n.parse().ok());
        number
            .map(Self)
            .ok_or_else(|| StoreError::BadToken(format!("'{}' is not a cursor of ours", text.escape_debug())))
    }
}

/// What a watcher has missed.
#[derive(Debug)]
pub struct Missed {
    /// Present states of what has changed, in the order of their last changes.
    pub changed: Vec<Record>,
    /// Id, name and number of what was deleted.
    pub deleted: Vec<(String, String, u64)>,
    /// Up to here.
    pub cursor: Cursor,
}

/// The next change's number; called only by the writer.
pub fn next_change(conn: &Connection) -> Result<u64, StoreError> {
    let number = last_change(conn)? + 1;
    schema::set_meta(conn, "change", &number.to_string())?;
    Ok(number)
}

fn last_change(conn: &Connection) -> Result<u64, StoreError> {
    Ok(schema::meta(conn, "change")?.and_then(|n| n.parse().ok()).unwrap_or_default())
}

/// Remembers a deletion and forgets the oldest ones.
pub fn bury(conn: &Connection, record: &Record, number: u64, at: i64) -> Result<(), StoreError> {
    conn.prepare_cached("INSERT INTO tombstones VALUES (?1, ?2, ?3, ?4)")?.execute((
        number,
        record.id.as_str(),
        &record.name,
        at,
    ))?;
    let oldest: Option<u64> = conn
        .prepare_cached("SELECT change FROM tombstones ORDER BY change DESC LIMIT 1 OFFSET ?1")?
        .query_map([TOMBSTONES], |row| row.get(0))?
        .next()
        .transpose()?;
    if let Some(oldest) = oldest {
        conn.prepare_cached("DELETE FROM tombstones WHERE change <= ?1")?.execute([oldest])?;
        schema::set_meta(conn, "forgotten", &oldest.to_string())?;
    }
    Ok(())
}

impl Store {
    /// Everything that changed after `cursor`; with none, everything there is.
    ///
    /// # Errors
    /// `CursorTooOld` when deletions after it were forgotten.
    pub async fn changes_after(self: &Arc<Self>, cursor: Option<Cursor>) -> Result<Missed, StoreError> {
        self.read(move |conn| {
            // One snapshot: what is read belongs together.
            let snapshot = conn.unchecked_transaction()?;
            let forgotten =
                schema::meta(&snapshot, "forgotten")?.and_then(|n| n.parse().ok()).unwrap_or(0_u64);
            let last = last_change(&snapshot)?;
            let after = match cursor {
                Some(Cursor(number)) if number < forgotten || number > last => {
                    return Err(StoreError::CursorTooOld);
                }
                Some(Cursor(number)) => number,
                None => 0,
            };
            let changed = sandboxes::changed_after(&snapshot, after)?;
            let deleted = if cursor.is_some() {
                snapshot
                    .prepare_cached(
                        "SELECT id, name, change FROM tombstones WHERE change > ?1 ORDER BY change",
                    )?
                    .query_map([after], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?
                    .collect::<Result<_, _>>()?
            } else {
                Vec::new()
            };
            Ok(Missed { changed, deleted, cursor: Cursor(last) })
        })
        .await
    }
}
