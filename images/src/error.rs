//! What can go wrong with images and kernels.

use std::io;
use std::path::PathBuf;

/// An error of this crate. The text names the thing and, where a user can do something, what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file operation failed.
    #[error("can't {action} {}: {source}", path.display())]
    Io {
        /// What was attempted, as a verb phrase.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A name that can't be the name of an image.
    #[error(
        "image name {name:?} is not valid: {why}; use lower-case letters, digits, '.', '_' and '-', with an optional :tag"
    )]
    BadName {
        /// The name as given.
        name: String,
        /// Which rule it breaks.
        why: &'static str,
    },
    /// No image has this name or digest.
    #[error(
        "there is no image {wanted:?}; {}; build the default one with: torpor image build debian",
        existing(known)
    )]
    UnknownImage {
        /// What was asked for.
        wanted: String,
        /// The names (or digests of nameless images) that exist.
        known: Vec<String>,
    },
    /// A shortened digest fits more than one image.
    #[error("digest {wanted:?} fits more than one image: {}; give more digits", matches.join(", "))]
    Ambiguous {
        /// The shortened digest.
        wanted: String,
        /// All digests that begin so.
        matches: Vec<String>,
    },
    /// The catalog has the name but not (all of) the data.
    #[error("image {name:?} is broken: {why} ({}); remove it with `torpor image rm {name}` and build or import it again", path.display())]
    Broken {
        /// Name or digest of the image.
        name: String,
        /// What is wrong with it.
        why: String,
        /// The file in question.
        path: PathBuf,
    },
    /// The image can't be removed now.
    #[error("image {name:?} is in use by {count} sandbox(es); delete them first: torpor sandbox list")]
    InUse {
        /// Name or digest of the image.
        name: String,
        /// How many sandboxes stand on it.
        count: u32,
    },
    /// A program that is needed isn't installed.
    #[error("{tool} is not installed; install it with: apt-get install {package}")]
    ToolMissing {
        /// The program.
        tool: String,
        /// The Debian package that brings it.
        package: &'static str,
    },
    /// A program ended with an error.
    #[error("{tool} failed while trying to {action} ({status}): {}", if output.is_empty() { "it said nothing" } else { output })]
    ToolFailed {
        /// The program.
        tool: String,
        /// What it was run for.
        action: &'static str,
        /// Exit code or signal.
        status: String,
        /// The last lines of what it wrote to its standard error.
        output: String,
    },
    /// Files with owners and device nodes can be made by root only.
    #[error(
        "building an image needs root (files keep their owners, device nodes are made); run it through the gateway or with sudo"
    )]
    NeedsRoot,
    /// An archive entry that isn't allowed.
    #[error("archive entry {entry:?} is refused: {why}")]
    BadEntry {
        /// Path of the entry in the archive.
        entry: String,
        /// Why it is refused.
        why: String,
    },
    /// The source isn't a root file system.
    #[error("{} can't become an image: {why}", path.display())]
    BadSource {
        /// The tar or directory.
        path: PathBuf,
        /// Why not, and what to do.
        why: String,
    },
    /// The made file system isn't laid out as expected.
    #[error("the new file system {} is not as expected: {why}", path.display())]
    BadDisk {
        /// The disk image.
        path: PathBuf,
        /// What is off.
        why: &'static str,
    },
    /// A package name that can't be passed on.
    #[error(
        "package name {0:?} is not valid: Debian names have lower-case letters, digits, '+', '-' and '.'"
    )]
    BadPackage(String),
    /// The file isn't a kernel that can be booted.
    #[error("{} is not a guest kernel: {why}", path.display())]
    BadKernel {
        /// The file.
        path: PathBuf,
        /// What was expected.
        why: &'static str,
    },
    /// No kernel with this digest is kept.
    #[error("there is no guest kernel {0}; `torpor doctor` says which one is used")]
    UnknownKernel(String),
    /// The host's package lists don't name a kernel.
    #[error(
        "the package lists of this host name no guest kernel ({package}): {why}; refresh them with: apt-get update"
    )]
    NoKernelPackage {
        /// The package looked for.
        package: String,
        /// What apt said.
        why: String,
    },
    /// A kernel module that the guest can't do without is in neither the modules nor the kernel.
    #[error("module {module} is neither in {} nor built into the kernel", dir.display())]
    ModuleMissing {
        /// Module name with underscores.
        module: String,
        /// Where modules were looked for.
        dir: PathBuf,
    },
    /// A kernel module can't be read.
    #[error("module {} can't be used: {why}", path.display())]
    BadModule {
        /// The module file.
        path: PathBuf,
        /// What is wrong.
        why: &'static str,
    },
    /// The agent can't run as the first program of a guest.
    #[error("agent {} can't be a guest's first program: {why}", path.display())]
    BadAgent {
        /// The agent binary.
        path: PathBuf,
        /// What is wrong.
        why: &'static str,
    },
}

fn existing(known: &[String]) -> String {
    if known.is_empty() { "the catalog is empty".into() } else { format!("there are: {}", known.join(", ")) }
}

/// Names the attempted action and the file in an I/O error.
pub(crate) trait At<T> {
    fn at(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T, Error>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T, Error> {
        self.map_err(|source| Error::Io { action, path: path.into(), source })
    }
}

impl<T> At<T> for nix::Result<T> {
    fn at(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T, Error> {
        self.map_err(io::Error::from).at(action, path)
    }
}
