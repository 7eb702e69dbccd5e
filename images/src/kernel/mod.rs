//! Guest kernels: the boot image, the modules that a guest needs before its root disk, and the initramfs.
//!
//! ```text
//! <state>/kernels/<64 hex digits>/vmlinuz                  bzImage or vmlinux
//!                                /modules/NN-name.ko       in load order, not compressed
//!                                /kernel.json              digest, release
//!                                /initramfs-<hash>.cpio    for one agent
//!                                /vmlinux-1                what is inside a bzImage; empty: it can't be unpacked
//!                /default.json                             which one ensure_default() found
//! ```

mod cpio;
mod image;
mod initramfs;
mod lz4;
mod modules;
mod package;
mod unpack;
mod when;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::error::At;
use crate::fsutil::{
    FileStamp, make_dir, read_json, rename_synced, sha256, sha256_file, sorted_entries, sync_dir, to_json,
    write_synced,
};
use crate::name::is_hex;
use crate::staging::{self, Staging};
use crate::{Error, OnProgress, tell};

const VMLINUZ: &str = "vmlinuz";
const MODULES: &str = "modules";
const RECORD: &str = "kernel.json";
const DEFAULT: &str = "default.json";

/// A guest kernel as kept on the host. Its files never change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// `sha256:` and a digest over the boot image and the modules.
    pub digest: String,
    /// The boot image: bzImage or ELF vmlinux.
    pub vmlinuz: PathBuf,
    /// The directory of modules that go into the initramfs, if the kernel came with any.
    pub modules: Option<PathBuf>,
    /// What `uname -r` says in the guest; empty if the boot image doesn't tell.
    pub release: String,
}

#[derive(Serialize, Deserialize)]
struct Record {
    digest: String,
    release: String,
}

#[derive(Serialize, Deserialize)]
struct Default {
    digest: String,
}

/// The guest kernels below a state directory.
#[derive(Debug, Clone)]
pub struct Kernels {
    dir: PathBuf,
    /// The agent that was asked for last, and its digest: to hash it takes longer than to start a VM.
    agent: Arc<Mutex<Option<(FileStamp, String)>>>,
}

