//! An agent within this program: what the driver asks of one, and no more.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use hyper::server::conn::http2;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    service::TowerToHyperService,
};
use tokio::{
    io::DuplexStream,
    sync::{mpsc, watch},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use torpor_agent_channel::guest;
use torpor_proto::agent::v1::{self as agent, agent_server};

#[derive(Debug, Default)]
struct State {
    run: u64,
    configured: bool,
    exit: Option<i32>,
}

/// One pod's.
#[derive(Debug)]
pub(crate) struct Local {
    state: Mutex<State>,
    boot_id: String,
    ended: watch::Sender<Option<i32>>,
}

impl Local {
    pub(crate) fn new(ended: watch::Sender<Option<i32>>) -> Arc<Self> {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap_or_default();
        Arc::new(Self { state: Mutex::default(), boot_id: boot_id.trim().to_owned(), ended })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn end(&self, code: i32) {
        self.ended.send_if_modified(|ended| {
            let first = ended.is_none();
            if first {
                *ended = Some(code);
            }
            first
        });
    }

    /// Answers on this stream for as long as the pod runs.
    pub(crate) fn serve(self: Arc<Self>, io: DuplexStream) {
        tokio::spawn(async move {
            let mut ended = self.ended.subscribe();
            let serve = async {
                let mut sessions = guest::serve(io);
                while let Some(session) = sessions.next().await {
                    let service = agent_server::AgentServer::new(Service(self.clone()));
                    tokio::spawn(
                        http2::Builder::new(TokioExecutor::new())
                            .serve_connection(TokioIo::new(session), TowerToHyperService::new(service)),
                    );
                }
            };
            tokio::select! {
                () = serve => {}
                () = until_some(&mut ended) => {
                    // For the last answer to be read.
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
            }
        });
    }
}

/// Waits for the code that a pod ended with, or until nobody can tell it any more.
pub(crate) async fn until_some(ended: &mut watch::Receiver<Option<i32>>) {
    while ended.borrow_and_update().is_none() {
        if ended.changed().await.is_err() {
            return;
        }
    }
}

struct Service(Arc<Local>);

fn absent<T>() -> Result<T, Status> {
    Err(Status::unimplemented("not by the agent of the tests"))
}

#[async_trait]
impl agent_server::Agent for Service {
    type ExecStream = ReceiverStream<Result<agent::ExecOutput, Status>>;
    type EventsStream = ReceiverStream<Result<agent::Event, Status>>;
    type ForwardStream = ReceiverStream<Result<agent::ForwardOutput, Status>>;
    type DownloadStream = ReceiverStream<Result<agent::DownloadOutput, Status>>;

    async fn configure(
        &self,
        request: Request<agent::ConfigureRequest>,
    ) -> Result<Response<agent::ConfigureResponse>, Status> {
        let request = request.into_inner();
        let mut state = self.0.lock();
        if request.run < state.run {
            return Err(Status::aborted(format!("run {} is over", request.run)));
        }
        state.run = request.run;
        state.configured = true;
        // A main command of "exit N" does.
        if let Some(main) = request.main
            && let [word, code] = main.argv.as_slice()
            && word == "exit"
        {
            state.exit = code.parse().ok();
        }
        Ok(Response::new(agent::ConfigureResponse {
            run: state.run,
            boot_id: self.0.boot_id.clone(),
            agent_version: "test".to_owned(),
            ..Default::default()
        }))
    }

    async fn status(
        &self,
        _: Request<agent::StatusRequest>,
    ) -> Result<Response<agent::StatusResponse>, Status> {
        let state = self.0.lock();
        Ok(Response::new(agent::StatusResponse {
            run: state.run,
            configured: state.configured,
            boot_id: self.0.boot_id.clone(),
            main_exit: state.exit.map(|code| agent::MainExit { code, ..Default::default() }),
            ..Default::default()
        }))
    }

    async fn enroll(
        &self,
        _: Request<agent::EnrollRequest>,
    ) -> Result<Response<agent::EnrollResponse>, Status> {
        absent()
    }

    async fn exec(
        &self,
        request: Request<Streaming<agent::ExecInput>>,
    ) -> Result<Response<Self::ExecStream>, Status> {
        let mut inputs = request.into_inner();
        let Some(agent::exec_input::Kind::Start(start)) = inputs.message().await?.and_then(|m| m.kind) else {
            return absent();
        };
        let (sink, outputs) = mpsc::channel(4);
        tokio::spawn(async move {
            use agent::exec_output::Kind;
            let _keeps = inputs;
            let text = format!("{}\n", start.argv.join(" "));
            let exit = agent::ExecExit::default();
            for kind in [Kind::Stdout(text.into_bytes().into()), Kind::Exit(exit)] {
                let _ = sink.send(Ok(agent::ExecOutput { kind: Some(kind) })).await;
            }
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
        let (sink, events) = mpsc::channel(4);
        let (run, exit) = {
            let state = self.0.lock();
            (state.run, state.exit)
        };
        let mut ended = self.0.ended.subscribe();
        tokio::spawn(async move {
            if let Some(code) = exit {
                let exit = agent::MainExit { code, ..Default::default() };
                let kind = Some(agent::event::Kind::MainExit(exit));
                let _ = sink.send(Ok(agent::Event { run, kind })).await;
            }
            // Open until the pod ends or nobody listens.
            tokio::select! {
                () = until_some(&mut ended) => {}
                () = sink.closed() => {}
            }
        });
        Ok(Response::new(ReceiverStream::new(events)))
    }

    async fn shutdown(
        &self,
        _: Request<agent::ShutdownRequest>,
    ) -> Result<Response<agent::ShutdownResponse>, Status> {
        self.0.end(0);
        Ok(Response::new(agent::ShutdownResponse { flushed: true, ..Default::default() }))
    }

    async fn forward(
        &self,
        _: Request<Streaming<agent::ForwardInput>>,
    ) -> Result<Response<Self::ForwardStream>, Status> {
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
}
