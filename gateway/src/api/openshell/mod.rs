//! The part of the public `openshell.v1` interface that an unmodified client needs, over the same calls that `torpor.v1`
//! serves: conversions, and what has to be kept so that a client gets back what it has sent. Nothing below knows of it.

mod call;
mod config;
mod convert;
mod exec;
mod info;
mod logs;
mod page;
mod providers;
mod refused;
mod sandboxes;
mod services;
mod ssh;
mod templates;
mod watch;
mod wish;
mod workspaces;

use std::pin::Pin;

use futures::Stream;
use tonic::{Request, Response, Status, Streaming};
use torpor_proto::openshell::{sandbox::v1 as sandbox, v1 as os};

use super::{SandboxesApi, Shared, TemplatesApi, WorkspacesApi};
use call::open;
pub use refused::refused;

type Reply<T> = Result<Response<T>, Status>;
type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// See the module.
#[derive(Clone)]
pub struct OpenShellApi {
    service: Shared,
    ssh: ssh::Ssh,
    /// Scheme, host and port where clients reach this gateway by TCP.
    address: (String, String, u16),
}

impl OpenShellApi {
    /// Over a service; `tcp`: where the gateway listens, and whether with TLS.
    pub fn new(service: Shared, tcp: Option<(std::net::SocketAddr, bool)>) -> Self {
        let address = tcp.map(|(address, tls)| {
            let scheme = if tls { "https" } else { "http" };
            (scheme.to_owned(), address.ip().to_string(), address.port())
        });
        Self { service, ssh: ssh::Ssh::default(), address: address.unwrap_or_default() }
    }

    fn sandboxes(&self) -> SandboxesApi {
        SandboxesApi(self.service.clone())
    }

    fn templates(&self) -> TemplatesApi {
        TemplatesApi(self.service.clone())
    }

    fn workspaces(&self) -> WorkspacesApi {
        WorkspacesApi(self.service.clone())
    }
}

#[tonic::async_trait]
impl os::open_shell_server::OpenShell for OpenShellApi {
    async fn health(&self, _: Request<os::HealthRequest>) -> Reply<os::HealthResponse> {
        Ok(Response::new(info::health_of(self).await))
    }

    async fn get_current_user(
        &self,
        request: Request<os::GetCurrentUserRequest>,
    ) -> Reply<os::GetCurrentUserResponse> {
        Ok(Response::new(info::user(&open(request)?.0)))
    }

    async fn get_gateway_info(
        &self,
        _: Request<os::GetGatewayInfoRequest>,
    ) -> Reply<os::GetGatewayInfoResponse> {
        info::gateway(self).await.map(Response::new)
    }

    async fn create_sandbox(&self, request: Request<os::CreateSandboxRequest>) -> Reply<os::SandboxResponse> {
        let (call, message) = open(request)?;
        sandboxes::create(self, call, message).await.map(Response::new)
    }

    async fn get_sandbox(&self, request: Request<os::GetSandboxRequest>) -> Reply<os::SandboxResponse> {
        let (call, message) = open(request)?;
        sandboxes::get(self, call, message).await.map(Response::new)
    }

    async fn list_sandboxes(
        &self,
        request: Request<os::ListSandboxesRequest>,
    ) -> Reply<os::ListSandboxesResponse> {
        let (call, message) = open(request)?;
        sandboxes::list(self, call, message).await.map(Response::new)
    }

    async fn create_sandbox_template(
        &self,
        request: Request<os::CreateSandboxTemplateRequest>,
    ) -> Reply<os::SandboxTemplateResponse> {
        let (call, message) = open(request)?;
        templates::create(self, call, message).await.map(Response::new)
    }

    async fn get_sandbox_template(
        &self,
        request: Request<os::GetSandboxTemplateRequest>,
    ) -> Reply<os::SandboxTemplateResponse> {
        let (call, message) = open(request)?;
        templates::get(self, call, message).await.map(Response::new)
    }

    async fn list_sandbox_templates(
        &self,
        request: Request<os::ListSandboxTemplatesRequest>,
    ) -> Reply<os::ListSandboxTemplatesResponse> {
        let (call, message) = open(request)?;
        templates::list(self, call, message).await.map(Response::new)
    }

    async fn delete_sandbox_template(
        &self,
        request: Request<os::DeleteSandboxTemplateRequest>,
    ) -> Reply<os::DeleteSandboxTemplateResponse> {
        let (call, message) = open(request)?;
        templates::delete(self, call, message).await.map(Response::new)
    }

