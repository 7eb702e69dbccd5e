//! The only SQL: sandboxes, leases, history and request ids in one SQLite database.
//!
//! WAL mode with `synchronous=FULL`: what was acknowledged survives a power failure. One thread writes and commits in
//! groups: whatever has queued up while a commit was on its way to the disk goes into the next one. Readers have
//! connections of their own and never wait for a writer.

mod exposed;
mod foreign;
mod leases;
mod lock;
mod ping;
mod recent;
mod requests;
pub mod rescue;
mod rows;
mod sandboxes;
mod schema;
mod spec;
mod templates;
mod tokens;
mod update;
mod watch;
mod workspaces;

use std::{
    os::unix::fs::PermissionsExt as _,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use rusqlite::{Connection, OpenFlags};
use tokio::sync::{Semaphore, broadcast, oneshot};
use torpor_sandbox::{
    Refusal, SandboxId,
    failpoint::{Injected, hit},
};

pub use exposed::{Exposed, NewExposed};
pub use foreign::{Foreign, Kind, Listing, NewObject, Object, Problem, Rest};
pub use leases::PoolLimits;
pub use lock::StateLock;
pub use requests::RequestKey;
pub use sandboxes::{Applied, NewSandbox, Page, Scope, Selector, Transition, page_token};
pub use templates::{Template, TemplateKey, template_token};
pub use tokens::{Rights, Token};
pub use watch::{Change, Cursor, Missed, Since, Wanted};
pub use workspaces::{Member, Role, Workspace};

use crate::{
    byid::ById,
    metrics::{self, Phases},
};

use recent::Recent;

/// Readers at once.
const READERS: usize = 4;
/// Jobs in one commit.
const GROUP: usize = 256;
/// Jobs that may wait for the writer; more wait in their callers.
const QUEUE: usize = 4096;
/// Requests of clients that may wait for the writer; more are refused. It writes some thousands in a second.
const MOST_WAITING: usize = 4096;
const BUSY: Duration = Duration::from_secs(10);
/// How often, at most, the reserve for a full disk is looked at.
const RESERVE_CHECK: Duration = Duration::from_secs(60);

/// A sandbox as it is written.
#[derive(Clone, Debug)]
pub struct Record {
    /// For ever.
    pub id: SandboxId,
    /// Unique among those that live: with its workspace ("team/box") outside the default one, as it can be typed.
    pub name: String,
    /// Grows with every change; compare-and-swap is on it.
    pub version: u64,
    /// The user's.
    pub labels: std::collections::BTreeMap<String, String>,
    /// The user's.
    pub annotations: std::collections::BTreeMap<String, String>,
    /// What was asked for.
    pub spec: torpor_sandbox::SandboxSpec,
    /// Where it is.
    pub state: torpor_sandbox::State,
    /// When it was asked for.
    pub created: SystemTime,
    /// When its phase was reached.
    pub since: SystemTime,
    /// Number of its last change among all changes; what watch cursors count.
    pub change: u64,
    /// Order of creation; what page tokens count.
    pub seq: u64,
}

/// What went wrong in the store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// No such sandbox.
    #[error("no sandbox '{0}'")]
    NotFound(String),
    /// The state directory is somebody else's, and others may look into it.
    #[error(
        "the state directory {} has mode {mode:o} and belongs to uid {owner}, so that it can't be closed to others, and it holds secrets: name a folder of its own below it, state_dir = \"{}\", or make it this user's (chown)",
        path.display(),
        path.join("state").display()
    )]
    OpenToOthers {
        /// The state directory.
        path: std::path::PathBuf,
        /// Its mode.
        mode: u32,
        /// Its owner.
        owner: u32,
    },
    /// The name is in use.
    #[error("a sandbox named '{0}' exists already")]
    NameTaken(String),
    /// The caller's version is not the present one.
    #[error("version {expected} of sandbox '{name}' is stale: it is at version {found}")]
    Stale {
        /// Its name.
        name: String,
        /// The caller's.
        expected: u64,
        /// The present one.
        found: u64,
    },
    /// The lifecycle says no.
    #[error("sandbox '{name}': {refusal}")]
    Refused {
        /// Its name.
        name: String,
        /// Why.
        refusal: Refusal,
    },
    /// It is on its way out.
    #[error("sandbox '{0}' is being deleted")]
    Deleting(String),
    /// The host listens there for another port already.
    #[error("{host} is the host's address of {} already", held_by(.holder.as_ref()))]
    HostTaken {
        /// The address.
        host: std::net::SocketAddr,
        /// Whose it is, and which port of that sandbox; none: it is no business of the one who asks.
        holder: Option<(String, u16)>,
    },
    /// No more ports of one sandbox.
    #[error("sandbox '{name}' has {most} exposed ports already, which is the most")]
    TooManyPorts {
        /// Its name.
        name: String,
        /// How many are possible.
        most: u64,
    },
    /// No such workspace.
    #[error("no workspace '{0}'")]
    NoWorkspace(String),
    /// The name is in use.
    #[error("a workspace named '{0}' exists already")]
    WorkspaceTaken(String),
    /// It isn't empty.
    #[error("workspace '{name}' has {sandboxes} sandboxes; delete them first")]
    WorkspaceInUse {
        /// Its name.
        name: String,
        /// How many.
        sandboxes: u64,
    },
    /// A bound of the gateway.
    #[error("there are {most} {what} already, which is the most")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many are possible.
        most: u64,
    },
    /// Of what is kept for clients of another interface.
    #[error(transparent)]
    Foreign(#[from] foreign::Problem),
    /// No such template.
    #[error("no template '{0}'")]
    NoTemplate(String),
    /// The name is in use.
    #[error("a template named '{0}' exists already")]
    TemplateTaken(String),
    /// The caller's version is not the present one.
    #[error("version {expected} of template '{name}' is stale: it is at version {found}")]
    StaleTemplate {
        /// Its name.
        name: String,
        /// The caller's.
        expected: u64,
        /// The present one.
        found: u64,
    },
    /// A request id that was used for something else.
    #[error("request id '{0}' was used for another request")]
    RequestReused(String),
    /// No slot, memory or address is left.
    #[error("{0}")]
    Exhausted(String),
    /// More than there is.
    #[error("{0}")]
    NeverFits(String),
    /// A page token or cursor that is not ours.
    #[error("{0}")]
    BadToken(String),
    /// A cursor from before what is still known.
    #[error("the cursor is too old: watch again without one")]
    CursorTooOld,
    /// Another gateway has the state directory.
    #[error("state directory '{}' is in use by another gateway{}; stop that one first, or give --state-dir another folder", dir.display(), holder.as_deref().map(|h| format!(" ({h})")).unwrap_or_default())]
    InUse {
        /// The folder.
        dir: PathBuf,
        /// What the lock file says of the holder.
        holder: Option<String>,
    },
    /// Made by a later version.
    #[error("the database has schema {found}, this gateway knows up to {known}: use a newer torpor")]
    Newer {
        /// In the file.
        found: usize,
        /// Here.
        known: usize,
    },
    /// The file is damaged.
    #[error(
        "database '{path}' is damaged: {detail}; put a copy back (torpor admin restore FILE), or make it anew from the folders of the sandboxes (torpor admin rebuild --force): the disks under sandboxes/ are kept"
    )]
    Damaged {
        /// The file.
        path: String,
        /// SQLite's finding.
        detail: String,
    },
    /// A row that can't be read.
    #[error("sandbox row {id}: {what} is not readable: {source}")]
    Row {
        /// Its id.
        id: String,
        /// Which column.
        what: &'static str,
        /// Why.
        source: serde_json::Error,
    },
    /// SQLite.
    #[error("database: {0}")]
    Sqlite(#[from] rusqlite::Error),
    /// A file.
    #[error("{action} '{}': {source}", path.display())]
    Io {
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// More is asked for at once than can be written in a useful time.
    #[error("the gateway has more to write than it can take on: {0} requests wait; try again in a moment")]
    Overloaded(usize),
    /// A test's.
    #[error(transparent)]
    Injected(#[from] Injected),
    /// The writer has ended.
    #[error("the database is closed")]
    Closed,
}

fn held_by(holder: Option<&(String, u16)>) -> String {
    match holder {
        Some((name, port)) => format!("port {port} of sandbox '{name}'"),
        None => "a sandbox of another workspace".to_owned(),
    }
}

type Completion = Box<dyn FnOnce(Result<(), String>) + Send>;
type Job = Box<dyn FnOnce(&Connection, &mut Vec<Change>) -> (bool, Completion) + Send>;

/// The store.
pub struct Store {
    jobs: Mutex<Option<mpsc::SyncSender<Job>>>,
    writer: Mutex<Option<thread::JoinHandle<()>>>,
    readers: Mutex<Vec<Connection>>,
    permits: Semaphore,
    /// For drivers, which ask from threads of their own.
    ledger: Mutex<Connection>,
    changes: broadcast::Sender<Change>,
    /// Those who wait for a change of one sandbox.
    listeners: Arc<ById<Change>>,
    recent: Arc<Recent>,
    /// Phases that sandboxes have left since this was opened.
    pub phases: Arc<Phases>,
    /// Requests that wait for the writer.
    waiting: AtomicUsize,
    /// Attempts to write for those who ask whether it is possible.
    pings: ping::Pings,
    limits: PoolLimits,
    /// Given back by `close`: somebody may still hold the store then.
    lock: Mutex<Option<StateLock>>,
}

impl Store {
    /// Opens or makes the database in `dir`, and holds `dir` against a second gateway.
    ///
    /// # Errors
    /// In use, damaged, made by a later version, or not accessible.
    pub fn open(dir: &Path, limits: PoolLimits) -> Result<Self, StoreError> {
        Self::open_in_groups(dir, limits, GROUP)
    }

    /// As [`Store::open`]; at most `group` changes share a commit.
    ///
    /// # Errors
    /// As there.
    pub fn open_in_groups(dir: &Path, limits: PoolLimits, group: usize) -> Result<Self, StoreError> {
        let io = |action| move |source| StoreError::Io { action, path: dir.to_owned(), source };
        std::fs::create_dir_all(dir).map_err(io("make"))?;
        close_to_others(dir)?;
        let lock = StateLock::acquire(dir)?;
        let path = dir.join("torpor.db");
        let conn = connect(&path, true)?;
        check(&conn, &path)?;
        schema::migrate(&conn)?;
        leases::count(&conn)?;
        if !schema::keep_reserve(&conn, &path)? {
            tracing::warn!(
                "no space for the database's reserve: free some, or lifecycle verbs may fail on a full disk"
            );
        }
        let readers = (0..READERS).map(|_| connect(&path, false)).collect::<Result<_, _>>()?;
        let ledger = Mutex::new(connect(&path, false)?);
        let (jobs, queue) = mpsc::sync_channel(QUEUE);
        let (changes, _) = broadcast::channel(4096);
        let listeners = Arc::new(ById::default());
        let recent = Arc::new(Recent::default());
        let phases = Arc::new(metrics::phases());
        let publish = Publisher {
            all: changes.clone(),
            listeners: listeners.clone(),
            recent: recent.clone(),
            phases: phases.clone(),
        };
        let writer = thread::Builder::new()
            .name("store-writer".to_owned())
            .spawn({
                let path = path.clone();
                move || write_in_groups(&conn, &path, &queue, &publish, group.max(1))
            })
            .map_err(|source| StoreError::Io { action: "start the writer of", path, source })?;
        Ok(Self {
            jobs: Mutex::new(Some(jobs)),
            writer: Mutex::new(Some(writer)),
            readers: Mutex::new(readers),
            permits: Semaphore::new(READERS),
            ledger,
            changes,
            listeners,
            recent,
            phases,
            waiting: AtomicUsize::new(0),
            pings: ping::Pings::default(),
            limits,
            lock: Mutex::new(Some(lock)),
        })
    }

    /// Every change from now on. A receiver that lags reads on with [`Store::changes_after`].
    pub fn subscribe(&self) -> broadcast::Receiver<Change> {
        self.changes.subscribe()
    }

    /// Changes of one sandbox from now on: what others do wakes nobody who waits for this one.
    pub fn subscribe_to(&self, id: &SandboxId) -> broadcast::Receiver<Change> {
        self.listeners.subscribe(id)
    }

    /// Requests of clients that wait for the writer.
    pub fn queue(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    /// Commits what is queued and closes the database.
    pub fn close(&self) {
        drop(self.jobs.lock().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(writer) = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take()
            && writer.join().is_err()
        {
            tracing::error!("the database's writer panicked");
        }
        drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// As [`Store::write`], for what clients ask: refused when too many wait already, instead of made to wait for ever.
    async fn write_if_possible<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Connection, &mut Vec<Change>) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let waiting = Waiting::among(&self.waiting, MOST_WAITING).map_err(StoreError::Overloaded)?;
        let done = self.write(job).await;
        drop(waiting);
        done
    }

    /// Runs `job` in a transaction and returns once it is on the disk. The job runs even if the caller goes away.
    async fn write<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Connection, &mut Vec<Change>) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (answer, answered) = oneshot::channel();
        let job: Job = Box::new(move |conn, changes| {
            let result = job(conn, changes);
            let keep = result.is_ok();
            let completion: Completion = Box::new(move |committed| {
                let result = match (result, committed) {
                    (Ok(_), Err(cause)) => Err(StoreError::Sqlite(rusqlite::Error::SqliteFailure(
                        rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_IOERR),
                        Some(format!("commit failed: {cause}")),
                    ))),
                    (result, _) => result,
                };
                // Nobody waits any more: the work is done all the same.
                let _ = answer.send(result);
            });
            (keep, completion)
        });
        let sender =
            self.jobs.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or(StoreError::Closed)?;
        match sender.try_send(job) {
            Ok(()) => {}
            Err(mpsc::TrySendError::Full(job)) => {
                // Back-pressure without blocking the runtime's threads.
                let sent = tokio::task::spawn_blocking(move || sender.send(job)).await;
                sent.map_err(|_| StoreError::Closed)?.map_err(|_| StoreError::Closed)?;
            }
            Err(mpsc::TrySendError::Disconnected(_)) => return Err(StoreError::Closed),
        }
        answered.await.map_err(|_| StoreError::Closed)?
    }

    /// Runs `query` on a connection for reading.
    async fn read<T: Send + 'static>(
        self: &std::sync::Arc<Self>,
        query: impl FnOnce(&Connection) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let store = self.clone();
        let _permit = self.permits.acquire().await.map_err(|_| StoreError::Closed)?;
        let done = tokio::task::spawn_blocking(move || store.read_now(query)).await;
        done.map_err(|_| StoreError::Closed)?
    }

    /// As `read`, for callers that are on a blocking thread already.
    fn read_now<T>(&self, query: impl FnOnce(&Connection) -> Result<T, StoreError>) -> Result<T, StoreError> {
        let pooled = self.readers.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let conn = pooled.ok_or(StoreError::Closed)?;
        let result = query(&conn);
        self.readers.lock().unwrap_or_else(PoisonError::into_inner).push(conn);
        result
    }
}

