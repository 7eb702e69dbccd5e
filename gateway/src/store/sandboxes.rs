//! Rows of sandboxes: made, read, swapped; with their history and the request ids of their callers.

use std::{
    collections::{BTreeMap, BTreeSet},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use rusqlite::{Connection, Row};
use torpor_sandbox::{
    Event, Phase, SandboxId, SandboxSpec, State,
    id::clip,
    lifecycle::{Next, next},
};

use super::{
    Change, Record, Store, StoreError, Wanted,
    exposed::{self, NewExposed},
    from_millis, leases, now,
    requests::{Begun, RequestKey, begin, remember, replayed},
    rows::{json, parsed},
    watch, workspaces,
};

/// It is looked at for every row and, of a watch, for every change; bytes.
const LONGEST_SELECTOR: usize = 4096;
/// Rows that a listing reads at once.
const BATCH: usize = 1000;
/// A run that was Ready for so long has lasted.
const LASTING: Duration = Duration::from_secs(600);
/// Phase changes that are kept of one sandbox.
const HISTORY: i64 = 500;

/// What a create writes.
#[derive(Clone, Debug)]
pub struct NewSandbox {
    /// For ever.
    pub id: SandboxId,
    /// Unique: qualified by its workspace.
    pub name: String,
    /// The user's.
    pub labels: BTreeMap<String, String>,
    /// The user's.
    pub annotations: BTreeMap<String, String>,
    /// What was asked for.
    pub spec: SandboxSpec,
}

/// What came of an event.
#[derive(Clone, Debug)]
pub struct Applied {
    /// The record afterwards; of a deletion, the last one.
    pub record: Arc<Record>,
    /// It was written.
    pub changed: bool,
    /// It is gone.
    pub gone: bool,
    /// Nothing was asked: the request id had been used for the same request before.
    pub replayed: bool,
}

/// A phase change.
#[derive(Clone, Debug)]
pub struct Transition {
    /// Order.
    pub seq: u64,
    /// When.
    pub at: std::time::SystemTime,
    /// From.
    pub from: Option<Phase>,
    /// To; none: the record went away.
    pub to: Option<Phase>,
    /// Who or what wanted it.
    pub why: String,
    /// Time spent in `from`.
    pub after: Duration,
    /// The run.
    pub run: u64,
    /// The record's version.
    pub version: u64,
}

/// One page of a listing.
#[derive(Clone, Debug)]
pub struct Page<T> {
    /// Its rows.
    pub rows: Vec<T>,
    /// Where the next one begins.
    pub next: Option<String>,
}

/// A label selector: "team=blue,stage!=prod,gpu,!old".
#[derive(Clone, Debug, Default)]
pub struct Selector {
    terms: Vec<Term>,
    scope: Scope,
}

/// The workspaces that somebody may look into.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// Every one.
    #[default]
    All,
    /// These.
    In(BTreeSet<String>),
}

impl Scope {
    /// Whether this workspace is one of them.
    pub fn has(&self, workspace: &str) -> bool {
        match self {
            Self::All => true,
            Self::In(these) => these.contains(workspace),
        }
    }

    fn single(&self) -> Option<&str> {
        match self {
            Self::In(these) if these.len() == 1 => these.first().map(String::as_str),
            _ => None,
        }
    }
}

#[derive(Clone, Debug)]
enum Term {
    Is(String, String),
    IsNot(String, String),
    Has(String),
    HasNot(String),
}

impl FromStr for Selector {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        if text.len() > LONGEST_SELECTOR {
            let message = format!("label selector: at most {LONGEST_SELECTOR} bytes");
            return Err(StoreError::BadToken(message));
        }
        let terms = text.split(',').map(str::trim).filter(|t| !t.is_empty()).map(|term| {
            let parsed = if let Some((key, value)) = term.split_once("!=") {
                Term::IsNot(key.trim().to_owned(), value.trim().to_owned())
            } else if let Some((key, value)) = term.split_once('=') {
                Term::Is(key.trim().to_owned(), value.trim_start_matches('=').trim().to_owned())
            } else if let Some(key) = term.strip_prefix('!') {
                Term::HasNot(key.trim().to_owned())
            } else {
                Term::Has(term.to_owned())
            };
            let key = match &parsed {
                Term::Is(k, _) | Term::IsNot(k, _) | Term::Has(k) | Term::HasNot(k) => k,
            };
            let fits = !key.is_empty() && !key.contains(|c: char| c.is_whitespace() || c.is_control());
            let wrong = || {
                StoreError::BadToken(format!(
                    "label selector: '{}' is not key=value, key!=value, key or !key",
                    term.escape_debug()
                ))
            };
            fits.then_some(parsed).ok_or_else(wrong)
        });
        Ok(Self { terms: terms.collect::<Result<_, _>>()?, scope: Scope::All })
    }
}

