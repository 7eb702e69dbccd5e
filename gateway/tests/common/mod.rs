//! A real gateway over the driver that only pretends, and clients on its socket.
#![allow(dead_code, reason = "each test file uses what it needs")]

pub mod process;
pub mod wired;

use std::{collections::HashMap, path::PathBuf, sync::Arc, time::Duration};

use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint, Uri};
use torpor_gateway::{Config, Gateway};
use torpor_proto::v1::{
    self, gateway_client::GatewayClient, images_client::ImagesClient, sandboxes_client::SandboxesClient,
};
use torpor_sandbox::{
    ComputeDriver,
    sim::{Script, SimDriver},
};

pub struct World {
    pub dir: TempDir,
    pub sim: Arc<SimDriver>,
    pub config: Config,
    gateway: Option<Gateway>,
    /// In place of the sim driver alone.
    wired: Option<Arc<wired::Wired>>,
}

pub async fn channel(socket: PathBuf) -> Channel {
    try_channel(socket).await.unwrap()
}

/// The same, to a gateway that may end at any time.
pub async fn try_channel(socket: PathBuf) -> Result<Channel, tonic::transport::Error> {
    let connect = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { tokio::net::UnixStream::connect(socket).await.map(hyper_util::rt::TokioIo::new) }
    });
    Endpoint::from_static("http://gateway").connect_with_connector(connect).await
}

impl World {
    pub async fn new(script: Script) -> Self {
        Self::with(script, |_| {}).await
    }

    pub async fn with(script: Script, change: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config {
            state_dir: dir.path().join("state"),
            run_dir: dir.path().join("run"),
            listen: format!("unix://{}/gateway.sock", dir.path().display()),
            drivers: vec!["sim".into()],
            ..Config::default()
        };
        change(&mut config);
        let mut world = Self { dir, sim: SimDriver::new(script), config, gateway: None, wired: None };
        world.start().await;
        world
    }

    /// With an agent whose connections are real.
    pub async fn with_agent(script: Script) -> Self {
        let mut world = Self::new(script).await;
        world.stop().await;
        let socket = world.dir.path().join("agent.sock");
        world.wired = Some(wired::Wired::new(world.sim.clone(), socket).await);
        world.start().await;
        world
    }

    pub async fn start(&mut self) {
        let driver: Arc<dyn ComputeDriver> = match &self.wired {
            Some(wired) => wired.clone(),
            None => self.sim.clone(),
        };
        let drivers = vec![driver];
        self.gateway = Some(Gateway::start_with(self.config.clone(), Some(drivers)).await.unwrap());
    }

    pub async fn stop(&mut self) {
        if let Some(gateway) = self.gateway.take() {
            gateway.end().await;
        }
    }

    pub async fn restart(&mut self) {
        self.stop().await;
        self.start().await;
    }

    pub fn socket(&self) -> PathBuf {
        self.config.socket().unwrap()
    }

    /// Where its figures and probes are.
    pub fn figures(&self) -> String {
        self.gateway.as_ref().unwrap().figures().unwrap().to_string()
    }

    pub async fn channel(&self) -> Channel {
        channel(self.socket()).await
    }

    pub async fn sandboxes(&self) -> SandboxesClient<Channel> {
        SandboxesClient::new(channel(self.socket()).await)
    }

    pub async fn images(&self) -> ImagesClient<Channel> {
        ImagesClient::new(channel(self.socket()).await)
    }

    pub async fn info(&self) -> v1::InfoResponse {
        let mut client = GatewayClient::new(channel(self.socket()).await);
        client.info(v1::InfoRequest {}).await.unwrap().into_inner()
    }
}

pub fn create(name: &str) -> v1::CreateSandboxRequest {
    v1::CreateSandboxRequest { name: name.into(), wait: true, ..Default::default() }
}

pub fn target(name: &str) -> Option<v1::Target> {
    Some(v1::Target { sandbox: name.into(), wait: true, ..Default::default() })
}

pub fn no_wait(name: &str) -> Option<v1::Target> {
    Some(v1::Target { sandbox: name.into(), ..Default::default() })
}

pub fn phase(sandbox: &v1::Sandbox) -> v1::Phase {
    sandbox.status.as_ref().unwrap().phase()
}

pub fn slow() -> Script {
    let delay = (Duration::from_millis(20), Duration::from_millis(60));
    Script { delay, ..Script::default() }
}

/// ErrorInfo of a status: its reason and what it says to do next.
pub fn error_info(status: &tonic::Status) -> (String, String) {
    use tonic_types::StatusExt as _;
    let info = status.get_error_details().error_info().cloned().expect("every error carries ErrorInfo");
    assert_eq!(info.domain, "torpor");
    (info.reason.clone(), info.metadata.get("next").cloned().unwrap_or_default())
}

/// A status with this code and reason.
pub fn refused(status: &tonic::Status, code: tonic::Code, reason: &str) {
    assert_eq!((status.code(), error_info(status).0.as_str()), (code, reason), "{status:?}");
}

/// Labels and the like.
pub fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

/// Makes the database of an ended gateway one of an earlier boot of the host.
pub fn pretend_host_restart(state_dir: &std::path::Path) {
    let db = rusqlite::Connection::open(state_dir.join("torpor.db")).unwrap();
    let changed = db.execute("UPDATE meta SET value = 'an earlier boot' WHERE key = 'boot_id'", []).unwrap();
    assert_eq!(changed, 1);
}
