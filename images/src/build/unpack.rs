//! A tar archive to a tree, as root, never writing outside of it.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tar::{Archive, Entry, EntryType};

use super::node::{Meta, Special, finish, make_link, make_special, wanted_xattr};
use super::scoped::{Missing, locate};
use crate::error::At;
use crate::fsutil::set_mtime;
use crate::tool::{Tool, follow};
use crate::{Error, OnProgress, tell};

const STEP: &str = "unpack";
/// Entries between two words of progress.
const EVERY: usize = 500;

/// Unpacks the archive `source`, compressed or not, to the directory `root`.
pub(crate) fn unpack_file(source: &Path, root: &Path, progress: OnProgress<'_>) -> Result<(), Error> {
    let mut magic = Vec::new();
    File::open(source).and_then(|file| file.take(6).read_to_end(&mut magic)).at("read", source)?;
    match packer(&magic) {
        None => {
            let file = File::open(source).at("open", source)?;
            unpack(io::BufReader::with_capacity(1 << 20, file), source, root, progress)
        }
        Some(tool) => unpack_packed(tool, source, root, progress),
    }
}

fn packer(magic: &[u8]) -> Option<Tool> {
    match magic {
        [0x1f, 0x8b, ..] => Some(Tool::new("gzip", "gzip")),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Some(Tool::new("zstd", "zstd")),
        [0xfd, b'7', b'z', b'X', b'Z', 0] => Some(Tool::new("xz", "xz-utils")),
        [b'B', b'Z', b'h', ..] => Some(Tool::new("bzip2", "bzip2")),
        _ => None,
    }
}

fn unpack_packed(tool: Tool, source: &Path, root: &Path, progress: OnProgress<'_>) -> Result<(), Error> {
    let input = File::open(source).at("open", source)?;
    let mut command = tool.command()?;
    command.arg("-dc").stdin(input);
    let mut child = start(&mut command, tool)?;
    let stdout = child.stdout.take();
    let stderr = child.stderr.take();
    let (done, said) = std::thread::scope(|scope| {
        let said = scope.spawn(move || follow(stderr, &mut |_| ()));
        let done = stdout.map_or(Ok(()), |out| unpack(out, source, root, progress));
        (done, said.join().unwrap_or_default())
    });
    let status = child.wait().at("wait for", tool.name)?;
    // A broken archive breaks the tar reading too: the unpacker's own words are the better message. When we stopped
    // reading first, it died of the closed pipe (a signal) and our reason counts.
    if status.code().is_some_and(|code| code != 0) {
        return Err(tool.failed("unpack the archive", status, &said));
    }
    done
}

fn start(command: &mut Command, tool: Tool) -> Result<Child, Error> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().at("run", tool.name)
}

/// Unpacks a tar stream to the directory `root`.
fn unpack(mut reader: impl Read, source: &Path, root: &Path, progress: OnProgress<'_>) -> Result<(), Error> {
    let mut directories = Vec::new();
    let mut archive = Archive::new(&mut reader);
    for (count, entry) in archive.entries().at("read archive", source)?.enumerate() {
        let mut entry = entry.at("read archive", source)?;
        if count % EVERY == 0 {
            tell(progress, STEP, entry_path(&entry).display().to_string());
        }
        if let Some(dir) = place(&mut entry, root)? {
            directories.push(dir);
        }
    }
    // Padding after the end mark: left unread it would end a decompressor by a closed pipe.
    io::copy(&mut reader, &mut io::sink()).at("read archive", source)?;
    // Last, because every file that was placed in a directory changed its time.
    for (path, mtime) in directories.iter().rev() {
        if path.symlink_metadata().is_ok_and(|meta| meta.is_dir()) {
            set_mtime(path, *mtime)?;
        }
    }
    Ok(())
}

fn entry_path<R: Read>(entry: &Entry<'_, R>) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(&entry.path_bytes()))
}

fn refused(entry: &Path, why: impl Into<String>) -> Error {
    Error::BadEntry { entry: entry.display().to_string(), why: why.into() }
}

