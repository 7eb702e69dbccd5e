//! The database as a whole: copied while it is used, put back, and made anew from the folders of sandboxes.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use rusqlite::{Connection, OpenFlags};
use torpor_netpool::Loan;
use torpor_sandbox::{Phase, Run, SandboxId, State};

use super::{BUSY, NewSandbox, StoreError, check, connect, leases, now, sandboxes, schema, workspaces};

/// The database below a state directory.
const FILE: &str = "torpor.db";
/// What lies beside it while it is used.
const BESIDE: [&str; 2] = ["torpor.db-wal", "torpor.db-shm"];
/// The next database, until it takes the place of the present one.
const PART: &str = "torpor.db.part";

/// A new id of a gateway.
pub fn gateway_id() -> String {
    SandboxId::generate().as_str().replacen("sb-", "gw-", 1)
}

/// A sandbox that was found without a row.
#[derive(Debug)]
pub struct Found {
    /// What its folder says.
    pub new: NewSandbox,
    /// What its compute has borrowed, if it runs; with the run.
    pub loan: Option<Loan>,
    /// It runs, or did when it was looked at.
    pub runs: bool,
    /// The run there is; of one at rest, larger than any run it may have had.
    pub run: Run,
}

fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::Io { action, path, source }
}

/// Where the database of a state directory is.
pub fn path(state_dir: &Path) -> PathBuf {
    state_dir.join(FILE)
}

fn open_existing(path: &Path) -> Result<Connection, StoreError> {
    fs::metadata(path).map_err(io("read", path))?;
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(path, flags)?;
    conn.busy_timeout(BUSY)?;
    Ok(conn)
}

/// How many sandboxes a database file knows.
///
/// # Errors
/// It is damaged, made by a later version, or no database of ours.
pub fn rows(path: &Path) -> Result<u64, StoreError> {
    let conn = open_existing(path)?;
    check(&conn, path)?;
    schema::known(&conn)?;
    Ok(conn.query_row("SELECT count(*) FROM sandboxes", [], |row| row.get(0))?)
}

/// The sandboxes that a database file knows.
///
/// # Errors
/// It can't be read.
pub fn ids(path: &Path) -> Result<BTreeSet<SandboxId>, StoreError> {
    let conn = open_existing(path)?;
    let mut statement = conn.prepare("SELECT id FROM sandboxes")?;
    let ids: Vec<String> = statement.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
    Ok(ids.iter().filter_map(|id| id.parse().ok()).collect())
}

/// Writes a copy of the database to a new file, whether or not a gateway uses it: what was committed when it began. Only
/// its owner may read the copy, and it is on the disk when this returns.
///
/// # Errors
/// The file is there already, or the database can't be read.
pub fn copy(state_dir: &Path, to: &Path) -> Result<u64, StoreError> {
    let conn = open_existing(&path(state_dir))?;
    // Empty, it is taken by SQLite; and nobody else may look into it from the first moment.
    let made = File::options().write(true).create_new(true).mode(0o600).open(to);
    made.map_err(io("make", to))?;
    let copied = conn
        .execute("VACUUM INTO ?1", [to.to_string_lossy()])
        .map_err(StoreError::from)
        .and_then(|_| File::open(to).and_then(|file| file.sync_all()).map_err(io("flush", to)))
        // Its name, too.
        .and_then(|()| match to.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            Some(folder) => File::open(folder).and_then(|it| it.sync_all()).map_err(io("flush", folder)),
            None => File::open(".").and_then(|it| it.sync_all()).map_err(io("flush", to)),
        });
    if let Err(error) = copied {
        // Half a copy is none.
        let _ = fs::remove_file(to);
        return Err(error);
    }
    fs::metadata(to).map(|found| found.len()).map_err(io("read", to))
}

