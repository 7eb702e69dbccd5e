//! Request ids of callers: a retry returns the first result.

use std::sync::Arc;

use rusqlite::{
    Connection, OptionalExtension as _,
    types::{FromSql, ToSql},
};
use torpor_sandbox::{id::clip, spec::DEFAULT_WORKSPACE};

use super::{
    Applied, Record, Store, StoreError, now,
    sandboxes::{expect, load},
};

/// How long a request id is remembered, milliseconds.
const REQUESTS_MS: i64 = 24 * 3600 * 1000;

/// Parts the place of an id from the id, which holds no such character.
const PART: char = '\u{1f}';

/// A caller's own id of its request: a retry with it returns the first result.
#[derive(Clone, Debug)]
pub struct RequestKey {
    /// The id, with its place before it where that is not the default workspace.
    pub id: String,
    /// The verb: an id is good for one.
    pub verb: &'static str,
    /// Stands for everything that was asked for: an id is good for one request.
    pub fingerprint: String,
}

impl RequestKey {
    /// An id of `place`.
    pub fn new(place: &str, id: &str, verb: &'static str, fingerprint: String) -> Self {
        let id = if place == DEFAULT_WORKSPACE { id.to_owned() } else { format!("{place}{PART}{id}") };
        Self { id, verb, fingerprint }
    }

    /// As its caller wrote it.
    fn said(&self) -> &str {
        self.id.rsplit(PART).next().unwrap_or_default()
    }
}

/// A table of requests: id, verb, fingerprint, what came of it, and when.
pub(super) struct Requests {
    /// Its name.
    pub table: &'static str,
    /// The column of what came of it.
    pub result: &'static str,
}

impl Requests {
    /// What came of a request that was made before.
    pub fn find<T: FromSql>(&self, conn: &Connection, key: &RequestKey) -> Result<Option<T>, StoreError> {
        let Self { table, result } = self;
        let sql = format!("SELECT verb, fingerprint, {result} FROM {table} WHERE request_id = ?1");
        let found: Option<(String, String, T)> = conn
            .prepare_cached(&sql)?
            .query_row([&key.id], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
            .optional()?;
        match found {
            Some((verb, fingerprint, result)) if verb == key.verb && fingerprint == key.fingerprint => {
                Ok(Some(result))
            }
            Some(_) => Err(StoreError::RequestReused(clip(key.said()))),
            None => Ok(None),
        }
    }

    /// Writes what came of a request; a few of those from long ago are forgotten.
    pub fn note(&self, conn: &Connection, key: &RequestKey, result: impl ToSql) -> Result<(), StoreError> {
        let (table, at) = (self.table, now());
        let sql = format!("INSERT INTO {table} VALUES (?1, ?2, ?3, ?4, ?5)");
        conn.prepare_cached(&sql)?.execute((&key.id, key.verb, &key.fingerprint, result, at))?;
        let sql = format!(
            "DELETE FROM {table} WHERE request_id IN (SELECT request_id FROM {table} WHERE at_ms < ?1 LIMIT 8)"
        );
        conn.prepare_cached(&sql)?.execute([at - REQUESTS_MS])?;
        Ok(())
    }
}

const REQUESTS: Requests = Requests { table: "requests", result: "sandbox_id" };

/// What this request id was used for before.
pub(super) fn replayed(conn: &Connection, key: &RequestKey) -> Result<Option<String>, StoreError> {
    REQUESTS.find(conn, key)
}

/// Writes what a request id was used for: a sandbox's id, another key, or nothing.
pub(super) fn remember(conn: &Connection, key: &RequestKey, what: &str) -> Result<(), StoreError> {
    REQUESTS.note(conn, key, what)
}

/// What a request to change a sandbox begins with.
pub(super) enum Begun {
    /// It was made before: what that came to.
    Before(Applied),
    /// It is new, and its id is remembered: the record to change.
    New(Box<Record>),
}

/// Begins a request to change a sandbox, which is named by `key` and at the version `expected`, where one is.
pub(super) fn begin(
    conn: &Connection,
    key: &str,
    expected: Option<u64>,
    request: Option<&RequestKey>,
) -> Result<Begun, StoreError> {
    if let Some(id) = request.map(|request| replayed(conn, request)).transpose()?.flatten() {
        let record = Arc::new(load(conn, &id)?);
        return Ok(Begun::Before(Applied { record, changed: false, gone: false, replayed: true }));
    }
    let record = load(conn, key)?;
    expect(&record, expected)?;
    if let Some(request) = request {
        remember(conn, request, record.id.as_str())?;
    }
    Ok(Begun::New(Box::new(record)))
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