impl Selector {
    /// The same, of these workspaces only.
    #[must_use]
    pub fn within(self, scope: Scope) -> Self {
        Self { scope, ..self }
    }

    /// A label that every chosen row has, if there is one.
    fn narrow(&self) -> Option<(&str, &str)> {
        self.terms.iter().find_map(|term| match term {
            Term::Is(key, value) => Some((key.as_str(), value.as_str())),
            _ => None,
        })
    }

    /// Whether few rows are read that are not chosen.
    fn narrows(&self) -> bool {
        self.narrow().is_some()
            || (self.terms.is_empty() && (self.scope == Scope::All || self.scope.single().is_some()))
    }

    /// Whether this sandbox is chosen.
    pub fn chooses(&self, record: &Record) -> bool {
        self.scope.has(&record.spec.workspace) && self.matches(&record.labels)
    }

    /// Whether something of this workspace may be chosen.
    pub fn reaches(&self, workspace: &str) -> bool {
        self.scope.has(workspace)
    }

    /// Whether these labels are chosen.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.terms.iter().all(|term| match term {
            Term::Is(key, value) => labels.get(key) == Some(value),
            Term::IsNot(key, value) => labels.get(key) != Some(value),
            Term::Has(key) => labels.contains_key(key),
            Term::HasNot(key) => !labels.contains_key(key),
        })
    }
}

const COLUMNS: &str =
    "id, seq, name, version, state, spec, labels, created_ms, since_ms, change, annotations";

/// Rows are read as text first, so that one that can't be read is named.
fn raw(row: &Row<'_>) -> rusqlite::Result<(Record, [String; 4])> {
    let id: String = row.get(0)?;
    let parsed = id.parse::<SandboxId>().map_err(|e| {
        rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, Box::new(e))
    })?;
    let record = Record {
        id: parsed,
        seq: row.get(1)?,
        name: row.get(2)?,
        version: row.get(3)?,
        labels: BTreeMap::new(),
        annotations: BTreeMap::new(),
        spec: empty_spec(),
        state: State::new(),
        created: from_millis(row.get(7)?),
        since: from_millis(row.get(8)?),
        change: row.get(9)?,
    };
    Ok((record, [row.get(4)?, row.get(5)?, row.get(6)?, row.get(10)?]))
}

pub(super) fn empty_spec() -> SandboxSpec {
    SandboxSpec {
        stop_grace: Duration::ZERO,
        machine: String::new(),
        ..SandboxSpec::of("", "", "", torpor_sandbox::Resources { cpus: 0, memory_bytes: 0, disk_bytes: 0 })
    }
}

fn finish(
    (mut record, [state, spec, labels, annotations]): (Record, [String; 4]),
) -> Result<Record, StoreError> {
    record.state = parsed(&record.id, "state", &state)?;
    record.spec = parsed(&record.id, "spec", &spec)?;
    record.labels = parsed(&record.id, "labels", &labels)?;
    record.annotations = parsed(&record.id, "annotations", &annotations)?;
    Ok(record)
}

/// The rows that a condition chooses.
fn select(
    conn: &Connection,
    condition: &str,
    params: impl rusqlite::Params,
) -> Result<Vec<Record>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM sandboxes {condition}");
    let mut statement = conn.prepare_cached(&sql)?;
    let rows = statement.query_map(params, raw)?;
    rows.map(|row| finish(row?)).collect()
}

/// A row of a listing.
pub(super) struct Listed {
    seq: u64,
    pub(super) change: u64,
    /// None: it can't be read.
    pub(super) record: Option<Record>,
}

/// As `select`, for listings: a row that can't be read is named in the log and hides no other.
fn select_readable(
    conn: &Connection,
    condition: &str,
    params: impl rusqlite::Params,
) -> Result<Vec<Listed>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM sandboxes {condition}");
    let mut statement = conn.prepare_cached(&sql)?;
    let readable = statement.query_map(params, raw)?.map(|row| {
        let row = row?;
        let (seq, change) = (row.0.seq, row.0.change);
        let record = finish(row).inspect_err(|error| tracing::error!(%error, "left out of a listing")).ok();
        Ok(Listed { seq, change, record })
    });
    readable.collect()
}

