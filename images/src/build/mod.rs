//! From a tar, a directory or a recipe to a raw disk in a scratch directory.

mod clean;
mod copy;
pub(crate) mod debian;
mod ext4;
mod inodes;
mod node;
mod scoped;
mod unpack;

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::At;
use crate::staging::Staging;
use crate::{Error, OnProgress, tell};

/// Time stamp of what a build adds, in seconds since 1970 (2023-11-14), unless SOURCE_DATE_EPOCH says another.
const EPOCH: i64 = 1_700_000_000;

/// Where the root file system of a new image comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A tar archive of the root file system (as `docker export` writes), plain or packed by gzip, zstd, xz or bzip2.
    Tar(PathBuf),
    /// A directory that holds the root file system. It is only read.
    Dir(PathBuf),
}

/// Fails early when nothing could come of a build.
pub(crate) fn check_root() -> Result<(), Error> {
    if nix::unistd::geteuid().is_root() { Ok(()) } else { Err(Error::NeedsRoot) }
}

/// Makes an empty tree in the scratch directory.
fn new_tree(staging: &Staging) -> Result<PathBuf, Error> {
    let tree = staging.join("tree");
    fs::create_dir(&tree).at("create directory", &tree)?;
    Ok(tree)
}

/// Brings the source into a tree in the scratch directory.
pub(crate) fn fetch(
    source: &Source,
    keep_out: &Path,
    staging: &Staging,
    progress: OnProgress<'_>,
) -> Result<PathBuf, Error> {
    let tree = new_tree(staging)?;
    let from = match source {
        Source::Tar(path) => {
            tell(progress, "unpack", path.display().to_string());
            if path.is_dir() {
                return Err(bad_source(path, "it is a directory, not a tar archive"));
            }
            unpack::unpack_file(path, &tree, progress)?;
            path
        }
        Source::Dir(path) => {
            let real = path.canonicalize().at("find", path)?;
            if !real.is_dir() {
                return Err(bad_source(path, "it is not a directory"));
            }
            if keep_out.starts_with(&real) {
                return Err(bad_source(
                    path,
                    "it holds Torpor's own state; choose a directory with a root file system only",
                ));
            }
            copy::copy_tree(&real, &tree, progress)?;
            path
        }
    };
    check_tree(&tree, from)?;
    Ok(tree)
}

/// Refuses what a guest could never use, above all the archives that are easily taken for a root file system.
fn check_tree(tree: &Path, source: &Path) -> Result<(), Error> {
    let has = |name: &str| tree.join(name).symlink_metadata().is_ok();
    if (has("manifest.json") || has("oci-layout")) && !has("bin") && !has("usr") {
        return Err(bad_source(
            source,
            "it is an archive of layers (docker save), not a root file system; make one with: docker export CONTAINER",
        ));
    }
    if !["bin", "sbin", "usr", "etc", "lib", "opt", "app"].iter().any(|name| has(name)) {
        return Err(bad_source(
            source,
            "it has none of the directories of a root file system (bin, usr, etc ...) at its top",
        ));
    }
    Ok(())
}

fn bad_source(path: &Path, why: &str) -> Error {
    Error::BadSource { path: path.to_owned(), why: why.into() }
}

/// Cleans a tree and makes the disk `base.raw` of it in the scratch directory.
pub(crate) fn make_disk(tree: &Path, staging: &Staging, progress: OnProgress<'_>) -> Result<PathBuf, Error> {
    let epoch = std::env::var("SOURCE_DATE_EPOCH").ok().and_then(|text| text.parse().ok()).unwrap_or(EPOCH);
    tell(progress, "clean", "");
    clean::clean(tree, epoch)?;
    let disk = staging.join("base.raw");
    ext4::make(tree, &disk, epoch, staging, progress)?;
    Ok(disk)
}
