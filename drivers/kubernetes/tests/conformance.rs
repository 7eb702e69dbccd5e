//! The suite that every driver passes, over a cluster in memory with each release of the controller.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::{
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use common::{Bench, claim, object};
use kube::{
    Api, Client, Config,
    api::{DeleteParams, DynamicObject},
    config::{KubeConfigOptions, Kubeconfig},
    core::{ApiResource, GroupVersionKind},
};
use torpor_driver_kubernetes::{AgentLink, KubernetesConfig, KubernetesDriver};
use torpor_sandbox::{ComputeDriver, Run, SandboxId, SandboxSpec, conformance, conformance::Harness};
use torpor_test_kube::{Behaviour, Generation};

struct Pods {
    bench: Bench,
    /// None only while one takes the place of the other.
    driver: Mutex<Option<Arc<KubernetesDriver>>>,
}

#[async_trait]
impl Harness for Pods {
    fn driver(&self) -> Arc<dyn ComputeDriver> {
        self.driver.lock().unwrap().clone().unwrap()
    }

    fn spec(&self) -> SandboxSpec {
        common::spec()
    }

    async fn lend(&self, _id: &SandboxId, _run: Run) {}

    async fn take_back(&self, id: &SandboxId) {
        assert_eq!(self.bench.server.object("pods", &object(id)), None, "a pod is left");
    }

    async fn restart(&self) {
        drop(self.driver.lock().unwrap().take());
        let driver = self.bench.driver().await;
        *self.driver.lock().unwrap() = Some(driver);
    }

    async fn kill(&self, id: &SandboxId) {
        self.bench.server.kill_pod(&object(id));
    }

    async fn lose_storage(&self, id: &SandboxId) {
        self.bench.server.remove("persistentvolumeclaims", &claim(id));
    }
}

async fn pods(generation: Generation) -> Option<Pods> {
    let (bench, driver) = Bench::new(generation).await;
    Some(Pods { bench, driver: Mutex::new(Some(driver)) })
}

conformance!(v0_4, pods(Generation::Alpha));
conformance!(v0_5_0, pods(Generation::Early));
conformance!(v0_5_4, pods(Generation::Late));
conformance!(v1_0, pods(Generation::Stable));

/// The same with the real agent as a process of this machine.
async fn with_agents() -> Option<Pods> {
    let agent = common::agent("conformance with real agents")?;
    let behaviour = Behaviour { agent: Some(agent), ..Behaviour::default() };
    let (bench, driver) = Bench::with(Generation::Stable, behaviour, |_| {}).await;
    Some(Pods { bench, driver: Mutex::new(Some(driver)) })
}

conformance!(real_agents, with_agents());

/// And with these on ports of their own.
async fn by_ports() -> Option<Pods> {
    let agent = common::agent("conformance with agents on ports of their own")?;
    let behaviour = Behaviour { agent: Some(agent), ..Behaviour::default() };
    let on_port = |config: &mut KubernetesConfig| config.agent_link = AgentLink::Mtls;
    let (bench, driver) = Bench::with(Generation::Stable, behaviour, on_port).await;
    Some(Pods { bench, driver: Mutex::new(Some(driver)) })
}

conformance!(ports_of_agents, by_ports());

/// The same of a cluster that is known by its URL and a token alone: a real one with `TORPOR_TEST_CLUSTER=URL`,
/// `TORPOR_TEST_CLUSTER_TOKEN`, `TORPOR_TEST_CLUSTER_CA=FILE` for https, `TORPOR_TEST_CLUSTER_NAMESPACE` ("sandboxes"),
/// `TORPOR_TEST_CLUSTER_AGENT_IMAGE` (deploy/kubernetes/Containerfile.agent) and `TORPOR_TEST_CLUSTER_IMAGE` ("debian:13").
/// Without one, the cluster in memory, asked in the same way, over TLS.
struct ByUrl {
    config: KubernetesConfig,
    client: Client,
    namespace: String,
    driver: Mutex<Option<Arc<KubernetesDriver>>>,
    _folder: tempfile::TempDir,
    _server: Option<(torpor_test_kube::Server, torpor_test_kube::Front)>,
}

fn variable(name: &str, usual: &str) -> String {
    std::env::var(format!("TORPOR_TEST_CLUSTER{name}")).unwrap_or_else(|_| usual.to_owned())
}

