//! From here into a sandbox.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    path::Path,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use tokio::runtime::Handle;
use torpor_agent_files::{self as local, Begin, Entry, FileError, Kind, Place, Sink};
use torpor_sdk::{Client, Upload, v1};

use super::{Plan, Report, bytes_of, is_missing, prefix_differs, same_time};
use crate::{
    commands::Outcome,
    failure::{FAILED, Failure},
    progress::Progress,
};

/// Bytes read from standard input at once.
const PIECE: usize = 128 << 10;

/// Where in the sandbox the entries go.
struct Goal {
    folder: String,
    /// Name of the copied thing there. Empty: what is in it goes into the folder itself.
    name: Vec<u8>,
    /// The folder is made when it is missing.
    parents: bool,
}

/// Copies a file or folder.
pub async fn files(plan: &Plan<'_>, path: &Path) -> Outcome {
    let client = plan.session.connect().await?;
    let unreadable =
        |error: io::Error| Failure::new(FAILED, format!("'{}' can't be read: {error}", path.display()));
    let found = fs::canonicalize(path).map_err(unreadable)?;
    let is_folder = fs::metadata(&found).map_err(unreadable)?.is_dir();
    let goal = goal(plan, &client, path, is_folder).await?;
    let mut fresh = false;
    let report = loop {
        let progress = Progress::new(plan.session.shows_progress(), &plan.remote.sandbox);
        progress.step("copying");
        match attempt(plan, &client, &found, is_folder, &goal, progress, fresh).await {
            Err(failure) if plan.resume && !fresh && prefix_differs(&failure) => fresh = true,
            Err(failure) => return Err(failure),
            Ok(report) => break report,
        }
    };
    Report {
        sandbox: plan.remote.sandbox.clone(),
        direction: "to",
        source: path.display().to_string(),
        target: format!("{}:{}", plan.remote.sandbox, plan.remote.path),
        ..report
    }
    .print(plan.session)?;
    Ok(0)
}

async fn goal(plan: &Plan<'_>, client: &Client, path: &Path, is_folder: bool) -> Result<Goal, Failure> {
    let remote = &plan.remote;
    let own_name = path.file_name().filter(|_| !ends_in_dot(path));
    if is_folder && own_name.is_none() {
        return Ok(Goal { folder: remote.path.clone(), name: Vec::new(), parents: true });
    }
    let inside = match client.stat_file(&remote.sandbox, &remote.path).await {
        Ok(there) => {
            let directory = i32::from(v1::FileKind::Directory);
            there.kind == directory || there.leads_to == directory
        }
        Err(error) if is_missing(&error) => !is_folder && remote.path.ends_with('/'),
        Err(error) => return Err(error.into()),
    };
    let (folder, name) = remote.split();
    match (inside, own_name, name) {
        (true, Some(own), _) => {
            let name = bytes_of(own).to_vec();
            Ok(Goal { folder: remote.path.clone(), name, parents: plan.parents })
        }
        (false, _, Some(name)) => {
            Ok(Goal { folder: folder.to_owned(), name: name.as_bytes().to_vec(), parents: plan.parents })
        }
        _ => Err(Failure::usage(format!("'{}' gives the copy no name", remote.path))),
    }
}

/// `a/.`, which the standard library takes for `a`.
fn ends_in_dot(path: &Path) -> bool {
    let bytes = bytes_of(path.as_os_str());
    bytes == b"." || bytes.ends_with(b"/.") || bytes.ends_with(b"/./")
}

