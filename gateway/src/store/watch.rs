//! Changes, in order, for those who watch.

use std::{fmt, str::FromStr, sync::Arc, time::Duration};

use rusqlite::Connection;
use torpor_sandbox::Phase;

use super::{Record, Selector, Store, StoreError, sandboxes, schema};

/// Deletions that are remembered for watchers who were away.
const TOMBSTONES: i64 = 20_000;

/// Rows that a watcher reads at once.
const PIECE: usize = 500;

/// One committed change.
#[derive(Clone, Debug)]
pub struct Change {
    /// Its number.
    pub number: u64,
    /// The record after it; of a deletion, the last one.
    pub record: Arc<Record>,
    /// The record went away.
    pub gone: bool,
    /// The phase that it has ended, and how long that was; none: it is in the same one.
    pub ended: Option<(Phase, Duration)>,
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

/// Where a watcher reads on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since {
    /// It has seen everything up to here.
    Cursor(Cursor),
    /// It is being shown what there is.
    Snapshot {
        /// Rows that last changed up to here were shown.
        shown: u64,
        /// The number of the last change when the first of them was read; none: nothing was read yet.
        begun: Option<u64>,
    },
}

impl Since {
    /// From nothing on.
    pub const START: Self = Self::Snapshot { shown: 0, begun: None };
}

/// Which sandboxes a watcher wants.
#[derive(Clone, Debug)]
pub enum Wanted {
    /// This one.
    Id(String),
    /// Those with these labels.
    Labels(Selector),
}

impl Wanted {
    /// Whether this is one of them.
    pub fn has(&self, record: &Record) -> bool {
        match self {
            Self::Id(id) => id == record.id.as_str(),
            Self::Labels(selector) => selector.chooses(record),
        }
    }
}

/// A piece of what a watcher has missed.
#[derive(Debug)]
pub struct Missed {
    /// Present states of what has changed, in the order of their last changes.
    pub changed: Vec<Record>,
    /// Id, name and number of what was deleted.
    pub deleted: Vec<(String, String, u64)>,
    /// Up to here.
    pub cursor: Cursor,
    /// Where the next piece begins, if there is one.
    pub next: Option<Since>,
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
    /// The next piece of what changed of the wanted rows, and of what was deleted. What changes meanwhile comes (again) in
    /// a later piece.
    ///
    /// # Errors
    /// `CursorTooOld` when deletions that the watcher has not heard of were forgotten.
    pub async fn changes_since(self: &Arc<Self>, since: Since, wanted: Wanted) -> Result<Missed, StoreError> {
        self.read(move |conn| {
            // One snapshot: what is read belongs together.
            let snapshot = conn.unchecked_transaction()?;
            let forgotten =
                schema::meta(&snapshot, "forgotten")?.and_then(|n| n.parse().ok()).unwrap_or(0_u64);
            let last = last_change(&snapshot)?;
            // Deletions after `heard` are told.
            let (after, heard) = match since {
                Since::Cursor(Cursor(number)) => (number, number),
                Since::Snapshot { shown, begun } => (shown, begun.unwrap_or(last)),
            };
            if heard < forgotten || heard > last {
                return Err(StoreError::CursorTooOld);
            }
            let rows = sandboxes::changed_after(&snapshot, &wanted, after, PIECE)?;
            let more = rows.len() == PIECE;
            let until = rows.last().map(|row| row.change).filter(|_| more).unwrap_or(last);
            let mut deleted: Vec<(String, String, u64)> = snapshot
                .prepare_cached(
                    "SELECT id, name, change FROM tombstones WHERE change > ?1 AND change <= ?2 ORDER BY change",
                )?
                .query_map([after.max(heard), until], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?
                .collect::<Result<_, _>>()?;
            // Of one whose labels were changed, only those hear who want it no longer.
            deleted.retain(|(id, _, _)| !sandboxes::load(&snapshot, id).is_ok_and(|there| wanted.has(&there)));
            let changed = rows.into_iter().filter_map(|row| row.record).collect();
            let next = match since {
                _ if !more => None,
                Since::Cursor(_) => Some(Since::Cursor(Cursor(until))),
                Since::Snapshot { .. } => Some(Since::Snapshot { shown: until, begun: Some(heard) }),
            };
            Ok(Missed { changed, deleted, cursor: Cursor(until), next })
        })
        .await
    }
}