/// Moves the database away with what lies beside it; where to. None: there was none.
///
/// # Errors
/// The files'; what was moved already is moved back then.
pub fn move_away(state_dir: &Path) -> Result<Option<PathBuf>, StoreError> {
    let there = |name: &str| state_dir.join(name).exists();
    if ![FILE, BESIDE[0], BESIDE[1]].into_iter().any(there) {
        return Ok(None);
    }
    let folder = state_dir.join(format!("torpor.db.away-{}", now()));
    fs::DirBuilder::new().mode(0o700).create(&folder).map_err(io("make", &folder))?;
    // The log first: without it the database is an older one, but with another's log it would be none.
    let names: Vec<&str> = [BESIDE[0], BESIDE[1], FILE].into_iter().filter(|name| there(name)).collect();
    for (number, name) in names.iter().enumerate() {
        let from = state_dir.join(name);
        if let Err(error) = fs::rename(&from, folder.join(name)) {
            for moved in names[..number].iter().rev() {
                fs::rename(folder.join(moved), state_dir.join(moved)).map_err(io("move back", &folder))?;
            }
            return Err(io("move", &from)(error));
        }
    }
    Ok(Some(folder))
}

/// The file that [`take_place`] gives its name.
pub fn part(state_dir: &Path) -> PathBuf {
    state_dir.join(PART)
}

/// Clears away a next database that never took its place.
pub fn remove_part(state_dir: &Path) {
    for end in ["", "-wal", "-shm", "-journal"] {
        // It is mostly not there.
        let _ = fs::remove_file(state_dir.join(format!("{PART}{end}")));
    }
}

/// Makes the next database from a copy. It is on the disk when this returns.
///
/// # Errors
/// The files'. Nothing is left of it then.
pub fn prepare(state_dir: &Path, copy: &Path) -> Result<(), StoreError> {
    let part = part(state_dir);
    let mut source = File::open(copy).map_err(io("open", copy))?;
    let mut write = || {
        let made = File::options().write(true).create_new(true).mode(0o600).open(&part);
        let mut target = made.map_err(io("make", &part))?;
        io::copy(&mut source, &mut target).map_err(io("write", &part))?;
        target.sync_all().map_err(io("flush", &part))
    };
    remove_part(state_dir);
    write().inspect_err(|_| remove_part(state_dir))
}

/// Gives the next database the name of the one that has been moved away.
///
/// # Errors
/// The files'.
pub fn take_place(state_dir: &Path) -> Result<(), StoreError> {
    let (part, to) = (part(state_dir), path(state_dir));
    // An old log beside the new database would be worse than none of both.
    sync(state_dir)?;
    fs::rename(&part, &to).map_err(io("rename", &part))?;
    // Without this it may be back under its first name after a crash of the host, and can be renamed then.
    sync(state_dir)
}

fn sync(folder: &Path) -> Result<(), StoreError> {
    File::open(folder).and_then(|file| file.sync_all()).map_err(io("flush", folder))
}

/// Makes the next database, of these sandboxes: what runs is Ready with what it has borrowed, all else is Stopped. It is on
/// the disk when this returns.
///
/// # Errors
/// The database's. Nothing is left of it then.
pub fn make(state_dir: &Path, found: Vec<Found>) -> Result<(), StoreError> {
    remove_part(state_dir);
    fill(&part(state_dir), found).inspect_err(|_| remove_part(state_dir))
}

fn fill(path: &Path, found: Vec<Found>) -> Result<(), StoreError> {
    let conn = connect(path, true)?;
    schema::migrate(&conn)?;
    leases::count(&conn)?;
    conn.execute_batch("BEGIN IMMEDIATE")?;
    // With an id of its own it is no longer one that was just made beside old disks.
    schema::set_meta(&conn, "gateway_id", &gateway_id())?;
    for one in found {
        let id = one.new.id.clone();
        workspaces::ensure(&conn, &one.new.spec.workspace)?;
        let record = sandboxes::insert(&conn, one.new)?;
        if let Some(loan) = &one.loan {
            leases::insert(&conn, loan)?;
        }
        let phase = if one.runs { Phase::Ready } else { Phase::Stopped };
        let run = one.loan.as_ref().map_or(one.run, |loan| Run(loan.run));
        let state = State { phase, run, created: true, ..State::new() };
        sandboxes::swap(&conn, record, state, "found without a record")?;
        tracing::info!(%id, %phase, "has a record again");
    }
    // One file, without a log beside it.
    conn.execute_batch("COMMIT; PRAGMA wal_checkpoint(TRUNCATE); PRAGMA journal_mode = DELETE;")?;
    drop(conn);
    File::open(path).and_then(|file| file.sync_all()).map_err(io("flush", path))
}