    async fn list_sandbox_providers(
        &self,
        request: Request<os::ListSandboxProvidersRequest>,
    ) -> Reply<os::ListSandboxProvidersResponse> {
        let (call, message) = open(request)?;
        providers::attached(self, call, message).await.map(Response::new)
    }

    async fn attach_sandbox_provider(
        &self,
        request: Request<os::AttachSandboxProviderRequest>,
    ) -> Reply<os::AttachSandboxProviderResponse> {
        let (call, message) = open(request)?;
        providers::attach(self, call, message).await.map(Response::new)
    }

    async fn detach_sandbox_provider(
        &self,
        request: Request<os::DetachSandboxProviderRequest>,
    ) -> Reply<os::DetachSandboxProviderResponse> {
        let (call, message) = open(request)?;
        providers::detach(self, call, message).await.map(Response::new)
    }

    async fn delete_sandbox(
        &self,
        request: Request<os::DeleteSandboxRequest>,
    ) -> Reply<os::DeleteSandboxResponse> {
        let (call, message) = open(request)?;
        sandboxes::delete(self, call, message).await.map(Response::new)
    }

    async fn stop_sandbox(&self, request: Request<os::StopSandboxRequest>) -> Reply<os::SandboxResponse> {
        let (call, message) = open(request)?;
        sandboxes::stop(self, call, message).await.map(Response::new)
    }

    async fn start_sandbox(&self, request: Request<os::StartSandboxRequest>) -> Reply<os::SandboxResponse> {
        let (call, message) = open(request)?;
        sandboxes::start(self, call, message).await.map(Response::new)
    }

    async fn create_ssh_session(
        &self,
        request: Request<os::CreateSshSessionRequest>,
    ) -> Reply<os::CreateSshSessionResponse> {
        let (call, message) = open(request)?;
        ssh::create(self, call, message).await.map(Response::new)
    }

    async fn expose_service(
        &self,
        request: Request<os::ExposeServiceRequest>,
    ) -> Reply<os::ServiceEndpointResponse> {
        let (call, message) = open(request)?;
        services::expose(self, call, message).await.map(Response::new)
    }

    async fn get_service(
        &self,
        request: Request<os::GetServiceRequest>,
    ) -> Reply<os::ServiceEndpointResponse> {
        let (call, message) = open(request)?;
        services::get(self, call, message).await.map(Response::new)
    }

    async fn list_services(
        &self,
        request: Request<os::ListServicesRequest>,
    ) -> Reply<os::ListServicesResponse> {
        let (call, message) = open(request)?;
        services::list(self, call, message).await.map(Response::new)
    }

    async fn delete_service(
        &self,
        request: Request<os::DeleteServiceRequest>,
    ) -> Reply<os::DeleteServiceResponse> {
        let (call, message) = open(request)?;
        services::delete(self, call, message).await.map(Response::new)
    }

    async fn revoke_ssh_session(
        &self,
        request: Request<os::RevokeSshSessionRequest>,
    ) -> Reply<os::RevokeSshSessionResponse> {
        let (call, message) = open(request)?;
        ssh::revoke(self, call, message).await.map(Response::new)
    }

    type ExecSandboxStream = Events<os::ExecSandboxEvent>;

    async fn exec_sandbox(&self, request: Request<os::ExecSandboxRequest>) -> Reply<Self::ExecSandboxStream> {
        let (call, message) = open(request)?;
        exec::exec(self, call, message).await.map(Response::new)
    }

    type ForwardTcpStream = Events<os::TcpForwardFrame>;

    async fn forward_tcp(
        &self,
        request: Request<Streaming<os::TcpForwardFrame>>,
    ) -> Reply<Self::ForwardTcpStream> {
        let (call, message) = open(request)?;
        exec::forward_tcp(self, call, message).await.map(Response::new)
    }

    type ExecSandboxInteractiveStream = Events<os::ExecSandboxEvent>;

    async fn exec_sandbox_interactive(
        &self,
        request: Request<Streaming<os::ExecSandboxInput>>,
    ) -> Reply<Self::ExecSandboxInteractiveStream> {
        let (call, message) = open(request)?;
        exec::interactive(self, call, message).await.map(Response::new)
    }

    async fn create_provider(
        &self,
        request: Request<os::CreateProviderRequest>,
    ) -> Reply<os::ProviderResponse> {
        let (call, message) = open(request)?;
        providers::create(self, call, message).await.map(Response::new)
    }

