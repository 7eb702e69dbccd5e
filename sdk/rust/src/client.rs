//! The verbs.

use tonic::Streaming;
use torpor_proto::v1::{
    self, files_client::FilesClient, gateway_client::GatewayClient, images_client::ImagesClient,
    sandboxes_client::SandboxesClient,
};

use crate::{
    endpoint::{self, Options, Transport},
    error::Error,
    exec::Exec,
    retry::{Retry, fill_in, request_id},
    watch::Watch,
};

/// Makes a call by the client's retry policy, each attempt with the same request.
macro_rules! retried {
    ($self:ident.$service:ident().$method:ident($request:expr)) => {{
        let request = $request.clone();
        let attempt = || {
            let (mut client, request) = ($self.$service(), request.clone());
            async move { client.$method(request).await }
        };
        $self.retry.call(attempt).await
    }};
}

/// Asks for one page after the other: the rows of all, or the first `$limit` of them.
macro_rules! all_pages {
    ($self:ident.$service:ident().$method:ident($request:expr).$rows:ident) => {
        all_pages!($self.$service().$method($request).$rows, usize::MAX)
    };
    ($self:ident.$service:ident().$method:ident($request:expr).$rows:ident, $limit:expr) => {{
        let (mut request, limit) = ($request, $limit);
        let mut all = Vec::new();
        loop {
            let page = retried!($self.$service().$method(request))?;
            all.extend(page.$rows);
            if page.next_page_token.is_empty() || all.len() >= limit {
                all.truncate(limit);
                break Ok(all);
            }
            if page.next_page_token == request.page_token {
                break Err(Error::Protocol("a page names itself as the next one"));
            }
            request.page_token = page.next_page_token;
        }
    }};
}

/// Rows asked for at once.
const PAGE: i32 = 500;

/// A connection to a gateway. Cheap to clone; all clones share it.
///
/// Calls that are answered UNAVAILABLE are made again a few times ([`Retry`]). Verbs carry a request id, made up when the
/// caller gives none, so that a repeat returns the first result. No verb waits for its end: see [`Client::wait`].
///
/// Every method fails with [`Error::Api`] when the gateway refuses, and [`Error::Lost`] when the connection breaks.
#[derive(Clone, Debug)]
pub struct Client {
    channel: Transport,
    pub(crate) retry: Retry,
}

impl Client {
    /// Connects to `unix:///path/to.sock`, `https://host:port` or, on loopback, `http://host:port`.
    ///
    /// # Errors
    /// [`Error::Endpoint`] for anything else, [`Error::Unreachable`] when nobody answers there.
    pub async fn connect(endpoint: &str) -> Result<Self, Error> {
        Self::connect_with(endpoint, &Options::default()).await
    }

    /// The same, as somebody in particular.
    ///
    /// # Errors
    /// As [`Client::connect`]; also for a certificate that can't be read, and a token that would go in the clear.
    pub async fn connect_with(endpoint: &str, options: &Options) -> Result<Self, Error> {
        Ok(Self { channel: endpoint::connect(endpoint, options).await?, retry: Retry::default() })
    }

    /// The same connection with other patience.
    #[must_use]
    pub fn with_retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    pub(crate) fn transport(&self) -> Transport {
        self.channel.clone()
    }

    pub(crate) fn sandboxes(&self) -> SandboxesClient<Transport> {
        SandboxesClient::new(self.channel.clone())
    }

    pub(crate) fn files(&self) -> FilesClient<Transport> {
        FilesClient::new(self.channel.clone())
    }

    fn images(&self) -> ImagesClient<Transport> {
        ImagesClient::new(self.channel.clone())
    }

    fn gateway(&self) -> GatewayClient<Transport> {
        GatewayClient::new(self.channel.clone())
    }

