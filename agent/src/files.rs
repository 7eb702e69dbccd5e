//! Files of the sandbox, for the host: whole trees in both directions, and single looks and changes.
//!
//! File systems block, so each transfer has a thread of its own; the streams of the host wait for it, and it for them.

use std::{
    fs::File,
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc},
    time::timeout,
};
use tonic::{Status, Streaming};
use torpor_agent_files::{
    self as files, Begin, Entry, FileError, Info, Kind, Options, Place, Problem, Sink, Writer,
};
use torpor_proto::agent::v1::{
    self as wire, DownloadEnd, DownloadOutput, DownloadRequest, FileEnd, FileEntry, FileKind, FileResult,
    FileSkipped, ListFilesResult, UploadDone, UploadInput, UploadResult, UploadStart, download_output,
    file_error, upload_input, upload_result,
};

use crate::exec::users;

/// Transfers at once.
const MOST: u32 = 32;
/// Pieces that wait between a stream and its thread.
const WAITING: usize = 4;
/// For threads to let go of their files at the end.
const LET_GO: Duration = Duration::from_secs(2);

/// Transfers under way.
pub struct Transfers {
    places: Arc<Semaphore>,
    ending: Notify,
}

impl Default for Transfers {
    fn default() -> Self {
        Self { places: Arc::new(Semaphore::new(MOST as usize)), ending: Notify::new() }
    }
}

impl Transfers {
    fn place(&self) -> Result<OwnedSemaphorePermit, wire::FileError> {
        self.places.clone().try_acquire_owned().map_err(|_| {
            told(file_error::Kind::TooMany, format!("{MOST} transfers of files are under way already"))
        })
    }

    /// Ends the uploads under way, so that nothing is open for writing when the disk is brought to rest.
    pub async fn end(&self) {
        self.ending.notify_waiters();
        // Whoever writes longer than this keeps the root from becoming read-only, which is told then.
        let _ = timeout(LET_GO, self.places.acquire_many(MOST)).await;
    }
}

fn told(kind: file_error::Kind, message: impl Into<String>) -> wire::FileError {
    wire::FileError { kind: kind.into(), message: message.into() }
}

fn error(error: FileError) -> wire::FileError {
    use file_error::Kind as Told;
    let kind = match error.problem {
        Problem::NotFound => Told::NotFound,
        Problem::Exists => Told::Exists,
        Problem::NotAFolder => Told::NotADirectory,
        Problem::IsAFolder => Told::IsADirectory,
        Problem::NotAFile => Told::NotAFile,
        Problem::NotEmpty => Told::NotEmpty,
        Problem::BadPath => Told::BadPath,
        Problem::Escapes => Told::Escapes,
        Problem::Full => Told::Full,
        Problem::ReadOnly => Told::ReadOnly,
        Problem::Denied => Told::Denied,
        Problem::PrefixDiffers => Told::PrefixDiffers,
        Problem::Busy => Told::Busy,
        Problem::Protocol => Told::Protocol,
        Problem::Other => Told::Other,
    };
    told(kind, error.message)
}

/// Runs something that blocks.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, wire::FileError> + Send + 'static,
) -> Result<T, wire::FileError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(told(file_error::Kind::Other, format!("work on files: {error}"))))
}

fn owner(user: &str) -> Result<Option<files::Owner>, wire::FileError> {
    if user.is_empty() {
        return Ok(None);
    }
    let identity = users::find(Path::new("/"), user)
        .map_err(|error| told(file_error::Kind::NoSuchUser, error.to_string()))?;
    Ok(Some((identity.uid, identity.gid)))
}

/// Takes an upload to its end.
pub async fn upload(
    transfers: &Transfers,
    start: UploadStart,
    mut inbound: Streaming<UploadInput>,
) -> UploadResult {
    let place = match transfers.place() {
        Ok(place) => place,
        Err(error) => return UploadResult { kind: Some(upload_result::Kind::Error(error)) },
    };
    let (pieces, waiting) = mpsc::channel(WAITING);
    let writing = blocking(move || {
        let _place = place;
        write(&start, waiting)
    });
    let feeding = async {
        let feed = async {
            while let Ok(Some(UploadInput { kind })) = inbound.message().await {
                // A kind of a newer host is nothing to write.
                let Some(kind) = kind else { continue };
                if pieces.send(kind).await.is_err() {
                    break;
                }
            }
        };
        tokio::select! {
            () = feed => {}
            () = transfers.ending.notified() => {}
        }
        // Without an end before it: the writer takes it for a break.
        drop(pieces);
        std::future::pending().await
    };
    let done = tokio::select! {
        done = writing => done,
        done = feeding => done,
    };
    UploadResult {
        kind: Some(match done {
            Ok(done) => upload_result::Kind::Done(done),
            Err(error) => upload_result::Kind::Error(error),
        }),
    }
}

