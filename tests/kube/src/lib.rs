//! A Kubernetes API server in memory, served over HTTP on loopback, with the agent-sandbox controller of three releases
//! and a kubelet that runs agents: for tests of what talks to clusters.
//!
//! Its semantics are those that were seen on a real server (AGENT-SANDBOX.md), each shown by a test of its own. Every
//! request is recorded. Nothing of it is for production.

#![forbid(unsafe_code)]

mod agent;
mod controller;
mod convert;
mod discovery;
mod exec;
mod http;
mod kubelet;
mod lists;
mod patch;
mod resources;
mod rights;
mod status;
mod store;
mod tls;
mod world;

use std::{
    io,
    net::SocketAddr,
    ops::Deref,
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::{net::TcpListener, task::JoinHandle};

pub use http::{Body, Cut, Service};
pub use resources::{GROUP, Generation};
pub use rights::Right;
pub use tls::Front;
pub use world::{Asked, Behaviour, NAMESPACE, Trouble, World};

/// A cluster that answers on loopback until it is dropped.
#[derive(Debug)]
pub struct Server {
    world: Arc<World>,
    address: SocketAddr,
    tasks: Vec<JoinHandle<()>>,
}

impl Server {
    /// A cluster with this release of the controller. Must be called within the runtime.
    ///
    /// # Errors
    /// When there is no port to listen on.
    pub async fn start(generation: Generation, behaviour: Behaviour) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let world = World::new(generation, behaviour);
        let tasks = vec![
            tokio::spawn(http::serve(listener, world.clone())),
            tokio::spawn(controller::run(world.clone())),
            tokio::spawn(kubelet::run(world.clone())),
        ];
        Ok(Self { world, address, tasks })
    }

    /// Where it answers.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The same to be asked in process.
    pub fn service(&self) -> Service {
        Service(self.world.clone())
    }

    /// Writes a kubeconfig for it into a folder.
    ///
    /// # Errors
    /// When the file can't be written.
    pub fn kubeconfig(&self, folder: &Path) -> io::Result<PathBuf> {
        let path = folder.join("kubeconfig");
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: fake\n\
             clusters: [{{name: fake, cluster: {{server: \"{}\"}}}}]\n\
             users: [{{name: fake, user: {{token: none}}}}]\n\
             contexts: [{{name: fake, context: {{cluster: fake, user: fake, namespace: {NAMESPACE}}}}}]\n",
            self.url()
        );
        std::fs::write(&path, text)?;
        Ok(path)
    }
}

impl Deref for Server {
    type Target = World;

    fn deref(&self) -> &World {
        &self.world
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
        self.world.kubelet.end();
    }
}
