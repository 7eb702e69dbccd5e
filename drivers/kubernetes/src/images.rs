//! Images are the nodes' own business: a name is passed on as it is, and the kubelets fetch it.

use async_trait::async_trait;
use torpor_sandbox::{DriverError, ImageCare, ImageFound, ImageSource, OnStep};

use crate::driver::Inner;

/// Longest name of an image, bytes.
const LONGEST: usize = 512;

#[async_trait]
impl ImageCare for Inner {
    async fn find(&self, name: &str) -> Result<Option<ImageFound>, DriverError> {
        let odd = |c: char| c.is_whitespace() || c.is_control() || !c.is_ascii();
        if name.is_empty() || name.len() > LONGEST || name.contains(odd) || name.starts_with('-') {
            let shown = torpor_sandbox::words::said(name);
            return Err(DriverError::Invalid(format!("image: '{shown}' is not a name of an image")));
        }
        // What nobody has looked at yet has no digest but that of its name.
        let digest = name.rsplit_once('@').map_or(name, |(_, digest)| digest);
        Ok(Some(ImageFound { digest: digest.to_owned(), names: vec![name.to_owned()], bytes: 0 }))
    }

    async fn pull(&self, name: &str, _tell: OnStep<'_>) -> Result<ImageFound, DriverError> {
        self.find(name).await?.ok_or_else(|| DriverError::BaseMissing(name.to_owned()))
    }

    async fn import(&self, name: &str, _: &ImageSource, _: OnStep<'_>) -> Result<ImageFound, DriverError> {
        Err(DriverError::Unsupported(format!(
            "{name}: a cluster's nodes fetch images from registries; push it to one and name it there"
        )))
    }

    fn takes_imports(&self) -> bool {
        false
    }

    fn sizes_disks(&self) -> bool {
        true
    }
}