/// By id, or by name.
pub(super) fn load(conn: &Connection, key: &str) -> Result<Record, StoreError> {
    let column = if key.parse::<SandboxId>().is_ok() { "WHERE id = ?1" } else { "WHERE name = ?1" };
    select(conn, column, [key])?.pop().ok_or_else(|| StoreError::NotFound(clip(key)))
}

/// At most `size` rows that changed after `change`, in the order of their last changes. A label narrows what is read.
pub(super) fn changed_after(
    conn: &Connection,
    wanted: &Wanted,
    change: u64,
    size: usize,
) -> Result<Vec<Listed>, StoreError> {
    let selector = match wanted {
        Wanted::Id(id) => return select_readable(conn, "WHERE id = ?1 AND change > ?2", (id, change)),
        Wanted::Labels(selector) => selector,
    };
    match selector.narrow() {
        Some((key, value)) => select_readable(
            conn,
            "WHERE seq IN (SELECT seq FROM labels WHERE key = ?1 AND value = ?2) AND change > ?3
             ORDER BY change LIMIT ?4",
            (key, value, change, size),
        ),
        None => select_readable(conn, "WHERE change > ?1 ORDER BY change LIMIT ?2", (change, size)),
    }
}

/// At most `size` rows after the one with this number, in the order of creation.
fn batch_of(
    conn: &Connection,
    selector: &Selector,
    after: u64,
    size: usize,
) -> Result<Vec<Listed>, StoreError> {
    match selector.narrow() {
        Some((key, value)) => select_readable(
            conn,
            "WHERE seq IN (SELECT seq FROM labels WHERE key = ?1 AND value = ?2 AND seq > ?3 ORDER BY seq LIMIT ?4)
             ORDER BY seq",
            (key, value, after, size),
        ),
        None => match selector.scope.single() {
            Some(workspace) => select_readable(
                conn,
                "WHERE workspace = ?1 AND seq > ?2 ORDER BY seq LIMIT ?3",
                (workspace, after, size),
            ),
            None => select_readable(conn, "WHERE seq > ?1 ORDER BY seq LIMIT ?2", (after, size)),
        },
    }
}

pub(super) fn insert(conn: &Connection, new: NewSandbox) -> Result<Record, StoreError> {
    workspaces::expect(conn, &new.spec.workspace)?;
    let taken = conn.prepare_cached("SELECT 1 FROM sandboxes WHERE name = ?1")?.exists([&new.name])?;
    if taken {
        return Err(StoreError::NameTaken(new.name));
    }
    let (at, change) = (now(), watch::next_change(conn)?);
    let record = Record {
        id: new.id,
        seq: change,
        name: new.name,
        version: 1,
        labels: new.labels,
        annotations: new.annotations,
        spec: new.spec,
        state: State::new(),
        created: from_millis(at),
        since: from_millis(at),
        change,
    };
    let sql = "INSERT INTO sandboxes VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)";
    conn.prepare_cached(sql)?.execute((
        record.id.as_str(),
        record.seq,
        &record.name,
        record.version,
        record.state.phase.as_str(),
        json(&record.id, "state", &record.state)?,
        json(&record.id, "spec", &record.spec)?,
        json(&record.id, "labels", &record.labels)?,
        &record.spec.image_digest,
        at,
        at,
        change,
        json(&record.id, "annotations", &record.annotations)?,
    ))?;
    note(conn, &record, None, Some(Phase::Provisioning), "create requested", 0)?;
    Ok(record)
}

fn note(
    conn: &Connection,
    record: &Record,
    from: Option<Phase>,
    to: Option<Phase>,
    why: &str,
    after_ms: i64,
) -> Result<(), StoreError> {
    conn.prepare_cached(
        "INSERT INTO history (sandbox_id, at_ms, from_phase, to_phase, why, after_ms, run, version)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
    )?
    .execute((
        record.id.as_str(),
        now(),
        from.map_or("", Phase::as_str),
        to.map_or("", Phase::as_str),
        why,
        after_ms,
        record.state.run.0,
        record.version,
    ))?;
    conn.prepare_cached(
        "DELETE FROM history WHERE sandbox_id = ?1 AND seq <=
         (SELECT seq FROM history WHERE sandbox_id = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)",
    )?
    .execute((record.id.as_str(), HISTORY))?;
    Ok(())
}