async fn attempt(
    plan: &Plan<'_>,
    client: &Client,
    found: &Path,
    is_folder: bool,
    goal: &Goal,
    progress: Progress,
    fresh: bool,
) -> Result<Report, Failure> {
    let upload = client.upload(start(plan, goal, true)).await;
    let (place, path) = match found.parent().zip(found.file_name()).filter(|_| !is_folder) {
        Some((parent, name)) => (Place::open(bytes_of(parent.as_os_str()))?, bytes_of(name).to_vec()),
        None => (Place::open(bytes_of(found.as_os_str()))?, b".".to_vec()),
    };
    let mut out = Out {
        handle: Handle::current(),
        upload,
        client: client.clone(),
        sandbox: plan.remote.sandbox.clone(),
        folder: goal.folder.clone(),
        resume: plan.resume,
        fresh,
        single: !is_folder,
        done: 0,
        total: 0,
        progress,
        report: Report::default(),
    };
    let name = goal.name.clone();
    let (out, read) = tokio::task::spawn_blocking(move || {
        let read = local::read(&place, &path, &name, &mut out);
        (out, read)
    })
    .await
    .map_err(|error| Failure::new(FAILED, format!("the copy ended: {error}")))?;
    match read {
        Ok(()) | Err(Stop::Answered) => {}
        Err(Stop::Failed(failure)) => return Err(*failure),
    }
    let made = out.upload.finish().await?;
    let mut report = out.report;
    report.files = made.files;
    report.directories = made.directories;
    report.symlinks = made.symlinks;
    report.bytes = made.bytes;
    Ok(report)
}

fn start(plan: &Plan<'_>, goal: &Goal, keep_partial: bool) -> v1::UploadStart {
    v1::UploadStart {
        sandbox: plan.remote.sandbox.clone(),
        path: goal.folder.clone(),
        parents: goal.parents,
        user: plan.user.clone(),
        keep_partial,
    }
}

/// Sends what is read. It runs in a thread of its own; the runtime's thread does the sending.
struct Out {
    handle: Handle,
    upload: Upload,
    client: Client,
    sandbox: String,
    folder: String,
    resume: bool,
    fresh: bool,
    single: bool,
    done: u64,
    total: u64,
    progress: Progress,
    report: Report,
}

enum Stop {
    /// The gateway has answered before everything was sent.
    Answered,
    Failed(Box<Failure>),
}

impl From<FileError> for Stop {
    fn from(error: FileError) -> Self {
        Self::Failed(Box::new(error.into()))
    }
}

impl Out {
    fn unless_answered(sent: bool) -> Result<(), Stop> {
        if sent { Ok(()) } else { Err(Stop::Answered) }
    }

    /// What an earlier try has left of a file: none when it is complete.
    fn earlier(&self, entry: &Entry, file: &mut File) -> Result<Option<(u64, Vec<u8>)>, Stop> {
        let whole = Some((0, Vec::new()));
        let Ok(path) = std::str::from_utf8(&entry.path) else { return Ok(whole) };
        let path = format!("{}/{path}", self.folder.trim_end_matches('/'));
        let there = match self.handle.block_on(self.client.stat_file(&self.sandbox, &path)) {
            Ok(there) => there,
            Err(error) if is_missing(&error) => return Ok(whole),
            Err(error) => return Err(Stop::Failed(Box::new(error.into()))),
        };
        let size = entry.size.unwrap_or(0);
        let same_time = same_time(there.modified.as_ref(), entry.modified);
        if there.kind() == v1::FileKind::File && there.size == size && same_time {
            return Ok(None);
        }
        let kept = there.partial_bytes.unwrap_or(0);
        if kept == 0 || kept > size || self.fresh {
            return Ok(whole);
        }
        Ok(Some(local::digest(file, kept, &entry.path)?.map_or((0, Vec::new()), |digest| (kept, digest))))
    }
}

impl Sink for Out {
    type Error = Stop;

    fn begin(&mut self, mut entry: Entry, file: Option<&mut File>) -> Result<Begin, Stop> {
        if entry.path.is_empty() {
            return Ok(Begin::From(0));
        }
        if let Some(file) = file {
            self.total = entry.size.unwrap_or(0);
            if self.resume {
                match self.earlier(&entry, file)? {
                    Some((offset, digest)) => (entry.offset, entry.prefix_sha256) = (offset, digest),
                    None => {
                        self.report.unchanged += 1;
                        return Ok(Begin::Skip);
                    }
                }
            }
            // What is written to it meanwhile would not fit the size that was promised.
            entry.size = None;
            if self.single {
                self.done = entry.offset;
            }
        }
        let from = entry.offset;
        Self::unless_answered(self.handle.block_on(self.upload.entry(to_wire(entry))))?;
        Ok(Begin::From(from))
    }

