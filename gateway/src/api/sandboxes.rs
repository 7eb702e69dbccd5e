//! `torpor.v1.Sandboxes`.

use std::{pin::Pin, sync::Arc};

use futures::{Stream, StreamExt as _};
use prost::Message as _;
use tonic::{Request, Response, Status, Streaming};
use torpor_proto::v1;
use torpor_sandbox::{Phase, Request as Ask, lifecycle::may_reach};

use super::{Shared, convert, disks, exec, forward, network, ssh, to_its_end, update, watch};
use crate::{
    access::{self, Caller},
    error::ApiError,
    service::{Deleted, Target, View},
    store::{Record, Selector, page_token},
};

/// Records of one page whose facts are gathered at once.
const AT_ONCE: usize = 16;
const LARGEST_PAGE: i32 = 1000;
const USUAL_PAGE: i32 = 100;
/// A page ends early when its sandboxes are this large, since clients take messages of 4 MiB.
pub(super) const PAGE_BYTES: usize = 2 << 20;

type Reply<T> = Result<Response<T>, Status>;
type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// See the module.
pub struct SandboxesApi(pub Shared);

pub(super) fn page_size(asked: i32) -> Result<usize, ApiError> {
    match asked {
        0 => Ok(USUAL_PAGE as usize),
        1..=LARGEST_PAGE => Ok(asked as usize),
        _ => Err(ApiError::invalid("page_size", format!("{asked} is not between 1 and {LARGEST_PAGE}"))),
    }
}

/// What of a sandbox its caller may see.
pub(super) fn veiled(caller: &Caller, mut sandbox: v1::Sandbox) -> v1::Sandbox {
    if let Some(spec) = &mut sandbox.spec {
        caller.veil(&sandbox.workspace, &mut spec.environment);
    }
    sandbox
}

impl SandboxesApi {
    /// The selector of a listing, within what the caller may look into.
    async fn chosen(&self, caller: &Caller, labels: &str, all: bool) -> Result<Selector, Status> {
        let selector: Selector = labels.parse()?;
        let scope = caller.scope(all)?;
        if !all {
            // An empty list of a workspace that isn't there would be a lie.
            self.0.store.workspace(caller.current()).await?;
        }
        Ok(selector.within(scope))
    }

    async fn show(&self, record: Arc<Record>) -> v1::Sandbox {
        convert::sandbox(&self.0.view(record).await)
    }

    /// A verb on a sandbox: write, wait if asked to, show. The waiting runs in this call only; what was written is
    /// carried out whether or not anybody waits.
    async fn verb(
        &self,
        caller: &Caller,
        target: Option<v1::Target>,
        ask: Ask,
        wanted: Phase,
    ) -> Reply<v1::Sandbox> {
        let (target, wait) = allowed(caller, target).await?;
        let applied = self.0.request(target, ask).await?;
        let mut record = applied.record;
        // A retry of a request that was fulfilled long ago has nothing to wait for.
        if wait && (!applied.replayed || may_reach(&record.state, wanted)) {
            record = self.0.wait(&record.id, wanted).await?;
        }
        Ok(Response::new(self.show(record).await))
    }
}

/// A verb's target, when its caller may ask for it.
pub async fn allowed(caller: &Caller, target: Option<v1::Target>) -> Result<(Target, bool), Status> {
    let (mut target, wait) = convert::target(target)?;
    target.sandbox = caller.key(&target.sandbox).await?;
    Ok((target, wait))
}