    async fn get_provider(&self, request: Request<os::GetProviderRequest>) -> Reply<os::ProviderResponse> {
        let (call, message) = open(request)?;
        providers::get(self, call, message).await.map(Response::new)
    }

    async fn list_providers(
        &self,
        request: Request<os::ListProvidersRequest>,
    ) -> Reply<os::ListProvidersResponse> {
        let (call, message) = open(request)?;
        providers::list(self, call, message).await.map(Response::new)
    }

    async fn update_provider(
        &self,
        request: Request<os::UpdateProviderRequest>,
    ) -> Reply<os::ProviderResponse> {
        let (call, message) = open(request)?;
        providers::update(self, call, message).await.map(Response::new)
    }

    async fn delete_provider(
        &self,
        request: Request<os::DeleteProviderRequest>,
    ) -> Reply<os::DeleteProviderResponse> {
        let (call, message) = open(request)?;
        providers::delete(self, call, message).await.map(Response::new)
    }

    async fn get_sandbox_config(
        &self,
        request: Request<sandbox::GetSandboxConfigRequest>,
    ) -> Reply<sandbox::GetSandboxConfigResponse> {
        let (call, message) = open(request)?;
        config::of_sandbox(self, call, message).await.map(Response::new)
    }

    async fn get_gateway_config(
        &self,
        _: Request<sandbox::GetGatewayConfigRequest>,
    ) -> Reply<sandbox::GetGatewayConfigResponse> {
        config::of_gateway(self).await.map(Response::new)
    }

    async fn update_config(
        &self,
        request: Request<os::UpdateConfigRequest>,
    ) -> Reply<os::UpdateConfigResponse> {
        let (call, message) = open(request)?;
        config::update(self, call, message).await.map(Response::new)
    }

    async fn get_sandbox_logs(
        &self,
        request: Request<os::GetSandboxLogsRequest>,
    ) -> Reply<os::GetSandboxLogsResponse> {
        let (call, message) = open(request)?;
        logs::get(self, call, message).await.map(Response::new)
    }

    type WatchSandboxStream = Events<os::SandboxStreamEvent>;

    async fn watch_sandbox(
        &self,
        request: Request<os::WatchSandboxRequest>,
    ) -> Reply<Self::WatchSandboxStream> {
        let (call, message) = open(request)?;
        watch::watch(self, call, message).await.map(Response::new)
    }

    async fn create_workspace(
        &self,
        request: Request<os::CreateWorkspaceRequest>,
    ) -> Reply<os::CreateWorkspaceResponse> {
        let (call, message) = open(request)?;
        workspaces::create(self, call, message).await.map(Response::new)
    }

    async fn get_workspace(
        &self,
        request: Request<os::GetWorkspaceRequest>,
    ) -> Reply<os::GetWorkspaceResponse> {
        let (call, message) = open(request)?;
        workspaces::get(self, call, message).await.map(Response::new)
    }

    async fn list_workspaces(
        &self,
        request: Request<os::ListWorkspacesRequest>,
    ) -> Reply<os::ListWorkspacesResponse> {
        let (call, message) = open(request)?;
        workspaces::list(self, call, message).await.map(Response::new)
    }

    async fn delete_workspace(
        &self,
        request: Request<os::DeleteWorkspaceRequest>,
    ) -> Reply<os::DeleteWorkspaceResponse> {
        let (call, message) = open(request)?;
        workspaces::delete(self, call, message).await.map(Response::new)
    }

    async fn add_workspace_member(
        &self,
        request: Request<os::AddWorkspaceMemberRequest>,
    ) -> Reply<os::AddWorkspaceMemberResponse> {
        let (call, message) = open(request)?;
        workspaces::add_member(self, call, message).await.map(Response::new)
    }

    async fn remove_workspace_member(
        &self,
        request: Request<os::RemoveWorkspaceMemberRequest>,
    ) -> Reply<os::RemoveWorkspaceMemberResponse> {
        let (call, message) = open(request)?;
        workspaces::remove_member(self, call, message).await.map(Response::new)
    }

    async fn list_workspace_members(
        &self,
        request: Request<os::ListWorkspaceMembersRequest>,
    ) -> Reply<os::ListWorkspaceMembersResponse> {
        let (call, message) = open(request)?;
        workspaces::members(self, call, message).await.map(Response::new)
    }
}