    fn data(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        self.done += bytes.len() as u64;
        self.progress.bytes(self.done, if self.single { self.total } else { 0 });
        Self::unless_answered(self.handle.block_on(self.upload.data(Bytes::copy_from_slice(bytes))))
    }

    fn end(&mut self) -> Result<(), Stop> {
        Self::unless_answered(self.handle.block_on(self.upload.file_end()))
    }

    fn skipped(&mut self, path: &[u8], why: &str) -> Result<(), Stop> {
        self.report.skip(path, why);
        Ok(())
    }
}

fn to_wire(entry: Entry) -> v1::FileEntry {
    let modified = entry.modified.and_then(|(seconds, nanos)| {
        // What is older than 1970 comes without its time.
        let since = Duration::new(u64::try_from(seconds).ok()?, nanos);
        Some(SystemTime::UNIX_EPOCH.checked_add(since)?.into())
    });
    let kind = match entry.kind {
        Kind::File => v1::FileKind::File,
        Kind::Folder => v1::FileKind::Directory,
        Kind::Link => v1::FileKind::Symlink,
        Kind::Other => v1::FileKind::Other,
    };
    v1::FileEntry {
        path: entry.path.into(),
        kind: kind.into(),
        mode: entry.mode,
        modified,
        size: entry.size,
        target: entry.target.into(),
        offset: entry.offset,
        prefix_sha256: entry.prefix_sha256.into(),
    }
}

/// Copies standard input into a file.
pub async fn stream(plan: &Plan<'_>) -> Outcome {
    let client = plan.session.connect().await?;
    let (folder, name) = plan.remote.split();
    let Some(name) = name.filter(|_| !plan.remote.path.ends_with('/')) else {
        return Err(Failure::usage(format!("'{}' is no name for a file", plan.remote.path)));
    };
    let goal = Goal { folder: folder.to_owned(), name: name.as_bytes().to_vec(), parents: plan.parents };
    let upload = client.upload(start(plan, &goal, false)).await;
    let entry = to_wire(Entry::new(goal.name.clone(), Kind::File, 0o644));
    let progress = Progress::new(plan.session.shows_progress(), &plan.remote.sandbox);
    progress.step("copying");
    let handle = Handle::current();
    let (upload, read) = tokio::task::spawn_blocking(move || {
        let read = read_input(&handle, &upload, entry, &progress);
        (upload, read)
    })
    .await
    .map_err(|error| Failure::new(FAILED, format!("the copy ended: {error}")))?;
    read.map_err(|error| Failure::new(FAILED, format!("standard input can't be read: {error}")))?;
    let made = upload.finish().await?;
    Report {
        sandbox: plan.remote.sandbox.clone(),
        direction: "to",
        source: "-".to_owned(),
        target: format!("{}:{}", plan.remote.sandbox, plan.remote.path),
        files: made.files,
        bytes: made.bytes,
        ..Report::default()
    }
    .print(plan.session)?;
    Ok(0)
}

fn read_input(handle: &Handle, upload: &Upload, entry: v1::FileEntry, progress: &Progress) -> io::Result<()> {
    let mut more = handle.block_on(upload.entry(entry));
    let mut buffer = vec![0; PIECE];
    let mut done = 0;
    while more {
        match io::stdin().lock().read(&mut buffer) {
            Ok(0) => {
                handle.block_on(upload.file_end());
                break;
            }
            Ok(count) => {
                done += count as u64;
                progress.bytes(done, 0);
                let bytes = Bytes::copy_from_slice(buffer.get(..count).unwrap_or_default());
                more = handle.block_on(upload.data(bytes));
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