impl Kernels {
    /// Opens `<state_dir>/kernels`, which is made if it isn't there, and takes away what killed runs left.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open(state_dir: &Path) -> Result<Self, Error> {
        let dir = state_dir.join("kernels");
        make_dir(&dir)?;
        let dir = dir.canonicalize().at("find", &dir)?;
        staging::sweep(&dir)?;
        Ok(Self { dir, agent: Arc::default() })
    }

    /// The default kernel: Debian's cloud kernel. It is fetched from the host's package sources the first time and
    /// then kept; nothing is installed on the host.
    ///
    /// # Errors
    /// [`Error::ToolMissing`] on a host without apt, [`Error::NoKernelPackage`] when its package lists are missing,
    /// [`Error::ToolFailed`] when the download fails.
    pub fn ensure_default(&self, progress: OnProgress<'_>) -> Result<Kernel, Error> {
        let chosen = self.dir.join(DEFAULT);
        if chosen.exists() {
            let Default { digest } = read_json(&chosen)?;
            match self.get(&digest) {
                Err(Error::UnknownKernel(_)) => {}
                kernel => return kernel,
            }
        }
        let staging = Staging::new(&self.dir)?;
        let unpacked = package::fetch(&staging, progress)?;
        tell(progress, "keep kernel", unpacked.release.clone());
        let kernel = self.keep(&unpacked.vmlinuz, Some(&unpacked.modules), &staging)?;
        let file = staging.join(DEFAULT);
        write_synced(&file, &to_json(&file, &Default { digest: kernel.digest.clone() })?)?;
        rename_synced(&file, &chosen)?;
        Ok(kernel)
    }

    /// Any other kernel: a bzImage or an ELF vmlinux. It is copied, so that a file which is rebuilt later doesn't
    /// change under sandboxes that sleep. Modules are taken from `modules/`, `lib/modules/<release>` or
    /// `../lib/modules/<release>` beside it; without any of these, all drivers have to be built in.
    ///
    /// # Errors
    /// [`Error::BadKernel`], [`Error::ModuleMissing`], [`Error::Io`].
    pub fn from_path(&self, path: &Path) -> Result<Kernel, Error> {
        let path = path.canonicalize().at("find kernel", path)?;
        let release = image::release(&path)?;
        let beside = path.parent().and_then(|dir| modules_beside(dir, &release));
        let staging = Staging::new(&self.dir)?;
        self.keep(&path, beside.as_deref(), &staging)
    }

    /// A kernel that is kept here, by its digest (with or without `sha256:`).
    ///
    /// # Errors
    /// [`Error::UnknownKernel`].
    pub fn get(&self, digest: &str) -> Result<Kernel, Error> {
        let unknown = || Error::UnknownKernel(digest.into());
        let hex = digest.strip_prefix("sha256:").unwrap_or(digest);
        if !is_hex(hex, 64) {
            return Err(unknown());
        }
        let dir = self.dir.join(hex);
        let record: Record = read_json(&dir.join(RECORD)).map_err(|_| unknown())?;
        let (vmlinuz, modules) = (dir.join(VMLINUZ), dir.join(MODULES));
        if !vmlinuz.is_file() {
            return Err(unknown());
        }
        let modules = modules.is_dir().then_some(modules);
        Ok(Kernel { digest: record.digest, vmlinuz, modules, release: record.release })
    }

    /// The initramfs for this kernel with `agent` as its first program, made if it isn't there yet.
    ///
    /// It holds `/init` (the agent), `/modules/NN-name.ko` and `/modules/list` (their file names in load order, one a
    /// line, each with the reasons to load it), `/dev/console`, `/dev/null` and the empty directories `/proc`, `/sys`, `/newroot` and `/run`.
    ///
    /// # Errors
    /// [`Error::BadAgent`] when the agent isn't a static program, [`Error::Io`].
    pub fn initramfs(&self, kernel: &Kernel, agent: &Path) -> Result<PathBuf, Error> {
        let dir = kernel.vmlinuz.parent().unwrap_or(&self.dir);
        // Before the file is read: what changes in between shows in the next stamp.
        let stamp = FileStamp::of(agent).at("look at", agent)?;
        if let Some(digest) = self.agent_digest(&stamp) {
            let target = dir.join(initramfs::file_name(&kernel.digest, &digest));
            if initramfs::touch(&target) {
                return Ok(target);
            }
        }
        let bytes = fs::read(agent).at("read", agent)?;
        initramfs::check_agent(agent, &bytes)?;
        let digest = sha256(&bytes);
        let name = initramfs::file_name(&kernel.digest, &digest);
        *self.agent.lock().unwrap_or_else(PoisonError::into_inner) = Some((stamp, digest));
        let target = dir.join(&name);
        if initramfs::touch(&target) {
            return Ok(target);
        }
        let cpio = initramfs::build(kernel, &bytes)?;
        let staging = Staging::new(&self.dir)?;
        let file = staging.join(&name);
        write_synced(&file, &cpio)?;
        rename_synced(&file, &target)?;
        initramfs::forget_old(dir, &name);
        Ok(target)
    }

    fn agent_digest(&self, stamp: &FileStamp) -> Option<String> {
        let known = self.agent.lock().unwrap_or_else(PoisonError::into_inner);
        known.as_ref().filter(|(of, _)| of == stamp).map(|(_, digest)| digest.clone())
    }

    /// The kernel as an ELF file with its relocations behind it, for a machine that loads it unpacked: made the first time,
    /// and then kept. None when the boot image is no bzImage or is packed in a way that this host can't unpack.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn unpacked(&self, kernel: &Kernel) -> Result<Option<PathBuf>, Error> {
        let target = kernel.vmlinuz.parent().unwrap_or(&self.dir).join(unpack::FILE);
        if !target.exists() {
            let staging = Staging::new(&self.dir)?;
            let file = staging.join(unpack::FILE);
            // An empty file: it was tried.
            write_synced(&file, &unpack::vmlinux(&kernel.vmlinuz, &staging).unwrap_or_default())?;
            rename_synced(&file, &target)?;
        }
        let bytes = target.metadata().at("look at", &target)?.len();
        Ok((bytes > 0).then_some(target))
    }

    /// Copies a boot image and the needed ones of its modules to where they stay.
    fn keep(&self, vmlinuz: &Path, modules: Option<&Path>, staging: &Staging) -> Result<Kernel, Error> {
        let ready = staging.join("kernel");
        fs::create_dir(&ready).at("create directory", &ready)?;
        let copy = ready.join(VMLINUZ);
        fs::copy(vmlinuz, &copy).at("copy to", &copy)?;
        // From the copy: what is kept is what was looked at.
        let release = image::release(&copy)?;
        let mut content = format!("{} vmlinuz\n", sha256_file(&copy)?);
        if let Some(from) = modules {
            let dir = ready.join(MODULES);
            fs::create_dir(&dir).at("create directory", &dir)?;
            for (number, module) in modules::closure(from)?.iter().enumerate() {
                let name = format!("{number:02}-{}.ko", module.name);
                content += &format!("{} {name}\n", sha256(&module.bytes));
                write_synced(&dir.join(name), &module.bytes)?;
            }
            sync_dir(&dir)?;
        }
        let hex = sha256(content.as_bytes());
        let digest = format!("sha256:{hex}");
        let record = ready.join(RECORD);
        write_synced(&record, &to_json(&record, &Record { digest: digest.clone(), release })?)?;
        fs::File::open(&copy).and_then(|file| file.sync_all()).at("sync", &copy)?;
        sync_dir(&ready)?;
        match rename_synced(&ready, &self.dir.join(&hex)) {
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            done => done?,
        }
        self.get(&digest)
    }
}

fn modules_beside(dir: &Path, release: &str) -> Option<PathBuf> {
    let mut candidates = vec![dir.join(MODULES)];
    if !release.is_empty() {
        candidates.push(dir.join("lib/modules").join(release));
        candidates.extend(dir.parent().map(|up| up.join("lib/modules").join(release)));
    }
    candidates.into_iter().find(|path| path.is_dir() && sorted_entries(path).is_ok_and(|all| !all.is_empty()))
}
