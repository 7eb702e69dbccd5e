//! The gRPC service, one instance for each connection.

use std::{fs, path::Path, sync::Arc, time::SystemTime};

use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use torpor_proto::agent::v1::{
    AttachResponse, ConfigureRequest, ConfigureResponse, DownloadOutput, DownloadRequest, EnrollRequest,
    EnrollResponse, Event, EventsRequest, ExecInput, ExecOutput, FileResult, ForwardInput, ForwardOutput,
    ListFilesRequest, ListFilesResult, MakeDirectoryRequest, RemoveFileRequest, ShutdownRequest,
    ShutdownResponse, StatFileRequest, StatusRequest, StatusResponse, UploadInput, UploadResult,
    agent_server, exec_input, forward_input, upload_input,
};

use crate::{
    agent::{Agent, Mode},
    boot, configure, exec, files, forward, main_log, modules, proc, shutdown,
};

/// Messages that wait for a slow reader; a command that fills them is stopped by its pipe.
const WAITING: usize = 4;

/// Serves one connection.
pub struct Service {
    pub agent: Arc<Agent>,
    /// Closes when the connection has ended.
    pub connected: watch::Receiver<()>,
}

impl Service {
    /// The agent, when commands may be given to it.
    fn ready(&self) -> Result<&Arc<Agent>, Status> {
        let state = self.agent.state();
        if state.ending {
            return Err(Status::failed_precondition("the sandbox is shutting down"));
        }
        if !state.configured {
            return Err(Status::failed_precondition("the agent is not configured: call Configure first"));
        }
        Ok(&self.agent)
    }
}

#[tonic::async_trait]
impl agent_server::Agent for Service {
    type ExecStream = ReceiverStream<Result<ExecOutput, Status>>;
    type ForwardStream = ReceiverStream<Result<ForwardOutput, Status>>;
    type DownloadStream = ReceiverStream<Result<DownloadOutput, Status>>;
    type EventsStream = ReceiverStream<Result<Event, Status>>;

    async fn configure(
        &self,
        request: Request<ConfigureRequest>,
    ) -> Result<Response<ConfigureResponse>, Status> {
        let agent = &self.agent;
        let _turn = agent.turn.lock().await;
        let request = request.into_inner();
        let main = configure::accept(agent, &request)?;
        if agent.mode == Mode::Machine {
            let last = agent.state().network.clone();
            let network = request.network.clone();
            let settle = move || {
                // The disk may have become larger since the boot.
                boot::grow_root(Path::new("/"));
                configure::machine(&request, last.as_ref())
            };
            tokio::task::spawn_blocking(settle)
                .await
                .map_err(|error| Status::internal(error.to_string()))?
                .map_err(|error| Status::internal(error.to_string()))?;
            agent.state().network = network;
            if !agent.state().configured {
                modules::load_later();
            }
        }
        agent.state().configured = true;
        if let Some(main) = main {
            agent.state().main_started = Some(SystemTime::now());
            main_log::start(agent, main);
        }
        Ok(Response::new(ConfigureResponse {
            run: agent.state().run,
            boot_id: agent.boot_id.clone(),
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel_release: fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            root_bytes: nix::sys::statvfs::statvfs("/")
                .map_or(0, |root| root.blocks() * root.fragment_size()),
        }))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
        let (memory_total_bytes, memory_available_bytes) = proc::memory();
        let state = self.agent.state();
        Ok(Response::new(StatusResponse {
            run: state.run,
            configured: state.configured,
            boot_id: self.agent.boot_id.clone(),
            main_exit: self.agent.main.exit(),
            main_started: state.main_started.map(Into::into),
            execs: self.agent.execs(),
            memory_total_bytes,
            memory_available_bytes,
            time: Some(SystemTime::now().into()),
        }))
    }

    async fn enroll(&self, request: Request<EnrollRequest>) -> Result<Response<EnrollResponse>, Status> {
        let agent = self.ready()?;
        let asked = request.into_inner();
        let run = agent.state().run;
        if asked.run != run {
            return Err(Status::aborted(format!("run {} is not the present one, {run}", asked.run)));
        }
        let port = agent.port.get();
        let port =
            port.ok_or_else(|| Status::failed_precondition("only in a pod it has a port of its own"))?;
        Ok(Response::new(port.open(agent, asked).await?))
    }