fn write(
    start: &UploadStart,
    mut pieces: mpsc::Receiver<upload_input::Kind>,
) -> Result<UploadDone, wire::FileError> {
    use upload_input::Kind as Input;
    let root = Place::root().map_err(error)?;
    let path = start.path.as_bytes();
    let folder = if start.parents { root.folder_made(path) } else { root.folder(path) }.map_err(error)?;
    let options = Options {
        owner: owner(&start.user)?,
        mode_mask: 0o7777,
        keep_partial: start.keep_partial,
        flush: true,
    };
    let mut writer = Writer::new(folder, options);
    loop {
        let piece = pieces.blocking_recv();
        let written = match piece {
            Some(Input::Entry(entry)) => writer.entry(from_wire(entry)),
            Some(Input::Data(data)) => writer.data(&data),
            Some(Input::FileEnd(FileEnd {})) => writer.end_file(),
            Some(Input::End(_)) => break,
            Some(Input::Start(_)) => Err(FileError::new(Problem::Protocol, "a second start came")),
            None => Err(FileError::new(Problem::Protocol, "the upload broke off before its end")),
        };
        written.map_err(error)?;
    }
    let totals = writer.finish().map_err(error)?;
    Ok(UploadDone {
        files: totals.files,
        directories: totals.folders,
        symlinks: totals.links,
        bytes: totals.bytes,
    })
}

/// Sends what is at a path to the host.
pub async fn download(
    transfers: &Transfers,
    request: DownloadRequest,
    out: mpsc::Sender<Result<DownloadOutput, Status>>,
) {
    let done = match transfers.place() {
        Ok(place) => {
            let out = out.clone();
            blocking(move || {
                let _place = place;
                read(request, out)
            })
            .await
        }
        Err(error) => Err(error),
    };
    let last = match done {
        Ok(()) => download_output::Kind::End(DownloadEnd {}),
        Err(error) => download_output::Kind::Error(error),
    };
    // Whoever reads may have gone.
    let _ = out.send(Ok(DownloadOutput { kind: Some(last) })).await;
}

fn read(
    request: DownloadRequest,
    out: mpsc::Sender<Result<DownloadOutput, Status>>,
) -> Result<(), wire::FileError> {
    let root = Place::root().map_err(error)?;
    let path = request.path.clone();
    files::read(&root, path.as_bytes(), b"", &mut Out { request, out }).map_err(|stop| match stop {
        Stop::Fault(fault) => error(fault),
        Stop::Left => told(file_error::Kind::Other, "the host has gone"),
    })
}

struct Out {
    request: DownloadRequest,
    out: mpsc::Sender<Result<DownloadOutput, Status>>,
}

enum Stop {
    Fault(FileError),
    /// Nobody listens any more.
    Left,
}

impl From<FileError> for Stop {
    fn from(fault: FileError) -> Self {
        Self::Fault(fault)
    }
}

impl Out {
    fn send(&self, kind: download_output::Kind) -> Result<(), Stop> {
        self.out.blocking_send(Ok(DownloadOutput { kind: Some(kind) })).map_err(|_| Stop::Left)
    }

    /// Checks the part that the host has already.
    fn go_on(&self, entry: &Entry, file: &mut File) -> Result<(), FileError> {
        let path = self.request.path.as_bytes();
        let digest = files::digest(file, self.request.offset, path)?;
        if digest.is_some_and(|digest| digest == self.request.prefix_sha256) {
            return Ok(());
        }
        let text = format!(
            "'{}': the first {} bytes are not those of the earlier transfer",
            files::shown(if entry.path.is_empty() { path } else { &entry.path }),
            self.request.offset
        );
        Err(FileError::new(Problem::PrefixDiffers, text))
    }
}

impl Sink for Out {
    type Error = Stop;

    fn begin(&mut self, entry: Entry, file: Option<&mut File>) -> Result<Begin, Stop> {
        let offset = self.request.offset;
        if offset > 0 {
            match file {
                Some(file) if entry.path.is_empty() => self.go_on(&entry, file)?,
                _ => {
                    let text = "only the transfer of a single file can go on at an offset";
                    return Err(FileError::new(Problem::Protocol, text).into());
                }
            }
        }
        self.send(download_output::Kind::Entry(to_wire(entry)))?;
        Ok(if self.request.entries_only { Begin::Skip } else { Begin::From(offset) })
    }