/// Makes one entry; returns a directory whose time is to be set at the end.
fn place<R: Read>(entry: &mut Entry<'_, R>, root: &Path) -> Result<Option<(PathBuf, i64)>, Error> {
    let name = entry_path(entry);
    let kind = entry.header().entry_type();
    if kind == EntryType::XGlobalHeader {
        return Ok(None);
    }
    let meta = meta_of(entry, &name)?;
    let Some(path) = locate(root, &name, Missing::Create)? else { return Ok(None) };
    if kind == EntryType::Directory {
        make_directory(&path, root)?;
        finish(&path, &meta)?;
        return Ok(Some((path, meta.mtime)));
    }
    if path == root {
        return Err(refused(&name, "the root is not a directory"));
    }
    let hard = if kind == EntryType::Link { Some(hard_target(entry, &name, root)?) } else { None };
    if hard.as_deref() == Some(path.as_path()) {
        return Ok(None);
    }
    clear(&path, &name)?;
    match kind {
        EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
            let mut file = File::create_new(&path).at("create", &path)?;
            io::copy(entry, &mut file).at("unpack", &path)?;
            finish(&path, &meta)?;
        }
        EntryType::Link => {
            let target = hard.ok_or_else(|| refused(&name, "it is a hard link to nothing"))?;
            fs::hard_link(&target, &path).at("make hard link", &path)?;
        }
        EntryType::Symlink => make_link(&path, &link_name(entry, &name)?, &meta)?,
        EntryType::Char | EntryType::Block | EntryType::Fifo => {
            make_special(&path, special_of(entry, kind, &name)?)?;
            finish(&path, &meta)?;
        }
        other => return Err(refused(&name, format!("entries of type {other:?} are not known"))),
    }
    Ok(None)
}

fn meta_of<R: Read>(entry: &mut Entry<'_, R>, name: &Path) -> Result<Meta, Error> {
    let mut meta = Meta::default();
    if let Some(extensions) = entry.pax_extensions().map_err(|error| refused(name, error.to_string()))? {
        for extension in extensions {
            let extension = extension.map_err(|error| refused(name, error.to_string()))?;
            let Ok(key) = extension.key() else { continue };
            if key.starts_with("GNU.sparse.") {
                return Err(refused(
                    name,
                    "it is a sparse file in pax format; make the archive without --sparse",
                ));
            }
            if let Some(attribute) = key.strip_prefix("SCHILY.xattr.").filter(|name| wanted_xattr(name)) {
                meta.xattrs.push((attribute.to_owned(), extension.value_bytes().to_vec()));
            }
        }
    }
    let header = entry.header();
    let number = |value: io::Result<u64>| value.map_err(|error| refused(name, error.to_string()));
    let id = |value: io::Result<u64>| {
        u32::try_from(number(value)?).map_err(|_| refused(name, "its owner is larger than 32 bits"))
    };
    meta.uid = id(header.uid())?;
    meta.gid = id(header.gid())?;
    meta.mode = header.mode().map_err(|error| refused(name, error.to_string()))?;
    meta.mtime = i64::try_from(number(header.mtime())?).unwrap_or(0);
    Ok(meta)
}

fn make_directory(path: &Path, root: &Path) -> Result<(), Error> {
    match path.symlink_metadata() {
        Ok(meta) if meta.is_dir() => return Ok(()),
        Ok(_) if path != root => fs::remove_file(path).at("replace", path)?,
        _ => {}
    }
    fs::create_dir(path).at("create directory", path)
}

/// Makes room: a later entry of the same name replaces an earlier one, as tar does.
fn clear(path: &Path, name: &Path) -> Result<(), Error> {
    match path.symlink_metadata() {
        Ok(meta) if meta.is_dir() => Err(refused(name, "it would replace a directory")),
        Ok(_) => fs::remove_file(path).at("replace", path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).at("look at", path),
    }
}

fn link_name<R: Read>(entry: &Entry<'_, R>, name: &Path) -> Result<PathBuf, Error> {
    match entry.link_name_bytes() {
        Some(bytes) if !bytes.is_empty() && !bytes.contains(&0) => {
            Ok(PathBuf::from(OsStr::from_bytes(&bytes)))
        }
        _ => Err(refused(name, "it is a link to nothing")),
    }
}

/// Where a hard link points: a file of the same tree. Its links on the way are checked like any path's.
fn hard_target<R: Read>(entry: &Entry<'_, R>, name: &Path, root: &Path) -> Result<PathBuf, Error> {
    let target = link_name(entry, name)?;
    let found = locate(root, &target, Missing::Stop)
        .map_err(|error| refused(name, format!("it is a hard link, and {error}")))?
        .filter(|path| path.symlink_metadata().is_ok_and(|meta| !meta.is_dir()));
    found.ok_or_else(|| {
        refused(name, format!("it is a hard link to {}, which is no file of the archive", target.display()))
    })
}

fn special_of<R: Read>(entry: &Entry<'_, R>, kind: EntryType, name: &Path) -> Result<Special, Error> {
    let part = |value: io::Result<Option<u32>>| match value {
        Ok(number) => Ok(u64::from(number.unwrap_or(0))),
        Err(error) => Err(refused(name, error.to_string())),
    };
    let header = entry.header();
    Ok(match kind {
        EntryType::Fifo => Special::Fifo,
        EntryType::Char => {
            Special::Char { major: part(header.device_major())?, minor: part(header.device_minor())? }
        }
        _ => Special::Block { major: part(header.device_major())?, minor: part(header.device_minor())? },
    })
}