/// Writes the state that an event leads to. `release` gives back the loan in the same transaction.
pub(super) fn swap(
    conn: &Connection,
    mut record: Record,
    state: State,
    why: &str,
) -> Result<Record, StoreError> {
    let (from, at) = (record.state.phase, now());
    let moved = from != state.phase;
    let after = (at - super::millis(record.since)).max(0);
    record.version += 1;
    record.change = watch::next_change(conn)?;
    record.state = state;
    if moved {
        record.since = from_millis(at);
    }
    conn.prepare_cached(
        "UPDATE sandboxes SET version = ?2, phase = ?3, state = ?4, since_ms = ?5, change = ?6 WHERE id = ?1",
    )?
    .execute((
        record.id.as_str(),
        record.version,
        record.state.phase.as_str(),
        json(&record.id, "state", &record.state)?,
        super::millis(record.since),
        record.change,
    ))?;
    if moved {
        note(conn, &record, Some(from), Some(record.state.phase), why, after)?;
    }
    Ok(record)
}

fn remove(conn: &Connection, record: &Record) -> Result<u64, StoreError> {
    let change = watch::next_change(conn)?;
    conn.prepare_cached("DELETE FROM history WHERE sandbox_id = ?1")?.execute([record.id.as_str()])?;
    conn.prepare_cached("DELETE FROM sandboxes WHERE id = ?1")?.execute([record.id.as_str()])?;
    watch::bury(conn, record, change, now())?;
    Ok(change)
}

/// Which version the caller believes in.
pub(super) fn expect(record: &Record, expected: Option<u64>) -> Result<(), StoreError> {
    match expected {
        Some(version) if version != record.version => {
            Err(StoreError::Stale { name: record.name.clone(), expected: version, found: record.version })
        }
        _ => Ok(()),
    }
}

fn apply(
    conn: &Connection,
    changes: &mut Vec<Change>,
    record: Record,
    event: &Event,
    why: &str,
    console: String,
) -> Result<Applied, StoreError> {
    let refused = |refusal| StoreError::Refused { name: record.name.clone(), refusal };
    let to = next(&record.state, event, record.spec.restart).map_err(refused)?;
    let from = record.state.phase;
    let after = from_millis(now()).duration_since(record.since).unwrap_or_default();
    let (record, number, gone) = match to {
        Next::Same => {
            return Ok(Applied { record: Arc::new(record), changed: false, gone: false, replayed: false });
        }
        Next::To(mut state) => {
            if let Some(failure) = state.failure.as_mut().filter(|f| f.console.is_empty()) {
                failure.console = console;
            }
            let record = swap(conn, record, state, why)?;
            let number = record.change;
            (record, number, false)
        }
        Next::Gone => {
            let number = remove(conn, &record)?;
            (record, number, true)
        }
    };
    let record = Arc::new(record);
    let ended = (gone || record.state.phase != from).then_some((from, after));
    changes.push(Change { number, record: record.clone(), gone, ended });
    Ok(Applied { record, changed: true, gone, replayed: false })
}

impl Store {
    /// Writes a new sandbox with its exposed ports. A retry with the same request id returns the first one's record.
    ///
    /// # Errors
    /// `NameTaken`, `HostTaken`, `TooManyPorts`, `RequestReused`, `NotFound` (the first one was deleted meanwhile), or the database's.
    pub async fn create(
        &self,
        new: NewSandbox,
        ports: Vec<NewExposed>,
        request: Option<RequestKey>,
    ) -> Result<Arc<Record>, StoreError> {
        self.write_if_possible(move |conn, changes| {
            if let Some(key) = &request {
                if let Some(id) = replayed(conn, key)? {
                    return load(conn, &id).map(Arc::new);
                }
                remember(conn, key, new.id.as_str())?;
            }
            let record = Arc::new(insert(conn, new)?);
            ports.iter().try_for_each(|port| exposed::insert(conn, &record, port))?;
            changes.push(Change { number: record.change, record: record.clone(), gone: false, ended: None });
            Ok(record)
        })
        .await
    }

    /// Writes what a user or policy asks for. `key` is a name or id; `expected` the version it must be at.
    ///
    /// # Errors
    /// `NotFound`, `Stale`, `Refused`, `RequestReused`, or the database's.
    pub async fn request(
        &self,
        key: String,
        event: Event,
        why: String,
        expected: Option<u64>,
        request: Option<RequestKey>,
    ) -> Result<Applied, StoreError> {
        self.write_if_possible(move |conn, changes| {
            let record = match begin(conn, &key, expected, request.as_ref())? {
                Begun::Before(before) => return Ok(before),
                Begun::New(record) => *record,
            };
            apply(conn, changes, record, &event, &why, String::new())
        })
        .await
    }