    fn data(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        self.send(download_output::Kind::Data(Bytes::copy_from_slice(bytes)))
    }

    fn end(&mut self) -> Result<(), Stop> {
        self.send(download_output::Kind::FileEnd(FileEnd {}))
    }

    fn skipped(&mut self, path: &[u8], why: &str) -> Result<(), Stop> {
        let skipped = FileSkipped { path: Bytes::copy_from_slice(path), why: why.to_owned() };
        self.send(download_output::Kind::Skipped(skipped))
    }
}

/// What is at a path.
pub async fn stat(path: String) -> FileResult {
    result(blocking(move || look(&path)).await)
}

fn look(path: &str) -> Result<wire::FileInfo, wire::FileError> {
    let info = files::info(&Place::root().map_err(error)?, path.as_bytes()).map_err(error)?;
    Ok(info_to_wire(info))
}

fn result(looked: Result<wire::FileInfo, wire::FileError>) -> FileResult {
    match looked {
        Ok(info) => FileResult { info: Some(info), error: None },
        Err(error) => FileResult { info: None, error: Some(error) },
    }
}

/// What is in a folder.
pub async fn list(request: wire::ListFilesRequest) -> ListFilesResult {
    let listed = blocking(move || {
        let most = usize::try_from(request.most).unwrap_or(usize::MAX);
        files::list(&Place::root().map_err(error)?, request.path.as_bytes(), &request.after, most)
            .map_err(error)
    });
    match listed.await {
        Ok((found, more)) => {
            ListFilesResult { files: found.into_iter().map(info_to_wire).collect(), more, error: None }
        }
        Err(error) => ListFilesResult { files: Vec::new(), more: false, error: Some(error) },
    }
}

/// Makes a folder.
pub async fn make(request: wire::MakeDirectoryRequest) -> FileResult {
    let made = blocking(move || {
        let owner = owner(&request.user)?;
        let root = Place::root().map_err(error)?;
        let path = request.path.as_bytes();
        files::make_folder(&root, path, request.mode, request.parents, owner).map_err(error)?;
        look(&request.path)
    });
    result(made.await)
}

/// Removes a file.
pub async fn remove(request: wire::RemoveFileRequest) -> FileResult {
    let removed = blocking(move || {
        let root = Place::root().map_err(error)?;
        files::remove(&root, request.path.as_bytes(), request.recursive).map_err(error)
    });
    FileResult { info: None, error: removed.await.err() }
}

fn info_to_wire(info: Info) -> wire::FileInfo {
    wire::FileInfo {
        entry: Some(to_wire(info.entry)),
        leads_to: info.leads_to.map_or(FileKind::Unspecified, kind_to_wire).into(),
        uid: info.owner.0,
        gid: info.owner.1,
        partial_bytes: info.partial,
    }
}

fn kind_to_wire(kind: Kind) -> FileKind {
    match kind {
        Kind::File => FileKind::File,
        Kind::Folder => FileKind::Directory,
        Kind::Link => FileKind::Symlink,
        Kind::Other => FileKind::Other,
    }
}

fn to_wire(entry: Entry) -> FileEntry {
    let modified = entry.modified.and_then(|(seconds, nanoseconds)| {
        // Before 1970 is left out.
        let since = Duration::new(u64::try_from(seconds).ok()?, nanoseconds);
        Some(SystemTime::UNIX_EPOCH.checked_add(since)?.into())
    });
    FileEntry {
        kind: kind_to_wire(entry.kind).into(),
        path: entry.path.into(),
        mode: entry.mode,
        modified,
        size: entry.size,
        target: entry.target.into(),
        offset: entry.offset,
        prefix_sha256: entry.prefix_sha256.into(),
    }
}

fn from_wire(entry: FileEntry) -> Entry {
    Entry {
        kind: match entry.kind() {
            FileKind::File => Kind::File,
            FileKind::Directory => Kind::Folder,
            FileKind::Symlink => Kind::Link,
            FileKind::Other | FileKind::Unspecified => Kind::Other,
        },
        path: entry.path.to_vec(),
        mode: entry.mode,
        modified: entry.modified.map(|time| (time.seconds, u32::try_from(time.nanos).unwrap_or(0))),
        size: entry.size,
        target: entry.target.to_vec(),
        offset: entry.offset,
        prefix_sha256: entry.prefix_sha256.to_vec(),
    }
}
