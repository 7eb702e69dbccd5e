//! Request ids of callers: a retry returns the first result.

use std::sync::Arc;

use rusqlite::{Connection, OptionalExtension as _};
use torpor_sandbox::id::clip;

use super::{Applied, Store, StoreError, now, sandboxes::load};

/// How long a request id is remembered, milliseconds.
const REQUESTS_MS: i64 = 24 * 3600 * 1000;

/// A caller's own id of its request: a retry with it returns the first result.
#[derive(Clone, Debug)]
pub struct RequestKey {
    /// The id.
    pub id: String,
    /// The verb: an id is good for one.
    pub verb: &'static str,
    /// Stands for everything that was asked for: an id is good for one request.
    pub fingerprint: String,
}

/// What this request id was used for before.
pub(super) fn replayed(conn: &Connection, key: &RequestKey) -> Result<Option<String>, StoreError> {
    let found: Option<(String, String, String)> = conn
        .prepare_cached("SELECT verb, fingerprint, sandbox_id FROM requests WHERE request_id = ?1")?
        .query_row([&key.id], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
        .optional()?;
    match found {
        Some((verb, fingerprint, id)) if verb == key.verb && fingerprint == key.fingerprint => Ok(Some(id)),
        Some(_) => Err(StoreError::RequestReused(clip(&key.id))),
        None => Ok(None),
    }
}

/// What a request came to that was made before; none when it wasn't.
pub(super) fn repeated(conn: &Connection, key: Option<&RequestKey>) -> Result<Option<Applied>, StoreError> {
    let id = key.map(|key| replayed(conn, key)).transpose()?.flatten();
    let record = id.map(|id| load(conn, &id)).transpose()?;
    Ok(record.map(|record| Applied { record: Arc::new(record), changed: false, gone: false, replayed: true }))
}

/// Writes what a request id was used for: a sandbox's id, another key, or nothing.
pub(super) fn remember(conn: &Connection, key: &RequestKey, what: &str) -> Result<(), StoreError> {
    let at = now();
    conn.prepare_cached("INSERT INTO requests VALUES (?1, ?2, ?3, ?4, ?5)")?.execute((
        &key.id,
        key.verb,
        &key.fingerprint,
        what,
        at,
    ))?;
    conn.prepare_cached(
        "DELETE FROM requests WHERE request_id IN (SELECT request_id FROM requests WHERE at_ms < ?1 LIMIT 8)",
    )?
    .execute([at - REQUESTS_MS])?;
    Ok(())
}

impl Store {
    /// The id that a request id was used for, if it was used for this verb.
    ///
    /// # Errors
    /// `RequestReused`, or the database's.
    pub async fn replayed(self: &Arc<Self>, key: RequestKey) -> Result<Option<String>, StoreError> {
        self.read(move |conn| replayed(conn, &key)).await
    }

    /// Writes that a request was about something that isn't there: a retry must not find what is made later.
    ///
    /// # Errors
    /// `RequestReused`, or the database's.
    pub async fn note_absent(&self, key: RequestKey) -> Result<(), StoreError> {
        self.write_if_possible(move |conn, _| match replayed(conn, &key)? {
            Some(_) => Ok(()),
            None => remember(conn, &key, ""),
        })
        .await
    }
}
