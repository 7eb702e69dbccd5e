//! From a sandbox to here. What comes from there is not trusted: it stays beneath the folder that was named.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use torpor_agent_files::{self as local, Entry, Kind, Options, Place, Writer};
use torpor_sdk::{Client, Download, Error, FilePiece, v1};

use super::{Plan, Report, bytes_of, prefix_differs, same_time};
use crate::{
    commands::Outcome,
    failure::{FAILED, Failure},
    progress::Progress,
};

/// Where here the entries go.
struct Goal {
    folder: PathBuf,
    /// Name of the copied thing there. Empty: what is in it goes into the folder itself.
    name: Vec<u8>,
}

/// Copies a file or folder.
pub async fn files(plan: &Plan<'_>, path: &Path) -> Outcome {
    let client = plan.session.connect().await?;
    let goal = goal(plan, path)?;
    let progress = Progress::new(plan.session.shows_progress(), &plan.remote.sandbox);
    progress.step("copying");
    let mut copy = Copy {
        client,
        plan,
        writer: writer(&goal)?,
        goal,
        progress,
        done: 0,
        total: 0,
        report: Report {
            sandbox: plan.remote.sandbox.clone(),
            direction: "from",
            source: format!("{}:{}", plan.remote.sandbox, plan.remote.path),
            target: path.display().to_string(),
            ..Report::default()
        },
    };
    if plan.resume {
        copy.resume().await?
    } else {
        copy.whole().await?
    }
    let Copy { writer, mut report, progress, .. } = copy;
    let totals = writer.finish()?;
    drop(progress);
    report.files += totals.files;
    report.directories += totals.folders;
    report.symlinks += totals.links;
    report.bytes += totals.bytes;
    report.print(plan.session)?;
    Ok(0)
}

fn goal(plan: &Plan<'_>, path: &Path) -> Result<Goal, Failure> {
    let (_, own_name) = plan.remote.split();
    // "dir/." as the source means what is in it.
    let contents = own_name.is_none();
    if path.is_dir() || contents {
        let name = own_name.unwrap_or_default().as_bytes().to_vec();
        if contents && !path.is_dir() {
            make(path, plan.parents)?;
        }
        return Ok(Goal { folder: path.to_owned(), name });
    }
    let name = path.file_name().filter(|_| !bytes_of(path.as_os_str()).ends_with(b"/"));
    let Some(name) = name else {
        return Err(Failure::usage(format!("there is no folder '{}'", path.display())));
    };
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    };
    if plan.parents && !folder.is_dir() {
        make(&folder, true)?;
    }
    Ok(Goal { folder, name: bytes_of(name).to_vec() })
}

fn make(path: &Path, parents: bool) -> Result<(), Failure> {
    let made = if parents { fs::create_dir_all(path) } else { fs::create_dir(path) };
    made.map_err(|error| Failure::new(FAILED, format!("folder '{}' can't be made: {error}", path.display())))
}

fn writer(goal: &Goal) -> Result<Writer, Failure> {
    // Of what a sandbox says nobody gets another user's rights here.
    let options = Options { owner: None, mode_mask: 0o777, keep_partial: true, flush: false };
    Ok(Writer::new(Place::open(bytes_of(goal.folder.as_os_str()))?, options))
}

struct Copy<'a> {
    client: Client,
    plan: &'a Plan<'a>,
    goal: Goal,
    writer: Writer,
    progress: Progress,
    done: u64,
    total: u64,
    report: Report,
}

fn request(plan: &Plan<'_>, path: &str) -> v1::DownloadRequest {
    v1::DownloadRequest {
        sandbox: plan.remote.sandbox.clone(),
        path: path.to_owned(),
        ..v1::DownloadRequest::default()
    }
}

