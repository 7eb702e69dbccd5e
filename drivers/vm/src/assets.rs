//! Where a VM's base disk, kernel and initramfs come from.

use std::path::{Path, PathBuf};

use torpor_images::{Catalog, Kernels};
use torpor_sandbox::DriverError;

use crate::config::{ConfigError, VmConfig};

/// What a guest is booted with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BootFiles {
    /// The boot image.
    pub(crate) kernel: PathBuf,
    /// The same kernel unpacked, where this host can do that.
    pub(crate) unpacked: Option<PathBuf>,
    pub(crate) initramfs: PathBuf,
}

/// A base image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Base {
    pub(crate) path: PathBuf,
    pub(crate) digest: String,
    pub(crate) size: u64,
}

/// The images and kernels below the state directory. Every call blocks.
#[derive(Debug)]
pub(crate) struct Assets {
    images: PathBuf,
    catalog: Catalog,
    kernels: Kernels,
    agent: PathBuf,
}

impl Assets {
    pub(crate) fn open(config: &VmConfig) -> Result<Self, ConfigError> {
        let failed = |source| ConfigError::Images { path: config.state_dir.clone(), source };
        Ok(Self {
            images: config.state_dir.join("images"),
            catalog: Catalog::open(&config.state_dir).map_err(failed)?,
            kernels: Kernels::open(&config.state_dir).map_err(failed)?,
            agent: config.agent.clone(),
        })
    }

    /// The base image of this digest.
    pub(crate) fn base(&self, digest: &str) -> Result<Base, DriverError> {
        match self.catalog.resolve(digest) {
            Ok(image) => Ok(Base { path: image.path, digest: image.digest, size: image.size_bytes }),
            Err(error) => Err(DriverError::BaseMissing(format!(
                "{error} (wanted: {digest} below {})",
                self.images.display()
            ))),
        }
    }

    /// Where the base of this digest is or should be, for a disk that exists already.
    pub(crate) fn base_path(&self, digest: &str) -> PathBuf {
        match self.catalog.resolve(digest) {
            Ok(image) => image.path,
            Err(_) => self.images.join(digest.strip_prefix("sha256:").unwrap_or(digest)).join("base.raw"),
        }
    }

    /// The default kernel or that of the spec, and the initramfs with our agent.
    pub(crate) fn boot(&self, kernel: Option<&Path>) -> Result<BootFiles, DriverError> {
        let kernel = match kernel {
            Some(path) => self
                .kernels
                .from_path(path)
                .map_err(|error| DriverError::Invalid(format!("kernel {}: {error}", path.display())))?,
            None => self
                .kernels
                .ensure_default(&mut |_| {})
                .map_err(|error| DriverError::backend("get the default guest kernel", error))?,
        };
        let initramfs = self
            .kernels
            .initramfs(&kernel, &self.agent)
            .map_err(|error| DriverError::backend("make the initramfs", error))?;
        let unpacked = self
            .kernels
            .unpacked(&kernel)
            .map_err(|error| DriverError::backend("unpack the guest kernel", error))?;
        Ok(BootFiles { kernel: kernel.vmlinuz, unpacked, initramfs })
    }
}
