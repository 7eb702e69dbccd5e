//! Images of drivers that keep their own: a create finds them there, pulls what is missing, and an import feeds them.

use std::sync::Arc;

use torpor_sandbox::{ComputeDriver, ImageFound, ImageSource, OnStep};

use crate::{
    drivers::Drivers,
    error::{ApiError, Code},
    service::{Service, Wish},
};

/// Has a driver fetch an image.
///
/// # Errors
/// `FAILED_PRECONDITION` for a driver without images of its own, `NOT_FOUND` for an image that can't be had, the driver's.
pub async fn pull(driver: &dyn ComputeDriver, image: &str, tell: OnStep<'_>) -> Result<ImageFound, ApiError> {
    let name = driver.capabilities().name;
    let Some(images) = driver.images() else {
        let message = format!("the {name} driver pulls no images; its images are built or imported");
        let error = ApiError::new(Code::FailedPrecondition, "UNSUPPORTED", message);
        return Err(error.with("next", "torpor image import"));
    };
    images.pull(image, tell).await.map_err(|error| match error {
        torpor_sandbox::DriverError::BaseMissing(why) => {
            ApiError::new(Code::NotFound, "IMAGE_NOT_FOUND", format!("{name} can't pull {why}"))
                .with("field", "image")
        }
        other => other.into(),
    })
}

/// Every driver with images of its own makes one of this root file system. The last one's.
///
/// # Errors
/// The first that fails.
pub async fn import(
    drivers: &[Arc<dyn ComputeDriver>],
    name: &str,
    source: &ImageSource,
    tell: OnStep<'_>,
) -> Result<Option<ImageFound>, ApiError> {
    let mut last = None;
    for driver in drivers {
        if let Some(images) = driver.images() {
            last = Some(images.import(name, source, tell).await?);
        }
    }
    Ok(last)
}

impl Drivers {
    /// Those that keep images of their own, which can be brought there.
    pub fn with_images(&self) -> Vec<Arc<dyn ComputeDriver>> {
        let takes =
            |driver: &&Arc<dyn ComputeDriver>| driver.images().is_some_and(|images| images.takes_imports());
        self.all().filter(takes).cloned().collect()
    }
}

impl Service {
    /// The digest of a create's image, when its driver keeps its own: pulled where it isn't there.
    ///
    /// # Errors
    /// As [`pull`].
    pub(crate) async fn fetch_image(&self, wish: &Wish) -> Result<Option<String>, ApiError> {
        let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let name = given(&wish.driver).unwrap_or_else(|| self.drivers.default_name().to_owned());
        let driver = self.driver(&name)?;
        let Some(images) = driver.images() else { return Ok(None) };
        let image = given(&wish.image).unwrap_or_else(|| self.defaults.image.clone());
        if let Some(found) = images.find(&image).await? {
            return Ok(Some(found.digest));
        }
        tracing::info!(driver = name, image, "pulling");
        let tell = |step: &'static str, detail: String| tracing::debug!(step, detail, "pulling");
        Ok(Some(pull(driver.as_ref(), &image, &tell).await?.digest))
    }
}
