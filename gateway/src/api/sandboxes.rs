//! `torpor.v1.Sandboxes`.

use std::{pin::Pin, sync::Arc};

use futures::{Stream, StreamExt as _};
use prost::Message as _;
use tonic::{Request, Response, Status, Streaming};
use torpor_proto::v1;
use torpor_sandbox::{Phase, Request as Ask, lifecycle::may_reach};

use super::{Shared, convert, disks, exec, forward, network, to_status, watch};
use crate::{
    error::ApiError,
    service::{Deleted, View},
    store::{Record, Selector, page_token},
};

/// Records of one page whose facts are gathered at once.
const AT_ONCE: usize = 16;
const LARGEST_PAGE: i32 = 1000;
const USUAL_PAGE: i32 = 100;
/// A page ends early when its sandboxes are this large, since clients take messages of 4 MiB.
const PAGE_BYTES: usize = 2 << 20;

type Reply<T> = Result<Response<T>, Status>;
type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// See the module.
pub struct SandboxesApi(pub Shared);

fn page_size(asked: i32) -> Result<usize, ApiError> {
    match asked {
        0 => Ok(USUAL_PAGE as usize),
        1..=LARGEST_PAGE => Ok(asked as usize),
        _ => Err(ApiError::invalid("page_size", format!("{asked} is not between 1 and {LARGEST_PAGE}"))),
    }
}

fn token(token: String) -> Option<String> {
    Some(token).filter(|t| !t.is_empty())
}

impl SandboxesApi {
    async fn show(&self, record: Arc<Record>) -> v1::Sandbox {
        convert::sandbox(&self.0.view(record).await)
    }

    /// A verb on a sandbox: write, wait if asked to, show. The waiting runs in this call only; what was written is
    /// carried out whether or not anybody waits.
    async fn verb(&self, target: Option<v1::Target>, ask: Ask, wanted: Phase) -> Reply<v1::Sandbox> {
        let (target, wait) = convert::target(target).map_err(to_status)?;
        let applied = self.0.request(target, ask).await.map_err(to_status)?;
        let mut record = applied.record;
        // A retry of a request that was fulfilled long ago has nothing to wait for.
        if wait && (!applied.replayed || may_reach(&record.state, wanted)) {
            record = self.0.wait(&record.id, wanted).await.map_err(to_status)?;
        }
        Ok(Response::new(self.show(record).await))
    }
}

#[tonic::async_trait]
impl v1::sandboxes_server::Sandboxes for SandboxesApi {
    async fn create(&self, request: Request<v1::CreateSandboxRequest>) -> Reply<v1::Sandbox> {
        let request = request.into_inner();
        let wait = request.wait;
        let wish = convert::wish(request).map_err(to_status)?;
        // In a task of its own: a caller that goes away must not let go of the image before the record is written.
        let service = self.0.clone();
        let made = tokio::spawn(async move { service.create(wish).await }).await;
        let mut record = made.map_err(|e| to_status(ApiError::internal(e)))?.map_err(to_status)?;
        if wait {
            record = self.0.wait(&record.id, Phase::Ready).await.map_err(to_status)?;
        }
        Ok(Response::new(self.show(record).await))
    }

    async fn get(&self, request: Request<v1::GetSandboxRequest>) -> Reply<v1::Sandbox> {
        let record =
            self.0.store.get(&request.into_inner().sandbox).await.map_err(|e| to_status(e.into()))?;
        Ok(Response::new(self.show(Arc::new(record)).await))
    }

    async fn list(&self, request: Request<v1::ListSandboxesRequest>) -> Reply<v1::ListSandboxesResponse> {
        let request = request.into_inner();
        let size = page_size(request.page_size).map_err(to_status)?;
        let selector: Selector =
            request.label_selector.parse().map_err(|e: crate::store::StoreError| to_status(e.into()))?;
        let page = self.0.store.list(size, token(request.page_token), selector).await;
        let page = page.map_err(|e| to_status(e.into()))?;
        let views = futures::stream::iter(page.rows).map(|record| self.0.view(Arc::new(record)));
        let views: Vec<View> = views.buffered(AT_ONCE).collect().await;
        let mut answer = v1::ListSandboxesResponse::default();
        let mut bytes = 0;
        for view in &views {
            let sandbox = convert::sandbox(view);
            bytes += sandbox.encoded_len();
            if bytes > PAGE_BYTES && !answer.sandboxes.is_empty() {
                break;
            }
            answer.next_page_token = page_token(view.record.seq);
            answer.sandboxes.push(sandbox);
        }
        if answer.sandboxes.len() == views.len() {
            answer.next_page_token = page.next.unwrap_or_default();
        }
        Ok(Response::new(answer))
    }

    type WatchStream = Events<v1::SandboxEvent>;

    async fn watch(&self, request: Request<v1::WatchSandboxesRequest>) -> Reply<Self::WatchStream> {
        let stream = watch::watch(self.0.clone(), request.into_inner()).await.map_err(to_status)?;
        Ok(Response::new(stream))
    }

    async fn suspend(&self, request: Request<v1::SuspendRequest>) -> Reply<v1::Sandbox> {
        let request = request.into_inner();
        let keep = convert::wanted_keep(request.keep).map_err(to_status)?;
        self.verb(request.target, Ask::Suspend(keep), Phase::Suspended).await
    }

