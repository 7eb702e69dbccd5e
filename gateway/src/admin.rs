//! What an administrator does about the gateway's database: copy it, put it back, make it anew, and find what it doesn't
//! know. Without the gateway's help, as that may not be able to start.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use serde_json::Value;
use torpor_netpool::{CpuSet, Loan, Slot};
use torpor_sandbox::{
    Run, SandboxId, SandboxName, SandboxSpec,
    spec::{DEFAULT_WORKSPACE, qualified},
};

use crate::store::{NewSandbox, StateLock, StoreError, rescue};

/// What can't be done about a database.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdminError {
    /// The database's.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// It holds sandboxes.
    #[error("{} knows {count} sandboxes; nothing was changed. To go by the folders instead: torpor admin rebuild --force (it is moved aside, not removed)", path.display())]
    NotEmpty {
        /// The database.
        path: PathBuf,
        /// Its rows.
        count: u64,
    },
    /// It may hold sandboxes.
    #[error("{} can't be read ({source}); nothing was changed. With a copy: torpor admin restore FILE; without one: torpor admin rebuild --force (it is moved aside, not removed)", path.display())]
    Unreadable {
        /// The database.
        path: PathBuf,
        /// Why.
        source: Box<StoreError>,
    },
    /// What should be put back is not good.
    #[error("{} is not a database that can be put back: {source}; nothing was changed", path.display())]
    BadCopy {
        /// The file.
        path: PathBuf,
        /// Why.
        source: StoreError,
    },
    /// The old database is away, and the new one isn't in its place.
    #[error("the new database can't take its place: {source}. It is {}, complete{}; to end this by hand: mv {} {}", part.display(), old_words(old.as_deref()), part.display(), path.display())]
    Between {
        /// The new database.
        part: PathBuf,
        /// Its place.
        path: PathBuf,
        /// Where the old one is.
        old: Option<PathBuf>,
        /// Why.
        source: Box<StoreError>,
    },
    /// The copy has the name that the next database is written under.
    #[error("{} is the name under which the next database is written; move the copy elsewhere first; nothing was changed", path.display())]
    InTheWay {
        /// The file.
        path: PathBuf,
    },
    /// A folder.
    #[error("read {}: {source}", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

fn old_words(old: Option<&Path>) -> String {
    old.map_or_else(String::new, |folder| format!(", and the old one is in {}", folder.display()))
}

/// What a rebuild came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rebuilt {
    /// Names of sandboxes that run and are Ready again.
    pub ready: Vec<String>,
    /// Names of those that are Stopped.
    pub stopped: Vec<String>,
    /// Folders that could not be used, with the reason.
    pub left_out: Vec<String>,
    /// Where the old database is.
    pub old: Option<PathBuf>,
}

/// Writes a copy of the database to a new file, also while a gateway uses it. The copy's size, bytes.
///
/// # Errors
/// The file is there already, or the database can't be read.
pub fn backup(state_dir: &Path, to: &Path) -> Result<u64, AdminError> {
    Ok(rescue::copy(state_dir, to)?)
}

/// Puts a copy in the place of the database; how many sandboxes it knows, and where the old one is now. No gateway may run.
///
/// # Errors
/// A gateway runs, or the copy is damaged.
pub fn restore(state_dir: &Path, from: &Path) -> Result<(u64, Option<PathBuf>), AdminError> {
    let _lock = StateLock::acquire(state_dir)?;
    let bad = |source| AdminError::BadCopy { path: from.to_owned(), source };
    let count = rescue::rows(from).map_err(bad)?;
    let part = rescue::part(state_dir);
    if fs::canonicalize(&part).is_ok_and(|part| fs::canonicalize(from).is_ok_and(|from| from == part)) {
        return Err(AdminError::InTheWay { path: part });
    }
    rescue::prepare(state_dir, from)?;
    Ok((count, replace(state_dir)?))
}