    async fn exec(
        &self,
        request: Request<Streaming<ExecInput>>,
    ) -> Result<Response<Self::ExecStream>, Status> {
        let agent = self.ready()?.clone();
        let mut inbound = request.into_inner();
        let first = inbound.message().await?.and_then(|input| input.kind);
        let Some(exec_input::Kind::Start(start)) = first else {
            return Err(Status::invalid_argument("the first input of an exec must be `start`"));
        };
        let (sink, output) = mpsc::channel(WAITING);
        // On its own: the command outlives the connection.
        tokio::spawn(exec::run(agent, start, exec::Inbound::of(inbound), sink));
        Ok(Response::new(ReceiverStream::new(output)))
    }

    async fn attach(
        &self,
        request: Request<Streaming<ExecInput>>,
    ) -> Result<Response<AttachResponse>, Status> {
        main_log::feed(self.ready()?, request.into_inner()).await?;
        Ok(Response::new(AttachResponse {}))
    }

    async fn forward(
        &self,
        request: Request<Streaming<ForwardInput>>,
    ) -> Result<Response<Self::ForwardStream>, Status> {
        let agent = self.ready()?.clone();
        let mut inbound = request.into_inner();
        let first = inbound.message().await?.and_then(|input| input.kind);
        let Some(forward_input::Kind::Start(start)) = first else {
            return Err(Status::invalid_argument("the first input of a forward must be `start`"));
        };
        let port = u16::try_from(start.port).ok().filter(|port| *port > 0);
        let port = port.ok_or_else(|| Status::invalid_argument(format!("{} is not a port", start.port)))?;
        let (sink, output) = mpsc::channel(WAITING);
        tokio::spawn(forward::run(agent, port, inbound, sink));
        Ok(Response::new(ReceiverStream::new(output)))
    }

    async fn events(&self, _: Request<EventsRequest>) -> Result<Response<Self::EventsStream>, Status> {
        let agent = self.ready()?.clone();
        let (sink, events) = mpsc::channel(WAITING);
        tokio::spawn(main_log::follow(agent, sink));
        Ok(Response::new(ReceiverStream::new(events)))
    }

    async fn upload(
        &self,
        request: Request<Streaming<UploadInput>>,
    ) -> Result<Response<UploadResult>, Status> {
        let agent = self.ready()?.clone();
        let mut inbound = request.into_inner();
        let first = inbound.message().await?.and_then(|input| input.kind);
        let Some(upload_input::Kind::Start(start)) = first else {
            return Err(Status::invalid_argument("the first input of an upload must be `start`"));
        };
        Ok(Response::new(files::upload(&agent.transfers, start, inbound).await))
    }

    async fn download(
        &self,
        request: Request<DownloadRequest>,
    ) -> Result<Response<Self::DownloadStream>, Status> {
        let agent = self.ready()?.clone();
        let (sink, output) = mpsc::channel(WAITING);
        tokio::spawn(async move { files::download(&agent.transfers, request.into_inner(), sink).await });
        Ok(Response::new(ReceiverStream::new(output)))
    }

    async fn stat_file(&self, request: Request<StatFileRequest>) -> Result<Response<FileResult>, Status> {
        self.ready()?;
        Ok(Response::new(files::stat(request.into_inner().path).await))
    }

    async fn list_files(
        &self,
        request: Request<ListFilesRequest>,
    ) -> Result<Response<ListFilesResult>, Status> {
        self.ready()?;
        Ok(Response::new(files::list(request.into_inner()).await))
    }

    async fn make_directory(
        &self,
        request: Request<MakeDirectoryRequest>,
    ) -> Result<Response<FileResult>, Status> {
        self.ready()?;
        Ok(Response::new(files::make(request.into_inner()).await))
    }

    async fn remove_file(&self, request: Request<RemoveFileRequest>) -> Result<Response<FileResult>, Status> {
        self.ready()?;
        Ok(Response::new(files::remove(request.into_inner()).await))
    }

    async fn shutdown(
        &self,
        request: Request<ShutdownRequest>,
    ) -> Result<Response<ShutdownResponse>, Status> {
        let grace = request.into_inner().grace.and_then(|grace| grace.try_into().ok()).unwrap_or_default();
        let agent = &self.agent;
        let _turn = agent.turn.lock().await;
        // A sandbox that was never configured has nothing to lose and may be ended all the same.
        agent.state().ending = true;
        let (flushed, detail) = shutdown::quiesce(agent, grace).await;
        tokio::spawn(shutdown::leave(agent.clone(), self.connected.clone()));
        Ok(Response::new(ShutdownResponse { run: agent.state().run, flushed, detail }))
    }
}