    async fn resume(&self, request: Request<v1::ResumeRequest>) -> Reply<v1::Sandbox> {
        let request = request.into_inner();
        let ask = Ask::Resume { cold_if_needed: request.restart_if_restore_fails };
        self.verb(request.target, ask, Phase::Ready).await
    }

    async fn stop(&self, request: Request<v1::StopRequest>) -> Reply<v1::Sandbox> {
        self.verb(request.into_inner().target, Ask::Stop, Phase::Stopped).await
    }

    async fn start(&self, request: Request<v1::StartRequest>) -> Reply<v1::Sandbox> {
        self.verb(request.into_inner().target, Ask::Start, Phase::Ready).await
    }

    async fn delete(&self, request: Request<v1::DeleteSandboxRequest>) -> Reply<v1::DeleteSandboxResponse> {
        use v1::delete_sandbox_response::Outcome;
        let request = request.into_inner();
        let (target, wait) = convert::target(request.target).map_err(to_status)?;
        let mut deleted = self.0.delete(target, request.allow_missing).await.map_err(to_status)?;
        if let (true, Deleted::Accepted(id)) = (wait, &deleted) {
            self.0.wait_gone(id).await.map_err(to_status)?;
            deleted = Deleted::Completed(id.clone());
        }
        let (outcome, id) = match deleted {
            Deleted::Completed(id) => (Outcome::Completed, id.to_string()),
            Deleted::Accepted(id) => (Outcome::Accepted, id.to_string()),
            Deleted::AlreadyAbsent => (Outcome::AlreadyAbsent, String::new()),
        };
        Ok(Response::new(v1::DeleteSandboxResponse { outcome: outcome.into(), id }))
    }

    type ExecStream = Events<v1::ExecOutput>;

    async fn exec(&self, request: Request<Streaming<v1::ExecInput>>) -> Reply<Self::ExecStream> {
        let stream = exec::exec(self.0.clone(), request.into_inner()).await?;
        Ok(Response::new(stream))
    }

    type LogsStream = Events<v1::LogChunk>;

    async fn logs(&self, request: Request<v1::LogsRequest>) -> Reply<Self::LogsStream> {
        let stream = super::logs::logs(self.0.clone(), request.into_inner()).await?;
        Ok(Response::new(stream))
    }

    async fn history(&self, request: Request<v1::HistoryRequest>) -> Reply<v1::HistoryResponse> {
        let request = request.into_inner();
        let size = page_size(request.page_size).map_err(to_status)?;
        let record = self.0.store.get(&request.sandbox).await.map_err(|e| to_status(e.into()))?;
        let page = self.0.store.history(&record.id, size, token(request.page_token)).await;
        let page = page.map_err(|e| to_status(e.into()))?;
        Ok(Response::new(v1::HistoryResponse {
            transitions: page.rows.into_iter().map(convert::transition).collect(),
            next_page_token: page.next.unwrap_or_default(),
        }))
    }

    async fn set_egress(&self, request: Request<v1::SetEgressRequest>) -> Reply<v1::Sandbox> {
        let record = network::set_egress(&self.0, request.into_inner()).await?;
        Ok(Response::new(self.show(record).await))
    }

    async fn expose(&self, request: Request<v1::ExposeRequest>) -> Reply<v1::ExposedPort> {
        network::expose(&self.0, request.into_inner()).await.map(Response::new)
    }

    async fn list_exposed(&self, request: Request<v1::ListExposedRequest>) -> Reply<v1::ListExposedResponse> {
        network::list(&self.0, request.into_inner()).await.map(Response::new)
    }

    async fn unexpose(&self, request: Request<v1::UnexposeRequest>) -> Reply<v1::UnexposeResponse> {
        network::unexpose(&self.0, request.into_inner()).await.map(Response::new)
    }

    type ForwardStream = Events<v1::ForwardOutput>;

    async fn forward(&self, request: Request<Streaming<v1::ForwardInput>>) -> Reply<Self::ForwardStream> {
        forward::forward(self.0.clone(), request.into_inner()).await.map(Response::new)
    }

    async fn get_disk(&self, request: Request<v1::GetDiskRequest>) -> Reply<v1::DiskReport> {
        disks::get(&self.0, request.into_inner()).await.map(Response::new)
    }

    async fn grow_disk(&self, request: Request<v1::GrowDiskRequest>) -> Reply<v1::Sandbox> {
        let record = disks::grow(&self.0, request.into_inner()).await?;
        Ok(Response::new(self.show(record).await))
    }

    type CompactDiskStream = Events<v1::CompactDiskProgress>;

    async fn compact_disk(&self, request: Request<v1::CompactDiskRequest>) -> Reply<Self::CompactDiskStream> {
        disks::compact(&self.0, request.into_inner()).await.map(Response::new)
    }

    type ExportDiskStream = Events<v1::ExportDiskChunk>;

    async fn export_disk(&self, request: Request<v1::ExportDiskRequest>) -> Reply<Self::ExportDiskStream> {
        disks::export(&self.0, request.into_inner()).await.map(Response::new)
    }
}