    /// Writes what happened to a sandbox, whatever version it is at.
    ///
    /// # Errors
    /// `NotFound`, or the database's.
    pub async fn note(&self, key: String, event: Event, why: String) -> Result<Applied, StoreError> {
        self.write(move |conn, changes| apply(conn, changes, load(conn, &key)?, &event, &why, String::new()))
            .await
    }

    /// Writes what happened, if the record is still at `version`; `release` gives back its loan as well, the compute
    /// having been seen to be gone; `console` goes with a failure that has none.
    ///
    /// # Errors
    /// `NotFound`, `Stale`, or the database's.
    pub async fn happened(
        &self,
        id: &SandboxId,
        version: u64,
        event: Event,
        why: String,
        release: bool,
        console: String,
    ) -> Result<Applied, StoreError> {
        let id = id.clone();
        self.write(move |conn, changes| {
            let mut record = load(conn, id.as_str())?;
            expect(&record, Some(version))?;
            if release {
                leases::release(conn, &id)?;
            }
            // The table knows no time: what came before a run that lasted slows no restart any more.
            if matches!(event, Event::Ended(_)) && lasted(&record) {
                record.state.streak = 0;
            }
            apply(conn, changes, record, &event, &why, console)
        })
        .await
    }

    /// One sandbox, by name or id.
    ///
    /// # Errors
    /// `NotFound`, or the database's.
    pub async fn get(self: &Arc<Self>, key: &str) -> Result<Record, StoreError> {
        if let Some(record) = key.parse().ok().and_then(|id| self.recent.get(&id)) {
            return Ok(Record::clone(&record));
        }
        let key = key.to_owned();
        self.read(move |conn| load(conn, &key)).await
    }

    /// Sandboxes in the order of their creation.
    ///
    /// # Errors
    /// `BadToken`, or the database's.
    pub async fn list(
        self: &Arc<Self>,
        size: usize,
        token: Option<String>,
        selector: Selector,
    ) -> Result<Page<Record>, StoreError> {
        let mut after = token.as_deref().map(parse_token).transpose()?.unwrap_or_default();
        self.read(move |conn| {
            let mut rows = Vec::with_capacity(size.min(BATCH));
            // One more than the page, so that it can be told whether there is another; all that can be chosen from when
            // few may be.
            let batch_size = if selector.narrows() { (size + 1).min(BATCH) } else { BATCH };
            loop {
                let batch = batch_of(conn, &selector, after, batch_size)?;
                let last = batch.len() < batch_size;
                for row in batch {
                    if rows.len() == size {
                        return Ok(Page { rows, next: Some(page_token(after)) });
                    }
                    after = row.seq;
                    rows.extend(row.record.filter(|record| selector.chooses(record)));
                }
                if last {
                    return Ok(Page { rows, next: None });
                }
            }
        })
        .await
    }

    /// Ids of the sandboxes that a new gateway must look at: whatever is not at rest, or holds a loan.
    ///
    /// # Errors
    /// The database's.
    pub async fn unsettled(self: &Arc<Self>) -> Result<Vec<SandboxId>, StoreError> {
        self.read(|conn| {
            // A turn-round that was not carried out yet is written in a row that is otherwise at rest.
            let sql = "SELECT id FROM sandboxes WHERE phase NOT IN ('Suspended', 'Stopped', 'Completed')
                       OR json_extract(state, '$.then') IS NOT NULL
                       UNION SELECT sandbox_id FROM leases";
            let ids: Vec<String> =
                conn.prepare_cached(sql)?.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
            Ok(ids.into_iter().filter_map(|id| id.parse().ok()).collect())
        })
        .await
    }

    /// Every id.
    ///
    /// # Errors
    /// The database's.
    pub async fn all_ids(self: &Arc<Self>) -> Result<std::collections::BTreeSet<SandboxId>, StoreError> {
        self.read(|conn| {
            let ids: Vec<String> = conn
                .prepare_cached("SELECT id FROM sandboxes")?
                .query_map([], |row| row.get(0))?
                .collect::<Result<_, _>>()?;
            Ok(ids.into_iter().filter_map(|id| id.parse().ok()).collect())
        })
        .await
    }