/// Moves the database away and puts the next one, which is complete, in its place; where the old one is.
fn replace(state_dir: &Path) -> Result<Option<PathBuf>, AdminError> {
    let old = rescue::move_away(state_dir).inspect_err(|_| rescue::remove_part(state_dir))?;
    match rescue::take_place(state_dir) {
        Ok(()) => Ok(old),
        Err(source) => {
            let (part, path, source) = (rescue::part(state_dir), rescue::path(state_dir), Box::new(source));
            Err(AdminError::Between { part, path, old, source })
        }
    }
}

/// Makes the database anew from the folders of sandboxes. Labels and history are lost; what runs goes on. No gateway may run.
///
/// # Errors
/// A gateway runs, or there is a database with rows or one that can't be read, and `force` is not given.
pub fn rebuild(state_dir: &Path, run_dir: &Path, force: bool) -> Result<Rebuilt, AdminError> {
    let _lock = StateLock::acquire(state_dir)?;
    let path = rescue::path(state_dir);
    if path.exists() && !force {
        match rescue::rows(&path) {
            Ok(0) => {}
            Ok(count) => return Err(AdminError::NotEmpty { path, count }),
            Err(source) => return Err(AdminError::Unreadable { path, source: Box::new(source) }),
        }
    }
    let mut rebuilt = Rebuilt::default();
    let (mut found, mut names) = (Vec::new(), BTreeSet::new());
    for place in places(state_dir, run_dir) {
        for id in folders(&place.storage)? {
            match found_in(&place, &id, &mut names) {
                Ok(one) => {
                    let list = if one.runs { &mut rebuilt.ready } else { &mut rebuilt.stopped };
                    list.push(one.new.name.clone());
                    found.push(one);
                }
                Err(why) => rebuilt.left_out.push(format!("{id}: {why}")),
            }
        }
    }
    rescue::make(state_dir, found)?;
    rebuilt.old = replace(state_dir)?;
    Ok(rebuilt)
}

/// Where a driver has the folders of sandboxes.
pub(crate) struct Place {
    /// One for each sandbox, with its spec.
    pub(crate) storage: PathBuf,
    /// The folders of their runs. None: these are noted beside the spec, as they end with no restart of this host.
    pub(crate) runs: Option<PathBuf>,
}

/// Where each driver has them. (The sim driver has none: its world is one file.)
pub(crate) fn places(state_dir: &Path, run_dir: &Path) -> [Place; 4] {
    let of_engine =
        |name| Place { storage: state_dir.join("containers").join(name), runs: Some(run_dir.join(name)) };
    [
        Place { storage: state_dir.join("sandboxes"), runs: Some(run_dir.to_owned()) },
        of_engine("docker"),
        of_engine("podman"),
        Place { storage: state_dir.join("kubernetes"), runs: None },
    ]
}

/// Folders named as sandboxes are, in order; none where there is no such folder.
fn folders(parent: &Path) -> Result<BTreeSet<SandboxId>, AdminError> {
    let failed = |source| AdminError::Folder { path: parent.to_owned(), source };
    let entries = match fs::read_dir(parent) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        Err(error) => return Err(failed(error)),
    };
    let names =
        entries.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>().map_err(failed)?;
    Ok(names.iter().filter_map(|name| name.to_str()?.parse().ok()).collect())
}

fn found_in(place: &Place, id: &SandboxId, names: &mut BTreeSet<String>) -> Result<rescue::Found, String> {
    let path = place.storage.join(id.as_str()).join("spec.json");
    let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let mut spec: SandboxSpec =
        serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?;
    // It is a part of names.
    if spec.workspace.parse::<SandboxName>().is_err() {
        spec.workspace = DEFAULT_WORKSPACE.to_owned();
    }
    let mut name = qualified(&spec.workspace, &spec.hostname);
    if spec.hostname.parse::<SandboxName>().is_err() || names.contains(&name) {
        name = qualified(&spec.workspace, &format!("found-{}", id.as_str().trim_start_matches("sb-")));
    }
    names.insert(name.clone());
    let minutes = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / 60);
    let new =
        NewSandbox { id: id.clone(), name, labels: BTreeMap::new(), annotations: BTreeMap::new(), spec };
    let (loan, run) = match &place.runs {
        Some(runs) => (loan(runs, id), container_run(runs, id)),
        None => (None, pod_run(&place.storage, id)),
    };
    let runs = loan.is_some() || run.is_some();
    Ok(rescue::Found { new, loan, runs, run: run.unwrap_or(Run(minutes)) })
}