fn kubeconfig(folder: &Path, url: &str, ca: &str, token: &str, namespace: &str) -> std::path::PathBuf {
    let ca = if ca.is_empty() { String::new() } else { format!(", certificate-authority: \"{ca}\"") };
    let path = folder.join("kubeconfig");
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: test\n\
         clusters: [{{name: test, cluster: {{server: \"{url}\"{ca}}}}}]\n\
         users: [{{name: test, user: {{token: \"{token}\"}}}}]\n\
         contexts: [{{name: test, context: {{cluster: test, user: test, namespace: {namespace}}}}}]\n",
    );
    std::fs::write(&path, text).unwrap();
    path
}

impl ByUrl {
    fn api(&self, kind: &str, plural: &str) -> Api<DynamicObject> {
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("", "v1", kind), plural);
        Api::namespaced_with(self.client.clone(), &self.namespace, &resource)
    }
}

#[async_trait]
impl Harness for ByUrl {
    fn driver(&self) -> Arc<dyn ComputeDriver> {
        self.driver.lock().unwrap().clone().unwrap()
    }

    fn spec(&self) -> SandboxSpec {
        let image = variable("_IMAGE", "debian:13");
        SandboxSpec { image_digest: image.clone(), image, ..common::spec() }
    }

    async fn lend(&self, _id: &SandboxId, _run: Run) {}

    async fn take_back(&self, id: &SandboxId) {
        assert!(self.api("Pod", "pods").get_opt(&object(id)).await.unwrap().is_none(), "a pod is left");
    }

    async fn restart(&self) {
        drop(self.driver.lock().unwrap().take());
        let driver = KubernetesDriver::new(self.config.clone()).await.unwrap();
        *self.driver.lock().unwrap() = Some(driver);
    }

    async fn kill(&self, id: &SandboxId) {
        let gone = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        let _ = self.api("Pod", "pods").delete(&object(id), &gone).await.unwrap();
    }

    async fn lose_storage(&self, id: &SandboxId) {
        let api = self.api("PersistentVolumeClaim", "persistentvolumeclaims");
        let _ = api.delete(&claim(id), &DeleteParams::default()).await.unwrap();
        for _ in 0..400 {
            let found = api.get_opt(&claim(id)).await.unwrap();
            if found.is_none_or(|claim| claim.metadata.deletion_timestamp.is_some()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        panic!("the claim is never gone");
    }
}

async fn by_url() -> Option<ByUrl> {
    let folder = tempfile::tempdir().unwrap();
    let namespace = variable("_NAMESPACE", torpor_test_kube::NAMESPACE);
    let (path, server) = match variable("", "") {
        url if url.is_empty() => {
            let server =
                torpor_test_kube::Server::start(Generation::Stable, Behaviour::default()).await.unwrap();
            common::grant(&server);
            // The test's own hand, which takes pods and claims away.
            let pods = serde_json::json!([{"apiGroups": [""], "resources": ["pods"], "verbs": ["delete"]}]);
            server.grant(Some(torpor_test_kube::NAMESPACE), &pods);
            let front = server.secure("secret").await.unwrap();
            let ca = folder.path().join("ca.pem");
            std::fs::write(&ca, &front.ca).unwrap();
            let path = kubeconfig(folder.path(), &front.url, &ca.display().to_string(), "secret", &namespace);
            (path, Some((server, front)))
        }
        url => {
            let (ca, token) = (variable("_CA", ""), variable("_TOKEN", "none"));
            (kubeconfig(folder.path(), &url, &ca, &token, &namespace), None)
        }
    };
    let mut config =
        KubernetesConfig::new(folder.path().join("state"), variable("_AGENT_IMAGE", "torpor-agent:0.1.0"));
    config.kubeconfig = Some(path.clone());
    config.start_timeout = Duration::from_secs(if server.is_some() { 20 } else { 300 });
    let read = Kubeconfig::read_from(path).unwrap();
    let read = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await.unwrap();
    let client = Client::try_from(read).unwrap();
    let driver = KubernetesDriver::new(config.clone()).await.unwrap();
    let driver = Mutex::new(Some(driver));
    Some(ByUrl { config, client, namespace, driver, _folder: folder, _server: server })
}

conformance!(by_url, by_url());
