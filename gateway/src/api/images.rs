//! `torpor.v1.Images`.

use std::{collections::HashMap, path::PathBuf, pin::Pin, sync::Arc, time::Duration};

use futures::Stream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use torpor_images::{Error, Image, Progress, Source};
use torpor_proto::v1;
use torpor_sandbox::{ComputeDriver, ImageFound, ImageSource};

use super::{Shared, to_status};
use crate::{
    engines,
    error::{ApiError, Code, with_causes},
};

const BUFFER: usize = 64;

type Steps = Pin<Box<dyn Stream<Item = Result<v1::ImageProgress, Status>> + Send>>;

/// See the module.
pub struct ImagesApi(pub Shared);

fn shown(image: &Image, sandboxes: u32) -> v1::Image {
    v1::Image {
        name: image.name.clone(),
        digest: image.digest.clone(),
        size_bytes: image.size_bytes,
        used_bytes: image.used_bytes,
        created: super::convert::time(std::time::UNIX_EPOCH + Duration::from_secs(image.created)),
        sandboxes,
    }
}

fn failed(error: &Error) -> Status {
    let message = with_causes(error);
    let (code, reason) = match error {
        Error::UnknownImage { .. } => (Code::NotFound, "IMAGE_NOT_FOUND"),
        Error::InUse { .. } => (Code::FailedPrecondition, "IMAGE_IN_USE"),
        Error::ToolMissing { .. } => (Code::FailedPrecondition, "TOOL_MISSING"),
        Error::BadName { .. }
        | Error::BadSource { .. }
        | Error::BadEntry { .. }
        | Error::Ambiguous { .. } => (Code::InvalidArgument, "INVALID_ARGUMENT"),
        _ => (Code::Internal, "IMAGE_FAILED"),
    };
    to_status(ApiError::new(code, reason, message))
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Status> {
    let done = tokio::task::spawn_blocking(work).await.map_err(|e| to_status(ApiError::internal(e)))?;
    done.map_err(|e| failed(&e))
}

/// What drivers with images of their own make of an import, too.
struct Feed {
    engines: Vec<Arc<dyn ComputeDriver>>,
    name: String,
    source: ImageSource,
}

/// A slow client misses some lines of detail.
fn teller(
    out: mpsc::Sender<Result<v1::ImageProgress, Status>>,
) -> impl Fn(&'static str, String) + Send + Sync {
    move |step, detail| drop(out.try_send(Ok(progress(step, &detail))))
}

fn done(image: v1::Image) -> v1::ImageProgress {
    v1::ImageProgress { step: "done".to_owned(), detail: String::new(), image: Some(image) }
}

fn of_engine(name: &str, found: &ImageFound) -> v1::Image {
    v1::Image {
        name: name.to_owned(),
        digest: found.digest.clone(),
        size_bytes: found.bytes,
        used_bytes: found.bytes,
        ..v1::Image::default()
    }
}

impl ImagesApi {
    /// Runs a build, streaming its steps. A client that goes away does not end it.
    fn stream(
        &self,
        work: impl FnOnce(&mut dyn FnMut(Progress)) -> Result<Image, Error> + Send + 'static,
    ) -> Steps {
        self.stream_to(work, None)
    }

    fn stream_to(
        &self,
        work: impl FnOnce(&mut dyn FnMut(Progress)) -> Result<Image, Error> + Send + 'static,
        feed: Option<Feed>,
    ) -> Steps {
        let (out, steps) = mpsc::channel(BUFFER);
        let service = self.0.clone();
        tokio::spawn(async move {
            let _turn = match service.building.try_lock() {
                Ok(turn) => turn,
                Err(_) => {
                    // Nobody may listen.
                    let _ = out.send(Ok(progress("wait", "another image is being made"))).await;
                    service.building.lock().await
                }
            };
            let to_client = out.clone();
            let tell_engines = teller(out.clone());
            let kernels = service.kernels.clone();
            let made = blocking(move || {
                let mut tell = |step: Progress| {
                    // A slow client misses some lines of detail.
                    let _ = to_client.try_send(Ok(progress(step.step, &step.detail)));
                };
                let image = work(&mut tell)?;
                // So that the first create need not wait for it. Without package sources an image is still good: for
                // sandboxes with a kernel of their own.
                if let Err(error) = kernels.ensure_default(&mut tell) {
                    tracing::warn!(%error, "the default guest kernel is not there yet");
                    tell(Progress { step: "no guest kernel", detail: error.to_string() });
                }
                Ok(image)
            })
            .await;
            let fed = match &feed {
                Some(feed) if made.is_ok() => {
                    engines::import(&feed.engines, &feed.name, &feed.source, &tell_engines).await.map(drop)
                }
                _ => Ok(()),
            };
            let last = match (made, fed) {
                (Ok(image), Ok(())) => Ok(done(shown(&image, 0))),
                (Ok(_), Err(error)) => Err(to_status(error)),
                (Err(status), _) => Err(status),
            };
            // Nobody may listen.
            let _ = out.send(last).await;
        });
        Box::pin(ReceiverStream::new(steps))
    }
}

fn progress(step: &str, detail: &str) -> v1::ImageProgress {
    v1::ImageProgress { step: step.to_owned(), detail: detail.to_owned(), image: None }
}

#[tonic::async_trait]
impl v1::images_server::Images for ImagesApi {
    async fn list(
        &self,
        _: Request<v1::ListImagesRequest>,
    ) -> Result<Response<v1::ListImagesResponse>, Status> {
        let catalog = self.0.images.clone();
        let list = blocking(move || catalog.list()).await?;
        let mut images = Vec::with_capacity(list.len());
        for image in list {
            let users = self.0.store.users_of_image(&image.digest).await.map_err(|e| to_status(e.into()))?;
            images.push(shown(&image, users));
        }
        Ok(Response::new(v1::ListImagesResponse { images }))
    }

    type BuildStream = Steps;

    async fn build(&self, request: Request<v1::BuildImageRequest>) -> Result<Response<Steps>, Status> {
        let request = request.into_inner();
        if request.recipe != "debian" {
            let problem = format!("'{}' is not a known recipe: debian", request.recipe.escape_debug());
            return Err(to_status(ApiError::invalid("recipe", problem)));
        }
        let name = if request.name.is_empty() { request.recipe } else { request.name };
        let catalog = self.0.images.clone();
        Ok(Response::new(self.stream(move |tell| catalog.build_debian(&name, &request.packages, tell))))
    }

    type PullStream = Steps;

    async fn pull(&self, request: Request<v1::PullImageRequest>) -> Result<Response<Steps>, Status> {
        let request = request.into_inner();
        if request.image.is_empty() {
            return Err(to_status(ApiError::invalid("image", "a name is needed")));
        }
        let name = match request.driver.as_str() {
            "" => self.0.drivers.default_name().to_owned(),
            name => name.to_owned(),
        };
        let driver = self.0.driver(&name).map_err(to_status)?;
        let (out, steps) = mpsc::channel(BUFFER);
        // A client that goes away does not end it.
        tokio::spawn(async move {
            let tell = teller(out.clone());
            let pulled = engines::pull(driver.as_ref(), &request.image, &tell).await;
            let last = pulled.map(|found| done(of_engine(&request.image, &found))).map_err(to_status);
            // Nobody may listen.
            let _ = out.send(last).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(steps))))
    }

    type ImportStream = Steps;

    async fn import(&self, request: Request<v1::ImportImageRequest>) -> Result<Response<Steps>, Status> {
        let request = request.into_inner();
        let path = PathBuf::from(&request.path);
        if !path.is_absolute() {
            return Err(to_status(ApiError::invalid(
                "path",
                "an absolute path on the gateway's host is needed",
            )));
        }
        let source = match std::fs::metadata(&path) {
            Ok(found) if found.is_dir() => ImageSource::Dir(path),
            Ok(_) => ImageSource::Tar(path),
            Err(error) => {
                return Err(to_status(ApiError::invalid("path", format!("'{}': {error}", path.display()))));
            }
        };
        let catalog = self.0.images.clone();
        let of_catalog = match source.clone() {
            ImageSource::Dir(path) => Source::Dir(path),
            ImageSource::Tar(path) => Source::Tar(path),
        };
        let engines = self.0.drivers.with_images();
        // A gateway of engines only has no use for disks.
        if !engines.is_empty() && engines.len() == self.0.drivers.names().len() {
            let (out, steps) = mpsc::channel(BUFFER);
            tokio::spawn(async move {
                let tell = teller(out.clone());
                let imported = engines::import(&engines, &request.name, &source, &tell).await;
                let last = match imported {
                    Ok(Some(found)) => Ok(done(of_engine(&request.name, &found))),
                    Ok(None) => Err(to_status(ApiError::internal("no driver took the image"))),
                    Err(error) => Err(to_status(error)),
                };
                // Nobody may listen.
                let _ = out.send(last).await;
            });
            return Ok(Response::new(Box::pin(ReceiverStream::new(steps))));
        }
        let feed = Feed { engines, name: request.name.clone(), source };
        let work = move |tell: &mut dyn FnMut(Progress)| catalog.import(&request.name, &of_catalog, tell);
        Ok(Response::new(self.stream_to(work, Some(feed))))
    }

    async fn remove(
        &self,
        request: Request<v1::RemoveImageRequest>,
    ) -> Result<Response<v1::RemoveImageResponse>, Status> {
        // In a task of its own: a caller that goes away must not open the gate in the middle.
        let service = self.0.clone();
        let removed = tokio::spawn(async move { remove(&service, request.into_inner()).await }).await;
        removed.map_err(|e| to_status(ApiError::internal(e)))?.map(Response::new)
    }
}

async fn remove(
    service: &Shared,
    request: v1::RemoveImageRequest,
) -> Result<v1::RemoveImageResponse, Status> {
    let _alone = service.image_gate.write().await;
    let catalog = service.images.clone();
    let list = blocking(move || catalog.list()).await?;
    let mut users = HashMap::new();
    for image in list {
        let count = service.store.users_of_image(&image.digest).await.map_err(|e| to_status(e.into()))?;
        users.insert(image.digest, count);
    }
    let catalog = service.images.clone();
    let in_use = move |digest: &str| users.get(digest).copied().unwrap_or(0);
    let removed = tokio::task::spawn_blocking(move || catalog.remove(&request.image, &in_use)).await;
    match removed.map_err(|e| to_status(ApiError::internal(e)))? {
        Ok(freed_bytes) => Ok(v1::RemoveImageResponse { removed: true, freed_bytes }),
        Err(Error::UnknownImage { .. }) if request.allow_missing => {
            Ok(v1::RemoveImageResponse { removed: false, freed_bytes: 0 })
        }
        Err(error) => Err(failed(&error)),
    }
}