/// The run of a pod whose agent has answered; whether it is there still, its driver finds out.
fn pod_run(storage: &Path, id: &SandboxId) -> Option<Run> {
    let text = fs::read_to_string(storage.join(id.as_str()).join("run.json")).ok()?;
    let record: Value = serde_json::from_str(&text).ok()?;
    record["run"].as_u64().filter(|_| record["configured"] == true || record["restored"] == true).map(Run)
}

/// The run of a container that was started in this boot of the host; whether it is there still, its driver finds out.
fn container_run(run_dir: &Path, id: &SandboxId) -> Option<Run> {
    let text = fs::read_to_string(run_dir.join(id.as_str()).join("run.json")).ok()?;
    let record: Value = serde_json::from_str(&text).ok()?;
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let of_this_boot = record["host_boot"].as_str()? == boot.trim();
    record["run"].as_u64().filter(|_| of_this_boot && record["configured"] == true).map(Run)
}

/// What a running VM has borrowed, as the record of its start says; none: it doesn't run.
fn loan(run_dir: &Path, id: &SandboxId) -> Option<Loan> {
    let text = fs::read_to_string(run_dir.join(id.as_str()).join("vm.json")).ok()?;
    let record: Value = serde_json::from_str(&text).ok()?;
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    if record["host_boot"].as_str()? != boot.trim() || !record["process"].is_object() {
        return None;
    }
    let slot = serde_json::from_value::<Slot>(record["net"]["slot"].clone()).ok()?;
    Some(Loan {
        sandbox_id: id.to_string(),
        run: record["run"].as_u64()?,
        slot,
        cpus: record["cpus"].as_str()?.parse::<CpuSet>().ok()?,
        memory_bytes: record["memory_bytes"].as_u64()?,
    })
}

/// Something that belongs to no record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orphan {
    /// Its id.
    pub id: SandboxId,
    /// The folder of its disk, if there is one.
    pub disk: Option<PathBuf>,
    /// The folder of its run, if it runs or has run.
    pub run: Option<PathBuf>,
    /// What it has in a cluster, in words.
    pub objects: Option<String>,
}

/// Disks and runs on this host that the database below `state_dir` doesn't know.
///
/// # Errors
/// The database or a folder can't be read.
pub fn orphans(state_dir: &Path, run_dir: &Path) -> Result<Vec<Orphan>, AdminError> {
    // Folders first: a sandbox that is made meanwhile has a record before it has a folder.
    let mut all = Vec::new();
    for place in places(state_dir, run_dir) {
        let with_run = place.runs.as_deref().map(folders).transpose()?.unwrap_or_default();
        all.push((folders(&place.storage)?, with_run, place));
    }
    let known = rescue::ids(&rescue::path(state_dir))?;
    let mut orphans = Vec::new();
    for (with_disk, with_run, place) in all {
        let unknown = with_disk.union(&with_run).filter(|id| !known.contains(id));
        orphans.extend(unknown.map(|id| {
            let runs = place.runs.as_ref().filter(|_| with_run.contains(id));
            let disk = with_disk.contains(id).then(|| place.storage.join(id.as_str()));
            let objects = disk.as_deref().filter(|_| place.runs.is_none()).map(|folder| objects(folder, id));
            Orphan { id: id.clone(), disk, run: runs.map(|runs| runs.join(id.as_str())), objects }
        }));
    }
    Ok(orphans)
}

/// Where the objects of a sandbox are in a cluster, as its folder says.
fn objects(folder: &Path, id: &SandboxId) -> String {
    let text = fs::read_to_string(folder.join("place.json")).unwrap_or_default();
    let place: Value = serde_json::from_str(&text).unwrap_or_default();
    let namespace = place["namespace"].as_str().map_or_else(|| "-A".to_owned(), |name| format!("-n {name}"));
    format!("kubectl {namespace} get sandboxes,pods,pvc -l torpor.dev/sandbox={id}")
}