impl Copy<'_> {
    /// Everything in one stream.
    async fn whole(&mut self) -> Result<(), Failure> {
        let mut download = self.client.download(request(self.plan, &self.plan.remote.path)).await?;
        while let Some(piece) = download.next().await? {
            match piece {
                FilePiece::Entry(entry) => self.entry(entry, 0, Vec::new())?,
                FilePiece::Data(bytes) => self.data(&bytes)?,
                FilePiece::FileEnd => self.writer.end_file()?,
                FilePiece::Skipped(skipped) => self.report.skip(&skipped.path, &skipped.why),
            }
        }
        Ok(())
    }

    /// First what there is, then of each file what is missing here.
    async fn resume(&mut self) -> Result<(), Failure> {
        let request =
            v1::DownloadRequest { entries_only: true, ..request(self.plan, &self.plan.remote.path) };
        let mut listing = self.client.download(request).await?;
        while let Some(piece) = listing.next().await? {
            match piece {
                FilePiece::Entry(entry) if entry.kind() == v1::FileKind::File => self.missing(entry).await?,
                FilePiece::Entry(entry) => self.entry(entry, 0, Vec::new())?,
                FilePiece::Skipped(skipped) => self.report.skip(&skipped.path, &skipped.why),
                FilePiece::Data(_) | FilePiece::FileEnd => {
                    return Err(Error::Protocol("a list of entries came with data").into());
                }
            }
        }
        Ok(())
    }

    async fn missing(&mut self, entry: v1::FileEntry) -> Result<(), Failure> {
        let Some(name) = self.place(&entry.path) else {
            return Err(Failure::usage(format!("'{}' is a file", self.plan.remote.path)));
        };
        let place = Place::open(bytes_of(self.goal.folder.as_os_str()))?;
        let mut kept = 0;
        if let Ok(there) = local::info(&place, &name) {
            let same_time = same_time(entry.modified.as_ref(), there.entry.modified);
            if there.entry.kind == Kind::File && there.entry.size == entry.size && same_time {
                self.report.unchanged += 1;
                return Ok(());
            }
            kept = there.partial.filter(|kept| Some(*kept) <= entry.size).unwrap_or(0);
        }
        let remote = match std::str::from_utf8(&entry.path) {
            Ok("") => self.plan.remote.path.clone(),
            Ok(below) => format!("{}/{below}", self.plan.remote.path.trim_end_matches('/')),
            Err(_) => {
                self.report.skip(&entry.path, "its name is not UTF-8: copy it without --resume");
                return Ok(());
            }
        };
        let digest = if kept > 0 { local::digest_of_partial(&place, &name, kept)? } else { None };
        if let Some(digest) = digest {
            match self.rest(&remote, &entry, kept, digest).await {
                Err(failure) if prefix_differs(&failure) => {}
                done => return done,
            }
        }
        self.rest(&remote, &entry, 0, Vec::new()).await
    }

    /// One file from an offset on.
    async fn rest(
        &mut self,
        path: &str,
        entry: &v1::FileEntry,
        offset: u64,
        digest: Vec<u8>,
    ) -> Result<(), Failure> {
        let prefix_sha256 = digest.clone().into();
        let request = v1::DownloadRequest { offset, prefix_sha256, ..request(self.plan, path) };
        let mut download: Download = self.client.download(request).await?;
        while let Some(piece) = download.next().await? {
            match piece {
                // As it is now; its place is the one of the list.
                FilePiece::Entry(now) => {
                    let now = v1::FileEntry { path: entry.path.clone(), ..now };
                    self.entry(now, offset, digest.clone())?;
                }
                FilePiece::Data(bytes) => self.data(&bytes)?,
                FilePiece::FileEnd => self.writer.end_file()?,
                FilePiece::Skipped(skipped) => self.report.skip(&entry.path, &skipped.why),
            }
        }
        Ok(())
    }

    /// The place of an entry here; none for the folder itself.
    fn place(&self, path: &[u8]) -> Option<Vec<u8>> {
        let name = &self.goal.name;
        let place = match (name.is_empty(), path.is_empty()) {
            (true, _) => path.to_vec(),
            (false, true) => name.clone(),
            (false, false) => [name.as_slice(), b"/", path].concat(),
        };
        (!place.is_empty()).then_some(place)
    }

    fn entry(&mut self, entry: v1::FileEntry, offset: u64, prefix_sha256: Vec<u8>) -> Result<(), Failure> {
        let kind = match entry.kind() {
            v1::FileKind::File => Kind::File,
            v1::FileKind::Directory => Kind::Folder,
            v1::FileKind::Symlink => Kind::Link,
            v1::FileKind::Other | v1::FileKind::Unspecified => Kind::Other,
        };
        let Some(path) = self.place(&entry.path) else {
            if kind == Kind::Folder {
                return Ok(());
            }
            return Err(Failure::usage(format!("'{}' is no folder", self.plan.remote.path)));
        };
        if entry.path.is_empty() {
            self.total = entry.size.unwrap_or(0);
            self.done = offset;
        }
        let modified = entry.modified.as_ref();
        self.writer.entry(Entry {
            path,
            kind,
            mode: entry.mode,
            modified: modified.map(|time| (time.seconds, u32::try_from(time.nanos).unwrap_or(0))),
            // What is written to it meanwhile comes along.
            size: None,
            target: entry.target.to_vec(),
            offset,
            prefix_sha256,
        })?;
        Ok(())
    }

    fn data(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.done += bytes.len() as u64;
        self.progress.bytes(self.done, self.total);
        Ok(self.writer.data(bytes)?)
    }
}

/// Copies a file to standard output.
pub async fn stream(plan: &Plan<'_>) -> Outcome {
    let client = plan.session.connect().await?;
    let mut download = client.download(request(plan, &plan.remote.path)).await?;
    let stdout = nix::unistd::dup(io::stdout()).map_err(io::Error::from)?;
    let mut stdout = File::from(stdout);
    while let Some(piece) = download.next().await? {
        match piece {
            FilePiece::Data(bytes) => stdout.write_all(&bytes)?,
            FilePiece::Entry(entry) if entry.kind() == v1::FileKind::Directory => {
                let text = format!("'{}' is a folder: give a folder here as the target", plan.remote.path);
                return Err(Failure::usage(text));
            }
            FilePiece::Entry(_) | FilePiece::FileEnd => {}
            FilePiece::Skipped(skipped) => {
                return Err(Failure::new(FAILED, format!("'{}': {}", plan.remote.path, skipped.why)));
            }
        }
    }
    Ok(0)
}
