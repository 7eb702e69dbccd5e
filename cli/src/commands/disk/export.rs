//! `torpor sandbox disk export`

use std::{
    ffi::OsString,
    fs::{self, File},
    io::{self, IsTerminal as _, Write},
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use clap::{Args, ValueEnum};
use nix::{
    errno::Errno,
    fcntl::{AT_FDCWD, RenameFlags, renameat2},
};
use torpor_sandbox::spec::size;
use torpor_sdk::{Client, DiskPiece, v1};

use super::Outcome;
use crate::{
    failure::{FAILED, Failure, USAGE},
    output::{clean, disk},
    progress::Progress,
    session::Session,
};

/// What an interrupted program ends with: 128 + SIGINT.
const INTERRUPTED: u8 = 130;
/// The name of standard output.
const STDOUT: &str = "-";
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

#[derive(Args)]
pub struct ExportArgs {
    /// Name or id.
    name: String,
    /// Where to, on this machine; `-` is standard output. What is zeros takes no space in a file.
    file: PathBuf,
    /// Form of the file; qcow2 for a FILE that ends so, else raw.
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Replace FILE when it is there already.
    #[arg(long)]
    force: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Format {
    /// Byte for byte.
    Raw,
    /// QEMU's format.
    Qcow2,
}

impl Format {
    fn wire(self) -> v1::DiskFormat {
        match self {
            Self::Raw => v1::DiskFormat::Raw,
            Self::Qcow2 => v1::DiskFormat::Qcow2,
        }
    }

    /// A raw disk with the name of another format would be a trap.
    fn of_name(file: &Path) -> Self {
        if file.extension().is_some_and(|end| end == "qcow2") { Self::Qcow2 } else { Self::Raw }
    }
}

/// Writes a disk to a file.
pub async fn run(session: &Session, args: ExportArgs) -> Outcome {
    let format = args.format.unwrap_or_else(|| Format::of_name(&args.file)).wire();
    let client = session.connect().await?;
    if args.file.as_os_str() == STDOUT {
        if io::stdout().is_terminal() {
            return Err(Failure::usage("a disk is nothing for a terminal; send it to a file or program"));
        }
        let mut output = Sequence { out: io::stdout().lock(), at: 0 };
        copy(session, &client, &args.name, format, &mut output).await?;
        return Ok(0);
    }
    let mut file = NewFile::create(&args.file, args.force)?;
    let (size_bytes, data_bytes) = copy(session, &client, &args.name, format, &mut file).await?;
    file.publish()?;
    let path = args.file.display().to_string();
    let shown = disk::Exported {
        name: args.name.clone(),
        file: path.clone(),
        format: disk::disk_format(format),
        size_bytes,
        data_bytes,
    };
    let line = || {
        let (all, data) = (size(size_bytes), size(data_bytes));
        format!("{} exported to {}: {all}, {data} of it data\n", clean(&args.name), clean(&path))
    };
    session.print(&shown, || vec![args.name.clone()], line)?;
    Ok(0)
}

/// Where a disk goes.
trait Sink {
    fn begin(&mut self, size: u64) -> io::Result<()>;
    fn data(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    fn end(&mut self, size: u64) -> io::Result<()>;
    fn name(&self) -> String;
}

/// Receives a disk. Its size and how much of it was data, bytes.
async fn copy(
    session: &Session,
    client: &Client,
    name: &str,
    format: v1::DiskFormat,
    sink: &mut dyn Sink,
) -> Result<(u64, u64), Failure> {
    let progress = Progress::new(session.shows_progress(), name);
    progress.step("asking for the disk");
    let mut export = client.export_disk(name, format).await?;
    let mut all = 0;
    loop {
        let piece = tokio::select! {
            piece = export.next() => piece?,
            // What was begun is cleared away on the way out.
            _ = tokio::signal::ctrl_c() => return Err(Failure::silent(INTERRUPTED)),
        };
        let Some(piece) = piece else { break };
        let written = match piece {
            DiskPiece::Preparing(done, total) => {
                progress.step("making the file ready");
                progress.amount(done, total);
                Ok(())
            }
            DiskPiece::Size(bytes) => {
                progress.step("copying");
                all = bytes;
                sink.begin(bytes)
            }
            DiskPiece::Data(offset, bytes) => {
                progress.amount(offset, all);
                sink.data(offset, &bytes)
            }
            DiskPiece::Reached(offset) => {
                progress.amount(offset, all);
                Ok(())
            }
        };
        written.map_err(|error| unwritten(&sink.name(), error))?;
    }
    sink.end(all).map_err(|error| unwritten(&sink.name(), error))?;
    Ok((all, export.data_bytes()))
}

fn unwritten(name: &str, error: io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::from(error),
        _ => Failure::new(FAILED, format!("can't write '{name}': {error}")),
    }
}

/// A file under another name until it is complete; removed when it never is.
struct NewFile {
    file: File,
    temporary: PathBuf,
    target: PathBuf,
    force: bool,
    published: bool,
}

impl NewFile {
    fn create(target: &Path, force: bool) -> Result<Self, Failure> {
        let shown = target.display();
        match target.symlink_metadata() {
            Ok(found) if !found.is_file() => {
                return Err(Failure::usage(format!("'{shown}' is there already and is no regular file")));
            }
            Ok(_) if !force => return Err(exists(target)),
            _ => {}
        }
        let name = target.file_name().ok_or_else(|| Failure::usage(format!("'{shown}' names no file")))?;
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".part-{}", std::process::id()));
        let temporary = target.with_file_name(hidden);
        // A process with this number may have left one. What anybody else puts there meanwhile, a link to a file of his
        // own perhaps, is refused: a guest's disk is nobody else's.
        let removed = match fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        let open = || File::options().write(true).create_new(true).mode(0o600).open(&temporary);
        let file = removed.and_then(|()| open()).map_err(|error| unwritten(&shown.to_string(), error))?;
        Ok(Self { file, temporary, target: target.to_owned(), force, published: false })
    }

    /// Gives it its name.
    fn publish(mut self) -> Result<(), Failure> {
        let name = self.name();
        let failed = |error: io::Error| unwritten(&name, error);
        if self.force {
            fs::rename(&self.temporary, &self.target).map_err(failed)?;
        } else {
            match renameat2(AT_FDCWD, &self.temporary, AT_FDCWD, &self.target, RenameFlags::RENAME_NOREPLACE)
            {
                Ok(()) => {}
                Err(Errno::EEXIST) => return Err(exists(&self.target)),
                // A file system that can't: a link doesn't replace anything either.
                Err(Errno::EINVAL) => {
                    fs::hard_link(&self.temporary, &self.target).map_err(failed)?;
                    fs::remove_file(&self.temporary).map_err(failed)?;
                }
                Err(errno) => return Err(failed(errno.into())),
            }
        }
        self.published = true;
        let folder = self.target.parent().filter(|folder| *folder != Path::new(""));
        File::open(folder.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all()).map_err(failed)
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.published {
            // Nothing more can be done about it.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

fn exists(path: &Path) -> Failure {
    let message =
        format!("'{}' is there already; use another name, or --force to replace it", path.display());
    Failure::new(USAGE, message)
}

impl Sink for NewFile {
    fn begin(&mut self, size: u64) -> io::Result<()> {
        self.file.set_len(size)
    }

    fn data(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    fn end(&mut self, _size: u64) -> io::Result<()> {
        self.file.sync_all()
    }

    fn name(&self) -> String {
        self.target.display().to_string()
    }
}

/// An output that can only go forward.
struct Sequence<W> {
    out: W,
    at: u64,
}

impl<W: Write> Sequence<W> {
    fn zeros_to(&mut self, offset: u64) -> io::Result<()> {
        while self.at < offset {
            let count = (offset - self.at).min(ZEROS.len() as u64);
            self.out.write_all(&ZEROS[..count as usize])?;
            self.at += count;
        }
        Ok(())
    }
}

impl<W: Write> Sink for Sequence<W> {
    fn begin(&mut self, _size: u64) -> io::Result<()> {
        Ok(())
    }

    fn data(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.zeros_to(offset)?;
        self.at += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    fn end(&mut self, size: u64) -> io::Result<()> {
        self.zeros_to(size)?;
        self.out.flush()
    }

    fn name(&self) -> String {
        "standard output".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_forward_only_has_its_zeros_written() {
        let mut output = Sequence { out: Vec::new(), at: 0 };
        output.begin(200_000).unwrap();
        output.data(2, b"ab").unwrap();
        output.data(100_000, b"c").unwrap();
        output.end(200_000).unwrap();
        let mut expected = vec![0; 200_000];
        expected[2..4].copy_from_slice(b"ab");
        expected[100_000] = b'c';
        assert!(output.out == expected);
    }

    #[test]
    fn a_file_that_is_not_complete_leaves_nothing_and_replaces_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("disk.raw");
        let mut file = NewFile::create(&target, false).unwrap();
        file.begin(1 << 20).unwrap();
        drop(file);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);

        let mut file = NewFile::create(&target, false).unwrap();
        file.data(0, b"new").unwrap();
        fs::write(&target, "old").unwrap();
        assert!(file.publish().unwrap_err().told.message.contains("--force"));
        assert!(NewFile::create(&target, false).is_err());
        assert_eq!(fs::read(&target).unwrap(), b"old");
        let mut file = NewFile::create(&target, true).unwrap();
        file.data(0, b"new").unwrap();
        file.publish().unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"new");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert!(NewFile::create(dir.path(), true).is_err());
    }

    #[test]
    fn what_lies_where_the_file_is_made_is_neither_followed_nor_kept() {
        use std::os::unix::fs::{MetadataExt as _, symlink};

        let dir = tempfile::tempdir().unwrap();
        let (target, other) = (dir.path().join("disk.raw"), dir.path().join("other"));
        fs::write(&other, "mine").unwrap();
        let temporary = dir.path().join(format!(".disk.raw.part-{}", std::process::id()));
        symlink(&other, &temporary).unwrap();
        let mut file = NewFile::create(&target, false).unwrap();
        file.data(0, b"disk").unwrap();
        file.publish().unwrap();
        assert_eq!(fs::read(&other).unwrap(), b"mine");
        let made = target.symlink_metadata().unwrap();
        assert!(made.is_file() && made.mode() & 0o777 == 0o600 && made.len() == 4);
    }

    #[test]
    fn the_name_tells_the_format() {
        assert!(Format::of_name(Path::new("a/web.qcow2")) == Format::Qcow2);
        assert!(Format::of_name(Path::new("web.raw")) == Format::Raw);
        assert!(Format::of_name(Path::new("-")) == Format::Raw);
    }
}
