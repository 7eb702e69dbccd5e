//! The driver that only pretends, with an agent that really connects: to servers of the test.

use std::{path::PathBuf, pin::Pin, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures::Stream;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UnixListener},
    sync::mpsc,
};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{Request, Response, Status, Streaming, transport::Channel};
use torpor_proto::agent::v1::{self as agent, agent_server, forward_input, forward_output::Kind};
use torpor_sandbox::{
    Capabilities, Change, ComputeDriver, DiskCare, DriverError, Facts, Keep, Observed, Run, SandboxId,
    SandboxSpec, Stopped, sim::SimDriver,
};

pub struct Wired {
    pub sim: Arc<SimDriver>,
    channel: Channel,
}

impl Wired {
    pub async fn new(sim: Arc<SimDriver>, socket: PathBuf) -> Arc<Self> {
        let listener = UnixListener::bind(&socket).unwrap();
        let server = tonic::transport::Server::builder().add_service(agent_server::AgentServer::new(Agent));
        tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
        Arc::new(Self { sim, channel: super::channel(socket).await })
    }
}

#[async_trait]
impl ComputeDriver for Wired {
    fn capabilities(&self) -> Capabilities {
        self.sim.capabilities()
    }
    fn disks(&self) -> Option<&dyn DiskCare> {
        self.sim.disks()
    }
    async fn create(&self, id: &SandboxId, spec: &SandboxSpec, run: Run) -> Result<Change, DriverError> {
        self.sim.create(id, spec, run).await
    }
    async fn adjust(&self, id: &SandboxId, spec: &SandboxSpec) -> Result<Change, DriverError> {
        self.sim.adjust(id, spec).await
    }
    async fn start(&self, id: &SandboxId, from: Keep, run: Run) -> Result<Change, DriverError> {
        self.sim.start(id, from, run).await
    }
    async fn stop(&self, id: &SandboxId, keep: Keep, deadline: Duration) -> Result<Stopped, DriverError> {
        self.sim.stop(id, keep, deadline).await
    }
    async fn delete(&self, id: &SandboxId) -> Result<Change, DriverError> {
        self.sim.delete(id).await
    }
    async fn observe(&self, id: &SandboxId) -> Result<Observed, DriverError> {
        self.sim.observe(id).await
    }
    async fn list(&self) -> Result<Vec<SandboxId>, DriverError> {
        self.sim.list().await
    }
    fn hints(&self) -> Pin<Box<dyn Stream<Item = SandboxId> + Send>> {
        self.sim.hints()
    }
    async fn agent(&self, _id: &SandboxId) -> Result<Channel, DriverError> {
        Ok(self.channel.clone())
    }
    async fn facts(&self, id: &SandboxId) -> Facts {
        self.sim.facts(id).await
    }
    fn agent_links(&self) -> Vec<(&'static str, usize)> {
        vec![("exec", 1), ("mtls", 2)]
    }
    async fn console(&self, id: &SandboxId, bytes: usize) -> Vec<u8> {
        self.sim.console(id, bytes).await
    }
}

struct Agent;

fn absent<T>() -> Result<T, Status> {
    Err(Status::unimplemented("not in this test"))
}

#[async_trait]
impl agent_server::Agent for Agent {
    type ExecStream = ReceiverStream<Result<agent::ExecOutput, Status>>;
    type EventsStream = ReceiverStream<Result<agent::Event, Status>>;
    type ForwardStream = ReceiverStream<Result<agent::ForwardOutput, Status>>;
    type DownloadStream = ReceiverStream<Result<agent::DownloadOutput, Status>>;

