//! `torpor.v1.Images`.

use std::{collections::HashMap, path::PathBuf, pin::Pin, time::Duration};

use futures::Stream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use torpor_images::{Error, Image, Progress, Source};
use torpor_proto::v1;

use super::{Shared, to_status};
use crate::error::{ApiError, Code, with_causes};

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

impl ImagesApi {
    /// Runs a build, streaming its steps. A client that goes away does not end it.
    fn stream(
        &self,
        work: impl FnOnce(&mut dyn FnMut(Progress)) -> Result<Image, Error> + Send + 'static,
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
            let kernels = service.kernels.clone();
            let done = blocking(move || {
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
            let last = done.map(|image| v1::ImageProgress {
                step: "done".to_owned(),
                detail: String::new(),
                image: Some(shown(&image, 0)),
            });
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
            Ok(found) if found.is_dir() => Source::Dir(path),
            Ok(_) => Source::Tar(path),
            Err(error) => {
                return Err(to_status(ApiError::invalid("path", format!("'{}': {error}", path.display()))));
            }
        };
        let catalog = self.0.images.clone();
        Ok(Response::new(self.stream(move |tell| catalog.import(&request.name, &source, tell))))
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