    /// Makes a sandbox.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn create(&self, mut request: v1::CreateSandboxRequest) -> Result<v1::Sandbox, Error> {
        fill_in(&mut request.request_id);
        retried!(self.sandboxes().create(request))
    }

    /// One sandbox, by name or id.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn get(&self, sandbox: &str) -> Result<v1::Sandbox, Error> {
        let request = v1::GetSandboxRequest { sandbox: sandbox.to_owned() };
        retried!(self.sandboxes().get(request))
    }

    /// All sandboxes that a label selector chooses (empty: all), in every phase, through all pages.
    ///
    /// # Errors
    /// See [`Client`]; [`Error::Protocol`] when the pages go round in a circle.
    pub async fn list(&self, label_selector: &str) -> Result<Vec<v1::Sandbox>, Error> {
        self.list_of(label_selector, false).await
    }

    /// The same, of every workspace that the caller may look into.
    ///
    /// # Errors
    /// As [`Client::list`].
    pub async fn list_everywhere(&self, label_selector: &str) -> Result<Vec<v1::Sandbox>, Error> {
        self.list_of(label_selector, true).await
    }

    async fn list_of(&self, label_selector: &str, all_workspaces: bool) -> Result<Vec<v1::Sandbox>, Error> {
        let request = v1::ListSandboxesRequest {
            page_size: PAGE,
            page_token: String::new(),
            label_selector: label_selector.to_owned(),
            all_workspaces,
        };
        all_pages!(self.sandboxes().list(request).sandboxes)
    }

    /// Every change of the chosen sandboxes.
    pub fn watch(&self, request: v1::WatchSandboxesRequest) -> Watch {
        Watch::new(self.sandboxes(), self.retry, request)
    }

    /// Frees compute; keeps the disk, or disk and memory.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn suspend(&self, sandbox: &str, keep: v1::Keep) -> Result<v1::Sandbox, Error> {
        let request = v1::SuspendRequest { target: Some(target(sandbox)), keep: keep.into() };
        retried!(self.sandboxes().suspend(request))
    }

    /// Brings a suspended sandbox back; with `restart_if_restore_fails` it boots from its disk when its memory image can't
    /// be used.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn resume(&self, sandbox: &str, restart_if_restore_fails: bool) -> Result<v1::Sandbox, Error> {
        let request = v1::ResumeRequest { target: Some(target(sandbox)), restart_if_restore_fails };
        retried!(self.sandboxes().resume(request))
    }

    /// As suspend, and only start wakes it.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn stop(&self, sandbox: &str) -> Result<v1::Sandbox, Error> {
        let request = v1::StopRequest { target: Some(target(sandbox)) };
        retried!(self.sandboxes().stop(request))
    }

    /// Boots a sandbox from its disk.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn start(&self, sandbox: &str) -> Result<v1::Sandbox, Error> {
        let request = v1::StartRequest { target: Some(target(sandbox)) };
        retried!(self.sandboxes().start(request))
    }

    /// Removes a sandbox with all that belongs to it.
    ///
    /// # Errors
    /// See [`Client`]; NOT_FOUND for one that isn't there, unless `allow_missing`.
    pub async fn delete(
        &self,
        sandbox: &str,
        allow_missing: bool,
    ) -> Result<v1::DeleteSandboxResponse, Error> {
        let request = v1::DeleteSandboxRequest { target: Some(target(sandbox)), allow_missing };
        retried!(self.sandboxes().delete(request))
    }

    /// Runs a command in a Ready sandbox. Never made again by itself: a command may have effects.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn exec(&self, start: v1::ExecStart) -> Result<Exec, Error> {
        Exec::start(self.sandboxes(), start).await
    }

    /// Connects to the main command of a Ready sandbox. It goes on when the [`Exec`] is dropped, and its input stays open
    /// unless it is closed. The exit is the last output when the sandbox is Completed by it.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn attach(&self, start: v1::AttachStart) -> Result<Exec, Error> {
        Exec::attach(self.sandboxes(), start).await
    }

    /// Output of the main command or the console.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn logs(&self, request: v1::LogsRequest) -> Result<Streaming<v1::LogChunk>, Error> {
        retried!(self.sandboxes().logs(request))
    }

    /// Phase changes, newest first: the latest `limit`, or all.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn history(&self, sandbox: &str, limit: Option<usize>) -> Result<Vec<v1::Transition>, Error> {
        let limit = limit.unwrap_or(usize::MAX);
        let page_size = i32::try_from(limit).map_or(PAGE, |l| l.clamp(1, PAGE));
        let request =
            v1::HistoryRequest { sandbox: sandbox.to_owned(), page_size, page_token: String::new() };
        all_pages!(self.sandboxes().history(request).transitions, limit)
    }

    /// The workspace disk of a sandbox; with `check` also whether its structure is in order, for which it must be at rest.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn disk(&self, sandbox: &str, check: bool) -> Result<v1::DiskReport, Error> {
        let request = v1::GetDiskRequest { sandbox: sandbox.to_owned(), check };
        retried!(self.sandboxes().get_disk(request))
    }

    /// Makes the disk of a sandbox larger, to this size in bytes. It must be at rest, or Ready on a machine whose disks grow
    /// while they are used. The guest sees it at once, or at its next start.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn grow_disk(&self, sandbox: &str, size_bytes: u64) -> Result<v1::Sandbox, Error> {
        let request = v1::GrowDiskRequest { target: Some(target(sandbox)), size_bytes };
        retried!(self.sandboxes().grow_disk(request))
    }

    /// All images.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn list_images(&self) -> Result<Vec<v1::Image>, Error> {
        let response = retried!(self.images().list(v1::ListImagesRequest {}))?;
        Ok(response.images)
    }

    /// Builds an image; the last message of the stream holds it.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn build_image(
        &self,
        request: v1::BuildImageRequest,
    ) -> Result<Streaming<v1::ImageProgress>, Error> {
        Ok(self.images().build(request).await?.into_inner())
    }

    /// Has a driver that keeps images of its own fetch one; the last message of the stream holds it.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn pull_image(
        &self,
        request: v1::PullImageRequest,
    ) -> Result<Streaming<v1::ImageProgress>, Error> {
        Ok(self.images().pull(request).await?.into_inner())
    }

    /// Makes an image of a tar file or directory on the gateway's host; the last message of the stream holds it.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn import_image(
        &self,
        request: v1::ImportImageRequest,
    ) -> Result<Streaming<v1::ImageProgress>, Error> {
        Ok(self.images().import(request).await?.into_inner())
    }

    /// Removes an image that no sandbox uses.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn remove_image(
        &self,
        image: &str,
        allow_missing: bool,
    ) -> Result<v1::RemoveImageResponse, Error> {
        // Not made again: a repeat of a removal that worked would be told NOT_FOUND.
        let request = v1::RemoveImageRequest { image: image.to_owned(), allow_missing };
        Ok(self.images().remove(request).await?.into_inner())
    }

    /// What the gateway is and what it has left.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn info(&self) -> Result<v1::InfoResponse, Error> {
        retried!(self.gateway().info(v1::InfoRequest {}))
    }

    /// Whether the gateway serves.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn health(&self) -> Result<v1::HealthResponse, Error> {
        retried!(self.gateway().health(v1::HealthRequest {}))
    }
}

/// How a verb names its sandbox: any version, a fresh request id, no waiting in the gateway.
pub(crate) fn target(sandbox: &str) -> v1::Target {
    v1::Target { sandbox: sandbox.to_owned(), expected_version: 0, request_id: request_id(), wait: false }
}
