//! The images of drivers that keep their own: a container engine pulls and stores what its containers are made of.

use std::path::PathBuf;

use async_trait::async_trait;

use crate::driver::DriverError;

/// What is told of a long operation: a short step, such as `pull`, and its detail, which may be empty.
pub type OnStep<'a> = &'a (dyn Fn(&'static str, String) + Send + Sync);

/// An image of a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageFound {
    /// "sha256:…": what a sandbox is bound to when it is created.
    pub digest: String,
    /// Its names.
    pub names: Vec<String>,
    /// What it takes on the host, bytes, as far as the driver says.
    pub bytes: u64,
}

/// Where the root file system of a new image comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageSource {
    /// A tar archive, plain or compressed.
    Tar(PathBuf),
    /// A directory.
    Dir(PathBuf),
}

/// The images of one driver.
#[async_trait]
pub trait ImageCare: Send + Sync {
    /// The image of this name or digest, if it is there.
    ///
    /// # Errors
    /// The driver's: most often `Unreachable`.
    async fn find(&self, name: &str) -> Result<Option<ImageFound>, DriverError>;

    /// Fetches an image by its name from where that says, as the driver is configured.
    ///
    /// # Errors
    /// `BaseMissing` when there is no such image or it may not be had, else the driver's.
    async fn pull(&self, name: &str, tell: OnStep<'_>) -> Result<ImageFound, DriverError>;

    /// Makes an image of a root file system and gives it a name, which moves when it exists.
    ///
    /// # Errors
    /// `Invalid` for a name or source that can't be used, else the driver's.
    async fn import(
        &self,
        name: &str,
        source: &ImageSource,
        tell: OnStep<'_>,
    ) -> Result<ImageFound, DriverError>;

    /// Whether images can be brought here. Not to who only passes their names on.
    fn takes_imports(&self) -> bool {
        true
    }

    /// Whether a sandbox of such an image has a disk whose size can be asked for.
    fn sizes_disks(&self) -> bool {
        false
    }
}