fn connect(path: &Path, write: bool) -> Result<Connection, StoreError> {
    let access = if write {
        OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE
    } else {
        OpenFlags::SQLITE_OPEN_READ_ONLY
    };
    let conn = Connection::open_with_flags(path, access | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    conn.busy_timeout(BUSY)?;
    if write {
        conn.pragma_update(None, "journal_mode", "WAL")?;
        conn.pragma_update(None, "synchronous", "FULL")?;
    }
    conn.pragma_update(None, "foreign_keys", true)?;
    conn.set_prepared_statement_cache_capacity(64);
    Ok(conn)
}

fn check(conn: &Connection, path: &Path) -> Result<(), StoreError> {
    let damaged = |detail: String| StoreError::Damaged { path: path.display().to_string(), detail };
    let found: Result<String, _> = conn.query_row("PRAGMA quick_check(1)", [], |row| row.get(0));
    match found {
        Ok(text) if text == "ok" => Ok(()),
        Ok(text) => Err(damaged(text)),
        Err(error) => Err(damaged(error.to_string())),
    }
}

/// Tells of what is committed.
struct Publisher {
    all: broadcast::Sender<Change>,
    listeners: Arc<ById<Change>>,
    recent: Arc<Recent>,
    phases: Arc<Phases>,
}

impl Publisher {
    fn publish(&self, change: Change) {
        if let Some((from, time)) = change.ended {
            let to = if change.gone { "" } else { change.record.state.phase.as_str() };
            self.phases.observe([from.as_str().into(), to.into()], time);
        }
        self.recent.put(&change);
        self.listeners.send(&change.record.id, || change.clone());
        // Nobody listens.
        let _ = self.all.send(change);
    }
}

/// One of those that wait, counted to its drop.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    /// # Errors
    /// How many there are, when they are `most` already.
    fn among(count: &'a AtomicUsize, most: usize) -> Result<Self, usize> {
        let before = count.fetch_add(1, Ordering::SeqCst);
        let this = Self(count);
        if before < most { Ok(this) } else { Err(before) }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn write_in_groups(
    conn: &Connection,
    path: &Path,
    queue: &mpsc::Receiver<Job>,
    publish: &Publisher,
    group: usize,
) {
    let mut reserve_checked = Instant::now();
    while let Ok(first) = queue.recv() {
        let mut completions = Vec::new();
        let mut changes = Vec::new();
        let begun = hit("store.begin").map_err(|e| e.to_string());
        let begun = begun.and_then(|()| conn.execute_batch("BEGIN IMMEDIATE").map_err(|e| e.to_string()));
        let mut next = Some(first);
        let mut jobs = 0;
        while let Some(job) = next {
            completions.extend(run_job(conn, job, &mut changes));
            jobs += 1;
            next = if jobs < group { queue.try_recv().ok() } else { None };
        }
        let ready = begun.and_then(|()| hit("store.commit").map_err(|e| e.to_string()));
        let committed = ready.and_then(|()| conn.execute_batch("COMMIT").map_err(|e| e.to_string()));
        if committed.is_err() && !conn.is_autocommit() {
            // Only fails when SQLite has rolled back already.
            let _ = conn.execute_batch("ROLLBACK");
        }
        // Only a place to end at: what is committed is committed.
        let _ = hit("store.committed");
        if committed.is_ok() {
            changes.into_iter().for_each(|change| publish.publish(change));
        }
        for completion in completions {
            completion(committed.clone());
        }
        let _ = hit("store.answered");
        if reserve_checked.elapsed() >= RESERVE_CHECK {
            reserve_checked = Instant::now();
            if !schema::keep_reserve(conn, path).unwrap_or(false) {
                tracing::warn!("no space for the database's reserve: free some");
            }
        }
    }
}

/// One job in a savepoint: its failure undoes its own writes only. A job that panics answers nobody, and the writer
/// goes on.
fn run_job(conn: &Connection, job: Job, changes: &mut Vec<Change>) -> Option<Completion> {
    let before = changes.len();
    // Without the group's transaction (it could not begin, or SQLite has rolled it back) a savepoint would commit by
    // itself what its caller is then told has failed.
    let in_group = !conn.is_autocommit();
    let guarded = conn.execute_batch("SAVEPOINT job").is_ok();
    let ran = catch_unwind(AssertUnwindSafe(|| job(conn, changes)));
    let (keep, completion) = match ran {
        Ok((keep, completion)) => (keep && in_group, Some(completion)),
        Err(_) => (false, None),
    };
    if !keep {
        changes.truncate(before);
    }
    if guarded {
        let end = if keep { "RELEASE job" } else { "ROLLBACK TO job; RELEASE job" };
        if let Err(error) = conn.execute_batch(end) {
            changes.truncate(before);
            let (text, completion) = (error.to_string(), completion?);
            return Some(Box::new(move |committed| completion(committed.and(Err(text)))));
        }
    }
    completion
}

/// Environments hold secrets: nobody but the owner looks into the state. A folder that is somebody else's can't be closed,
/// as the root of a cluster's volume is, which belongs to root.
fn close_to_others(dir: &Path) -> Result<(), StoreError> {
    let io = |action| move |source| StoreError::Io { action, path: dir.to_owned(), source };
    let found = std::fs::metadata(dir).map_err(io("read"))?;
    let mode = found.permissions().mode() & 0o7777;
    if mode & 0o077 == 0 {
        return Ok(());
    }
    match std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700)) {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            let owner = std::os::unix::fs::MetadataExt::uid(&found);
            Err(StoreError::OpenToOthers { path: dir.to_owned(), mode, owner })
        }
        done => done.map_err(io("set the mode of")),
    }
}

/// Milliseconds since 1970.
fn millis(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |d| i64::try_from(d.as_millis()).unwrap_or(i64::MAX))
}

fn from_millis(ms: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(u64::try_from(ms).unwrap_or_default())
}

fn now() -> i64 {
    millis(SystemTime::now())
}