    /// Ids of the sandboxes in a phase.
    ///
    /// # Errors
    /// The database's.
    pub async fn in_phase(self: &Arc<Self>, phase: Phase) -> Result<Vec<SandboxId>, StoreError> {
        self.read(move |conn| {
            let ids: Vec<String> = conn
                .prepare_cached("SELECT id FROM sandboxes WHERE phase = ?1")?
                .query_map([phase.as_str()], |row| row.get(0))?
                .collect::<Result<_, _>>()?;
            Ok(ids.into_iter().filter_map(|id| id.parse().ok()).collect())
        })
        .await
    }

    /// How many sandboxes there are in each phase that any is in.
    ///
    /// # Errors
    /// The database's.
    pub async fn by_phase(self: &Arc<Self>) -> Result<BTreeMap<String, u64>, StoreError> {
        self.read(|conn| {
            let counts = conn
                .prepare_cached("SELECT phase, count(*) FROM sandboxes GROUP BY phase")?
                .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
                .collect::<Result<_, _>>()?;
            Ok(counts)
        })
        .await
    }

    /// How many sandboxes stand on an image.
    ///
    /// # Errors
    /// The database's.
    pub async fn users_of_image(self: &Arc<Self>, digest: &str) -> Result<u32, StoreError> {
        let digest = digest.to_owned();
        self.read(move |conn| {
            let sql = "SELECT count(*) FROM sandboxes WHERE image = ?1";
            Ok(conn.prepare_cached(sql)?.query_row([&digest], |row| row.get(0))?)
        })
        .await
    }

    /// Phase changes of one sandbox, newest first.
    ///
    /// # Errors
    /// `BadToken`, or the database's.
    pub async fn history(
        self: &Arc<Self>,
        id: &SandboxId,
        size: usize,
        token: Option<String>,
    ) -> Result<Page<Transition>, StoreError> {
        let before = token.as_deref().map(parse_token).transpose()?.unwrap_or(i64::MAX as u64);
        let id = id.clone();
        self.read(move |conn| {
            let sql = "SELECT seq, at_ms, from_phase, to_phase, why, after_ms, run, version FROM history
                       WHERE sandbox_id = ?1 AND seq < ?2 ORDER BY seq DESC LIMIT ?3";
            let mut rows: Vec<Transition> = conn
                .prepare_cached(sql)?
                .query_map((id.as_str(), before, size + 1), transition)?
                .collect::<Result<_, _>>()?;
            let more = rows.len() > size;
            rows.truncate(size);
            let next = rows.last().filter(|_| more).map(|row| page_token(row.seq));
            Ok(Page { rows, next })
        })
        .await
    }

    /// A value that belongs to the whole gateway.
    ///
    /// # Errors
    /// The database's.
    pub async fn meta(self: &Arc<Self>, key: &'static str) -> Result<Option<String>, StoreError> {
        self.read(move |conn| super::schema::meta(conn, key)).await
    }

    /// Sets it.
    ///
    /// # Errors
    /// The database's.
    pub async fn set_meta(&self, key: &'static str, value: String) -> Result<(), StoreError> {
        self.write(move |conn, _| super::schema::set_meta(conn, key, &value)).await
    }
}

fn transition(row: &Row<'_>) -> rusqlite::Result<Transition> {
    let (from, to): (String, String) = (row.get(2)?, row.get(3)?);
    let after: i64 = row.get(5)?;
    Ok(Transition {
        seq: row.get(0)?,
        at: from_millis(row.get(1)?),
        from: Phase::parse(&from),
        to: Phase::parse(&to),
        why: row.get(4)?,
        after: Duration::from_millis(u64::try_from(after).unwrap_or_default()),
        run: row.get(6)?,
        version: row.get(7)?,
    })
}

/// A token for what comes after the row with this number.
pub fn page_token(seq: u64) -> String {
    format!("p1.{seq}")
}

pub(super) fn parse_token(token: &str) -> Result<u64, StoreError> {
    // SQLite's numbers have a sign.
    let number =
        token.strip_prefix("p1.").and_then(|n| n.parse::<i64>().ok()).and_then(|n| u64::try_from(n).ok());
    number.ok_or_else(|| StoreError::BadToken(format!("'{}' is not a page token of ours", clip(token))))
}

/// Whether a run was Ready for long.
fn lasted(record: &Record) -> bool {
    record.state.phase == Phase::Ready && record.since.elapsed().is_ok_and(|time| time >= LASTING)
}