    async fn configure(
        &self,
        _: Request<agent::ConfigureRequest>,
    ) -> Result<Response<agent::ConfigureResponse>, Status> {
        absent()
    }
    async fn status(
        &self,
        _: Request<agent::StatusRequest>,
    ) -> Result<Response<agent::StatusResponse>, Status> {
        absent()
    }
    async fn enroll(
        &self,
        _: Request<agent::EnrollRequest>,
    ) -> Result<Response<agent::EnrollResponse>, Status> {
        absent()
    }
    /// `cat` gives its input back, every other command its arguments.
    async fn exec(
        &self,
        request: Request<Streaming<agent::ExecInput>>,
    ) -> Result<Response<Self::ExecStream>, Status> {
        use agent::{exec_input::Kind as In, exec_output::Kind as Out};
        let mut inputs = request.into_inner();
        let Some(In::Start(start)) = inputs.message().await?.and_then(|m| m.kind) else {
            return absent();
        };
        let (sink, outputs) = mpsc::channel(4);
        tokio::spawn(async move {
            let say = |kind| sink.send(Ok(agent::ExecOutput { kind: Some(kind) }));
            let _ = say(Out::Started(agent::ExecStarted { pid: 1 })).await;
            if start.argv[0] == "cat" {
                while let Ok(Some(agent::ExecInput { kind: Some(In::Stdin(data)) })) = inputs.message().await
                {
                    let _ = say(Out::Stdout(data)).await;
                }
            } else {
                let _ = say(Out::Stdout(start.argv.join(" ").into())).await;
            }
            let _ = say(Out::Exit(agent::ExecExit::default())).await;
        });
        Ok(Response::new(ReceiverStream::new(outputs)))
    }
    async fn attach(
        &self,
        _: Request<Streaming<agent::ExecInput>>,
    ) -> Result<Response<agent::AttachResponse>, Status> {
        absent()
    }
    async fn events(&self, _: Request<agent::EventsRequest>) -> Result<Response<Self::EventsStream>, Status> {
        absent()
    }
    async fn upload(
        &self,
        _: Request<Streaming<agent::UploadInput>>,
    ) -> Result<Response<agent::UploadResult>, Status> {
        absent()
    }
    async fn download(
        &self,
        _: Request<agent::DownloadRequest>,
    ) -> Result<Response<Self::DownloadStream>, Status> {
        absent()
    }
    async fn stat_file(
        &self,
        _: Request<agent::StatFileRequest>,
    ) -> Result<Response<agent::FileResult>, Status> {
        absent()
    }
    async fn list_files(
        &self,
        _: Request<agent::ListFilesRequest>,
    ) -> Result<Response<agent::ListFilesResult>, Status> {
        absent()
    }
    async fn make_directory(
        &self,
        _: Request<agent::MakeDirectoryRequest>,
    ) -> Result<Response<agent::FileResult>, Status> {
        absent()
    }
    async fn remove_file(
        &self,
        _: Request<agent::RemoveFileRequest>,
    ) -> Result<Response<agent::FileResult>, Status> {
        absent()
    }
    async fn shutdown(
        &self,
        _: Request<agent::ShutdownRequest>,
    ) -> Result<Response<agent::ShutdownResponse>, Status> {
        absent()
    }
    async fn forward(
        &self,
        request: Request<Streaming<agent::ForwardInput>>,
    ) -> Result<Response<Self::ForwardStream>, Status> {
        let mut inputs = request.into_inner();
        let Some(forward_input::Kind::Start(start)) = inputs.message().await?.and_then(|m| m.kind) else {
            return absent();
        };
        let (sink, outputs) = mpsc::channel(4);
        tokio::spawn(async move {
            let say = |kind| sink.send(Ok(agent::ForwardOutput { kind: Some(kind) }));
            let port = u16::try_from(start.port).unwrap();
            let Ok(stream) = TcpStream::connect(("127.0.0.1", port)).await else {
                let (kind, message) = (agent::forward_error::Kind::Refused.into(), "refused".to_owned());
                let _ = say(Kind::Error(agent::ForwardError { kind, message })).await;
                return;
            };
            let _ = say(Kind::Connected(agent::ForwardConnected {})).await;
            let (mut read, mut write) = stream.into_split();
            let feeding = tokio::spawn(async move {
                while let Ok(Some(message)) = inputs.message().await {
                    match message.kind {
                        Some(forward_input::Kind::Data(data)) => write.write_all(&data).await.unwrap(),
                        _ => break,
                    }
                }
            });
            let mut piece = [0; 1000];
            while let Ok(length) = read.read(&mut piece).await {
                if length == 0 {
                    let _ = say(Kind::Close(agent::ForwardClose {})).await;
                    break;
                }
                let _ = say(Kind::Data(piece[..length].to_vec().into())).await;
            }
            let _ = feeding.await;
        });
        Ok(Response::new(ReceiverStream::new(outputs)))
    }
}