#[tonic::async_trait]
impl v1::sandboxes_server::Sandboxes for SandboxesApi {
    async fn create(&self, request: Request<v1::CreateSandboxRequest>) -> Reply<v1::Sandbox> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        let wait = request.wait;
        let mut wish = convert::wish(request)?;
        // "team/box" is box in team.
        let named = wish.name.take().unwrap_or_default();
        let (workspace, name) = named.split_once('/').unwrap_or(("", &named));
        wish.workspace = Some(caller.workspace(workspace)?);
        wish.trusted = caller.is_admin();
        for port in &wish.expose {
            network::may_listen(&caller, port.host.as_deref())?;
        }
        wish.name = convert::text(name.to_owned());
        // In a task of its own: a caller that goes away must not let go of the image before the record is written.
        let service = self.0.clone();
        let mut record = to_its_end(async move { service.create(wish).await }).await?;
        caller.speaks_of(&format!("{} ({})", record.name, record.id));
        if wait {
            record = self.0.wait(&record.id, Phase::Ready).await?;
        }
        Ok(Response::new(self.show(record).await))
    }

    async fn get(&self, request: Request<v1::GetSandboxRequest>) -> Reply<v1::Sandbox> {
        let caller = access::caller(&request)?;
        let key = caller.key(&request.into_inner().sandbox).await?;
        let record = self.0.store.get(&key).await?;
        Ok(Response::new(veiled(&caller, self.show(Arc::new(record)).await)))
    }

    async fn list(&self, request: Request<v1::ListSandboxesRequest>) -> Reply<v1::ListSandboxesResponse> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        let size = page_size(request.page_size)?;
        let selector = self.chosen(&caller, &request.label_selector, request.all_workspaces).await?;
        let page = self.0.store.list(size, convert::text(request.page_token), selector).await?;
        let views = futures::stream::iter(page.rows).map(|record| self.0.view(Arc::new(record)));
        let views: Vec<View> = views.buffered(AT_ONCE).collect().await;
        let mut answer = v1::ListSandboxesResponse::default();
        let mut bytes = 0;
        for view in &views {
            let sandbox = veiled(&caller, convert::sandbox(view));
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
        let caller = access::caller(&request)?;
        let mut request = request.into_inner();
        request.sandbox = caller.key(&request.sandbox).await?;
        // One sandbox was asked for already.
        let all = request.all_workspaces || !request.sandbox.is_empty();
        let selector: Selector = match request.sandbox.is_empty() {
            false => request.label_selector.parse()?,
            true => self.chosen(&caller, &request.label_selector, all).await?,
        };
        let stream = watch::watch(self.0.clone(), caller, request, selector).await?;
        Ok(Response::new(stream))
    }

    async fn suspend(&self, request: Request<v1::SuspendRequest>) -> Reply<v1::Sandbox> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        let keep = convert::wanted_keep(request.keep)?;
        self.verb(&caller, request.target, Ask::Suspend(keep), Phase::Suspended).await
    }

    async fn resume(&self, request: Request<v1::ResumeRequest>) -> Reply<v1::Sandbox> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        let ask = Ask::Resume { cold_if_needed: request.restart_if_restore_fails };
        self.verb(&caller, request.target, ask, Phase::Ready).await
    }

    async fn stop(&self, request: Request<v1::StopRequest>) -> Reply<v1::Sandbox> {
        let caller = access::caller(&request)?;
        self.verb(&caller, request.into_inner().target, Ask::Stop, Phase::Stopped).await
    }

    async fn start(&self, request: Request<v1::StartRequest>) -> Reply<v1::Sandbox> {
        let caller = access::caller(&request)?;
        self.verb(&caller, request.into_inner().target, Ask::Start, Phase::Ready).await
    }

    async fn delete(&self, request: Request<v1::DeleteSandboxRequest>) -> Reply<v1::DeleteSandboxResponse> {
        use v1::delete_sandbox_response::Outcome;
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        let (target, wait) = allowed(&caller, request.target).await?;
        let mut deleted = self.0.delete(target, request.allow_missing).await?;
        if let (true, Deleted::Accepted(id)) = (wait, &deleted) {
            self.0.wait_gone(id).await?;
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
        let caller = access::caller(&request)?;
        let stream = exec::exec(self.0.clone(), &caller, request.into_inner()).await?;
        Ok(Response::new(stream))
    }

    type AttachStream = Events<v1::ExecOutput>;

    async fn attach(&self, request: Request<Streaming<v1::ExecInput>>) -> Reply<Self::AttachStream> {
        let caller = access::caller(&request)?;
        let stream = super::attach::attach(self.0.clone(), &caller, request.into_inner()).await?;
        Ok(Response::new(stream))
    }

    type LogsStream = Events<v1::LogChunk>;

    async fn logs(&self, request: Request<v1::LogsRequest>) -> Reply<Self::LogsStream> {
        let caller = access::caller(&request)?;
        let mut request = request.into_inner();
        request.sandbox = caller.key(&request.sandbox).await?;
        let stream = super::logs::logs(self.0.clone(), request).await?;
        Ok(Response::new(stream))
    }

    async fn history(&self, request: Request<v1::HistoryRequest>) -> Reply<v1::HistoryResponse> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        let size = page_size(request.page_size)?;
        let key = caller.key(&request.sandbox).await?;
        let record = self.0.store.get(&key).await?;
        let page = self.0.store.history(&record.id, size, convert::text(request.page_token)).await?;
        Ok(Response::new(v1::HistoryResponse {
            transitions: page.rows.into_iter().map(convert::transition).collect(),
            next_page_token: page.next.unwrap_or_default(),
        }))
    }

    async fn update(&self, request: Request<v1::UpdateSandboxRequest>) -> Reply<v1::Sandbox> {
        let caller = access::caller(&request)?;
        let record = update::update(&self.0, &caller, request.into_inner()).await?;
        Ok(Response::new(self.show(record).await))
    }

    async fn resume_pending_update(
        &self,
        request: Request<v1::ResumePendingUpdateRequest>,
    ) -> Reply<v1::Sandbox> {
        let caller = access::caller(&request)?;
        let record = update::resume(&self.0, &caller, request.into_inner()).await?;
        Ok(Response::new(self.show(record).await))
    }

    async fn set_egress(&self, request: Request<v1::SetEgressRequest>) -> Reply<v1::Sandbox> {
        let record = network::set_egress(&self.0, &access::caller(&request)?, request.into_inner()).await?;
        Ok(Response::new(self.show(record).await))
    }

    async fn expose(&self, request: Request<v1::ExposeRequest>) -> Reply<v1::ExposedPort> {
        network::expose(&self.0, &access::caller(&request)?, request.into_inner()).await.map(Response::new)
    }

    async fn list_exposed(&self, request: Request<v1::ListExposedRequest>) -> Reply<v1::ListExposedResponse> {
        network::list(&self.0, &access::caller(&request)?, request.into_inner()).await.map(Response::new)
    }

    async fn unexpose(&self, request: Request<v1::UnexposeRequest>) -> Reply<v1::UnexposeResponse> {
        network::unexpose(&self.0, &access::caller(&request)?, request.into_inner()).await.map(Response::new)
    }

    type ForwardStream = Events<v1::ForwardOutput>;

    async fn forward(&self, request: Request<Streaming<v1::ForwardInput>>) -> Reply<Self::ForwardStream> {
        forward::forward(self.0.clone(), &access::caller(&request)?, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn create_ssh_session(
        &self,
        request: Request<v1::CreateSshSessionRequest>,
    ) -> Reply<v1::SshSession> {
        ssh::create(&self.0, &access::caller(&request)?, request.into_inner()).await.map(Response::new)
    }

    async fn revoke_ssh_session(
        &self,
        request: Request<v1::RevokeSshSessionRequest>,
    ) -> Reply<v1::RevokeSshSessionResponse> {
        ssh::revoke(&self.0, &access::caller(&request)?, request.into_inner()).await.map(Response::new)
    }

    type SshStream = Events<v1::ForwardOutput>;

    async fn ssh(&self, request: Request<Streaming<v1::SshInput>>) -> Reply<Self::SshStream> {
        ssh::connect(self.0.clone(), &access::caller(&request)?, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn get_disk(&self, request: Request<v1::GetDiskRequest>) -> Reply<v1::DiskReport> {
        disks::get(&self.0, &access::caller(&request)?, request.into_inner()).await.map(Response::new)
    }

    async fn grow_disk(&self, request: Request<v1::GrowDiskRequest>) -> Reply<v1::Sandbox> {
        let record = disks::grow(&self.0, &access::caller(&request)?, request.into_inner()).await?;
        Ok(Response::new(self.show(record).await))
    }

    type CompactDiskStream = Events<v1::CompactDiskProgress>;

    async fn compact_disk(&self, request: Request<v1::CompactDiskRequest>) -> Reply<Self::CompactDiskStream> {
        disks::compact(&self.0, &access::caller(&request)?, request.into_inner()).await.map(Response::new)
    }

    type ExportDiskStream = Events<v1::ExportDiskChunk>;

    async fn export_disk(&self, request: Request<v1::ExportDiskRequest>) -> Reply<Self::ExportDiskStream> {
        disks::export(&self.0, &access::caller(&request)?, request.into_inner()).await.map(Response::new)
    }
}
